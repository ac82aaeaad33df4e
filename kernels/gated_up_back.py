"""Gradient through the gated half of an MLP of few rows: both products, and the way back through the gated GELU.

A tile makes the gate and the up column of some outputs again, and their gradient from the one behind the down
projection; only the gradient of the merged projection is stored.
Worth it up to 64 rows, where the time is the two weights' bytes; above, the definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels import backward
from phyai_kernels.linear_back import MOST_ROWS, check_factors
from phyai_kernels.products import fetch, fetch_columns, launch_options, overlaps, product, product_back, requests
from phyai_kernels.tiles import block, check_launch, chip_bytes, dot_type, last_axis_is_dense, stages_that_fit
from torch import Tensor


class Plan(NamedTuple):
    """How one shape is cut: outputs of a tile, inputs and rows of ``down`` that one step multiplies, warps and stages
    of a program."""

    outputs: int
    inputs: int
    down: int
    warps: int
    stages: int


def plan(inputs: int, outputs: int, behind: int, *, itemsize: int, chip: int) -> Plan:
    """As measured on an H200 at 50 rows.

    :param outputs: of the way forward. :param behind: rows of ``down``. :param itemsize: bytes of a value.
    :param chip: bytes of shared memory that one program may take.
    """
    wide = itemsize == 4
    across = block(outputs, largest=16 if wide else 32)
    most = 64 if wide else 128
    step, down = block(inputs, largest=most), block(behind, largest=most)
    stages = stages_that_fit(chip, 0, (MOST_ROWS + 2 * across) * step * itemsize, most=3 if wide else 4)
    return Plan(across, step, down, warps=4 if wide else 8, stages=stages)


@triton.jit
def gelu_and_slope(x):
    """GELU, tanh form, as gelu_mul.bent_gelu has it, and its derivative."""
    square = x * x
    twice = 1.5957691216057308 * x * (1.0 + 0.044715 * square)
    opened = tl.sigmoid(tl.maximum(twice, -80.0))
    bent = 1.5957691216057308 * (1.0 + 0.134145 * square)
    return x * opened, opened + x * opened * (1.0 - opened) * bent


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _gated_up_back(
    grad,
    down,
    x,
    weight,
    out,
    rows,
    behind,
    inputs,
    outputs,
    down_row,
    weight_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_DOWN: tl.constexpr,
    PRODUCT: tl.constexpr,
    EVEN: tl.constexpr,
    EVEN_DOWN: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """All rows, BLOCK_N outputs. ``grad`` is [rows, behind], or without PRODUCT [rows, outputs]."""
    column = tl.arange(0, 2 * BLOCK_N)
    output = tl.program_id(0) * BLOCK_N + column // 2
    held = output < outputs
    weight_at = weight + tl.where(held, output + column % 2 * outputs, 0).to(tl.int64) * weight_row
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < outputs
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch(weight_at.to(tl.int64), inputs * (weight.dtype.element_ty.primitive_bitwidth // 8), CHUNKS)
        if PRODUCT:
            fetch_columns(down + tl.program_id(0) * BLOCK_N, 0, behind, down_row, BLOCK_DOWN)
        tl.extra.cuda.gdc_wait()
    both = product(x, weight_at, rows, 0, inputs, inputs, held, BLOCK_M, 2 * BLOCK_N, BLOCK_K, EVEN, DOT)
    gate, up = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    row = tl.arange(0, BLOCK_M)[:, None]
    real = (row < rows) & inside[None, :]
    if PRODUCT:
        pull = product_back(
            grad, down, rows, 0, behind, behind, down_row, place, inside, BLOCK_M, BLOCK_DOWN, BLOCK_N, EVEN_DOWN, DOT
        )
    else:
        pull = tl.load(grad + row * outputs + place[None, :], mask=real, other=0.0).to(tl.float32)
    active, slope = gelu_and_slope(gate)
    at = out + row.to(tl.int64) * (2 * outputs) + place[None, :]
    tl.store(at, (pull * up * slope).to(out.dtype.element_ty), mask=real)
    tl.store(at + outputs, (pull * active).to(out.dtype.element_ty), mask=real)


def gated_up_back(grad: Tensor, down: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """See :func:`phyai_kernels.backward.gated_up_back`. ``grad`` and ``x`` are copied first where not contiguous.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a weight whose last axis has gaps.
    """
    check_launch(grad, down, x, weight)
    double, inputs = weight.shape
    if x.shape[-1] != inputs or double % 2 or {weight.dtype, grad.dtype} != {x.dtype}:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit")
    if down is not None:
        check_factors(grad, down)
    width = grad.shape[-1] if down is None else down.shape[1]
    if width != double // 2 or grad.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"a gradient of {double // 2} columns for each row of x: got {tuple(grad.shape)}, {width}")
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return backward.gated_up_back(grad, down, x, weight)
    last_axis_is_dense(weight=weight)
    out = torch.empty((*x.shape[:-1], double), dtype=x.dtype, device=x.device)
    _launch(grad.contiguous(), down, x.contiguous(), weight, out, rows)
    return out


def _launch(grad: Tensor, down: Tensor | None, x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
    outputs, inputs, behind = weight.shape[0] // 2, x.shape[-1], grad.shape[-1]
    cut = plan(inputs, outputs, behind, itemsize=x.element_size(), chip=chip_bytes(x.device))
    _gated_up_back[(triton.cdiv(outputs, cut.outputs),)](
        grad,
        down,
        x,
        weight,
        out,
        rows,
        behind,
        inputs,
        outputs,
        0 if down is None else down.stride(0),
        weight.stride(0),
        BLOCK_M=block(rows, largest=MOST_ROWS),
        BLOCK_N=cut.outputs,
        BLOCK_K=cut.inputs,
        BLOCK_DOWN=cut.down,
        PRODUCT=down is not None,
        EVEN=inputs % cut.inputs == 0,
        EVEN_DOWN=behind % cut.down == 0,
        CHUNKS=requests(weight, inputs * x.element_size(), 2 * cut.outputs, cut.warps),
        OVERLAP=overlaps(x.device),
        DOT=dot_type(x.dtype),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )
