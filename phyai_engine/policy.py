"""load_policy: a robot file and a model file -> Policy, which turns requests into chunks."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import numpy as np

from phyai_engine.adapter import Adapter
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import CancelledError, ConfigError, EngineError, PhyaiError, RefusalError
from phyai_engine.models import Capturable, Model
from phyai_engine.rtc import Guidance
from phyai_engine.runner import BUCKETS, Graphs, RowResult, Runner
from phyai_engine.types import (
    CancelToken,
    Chunk,
    Committed,
    ModelSpec,
    Observation,
    Refusal,
    Request,
    Row,
    StageTimings,
)
from phyai_engine.weights.checkpoint import swapped_cameras

_log = logging.getLogger(__name__)

Answer = Chunk | PhyaiError


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Where a family's class is; imported on demand, so that no torch is needed for the fake model.

    :param untrained: the note shown while the model file names no checkpoint.
    :param options: ``module:name`` of the struct of its options, which needs no torch and has an ``image_size``.
    """

    module: str
    name: str
    untrained: str
    options: str


_FAKE_OPTIONS = "phyai_engine.models.fake:FakeOptions"
_PI_OPTIONS = "phyai_engine.models.pi_options:PiOptions"
_RANDOM = "seeded random weights: its motions mean nothing"

MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "pi0": ModelEntry("phyai_engine.models.pi", "PiModel", _RANDOM, _PI_OPTIONS),
        "pi05": ModelEntry("phyai_engine.models.pi", "PiModel", _RANDOM, _PI_OPTIONS),
        "fake": ModelEntry("phyai_engine.models.fake", "FakeModel", "no weights: synthetic motion", _FAKE_OPTIONS),
    }
)
"""Model families. A class has ``load(config: ModelConfig) -> Model``."""

# Warm-up needs images of some size before any camera was seen; the resize is not what warming up is for.
_WARM_UP_IMAGE = (480, 640, 3)


def load_policy(robot: RobotConfig, model: ModelConfig, batches: Sequence[int] = ()) -> Policy:
    """Load the weights and join them with the robot.

    :param batches: sizes of the batches that will come; empty: single requests, and what the runner allows.

    :raises ConfigError: unknown family, wrong options, or robot and model do not fit.
    :raises WeightsError: the checkpoint does not hold what the model needs.
    """
    entry = MODELS.get(model.family)
    if entry is None:
        raise ConfigError(
            f"unknown model family {model.family!r}", wanted=f"one of {', '.join(MODELS)}", where="family"
        )
    loaded: Model = getattr(importlib.import_module(entry.module), entry.name).load(model)
    for swap in swapped_cameras(robot, loaded.spec.cameras):
        _log.warning("%s", swap)
    guidance = model.rtc.guide
    graphs = captured_graphs(loaded, guidance, batches or (1,))
    runner = Runner(loaded, batches or BUCKETS, guidance=guidance, graphs=graphs)
    return Policy(Adapter(robot, model, loaded.spec), runner, weights_note(model))


def arrival_size(model: ModelConfig) -> int:
    """Side of the square to which images may be resized before the engine sees them; 0: not, whatever is wrong is the
    engine's to say. The ``float`` resampler does not end in bytes. Loads no weights and no torch.
    """
    entry = MODELS.get(model.family)
    if entry is None or model.resize != "pillow":
        return 0
    module, name = entry.options.split(":")
    size = model.options.get("image_size", getattr(importlib.import_module(module), name)().image_size)
    return size if isinstance(size, int) else 0


def weights_note(model: ModelConfig) -> str:
    """What the weights of a model of a known family are, for people to read."""
    return f"{model.family}, {model.checkpoint or MODELS[model.family].untrained}"


def captured_graphs(model: Model, guidance: Guidance, batches: Sequence[int] = (1,)) -> Graphs | None:
    """The model's graphs where it computes with some; captured here, before any request.

    :raises EngineError: the accelerator's memory is too small for them.
    """
    if not isinstance(model, Capturable) or not model.captured_shapes(batches):
        return None
    graphs: Graphs = importlib.import_module("phyai_engine.graphs").Graphs(model, batches, guidance=guidance)
    return graphs


class Policy:
    """Observation -> chunk for one model and its robots: that of ``adapter``, slot 0, and those that joined.

    One ``infer`` at a time; ``join`` and ``leave`` may come meanwhile, from another thread.

    :param note: what the weights are, for people to read.
    """

    def __init__(self, adapter: Adapter, runner: Runner, note: str) -> None:
        self.adapter = adapter
        self.runner = runner
        self.note = note
        self._adapters = {0: adapter}
        self._kinds: dict[RobotConfig, Adapter] = {}  # without their ids: robots of one kind share a tokenizer

    @property
    def spec(self) -> ModelSpec:
        """What the model declares."""
        return self.adapter.spec

    def join(self, slot: int, robot: RobotConfig) -> None:
        """Take requests with this slot from ``robot``.

        :raises ConfigError: it does not fit the model.
        """
        kind = msgspec.structs.replace(robot, robot_id=self.adapter.robot.robot_id)
        if kind not in self._kinds:
            self._kinds[kind] = self.adapter if kind == self.adapter.robot else self.adapter.of(kind)
        self._adapters[slot] = self._kinds[kind]

    def leave(self, slot: int) -> None:
        """That robot is gone; its kind stays, for the next one."""
        self._adapters.pop(slot, None)

    def infer(self, requests: Sequence[Request], cancels: Sequence[CancelToken] | None = None) -> list[Answer]:
        """One answer per request, in order; an error of one never loses the others.

        :returns: a Chunk, or a RefusalError (the observation or the result is unusable), a CancelledError,
            or an EngineError (the model or the adapter raised).
        """
        began = time.monotonic_ns()  # of every row: each waits for all of them
        answers: list[Answer | None] = [None] * len(requests)
        rows: dict[int, tuple[Row, float]] = {}
        for i, request in enumerate(requests):
            started = time.monotonic_ns()
            try:
                row = self._adapter(request).encode(request, None if cancels is None else cancels[i])
            except Exception as error:  # also a defect: the other rows must not pay for it
                answers[i] = _as_engine_error(error, "the adapter")
            else:
                rows[i] = row, _ms_since(started)
        results = self._run([row for row, _ in rows.values()])
        for (i, (_, encode_ms)), result in zip(rows.items(), results, strict=True):
            try:
                answers[i] = self._answer(requests[i], result, encode_ms, began)
            except Exception as error:
                answers[i] = _as_engine_error(error, "the adapter")
        return [answer for answer in answers if answer is not None]

    def warm_up(self, count: int = 2, rows: int = 1) -> list[float]:
        """Run at real shapes, so that the first real request meets no first-use cost; every second is guided.

        :param rows: of each batch.
        :returns: duration of each, ms.
        :raises PhyaiError: the model cannot answer.
        """
        durations = []
        for i in range(count):
            started = time.monotonic_ns()
            answers = self.infer([self._synthetic(guided=i % 2 == 1)] * rows)
            durations.append(_ms_since(started))
            for answer in answers:
                if isinstance(answer, PhyaiError):
                    raise answer
        return durations

    def keep_warm(self) -> None:
        """A short piece of work where the model computes; nothing where it has no graphs. Not during ``infer``."""
        if self.runner.graphs is not None:
            self.runner.graphs.keep_warm()

    def _adapter(self, request: Request) -> Adapter:
        adapter = self._adapters.get(request.slot)
        if adapter is None:
            raise EngineError("no robot has joined in this slot", got=request.slot)
        return adapter

    def _run(self, rows: list[Row]) -> list[RowResult | PhyaiError]:
        """The rows in batches that the runner takes. A batch that fails is tried again row by row."""
        results: list[RowResult | PhyaiError] = []
        size = self.runner.buckets[-1]
        for first in range(0, len(rows), size):
            batch = rows[first : first + size]
            try:
                results += self.runner.run(batch)
            except Exception as error:  # whatever a model raises is an answer, not the end of the engine
                if len(batch) > 1:
                    results += [result for row in batch for result in self._run([row])]
                else:
                    results.append(_as_engine_error(error, "the model"))
        return results

    def _answer(self, request: Request, result: RowResult | PhyaiError, encode_ms: float, began: int) -> Answer:
        if isinstance(result, PhyaiError):
            return result
        if result.cancelled or result.actions is None:
            return CancelledError(f"request {request.chunk_id} of epoch {request.epoch} was cancelled")
        started = time.monotonic_ns()
        adapter = self._adapter(request)
        actions = adapter.decode(result.actions, request)
        finite = np.isfinite(actions)
        if not finite.all():
            step, column = (int(index) for index in np.argwhere(~finite)[0])
            name = adapter.robot.action_names[column]
            return RefusalError(
                Refusal.NOT_FINITE,
                f"action {name} is not finite",
                got=actions[step, column],
                where=f"step {step}",
            )
        timings = StageTimings(
            encode_ms=encode_ms,
            prefix_ms=result.prefix_ms,
            denoise_ms=result.denoise_ms,
            decode_ms=_ms_since(started),
            inference_ms=_ms_since(began),
        )
        return Chunk(epoch=request.epoch, chunk_id=request.chunk_id, actions=actions, timings=timings)

    def _synthetic(self, *, guided: bool) -> Request:
        robot = self.adapter.robot
        count = len(robot.state)
        grey = np.full(_WARM_UP_IMAGE, 128, dtype=np.uint8)
        seen = Observation(
            images={camera.name: grey for camera in robot.cameras},
            state=np.zeros(count),
            velocity=np.zeros(count),
            instruction="warm up",
            oldest_ros_ns=0,
            newest_ros_ns=0,
            capture_mono_ns=0,
            snapshot_mono_ns=0,
        )
        half = max(1, self.spec.horizon // 2)
        committed = Committed(np.zeros((half, len(robot.actions))), delay_steps=1, execution_steps=half)
        return Request(0, 0, seen, committed if guided else None, seed=0, remaining_ms=float("nan"))


def _as_engine_error(error: Exception, who: str) -> PhyaiError:
    if isinstance(error, PhyaiError):
        return error
    wrapped = EngineError(f"{who} raised {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _ms_since(start_ns: int) -> float:
    return (time.monotonic_ns() - start_ns) / 1e6
