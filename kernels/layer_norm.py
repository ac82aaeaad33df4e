"""Residual add and LayerNorm in one pass: mean and spread of a row that stays in registers.

Fused: two adds, mean, variance, gain, bias, cast: read and written once, one launch instead of seven. The bias of the
product before is added here, since it costs cuBLAS' kernel up to 5 us (768 rows, 4304 -> 1152: 14.7 without, 20.0 with
it) and this one nothing. 3.4 us at 768 rows of 1152 (H200, CUDA graph).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels.products import launch_options, overlaps
from phyai_kernels.products_fp8 import check_code, coded
from phyai_kernels.reference import EPS, FP8, Code
from phyai_kernels.tiles import block, check_launch
from torch import Tensor

WIDEST = 16384  # a row lives in one program's registers


@triton.jit
def _layer_norm(
    x,
    out,
    factor,
    out_bias,
    weight,
    bias,
    centre,
    inverse,
    total,
    normed,
    width,
    eps,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: total = x + (out + out_bias); normed = (total - mean) / spread * weight + bias, with CODE as e4m3.

    With SCALE ``out`` is a coded product, to be multiplied with a factor first.
    """
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    moved = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:  # the vectors are nobody's result
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        dtype = value.dtype
        added = tl.load(out + row + column, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            added = added * tl.load(factor + column, mask=inside, other=0.0)
        added += tl.load(out_bias + column, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added.to(dtype).to(tl.float32)).to(dtype)  # rounded where the reference rounds
        tl.store(total + row + column, value, mask=inside)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps) * gain + moved
    result = result.to(value.dtype)
    if CODE:
        middle = tl.load(centre + column, mask=inside, other=0.0)
        tl.store(normed + row + column, coded(result.to(tl.float32), middle, inverse), mask=inside)
    else:
        tl.store(normed + row + column, result, mask=inside)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, out_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`phyai_kernels.reference.layer_norm`. What is not contiguous is copied first.

    :raises ValueError: as tiles.check_launch; sizes that do not fit, rows longer than 16384, or ``out`` without
        ``out_bias`` or the reverse.
    """
    return coded_layer_norm(x, weight, bias, None, out, None, out_bias)


def coded_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    code: Code | None,
    out: Tensor | None,
    factor: Tensor | None,
    out_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As ``layer_norm``; ``code`` and ``factor`` as :func:`phyai_kernels.reference.layer_norm_fp8` has them."""
    if (out is None) != (out_bias is None):
        raise ValueError("out and out_bias go together: both are None or neither")
    check_launch(x, weight, bias, out, factor, out_bias, *(code or ()))
    width = x.shape[-1]
    if width > WIDEST:
        raise ValueError(f"rows of {width} are too long for one program, the longest is {WIDEST}")
    vectors = [v if v is None else v.contiguous() for v in (factor, out_bias, weight, bias)]
    if any(v is not None and v.shape != (width,) for v in vectors):
        raise ValueError(f"weight, factor and biases must have {width} elements, the width of x {tuple(x.shape)}")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(f"out must be like x: got {tuple(out.shape)} {out.dtype}, x {tuple(x.shape)} {x.dtype}")
    x = x.contiguous()
    normed = torch.empty_like(x, dtype=x.dtype if code is None else FP8)
    total = x if out is None else torch.empty_like(x)
    size = block(width, largest=WIDEST)
    _layer_norm[(x.numel() // width,)](
        x,
        out if out is None else out.contiguous(),
        *vectors,
        *((None, None) if code is None else check_code(code, width)),
        total,
        normed,
        width,
        EPS,
        ADD=out is not None,
        SCALE=factor is not None,
        CODE=code is not None,
        BLOCK=size,
        OVERLAP=overlaps(x.device),
        num_warps=min(max(size // 512, 1), 16),
        enable_fp_fusion=False,  # or a product and a sum round once where the reference rounds twice
        **launch_options(x.device),
    )
    return total, normed
