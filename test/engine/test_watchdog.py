"""The watchdogs' limits: durations in, a cause out."""

from __future__ import annotations

from typing import Any

import pytest

from phyai_engine.types import AbortCause
from phyai_engine.watchdog import Vitals, Watchdogs, WatchdogSettings

DT_S = 0.02
OFF = {
    "tick_gap_s": 0.0,
    "request_timeout_s": 0.0,
    "observation_age_s": 0.0,
    "player_timeout_s": 0.0,
    "misses_max": 0,
    "hold_max_s": 0.0,
}
# cause, limit, what is watched, still good, too much, words
ROWS: list[tuple[AbortCause, dict[str, Any], str, float, float, str]] = [
    (AbortCause.TICK_OVERRUN, {"tick_gap_s": 0.5}, "tick_gap_s", 0.5, 0.501, "no control tick for 0.501 s"),
    (AbortCause.INFERENCE_DEADLINE, {"request_timeout_s": 2.0}, "request_s", 1.999, 2.0, "not answered within 2.0 s"),
    (AbortCause.OBSERVATION_AGE, {"observation_age_s": 1.0}, "observation_age_s", 1.0, 1.001, "1.001 s old"),
    (AbortCause.PLAYER_LOST, {"player_timeout_s": 2.0}, "player_silence_s", 2.0, 2.25, "for 2.250 s"),
    (AbortCause.MISSES, {"misses_max": 3}, "misses", 2, 3, "3 handoffs in a row"),
    (AbortCause.EXHAUSTED, {"hold_max_s": 10.0}, "hold_s", 10.0, 10.01, "held for more than 10.0 s"),
]
IDS = [row[0].name.lower() for row in ROWS]


@pytest.mark.parametrize(("cause", "limit", "watched", "good", "bad", "words"), ROWS, ids=IDS)
def test_a_limit_is_named_once_it_is_passed(
    cause: AbortCause, limit: dict[str, Any], watched: str, good: float, bad: float, words: str
) -> None:
    watchdogs = Watchdogs(WatchdogSettings(**{**OFF, **limit}))
    assert watchdogs.check(Vitals(dt_s=DT_S, **{watched: good})) is None
    found = watchdogs.check(Vitals(dt_s=DT_S, **{watched: bad}))
    assert found is not None
    assert found[0] is cause
    assert words in found[1]
    assert Watchdogs(WatchdogSettings(**OFF)).check(Vitals(dt_s=DT_S, **{watched: 1e9})) is None


def test_nothing_to_watch_passes_the_defaults() -> None:
    assert Watchdogs(WatchdogSettings()).check(Vitals(dt_s=DT_S)) is None


def test_a_late_tick_explains_everything_that_grew_old_meanwhile() -> None:
    limits = {name: value for _, limit, *_ in ROWS for name, value in limit.items()}
    vitals = Vitals(dt_s=DT_S, **{watched: bad for _, _, watched, _, bad, _ in ROWS})
    found = Watchdogs(WatchdogSettings(**limits)).check(vitals)
    assert found is not None
    assert found[0] is AbortCause.TICK_OVERRUN


@pytest.mark.parametrize(("dt_s", "limit_s"), [(0.002, 0.5), (0.1, 0.5), (0.2, 1.0)])
def test_a_slow_robot_may_miss_a_few_periods(dt_s: float, limit_s: float) -> None:
    assert Watchdogs(WatchdogSettings(tick_gap_s=0.5)).tick_limit_s(dt_s) == pytest.approx(limit_s)
    assert Watchdogs(WatchdogSettings(tick_gap_s=0.0)).tick_limit_s(dt_s) == 0.0
