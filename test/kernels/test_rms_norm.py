"""rms_norm: residual add and norm against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference

SHAPES = [(1, 1), (3, 5, 72), (1, 1000), (2, 2048)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_norms_alone(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1])
    stream, normed = fused(x, weight)
    assert stream is x
    agree(normed, reference.rms_norm(x, weight)[1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_adds_first(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, out, weight = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype), normal(shape[-1])
    before = x.clone()
    for found, wanted in zip(fused(x, weight, out), reference.rms_norm(x, weight, out), strict=True):
        agree(found, wanted)
    assert torch.equal(x, before), "the stream it was given must stay: a captured graph may read it again"


def test_views_are_read_where_they_stand(fused: Any, normal: Any, agree: Any) -> None:
    x, out, weight = normal(6, 4, 10).transpose(0, 1), normal(4, 6, 20)[..., ::2], normal(20)[::2]
    for found, wanted in zip(fused(x, weight, out), reference.rms_norm(x, weight, out), strict=True):
        agree(found, wanted)


def test_rows_of_zeros_stay_finite(fused: Any, normal: Any) -> None:
    x = normal(2, 8) * 0
    assert torch.equal(fused(x, normal(8))[1], x)


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="must have 8 elements"):
        fused(normal(2, 8), normal(7))
    with pytest.raises(ValueError, match="out must be like x"):
        fused(normal(2, 8), normal(8), normal(2, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="16384"):
        fused(normal(1, 16385), normal(16385))
    with pytest.raises(ValueError, match="float64"):
        fused(normal(2, 8).double(), normal(8))


def test_a_gradient_is_not_lost_in_silence(fused: Any, normal: Any) -> None:
    x = normal(2, 8).requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        fused(x, normal(8))
    with torch.no_grad():
        fused(x, normal(8))
