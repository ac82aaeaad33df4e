"""layer_norm: residual add and norm against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference

SHAPES = [(1, 1), (3, 5, 72), (1, 1000), (2, 1152)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_norms_alone(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight, bias = normal(*shape, dtype=dtype) + 3, normal(shape[-1]), normal(shape[-1])
    stream, normed = fused(x, weight, bias)
    assert stream is x
    agree(normed, reference.layer_norm(x, weight, bias)[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_adds_first(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, out = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    weight, bias, before = normal(shape[-1]), normal(shape[-1]), x.clone()
    added = out, normal(shape[-1], dtype=dtype)
    for found, wanted in zip(
        fused(x, weight, bias, *added), reference.layer_norm(x, weight, bias, *added), strict=True
    ):
        agree(found, wanted)
    assert torch.equal(x, before), "the stream it was given must stay: a captured graph may read it again"


def test_views_are_read_where_they_stand(fused: Any, normal: Any, agree: Any) -> None:
    x, out = normal(6, 4, 10).transpose(0, 1), normal(4, 6, 20)[..., ::2]
    weight, bias, out_bias = (normal(20)[::2] for _ in range(3))
    wanted = reference.layer_norm(x, weight, bias, out, out_bias)
    for found, expected in zip(fused(x, weight, bias, out, out_bias), wanted, strict=True):
        agree(found, expected)


def test_rows_of_one_value_become_the_bias(fused: Any, normal: Any) -> None:
    x, bias = normal(2, 8) * 0 + 5, normal(8)
    assert torch.equal(fused(x, normal(8), bias)[1], bias.expand(2, 8))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="must have 8 elements"):
        fused(normal(2, 8), normal(8), normal(7))
    with pytest.raises(ValueError, match="out must be like x"):
        fused(normal(2, 8), normal(8), normal(8), normal(2, 8, dtype=torch.bfloat16), normal(8))
    with pytest.raises(ValueError, match="go together"):
        fused(normal(2, 8), normal(8), normal(8), normal(2, 8))
    with pytest.raises(ValueError, match="16384"):
        fused(normal(1, 16385), normal(16385), normal(16385))
