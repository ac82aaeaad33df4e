"""The second half of a sub-layer for few rows: product with a weight, gated residual add, and the norm that follows.

The outputs alone would occupy a fraction of the multiprocessors, so the inputs are cut into spans. A second kernel, one
program a row, adds the spans' sums (fp32) in a fixed order, multiplies by the gate, adds the residual stream and norms:
a row is whole there, and the result is the same in each run.
Worth it up to 64 rows, where the time is the weight's bytes; above, the vendor's product and rms_norm's kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels.linear import Plan, partial_sums
from phyai_kernels.products import launch_options, overlaps
from phyai_kernels.reference import EPS
from phyai_kernels.rms_norm import WIDEST, norm_rows
from phyai_kernels.tiles import block, check_launch, last_axis_is_dense, stages_that_fit
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 64


def plan(inputs: int, outputs: int, *, itemsize: int, chip: int) -> Plan:
    """Two spans, whose sums the second kernel adds, and narrow tiles where the inputs are many: the second kernel's
    time grows with the spans. In the expert's chain on an H200, 50 rows, bf16, both kernels: 2048 -> 1024 5.2 us,
    4096 -> 1024 4.3 us (cuBLAS alone 7.3 and 8.1).

    :param itemsize: bytes of a value. :param chip: bytes of shared memory that one program may take.
    """
    wide = itemsize == 4
    across = block(outputs, largest=16 if inputs > 2048 else 32)
    down = block(inputs, largest=64 if wide else 256)
    spans = max(1, min(4 if wide else 2, inputs // 128))
    span = triton.cdiv(triton.cdiv(inputs, spans), down) * down
    stages = stages_that_fit(chip, 0, (MOST_ROWS + across) * down * itemsize, most=3)
    return Plan(across, down, span, warps=4, stages=stages)


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _add_norm(
    partial,
    gate,
    stream,
    scale,
    shift,
    total,
    normed,
    rows,
    width,
    eps,
    SPANS: tl.constexpr,
    GATE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: total = stream + gate * sum of the spans; normed = total / rms(total) * (1 + scale) + shift."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    gain = 1.0 + tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        opened = tl.load(gate + column, mask=inside, other=0.0)
    if SHIFT:
        moved = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:  # what stands above is nobody's result
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    before = tl.load(stream + at, mask=inside, other=0.0)
    dtype = before.dtype
    summed = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPANS):
        summed += tl.load(partial + part * rows * width + at, mask=inside, other=0.0)
    out = summed.to(dtype).to(tl.float32)
    if GATE:  # rounded where the reference rounds: the product, the gate, their product
        out = (opened.to(dtype).to(tl.float32) * out).to(dtype).to(tl.float32)
    value = (before.to(tl.float32) + out).to(dtype)
    tl.store(total + at, value, mask=inside)
    wide = value.to(tl.float32)
    result = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps) * gain
    if SHIFT:
        result += moved
    tl.store(normed + at, result.to(dtype), mask=inside)


def linear_norm(
    x: Tensor,
    weight: Tensor,
    stream: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.linear_norm`. What is not contiguous is copied first.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, rows longer than 16384, or a weight
        whose last axis has gaps.
    """
    check_launch(x, weight, stream, scale, shift, gate)
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs or stream.shape != (*x.shape[:-1], outputs):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and stream {tuple(stream.shape)} do not fit"
        )
    if {weight.dtype, stream.dtype} != {x.dtype}:
        raise ValueError(f"x, weight and stream differ in dtype: {x.dtype}, {weight.dtype}, {stream.dtype}")
    rows = x.numel() // inputs
    if rows > MOST_ROWS:
        return norm_rows(stream, scale, shift, functional.linear(x, weight), gate)
    if outputs > WIDEST:
        raise ValueError(f"rows of {outputs} are too long for one program, the longest is {WIDEST}")
    vectors = [v if v is None else v.contiguous() for v in (gate, scale, shift)]
    if any(v is not None and v.shape != (outputs,) for v in vectors):
        raise ValueError(f"scale, shift and gate must have {outputs} elements, as the weight has rows")
    last_axis_is_dense(weight=weight)
    return _launch(x.contiguous(), weight, stream.contiguous(), vectors, rows)


def _launch(
    x: Tensor, weight: Tensor, stream: Tensor, vectors: list[Tensor | None], rows: int
) -> tuple[Tensor, Tensor]:
    gate, scale, shift = vectors
    partial = partial_sums(x, weight, plan, rows)
    total, normed = torch.empty_like(stream), torch.empty_like(stream)
    size = block(weight.shape[0], largest=WIDEST)
    _add_norm[(rows,)](
        partial,
        gate,
        stream,
        scale,
        shift,
        total,
        normed,
        rows,
        weight.shape[0],
        EPS,
        SPANS=len(partial),
        GATE=gate is not None,
        SHIFT=shift is not None,
        BLOCK=size,
        OVERLAP=overlaps(x.device),
        num_warps=min(max(size // 256, 1), 16),
        enable_fp_fusion=False,  # or product and sum become one bf16 instruction that rounds once
        **launch_options(x.device),
    )
    return total, normed
