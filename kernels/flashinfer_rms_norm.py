"""Residual add and Gemma RMSNorm by FlashInfer; bfloat16 on NVIDIA accelerators only.

Its weight has the dtype of the activations: an fp32 weight is rounded first. It compiles at its first use, for about a
minute; what it compiled is kept in its own cache.
"""

from __future__ import annotations

import torch
from flashinfer import norm
from phyai_kernels.reference import EPS
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.rms_norm`.

    :raises ValueError: float32, which FlashInfer's norms do not have.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"no kernel for {x.dtype}; bfloat16 has one")
    rows, gain = x.reshape(-1, x.shape[-1]), weight.to(x.dtype)
    if out is None:
        return x, norm.gemma_rmsnorm(rows, gain, EPS).view(x.shape)
    normed, total = out.reshape(rows.shape).clone(), rows.clone()  # it writes over both
    norm.gemma_fused_add_rmsnorm(normed, total, gain, EPS)
    return total.view(x.shape), normed.view(x.shape)
