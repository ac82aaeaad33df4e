"""Attention of every query over every key on Hopper, where a head has few columns: cuda_attend.cu.

The vision tower's 48 heads of 256 patches: cuDNN takes 10 us, whose kernel is made for long rows. NOT MEASURED. Serves
where a profile names it; what it does not take goes to attend.py.
"""

from __future__ import annotations

import functools

import torch
from phyai_kernels import attend as others
from phyai_kernels import hopper, wgmma
from phyai_kernels.attend import LOG2_E, check_attention
from phyai_kernels.reference import Code
from phyai_kernels.tiles import check_launch
from torch import Tensor

FILES = ("cuda_attend.cu",)
GROUPS = 2  # warpgroups of a block, 64 queries each
MOST_COLUMNS, WIDEST = 256, 128


def expression(dim: int, columns: int) -> tuple[str, tuple[tuple[str, int], ...]]:
    """C++ expression of the kernel, and its matrix instructions. :param columns: at most."""
    across = -(-columns // 16) * 16
    return f"attend_all<{dim}, {across}, {GROUPS}>", (("Mma", across), ("Wide", dim))


def shared_bytes(dim: int, columns: int) -> int:
    """Of a block, as attend_all has it."""
    panels, across = -(-dim // 64), -(-columns // 16) * 16
    return 1024 + panels * (64 * GROUPS + 2 * across) * 128


@functools.cache
def kernel(dim: int, columns: int, device: int) -> hopper.Kernel:
    """Compiled and loaded. :raises RuntimeError: as hopper.load."""
    name, used = expression(dim, columns)
    function = hopper.load(wgmma.source(used, FILES), name, device)
    return hopper.kernel(function, threads=128 * GROUPS, cluster=1, shared=shared_bytes(dim, columns))


def fits(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes them: heads of their own, rows of whole 16-byte chunks that stand on such a border."""
    dim = query.shape[3]
    here = torch.cuda.get_device_capability(query.device) == (9, 0)
    alike = query.dtype == torch.bfloat16 and query.shape[1] == keys.shape[1]
    sizes = dim % 8 == 0 and 16 <= dim <= WIDEST and keys.shape[2] <= MOST_COLUMNS
    places = [place for part in (query, keys, values) for place in (part.data_ptr() // 2, *part.stride()[:3])]
    return here and alike and sizes and all(place % 8 == 0 for place in places)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None, code: Code | None = None
) -> Tensor:
    """See :func:`phyai_kernels.reference.attend`.

    :raises ValueError: as attend.attend.
    """
    if lengths is not None or code is not None or not fits(query, keys, values):
        return others.attend(query, keys, values, lengths, code)
    check_launch(query, keys, values)
    check_attention(query, keys, values, lengths)
    batch, heads, queries, dim = query.shape
    columns = keys.shape[2]
    out = torch.empty((batch, queries, heads * dim), dtype=query.dtype, device=query.device)
    grid = -(-queries // (64 * GROUPS)), batch * heads
    slabs = (hopper.Slab.of(part) for part in (query, keys, values))
    args = *slabs, out, queries, columns, heads, dim**-0.5 * LOG2_E
    hopper.launch(kernel(dim, columns, query.device.index), grid, args)
    return out
