"""A server of the engine protocol that does what a test says: sessions and deltas as a real one, answers on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from phyai_engine.errors import KeyframeError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.streams import KeptStreams, request_from_wire
from phyai_engine.types import Request, StageTimings

HORIZON = 5
Answer = Callable[["ScriptedServer", bytes, Request], None]


def engine_hello(**changes: Any) -> wire.EngineHello:
    """Of a server for the robot of conftest."""
    given: dict[str, Any] = {
        "horizon": HORIZON,
        "action_names": ("lift", "turn"),
        "dt_s": 0.1,
        "note": "scripted",
        "warm_up_ms": (1.0,),
        "pid": 1,
        "versions": {},
        "heartbeat_s": 0.05,
        "expiry_s": 1.0,
        **changes,
    }
    return wire.EngineHello(**given)


class ScriptedServer:
    """In a thread of this process, on a TCP port.

    :param answer: called with each whole request; None answers with the first state value, as the stand-in does.
    :param greet: answer to a hello. :param guard: called with the socket before it binds.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        *,
        greet: Callable[[wire.Hello], wire.HelloReply] | None = None,
        port: int = 0,
        cameras: tuple[str, ...] = ("top", "wrist"),
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        guard: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        self.answer: Answer = answer or ScriptedServer.reply
        self._greet = greet or (lambda hello: wire.HelloReply(engine=engine_hello()))
        self._cameras, self._own = cameras, context is None
        self._context = zmq.Context() if context is None else context
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        guard(self.socket)
        if port:
            self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.port: int = port or self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.kept: dict[bytes, KeptStreams] = {}
        self.hellos: list[wire.Hello] = []
        self.heard: list[wire.Message] = []  # everything but hellos
        self.sizes: list[int] = []  # bytes of each request message
        self.beating = True
        self._running = True
        self._use = threading.RLock()  # of the socket, which tests send through from threads of their own
        self._thread = threading.Thread(target=self._run, name="scripted-server", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def requests(self) -> list[wire.RequestMessage]:
        return [m for m in self.heard if isinstance(m, wire.RequestMessage)]

    def send(self, peer: bytes, message: wire.Message, arrays: Any = None) -> None:
        with self._use:
            self.socket.send_multipart([peer, *wire.encode(message, arrays)])

    def reply(self, peer: bytes, request: Request, chunk_id: int | None = None, epoch: int | None = None) -> None:
        """A chunk full of the first state value."""
        message = wire.Reply(
            epoch=request.epoch if epoch is None else epoch,
            chunk_id=request.chunk_id if chunk_id is None else chunk_id,
            timings=StageTimings(queue_ms=0.5, inference_ms=1.0),
        )
        self.send(peer, message, {"actions": np.full((HORIZON, 2), request.observation.state[0])})

    def close(self) -> None:
        """As SIGKILL: nobody is told, the connections end. Idempotent."""
        self._running = False
        self._thread.join(5.0)
        if not self.socket.closed:
            self.socket.close(0)
            if self._own:
                self._context.term()

    def _run(self) -> None:
        beat_s = 0.0
        while self._running:
            with self._use:
                received = self.socket.recv_multipart() if self.socket.poll(0) else None
            if received is None:
                time.sleep(0.001)
            else:
                self._on_frames(received[0], received[1:])
            if self.beating and time.monotonic() > beat_s:
                beat_s = time.monotonic() + 0.05
                for peer in self.kept:
                    self.send(peer, wire.Heartbeat(phase="idle"))

    def _on_frames(self, peer: bytes, frames: list[bytes]) -> None:
        message, arrays = wire.decode(frames)
        if isinstance(message, wire.Hello):
            self.hellos.append(message)
            reply = self._greet(message)
            if reply.engine is not None:
                self.kept[peer] = KeptStreams(self._cameras)
            self.send(peer, reply)
            return
        self.heard.append(message)
        if isinstance(message, wire.Goodbye):
            self.kept.pop(peer, None)
        elif peer not in self.kept:
            self.send(peer, wire.ErrorReply(reason="unknown_session", error_type="", text="who are you?"))
        elif isinstance(message, wire.RequestMessage):
            self.sizes.append(sum(map(len, frames)))
            self._on_request(peer, message, arrays)

    def _on_request(self, peer: bytes, message: wire.RequestMessage, arrays: Any) -> None:
        ids = {"epoch": message.epoch, "chunk_id": message.chunk_id}
        try:
            message, arrays = self.kept[peer].whole(message, arrays)
        except KeyframeError as error:
            self.send(peer, wire.ErrorReply(reason="keyframe", error_type="", text=str(error), **ids))
            return
        self.answer(self, peer, request_from_wire(message, arrays, now_mono_ns=time.monotonic_ns()))
