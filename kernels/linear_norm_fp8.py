"""The end of a sub-layer with coded operands, a coded result, or both: product, gated residual add, norm, coding.

Two kernels, the product and one program a row of rms_norm.py; the second is started while the first still runs.
"""

from __future__ import annotations

from phyai_kernels.linear import linear
from phyai_kernels.products_fp8 import check_coded, product_fp8
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.tiles import check_launch
from torch import Tensor


def linear_norm_fp8(
    x: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    stream: Tensor,
    inverse: Tensor | None,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.linear_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as products_fp8.check_coded, ``linear`` and ``rms_norm``; sizes that do not fit.
    """
    if factor is None:
        check_launch(x, weight, stream, inverse, scale, shift, gate)
        out = linear(x, weight)
    else:
        check_coded(x, weight, factor, stream, inverse, scale, shift, gate)
        out = product_fp8(x, weight, factor)
    return norm_rows(stream, scale, shift, out, gate, inverse)
