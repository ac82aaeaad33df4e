"""gated_up_back: gradient through a gated MLP's first half and the product behind it, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import backward, reference
from torch import Tensor

# rows, inputs, outputs, rows of the matrix behind: nothing is a multiple of a tile in most
SIZES = [(1, 3, 4, 2), (50, 40, 33, 70), (17, 130, 24, 131), (64, 64, 32, 64)]


def call(normal: Any, dtype: torch.dtype, size: tuple[int, int, int, int], product: bool) -> tuple[Any, ...]:
    """grad, down, x, weight."""
    rows, inputs, outputs, behind = size
    weight = normal(2 * outputs, inputs, dtype=dtype) * 2 / inputs**0.5
    down = normal(behind, outputs, dtype=dtype) / behind**0.5 if product else None
    grad = normal(rows, behind if product else outputs, dtype=dtype)
    return grad, down, normal(rows, inputs, dtype=dtype), weight


def autograd(grad: Tensor, down: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """In float32."""
    merged = reference.linear(x.float(), weight.float()).requires_grad_()
    inner = reference.gelu_mul(merged)
    behind = inner if down is None else reference.linear(inner, down.float())
    return torch.autograd.grad(behind, merged, grad.float())[0]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("product", [True, False], ids=["product", "no product"])
def test_it_is_the_gradient(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int, int], product: bool
) -> None:
    args = call(normal, dtype, size, product)
    agree(fused(*args), autograd(*args).to(dtype))


def test_large_arguments_of_gelu_have_its_ends(fused: Any, normal: Any) -> None:
    """Slope 0 far below, 1 far above; the exponential must not overflow."""
    x = torch.tensor([[-1e4], [1e4]]).to(normal(1).device)
    found = fused(torch.ones_like(x), None, x, torch.ones_like(x))
    assert (found - torch.tensor([[0.0, 0.0], [1e4, 1e4]], device=x.device)).abs().max() < 1e-12


def test_views_and_many_rows(fused: Any, normal: Any, agree: Any) -> None:
    weight, down = normal(40, 24)[10:30, 4:16], normal(40, 24)[::4, 6:16]
    for rows in (8, 70):
        x, grad = normal(12, rows).T, normal(10, rows).T
        agree(fused(grad, down, x, weight), backward.gated_up_back(grad, down, x, weight))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    grad, down, x, weight = call(normal, torch.float32, (2, 8, 3, 5), True)
    with pytest.raises(ValueError, match="do not fit"):
        fused(grad, down, normal(2, 7), weight)
    with pytest.raises(ValueError, match="do not fit"):
        fused(grad, normal(6, 3), x, weight)
    with pytest.raises(ValueError, match="a gradient of 3 columns"):
        fused(grad, None, x, weight)
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(grad, down, x, normal(8, 6).T)
