"""split_rotate: rotation and the writes into the K/V slab, against the reference and beyond its promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference
from torch import Tensor

# batch, tokens, heads, kv heads, head_dim, columns
CASES = [(1, 1, 1, 1, 2, 1), (2, 5, 4, 2, 24, 20), (3, 7, 8, 1, 16, 9), (1, 3, 8, 1, 256, 11), (2, 3, 0, 1, 16, 6)]


def call(normal: Any, dtype: torch.dtype, case: tuple[int, ...]) -> tuple[Any, ...]:
    """Arguments with another start for each row and a slab that holds something already."""
    batch, tokens, heads, kv_heads, dim, columns = case
    angles = normal(batch, tokens, dim // 2) * 3
    slabs = [normal(batch, kv_heads, columns, dim, dtype=dtype) for _ in range(2)]
    start = torch.tensor([columns - tokens, 0, 1][:batch], device=angles.device)
    return normal(batch, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype), (angles.cos(), angles.sin()), *slabs, start


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    qkv, table, keys, values, start = call(normal, dtype, case)
    old, wanted_keys, wanted_values = keys.clone(), keys.clone(), values.clone()
    query = fused(qkv, table, keys, values, start, case[2])
    wanted = reference.split_rotate(qkv, table, wanted_keys, wanted_values, start, case[2])
    if case[2]:
        agree(query, wanted)
    else:
        assert query.shape == wanted.shape
    agree(keys, wanted_keys)
    assert torch.equal(values, wanted_values), "values are copied, not computed"
    column = torch.arange(case[5], device=keys.device)
    kept = (column < start[:, None]) | (column >= start[:, None] + case[1])
    assert torch.equal(keys.transpose(1, 2)[kept], old.transpose(1, 2)[kept]), "a column outside the range was written"


def test_slabs_and_table_may_be_views(fused: Any, normal: Any, agree: Any) -> None:
    qkv, table, keys, values, start = call(normal, torch.float32, (2, 3, 2, 2, 8, 10))
    shared = tuple(part[:1].expand(2, -1, -1) for part in table)
    whole = normal(2, 2, 10, 2, 8)  # [K or V, batch, columns, kv, head_dim]
    slab = whole.clone().transpose(2, 3)
    query = fused(qkv.transpose(0, 1).contiguous().transpose(0, 1), shared, slab[0], slab[1], start, 2)
    agree(query, reference.split_rotate(qkv, shared, keys, values, start, 2))
    reference_slab = whole.transpose(2, 3).contiguous()
    reference.split_rotate(qkv, shared, reference_slab[0], reference_slab[1], start, 2)
    agree(slab, reference_slab)


def test_a_broken_promise_stays_inside_the_slab(fused: Any, normal: Any) -> None:
    qkv, table, *_ = call(normal, torch.float32, (2, 3, 2, 1, 8, 6))
    around: Tensor = torch.full((2, 2, 1, 10, 8), 7.0, device=qkv.device)
    keys, values = (part[:, :, 2:8] for part in around)
    fused(qkv, table, keys, values, torch.tensor([5, -2], device=qkv.device), 2)
    assert (around[:, :, :, :2] == 7).all() and (around[:, :, :, 8:] == 7).all()
    assert (keys[0, :, :5] == 7).all() and (keys[0, :, 5] != 7).all() and (keys[1, :, 0] != 7).all()


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    qkv, table, keys, values, start = call(normal, torch.float32, (2, 5, 4, 2, 24, 20))
    with pytest.raises(ValueError, match="is not 3"):
        fused(qkv, table, keys, values, start, 3)
    with pytest.raises(ValueError, match="keys and values must be"):
        fused(qkv, table, keys, values[:1], start, 4)
    with pytest.raises(ValueError, match="keys and values must be"):
        fused(qkv, table, keys.bfloat16(), values, start, 4)
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(qkv, table, keys, normal(2, 2, 24, 20).transpose(2, 3), start, 4)
    with pytest.raises(ValueError, match="start must be"):
        fused(qkv, table, keys, values, start.int(), 4)
