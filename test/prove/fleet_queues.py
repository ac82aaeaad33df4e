"""`phyai serve` with another queue in place of the product's, for comparison: first in, first out, nobody refused."""

from __future__ import annotations

from phyai_engine.serve import pool
from phyai_engine.serve.batcher import Ask, Batcher, Dropped
from phyai_engine.serve.server import serve_command


class Fifo(Batcher):
    """Runs whatever came first, however late it will be; a free replica never waits."""

    replaces = False

    def offer(self, ask: Ask, now_ns: int) -> list[Dropped]:
        """Queue it."""
        dropped = []
        if self.replaces and (older := self._by_slot.get(ask.slot)) is not None:
            self._remove(older)
            dropped.append(Dropped(older, "replaced"))
        self._queue.append(ask)
        self._by_slot[ask.slot] = ask
        return dropped

    def take(self, replica: int, now_ns: int) -> tuple[list[Ask], list[Dropped]]:
        """As many as fit."""
        state = self._replicas[replica]
        if state.rows or not self._queue:
            return [], []
        rows = self._queue[: self.buckets[-1]]
        for ask in rows:
            self._remove(ask)
            ask.started_ns = now_ns
        bucket = self.bucket(len(rows))
        state.rows, state.started_ns, state.until_ns = bucket, now_ns, now_ns + self._takes_ns(bucket)
        return rows, []

    def wake_ns(self, now_ns: int) -> int | None:
        """Only events wake it."""
        return None


class FifoNewest(Fifo):
    """Likewise, but a robot's newer request replaces its older one."""

    replaces = True


QUEUES = {"deadline": Batcher, "fifo": Fifo, "fifo_newest": FifoNewest}


def serve(config: str, queue: str) -> None:
    """Serve with the named queue."""
    pool.Batcher = QUEUES[queue]  # type: ignore[misc]
    serve_command(config)
