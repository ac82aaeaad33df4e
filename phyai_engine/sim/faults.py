"""Faults of a sensor stream: delay, loss, freezing, dropouts; equal for equal seeds, changed at run time."""

from __future__ import annotations

import enum
import math
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from phyai_engine.errors import ConfigError

T = TypeVar("T")


class Freeze(str, enum.Enum):
    """What of a stream stands still."""

    NONE = "none"
    FRAME = "frame"  # the same content with new stamps: a hung sensor behind a live driver
    STAMP = "stamp"  # new content with the same stamp: a driver whose clock stopped
    BOTH = "both"  # the same message again and again


@dataclass(frozen=True, slots=True)
class StreamFaults:
    """Faults of one stream.

    :param delay_s: time between the sample's stamp and its release.
    :param drop: probability that a sample is lost, 0..1.
    :param dropouts: (begin, end) windows in seconds of the stream's clock in which everything is lost.
    :raises ConfigError: a value outside its range.
    """

    delay_s: float = 0.0
    drop: float = 0.0
    freeze: Freeze = Freeze.NONE
    dropouts: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delay_s) and self.delay_s >= 0.0):
            raise ConfigError("delay_s is out of range", got=self.delay_s, wanted=">= 0")
        if not 0.0 <= self.drop <= 1.0:
            raise ConfigError("drop is out of range", got=self.drop, wanted="a probability, 0..1")
        for begin, end in self.dropouts:
            if not begin < end:
                raise ConfigError("a dropout window is not ordered", got=f"{begin}..{end}", wanted="begin < end")


@dataclass(frozen=True, slots=True)
class Released(Generic[T]):
    """A sample that leaves the stream now: its stamp (possibly frozen) and its content."""

    stamp_ns: int
    payload: T


class FaultyStream(Generic[T]):
    """One stream with faults. Any thread may replace ``faults`` at any time; all else belongs to one thread.

    One number is drawn per sample whatever the faults are, so switching them does not shift later draws.
    """

    def __init__(self, name: str, seed: int, faults: StreamFaults | None = None, *, pending_max: int = 256) -> None:
        self.name = name
        self.faults = faults or StreamFaults()
        self._random = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), zlib.crc32(name.encode())]))
        self._pending: deque[tuple[float, Released[T]]] = deque()
        self._pending_max = pending_max
        self._frozen: Released[T] | None = None
        self.pushed = 0
        self.dropped = 0

    def push(self, now_s: float, stamp_ns: int, payload: T) -> None:
        """Hand in one sample taken at ``now_s`` of the stream's clock, stamped ``stamp_ns``."""
        faults = self.faults
        self.pushed += 1
        lost = self._random.random() < faults.drop or any(b <= now_s < e for b, e in faults.dropouts)
        if faults.freeze is Freeze.NONE:
            self._frozen = None
        elif self._frozen is None:
            self._frozen = Released(stamp_ns, payload)
        # The bound keeps a long delay of large images from eating the memory.
        if lost or len(self._pending) >= self._pending_max:
            self.dropped += 1
            return
        if self._frozen is not None:
            stamp_ns = stamp_ns if faults.freeze is Freeze.FRAME else self._frozen.stamp_ns
            payload = payload if faults.freeze is Freeze.STAMP else self._frozen.payload
        self._pending.append((now_s + faults.delay_s, Released(stamp_ns, payload)))

    def due(self, now_s: float) -> list[Released[T]]:
        """The samples to release by ``now_s``, in the order they were taken: a delay never reorders."""
        released = []
        while self._pending and self._pending[0][0] <= now_s:
            released.append(self._pending.popleft()[1])
        return released

    @property
    def next_due_s(self) -> float:
        """When the next sample is to be released; infinity if none waits."""
        return self._pending[0][0] if self._pending else math.inf
