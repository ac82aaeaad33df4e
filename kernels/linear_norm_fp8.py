"""The end of a sub-layer with coded operands, a coded result, or both: product, residual add, norm, coding.

The vendor's product, then one program a row of rms_norm.py, which also scales: 46 and 5 us for 968 rows of 16384 -> 2048
(H200; in bfloat16 82 and 5).
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_coded, product_fp8, vendor_product_fp8
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.tiles import check_launch
from torch import Tensor
from torch.nn import functional


def linear_norm_fp8(
    x: Tensor, weight: Tensor, factor: Tensor | None, stream: Tensor, scale: Tensor, inverse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.linear_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as products_fp8.check_coded and ``rms_norm``; sizes that do not fit.
    """
    if factor is None:
        check_launch(x, weight, stream, scale, inverse)
        return norm_rows(stream, scale, None, functional.linear(x, weight), None, inverse)
    check_coded(x, weight, factor, stream, scale, inverse)
    out = vendor_product_fp8(x, weight)
    if out is None:
        return norm_rows(stream, scale, None, product_fp8(x, weight, factor), None, inverse)
    return norm_rows(stream, scale, None, out, None, inverse, factor)
