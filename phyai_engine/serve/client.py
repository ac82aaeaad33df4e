"""EngineClient: the node's one way to an engine. In the process placement nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import msgspec
import zmq

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import (
    CancelledError,
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    PhyaiError,
    ProtocolError,
    RefusalError,
)
from phyai_engine.serve.compute import Load
from phyai_engine.serve.crash import CrashReport
from phyai_engine.serve.host import Host, ProcessHost, ThreadHost, end
from phyai_engine.serve.in_flight import Answered, Event, Failed, InFlight, Lost
from phyai_engine.serve.protocol import (
    HEARTBEAT_S,
    Array,
    Cancel,
    EngineHello,
    ErrorReply,
    Goodbye,
    Heartbeat,
    Hello,
    HelloReply,
    Message,
    Reply,
    decode,
    encode,
)
from phyai_engine.serve.sockets import Wake, prepare, received
from phyai_engine.serve.streams import chunk_from_wire, request_to_wire
from phyai_engine.types import Refusal, Request

__all__ = ["Answered", "CrashReport", "EngineClient", "EngineHello", "Event", "Failed", "Lost", "Placement"]

Placement = Literal["thread", "process", "remote"]
_LAST_EPOCH = (1 << 63) - 1
_JOIN_MARGIN_S = 0.5
_STALL_S = 0.25  # a gap of our own loop above this: we slept, so the engine's silence proves nothing
_ASK_S = 0.2
_LOST_WAIT_S = 2.0
_log = logging.getLogger(__name__)


class EngineClient:
    """One engine, from start to stop; a restart is a new client.

    One I/O thread owns the socket and the child. Everything but ``start`` and ``stop`` returns at once, from
    any thread.

    :param placement: ``process`` (a spawned child) or ``thread`` (this process; a model that holds the
        interpreter lock then holds the node, and one that hangs cannot be ended). ``remote`` is refused: it
        has no server yet.
    :param on_event: called after events were queued, in the I/O thread (after the engine's end in the thread
        that submits); it must be cheap and only signal.
    :param threads: torch threads of the engine, 0 = its default.
    :param heartbeat_timeout_s: silence after which a ready engine is lost; a model that holds the child's
        interpreter lock that long is lost as well, since it can be neither cancelled nor watched.
    :param warm_up_count: inferences at real shapes during ``start``.
    :param load: replaces ``load_policy``, in the thread placement only.
    """

    def __init__(
        self,
        robot: RobotConfig,
        model: ModelConfig,
        placement: Placement,
        *,
        on_event: Callable[[], None],
        start_timeout_s: float = 120.0,
        threads: int = 1,
        heartbeat_timeout_s: float = 1.0,
        warm_up_count: int = 3,
        load: Load | None = None,
    ) -> None:
        if placement not in ("thread", "process"):
            raise ConfigError("this engine placement is not available", got=placement, wanted="thread or process")
        if load is not None and placement != "thread":
            raise ConfigError("a load function cannot travel to another process", got=placement, wanted="thread")
        self._robot, self._model, self._placement = robot, model, placement
        self._on_event, self._load = on_event, load
        self._start_timeout_s, self._threads = start_timeout_s, threads
        self._heartbeat_timeout_s, self._warm_up_count = heartbeat_timeout_s, warm_up_count
        self._requests = InFlight()
        self._condition = threading.Condition()  # guards what start waits for
        self._hello: EngineHello | None = None
        self._failure: EngineError | None = None
        self._crash: CrashReport | None = None
        self._phase, self._phase_ns = "starting", time.monotonic_ns()
        self._heartbeat_ns = self._checked_ns = 0
        self._io_ended = False
        self._start_by_s = math.inf
        self._stop_at_s: float | None = None
        self._ask = True  # it to end, before it is killed
        self._ended_clean = True
        self._host: Host | None = None
        self._wake: Wake | None = None
        self._thread: threading.Thread | None = None

    def start(
        self, progress: Callable[[str], None] | None = None, *, give_up: Callable[[], bool] = lambda: False
    ) -> EngineHello:
        """Start the engine and wait until it has warmed up.

        :param progress: called in this thread with ``starting``, ``loading``, ``warming`` as they begin.
        :param give_up: asked several times a second; True ends the start (the process was told to end).
        :raises EngineRefusedError: the engine refused the configuration or could not load the model.
        :raises EngineDiedError: it ended meanwhile; the message has the cause and its last lines.
        :raises EngineTimeoutError: not ready within ``start_timeout_s``.
        After any of them everything is released.
        """
        if self._thread is not None or self._stop_at_s is not None:
            raise EngineError("start was called before", do="A restart is a new EngineClient.")
        self._start_by_s = time.monotonic() + self._start_timeout_s
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, args=(self._wake,), name="phyai-engine-io", daemon=True)
        self._thread.start()
        try:
            return self._await_ready(progress, give_up)
        except BaseException:  # also a KeyboardInterrupt, or a progress callback that raises
            self.stop()
            raise

    def _await_ready(self, progress: Callable[[str], None] | None, give_up: Callable[[], bool]) -> EngineHello:
        # The I/O thread keeps the bound, and reports what the engine said; this one is for the I/O thread itself.
        deadline_s = self._start_by_s + _JOIN_MARGIN_S
        told = ""
        while True:
            with self._condition:
                wait_s = min(_ASK_S, max(0.0, deadline_s - time.monotonic()))
                self._condition.wait_for(functools.partial(self._start_moved, told), wait_s)
                hello, failure, phase = self._hello, self._failure, self._phase
            if failure is not None:
                raise failure
            if hello is not None:
                return hello
            if time.monotonic() >= deadline_s:
                raise self._not_ready()
            if give_up():
                raise EngineError("the start of the engine was interrupted", got=f"still {phase}")
            if progress is not None and phase != told:
                progress(phase)
            told = phase

    def _not_ready(self) -> EngineError:
        return EngineTimeoutError(
            "the engine did not become ready",
            got=f"still {self._phase}",
            wanted=f"within {self._start_timeout_s} s",
        )

    def submit(self, request: Request) -> None:
        """Have a request answered; one that still waits for the engine is replaced."""
        self._requests.submit(request)
        self._nudge()
        if self._io_ended:  # nobody else is left to announce that it failed
            self._announce()

    def cancel(self, epoch: int) -> None:
        """Cancel every request whose epoch is at most ``epoch``: none of them comes as Answered any more."""
        self._requests.cancel(epoch)
        self._nudge()

    def poll(self) -> list[Event]:
        """The events since the last poll, oldest first."""
        return self._requests.poll()

    @property
    def alive(self) -> bool:
        """True while the engine is ready and its heartbeat fresh."""
        ready = self._hello is not None and self._failure is None and self._stop_at_s is None
        return ready and self.last_heartbeat_age_s() <= self._heartbeat_timeout_s

    def last_heartbeat_age_s(self) -> float:
        """Time since the last sign of life; infinite before the first."""
        return (time.monotonic_ns() - self._heartbeat_ns) / 1e9 if self._heartbeat_ns else float("inf")

    @property
    def pid(self) -> int | None:
        """Process the engine runs in; None before ``start``."""
        return None if self._host is None else self._host.pid

    @property
    def crash(self) -> CrashReport | None:
        """How the engine was lost; None as long as it was not. Its last lines may grow until it was ended."""
        return self._crash

    @property
    def counters(self) -> dict[str, int]:
        """How requests ended and what was dropped, by name."""
        counters = self._requests.counters
        if self._host is not None and (dropped := self._host.dropped_bytes):
            counters["log_bytes_dropped"] = dropped
        return counters

    def stop(self, timeout_s: float = 2.0, *, ask: bool = True) -> bool:
        """End the engine: cancel, ask, and after half of ``timeout_s`` SIGKILL. Idempotent.

        :param ask: False kills at once.
        :returns: True when nothing of it is left; False for a thread placement whose model hangs, or a child
            that the kernel could not end within the bound.
        """
        with self._condition:
            if self._stop_at_s is None:
                self._stop_at_s, self._ask = time.monotonic() + timeout_s, ask
            self._condition.notify_all()
        self._nudge()
        if self._thread is None:
            self._requests.close(CancelledError("the client was stopped"), lost=False)
            return True
        self._thread.join(timeout_s + _JOIN_MARGIN_S)
        if self._thread.is_alive():
            return False
        if not self._ended_clean and self._host is not None:
            self._ended_clean = self._host.wait(0.0)  # it may have ended since
        return self._ended_clean

    def _nudge(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _start_moved(self, told: str) -> bool:
        return self._hello is not None or self._failure is not None or self._phase != told

    # Below: the I/O thread.

    def _run(self, wake: Wake) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket: zmq.Socket[bytes] | None = None
        host: Host | None = None
        try:
            socket = context.socket(zmq.DEALER)
            prepare(socket)
            self._host = host = self._open_host(context)
            socket.connect(host.endpoint)
            self._loop(host, socket, wake)
        except EngineError as error:
            self._fail(self._reported(error))
        except BaseException as error:  # whatever it is, the node must learn that the engine is gone
            _log.exception("the engine client failed")
            self._fail(EngineError(f"the engine client failed: {type(error).__name__}: {error}"))
        finally:
            self._close(host, socket, context)
            wake.close()

    def _open_host(self, context: zmq.Context[zmq.Socket[bytes]]) -> Host:
        if self._placement == "process":
            return ProcessHost(threads=self._threads)
        from phyai_engine.serve.worker import serve  # noqa: PLC0415 - only here does it run in this process

        return ThreadHost(functools.partial(serve, context=context, load=self._load, threads=self._threads))

    def _loop(self, host: Host, socket: zmq.Socket[bytes], wake: Wake) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        if (ended := host.fileno()) >= 0:
            poller.register(ended, zmq.POLLIN)
        self._send(
            socket,
            Hello(
                robot=msgspec.to_builtins(self._robot),
                model=msgspec.to_builtins(self._model),
                parent_pid=os.getpid(),
                warm_up_count=self._warm_up_count,
            ),
        )
        self._checked_ns = time.monotonic_ns()
        while self._stop_at_s is None:
            poller.poll(int(HEARTBEAT_S * 1e3))
            wake.clear()
            for frames in received(socket):
                self._on_frames(host, frames)
            self._flush(socket)
            self._announce()
            host.pump()
            self._check_engine(host)

    def _on_frames(self, host: Host, frames: list[memoryview]) -> None:
        try:
            message, arrays = decode(frames)
            if not self._heartbeat_ns:
                host.connected()
            self._heartbeat_ns = time.monotonic_ns()
            if isinstance(message, Heartbeat):
                self._on_phase(message.phase)
            elif isinstance(message, Reply):
                self._requests.answered(chunk_from_wire(message, arrays))
            elif isinstance(message, ErrorReply) and message.reason != "protocol":
                self._requests.failed(message.epoch, message.chunk_id, _error_of(message))
            elif isinstance(message, ErrorReply):
                raise ProtocolError(f"the engine could not read a message: {message.text}")
            elif isinstance(message, HelloReply) and self._hello is None:
                self._on_hello(message)
            else:
                raise ProtocolError("not an engine's message", got=type(message).__name__)
        except ProtocolError as error:
            if self._hello is None:
                raise EngineRefusedError(f"the handshake failed: {error}") from None
            self._requests.failed_unread(error)

    def _on_phase(self, phase: str) -> None:
        if phase != self._phase:
            with self._condition:
                self._phase, self._phase_ns = phase, time.monotonic_ns()
                self._condition.notify_all()

    def _on_hello(self, reply: HelloReply) -> None:
        if reply.engine is None:
            raise EngineRefusedError("the engine refused", got=reply.reason)
        if reply.engine.action_names != self._robot.action_names:
            raise EngineRefusedError(
                "the engine has other actions than the robot",
                got=", ".join(reply.engine.action_names),
                wanted=", ".join(self._robot.action_names),
            )
        with self._condition:
            self._hello = reply.engine
            self._condition.notify_all()

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        if (epoch := self._requests.take_cancel()) is not None:
            self._send(socket, Cancel(epoch=epoch))
        if self._hello is None or (request := self._requests.take_request()) is None:
            return
        try:
            self._send(socket, *request_to_wire(request))
        except ProtocolError as error:
            self._requests.failed(request.epoch, request.chunk_id, error)

    def _send(self, socket: zmq.Socket[bytes], message: Message, arrays: dict[str, Array] | None = None) -> None:
        try:
            # Copied into libzmq, also the images: handing over our memory saved 0.15 ms of 1.7 in the median
            # of a round trip with two 640x480 images, but its p99 was 17 ms instead of 7 (n = 1800, process).
            socket.send_multipart(encode(message, arrays), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDiedError("the engine closed the connection") from None

    def _announce(self) -> None:
        if not self._requests.take_announcement():
            return
        try:
            self._on_event()
        except Exception:
            self._requests.count("on_event_errors")
            _log.exception("on_event failed")

    def _check_engine(self, host: Host) -> None:
        if (cause := host.exit_cause()) is not None:
            raise EngineDiedError("the engine ended", got=cause)
        now_ns = time.monotonic_ns()
        stalled, self._checked_ns = now_ns - self._checked_ns > _STALL_S * 1e9, now_ns
        if stalled and self._heartbeat_ns:
            self._heartbeat_ns = now_ns
        if self._hello is None:
            if time.monotonic() > self._start_by_s:
                raise self._not_ready()
            return
        age_s = self.last_heartbeat_age_s()
        if age_s > self._heartbeat_timeout_s:
            state = f", its process {state}" if (state := host.state()) else ""
            raise EngineTimeoutError(
                "no heartbeat from the engine",
                got=f"{age_s:.2f} s of silence{state}",
                wanted=f"at most {self._heartbeat_timeout_s} s",
            )

    def _reported(self, error: EngineError) -> EngineError:
        """The error, and the report kept, of an engine that is lost rather than one that refused."""
        host = self._host
        if host is None or not isinstance(error, (EngineDiedError, EngineTimeoutError)):
            return error
        running = self._requests.running()
        # The heartbeat's word may be a period old; once it is ready the requests tell exactly.
        phase = "busy" if running else "idle" if self._hello is not None else self._phase
        epoch, chunk_id, ran_s = running or (0, 0, (time.monotonic_ns() - self._phase_ns) / 1e9)
        self._crash = crash = CrashReport(
            str(error.got or error.what), host.pid, phase, ran_s, epoch, chunk_id, host.tail()
        )
        where = f"pid {crash.pid}, {crash.ran}"
        return type(error)(error.what, got=error.got, wanted=error.wanted, where=where, do=crash.said)

    def _fail(self, error: EngineError) -> None:
        # Told before the engine is ended: that may take seconds, and the node has to stop the robot now.
        self._requests.close(error, lost=self._hello is not None)
        with self._condition:
            self._failure = error
            self._condition.notify_all()
        self._announce()

    def _close(
        self, host: Host | None, socket: zmq.Socket[bytes] | None, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self._requests.close(CancelledError("the client was stopped"), lost=False)
        self._io_ended = True
        self._announce()
        if host is not None and socket is not None:
            with contextlib.suppress(EngineError):
                self._send(socket, Cancel(epoch=_LAST_EPOCH))
                self._send(socket, Goodbye())
            self._ended_clean = self._end_host(host)
        if socket is not None:
            socket.close(linger=0)
        if self._placement == "process" or host is None or host.exit_cause() is not None:
            context.term()  # would wait for ever for a worker thread that still has its socket
        with self._condition:
            if self._hello is None and self._failure is None:
                self._failure = EngineError("the client was stopped before the engine was ready")
            self._condition.notify_all()

    def _end_host(self, host: Host) -> bool:
        until_s = time.monotonic() + _LOST_WAIT_S if self._stop_at_s is None else self._stop_at_s
        # A lost one had its chance, and the memory it holds is wanted by the next one.
        lost = self._crash is not None
        ended = end(host, until_s, ask=self._ask and not lost, trace=lost or self._phase == "busy")
        if self._crash is not None:
            self._crash = replace(self._crash, last_lines=host.tail())
        host.close()
        return ended


def _error_of(reply: ErrorReply) -> PhyaiError:
    if reply.reason == "cancelled":
        return CancelledError(reply.text)
    if reply.refusal is not Refusal.NONE:
        return RefusalError(reply.refusal, reply.text)
    return EngineError(f"{reply.error_type}: {reply.text}" if reply.error_type else reply.text)
