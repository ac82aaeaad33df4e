"""A fleet in virtual time: periodic robots, a batcher, replicas that take a + b * rows. No sockets, no sleeping."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from phyai_engine.serve.batcher import Ask, Batcher

MS = 1_000_000


@dataclass
class Outcome:
    """Per robot: requests, answers in time."""

    asked: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    late: int = 0
    batches: list[int] = field(default_factory=list)

    @property
    def miss_rate(self) -> float:
        """Of all robots."""
        return 1.0 - sum(self.in_time.values()) / sum(self.asked.values())

    def miss_rates(self) -> list[float]:
        """Of each robot."""
        return [1.0 - self.in_time[robot] / asked for robot, asked in self.asked.items()]


def run_fleet(  # noqa: PLR0912 - one loop over events
    batcher: Batcher,
    *,
    robots: int,
    period_ms: float = 200.0,
    budget_ms: float = 100.0,
    seconds: float = 60.0,
    replicas: int = 1,
    takes_ms: Callable[[int], float] = lambda rows: 22.0 + rows - 1,
    seed: int = 0,
    jitter_ms: float = 0.5,
    together: bool = False,
) -> Outcome:
    """:param together: all robots ask at the same instants; else at phases drawn once."""
    rng, outcome, order = np.random.default_rng(seed), Outcome(), itertools.count()
    for index in range(replicas):
        batcher.add(index)
    events: list[tuple[int, int, str, object]] = []

    def at(ms: float, what: str, content: object) -> None:
        heapq.heappush(events, (round(ms * MS), next(order), what, content))

    phases = np.zeros(robots) if together else rng.uniform(0, period_ms, robots)
    for index, phase in enumerate(phases):
        at(float(phase), "ask", (index, 1))
    woken_ns = -1
    while events:
        now_ns, _, what, content = heapq.heappop(events)
        if what == "wake" and now_ns != woken_ns:
            continue  # another one was asked for since
        now_ms = now_ns / MS
        if what == "ask":
            index, chunk_id = content  # type: ignore[misc]
            robot = f"robot {index}"
            outcome.asked[robot] += 1
            batcher.offer(Ask(robot, index, 1, chunk_id, now_ns, now_ns + round(budget_ms * MS)), now_ns)
            next_ms = float(phases[index]) + chunk_id * period_ms + float(rng.uniform(0, jitter_ms))
            if next_ms < seconds * 1e3:
                at(next_ms, "ask", (index, chunk_id + 1))
        elif what == "done":
            replica, rows = content  # type: ignore[misc]
            batcher.finished(replica, now_ns)
            for ask in rows:
                batcher.answered(ask, now_ns)
                if now_ns <= ask.deadline_ns:
                    outcome.in_time[ask.robot] += 1
                else:
                    outcome.late += 1
        for replica in batcher.free():
            rows, _ = batcher.take(replica, now_ns)
            if rows:
                outcome.batches.append(len(rows))
                at(now_ms + takes_ms(batcher.bucket(len(rows))), "done", (replica, rows))
        wake_ns = batcher.wake_ns(now_ns)
        if wake_ns is not None and wake_ns > now_ns and wake_ns != woken_ns:
            woken_ns = round(wake_ns / MS * MS)
            at(woken_ns / MS, "wake", None)
    return outcome
