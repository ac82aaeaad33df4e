"""The gate: its grammar, its figures, and right answers both ways."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phyai_engine.errors import ConfigError
from phyai_engine.replay.gate import FIGURES, Condition, judge, parse_gate
from phyai_engine.replay.record import Event, IdleRow, Record, StepRow, TimingRow
from phyai_engine.replay.survey import Fault, Survey


def record(margins_ms: Any = (), **more: Any) -> Record:
    timings = [
        TimingRow(
            t_s=float(i), epoch=1, chunk_id=i, outcome="accepted", m_ctrl_s=m * 1e-3, l_inference_s=0.02 + i * 1e-3
        )
        for i, m in enumerate(margins_ms)
    ]
    facts = {
        "robot_id": "r",
        "action_names": ("a",),
        "dt_s": 0.02,
        "model": "fake",
        "placement": "thread",
        "schedule": "rtc",
        "started": "",
        "host": "",
        "timings": timings,
    }
    return Record(**{**facts, **more})


def value(name: str, of: Record) -> float:
    return FIGURES[name](of)


def test_conditions_are_read_with_and_without_blanks() -> None:
    assert parse_gate("p99_margin_ms>=5,miss_rate<=1e-3") == (
        Condition("p99_margin_ms", ">=", 5.0),
        Condition("miss_rate", "<=", 1e-3),
    )
    assert parse_gate(" min_margin_ms > -2.5 , misses < 1 ") == (
        Condition("min_margin_ms", ">", -2.5),
        Condition("misses", "<", 1.0),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a condition of the gate cannot be read, got ''"),
        ("p99_margin_ms", "got 'p99_margin_ms', wanted NAME>=NUMBER"),
        ("p99_margin_ms=5", "got 'p99_margin_ms=5'"),
        ("misses<1,,handoffs>3", "got ''"),
        ("misses<one", "a limit of the gate is no number, got 'misses<one'"),
        ("misses<nan", "a limit of the gate is no number"),
        ("p99_margn_ms>=5", r"names no figure, got p99_margn_ms, wanted one of .*Did you mean 'p99_margin_ms'\?"),
        ("colour>=5", "the gate names no figure, got colour, wanted one of .*miss_rate_upper95"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_lists_the_names(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_gate(text)


def test_percentiles_of_margins_count_from_the_worst() -> None:
    run = record(range(101))  # 0..100 ms
    assert value("min_margin_ms", run) == pytest.approx(0.0)
    assert value("p99_margin_ms", run) == pytest.approx(1.0)
    assert value("p50_margin_ms", run) == pytest.approx(50.0)
    assert value("p99_inference_ms", run) == pytest.approx(119.0)
    assert value("max_inference_ms", run) == pytest.approx(120.0)
    assert value("p999_inference_ms", run) == pytest.approx(119.9)


def test_misses_and_their_bound() -> None:
    run = record([-1.0, 2.0, 3.0, 4.0])
    assert (value("misses", run), value("miss_rate", run), value("handoffs", run)) == (1.0, 0.25, 4.0)
    assert 0.25 < value("miss_rate_upper95", run) < 1.0


def test_counts() -> None:
    run = record(
        [1.0],
        refusals={"stale": 3, "skewed": 2},
        events=[Event(0.1, "abort", "misses"), Event(0.2, "rearm", "")],
        steps=[StepRow(t_s=0.02 * i, kind="hold", values=(0.0,), tick=i, epoch=1) for i in range(10)],
        first_inference_s=0.5,
        idle=[IdleRow(t_s=1.0 + s, idle_s=2.0, inference_s=s, probe=s > 0.03) for s in (0.03, 0.04)],
        survey=Survey(faults=[Fault("front", "late", "", 0.0)]),
    )
    assert {n: value(n, run) for n in ("refusals", "refused_chunks", "aborts", "sensor_faults")} == {
        "refusals": 5.0,
        "refused_chunks": 0.0,
        "aborts": 1.0,
        "sensor_faults": 1.0,
    }
    assert value("longest_hold_s", run) == pytest.approx(0.2)
    assert (value("first_inference_ms", run), value("max_after_idle_ms", run)) == (500.0, 40.0)


def test_the_answer_is_right_both_ways() -> None:
    run = record([5.0, 6.0, 7.0])
    good, bad = judge(parse_gate("min_margin_ms>=5,min_margin_ms>5"), run)
    assert (good.ok, good.name, good.detail) == (True, "gate min_margin_ms >= 5", "min_margin_ms is 5")
    assert (bad.ok, bad.name) == (False, "gate min_margin_ms > 5")
    assert [entry.ok for entry in judge(parse_gate("misses<=0,misses>=1,p50_inference_ms<21.5"), run)] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("condition", ["p99_margin_ms>=-1e9", "miss_rate<=1", "max_after_idle_ms<1e9"])
def test_what_was_not_measured_fulfils_nothing(condition: str) -> None:
    (answer,) = judge(parse_gate(condition), record())
    assert not answer.ok
    assert answer.detail.endswith("was not measured")


def test_every_figure_of_an_empty_run_is_a_number_or_nan() -> None:
    for figure in FIGURES.values():
        number = figure(record())
        assert isinstance(number, float)
        assert math.isnan(number) or number == 0.0
