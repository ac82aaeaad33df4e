"""Gated GELU of a merged gate-and-up projection in one pass.

Fused: GELU (tanh form) and product. 6 bytes a bf16 value instead of 10, one launch instead of two: 25 us instead of 88
at 968 rows of 16384, 2.2 instead of 7.6 at 50 rows of 4096 (H200, CUDA graph). Worth it wherever the projection is
merged and has many rows; few rows have gated_up, whose gate and up do not travel at all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels.tiles import block, check_launch
from torch import Tensor


@triton.jit
def bent_gelu(x):
    """GELU, tanh form: 0.5 (1 + tanh(u)) = sigmoid(2u), which every back end has; its exponential stays finite."""
    twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(tl.maximum(twice, -80.0))


@triton.jit
def _gelu_mul(gate_up, product, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * (2 * width) + column
    gate = tl.load(at, mask=inside, other=0.0)
    opened = bent_gelu(gate.to(tl.float32)).to(gate.dtype).to(tl.float32)  # rounded where the reference rounds
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(product + row * width + column, (opened * up).to(gate.dtype), mask=inside)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.gelu_mul`. What is not contiguous is copied first.

    :raises ValueError: as tiles.check_launch; an odd last axis.
    """
    check_launch(gate_up)
    if gate_up.shape[-1] % 2:
        raise ValueError(f"the last axis holds gate and up, so it must be even: got {gate_up.shape[-1]}")
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    product = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    size = block(width, largest=1024)
    _gelu_mul[(product.numel() // width, triton.cdiv(width, size))](gate_up, product, width, BLOCK=size, num_warps=4)
    return product
