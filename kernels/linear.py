"""Matrix product of few rows with a large weight: a stream over the weight.

At 50 rows an accelerator could multiply four times more than the weights it reads allow, so the time is the weight's
bytes over the memory rate. One tile holds all rows, each weight is read exactly once, and where the outputs alone would
leave multiprocessors idle, the inputs are cut into spans whose partial sums (fp32) a second kernel adds in a fixed
order: the result is the same in each run. Bias and the cast are in the last kernel.
Worth it up to 64 rows (``plan`` has the times); above, the vendor's matrix product is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.products import fetch, launch_options, overlaps, product, requests
from phyai_kernels.tiles import WAVE, block, check_launch, chip_bytes, dot_type, last_axis_is_dense, stages_that_fit
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 64
SHORTEST_SPAN = 128  # inputs; shorter ones cost more to add up than they save


class Plan(NamedTuple):
    """How one shape is cut: outputs and inputs of a tile, inputs of a span, warps and stages of a program."""

    outputs: int
    inputs: int
    span: int
    warps: int
    stages: int


def plan(inputs: int, outputs: int, *, itemsize: int, chip: int) -> Plan:
    """Measured on an H200 at 50 rows, bf16, us (cuBLAS): 1024 -> 2560 4.8 (5.0), 2048 -> 1024 5.7 (7.4), 1024 -> 8192
    7.2 (7.5), 4096 -> 1024 6.8 (7.4); in float32 10 to 25 (17 to 33).

    :param itemsize: bytes of a value. :param chip: bytes of shared memory that one program may take.
    """
    wide = itemsize == 4
    down = block(inputs, largest=64 if wide else 128)
    across = block(outputs, largest=64 if outputs >= 64 * WAVE and not wide else 32)
    programs = 2 * WAVE if wide else WAVE
    spans = max(1, min(programs // triton.cdiv(outputs, across), inputs // SHORTEST_SPAN))
    span = triton.cdiv(triton.cdiv(inputs, spans), down) * down
    stages = stages_that_fit(chip, 0, (MOST_ROWS + across) * down * itemsize, most=4 if wide else 5)
    return Plan(across, down, span, warps=4, stages=stages)


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    inputs,
    outputs,
    span,
    weight_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """All rows, one tile of outputs, one span of inputs. ``out`` is [spans, rows, outputs]."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    held = column < outputs
    begin = part * span
    weight_at = weight + tl.where(held, column, 0).to(tl.int64) * weight_row
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        fetch((weight_at + begin).to(tl.int64), span * (weight.dtype.element_ty.primitive_bitwidth // 8), CHUNKS)
        tl.extra.cuda.gdc_wait()
    end = tl.minimum(begin + span, inputs)
    summed = product(x, weight_at, rows, begin, end, inputs, held, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, DOT)
    if BIAS:
        summed += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)[None, :]
    row = tl.arange(0, BLOCK_M)
    at = (part.to(tl.int64) * rows + row[:, None]) * outputs + column[None, :]
    tl.store(out + at, summed.to(out.dtype.element_ty), mask=(row < rows)[:, None] & held[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_spans(
    partial,
    bias,
    out,
    rows,
    outputs,
    SPANS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < outputs
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    summed = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPANS):
        summed += tl.load(partial + (part * rows + row) * outputs + column, mask=held, other=0.0)
    if BIAS:
        summed += tl.load(bias + column, mask=held, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, summed.to(out.dtype.element_ty), mask=held)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`phyai_kernels.reference.linear`. ``x`` is copied first where it is not contiguous.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a weight whose last axis has gaps.
    """
    check_launch(x, weight, bias)
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and the bias do not fit")
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"x, weight and bias differ in dtype: {x.dtype}, {weight.dtype}, {bias and bias.dtype}")
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return functional.linear(x, weight, bias)
    last_axis_is_dense(weight=weight)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    _launch(x.contiguous(), weight, bias, out, rows)
    return out


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int) -> None:
    outputs, inputs = weight.shape
    cut = plan(inputs, outputs, itemsize=x.element_size(), chip=chip_bytes(x.device))
    if cut.span >= inputs:
        _launch_spans(x, weight, bias, out, rows, cut)
        return
    add_spans(partial_sums(x, weight, plan, rows), bias, out)


def add_spans(partial: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The sum over the spans, and a bias, written into ``out``. :param partial: [spans, rows, outputs] fp32."""
    spans, rows, outputs = partial.shape
    size = block(outputs, largest=512)
    _add_spans[(rows, triton.cdiv(outputs, size))](
        partial,
        bias,
        out,
        rows,
        outputs,
        SPANS=spans,
        BIAS=bias is not None,
        BLOCK=size,
        OVERLAP=overlaps(out.device),
        num_warps=4,
        **launch_options(out.device),
    )


def partial_sums(x: Tensor, weight: Tensor, cuts: Callable[..., Plan], rows: int) -> Tensor:
    """[spans, rows, outputs] fp32, whose sum over the spans is the product.

    :param x: contiguous. :param cuts: a plan.
    """
    outputs, inputs = weight.shape
    cut = cuts(inputs, outputs, itemsize=x.element_size(), chip=chip_bytes(x.device))
    spans = triton.cdiv(inputs, cut.span)
    partial = torch.empty((spans, rows, outputs), dtype=torch.float32, device=x.device)
    _launch_spans(x, weight, None, partial, rows, cut)
    return partial


def _launch_spans(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int, cut: Plan) -> None:
    outputs, inputs = weight.shape
    whole = inputs % cut.span == 0  # or a row's last span ends beyond the weight
    _linear[(triton.cdiv(outputs, cut.outputs), triton.cdiv(inputs, cut.span))](
        x,
        weight,
        bias,
        out,
        rows,
        inputs,
        outputs,
        cut.span,
        weight.stride(0),
        BLOCK_M=block(rows, largest=MOST_ROWS),
        BLOCK_N=cut.outputs,
        BLOCK_K=cut.inputs,
        BIAS=bias is not None,
        EVEN=whole and cut.span % cut.inputs == 0,
        CHUNKS=requests(weight, cut.span * x.element_size(), cut.outputs, cut.warps) if whole else 0,
        OVERLAP=overlaps(x.device),
        DOT=dot_type(x.dtype),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )
