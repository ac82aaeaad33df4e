"""The torch definition of every operator: the specification that each fused form must equal.

Plain and unfused; statistics, logits and rotations are fp32 and rounded once to the activation dtype.
Every fused form is a file of the operator's name beside this one, with a function of the same name and signature.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

EPS = 1e-6  # every norm of the pi family (SigLIP LayerNorm, Gemma RMSNorm, adaRMS)
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0


class Norm(NamedTuple):
    """Vectors of one norm, [width] fp32 each.

    :param scale: the gain's offset from 1. :param shift: None for a plain RMSNorm.
    :param gate: of the sub-layer behind the norm; None adds its output as it is.
    :param moved: shift @ W.T of the product behind the norm, [outputs] fp32, made once; a fused form may add it there
        instead of ``shift``. None with a shift: nobody made it.
    """

    scale: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None
    moved: Tensor | None = None


class Ends(NamedTuple):
    """Affine maps on both sides of a stack: weight and bias, fp32.

    :param into: [width, A] and [width]; None where the stack is given the stream itself.
    :param out_of: [A, width] and [A].
    """

    into: tuple[Tensor, Tensor] | None
    out_of: tuple[Tensor, Tensor]


class LayerWeights(NamedTuple):
    """Matrices of one decoder layer. :param qkv, gate_up: as ``project_rotate`` and ``gated_up`` have them."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor


def rms_normalise(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, fp32. :param x: [..., D]."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Residual add, then Gemma RMSNorm: the stored weight is an offset from 1.

    :param x: [..., D], the residual stream. :param weight: [D] fp32.
    :param out: like x, the sub-layer's output to add first; None adds nothing.
    :return: the new residual stream (x itself without ``out``), and its normed form.
    """
    if out is not None:
        x = x + out
    return x, (rms_normalise(x) * (1.0 + weight)).to(x.dtype)


def ada_rms_norm(
    x: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gated residual add, then RMSNorm whose gain and shift come from the flow time.

    :param x: [..., D], the residual stream. :param scale, shift: [D] fp32; the reference takes a row per token too.
    :param out: like x, the sub-layer's output to add first, times ``gate`` [D] fp32, which is rounded to the
        activation dtype before it is used; both are None or neither.
    :return: the new residual stream (x itself without ``out``), and its normed form.
    """
    if out is not None and gate is not None:
        x = x + gate.to(x.dtype) * out
    return x, (rms_normalise(x) * (1.0 + scale) + shift).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, out_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Residual add, then LayerNorm over the last axis.

    :param x: [..., D], the residual stream. :param weight, bias: [D] fp32.
    :param out: like x, the sub-layer's output to add first, plus ``out_bias`` [D] like x; both are None or neither.
    :return: the new residual stream (x itself without ``out``), and its normed form.
    """
    if out is not None and out_bias is not None:
        x = x + (out + out_bias)
    return x, functional.layer_norm(x.float(), weight.shape, weight, bias, EPS).to(x.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Gated GELU (tanh form) of a merged projection: gelu(first half) * second half.

    :param gate_up: [..., 2F]. :return: [..., F]
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. :param x: [..., K]. :param weight: [N, K]. :param bias: [N]."""
    return functional.linear(x, weight, bias)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU (tanh form) of x @ weight.T + bias. :param x: [..., K]. :param weight: [N, K]. :param bias: [N]."""
    return functional.gelu(linear(x, weight, bias), approximate="tanh")


def linear_norm(
    x: Tensor,
    weight: Tensor,
    stream: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Product with a weight, gated residual add, and the norm of what follows: a sub-layer's end.

    :param x: [..., K]. :param weight: [N, K]. :param stream: [..., N], the residual stream.
    :param scale, shift, gate: [N] fp32, as in ``ada_rms_norm``; without ``shift`` the norm is ``rms_norm`` with the
        weight ``scale``, without ``gate`` the product is added as it is.
    :return: the new residual stream, and its normed form.
    """
    out = linear(x, weight)
    if gate is not None:
        out = gate.to(x.dtype) * out
    if shift is None:
        return rms_norm(stream, scale, out)
    stream = stream + out
    return stream, ada_rms_norm(stream, scale, shift)[1]


def gated_up(x: Tensor, weight: Tensor) -> Tensor:
    """Merged gate and up projection, then gated GELU: the first half of an MLP.

    :param x: [..., K]. :param weight: [2F, K], gate above up. :return: [..., F]
    """
    return gelu_mul(linear(x, weight))


def project_rotate(
    x: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Tensor:
    """Merged QKV projection, then ``split_rotate``: the way into attention.

    :param x: [B, S, K]. :param weight: [(heads + 2 kv) * D, K]; the other parameters are ``split_rotate``'s.
    :return: as ``split_rotate``
    """
    return split_rotate(linear(x, weight), table, keys, values, start, heads)


def split_rotate(
    qkv: Tensor, table: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, start: Tensor, heads: int
) -> Tensor:
    """Split a merged projection, rotate queries and keys, and write keys and values into their slab.

    Rotary pairing is half-split, (i, i + D/2). Token s of row b goes to column ``start[b] + s``.

    :param qkv: [B, S, (heads + 2 kv) * D]: all query heads, then key heads, then value heads.
    :param table: cos and sin of the tokens' positions, [B, S, D/2] fp32 each.
    :param keys, values: [B, kv, C, D], written in place; C >= start + S. :param start: [B] int64.
    :return: rotated queries [B, heads, S, D]
    """
    batch, tokens, _ = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    split = qkv.view(batch, tokens, heads + 2 * kv_heads, dim).transpose(1, 2)
    cos, sin = (part[:, None] for part in table)
    low, high = split[:, : heads + kv_heads].float().chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(qkv.dtype)
    columns = start[:, None] + torch.arange(tokens, device=qkv.device)
    at = columns[:, None, :, None].expand(batch, kv_heads, tokens, dim)
    keys.scatter_(2, at, turned[:, heads:])
    values.scatter_(2, at, split[:, heads + kv_heads :])
    return turned[:, :heads]


def attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Attention with scale D**-0.5 and shared key/value heads; every query of a row sees the same keys.

    :param query: [B, heads, Q, D].
    :param keys, values: [B, kv, C, D]; query head h reads K/V head ``h // (heads / kv)``.
    :param lengths: [B] int64, >= 1: row b sees columns 0 to lengths[b]-1; what stands beyond, a NaN too, has no
        influence. None = all columns.
    :return: [B, Q, heads*D]
    """
    batch, heads, rows, dim = query.shape
    kv_heads = keys.shape[1]
    hidden = None
    if lengths is not None:
        hidden = torch.arange(keys.shape[2], device=query.device) >= lengths[:, None]
        values = values.masked_fill(hidden[:, None, :, None], 0.0)  # 0 * NaN would be NaN
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    logits = (grouped @ keys.transpose(-1, -2)).float() * dim**-0.5
    if hidden is not None:
        logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(logits, dim=-1).to(values.dtype)
    mixed = weights @ values
    return mixed.view(batch, heads, rows, dim).transpose(1, 2).flatten(2)


def stack(
    x: Tensor,
    weights: Sequence[LayerWeights],
    norms: Sequence[Norm],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    lengths: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    ops: Any = None,
    ends: Ends | None = None,
) -> Tensor:
    """Decoder layers, and the norm behind the last.

    :param x: [B, S, width], and [B, S, A] fp32 where ``ends`` leads into the stream.
    :param norms: 2i is layer i's before attention, 2i+1 before the MLP; one more than that.
    :param keys, values: [depth, B, kv, C, D], written in place. :param lengths: [B] int64, columns that row b sees, its
        own tokens included. :param start, table, heads: as ``project_rotate`` has them.
    :param ops: implementations of the operators that it calls, by name; this module's unless given.
    :return: [B, S, width]; with ``ends`` [B, S, A] fp32
    """
    ops = ops or sys.modules[__name__]
    if ends is not None:
        return around(stack, ends, ops, x, weights, norms, keys, values, start, lengths, table, heads)
    scale, shift = norms[0][:2]
    _, normed = ops.rms_norm(x, scale) if shift is None else ops.ada_rms_norm(x, scale, shift)
    for i, layer in enumerate(weights):
        before, between, behind = norms[2 * i : 2 * i + 3]
        slabs = keys[i], values[i]
        query = ops.project_rotate(normed, layer.qkv, table, *slabs, start, heads)
        attended = ops.attend(query, *slabs, lengths)
        x, normed = ops.linear_norm(attended, layer.o, x, between.scale, between.shift, before.gate)
        inner = ops.gated_up(normed, layer.gate_up)
        x, normed = ops.linear_norm(inner, layer.down, x, behind.scale, behind.shift, between.gate)
    return normed


def around(
    layers: Callable[..., Tensor], ends: Ends, ops: Any, x: Tensor, weights: Any, norms: Any, keys: Tensor, *rest: Any
) -> Tensor:
    """Layers with both affine maps as operators of their own. :param rest: what ``stack`` takes between both."""
    if ends.into is not None:
        x = ops.linear(x, *ends.into).to(keys.dtype)
    out: Tensor = ops.linear(layers(x, weights, norms, keys, *rest, ops).float(), *ends.out_of)
    return out


def late_stack(
    product: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    weights: Sequence[Any],
    norms: Sequence[Norm],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    lengths: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    ops: Any = None,
    ends: Ends | None = None,
) -> Tensor:
    """``stack`` whose norms come behind the products that read them: its mathematics, with x * (1 + scale) as operand.

    What reads a stream need not wait for the sum of its squares.

    :param product: (operand fp32 [..., K], matrix of a layer) -> [..., N] fp32.
    :param weights: per layer ``qkv``, ``o``, ``gate_up``, ``down``, as ``product`` takes them.
    :raises ValueError: a norm with a shift whose ``moved`` nobody made.
    """
    ops = ops or sys.modules[__name__]
    if ends is not None:
        rest = weights, norms, keys, values, start, lengths, table, heads
        return around(partial(late_stack, product), ends, ops, x, *rest)
    for i, layer in enumerate(weights):
        before, between, slabs = norms[2 * i], norms[2 * i + 1], (keys[i], values[i])
        qkv = _late_norm(product, x, before, layer.qkv).to(x.dtype)
        attended = ops.attend(ops.split_rotate(qkv, table, *slabs, start, heads), *slabs, lengths)
        x = _gated_add(x, product(attended.float(), layer.o), before.gate)
        inner = gelu_mul(_late_norm(product, x, between, layer.gate_up))
        x = _gated_add(x, product(inner, layer.down), between.gate)
    scale, shift = norms[-1][:2]
    _, normed = ops.rms_norm(x, scale) if shift is None else ops.ada_rms_norm(x, scale, shift)
    return normed  # type: ignore[no-any-return]


def _late_norm(product: Callable[[Tensor, Any], Tensor], x: Tensor, norm: Norm, matrix: Any) -> Tensor:
    if norm.shift is not None and norm.moved is None:
        raise ValueError("a norm has a shift, and nobody made what it becomes behind the product (Norm.moved)")
    wide = x.float()
    out = product(wide * (1.0 + norm.scale), matrix) * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return out if norm.moved is None else out + norm.moved


def _gated_add(x: Tensor, out: Tensor, gate: Tensor | None) -> Tensor:
    out = out.to(x.dtype)
    return x + (out if gate is None else gate.to(x.dtype) * out)


# --- products of eight bits ---
#
# A coded tensor is e4m3: numbers of 8 bits that stand for (x - centre) * inverse, with a ``code`` of two, ``centre``
# [K] fp32, a constant per input, and ``inverse`` [] fp32. A coded weight has a scale per row. A product of both is
# multiplied with ``factor`` [N] fp32, that scale over the inverse, and ``bias`` [N] fp32 is added, weight times centre.
# An operator codes its result with the code of the matrix that reads it.

Code = tuple[Tensor, Tensor]


class CodedMatrix(NamedTuple):
    """A matrix of ``stack_fp8``.

    :param weight: [N, K] e4m3, rows in their plain order. :param factor, bias: [N] fp32. :param code: of its operand.
    """

    weight: Tensor
    factor: Tensor
    bias: Tensor
    code: Code


class CodedLayer(NamedTuple):
    """``LayerWeights``, coded; the operand of ``qkv`` and of ``gate_up`` is that of ``late_stack``, not yet normed."""

    qkv: CodedMatrix
    o: CodedMatrix
    gate_up: CodedMatrix
    down: CodedMatrix


def encode_fp8(x: Tensor, code: Code) -> Tensor:
    """(x - centre) * inverse as e4m3: rounded to the nearest, held within 448; a NaN stays one. :param x: [..., K]."""
    centre, inverse = code
    return ((x.float() - centre) * inverse).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8)


def halves_of_pairs(x: Tensor, width: int) -> Tensor:
    """Columns (0, w/2, 1, w/2 + 1, ...) of each group of ``width`` back in order. :param x: [..., groups * width]."""
    grouped = x.unflatten(-1, (-1, width // 2, 2))
    return grouped.transpose(-1, -2).flatten(-3)


def linear_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor) -> Tensor:
    """(x @ weight.T) * factor + bias in bfloat16, summed, scaled and added in fp32.

    :param x: [..., K] coded. :param weight: [N, K] coded. :param factor: [N] fp32. :param bias: [N].
    """
    return (functional.linear(x.float(), weight.float()) * factor + bias.float()).to(torch.bfloat16)


def gated_up_fp8(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, code: Code) -> Tensor:
    """``gated_up`` of coded operands, coded.

    :param x: [..., K] coded. :param weight: [2F, K] coded, rows in turn of gate and up; ``factor`` and ``bias`` [2F]
        likewise. :return: [..., F] e4m3
    """
    gate_up = linear_fp8(x, weight, factor, bias)
    return encode_fp8(gelu_mul(halves_of_pairs(gate_up, gate_up.shape[-1]).float()), code)


def rms_norm_fp8(x: Tensor, weight: Tensor, code: Code) -> Tensor:
    """``rms_norm`` without a residual add, coded. :param x: [..., D]."""
    return encode_fp8(rms_norm(x, weight)[1], code)


def linear_norm_fp8(
    x: Tensor,
    weight: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    stream: Tensor,
    scale: Tensor,
    code: Code | None,
) -> tuple[Tensor, Tensor]:
    """``linear_norm``, neither gated nor shifted, with coded operands, a coded result, or both.

    :param x, weight: [..., K] and [N, K], coded with ``factor`` and ``bias``; as they are where both are None.
    :param code: of the normed form; None leaves it as it is.
    :return: the new residual stream, and its normed form, e4m3 where ``code`` is given.
    """
    coded = factor is not None and bias is not None
    out = linear_fp8(x, weight, factor, bias) if coded else linear(x, weight)
    stream, normed = rms_norm(stream, scale, out.to(stream.dtype))
    return stream, normed if code is None else encode_fp8(normed, code)


def project_rotate_fp8(
    x: Tensor,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Tensor:
    """``project_rotate`` of coded operands.

    :param x: [B, S, K] coded. :param weight: [(heads + 2 kv) * D, K] coded; of each head the rows (0, D/2, 1, ...):
        a rotary pair stands together; ``factor`` and ``bias`` likewise.
    :return: as ``split_rotate``
    """
    qkv = halves_of_pairs(linear_fp8(x, weight, factor, bias), keys.shape[3])
    return split_rotate(qkv.to(keys.dtype), table, keys, values, start, heads)


def attend_fp8(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, code: Code) -> Tensor:
    """``attend``, coded. :return: [B, Q, heads*D] e4m3"""
    return encode_fp8(attend(query, keys, values, lengths), code)


def stack_fp8(x: Tensor, weights: Sequence[CodedLayer], *rest: Any, **named: Any) -> Tensor:
    """``late_stack`` of coded matrices. Parameters and result are those of ``stack``; stream, K and V are not coded.

    :raises ValueError: as ``late_stack``.
    """
    return late_stack(_product_fp8, x, weights, *rest, **named)


def _product_fp8(x: Tensor, matrix: CodedMatrix) -> Tensor:
    """In fp32, of an operand that is not coded yet."""
    return functional.linear(encode_fp8(x, matrix.code).float(), matrix.weight.float()) * matrix.factor + matrix.bias
