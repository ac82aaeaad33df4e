"""Gradient through the attention of few queries over many keys, of which only the last few need one themselves.

Three kernels. The first is attend's, but sums weight * (grad . value - delta) * key, with delta = grad . result: one
pass over the keys gives the gradient of the queries, span by span. The second makes the weights of the wanted columns
again, now that the spans' peaks and sums are known, and from them the gradients of these keys and values, a part for
each tile of queries. The third adds spans and parts. No two programs add to one sum, so each run gives the same bits.
Logits and weights never leave the chip (8 heads of 50 queries over 1018 keys: four times 1.6 MB in fp32, written and
read by some twenty separate operators).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.attend import LOG2_E, SHORTEST_SPAN, WIDEST, check_attention
from phyai_kernels.products import fetch, launch_options, overlaps, requests
from phyai_kernels.tiles import WAVE, block, check_launch, chip_bytes, dot_type, stages_that_fit
from torch import Tensor

MOST_SPANS = 64  # a program of the second kernel holds all spans' peaks of its queries


class Plan(NamedTuple):
    """How one shape is cut: packed queries and columns of a tile, columns of a span, values of a head that the second
    kernel takes at a time, warps and stages of the first."""

    rows: int
    columns: int
    span: int
    part: int
    warps: int
    stages: int


def plan(packed: int, pairs: int, columns: int, dim: int, *, itemsize: int, chip: int) -> Plan:
    """Parameters are those of ``attend.plan``. Warps as measured on an H200 at 50 queries over 1018 columns."""
    wide = itemsize == 4
    rows, across = block(packed, largest=16 if wide and dim > 128 else 64), block(columns, largest=32)
    depth = block(dim, largest=WIDEST) * itemsize
    stages = stages_that_fit(chip, 2 * rows * depth, 2 * across * depth, most=2 if wide else 3)
    spans = min(WAVE // (triton.cdiv(packed, rows) * pairs), triton.cdiv(columns, SHORTEST_SPAN), MOST_SPANS)
    span = triton.cdiv(triton.cdiv(columns, max(spans, 1)), across) * across
    return Plan(rows, across, span, part=32 if wide else 64, warps=8 if wide else 4, stages=stages)


@triton.jit
def _places(batch, kv_head, row, queries, group, kv_heads, query_at, DIM: tl.constexpr):
    """Where the query and the result of a packed query begin: row r is query r % queries of its head. [M, 1] each."""
    head = kv_head * group + row // queries
    at = batch * query_at[0] + head * query_at[1] + (row % queries).to(tl.int64) * query_at[2]
    place = ((batch * queries + row % queries) * (kv_heads * group) + head) * DIM
    return at[:, None], place[:, None]


@triton.jit
def _tile(query, grad, mixed, at, place, depth, held):
    """Of packed queries: the queries, the gradients of their results, and delta, of some values of a head."""
    asked = tl.load(query + at + depth, mask=held, other=0.0)
    pulled = tl.load(grad + place + depth, mask=held, other=0.0)
    result = tl.load(mixed + place + depth, mask=held, other=0.0)
    return asked, pulled, tl.sum(pulled.to(tl.float32) * result.to(tl.float32), axis=1)


@triton.jit
def _sum_columns_back(
    asked,
    pulled,
    delta,
    keys,
    values,
    begin,
    end,
    key_column,
    value_column,
    scale,
    deep,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DOT: tl.constexpr,
):
    """Columns begin to end - 1 of one K/V head: highest logit, sum of weights, and the queries' gradient, not yet
    divided by that sum."""
    depth = tl.arange(0, BLOCK_D)
    step = tl.arange(0, BLOCK_N)
    key_tile = step[:, None] * key_column + depth[None, :]
    value_tile = step[None, :] * value_column + depth[:, None]
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for column in range(begin, end, BLOCK_N):
        far = tl.cast(column, tl.int64)  # a slab may hold more than 2**31 values
        visible = column + step < end
        key = tl.load(keys + far * key_column + key_tile, mask=visible[:, None] & deep[None, :], other=0.0).to(DOT)
        value = tl.load(values + far * value_column + value_tile, mask=visible[None, :] & deep[:, None], other=0.0)
        logits = tl.dot(asked.to(DOT), tl.trans(key), input_precision="tf32x3") * scale
        logits = tl.where(visible[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        shrink = tl.exp2(peak - higher)
        share = tl.exp2(logits - higher[:, None])
        weight = weight * shrink + tl.sum(share, axis=1)
        pull = tl.dot(pulled.to(DOT), value.to(DOT), input_precision="tf32x3") - delta[:, None]
        along = (share * pull).to(asked.dtype).to(DOT)
        summed = tl.dot(along, key, summed * shrink[:, None], input_precision="tf32x3")
        peak = higher
    return peak, weight, summed


@triton.jit(do_not_specialize=["columns", "queries"])  # see attend.py
def _pull_queries(
    grad,
    mixed,
    query,
    keys,
    values,
    lengths,
    partial,
    peaks,
    sums,
    columns,
    span,
    queries,
    group,
    kv_heads,
    scale,
    query_at,
    key_at,
    value_at,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LIMITED: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of packed queries over one span of columns. ``*_at``: as attend's."""
    pair = tl.program_id(2).to(tl.int64)  # row of the batch and K/V head
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < group * queries
    depth = tl.arange(0, BLOCK_D)
    deep = depth < DIM
    held = real[:, None] & deep[None, :]
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, columns)
    keys += batch * key_at[0] + kv_head * key_at[1]
    values += batch * value_at[0] + kv_head * value_at[1]
    if LIMITED:  # lengths are no result of the kernel before
        end = tl.minimum(end, tl.load(lengths + batch)).to(tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if CHUNKS > 0 and tl.program_id(0) == 0:
            size = DIM * (keys.dtype.element_ty.primitive_bitwidth // 8)
            for column in range(begin, end, BLOCK_N):
                far = tl.minimum(column + tl.arange(0, BLOCK_N), columns - 1).to(tl.int64)
                fetch((keys + far * key_at[2]).to(tl.int64), size, CHUNKS)
                fetch((values + far * value_at[2]).to(tl.int64), size, CHUNKS)
        tl.extra.cuda.gdc_wait()
    at, place = _places(batch, kv_head, row, queries, group, kv_heads, query_at, DIM)
    asked, pulled, delta = _tile(query, grad, mixed, at, place, depth[None, :], held)
    peak, weight, summed = _sum_columns_back(
        asked,
        pulled,
        delta,
        keys,
        values,
        begin,
        end,
        key_at[2],
        value_at[2],
        scale,
        deep,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        DOT,
    )
    part = (pair * tl.num_programs(1) + tl.program_id(1)) * (group * queries) + row
    tl.store(peaks + part, peak, mask=real)
    tl.store(sums + part, weight, mask=real)
    tl.store(partial + part[:, None] * DIM + depth[None, :], summed, mask=held)


@triton.jit(do_not_specialize=["columns", "queries", "spans", "count"])
def _pull_columns(
    grad,
    mixed,
    query,
    keys,
    values,
    lengths,
    start,
    peaks,
    sums,
    key_parts,
    value_parts,
    columns,
    spans,
    count,
    queries,
    group,
    kv_heads,
    scale,
    query_at,
    key_at,
    value_at,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    LIMITED: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of packed queries, one tile of the wanted columns. The parts are [tiles, batch * kv, count, D]."""
    pair = tl.program_id(2).to(tl.int64)
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    packed = group * queries
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < packed
    at, place = _places(batch, kv_head, row, queries, group, kv_heads, query_at, DIM)
    step = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.load(start + batch) + step
    end = tl.minimum(tl.load(lengths + batch), columns) if LIMITED else columns
    visible = (step < count) & (column >= 0) & (column < end)
    span = tl.arange(0, BLOCK_S)[:, None]
    part = (pair * spans + span) * packed + row[None, :]
    there = (span < spans) & real[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    heights = tl.load(peaks + part, mask=there, other=float("-inf"))
    peak = tl.where(real, tl.max(heights, axis=0), 0.0)
    total = tl.sum(tl.exp2(heights - peak[None, :]) * tl.load(sums + part, mask=there, other=0.0), axis=0)
    total = tl.where(real, total, 1.0)
    keys += batch * key_at[0] + kv_head * key_at[1] + column[:, None] * key_at[2]
    values += batch * value_at[0] + kv_head * value_at[1] + column[:, None] * value_at[2]
    # Turned: columns are the rows of all products. A part of the head at a time, or the operands fill the registers.
    logits = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    pull = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    delta = tl.zeros((BLOCK_M,), tl.float32)
    for d in range(0, DIM, BLOCK_D):
        depth = d + tl.arange(0, BLOCK_D)[None, :]
        asked, pulled, along = _tile(query, grad, mixed, at, place, depth, real[:, None] & (depth < DIM))
        wanted = visible[:, None] & (depth < DIM)
        key = tl.load(keys + depth, mask=wanted, other=0.0)
        value = tl.load(values + depth, mask=wanted, other=0.0)
        logits = tl.dot(key.to(DOT), tl.trans(asked.to(DOT)), logits, input_precision="tf32x3")
        pull = tl.dot(value.to(DOT), tl.trans(pulled.to(DOT)), pull, input_precision="tf32x3")
        delta += along
    share = tl.exp2(logits * scale - peak[None, :]) / total[None, :]
    share = tl.where(visible[:, None] & real[None, :], share, 0.0)
    dtype = query.dtype.element_ty
    along = (share * (pull - delta[None, :])).to(dtype).to(DOT)
    share = share.to(dtype).to(DOT)
    to = ((tl.program_id(0) * tl.num_programs(2) + pair) * count + step)[:, None] * DIM
    for d in range(0, DIM, BLOCK_D):
        depth = d + tl.arange(0, BLOCK_D)[None, :]
        asked, pulled, _ = _tile(query, grad, mixed, at, place, depth, real[:, None] & (depth < DIM))
        kept = (step < count)[:, None] & (depth < DIM)
        tl.store(key_parts + to + depth, tl.dot(along, asked.to(DOT), input_precision="tf32x3"), mask=kept)
        tl.store(value_parts + to + depth, tl.dot(share, pulled.to(DOT), input_precision="tf32x3"), mask=kept)


@triton.jit(do_not_specialize=["spans", "queries", "tiles", "count"])
def _merge_back(
    partial,
    peaks,
    sums,
    key_parts,
    value_parts,
    query,
    keys,
    values,
    spans,
    queries,
    tiles,
    count,
    group,
    scale,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One packed query: its spans, each brought to the highest peak; or one of the wanted columns: its parts."""
    row = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    packed = group * queries
    depth = tl.arange(0, BLOCK_D)
    deep = depth < DIM
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row < packed:
        span = tl.arange(0, BLOCK_S)
        part = (pair * spans + span) * packed + row
        peak = tl.load(peaks + part, mask=span < spans, other=float("-inf"))
        share = tl.exp2(peak - tl.max(peak, axis=0))  # the first span holds a column, so the highest peak is a number
        weight = tl.sum(share * tl.load(sums + part, mask=span < spans, other=0.0), axis=0)
        stored = (span < spans)[:, None] & deep[None, :]
        summed = tl.load(partial + part[:, None] * DIM + depth[None, :], mask=stored, other=0.0)
        result = tl.sum(summed * share[:, None], axis=0) / weight * scale
        tl.store(query + (pair * packed + row) * DIM + depth, result.to(query.dtype.element_ty), mask=deep)
    else:
        tile = tl.arange(0, BLOCK_T)
        own = pair * count + row - packed
        at = (tile.to(tl.int64) * tl.num_programs(1) * count + own)[:, None] * DIM + depth[None, :]
        held = (tile < tiles)[:, None] & deep[None, :]
        key = tl.sum(tl.load(key_parts + at, mask=held, other=0.0), axis=0) * scale
        value = tl.sum(tl.load(value_parts + at, mask=held, other=0.0), axis=0)
        tl.store(keys + own * DIM + depth, key.to(keys.dtype.element_ty), mask=deep)
        tl.store(values + own * DIM + depth, value.to(values.dtype.element_ty), mask=deep)


def attend_back(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    lengths: Tensor | None,
    start: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`phyai_kernels.backward.attend_back`. Query, keys and values may be views whose last axis is
    contiguous; what else is not contiguous is copied first. A wanted column that a row does not see has the gradient 0.

    :raises ValueError: as ``attend``; ``grad``, ``mixed`` or ``start`` that do not fit.
    """
    check_launch(grad, query, keys, values, mixed)
    check_attention(query, keys, values, lengths)
    batch, heads, queries, dim = query.shape
    for name, tensor in {"grad": grad, "mixed": mixed}.items():
        if tensor.shape != (batch, queries, heads * dim) or tensor.dtype != query.dtype:
            wanted = f"[{batch}, {queries}, {heads * dim}] {query.dtype}"
            raise ValueError(f"{name} must be {wanted}: got {tuple(tensor.shape)} {tensor.dtype}")
    if start.shape != (batch,) or start.dtype != torch.int64:
        raise ValueError(f"start must be [{batch}] int64: got {tuple(start.shape)} {start.dtype}")
    lengths = lengths if lengths is None else lengths.contiguous()
    return _launch(grad.contiguous(), query, keys, values, mixed.contiguous(), lengths, start.contiguous(), count)


def _launch(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    lengths: Tensor | None,
    start: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, queries, dim), (kv_heads, columns), itemsize = query.shape, keys.shape[1:3], query.element_size()
    group, pairs, device = heads // kv_heads, batch * kv_heads, query.device
    packed = group * queries
    cut = plan(packed, pairs, columns, dim, itemsize=itemsize, chip=chip_bytes(device))
    spans, tiles = triton.cdiv(columns, cut.span), triton.cdiv(packed, cut.rows)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    partial, peaks, sums = made(pairs, spans, packed, dim), made(pairs, spans, packed), made(pairs, spans, packed)
    key_parts, value_parts = (made(tiles, pairs, count, dim) for _ in range(2))
    found = made(*query.shape, dtype=query.dtype)
    own_keys, own_values = (made(batch, kv_heads, count, dim, dtype=query.dtype) for _ in range(2))
    head = {"DIM": dim, "BLOCK_D": block(dim, largest=WIDEST)}
    merged = {**head, "BLOCK_S": block(spans, largest=MOST_SPANS)}
    tile = {"BLOCK_M": cut.rows, "BLOCK_N": cut.columns, "LIMITED": lengths is not None, "DOT": dot_type(query.dtype)}
    overlap = {"OVERLAP": overlaps(device), **launch_options(device)}
    sizes = queries, group, kv_heads, dim**-0.5 * LOG2_E
    strides = query.stride()[:3], keys.stride()[:3], values.stride()[:3]
    chunks = min(requests(slab, dim * itemsize, cut.columns, cut.warps) for slab in (keys, values))
    read = grad, mixed, query, keys, values, lengths
    _pull_queries[(tiles, spans, pairs)](
        *read,
        partial,
        peaks,
        sums,
        columns,
        cut.span,
        *sizes,
        *strides,
        **head,
        **tile,
        CHUNKS=chunks,
        **overlap,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if count:
        _pull_columns[(tiles, triton.cdiv(count, cut.columns), pairs)](
            *read,
            start,
            peaks,
            sums,
            key_parts,
            value_parts,
            columns,
            spans,
            count,
            *sizes,
            *strides,
            **merged | {"BLOCK_D": min(head["BLOCK_D"], cut.part)},
            **tile,
            **overlap,
            num_warps=4,
        )
    _merge_back[(packed + count, pairs)](
        partial,
        peaks,
        sums,
        key_parts,
        value_parts,
        found,
        own_keys,
        own_values,
        spans,
        queries,
        tiles,
        count,
        group,
        dim**-0.5,
        **merged,
        BLOCK_T=triton.next_power_of_2(tiles),
        **overlap,
        num_warps=4,
    )
    return found, own_keys, own_values
