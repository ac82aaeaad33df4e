"""The record of a run, its figures worked out by hand, and the words and structure of its report."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from phyai_engine.errors import ConfigError
from phyai_engine.replay import look, strip, tracks
from phyai_engine.replay.record import (
    Camera,
    ChunkRow,
    Event,
    FrameRow,
    IdleRow,
    Invariant,
    Joints,
    Record,
    StepKind,
    StepRow,
    TimingRow,
    load,
)
from phyai_engine.replay.report import verdict, write_report
from phyai_engine.replay.summary import spans, summary, write_summary
from phyai_engine.replay.survey import Fault, InputSurvey, Spread, Survey
from phyai_engine.replay.verdict import passed

NAN = math.nan
JPEG = b"\xff\xd8\xff\xe0 stands for a picture \xff\xd9"


def _step(tick: int, kind: StepKind, chunk: int = 0, row: int = 0) -> StepRow:
    return StepRow(
        t_s=tick * 0.1,
        kind=kind,
        values=(0.5, NAN) if kind == "hold" else (1.0, -1.0),
        tick=tick,
        epoch=1,
        chunk_id=chunk,
        step=row,
    )


def _handoff(t_s: float, chunk: int, margin: float, cond: float = NAN, **more: Any) -> TimingRow:
    fields: dict[str, Any] = {"l_inference_s": 0.2, "l_critical_s": 0.4, "l_env_s": 0.8, **more}
    return TimingRow(t_s=t_s, epoch=1, chunk_id=chunk, outcome="accepted", m_ctrl_s=margin, m_cond_s=cond, **fields)


def small(**changes: Any) -> Record:
    """Two joints at 10 Hz: holds 2 ticks, plays 6, holds 1, plays 2, is aborted and stops for 3 ticks."""
    kinds: list[StepKind] = [*["hold"] * 2, *["action"] * 6, "hold", *["action"] * 2, *["stop"] * 3]  # type: ignore[list-item]
    fields: dict[str, Any] = {
        "robot_id": "twin",
        "action_names": ("lift", "turn"),
        "action_type": "joint_position",
        "dt_s": 0.1,
        "model": "fake, seeded random weights",
        "placement": "process",
        "schedule": "rtc",
        "started": "2026-01-02T03:04:05+00:00",
        "host": "a processor, 2 cores",
        "events": [Event(0.05, "lifecycle", "active"), Event(1.1, "abort", "~/abort called")],
        "steps": [_step(i, kind, chunk=1, row=i) for i, kind in enumerate(kinds)],
        "timings": [
            _handoff(0.2, 1, NAN, l_env_s=NAN),
            _handoff(0.4, 2, 0.10, 0.10, jump_ratio=1.0, jerk=12.5),
            _handoff(0.6, 3, -0.02, -0.02, jump_ratio=3.0, l_critical_s=0.5),
            _handoff(0.9, 4, 0.30, jump_ratio=2.0),
            _handoff(1.0, 5, 0.04, 0.04, jump_ratio=NAN),
            TimingRow(t_s=1.1, epoch=2, chunk_id=6, outcome="cancelled", text="by the abort"),
            TimingRow(t_s=0.8, epoch=1, chunk_id=7, outcome="refused", refusal="out_of_envelope"),
        ],
        "joints": Joints(names=("lift", "elbow"), t_s=(0.0, 0.5), positions=((0.0, 1.0), (0.5, NAN))),
        "cameras": {
            "front": Camera(t_s=(0.0, 0.1, 0.2, 0.6), stamp_s=(-0.02, 0.08, 0.18, 0.56), delivered=0.8),
            "wrist": Camera(),
        },
        "frames": [FrameRow(t_s=0.62, camera="front", jpeg=JPEG), FrameRow(t_s=9.0, camera="front", jpeg=JPEG)],
        "refusals": {"none": 0, "stale": 7, "out_of_envelope": 1},
        "invariants": [Invariant("nothing of an older epoch", True, "0 of 3"), Invariant("one per tick", True)],
    }
    return Record(**{**fields, **changes})


# -- record ----------------------------------------------------------------------------------------------------------


def test_record_round_trip_keeps_nan_bytes_and_order(tmp_path: Path) -> None:
    record = small()
    record.save(tmp_path / "out" / "record.json")
    read = load(tmp_path / "out" / "record.json")
    assert msgspec.json.encode(read) == msgspec.json.encode(record)
    assert read.frames[0].jpeg == JPEG
    assert math.isnan(read.steps[0].values[1])
    assert math.isnan(read.timings[0].m_ctrl_s)
    assert math.isnan(read.joints.positions[1][1])
    assert read.duration_s == 9.0
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(version=2), r"not a record of this version, got version 2, wanted version 1"),
        (lambda raw: raw.pop("version"), r"not a record of this version, got no version"),
        (lambda raw: raw["timings"][2].update(l_queue_s="slow"), r"float.*\$\.timings\[2\]\.l_queue_s"),
        (lambda raw: raw["timings"][0].update(outcome="lost"), r"\$\.timings\[0\]\.outcome"),
        (lambda raw: raw.update(colour="red"), r"unknown field `colour`"),
        (lambda raw: raw.pop("dt_s"), r"missing required field `dt_s`"),
        (lambda raw: raw["steps"][3].update(values=[1.0]), r"steps\[3\]\.values, got 1 entries, wanted 2"),
        (lambda raw: raw["joints"].update(t_s=[0.0]), r"joints\.positions, got 2 entries, wanted 1"),
        (lambda raw: raw["cameras"]["front"].update(stamp_s=[]), r"cameras\.front\.stamp_s"),
    ],
)
def test_load_says_what_does_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    raw = json.loads(msgspec.json.encode(small()))
    change(raw)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b'{"version": 1, "robot', b"[1]", b"\xff\xfe\x00"])
def test_load_of_a_corrupt_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"record\.json"):
        load(path)


def test_load_of_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read, got No such file"):
        load(tmp_path / "none.json")


def test_timing_row_copies_a_message() -> None:
    @dataclass
    class Message:
        epoch: int = 3
        chunk_id: int = 8
        outcome: int = 2
        text: str = "too old"
        fallback: str = "sync"
        l_inference_s: float = 0.25

        def __getattr__(self, name: str) -> float:
            if name == "l_network_s":
                raise AttributeError("a recording from before there was such a field")
            return 4 if name.endswith("_steps") else NAN

    row = TimingRow.of(1.5, Message(), outcome="refused", refusal="stale")
    assert (row.t_s, row.epoch, row.chunk_id, row.outcome, row.refusal) == (1.5, 3, 8, "refused", "stale")
    assert (row.l_inference_s, row.delay_steps, row.text) == (0.25, 4, "too old")
    assert math.isnan(row.m_ctrl_s)
    assert math.isnan(row.l_network_s)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_summary_by_hand(tmp_path: Path) -> None:
    run = summary(small())
    assert run["ok"] is True
    assert run["random_weights"] is True
    assert run["handoffs"] == 5
    assert run["rejected"] == {"refused": 1, "cancelled": 1, "engine_error": 0}
    assert run["refusals"] == {"stale": 7, "out_of_envelope": 1}

    margin = run["margins"]["m_ctrl_s"]  # of -0.02, 0.04, 0.10, 0.30
    assert (margin["n"], margin["misses"], margin["miss_rate"]) == (4, 1, 0.25)
    assert margin["p50"] == pytest.approx(0.07)
    assert margin["p01"] == pytest.approx(-0.02 + 0.03 * 0.06)  # rank 0.03 between the two smallest
    assert margin["min"] == -0.02
    # p with P(at most 1 of 4) = 5 %: (1-p)^4 + 4 p (1-p)^3 = 0.05
    p = margin["miss_rate_upper95"]
    assert (1 - p) ** 4 + 4 * p * (1 - p) ** 3 == pytest.approx(0.05)
    assert (run["margins"]["m_cond_s"]["n"], run["margins"]["m_cond_s"]["misses"]) == (3, 1)
    assert run["margins"]["m_exhaust_s"]["n"] == 0
    assert run["margins"]["m_exhaust_s"]["p50"] is None

    # medians: env 0.8, inference 0.2, critical 0.4 (0.4, 0.5, 0.4, 0.4)
    roof = {"x": 4.0, "y_seq": 0.8, "y_overlap": 1.0, "x_crit": 2.0, "y": 1.0}
    assert run["roofline"] == pytest.approx(roof)
    assert run["seam"]["jump_ratio"]["n"] == 3
    assert run["seam"]["jump_ratio"]["p50"] == 2.0
    assert (run["seam"]["jerk"]["n"], run["seam"]["jerk"]["max"], run["fallbacks"]) == (1, 12.5, {})

    ticks = run["ticks"]
    assert (ticks["action"], ticks["hold"], ticks["stop"], ticks["hold_spans"]) == (8, 3, 3, 2)
    assert ticks["played_fraction"] == pytest.approx(8 / 11)
    assert ticks["hold_longest_s"] == pytest.approx(0.2)

    front = run["cameras"]["front"]
    assert front["frames"] == 4
    assert front["rate_hz"] == pytest.approx(5.0)  # 3 intervals in 0.6 s
    assert front["interval"]["max"] == pytest.approx(0.4)
    assert front["longest_gap_at_s"] == pytest.approx(0.2)
    assert front["delay"]["p50"] == pytest.approx(0.02)
    assert (front["delivered"], run["cameras"]["wrist"]["rate_hz"]) == (0.8, None)

    write_summary(small(), tmp_path / "summary.json")
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == run  # no NaN: any JSON reader takes it


def test_sequential_schedule_has_its_own_roofline() -> None:
    roof = summary(small(schedule="sync"))["roofline"]
    assert roof["y"] == pytest.approx(0.8 / (0.8 + 0.4))


def test_refusals_without_counters_come_from_the_timings() -> None:
    assert summary(small(refusals={}))["refusals"] == {"out_of_envelope": 1}


def test_spans_end_where_another_kind_or_a_pause_begins() -> None:
    steps = [_step(0, "hold"), _step(1, "hold"), _step(2, "action"), _step(3, "hold"), _step(13, "hold")]
    assert spans(steps, "hold", 0.1) == [
        pytest.approx((0.0, 0.2)),
        pytest.approx((0.3, 0.4)),
        pytest.approx((1.3, 1.4)),
    ]


# -- words -----------------------------------------------------------------------------------------------------------


def test_verdict_of_a_run_that_passed() -> None:
    first, deadline, answers, motion, seams, weights = verdict(small())
    assert first == "Passed: all 2 invariants held"
    assert deadline == (
        "Deadline missed at 1 of 4 handoffs (25.0 %, upper 95 % bound 75.1 %): "
        "margin p50 70.0 ms, p01 −18.2 ms, minimum −20.0 ms."
    )
    assert answers == (
        "5 handoffs; other answers: 1 refused, 1 cancelled. Refusals by code: stale 7, out_of_envelope 1."
    )
    assert motion == (
        "Control ticks: 8 actions, 3 holds (longest 0.20 s), 3 stop commands; "
        "an action in 72.7 % of the ticks outside stops."
    )
    assert seams == (
        "Jump at a handoff over the median step of its chunk: p50 2.00, p99 2.98 of 3 (1 = like any other step)."
    )
    assert "random weights" in weights


def test_verdict_tells_what_the_schedule_fell_back_to() -> None:
    rows = [msgspec.structs.replace(row, fallback="sync") for row in small().timings[:2]]
    record = small(timings=[*rows, *small().timings[2:]])
    assert summary(record)["fallbacks"] == {"sync": 2}
    assert "The schedule fell back at 2 of 5 handoffs: sync 2." in verdict(record)


def test_verdict_names_what_failed() -> None:
    failed = [Invariant("one per tick", False, "tick 7 has 2 commands"), Invariant("other", True)]
    words = verdict(small(invariants=failed, model="trained"))
    assert words[:2] == ["FAILED: 1 of 2 invariants did not hold", "one per tick: tick 7 has 2 commands"]
    assert not any("random weights" in sentence for sentence in words)
    assert summary(small(invariants=failed))["ok"] is False


def test_verdict_without_invariants_claims_nothing() -> None:
    assert verdict(small(invariants=[]))[0] == "No invariant was checked"
    assert summary(small(invariants=[]))["ok"] is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"timings": [], "steps": []}, "neither timings nor control ticks"),
        ({"timings": []}, "the node ticked, but no chunk arrived"),
        ({"timings": small().timings[5:]}, "none of the 2 answers was accepted"),
        ({"timings": small().timings[:1], "schedule": "sync"}, "the robot waits for each chunk"),
        ({"timings": small().timings[:1]}, "No handoff had a deadline"),
        ({"timings": small().timings[:1], "mode": "step"}, "No margins: in step mode the latency is stated"),
        ({"timings": small().timings[1:2]}, "Deadline kept at 1 of 1 handoffs that had one"),
    ],
)
def test_verdict_says_why_there_is_no_deadline(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in verdict(small(**changes))[1]


def replayed(**changes: Any) -> Record:
    """A bag played to an engine: a late camera, one chunk kept, the first inference and one after a pause."""
    inputs = [
        InputSurvey(
            name="front",
            topic="/front/image",
            kind="camera",
            messages=4,
            rate_hz=30.0,
            lateness=Spread(0.085, 0.09, 0.1),
            encodings=["rgb8 640x480"],
        ),
        InputSurvey(name="joint_states", topic="/joint_states", kind="joints", messages=40),
    ]
    fields: dict[str, Any] = {
        "invariants": [],
        "bag": "walk_7",
        "mode": "real-time",
        "survey": Survey(
            duration_s=9.0,
            messages=44,
            inputs=inputs,
            faults=[Fault("front", "late", "80 ms later than the others", 0.0)],
        ),
        "chunks": [ChunkRow(t_s=0.2, epoch=1, chunk_id=1, actions=[[float(i), 5.0] for i in range(8)])],
        "first_inference_s": 0.9,
        "idle": [IdleRow(t_s=0.8, idle_s=1.0, inference_s=0.31)],
    }
    return small(**{**fields, **changes})


def test_verdict_of_a_bag_names_its_sensor_faults_first() -> None:
    two = [Fault("front", "late", "80 ms late", 0.0), Fault("wrist", "repeated_stamp", "7 of 9 frames", 3.0)]
    words = verdict(replayed(survey=Survey(faults=two, warnings=["cut after 9 s"])))
    assert words[:4] == [
        "walk_7, real-time: deadline missed at 1 of 4 handoffs; 2 sensor faults: front late, wrist repeated stamp",
        "Sensor fault, front late: 80 ms late",
        "Sensor fault, wrist repeated stamp: 7 of 9 frames",
        "The bag: cut after 9 s",
    ]
    assert words[4].startswith("Deadline missed at 1 of 4")


@pytest.mark.parametrize(
    ("changes", "first", "good"),
    [
        ({}, "walk_7, real-time: deadline missed at 1 of 4 handoffs; 1 sensor fault: front late", False),
        ({"survey": Survey()}, "walk_7, real-time: deadline missed at 1 of 4 handoffs; no sensor fault", False),
        (
            {"survey": Survey(), "timings": small().timings[1:2]},
            "walk_7, real-time: deadline kept at 1 of 1 handoffs; no sensor fault",
            True,
        ),
        (
            {"timings": small().timings[1:2]},
            "walk_7, real-time: deadline kept at 1 of 1 handoffs; 1 sensor fault: front late",
            False,
        ),
        (
            {"survey": Survey(), "timings": (), "mode": "step"},
            "walk_7, step: no deadline was measured; no sensor fault",
            True,
        ),
        ({"survey": Survey(), "invariants": [Invariant("x", False)]}, "FAILED: 1 of 1 invariants did not hold", False),
        ({"invariants": [Invariant("gate misses <= 9", True)]}, "Passed: the one invariant held", None),
    ],
)
def test_a_bag_passes_with_its_deadline_and_its_sensors(changes: dict[str, Any], first: str, good: bool | None) -> None:
    record = replayed(**changes)
    assert verdict(record)[0] == first
    assert passed(record, summary(record)) is good


def test_a_live_run_passes_with_its_invariants() -> None:
    judged: list[tuple[list[Invariant], bool | None]] = [
        ([Invariant("x", True)], True),
        ([], None),
        ([Invariant("x", False)], False),
    ]
    for invariants, good in judged:
        record = small(invariants=invariants)
        assert passed(record, summary(record)) is good


def test_summary_of_a_bag(tmp_path: Path) -> None:
    run = summary(replayed(chunk_hash="ab"))
    assert (run["bag"], run["mode"], run["chunk_hash"], run["first_inference_s"]) == ("walk_7", "real-time", "ab", 0.9)
    assert (run["after_idle"]["n"], run["after_idle"]["p50"]) == (1, 0.31)
    (fault,) = run["survey"]["faults"]
    assert fault == {"where": "front", "kind": "late", "text": "80 ms later than the others", "t_s": 0.0}
    assert run["survey"]["inputs"][1]["rate_hz"] is None  # NaN
    assert run["age"]["n"] == 0


# -- page ------------------------------------------------------------------------------------------------------------


def _page(tmp_path: Path, record: Record, other: Record | None = None) -> str:
    """The page without plotly.js and style."""
    path = tmp_path / "out" / "report.html"
    write_report(record, path, other=other)
    text = path.read_text(encoding="utf-8")
    return text[text.index("<body>") : text.index("</main>")]


def test_page_holds_the_verdict_the_events_and_every_chart(tmp_path: Path) -> None:
    page = _page(tmp_path, small())
    assert re.search(r'class="verdict pass"><strong>Passed: all 2 invariants held', page)
    names = re.findall(r'<div class="chart" id="([^"]*)"', page)
    assert names == [
        "margin-cdf",
        "margin-time",
        "stages",
        "roofline",
        "seams",
        "commands",
        "joints",
        "cameras",
        "camera-late",
    ]
    assert page.count("<figure>") == 2
    assert "0.62 s</b> chunk 1, step 6" in page
    assert "9.00 s</b> no control tick near" in page
    assert "~/abort called" in page
    assert "refused: out_of_envelope" in page
    assert 'class="bad">−20.0' in page
    assert "Compared" not in page


def test_page_compares_two_runs(tmp_path: Path) -> None:
    slower = small(timings=[_handoff(0.4, 1, -0.3, -0.3, l_inference_s=0.5)], model="other & slower")
    page = _page(tmp_path, small(), slower)
    assert "M_ctrl of the other run (n = 1)" in page
    assert "<td>70.0 ms</td><td>−300.0 ms</td><td>+370.0 ms</td>" in page
    assert "other &amp; slower" in page


def test_page_compares_every_stage_bags_and_hashes(tmp_path: Path) -> None:
    page = _page(tmp_path, replayed(chunk_hash="ab" * 32), replayed(chunk_hash="cd" * 32, bag="walk_9"))
    assert "<td>hash of all chunks</td><td>abababababababab</td><td>cdcdcdcdcdcdcdcd</td><td>differs</td>" in page
    assert "<td>walk_7, real-time</td><td>walk_9, real-time</td><td>differs</td>" in page
    assert "<td>inference p50</td><td>200.0 ms</td><td>200.0 ms</td><td>+0.0 ms</td>" in page
    assert "other run, at its medians: X = 4.00" in page


def test_page_shows_the_sensors_of_a_bag(tmp_path: Path) -> None:
    page = _page(tmp_path, replayed())
    assert 'class="verdict fail"' in page
    assert '<a href="#sensors">Sensors</a>' in page
    assert "No gate was given." in page
    assert '<td class="bad">front late</td><td class="text">80 ms later than the others</td><td>0.00 s</td>' in page
    assert '<td class="bad">85.0 ms</td>' in page
    assert "rgb8 640x480" in page
    assert "first inference of all, apart" in page and "<td>900.0 ms</td>" in page
    assert "inference after idle" in page and "<td>310.0 ms</td>" in page
    clean = _page(tmp_path, replayed(survey=Survey(inputs=replayed().survey.inputs)))
    assert "No fault was found." in clean
    assert 'class="bad">85.0 ms' not in clean
    assert 'id="sensors"' not in _page(tmp_path, small())


def test_page_draws_the_chunk_under_each_frame(tmp_path: Path) -> None:
    page = _page(tmp_path, replayed())
    (plan,) = re.findall(r'<svg class="plan".*?</svg>', page)  # the frame at 9 s is near no control tick
    assert plan.count("<polyline") == 2
    # lift runs through its whole range in 8 rows, turn does not move; row 6 is played
    assert 'points="0,43.0 24,37.3' in plan
    assert 'd="M144 0V46"' in plan
    assert 'class="plan"' not in _page(tmp_path, small())


def test_page_escapes_what_it_was_given(tmp_path: Path) -> None:
    nasty = "</script><script>alert(1)</script>"
    record = small(
        robot_id=nasty,
        model=nasty,
        action_names=(nasty, "b"),
        events=[Event(0.1, "note", nasty)],
        invariants=[Invariant(nasty, False, nasty)],
        bag=nasty,
        survey=Survey(
            inputs=[InputSurvey(name=nasty, topic=nasty, kind="camera", messages=1, encodings=[nasty])],
            faults=[Fault(nasty, "late", nasty, 0.0)],
            warnings=[nasty],
        ),
    )
    assert "<script>alert" not in _page(tmp_path, record)


def test_page_of_an_empty_record(tmp_path: Path) -> None:
    empty = small(steps=[], timings=[], events=[], cameras={}, frames=[], joints=Joints(), invariants=[], refusals={})
    page = _page(tmp_path, empty)
    assert 'class="chart"' not in page
    assert page.count("No handoffs were recorded") >= 6
    assert "No answer of the engine was recorded. Nothing was refused." in page
    assert "No control tick was recorded." in page
    assert "No camera frame was kept" in page


def test_page_refuses_rows_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps\[0\]\.values"):
        write_report(small(action_names=("lift",)), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """20 minutes at 10 Hz, a handoff every 0.4 s: boxes instead of bars, thinned lines, fewer frames, a cut table."""
    steps = [_step(i, "action", i // 4, i % 4) for i in range(12_000)]
    timings = [_handoff(i * 0.4, i, 0.1, 0.1) for i in range(1, 3001)]
    frames = [FrameRow(t_s=float(i), camera="front", jpeg=b"x" * 20_000) for i in range(400)]
    page = _page(tmp_path, small(steps=steps, timings=timings, frames=frames))
    assert '"type":"box"' in page
    assert "the first 1000 shown" in page
    assert f"80 frames, every {-(-400 * 20_000 // strip.FRAME_BYTES)}th of the 400 kept" in page
    assert (tmp_path / "out" / "report.html").stat().st_size < 8_000_000


def test_thin_keeps_peaks_and_breaks() -> None:
    t = np.arange(10_000.0)
    y = np.zeros(10_000)
    y[4321], y[5432], y[7777] = 5.0, -5.0, np.nan
    kept_t, kept_y = look.thin(t, y, 1000)
    assert len(kept_t) <= 1002
    assert (kept_y[kept_t == 4321], kept_y[kept_t == 5432]) == (5.0, -5.0)
    assert kept_t[np.isnan(kept_y)].tolist() == [7777]


def test_commands_break_at_a_pause() -> None:
    steps = [_step(0, "action"), _step(1, "action"), _step(40, "action")]
    figure = tracks.commands(small(steps=steps)).figure
    line = figure.data[1]  # measured lift, commanded lift, commanded turn
    np.testing.assert_array_equal(line.y, np.array([1, 1, np.nan, 1], np.float32))


def test_badges_of_close_events_are_staggered() -> None:
    marks = look.event_marks([Event(1.0, "abort", ""), Event(1.01, "rearm", ""), Event(9.0, "note", "")], 10.0)
    assert [badge["yshift"] for badge in marks.badges] == [9, 24, 9]
    assert [badge["text"] for badge in marks.badges] == ["1", "2", "3"]
    assert marks.top_px == 12 + 15 * 2


def test_record_summary_and_verdict_need_no_plotly_and_no_torch() -> None:
    code = (
        "import sys; sys.modules.update(plotly=None, torch=None, rclpy=None);"
        "import phyai_engine.replay.record, phyai_engine.replay.summary, phyai_engine.replay.verdict"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
