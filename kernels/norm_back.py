"""Gradient through a product and the norm in front of it: the mirror of linear_norm.

The columns of the weight alone would occupy a fraction of the multiprocessors, so its rows are cut into spans. A second
kernel, one program a row, adds the spans' sums (fp32) in a fixed order, goes back through the norm, adds the gradient
of the residual stream, and multiplies by the gate of the sub-layer before: some fourteen separate operators.
Worth it up to 64 rows; above, the vendor's product and the second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels import backward
from phyai_kernels.linear_back import MOST_ROWS, Plan, check_factors, cut, partial_sums
from phyai_kernels.products import launch_options, overlaps
from phyai_kernels.reference import EPS
from phyai_kernels.rms_norm import WIDEST
from phyai_kernels.tiles import WAVE, block, check_launch, chip_bytes
from torch import Tensor


def plan(outputs: int, inputs: int, *, itemsize: int, chip: int) -> Plan:
    """One program for each multiprocessor; of a long weight wider tiles in more spans, as measured on an H200 at 8192
    rows of the weight. Parameters are those of ``linear_back.plan``.
    """
    columns = 64 if outputs > 4096 else 32
    spans = WAVE // triton.cdiv(inputs, columns)
    return cut(outputs, inputs, spans, itemsize=itemsize, chip=chip, columns=columns)


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _norm_back(
    normed,
    beside,
    stream,
    scale,
    gate,
    found,
    gated,
    rows,
    width,
    eps,
    SPANS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row. ``normed`` is [SPANS, rows, width] fp32, and their sum is meant; with SPANS 0 [rows, width] as it is."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row.to(tl.int64) * width + column
    gain = 1.0 + tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        opened = tl.load(gate + column, mask=inside, other=0.0)
    if OVERLAP:  # what stands above is nobody's result
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if SPANS == 0:
        pull = tl.load(normed + at, mask=inside, other=0.0).to(tl.float32)
    else:
        pull = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(SPANS):
            pull += tl.load(normed + part * rows * width + at, mask=inside, other=0.0)
    pull *= gain
    wide = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    unit = wide * inverse
    result = inverse * (pull - unit * (tl.sum(pull * unit, axis=0) / width))
    if ADD:
        result += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
    dtype = found.dtype.element_ty
    tl.store(found + at, result.to(dtype), mask=inside)
    if GATE:  # rounded where the definition rounds: the gradient, the gate, their product
        passed = opened.to(dtype).to(tl.float32) * result.to(dtype).to(tl.float32)
        tl.store(gated + at, passed.to(dtype), mask=inside)


def norm_back(
    grad: Tensor,
    weight: Tensor | None,
    grad_stream: Tensor | None,
    stream: Tensor,
    scale: Tensor,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.backward.norm_back`. What is not contiguous is copied first.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, rows longer than 16384, a scale or gate
        for each row, or a weight whose last axis has gaps.
    """
    check_launch(grad, weight, grad_stream, stream, scale, gate)
    width = stream.shape[-1]
    vectors = [v if v is None else v.contiguous() for v in (scale, gate)]
    if width > WIDEST:
        raise ValueError(f"rows of {width} are too long for one program, the longest is {WIDEST}")
    if any(v is not None and v.shape != (width,) for v in vectors):
        raise ValueError(f"scale and gate must have {width} elements, the width of the stream {tuple(stream.shape)}")
    like = [grad_stream, grad if weight is None else None]
    if any(t is not None and (t.shape != stream.shape or t.dtype != stream.dtype) for t in like):
        raise ValueError(f"gradients must be like the stream {tuple(stream.shape)} {stream.dtype}")
    if weight is not None:
        check_factors(grad, weight)
        if weight.shape[1] != width or weight.dtype != stream.dtype:
            raise ValueError(f"weight {tuple(weight.shape)} {weight.dtype} does not fit rows of {width} {stream.dtype}")
    if weight is not None and stream.numel() // width > MOST_ROWS:
        return _launch(backward.linear_back(grad, weight), 0, grad_stream, stream, vectors)
    if weight is None:
        return _launch(grad, 0, grad_stream, stream, vectors)
    chosen = plan(*weight.shape, itemsize=grad.element_size(), chip=chip_bytes(grad.device))
    partial = partial_sums(grad, weight, chosen)
    return _launch(partial, len(partial), grad_stream, stream, vectors)


def _launch(
    normed: Tensor, spans: int, grad_stream: Tensor | None, stream: Tensor, vectors: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """:param spans: 0: ``normed`` is no sums. :param vectors: scale and gate."""
    scale, gate = vectors
    stream, width = stream.contiguous(), stream.shape[-1]
    rows, size = stream.numel() // width, block(width, largest=WIDEST)
    found = torch.empty_like(stream)
    gated = found if gate is None else torch.empty_like(stream)
    _norm_back[(rows,)](
        normed.contiguous(),
        None if grad_stream is None else grad_stream.contiguous(),
        stream,
        scale,
        gate,
        found,
        gated,
        rows,
        width,
        EPS,
        SPANS=spans,
        ADD=grad_stream is not None,
        GATE=gate is not None,
        BLOCK=size,
        OVERLAP=overlaps(stream.device),
        num_warps=min(max(size // 256, 1), 16),
        **launch_options(stream.device),
    )
    return found, gated
