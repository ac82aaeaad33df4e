"""The front of a server: one thread, one ROUTER socket to the robots, the pools behind it. It never computes.

It keeps what robots send once, hands replicas whole requests, and says at once what cannot be answered in time.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from phyai_engine import __version__
from phyai_engine.errors import KeyframeError, PhyaiError, ProtocolError
from phyai_engine.serve.auth import Gate
from phyai_engine.serve.batcher import Ask
from phyai_engine.serve.metrics import Figures
from phyai_engine.serve.pool import Pool
from phyai_engine.serve.protocol import (
    Alive,
    Array,
    Cancel,
    ErrorKind,
    ErrorReply,
    Goodbye,
    Heartbeat,
    Hello,
    HelloReply,
    Message,
    Reply,
    RequestMessage,
    ServerLoad,
    StatusQuery,
    StatusReply,
    decode,
    encode,
)
from phyai_engine.serve.server_config import ServerConfig
from phyai_engine.serve.sessions import Session, Sessions
from phyai_engine.serve.sockets import Wake, prepare, received_frames
from phyai_engine.serve.welcome import Refused, welcome
from phyai_engine.types import Refusal

_UNREAD_MESSAGES = 64  # that may wait for a robot which does not read
_LAST_WORDS_MS = 300  # for what was sent last to leave this process
_DEAD_PEER_S = 5.0  # until a connection that says nothing is closed
_log = logging.getLogger(__name__)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], config: ServerConfig, gate: Gate | None) -> zmq.Socket[bytes]:
    """The bound socket.

    :raises PhyaiError: the address is taken, or is none.
    """
    socket = context.socket(zmq.ROUTER)
    prepare(socket, config.endpoint)
    socket.setsockopt(zmq.SNDHWM, _UNREAD_MESSAGES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send tells that the robot is gone or does not read
    socket.setsockopt(zmq.MAXMSGSIZE, min(config.limits.message_bytes, socket.getsockopt(zmq.MAXMSGSIZE)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(_DEAD_PEER_S * 300))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(_DEAD_PEER_S * 1e3))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(_DEAD_PEER_S * 1e3))
    if gate is not None:
        gate.guard(socket)
    try:
        socket.bind(config.endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise PhyaiError(f"cannot bind: {error}", where=config.endpoint) from None
    return socket


class Front:
    """See the module.

    :param gate: asks for keys; None: nobody is asked. :param stopping: asked every turn; true drains and ends.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        config: ServerConfig,
        pools: Mapping[str, Pool],
        gate: Gate | None,
        figures: Figures,
        *,
        wake: Wake,
        stopping: Callable[[], bool],
        on_ready: Callable[[], None],
    ) -> None:
        self._socket, self._config, self._pools, self._gate = socket, config, pools, gate
        self._figures, self._wake, self._stopping, self._on_ready = figures, wake, stopping, on_ready
        self._sessions = Sessions(config.limits)
        self._boot = secrets.randbits(62)
        self._draining = False
        self._watched: list[Any] = []
        self._poller = zmq.Poller()

    def run(self) -> None:
        """Until told to stop; then what is under way is finished, within ``drain_s``."""
        beat_s, drained_s = time.monotonic(), math.inf
        while True:
            self._poll(beat_s)
            for frames in received_frames(self._socket):
                self._on_frames(frames)
            for pool in self._pools.values():
                pool.turn(self)
            now_s = time.monotonic()
            if now_s >= beat_s:
                self._beat(now_s)
                beat_s = now_s + self._config.heartbeat_s
            if not self._draining and (self._stopping() or all(pool.failure for pool in self._pools.values())):
                self._drain()
                drained_s = now_s + self._config.drain_s
            if self._draining and (now_s >= drained_s or not self._under_way()):
                return

    # --- what the pools tell ---

    def answered(self, ask: Ask, reply: Reply, arrays: dict[str, Array], rows: int) -> None:
        """Send a chunk on."""
        now_ns = time.monotonic_ns()
        session = self._sessions.of_slot(ask.slot)
        if session is None:
            return
        session.asking.pop((ask.epoch, ask.chunk_id), None)
        pool, timings = session.pool, reply.timings
        spent_ms = (now_ns - ask.arrived_ns) / 1e6
        queue_ms = spent_ms - timings.inference_ms
        if ask.epoch <= session.cancelled_epoch:
            self._refuse(session, ask.epoch, ask.chunk_id, "cancelled", "the request was cancelled")
            return
        assert pool.engine is not None
        assert pool.batcher is not None
        load = ServerLoad(
            robots=len(self._sessions),
            queued=len(pool.batcher),
            rows=rows,
            predicted_ms=min(1e9, pool.batcher.predicted_ms(now_ns)),
        )
        message = msgspec.structs.replace(
            reply,
            slot=0,
            timings=replace(timings, queue_ms=queue_ms, batch_ms=ask.batch_ns / 1e6),
            valid_ms=pool.engine.horizon * session.robot.dt_s * 1e3,
            load=load,
        )
        self._send(session.peer, message, arrays)  # before anything is counted: the robot waits
        self._figures.timed(pool.name, "queue_ms", queue_ms)
        self._figures.timed(pool.name, "total_ms", spent_ms)
        self._figures.outcomes[pool.name, "answered"] += 1
        if now_ns > ask.deadline_ns:
            self._figures.outcomes[pool.name, "late"] += 1

    def failed(self, ask: Ask, error: ErrorReply) -> None:
        """Send a refusal on."""
        session = self._sessions.of_slot(ask.slot)
        if session is None:
            return
        session.asking.pop((ask.epoch, ask.chunk_id), None)
        self._figures.outcomes[session.pool.name, error.reason] += 1
        self._send(session.peer, msgspec.structs.replace(error, slot=0))

    def joined(self, slot: int, reason: str) -> None:
        """Let a robot in, or not."""
        session = self._sessions.of_slot(slot)
        if session is None or session.state != "joining":
            return
        if reason:
            self._send(session.peer, HelloReply(reason=reason))
            self._end(session, "refused")
            return
        session.state = "open"
        assert session.pool.engine is not None
        engine = msgspec.structs.replace(
            session.pool.engine,
            action_names=session.robot.action_names,
            dt_s=session.robot.dt_s,
            pid=os.getpid(),
            heartbeat_s=self._config.heartbeat_s,
            expiry_s=self._config.expiry_s,
            boot=self._boot,
        )
        _log.info("%s: robot %s is here", session.pool.name, session.robot_id)
        self._send(session.peer, HelloReply(engine=engine))

    def ready(self, pool: Pool) -> None:
        """Let those in who waited for the model."""
        for session in self._sessions:
            if session.pool is pool and session.state == "waiting":
                self._join(session)
        if all(each.batcher is not None for each in self._pools.values()):
            self._on_ready()

    def forgotten(self, slot: int) -> None:
        """Ask for a keyframe, so that the new replica begins with everything."""
        if (session := self._sessions.of_slot(slot)) is not None:
            session.streams.forget()
            self._figures.events["robots whose model state was lost"] += 1
            _log.warning("%s: the model's state of robot %s is lost", session.pool.name, session.robot_id)

    # --- robots ---

    def _on_frames(self, frames: Sequence[Any]) -> None:
        peer, rest = bytes(frames[0]), [frame.buffer for frame in frames[1:]]
        session, size, now_s = self._sessions.of_peer(peer), sum(map(len, rest)), time.monotonic()
        self._figures.bytes_in += size
        user = ""
        if self._gate is not None:
            named = self._gate.robot_of(frames[-1])
            if named is None or (session is not None and named != session.user):
                if session is not None:
                    self._end(session, "revoked")
                self._send(peer, _protocol_error("this robot's key is not on the list any more"))
                return
            user = named
        try:
            if session is not None:
                session.seen_s = now_s
            robot_id = user if session is None else session.robot_id
            if robot_id and (reason := self._sessions.refused(robot_id, size, now_s)):
                self._figures.events["over the limits"] += 1
                raise ProtocolError(reason, where=f"robot {robot_id}")
            message, arrays = decode(rest)
            self._on_message(peer, user, session, message, arrays)
        except ProtocolError as error:
            self._figures.events["unreadable messages"] += 1
            self._send(peer, _protocol_error(str(error)))

    def _on_message(
        self, peer: bytes, user: str, session: Session | None, message: Message, arrays: dict[str, Array]
    ) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer, user, message)
        elif isinstance(message, StatusQuery):
            self._send(peer, StatusReply(lines=tuple(self.status())))
        elif isinstance(message, Goodbye):
            if session is not None:
                self._end(session, "goodbye")
        elif session is not None and isinstance(message, Alive):
            pass  # it was seen; also one that waits for the model says so
        elif session is None or session.state != "open":
            self._on_stranger(peer, message)
        elif isinstance(message, RequestMessage):
            self._on_request(session, message, arrays)
        elif isinstance(message, Cancel):
            session.cancelled_epoch = max(session.cancelled_epoch, message.epoch)
            session.pool.cancel(session.slot, message.epoch, self)
        else:
            raise ProtocolError("not a robot's message", got=type(message).__name__)

    def _on_stranger(self, peer: bytes, message: Message) -> None:
        """No session: it expired, or this server was restarted, or it never said hello."""
        epoch, chunk_id = (message.epoch, message.chunk_id) if isinstance(message, RequestMessage) else (0, 0)
        text = "no session: say hello"
        error = ErrorReply(reason="unknown_session", error_type="", text=text, epoch=epoch, chunk_id=chunk_id)
        self._send(peer, error)

    def _on_hello(self, peer: bytes, user: str, hello: Hello) -> None:
        now_s = time.monotonic()
        try:
            if self._draining:
                raise Refused("the server is shutting down", retry_s=self._config.drain_s + 1.0)
            session = welcome(hello, peer, user, self._pools, self._sessions, self._config, now_s)
        except (Refused, PhyaiError) as refusal:
            self._figures.events["hellos refused"] += 1
            retry_s = refusal.retry_s if isinstance(refusal, Refused) else 0.0
            self._send(peer, HelloReply(reason=str(refusal), retry_s=retry_s))
            return
        before = self._sessions.of_peer(peer), self._sessions.of_robot(session.robot_id)
        for old in {each for each in before if each is not None}:
            self._end(old, "said hello again")
        self._sessions.add(session)
        self._figures.events["sessions"] += 1
        if session.pool.batcher is not None:
            self._join(session)

    def _join(self, session: Session) -> None:
        session.state = "joining"
        session.pool.join(session.slot, session.hello.robot, self)

    def _on_request(self, session: Session, message: RequestMessage, arrays: dict[str, Array]) -> None:
        ids = message.epoch, message.chunk_id
        if self._draining:
            self._refuse(session, *ids, "overloaded", "the server is shutting down")
            return
        if message.chunk_id <= session.last_chunk_id:
            self._refuse(session, *ids, "duplicate", f"chunk_id {message.chunk_id} after {session.last_chunk_id}")
            return
        try:
            message, arrays = session.streams.whole(message, arrays)
        except ProtocolError as error:
            self._refuse(session, *ids, "keyframe" if isinstance(error, KeyframeError) else "protocol", str(error))
            return
        session.last_chunk_id = message.chunk_id
        if message.epoch <= session.cancelled_epoch:
            self._refuse(session, *ids, "cancelled", "the request was cancelled")
            return
        now_ns = time.monotonic_ns()
        session.asking[ids] = now_ns
        deadline_ns = now_ns + round(self._budget_ms(message.remaining_ms) * 1e6)
        ask = Ask(session.robot_id, session.slot, *ids, now_ns, deadline_ns, content=(message, arrays))
        session.pool.submit(ask, now_ns, self)

    def _budget_ms(self, remaining_ms: float) -> float:
        """Time to answer. A robot without time left plays nothing: no handoff waits, but it would like to go on."""
        config = self._config
        if not remaining_ms > 0.0:  # also NaN
            return config.hold_ms
        return min(remaining_ms, config.budget_max_ms) - config.return_ms

    def _refuse(self, session: Session, epoch: int, chunk_id: int, reason: ErrorKind, text: str) -> None:
        self._figures.outcomes[session.pool.name, reason] += 1
        refusal = Refusal.OVERLOADED if reason == "overloaded" else Refusal.NONE
        error = ErrorReply(reason=reason, error_type="", text=text, refusal=refusal, epoch=epoch, chunk_id=chunk_id)
        self._send(session.peer, error)

    def _end(self, session: Session, why: str) -> None:
        self._sessions.remove(session)
        session.pool.leave(session.slot, session.robot_id)
        self._figures.events[f"sessions ended: {why}"] += 1
        _log.info("%s: robot %s is gone: %s", session.pool.name, session.robot_id, why)

    # --- each turn ---

    def _poll(self, beat_s: float) -> None:
        watched = [socket for pool in self._pools.values() for socket in pool.sockets()]
        if watched != self._watched:
            self._watched, self._poller = watched, zmq.Poller()
            for socket in (self._socket, self._wake, *watched):
                self._poller.register(socket, zmq.POLLIN)
        now_ns = time.monotonic_ns()
        wakes = [wake for pool in self._pools.values() if (wake := pool.wake_ns(now_ns)) is not None]
        due_ns = min([round(beat_s * 1e9), *wakes])
        found = self._poller.poll(max(0, math.ceil((due_ns - now_ns) / 1e6)))
        if any(what is self._wake or what == self._wake.fileno() for what, _ in found):
            self._wake.clear()

    def _beat(self, now_s: float) -> None:
        for session in self._sessions.expired(self._config.expiry_s, now_s):
            self._end(session, "expired")
        for session in self._sessions:
            epoch, chunk_id = session.running
            phase = session.pool.phase if session.state != "open" else "busy" if session.asking else "idle"
            self._send(session.peer, Heartbeat(phase=phase, epoch=epoch, chunk_id=chunk_id))
            if session.pool.failure and session.state == "waiting":
                self._reject(session)

    def _reject(self, session: Session) -> None:
        self._send(session.peer, HelloReply(reason=f"the model cannot be served: {session.pool.failure}"))
        self._end(session, "refused")

    def _drain(self) -> None:
        self._draining = True
        self._socket.setsockopt(zmq.LINGER, _LAST_WORDS_MS)
        _log.info("shutting down: %d robots, %d requests under way", len(self._sessions), self._under_way())
        for session in self._sessions:
            if session.pool.failure:
                self._reject(session)
            else:
                self._send(session.peer, Goodbye(reason="the server is shutting down"))

    def _under_way(self) -> int:
        return sum(pool.running() + (0 if pool.batcher is None else len(pool.batcher)) for pool in self._pools.values())

    def _send(self, peer: bytes, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        try:
            self._socket.send_multipart([peer, *encode(message, arrays)], zmq.NOBLOCK)
        except zmq.Again:  # it does not read: what is sent to it is lost, and it expires unless it says something
            self._figures.events["messages to robots that do not read"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if (session := self._sessions.of_peer(peer)) is not None:
                self._end(session, "disconnected")

    # --- figures ---

    def status(self) -> Iterator[tuple[str, str]]:
        """Name and value, for people."""
        yield "version", __version__
        yield "pid", str(os.getpid())
        yield "robots", ", ".join(sorted(session.robot_id for session in self._sessions)) or "none"
        for name, pool in self._pools.items():
            state = pool.failure or ("ready" if pool.batcher is not None else pool.phase)
            yield name, f"{state}, {pool.up} of {len(pool.served.places)} replicas"
            if pool.batcher is not None:
                latency = pool.batcher.latency
                yield f"{name} batch", f"{latency.a:.2f} + {latency.b:.2f} x rows + {latency.slack_ms:.2f} ms"
        yield from self._figures.lines()

    def gauges(self) -> Iterator[tuple[str, str, float]]:
        """(name, model, value) of what is so now; read by another thread."""
        yield "robots", "", len(self._sessions)
        for name, pool in self._pools.items():
            yield "replicas", name, pool.up
            yield "running", name, pool.running()
            yield "queued", name, 0 if pool.batcher is None else len(pool.batcher)


def _protocol_error(text: str) -> ErrorReply:
    return ErrorReply(reason="protocol", error_type="ProtocolError", text=text)
