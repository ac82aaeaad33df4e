"""Product of coded operands with scale and bias in its epilogue.

Fused: product, scale per output, bias, cast. Half the weight's bytes and up to twice the rate of bfloat16.
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_coded, product_fp8
from torch import Tensor


def linear_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`phyai_kernels.reference.linear_fp8`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as products_fp8.check_coded; a bias that does not fit.
    """
    check_coded(x, weight, factor, bias)
    if bias is not None and bias.shape != factor.shape:
        raise ValueError(f"the bias must have {len(factor)} elements, as the weight has rows: got {tuple(bias.shape)}")
    return product_fp8(x, weight, factor, bias)
