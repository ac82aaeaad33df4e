"""Which requests run next, together, on which replica: pure logic. No sockets, no torch; every call is told the time.

Earliest deadline first. A request is taken only if the plan (:meth:`Batcher._plan_fails`) still answers everything in
time; else one is refused at once, of the robot that was refused least of late. A free replica waits up to the window
for more rows, but never past the moment from which the earliest deadline would be missed.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phyai_engine.errors import ConfigError
from phyai_engine.serve.latency import LatencyModel

WINDOW_MAX_MS = 20.0
_DEBT_MEMORY = 0.9  # per request of the robot: about its last ten count
_DEBT_GAP = 0.5  # a waiting request gives way to a newcomer only if its robot is better off by this much
_TRIAL = 8  # requests refused in a row by prediction alone, until one is run all the same
_MS = 1_000_000


@dataclass(slots=True, eq=False)
class Ask:
    """One request in the queue.

    :param robot: whose, for fairness; ``slot`` its session. :param arrived_ns: monotonic, as is ``deadline_ns``, by
        which the answer must be here. :param replica: the only one that may answer, -1 = any.
    :param content: the caller's own. :param started_ns: when it was sent to a replica; 0: not yet. :param batch_ns: of
        the time until then, what its replica was free and waited for more rows.
    """

    robot: str
    slot: int
    epoch: int
    chunk_id: int
    arrived_ns: int
    deadline_ns: int
    replica: int = -1
    content: Any = None
    started_ns: int = 0
    batch_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Dropped:
    """A request that will not run."""

    ask: Ask
    reason: Literal["replaced", "overloaded"]


@dataclass(slots=True, eq=False)
class _Replica:
    """``rows`` 0: free, since ``free_ns``. :param until_ns: when its batch is predicted to end."""

    rows: int = 0
    free_ns: int = 0
    started_ns: int = 0
    until_ns: int = 0


class Batcher:
    """The queue of one model. Calls must not go back in time.

    :param buckets: sizes of a batch; one is padded to the next.
    :param window_ms: how long a free replica waits for more rows.
    :raises ConfigError: no bucket, or a window outside 0..WINDOW_MAX_MS.
    """

    def __init__(self, buckets: Sequence[int], latency: LatencyModel, *, window_ms: float = 2.0) -> None:
        self.buckets = tuple(sorted(set(buckets)))
        if not self.buckets or self.buckets[0] < 1:
            raise ConfigError("no usable batch sizes", got=list(buckets), wanted="numbers >= 1")
        if not 0.0 <= window_ms <= WINDOW_MAX_MS:
            raise ConfigError("the batching window is out of range", got=window_ms, wanted=f"0..{WINDOW_MAX_MS} ms")
        self.latency = latency
        self._window_ns = round(window_ms * _MS)
        self._queue: list[Ask] = []  # by deadline, then by arrival
        self._by_slot: dict[int, Ask] = {}
        self._replicas: dict[int, _Replica] = {}
        self._debts: dict[str, float] = {}
        self._doubts = 0  # refused in a row while nothing ran

    def __len__(self) -> int:
        return len(self._queue)

    # --- replicas ---

    def add(self, replica: int) -> None:
        """A replica is ready and free."""
        self._replicas[replica] = _Replica()

    def lose(self, replica: int) -> None:
        """A replica is gone; what it ran is the caller's to answer."""
        self._replicas.pop(replica, None)

    def finished(self, replica: int, now_ns: int) -> None:
        """Its batch is answered: it is free, and the latency is known."""
        state = self._replicas.get(replica)
        if state is None or not state.rows:
            return
        self.latency.observe(state.rows, (now_ns - state.started_ns) / _MS)
        state.rows, state.free_ns = 0, now_ns

    def free(self) -> list[int]:
        """Replicas without a batch."""
        return [index for index, state in self._replicas.items() if not state.rows]

    # --- requests ---

    def offer(self, ask: Ask, now_ns: int) -> list[Dropped]:
        """Queue a request. What it replaces, and what cannot be in time because of it (maybe itself), is dropped."""
        dropped = []
        if (older := self._by_slot.get(ask.slot)) is not None:
            self._remove(older)
            dropped.append(Dropped(older, "replaced"))
        self._doubt(ask, now_ns)
        bisect.insort(self._queue, ask, key=lambda queued: queued.deadline_ns)
        self._by_slot[ask.slot] = ask
        while (late := self._plan_fails(now_ns)) is not None:
            dropped.append(self._refuse(self._victim(late, ask)))
        return dropped

    def cancel(self, slot: int, epoch: int) -> Ask | None:
        """Take the slot's waiting request out, if its epoch is at most ``epoch``."""
        ask = self._by_slot.get(slot)
        if ask is None or ask.epoch > epoch:
            return None
        self._remove(ask)
        return ask

    def answered(self, ask: Ask, now_ns: int) -> None:
        """The robot has its answer: in time, or late, which counts as if it had been refused."""
        self._note(ask.robot, missed=now_ns > ask.deadline_ns)

    def forget(self, robot: str) -> None:
        """A robot is gone for good."""
        self._debts.pop(robot, None)

    def take(self, replica: int, now_ns: int) -> tuple[list[Ask], list[Dropped]]:
        """The batch that a free replica runs now, empty when it is better to wait; and what is too late by now."""
        dropped = self._hopeless(now_ns)
        state, waiting = self._replicas[replica], self._waiting(self._queue, replica)
        if not waiting or state.rows or now_ns < self._start_ns(waiting, now_ns):
            return [], dropped
        rows, late = self._choose(waiting, replica, now_ns)
        dropped += [self._refuse(ask) for ask in late]
        self._doubts = 0
        for ask in rows:
            self._remove(ask)
            ask.started_ns, ask.batch_ns = now_ns, now_ns - max(ask.arrived_ns, state.free_ns)
        bucket = self.bucket(len(rows))
        state.rows, state.started_ns, state.until_ns = bucket, now_ns, now_ns + self._takes_ns(bucket)
        return rows, dropped

    def wake_ns(self, now_ns: int) -> int | None:
        """When ``take`` may have something to say although nothing happened; None: never."""
        if not self._queue:
            return None
        hopeless_ns = self._queue[0].deadline_ns - self._takes_ns(self.buckets[0])
        starts = [self._start_ns(waiting, now_ns) for i in self.free() if (waiting := self._waiting(self._queue, i))]
        return max(now_ns, min([hopeless_ns + 1, *starts]))

    def predicted_ms(self, now_ns: int) -> float:
        """What a request without a hurry would take if it came now."""
        if not self._replicas:
            return float("inf")
        busy_ns = sum(max(0, s.until_ns - now_ns) for s in self._replicas.values() if s.rows)
        batches = len(self._queue) // self.buckets[-1]
        full_ms = self.latency.predict_ms(self.buckets[-1])
        own_ms = self.latency.predict_ms(self.bucket(len(self._queue) % self.buckets[-1] + 1))
        return (busy_ns / _MS + batches * full_ms) / len(self._replicas) + own_ms

    # --- parts ---

    def _doubt(self, ask: Ask, now_ns: int) -> None:
        """A free server that refuses everybody learns nothing: one stall would close it for ever. It tries one."""
        takes_ns = self._takes_ns(self.buckets[0])
        if self._queue or not self.free() or now_ns + takes_ns <= ask.deadline_ns:
            return
        self._doubts += 1
        if self._doubts >= _TRIAL:
            self._doubts = 0
            self.latency.doubt()
            ask.deadline_ns = now_ns + 2 * takes_ns

    def _takes_ns(self, bucket: int) -> int:
        return round(self.latency.predict_ms(bucket) * _MS)

    def bucket(self, rows: int) -> int:
        """The size that so many rows are padded to."""
        return next((size for size in self.buckets if rows <= size), self.buckets[-1])

    def _waiting(self, queue: Sequence[Ask], replica: int) -> list[Ask]:
        """What the replica may run next, earliest deadline first, at most a full batch."""
        waiting: list[Ask] = []
        for ask in queue:
            if ask.replica in (-1, replica):
                waiting.append(ask)
                if len(waiting) == self.buckets[-1]:
                    break
        return waiting

    def _start_ns(self, waiting: Sequence[Ask], now_ns: int) -> int:
        """When a free replica starts: at once with a full batch, else at the end of the window or when it must."""
        if len(waiting) >= self.buckets[-1] or not self._window_ns:
            return now_ns
        must_ns = waiting[0].deadline_ns - self._takes_ns(self.bucket(len(waiting) + 1))
        return min(min(ask.arrived_ns for ask in waiting) + self._window_ns, must_ns)

    def _fill(self, waiting: Sequence[Ask], at_ns: int) -> tuple[int, int]:
        """Rows of the largest batch from ``at_ns`` that is in time for its first, 0 if none; and when it ends."""
        for size in reversed(self.buckets):
            if size > self.buckets[0] and self.bucket(len(waiting)) < size:
                continue
            end_ns = at_ns + self._takes_ns(size)
            if end_ns <= waiting[0].deadline_ns:
                return min(size, len(waiting)), end_ns
        return 0, at_ns

    def _plan_fails(
        self, now_ns: int, without: Sequence[Ask] = (), starting: tuple[int, int] | None = None
    ) -> Ask | None:
        """The first request that will be late if every replica always takes as large a batch as it may; None: none.

        :param without: requests to leave out. :param starting: (replica, monotonic end) of a batch as good as started.
        """
        queue = [ask for ask in self._queue if ask not in without] if without else list(self._queue)
        free = [(max(now_ns, s.until_ns) if s.rows else now_ns, i) for i, s in self._replicas.items()]
        if starting is not None:
            free = [(starting[1] if i == starting[0] else at, i) for at, i in free]
        heapq.heapify(free)
        first = set(self._replicas)
        while queue and free:
            at_ns, replica = heapq.heappop(free)
            waiting = self._waiting(queue, replica)
            if not waiting:
                continue  # nothing that it may run: others may
            rows, end_ns = self._fill(waiting, at_ns)
            # Behind a queue room is kept for a full batch: small ones, each as late as its first row can bear, would
            # cost most of the throughput just when it is short.
            full_ns = end_ns if replica in first else at_ns + self._takes_ns(self.buckets[-1])
            if not rows or full_ns > waiting[0].deadline_ns:
                return waiting[0]
            first.discard(replica)
            taken = waiting[:rows]
            queue = queue[rows:] if queue[rows - 1] is taken[-1] else [ask for ask in queue if ask not in taken]
            heapq.heappush(free, (end_ns, replica))
        return queue[0] if queue else None

    def _choose(self, waiting: list[Ask], replica: int, now_ns: int) -> tuple[list[Ask], list[Ask]]:
        """Rows to run now and rows to give up.

        Nobody is given up while some batch lets the rest be in time; else most answers in time per millisecond win.
        """
        rows, end_ns = self._fill(waiting, now_ns)
        if rows and (rows == len(waiting) or self._plan_fails(now_ns, waiting[:rows], (replica, end_ns)) is None):
            return waiting[:rows], []
        best: tuple[float, int] = (-1.0, self.buckets[0])
        for size in self.buckets:
            takes_ns = self._takes_ns(size)
            in_time = min(size, sum(ask.deadline_ns >= now_ns + takes_ns for ask in waiting))
            best = max(best, (in_time / max(1, takes_ns), size))
        end_ns = now_ns + self._takes_ns(best[1])
        kept = [ask for ask in waiting if ask.deadline_ns >= end_ns][: best[1]]
        return kept, [ask for ask in waiting if ask.deadline_ns < end_ns]

    def _hopeless(self, now_ns: int) -> list[Dropped]:
        """Refuse what would be late even alone and at once."""
        dropped = []
        while self._queue and now_ns + self._takes_ns(self.buckets[0]) > self._queue[0].deadline_ns:
            dropped.append(self._refuse(self._queue[0]))
        return dropped

    def _victim(self, late: Ask, newcomer: Ask) -> Ask:
        """Who gives way so that ``late`` is in time: of those at or before it, the robot that was refused least."""
        before = self._queue[: self._queue.index(late) + 1]
        spared = min(before, key=lambda ask: (self._debts.get(ask.robot, 0.0), -ask.deadline_ns))
        gap = self._debts.get(newcomer.robot, 0.0) - self._debts.get(spared.robot, 0.0)
        return newcomer if newcomer in before and gap < _DEBT_GAP else spared

    def _refuse(self, ask: Ask) -> Dropped:
        self._remove(ask)
        if ask.deadline_ns - ask.arrived_ns > self._takes_ns(self.buckets[0]):  # else it asked for the impossible
            self._note(ask.robot, missed=True)
        return Dropped(ask, "overloaded")

    def _note(self, robot: str, *, missed: bool) -> None:
        self._debts[robot] = self._debts.get(robot, 0.0) * _DEBT_MEMORY + (1.0 if missed else 0.0)

    def _remove(self, ask: Ask) -> None:
        self._queue.remove(ask)
        if self._by_slot.get(ask.slot) is ask:
            del self._by_slot[ask.slot]
