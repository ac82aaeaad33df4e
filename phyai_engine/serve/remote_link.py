"""The link to an engine server: a connection that is made again whenever it is lost.

A lost connection is no lost robot. What was in flight fails at once and the node asks again with a fresh observation;
the playing chunk goes on, then the robot holds. Only a silence above the heartbeat's limit is told as Lost, which stops
the robot; the link goes on trying, and a person re-arms when it is back.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from phyai_engine.config import RobotConfig
from phyai_engine.errors import EngineDiedError, EngineError, EngineRefusedError, EngineTimeoutError, ProtocolError
from phyai_engine.serve.auth import check_connect, secure_client
from phyai_engine.serve.keys import RobotKeys
from phyai_engine.serve.link import Context, Link
from phyai_engine.serve.protocol import (
    HEARTBEAT_S,
    Alive,
    Array,
    Buffer,
    EngineHello,
    ErrorReply,
    Goodbye,
    Hello,
    HelloReply,
    Message,
    Reply,
    RequestMessage,
)
from phyai_engine.serve.sockets import prepare
from phyai_engine.serve.streams import SentStreams
from phyai_engine.types import Request

_HANDSHAKE_S = 2.0  # of one attempt, from connecting to the server's answer
_LEAVE_S = 0.2  # for the goodbye to be sent
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0  # between attempts; doubled each time, shortened by chance
# A robot whose request was refused asks again with its next tick, and sends images: an overloaded server would get the
# more the less it can do. So it hears of the refusal a little later.
_FIRST_REFUSAL_S, _LONGEST_REFUSAL_S = 0.025, 0.2
_WAITING_S = 0.5  # between signs of life of a robot that waits for a server to warm up
_BEATS = 3  # heartbeats that the limit must span
_SIGNS = 4  # signs of life of ours within the time after which a server ends a session
_log = logging.getLogger(__name__)

_ENDED = {
    zmq.Event.CLOSED: "the connection was refused",
    zmq.Event.DISCONNECTED: "the connection ended",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the server does not let this robot's key in: `phyai robots add` there",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "only one of server and robot has keys",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "it broke off the handshake: no engine server, or one with another key",
}
_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.CLOSED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
_EVENTS |= zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteEngine:
    """A model on a server.

    :param endpoint: tcp://HOST:PORT (of a name its IPv4 address), tcp://[IPV6]:PORT or ipc://PATH.
    :param model: its name there.
    :param robot_id: of this robot among all of the fleet; empty: the robot file's.
    :param keys: needed beyond this host. :param jpeg_quality: 1..95 sends images as JPEG, 0 as they are.
    :raises ConfigError: an address on another host without keys.
    """

    endpoint: str
    model: str
    robot_id: str = ""
    keys: RobotKeys | None = None
    jpeg_quality: int = 0

    def __post_init__(self) -> None:
        check_connect(self.endpoint, self.keys)


class RemoteLink(Link):
    """See the module. A socket lives for one connection: what a lost one still held cannot reach the next.

    :param rest: as :class:`Link` takes it.
    """

    def __init__(self, robot: RobotConfig, remote: RemoteEngine, **rest: Any) -> None:
        super().__init__(robot, waits_for_cancelled=False, **rest)
        self._remote = remote
        self._instance = secrets.randbits(62)
        self._streams = SentStreams(remote.jpeg_quality)
        self._context: Context | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._accepted = False  # by the server, on this connection
        self._leaving = False  # it said goodbye: what is in flight may still come
        self._told_lost = False
        self._failures = 0  # attempts since the last session
        self._next_s = 0.0  # when to try again
        self._by_s = 0.0  # when this attempt, or this farewell, is over
        self._spoke_s = 0.0
        self._alive_s = 0.0  # longest silence of ours; 0 = none is too long
        self._why = ""
        self._overloaded: tuple[float, ErrorReply] | None = None  # told when, so that it is not asked again at once
        self._overloads = 0  # in a row
        self._broken = ""  # why the connection is to be given up, at the end of this turn
        self._retry_s = 0.0  # and the server's word when to come again

    @property
    def words(self) -> str:
        """Connected, or why not."""
        if self._accepted:
            return f"connected to {self._remote.endpoint}"
        why = f": {self._why}" if self._why else ""
        return f"connecting to {self._remote.endpoint}, attempt {self._failures + 1}{why}"

    @property
    def ready(self) -> bool:
        """Also whether the session stands."""
        return super().ready and self._accepted

    # -- the connection

    def _open(self, context: Context) -> None:
        self._context = context
        self._enter("connecting")
        self._connect(time.monotonic())

    def _connect(self, now_s: float) -> None:
        assert self._context is not None  # opened
        self._by_s = now_s + _HANDSHAKE_S
        self._socket = socket = self._context.socket(zmq.DEALER)
        prepare(socket, self._remote.endpoint)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a connection that does not stand
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # we do that: with jitter, a new hello and nothing left over
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_S * 1e3))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(_HANDSHAKE_S * 1e3))
        if self._remote.keys is not None:
            secure_client(socket, self._remote.keys)
        self._monitor = socket.get_monitor_socket(int(_EVENTS))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            socket.connect(self._remote.endpoint)
        except zmq.ZMQError as error:
            raise EngineRefusedError(f"not an address: {error}", got=self._remote.endpoint) from None

    def _disconnect(self) -> None:
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        self._accepted = self._leaving = False
        self._alive_s = 0.0
        if socket is not None and monitor is not None:
            self._poller.unregister(socket)
            self._poller.unregister(monitor)
            _shut(socket, monitor, linger_s=0.0)

    def _lose(self, why: str, pause_s: float = 0.0) -> None:
        """The connection is over: try again in a while, not at the same time as every other robot.

        :param pause_s: the least while. Closes the socket: not while messages are taken from it.
        """
        had = self._accepted
        self._why, self._broken = why, ""
        self._disconnect()
        self._failures = 0 if had else self._failures + 1
        pause_s = max(pause_s, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures, 16)))
        self._next_s = time.monotonic() + pause_s * random.uniform(0.5, 1.0)
        self.requests.unanswered(EngineDiedError("the connection to the engine server was lost", got=why))
        if had:
            self.requests.count("disconnected")
            _log.warning("%s: %s", self._remote.endpoint, why)

    def _pause_s(self) -> float:
        next_s = self._next_s if self._socket is None else math.inf
        if self._overloaded is not None:
            next_s = min(next_s, self._overloaded[0])
        return min(HEARTBEAT_S, max(0.0, next_s - time.monotonic()))

    # -- the session

    def _greet(self) -> None:
        self._accepted = False
        had = self.hello
        self._send(
            Hello(
                robot=msgspec.to_builtins(self._robot),
                robot_id=self._remote.robot_id,
                model=self._remote.model,
                horizon=0 if had is None else had.horizon,
                statistics="" if had is None else had.statistics,
                instance=self._instance,
            )
        )

    def _on_hello(self, reply: HelloReply) -> None:
        """A refusal is fatal at the start, unless time may mend it; later the robot waits, as for any lost server."""
        if self._accepted:
            self._on_other(reply)
            return
        try:
            if reply.engine is None:
                raise EngineRefusedError("the engine server refused", got=reply.reason)
            self._check_engine(reply.engine)
        except EngineRefusedError as error:
            if self.hello is None and not reply.retry_s:
                raise
            self._broken, self._retry_s = str(error), reply.retry_s
        else:
            self._begin_session(reply.engine)

    def _check_engine(self, engine: EngineHello) -> None:
        super()._check_engine(engine)
        if (least_s := _BEATS * engine.heartbeat_s) > self._heartbeat_timeout_s:
            raise EngineRefusedError(
                "the server's heartbeat is too slow for this limit",
                got=f"engine_heartbeat_s {self._heartbeat_timeout_s}",
                wanted=f">= {least_s:g}, {_BEATS} of its beats",
            )

    def _begin_session(self, engine: EngineHello) -> None:
        again = self.hello is not None
        self._accepted, self._leaving, self._told_lost = True, False, False
        self._failures, self._why = 0, ""
        self._streams.forget()
        self._heartbeat_ns = time.monotonic_ns()
        self._alive_s = engine.expiry_s / _SIGNS
        self.requests.count("sessions")
        if again:  # it waited for the server, and the world went on
            self.requests.outdated(EngineError("asked while the engine server was away: ask again"))
            _log.info("%s: back", self._remote.endpoint)
        self._enter("idle")
        with self._condition:
            self.hello = engine
            self._condition.notify_all()

    def _unread(self, error: ProtocolError) -> None:
        super()._unread(error)
        if not self._accepted:  # another server is there now, of another version
            self._broken = str(error)

    def _heard(self, message: Message) -> None:
        if isinstance(message, ErrorReply) and message.reason == "protocol":
            return  # it lives, but not for us: so it answers a robot that was revoked
        if isinstance(message, Reply):
            self._overloads = 0
        if self._accepted:
            super()._heard(message)
        else:  # it lives, and warms up perhaps: it is to know that somebody waits
            self._by_s = time.monotonic() + _HANDSHAKE_S
            self._alive_s = _WAITING_S

    def _on_error(self, message: ErrorReply) -> None:
        if message.reason == "keyframe":
            self._streams.forget()
            if (request := self.requests.again(message.epoch, message.chunk_id)) is not None:
                self._send_request(request)
                return
        elif message.reason == "overloaded" and self._overloaded is None:
            pause_s = min(_LONGEST_REFUSAL_S, _FIRST_REFUSAL_S * 2.0**self._overloads)
            self._overloads = min(self._overloads + 1, 16)
            self._overloaded = time.monotonic() + pause_s * random.uniform(0.5, 1.0), message
            return
        elif message.reason == "unknown_session":
            self.requests.unanswered(EngineError("the server ended this session", got=message.text))
            self._by_s = time.monotonic() + _HANDSHAKE_S
            self._greet()
            return
        super()._on_error(message)

    def _on_other(self, message: Message) -> None:
        if isinstance(message, Goodbye):
            self._leaving, self._why = True, f"the server said goodbye: {message.reason}"
            self._by_s = time.monotonic() + self._heartbeat_timeout_s
        else:
            super()._on_other(message)

    # -- each turn

    def _flush(self) -> None:
        if self._overloaded is not None and time.monotonic() >= self._overloaded[0]:
            message, self._overloaded = self._overloaded[1], None
            super()._on_error(message)
        if self._accepted and not self._leaving:
            super()._flush()
        if self._socket is not None and self._alive_s and time.monotonic() - self._spoke_s > self._alive_s:
            self._send(Alive())

    def _to_wire(self, request: Request) -> tuple[RequestMessage, dict[str, Array]]:
        waited_ms = (time.monotonic_ns() - request.observation.snapshot_mono_ns) / 1e6
        return self._streams.to_wire(replace(request, remaining_ms=request.remaining_ms - max(0.0, waited_ms)))

    def _send_frames(self, frames: list[Buffer]) -> None:
        try:
            super()._send_frames(frames)
        except EngineDiedError:
            self._broken = "the connection ended"
            return
        self._spoke_s = time.monotonic()
        self.requests.count("bytes_sent", sum(map(len, frames)))

    def _check(self, now_s: float) -> None:
        self._watch_connection()
        if self._broken:
            self._lose(self._broken, self._retry_s)
            self._retry_s = 0.0
        if self._socket is None:
            if now_s >= self._next_s:
                self._connect(now_s)
        elif self._leaving:
            if self.requests.running() is None or now_s > self._by_s:
                self._lose(self._why)
        elif not self._accepted and now_s > self._by_s:
            self._lose(self._why or f"no answer to the hello within {_HANDSHAKE_S} s")
        if self.hello is None:
            if now_s > self._start_by_s:
                raise self._not_ready()
        elif not self._told_lost and self.heartbeat_age_s > self._heartbeat_timeout_s:
            self._tell_lost()

    def _watch_connection(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = zmq.Event(recv_monitor_message(self._monitor)["event"])
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._greet()
            elif event in _ENDED:
                self._lose(_ENDED[event])

    def _tell_lost(self) -> None:
        self._told_lost = True
        silence_s = self.heartbeat_age_s
        if self._accepted:
            self._lose("the server fell silent")
        self.requests.lost(
            EngineTimeoutError(
                "no heartbeat from the engine server",
                got=f"{silence_s:.2f} s of silence",
                wanted=f"at most {self._heartbeat_timeout_s} s",
                where=self._remote.endpoint,
                do=f"Now {self.words}. Re-arm when it is back.",
            )
        )
        self._announce()

    def _not_ready(self) -> EngineError:
        return EngineTimeoutError(
            "the engine server did not accept this robot",
            got=self._why or "no answer",
            wanted=f"within {self._start_timeout_s} s",
            where=self._remote.endpoint,
        )

    def _close(self, context: Context) -> None:
        if self._socket is not None and self._monitor is not None:
            if self._accepted:
                self._send(Goodbye())
            _shut(self._socket, self._monitor, linger_s=_LEAVE_S)
        context.term()  # at most as long as that


def _shut(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], *, linger_s: float) -> None:
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=int(linger_s * 1e3))
