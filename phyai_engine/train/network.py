"""pi0.5 in training: the modules of models/pi.py, with what it folds at load time still apart.

Only the reference operators have an autograd form. Two things differ from inference: K and V of each layer have tensors
of their own (autograd forbids writing into a slab that an earlier layer still needs); attention and norms are torch's
fused ones, which keep less for the way back. The test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from phyai_kernels.reference import EPS, Norm
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.layers.ops import REFERENCE
from phyai_engine.layers.rotary import inverse_frequencies, rotary_table
from phyai_engine.models.backbones.gemma import Span
from phyai_engine.models.pi import PiModel
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.weights.pi import places

_MODULATE = {"weight": "modulate", "bias": "modulate_bias"}
_COLUMNS = 16  # K and V are as long as a multiple of this: torch's attention wants aligned masks


def _attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
    """``phyai_kernels.reference.attend`` by torch's fused attention, which does not store the weights."""
    batch, heads, rows, dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * rows, dim)
    seen = None
    if lengths is not None:
        seen = (torch.arange(columns, device=query.device) < lengths[:, None])[:, None, None]
        seen = seen.expand(batch, 1, grouped.shape[2], columns)
    mixed = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen)
    return mixed.view(batch, heads, rows, dim).transpose(1, 2).flatten(2)


def _rms_norm(x: Tensor, weight: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = x if out is None else x + out
    return x, functional.rms_norm(x, x.shape[-1:], 1.0 + weight, EPS)


def _ada_rms_norm(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.addcmul(shift, functional.rms_norm(x, x.shape[-1:], None, EPS), 1.0 + scale)


def _linear_norm(
    x: Tensor, weight: Tensor, stream: Tensor, scale: Tensor, shift: Tensor | None = None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    out = functional.linear(x, weight)
    if shift is None:
        return _rms_norm(stream, scale, out)
    return _ada_rms_norm(stream + (out if gate is None else gate * out), scale, shift)


_OPS = replace(REFERENCE, attend=_attend, rms_norm=_rms_norm, ada_rms_norm=_ada_rms_norm, linear_norm=_linear_norm)


class Seen(NamedTuple):
    """K and V of a batch of observations: per layer [B, kv_heads, C, head_dim]; valid columns [B]."""

    keys: list[Tensor]
    values: list[Tensor]
    valid: Tensor


class PiNetwork(nn.Module):
    """A pi0.5 whose weights learn. :param options: of a pi0.5 in float32."""

    frequencies: Tensor

    def __init__(self, options: PiOptions) -> None:
        super().__init__()
        o = self.options = options
        self._table = places(options)
        self.model = PiModel(options)
        self.model.modulation = torch.empty(0)
        self.time_in = nn.Linear(o.exp_width, o.exp_width)
        self.time_out = nn.Linear(o.exp_width, o.exp_width)
        norms = 2 * o.depth + 1
        self.modulate = nn.Parameter(torch.zeros(norms, 3 * o.exp_width, o.exp_width))
        self.modulate_bias = nn.Parameter(torch.zeros(norms, 3 * o.exp_width))
        self.register_buffer("frequencies", inverse_frequencies(o.head_dim, o.rope_theta), persistent=False)
        with torch.no_grad():
            self.modulate_bias[:, 2 * o.exp_width :] = 1.0  # gates open: every layer learns from the first step on
            self.model.embedding.normal_()
            self.model.vision.position.normal_(std=0.02)
            cast("nn.Parameter", self.model.language.norms).zero_()
            for stack in (self.model.language, self.model.expert):
                for name, weight in stack.named_parameters():
                    if name.endswith(("o.weight", "down.weight")):
                        weight.mul_((2 * o.depth) ** -0.5)

    def observe(self, images: Tensor, tokens: Tensor, token_mask: Tensor) -> Seen:
        """The prefix. :param images: [B, C, 3, s, s] in [-1, 1]. :param tokens, token_mask: [B, P], padded right."""
        o, model, batch = self.options, self.model, len(images)
        seen = _OPS.linear(model.vision(images.flatten(0, 1), _OPS), model.projector.weight, model.projector.bias)
        pictures = seen.reshape(batch, -1, o.width)
        words = functional.embedding(tokens.masked_fill(~token_mask, 0), model.embedding)
        x = torch.cat((pictures.to(words.dtype), words), dim=1)
        valid = pictures.shape[1] + token_mask.sum(dim=1)
        zero = torch.zeros_like(valid)
        keys, values = (self._columns(o.depth, batch, x.shape[1], x.device) for _ in range(2))
        model.language.fill(x, self._span(keys, values, zero, valid, x.shape[1]), model.language.plain_norm, _OPS)
        return Seen(keys, values, valid)

    def velocity(self, seen: Seen, x: Tensor, times: Tensor, clean: Tensor) -> Tensor:
        """[B*n, H, A]: n noisy chunks for each of B observations, one observation's after the other.

        :param times: [B*n]. :param clean: [B*n, H] bool, actions that are data already: their flow time is 0.
        """
        o, model = self.options, self.model
        draws = len(x) // len(seen.valid)
        valid = seen.valid.repeat_interleave(draws)
        own = self._columns(1, len(x), o.action_horizon, x.device)[0]
        keys, values = (
            [torch.cat((part.repeat_interleave(draws, dim=0), own), dim=2) for part in parts] for parts in seen[:2]
        )
        span = self._span(keys, values, valid, valid + o.action_horizon, o.action_horizon)
        table = self._modulation(torch.cat((times, times.new_zeros(1))))

        def norm(index: int) -> Norm:
            rows = table[:, index, :, None]  # [B*n + 1, 3, 1, width]
            mixed = torch.where(clean[:, None, :, None], rows[-1:], rows[:-1])
            return Norm(*mixed.unbind(dim=1))

        tokens = _OPS.linear(x, model.action_in.weight, model.action_in.bias).float()
        hidden = model.expert(tokens, span, norm, _OPS)
        out: Tensor = _OPS.linear(hidden, model.action_out.weight, model.action_out.bias).float()
        return out

    def _modulation(self, times: Tensor) -> Tensor:
        """[K, norms, 3, width]. :param times: [K]."""
        o = self.options
        fraction = torch.linspace(0.0, 1.0, o.exp_width // 2, dtype=torch.float64, device=times.device)
        period = o.min_period * (o.max_period / o.min_period) ** fraction
        angle = times.double()[:, None] * (2.0 * math.pi / period)
        with torch.autocast(times.device.type, enabled=False):  # small, and the time must be exact
            embedded = torch.cat((angle.sin(), angle.cos()), dim=1).float()
            condition = functional.silu(self.time_out(functional.silu(self.time_in(embedded))))
            made = torch.einsum("kw,nvw->knv", condition, self.modulate) + self.modulate_bias
        return made.view(len(times), -1, 3, o.exp_width)

    def _columns(self, layers: int, batch: int, length: int, device: torch.device) -> list[Tensor]:
        o = self.options
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32
        length += -length % _COLUMNS
        shape = (batch, o.kv_heads, length, o.head_dim)
        return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def _span(self, keys: list[Tensor], values: list[Tensor], start: Tensor, lengths: Tensor, count: int) -> Span:
        positions = start[:, None] + torch.arange(count, device=start.device)
        slabs = cast("tuple[Tensor, Tensor]", (keys, values))  # a list of layers is indexed as a slab is
        return Span(*slabs, start, lengths, rotary_table(positions, self.frequencies))

    def export(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's names -> fp32 tensors on the CPU. :param weights: this module's, or their running average."""
        own = {name.removeprefix("model."): value.detach().float().cpu() for name, value in weights.items()}
        own["embedding"] = own["embedding"] * self.options.width**-0.5  # models/pi.py multiplies at load
        made = {name: rows.clone().view(self._table[name].shape) for name, rows in self._rows(own)}
        # The others are stored by every checkpoint and read by no inference.
        return {name: made.get(name, torch.zeros(place.shape)) for name, place in self._table.items()}

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with a checkpoint's weights. :param tensors: canonical names -> tensors, of these dimensions."""
        own = {name.removeprefix("model."): value for name, value in self.named_parameters()}
        for name, rows in self._rows(own):
            rows.copy_(tensors[name].reshape(rows.shape))
        self.model.embedding.mul_(self.options.width**0.5)

    def _rows(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a checkpoint as a view of the parameters. :param own: of this module, without ``model.``."""
        dense = [name for name in self._table if name.endswith("dense.weight")]
        for name, place in self._table.items():
            module, _, kind = name.rpartition(".")
            if place.own:
                rows = own[place.own].view(len(own[place.own]), -1)
                yield name, rows[place.row : place.row + math.prod(place.shape) // rows.shape[1]]
            elif module.startswith("time_mlp_"):
                yield name, own[f"{module.replace('time_mlp', 'time')}.{kind}"]
            elif place.folded:
                yield name, own[_MODULATE[kind]][dense.index(f"{module}.weight")]
