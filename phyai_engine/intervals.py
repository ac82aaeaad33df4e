"""Shares with their intervals, differences of paired shares, and percentiles: what evaluations report."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from phyai_engine.types import F64

Z95 = 1.959963984540054  # two-sided 95 % of the standard normal


class Interval(Struct, frozen=True, forbid_unknown_fields=True):
    """A share, or a difference of shares, with its 95 % interval."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


class Spread(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Over n values."""

    n: int
    p50: float
    p90: float
    p99: float


def wilson(successes: int, n: int) -> Interval:
    """Score interval (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"{successes} successes of {n}, wanted 0 <= successes <= n and n >= 1")
    share = successes / n
    middle = share + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    scale = 1 + Z95**2 / n
    # At the ends the bound is the share itself; rounding must not put it beyond.
    return Interval(share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


def paired_difference(both: int, first: int, second: int, neither: int) -> Interval:
    """Share of the first minus share of the second over pairs (Newcombe, Stat. Med. 17, 1998, his method 10).

    :param both: pairs in which both succeeded; ``first`` only the first, ``second`` only the second.
    """
    n = both + first + second + neither
    a, b = wilson(both + first, n), wilson(both + second, n)
    difference = a.share - b.share
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = float(both * neither - first * second)
    if excess > 0:  # his continuity correction, of positive correlation only
        excess = max(excess - n / 2, 0.0)
    phi = excess / math.sqrt(product) if product else 0.0
    below, above = a.share - a.low, b.high - b.share
    low = difference - math.sqrt(max(0.0, below**2 - 2 * phi * below * above + above**2))
    above, below = a.high - a.share, b.share - b.low
    high = difference + math.sqrt(max(0.0, above**2 - 2 * phi * above * below + below**2))
    return Interval(difference, max(-1.0, low), min(1.0, high))


def spread(values: F64) -> Spread | None:
    """None for no values."""
    if not len(values):
        return None
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Spread(n=len(values), p50=p50, p90=p90, p99=p99)
