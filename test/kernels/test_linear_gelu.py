"""linear_gelu: the vendor's epilogue against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 5, 7), (2, 48, 72)], ids=str)
def test_it_is_the_reference(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int]
) -> None:
    rows, inputs, outputs = size
    x, weight = normal(2, rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype) / inputs**0.5
    bias = normal(outputs, dtype=dtype)
    agree(fused(x, weight, bias), reference.linear_gelu(x, weight, bias))


def test_views_are_rows_too(fused: Any, normal: Any, agree: Any) -> None:
    x, weight, bias = normal(4, 2, 12).transpose(0, 1), normal(10, 12), normal(10)
    agree(fused(x, weight, bias), reference.linear_gelu(x, weight, bias))
