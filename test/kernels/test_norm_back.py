"""norm_back: gradient through a product and the norm in front of it, against autograd of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import backward, reference
from torch import Tensor

# rows, width, outputs of the product behind the norm: nothing is a multiple of a tile in most; long ones have spans
SIZES = [(3, 40, 300), (20, 33, 24), (5, 130, 260), (1, 7, 1)]


def call(normal: Any, dtype: torch.dtype, size: tuple[int, int, int]) -> tuple[Any, ...]:
    """grad, weight, grad_stream, stream, scale, gate."""
    rows, width, outputs = size
    weight = normal(outputs, width, dtype=dtype) / outputs**0.5
    rest = [normal(rows, width, dtype=dtype) for _ in range(2)]
    gate = normal(width).to(dtype).float()  # the interpreter cuts off three times in a row otherwise
    return normal(rows, outputs, dtype=dtype), weight, *rest, normal(width), gate


def autograd(args: tuple[Any, ...]) -> list[Tensor]:
    """Of the sum that is normed, and of what was added to it times the gate, in float32."""
    grad, weight, beside, stream, scale, gate = (arg if arg is None else arg.float() for arg in args)
    out = torch.zeros_like(stream, requires_grad=True)
    x = stream.clone().requires_grad_()
    opened = torch.ones_like(scale) if gate is None else gate.to(args[3].dtype).float()
    total, normed = reference.ada_rms_norm(x, scale, torch.zeros_like(scale), out, opened)
    behind = normed if weight is None else reference.linear(normed, weight)
    grads = [grad, torch.zeros_like(stream) if beside is None else beside]
    return list(torch.autograd.grad((behind, total), (x, out), grads))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("left_out", [(), (2, 5), (1,), (1, 2)], ids=["whole", "plain", "no product", "only the norm"])
def test_it_is_the_gradient(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, int, int], left_out: tuple[int, ...]
) -> None:
    args = list(call(normal, dtype, size))
    for i in left_out:
        args[i] = None
    if args[1] is None:
        args[0] = torch.randn_like(args[3])
    for found, wanted in zip(fused(*args), autograd(tuple(args)), strict=True):
        agree(found, wanted.to(dtype))


def test_runs_do_not_differ(fused: Any, normal: Any) -> None:
    args = call(normal, torch.float32, (9, 20, 400))
    assert all(torch.equal(a, b) for a, b in zip(fused(*args), fused(*args), strict=True))


def test_many_rows_and_views(fused: Any, normal: Any, agree: Any) -> None:
    """More rows than the product's kernel takes; views of everything."""
    _, weight, *_, scale, gate = call(normal, torch.float32, (1, 20, 8))
    for rows in (3, 66):
        grad, beside, stream = normal(8, rows).T, normal(20, rows).T, normal(rows, 40)[:, ::2]
        args = grad, weight, beside, stream, scale, gate
        for found, wanted in zip(fused(*args), backward.norm_back(*args), strict=True):
            agree(found, wanted)


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    grad, weight, beside, stream, scale, gate = call(normal, torch.float32, (2, 8, 4))
    with pytest.raises(ValueError, match="do not fit"):
        fused(normal(2, 5), weight, beside, stream, scale, gate)
    with pytest.raises(ValueError, match="does not fit rows of 8"):
        fused(grad, normal(4, 7), beside, stream, scale, gate)
    with pytest.raises(ValueError, match="must be like the stream"):
        fused(grad, weight, normal(2, 7), stream, scale, gate)
    with pytest.raises(ValueError, match="must have 8 elements"):
        fused(grad, weight, beside, stream, normal(2, 8), gate)
