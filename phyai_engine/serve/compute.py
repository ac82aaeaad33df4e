"""The one thread that owns the policy, and its mailbox of one batch."""

from __future__ import annotations

import logging
import statistics
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
_TIMED = 5  # inferences per batch size: enough for a first estimate, which running batches mend
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

    def warm_up(self, count: int, rows: int = 1) -> Sequence[float]:
        """Durations of ``count`` inferences of so many rows at real shapes, in ms."""
        ...

    def join(self, slot: int, robot: RobotConfig) -> None:
        """Take requests with this slot from another robot; called in another thread than ``infer``."""
        ...

    def leave(self, slot: int) -> None:
        """That robot is gone."""
        ...

    def keep_warm(self) -> None:
        """A short piece of work, so that the accelerator keeps its clock; asked for only where a model file does."""
        ...


Load = Callable[..., EnginePolicy]
"""(RobotConfig, ModelConfig), and the sizes of the batches that will come if more than one row ever does."""


def load_policy_lazily(robot: RobotConfig, model: ModelConfig, *batches: Sequence[int]) -> EnginePolicy:
    """The shipped ``load_policy``; imported here, in the compute thread, while heartbeats go on."""
    from phyai_engine.policy import load_policy  # noqa: PLC0415 - see above

    return load_policy(robot, model, *batches)


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

    def meant(self, slot: int, epoch: int) -> bool:
        """True where a cancel of the slot up to ``epoch`` means it."""
        return self.request.slot == slot and self.request.epoch <= epoch


@dataclass(frozen=True, slots=True)
class Ready:
    """Loading ended: what the hello reply needs, or why it failed."""

    horizon: int = 0
    note: str = ""
    warm_up_ms: tuple[float, ...] = ()
    batch_ms: tuple[tuple[int, float], ...] = ()
    keeps_state: bool = False
    failure: Failure | None = None


class Compute:
    """Loads, warms up and runs a policy in one thread.

    :param post: takes every outcome; called in the compute thread.
    :param robot: of slot 0. Chunks are checked against its actions, those of other slots against theirs.
    """

    def __init__(self, post: Callable[[Ready | Work], None], robot: RobotConfig, threads: int) -> None:
        self._post, self._threads = post, threads
        self._action_dims = {0: len(robot.actions)}
        self._policy: EnginePolicy | None = None
        self._condition = threading.Condition()
        self._queued: list[Work] = []
        self._current: list[Work] = []
        self._phase: Phase = "loading"
        self._stopping = False
        self._keep_warm_s = 0.0
        self._thread: threading.Thread | None = None

    def start(
        self,
        load: Callable[[], EnginePolicy],
        warm_up_count: int,
        batches: Sequence[int] = (),
        keep_warm_s: float = 0.0,
    ) -> None:
        """Start the thread; it posts one Ready, then one Work per request put.

        :param keep_warm_s: time between two ``keep_warm`` while nothing is asked; 0 = never.
        """
        self._keep_warm_s = keep_warm_s
        arguments = load, warm_up_count, batches
        self._thread = threading.Thread(target=self._run, args=arguments, name="phyai-compute", daemon=True)
        self._thread.start()

    def join(self, slot: int, robot: RobotConfig) -> None:
        """Take requests of another robot.

        :raises PhyaiError: it does not fit the model, or nothing is loaded yet.
        """
        if self._policy is None:
            raise EngineError("no model is loaded yet", where=f"slot {slot}")
        self._policy.join(slot, robot)
        self._action_dims[slot] = len(robot.actions)

    def leave(self, slot: int) -> None:
        """Forget a robot; what still runs for it ends in an error or an answer."""
        if self._policy is not None:
            self._policy.leave(slot)
        self._action_dims.pop(slot, None)

    def put(self, batch: Sequence[Work]) -> list[Work]:
        """Queue a batch; the one it replaces is returned and will not be posted."""
        with self._condition:
            replaced, self._queued = self._queued, list(batch)
            self._condition.notify()
            return replaced

    def cancel(self, slot: int, epoch: int) -> list[Work]:
        """Mark running requests of the slot up to ``epoch``; drop and return the queued ones."""
        with self._condition:
            for work in self._current:
                if work.meant(slot, epoch):
                    work.token.cancel()
            dropped = [work for work in self._queued if work.meant(slot, epoch)]
            self._queued = [work for work in self._queued if work not in dropped]
            return dropped

    def status(self) -> tuple[Phase, int, int]:
        """Phase, and epoch and chunk_id of the running inference, its first row's (0 when there is none)."""
        with self._condition:
            if not self._current:
                return self._phase, 0, 0
            request = self._current[0].request
            return self._phase, request.epoch, request.chunk_id

    @property
    def died(self) -> bool:
        """True when the thread ended by itself: nothing will be posted any more."""
        return self._thread is not None and not self._thread.is_alive() and not self._stopping

    def stop(self, timeout_s: float) -> bool:
        """Cancel what runs and join; False when the thread is still inside the policy."""
        with self._condition:
            self._stopping = True
            self._queued = []
            for work in self._current:
                work.token.cancel()
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def _run(self, load: Callable[[], EnginePolicy], warm_up_count: int, batches: Sequence[int]) -> None:
        try:
            policy = load()
            # torch keeps its thread count per thread, so it is set here and not in main.
            if self._threads and (torch := sys.modules.get("torch")) is not None:
                torch.set_num_threads(self._threads)
            self._set_phase("warming")
            warm_up_ms = tuple(float(ms) for ms in policy.warm_up(warm_up_count))
            measured = tuple((rows, statistics.median(policy.warm_up(_TIMED, rows))) for rows in batches)
            ready = Ready(policy.spec.horizon, policy.note, warm_up_ms, measured, policy.spec.keeps_state)
        except BaseException as error:  # also SystemExit: a model must not end the engine silently
            self._post(Ready(failure=_failure(error)))
            return
        self._policy = policy
        self._set_phase("idle")
        self._post(ready)
        while batch := self._next(policy):
            for work, result in zip(batch, self._infer(policy, batch), strict=True):
                work.result = result
            with self._condition:
                self._current, self._phase = [], "idle"
            for work in batch:
                self._post(work)

    def _set_phase(self, phase: Phase) -> None:
        with self._condition:
            self._phase = phase

    def _next(self, policy: EnginePolicy) -> list[Work]:
        """The next batch; empty when it is time to end."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._stopping or bool(self._queued), self._keep_warm_s or None)
                if self._stopping:
                    return []
                if self._queued:
                    self._current, self._queued, self._phase = self._queued, [], "busy"
                    return self._current
            self._keep_warm(policy)  # without the lock: a request is taken meanwhile, and waits a millisecond or two

    def _keep_warm(self, policy: EnginePolicy) -> None:
        try:
            policy.keep_warm()
        except Exception:  # what is wrong with the device is the next request's to say
            _log.exception("keeping the accelerator warm failed; it is not tried again")
            self._keep_warm_s = 0.0

    def _infer(self, policy: EnginePolicy, batch: Sequence[Work]) -> list[Chunk | Failure]:
        """One result per row; what a row raises is that row's alone."""
        started_ns = time.monotonic_ns()
        try:
            results = policy.infer([work.request for work in batch], [work.token for work in batch])
            inference_ms = (time.monotonic_ns() - started_ns) / 1e6
            if not isinstance(results, Sequence) or len(results) != len(batch):
                wanted = f"{len(batch)} chunks"
                raise EngineError("the policy gave not one result per request", got=repr(results)[:80], wanted=wanted)
        except BaseException as error:  # also SystemExit: the worker survives whatever the model raises
            return [_failure(error)] * len(batch)
        answers: list[Chunk | Failure] = []
        for work, result in zip(batch, results, strict=True):
            try:
                chunk = self._checked(result, work.request, policy.spec.horizon)
            except Exception as error:
                answers.append(_failure(error))
                continue
            timings = replace(chunk.timings, queue_ms=(started_ns - work.received_ns) / 1e6)
            if np.isnan(timings.inference_ms):
                timings = replace(timings, inference_ms=inference_ms)
            answers.append(replace(chunk, timings=timings))
        return answers

    def _checked(self, chunk: Chunk | PhyaiError, request: Request, horizon: int) -> Chunk:
        if isinstance(chunk, PhyaiError):
            raise chunk
        if not isinstance(chunk, Chunk):
            raise EngineError("the policy gave no chunk", got=type(chunk).__name__, wanted="Chunk")
        wanted = (horizon, self._action_dims.get(request.slot, 0))
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
