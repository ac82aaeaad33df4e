"""The torch definition of the operators' way back: gradients of what flows through them, never of a parameter.

A name that ends in ``_back`` is an operator like those in reference.py: with a field of ``Ops``, and fused forms in a
file of its name where there are any. Gradients have the activation dtype; statistics, logits and rotations are fp32, as
in the forward pass. No shape or value is read on the host: all of it may be captured in a CUDA graph.

Where a gradient comes from behind a matrix, an operator takes both, ``grad`` and ``weight``: the product belongs to
what reads it, as on the way forward the norm belongs to the product in front of it.
"""

from __future__ import annotations

import torch
from phyai_kernels.reference import EPS
from torch import Tensor
from torch.nn import functional


def linear_back(grad: Tensor, weight: Tensor) -> Tensor:
    """:param grad: [..., N]. :param weight: [N, K]. :return: of x, [..., K]."""
    return grad @ weight


def norm_back(
    grad: Tensor,
    weight: Tensor | None,
    grad_stream: Tensor | None,
    stream: Tensor,
    scale: Tensor,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of ``rms_norm``, ``ada_rms_norm`` and the second half of ``linear_norm``.

    :param grad: [..., N], of the product of the normed form with ``weight`` [N, D]; None: of the normed form itself.
    :param grad_stream: of the residual stream from elsewhere, [..., D]; None where nothing else follows.
    :param stream: what was normed, [..., D]. :param scale, gate: as ``ada_rms_norm`` has them.
    :return: of the stream, which is of x; and of ``out``
    """
    normed = grad if weight is None else linear_back(grad, weight)
    wide = stream.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    unit, pull = wide * inverse, normed.float() * (1.0 + scale)
    found = inverse * (pull - unit * (pull * unit).mean(dim=-1, keepdim=True))
    found = (found if grad_stream is None else found + grad_stream.float()).to(stream.dtype)
    return found, found if gate is None else gate.to(found.dtype) * found


def gated_up_back(grad: Tensor, down: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """The merged projection is made again, not kept.

    :param grad: [..., N], of the product of the result with ``down`` [N, F]; None: of the result itself, [..., F].
    :param x, weight: as ``gated_up`` has them. :return: of the merged projection, [..., 2F]
    """
    inner = grad if down is None else linear_back(grad, down)
    return gelu_mul_back(inner, functional.linear(x, weight))


def split_rotate_back(
    grad_query: Tensor, grad_keys: Tensor, grad_values: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    """Turn back by the same angles.

    :param grad_query: [B, heads, S, D]. :param grad_keys, grad_values: [B, kv, S, D], of the columns that were written.
    :return: of qkv, [B, S, (heads + 2 kv) * D]
    """
    turned = torch.cat((grad_query, grad_keys), dim=1)
    cos, sin = (part[:, None] for part in table)
    low, high = turned.float().chunk(2, dim=-1)
    back = torch.cat((low * cos + high * sin, high * cos - low * sin), dim=-1).to(turned.dtype)
    return torch.cat((back, grad_values), dim=1).transpose(1, 2).flatten(2)


def attend_back(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    lengths: Tensor | None,
    start: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights are made again, not kept. Most columns of a slab are a prefix that depends on nothing here.

    :param grad: [B, Q, heads*D]. :param mixed: like it, the result of ``attend``.
    :param start, count: the columns whose gradient is wanted, start[b] to start[b] + count - 1; [B] int64.
    :return: of query [B, heads, Q, D], and of keys and values in those columns, [B, kv, count, D]
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    grad_mixed, result = (part.view(batch, rows, heads, dim).transpose(1, 2) for part in (grad, mixed))
    along = (grad_mixed.float() * result.float()).sum(dim=-1).view(batch, kv_heads, -1, 1)
    grad_mixed = grad_mixed.reshape(grouped.shape)
    hidden = None
    if lengths is not None:
        hidden = torch.arange(keys.shape[2], device=query.device) >= lengths[:, None]
        keys, values = (slab.masked_fill(hidden[:, None, :, None], 0.0) for slab in (keys, values))
    logits = (grouped @ keys.transpose(-1, -2)).float() * dim**-0.5
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1)
    grad_weights = (grad_mixed @ values.transpose(-1, -2)).float()
    grad_logits = (weights * (grad_weights - along)).to(query.dtype)
    columns = start[:, None] + torch.arange(count, device=query.device)
    at = columns[:, None, None].expand(batch, kv_heads, grouped.shape[2], count)
    grad_keys = grad_logits.gather(3, at).transpose(-1, -2) @ grouped
    grad_values = weights.gather(3, at).to(values.dtype).transpose(-1, -2) @ grad_mixed
    # The logits' scale on the small products instead of all logits.
    return (grad_logits @ keys).view(query.shape) * dim**-0.5, grad_keys * dim**-0.5, grad_values


# --- what has no fused form, since no action head calls it often ---


def gelu_mul_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """:param grad: [..., F]. :return: of gate_up, [..., 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    active = functional.gelu(gate, approximate="tanh")
    return torch.cat((torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"), grad * active), dim=-1)


def silu_back(grad: Tensor, x: Tensor) -> Tensor:
    """:param grad: like x, the argument of silu. :return: of x."""
    return torch.ops.aten.silu_backward(grad, x)


def layer_norm_back(grad: Tensor, grad_stream: Tensor | None, stream: Tensor, weight: Tensor) -> Tensor:
    """As ``norm_back``. :param grad: of the normed form. :return: of x, which is of ``out`` too."""
    wide = stream.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    unit, pull = centred * inverse, grad.float() * weight
    along = unit * (pull * unit).mean(dim=-1, keepdim=True)
    found = inverse * (pull - pull.mean(dim=-1, keepdim=True) - along)
    return (found if grad_stream is None else found + grad_stream.float()).to(stream.dtype)


def linear_gelu_back(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product is made again, not kept. :param grad: [..., N]. :return: of the argument of GELU, [..., N]."""
    return torch.ops.aten.gelu_backward(grad, functional.linear(x, weight, bias), approximate="tanh")
