"""linear_norm: product, gated residual add and the next norm against the reference, the same in each run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference
from torch import Tensor

# rows, inputs, outputs: nothing is a multiple of a tile in most, and the long ones are added from spans
SIZES = [(1, 1, 1), (3, 300, 130), (50, 40, 33), (17, 900, 24), (64, 515, 20)]


def call(normal: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> tuple[Any, ...]:
    """x, weight, stream, scale, shift and gate."""
    rows, inputs, outputs = size
    weight = normal(outputs, inputs, dtype=dtype) / inputs**0.5
    vectors = [normal(outputs) for _ in range(3)]
    return normal(rows, inputs, dtype=dtype), weight, normal(rows, outputs, dtype=dtype), *vectors


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("vectors", [4, 6], ids=["plain", "modulated"])
def test_it_is_the_reference(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int], vectors: int
) -> None:
    args = call(normal, dtype, size)[:vectors]
    before = args[2].clone()
    wide = [arg.float() for arg in args]
    for found, wanted in zip(fused(*args), reference.linear_norm(*wide), strict=True):
        agree(found, wanted.to(dtype))
    assert torch.equal(args[2], before), "the stream it was given must stay: a captured graph may read it again"


def test_runs_do_not_differ(fused: Any, normal: Any) -> None:
    args = call(normal, torch.float32, (9, 900, 20))
    first = fused(*args)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, fused(*args), strict=True))


def test_both_ways_are_covered() -> None:
    """One span, and several."""
    plan = pytest.importorskip("phyai_kernels.linear_norm", reason="Triton is not installed").plan
    spans = [-(-inputs // plan(inputs, outputs, itemsize=2, chip=99 * 1024).span) for _, inputs, outputs in SIZES]
    assert {1, 2} <= set(spans)


def test_leading_axes_are_rows_and_views_are_read(fused: Any, normal: Any, agree: Any) -> None:
    x, weight = normal(4, 2, 12).transpose(0, 1), normal(40, 24)[10:20, 4:16]
    stream: Tensor = normal(2, 4, 20)[..., ::2]
    scale, shift, gate = (normal(20)[::2] for _ in range(3))
    wanted = reference.linear_norm(x, weight, stream, scale, shift, gate)
    for found, expected in zip(fused(x, weight, stream, scale, shift, gate), wanted, strict=True):
        agree(found, expected)


def test_many_rows_are_left_to_the_vendor(fused: Any, normal: Any, agree: Any) -> None:
    args = call(normal, torch.float32, (65, 20, 8))
    for found, wanted in zip(fused(*args), reference.linear_norm(*args), strict=True):
        agree(found, wanted)


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    x, weight, stream, scale, *_ = call(normal, torch.float32, (2, 8, 4))
    with pytest.raises(ValueError, match="do not fit"):
        fused(x, normal(4, 7), stream, scale)
    with pytest.raises(ValueError, match="do not fit"):
        fused(x, weight, normal(2, 5), scale)
    with pytest.raises(ValueError, match="differ in dtype"):
        fused(x, weight, stream.bfloat16(), scale)
    with pytest.raises(ValueError, match="must have 4 elements"):
        fused(x, weight, stream, normal(5))
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(x, normal(8, 4).T, stream, scale)
