"""project_rotate: projection, rotation and writes into the K/V slab, against the reference and beyond its promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference
from torch import Tensor

# batch, tokens, inputs, heads, kv heads, head_dim, columns
CASES = [
    (1, 1, 1, 1, 1, 2, 1),
    (2, 5, 20, 4, 2, 24, 20),
    (3, 7, 33, 2, 1, 16, 9),
    (1, 3, 40, 1, 1, 256, 11),
    (2, 3, 8, 0, 1, 16, 6),
]


def call(normal: Any, dtype: torch.dtype, case: tuple[int, ...]) -> tuple[Any, ...]:
    """Arguments with another start for each row and a slab that holds something already."""
    batch, tokens, inputs, heads, kv_heads, dim, columns = case
    angles = normal(batch, tokens, dim // 2) * 3
    slabs = [normal(batch, kv_heads, columns, dim, dtype=dtype) for _ in range(2)]
    start = torch.tensor([columns - tokens, 0, 1][:batch], device=angles.device)
    weight = normal((heads + 2 * kv_heads) * dim, inputs, dtype=dtype) / inputs**0.5
    return normal(batch, tokens, inputs, dtype=dtype), weight, (angles.cos(), angles.sin()), *slabs, start, heads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, case: tuple[int, ...]) -> None:
    x, weight, table, keys, values, start, heads = call(normal, dtype, case)
    old, wanted_keys, wanted_values = keys.clone(), keys.float(), values.float()
    query = fused(x, weight, table, keys, values, start, heads)
    wanted = reference.project_rotate(x.float(), weight.float(), table, wanted_keys, wanted_values, start, heads)
    if heads:
        agree(query, wanted.to(dtype))
    else:
        assert query.shape == wanted.shape
    agree(keys, wanted_keys.to(dtype))
    agree(values, wanted_values.to(dtype))
    column = torch.arange(case[6], device=keys.device)
    kept = (column < start[:, None]) | (column >= start[:, None] + case[1])
    assert torch.equal(keys.transpose(1, 2)[kept], old.transpose(1, 2)[kept]), "a column outside the range was written"


def test_slabs_table_and_weight_may_be_views(fused: Any, normal: Any, agree: Any) -> None:
    x, weight, table, _, _, start, heads = call(normal, torch.float32, (2, 3, 12, 2, 2, 8, 10))
    shared = tuple(part[:1].expand(2, -1, -1) for part in table)
    whole = normal(2, 2, 10, 2, 8)  # [K or V, batch, columns, kv, head_dim]
    slab, wanted = whole.clone().transpose(2, 3), whole.transpose(2, 3).contiguous()
    wide = torch.cat((weight, weight), dim=1)[:, :12]
    query = fused(x.transpose(0, 1).contiguous().transpose(0, 1), wide, shared, slab[0], slab[1], start, heads)
    agree(query, reference.project_rotate(x, weight, shared, wanted[0], wanted[1], start, heads))
    agree(slab, wanted)


def test_many_rows_are_left_to_the_vendor(fused: Any, normal: Any, agree: Any) -> None:
    x, weight, table, keys, values, start, heads = call(normal, torch.float32, (1, 65, 6, 1, 1, 4, 70))
    wanted_keys, wanted_values = keys.clone(), values.clone()
    query = fused(x, weight, table, keys, values, start, heads)
    agree(query, reference.project_rotate(x, weight, table, wanted_keys, wanted_values, start, heads))
    agree(keys, wanted_keys)


def test_a_broken_promise_stays_inside_the_slab(fused: Any, normal: Any) -> None:
    x, weight, table, *_ = call(normal, torch.float32, (2, 3, 5, 2, 1, 8, 6))
    around: Tensor = torch.full((2, 2, 1, 10, 8), 7.0, device=x.device)
    keys, values = (part[:, :, 2:8] for part in around)
    fused(x, weight, table, keys, values, torch.tensor([5, -2], device=x.device), 2)
    assert (around[:, :, :, :2] == 7).all() and (around[:, :, :, 8:] == 7).all()
    assert (keys[0, :, :5] == 7).all() and (keys[0, :, 5] != 7).all() and (keys[1, :, 0] != 7).all()


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    x, weight, table, keys, values, start, _ = call(normal, torch.float32, (2, 5, 6, 4, 2, 24, 20))
    with pytest.raises(ValueError, match="is not 3"):
        fused(x, weight, table, keys, values, start, 3)
    with pytest.raises(ValueError, match="do not fit"):
        fused(x, normal(192, 5), table, keys, values, start, 4)
    with pytest.raises(ValueError, match="keys and values must be"):
        fused(x, weight, table, keys, values[:1], start, 4)
    with pytest.raises(ValueError, match="start must be"):
        fused(x, weight, table, keys, values, start.int(), 4)
