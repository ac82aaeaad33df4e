"""linear_norm of many rows whose product is cuBLASLt's: for few outputs it chooses a better kernel than cuBLAS.

torch has no call that asks for it, only a switch for the whole process. It is on while the product is submitted and no
longer: what a graph captures then is captured for good, and another thread's product, should it fall into that moment,
is at worst computed by the other library.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from phyai_kernels import linear_norm as fused
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.tiles import check_launch
from torch import Tensor
from torch.nn import functional


@contextmanager
def cublaslt() -> Iterator[None]:
    """torch's products on CUDA are cuBLASLt's inside."""
    switch = torch.backends.cuda.preferred_blas_library
    before = switch()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*preferred_blas_library is an experimental feature")
        switch("cublaslt")
    try:
        yield
    finally:
        switch(before)


def worth_it(rows: int) -> bool:
    """Measured on an H200, bf16, us (cuBLAS): 784 rows 16384 -> 2048 83.8 (98.8), 712 rows 73.3 (78.2), 968 rows 93.5
    (93.5); but 832 rows 134 (100) and 704 rows 110 (83): where half a tile of rows is left over.
    """
    return rows > fused.MOST_ROWS and rows % 128 != 64


def linear_norm(
    x: Tensor,
    weight: Tensor,
    stream: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.linear_norm`. Where it does not pay, the Triton form's.

    :raises ValueError: as that form.
    """
    check_launch(x, weight, stream, scale, shift, gate)
    if not worth_it(x[..., 0].numel()):
        return fused.linear_norm(x, weight, stream, scale, shift, gate)
    with cublaslt():
        out = functional.linear(x, weight)
    return norm_rows(stream, scale, shift, out, gate)
