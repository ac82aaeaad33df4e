"""Residual add and LayerNorm whose result is coded: layer_norm.py's kernel with another last step."""

from __future__ import annotations

from phyai_kernels.layer_norm import layer_norm
from torch import Tensor


def layer_norm_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    inverse: Tensor,
    out: Tensor | None = None,
    out_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.layer_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as ``layer_norm``.
    """
    return layer_norm(x, weight, bias, out, out_bias, inverse)
