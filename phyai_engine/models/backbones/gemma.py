"""Gemma layers over one slab of K/V: a bidirectional prefix stack fills it, an expert stack reads and extends it.

Both stacks have the same number of layers, heads, K/V heads and head_dim; layer i of the expert attends to the prefix
K/V of layer i and to its own, which stand behind them in the same slab. Widths may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from phyai_kernels.reference import CodedLayer, Ends, LayerWeights, Norm
from torch import Tensor, nn

from phyai_engine.layers import coded
from phyai_engine.layers.coded import is_coded
from phyai_engine.layers.ops import Ops
from phyai_engine.layers.rotary import Rotary

Norms = Callable[[int], Norm]
"""Index -> norm: 2i is layer i's before attention, 2i+1 before the MLP, 2*depth the final one."""


@dataclass(frozen=True, slots=True)
class GemmaOptions:
    """Dimensions of one stack.

    :param norms: the stack holds the weights of its norms; else they are modulated (adaRMS) and the caller has them.
    :param keys_values_only: the stack ends at the K/V of its last layer; it has no weights beyond.
    """

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    norms: bool = True
    keys_values_only: bool = False

    @property
    def query_rows(self) -> int:
        """Rows of a merged QKV projection before the first K row."""
        return self.heads * self.head_dim

    @property
    def qkv_rows(self) -> int:
        """Rows of a merged QKV projection: query heads, K heads, V heads."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The tokens of one pass: where their K/V go in the slab, what they see, where they stand.

    :param keys, values: [depth, B, kv_heads, C, head_dim], written in place.
    :param start: [B] int64, the column of each row's first token; the others follow it.
    :param lengths: [B] int64, >= 1: columns that row b sees, its own tokens included.
    :param rotary: cos and sin of the tokens' positions, [B, S, head_dim/2] fp32 each.
    """

    keys: Tensor
    values: Tensor
    start: Tensor
    lengths: Tensor
    rotary: Rotary


class _Layer(nn.Module):
    """Parameters of one layer; gate and up, as Q, K and V, stand one below the other."""

    def __init__(self, options: GemmaOptions, dtype: torch.dtype, *, keys_values_only: bool) -> None:
        super().__init__()
        rows = options.qkv_rows - (options.query_rows if keys_values_only else 0)
        self.qkv = nn.Linear(options.width, rows, bias=False, dtype=dtype)
        if keys_values_only:
            return
        self.o = nn.Linear(options.query_rows, options.width, bias=False, dtype=dtype)
        self.gate_up = nn.Linear(options.width, 2 * options.mlp, bias=False, dtype=dtype)
        self.down = nn.Linear(options.mlp, options.width, bias=False, dtype=dtype)

    def weights(self) -> LayerWeights:
        """Of a whole layer."""
        return LayerWeights(self.qkv.weight, self.o.weight, self.gate_up.weight, self.down.weight)


class GemmaStack(nn.Module):
    """One stack. :param dtype: of its matrices and activations; norm weights are fp32."""

    norms: nn.Parameter | None

    def __init__(self, options: GemmaOptions, dtype: torch.dtype) -> None:
        super().__init__()
        self.options = options
        only, last = options.keys_values_only, options.depth - 1
        self.layers = nn.ModuleList(
            _Layer(options, dtype, keys_values_only=only and i == last) for i in range(options.depth)
        )
        rows = 2 * options.depth + (-1 if only else 1)
        self.norms = nn.Parameter(torch.empty(rows, options.width)) if options.norms else None

    def plain_norm(self, index: int) -> Norm:
        """RMSNorm with the stack's own weights."""
        return Norm(cast("Tensor", self.norms)[index])

    def behind_norms(self) -> list[Tensor]:
        """The matrix that reads each norm, the final one left out."""
        whole = (self._at(i).weights() for i in range(self.options.depth))
        return [matrix for layer in whole for matrix in (layer.qkv, layer.gate_up)]

    def forward(
        self,
        x: Tensor,
        span: Span,
        norms: Norms,
        ops: Ops,
        ends: Ends | None = None,
        coded: Sequence[CodedLayer] = (),
    ) -> Tensor:
        """Final-normed hidden states. :param x: [B, S, width]. :return: the same shape.

        :param ends: what stands around the layers, where it is to be one call with them; x and the result are then as
            ``reference.stack`` says.
        :param coded: to run instead of the stack's own layers.
        """
        if coded:
            return self._through(ops.stack_fp8, coded, x, span, norms, ops, ends)
        return self._run(self.options.depth, x, span, norms, ops, ends)

    def fill(self, x: Tensor, span: Span, norms: Norms, ops: Ops) -> None:
        """Only write the K/V of every layer: nothing past those of the last layer is computed.

        :param x: [B, S, width].
        """
        last = self.options.depth - 1
        if any(is_coded(*layer.children()) for layer in self.layers):
            self._fill_coded(x, span, norms, ops)
            return
        normed = self._run(last, x, span, norms, ops)
        weight = self._at(last).qkv.weight[-2 * self.options.kv_heads * self.options.head_dim :]
        ops.project_rotate(normed, weight, span.rotary, span.keys[last], span.values[last], span.start, 0)

    def _run(self, count: int, x: Tensor, span: Span, norms: Norms, ops: Ops, ends: Ends | None = None) -> Tensor:
        """The first ``count`` layers. :return: the stream as the norm behind them leaves it, or as ``ends`` says."""
        weights = [self._at(i).weights() for i in range(count)]
        return self._through(ops.stack, weights, x, span, norms, ops, ends)

    def _through(
        self,
        stack: Callable[..., Tensor],
        weights: Sequence[LayerWeights] | Sequence[CodedLayer],
        x: Tensor,
        span: Span,
        norms: Norms,
        ops: Ops,
        ends: Ends | None,
    ) -> Tensor:
        found = [norms(i) for i in range(2 * len(weights) + 1)]
        slab = span.keys, span.values, span.start, span.lengths
        return stack(x, weights, found, *slab, span.rotary, self.options.heads, ops, ends)

    def _fill_coded(self, x: Tensor, span: Span, norms: Norms, ops: Ops) -> None:
        """``fill`` of a stack with coded matrices. Its norms are plain, and it ends at K and V."""
        scales = [norms(index).scale for index in range(2 * self.options.depth - 1)]
        normed = coded.rms_norm(ops, x, scales[0], self._at(0).qkv)
        for i, layer in enumerate(cast("Sequence[_Layer]", self.layers)):
            slabs, last = (span.keys[i], span.values[i]), i + 1 == self.options.depth
            heads = 0 if last else self.options.heads
            query = coded.project_rotate(ops, normed, layer.qkv, span.rotary, *slabs, span.start, heads)
            if last:
                return
            mixed = coded.attend(ops, query, *slabs, span.lengths, layer.o)
            x, normed = coded.linear_norm(ops, mixed, layer.o, x, scales[2 * i + 1], layer.gate_up)
            inner = coded.gated_up(ops, normed, layer.gate_up, layer.down)
            x, normed = coded.linear_norm(ops, inner, layer.down, x, scales[2 * i + 2], self._at(i + 1).qkv)

    def _at(self, index: int) -> _Layer:
        return cast("Sequence[_Layer]", self.layers)[index]
