"""pi0 and pi0.5: vision-language prefix, flow-matching action expert, without what can be left out exactly.

Shapes: B batch, C cameras, T tokens per camera, P prompt tokens, L valid prefix tokens of the longest row, H actions,
A action_dim, N steps. The formulas are those of openpi's PyTorch classes. Each saving is explained where it is made:
merged and folded weights in weights/pi.py, padding and masked cameras in pi_compact.py, K/V in backbones/gemma.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from phyai_kernels import backward, reference
from phyai_kernels.reference import CodedLayer, Ends, Norm
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.config import ModelConfig, convert
from phyai_engine.errors import ConfigError, EngineError
from phyai_engine.layers.coded import CodedLinear
from phyai_engine.layers.ops import BACK, REFERENCE, Ops, load_ops
from phyai_engine.layers.rotary import Rotary, inverse_frequencies, rotary_table
from phyai_engine.layers.tape import Tape
from phyai_engine.models import Work, pi_compact
from phyai_engine.models.backbones.gemma import GemmaOptions, GemmaStack, Norms, Span
from phyai_engine.models.backbones.siglip import Siglip, SiglipOptions
from phyai_engine.models.pi_coded import check_device, code, code_expert
from phyai_engine.models.pi_compact import BatchShape, arrange
from phyai_engine.models.pi_options import PiOptions, images_of
from phyai_engine.models.pi_shapes import op_shapes, vision_dtype
from phyai_engine.models.pi_work import phase_work
from phyai_engine.types import BufferSpec, ModelSpec
from phyai_engine.weights.header import Shape, stored_tensors
from phyai_engine.weights.loading import check_tensors, device_of, stream_tensors
from phyai_engine.weights.pi import Place, fill, fold, places, random_stream
from phyai_engine.weights.pi_names import canonical

__all__ = ["PiModel", "PiOptions", "PiPrefix", "op_shapes", "time_embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class PiPrefix:
    """What the denoising steps need of one batch of observations; the same for every step.

    :param mask: [B, C*T + P] bool, valid tokens of the padded prefix. Column j of row b in the slab is the j-th of
        them; pi0's state token follows, then the actions.
    :param actions: the slab, and where the actions go in it; each step overwrites their K/V.
    """

    mask: Tensor
    actions: Span


def time_embedding(times: tuple[float, ...], options: PiOptions) -> Tensor:
    """[N, exp_width] fp32: sines, then cosines; periods geometric between the two; angles in fp64."""
    fraction = torch.linspace(0.0, 1.0, options.exp_width // 2, dtype=torch.float64, device="cpu")
    period = options.min_period * (options.max_period / options.min_period) ** fraction
    t = torch.tensor(times, dtype=torch.float64, device="cpu")
    angle = t[:, None] * (1.0 / period * 2.0 * math.pi)
    return torch.cat((angle.sin(), angle.cos()), dim=1).float()


class PiModel(nn.Module):
    """One pi0 or pi0.5 network with its weights. Made by ``load``, ``from_state`` or ``random``.

    Parameters are the towers' matrices (``options.dtype``), norms, patch, position and heads (fp32); ``modulation`` or
    ``time_rows`` is made of the checkpoint at load.
    """

    spec: ModelSpec
    ops: Ops
    rotary: Rotary  # of every position that a prefix or its actions can have, [P, D/2]
    positions: Tensor  # 0 to P - 1
    modulation: Tensor
    time_rows: Tensor
    moved: Sequence[Tensor]  # of pi0.5's expert, where a form of it reads them: norm -> ``Norm.moved`` of each step
    coded: Sequence[CodedLayer]  # the expert's layers in eight bits, beside its own; empty where nothing runs them

    def __init__(self, options: PiOptions) -> None:
        super().__init__()
        o = self.options = options
        self.spec = options.spec()
        self.ops = Ops()
        self.moved, self.coded = (), ()
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        pi0, width, vision = options.variant == "pi0", options.exp_width, vision_dtype(options, self.dtype)
        self.vision = Siglip(
            SiglipOptions(o.vis_width, o.vis_depth, o.vis_mlp, o.vis_heads, o.image_size, o.patch), vision
        )
        self.projector = nn.Linear(o.vis_width, o.width, dtype=vision)
        self.embedding = nn.Parameter(torch.empty(o.vocab, o.width, dtype=self.dtype))
        heads = (o.heads, o.kv_heads, o.head_dim)
        self.language = GemmaStack(GemmaOptions(o.width, o.depth, o.mlp, *heads, keys_values_only=True), self.dtype)
        self.expert = GemmaStack(GemmaOptions(width, o.depth, o.exp_mlp, *heads, norms=pi0), self.dtype)
        self.action_in = nn.Linear(o.action_dim, width, bias=not pi0)
        self.action_out = nn.Linear(width, o.action_dim)
        if pi0:
            self.state_in = nn.Linear(o.action_dim, width)
            self.time_mlp_out = nn.Linear(width, width)
            self.register_buffer("time_rows", torch.empty(o.num_steps + 1, width))
        else:
            self.register_buffer("modulation", torch.empty(o.num_steps + 1, 2 * o.depth + 1, 3, width))

    @staticmethod
    def expected(options: PiOptions) -> dict[str, Shape]:
        """Canonical name and shape of every tensor that a checkpoint must hold; nothing else is in its way."""
        return {name: place.shape for name, place in places(options).items()}

    @classmethod
    def load(cls, config: ModelConfig) -> PiModel:
        """The model that a model file describes; seeded random weights where it names no checkpoint.

        :raises ConfigError: unknown or wrong options, or a device that is not there.
        :raises WeightsError: the checkpoint does not fit them; told from its headers, before a tensor is read.
        :raises EngineError: the accelerator's memory is too small.
        """
        options = convert({"variant": config.family, **config.options}, PiOptions, where="options")
        if options.variant != config.family:
            raise ConfigError("options.variant contradicts the family", got=options.variant, wanted=config.family)
        device = device_of(config.device)
        if "images" not in config.options:
            options = structs.replace(options, images=images_of(config.resize))
        check_device(options, device)
        gradient = config.rtc.guide.differentiates(0)
        if not config.checkpoint:
            return cls.random(options, config.seed, device=device, gradient=gradient)
        folder, table = Path(config.checkpoint), places(options)
        stored = stored_tensors(folder)
        names = canonical(stored, where=folder)
        check_tensors(((names[own], stored[own]) for own in names), cls.expected(options), where=folder)
        read = {own: name for own, name in names.items() if table[name].read}
        tensors = stream_tensors(folder, read)
        return cls._filled(options, tensors, table, device, where=folder, checkpoint=folder, gradient=gradient)

    @classmethod
    def from_state(
        cls,
        options: PiOptions,
        tensors: Mapping[str, Tensor],
        *,
        where: object = None,
        device: str | torch.device = "cpu",
    ) -> PiModel:
        """A model with a checkpoint's weights.

        :param tensors: checkpoint names, in any spelling, -> tensors. :param where: their origin, for messages.
        :raises WeightsError: naming every tensor that is missing, unexpected or mis-shaped.
        """
        names = canonical(tensors, where=where)
        pairs = [(name, tensors[own]) for own, name in names.items()]
        check_tensors(pairs, cls.expected(options), where=where)
        return cls._filled(options, pairs, places(options), torch.device(device), where=where)

    @classmethod
    def random(
        cls, options: PiOptions, seed: int, *, device: str | torch.device = "cpu", gradient: bool = True
    ) -> PiModel:
        """An untrained model: its actions are finite, bounded, smooth and depend on the observation.

        :param gradient: guidance will ask for the action head's; without it the fused way back is not looked for.
        """
        times = options.spec().times
        dtype: torch.dtype = getattr(torch, options.dtype)
        made = random_stream(cls.expected(options), seed, times, time_embedding(times, options), dtype)
        where = f"random weights, seed {seed}"
        return cls._filled(options, made, places(options), torch.device(device), where=where, gradient=gradient)

    @classmethod
    def _filled(
        cls,
        options: PiOptions,
        tensors: Iterable[tuple[str, Tensor]],
        table: Mapping[str, Place],
        device: torch.device,
        *,
        where: object,
        checkpoint: Path | None = None,
        gradient: bool = True,
    ) -> PiModel:
        """Allocate the merged parameters, then write into them what comes, tensor by tensor.

        :param checkpoint: the folder they come from; what else belongs to them lies there. :param gradient: as random.
        """
        with torch.device("meta"):
            model = cls(options)
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 2**30
        try:
            model.to_empty(device=device).requires_grad_(False).eval()
        except torch.OutOfMemoryError as error:
            raise EngineError(
                "the weights do not fit into the accelerator's memory",
                got=str(error).partition(". GPU")[0],
                wanted=f"{size:.1f} GiB free",
                where=where,
                do="End what else uses it (nvidia-smi), or choose `dtype: bfloat16` or `device: cpu`.",
            ) from None
        own = model.state_dict()
        folded = fill(own, tensors, table, where=where)
        times = (*model.spec.times, 0.0)  # the last: of tokens that are data already
        for name, tensor in fold(folded, options, time_embedding(times, options)).items():
            own[name].copy_(tensor)
        own["embedding"].mul_(options.width**0.5)  # rounded once, as a product with the looked-up row would be
        prefix = len(options.cameras) * options.image_tokens + options.prompt_len + options.state_tokens
        model.positions = torch.arange(prefix + options.action_horizon, device=device)
        frequencies = inverse_frequencies(options.head_dim, options.rope_theta).to(device)
        model.rotary = rotary_table(model.positions, frequencies)
        scales = None if options.quant == "none" else code(model, checkpoint)
        shapes = [shape for shape in op_shapes(options, model.dtype) if gradient or shape.op not in BACK]
        model.ops = load_ops(options.kernels, device=device, shapes=shapes)
        if scales is not None:
            code_expert(model, scales)
        if options.variant == "pi05" and (model.coded or model.ops.stack is not reference.stack):
            model.moved = model.moved_shifts()
        return model

    def moved_shifts(self) -> list[Tensor]:
        """``Norm.moved`` of pi0.5's expert: of each norm but the last [N + 1, outputs]; the last row is of time 0."""
        return [self.modulation[:, i, 1] @ behind.float().T for i, behind in enumerate(self.expert.behind_norms())]

    def to_device(self, array: NDArray[np.generic]) -> Tensor:
        """See :class:`phyai_engine.models.Model`."""
        return torch.tensor(array, device=self.positions.device)

    def to_host(self, array: Tensor) -> NDArray[np.generic]:
        """See :class:`phyai_engine.models.Model`; bfloat16, which NumPy does not have, becomes float32."""
        host: NDArray[np.generic] = (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()
        return host

    def captured_shapes(self, batches: Sequence[int]) -> list[BatchShape]:
        """See :class:`phyai_engine.models.Capturable`."""
        on_accelerator = self.positions.device.type == "cuda"
        wanted = on_accelerator and self.options.graphs == "auto"
        return pi_compact.captured_shapes(self.options, batches) if wanted else []

    def shape_of(self, rows: Sequence[pi_compact.Inputs]) -> BatchShape:
        """See :class:`phyai_engine.models.Capturable`."""
        image_masks, token_masks = ([row[name] for row in rows] for name in ("image_mask", "token_mask"))
        return pi_compact.shape_of(image_masks, token_masks, self.options.image_tokens)

    def staged(self, shape: BatchShape) -> dict[str, BufferSpec]:
        """See :class:`phyai_engine.models.Capturable`."""
        return pi_compact.staged(self.options, shape)

    def stage(self, shape: BatchShape, rows: Sequence[pi_compact.Inputs], into: Mapping[str, NDArray[Any]]) -> None:
        """See :class:`phyai_engine.models.Capturable`."""
        pi_compact.stage(self.options, shape, rows, into)

    def work(self, rows: Sequence[pi_compact.Inputs]) -> Mapping[str, Work]:
        """See :class:`phyai_engine.models.Counted`."""
        o, size = self.options, self.dtype.itemsize
        expert = [matrix.weight for layer in self.coded for matrix in layer] if self._takes_codes(len(rows)) else []
        prefix = [module.weight for module in self.language.modules() if isinstance(module, CodedLinear)]
        coded = {"prefix": sum(map(torch.numel, prefix)), "step": sum(map(torch.numel, expert))}
        return phase_work(o, self.shape_of(rows), size, vision_dtype(o, self.dtype).itemsize, coded)

    @torch.no_grad()
    def prefix(self, inputs: Mapping[str, Any], on_phase: Callable[[str], None] = lambda _: None) -> PiPrefix:
        """Encode images and prompt, and keep K and V of every layer; pi0's state token is part of it.

        Waits for the device once, to learn which cameras are there and how long the longest row is.

        :param inputs: ``images`` [B,C,3,h,w] in [-1,1] or bytes [B,C,h,w,3], ``image_mask`` [B,C], ``tokens`` [B,P],
            ``token_mask`` [B,P], and for pi0 ``state`` [B,A].
        :param on_phase: told ``vision`` and ``prefix``.
        """
        return self.encode(self.arranged(inputs), on_phase)

    def arranged(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs as ``encode`` takes them, in the smallest shape that holds them."""
        image_mask, token_mask = (inputs[name].cpu().numpy() for name in ("image_mask", "token_mask"))
        layout = arrange(image_mask, token_mask, self.options.image_tokens)
        made = {name: self.to_device(getattr(layout, name)) for name in ("mask", "source", "valid")}
        # What stands under a false mask may be anything, and beyond the vocabulary.
        made["tokens"] = inputs["tokens"].masked_fill(~inputs["token_mask"], 0)
        made["images"] = inputs["images"].flatten(0, 1)[self.to_device(layout.present)]
        return made | ({"state": inputs["state"]} if self.options.variant == "pi0" else {})

    @torch.no_grad()
    def encode(self, staged: Mapping[str, Tensor], on_phase: Callable[[str], None] = lambda _: None) -> PiPrefix:
        """The prefix of arranged inputs; see :class:`phyai_engine.models.Capturable`.

        :param staged: as ``staged`` lists them.
        """
        x = self.embed(staged, on_phase)
        o, (batch, length), valid = self.options, x.shape[:2], staged["valid"]
        slab = (o.depth, batch, o.kv_heads, length + o.state_tokens + o.action_horizon, o.head_dim)
        keys, values = (torch.empty(slab, dtype=self.dtype, device=x.device) for _ in range(2))
        cos, sin = (part[:length].expand(batch, -1, -1) for part in self.rotary)
        span = Span(keys, values, torch.zeros_like(valid), valid.clamp(min=1), (cos, sin))
        self.language.fill(x, span, self.language.plain_norm, self.ops)
        start = valid
        if o.variant == "pi0":
            token = self.ops.linear(staged["state"], self.state_in.weight, self.state_in.bias)[:, None].to(self.dtype)
            span = replace(span, start=start, lengths=start + 1, rotary=self._rotary(start, 1))
            self.expert.fill(token, span, self.expert.plain_norm, self.ops)
            start = start + 1
        rotary = self._rotary(start, o.action_horizon)
        actions = replace(span, start=start, lengths=start + o.action_horizon, rotary=rotary)
        return PiPrefix(staged["mask"], actions)

    @torch.no_grad()
    def embed(self, staged: Mapping[str, Tensor], on_phase: Callable[[str], None] = lambda _: None) -> Tensor:
        """[B, L, width], the prefix tokens before layer 0, compact. :param staged: as ``encode`` takes them."""
        on_phase("vision")
        width, ops, pool = self.options.width, self.ops, []
        if len(staged["images"]):
            seen = self.vision(staged["images"], ops)
            projected = ops.linear(seen, self.projector.weight, self.projector.bias)
            pool.append(projected.to(self.dtype).view(-1, width))
        on_phase("prefix")
        pool.append(functional.embedding(staged["tokens"], self.embedding).view(-1, width))
        return torch.cat(pool)[staged["source"]]

    @torch.no_grad()
    def velocity(self, prefix: PiPrefix, x: Tensor, step: int, clean: Tensor | None = None) -> Tensor:
        """The expert's noise - action estimate.

        :param x: [B, H, A] fp32. :param clean: [B, H, 1] bool, tokens at flow time 0 instead of the step's.
        :return: [B, H, A] fp32.
        """
        if clean is not None and self.options.variant == "pi05":
            # A fused form takes one row of the time's tables for all tokens; the reference a row per token too.
            tokens, _ = self._into(x, step, clean)
            return self._out(self.expert(tokens, prefix.actions, self._norms(step, clean), REFERENCE))
        into = None
        if self.options.variant == "pi05":
            into = self.action_in.weight, self.action_in.bias
        else:
            x, _ = self._into(x, step, clean)
        ends = Ends(into, (self.action_out.weight, self.action_out.bias))
        coded = self.coded if clean is None and self._takes_codes(len(x)) else ()
        velocity: Tensor = self.expert(x, prefix.actions, self._norms(step, clean), self.ops, ends, coded)
        return velocity

    def _takes_codes(self, rows: int) -> bool:
        """A fused form is asked for one row, as it was checked at load; the definition takes any number."""
        return rows == 1 or self.options.kernels == "reference"

    @torch.no_grad()
    def velocity_vjp(self, prefix: PiPrefix, x: Tensor, step: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See :class:`phyai_engine.models.Model`. The bits of the velocity are those of ``velocity``, but where that
        runs a fused ``stack`` or coded layers: the tape needs the single operators, whose rounding differs.
        """
        tape = Tape(self.ops)
        tokens, inner = self._into(x, step)
        hidden = self.expert(tokens, prefix.actions, self._norms(step), tape.ops)

        @torch.no_grad()
        def pull(error: Tensor) -> Tensor:
            back = self.ops.linear_back
            grad = back(error, self.action_out.weight).to(self.dtype)
            grad = tape.pull(hidden, grad, tokens).float()
            if inner is not None:
                grad = backward.silu_back(back(grad, self.time_mlp_out.weight), inner)
            return back(grad, self.action_in.weight)

        return self._out(hidden), pull

    def _into(self, x: Tensor, step: int, clean: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The action tokens [B, H, exp_width] and, of pi0, the argument of the nonlinearity in front of them."""
        ops = self.ops
        if self.options.variant == "pi05":
            return ops.linear(x, self.action_in.weight, self.action_in.bias).to(self.dtype), None
        inner = ops.linear(x, self.action_in.weight, self.time_rows[step])
        if clean is not None:
            inner = torch.where(clean, ops.linear(x, self.action_in.weight, self.time_rows[-1]), inner)
        tokens = ops.linear(functional.silu(inner), self.time_mlp_out.weight, self.time_mlp_out.bias)
        return tokens.to(self.dtype), inner

    def _out(self, hidden: Tensor) -> Tensor:
        velocity: Tensor = self.ops.linear(hidden.float(), self.action_out.weight, self.action_out.bias)
        return velocity

    def _norms(self, step: int, clean: Tensor | None = None) -> Norms:
        """Of the action tokens: plain for pi0; pi0.5's is adaRMS with the step's rows, where clean those of time 0."""
        if self.options.variant == "pi0":
            return self.expert.plain_norm

        def norm(index: int) -> Norm:
            own = self.modulation[step, index]
            if clean is None:
                return Norm(*own, self.moved[index][step] if index < len(self.moved) else None)
            return Norm(
                *(torch.where(clean, zero, row) for zero, row in zip(self.modulation[-1, index], own, strict=True))
            )

        return norm

    def _rotary(self, start: Tensor, count: int) -> Rotary:
        """Of ``count`` tokens per row from position ``start`` [B] on."""
        place = start[:, None] + self.positions[:count]
        cos, sin = self.rotary
        return cos[place], sin[place]
