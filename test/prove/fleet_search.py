"""How many robots a server can have: first in virtual time, then by trying."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from fleet_model import run_fleet

from phyai_engine.serve.batcher import Batcher
from phyai_engine.serve.latency import LatencyModel

EPS = 1e-3
AWAY_MS = 6.0  # of a deadline, what is neither queue nor batch: the network both ways, the server's own allowance
FINE = 1.07  # neighbours closer than this are not told apart
STEPS_DOWN = 2


@dataclass(frozen=True)
class Rate:
    """How often a robot asks, and by when it wants the answer."""

    hz: float
    deadline_ms: float

    def __str__(self) -> str:
        return f"{self.hz:g} Hz, {self.deadline_ms:g} ms"


def predicted(batch: str, rate: Rate, replicas: int, buckets: Sequence[int]) -> int:
    """Robots that the batcher serves within EPS if batches take exactly what the server measured.

    :param batch: as the server's status says it: ``16.02 + 9.80 x rows + 1.20 ms``; the last is a margin, not a time.
    """
    base, row = (float(ms) for ms in re.findall(r"-?[\d.]+", batch)[:2])

    def takes_ms(rows: int) -> float:
        return max(0.1, base + row * rows)

    def missed(robots: int) -> float:
        batcher = Batcher(buckets, LatencyModel([(n, takes_ms(n)) for n in buckets]))
        period_ms, budget_ms = 1e3 / rate.hz, rate.deadline_ms - AWAY_MS
        outcome = run_fleet(
            batcher, robots=robots, period_ms=period_ms, budget_ms=budget_ms, replicas=replicas, takes_ms=takes_ms
        )
        return float(outcome.miss_rate)

    low, high = 1, 2
    while missed(high) <= EPS and high < 4096:
        low, high = high, 2 * high
    while high - low > max(1, low // 40):
        middle = (low + high) // 2
        low, high = (middle, high) if missed(middle) <= EPS else (low, middle)
    return low


def search(guess: int, screened: Callable[[int], bool], counted: Callable[[int], bool], *, tries: int) -> int | None:
    """The most robots for which ``counted`` holds, by ``tries`` short runs around a guess; None where it never does."""
    low = high = 0
    robots = max(1, round(0.95 * guess))
    for _ in range(tries):
        if screened(robots):
            low = max(low, robots)
        else:
            high = min(high or robots, robots)
        if low and high and high <= max(low + 1, FINE * low):
            break
        robots = round((low * high) ** 0.5) if low and high else round(1.12 * low) if low else int(0.85 * high)
        if robots in (low, high):
            robots = low + 1 if low else max(1, high - 1)
    best = low or max(1, int(0.85 * high))
    for _ in range(STEPS_DOWN + 1):
        if counted(best):
            return best
        best = max(1, int(0.94 * best))
    return None
