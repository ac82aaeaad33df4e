"""The end of a sub-layer with coded operands, a coded result, or both: product, residual add, norm, coding.

The product, then one program a row of rms_norm.py, which also scales: 46 and 5 us for 968 rows, 16384 -> 2048 (H200; in
bfloat16 82 and 5).
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_coded, fused_product, vendor_product
from phyai_kernels.reference import Code
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.tiles import check_launch
from torch import Tensor
from torch.nn import functional


def linear_norm_fp8(
    x: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    stream: Tensor,
    scale: Tensor,
    code: Code | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.linear_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as products_fp8.check_coded and ``rms_norm``; sizes that do not fit.
    """
    if factor is None or bias is None:
        check_launch(x, weight, stream, scale)
        return norm_rows(stream, scale, None, functional.linear(x, weight), None, code)
    check_coded(x, weight, factor, bias, stream, scale)
    out = vendor_product(x, weight)
    if out is None:
        return norm_rows(stream, scale, None, fused_product(x, weight, factor, bias), None, code)
    return norm_rows(stream, scale, None, out, None, code, (factor, bias))
