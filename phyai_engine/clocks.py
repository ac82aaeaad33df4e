"""Clocks of the runner's phases, on the host or by CUDA events: told as each phase begins, read after the run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from phyai_engine.models import Model

END = "end"


class PhaseClock(Protocol):
    """What measures the phases of a run."""

    def __call__(self, phase: str) -> None:
        """A phase begins; ``end`` closes the last one."""

    def take(self) -> dict[str, float]:
        """Phase -> duration [ms] since the last call, in order of their start. Waits for the last phase's end."""

    def drop(self) -> None:
        """Forget a run that was not finished, without waiting."""

    def named(self, phase: str) -> AbstractContextManager[None]:
        """A range that a profiler shows under this name, for what happens outside the runner."""


class HostClock:
    """For models on the CPU, whose calls return when the work is done."""

    def __init__(self) -> None:
        self._borders: list[tuple[str, int]] = []

    def __call__(self, phase: str) -> None:
        self._borders.append((phase, time.perf_counter_ns()))

    def drop(self) -> None:
        """See :class:`PhaseClock`."""
        self._borders = []

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
    Events are kept for the next run: to make one takes longer than to record it, while the device waits.
    """

    def __init__(self, cuda: Any) -> None:
        """:param cuda: torch.cuda, which this module does not import."""
        self._cuda = cuda
        self._events: list[Any] = []
        self._borders: list[tuple[str, Any]] = []

    def __call__(self, phase: str) -> None:
        if self._borders and self._borders[-1][0] != END:
            self._cuda.nvtx.range_pop()
        if len(self._borders) == len(self._events):
            self._events.append(self._cuda.Event(enable_timing=True))
        event = self._events[len(self._borders)]
        event.record()
        self._borders.append((phase, event))
        if phase != END:
            self._cuda.nvtx.range_push(phase)

    def drop(self) -> None:
        """See :class:`PhaseClock`."""
        if self._borders and self._borders[-1][0] != END:
            self._cuda.nvtx.range_pop()
        self._borders = []

    def take(self) -> dict[str, float]:
        """See :class:`PhaseClock`."""
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


def device_of(model: Model) -> str:
    """torch's name of where a model computes; ``cpu`` for models without torch."""
    return str(getattr(model.to_device(np.zeros(1, dtype=np.float32)), "device", "cpu"))


def clock_of(model: Model) -> PhaseClock:
    """What times the phases where a model computes."""
    on_cuda = device_of(model).startswith("cuda")
    return CudaClock(importlib.import_module("torch").cuda) if on_cuda else HostClock()
