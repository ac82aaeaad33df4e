"""Layers some of whose matrices are coded (quant/): the operators' calls that differ by it.

What comes before a coded matrix hands it eight bits, so that no kernel of its own codes anything. With plain matrices
on both sides the operators are those of 16 and 32 bits.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from phyai_engine.layers.ops import Ops
from phyai_engine.layers.rotary import Rotary

Matrix = nn.Module
"""nn.Linear or CodedLinear: all that a type checker knows of a module's attribute."""


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


def inverse_of(reader: Matrix | None) -> Tensor | None:
    """What codes the operand of a matrix; None for a plain one and for none at all."""
    return reader.inverse if isinstance(reader, CodedLinear) else None


def is_coded(*matrices: Matrix) -> bool:
    """Any of them is."""
    return any(isinstance(matrix, CodedLinear) for matrix in matrices)


def rms_norm(ops: Ops, x: Tensor, scale: Tensor, reader: Matrix) -> Tensor:
    """The stream normed, before any sub-layer."""
    inverse = inverse_of(reader)
    return ops.rms_norm(x, scale)[1] if inverse is None else ops.rms_norm_fp8(x, scale, inverse)


def linear_norm(
    ops: Ops, x: Tensor, matrix: Matrix, stream: Tensor, scale: Tensor, reader: Matrix
) -> tuple[Tensor, Tensor]:
    """A sub-layer's end, and the norm that the reader multiplies."""
    inverse, weight = inverse_of(reader), _weight(matrix)
    if isinstance(matrix, CodedLinear):
        return ops.linear_norm_fp8(x, weight, matrix.factor, stream, scale, inverse)
    if inverse is not None:
        return ops.linear_norm_fp8(x, weight, None, stream, scale, inverse)
    return ops.linear_norm(x, weight, stream, scale)


def project_rotate(
    ops: Ops, x: Tensor, matrix: Matrix, table: Rotary, keys: Tensor, values: Tensor, start: Tensor, heads: int
) -> Tensor:
    """The way into attention."""
    if isinstance(matrix, CodedLinear):
        return ops.project_rotate_fp8(x, matrix.weight, matrix.factor, table, keys, values, start, heads)
    return ops.project_rotate(x, _weight(matrix), table, keys, values, start, heads)


def attend(ops: Ops, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, reader: Matrix) -> Tensor:
    """Attention up to a length."""
    inverse = inverse_of(reader)
    if inverse is None:
        return ops.attend(query, keys, values, lengths)
    return ops.attend_fp8(query, keys, values, lengths, inverse)


def gated_up(ops: Ops, x: Tensor, matrix: Matrix, reader: Matrix) -> Tensor:
    """The first half of a gated MLP; both halves are coded or neither is."""
    if isinstance(matrix, CodedLinear):
        return ops.gated_up_fp8(x, matrix.weight, matrix.factor, inverse_of(reader))
    return ops.gated_up(x, _weight(matrix))


def layer_norm(
    ops: Ops, x: Tensor, norm: nn.LayerNorm, added: tuple[Tensor, ...], reader: Matrix
) -> tuple[Tensor, Tensor]:
    """Residual add and LayerNorm. :param added: a product without its bias, and the bias; or nothing."""
    inverse = inverse_of(reader)
    if inverse is None:
        return ops.layer_norm(x, norm.weight, norm.bias, *added)
    return ops.layer_norm_fp8(x, norm.weight, norm.bias, inverse, *added)


def linear(ops: Ops, x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """A product."""
    if isinstance(matrix, CodedLinear):
        return ops.linear_fp8(x, matrix.weight, matrix.factor, bias)
    return ops.linear(x, _weight(matrix), bias)


def linear_gelu(ops: Ops, x: Tensor, matrix: Matrix, reader: Matrix) -> Tensor:
    """The first half of a plain MLP; both halves are coded or neither is."""
    bias = cast("Tensor", matrix.bias)
    if isinstance(matrix, CodedLinear):
        return ops.linear_gelu_fp8(x, matrix.weight, matrix.factor, bias, inverse_of(reader))
    return ops.linear_gelu(x, _weight(matrix), bias)


def _weight(matrix: Matrix) -> Tensor:
    return cast("Tensor", matrix.weight)
