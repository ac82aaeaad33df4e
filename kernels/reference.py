"""The torch definition of every operator: the specification that each fused form must equal.

Plain and unfused; statistics, logits and rotations are fp32 and rounded once to the activation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # every norm of the pi family (SigLIP LayerNorm, Gemma RMSNorm, adaRMS)
# Finite on purpose: a row that sees nothing becomes a uniform average instead of NaN, which would spread to the K/V
# of later layers. After softmax a masked key of any other row has weight exactly 0.
MASKED_LOGIT = -2.3819763e38


def rms_normalise(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, fp32. :param x: [..., D]."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma RMSNorm: the stored weight is an offset from 1. :param x: [..., D]. :param weight: [D] fp32."""
    return (rms_normalise(x) * (1.0 + weight)).to(x.dtype)


def ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """RMSNorm whose gain and shift come from the flow time. :param scale, shift: fp32, broadcastable to x."""
    return (rms_normalise(x) * (1.0 + scale) + shift).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm over the last axis. :param x: [..., D]. :param weight, bias: [D] fp32."""
    return functional.layer_norm(x.float(), weight.shape, weight, bias, EPS).to(x.dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of queries or keys, half-split pairing (i, i + D/2).

    :param x: [B, heads, S, D]. :param table: cos and sin, [B, 1, S, D/2] fp32 each.
    """
    cos, sin = table
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with scale D**-0.5 and shared key/value heads.

    :param query: [B, heads, Q, D].
    :param key, value: [B, kv_heads, K, D]; query head h reads K/V head ``h // (heads / kv_heads)``.
    :param mask: [B, Q, K] bool, True where the query may see the key; None = all.
    :return: [B, Q, heads*D]
    """
    batch, heads, rows, dim = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    logits = (grouped @ key.transpose(-1, -2)).float() * dim**-0.5
    logits = logits.view(batch, heads, rows, columns)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], MASKED_LOGIT)
    weights = torch.softmax(logits, dim=-1).to(value.dtype)
    mixed = weights.view(batch, kv_heads, -1, columns) @ value
    return mixed.view(batch, heads, rows, dim).transpose(1, 2).flatten(2)
