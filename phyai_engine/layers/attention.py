"""Shapes around attention; the operator itself is phyai_kernels."""

from __future__ import annotations

from torch import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads*D] -> [B, heads, S, D]; head h owns columns h*D to (h+1)*D."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)
