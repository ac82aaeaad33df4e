"""The engine side: one loop that owns the socket, one compute thread that owns the policy.

The same loop serves every local placement. It never computes, so it takes cancels and sends heartbeats while
an inference runs; a model that holds the interpreter lock for long silences it, and the client calls the
engine lost.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import platform
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from phyai_engine import __version__, config
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import EngineError, KeyframeError, PhyaiError, ProtocolError
from phyai_engine.robot_check import check_robot
from phyai_engine.serve.compute import Compute, Load, Ready, Work, load_policy_lazily
from phyai_engine.serve.host import TRACE_SIGNAL
from phyai_engine.serve.protocol import (
    HEARTBEAT_S,
    Alive,
    Array,
    Cancel,
    EngineHello,
    ErrorKind,
    ErrorReply,
    Goodbye,
    Heartbeat,
    Hello,
    HelloReply,
    Join,
    JoinReply,
    Leave,
    Message,
    RequestMessage,
    decode,
    encode,
)
from phyai_engine.serve.sockets import Wake, prepare, received
from phyai_engine.serve.streams import KeptStreams, chunk_to_wire, request_from_wire, statistics_id
from phyai_engine.types import Chunk, Request

_JOIN_S = 0.4  # below half of the client's default stop bound
_MAX_ROWS = 1024  # of a batch: what a peer that never ends one may have waiting here
_PR_SET_PDEATHSIG = 1
_OOM_SCORE = 500  # of 1000
_log = logging.getLogger(__name__)


def serve(
    endpoint: str,
    *,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    load: Load | None = None,
    threads: int = 1,
) -> bool:
    """Serve one client until it says goodbye.

    :param endpoint: address to bind.
    :param context: shared with the client for ``inproc://``; None makes one.
    :param load: (RobotConfig, ModelConfig) -> policy, called in the compute thread; None takes
        :func:`phyai_engine.policy.load_policy`.
    :param threads: torch threads of the compute thread, if the model brings torch; 0 = its default.
    :returns: False when the compute thread did not end within its bound: then leave the process without
        finalising it.
    """
    own = zmq.Context() if context is None else context
    try:
        with own.socket(zmq.ROUTER) as socket, contextlib.closing(Wake()) as wake:
            prepare(socket, endpoint)
            socket.bind(endpoint)
            return _Worker(socket, wake, load or load_policy_lazily, threads).run()
    finally:
        if context is None:
            own.term()


class _Worker:
    """The I/O loop. ``peer``, the first to say hello, is the one client served; everybody else is refused."""

    def __init__(self, socket: zmq.Socket[bytes], wake: Wake, load: Load, threads: int) -> None:
        self._socket, self._wake, self._load, self._threads = socket, wake, load, threads
        self._peer: bytes | None = None
        self._robot: RobotConfig | None = None
        self._model: ModelConfig | None = None
        self._kept = KeptStreams(())
        self._rows: list[Work] = []  # of a batch whose last row has not come yet
        self._compute: Compute | None = None
        self._outcomes: collections.deque[Ready | Work] = collections.deque()
        self._ready = False
        self._cancelled: dict[int, int] = {}  # slot -> epoch
        self._running = True

    def run(self) -> bool:
        """Loop until the goodbye; True when the compute thread has ended."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        beat_s = time.monotonic()
        while self._running:
            poller.poll(max(0, math.ceil((beat_s - time.monotonic()) * 1e3)))
            self._wake.clear()
            # Asked before the outcomes are taken: its last words may be among them.
            died = self._compute is not None and self._compute.died
            for frames in received(self._socket):
                self._on_frames(bytes(frames[0]), frames[1:])
            # After receiving: a cancel that has arrived is honoured by every answer sent from here on.
            while self._outcomes:
                self._on_outcome(self._outcomes.popleft())
            if died and self._compute is not None:
                raise EngineError("the compute thread ended", do="What it raised is in the log, memory permitting.")
            if time.monotonic() >= beat_s:
                self._beat()
                beat_s = time.monotonic() + HEARTBEAT_S
        return self._compute is None or self._compute.stop(_JOIN_S)

    def _beat(self) -> None:
        if self._peer is not None and self._compute is not None:
            phase, epoch, chunk_id = self._compute.status()
            self._send(self._peer, Heartbeat(phase=phase, epoch=epoch, chunk_id=chunk_id))

    def _send(self, peer: bytes, message: Message, arrays: dict[str, Array] | None = None) -> None:
        self._socket.send_multipart([peer, *encode(message, arrays)])

    def _on_frames(self, peer: bytes, frames: list[memoryview]) -> None:
        try:
            message, arrays = decode(frames)
            if isinstance(message, Hello):
                self._on_hello(peer, message)
            elif peer != self._peer:
                raise ProtocolError("a message before the hello", got=type(message).__name__)
            elif isinstance(message, RequestMessage):
                self._on_request(peer, message, arrays)
            elif isinstance(message, Cancel):
                self._on_cancel(peer, message.slot, message.epoch)
            elif isinstance(message, Join):
                self._on_join(peer, message)
            elif isinstance(message, Leave):
                self._on_leave(message.slot)
            elif isinstance(message, Goodbye):
                self._running = False
            elif not isinstance(message, Alive):
                raise ProtocolError("not a client's message", got=type(message).__name__)
        except ProtocolError as error:
            self._send(peer, ErrorReply(reason="protocol", error_type=type(error).__name__, text=str(error)))

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        if self._peer not in (None, peer) or self._compute is not None:
            self._send(peer, HelloReply(reason="this engine serves a client already"))
            return
        self._peer = peer
        try:
            robot = config.convert(hello.robot, RobotConfig, where="hello: robot")
            check_robot(robot, where="hello: robot")
            if isinstance(hello.model, str):
                raise EngineError("this engine has loaded no model yet", got=f"the name {hello.model!r}")
            model = config.convert(hello.model, ModelConfig, where="hello: model")
        except PhyaiError as error:
            self._send(peer, HelloReply(reason=str(error)))
            return
        self._robot, self._model = robot, model
        self._kept = KeptStreams([camera.name for camera in robot.cameras])
        self._compute = Compute(self._post, robot, self._threads)
        batches = (hello.batches,) if hello.batches else ()
        load = partial(self._load, robot, model, *batches)
        self._compute.start(load, hello.warm_up_count, hello.batches, model.keep_warm_s)

    def _on_join(self, peer: bytes, join: Join) -> None:
        """In this thread: an adapter is numpy alone, and the compute thread is to go on with its batches."""
        try:
            robot = config.convert(join.robot, RobotConfig, where="join: robot")
            check_robot(robot, where="join: robot")
            if self._compute is None or not self._ready:
                raise ProtocolError("a join before the hello was answered")
            self._compute.join(join.slot, robot)
        except PhyaiError as error:
            self._send(peer, JoinReply(slot=join.slot, reason=str(error)))
        else:
            self._cancelled.pop(join.slot, None)
            self._send(peer, JoinReply(slot=join.slot))

    def _on_leave(self, slot: int) -> None:
        if self._compute is not None:
            self._compute.leave(slot)
        self._cancelled.pop(slot, None)

    def _post(self, outcome: Ready | Work) -> None:
        self._outcomes.append(outcome)
        self._wake.set()

    def _on_request(self, peer: bytes, message: RequestMessage, arrays: dict[str, Array]) -> None:
        now_ns = time.monotonic_ns()
        if self._compute is None or not self._ready:
            raise ProtocolError("a request before the hello was answered")
        try:
            if message.keys:  # a front has made its requests whole
                message, arrays = self._kept.whole(message, arrays)
            work = Work(request_from_wire(message, arrays, now_mono_ns=now_ns), now_ns)
        except ProtocolError as error:  # of this row alone: the others of the batch run
            self._refuse(peer, message, "keyframe" if isinstance(error, KeyframeError) else "protocol", str(error))
        else:
            if message.epoch <= self._cancelled.get(message.slot, -1):
                self._refuse(peer, message, "cancelled")
            else:
                self._rows.append(work)
        if self._rows and (message.rows_left == 0 or len(self._rows) >= _MAX_ROWS):
            batch, self._rows = self._rows, []
            for replaced in self._compute.put(batch):
                self._refuse(peer, replaced.request, "replaced")

    def _on_cancel(self, peer: bytes, slot: int, epoch: int) -> None:
        self._cancelled[slot] = max(self._cancelled.get(slot, -1), epoch)
        for dropped in self._compute.cancel(slot, epoch) if self._compute is not None else ():
            self._refuse(peer, dropped.request, "cancelled")

    def _refuse(self, peer: bytes, request: Request | RequestMessage, reason: ErrorKind, text: str = "") -> None:
        self._send(
            peer,
            ErrorReply(
                reason=reason,
                error_type="",
                text=text or f"the request was {reason}",
                epoch=request.epoch,
                chunk_id=request.chunk_id,
                slot=request.slot,
            ),
        )

    def _on_outcome(self, outcome: Ready | Work) -> None:
        assert self._peer is not None
        if isinstance(outcome, Ready):
            self._on_ready(self._peer, outcome)
        elif outcome.token.cancelled or outcome.request.epoch <= self._cancelled.get(outcome.request.slot, -1):
            self._refuse(self._peer, outcome.request, "cancelled")
        elif isinstance(outcome.result, Chunk):
            self._send(self._peer, *chunk_to_wire(outcome.result, slot=outcome.request.slot))
        else:
            assert outcome.result is not None
            self._send(
                self._peer,
                ErrorReply(
                    reason="failed",
                    error_type=outcome.result.error_type,
                    text=outcome.result.text,
                    refusal=outcome.result.refusal,
                    epoch=outcome.request.epoch,
                    chunk_id=outcome.request.chunk_id,
                    slot=outcome.request.slot,
                ),
            )

    def _on_ready(self, peer: bytes, ready: Ready) -> None:
        if ready.failure is not None:
            reason = f"{ready.failure.error_type}: {ready.failure.text}"
            self._send(peer, HelloReply(reason=reason))
            self._compute = None  # its thread has ended; the client may say hello with another configuration
            return
        assert self._robot is not None
        assert self._model is not None
        self._ready = True
        engine = EngineHello(
            horizon=ready.horizon,
            action_names=self._robot.action_names,
            dt_s=self._robot.dt_s,
            note=ready.note.encode(errors="replace").decode(),  # a path may hold bytes that are no text
            warm_up_ms=ready.warm_up_ms,
            pid=os.getpid(),
            versions=_versions(),
            rtc_max_delay=self._model.rtc.guide.max_delay,
            batch_ms=ready.batch_ms,
            keeps_state=ready.keeps_state,
            statistics=statistics_id(self._model.normalisation),
        )
        self._send(peer, HelloReply(engine=engine))


def _versions() -> dict[str, str]:
    versions = {"phyai_engine": __version__, "python": platform.python_version(), "numpy": np.__version__}
    if (torch := sys.modules.get("torch")) is not None:
        versions["torch"] = str(torch.__version__)
    return versions


def _die_with(parent_pid: int, endpoint: str) -> None:
    """Have this process end with its parent, also when the parent is killed or our threads are stuck.

    A parent that was killed before it connected has left the socket's folder to us.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux: standard input alone has to do
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def end() -> None:
        path = Path(endpoint.removeprefix("ipc://"))
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()  # refused where something else lies in it
        os._exit(1)

    if os.getppid() != parent_pid:  # it ended before the call above
        end()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()

    threading.Thread(target=watch, name="phyai-parent", daemon=True).start()


def _first_victim() -> None:
    """When memory runs out, the kernel is to end this process and not the one that stops the robot."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # not Linux
        score.write_text(str(max(_OOM_SCORE, int(score.read_text(encoding="ascii")))), encoding="ascii")


def main() -> None:
    """Entry point of the child process that :class:`phyai_engine.serve.host.ProcessHost` starts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    faulthandler.register(TRACE_SIGNAL)  # in C: also while something holds the interpreter lock
    parser = argparse.ArgumentParser(prog="phyai-engine")
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    _first_victim()
    _die_with(arguments.parent_pid, arguments.endpoint)
    # Finalising the interpreter under a thread that is inside torch aborts the process: then it is left as it is.
    try:
        if serve(arguments.endpoint, threads=arguments.threads):
            return
        _log.warning("the inference did not end within %.1f s; leaving without it", _JOIN_S)
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)
