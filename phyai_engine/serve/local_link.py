"""The link to an engine of our own: it is started here, and ends with us."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import EngineDiedError, EngineError, EngineTimeoutError
from phyai_engine.serve.compute import Load
from phyai_engine.serve.crash import CrashReport
from phyai_engine.serve.host import Host, ProcessHost, ThreadHost, end
from phyai_engine.serve.link import Context, Link
from phyai_engine.serve.protocol import Cancel, Goodbye, Hello, Message
from phyai_engine.serve.sockets import prepare

_LAST_EPOCH = (1 << 63) - 1
_LOST_WAIT_S = 2.0


class LocalLink(Link):
    """An engine in a child process, or in a thread of this one.

    :param load: replaces ``load_policy``, in a thread only; None in a thread takes ``load_policy``.
    :param thread: in a thread. :param rest: as :class:`Link` takes it.
    """

    def __init__(
        self,
        robot: RobotConfig,
        model: ModelConfig,
        *,
        thread: bool,
        threads: int,
        warm_up_count: int,
        load: Load | None,
        **rest: Any,
    ) -> None:
        super().__init__(robot, **rest)
        self._model, self._load = model, load
        self._in_thread, self._threads, self._warm_up_count = thread, threads, warm_up_count
        self._host: Host | None = None
        self._ended_clean = True

    def left_clean(self) -> bool:
        """True when nothing of the engine is left; it may have ended since."""
        if not self._ended_clean and self._host is not None:
            self._ended_clean = self._host.wait(0.0)
        return self._ended_clean

    @property
    def pid(self) -> int | None:
        """Of the child, or our own; None before the start."""
        return None if self._host is None else self._host.pid

    @property
    def counters(self) -> dict[str, int]:
        """Also what the child wrote and nobody kept."""
        counters = super().counters
        if self._host is not None and (dropped := self._host.dropped_bytes):
            counters["log_bytes_dropped"] = dropped
        return counters

    # -- the I/O thread

    def _open(self, context: Context) -> None:
        self._socket = socket = context.socket(zmq.DEALER)
        self._host = host = self._make_host(context)
        prepare(socket, host.endpoint)
        socket.connect(host.endpoint)
        self._poller.register(socket, zmq.POLLIN)
        if (ended := host.fileno()) >= 0:
            self._poller.register(ended, zmq.POLLIN)
        self._send(
            Hello(
                robot=msgspec.to_builtins(self._robot),
                model=msgspec.to_builtins(self._model),
                parent_pid=os.getpid(),
                warm_up_count=self._warm_up_count,
            )
        )

    def _make_host(self, context: Context) -> Host:
        if not self._in_thread:
            return ProcessHost(threads=self._threads)
        from phyai_engine.serve.worker import serve  # noqa: PLC0415 - only here does it run in this process

        return ThreadHost(functools.partial(serve, context=context, load=self._load, threads=self._threads))

    def _heard(self, message: Message) -> None:
        if not self._heartbeat_ns and self._host is not None:
            self._host.connected()
        super()._heard(message)

    def _check(self, now_s: float) -> None:
        host = self._host
        assert host is not None  # opened
        host.pump()
        if (cause := host.exit_cause()) is not None:
            raise EngineDiedError("the engine ended", got=cause)
        if self.hello is None:
            if now_s > self._start_by_s:
                raise self._not_ready()
            return
        age_s = self.heartbeat_age_s
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
        running = self.requests.running()
        # The heartbeat's word may be a period old; once it is ready the requests tell exactly.
        phase = "busy" if running else "idle" if self.hello is not None else self._phase
        epoch, chunk_id, ran_s = running or (0, 0, (time.monotonic_ns() - self._phase_ns) / 1e9)
        self.crash = crash = CrashReport(
            str(error.got or error.what), host.pid, phase, ran_s, epoch, chunk_id, host.tail()
        )
        where = f"pid {crash.pid}, {crash.ran}"
        return type(error)(error.what, got=error.got, wanted=error.wanted, where=where, do=crash.said)

    def _close(self, context: Context) -> None:
        host, socket = self._host, self._socket
        if host is not None and socket is not None:
            with contextlib.suppress(EngineError):
                self._send(Cancel(epoch=_LAST_EPOCH))
                self._send(Goodbye())
            self._ended_clean = self._end_host(host)
        if socket is not None:
            socket.close(linger=0)
        if not self._in_thread or host is None or host.exit_cause() is not None:
            context.term()  # would wait for ever for a worker thread that still has its socket

    def _end_host(self, host: Host) -> bool:
        until_s = time.monotonic() + _LOST_WAIT_S if self._stop_at_s is None else self._stop_at_s
        # A lost one had its chance, and the memory it holds is wanted by the next one.
        lost = self.crash is not None
        ended = end(host, until_s, ask=self._ask and not lost, trace=lost or self._phase == "busy")
        if self.crash is not None:
            self.crash = replace(self.crash, last_lines=host.tail())
        host.close()
        return ended
