"""What passes between the player and the output it writes to. No ROS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from phyai_engine.control.seam import Seam
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import Accepted
from phyai_engine.stop import StopPlan
from phyai_engine.types import F64, Chunk, CommandKind


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    """What one tick commands. ``values``/``rates`` [A] robot units and unit/s; chunk_id and step only for ACTION."""

    kind: CommandKind
    values: F64
    rates: F64
    tick: int
    epoch: int
    chunk_id: int = 0
    step: int = 0


class Output(Protocol):
    """Where the player writes. ``ticks``: this process publishes one command a tick; else a player elsewhere plays."""

    @property
    def ticks(self) -> bool: ...

    def command(self, command: Command) -> None:
        """Publish one tick's command."""

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None:
        """Hand an accepted chunk to a player elsewhere."""

    def stop(self, plan: StopPlan) -> None:
        """Publish a whole stop to a player elsewhere."""

    def consumed(self) -> int | None:
        """Rows consumed as the player elsewhere reports it, on this side's count; None when it has not reported."""

    def since_step_s(self) -> float | None:
        """Time since the newest row that :meth:`consumed` counts; None where this process plays."""

    def begun(self) -> tuple[int, int] | None:
        """chunk_id and row at which the player elsewhere began the newest chunk; asked every tick, told once."""

    def ready(self) -> RefusalError | None:
        """Why no chunk can be handed over now; None where it can."""

    def heard_mono_ns(self) -> int:
        """Steady time of the newest word of the player elsewhere; 0 where there was none."""

    def motion(self) -> tuple[F64, F64] | None:
        """Value [A] and rate [A] at which the player elsewhere is by its own clock; None when nothing plays there.

        Values are NaN where it was handed a chunk that has not begun, and nothing before it: it rests where it is.
        A stop goes on from what was returned last.
        """

    def take_rejection(self) -> RefusalError | None:
        """Why the player elsewhere does not play the last chunk handed over; asked every tick, told once."""

    def reset(self, consumed: int) -> None:
        """Activation, re-arm or deactivation: nothing plays; counting goes on from ``consumed``."""


class PlaysHere:
    """The part of an :class:`Output` that says: this process plays, nobody elsewhere is told or heard."""

    ticks = True

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None:
        """Nothing to hand over."""

    def stop(self, plan: StopPlan) -> None:
        """Nothing to hand over: the stop is commanded step by step."""

    def consumed(self) -> int | None:
        return None

    def since_step_s(self) -> float | None:
        return None

    def begun(self) -> tuple[int, int] | None:
        return None

    def ready(self) -> RefusalError | None:
        return None

    def heard_mono_ns(self) -> int:
        return 0

    def motion(self) -> tuple[F64, F64] | None:
        return None

    def take_rejection(self) -> RefusalError | None:
        return None

    def reset(self, consumed: int) -> None:
        """No state between activations."""


@dataclass(frozen=True, slots=True, eq=False)
class Spliced:
    """An accepted chunk: the handoff's facts and what the seam looked like.

    :param clamped: values changed by the clamp (0 unless asked for).
    """

    facts: Accepted
    chunk_id: int
    seam: Seam
    clamped: int
