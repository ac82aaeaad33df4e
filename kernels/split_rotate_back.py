"""Gradients of queries, keys and values turned back and merged, as the projection in front of them wants it.

Fused: two concatenations, cast, rotation, cast and a transposition. Each value is read once and written once, 4 bytes
in bf16, and one launch instead of about ten. Worth it at any size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from phyai_kernels.products import launch_options, overlaps
from phyai_kernels.tiles import block, check_launch, last_axis_is_dense
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])  # see attend.py
def _split_rotate_back(
    query,
    keys,
    values,
    cos,
    sin,
    out,
    tokens,
    heads,
    kv_heads,
    cos_at,
    sin_at,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one token. ``*_at``: strides of the batch and the tokens."""
    token_of_all = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    batch = token_of_all // tokens
    token = token_of_all % tokens
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if head < heads:
        at = query + ((batch * heads + head) * tokens + token) * (2 * HALF) + pair
    elif head < heads + kv_heads:
        at = keys + ((batch * kv_heads + head - heads) * tokens + token) * (2 * HALF) + pair
    else:
        at = values + ((batch * kv_heads + head - heads - kv_heads) * tokens + token) * (2 * HALF) + pair
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + HALF, mask=inside, other=0.0)
    dtype = low.dtype
    if head < heads + kv_heads:
        c = tl.load(cos + batch * cos_at[0] + token * cos_at[1] + pair, mask=inside, other=0.0)
        s = tl.load(sin + batch * sin_at[0] + token * sin_at[1] + pair, mask=inside, other=0.0)
        x, y = low.to(tl.float32), high.to(tl.float32)
        low = (x * c + y * s).to(dtype)
        high = (y * c - x * s).to(dtype)
    to = out + (token_of_all * (heads + 2 * kv_heads) + head) * (2 * HALF) + pair
    tl.store(to, low, mask=inside)
    tl.store(to + HALF, high, mask=inside)


def split_rotate_back(
    grad_query: Tensor, grad_keys: Tensor, grad_values: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    """See :func:`phyai_kernels.backward.split_rotate_back`. The table may be views whose last axis is contiguous; what
    else is not contiguous is copied first.

    :raises ValueError: as tiles.check_launch; sizes or dtypes that do not fit, or a table whose last axis has gaps.
    """
    check_launch(grad_query, grad_keys, grad_values, *table)
    batch, heads, tokens, dim = grad_query.shape
    kv_heads = grad_keys.shape[1]
    if grad_keys.shape != (batch, kv_heads, tokens, dim) or grad_values.shape != grad_keys.shape or dim % 2:
        raise ValueError(
            f"gradients of keys and values must be [{batch}, kv, {tokens}, {dim}], of an even D: got "
            f"{tuple(grad_keys.shape)}, {tuple(grad_values.shape)}"
        )
    if {grad_keys.dtype, grad_values.dtype} != {grad_query.dtype}:
        raise ValueError(f"dtypes differ: {grad_query.dtype}, {grad_keys.dtype}, {grad_values.dtype}")
    cos, sin = (part.expand(batch, tokens, dim // 2) for part in table)
    last_axis_is_dense(cos=cos, sin=sin)
    out = torch.empty((batch, tokens, (heads + 2 * kv_heads) * dim), dtype=grad_query.dtype, device=grad_query.device)
    _split_rotate_back[(batch * tokens, heads + 2 * kv_heads)](
        grad_query.contiguous(),
        grad_keys.contiguous(),
        grad_values.contiguous(),
        cos,
        sin,
        out,
        tokens,
        heads,
        kv_heads,
        cos.stride()[:2],
        sin.stride()[:2],
        HALF=dim // 2,
        BLOCK=block(dim // 2, largest=1 << 16),
        OVERLAP=overlaps(out.device),
        num_warps=1,
        **launch_options(out.device),
    )
    return out
