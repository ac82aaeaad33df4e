"""The one thread that owns the policy, and its mailbox of size 1."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import EngineError, PhyaiError, RefusalError
from phyai_engine.serve.protocol import Phase
from phyai_engine.types import CancelToken, Chunk, ModelSpec, Refusal, Request

_TEXT_LENGTH = 4000
_log = logging.getLogger(__name__)


class EnginePolicy(Protocol):
    """What the worker needs of a policy; :class:`phyai_engine.policy.Policy` is one."""

    @property
    def spec(self) -> ModelSpec:
        """What the model declares."""
        ...

    @property
    def note(self) -> str:
        """The model's own text for the screen."""
        ...

    def infer(self, requests: Sequence[Request], cancels: Sequence[CancelToken]) -> Sequence[Chunk | PhyaiError]:
        """One result per request."""
        ...

    def warm_up(self, count: int) -> Sequence[float]:
        """Durations of ``count`` inferences at real shapes, in ms."""
        ...

    def keep_warm(self) -> None:
        """A short piece of work, so that the accelerator keeps its clock; asked for only where a model file does."""
        ...


Load = Callable[[RobotConfig, ModelConfig], EnginePolicy]


def load_policy_lazily(robot: RobotConfig, model: ModelConfig) -> EnginePolicy:
    """The shipped ``load_policy``; imported here, in the compute thread, while heartbeats go on."""
    from phyai_engine.policy import load_policy  # noqa: PLC0415 - see above

    return load_policy(robot, model)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as it travels."""

    error_type: str
    text: str
    refusal: Refusal = Refusal.NONE


@dataclass(slots=True, eq=False)
class Work:
    """One request on the engine's side; ``result`` is set when it is posted."""

    request: Request
    received_ns: int
    token: CancelToken = field(default_factory=CancelToken)
    result: Chunk | Failure | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Loading ended: what the hello reply needs, or why it failed."""

    horizon: int = 0
    note: str = ""
    warm_up_ms: tuple[float, ...] = ()
    failure: Failure | None = None


class Compute:
    """Loads, warms up and runs a policy in one thread.

    :param post: takes every outcome; called in the compute thread.
    :param action_dim: A of the robot, against which chunks are checked.
    """

    def __init__(self, post: Callable[[Ready | Work], None], action_dim: int, threads: int) -> None:
        self._post, self._action_dim, self._threads = post, action_dim, threads
        self._condition = threading.Condition()
        self._queued: Work | None = None
        self._current: Work | None = None
        self._phase: Phase = "loading"
        self._stopping = False
        self._keep_warm_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self, load: Callable[[], EnginePolicy], warm_up_count: int, keep_warm_s: float = 0.0) -> None:
        """Start the thread; it posts one Ready, then one Work per request put.

        :param keep_warm_s: time between two ``keep_warm`` while nothing is asked; 0 = never.
        """
        self._keep_warm_s = keep_warm_s
        self._thread = threading.Thread(target=self._run, args=(load, warm_up_count), name="phyai-compute", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> Work | None:
        """Queue a request; the one it replaces is returned and will not be posted."""
        with self._condition:
            replaced, self._queued = self._queued, work
            self._condition.notify()
            return replaced

    def cancel(self, epoch: int) -> Work | None:
        """Mark the running request if its epoch is at most ``epoch``; drop and return a queued one."""
        with self._condition:
            if self._current is not None and self._current.request.epoch <= epoch:
                self._current.token.cancel()
            if self._queued is not None and self._queued.request.epoch <= epoch:
                dropped, self._queued = self._queued, None
                return dropped
            return None

    def status(self) -> tuple[Phase, int, int]:
        """Phase, and epoch and chunk_id of the running inference (0 when there is none)."""
        with self._condition:
            request = self._current and self._current.request
            return (self._phase, request.epoch, request.chunk_id) if request else (self._phase, 0, 0)

    @property
    def died(self) -> bool:
        """True when the thread ended by itself: nothing will be posted any more."""
        return self._thread is not None and not self._thread.is_alive() and not self._stopping

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs and join; False when the thread is still inside the policy."""
        with self._condition:
            self._stopping = True
            self._queued = None
            if self._current is not None:
                self._current.token.cancel()
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self, load: Callable[[], EnginePolicy], warm_up_count: int) -> None:
        try:
            policy = load()
            # torch keeps its thread count per thread, so it is set here and not in main.
            if self._threads and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(self._threads)
            self._set_phase("warming")
            warm_up_ms = tuple(float(ms) for ms in policy.warm_up(warm_up_count))
            ready = Ready(policy.spec.horizon, policy.note, warm_up_ms)
        except BaseException as error:  # also SystemExit: a model must not end the engine silently
            self._post(Ready(failure=_failure(error)))
            return
        self._set_phase("idle")
        self._post(ready)
        while (work := self._next(policy)) is not None:
            work.result = self._infer(policy, work)
            with self._condition:
                self._current, self._phase = None, "idle"
            self._post(work)

    def _set_phase(self, phase: Phase) -> None:
        with self._condition:
            self._phase = phase

    def _next(self, policy: EnginePolicy) -> Work | None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or self._queued is not None, self._keep_warm_s or None)
                if self._stopping:
                    return None
                if self._queued is not None:
                    self._current, self._queued, self._phase = self._queued, None, "busy"
                    return self._current
            self._keep_warm(policy)  # without the lock: a request is taken meanwhile, and waits a millisecond or two

    def _keep_warm(self, policy: EnginePolicy) -> None:
        try:
            policy.keep_warm()
        except Exception:  # what is wrong with the device is the next request's to say
            _log.exception("keeping the accelerator warm failed; it is not tried again")
            self._keep_warm_s = 0.0

    def _infer(self, policy: EnginePolicy, work: Work) -> Chunk | Failure:
        started_ns = time.monotonic_ns()
        try:
            results = policy.infer([work.request], [work.token])
            inference_ms = (time.monotonic_ns() - started_ns) / 1e6
            chunk = self._only_chunk(results, work.request, policy.spec.horizon)
        except BaseException as error:  # also SystemExit: the worker survives whatever the model raises
            return _failure(error)
        queue_ms = (started_ns - work.received_ns) / 1e6
        timings = replace(chunk.timings, queue_ms=queue_ms)
        if np.isnan(timings.inference_ms):
            timings = replace(timings, inference_ms=inference_ms)
        return replace(chunk, timings=timings)

    def _only_chunk(self, results: Sequence[Chunk | PhyaiError], request: Request, horizon: int) -> Chunk:
        if not isinstance(results, Sequence) or len(results) != 1:
            raise EngineError("the policy gave no single result", got=repr(results)[:80], wanted="[Chunk]")
        chunk = results[0]
        if isinstance(chunk, PhyaiError):
            raise chunk
        if not isinstance(chunk, Chunk):
            raise EngineError("the policy gave no chunk", got=type(chunk).__name__, wanted="Chunk")
        wanted = (horizon, self._action_dim)
        if chunk.actions.shape != wanted or chunk.actions.dtype != np.float64:
            got = f"{chunk.actions.dtype} {list(chunk.actions.shape)}"
            raise EngineError("the chunk has the wrong form", got=got, wanted=f"float64 {list(wanted)}")
        if (chunk.epoch, chunk.chunk_id) != (request.epoch, request.chunk_id):
            got = f"epoch {chunk.epoch} chunk {chunk.chunk_id}"
            raise EngineError(
                "the chunk answers another request", got=got, wanted=f"{request.epoch} {request.chunk_id}"
            )
        return chunk


def _failure(error: BaseException) -> Failure:
    text, refusal = str(error), Refusal.NONE
    if isinstance(error, RefusalError):  # the client makes it again from the code, which heads the text
        refusal, text = error.code, text.removeprefix(f"{error.code.name.lower()}: ")
    defect = error.__cause__ if isinstance(error, PhyaiError) else error
    if defect is not None:  # no refusal: the reader needs the place, the log the trace
        _log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if frames := traceback.extract_tb(defect.__traceback__):
            text = f"{text}, at {frames[-1].filename}:{frames[-1].lineno}"
    # Text that cannot be encoded, or is larger than a header may be, must not cost the reply.
    return Failure(type(error).__name__, text[:_TEXT_LENGTH].encode(errors="replace").decode(), refusal)
