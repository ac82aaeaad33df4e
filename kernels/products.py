"""What the fused products of few rows share: the loop over the inputs, and how kernels overlap.

A chain of small kernels loses a microsecond at each border, and the memory idles while the last results are written.
Where the hardware can (Hopper on), a kernel is therefore started while the one before it still runs: it asks for its
weights, which nobody writes, to be brought into the L2 cache, and only then waits for what the one before it computed.
Every program of such a kernel waits, so a kernel that has ended has waited for all before it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from phyai_kernels.tiles import INTERPRETED
from torch import Tensor


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it has ended: NVIDIA's, from Hopper on."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def requests(rows: Tensor, row_bytes: int, count: int, warps: int) -> int:
    """In how many requests each of a program's ``count`` rows is asked for ahead, one request a thread; 0 = not at all.

    :param rows: [..., N, K], of which each program reads some; the instruction wants multiples of 16 bytes.
    :param row_bytes: of a row, how much a program reads.
    """
    if not overlaps(rows.device) or (rows.data_ptr() | rows.stride(-2) * rows.element_size() | row_bytes) % 16:
        return 0
    chunks = max(1, warps * 32 // count)
    while row_bytes % (16 * chunks):
        chunks //= 2
    return chunks


def launch_options(device: torch.device) -> dict[str, bool]:
    """What a launch needs for it; nothing elsewhere, since other back ends do not know the option."""
    return {"launch_pdl": True} if overlaps(device) else {}


@triton.jit
def fetch(addresses, row_bytes, CHUNKS: tl.constexpr):
    """Ask for rows to be brought into the L2 cache. :param addresses: [N]. :param CHUNKS: see ``requests``."""
    if CHUNKS > 0:
        size = row_bytes // CHUNKS
        at = addresses[:, None] + (tl.arange(0, CHUNKS) * size)[None, :].to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [at, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def product(
    x,
    weight_at,
    rows,
    begin,
    end,
    x_row,
    held,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32: rows of x times rows of the weight, inputs ``begin`` to ``end`` - 1.

    :param weight_at: [N] pointers to the first input of each row of the weight. :param held: [N], the rows that exist.
    :param EVEN: the inputs are whole blocks.
    """
    row = tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * x_row + step[None, :]
    tile = weight_at[None, :] + step[:, None]
    real = (row < rows)[:, None]
    summed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin, end, BLOCK_K):
        if EVEN:
            a = tl.load(x_at + k, mask=real, other=0.0)
            b = tl.load(tile + k, mask=held[None, :], other=0.0)
        else:
            inside = k + step < end
            a = tl.load(x_at + k, mask=real & inside[None, :], other=0.0)
            b = tl.load(tile + k, mask=inside[:, None] & held[None, :], other=0.0)
        summed = tl.dot(a.to(DOT), b.to(DOT), summed, input_precision="tf32x3")
    return summed


@triton.jit
def fetch_columns(tile, begin, end, row_size, BLOCK: tl.constexpr):
    """Ask for one cache line of each of some rows, ``begin`` to ``end`` - 1, to be brought into the L2 cache.

    :param tile: a pointer to the first row. :param row_size: from one row to the next.
    """
    step = tl.arange(0, BLOCK)
    for n in range(begin, end, BLOCK):
        at = (tile + tl.minimum(n + step, end - 1).to(tl.int64) * row_size).to(tl.int64)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def product_back(
    x,
    weight,
    rows,
    begin,
    end,
    x_row,
    weight_row,
    column,
    held,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_M, BLOCK_K] fp32: rows of x times columns of the weight, of whose rows ``begin`` to ``end`` - 1.

    The weight is read as it lies, so a tile's rows are short: one or two cache lines each.

    :param column: [BLOCK_K]. :param held: likewise, those that exist. :param EVEN: the rows are whole blocks.
    """
    row = tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_N)
    x_at = x + row[:, None] * x_row + step[None, :]
    tile = weight + step[:, None].to(tl.int64) * weight_row + column[None, :]
    real = (row < rows)[:, None]
    summed = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for n in range(begin, end, BLOCK_N):
        far = tl.cast(n, tl.int64) * weight_row
        if EVEN:
            a = tl.load(x_at + n, mask=real, other=0.0)
            b = tl.load(tile + far, mask=held[None, :], other=0.0)
        else:
            inside = n + step < end
            a = tl.load(x_at + n, mask=real & inside[None, :], other=0.0)
            b = tl.load(tile + far, mask=inside[:, None] & held[None, :], other=0.0)
        summed = tl.dot(a.to(DOT), b.to(DOT), summed, input_precision="tf32x3")
    return summed
