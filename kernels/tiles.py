"""What the Triton kernels share: the checks before a launch and the plain rules of tile sizes.

No tuning happens at run time: a tile follows from the shape alone, so that a captured graph, a second process and a
second run all launch the same thing. A broken rule raises ValueError with a sentence; the operator selector shows it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

# Triton decides it at the import of the kernels; the interpreter runs them on the CPU, for tests.
INTERPRETED = bool(triton.knobs.runtime.interpret)

# Programs that one launch should have where rows are few: about one for each of an H200's 132 multiprocessors.
WAVE = 128

_DOT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def check_launch(*tensors: Tensor | None) -> None:
    """Refuse what a launch would get wrong without a word.

    :raises ValueError: CPU tensors without the interpreter, tensors of several devices, a dtype other than
        float32 and bfloat16, or a gradient that would be lost: the kernels have no backward.
    """
    given = [t for t in tensors if t is not None]
    if len({t.device for t in given}) != 1:
        raise ValueError(f"tensors are on several devices: {', '.join(sorted({str(t.device) for t in given}))}")
    if given[0].device.type == "cpu" and not INTERPRETED:
        raise ValueError("Triton compiles for an accelerator only; for CPU tensors import it with TRITON_INTERPRET=1")
    for t in given:
        if t.dtype not in _DOT_TYPES:
            raise ValueError(f"no kernel for {t.dtype}; float32 and bfloat16 have one")
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise ValueError("the kernels have no backward: call them under torch.no_grad(), or bind the reference")


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What operands are cast to for ``tl.dot``: the interpreter multiplies bfloat16 as if it were integers."""
    return tl.float32 if INTERPRETED else _DOT_TYPES[dtype]


def block(size: int, *, smallest: int = 16, largest: int) -> int:
    """The next power of two, within bounds that are powers of two themselves."""
    return min(max(triton.next_power_of_2(size), smallest), largest)


def chip_bytes(device: torch.device) -> int:
    """Shared memory that one program may take: 227 KiB on Hopper, 99 KiB on a GeForce."""
    if device.type == "cpu":
        return 99 * 1024
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024))


def stages_that_fit(chip: int, fixed: int, stage: int, *, most: int) -> int:
    """How many loads may be under way ahead of the product, each ``stage`` bytes, beside ``fixed`` bytes that stay."""
    return max(1, min(most, (chip - fixed) // stage))


def last_axis_is_dense(**tensors: Tensor) -> None:
    """:raises ValueError: a tensor's last axis has gaps; views along the other axes are fine."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: the last axis must be contiguous, got strides {tensor.stride()}")


def keep_compiled(folder: Path) -> None:
    """Where Triton keeps what it compiled, in this process."""
    triton.knobs.cache.dir = str(folder)
