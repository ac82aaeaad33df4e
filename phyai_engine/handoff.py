"""Which row is played next, when the next inference starts, and how a finished chunk is spliced in.

A pure state machine: every method returns a new value, nothing here reads a clock. The unit of time is the step
actually consumed. Rows are skipped by that count, never by latency / dt, so a chunk that arrives while the robot
stood still is played from its first row.

Row numbers count from the observation's instant: row 0 of a chunk belongs to the tick at which its observation was
taken. ``s`` (execution steps) is the row at which the next inference starts, H - s rows then remain to cover its
delay d: d <= s <= H - d (design.md section 7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.types import F64, Chunk, Committed, Refusal, Schedule


@dataclass(frozen=True, slots=True)
class HandoffSettings:
    """Constants of one activation.

    :param horizon: H, rows of a chunk. :param execution_steps: configured s, 1..H.
    :param delay_init_steps: d assumed before any delay was measured.
    :param delay_window: number of recent delays whose maximum predicts the next one.
    """

    schedule: Schedule
    horizon: int
    execution_steps: int
    dt_s: float
    delay_init_steps: int = 2
    delay_window: int = 10

    def __post_init__(self) -> None:
        if self.horizon < 1 or self.dt_s <= 0 or self.delay_window < 1 or self.delay_init_steps < 0:
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
    """A chunk being played. ``next_row`` is the row the next tick plays; rows before ``first_row`` never played."""

    chunk_id: int
    epoch: int
    actions: F64  # [H, A] robot units, as commanded (after a reported clamp)
    first_row: int
    next_row: int


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The request being computed, with what was true when its observation was taken."""

    chunk_id: int
    epoch: int
    snapshot_mono_ns: int
    consumed_at: int  # Handoff.consumed at the snapshot
    held_at: int  # Handoff.held at the snapshot
    delay_steps: int  # predicted d
    execution_steps: int  # s used
    remaining_steps: int  # rows left to play at the snapshot
    committed: F64 | None  # [n, A] those rows, None when nothing was playing


@dataclass(frozen=True, slots=True)
class Accepted:
    """Facts of one handoff.

    :param row: d', the first row that will be played = steps consumed since the snapshot.
    :param m_cond_s: d_pred * dt - elapsed; NaN for an unconditioned chunk.
    :param m_exhaust_s: remaining * dt - elapsed; NaN when nothing was playing at the snapshot.
    :param held: ticks spent holding since the snapshot.
    """

    row: int
    delay_predicted_steps: int
    execution_steps: int
    held: int
    m_cond_s: float
    m_exhaust_s: float
    frozen_error: float


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
    def last_row(self) -> int:
        """Rows from here on are not played: s in ``sync`` (the robot waits there), else H."""
        s = self.settings
        return s.execution_steps if s.schedule is Schedule.SYNC else s.horizon

    @property
    def remaining_steps(self) -> int:
        """Rows left before the chunk runs out."""
        return 0 if self.playing is None else max(0, self.last_row - self.playing.next_row)

    @property
    def predicted_delay(self) -> int:
        """d: the largest recent delay, so that one slow inference is forgotten after ``delay_window`` handoffs."""
        d = max(self.delays) if self.delays else self.settings.delay_init_steps
        return min(d, self.settings.horizon)

    @property
    def start_row(self) -> int:
        """Row of the playing chunk at which the next inference starts: s, made feasible for the predicted delay.

        At least d (a chunk must live until its successor arrives), at most H - d (enough rows must remain). When
        both cannot hold (2d > H) covering the delay wins: motion without a pause matters more than reuse.
        """
        s = self.settings
        if s.schedule is Schedule.SYNC:
            return s.execution_steps
        d = self.predicted_delay
        return max(1, min(max(s.execution_steps, d), s.horizon - d))

    @property
    def due(self) -> bool:
        """True when the next observation should be taken now."""
        if self.in_flight is not None:
            return False
        return self.playing is None or self.remaining_steps == 0 or self.playing.next_row >= self.start_row

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
        rows = self.playing.actions[self.playing.next_row : self.last_row].copy()
        return Committed(
            actions=rows,
            delay_steps=min(self.predicted_delay, len(rows)),
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
            delay_steps=self.predicted_delay,
            execution_steps=self.start_row if self.playing is None else self.playing.next_row,
            remaining_steps=self.remaining_steps,
            committed=None if committed is None else committed.actions,
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
        )
        return replace(self, in_flight=flight, last_chunk_id=chunk_id)

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
        if row >= self.last_row:
            raise RefusalError(
                Refusal.EXHAUSTED,
                "every row of the chunk was consumed while it was computed",
                got=f"{row} steps consumed",
                wanted=f"fewer than {self.last_row}",
                do="Shorten inference, or use a longer horizon or a smaller execution_horizon.",
            )
        return row

    def accept(self, chunk: Chunk, now_mono_ns: int) -> tuple[Handoff, Accepted]:
        """Splice ``chunk`` in. The caller has checked finiteness and the envelope.

        :raises RefusalError: see :meth:`row_for`.
        """
        row = self.row_for(chunk)
        flight = self.in_flight
        assert flight is not None  # row_for refuses otherwise
        settings = self.settings
        elapsed_s = (now_mono_ns - flight.snapshot_mono_ns) * 1e-9
        held = self.held - flight.held_at
        moving = flight.remaining_steps > 0 and settings.schedule is not Schedule.SYNC
        # Ticks held while waiting belong to the delay: they are what the next prediction must cover.
        delays = (*self.delays, row + held)[-settings.delay_window :] if moving else self.delays
        frozen = math.nan
        if flight.committed is not None:
            n = min(flight.delay_steps, len(flight.committed))
            frozen = float(np.abs(chunk.actions[:n] - flight.committed[:n]).mean()) if n else 0.0
        facts = Accepted(
            row=row,
            delay_predicted_steps=flight.delay_steps,
            execution_steps=flight.execution_steps,
            held=held,
            m_cond_s=flight.delay_steps * settings.dt_s - elapsed_s if flight.committed is not None else math.nan,
            m_exhaust_s=flight.remaining_steps * settings.dt_s - elapsed_s if moving else math.nan,
            frozen_error=frozen,
        )
        playing = Playing(
            chunk_id=chunk.chunk_id,
            epoch=chunk.epoch,
            actions=chunk.actions,
            first_row=row,
            next_row=row,
        )
        return replace(self, playing=playing, in_flight=None, delays=delays), facts

    def cleared(self) -> Handoff:
        """After abort, deactivate or flush: nothing plays, nothing is awaited; the delay history starts anew.

        Chunk ids start anew too: the new epoch keeps old ones out, and a policy node that restarted counts from 1.
        """
        return replace(self, playing=None, in_flight=None, delays=(), last_chunk_id=0)
