"""The clocks a bag is replayed on. Both count nanoseconds from an arbitrary start, like CLOCK_MONOTONIC."""

from __future__ import annotations

import threading
from typing import Protocol

from phyai_engine.timing import mono_ns


class Clock(Protocol):
    """What the replay needs of a clock."""

    def now_ns(self) -> int:
        """Now."""

    def wait(self, until_ns: int) -> None:
        """Return when it is ``until_ns``, or earlier after :meth:`wake`."""

    def wake(self) -> None:
        """End the wait that runs, or the next one; from any thread."""


class RealClock:
    """CLOCK_MONOTONIC: the bag plays as fast as it was recorded."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now_ns(self) -> int:
        return mono_ns()

    def wait(self, until_ns: int) -> None:
        left_s = (until_ns - mono_ns()) * 1e-9
        if left_s > 0 and self._woken.wait(left_s):
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


class VirtualClock:
    """Time that passes only where the replay waits: it leaps to the next thing that happens.

    :param start_ns: its first reading.
    """

    def __init__(self, start_ns: int) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def wait(self, until_ns: int) -> None:
        self._now_ns = max(self._now_ns, until_ns)

    def wake(self) -> None:
        """Nothing waits."""
