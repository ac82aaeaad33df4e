"""Attention whose result is coded for the product that reads it, on Hopper: cuda_attend.py's with another last step."""

from __future__ import annotations

from phyai_kernels.cuda_attend import attend
from phyai_kernels.reference import Code
from torch import Tensor


def attend_fp8(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, code: Code) -> Tensor:
    """See :func:`phyai_kernels.reference.attend_fp8`.

    :raises ValueError: as ``attend``; a code that does not fit.
    """
    return attend(query, keys, values, lengths, code)
