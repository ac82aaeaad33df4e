"""Gemma layers: a bidirectional prefix stack that yields K/V, and an expert stack that reads them.

Both stacks have the same number of layers, heads, K/V heads and head_dim; layer i of the expert attends to
the prefix K/V of layer i and to its own. Widths may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from phyai_kernels.reference import ada_rms_norm, attend, rms_norm, rotate
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.layers.attention import split_heads

Rotary = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class GemmaOptions:
    """Dimensions of one stack. ``adaptive``: norms take scale, shift and gate from a condition (adaRMS)."""

    width: int
    depth: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    adaptive: bool = False


class RmsNorm(nn.Module):
    """RMSNorm with a stored weight. The gate is None: nothing modulates the sub-layer's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return rms_norm(x, self.weight), None


class AdaRmsNorm(nn.Module):
    """RMSNorm modulated by a condition; ``dense`` yields [scale | shift | gate] in this order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        return ada_rms_norm(x, scale, shift), gate.to(x.dtype)


def _add(x: Tensor, out: Tensor, gate: Tensor | None) -> Tensor:
    """Residual add of a sub-layer's output, through its gate where there is one."""
    return x + out if gate is None else x + gate * out


class _Attention(nn.Module):
    def __init__(self, options: GemmaOptions) -> None:
        super().__init__()
        self.heads, self.kv_heads = options.heads, options.kv_heads
        self.q_proj = nn.Linear(options.width, options.heads * options.head_dim, bias=False)
        self.k_proj = nn.Linear(options.width, options.kv_heads * options.head_dim, bias=False)
        self.v_proj = nn.Linear(options.width, options.kv_heads * options.head_dim, bias=False)
        self.o_proj = nn.Linear(options.heads * options.head_dim, options.width, bias=False)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated K and V, [B, kv_heads, S, head_dim] each."""
        key = rotate(split_heads(self.k_proj(x), self.kv_heads), rotary)
        return key, split_heads(self.v_proj(x), self.kv_heads)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor, rotary: Rotary) -> Tensor:
        query = rotate(split_heads(self.q_proj(x), self.heads), rotary)
        out: Tensor = self.o_proj(attend(query, key, value, mask))
        return out


class _Mlp(nn.Module):
    def __init__(self, options: GemmaOptions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(options.width, options.mlp, bias=False)
        self.up_proj = nn.Linear(options.width, options.mlp, bias=False)
        self.down_proj = nn.Linear(options.mlp, options.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.gate_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, options: GemmaOptions) -> None:
        super().__init__()
        norm = AdaRmsNorm if options.adaptive else RmsNorm
        self.input_layernorm = norm(options.width)
        self.self_attn = _Attention(options)
        self.post_attention_layernorm = norm(options.width)
        self.mlp = _Mlp(options)

    def feed(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """The rest of the layer after attention. :param gate: of the attention output."""
        x = _add(x, attended, gate)
        normed, mlp_gate = self.post_attention_layernorm(x, condition)
        return _add(x, self.mlp(normed), mlp_gate)


class _Stack(nn.Module):
    def __init__(self, options: GemmaOptions) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(options) for _ in range(options.depth))

    def typed_layers(self) -> Sequence[_Layer]:
        """The layers with their type, which ModuleList does not keep."""
        return cast("Sequence[_Layer]", self.layers)


class GemmaPrefix(_Stack):
    """The stack that reads the vision-language tokens."""

    def forward(self, x: Tensor, mask: Tensor, rotary: Rotary) -> tuple[tuple[Tensor, Tensor], ...]:
        """K (after rotation) and V of every layer.

        The last layer stops at its K/V, and there is no final norm: nothing downstream reads further.

        :param x: [B, L, width]. :param mask: [B, L, L] bool.
        :return: depth pairs of [B, kv_heads, L, head_dim].
        """
        cache = []
        for i, layer in enumerate(self.typed_layers()):
            normed, gate = layer.input_layernorm(x, None)
            key, value = layer.self_attn.keys_values(normed, rotary)
            cache.append((key, value))
            if i + 1 < len(self.layers):
                x = layer.feed(x, layer.self_attn(normed, key, value, mask, rotary), gate, None)
        return tuple(cache)


class GemmaExpert(_Stack):
    """The stack that denoises the action tokens against cached prefix K/V."""

    def __init__(self, options: GemmaOptions) -> None:
        super().__init__(options)
        self.norm = AdaRmsNorm(options.width) if options.adaptive else RmsNorm(options.width)

    def forward(
        self,
        x: Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        mask: Tensor,
        rotary: Rotary,
        condition: Tensor | None,
    ) -> Tensor:
        """Final-normed hidden states.

        :param x: [B, S, width]. :param cache: the prefix K/V per layer, L tokens.
        :param mask: [B, S, L+S] bool. :param condition: [1 or B, width] fp32 of an adaptive stack.
        :return: [B, S, width]
        """
        for layer, (prefix_key, prefix_value) in zip(self.typed_layers(), cache, strict=True):
            normed, gate = layer.input_layernorm(x, condition)
            key, value = layer.self_attn.keys_values(normed, rotary)
            key = torch.cat((prefix_key, key), dim=2)
            value = torch.cat((prefix_value, value), dim=2)
            x = layer.feed(x, layer.self_attn(normed, key, value, mask, rotary), gate, condition)
        out: Tensor = self.norm(x, condition)[0]
        return out
