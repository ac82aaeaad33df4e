"""How the proof on GPUs looks for the most robots: it must find a known edge, and end where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "prove"))

from fleet_search import Rate, predicted, search

BUCKETS = (1, 2, 4, 8)


@pytest.mark.parametrize("guess", [1, 30, 44, 45, 60, 200])
def test_an_edge_is_found(guess: int) -> None:
    asked: list[int] = []

    def held(robots: int) -> bool:
        asked.append(robots)
        return robots <= 44

    found = search(guess, held, held, tries=5)
    if 30 <= guess <= 60:
        assert found is not None and 40 <= found <= 44
    assert len(asked) <= 8


def test_short_runs_that_were_lucky_are_corrected() -> None:
    found = search(50, lambda robots: robots <= 48, lambda robots: robots <= 44, tries=5)
    assert found is not None and 41 <= found <= 44
    assert search(50, lambda _: False, lambda _: False, tries=5) is None


def test_slower_batches_serve_fewer_robots_and_two_replicas_more() -> None:
    fast = Rate(2.0, 200.0)
    few, many = (
        predicted("6.0 + 20.0 x rows + 3.0 ms", fast, 1, BUCKETS),
        predicted("6.0 + 10.0 x rows + 3.0 ms", fast, 1, BUCKETS),
    )
    assert 0 < few < many < 50  # 50 robots at 2 Hz are 100 a second: more than any batch of 8 gives
    assert predicted("6.0 + 10.0 x rows + 3.0 ms", fast, 2, BUCKETS) >= 2 * many
