"""linear: the product of few rows against the reference, the same in each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference

# rows, inputs, outputs: nothing is a multiple of a tile in most, and the long ones are added from spans
SIZES = [(1, 1, 1), (1, 7, 5), (3, 300, 130), (50, 32, 40), (17, 900, 33), (64, 515, 1)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_it_is_the_reference(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int], biased: bool
) -> None:
    rows, inputs, outputs = size
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = normal(outputs, dtype=dtype) if biased else None
    agree(fused(x, weight, bias), reference.linear(x, weight, bias))


def test_runs_do_not_differ(fused: Any, normal: Any) -> None:
    x, weight = normal(9, 900), normal(20, 900)
    first = fused(x, weight)
    assert all(torch.equal(first, fused(x, weight)) for _ in range(3))


def test_both_ways_are_covered() -> None:
    """One launch, and spans that are added."""
    plan = pytest.importorskip("phyai_kernels.linear", reason="Triton is not installed").plan
    spans = [-(-inputs // plan(inputs, outputs, itemsize=2, chip=99 * 1024).span) for _, inputs, outputs in SIZES]
    assert 1 in spans and max(spans) >= 4


def test_the_last_input_counts(fused: Any, normal: Any, agree: Any) -> None:
    x, weight = normal(5, 777), normal(9, 777)
    x[:, -1] *= 1000
    agree(fused(x, weight), reference.linear(x, weight))


def test_leading_axes_are_rows(fused: Any, normal: Any, agree: Any) -> None:
    x, weight = normal(4, 2, 12).transpose(0, 1), normal(40, 24)[10:20, 4:16]  # views of both
    agree(fused(x, weight), reference.linear(x, weight))


def test_many_rows_are_left_to_torch(fused: Any, normal: Any) -> None:
    x, weight = normal(5, 13, 20), normal(8, 20)
    assert torch.equal(fused(x, weight), reference.linear(x, weight))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    x, weight = normal(2, 8), normal(4, 8)
    with pytest.raises(ValueError, match="do not fit"):
        fused(x, normal(4, 7))
    with pytest.raises(ValueError, match="do not fit"):
        fused(x, weight, normal(5))
    with pytest.raises(ValueError, match="differ in dtype"):
        fused(x, weight.bfloat16())
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(x, normal(8, 4).T)
