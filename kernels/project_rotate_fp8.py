"""The way into attention with coded operands: merged QKV projection, rotation, K and V into their slab, in one kernel.

Fused: scale, split, rotation and the scattered writes, for any number of rows. The weight holds the two rows of a
rotary pair side by side, so a thread has both of their sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels.products_fp8 import (
    Plan,
    check_coded,
    described,
    launch_constants,
    plan,
    programs_of,
    sum_tile,
    tile_of,
)
from phyai_kernels.split_rotate import check_slab
from phyai_kernels.tiles import block, chip_bytes, stages_that_fit
from torch import Tensor


@triton.jit(do_not_specialize=["rows", "tokens", "columns"])  # see attend.py
def _project_rotate_fp8(
    x,
    weight,
    factor,
    bias,
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
    cos_at,
    sin_at,
    key_at,
    value_at,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile, within one head. ``*_at``: strides of the batch, then of tokens or heads and columns."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    per_head = tl.cdiv(HALF, PAIRS)
    down, across = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), per_head * (heads + 2 * kv_heads), GROUP)
    head = across // per_head
    first = across % per_head * PAIRS
    output = head * 2 * HALF + 2 * first
    column = tl.arange(0, BLOCK_N)
    held = first + column // 2 < HALF
    scale = tl.load(factor + output + column, mask=held, other=0.0)
    added = tl.load(bias + output + column, mask=held, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    both = sum_tile(x, weight, down * BLOCK_M, output, inputs, BLOCK_M, BLOCK_N, BLOCK_K, DOT)
    both = both * scale[None, :] + added[None, :]
    low, high = tl.split(tl.reshape(both, (BLOCK_M, PAIRS, 2)))
    row = (down * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    batch, token = row // tokens, row % tokens
    pair = (first + tl.arange(0, PAIRS))[None, :]
    real = row < rows
    inside = real[:, None] & (pair < HALF)
    dtype = query.dtype.element_ty
    if head < heads + kv_heads:  # rounded where the reference rounds: the product, then what is turned
        c = tl.load(cos + (batch * cos_at[0] + token * cos_at[1])[:, None] + pair, mask=inside, other=0.0)
        s = tl.load(sin + (batch * sin_at[0] + token * sin_at[1])[:, None] + pair, mask=inside, other=0.0)
        low, high = low * c - high * s, high * c + low * s
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


def project_rotate_fp8(
    x: Tensor,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Tensor:
    """See :func:`phyai_kernels.reference.project_rotate_fp8`. Slabs and table may be views whose last axis is
    contiguous; what else is not contiguous is copied first. Columns outside the slab are not written.

    :raises ValueError: as products_fp8.check_coded; sizes or dtypes that do not fit, or a last axis with gaps.
    """
    check_coded(x, weight, factor, bias, *table, keys, values)
    batch, tokens, _ = x.shape
    cos, sin = check_slab((batch, tokens, len(weight)), keys.dtype, table, keys, values, start, heads)
    query = torch.empty((batch, heads, tokens, keys.shape[3]), dtype=keys.dtype, device=x.device)
    _launch(x.contiguous(), weight, (factor, bias), (cos, sin), query, keys, values, start.contiguous())
    return query


def _launch(
    x: Tensor,
    weight: Tensor,
    scaling: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
) -> None:
    (batch, tokens, inputs), heads = x.shape, query.shape[1]
    kv_heads, columns, dim = keys.shape[1:]
    cut = _within_a_head(
        plan_once(batch * tokens, inputs, len(weight), programs_of(x.device), chip_bytes(x.device)), dim
    )
    tiles = triton.cdiv(batch * tokens, cut.rows) * triton.cdiv(dim, cut.outputs) * (heads + 2 * kv_heads)
    _project_rotate_fp8[(tiles,)](
        *described(x, weight, cut),
        *scaling,
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
        table[0].stride()[:2],
        table[1].stride()[:2],
        keys.stride()[:3],
        values.stride()[:3],
        HALF=dim // 2,
        **launch_constants(cut, x.device),
    )


def plan_once(rows: int, inputs: int, outputs: int, programs: int, chip: int) -> Plan:
    """Wide tiles where all run at once: 784 rows of 2048 -> 2560 12.0 us instead of 17.7 (H200).

    :param programs: that run at the same time. :param chip: bytes of shared memory that one may take.
    """
    cut, wide = plan(rows, inputs, outputs), Plan(64, 256, 128, 8, 4)
    once = triton.cdiv(rows, wide.rows) * triton.cdiv(outputs, wide.outputs) <= programs
    fits = stages_that_fit(chip, 0, (wide.rows + wide.outputs) * wide.inputs, most=wide.stages) == wide.stages
    return wide if rows > wide.rows and inputs >= wide.inputs and once and fits else cut


def _within_a_head(cut: Plan, dim: int) -> Plan:
    return cut._replace(outputs=min(cut.outputs, block(dim, largest=256)))
