"""The report in headless Chromium: nothing on its console, every chart drawn, nothing fetched."""

from __future__ import annotations

import importlib.util
import io
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from plotly.offline import get_plotlyjs

from phyai_engine.replay.page import document
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
    chunk_hash,
)
from phyai_engine.replay.report import write_report
from phyai_engine.replay.survey import Fault, InputSurvey, Spread, Survey

DT_S = 0.02
NAMES = ("dx", "dy", "dz", "gripper")


def _load_browser() -> ModuleType:
    """The module browser.py, by path: test folders are not packages."""
    spec = importlib.util.spec_from_file_location("phyai_test_browser", Path(__file__).with_name("browser.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = _load_browser()
needs_browser = pytest.mark.skipif(
    browser.find_browser() is None,
    reason="no Chromium on the path (apt-get install chromium): the report was not opened in a browser",
)


def _kind(t_s: float) -> StepKind | None:
    """What the tick at ``t_s`` commands: start, motion, camera dropout, motion, abort, latch, motion."""
    if t_s < 0.4 or 7.2 <= t_s < 8.4 or 14.6 <= t_s < 14.9:
        return "hold"
    if 12.0 <= t_s < 12.3:
        return "stop"
    return None if 12.3 <= t_s < 14.6 else "action"


def _timing(chunk: int, t_s: float, rng: np.random.Generator, epoch: int, *, first: bool) -> TimingRow:
    inference = float(rng.gamma(30.0, 0.005)) + (0.22 if chunk % 17 == 9 else 0.0)
    observe, transfer, queue, actuate = (float(v) for v in rng.uniform(0.001, [0.06, 0.006, 0.002, 0.004]))
    critical = observe + transfer + queue + inference + actuate + 0.004
    waited = critical - observe
    d = 11
    return TimingRow(
        t_s=t_s,
        epoch=epoch,
        chunk_id=chunk,
        outcome="accepted",
        l_observe_s=observe,
        l_transfer_s=transfer,
        l_queue_s=queue,
        l_inference_s=inference,
        l_actuate_s=actuate,
        l_critical_s=critical,
        l_env_s=math.nan if first else 0.5,
        m_ctrl_s=math.nan if first else d * DT_S - waited,
        m_cond_s=math.nan if first else d * DT_S - waited,
        m_exhaust_s=math.nan if first else 25 * DT_S - waited,
        delay_predicted_steps=d,
        delay_steps=0 if first else round(waited / DT_S),
        execution_steps=25,
        age_s=critical,
        jump=math.nan if first else float(rng.gamma(2.0, 0.02)),
        jump_ratio=math.nan if first else float(rng.gamma(2.0, 0.5)),
        frozen_error=math.nan if first else 0.0,
    )


def _frames(rng: np.random.Generator) -> list[FrameRow]:
    rows = []
    for name, tone in (("front", 60), ("wrist", 150)):
        for t_s in np.arange(0.3, 20.0, 0.9).tolist():
            picture = np.full((120, 160, 3), tone, np.uint8)
            picture[40:80, int(t_s * 6) : int(t_s * 6) + 30] = (230, 160, 40)
            picture += rng.integers(0, 12, picture.shape, dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "JPEG", quality=80)
            rows.append(FrameRow(t_s=t_s, camera=name, jpeg=file.getvalue()))
    return rows


def _motion(rng: np.random.Generator) -> tuple[list[StepRow], list[TimingRow]]:
    """What was commanded in each tick, and the handoffs."""
    steps: list[StepRow] = []
    timings: list[TimingRow] = []
    chunk, row = 0, 0
    for tick in range(1000):
        t_s = tick * DT_S
        kind = _kind(t_s)
        epoch = 1 if t_s < 12.0 else 2 if t_s < 14.6 else 3
        if kind is None:
            continue
        if kind == "action" and (row >= 25 or steps[-1].kind != "action"):
            chunk, row = chunk + 1, 0
            timings.append(_timing(chunk, t_s, rng, epoch, first=steps[-1].kind != "action"))
        wave = [math.sin(t_s * (1 + i / 3) + 0.05 * chunk) * 0.6 for i in range(4)]
        values = wave if kind == "action" else [0.0, 0.0, 0.0, wave[3]]
        steps.append(StepRow(t_s=t_s, kind=kind, values=values, tick=tick, epoch=epoch, chunk_id=chunk, step=row))
        row += 1
    return steps, timings


def _planned(row: TimingRow) -> ChunkRow:
    actions = [[math.sin((row.t_s + i * DT_S) * (1 + a / 3)) * 0.6 for a in range(4)] for i in range(50)]
    return ChunkRow(t_s=row.t_s, epoch=row.epoch, chunk_id=row.chunk_id, actions=actions)


def run_record(seed: int = 0) -> Record:
    """About what the demo records: 20 s of motion, a camera dropout, an abort, a re-arm."""
    rng = np.random.default_rng(seed)
    steps, timings = _motion(rng)
    timings.append(TimingRow(t_s=12.02, epoch=2, chunk_id=90, outcome="cancelled", text="cancelled by the abort"))
    timings.append(TimingRow(t_s=16.1, epoch=3, chunk_id=91, outcome="refused", refusal="out_of_envelope"))
    arrivals = [t for t in np.cumsum(rng.normal(1 / 12, 0.006, 235)).tolist() if not 6.5 < t < 8.3]
    others = np.cumsum(rng.normal(1 / 12, 0.006, 235)).tolist()
    joint_t = np.arange(0, 20, 0.05)
    chunks = [_planned(row) for row in timings if row.outcome == "accepted"]
    return Record(
        robot_id="metaworld_sawyer",
        action_names=NAMES,
        action_type="cartesian_delta",
        dt_s=DT_S,
        model="pi0.5, demo configuration, seeded random weights",
        placement="process",
        schedule="rtc",
        started="2026-03-04T10:20:30+00:00",
        host="Example CPU @ 2.5 GHz, 2 cores",
        events=[
            Event(0.1, "lifecycle", "policy_node active"),
            Event(6.5, "camera", "front stopped publishing"),
            Event(7.2, "fault", "observation refused: stale (front)"),
            Event(8.3, "camera", "front publishes again"),
            Event(12.0, "abort", "~/abort called"),
            Event(14.5, "rearm", "~/rearm called"),
            Event(19.8, "lifecycle", "policy_node deactivated"),
        ],
        steps=steps,
        timings=timings,
        joints=Joints(
            names=("right_j0", "hand_x", "dx"),
            t_s=joint_t.tolist(),
            positions=[
                [math.sin(t), 0.1 * t, 0.6 * math.sin(t - 0.1) if t > 1 else math.nan] for t in joint_t.tolist()
            ],
        ),
        cameras={
            "front": Camera(t_s=arrivals, stamp_s=[t - 0.021 for t in arrivals], delivered=0.91),
            "wrist": Camera(t_s=others, stamp_s=[t - 0.019 for t in others]),
        },
        frames=_frames(rng),
        refusals={"none": 0, "stale": 61, "out_of_envelope": 1},
        invariants=[
            Invariant("nothing of an older epoch after an abort", True, "0 of 15 commands after 12.00 s"),
            Invariant("one command per tick", True, "largest count 1"),
            Invariant("stop published after the abort", True, "15 stop commands, first after 4.1 ms"),
        ],
        bag="pick_and_place",
        mode="real-time",
        chunks=chunks,
        chunk_hash=chunk_hash(chunks),
        first_inference_s=0.912,
        idle=[IdleRow(t_s=14.7, idle_s=2.3, inference_s=0.21)],
        survey=survey(),
    )


def survey() -> Survey:
    """A camera 80 ms late with a stall, another that freezes."""
    figures = {
        "period": Spread(0.083, 0.09, 0.11),
        "interval": Spread(0.083, 0.1, 1.8),
        "skew": Spread(0.03, 0.04, 0.05),
    }
    camera = {"kind": "camera", "messages": 235, "rate_hz": 12.0, "encodings": ["rgb8 160x120"], **figures}
    return Survey(
        duration_s=20.0,
        messages=870,
        inputs=[
            InputSurvey(name="front", topic="/front/image_raw", longest_gap_s=1.8, longest_gap_t_s=6.5, gaps=1,
                        lateness=Spread(0.101, 0.11, 0.12), **camera),
            InputSurvey(name="wrist", topic="/wrist/image_raw", lateness=Spread(0.019, 0.02, 0.03), frozen=40,
                        longest_frozen=31, **camera),
            InputSurvey(name="joint_states", topic="/joint_states", kind="joints", messages=400, rate_hz=20.0),
        ],
        faults=[
            Fault("front", "gap", "silent for 1.80 s", 6.5),
            Fault("front", "late", "frames arrive 82 ms later than those of the other inputs (101 ms, 19 ms)", 0.1),
            Fault("wrist", "frozen", "31 frames in a row with the same pixels while the robot moved", 9.2),
        ],
    )  # fmt: skip


@needs_browser
def test_report_is_silent_and_drawn(tmp_path: Path) -> None:
    """A whole run compared with another, all of it unfolded."""
    page = tmp_path / "report.html"
    write_report(run_record(), page, other=run_record(1))
    page.write_text(page.read_text().replace("<details>", "<details open>"))
    document, said = browser.open_in_browser(page)
    assert said == []
    # two margins, stages, roofline, seams, commands, joints, camera rates, camera timing
    assert 'data-drawn="9"' in document
    assert browser.count_charts(document) == 9
    assert document.count('class="plan"') > 20
    assert page.stat().st_size < 8_000_000


@needs_browser
def test_report_of_nothing_is_silent(tmp_path: Path) -> None:
    empty = Record(
        robot_id="none",
        action_names=(),
        dt_s=DT_S,
        model="none",
        placement="thread",
        schedule="sync",
        started="",
        host="",
    )
    write_report(empty, tmp_path / "empty.html")
    assert browser.open_in_browser_check(tmp_path / "empty.html") == []


@needs_browser
def test_check_finds_errors(tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    planted = (
        "<script>throw new Error('planted')</script><img src='http://example.invalid/a.png'>",
        "<script>setTimeout(() => { document.body.dataset.drawn = 2; }, 50)</script>",
    )
    broken.write_text(document("broken", "".join(planted)).replace(get_plotlyjs(), ""))
    errors = browser.open_in_browser_check(broken)
    for expected in ("planted", "Content Security Policy", "0 of 2 charts were drawn"):
        assert any(expected in line for line in errors), (expected, errors)


@needs_browser
def test_check_finds_a_script_that_does_not_finish(tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    other.write_text("<html><body>no report</body></html>")
    assert browser.open_in_browser_check(other) == ["the script of the report did not finish"]
