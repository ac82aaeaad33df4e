"""The runner: rows in, action chunks out. Owns batching, solver state, guidance and cancellation.

No torch here; the model brings its own tensors, on which only arithmetic operators and indexing are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phyai_engine.clocks import END, PhaseClock, clock_of
from phyai_engine.errors import EngineError
from phyai_engine.models import Model
from phyai_engine.noise import standard_normal
from phyai_engine.rtc import IDENTITY, Guidance, GuidanceBuffers
from phyai_engine.solvers import StepCallback, flow_step, hold_prefix
from phyai_engine.types import F32, Row

BUCKETS = (1, 2, 4, 8)
"""Sizes of a batch, where nobody says which will come."""

NoiseSource = Callable[[int, int, int], F32]
PhaseCallback = Callable[[str], None]
STEP = "step "


class Start(NamedTuple):
    """What the solver begins with, on the host.

    :param noise: [B, H, A], its first actions locked where the guidance does that.
    :param buffers: what guides the batch; None where no row asks for it, which saves the gradient and changes no bit.
    """

    noise: F32
    buffers: GuidanceBuffers | None


class Batch(Protocol):
    """One batch under way on the device, one call after the other: ``encode``, ``start``, each step, ``actions``."""

    def encode(self, on_phase: PhaseCallback) -> None:
        """Copy the inputs in and compute the prefix; a device may still be at it on return."""

    def start(self, start: Start) -> None:
        """Copy in what the solver begins with."""

    def step(self, step: int) -> tuple[Any, Any]:
        """One solver step. :return: x before it [B, H, A], and the velocity that it applied, device arrays."""

    def actions(self) -> Any:
        """x after the last step, a host array [B, H, A]."""


class Graphs(Protocol):
    """Captured shapes of a model (graphs.py).

    :ivar guidance: of the captured steps.
    """

    guidance: Guidance

    def batch(self, rows: Sequence[Row]) -> Batch | None:
        """The batch in the smallest captured shape that holds it, None if none does. Valid until the next one."""

    def keep_warm(self) -> None:
        """Something short on the device, of which nothing is read; waits until it is done. Not during a batch."""


class _PlainBatch:
    """Calls the model as it is: on the CPU, and where no captured shape fits."""

    def __init__(self, model: Model, rows: Sequence[Row], guidance: Guidance) -> None:
        self._model, self._rows, self._guidance = model, rows, guidance
        self._prefix: Any = None
        self._x: Any = None
        self._buffers: GuidanceBuffers | None = None

    def encode(self, on_phase: PhaseCallback) -> None:
        put = self._model.to_device
        inputs = {name: put(np.stack([row.inputs[name] for row in self._rows])) for name in self._model.spec.inputs}
        self._prefix = self._model.prefix(inputs, on_phase)

    def start(self, start: Start) -> None:
        put = self._model.to_device
        self._x = put(start.noise)
        self._buffers = start.buffers and start.buffers.to(put)

    def step(self, step: int) -> tuple[Any, Any]:
        x, times = self._x, self._model.spec.times
        velocity, self._x = flow_step(self._model, self._prefix, x, step, times, self._guidance, self._buffers)
        return x, velocity

    def actions(self) -> Any:
        return self._model.to_host(self._x)


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """The answer to one row.

    :param actions: [H, A] float32 in the model's normalised space; None if and only if ``cancelled``.
    :param phases: of the whole batch, in order -> ms; empty where the batch was ended before its last step.
    """

    actions: F32 | None
    cancelled: bool
    phases: Mapping[str, float]

    @property
    def prefix_ms(self) -> float:
        """All before the first step; NaN without phases."""
        return self._until_steps()[0]

    @property
    def denoise_ms(self) -> float:
        """The steps, and bringing their result back; NaN without phases."""
        return self._until_steps()[1]

    def _until_steps(self) -> tuple[float, float]:
        if not self.phases:
            return math.nan, math.nan
        names = list(self.phases)
        first = next((i for i, name in enumerate(names) if name.startswith(STEP)), len(names))
        durations = list(self.phases.values())
        return sum(durations[:first]), sum(durations[first:])


class Runner:
    """Runs batches of rows, one batch at a time: not for concurrent calls.

    :param buckets: allowed batch sizes; a batch is padded to the next one by repeating its first row.
    :param on_step: called at each step with (step, x [B,H,A], velocity [B,H,A]): device arrays, padded.
    :param noise: (seed, H, A) -> [H, A] float32 start noise.
    :param clock: told as each phase begins: ``stage`` (the host writes where the device copies from), ``copy_in``, the
        model's own (``vision``, ``prefix``), ``step 0`` and so on, ``copy_out``, and ``end``. Nothing waits for the
        device at a phase's border. None takes the one that fits where the model computes.
    :param guidance: how rows that carry committed actions continue them.
    :param graphs: captured shapes of the model, with the same guidance; what fits none of them runs without.
    :raises EngineError: no batch size, or graphs of another guidance.
    """

    def __init__(
        self,
        model: Model,
        buckets: Sequence[int] = BUCKETS,
        on_step: StepCallback | None = None,
        noise: NoiseSource = standard_normal,
        clock: PhaseClock | None = None,
        guidance: Guidance = IDENTITY,
        graphs: Graphs | None = None,
    ) -> None:
        self.model = model
        self.guidance = guidance
        self.graphs = graphs
        self.buckets = tuple(sorted(set(buckets)))
        self._on_step = on_step
        self._noise = noise
        self._clock = clock_of(model) if clock is None else clock
        if not self.buckets or self.buckets[0] < 1:
            raise EngineError("no usable batch sizes", got=list(buckets), wanted="at least one number >= 1")
        if graphs is not None and graphs.guidance != guidance:
            raise EngineError(
                "the graphs hold another guidance", got=graphs.guidance, wanted=guidance, do="Capture them with it."
            )

    def run(self, rows: Sequence[Row]) -> list[RowResult]:
        """Infer one chunk per row; results in the rows' order.

        A row whose token is set by the end of the last step is reported cancelled and carries no actions;
        the loop ends early only when that holds for all rows.

        :raises EngineError: too many rows, or a row that does not fit the model's spec.
        """
        size = self._bucket(len(rows))
        for i, row in enumerate(rows):
            self._check(row, i)
        if all(row.cancel.cancelled for row in rows):
            return [_CANCELLED for _ in rows]
        padded = [*rows, *[rows[0]] * (size - len(rows))]

        self._clock.drop()
        self._clock("stage")
        batch = self.graphs.batch(padded) if self.graphs is not None else None
        batch = batch or _PlainBatch(self.model, padded, self.guidance)
        self._clock("copy_in")
        batch.encode(self._clock)
        batch.start(self._start(padded))  # made while a device is at the prefix
        actions = self._denoise(batch, rows, size)
        if actions is None:  # the device may still be at a step: whoever cancels does not wait for it
            return [_CANCELLED for _ in rows]
        self._clock(END)
        phases = self._clock.take()
        return [
            _CANCELLED if row.cancel.cancelled else RowResult(actions[i].copy(), False, phases)
            for i, row in enumerate(rows)
        ]

    def _denoise(self, batch: Batch, rows: Sequence[Row], size: int) -> F32 | None:
        """The solver loop; None once every real row is cancelled."""
        for step in range(len(self.model.spec.times)):
            if all(row.cancel.cancelled for row in rows):
                return None
            self._clock(f"{STEP}{step}")
            x, velocity = batch.step(step)
            if self._on_step is not None:
                self._on_step(step, x, velocity)
        self._clock("copy_out")
        return self._checked(batch.actions(), size)

    def _start(self, padded: Sequence[Row]) -> Start:
        spec, guided = self.model.spec, any(self.guidance.reads(row).any() for row in padded)
        buffers = GuidanceBuffers.of(self.guidance, padded) if guided else None
        noise = np.stack([self._noise(row.seed, spec.horizon, spec.action_dim) for row in padded])
        return Start(hold_prefix(noise, self.guidance, buffers), buffers)

    def _checked(self, host: Any, size: int) -> F32:
        spec = self.model.spec
        actions = np.asarray(host)
        wanted = (size, spec.horizon, spec.action_dim)
        if actions.shape != wanted or actions.dtype != np.float32:
            raise EngineError(
                "the model returned the wrong array",
                got=f"{actions.dtype} {list(actions.shape)}",
                wanted=f"float32 {list(wanted)}",
                where=f"model {spec.family}",
            )
        return actions

    def _bucket(self, count: int) -> int:
        for size in self.buckets:
            if 1 <= count <= size:
                return size
        raise EngineError("the batch does not fit", got=f"{count} rows", wanted=f"1 to {self.buckets[-1]}")

    def _check(self, row: Row, index: int) -> None:
        spec = self.model.spec
        where = f"row {index}"
        if row.inputs.keys() != spec.inputs.keys():
            raise EngineError("wrong inputs", got=sorted(row.inputs), wanted=sorted(spec.inputs), where=where)
        for name, buffer in spec.inputs.items():
            _check_array(row.inputs[name], buffer.shape, buffer.dtype, f"{where}, input {name!r}")
        chunk = (spec.horizon, spec.action_dim)
        guidance: Mapping[str, tuple[F32, tuple[int, ...]]] = {
            "target": (row.target, chunk),
            "weight": (row.weight, chunk),
            "gain": (row.gain, (len(spec.times),)),
        }
        for name, (array, shape) in guidance.items():
            _check_array(array, shape, "float32", f"{where}, {name}")
        for name, array in (
            ("weight", row.weight),
            ("gain", row.gain),
            ("target", row.target[self.guidance.reads(row)]),
        ):
            if not np.isfinite(array).all():
                raise EngineError(f"{name} is not finite", where=where, do="Give weight 0 where there is no target.")
        longest = min(spec.horizon, self.guidance.max_delay or spec.horizon)
        if not 0 <= row.delay_steps <= longest:
            raise EngineError(
                "the delay is beyond what the policy can continue",
                got=f"{row.delay_steps} steps",
                wanted=f"0 to {longest}",
                where=where,
                do="Reduce the delay (a faster model, a longer control period), or choose `rtc: {guidance: vjp}`.",
            )


def _check_array(array: NDArray[Any], shape: tuple[int, ...], dtype: str, where: str) -> None:
    if array.shape != shape or array.dtype != np.dtype(dtype):
        raise EngineError(
            "an array does not fit the model",
            got=f"{array.dtype} {list(array.shape)}",
            wanted=f"{dtype} {list(shape)}",
            where=where,
        )


_CANCELLED = RowResult(None, True, {})
