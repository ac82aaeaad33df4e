"""Matrices that may be coded (quant/), and the operators' calls that differ by it.

Each call takes the matrix that reads its result: a coded one is handed eight bits by what comes before it, so that no
kernel of its own codes anything. With plain matrices on both sides the operators are those of 16 and 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from torch import Tensor, nn

from phyai_engine.layers.ops import Ops
from phyai_engine.layers.rotary import Rotary


class Coded(NamedTuple):
    """What an operator takes of a coded matrix. :param weight, factor, inverse: see :class:`CodedLinear`."""

    weight: Tensor
    factor: Tensor
    inverse: Tensor


class CodedLinear(nn.Module):
    """A linear layer with a coded weight.

    :param weight: [N, K] e4m3, rows in the order that its operator asks for. :param factor: [N] fp32, what the coded
        product is multiplied with. :param inverse: [] fp32, codes the operand. :param bias: [N] or None.
    """

    weight: Tensor
    factor: Tensor
    inverse: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, factor: Tensor, inverse: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        for name, tensor in (("weight", weight), ("factor", factor), ("inverse", inverse), ("bias", bias)):
            self.register_buffer(name, tensor)


Matrix = nn.Module
"""nn.Linear or CodedLinear: what nn.Module's attributes are to a type checker."""


def code_of(matrix: Matrix | None) -> Coded | None:
    """None for a plain matrix and for none at all."""
    if not isinstance(matrix, CodedLinear):
        return None
    return Coded(matrix.weight, matrix.factor, matrix.inverse)


def plain(matrix: Matrix) -> Tensor:
    """The weight of a matrix that is not coded."""
    return cast("nn.Linear", matrix).weight


class Norm(NamedTuple):
    """Vectors of one norm, [width] fp32 each.

    :param scale: the gain's offset from 1. :param shift: None for a plain RMSNorm.
    :param gate: of the sub-layer behind the norm; None adds its output as it is.
    """

    scale: Tensor
    shift: Tensor | None = None
    gate: Tensor | None = None


def first_norm(ops: Ops, x: Tensor, norm: Norm, reader: Matrix) -> Tensor:
    """The stream normed, before any sub-layer."""
    if (code := code_of(reader)) is not None:
        return ops.rms_norm_fp8(x, code.inverse, norm.scale, norm.shift)
    if norm.shift is None:
        return ops.rms_norm(x, norm.scale)[1]
    return ops.ada_rms_norm(x, norm.scale, norm.shift)[1]


def linear_norm(
    ops: Ops, x: Tensor, matrix: Matrix, stream: Tensor, norm: Norm, gate: Tensor | None, reader: Matrix | None
) -> tuple[Tensor, Tensor]:
    """A sub-layer's end and the norm behind it.

    :param gate: of this sub-layer. :param reader: what multiplies the normed form; None: no matrix does.
    """
    code, next_ = code_of(matrix), code_of(reader)
    if code is None and next_ is None:
        return ops.linear_norm(x, plain(matrix), stream, norm.scale, norm.shift, gate)
    weight, factor = (plain(matrix), None) if code is None else code[:2]
    inverse = None if next_ is None else next_.inverse
    return ops.linear_norm_fp8(x, weight, factor, stream, inverse, norm.scale, norm.shift, gate)


def project_rotate(
    ops: Ops, x: Tensor, matrix: Matrix, table: Rotary, keys: Tensor, values: Tensor, start: Tensor, heads: int
) -> Tensor:
    """The way into attention. With ``heads`` 0 the rows of K and V alone are used, the matrix' last."""
    rows = (heads + 2 * keys.shape[1]) * keys.shape[3]
    if (code := code_of(matrix)) is None:
        return ops.project_rotate(x, plain(matrix)[-rows:], table, keys, values, start, heads)
    return ops.project_rotate_fp8(x, code.weight[-rows:], code.factor[-rows:], table, keys, values, start, heads)


def attend(ops: Ops, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, reader: Matrix) -> Tensor:
    """Attention."""
    if (code := code_of(reader)) is None:
        return ops.attend(query, keys, values, lengths)
    return ops.attend_fp8(query, keys, values, lengths, code.inverse)


def gated_up(ops: Ops, x: Tensor, matrix: Matrix, reader: Matrix) -> Tensor:
    """The first half of a gated MLP; both halves are coded or neither is."""
    code, next_ = code_of(matrix), code_of(reader)
    if code is None or next_ is None:
        return ops.gated_up(x, plain(matrix))
    return ops.gated_up_fp8(x, code.weight, code.factor, next_.inverse)


def layer_norm(
    ops: Ops, x: Tensor, norm: nn.LayerNorm, added: tuple[Tensor, ...], reader: Matrix
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm. :param added: a product without its bias, and the bias; or nothing."""
    if (code := code_of(reader)) is None:
        return ops.layer_norm(x, norm.weight, norm.bias, *added)
    return ops.layer_norm_fp8(x, norm.weight, norm.bias, code.inverse, *added)


def linear(ops: Ops, x: Tensor, matrix: Matrix, *, with_bias: bool = True) -> Tensor:
    """A product."""
    bias = cast("Tensor | None", matrix.bias) if with_bias else None
    if (code := code_of(matrix)) is None:
        return ops.linear(x, plain(matrix)) if bias is None else ops.linear(x, plain(matrix), bias)
    return ops.linear_fp8(x, code.weight, code.factor, bias)


def linear_gelu(ops: Ops, x: Tensor, matrix: Matrix, reader: Matrix) -> Tensor:
    """The first half of a plain MLP; both halves are coded or neither is."""
    code, next_, bias = code_of(matrix), code_of(reader), cast("Tensor", matrix.bias)
    if code is None or next_ is None:
        return ops.linear_gelu(x, plain(matrix), bias)
    return ops.linear_gelu_fp8(x, code.weight, code.factor, bias, next_.inverse)
