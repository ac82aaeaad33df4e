"""gated_up: merged projection and gated GELU against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference

# rows, inputs, outputs: nothing is a multiple of a tile in most
SIZES = [(1, 1, 1), (3, 7, 5), (50, 40, 33), (17, 130, 24), (64, 64, 32)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_reference(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    rows, inputs, outputs = size
    x, weight = normal(rows, inputs, dtype=dtype), normal(2 * outputs, inputs, dtype=dtype) * 2 / inputs**0.5
    agree(fused(x, weight), reference.gated_up(x.float(), weight.float()).to(dtype))


def test_leading_axes_are_rows_and_views_are_read(fused: Any, normal: Any, agree: Any) -> None:
    x, weight = normal(4, 2, 12).transpose(0, 1), normal(40, 24)[10:30, 4:16]
    agree(fused(x, weight), reference.gated_up(x, weight))


def test_many_rows_are_left_to_the_vendor(fused: Any, normal: Any, agree: Any) -> None:
    x, weight = normal(5, 13, 20), normal(8, 20)
    agree(fused(x, weight), reference.gated_up(x, weight))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 8), normal(4, 7))
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 8), normal(5, 8))
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 8), normal(4, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(normal(2, 8), normal(8, 4).T)
