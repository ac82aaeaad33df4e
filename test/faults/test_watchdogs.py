"""Every watchdog ends in the one latch, with its code, a stop at once, and nothing that resumes by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phyai_engine.errors import EngineError, RefusalError
from phyai_engine.serve.client import Failed
from phyai_engine.types import AbortCause, CommandKind, Refusal, SafetyState, Schedule

Make = Callable[..., Any]
DT_S, HORIZON = 0.02, 16


def limits(loop: Any, **given: Any) -> None:
    loop.loop.settings = replace(loop.loop.settings, **given)


def latched(loop: Any, cause: AbortCause) -> None:
    """The latch holds this cause, the last command is a stop, and only a re-arm leads out."""
    assert (loop.player.safety.cause, loop.kinds()[-1]) == (cause, CommandKind.STOP)
    epoch = loop.player.safety.epoch
    loop.tick(40)
    for request in loop.engine.requests:
        loop.reply(loop.ramp(0.5, loop.commands[-1].values), request)
    loop.loop.on_events()
    loop.tick(5)
    assert loop.safety is SafetyState.LATCHED
    assert loop.player.safety.epoch == epoch
    loop.state = np.array(loop.commands[-1].values)
    loop.loop.rearm(0, active=True)
    loop.tick()
    loop.answer(loop.ramp(0.5))
    loop.tick(3)  # what latched is over: it does not latch again
    assert loop.safety is SafetyState.RUNNING


def fail(loop: Any) -> None:
    """The engine gives no chunk for the newest request."""
    request = loop.engine.requests[-1]
    loop.engine.events.append(Failed(request.epoch, request.chunk_id, EngineError("planted"), cancelled=False))
    loop.loop.on_events()


# -- observation age -----------------------------------------------------------------------------------------


def test_what_plays_must_not_be_computed_from_an_old_observation(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    limits(loop, observation_age_s=0.2)
    loop.start(0.5)
    loop.tick(9)
    assert loop.safety is SafetyState.RUNNING
    loop.tick(4)
    latched(loop, AbortCause.OBSERVATION_AGE)


def test_the_age_counts_from_the_capture_not_from_the_handoff(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    limits(loop, observation_age_s=0.4)
    loop.loop.activate()
    loop.tick(16)  # the inference of the first chunk takes 0.3 s
    loop.answer(loop.ramp())
    loop.tick(4)
    assert loop.safety is SafetyState.RUNNING
    loop.tick(3)
    assert loop.player.safety.cause is AbortCause.OBSERVATION_AGE


def test_fresh_chunks_and_holding_are_no_old_observations(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    limits(loop, observation_age_s=0.35)
    loop.start()
    for _ in range(4):
        loop.tick(9)
        loop.answer(loop.ramp(0.5, loop.commands[-1].values))
    loop.tick(60)  # runs out and holds: max_hold_s is the watchdog of that
    assert loop.safety is SafetyState.HOLDING


# -- misses --------------------------------------------------------------------------------------------------


def late(loop: Any) -> None:
    """A handoff after its chunk ran out."""
    loop.tick(HORIZON + 4)
    loop.answer(loop.ramp(0.0, loop.commands[-1].values))


def in_time(loop: Any) -> None:
    count = len(loop.engine.requests)
    while len(loop.engine.requests) == count:
        loop.tick()
    loop.answer(loop.ramp(0.0, loop.commands[-1].values))


def test_handoffs_missed_in_a_row_latch(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    limits(loop, misses_max=3)
    loop.start(0.0)
    for _ in range(6):
        in_time(loop)  # late is not the rule: the robot does not wait
    late(loop)
    late(loop)
    in_time(loop)  # in a row means in a row
    late(loop)
    late(loop)
    assert loop.loop.counters.misses_in_a_row == 2
    assert loop.safety is not SafetyState.LATCHED
    late(loop)
    loop.tick()
    assert "3 handoffs in a row" in loop.player.safety.text
    latched(loop, AbortCause.MISSES)


def test_a_player_elsewhere_that_has_not_gone_beyond_the_prediction_is_no_reason_to_stop(bench: Make) -> None:
    """Its ticks have another phase: by our clock every handoff is late by some ms, by its count none is."""
    loop = bench(ticks=False)
    limits(loop, misses_max=3)
    loop.start(0.0)
    loop.written.since_s = DT_S
    for _ in range(6):
        count = len(loop.engine.requests)
        for _ in range(2 * HORIZON):
            if len(loop.engine.requests) == count:
                loop.written.reported += 1
                loop.tick()
        assert len(loop.engine.requests) == count + 1
        loop.mono_ns += round(20 * DT_S * 1e9)
        loop.answer(loop.ramp(0.0))
        loop.tick()
    counters = loop.loop.counters
    assert (counters.handoffs, counters.misses, counters.misses_cond) == (6, 0, 0)
    assert loop.safety is not SafetyState.LATCHED


@pytest.mark.parametrize("schedule", [Schedule.NAIVE_ASYNC, Schedule.RTC])
def test_an_engine_that_is_always_too_slow_makes_the_robot_wait_and_is_no_miss(bench: Make, schedule: Schedule) -> None:
    loop = bench(schedule)
    limits(loop, misses_max=3)
    loop.start(0.0)
    late(loop)
    for _ in range(5):
        played = len([c for c in loop.commands if c.kind is CommandKind.ACTION])
        while loop.player.handoff.in_flight is None:
            loop.tick()
        assert loop.player.handoff.in_flight.remaining_steps == 0
        assert loop.engine.requests[-1].committed is None
        loop.tick(12)
        loop.answer(loop.ramp(0.0, loop.commands[-1].values))
        assert loop.timings[-1].fallback == "sync"
        assert len([c for c in loop.commands if c.kind is CommandKind.ACTION]) - played == 8  # s
    assert loop.loop.counters.misses == 1
    assert loop.safety is not SafetyState.LATCHED


def test_a_request_that_fails_until_the_chunk_runs_out_is_one_miss(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    loop.start(0.0)
    for _ in range(HORIZON + 10):
        loop.tick()
        if loop.player.handoff.in_flight is not None:
            fail(loop)
    counters = loop.loop.counters
    assert counters.failed > 5
    assert (counters.misses, counters.misses_exhaust, counters.misses_in_a_row, counters.handoffs) == (1, 1, 1, 1)
    loop.answer(loop.ramp(0.0, loop.commands[-1].values))  # motion goes on: no deadline, so no proof of health either
    assert counters.misses_in_a_row == 1


def test_a_failure_that_is_made_up_for_in_time_is_no_miss(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    loop.start(0.0)
    loop.tick(9)
    fail(loop)
    loop.tick()
    loop.answer(loop.ramp(0.0, loop.commands[-1].values))
    loop.tick(6)
    counters = loop.loop.counters
    assert (counters.failed, counters.misses, counters.handoffs) == (1, 0, 1)
    loop.blind = RefusalError(Refusal.STALE, "camera 'front' is silent")
    loop.tick(HORIZON)  # nothing is asked for: the camera is late, not the engine
    assert (loop.safety, counters.misses) == (SafetyState.HOLDING, 0)


def test_a_late_retry_counts_once(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC)
    loop.start(0.0)
    loop.tick(9)
    fail(loop)
    loop.tick()  # asks again, while rows are left
    loop.tick(12)  # they run out
    loop.answer(loop.ramp(0.0, loop.commands[-1].values))
    loop.tick(3)
    counters = loop.loop.counters
    assert (counters.misses, counters.misses_exhaust, counters.handoffs) == (1, 1, 1)


@pytest.mark.parametrize("what", ["refused", "failed"])
def test_failures_in_a_row_latch_as_misses(bench: Make, what: str) -> None:
    """The engine answers once nothing is left to play, so each chunk runs out."""
    loop = bench(Schedule.NAIVE_ASYNC)
    limits(loop, misses_max=3)
    loop.start(0.0)
    for _ in range(3 * (HORIZON + 2) + 2):
        loop.tick()
        flight = loop.player.handoff.in_flight
        if flight is None:
            continue
        if flight.remaining_steps == 0:  # asked for when nothing was left
            loop.answer(loop.ramp(0.0, loop.commands[-1].values))
        elif what == "failed":
            fail(loop)
        else:
            loop.answer(np.full((HORIZON, 2), np.nan))
    assert loop.player.safety.cause is AbortCause.MISSES
    assert loop.loop.counters.misses == 3


def test_waiting_by_design_is_no_miss(bench: Make) -> None:
    loop = bench(Schedule.SYNC)
    limits(loop, misses_max=1)
    loop.start(0.0)
    for _ in range(4):
        loop.tick(12)
        fail(loop)
        loop.tick(5)
        loop.answer(loop.ramp(0.0, loop.commands[-1].values))
    assert (loop.loop.counters.misses, loop.safety) == (0, SafetyState.HOLDING)


# -- the tick and its clock ----------------------------------------------------------------------------------


def test_a_tick_that_comes_late_is_a_stop_and_no_action(bench: Make) -> None:
    loop = bench()
    limits(loop, tick_gap_s=0.2)
    loop.start(1.0)
    loop.tick(5)
    loop.mono_ns += 170_000_000
    loop.tick()  # 0.19 s
    assert loop.kinds()[-1] is CommandKind.ACTION
    loop.mono_ns += 200_000_000
    count = len(loop.commands)
    loop.tick()
    assert loop.kinds()[count:] == [CommandKind.STOP]
    assert "no control tick for 0.220 s" in loop.player.safety.text
    latched(loop, AbortCause.TICK_OVERRUN)


def test_time_spent_latched_or_inactive_is_no_late_tick(bench: Make) -> None:
    loop = bench()
    limits(loop, tick_gap_s=0.2)
    loop.start()
    loop.tick(3)
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.tick(30)
    loop.mono_ns += 60_000_000_000  # the engine was restarted
    loop.state = np.array(loop.commands[-1].values)
    loop.loop.rearm(0, active=True)
    loop.tick(2)
    assert loop.safety is SafetyState.ARMED
    loop.loop.stop()
    loop.tick(30)
    loop.player.deactivate()
    loop.mono_ns += 60_000_000_000
    loop.loop.activate()
    loop.tick()
    assert loop.safety is SafetyState.ARMED


def test_a_request_expires_while_the_simulated_clock_stands_still(bench: Make) -> None:
    loop = bench(request_timeout_s=0.5)
    limits(loop, simulated=True, tick_gap_s=0.2)
    loop.start()
    loop.tick(10)
    assert loop.player.handoff.in_flight is not None
    for _ in range(30):  # only steady time goes on
        loop.mono_ns += 20_000_000
        loop.loop.beat()
    latched(loop, AbortCause.INFERENCE_DEADLINE)


def test_ages_and_holding_do_not_grow_while_the_simulated_clock_stands_still(bench: Make) -> None:
    loop = bench(Schedule.NAIVE_ASYNC, request_timeout_s=1e3, hold_max_s=0.5)
    limits(loop, simulated=True, observation_age_s=0.5, tick_gap_s=0.2)
    loop.start()

    def pause() -> None:
        for _ in range(200):
            loop.mono_ns += 20_000_000
            loop.loop.beat()

    loop.tick(3)
    pause()
    loop.tick(HORIZON)
    pause()
    assert loop.safety is SafetyState.HOLDING
    loop.tick(20)
    assert loop.safety is SafetyState.HOLDING
    loop.tick(10)
    latched(loop, AbortCause.EXHAUSTED)


# -- a player elsewhere --------------------------------------------------------------------------------------


class Silent:
    """What a player elsewhere that does not answer looks like: every chunk is told missing half a second later."""

    def __init__(self, loop: Any, wait_ticks: int = 25) -> None:
        self.loop, self.wait = loop, wait_ticks
        self.handed = 0
        loop.written.chunk = self.chunk
        loop.written.take_rejection = self.take_rejection
        self.alive = False

    def chunk(self, *args: Any) -> None:
        self.handed = self.loop.mono_ns

    def take_rejection(self) -> RefusalError | None:
        if not self.handed or self.loop.mono_ns - self.handed < self.wait * DT_S * 1e9:
            return None
        self.handed = 0
        code = Refusal.OUT_OF_ENVELOPE if self.alive else Refusal.MISSING
        return RefusalError(code, "no ChunkStatus named the chunk within 0.5 s")


def serve(loop: Any, ticks: int) -> None:
    for _ in range(ticks):
        loop.tick()
        if loop.player.handoff.in_flight is not None:
            loop.answer(loop.ramp(0.0))


def test_a_player_that_acknowledges_nothing_is_lost(bench: Make) -> None:
    loop = bench(ticks=False)
    limits(loop, player_timeout_s=2.0, acknowledge_s=0.5)
    Silent(loop)
    loop.loop.activate()
    serve(loop, 99)
    assert loop.loop.counters.refusals[Refusal.MISSING] >= 3  # asked for again and again meanwhile
    assert not loop.player.safety.latched
    serve(loop, 5)
    assert loop.player.safety.cause is AbortCause.PLAYER_LOST
    assert loop.player.safety.epoch - 1 in loop.engine.cancelled


@pytest.mark.parametrize("sign", ["it speaks", "it refuses"])
def test_a_player_that_is_heard_again_is_not_lost(bench: Make, sign: str) -> None:
    loop = bench(ticks=False)
    limits(loop, player_timeout_s=2.0, acknowledge_s=0.5)
    silent = Silent(loop)
    loop.loop.activate()
    serve(loop, 60)
    if sign == "it speaks":  # and still does not name the chunk
        loop.written.heard_ns = loop.mono_ns + 1
        serve(loop, 2)
    else:
        silent.alive = True
        serve(loop, 26)
        silent.alive = False
    serve(loop, 60)
    assert not loop.player.safety.latched
