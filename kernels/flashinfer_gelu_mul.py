"""Gated GELU of a merged projection by FlashInfer; bfloat16 on NVIDIA accelerators only.

It compiles at its first use, for about ten seconds; what it compiled is kept in its own cache.
"""

from __future__ import annotations

import torch
from flashinfer import activation
from torch import Tensor


def gelu_mul(gate_up: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.gelu_mul`.

    :raises ValueError: float32, which FlashInfer's activations do not have.
    """
    if gate_up.dtype != torch.bfloat16:
        raise ValueError(f"no kernel for {gate_up.dtype}; bfloat16 has one")
    product: Tensor = activation.gelu_tanh_and_mul(gate_up.contiguous())
    return product
