"""The first half of a gated MLP in eight bits: gate and up projection, gated GELU, coding.

Fused: rows of gate and up alternate in the weight, so a thread holds both sums of an output, and neither is stored:
968 rows of 2 x 16384 would be written and read as 63 MB. 16 MB of e4m3 leave the kernel.
"""

from __future__ import annotations

from phyai_kernels.products_fp8 import check_code, check_coded, fused_product
from phyai_kernels.reference import Code
from torch import Tensor


def gated_up_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, code: Code) -> Tensor:
    """See :func:`phyai_kernels.reference.gated_up_fp8`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as products_fp8.check_coded and check_code; an odd number of rows of the weight.
    """
    check_coded(x, weight, factor, bias, *code)
    if len(weight) % 2:
        raise ValueError(f"the weight holds rows of gate and up in turn, so their number must be even: {len(weight)}")
    return fused_product(x, weight, factor, bias, check_code(code, len(weight) // 2))
