"""The launches of stack.py: what each kernel of a layer is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from phyai_kernels import hopper
from phyai_kernels.attend import LOG2_E
from phyai_kernels.reference import EPS, Code, CodedLayer, CodedMatrix, LayerWeights, Norm
from torch import Tensor

HEAD = 256


class Matrix(NamedTuple):
    """One of a layer. :param scales: factor and bias of a coded one, whose operand ``code`` codes."""

    weight: Tensor
    scales: tuple[Tensor, Tensor] | None = None
    code: Code | None = None

    @classmethod
    def of(cls, matrix: Tensor | CodedMatrix) -> Matrix:
        if isinstance(matrix, Tensor):
            return cls(matrix)
        return cls(matrix.weight, (matrix.factor, matrix.bias), matrix.code)


class Layer(NamedTuple):
    """Matrices as ``LayerWeights`` and ``CodedLayer`` have them."""

    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix

    @classmethod
    def of(cls, layer: LayerWeights | CodedLayer) -> Layer:
        return cls(*map(Matrix.of, layer))


class Span(NamedTuple):
    """Of one call: slabs [depth, B, kv, C, D], first columns and lengths [B], cos and sin [B, S, D/2]."""

    keys: Tensor
    values: Tensor
    start: Tensor
    lengths: Tensor
    table: tuple[Tensor, ...]


class Stream(NamedTuple):
    """The residual stream [B, S, width], its form times 1 + scale of the norm behind it, and the sums of its squares.

    :param scaled: coded where its reader is. :param squares: [rows, parts] fp32.
    """

    total: Tensor
    scaled: Tensor
    squares: Tensor


class Run(NamedTuple):
    """What every layer of one call needs.

    :param kernels, cuts: stack.py's. :param sizes: batch, tokens, heads, K/V heads, columns of the slab.
    :param tall: rows of a panel of x. :param size: bytes of an operand's value.
    """

    kernels: Any
    cuts: Any
    span: Span
    sizes: tuple[int, int, int, int, int]
    tall: int
    size: int

    def first(
        self, x: Tensor, scale: Tensor, code: Code | None, into: tuple[hopper.Kernel, Tensor, Tensor] | None
    ) -> Stream:
        """The stream in front of the layers. :param scale: of the first norm. :param into: as Ends has it."""
        (batch, tokens, *_), width = self.sizes, len(scale)
        rows, sums = batch * tokens, (batch * tokens, 1 if into is None else width // 16)
        scaled, squares = self._operand(x, width), torch.empty(sums, device=x.device)
        if into is None:
            args = x, scale, hopper.Pair.of(code), scaled, squares, width
            hopper.launch(self.kernels.scale_rows, (rows, 1), args)
            return Stream(x, scaled, squares)
        total = torch.empty((batch, tokens, width), dtype=torch.bfloat16, device=x.device)
        kernel, weight, bias = into
        args = x, weight, bias, scale, hopper.Pair.of(code), total, scaled, squares, rows, width
        hopper.launch(kernel, (width // 16, 1), args)
        return Stream(total, scaled, squares)

    def leave(
        self, kernel: hopper.Kernel, stream: Stream, scale: Tensor, shift: Tensor | None, out_of: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[B, S, A] fp32: the last norm and what follows it. :param out_of: as Ends has it."""
        batch, tokens, _ = stream.total.shape
        rows, parts = stream.squares.shape
        out = torch.empty((batch, tokens, len(out_of[1])), device=stream.total.device)
        hopper.launch(kernel, (rows, 1), (stream.total, stream.squares, scale, shift, *out_of, out, parts, EPS))
        return out

    def layer(self, i: int, stream: Stream, layer: Layer, norms: Sequence[Norm], reader: Code | None) -> Stream:
        """Five launches. :param reader: codes what the next layer multiplies."""
        before, between, behind = norms
        query = self.project(i, stream, layer.qkv, before.moved)
        attended = self.attend(i, query, layer.o.code)
        gain = between.scale, layer.gate_up.code
        stream = self.add_product(self.kernels.o, self.cuts.o, attended, layer.o, stream, before.gate, *gain)
        gated = self.gated_up(stream, layer.gate_up, between.moved, layer.down)
        gain = behind.scale, reader
        return self.add_product(self.kernels.down, self.cuts.down, gated, layer.down, stream, between.gate, *gain)

    def project(self, i: int, stream: Stream, matrix: Matrix, moved: Tensor | None) -> Tensor:
        """Rotated queries [B, heads, S, D], in the order that attention reads them; K and V are in the slab."""
        (batch, tokens, heads, kv_heads, columns), span, cut = self.sizes, self.span, self.cuts.project
        query = torch.empty((batch, heads, tokens, HEAD), dtype=torch.bfloat16, device=stream.total.device)
        slabs = hopper.Slab.of(span.keys[i]), hopper.Slab.of(span.values[i])
        counts = batch * tokens, tokens, heads, kv_heads, columns, stream.squares.shape[1]
        half = cut.outputs // 2
        maps = _map(stream.scaled, self.tall), _map(matrix.weight, 8 if HEAD // 2 % half else half)
        args = *maps, stream.squares, moved, hopper.Pair.of(matrix.scales), *span.table, query, *slabs, span.start
        hopper.launch(self.kernels.project, (_blocks(cut, matrix), 1), (*args, *counts, EPS))
        return query

    def attend(self, i: int, query: Tensor, code: Code | None) -> Tensor:
        """[B, S, heads * D]. :param code: of the matrix that reads it."""
        (batch, tokens, heads, kv_heads, columns), span = self.sizes, self.span
        out = self._operand(query, heads * HEAD)
        slabs = hopper.Slab.of(span.keys[i]), hopper.Slab.of(span.values[i])
        group = heads // kv_heads
        tiles = -(-group * tokens // 64)
        counts = tokens, group, kv_heads, columns, HEAD**-0.5 * LOG2_E
        args = query, *slabs, span.lengths, hopper.Pair.of(code), out, *counts
        hopper.launch(self.kernels.attend, (tiles * self.cuts.attend.blocks, batch * kv_heads), args)
        return out

    def gated_up(self, stream: Stream, matrix: Matrix, moved: Tensor | None, reader: Matrix) -> Tensor:
        """[B, S, inner]. :param reader: the matrix that reads it."""
        rows, inner = len(stream.squares), len(matrix.weight) // 2
        out, blocks = self._operand(stream.total, inner), _blocks(self.cuts.gated, matrix)
        part = reader.weight.nbytes // blocks // 16 * 16
        later = reader.weight if self.cuts.ahead else None
        maps = _map(stream.scaled, self.tall), _map(matrix.weight, self.cuts.gated.outputs // 2)
        coded = hopper.Pair.of(matrix.scales), hopper.Pair.of(reader.code)
        counts = rows, inner, stream.squares.shape[1], part, EPS
        hopper.launch(self.kernels.gated, (blocks, 1), (*maps, stream.squares, moved, *coded, out, later, *counts))
        return out

    def add_product(
        self,
        kernel: hopper.Kernel,
        cut: Any,
        x: Tensor,
        matrix: Matrix,
        stream: Stream,
        gate: Tensor | None,
        scale: Tensor,
        reader: Code | None,
    ) -> Stream:
        """The stream behind a sub-layer. :param scale: of the norm behind it. :param reader: codes what that reads."""
        rows, blocks = len(stream.squares), _blocks(cut, matrix)
        total, scaled = torch.empty_like(stream.total), torch.empty_like(stream.scaled)
        squares = torch.empty((rows, blocks // cut.blocks), device=x.device)
        maps = _map(x, self.tall), _map(matrix.weight, cut.outputs)
        coded = hopper.Pair.of(matrix.scales), hopper.Pair.of(reader)
        args = *maps, stream.total, gate, scale, *coded, total, scaled, squares, rows, len(matrix.weight)
        hopper.launch(kernel, (blocks, 1), args)
        return Stream(total, scaled, squares)

    def _operand(self, like: Tensor, width: int) -> Tensor:
        """Of a product, to be filled."""
        dtype = torch.bfloat16 if self.size == 2 else torch.float8_e4m3fn
        return torch.empty((*self.sizes[:2], width), dtype=dtype, device=like.device)


def _blocks(cut: Any, matrix: Matrix) -> int:
    return int(-(-len(matrix.weight) // cut.outputs) * cut.blocks)


def _map(matrix: Tensor, box: int) -> hopper.Map:
    return hopper.Map(matrix.view(-1, matrix.shape[-1]), box)
