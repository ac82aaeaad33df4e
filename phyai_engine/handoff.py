"""Which row is played next, when the next inference starts, and how a finished chunk is spliced in.

A pure state machine: every method returns a new value, nothing here reads a clock. The unit of time is the step
actually consumed. Rows are skipped by that count, never by latency / dt, so a chunk that arrives while the robot
stood still is played from its first row.

Row numbers count from the observation's instant: row 0 of a chunk belongs to the tick at which its observation was
taken. ``s`` (execution steps) is the row at which the next inference starts, H - s rows then remain to cover its
delay d: d <= s <= H - d. Where the configured s does not fit, :class:`Fallback` says what is done instead.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.types import F64, Chunk, Committed, Refusal, Schedule


class Fallback(str, enum.Enum):
    """What an overlapping schedule does where the predicted delay d does not fit; from the mildest on.

    ``shorter_s``: the next inference starts earlier, so that H - s rows cover d; where d > H / 2 it starts as soon as a
    chunk has come. Motion does not pause. ``limited_d``: no more rows are frozen than the checkpoint was trained for; a
    later handoff misses its conditioning. ``sync``: as schedule ``sync``, because most of the recent delays are beyond
    what any s or the checkpoint can cover: every chunk would run out in motion.
    """

    NONE = ""
    SHORTER_S = "shorter_s"
    LIMITED_D = "limited_d"
    SYNC = "sync"


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """Constants of one activation.

    :param horizon: H, rows of a chunk. :param execution_steps: configured s, 1..H.
    :param delay_init_steps: d assumed before any delay was measured.
    :param delay_window: number of recent delays whose maximum predicts the next one.
    :param delay_slack_steps: added to that maximum: a delay that was not seen yet then keeps its deadline too.
    :param delay_limit_steps: longest d that the checkpoint can continue (``rtc`` only), 0 = no limit.
    """

    schedule: Schedule
    horizon: int
    execution_steps: int
    dt_s: float
    delay_init_steps: int = 2
    delay_window: int = 10
    delay_limit_steps: int = 0
    delay_slack_steps: int = 0

    def __post_init__(self) -> None:
        steps = self.delay_init_steps, self.delay_limit_steps, self.delay_slack_steps
        least = min(self.horizon - 1, self.delay_window - 1, *steps)
        if least < 0 or self.dt_s <= 0:
            raise ConfigError("handoff settings are out of range", got=self)
        if not 1 <= self.execution_steps <= self.horizon:
            raise ConfigError(
                "execution horizon is out of range",
                got=self.execution_steps,
                wanted=f"1..{self.horizon} (the model's horizon)",
                do="Set the parameter execution_horizon, or 0 for half the horizon.",
            )


def assumed_delay_steps(warm_up_ms: Sequence[float], horizon: int, dt_s: float) -> int:
    """Inference delay before one was measured: steps of the median warm-up inference, and one more for what lies
    outside the model; at most half a chunk."""
    steps = math.ceil(float(np.median(warm_up_ms)) * 1e-3 / dt_s) + 1
    return min(steps, horizon // 2)


@dataclass(frozen=True, slots=True, eq=False)
class Playing:
    """A chunk being played. ``next_row`` is the row the next tick plays; rows before ``first_row`` never played.

    :param actions: [H, A] robot units, as commanded (after a reported clamp). :param end_row: rows from here on are
        not played. :param learned: its delay is the newest of the history.
    """

    chunk_id: int
    epoch: int
    actions: F64
    first_row: int
    next_row: int
    end_row: int
    learned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The request being computed, with what was true when its observation was taken."""

    chunk_id: int
    epoch: int
    snapshot_mono_ns: int
    consumed_at: int  # Handoff.consumed at the snapshot
    held_at: int  # Handoff.held at the snapshot
    delay_steps: int  # d: as predicted, or the longest that the checkpoint can continue
    execution_steps: int  # s used
    remaining_steps: int  # rows left to play at the snapshot
    committed: F64 | None  # [n, A] those rows, None when nothing was playing
    end_row: int  # rows of its chunk from here on will not be played
    fallback: Fallback = Fallback.NONE


@dataclass(frozen=True, slots=True)
class Accepted:
    """Facts of one handoff.

    :param row: d', the first row that will be played = steps consumed since the snapshot.
    :param m_cond_s: time left until row d is due; NaN for an unconditioned chunk.
    :param m_exhaust_s: time left until nothing is left to play; NaN when nothing was playing at the snapshot.
    :param held: ticks spent holding since the snapshot.
    """

    row: int
    delay_predicted_steps: int
    execution_steps: int
    held: int
    m_cond_s: float
    m_exhaust_s: float
    frozen_error: float
    fallback: Fallback = Fallback.NONE


@dataclass(frozen=True, slots=True, eq=False)
class Handoff:
    """The playing chunk, the request in flight and the delay history. Swapped whole by its one owner, the player."""

    settings: HandoffSettings
    playing: Playing | None = None
    in_flight: InFlight | None = None
    consumed: int = 0
    held: int = 0
    delays: tuple[int, ...] = ()
    last_chunk_id: int = 0

    @property
    def remaining_steps(self) -> int:
        """Rows left before the chunk runs out."""
        return 0 if self.playing is None else max(0, self.playing.end_row - self.playing.next_row)

    @property
    def predicted_delay(self) -> int:
        """d: the largest recent delay, so that one slow inference is forgotten after ``delay_window`` handoffs, and the
        slack."""
        s = self.settings
        return min(max(self.delays) + s.delay_slack_steps if self.delays else s.delay_init_steps, s.horizon)

    @property
    def typical_delay(self) -> int:
        """The delay that half of the recent ones did not exceed: what is the rule, where the largest is a rare case."""
        newest = sorted(self.delays) or [self.settings.delay_init_steps]
        return newest[(len(newest) - 1) // 2]

    @property
    def delay_limit(self) -> int:
        """Longest d that a request may carry."""
        s = self.settings
        return s.delay_limit_steps if s.schedule is Schedule.RTC and s.delay_limit_steps else s.horizon

    @property
    def fallback(self) -> Fallback:
        """What is done because d <= s <= H - d, or the checkpoint's limit of d, does not hold with the configured s.

        Only a delay that is the rule makes the robot wait: after a rare slow inference s is shorter for a while.
        """
        s, d = self.settings, self.predicted_delay
        if s.schedule is Schedule.SYNC:
            return Fallback.NONE
        if 2 * self.typical_delay > s.horizon or self.typical_delay > self.delay_limit:
            return Fallback.SYNC
        if d > self.delay_limit:
            return Fallback.LIMITED_D
        return Fallback.SHORTER_S if max(s.execution_steps, d) > max(1, s.horizon - d) else Fallback.NONE

    @property
    def fallback_text(self) -> str:
        """Why, in words; empty where nothing is done otherwise than configured."""
        s, d = self.settings, self.predicted_delay
        return {
            Fallback.NONE: "",
            Fallback.SHORTER_S: f"the next inference starts at row {self.start_row} instead of {s.execution_steps}: "
            f"up to {d} of {s.horizon} steps pass before its chunk comes",
            Fallback.LIMITED_D: f"{self.delay_limit} steps are frozen, the most that the checkpoint can continue: "
            f"up to {d} pass before a chunk comes",
            Fallback.SYNC: f"the robot waits for each chunk: {self.typical_delay} steps pass before one comes, "
            f"more than the {min(s.horizon // 2, self.delay_limit)} that a chunk or the checkpoint can cover",
        }[self.fallback]

    @property
    def waits(self) -> bool:
        """The robot plays s rows and rests until the next chunk has come: schedule ``sync``, or the fallback to it."""
        return self.settings.schedule is Schedule.SYNC or self.fallback is Fallback.SYNC

    @property
    def start_row(self) -> int:
        """Row of the playing chunk at which the next inference starts: s, made feasible for the predicted delay.

        At least d (a chunk must live until its successor arrives), at most H - d (enough rows must remain). When
        both cannot hold (2d > H) covering the delay wins: motion without a pause matters more than reuse.
        """
        s = self.settings
        if self.waits:
            return s.execution_steps
        d = self.predicted_delay
        return max(1, min(max(s.execution_steps, d), s.horizon - d))

    @property
    def due(self) -> bool:
        """True when the next observation should be taken now."""
        if self.in_flight is not None:
            return False
        if self.playing is None or self.remaining_steps == 0:
            return True
        return not self.waits and self.playing.next_row >= self.start_row

    def peek(self) -> F64 | None:
        """[A] robot units: the row the next tick plays, or None (hold)."""
        return (
            None if self.playing is None or self.remaining_steps == 0 else self.playing.actions[self.playing.next_row]
        )

    def advance(self) -> Handoff:
        """One control tick: one row consumed, or one tick held."""
        if self.playing is None or self.remaining_steps == 0:
            return replace(self, held=self.held + 1)
        playing = replace(self.playing, next_row=self.playing.next_row + 1)
        return replace(self, playing=playing, consumed=self.consumed + 1)

    def advance_to(self, consumed: int) -> Handoff:
        """Take the count reported by a player elsewhere (ChunkStatus, controller time). Never goes backwards."""
        steps = consumed - self.consumed
        if steps <= 0:
            return self
        if self.playing is None:
            return replace(self, consumed=consumed)
        playing = replace(self.playing, next_row=self.playing.next_row + min(steps, self.remaining_steps))
        return replace(self, playing=playing, consumed=consumed)

    def committed_now(self) -> Committed | None:
        """The rows the next inference must continue, cut at this instant; None when nothing is left or wanted."""
        if self.playing is None or self.remaining_steps == 0 or self.settings.schedule is not Schedule.RTC:
            return None
        rows = self.playing.actions[self.playing.next_row : self.playing.end_row].copy()
        return Committed(
            actions=rows,
            delay_steps=min(self.predicted_delay, self.delay_limit, len(rows)),
            execution_steps=self.playing.next_row,
        )

    def begin(self, chunk_id: int, epoch: int, snapshot_mono_ns: int) -> Handoff:
        """An observation was taken and a request submitted.

        :raises ValueError: a request is already in flight, or chunk_id does not increase (a caller's defect).
        """
        if self.in_flight is not None or chunk_id <= self.last_chunk_id:
            raise ValueError(f"begin({chunk_id}) after {self.last_chunk_id}, in flight: {self.in_flight}")
        committed = self.committed_now()
        flight = InFlight(
            chunk_id=chunk_id,
            epoch=epoch,
            snapshot_mono_ns=snapshot_mono_ns,
            consumed_at=self.consumed,
            held_at=self.held,
            delay_steps=min(self.predicted_delay, self.delay_limit),
            execution_steps=self.start_row if self.playing is None else self.playing.next_row,
            remaining_steps=self.remaining_steps,
            committed=None if committed is None else committed.actions,
            end_row=self.settings.execution_steps if self.waits else self.settings.horizon,
            fallback=self.fallback,
        )
        return replace(self, in_flight=flight, last_chunk_id=chunk_id)

    def expect(self, chunk_id: int, epoch: int, base_step: int, now_mono_ns: int) -> Handoff:
        """A chunk computed elsewhere arrived: what this player must know of its request to splice it in.

        :param base_step: ``consumed`` at the snapshot.
        :raises RefusalError: WRONG_EPOCH for a duplicate or reordered chunk, MALFORMED for a base in the future.
        """
        if chunk_id <= self.last_chunk_id:
            raise RefusalError(
                Refusal.WRONG_EPOCH,
                "a duplicate or reordered chunk",
                got=chunk_id,
                wanted=f"> {self.last_chunk_id}",
            )
        if base_step > self.consumed:
            raise RefusalError(
                Refusal.MALFORMED,
                "base_step was never reached",
                got=base_step,
                wanted=f"<= {self.consumed}",
            )
        flight = InFlight(
            chunk_id=chunk_id,
            epoch=epoch,
            snapshot_mono_ns=now_mono_ns,
            consumed_at=base_step,
            held_at=self.held,
            delay_steps=0,
            execution_steps=self.settings.execution_steps,
            remaining_steps=0,
            committed=None,
            end_row=self.settings.horizon,
        )
        return replace(self, in_flight=flight, last_chunk_id=chunk_id)

    def begun(self, chunk_id: int, row: int) -> Handoff:
        """The player elsewhere began the playing chunk at ``row``: the delay that the next prediction must cover.

        It may have gone on while the chunk was on its way. Word of another chunk, or of fewer rows, changes nothing.
        """
        playing = self.playing
        if playing is None or playing.chunk_id != chunk_id or not playing.learned or row <= playing.first_row:
            return self
        delays = (*self.delays[:-1], self.delays[-1] + row - playing.first_row)
        return replace(self, delays=delays, playing=replace(playing, first_row=row))

    def drop(self, chunk_id: int) -> Handoff:
        """The request failed, was cancelled or its chunk was refused: the playing chunk goes on."""
        if self.in_flight is None or self.in_flight.chunk_id != chunk_id:
            return self
        return replace(self, in_flight=None)

    def row_for(self, chunk: Chunk) -> int:
        """d': the row at which ``chunk`` would be spliced in now.

        :raises RefusalError: WRONG_EPOCH when it does not answer the request in flight; EXHAUSTED when all its rows
            were consumed meanwhile; MALFORMED when it has not H rows.
        """
        flight = self.in_flight
        if flight is None or chunk.chunk_id != flight.chunk_id or chunk.epoch != flight.epoch:
            raise RefusalError(
                Refusal.WRONG_EPOCH,
                "the chunk does not answer the request in flight",
                got=f"epoch {chunk.epoch} chunk {chunk.chunk_id}",
                wanted="none in flight" if flight is None else f"epoch {flight.epoch} chunk {flight.chunk_id}",
            )
        if len(chunk.actions) != self.settings.horizon:
            raise RefusalError(
                Refusal.MALFORMED,
                "wrong number of rows",
                got=len(chunk.actions),
                wanted=self.settings.horizon,
            )
        row = self.consumed - flight.consumed_at
        if row >= flight.end_row:
            raise RefusalError(
                Refusal.EXHAUSTED,
                "every row of the chunk was consumed while it was computed",
                got=f"{row} steps consumed",
                wanted=f"fewer than {flight.end_row}",
                do="Shorten inference, or use a longer horizon or a smaller execution_horizon.",
            )
        return row

    def accept(self, chunk: Chunk, now_mono_ns: int, since_step_s: float | None = None) -> tuple[Handoff, Accepted]:
        """Splice ``chunk`` in. The caller has checked finiteness and the envelope.

        :param since_step_s: of a player elsewhere, time since its newest step; None where this process plays.
        :raises RefusalError: see :meth:`row_for`.
        """
        row = self.row_for(chunk)
        flight = self.in_flight
        assert flight is not None  # row_for refuses otherwise
        held = self.held - flight.held_at
        moving = flight.remaining_steps > 0 and self.settings.schedule is not Schedule.SYNC
        # A robot that waits by fallback must learn when it need not any more.
        learned = moving or flight.fallback is Fallback.SYNC
        # Ticks held while waiting belong to the delay: they are what the next prediction must cover.
        delays = (*self.delays, row + held)[-self.settings.delay_window :] if learned else self.delays
        frozen = math.nan
        if flight.committed is not None:
            n = min(flight.delay_steps, len(flight.committed))
            frozen = float(np.abs(chunk.actions[:n] - flight.committed[:n]).mean()) if n else 0.0
        m_cond_s, m_exhaust_s = self._margins(flight, row, now_mono_ns, since_step_s)
        facts = Accepted(
            row=row,
            delay_predicted_steps=flight.delay_steps,
            execution_steps=flight.execution_steps,
            held=held,
            m_cond_s=m_cond_s if flight.committed is not None else math.nan,
            m_exhaust_s=m_exhaust_s if moving else math.nan,
            frozen_error=frozen,
            fallback=flight.fallback,
        )
        playing = Playing(
            chunk_id=chunk.chunk_id,
            epoch=chunk.epoch,
            actions=chunk.actions,
            first_row=row,
            next_row=row,
            end_row=flight.end_row,
            learned=learned,
        )
        return replace(self, playing=playing, in_flight=None, delays=delays), facts

    def _margins(self, flight: InFlight, row: int, now_mono_ns: int, since_step_s: float | None) -> tuple[float, float]:
        """Time left until row d, and until the row after the last, is due [s].

        Here rows are due on the grid that begins with the snapshot, in whose tick row 0 is played. A player elsewhere
        ticks in a phase of its own: its next row, ``row``, is due a period after its newest step, whatever time the
        snapshot was taken at.
        """
        dt_s = self.settings.dt_s
        if since_step_s is None:
            cond_s = exhaust_s = (now_mono_ns - flight.snapshot_mono_ns) * 1e-9
        else:
            cond_s = (row - 1) * dt_s + since_step_s
            held_s = (self.held - flight.held_at) * dt_s
            exhaust_s = (row - 1) * dt_s + max(since_step_s, held_s + min(since_step_s, dt_s))
        return flight.delay_steps * dt_s - cond_s, flight.remaining_steps * dt_s - exhaust_s

    def cleared(self) -> Handoff:
        """After abort, deactivate or flush: nothing plays, nothing is awaited; the delay history starts anew.

        Chunk ids start anew too: the new epoch keeps old ones out, and a policy node that restarted counts from 1.
        """
        return replace(self, playing=None, in_flight=None, delays=(), last_chunk_id=0)
