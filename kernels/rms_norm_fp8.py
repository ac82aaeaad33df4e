"""RMSNorm whose result is coded: rms_norm.py's kernel without the residual add."""

from __future__ import annotations

from phyai_kernels.reference import Code
from phyai_kernels.rms_norm import norm_rows
from torch import Tensor


def rms_norm_fp8(x: Tensor, weight: Tensor, code: Code) -> Tensor:
    """See :func:`phyai_kernels.reference.rms_norm_fp8`. What is not contiguous is copied first.

    :raises ValueError: as ``rms_norm``; a code that does not fit.
    """
    return norm_rows(x, weight, None, None, None, code)[1]
