"""split_rotate_back: gradients turned back and merged, against autograd of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import backward, reference

# batch, tokens, heads, K/V heads, D
SIZES = [(2, 3, 4, 2, 16), (1, 5, 2, 1, 6), (3, 1, 1, 1, 34)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_gradient(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    batch, tokens, heads, kv, dim = size
    angles = normal(batch, tokens, dim // 2)
    table = angles.cos(), angles.sin()
    grads = [normal(batch, count, tokens, dim, dtype=dtype) for count in (heads, kv, kv)]
    qkv = normal(batch, tokens, (heads + 2 * kv) * dim).requires_grad_()
    slabs = [normal(batch, kv, tokens, dim) for _ in range(2)]
    start = torch.zeros(batch, dtype=torch.int64, device=qkv.device)
    outputs = reference.split_rotate(qkv, table, *slabs, start, heads), *slabs
    wanted = torch.autograd.grad(outputs, qkv, [grad.float() for grad in grads])[0]
    agree(fused(*grads, table), wanted.to(dtype))


def test_views_are_read(fused: Any, normal: Any, agree: Any) -> None:
    grads = [normal(2, 3, count, 16).transpose(1, 2) for count in (4, 1, 1)]
    angles = normal(1, 3, 20)[..., :8]
    table = angles.cos().expand(2, 3, 8), angles.sin()
    agree(fused(*grads, table), backward.split_rotate_back(*grads, table))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    table = normal(2, 3, 4), normal(2, 3, 4)
    with pytest.raises(ValueError, match=r"must be \[2, kv, 3, 8\]"):
        fused(normal(2, 4, 3, 8), normal(2, 1, 3, 8), normal(2, 1, 3, 6), table)
    with pytest.raises(ValueError, match="dtypes differ"):
        fused(normal(2, 4, 3, 8), normal(2, 1, 3, 8), normal(2, 1, 3, 8, dtype=torch.bfloat16), table)
