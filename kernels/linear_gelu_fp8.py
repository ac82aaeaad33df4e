"""The first half of a plain MLP in eight bits: product, bias, GELU, and the coding of what the second half reads.

Fused: the product is never stored in 16 bits, and no kernel of its own codes it.
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_coded, product_fp8
from torch import Tensor


def linear_gelu_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, inverse: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.linear_gelu_fp8`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as products_fp8.check_coded; a bias that does not fit.
    """
    check_coded(x, weight, factor, bias, inverse)
    if bias.shape != factor.shape:
        raise ValueError(f"the bias must have {len(factor)} elements, as the weight has rows: got {tuple(bias.shape)}")
    return product_fp8(x, weight, factor, bias, inverse, gelu=True)
