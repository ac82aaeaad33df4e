"""Residual add and LayerNorm of a coded product, with a coded result, or both: layer_norm.py's kernel."""

from __future__ import annotations

from phyai_kernels.layer_norm import coded_layer_norm
from phyai_kernels.reference import Code
from torch import Tensor


def layer_norm_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    code: Code | None,
    out: Tensor | None = None,
    factor: Tensor | None = None,
    out_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.layer_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as ``layer_norm``; a code that does not fit.
    """
    return coded_layer_norm(x, weight, bias, code, out, factor, out_bias)
