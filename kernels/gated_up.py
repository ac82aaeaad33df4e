"""The first half of a gated MLP for few rows: gate and up projection and gated GELU in one kernel.

Fused: a tile holds the gate and the up column of the same outputs side by side, so that neither is stored.
Worth it up to 64 rows, where the time is the weight's bytes; above, the vendor's product and gelu_mul.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.gelu_mul import bent_gelu, gelu_mul
from phyai_kernels.products import fetch, launch_options, overlaps, product, requests
from phyai_kernels.tiles import block, check_launch, chip_bytes, dot_type, last_axis_is_dense, stages_that_fit
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 64


class Plan(NamedTuple):
    """How one shape is cut: outputs and inputs of a tile, warps and stages of a program."""

    outputs: int
    inputs: int
    warps: int
    stages: int


def plan(inputs: int, outputs: int, *, itemsize: int, chip: int) -> Plan:
    """In the expert's chain on an H200, 50 rows, bf16, 1024 -> 2 x 4096: 6.7 us, alone 7.2 (cuBLAS without GELU 7.4).

    :param outputs: of the result. :param itemsize: bytes of a value. :param chip: bytes of shared memory.
    """
    wide = itemsize == 4
    across = block(outputs, largest=16 if wide else 32)
    down = block(inputs, largest=64 if wide else 128)
    stages = stages_that_fit(chip, 0, (MOST_ROWS + 2 * across) * down * itemsize, most=3 if wide else 4)
    return Plan(across, down, warps=4 if wide else 8, stages=stages)


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _gated_up(
    x,
    weight,
    out,
    rows,
    inputs,
    outputs,
    weight_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """All rows, BLOCK_N outputs."""
    column = tl.arange(0, 2 * BLOCK_N)
    output = tl.program_id(0) * BLOCK_N + column // 2
    held = output < outputs
    weight_at = weight + tl.where(held, output + column % 2 * outputs, 0).to(tl.int64) * weight_row
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch(weight_at.to(tl.int64), inputs * (weight.dtype.element_ty.primitive_bitwidth // 8), CHUNKS)
        tl.extra.cuda.gdc_wait()
    both = product(x, weight_at, rows, 0, inputs, inputs, held, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN, DOT)
    gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    row = tl.arange(0, BLOCK_M)[:, None]
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    result = (bent_gelu(gate) * up).to(out.dtype.element_ty)
    tl.store(out + row * outputs + place, result, mask=(row < rows) & (place < outputs))


def gated_up(x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`phyai_kernels.reference.gated_up`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a weight whose last axis has gaps.
    """
    check_launch(x, weight)
    double, inputs = weight.shape
    if x.shape[-1] != inputs or double % 2 or weight.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return gelu_mul(functional.linear(x, weight))
    last_axis_is_dense(weight=weight)
    out = torch.empty((*x.shape[:-1], double // 2), dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), weight, out, rows)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
    outputs, inputs = out.shape[-1], x.shape[-1]
    cut = plan(inputs, outputs, itemsize=x.element_size(), chip=chip_bytes(x.device))
    _gated_up[(triton.cdiv(outputs, cut.outputs),)](
        x,
        weight,
        out,
        rows,
        inputs,
        outputs,
        weight.stride(0),
        BLOCK_M=block(rows, largest=MOST_ROWS),
        BLOCK_N=cut.outputs,
        BLOCK_K=cut.inputs,
        EVEN=inputs % cut.inputs == 0,
        CHUNKS=requests(weight, inputs * x.element_size(), 2 * cut.outputs, cut.warps),
        OVERLAP=overlaps(x.device),
        DOT=dot_type(x.dtype),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )
