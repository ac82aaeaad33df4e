"""Intervals of shares and of paired differences, against published values."""

from __future__ import annotations

import numpy as np
import pytest

from phyai_engine.intervals import paired_difference, spread, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (95, 100, 0.88825, 0.97846), (1, 1, 0.20655, 1.0)],
)
def test_wilson_intervals(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert (found.share, found.low, found.high) == pytest.approx((successes / n, low, high), abs=1e-5)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="wanted 0 <= successes"):
        wilson(3, 2)


@pytest.mark.parametrize(
    ("counts", "share", "low", "high"),
    [  # Newcombe 1998 (Stat. Med. 17:2635), table II, method 10
        ((20, 12, 2, 16), 0.2, 0.0562, 0.3292),
        ((0, 0, 0, 50), 0.0, -0.0713, 0.0713),
    ],
)
def test_paired_differences(counts: tuple[int, int, int, int], share: float, low: float, high: float) -> None:
    found = paired_difference(*counts)
    assert (found.share, found.low, found.high) == pytest.approx((share, low, high), abs=5e-4)


def test_a_pair_that_always_agrees_differs_less_than_two_samples_would() -> None:
    agreeing, apart = paired_difference(90, 0, 0, 10), paired_difference(81, 9, 9, 1)
    assert agreeing.high - agreeing.low < 0.5 * (apart.high - apart.low)


def test_a_spread_of_nothing_is_none() -> None:
    assert spread(np.empty(0)) is None
    found = spread(np.arange(101.0))
    assert found is not None and (found.n, found.p50, found.p90, found.p99) == (101, 50.0, 90.0, 99.0)
