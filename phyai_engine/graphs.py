"""CUDA graphs of a model's phases: captured once at load for a list of shapes, replayed for every request.

What varies between requests of a shape stands in static device memory: the staged inputs, the start noise, the
guidance. It is written into pinned host memory and copied in one piece, on the stream of the graphs; the solver's part
is written while the device is at the prefix. Each phase that the model names is a graph, and each solver step: a
cancellation takes effect at a step's border, since at most one step waits behind the one that runs. All graphs share
one memory pool; every replay rewrites what it reads.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai_engine.errors import EngineError
from phyai_engine.models import Capturable
from phyai_engine.rtc import IDENTITY, Guidance, GuidanceBuffers, GuidanceMode
from phyai_engine.runner import PhaseCallback, Start
from phyai_engine.solvers import flow_step
from phyai_engine.types import BufferSpec, Row

_log = logging.getLogger(__name__)

_BUFFERS = [field.name for field in fields(GuidanceBuffers)]
_ALIGNED = 256  # bytes between the borders of staged arrays, as the allocator's


class Staging:
    """Arrays of one batch: numpy views of one pinned block, and tensors of its twin on the device.

    :param specs: name -> whole shape and dtype.
    """

    def __init__(self, specs: Mapping[str, BufferSpec], device: torch.device) -> None:
        places, size = {}, 0
        for name, spec in specs.items():
            bytes_ = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
            places[name] = (size, size + bytes_)
            size += -(-bytes_ // _ALIGNED) * _ALIGNED
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = _event() if device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        flat = self._host.numpy()
        self.host: dict[str, NDArray[Any]] = {}
        self.device: dict[str, Tensor] = {}
        for name, (begin, end) in places.items():
            spec = specs[name]
            self.host[name] = flat[begin:end].view(spec.dtype).reshape(spec.shape)
            self.device[name] = self._device[begin:end].view(getattr(torch, spec.dtype)).view(spec.shape)

    def open(self) -> dict[str, NDArray[Any]]:
        """The host's arrays, to be written: the last copy of them is done, also of a batch that was cancelled."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.host

    def capture(self, recorder: _Recorder) -> None:
        """Take the copy into a graph: torch asks for it later than a replay does, and the device waits."""
        self._graph = recorder.begin()
        self._copy()

    def copy_in(self) -> None:
        """Bring all arrays to the device."""
        if self._graph is None:
            self._copy()
        else:
            self._graph.replay()
        if self._copied is not None:
            self._copied.record()

    def _copy(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class CapturedShape:
    """One shape's buffers and graphs, and the batch that runs in them.

    :param shape: of the model. :param guidance: of the steps that rows with committed actions take.
    :param replay: False calls the model on the same buffers instead, without graphs: what
        a replay must equal bit for bit.
    """

    def __init__(self, model: Capturable, shape: Any, guidance: Guidance, *, pool: Any, replay: bool) -> None:
        self.shape = shape
        self._model, self._guidance, self._pool, self._replay = model, guidance, pool, replay
        spec = model.spec
        batch = (shape.batch, spec.horizon, spec.action_dim)
        starts = {name: BufferSpec(batch, "float32") for name in ("noise", "target", "weight")}
        starts["gain"] = BufferSpec((len(spec.times), shape.batch, 1, 1), "float32")
        starts["locked"] = BufferSpec((shape.batch, spec.horizon, 1), "bool")
        device = model.to_device(np.zeros(1, np.float32)).device
        self.inputs = Staging(model.staged(shape), device)
        self.starts = Staging(starts, device)
        self._buffers = GuidanceBuffers(**{name: self.starts.device[name] for name in _BUFFERS})
        self._host_actions = torch.zeros(batch, pin_memory=device.type == "cuda")
        self._phases: list[tuple[str, torch.cuda.CUDAGraph]] = []
        self._steps: dict[bool, list[torch.cuda.CUDAGraph]] = {False: [], True: []}
        # x before the first step and after each, and the velocities, of plain and of guided runs.
        self.x: dict[bool, list[Tensor]] = {}
        self.velocity: dict[bool, list[Tensor]] = {}
        self.prefix: Any = None
        self._guided = False
        self._ends = [_event() for _ in range(len(spec.times) + 1)] if device.type == "cuda" else []
        if replay:
            self._capture()

    def load(self, rows: Sequence[Row]) -> CapturedShape:
        """Write a batch's inputs into their staging."""
        self._model.stage(self.shape, [row.inputs for row in rows], self.inputs.open())
        return self

    def encode(self, on_phase: PhaseCallback) -> None:
        """See :class:`phyai_engine.runner.Batch`."""
        self.inputs.copy_in()
        if self._replay:
            for name, graph in self._phases:
                on_phase(name)
                graph.replay()
        else:
            self.prefix = self._model.encode(self.inputs.device, on_phase)
        if self._ends:
            self._ends[0].record()

    def start(self, start: Start) -> None:
        """See :class:`phyai_engine.runner.Batch`."""
        self._guided = start.buffers is not None
        host = self.starts.open()
        host["noise"][:] = start.noise
        if start.buffers is not None:
            for name in _BUFFERS:
                host[name][:] = getattr(start.buffers, name)
        self.starts.copy_in()
        if not self._replay:
            self._reset(self._guided)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """See :class:`phyai_engine.runner.Batch`. Waits until the step before the last one is done."""
        if self._ends and step:
            self._ends[step - 1].synchronize()
        if self._replay:
            self._steps[self._guided][step].replay()
        else:
            self._advance(step, self._guided)
        if self._ends:
            self._ends[step + 1].record()
        return self.x[self._guided][step], self.velocity[self._guided][step]

    def actions(self) -> NDArray[np.float32]:
        """See :class:`phyai_engine.runner.Batch`. A copy: the next batch writes over what the graphs hold."""
        self._host_actions.copy_(self.x[self._guided][-1], non_blocking=True)
        if self._ends:
            self._ends[-1].record()
            self._ends[-1].synchronize()
        copied: NDArray[np.float32] = self._host_actions.numpy().copy()
        return copied

    def keep_warm(self) -> None:
        """Replay the first phase on what stands in the buffers; the next batch writes over all of it."""
        if self._phases:
            self._phases[0][1].replay()
            torch.cuda.current_stream().synchronize()

    def _advance(self, step: int, guided: bool) -> None:
        x, buffers = self.x[guided][step], self._buffers if guided else None
        velocity, x = flow_step(self._model, self.prefix, x, step, self._model.spec.times, self._guidance, buffers)
        self.velocity[guided].append(velocity)
        self.x[guided].append(x)

    def _reset(self, guided: bool) -> None:
        self.x[guided], self.velocity[guided] = [self.starts.device["noise"]], []

    @torch.no_grad()
    def _capture(self) -> None:
        """Once outside a graph, so that kernels are compiled and libraries have their handles; then into graphs."""
        runs = (False,) if self._guidance.mode is GuidanceMode.NONE else (False, True)
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.prefix = self._model.encode(self.inputs.device, lambda _: None)
            for guided in runs:
                self._reset(guided)
                self._advance(0, guided)
            stream.synchronize()
            recorder = _Recorder(self._pool)

            def on_phase(name: str) -> None:
                self._phases.append((name, recorder.begin()))

            self.inputs.capture(recorder)
            self.prefix = self._model.encode(self.inputs.device, on_phase)
            for guided in runs:
                self._reset(guided)
                for step in range(len(self._model.spec.times)):
                    self._steps[guided].append(recorder.begin())
                    self._advance(step, guided)
            recorder.end()
        torch.cuda.current_stream().wait_stream(stream)


class _Recorder:
    """Captures into one graph after the other: beginning one ends the one before."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._open: torch.cuda.CUDAGraph | None = None

    def begin(self) -> torch.cuda.CUDAGraph:
        self.end()
        self._open = torch.cuda.CUDAGraph()
        # Another thread may use the device: the engine's, on its own model.
        self._open.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return self._open

    def end(self) -> None:
        if self._open is not None:
            self._open.capture_end()
        self._open = None


class Graphs:
    """The captured shapes of one model. For one batch at a time.

    :param batches: sizes of the batches that will come. :param guidance, replay: see :class:`CapturedShape`.
    :param shapes: which to capture instead of the model's own list.
    :raises EngineError: the accelerator's memory is too small for them.
    """

    def __init__(
        self,
        model: Capturable,
        batches: Sequence[int] = (1,),
        *,
        guidance: Guidance = IDENTITY,
        replay: bool = True,
        shapes: Sequence[Any] | None = None,
        progress: Callable[[str], None] = _log.info,
    ) -> None:
        self._model = model
        self.guidance = guidance
        wanted = model.captured_shapes(batches) if shapes is None else shapes
        began, before = time.perf_counter(), _free_bytes() if replay else 0
        pool = torch.cuda.graph_pool_handle() if replay else None
        self.shapes: list[CapturedShape] = []
        for shape in wanted:  # largest first: the others fit into its memory
            try:
                self.shapes.append(CapturedShape(model, shape, guidance, pool=pool, replay=replay))
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"the graphs of {len(wanted)} shapes do not fit into the accelerator's memory",
                    got=str(error).partition(". GPU")[0],
                    wanted=f"room for {shape}",
                    where=f"model {model.spec.family}",
                    do="End what else uses it (nvidia-smi), give fewer `prompt_buckets`, or choose `graphs: none`.",
                ) from None
        self.captures = len(self.shapes) if replay else 0
        self.seconds = time.perf_counter() - began
        self.bytes = before - _free_bytes() if replay else 0
        if self.captures:
            progress(f"captured {self.captures} shapes, {self.bytes / 2**20:.0f} MiB, {self.seconds:.1f} s")

    def batch(self, rows: Sequence[Row]) -> CapturedShape | None:
        """See :class:`phyai_engine.runner.Graphs`."""
        needed = self._model.shape_of([row.inputs for row in rows])
        fitting = [captured for captured in self.shapes if captured.shape.holds(needed)]
        return fitting[-1].load(rows) if fitting else None

    def keep_warm(self) -> None:
        """See :class:`phyai_engine.runner.Graphs`."""
        if self.shapes:
            self.shapes[-1].keep_warm()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _free_bytes() -> int:
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    return free
