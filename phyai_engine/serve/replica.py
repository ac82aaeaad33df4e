"""One replica: a child process with a model, seen from the front. One batch at a time; for the front's thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from phyai_engine.config import child_environment
from phyai_engine.errors import ProtocolError
from phyai_engine.serve.batcher import Ask
from phyai_engine.serve.host import ProcessHost, end
from phyai_engine.serve.protocol import (
    Array,
    Cancel,
    EngineHello,
    Goodbye,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    Phase,
    decode,
    encode,
)
from phyai_engine.serve.sockets import prepare, received

_SILENCE_S = 2.0  # above what a model holds the interpreter lock for; a dead process is seen at once
_LOOK_S = 0.01  # system calls: not at every message
_STALL_S = 0.5  # a gap between two looks of ours: its silence proves nothing then
_log = logging.getLogger(__name__)


class Replica:
    """See the module.

    :param hello: what it loads. :param device: the only accelerator that it sees; None: as this process.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        index: int,
        hello: Hello,
        *,
        device: int | None,
        threads: int,
        start_timeout_s: float,
    ) -> None:
        self.index = index
        self.engine: EngineHello | None = None
        self.phase: Phase = "loading"
        self.running: dict[int, Ask] = {}
        self._start_by_s = time.monotonic() + start_timeout_s
        self._heard_s = self._looked_s = time.monotonic()
        environment = None if device is None else child_environment(CUDA_VISIBLE_DEVICES=str(device))
        self.host = ProcessHost(threads=threads, environment=environment)
        self.socket = context.socket(zmq.DEALER)
        prepare(self.socket, self.host.endpoint)
        self.socket.connect(self.host.endpoint)
        self._connected = False
        self.send(hello)

    def send(self, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """One message. A replica that is gone loses it; :meth:`lost` says so."""
        try:
            self.socket.send_multipart(encode(message, arrays), zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("replica %d takes no messages", self.index)

    def join(self, slot: int, robot: dict[str, Any]) -> None:
        """Tell it of a robot; it answers with a JoinReply."""
        self.send(Join(slot=slot, robot=robot))

    def leave(self, slot: int) -> None:
        """A robot is gone."""
        self.send(Leave(slot=slot))

    def run(self, asks: Sequence[Ask]) -> None:
        """Send a batch. Each ask's content is its message and arrays, whole."""
        for left, ask in zip(range(len(asks) - 1, -1, -1), asks, strict=True):
            message, arrays = ask.content
            self.running[ask.slot] = ask
            self.send(msgspec.structs.replace(message, slot=ask.slot, rows_left=left), arrays)

    def cancel(self, slot: int, epoch: int) -> None:
        """Have a running row of the slot end, if its epoch is at most ``epoch``."""
        ask = self.running.get(slot)
        if ask is not None and ask.epoch <= epoch:
            self.send(Cancel(slot=slot, epoch=epoch))

    def released(self, slot: int, epoch: int, chunk_id: int) -> Ask | None:
        """The running request that an answer means; None for an answer to nothing."""
        ask = self.running.get(slot)
        if ask is None or (ask.epoch, ask.chunk_id) != (epoch, chunk_id):
            return None
        return self.running.pop(slot)

    def receive(self) -> Iterator[tuple[Message, dict[str, Array]]]:
        """What it said, but for heartbeats."""
        for frames in received(self.socket):
            try:
                message, arrays = decode(frames)
            except ProtocolError as error:
                _log.error("replica %d: %s", self.index, error)
                continue
            if not self._connected:
                self._connected = True
                self.host.connected()
            self._heard_s = time.monotonic()
            if isinstance(message, Heartbeat):
                self.phase = message.phase
            else:
                yield message, arrays

    def lost(self, now_s: float) -> str:
        """Why it will not answer any more, or ""."""
        if now_s - self._looked_s < _LOOK_S:
            return ""
        self.host.pump()
        if (cause := self.host.exit_cause()) is not None:
            return cause
        stalled, self._looked_s = now_s - self._looked_s > _STALL_S, now_s
        if stalled:
            self._heard_s = now_s
        if self.engine is None:
            return "" if now_s < self._start_by_s else f"still {self.phase} after its time to start"
        silence_s = now_s - self._heard_s
        return f"{silence_s:.1f} s of silence" if silence_s > _SILENCE_S else ""

    def ask_to_end(self) -> None:
        """It may take its time: see :meth:`end`."""
        self.send(Goodbye())

    def end(self, until_s: float) -> bool:
        """Wait for one that was asked to end; killed before ``until_s`` (monotonic). True: nothing is left of it."""
        ended = end(self.host, until_s, ask=True, trace=False)
        self.socket.close(linger=0)
        self.host.close()
        return ended

    def kill(self) -> None:
        """End it now, without waiting: :meth:`gone` says when it has."""
        self.host.kill()
        self.socket.close(linger=0)

    def gone(self, until_s: float = 0.0) -> bool:
        """True once a killed one has ended; what it held is released then.

        :param until_s: monotonic time, to wait for it.
        """
        if not self.host.wait(max(0.0, until_s - time.monotonic())):
            return False
        self.host.close()
        return True
