"""Tables of the rotary position embedding; the rotation itself is phyai_kernels."""

from __future__ import annotations

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]


def inverse_frequencies(head_dim: int, base: float) -> Tensor:
    """[D/2] fp32, ``1 / base**(2i/D)`` with every step in fp32 on the CPU.

    The rounding is part of what a checkpoint means: an fp64 table moves K by up to 8e-5 at positions near
    800.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return 1.0 / (base**exponent)


def rotary_table(positions: Tensor, frequencies: Tensor) -> Rotary:
    """cos and sin of every position.

    :param positions: [...] integer. :param frequencies: [D/2] fp32. :return: two [..., D/2] fp32 tensors.
    """
    angles = positions.float()[..., None] * frequencies
    return angles.cos(), angles.sin()
