"""The runner: rows in, action chunks out. Owns batching, solver state, guidance and cancellation.

No torch here; the model brings its own tensors, on which only arithmetic operators and indexing are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai_engine.errors import EngineError
from phyai_engine.models import Model
from phyai_engine.noise import standard_normal
from phyai_engine.rtc import IDENTITY, Guidance, GuidanceBuffers
from phyai_engine.solvers import StepCallback, euler_flow
from phyai_engine.types import F32, Row

NoiseSource = Callable[[int, int, int], F32]
PhaseCallback = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """The answer to one row.

    :param actions: [H, A] float32 in the model's normalised space; None if and only if ``cancelled``.
    :param prefix_ms: of the whole batch, as is ``denoise_ms``; NaN where the phase did not run.
    """

    actions: F32 | None
    cancelled: bool
    prefix_ms: float
    denoise_ms: float


class Runner:
    """Runs batches of rows, one batch at a time: not for concurrent calls.

    :param buckets: allowed batch sizes; a batch is padded to the next one by repeating its first row.
    :param on_step: called at each step with (step, x [B,H,A], velocity [B,H,A]): device arrays, padded.
    :param noise: (seed, H, A) -> [H, A] float32 start noise.
    :param on_phase: called as each phase begins: ``copy_in``, the model's own (``vision``, ``prefix``), ``step 0`` and
        so on, ``copy_out``, and ``end``. Nothing waits for the device at a phase's border.
    :param guidance: how rows that carry committed actions continue them.
    """

    def __init__(
        self,
        model: Model,
        buckets: Sequence[int] = (1, 2, 4, 8),
        on_step: StepCallback | None = None,
        noise: NoiseSource = standard_normal,
        on_phase: PhaseCallback = lambda _: None,
        guidance: Guidance = IDENTITY,
    ) -> None:
        self.model = model
        self.guidance = guidance
        self.buckets = tuple(sorted(set(buckets)))
        self._on_step = on_step
        self._noise = noise
        self._on_phase = on_phase
        if not self.buckets or self.buckets[0] < 1:
            raise EngineError("no usable batch sizes", got=list(buckets), wanted="at least one number >= 1")

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
            return [_cancelled(float("nan"), float("nan")) for _ in rows]
        padded = [*rows, *[rows[0]] * (size - len(rows))]

        started = time.perf_counter()
        self._on_phase("copy_in")
        inputs = {name: self._stack([row.inputs[name] for row in padded]) for name in self.model.spec.inputs}
        prefix = self.model.prefix(inputs, self._on_phase)
        encoded = time.perf_counter()
        x = self._denoise(prefix, padded, rows)
        self._on_phase("copy_out")
        actions = None if x is None else self._to_host(x, size)
        self._on_phase("end")
        finished = time.perf_counter()

        prefix_ms, denoise_ms = (encoded - started) * 1e3, (finished - encoded) * 1e3
        return [
            _cancelled(prefix_ms, denoise_ms)
            if actions is None or row.cancel.cancelled
            else RowResult(actions[i].copy(), False, prefix_ms, denoise_ms)
            for i, row in enumerate(rows)
        ]

    def _denoise(self, prefix: Any, padded: Sequence[Row], rows: Sequence[Row]) -> Any:
        """The solver loop; None once every real row is cancelled."""
        spec = self.model.spec

        def goes_on(step: int) -> bool:
            if all(row.cancel.cancelled for row in rows):
                return False
            self._on_phase(f"step {step}")
            return True

        x = self._stack([self._noise(row.seed, spec.horizon, spec.action_dim) for row in padded])
        buffers = self._buffers(padded)
        return euler_flow(
            self.model, prefix, x, spec.times, self.guidance, buffers, goes_on=goes_on, on_step=self._on_step
        )

    def _buffers(self, padded: Sequence[Row]) -> GuidanceBuffers | None:
        """What guides the batch; None where no row asks for it, which saves the gradient and changes no bit."""
        if not any(self.guidance.reads(row).any() for row in padded):
            return None
        return GuidanceBuffers.of(self.guidance, padded).to(self.model.to_device)

    def _stack(self, arrays: Sequence[NDArray[Any]]) -> Any:
        return self.model.to_device(np.stack(arrays))

    def _to_host(self, x: Any, size: int) -> F32:
        spec = self.model.spec
        actions = np.asarray(self.model.to_host(x))
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


def _cancelled(prefix_ms: float, denoise_ms: float) -> RowResult:
    return RowResult(None, True, prefix_ms, denoise_ms)
