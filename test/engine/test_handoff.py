"""Handoff: rows are counted, never derived from time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import Fallback, Handoff, HandoffSettings
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


NONE, SHORTER, LIMITED, WAITS = Fallback.NONE, Fallback.SHORTER_S, Fallback.LIMITED_D, Fallback.SYNC


def test_slack_is_added_to_what_was_measured_alone() -> None:
    h = handoff(s=6, d=2, delay_slack_steps=1)
    assert h.predicted_delay == 2
    assert replace(h, delays=(1, 3, 2)).predicted_delay == 4
    assert replace(h, delays=(h.settings.horizon,)).predicted_delay == h.settings.horizon
    with pytest.raises(ConfigError):
        handoff(delay_slack_steps=-1)


@pytest.mark.parametrize(
    ("s", "delays", "limit", "start_row", "fallback"),
    [
        (4, (2,), 0, 4, NONE),
        (2, (3,), 0, 3, NONE),  # a chunk must live until its successor arrives
        (4, (4,), 0, 4, NONE),  # d = s = H - d: just feasible
        (7, (3,), 0, 5, SHORTER),  # H - d rows must remain
        (4, (1, 1, 7), 0, 1, SHORTER),  # 2d > H once: cover the delay
        (4, (1, 7), 0, 1, SHORTER),
        (4, (1, 7, 7), 0, 4, WAITS),  # 2d > H is the rule
        (4, (5,), 0, 4, WAITS),
        (4, (50,), 0, 4, WAITS),
        (4, (1, 1, 3), 2, 4, LIMITED),
        (4, (2, 2), 2, 4, NONE),
        (4, (3, 3, 1), 2, 4, WAITS),
    ],
)
def test_an_execution_horizon_that_does_not_fit_the_delay_has_its_stated_fallback(
    s: int, delays: tuple[int, ...], limit: int, start_row: int, fallback: Fallback
) -> None:
    h = replace(handoff(s=s, delay_limit_steps=limit), delays=delays)
    assert (h.start_row, h.fallback, h.waits) == (start_row, fallback, fallback is WAITS)
    assert bool(h.fallback_text) == (fallback is not NONE)
    naive = replace(handoff(Schedule.NAIVE_ASYNC, s=s, delay_limit_steps=limit), delays=delays)
    assert naive.fallback is (fallback if not limit else NONE)  # nothing is frozen, so nothing is limited
    assert replace(handoff(Schedule.SYNC, s=s), delays=delays).fallback is NONE


def test_a_robot_that_waits_plays_s_rows_continues_nothing_and_goes_on_once_the_engine_is_fast_enough() -> None:
    h = started(replace(handoff(s=3), delays=(7,)), held=7)
    h, played = play(h, 5)
    assert played == [0.0, 1.0, 2.0, None, None]
    assert h.due and h.committed_now() is None
    h = h.begin(2, 1, 0)
    h, _ = play(h, 6)
    h, facts = h.accept(chunk(2, 3.0), 120_000_000)
    assert (facts.row, facts.held, facts.fallback) == (0, 6, WAITS)
    assert np.isnan(facts.m_exhaust_s)  # no deadline
    assert h.delays == (7, 7, 6) and h.waits
    for chunk_id in (3, 4, 5):
        h, _ = play(h, 3)
        h = h.begin(chunk_id, 1, 0)
        h, _ = play(h, 2)
        h, _ = h.accept(chunk(chunk_id), 40_000_000)
    assert h.delays == (7, 7, 6, 2, 2, 2) and h.fallback is SHORTER
    assert h.remaining_steps == 3  # what was asked for at rest is played as it was meant
    h, _ = play(h, 1)
    assert h.due  # row 1 of H = 8: seven rows cover the seven steps that it may still take
    assert h.begin(6, 1, 0).in_flight.end_row == H  # type: ignore[union-attr]


def test_no_more_steps_are_frozen_than_the_checkpoint_can_continue() -> None:
    h = started(replace(handoff(s=3, delay_limit_steps=2), delays=(1, 1, 4)))
    h, _ = play(h, 3)
    committed = h.committed_now()
    assert committed is not None and committed.delay_steps == 2
    h = h.begin(2, 1, 0)
    h, _ = play(h, 3)
    _, facts = h.accept(chunk(2, 3.0), 50_000_000)
    assert facts.fallback is LIMITED
    assert facts.delay_predicted_steps == 2 and facts.m_cond_s == pytest.approx(2 * DT - 0.05)  # missed, and told


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("s", range(1, H + 1))
@pytest.mark.parametrize("delay", range(13))
def test_no_step_is_skipped_or_repeated_whatever_the_delay(schedule: Schedule, s: int, delay: int) -> None:
    """Every chunk goes on from what was played at its snapshot, so the values played count the steps."""
    h, played, ids, ready, base = handoff(schedule, s=s, d=1), [], 0, 0, 0
    for tick in range(120):
        if h.in_flight is not None and tick >= ready:
            h, _ = h.accept(chunk(ids, float(base)), tick * 20_000_000)
        if h.due:
            ids, ready, base = ids + 1, tick + delay, h.consumed
            h = h.begin(ids, 1, tick * 20_000_000)
            assert h.in_flight is not None
            assert h.in_flight.committed is None or not h.waits
        h, [value] = play(h, 1)
        played.append(value)
    moved = [value for value in played if value is not None]
    assert moved == [float(i) for i in range(len(moved))]
    if schedule is not Schedule.SYNC and 1 <= delay <= H // 2:
        assert None not in played[40:], "a delay that fits costs no motion"
    if delay > H // 2:
        assert len(moved) > 120 * min(s, H) / (s + delay + 2) - 2 * H  # it waits, and goes on


def test_every_row_consumed_is_exhausted() -> None:
    h = started(handoff(s=1, d=0))
    h = h.advance()
    h = h.begin(2, 1, 0)
    h = h.advance_to(h.consumed + 7)
    # a player elsewhere went on with rows of this request's own chunk: nothing of it is left
    late = replace(h, consumed=h.consumed + 1)
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


def test_a_player_elsewhere_is_late_by_its_own_count() -> None:
    h = started(handoff(d=2))
    h = h.advance_to(4).begin(2, 1, 1_000_000_000)
    for row, since_s, m_cond_s in ((1, 0.005, 1.75), (2, 0.0, 1.0), (2, DT, 0.0), (3, 0.0, 0.0), (3, 0.001, -0.05)):
        _, facts = h.advance_to(4 + row).accept(chunk(2, 4.0), 1_300_000_000, since_s)  # whatever our clock says
        assert facts.row == row and facts.m_cond_s == pytest.approx(m_cond_s * DT)
        assert facts.m_exhaust_s == pytest.approx((m_cond_s + 2) * DT)
    out = h.advance_to(8)
    assert out.accept(chunk(2, 4.0), 0, DT)[1].m_exhaust_s == pytest.approx(0.0)
    out, _ = play(out, 2)  # it holds: its count stands still
    assert out.accept(chunk(2, 4.0), 0, DT)[1].m_exhaust_s == pytest.approx(-2 * DT)


def test_the_row_at_which_a_player_elsewhere_began_is_the_delay() -> None:
    h = started(handoff(d=2))
    h = h.advance_to(4).begin(2, 1, 0).advance_to(6)
    h, _ = h.accept(chunk(2, 4.0), 0, 0.0)
    assert h.delays == (2,)
    assert h.begun(1, 4) is h and h.begun(2, 2) is h and h.begun(2, 0) is h
    late = h.begun(2, 3)
    assert late.delays == (3,) and late.begun(2, 3) is late
    assert late.playing is not None and late.playing.first_row == 3
    first = started(handoff())  # from standstill there is no delay to learn
    assert first.begun(1, 5) is first


@pytest.mark.parametrize("s", [0, H + 1])
def test_execution_horizon_must_fit(s: int) -> None:
    with pytest.raises(ConfigError, match="execution horizon"):
        handoff(s=s)
