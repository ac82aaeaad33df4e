"""Observation -> request -> chunk -> player, once per control tick. No rclpy: clocks, client and outputs are passed in.

Runs on the executor thread only. It never waits: the client's submit, cancel and poll return at once, and a tick that
finds no fresh observation counts the refusal and lets the playing chunk go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from phyai_engine.control.commands import Spliced
from phyai_engine.control.counters import Counters, Windows
from phyai_engine.control.player import Player
from phyai_engine.errors import PhyaiError, RefusalError
from phyai_engine.serve.client import Answered, Event, Failed, Lost
from phyai_engine.timing import Outcome, Timing
from phyai_engine.types import AbortCause, Observation, Refusal, Request, Schedule
from phyai_engine.watchdog import Vitals, Watchdogs, WatchdogSettings

NAN = math.nan


def headline(error: PhyaiError) -> str:
    """An error without its advice, which may hold the engine's last lines: /diagnostics has those."""
    return str(PhyaiError(error.what, got=error.got, wanted=error.wanted, where=error.where))


class Client(Protocol):
    """What the loop needs of EngineClient."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, epoch: int) -> None: ...
    def poll(self) -> Sequence[Event]: ...


@dataclass(frozen=True, slots=True)
class LoopSettings(WatchdogSettings):
    """Constants of one activation, and the watchdogs' limits.

    :param seed: of the noise: the k-th chunk has ``seed + k``.
    :param simulated: ticks follow a clock that may stand still or leap: holding and the observation's age are then
        counted in ticks, not in steady time.
    :param acknowledge_s: how long the output waits before it says that the player elsewhere is silent.
    """

    dt_s: float
    schedule: Schedule
    seed: int = 0
    window: int = 1000
    simulated: bool = False
    acknowledge_s: float = 0.0


class ControlLoop:
    """The node's control loop.

    :param snapshot: (now_ros_ns, now_mono_ns) -> Observation, or raises RefusalError.
    :param client: the engine.
    :param player: the last writer.
    :param mono_ns: monotonic clock.
    :param report: called once per handoff or rejection.
    :param refused: told of every refused observation or chunk, in words.
    :param clock_fault: why durations are not usable now (simulated time at another rate), or "".
    """

    def __init__(
        self,
        settings: LoopSettings,
        snapshot: Callable[[int, int], Observation],
        client: Client,
        player: Player,
        mono_ns: Callable[[], int],
        report: Callable[[Timing], None],
        clock_fault: Callable[[], str] = lambda: "",
        refused: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.player = player
        self.counters = Counters()
        self.windows = Windows(settings.window)
        self.settings = settings
        self._snapshot = snapshot
        self._client = client
        self._mono_ns = mono_ns
        self._report = report
        self._clock_fault = clock_fault
        self._refused = refused
        self._request: Request | None = None
        self._chunk_id = 0
        self._seeded_id = 0  # the last chunk before the seed was set
        self._play_ns = 0  # now, on the clock that holding and ages count on
        self._forget()

    def _forget(self) -> None:
        """Nothing is awaited, nothing is late: activation, re-arm, and every new epoch."""
        self._request = None
        self._last_consumed: int | None = None  # steps consumed at the handoff before
        self._timed = False  # the request in flight has a deadline: rows were left when it was made
        self._owing = False  # such a request ended without its chunk, and none has come since
        self._turned_ns = 0  # steady time of the last tick or beat
        self._hold_since_ns = 0  # on the clock of _play_ns, as the next three
        self._captured_ns = 0  # the observation of the request in flight
        self._observed_ns = 0  # the observation that the playing chunk was computed from
        self._age_last_s = NAN  # of that observation, when a step was played last
        self._silent: tuple[int, int] | None = None  # when a player elsewhere fell silent, and in steady time
        self.counters.misses_in_a_row = 0

    def activate(self) -> None:
        """Zero the counters and start a new epoch.

        :raises LatchedError: the abort latch is set.
        """
        self.player.activate()
        self.counters = Counters()
        self.windows = Windows(self.settings.window)
        self._forget()

    def reseed(self, seed: int) -> None:
        """From now on chunks count from 1 for the noise: the k-th has ``seed + k``."""
        self.settings = replace(self.settings, seed=seed)
        self._seeded_id = self._chunk_id

    def tick(self, now_ros_ns: int) -> None:
        """One control tick: take the observation if one is due, play one step, then submit."""
        now = self._mono_ns()
        self._play_ns = self._play_ns + round(self.settings.dt_s * 1e9) if self.settings.simulated else now
        self._watch(now)
        if (rejected := self.player.take_rejection()) is not None:
            chunk_id, error = rejected
            self.counters.accepted -= 1
            self.counters.refused += 1
            if self._request is not None:  # it was cut for a chunk that does not play
                self.counters.cancelled += 1
                self._finish(self._request.chunk_id, "cancelled", text="the chunk that it continues does not play")
            self._refuse(error)
            self._finish(chunk_id, "refused", refusal=error.code, text=str(error))
            self._listen(error)
        consumed = self.player.handoff.consumed
        self.player.catch_up()  # a request is cut where the robot is now, not where it was a tick ago
        request = self._next_request(now_ros_ns, now)
        self.player.tick()
        if self.player.handoff.consumed > consumed:
            self._age_last_s = (self._play_ns - self._observed_ns) * 1e-9
        if request is not None:
            self._client.submit(request)
        self._count_owed()

    def beat(self) -> None:
        """A turn on steady time: simulated time may stand still, and the engine must answer all the same."""
        self._watch(self._mono_ns())

    def on_events(self) -> None:
        """Take what the engine finished. Called when the client signals, on the executor thread."""
        for event in self._client.poll():
            if isinstance(event, Answered):
                self._answered(event)
            elif isinstance(event, Failed):
                self._failed(event)
            elif isinstance(event, Lost):
                self.abort(AbortCause.ENGINE_LOST, headline(event.error))

    def abort(self, cause: AbortCause, text: str) -> bool:
        """Stop now. Never waits for inference. True if the latch was newly set."""
        newly = self.player.abort(cause, text)
        self._drop_request()
        return newly

    def stop(self) -> None:
        """Begin the controlled stop of a deactivation."""
        self.player.stop()
        self._drop_request()

    def rearm(self, now_ros_ns: int, *, active: bool) -> None:
        """Clear the latch.

        :raises RefusalError: the observation is not fresh, or the player elsewhere is silent (only asked for while
            active).
        """
        if active:
            self.player.check_output()
            self._snapshot(now_ros_ns, self._mono_ns())
        self.player.rearm(active=active)
        self._drop_request()

    def flush(self) -> None:
        """A new epoch for a new instruction: what plays and what is in flight is dropped."""
        self.player.flush()
        self._drop_request()

    def _drop_request(self) -> None:
        """After the epoch was bumped: nothing older is awaited."""
        request = self._request
        self._forget()
        self._client.cancel(self.player.safety.epoch - 1)
        if request is not None:
            self.counters.cancelled += 1
            self._report(
                Timing(epoch=request.epoch, chunk_id=request.chunk_id, outcome="cancelled", text="a new epoch began")
            )

    def _refuse(self, error: RefusalError) -> None:
        self.counters.refusals[error.code] += 1
        self.counters.last_refusal = error.code
        self.counters.last_refusal_text = str(error)
        self._refused(str(error))

    def _next_request(self, now_ros_ns: int, now: int) -> Request | None:
        player = self.player
        if not player.safety.may_play or not player.handoff.due:
            return None
        try:
            observation = self._snapshot(now_ros_ns, now)
        except RefusalError as error:
            self._refuse(error)
            return None
        self._chunk_id += 1
        self._captured_ns = self._play_ns - (now - observation.capture_mono_ns)
        committed = player.handoff.committed_now()
        player.handoff = player.handoff.begin(self._chunk_id, player.safety.epoch, now)
        flight = player.handoff.in_flight
        assert flight is not None  # begin set it
        steps = flight.delay_steps if committed is not None else flight.remaining_steps
        self._request = Request(
            epoch=flight.epoch,
            chunk_id=flight.chunk_id,
            observation=observation,
            committed=committed,
            seed=self.settings.seed + self._chunk_id - self._seeded_id,
            remaining_ms=steps * self.settings.dt_s * 1e3,
        )
        self._timed = flight.remaining_steps > 0 and self.settings.schedule is not Schedule.SYNC
        self.counters.requests += 1
        return self._request

    def _watch(self, now: int) -> None:
        """Every limit of phyai_engine/watchdog.py, while the robot may move. A passed one is an abort."""
        gap_ns = now - self._turned_ns if self._turned_ns else 0
        self._turned_ns = now
        if not self.player.safety.may_play:
            return
        vitals = self._vitals(now, gap_ns * 1e-9)
        if (found := Watchdogs(self.settings).check(vitals)) is None:
            return
        if found[0] is AbortCause.INFERENCE_DEADLINE:
            self.counters.failed += 1
            self._finish(vitals.chunk_id, "engine_error", text=found[1])
        self.abort(*found)

    def _vitals(self, now: int, tick_gap_s: float) -> Vitals:
        player, handoff = self.player, self.player.handoff
        # A robot that was never moved may wait for ever.
        holding = handoff.remaining_steps == 0 and player.last_command is not None
        self._hold_since_ns = (self._hold_since_ns or self._play_ns) if holding else 0
        if self._silent is not None and player.heard_mono_ns > self._silent[1]:
            self._silent = None
        flight = handoff.in_flight
        return Vitals(
            dt_s=self.settings.dt_s,
            tick_gap_s=tick_gap_s,
            chunk_id=0 if flight is None else flight.chunk_id,
            request_s=0.0 if flight is None else (now - flight.snapshot_mono_ns) * 1e-9,
            observation_age_s=(self._play_ns - self._observed_ns) * 1e-9 if handoff.remaining_steps else 0.0,
            player_silence_s=0.0
            if self._silent is None
            else (self._play_ns - self._silent[0]) * 1e-9 + self.settings.acknowledge_s,
            misses=self.counters.misses_in_a_row,
            hold_s=(self._play_ns - self._hold_since_ns) * 1e-9 if holding else 0.0,
        )

    def _listen(self, error: RefusalError) -> None:
        """A chunk was not taken by the player elsewhere: MISSING is its silence, any other code is a sign of life."""
        if error.code is not Refusal.MISSING:
            self._silent = None
        elif self._silent is None:
            self._silent = (self._play_ns, self._mono_ns())

    def _count_owed(self) -> None:
        """The chunk ran out and the request that was to continue it had failed: that handoff is missed for good.

        While another request with a deadline is in flight, that one counts when it arrives.
        """
        if not self._owing or self.player.handoff.remaining_steps or (self._request is not None and self._timed):
            return
        self._owing = False
        if not self._clock_fault():
            self.counters.misses_exhaust += 1
            self._count_margin(missed=True)

    def _count_margin(self, *, missed: bool) -> None:
        self.counters.handoffs += 1
        self.counters.misses += missed
        self.counters.misses_in_a_row = self.counters.misses_in_a_row + 1 if missed else 0

    def _finish(self, chunk_id: int, outcome: Outcome, *, refusal: Refusal = Refusal.NONE, text: str = "") -> None:
        """Report a chunk that will not be played; the request in flight, if it was that one, is over."""
        self.player.handoff = self.player.handoff.drop(chunk_id)
        if self._request is not None and self._request.chunk_id == chunk_id:
            self._request = None
            self._owing |= self._timed and outcome != "cancelled"
        epoch = self.player.safety.epoch
        self._report(Timing(epoch=epoch, chunk_id=chunk_id, outcome=outcome, refusal=refusal.name.lower(), text=text))

    def _failed(self, event: Failed) -> None:
        request = self._request
        if request is None or event.chunk_id != request.chunk_id:
            return
        if event.cancelled:
            self.counters.cancelled += 1
            self._finish(event.chunk_id, "cancelled", text=str(event.error))
            return
        self.counters.failed += 1
        code = Refusal.NONE
        if isinstance(event.error, RefusalError):
            code = event.error.code
            self._refuse(event.error)
        self._finish(
            event.chunk_id,
            "refused" if code else "engine_error",
            refusal=code,
            text=str(event.error),
        )

    def _answered(self, event: Answered) -> None:
        request, chunk = self._request, event.chunk
        if request is None or (chunk.epoch, chunk.chunk_id) != (
            request.epoch,
            request.chunk_id,
        ):
            return  # an answer to a request that was dropped; the client counts it
        observation = request.observation
        chunk = replace(
            chunk,
            oldest_ros_ns=observation.oldest_ros_ns,
            newest_ros_ns=observation.newest_ros_ns,
        )
        try:
            spliced = self.player.accept(chunk, self._mono_ns())
        except RefusalError as error:
            self.counters.refused += 1
            self._refuse(error)
            self._finish(chunk.chunk_id, "refused", refusal=error.code, text=str(error))
            if error.code is Refusal.MISSING:  # the output's word: what plays there is silent
                self._listen(error)
            return
        self._request, self._owing = None, False
        self._observed_ns = self._captured_ns
        self._accepted(event, request, spliced)

    def _accepted(self, event: Answered, request: Request, spliced: Spliced) -> None:
        accepted, facts, timings = self._mono_ns(), spliced.facts, event.chunk.timings
        observation = request.observation
        observe = (observation.snapshot_mono_ns - observation.capture_mono_ns) * 1e-9
        critical = observe + (accepted - observation.snapshot_mono_ns) * 1e-9
        clock_fault = self._clock_fault()
        if clock_fault:
            facts = replace(facts, m_cond_s=NAN, m_exhaust_s=NAN)
        margin = facts.m_cond_s if request.committed is not None else facts.m_exhaust_s
        counters = self.counters
        counters.accepted += 1
        counters.misses_cond += facts.m_cond_s < 0
        counters.misses_exhaust += facts.m_exhaust_s < 0
        if not math.isnan(margin):
            self._count_margin(missed=margin < 0)
        consumed = self.player.handoff.consumed
        env = (consumed - self._last_consumed) * self.settings.dt_s if self._last_consumed is not None else NAN
        self._last_consumed = consumed
        timing = Timing(
            epoch=request.epoch,
            chunk_id=request.chunk_id,
            outcome="accepted",
            text=clock_fault or (f"{spliced.clamped} values clamped" if spliced.clamped else ""),
            fallback=facts.fallback.value,
            l_observe_s=observe,
            l_transfer_s=timings.transfer_ms * 1e-3,
            l_serialise_s=timings.serialise_ms * 1e-3,
            l_network_s=timings.network_ms * 1e-3,
            l_queue_s=timings.queue_ms * 1e-3,
            l_batch_s=timings.batch_ms * 1e-3,
            l_inference_s=timings.inference_ms * 1e-3,
            l_actuate_s=(accepted - event.received_mono_ns) * 1e-9,
            l_critical_s=critical,
            l_env_s=env,
            m_ctrl_s=margin,  # B_ctrl and L_critical both start at capture, so the capture cancels
            m_cond_s=facts.m_cond_s,
            m_exhaust_s=facts.m_exhaust_s,
            delay_predicted_steps=facts.delay_predicted_steps,
            delay_steps=facts.row,
            execution_steps=facts.execution_steps,
            hold_steps=facts.held,
            age_s=critical,
            age_last_s=self._age_last_s,
            jump=spliced.seam.jump,
            jump_ratio=spliced.seam.jump_ratio,
            jerk=spliced.seam.jerk,
            frozen_error=facts.frozen_error,
        )
        self.windows.add(timing)
        self._report(timing)
