"""attend: masked-length attention against the reference; what stands beyond a length has no influence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference
from torch import Tensor

# batch, heads, kv heads, queries, columns, head_dim, lengths
CASES = {
    "expert": (1, 8, 1, 5, 150, 256, [148]),
    "one query, one key": (1, 1, 1, 1, 1, 16, [1]),
    "rows differ": (3, 8, 1, 2, 257, 16, [1, 64, 257]),
    "at a tile's end": (3, 2, 1, 3, 130, 16, [63, 65, 128]),
    "kv heads": (2, 6, 3, 19, 70, 24, [69, 2]),
    "vision": (2, 4, 4, 40, 40, 72, None),
    "merged, no lengths": (1, 2, 1, 2, 385, 64, None),
}


def inputs(normal: Any, dtype: torch.dtype, case: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, slabs with NaN beyond the lengths, lengths."""
    batch, heads, kv_heads, queries, columns, dim, lengths = case
    query = normal(batch, heads, queries, dim, dtype=dtype)
    keys, values = (normal(batch, kv_heads, columns, dim, dtype=dtype) for _ in range(2))
    if lengths is None:
        return query, keys, values, None
    limit = torch.tensor(lengths, device=query.device)
    beyond = torch.arange(columns, device=query.device) >= limit[:, None]
    keys, values = (slab.masked_fill(beyond[:, None, :, None], float("nan")) for slab in (keys, values))
    return query, keys, values, limit


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_the_reference(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, case: tuple[Any, ...]) -> None:
    args = inputs(normal, dtype, case)
    wanted = reference.attend(*(arg.float() if arg is not None and arg.is_floating_point() else arg for arg in args))
    agree(fused(*args), wanted.to(dtype))


def test_runs_do_not_differ(fused: Any, normal: Any) -> None:
    args = inputs(normal, torch.float32, CASES["rows differ"])
    first = fused(*args)
    assert all(torch.equal(first, fused(*args)) for _ in range(3))


def test_both_ways_are_covered() -> None:
    """One launch, and spans that are merged; with a length that leaves whole spans empty."""
    plan = pytest.importorskip("phyai_kernels.attend", reason="Triton is not installed").plan
    spans = {}
    for name, (batch, heads, kv_heads, queries, columns, dim, _) in CASES.items():
        cut = plan(heads // kv_heads * queries, batch * kv_heads, columns, dim, itemsize=2, chip=99 * 1024)
        spans[name] = -(-columns // cut.span)
    assert spans["vision"] == 1 and spans["kv heads"] == 1
    assert spans["expert"] > 1 and spans["rows differ"] > 2 and spans["merged, no lengths"] >= 4


@pytest.mark.parametrize("column", [0, 63, 64, 199])
def test_every_column_counts_up_to_the_length(fused: Any, normal: Any, agree: Any, column: int) -> None:
    query, keys, values, _ = inputs(normal, torch.float32, (1, 8, 1, 2, 200, 32, None))
    values[:, :, column] *= 1000
    agree(fused(query, keys, values, None), reference.attend(query, keys, values))
    lengths = torch.tensor([column + 1], device=query.device)
    agree(fused(query, keys, values, lengths), reference.attend(query, keys, values, lengths))


def test_large_logits_do_not_overflow(fused: Any, normal: Any, agree: Any) -> None:
    query, keys, values, lengths = inputs(normal, torch.float32, CASES["rows differ"])
    agree(fused(query * 40, keys, values, lengths), reference.attend(query * 40, keys, values, lengths))


def test_a_length_beyond_the_slab_counts_as_the_slab(fused: Any, normal: Any) -> None:
    query, keys, values, _ = inputs(normal, torch.float32, (1, 2, 1, 3, 40, 16, None))
    far = torch.tensor([10_000], device=query.device)
    assert torch.equal(fused(query, keys, values, far), fused(query, keys, values))


def test_views_are_read_where_they_stand(fused: Any, normal: Any, agree: Any) -> None:
    query, keys, values = normal(2, 30, 3, 4, 24).permute(2, 0, 3, 1, 4)  # a merged QKV projection, split
    agree(fused(query, keys, values), reference.attend(query, keys, values))


def test_what_does_not_fit_is_refused(fused: Any, normal: Any) -> None:
    query, keys = normal(2, 4, 3, 16), normal(2, 2, 10, 16)
    with pytest.raises(ValueError, match="a divisor of 4"):
        fused(query, normal(2, 3, 10, 16), normal(2, 3, 10, 16))
    with pytest.raises(ValueError, match="keys and values must be"):
        fused(query, keys, keys[:, :, :9])
    with pytest.raises(ValueError, match="differ in dtype"):
        fused(query, keys, keys.bfloat16())
    with pytest.raises(ValueError, match="lengths must be"):
        fused(query, keys, keys, torch.tensor([1, 2], dtype=torch.int32, device=query.device))
    with pytest.raises(ValueError, match="last axis must be contiguous"):
        fused(query, keys, normal(2, 2, 16, 10).transpose(2, 3))
    with pytest.raises(ValueError, match="the widest is 256"):
        fused(normal(1, 1, 1, 257), normal(1, 1, 1, 257), normal(1, 1, 1, 257))


@pytest.mark.gpu
def test_offsets_beyond_2_31(fused: Any, device: torch.device, agree: Any) -> None:
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    slab = torch.zeros((2, 1, 1 << 23, 256), dtype=torch.bfloat16, device=device)
    query = torch.randn((2, 8, 5, 256), device=device).bfloat16()
    slab[1, 0, -70:] = torch.randn((70, 256), device=device).bfloat16()
    view = slab[:, :, -300:]  # each row begins 2**31 values after the one before
    agree(fused(query, view, view), reference.attend(query.float(), view.float(), view.float()).bfloat16())
