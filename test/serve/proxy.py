"""A TCP proxy that makes a network bad on purpose: delay, jitter, loss, cuts. In user space: it needs no netem.

TCP repairs what is lost, at a price in time. A lost segment is therefore modelled as what an application sees of it:
its bytes, and all that follow them, come a retransmission later (``retransmit_s``, doubled for each loss of the same
segment, as RFC 6298 does; the segments of one block are repaired at the same time). A cut is what a pulled cable does:
both ends stay connected and nothing passes; a reset ends the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

SEGMENT = 1448  # payload of an Ethernet frame


@dataclass(frozen=True, slots=True)
class Faults:
    """What the network does to each direction.

    :param delay_s: one way. :param jitter_s: up to so much more, evenly; order is kept, as TCP does.
    :param loss: probability that one segment is lost, each time it is sent.
    :param retransmit_s: first retransmission timeout; Linux has 0.2.
    :param drop_after: bytes towards the server after which a connection is reset; 0 = never.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    retransmit_s: float = 0.2
    drop_after: int = 0


class Proxy:
    """Listens on a free port of this host and forwards to ``port``. Its own thread; faults may change at any time."""

    def __init__(self, port: int, faults: Faults = Faults(), *, seed: int = 0) -> None:
        self.faults = faults
        self.connections = 0  # ever
        self.bytes_up = self.bytes_down = 0  # towards the server, and back
        self._target, self._random = port, random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """From now on nothing passes; nobody is told."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def mend(self) -> None:
        """What waited passes, and the rest."""
        self._loop.call_soon_threadsafe(self._flows.set)

    def reset(self) -> None:
        """End every connection, as a restarted switch with state does."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._loop.is_closed():
            return
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(5.0)

    async def _end(self) -> None:
        self._server.close()
        self._abort()
        self._flows.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down: the robot sees its connection end
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(far_writer)
        for source, sink, count in ((reader, far_writer, self._up), (far_reader, writer, self._down)):
            task = self._loop.create_task(self._pump(source, sink, count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _up(self, size: int) -> None:
        self.bytes_up += size

    def _down(self, size: int) -> None:
        self.bytes_down += size

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: Callable[[int], None]
    ) -> None:
        """One direction: a reader that stamps blocks with their time of arrival, and a writer that waits for it."""
        blocks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)  # a full queue stops reading, as a window does
        writing = self._loop.create_task(self._write(blocks, sink))
        passed = 0
        due = 0.0
        try:
            while block := await source.read(64 << 10):
                await self._flows.wait()
                count(len(block))
                passed += len(block)
                due = max(due, time.monotonic() + self._late(len(block)))  # order is kept
                await blocks.put((due, block))
                if 0 < self.faults.drop_after < passed:
                    self._abort()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await blocks.put((0.0, b""))
                await writing
            writing.cancel()

    def _late(self, size: int) -> float:
        faults, chance = self.faults, self._random.random
        repaired = 0.0
        if faults.loss:
            for _ in range(-(-size // SEGMENT)):
                timeout, late = faults.retransmit_s, 0.0
                while chance() < faults.loss:
                    late += timeout
                    timeout *= 2
                repaired = max(repaired, late)
        return faults.delay_s + faults.jitter_s * chance() + repaired

    async def _write(self, blocks: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                due, block = await blocks.get()
                if not block:
                    break
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                await self._flows.wait()
                sink.write(block)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)
