"""Attention of few queries over many keys, up to a length that each row reads from device memory.

Fused: logits, mask, softmax, weighted sum, head merge; the logits never leave the chip (8 heads of 50 queries over 1018
keys are 1.6 MB in fp32, written and read three times by separate operators). All query heads of one K/V head are packed
into one tile's rows, so multi-query attention reads a key once instead of eight times. Columns beyond the length are
neither read nor computed: nothing that stands there, a NaN included, has influence.

Where the tiles alone would leave multiprocessors idle, the columns are cut into spans whose partial sums a second
kernel merges in a fixed order. The cut follows from the slab's size, not from the lengths: it needs no word from the
host. Worth it wherever the reference would store logits: ``plan`` has the times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.products import fetch, launch_options, overlaps, requests
from phyai_kernels.products_fp8 import check_code, coded
from phyai_kernels.reference import FP8, Code
from phyai_kernels.tiles import (
    INTERPRETED,
    WAVE,
    block,
    check_launch,
    chip_bytes,
    dot_type,
    last_axis_is_dense,
    stages_that_fit,
)
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDEST = 256  # a head's query, key and value tiles must fit on the chip together
LOG2_E = 1.4426950408889634
SHORTEST_SPAN = 64  # columns; 8 to 24 spans of the expert's 1018 columns are equally fast on an H200


class Plan(NamedTuple):
    """How one shape is cut: packed queries and columns of a tile, columns of a span, warps and stages of a program."""

    rows: int
    columns: int
    span: int
    warps: int
    stages: int


def plan(packed: int, pairs: int, columns: int, dim: int, *, itemsize: int, chip: int) -> Plan:
    """Measured on an H200: bf16 expert 10.6 us, prefix 33, vision 17 (best of torch: 14, 30, 10).

    :param packed: queries that share a K/V head. :param pairs: batch times K/V heads.
    :param itemsize: bytes of a value. :param chip: bytes of shared memory that one program may take.
    """
    wide = itemsize == 4
    if dim > 128:
        rows, across, stages = (16, 32, 2) if wide else (64, 32, 3)
    else:
        rows, across, stages = (64, 32, 1) if wide else (128, 64, 2)
    rows, across = block(packed, largest=rows), block(columns, largest=across)
    depth = block(dim, largest=WIDEST) * itemsize
    stages = stages_that_fit(chip, rows * depth, 2 * across * depth, most=stages)
    spans = max(1, min(WAVE // (triton.cdiv(packed, rows) * pairs), columns // SHORTEST_SPAN))
    span = triton.cdiv(triton.cdiv(columns, spans), across) * across
    return Plan(rows, across, span, warps=8 if rows == 128 else 4, stages=stages)


@triton.jit
def _sum_columns(
    asked,
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
    """Softmax over columns begin to end - 1 of one K/V head, not yet divided: highest logit, weights, weighted sum."""
    depth = tl.arange(0, BLOCK_D)
    step = tl.arange(0, BLOCK_N)
    key_tile = step[None, :] * key_column + depth[:, None]
    value_tile = step[:, None] * value_column + depth[None, :]
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    summed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for column in range(begin, end, BLOCK_N):
        far = tl.cast(column, tl.int64)  # a slab may hold more than 2**31 values
        visible = column + step < end
        key = tl.load(keys + far * key_column + key_tile, mask=visible[None, :] & deep[:, None], other=0.0)
        logits = tl.dot(asked.to(DOT), key.to(DOT), input_precision="tf32x3") * scale
        logits = tl.where(visible[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        shrink = tl.exp2(peak - higher)
        share = tl.exp2(logits - higher[:, None])
        weight = weight * shrink + tl.sum(share, axis=1)
        value = tl.load(values + far * value_column + value_tile, mask=visible[:, None] & deep[None, :], other=0.0)
        share = share.to(value.dtype).to(DOT)
        summed = tl.dot(share, value.to(DOT), summed * shrink[:, None], input_precision="tf32x3")
        peak = higher
    return peak, weight, summed


# What varies between requests is not specialized: a new prompt length would compile for seconds in a moving robot.
@triton.jit(do_not_specialize=["columns", "queries"])
def _attend(
    query,
    keys,
    values,
    lengths,
    mixed,
    peaks,
    sums,
    centre,
    inverse,
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
    MERGE: tl.constexpr,
    CODE: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of packed queries (row r is query r % queries of head r // queries) over one span of columns.

    ``mixed`` receives the result, with CODE as e4m3, or with MERGE the sums of this span, beside their peaks and
    weights.
    ``query_at``, ``key_at`` and ``value_at`` are strides: of the batch, the heads, and the queries or columns.
    """
    pair = tl.program_id(2).to(tl.int64)  # row of the batch and K/V head
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < group * queries
    head = kv_head * group + row // queries
    depth = tl.arange(0, BLOCK_D)
    deep = depth < DIM
    held = real[:, None] & deep[None, :]
    at = batch * query_at[0] + head * query_at[1] + (row % queries).to(tl.int64) * query_at[2]
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, columns)
    keys += batch * key_at[0] + kv_head * key_at[1]
    values += batch * value_at[0] + kv_head * value_at[1]
    if LIMITED:  # lengths are no result of the kernel before, which writes queries, keys and values
        end = tl.minimum(end, tl.load(lengths + batch)).to(tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if MERGE and CHUNKS > 0 and tl.program_id(0) == 0:
            size = DIM * (keys.dtype.element_ty.primitive_bitwidth // 8)
            for column in range(begin, end, BLOCK_N):
                far = tl.minimum(column + tl.arange(0, BLOCK_N), columns - 1).to(tl.int64)
                fetch((keys + far * key_at[2]).to(tl.int64), size, CHUNKS)
                fetch((values + far * value_at[2]).to(tl.int64), size, CHUNKS)
        tl.extra.cuda.gdc_wait()
    asked = tl.load(query + at[:, None] + depth[None, :], mask=held, other=0.0)
    peak, weight, summed = _sum_columns(
        asked, keys, values, begin, end, key_at[2], value_at[2], scale, deep, BLOCK_M, BLOCK_N, BLOCK_D, DOT
    )
    if MERGE:
        part = (pair * tl.num_programs(1) + tl.program_id(1)) * (group * queries) + row
        tl.store(peaks + part, peak, mask=real)
        tl.store(sums + part, weight, mask=real)
        tl.store(mixed + part[:, None] * DIM + depth[None, :], summed, mask=held)
    else:
        place = (batch * queries + row % queries) * (kv_heads * group) + head
        result = (summed / weight[:, None]).to(asked.dtype)
        to = mixed + place[:, None] * DIM + depth[None, :]
        if CODE:
            middle = tl.load(centre + head[:, None] * DIM + depth[None, :], mask=held, other=0.0)
            tl.store(to, coded(result.to(tl.float32), middle, inverse), mask=held)
        else:
            tl.store(to, result, mask=held)


@triton.jit(do_not_specialize=["spans", "queries"])
def _merge(
    partial,
    peaks,
    sums,
    mixed,
    centre,
    inverse,
    spans,
    queries,
    group,
    kv_heads,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CODE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One packed query: the sums of all spans, each brought to the highest peak."""
    row = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    packed = group * queries
    span = tl.arange(0, BLOCK_S)
    depth = tl.arange(0, BLOCK_D)
    part = (pair * spans + span) * packed + row
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    peak = tl.load(peaks + part, mask=span < spans, other=float("-inf"))
    share = tl.exp2(peak - tl.max(peak, axis=0))  # the first span holds a column, so the highest peak is a number
    weight = tl.sum(share * tl.load(sums + part, mask=span < spans, other=0.0), axis=0)
    # Also a span without columns has stored its sums, zeros: the loads need not wait for the peaks.
    held = (span < spans)[:, None] & (depth < DIM)[None, :]
    summed = tl.load(partial + part[:, None] * DIM + depth[None, :], mask=held, other=0.0)
    result = tl.sum(summed * share[:, None], axis=0) / weight
    head = pair % kv_heads * group + row // queries
    place = (pair // kv_heads * queries + row % queries) * (kv_heads * group) + head
    if CODE:
        middle = tl.load(centre + head * DIM + depth, mask=depth < DIM, other=0.0)
        tl.store(mixed + place * DIM + depth, coded(result, middle, inverse), mask=depth < DIM)
    else:
        tl.store(mixed + place * DIM + depth, result.to(mixed.dtype.element_ty), mask=depth < DIM)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None, code: Code | None = None
) -> Tensor:
    """See :func:`phyai_kernels.reference.attend`. All may be views whose last axis is contiguous.

    A length beyond the slab counts as the slab's. With ``code`` the result is coded.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, heads wider than 256, a last axis with
        gaps.
    """
    check_launch(query, keys, values, *(code or ()))
    check_attention(query, keys, values, lengths)
    if lengths is None and code is None and query.dtype == torch.bfloat16 and not INTERPRETED:
        return _by_torch(query, keys, values)
    return _launch(query, keys, values, lengths if lengths is None else lengths.contiguous(), code)


def check_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None) -> None:
    """:raises ValueError: as ``attend``."""
    batch, heads, _, dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    if dim > WIDEST:
        raise ValueError(f"heads of {dim} are too wide for the chip, the widest is {WIDEST}")
    if keys.shape != (batch, kv_heads, columns, dim) or values.shape != keys.shape or heads % kv_heads:
        raise ValueError(
            f"keys and values must be [{batch}, kv, C, {dim}], kv a divisor of {heads}: got {tuple(keys.shape)} and "
            f"{tuple(values.shape)}"
        )
    if {keys.dtype, values.dtype} != {query.dtype}:
        raise ValueError(f"query, keys and values differ in dtype: {query.dtype}, {keys.dtype}, {values.dtype}")
    last_axis_is_dense(query=query, keys=keys, values=values)
    if lengths is not None and (lengths.shape != (batch,) or lengths.dtype != torch.int64):
        raise ValueError(f"lengths must be [{batch}] int64: got {tuple(lengths.shape)} {lengths.dtype}")


def _by_torch(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """All columns of 16-bit values: cuDNN takes 10 us for the vision tower's 48 heads of 256 tokens, this file 17."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], True):
        grouped = query.shape[1] != keys.shape[1]
        mixed = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)
    return mixed.transpose(1, 2).flatten(2)


def _launch(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, code: Code | None) -> Tensor:
    batch, heads, queries, dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    group, pairs = heads // kv_heads, batch * kv_heads
    packed = group * queries
    itemsize = query.element_size()
    cut = plan(packed, pairs, columns, dim, itemsize=itemsize, chip=chip_bytes(query.device))
    spans = triton.cdiv(columns, cut.span)
    dtype = query.dtype if code is None else FP8
    centre, inverse = (None, None) if code is None else check_code(code, heads * dim)
    out = torch.empty((batch, queries, heads * dim), dtype=dtype, device=query.device)
    if spans == 1:
        partial, peaks, sums = out, None, None
    else:
        partial = torch.empty((pairs, spans, packed, dim), dtype=torch.float32, device=query.device)
        peaks, sums = torch.empty((2, pairs, spans, packed), dtype=torch.float32, device=query.device)
    sizes = {"DIM": dim, "BLOCK_D": block(dim, largest=WIDEST)}
    overlap = {"OVERLAP": overlaps(query.device), **launch_options(query.device)}
    _attend[(triton.cdiv(packed, cut.rows), spans, pairs)](
        query,
        keys,
        values,
        lengths,
        partial,
        peaks,
        sums,
        centre,
        inverse,
        columns,
        cut.span,
        queries,
        group,
        kv_heads,
        dim**-0.5 * LOG2_E,
        query.stride()[:3],
        keys.stride()[:3],
        values.stride()[:3],
        **sizes,
        BLOCK_M=cut.rows,
        BLOCK_N=cut.columns,
        LIMITED=lengths is not None,
        MERGE=spans > 1,
        CODE=code is not None,
        CHUNKS=min(requests(slab, dim * itemsize, cut.columns, cut.warps) for slab in (keys, values)),
        **overlap,
        DOT=dot_type(query.dtype),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if spans > 1:
        _merge[(packed, pairs)](
            partial,
            peaks,
            sums,
            out,
            centre,
            inverse,
            spans,
            queries,
            group,
            kv_heads,
            **sizes,
            BLOCK_S=block(spans, largest=WAVE),
            CODE=code is not None,
            **overlap,
            num_warps=4,
        )
    return out
