"""pi0 and pi0.5 written out, for comparison: nothing merged, folded, skipped or reused, official tensor names, fp64.

Every step runs the whole suffix against the whole padded prefix under explicit masks. It shares no code with the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from phyai_engine.models.pi_options import PiOptions

GEMMA = "paligemma_with_expert.paligemma."
VISION = GEMMA + "model.vision_tower.vision_model."
LANGUAGE = GEMMA + "model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert.model."


@dataclass(frozen=True)
class PlainPrefix:
    """Of the padded prefix, masked positions too: tokens before layer 0, mask, and K and V of every layer."""

    tokens: Tensor  # [B, P, width]
    mask: Tensor  # [B, P]
    keys: list[Tensor]  # depth x [B, kv, P, D], after rotation
    values: list[Tensor]
    state: Tensor  # [B, A]


class PlainPi:
    """:param tensors: a checkpoint's. :param dtype: of all arithmetic but the rotary and time tables."""

    def __init__(self, options: PiOptions, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        self.o = options
        self.dtype = dtype
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        exponent = torch.arange(0, options.head_dim, 2).float() / options.head_dim
        self.frequencies = 1.0 / options.rope_theta**exponent  # fp32: part of what a checkpoint means

    def prefix(self, inputs: Mapping[str, Tensor]) -> PlainPrefix:
        """Masked cameras and padding are computed too, and hidden by the mask."""
        o, image_mask, token_mask = self.o, inputs["image_mask"], inputs["token_mask"]
        seen = [self._project(self._see(inputs["images"][:, c])) for c in range(len(o.cameras))]
        table = self.tensors[GEMMA + "lm_head.weight"]
        said = table[inputs["tokens"]] * math.sqrt(o.width)
        tokens = torch.cat((*seen, said), dim=1)
        mask = torch.cat((image_mask.repeat_interleave(o.image_tokens, dim=1), token_mask), dim=1)
        positions = mask.cumsum(dim=1) - 1
        visible = mask[:, :, None] & mask[:, None, :]
        x, keys, values = tokens, [], []
        for i in range(o.depth):
            name = f"{LANGUAGE}layers.{i}."
            normed, _ = self._norm(x, name + "input_layernorm.", None)
            keys.append(self._rotate(self._heads(normed, name + "self_attn.k_proj"), positions))
            values.append(self._heads(normed, name + "self_attn.v_proj"))
            attended = self._attend(normed, name, keys[i], values[i], visible, positions)
            x = x + attended
            x = x + self._feed(self._norm(x, name + "post_attention_layernorm.", None)[0], name)
        return PlainPrefix(tokens, mask, keys, values, inputs["state"].to(self.dtype))

    def velocity(self, prefix: PlainPrefix, x: Tensor, time: float | Tensor) -> Tensor:
        """[B, H, A]: state token and actions together, each seeing what its block may.

        :param time: of all actions, or of each, [B, H].
        """
        o = self.o
        embedded = self._time(time)
        tokens = self._linear(x.to(self.dtype), "action_in_proj")
        condition = None
        if o.variant == "pi0":
            both = torch.cat((tokens, embedded.expand(*tokens.shape[:2], -1)), dim=-1)
            tokens = self._linear(functional.silu(self._linear(both, "action_time_mlp_in")), "action_time_mlp_out")
            tokens = torch.cat((self._linear(prefix.state, "state_proj")[:, None], tokens), dim=1)
        else:
            inner = functional.silu(self._linear(embedded, "time_mlp_in"))
            condition = functional.silu(self._linear(inner, "time_mlp_out"))
        hidden = self._suffix(prefix, tokens, condition)
        return self._linear(hidden[:, -o.action_horizon :], "action_out_proj")

    def _suffix(self, prefix: PlainPrefix, x: Tensor, condition: Tensor | None) -> Tensor:
        count = x.shape[1]
        among = torch.ones(count, count, dtype=torch.bool)
        if self.o.variant == "pi0":
            among[0, 1:] = False  # the state token sees no action
        batch = len(x)
        visible = torch.cat((prefix.mask[:, None].expand(-1, count, -1), among.expand(batch, -1, -1)), dim=2)
        positions = prefix.mask.sum(dim=1, keepdim=True) + torch.arange(count)
        for i in range(self.o.depth):
            name = f"{EXPERT}layers.{i}."
            normed, gate = self._norm(x, name + "input_layernorm.", condition)
            keys = self._rotate(self._heads(normed, name + "self_attn.k_proj"), positions)
            values = self._heads(normed, name + "self_attn.v_proj")
            keys, values = (
                torch.cat((prefix.keys[i], keys), dim=2),
                torch.cat((prefix.values[i], values), dim=2),
            )
            x = x + gate * self._attend(normed, name, keys, values, visible, positions)
            normed, gate = self._norm(x, name + "post_attention_layernorm.", condition)
            x = x + gate * self._feed(normed, name)
        return self._norm(x, EXPERT + "norm.", condition)[0]

    def _see(self, images: Tensor) -> Tensor:
        """[B, 3, h, w] -> [B, tokens, vis_width]."""
        patch = VISION + "embeddings.patch_embedding."
        weight, bias = self.tensors[patch + "weight"], self.tensors[patch + "bias"]
        patches = functional.conv2d(images.to(self.dtype), weight, bias, stride=self.o.patch)
        x = patches.flatten(2).transpose(1, 2) + self.tensors[VISION + "embeddings.position_embedding.weight"]
        for i in range(self.o.vis_depth):
            name = f"{VISION}encoder.layers.{i}."
            normed = self._layer_norm(x, name + "layer_norm1")
            q, k, v = (self._split(self._linear(normed, f"{name}self_attn.{p}_proj"), self.o.vis_heads) for p in "qkv")
            weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
            x = x + self._linear((weights @ v).transpose(1, 2).flatten(2), name + "self_attn.out_proj")
            inner = functional.gelu(
                self._linear(self._layer_norm(x, name + "layer_norm2"), name + "mlp.fc1"), approximate="tanh"
            )
            x = x + self._linear(inner, name + "mlp.fc2")
        return self._layer_norm(x, VISION + "post_layernorm")

    def _project(self, x: Tensor) -> Tensor:
        return self._linear(x, GEMMA + "model.multi_modal_projector.linear")

    def _time(self, time: float | Tensor) -> Tensor:
        """[..., exp_width]: sines, then cosines, rounded to fp32 as the reference does."""
        half = self.o.exp_width // 2
        fraction = torch.linspace(0, 1, half, dtype=torch.float64)
        period = self.o.min_period * (self.o.max_period / self.o.min_period) ** fraction
        angle = torch.as_tensor(time, dtype=torch.float64)[..., None] * (1.0 / period * 2.0 * math.pi)
        return torch.cat((angle.sin(), angle.cos()), dim=-1).float().to(self.dtype)

    def _attend(
        self, normed: Tensor, name: str, keys: Tensor, values: Tensor, visible: Tensor, positions: Tensor
    ) -> Tensor:
        """:param visible: [B, Q, K] bool."""
        query = self._rotate(self._heads(normed, name + "self_attn.q_proj"), positions)
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        logits = query @ keys.transpose(-1, -2) / math.sqrt(self.o.head_dim)
        weights = torch.softmax(logits.masked_fill(~visible[:, None], -2.3819763e38), dim=-1)
        return self._linear((weights @ values).transpose(1, 2).flatten(2), name + "self_attn.o_proj")

    def _feed(self, normed: Tensor, name: str) -> Tensor:
        gate = functional.gelu(self._linear(normed, name + "mlp.gate_proj"), approximate="tanh")
        return self._linear(gate * self._linear(normed, name + "mlp.up_proj"), name + "mlp.down_proj")

    def _norm(self, x: Tensor, name: str, condition: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """The normed stream, and what gates the sub-layer behind it."""
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
        if condition is None:
            return normed * (1.0 + self.tensors[name + "weight"]), 1.0
        scale, shift, gate = self._linear(condition, name + "dense").chunk(3, dim=-1)
        return normed * (1.0 + scale) + shift, gate

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], *(self.tensors[f"{name}.{p}"] for p in ("weight", "bias")), 1e-6)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[name + ".weight"], self.tensors.get(name + ".bias"))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        projected = self._linear(x, name)
        return self._split(projected, projected.shape[-1] // self.o.head_dim)

    @staticmethod
    def _split(x: Tensor, heads: int) -> Tensor:
        """[B, S, heads*D] -> [B, heads, S, D]."""
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """:param x: [B, heads, S, D], pairs (i, i + D/2)."""
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
