"""The batcher in virtual time: who runs with whom, who is refused, and that it is fair."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_engine.errors import ConfigError, EngineError
from phyai_engine.serve.batcher import Ask, Batcher
from phyai_engine.serve.latency import LatencyModel

MS = 1_000_000
BUCKETS = (1, 2, 4, 8)


def _latency(base: float = 22.0, row: float = 1.0) -> LatencyModel:
    return LatencyModel([(n, base + row * (n - 1)) for n in BUCKETS])


def _batcher(window_ms: float = 0.0, replicas: int = 1, latency: LatencyModel | None = None) -> Batcher:
    batcher = Batcher(BUCKETS, latency or _latency(), window_ms=window_ms)
    for index in range(replicas):
        batcher.add(index)
    return batcher


def _ask(slot: int, deadline_ms: float, *, now_ms: float = 0.0, chunk_id: int = 1, replica: int = -1) -> Ask:
    return Ask(f"r{slot}", slot, 1, chunk_id, round(now_ms * MS), round(deadline_ms * MS), replica)


@pytest.fixture(scope="module")
def fleet_model() -> ModuleType:
    path = Path(__file__).with_name("fleet_model.py")
    spec = importlib.util.spec_from_file_location("fleet_model", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["fleet_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_earliest_deadlines_run_first_and_together() -> None:
    batcher = _batcher()
    for slot, deadline in ((1, 300.0), (2, 100.0), (3, 200.0)):
        assert batcher.offer(_ask(slot, deadline), 0) == []
    rows, dropped = batcher.take(0, 0)
    assert [ask.slot for ask in rows] == [2, 3, 1] and dropped == [] and len(batcher) == 0
    assert batcher.free() == [] and batcher.take(0, 1) == ([], [])
    batcher.finished(0, 25 * MS)
    assert batcher.free() == [0]


def test_the_newest_of_a_robot_replaces_its_older() -> None:
    batcher = _batcher()
    first, second = _ask(1, 100.0), _ask(1, 120.0, chunk_id=2)
    batcher.offer(first, 0)
    (dropped,) = batcher.offer(second, 0)
    assert dropped.ask is first and dropped.reason == "replaced"
    assert batcher.take(0, 0)[0] == [second]


def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    batcher = _batcher()
    (dropped,) = batcher.offer(_ask(1, 21.0), 0)
    assert dropped.reason == "overloaded" and len(batcher) == 0
    batcher.offer(_ask(2, 100.0), 0)
    batcher.take(0, 0)  # until 22
    (dropped,) = batcher.offer(_ask(3, 43.0), 0)
    assert dropped.ask.slot == 3
    assert batcher.offer(_ask(4, 45.0), 0) == []


def test_a_batch_never_grows_past_its_first_deadline() -> None:
    batcher = _batcher()
    batcher.offer(_ask(1, 22.5), 0)
    for slot in (2, 3):
        batcher.offer(_ask(slot, 200.0), 0)
    assert [ask.slot for ask in batcher.take(0, 0)[0]] == [1]


def test_a_free_replica_waits_for_the_window_but_not_past_a_deadline() -> None:
    batcher = _batcher(window_ms=10.0)
    batcher.offer(_ask(1, 100.0), 0)
    assert batcher.take(0, 0) == ([], []) and batcher.wake_ns(0) == 10 * MS
    assert len(batcher.take(0, 10 * MS)[0]) == 1
    tight = _batcher(window_ms=10.0)
    tight.offer(_ask(1, 27.0), 0)
    assert tight.wake_ns(0) == 4 * MS  # 27 less 23, what two rows take
    full = _batcher(window_ms=10.0)
    for slot in range(8):
        full.offer(_ask(slot, 100.0), 0)
    assert len(full.take(0, 0)[0]) == 8


def test_waiting_for_more_rows_is_told_from_waiting_for_a_replica() -> None:
    batcher = _batcher(window_ms=10.0)
    batcher.offer(_ask(1, 100.0), 0)
    (first,), _ = batcher.take(0, 10 * MS)
    assert (first.started_ns, first.batch_ns) == (10 * MS, 10 * MS)  # the replica was free all the time
    batcher.offer(_ask(2, 200.0, now_ms=15.0), 15 * MS)
    batcher.finished(0, 32 * MS)
    (second,), _ = batcher.take(0, 36 * MS)
    assert (second.started_ns, second.batch_ns) == (36 * MS, 4 * MS)  # from when it was free


def test_what_became_hopeless_while_the_replica_stalled_is_refused() -> None:
    batcher = _batcher()
    batcher.offer(_ask(1, 100.0), 0)
    batcher.take(0, 0)
    batcher.offer(_ask(2, 100.0), 0)
    wake_ns = batcher.wake_ns(0)
    assert wake_ns is not None and 77 * MS < wake_ns < 79 * MS
    rows, (dropped,) = batcher.take(0, wake_ns)
    assert rows == [] and dropped.ask.slot == 2


def test_a_pinned_robot_runs_where_its_state_is() -> None:
    batcher = _batcher(replicas=2)
    batcher.offer(_ask(1, 100.0, replica=1), 0)
    batcher.offer(_ask(2, 90.0), 0)
    assert [ask.slot for ask in batcher.take(0, 0)[0]] == [2]
    assert [ask.slot for ask in batcher.take(1, 0)[0]] == [1]
    (dropped,) = batcher.offer(_ask(3, 40.0, replica=1), 0)  # busy until 22: 44 is too late
    assert dropped.ask.slot == 3


def test_cancel_takes_out_what_waits() -> None:
    batcher = _batcher()
    ask = _ask(1, 100.0)
    batcher.offer(ask, 0)
    assert batcher.cancel(1, 0) is None and batcher.cancel(2, 9) is None
    assert batcher.cancel(1, 1) is ask and len(batcher) == 0


def test_without_a_replica_everything_is_refused() -> None:
    batcher = _batcher(replicas=0)
    assert [d.reason for d in batcher.offer(_ask(1, 1e6), 0)] == ["overloaded"]
    assert math.isinf(batcher.predicted_ms(0))


def test_the_robot_that_was_refused_least_gives_way() -> None:
    batcher = _batcher()
    batcher.offer(_ask(8, 22.5), 0)
    batcher.take(0, 0)  # until 22
    for deadline in (43.0, 43.1, 43.2):  # robot 1 is refused three times
        batcher.offer(_ask(1, deadline), 0)
    for slot in range(2, 10):
        assert batcher.offer(_ask(slot, 52.0), 0) == []
    (dropped,) = batcher.offer(_ask(1, 52.5), 0)
    assert dropped.ask.slot != 1 and dropped.reason == "overloaded"


def test_configuration_is_checked() -> None:
    for buckets in ((), (0, 1)):
        with pytest.raises(ConfigError, match="batch sizes"):
            Batcher(buckets, _latency())
    for window_ms in (-1.0, 20.1, math.nan):
        with pytest.raises(ConfigError, match="window"):
            Batcher(BUCKETS, _latency(), window_ms=window_ms)
    with pytest.raises(EngineError, match="no batch was measured"):
        LatencyModel([(1, math.nan)])


def test_the_latency_follows_what_is_seen() -> None:
    latency = _latency()
    assert latency.predict_ms(1) == pytest.approx(22.0) and latency.predict_ms(8) == pytest.approx(29.0)
    for _ in range(200):
        latency.observe(4, 40.0)  # slower than the warm-up said
    assert latency.predict_ms(4) == pytest.approx(40.0, abs=3.0)
    assert latency.predict_ms(8) > latency.predict_ms(4)
    before = latency.predict_ms(4)
    latency.observe(4, 5000.0)  # one stall
    assert latency.predict_ms(4) < 1.2 * before


def test_one_size_alone_keeps_the_slope() -> None:
    latency = LatencyModel([(1, 10.0)])
    latency.observe(1, 10.0)
    assert latency.predict_ms(8) == pytest.approx(10.0)  # nothing is known of other sizes


def test_a_warm_up_with_larger_images_is_not_believed_of_sizes_never_seen() -> None:
    latency = LatencyModel([(n, 18.5 + 14.5 * (n - 1)) for n in BUCKETS])  # 120 ms for 8, where 84 is true
    for i in range(100):
        latency.observe(1 + i % 2, 14.0 + 10.0 * (i % 2))
    assert latency.predict_ms(8) == pytest.approx(84.0, rel=0.15)


def test_a_stall_does_not_close_the_server_for_ever(fleet_model: ModuleType) -> None:
    latency = _latency()
    for _ in range(64):
        latency.observe(1, 500.0)
    assert latency.predict_ms(1) > 100.0  # more than anybody has: nothing would run, and nothing be learnt
    outcome = fleet_model.run_fleet(_batcher(2.0, 0, latency), robots=8, seconds=30)
    first_s = 64 / (8 * 5.0)
    assert outcome.miss_rate < first_s / 30 * 1.5
    assert outcome.late <= 16


@pytest.mark.parametrize("together", [False, True])
def test_a_fleet_within_capacity_misses_nothing(fleet_model: ModuleType, together: bool) -> None:
    outcome = fleet_model.run_fleet(_batcher(2.0, 0), robots=32 if not together else 24, together=together, seconds=30)
    assert outcome.miss_rate == 0.0 and sum(outcome.asked.values()) > 3000


def test_overload_is_shared_and_answers_stay_in_time(fleet_model: ModuleType) -> None:
    """1.5 times what batches of 8 in 29 ms can do: no answer is late, the rest is refused, everybody alike."""
    capacity_hz = 8 / 0.029
    robots = round(1.5 * capacity_hz / 5)
    outcome = fleet_model.run_fleet(_batcher(2.0, 0), robots=robots, seconds=60)
    rates = outcome.miss_rates()
    assert outcome.late == 0
    assert outcome.miss_rate < 0.36  # 1/3 cannot be served
    assert max(rates) < 1.25 * outcome.miss_rate


def test_two_replicas_serve_twice_the_robots(fleet_model: ModuleType) -> None:
    outcome = fleet_model.run_fleet(_batcher(2.0, 0), robots=64, replicas=2, seconds=30)
    assert outcome.miss_rate == 0.0


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.floats(25, 300), st.floats(0, 20), st.integers(1, 3), st.integers(0, 99))
def test_whatever_the_load_no_admitted_request_is_late(
    fleet_model: ModuleType, robots: int, budget_ms: float, window_ms: float, replicas: int, seed: int
) -> None:
    outcome = fleet_model.run_fleet(
        _batcher(window_ms, 0), robots=robots, budget_ms=budget_ms, replicas=replicas, seconds=3, seed=seed
    )
    assert outcome.late == 0


def test_who_asks_for_the_impossible_is_not_favoured_for_it() -> None:
    batcher = _batcher()
    for chunk_id in range(1, 6):  # 5 ms, when one row takes 22
        (dropped,) = batcher.offer(_ask(1, 5.0, chunk_id=chunk_id), 0)
        assert dropped.reason == "overloaded"
    batcher.offer(_ask(8, 22.5), 0)
    batcher.take(0, 0)  # until 22
    for slot in range(2, 10):
        batcher.offer(_ask(slot, 52.0), 0)
    (dropped,) = batcher.offer(_ask(1, 52.5, chunk_id=9), 0)
    assert dropped.ask.slot == 1
