"""linear_back: gradient through a product against the definition, the weight read as it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import backward

# rows, columns and rows of the weight: nothing is a multiple of a tile in most, and the long ones are added from spans
SIZES = [(1, 1, 1), (3, 33, 300), (50, 1050, 40), (17, 24, 700), (64, 64, 129)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_definition(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: Any) -> None:
    rows, inputs, outputs = size
    grad, weight = normal(rows, outputs, dtype=dtype), normal(outputs, inputs, dtype=dtype) / outputs**0.5
    agree(fused(grad, weight), backward.linear_back(grad.float(), weight.float()).to(dtype))


def test_both_ways_are_covered() -> None:
    """One span, and several."""
    plan = pytest.importorskip("phyai_kernels.linear_back", reason="Triton is not installed").plan
    spans = [-(-outputs // plan(outputs, inputs, itemsize=4, chip=99 * 1024).span) for _, inputs, outputs in SIZES]
    assert 1 in spans and max(spans) > 2


def test_runs_do_not_differ(fused: Any, normal: Any) -> None:
    grad, weight = normal(9, 400), normal(400, 20)
    assert torch.equal(fused(grad, weight), fused(grad, weight))


def test_leading_axes_are_rows_and_views_are_read(fused: Any, normal: Any, agree: Any) -> None:
    grad, weight = normal(4, 2, 10).transpose(0, 1), normal(40, 24)[10:20, 4:16]
    agree(fused(grad, weight), backward.linear_back(grad, weight))


def test_many_rows_are_left_to_the_vendor(fused: Any, normal: Any, agree: Any) -> None:
    grad, weight = normal(5, 13, 20), normal(20, 8)
    agree(fused(grad, weight), backward.linear_back(grad, weight))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 8), normal(7, 4))
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 8), normal(8, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(normal(2, 8), normal(4, 8).T)
