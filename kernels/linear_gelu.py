"""GELU in the epilogue of the vendor's product, where cuBLAS has one; no kernel of ours.

Fused: bias, GELU (tanh form), cast: the product is not stored before it is bent. 768 rows of 4304 would travel twice
more, 13 MB a layer of the vision tower.
"""

from __future__ import annotations

import torch
from phyai_kernels.tiles import check_launch
from torch import Tensor
from torch.nn import functional


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.linear_gelu`.

    :raises ValueError: as tiles.check_launch.
    """
    check_launch(x, weight, bias)
    if x.device.type != "cuda" or x.dtype == torch.float32:  # cuBLAS' float32 GELU is off by 1e-6
        return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")
    flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
    return flat.view(*x.shape[:-1], -1)
