"""Gradient through a product of few rows: a stream over the weight as it lies, no transposed copy of it.

As in linear.py the time is the weight's bytes; a tile holds all rows and some columns of the weight, and where those
alone would leave multiprocessors idle, the weight's rows are cut into spans whose sums (fp32) another kernel adds in a
fixed order.
Worth it up to 64 rows; above, the vendor's product is called.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels import backward
from phyai_kernels.linear import add_spans
from phyai_kernels.products import fetch_columns, launch_options, overlaps, product_back
from phyai_kernels.tiles import WAVE, block, check_launch, chip_bytes, dot_type, last_axis_is_dense, stages_that_fit
from torch import Tensor

MOST_ROWS = 64
SHORTEST_SPAN = 128  # rows of the weight
ENOUGH_TILES = 32  # that many keep the memory busy by themselves; cutting the rows too would cost another kernel


class Plan(NamedTuple):
    """How one shape is cut: columns of a tile, rows of the weight that one step multiplies, rows of a span, warps and
    stages of a program."""

    columns: int
    step: int
    span: int
    warps: int
    stages: int


def plan(outputs: int, inputs: int, *, itemsize: int, chip: int) -> Plan:
    """As measured on an H200 at 50 rows.

    :param outputs, inputs: rows and columns of the weight. :param itemsize: bytes of a value. :param chip: bytes of
        shared memory that one program may take.
    """
    tiles = triton.cdiv(inputs, 32)
    return cut(outputs, inputs, 1 if tiles >= ENOUGH_TILES else WAVE // tiles, itemsize=itemsize, chip=chip)


def cut(outputs: int, inputs: int, spans: int, *, itemsize: int, chip: int, columns: int = 32) -> Plan:
    """:param spans: at most. :param columns: of a tile, at most."""
    wide = itemsize == 4
    across = block(inputs, largest=columns)
    down = block(outputs, largest=64 if wide else 128)
    spans = max(1, min(spans, outputs // SHORTEST_SPAN))
    span = triton.cdiv(triton.cdiv(outputs, spans), down) * down
    stages = stages_that_fit(chip, 0, (MOST_ROWS + across) * down * itemsize, most=3 if wide else 4)
    return Plan(across, down, span, warps=4, stages=stages)


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _linear_back(
    grad,
    weight,
    out,
    rows,
    outputs,
    inputs,
    span,
    weight_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """All rows, one tile of the weight's columns, one span of its rows. ``out`` is [spans, rows, inputs]."""
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    part = tl.program_id(1)
    held = column < inputs
    begin = part * span
    end = tl.minimum(begin + span, outputs)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch_columns(weight + tl.program_id(0) * BLOCK_K, begin, end, weight_row, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    summed = product_back(
        grad, weight, rows, begin, end, outputs, weight_row, column, held, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, DOT
    )
    row = tl.arange(0, BLOCK_M)
    at = (part.to(tl.int64) * rows + row[:, None]) * inputs + column[None, :]
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=(row < rows)[:, None] & held[None, :])


def linear_back(grad: Tensor, weight: Tensor) -> Tensor:
    """See :func:`phyai_kernels.backward.linear_back`. ``grad`` is copied first where it is not contiguous.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a weight whose last axis has gaps.
    """
    check_factors(grad, weight)
    rows = grad.numel() // grad.shape[-1]
    if rows > MOST_ROWS:
        return backward.linear_back(grad, weight)
    outputs, inputs = weight.shape
    chosen = plan(outputs, inputs, itemsize=grad.element_size(), chip=chip_bytes(grad.device))
    out = torch.empty((*grad.shape[:-1], inputs), dtype=grad.dtype, device=grad.device)
    if chosen.span >= outputs:
        _launch(grad.contiguous(), weight, out, rows, chosen)
    else:
        add_spans(partial_sums(grad, weight, chosen), None, out)
    return out


def check_factors(grad: Tensor, weight: Tensor) -> None:
    """:raises ValueError: as ``linear_back``."""
    check_launch(grad, weight)
    if grad.shape[-1] != weight.shape[0] or grad.dtype != weight.dtype:
        raise ValueError(
            f"grad {tuple(grad.shape)} {grad.dtype} and weight {tuple(weight.shape)} {weight.dtype} do not fit"
        )
    last_axis_is_dense(weight=weight)


def partial_sums(grad: Tensor, weight: Tensor, chosen: Plan) -> Tensor:
    """[spans, rows, inputs] fp32, whose sum over the spans is the product. What is not contiguous is copied first."""
    rows, (outputs, inputs) = grad.numel() // grad.shape[-1], weight.shape
    spans = triton.cdiv(outputs, chosen.span)
    partial = torch.empty((spans, rows, inputs), dtype=torch.float32, device=grad.device)
    _launch(grad.contiguous(), weight, partial, rows, chosen)
    return partial


def _launch(grad: Tensor, weight: Tensor, out: Tensor, rows: int, chosen: Plan) -> None:
    outputs, inputs = weight.shape
    _linear_back[(triton.cdiv(inputs, chosen.columns), triton.cdiv(outputs, chosen.span))](
        grad,
        weight,
        out,
        rows,
        outputs,
        inputs,
        chosen.span,
        weight.stride(0),
        BLOCK_M=block(rows, largest=MOST_ROWS),
        BLOCK_N=chosen.step,
        BLOCK_K=chosen.columns,
        EVEN=outputs % chosen.span == 0 and chosen.span % chosen.step == 0,
        OVERLAP=overlaps(grad.device),
        DOT=dot_type(grad.dtype),
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        **launch_options(grad.device),
    )
