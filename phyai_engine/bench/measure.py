"""Runs a policy and times its phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phyai_engine.bench.result import ChunkCheck, Figures, WarmUp
from phyai_engine.clocks import PhaseClock
from phyai_engine.errors import EngineError
from phyai_engine.policy import Policy
from phyai_engine.runner import STEP, RowResult, Runner
from phyai_engine.types import F32, Request

OUTSIDE = ("encode", "decode")  # what happens on the host around the runner


@dataclass(frozen=True, slots=True)
class Run:
    """One request's answer. :param phases: in order -> ms. :param shapes: of the model's chunk, of the robot's."""

    phases: dict[str, float]
    end_to_end_ms: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    finite: bool


class Bench:
    """One policy, prepared for timing. The runner is its own: one row, with a clock at the phases' borders.

    :param requests: run's index -> request.
    """

    def __init__(self, policy: Policy, requests: Callable[[int], Request], clock: PhaseClock) -> None:
        self._adapter = policy.adapter
        self._requests = requests
        self._clock = clock
        own = policy.runner
        self._runner = Runner(own.model, buckets=(1,), clock=clock, guidance=own.guidance, graphs=own.graphs)
        self._count = 0

    def run(self) -> Run:
        """Time the next request.

        :raises PhyaiError: the policy cannot answer.
        """
        request = self._requests(self._count)
        self._count += 1
        began = time.perf_counter_ns()
        with self._clock.named("encode"):
            row = self._adapter.encode(request)
        encoded = time.perf_counter_ns()
        result = self._runner.run([row])[0]
        answered = time.perf_counter_ns()
        if result.actions is None:
            raise EngineError("a run without actions", got="cancelled", wanted="a chunk")
        return self._finish(request, result, began, encoded, answered)

    def _finish(self, request: Request, result: RowResult, began: int, encoded: int, answered: int) -> Run:
        actions: F32 = np.asarray(result.actions)
        with self._clock.named("decode"):
            chunk = self._adapter.decode(actions, request)
        ended = time.perf_counter_ns()
        phases = {
            "encode": (encoded - began) / 1e6,
            **result.phases,
            "decode": (ended - answered) / 1e6,
        }
        finite = bool(np.isfinite(actions).all() and np.isfinite(chunk).all())
        return Run(phases, (ended - began) / 1e6, (actions.shape, chunk.shape), finite)


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of a measurement. :param warm_up: not counted. :param counted: at least one."""

    warm_up: list[Run]
    counted: list[Run]

    def phases(self) -> dict[str, Figures]:
        """Each phase of the counted runs."""
        return {name: Figures.of([run.phases[name] for run in self.counted]) for name in self.counted[0].phases}

    def steps(self) -> Figures:
        """All denoising steps as one sample."""
        return Figures.of([ms for run in self.counted for name, ms in run.phases.items() if name.startswith(STEP)])

    def steps_sum(self) -> Figures:
        """The denoising steps of a run together."""
        return Figures.of([sum(ms for name, ms in run.phases.items() if name.startswith(STEP)) for run in self.counted])

    def model(self) -> Figures:
        """The runner's phases of a run together: all but pre- and post-processing."""
        sums = [sum(ms for name, ms in run.phases.items() if name not in OUTSIDE) for run in self.counted]
        return Figures.of(sums)

    def end_to_end(self) -> Figures:
        """From the observation to the chunk in robot units."""
        return Figures.of([run.end_to_end_ms for run in self.counted])

    def warm_up_ms(self) -> WarmUp:
        """The runs before."""
        times = [run.end_to_end_ms for run in self.warm_up]
        return WarmUp(first_ms=times[0] if times else None, others_ms=tuple(times[1:]))

    def chunk(self) -> ChunkCheck:
        """The answers of all runs."""
        runs = [*self.warm_up, *self.counted]
        model, robot = runs[0].shapes
        return ChunkCheck(model=model, robot=robot, not_finite=sum(not run.finite for run in runs), runs=len(runs))


def measure(bench: Bench, *, warm_up: int, n: int, each: Callable[[], None] = lambda: None) -> Measured:
    """Time ``warm_up + n`` runs. :param each: called after each."""

    def some(count: int) -> list[Run]:
        runs = []
        for _ in range(count):
            runs.append(bench.run())
            each()
        return runs

    return Measured(some(warm_up), some(n))
