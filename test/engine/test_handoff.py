"""Handoff: rows are counted, never derived from time."""

from __future__ import annotations

import numpy as np
import pytest

from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import Handoff, HandoffSettings
from phyai_engine.types import Chunk, Refusal, Schedule, StageTimings

H, DT = 8, 0.02


def handoff(schedule: Schedule = Schedule.RTC, s: int = 4, d: int = 2, **kwargs: int) -> Handoff:
    return Handoff(HandoffSettings(schedule, H, s, DT, delay_init_steps=d, **kwargs))


def chunk(chunk_id: int, offset: float = 0.0, epoch: int = 1) -> Chunk:
    rows = np.arange(H, dtype=np.float64)[:, None] + offset
    return Chunk(epoch, chunk_id, rows, StageTimings())


def play(h: Handoff, ticks: int) -> tuple[Handoff, list[float | None]]:
    played: list[float | None] = []
    for _ in range(ticks):
        row = h.peek()
        played.append(None if row is None else float(row[0]))
        h = h.advance()
    return h, played


def started(h: Handoff, chunk_id: int = 1, held: int = 0) -> Handoff:
    h = h.begin(chunk_id, 1, 0)
    h, _ = play(h, held)
    return h.accept(chunk(chunk_id), 0)[0]


@pytest.mark.fault(3)
def test_first_chunk_is_played_from_its_first_row_however_slow_inference_was() -> None:
    # lerobot PR 4223: latency 0.7 s at 30 fps skipped 21 of 30 rows although nothing had been executed
    h = handoff().begin(1, 1, 0)
    h, played = play(h, 35)
    assert played == [None] * 35
    h, facts = h.accept(chunk(1), 700_000_000)
    assert facts.row == 0 and facts.held == 35
    assert np.isnan(facts.m_cond_s) and np.isnan(facts.m_exhaust_s)
    assert play(h, 3)[1] == [0.0, 1.0, 2.0]
    assert h.delays == ()  # the wait from standstill is no inference delay


@pytest.mark.fault(2)
def test_consumed_rows_are_skipped_and_the_timeline_has_no_gap() -> None:
    # GR00T issue 272: a chunk computed from an observation 8 steps ago was played from row 0
    h = started(handoff())
    h, played = play(h, 4)
    assert h.due
    h = h.begin(2, 1, 0)
    h, more = play(h, 3)  # d' = 3
    h, facts = h.accept(chunk(2, offset=4.0), 60_000_000)
    h, rest = play(h, 5)
    assert facts.row == 3
    assert played + more + rest == [float(i) for i in range(12)]


@pytest.mark.fault(5)
def test_committed_rows_are_cut_when_the_request_is_made() -> None:
    # strands PR 3402: 5 of 16 rows consumed when the request is sent
    h = started(handoff())
    h, _ = play(h, 5)
    committed = h.committed_now()
    assert committed is not None
    assert committed.actions[:, 0].tolist() == [5.0, 6.0, 7.0]
    assert committed.execution_steps == 5 and committed.delay_steps == 2


@pytest.mark.parametrize("schedule", [Schedule.SYNC, Schedule.NAIVE_ASYNC])
def test_only_rtc_conditions(schedule: Schedule) -> None:
    h = started(handoff(schedule))
    h, _ = play(h, 2)
    assert h.committed_now() is None


def test_sync_plays_s_rows_then_waits() -> None:
    h = started(handoff(Schedule.SYNC, s=3))
    h, played = play(h, 5)
    assert played == [0.0, 1.0, 2.0, None, None]
    assert h.due
    h = h.begin(2, 1, 0)
    h, _ = play(h, 4)
    h, facts = h.accept(chunk(2, 10.0), 0)
    assert facts.row == 0
    assert h.peek() is not None and h.peek()[0] == 10.0  # type: ignore[index]


def test_margins_are_signed_and_named() -> None:
    h = started(handoff(d=2))
    h, _ = play(h, 4)
    h = h.begin(2, 1, 1_000_000_000)
    h, _ = play(h, 3)
    _, facts = h.accept(chunk(2, 4.0), 1_050_000_000)
    assert facts.m_cond_s == pytest.approx(2 * DT - 0.05)  # later than predicted: a conditioning miss
    assert facts.m_exhaust_s == pytest.approx(4 * DT - 0.05)


def test_frozen_error_measures_how_far_the_new_chunk_left_the_committed_rows() -> None:
    h = started(handoff(d=2))
    h, _ = play(h, 4)
    h = h.begin(2, 1, 0)
    _, exact = h.accept(chunk(2, 4.0), 0)
    _, off = h.accept(chunk(2, 4.5), 0)
    assert exact.frozen_error == 0.0 and off.frozen_error == pytest.approx(0.5)


def test_chunk_that_ran_out_continues_after_its_last_row() -> None:
    h = started(handoff())
    h, _ = play(h, 4)
    h = h.begin(2, 1, 0)
    h, played = play(h, 7)
    assert played == [4.0, 5.0, 6.0, 7.0, None, None, None]
    h, facts = h.accept(chunk(2, 4.0), 140_000_000)
    assert facts.row == 4 and facts.held == 3 and facts.m_exhaust_s < 0
    assert play(h, 1)[1] == [8.0]
    assert h.delays == (7,)  # what the next prediction must cover


def test_delay_window_forgets_one_slow_inference() -> None:
    h = handoff(delay_window=3, d=1)
    h = started(h)
    delays = [5, 2, 2, 2]
    for i, d in enumerate(delays, start=2):
        while not h.due:
            h = h.advance()
        h = h.begin(i, 1, 0)
        h, _ = play(h, d)
        h, _ = h.accept(chunk(i), 0)
    assert h.delays == (2, 2, 2) and h.predicted_delay == 2


def test_start_row_is_feasible() -> None:
    assert handoff(s=4, d=2).start_row == 4
    assert handoff(s=2, d=3).start_row == 3  # a chunk must live until its successor arrives
    assert handoff(s=7, d=3).start_row == 5  # H - d rows must remain
    assert handoff(s=4, d=7).start_row == 1  # 2d > H: cover the delay
    assert handoff(s=4, d=50).start_row == 1


def test_every_row_consumed_is_exhausted() -> None:
    h = started(handoff(s=1, d=0))
    h = h.advance()
    h = h.begin(2, 1, 0)
    h = h.advance_to(h.consumed + 7)
    # a player elsewhere went on with rows of this request's own chunk: nothing of it is left
    late = Handoff(h.settings, h.playing, h.in_flight, h.consumed + 1, 0, (), 2)
    with pytest.raises(RefusalError) as error:
        late.accept(chunk(2), 0)
    assert error.value.code is Refusal.EXHAUSTED


@pytest.mark.fault(26)
@pytest.mark.parametrize(("chunk_id", "epoch"), [(1, 1), (3, 1), (2, 0), (2, 2)])
def test_answer_to_another_request_is_refused(chunk_id: int, epoch: int) -> None:
    h = started(handoff()).begin(2, 1, 0)
    with pytest.raises(RefusalError) as error:
        h.accept(chunk(chunk_id, epoch=epoch), 0)
    assert error.value.code is Refusal.WRONG_EPOCH


@pytest.mark.parametrize("rows", [0, H - 1, H + 1])
def test_wrong_number_of_rows_is_malformed(rows: int) -> None:
    h = handoff().begin(1, 1, 0)
    with pytest.raises(RefusalError) as error:
        h.accept(Chunk(1, 1, np.zeros((rows, 1)), StageTimings()), 0)
    assert error.value.code is Refusal.MALFORMED


def test_dropped_request_leaves_the_playing_chunk() -> None:
    h = started(handoff())
    h, _ = play(h, 4)
    h = h.begin(2, 1, 0).drop(2)
    assert h.in_flight is None and h.due
    assert h.drop(7) is h
    assert play(h, 2)[1] == [4.0, 5.0]


def test_one_request_in_flight() -> None:
    h = handoff().begin(1, 1, 0)
    assert not h.due
    with pytest.raises(ValueError, match="begin"):
        h.begin(2, 1, 0)


def test_reported_consumption_never_goes_back_and_is_believed_past_the_end() -> None:
    h = started(handoff())
    h = h.advance_to(3)
    assert h.consumed == 3 and h.playing is not None and h.playing.next_row == 3
    assert h.advance_to(2) is h
    h = h.advance_to(99)
    assert h.consumed == 99 and h.remaining_steps == 0


def test_reported_consumption_counts_while_nothing_plays_on_this_side() -> None:
    h = handoff().advance_to(7)
    assert h.consumed == 7 and h.playing is None


def test_chunk_ids_start_anew_with_an_epoch() -> None:
    # a policy node that restarted counts from 1 again, and a living player must not call that a duplicate
    h = started(handoff(Schedule.NAIVE_ASYNC), chunk_id=500).cleared()
    h = h.expect(1, 2, base_step=h.consumed, now_mono_ns=0)
    assert h.accept(chunk(1, epoch=2), 0)[1].row == 0


def test_chunk_from_elsewhere_is_placed_by_count() -> None:
    h = started(handoff(Schedule.NAIVE_ASYNC))
    h, _ = play(h, 5)
    h = h.expect(9, 1, base_step=3, now_mono_ns=0)
    h, facts = h.accept(chunk(9, 3.0), 0)
    assert facts.row == 2 and play(h, 1)[1] == [5.0]
    for chunk_id, base, code in ((9, 3, Refusal.WRONG_EPOCH), (10, 99, Refusal.MALFORMED)):
        with pytest.raises(RefusalError) as error:
            h.expect(chunk_id, 1, base_step=base, now_mono_ns=0)
        assert error.value.code is code


@pytest.mark.parametrize("s", [0, H + 1])
def test_execution_horizon_must_fit(s: int) -> None:
    with pytest.raises(ConfigError, match="execution horizon"):
        handoff(s=s)
