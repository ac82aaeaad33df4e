"""Layers some of whose matrices are coded (quant/): the operators' calls that differ by it.

What comes before a coded matrix hands it eight bits, so that no kernel of its own codes anything. With plain matrices
on both sides the operators are those of 16 and 32 bits.
"""

from __future__ import annotations

from typing import cast

from phyai_kernels.reference import Code
from torch import Tensor, nn

from phyai_engine.layers.ops import Ops
from phyai_engine.layers.rotary import Rotary

Matrix = nn.Module
"""nn.Linear or CodedLinear: all that a type checker knows of a module's attribute."""


class CodedLinear(nn.Module):
    """A linear layer with a coded weight.

    :param weight: [N, K] e4m3, rows in the order that its operator asks for.
    :param factor: [N] fp32, what the coded product is multiplied with. :param bias: [N] fp32, what is then added: the
        weight times ``centre``. :param centre: [K] fp32; with ``inverse`` [] fp32 it codes the operand.
    """

    weight: Tensor
    factor: Tensor
    bias: Tensor
    centre: Tensor
    inverse: Tensor

    def __init__(self, weight: Tensor, factor: Tensor, bias: Tensor, centre: Tensor, inverse: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("factor", factor)
        self.register_buffer("bias", bias)
        self.register_buffer("centre", centre)
        self.register_buffer("inverse", inverse)


def code_of(reader: Matrix | None) -> Code | None:
    """What codes the operand of a matrix; None for a plain one and for none at all."""
    return (reader.centre, reader.inverse) if isinstance(reader, CodedLinear) else None


def is_coded(*matrices: Matrix) -> bool:
    """Any of them is."""
    return any(isinstance(matrix, CodedLinear) for matrix in matrices)


def rms_norm(ops: Ops, x: Tensor, scale: Tensor, reader: Matrix) -> Tensor:
    """The stream normed, before any sub-layer."""
    code = code_of(reader)
    return ops.rms_norm(x, scale)[1] if code is None else ops.rms_norm_fp8(x, scale, code)


def linear_norm(
    ops: Ops, x: Tensor, matrix: Matrix, stream: Tensor, scale: Tensor, reader: Matrix
) -> tuple[Tensor, Tensor]:
    """A sub-layer's end, and the norm that the reader multiplies."""
    code, weight = code_of(reader), _weight(matrix)
    if isinstance(matrix, CodedLinear):
        return ops.linear_norm_fp8(x, weight, matrix.factor, matrix.bias, stream, scale, code)
    if code is not None:
        return ops.linear_norm_fp8(x, weight, None, None, stream, scale, code)
    return ops.linear_norm(x, weight, stream, scale)


def project_rotate(
    ops: Ops, x: Tensor, matrix: Matrix, table: Rotary, keys: Tensor, values: Tensor, start: Tensor, heads: int
) -> Tensor:
    """The way into attention."""
    if isinstance(matrix, CodedLinear):
        coded = matrix.weight, matrix.factor, matrix.bias
        return ops.project_rotate_fp8(x, *coded, table, keys, values, start, heads)
    return ops.project_rotate(x, _weight(matrix), table, keys, values, start, heads)


def attend(ops: Ops, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, reader: Matrix) -> Tensor:
    """Attention up to a length."""
    code = code_of(reader)
    if code is None:
        return ops.attend(query, keys, values, lengths)
    return ops.attend_fp8(query, keys, values, lengths, code)


def gated_up(ops: Ops, x: Tensor, matrix: Matrix, reader: Matrix) -> Tensor:
    """The first half of a gated MLP; both halves are coded or neither is."""
    if isinstance(matrix, CodedLinear):
        return ops.gated_up_fp8(x, matrix.weight, matrix.factor, matrix.bias, code_of(reader))
    return ops.gated_up(x, _weight(matrix))


def _weight(matrix: Matrix) -> Tensor:
    return cast("Tensor", matrix.weight)
