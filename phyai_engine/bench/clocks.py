"""Clocks of the runner's phases: each is given to the Runner as ``on_phase`` and read after the run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

END = "end"


class PhaseClock(Protocol):
    """What measures the phases of a run."""

    def __call__(self, phase: str) -> None:
        """A phase begins; ``end`` closes the last one."""

    def take(self) -> dict[str, float]:
        """Phase -> duration [ms] since the last call, in order of their start."""

    def named(self, phase: str) -> AbstractContextManager[None]:
        """A range that a profiler shows under this name, for what happens outside the runner."""


class HostClock:
    """For models on the CPU, whose calls return when the work is done."""

    def __init__(self) -> None:
        self._borders: list[tuple[str, int]] = []

    def __call__(self, phase: str) -> None:
        self._borders.append((phase, time.perf_counter_ns()))

    def take(self) -> dict[str, float]:
        """See :class:`PhaseClock`."""
        borders, self._borders = self._borders, []
        return _sums((name, (end - start) / 1e6) for (name, start), (_, end) in pairwise(borders))

    def named(self, phase: str) -> AbstractContextManager[None]:
        """See :class:`PhaseClock`; no profiler is told."""
        return nullcontext()


class CudaClock:
    """CUDA events at the borders, because calls return before the work is done; each phase is an NVTX range.

    Events are only recorded while a run lasts: nothing waits for the device before ``take``. A phase includes the
    time in which the device waited for the host. Ranges show the host's side; a profiler links them to the kernels.
    """

    def __init__(self, cuda: Any) -> None:
        """:param cuda: torch.cuda, which this module does not import."""
        self._cuda = cuda
        self._borders: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        if self._borders:
            self._cuda.nvtx.range_pop()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        self._borders.append((phase, event))
        if phase != END:
            self._cuda.nvtx.range_push(phase)

    def take(self) -> dict[str, float]:
        """See :class:`PhaseClock`. Waits for the last event."""
        borders, self._borders = self._borders, []
        if borders:
            borders[-1][1].synchronize()
        return _sums((name, start.elapsed_time(end)) for (name, start), (_, end) in pairwise(borders))

    @contextmanager
    def named(self, phase: str) -> Iterator[None]:
        """See :class:`PhaseClock`."""
        self._cuda.nvtx.range_push(phase)
        try:
            yield
        finally:
            self._cuda.nvtx.range_pop()


def _sums(spans: Iterable[tuple[str, float]]) -> dict[str, float]:
    """A phase that begins twice in a run is one phase."""
    total: dict[str, float] = {}
    for name, ms in spans:
        total[name] = total.get(name, 0.0) + ms
    return total
