"""Product of coded operands with scale and bias in its epilogue.

Fused: product, scale per output, bias, cast. Half the weight's bytes and up to twice the rate of bfloat16.
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_coded, fused_product
from torch import Tensor


def linear_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.linear_fp8`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as products_fp8.check_coded.
    """
    check_coded(x, weight, factor, bias)
    return fused_product(x, weight, factor, bias)
