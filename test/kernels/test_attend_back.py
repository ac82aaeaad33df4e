"""attend_back: gradient of queries and of the columns that the pass wrote, against autograd of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference
from torch import Tensor

# batch, heads, K/V heads, queries, columns, D, and the lengths: several tiles of queries and spans in the last
SIZES = [
    ((2, 4, 2, 3, 20, 8), [20, 9]),
    ((2, 6, 1, 5, 40, 12), [5, 33]),
    ((1, 2, 1, 1, 1, 2), None),
    ((1, 23, 1, 3, 100, 5), [98]),
]
MOST_COLUMNS = 4  # with a gradient


def call(normal: Any, dtype: torch.dtype, size: tuple[int, ...], given: list[int] | None) -> tuple[Any, ...]:
    """As attend_back takes them; NaN beyond the lengths."""
    batch, heads, kv, queries, columns, dim = size
    query = normal(batch, heads, queries, dim, dtype=dtype)
    slabs = [normal(batch, kv, columns, dim, dtype=dtype) for _ in range(2)]
    lengths = None if given is None else torch.tensor(given, device=query.device)
    ends = torch.full((batch,), columns, device=query.device) if lengths is None else lengths
    beyond = torch.arange(columns, device=query.device) >= ends[:, None]
    slabs = [slab.masked_fill(beyond[:, None, :, None], float("nan")) for slab in slabs]
    count = min(queries, MOST_COLUMNS)
    mixed = reference.attend(query, *slabs, lengths)
    return normal(batch, queries, heads * dim, dtype=dtype), query, *slabs, mixed, lengths, ends - count, count


def autograd(args: tuple[Any, ...]) -> list[Tensor]:
    """In float32."""
    grad, query, keys, values, _, lengths, start, count = args
    leaves = [part.float().nan_to_num().requires_grad_() for part in (query, keys, values)]
    found = torch.autograd.grad(reference.attend(*leaves, lengths), leaves, grad.float())
    own = (start[:, None] + torch.arange(count, device=start.device))[:, None, :, None]
    at = own.expand(*keys.shape[:2], count, keys.shape[3])
    return [found[0], *(part.gather(2, at) for part in found[1:])]


# Over the largest value, in bfloat16: few values are sums of many rounded ones that cancel. In the last size the
# definition's own error is up to 1.3e-2 over six seeds.
CANCELLED = 2.5e-2


def check(found: Any, wanted: list[Tensor], dtype: torch.dtype, agree: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        most = float(theirs.abs().max())
        if most < 1e-6:  # one column: its weight is 1 whatever the query
            assert float(ours.abs().max()) < 2e-2
        elif dtype == torch.bfloat16:
            assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
            assert (ours.float() - theirs).abs().max() <= CANCELLED * most
        else:
            agree(ours, theirs)


@pytest.mark.parametrize(("size", "lengths"), SIZES, ids=str)
def test_it_is_the_gradient(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, size: Any, lengths: Any) -> None:
    args = call(normal, dtype, size, lengths)
    check(fused(*args), autograd(args), dtype, agree)


def test_both_ways_are_covered() -> None:
    """One span and one tile of queries, and several."""
    plan = pytest.importorskip("phyai_kernels.attend_back", reason="Triton is not installed").plan
    counts = set()
    for (batch, heads, kv, queries, columns, dim), _ in SIZES:
        packed = heads // kv * queries
        cut = plan(packed, batch * kv, columns, dim, itemsize=4, chip=99 * 1024)
        counts.add((-(-packed // cut.rows) > 1, -(-columns // cut.span) > 1))
    assert {(False, False), (True, True)} <= counts


def test_runs_do_not_differ_and_nothing_beyond_a_length_is_seen(fused: Any, normal: Any) -> None:
    args = list(call(normal, torch.float32, (2, 2, 1, 2, 140, 8), [139, 70]))
    first = fused(*args)
    assert all(part.isfinite().all() for part in first)
    args[2:4] = [slab.nan_to_num(nan=1e30) for slab in args[2:4]]
    assert all(torch.equal(a, b) for a, b in zip(first, fused(*args), strict=True))


def test_views_and_columns_without_a_gradient(fused: Any, normal: Any, agree: Any) -> None:
    grad, query, keys, values, mixed, lengths, start, _ = call(normal, torch.float32, (2, 4, 2, 3, 20, 8), [20, 9])
    views = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, keys, values)]
    args = grad.transpose(0, 1).contiguous().transpose(0, 1), *views, mixed, lengths, start
    check(fused(*args, 3), autograd((*args, 3)), torch.float32, agree)
    found = fused(*args, 0)
    agree(found[0], autograd((*args, 3))[0])
    assert found[1].shape == found[2].shape == (2, 2, 0, 8)


def test_a_column_that_a_row_does_not_see_has_none(fused: Any, normal: Any, agree: Any) -> None:
    grad, query, keys, values, mixed, lengths, start, count = call(normal, torch.float32, (1, 2, 1, 3, 20, 8), [18])
    for moved in (start + 2, start * 0 + 19):
        found = fused(grad, query, keys, values, mixed, lengths, moved, count)
        assert all(part.isfinite().all() for part in found)
        assert not found[1][:, :, -2:].any() and not found[2][:, :, -2:].any()


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    grad, query, keys, values, mixed, lengths, start, count = call(normal, torch.float32, (2, 4, 2, 3, 20, 8), [20, 9])
    with pytest.raises(ValueError, match="keys and values must be"):
        fused(grad, query, keys, values[..., :4], mixed, lengths, start, count)
    with pytest.raises(ValueError, match=r"mixed must be \[2, 3, 32\]"):
        fused(grad, query, keys, values, mixed.bfloat16(), lengths, start, count)
    with pytest.raises(ValueError, match=r"start must be \[2\] int64"):
        fused(grad, query, keys, values, mixed, lengths, start.int(), count)
