"""The way into attention for few rows: merged QKV projection, rotation, K and V into their slab, in one kernel.

Fused: split, rotation and the scattered writes. A tile holds both columns (i, i + D/2) of each rotary pair side by
side.
Worth it up to 64 rows, where the time is the weight's bytes; above, the vendor's product and split_rotate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.products import fetch, launch_options, overlaps, product, requests
from phyai_kernels.split_rotate import check_slab, split_rotate
from phyai_kernels.tiles import block, check_launch, chip_bytes, dot_type, last_axis_is_dense, stages_that_fit
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 64


class Plan(NamedTuple):
    """How one shape is cut: rotary pairs and inputs of a tile, warps and stages of a program."""

    pairs: int
    inputs: int
    warps: int
    stages: int


def plan(inputs: int, half: int, *, itemsize: int, chip: int) -> Plan:
    """In the expert's chain on an H200, 50 rows, bf16, 1024 -> 2560: 1.7 us, alone 5.6 (cuBLAS without rotation 5.1).

    :param half: pairs of a head. :param itemsize: bytes of a value. :param chip: bytes of shared memory.
    """
    wide = itemsize == 4
    pairs = block(half, smallest=8, largest=8 if wide else 16)
    down = block(inputs, largest=64 if wide else 128)
    stages = stages_that_fit(chip, 0, (64 + 2 * pairs) * down * itemsize, most=3 if wide else 4)
    return Plan(pairs, down, warps=4, stages=stages)


@triton.jit(do_not_specialize=["rows", "tokens", "columns"])  # see attend.py
def _project_rotate(
    x,
    weight,
    cos,
    sin,
    query,
    keys,
    values,
    start,
    rows,
    tokens,
    inputs,
    heads,
    kv_heads,
    columns,
    weight_row,
    cos_at,
    sin_at,
    key_at,
    value_at,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """All rows, PAIRS rotary pairs of one head. ``*_at``: strides of the batch, then of tokens or heads and columns."""
    per_head = tl.cdiv(HALF, PAIRS)
    head = tl.program_id(0) // per_head
    first = tl.program_id(0) % per_head * PAIRS
    column = tl.arange(0, 2 * PAIRS)
    pair = first + column // 2
    held = pair < HALF
    weight_at = weight + tl.where(held, head * 2 * HALF + column % 2 * HALF + pair, 0).to(tl.int64) * weight_row
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch(weight_at.to(tl.int64), inputs * (weight.dtype.element_ty.primitive_bitwidth // 8), CHUNKS)
        tl.extra.cuda.gdc_wait()
    both = product(x, weight_at, rows, 0, inputs, inputs, held, BLOCK_M, 2 * PAIRS, BLOCK_K, EVEN, DOT)
    low, high = tl.split(tl.reshape(both, (BLOCK_M, PAIRS, 2)))
    row = tl.arange(0, BLOCK_M).to(tl.int64)
    batch, token = row // tokens, row % tokens
    pair = (first + tl.arange(0, PAIRS))[None, :]
    real = row < rows
    inside = real[:, None] & (pair < HALF)
    if head < heads + kv_heads:
        c = tl.load(cos + (batch * cos_at[0] + token * cos_at[1])[:, None] + pair, mask=inside, other=0.0)
        s = tl.load(sin + (batch * sin_at[0] + token * sin_at[1])[:, None] + pair, mask=inside, other=0.0)
        low, high = low * c - high * s, high * c + low * s
    dtype = query.dtype.element_ty
    low, high = low.to(dtype), high.to(dtype)
    if head < heads:
        to = query + ((batch * heads + head) * tokens + token)[:, None] * (2 * HALF) + pair
        tl.store(to, low, mask=inside)
        tl.store(to + HALF, high, mask=inside)
    else:
        place = tl.load(start + batch, mask=real, other=0) + token
        # The caller promises C >= start + S; a broken promise must not reach memory beside the slab.
        inside = inside & ((place >= 0) & (place < columns))[:, None]
        if head < heads + kv_heads:
            to = keys + (batch * key_at[0] + (head - heads) * key_at[1] + place * key_at[2])[:, None] + pair
        else:
            far = (head - heads - kv_heads) * value_at[1]
            to = values + (batch * value_at[0] + far + place * value_at[2])[:, None] + pair
        tl.store(to, low, mask=inside)
        tl.store(to + HALF, high, mask=inside)


def project_rotate(
    x: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Tensor:
    """See :func:`phyai_kernels.reference.project_rotate`. Slabs and table may be views whose last axis is contiguous;
    what else is not contiguous is copied first. Columns outside the slab are not written.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a last axis with gaps.
    """
    check_launch(x, weight, *table, keys, values)
    batch, tokens, inputs = x.shape
    if weight.shape[1] != inputs or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
    if batch * tokens > MOST_ROWS:
        return split_rotate(functional.linear(x, weight), table, keys, values, start, heads)
    cos, sin = check_slab((batch, tokens, weight.shape[0]), x.dtype, table, keys, values, start, heads)
    last_axis_is_dense(weight=weight)
    query = torch.empty((batch, heads, tokens, keys.shape[3]), dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), weight, (cos, sin), query, keys, values, start.contiguous())
    return query


def _launch(
    x: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
) -> None:
    (batch, tokens, inputs), heads = x.shape, query.shape[1]
    kv_heads, columns, dim = keys.shape[1:]
    half = dim // 2
    cut = plan(inputs, half, itemsize=x.element_size(), chip=chip_bytes(x.device))
    _project_rotate[(triton.cdiv(half, cut.pairs) * (heads + 2 * kv_heads),)](
        x,
        weight,
        *table,
        query,
        keys,
        values,
        start,
        batch * tokens,
        tokens,
        inputs,
        heads,
        kv_heads,
        columns,
        weight.stride(0),
        table[0].stride()[:2],
        table[1].stride()[:2],
        keys.stride()[:3],
        values.stride()[:3],
        HALF=half,
        PAIRS=cut.pairs,
        BLOCK_M=block(batch * tokens, largest=MOST_ROWS),
        BLOCK_K=cut.inputs,
        EVEN=inputs % cut.inputs == 0,
        CHUNKS=requests(weight, inputs * x.element_size(), 2 * cut.pairs, cut.warps),
        OVERLAP=overlaps(x.device),
        DOT=dot_type(x.dtype),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )
