"""The torch definition of every operator's backward: gradients of what flows through it, never of a parameter.

Each function has the name of its operator in reference.py and belongs to that definition, so it holds for every fused
form too. Gradients have the activation dtype; statistics, logits and rotations are fp32, as in the forward pass. No
shape or value is read on the host: all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from phyai_kernels.reference import EPS
from torch import Tensor
from torch.nn import functional


def linear(grad: Tensor, weight: Tensor) -> Tensor:
    """:param grad: [..., N]. :param weight: [N, K]. :return: of x, [..., K]."""
    return grad @ weight


def gelu_mul(grad: Tensor, gate_up: Tensor) -> Tensor:
    """:param grad: [..., F]. :return: of gate_up, [..., 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    active = functional.gelu(gate, approximate="tanh")
    return torch.cat((torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"), grad * active), dim=-1)


def silu(grad: Tensor, x: Tensor) -> Tensor:
    """:param grad: like x, the argument of silu. :return: of x."""
    return torch.ops.aten.silu_backward(grad, x)


def rms_norm(grad_stream: Tensor | None, grad_normed: Tensor | None, stream: Tensor, weight: Tensor) -> Tensor:
    """:param grad_stream, grad_normed: of both results; None where nothing follows. :param stream: the first result.

    :return: of x, which is of ``out`` too.
    """
    return _rms(grad_stream, grad_normed, stream, weight)


def ada_rms_norm(
    grad_stream: Tensor | None, grad_normed: Tensor | None, stream: Tensor, scale: Tensor, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As ``rms_norm``. :return: of x, and of ``out``."""
    grad = _rms(grad_stream, grad_normed, stream, scale)
    return grad, grad if gate is None else gate.to(grad.dtype) * grad


def layer_norm(grad_stream: Tensor | None, grad_normed: Tensor | None, stream: Tensor, weight: Tensor) -> Tensor:
    """As ``rms_norm``."""
    if grad_normed is None:
        return torch.zeros_like(stream) if grad_stream is None else grad_stream
    wide = stream.float()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + EPS)
    unit, pull = centred * inverse, grad_normed.float() * weight
    along = unit * (pull * unit).mean(dim=-1, keepdim=True)
    grad = inverse * (pull - pull.mean(dim=-1, keepdim=True) - along)
    return (grad if grad_stream is None else grad + grad_stream.float()).to(stream.dtype)


def linear_gelu(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product is made again, not kept. :param grad: [..., N]. :return: of x, [..., K]."""
    inner = functional.linear(x, weight, bias)
    return linear(torch.ops.aten.gelu_backward(grad, inner, approximate="tanh"), weight)


def linear_norm(
    grad_stream: Tensor | None,
    grad_normed: Tensor | None,
    stream: Tensor,
    weight: Tensor,
    scale: Tensor,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``ada_rms_norm``. :return: of x, and of the stream that the product was added to."""
    grad, grad_out = ada_rms_norm(grad_stream, grad_normed, stream, scale, gate)
    return linear(grad_out, weight), grad


def gated_up(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The product is made again, not kept. :param grad: [..., F]. :return: of x, [..., K]."""
    return linear(gelu_mul(grad, functional.linear(x, weight)), weight)


def project_rotate(
    grad_query: Tensor, grad_keys: Tensor, grad_values: Tensor, weight: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    """As ``split_rotate``. :param weight: [(heads + 2 kv) * D, K]. :return: of x, [B, S, K]."""
    return linear(split_rotate(grad_query, grad_keys, grad_values, table), weight)


def split_rotate(grad_query: Tensor, grad_keys: Tensor, grad_values: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn back by the same angles.

    :param grad_query: [B, heads, S, D]. :param grad_keys, grad_values: [B, kv, S, D], of the columns that were written.
    :return: of qkv, [B, S, (heads + 2 kv) * D]
    """
    turned = torch.cat((grad_query, grad_keys), dim=1)
    cos, sin = (part[:, None] for part in table)
    low, high = turned.float().chunk(2, dim=-1)
    back = torch.cat((low * cos + high * sin, high * cos - low * sin), dim=-1).to(turned.dtype)
    return torch.cat((back, grad_values), dim=1).transpose(1, 2).flatten(2)


def attend(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor | None,
    start: Tensor,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights are made again, not kept. Most columns of a slab are a prefix that depends on nothing here.

    :param grad: [B, Q, heads*D]. :param start, count: the columns whose gradient is wanted, start[b] to
        start[b] + count - 1; [B] int64.
    :return: of query [B, heads, Q, D], and of keys and values in those columns, [B, kv, count, D]
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    grad_mixed = grad.view(batch, rows, heads, dim).transpose(1, 2).reshape(grouped.shape)
    hidden = None
    if lengths is not None:
        hidden = torch.arange(keys.shape[2], device=query.device) >= lengths[:, None]
        keys, values = (slab.masked_fill(hidden[:, None, :, None], 0.0) for slab in (keys, values))
    logits = (grouped @ keys.transpose(-1, -2)).float() * dim**-0.5
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1)
    grad_weights = (grad_mixed @ values.transpose(-1, -2)).float()
    grad_logits = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, torch.float32).to(query.dtype)
    columns = start[:, None] + torch.arange(count, device=query.device)
    at = columns[:, None, None].expand(batch, kv_heads, grouped.shape[2], count)
    grad_keys = grad_logits.gather(3, at).transpose(-1, -2) @ grouped
    grad_values = weights.gather(3, at).to(values.dtype).transpose(-1, -2) @ grad_mixed
    # The logits' scale on the small products instead of all logits.
    return (grad_logits @ keys).view(query.shape) * dim**-0.5, grad_keys * dim**-0.5, grad_values


def _rms(grad_stream: Tensor | None, grad_normed: Tensor | None, stream: Tensor, offset: Tensor) -> Tensor:
    """Of the sum that was normed, with the gain 1 + offset."""
    if grad_normed is None:
        return torch.zeros_like(stream) if grad_stream is None else grad_stream
    wide = stream.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    unit, pull = wide * inverse, grad_normed.float() * (1.0 + offset)
    grad = inverse * (pull - unit * (pull * unit).mean(dim=-1, keepdim=True))
    return (grad if grad_stream is None else grad + grad_stream.float()).to(stream.dtype)
