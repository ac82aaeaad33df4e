"""Attention on Hopper in CUDA C++, where Triton leaves multiprocessors or their matrix units idle: cuda_attend.cu.

Few columns, as the vision tower's 48 heads of 256 patches (7.3 us on an H200; cuDNN takes 10.7): a head's keys stand in
shared memory as a whole. Many queries of heads of 256 over a slab, as the prefix's (10 us less than Triton's 30): two
warpgroups take turns at the matrix unit; with a code it has another last step (cuda_attend_fp8.py). Serves where a
profile names it; all else goes to attend.py.
"""

from __future__ import annotations

import functools

import torch
from phyai_kernels import attend as others
from phyai_kernels import hopper, wgmma
from phyai_kernels.attend import LOG2_E, check_attention
from phyai_kernels.products_fp8 import check_code
from phyai_kernels.reference import FP8, Code
from phyai_kernels.tiles import check_launch
from torch import Tensor

FILES = ("cuda_attend.cu",)
GROUPS = 2  # warpgroups of a block of few columns, 64 queries each
FEW_COLUMNS, WIDEST = 256, 128
TILE, MOST_TILES, HEAD = 64, 32, 256  # of many queries: columns of a tile, tiles, values of a head

Instructions = tuple[tuple[str, int], ...]


def expression(dim: int, columns: int, *, coded: bool = False) -> tuple[str, Instructions]:
    """C++ expression of the kernel, and its matrix instructions.

    :param columns: at most; of heads of 256 any. :param coded: their result.
    """
    if dim == HEAD:
        return f"attend_long<{MOST_TILES}, {str(coded).lower()}>", (("Mma", TILE), ("Wide", HEAD))
    across = -(-columns // 16) * 16
    return f"attend_all<{dim}, {across}, {GROUPS}>", (("Mma", across), ("Wide", dim))


def shared_bytes(dim: int, columns: int) -> int:
    """Of a block, as the kernels have it."""
    if dim == HEAD:
        return 1024 + 7 * 64 * HEAD * 2 + 2 * 64 * 8 + (MOST_TILES + 1) * 8
    panels, across = -(-dim // 64), -(-columns // 16) * 16
    return 1024 + panels * (64 * GROUPS + 2 * across) * 128


@functools.cache
def kernel(dim: int, columns: int, device: int, *, coded: bool = False) -> hopper.Kernel:
    """Compiled and loaded. :raises RuntimeError: as hopper.load."""
    name, used = expression(dim, columns, coded=coded)
    function = hopper.load(wgmma.source(used, FILES), name, device)
    return hopper.kernel(function, threads=128 * GROUPS, cluster=1, shared=shared_bytes(dim, columns))


def has_few_columns(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether attend_all takes them: heads of their own, rows of whole 16-byte chunks that stand on such a border."""
    dim = query.shape[3]
    sizes = dim % 8 == 0 and 16 <= dim <= WIDEST and keys.shape[2] <= FEW_COLUMNS and query.shape[1] == keys.shape[1]
    places = [place for part in (query, keys, values) for place in (part.data_ptr() // 2, *part.stride()[:3])]
    return sizes and all(place % 8 == 0 for place in places)


def has_many_queries(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether attend_long takes them: dense, heads of 256, more packed queries than one tile has."""
    (_, heads, queries, dim), (kv_heads, columns) = query.shape, keys.shape[1:3]
    sizes = dim == HEAD and heads % kv_heads == 0 and heads // kv_heads * queries > TILE
    return sizes and columns <= TILE * MOST_TILES and all(part.is_contiguous() for part in (query, keys, values))


def takes_code(centre: Tensor, inverse: Tensor) -> bool:
    """Whether attend_long reads them: float32, dense, in 16-byte chunks."""
    wide = centre.dtype == inverse.dtype == torch.float32
    return wide and centre.is_contiguous() and centre.data_ptr() % 16 == 0


def attend(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None, code: Code | None = None
) -> Tensor:
    """See :func:`phyai_kernels.reference.attend`. With ``code`` the result is coded.

    :raises ValueError: as attend.attend.
    """
    check_launch(query, keys, values, *(code or ()))
    here = query.dtype == torch.bfloat16 and torch.cuda.get_device_capability(query.device) == (9, 0)
    few = lengths is None and code is None and has_few_columns(query, keys, values)
    many = has_many_queries(query, keys, values) and (code is None or takes_code(*code))
    if not here or not (few or many):
        return others.attend(query, keys, values, lengths, code)
    check_attention(query, keys, values, lengths)
    return _few_columns(query, keys, values) if few else _many_queries(query, keys, values, lengths, code)


def _few_columns(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    (batch, heads, queries, dim), columns = query.shape, keys.shape[2]
    out = torch.empty((batch, queries, heads * dim), dtype=query.dtype, device=query.device)
    slabs = [hopper.Slab.of(part) for part in (query, keys, values)]
    grid = -(-queries // (64 * GROUPS)), batch * heads
    used = kernel(dim, columns, query.device.index)
    hopper.launch(used, grid, (*slabs, out, queries, columns, heads, dim**-0.5 * LOG2_E))
    return out


def _many_queries(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None, code: Code | None) -> Tensor:
    (batch, heads, queries, dim), (kv_heads, columns) = query.shape, keys.shape[1:3]
    centre, inverse = (None, None) if code is None else check_code(code, heads * dim)
    dtype = query.dtype if code is None else FP8
    out = torch.empty((batch, queries, heads * dim), dtype=dtype, device=query.device)
    group, maps = heads // kv_heads, (hopper.Map(part.view(-1, HEAD), TILE) for part in (query, keys, values))
    given = None if lengths is None else lengths.contiguous()
    sizes = queries, group, kv_heads, columns, dim**-0.5 * LOG2_E
    used = kernel(dim, 0, query.device.index, coded=code is not None)
    grid = -(-group * queries // 64), batch * kv_heads
    hopper.launch(used, grid, (*maps, given, out, *sizes, centre, inverse))
    return out
