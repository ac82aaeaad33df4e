"""pi0 and pi0.5: vision-language prefix, flow-matching action expert. The plain forward pass.

Shapes: B batch, C cameras, P prompt tokens, L = C * tokens per image + P prefix tokens, A action_dim, S
suffix
tokens (H actions; pi0 has one state token before them). The formulas are those of openpi's PyTorch classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from msgspec import Meta, Struct
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.config import ModelConfig, convert
from phyai_engine.errors import ConfigError
from phyai_engine.layers.rotary import inverse_frequencies, rotary_table
from phyai_engine.models.backbones.gemma import GemmaExpert, GemmaOptions, GemmaPrefix, Rotary
from phyai_engine.models.backbones.siglip import Siglip, SiglipOptions
from phyai_engine.solvers import flow_times
from phyai_engine.types import BufferSpec, ModelSpec
from phyai_engine.weights import pi as names
from phyai_engine.weights.loading import Shape, check_tensors, read_tensors

Count = Annotated[int, Meta(ge=1)]

_MIN_PERIOD, _MAX_PERIOD = 4e-3, 4.0  # of the time embedding's sinusoids, in flow time


class PiOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Dimensions and conventions; the defaults are the released pi0.5.

    :param vis_width: ``vis_*`` are SigLIP's, ``width mlp`` the prefix stack's, ``exp_*`` the action expert's;
        ``depth heads kv_heads head_dim`` hold for both stacks.
    :param prompt_len: P, tokens of the padded prompt (released pi0: 48). :param image_size: pixels, square.
    :param cameras: roles in the order in which they enter the prefix.
    :param dtype: of the towers' matrices and activations; norms, action heads and the actions stay float32.
    :param time_rule: how the flow times are rounded: ``accumulate`` (openpi) or ``direct`` (lerobot).
    """

    variant: Literal["pi0", "pi05"] = "pi05"
    vocab: Count = 257152
    vis_width: Count = 1152
    vis_depth: Count = 27
    vis_mlp: Count = 4304
    vis_heads: Count = 16
    width: Count = 2048
    depth: Count = 18
    mlp: Count = 16384
    heads: Count = 8
    kv_heads: Count = 1
    head_dim: Count = 256
    exp_width: Count = 1024
    exp_mlp: Count = 4096
    action_dim: Count = 32
    action_horizon: Count = 50
    num_steps: Count = 10
    prompt_len: Count = 200
    rope_theta: Annotated[float, Meta(gt=1)] = 10000.0
    image_size: Count = 224
    patch: Count = 14
    cameras: Annotated[tuple[str, ...], Meta(min_length=1)] = (
        "base_0_rgb",
        "left_wrist_0_rgb",
        "right_wrist_0_rgb",
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    time_rule: Literal["accumulate", "direct"] = "accumulate"

    def __post_init__(self) -> None:
        rules = (
            (self.vis_width % self.vis_heads == 0, "vis_width must be a multiple of vis_heads"),
            (self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads"),
            (self.head_dim % 2 == 0, "head_dim must be even (rotary pairs)"),
            (
                self.exp_width % 2 == 0 and self.exp_width >= 4,
                "exp_width must be even and at least 4 (sine and cosine)",
            ),
            (self.image_size >= self.patch, "image_size must be at least one patch"),
            (len(set(self.cameras)) == len(self.cameras), "cameras must differ"),
        )
        for holds, rule in rules:
            if not holds:
                raise ValueError(rule)

    @property
    def vision(self) -> SiglipOptions:
        """The vision tower's dimensions."""
        return SiglipOptions(self.vis_width, self.vis_depth, self.vis_mlp, self.vis_heads, self.image_size, self.patch)

    @property
    def language(self) -> GemmaOptions:
        """The prefix stack's dimensions."""
        return GemmaOptions(self.width, self.depth, self.mlp, self.heads, self.kv_heads, self.head_dim)

    @property
    def expert(self) -> GemmaOptions:
        """The action expert's dimensions."""
        adaptive = self.variant == "pi05"
        return GemmaOptions(
            self.exp_width, self.depth, self.exp_mlp, self.heads, self.kv_heads, self.head_dim, adaptive
        )


@dataclass(frozen=True, slots=True, eq=False)
class PiPrefix:
    """What the denoising steps need of one batch of observations; the same for every step.

    :param cache: per layer K (rotated) and V, [B, kv_heads, L, head_dim].
    :param mask: [B, L] bool, valid prefix tokens. :param suffix_mask: [B, S, L+S] bool.
    :param rotary: cos and sin of the suffix positions.
    :param state: pi0's state token, [B, 1, exp_width] fp32; None for pi0.5.
    """

    cache: tuple[tuple[Tensor, Tensor], ...]
    mask: Tensor
    suffix_mask: Tensor
    rotary: Rotary
    state: Tensor | None


def time_embedding(times: tuple[float, ...], width: int) -> Tensor:
    """[N, width] fp32: sines, then cosines; periods geometric from 4e-3 to 4; angles in fp64."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device="cpu")
    period = _MIN_PERIOD * (_MAX_PERIOD / _MIN_PERIOD) ** fraction
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    angle = t[:, None] * (1.0 / period * 2.0 * math.pi)
    return torch.cat((angle.sin(), angle.cos()), dim=1).float()


class PiModel(nn.Module):
    """One pi0 or pi0.5 network with its weights. Made by ``load``, ``from_state`` or ``random``."""

    spec: ModelSpec
    rotary_frequencies: Tensor
    time_table: Tensor

    def __init__(self, options: PiOptions) -> None:
        super().__init__()
        self.options = options
        self.spec = _spec(options)
        self.compute_dtype: torch.dtype = getattr(torch, options.dtype)
        width, action_dim = options.exp_width, options.action_dim
        self.vision = Siglip(options.vision)
        self.projector = nn.Linear(options.vis_width, options.width)
        self.embedding = nn.Embedding(options.vocab, options.width)
        self.language = GemmaPrefix(options.language)
        self.expert = GemmaExpert(options.expert)
        self.action_in_proj = nn.Linear(action_dim, width)
        self.action_out_proj = nn.Linear(width, action_dim)
        if options.variant == "pi0":
            self.state_proj = nn.Linear(action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        else:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        frequencies = inverse_frequencies(options.head_dim, options.rope_theta)
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)
        self.register_buffer("time_table", time_embedding(self.spec.times, width), persistent=False)

    @classmethod
    def load(cls, config: ModelConfig) -> PiModel:
        """The model that a model file describes; seeded random weights where it names no checkpoint.

        :raises ConfigError: unknown or wrong options. :raises WeightsError: the checkpoint does not fit them.
        """
        options = convert({"variant": config.family, **config.options}, PiOptions, where="options")
        if options.variant != config.family:
            raise ConfigError("options.variant contradicts the family", got=options.variant, wanted=config.family)
        if not config.checkpoint:
            return cls.random(options, config.seed)
        folder = Path(config.checkpoint)
        return cls.from_state(options, read_tensors(folder), where=folder)

    @classmethod
    def from_state(
        cls, options: PiOptions, tensors: Mapping[str, Tensor], *, where: object = None, device: str = "cpu"
    ) -> PiModel:
        """A model with a checkpoint's weights.

        :param tensors: checkpoint names -> tensors. :param where: their origin, for messages.
        :raises WeightsError: naming every tensor that is missing, unexpected or mis-shaped.
        """
        model = _skeleton(options)
        tensors = names.canonical_tensors(tensors, where=where)
        check_tensors(tensors, _shapes(model), where=where)
        state = {
            own: tensors[names.checkpoint_name(own)].to(
                device=device, dtype=names.parameter_dtype(own, model.compute_dtype)
            )
            for own in model.state_dict()
        }
        model.load_state_dict(state, strict=True, assign=True)
        return model.requires_grad_(False).to(device).eval()

    @classmethod
    def random(cls, options: PiOptions, seed: int, *, device: str = "cpu") -> PiModel:
        """An untrained model: its actions are finite, bounded, smooth and depend on the observation."""
        skeleton = _skeleton(options)
        tensors = names.random_tensors(_shapes(skeleton), seed, skeleton.spec.times, skeleton.time_table)
        return cls.from_state(options, tensors, where=f"random weights, seed {seed}", device=device)

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """See :class:`phyai_engine.models.Model`."""
        return torch.tensor(array, device=self.rotary_frequencies.device)

    def to_host(self, array: Tensor) -> NDArray[np.generic]:
        """See :class:`phyai_engine.models.Model`; bfloat16, which NumPy does not have, becomes float32."""
        host: NDArray[np.generic] = (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()
        return host

    @torch.no_grad()
    def prefix(self, inputs: Mapping[str, Any]) -> PiPrefix:
        """Encode images and prompt, and keep K and V of every layer.

        :param inputs: ``images`` [B,C,3,h,w] in [-1,1], ``image_mask`` [B,C], ``tokens`` [B,P],
            ``token_mask`` [B,P], and for pi0 ``state`` [B,A].
        """
        tokens, mask = self.embed(inputs)
        positions = mask.cumsum(dim=1) - 1  # masked tokens take no position
        visible = mask[:, None, :] & mask[:, :, None]
        cache = self.language(tokens, visible, rotary_table(positions, self.rotary_frequencies))
        state = self.state_proj(inputs["state"])[:, None] if self.options.variant == "pi0" else None
        length = self.options.action_horizon + (state is not None)
        suffix = mask.sum(dim=1, keepdim=True) + torch.arange(length, device=mask.device)
        return PiPrefix(
            cache=cache,
            mask=mask,
            suffix_mask=_suffix_mask(mask, length, state_first=state is not None),
            rotary=rotary_table(suffix, self.rotary_frequencies),
            state=state,
        )

    @torch.no_grad()
    def embed(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The prefix tokens before layer 0: cameras in order, then the prompt.

        Content under a false mask is replaced before use: garbage there, a NaN above all, would reach valid
        tokens as 0 * NaN.

        :return: tokens [B, L, width] and their validity [B, L] bool.
        """
        images, image_mask = inputs["images"], inputs["image_mask"]
        images = images.masked_fill(~image_mask[:, :, None, None, None], 0.0)
        batch, cameras = image_mask.shape
        seen = self.projector(self.vision(images.flatten(0, 1), self.compute_dtype))
        seen = seen.view(batch, -1, self.options.width)
        said = self.embedding(inputs["tokens"].masked_fill(~inputs["token_mask"], 0)) * self.options.width**0.5
        mask = image_mask.repeat_interleave(seen.shape[1] // cameras, dim=1)
        return torch.cat((seen, said), dim=1), torch.cat((mask, inputs["token_mask"]), dim=1)

    @torch.no_grad()
    def velocity(self, prefix: PiPrefix, x: Tensor, step: int) -> Tensor:
        """The expert's noise - action estimate. :param x: [B, H, A] fp32. :return: [B, H, A] fp32."""
        time = self.time_table[step : step + 1]
        condition: Tensor | None = None
        tokens = self.action_in_proj(x)
        if prefix.state is None:
            condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(time))))
        else:
            timed = torch.cat((tokens, time.expand(*tokens.shape[:2], -1)), dim=-1)
            tokens = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(timed)))
            tokens = torch.cat((prefix.state, tokens), dim=1)
        hidden = self.expert(tokens.to(self.compute_dtype), prefix.cache, prefix.suffix_mask, prefix.rotary, condition)
        out: Tensor = self.action_out_proj(hidden[:, -x.shape[1] :].float())
        return out


def _spec(options: PiOptions) -> ModelSpec:
    cameras, size = len(options.cameras), options.image_size
    inputs = {
        "images": BufferSpec((cameras, 3, size, size), "float32"),
        "image_mask": BufferSpec((cameras,), "bool"),
        "tokens": BufferSpec((options.prompt_len,), "int64"),
        "token_mask": BufferSpec((options.prompt_len,), "bool"),
    }
    if options.variant == "pi0":
        inputs["state"] = BufferSpec((options.action_dim,), "float32")
    return ModelSpec(
        family=options.variant,
        horizon=options.action_horizon,
        action_dim=options.action_dim,
        times=flow_times(options.num_steps, options.time_rule),
        inputs=inputs,
        cameras=options.cameras,
        vocabulary=options.vocab,
    )


def _suffix_mask(prefix_mask: Tensor, length: int, *, state_first: bool) -> Tensor:
    """[B, S, L+S] bool: suffix tokens see the valid prefix and each other; the state token sees no action."""
    among = torch.ones((length, length), dtype=torch.bool, device=prefix_mask.device)
    if state_first:
        among[0, 1:] = False
    batch = prefix_mask.shape[0]
    before = prefix_mask[:, None, :].expand(-1, length, -1)
    return torch.cat((before, among.expand(batch, -1, -1)), dim=2)


def _skeleton(options: PiOptions) -> PiModel:
    """The network without storage: weights are assigned, so a full-size model is never initialised twice."""
    with torch.device("meta"):
        return PiModel(options)


def _shapes(model: PiModel) -> dict[str, Shape]:
    """Checkpoint name -> shape of every parameter."""
    return {names.checkpoint_name(own): tuple(t.shape) for own, t in model.state_dict().items()}
