"""pi0 and pi0.5 weights: where each checkpoint tensor goes, what is folded at load, and seeded random weights.

Parameters are the merged ones that the model computes with (``qkv``, ``gate_up``, ``norms``); checkpoint tensors are
written into their rows as they come, so that nothing of full size stands in memory twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from phyai_engine.errors import WeightsError
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.weights.header import Shape
from phyai_engine.weights.pi_names import EMBEDDING, EXPERT, LANGUAGE, PALIGEMMA, TIED_EMBEDDING, VISION

_LAYERS = EXPERT + "model.layers."
_FINAL = EXPERT + "model.norm."
_ROWS = 1 << 14  # of the embedding, compared at a time


@dataclass(frozen=True, slots=True)
class Place:
    """Where one checkpoint tensor goes.

    :param shape: as the checkpoint has it.
    :param own: the model's parameter. Empty: none.
    :param row: its first row there; the tensor is flattened to rows as wide as the parameter's.
    :param folded: it is not kept: ``fold`` makes tables of it. With neither, inference never reads it.
    """

    shape: Shape
    own: str = ""
    row: int = 0
    folded: bool = False

    @property
    def read(self) -> bool:
        """Its values matter."""
        return bool(self.own) or self.folded


def places(options: PiOptions) -> dict[str, Place]:
    """Canonical name -> place, of every tensor that a checkpoint of this size must hold and no other."""
    table = {**_vision(options), **_language(options), **_expert(options)}
    width, dim = options.exp_width, options.action_dim
    if options.variant == "pi0":
        table |= _affine("state_proj", (width, dim), "state_in")
        table |= _affine("action_in_proj", (width, dim))
        table |= _affine("action_time_mlp_in", (width, 2 * width))
        table |= _affine("action_time_mlp_out", (width, width), "time_mlp_out")
    else:
        table |= _affine("action_in_proj", (width, dim), "action_in")
        table |= _affine("time_mlp_in", (width, width)) | _affine("time_mlp_out", (width, width))
    return table | _affine("action_out_proj", (dim, width), "action_out")


def _affine(name: str, shape: Shape, own: str = "", row: int = 0) -> dict[str, Place]:
    """Weight and bias; without ``own`` they are folded."""
    sizes = {"weight": shape, "bias": shape[:1]}
    return {
        f"{name}.{kind}": Place(size, f"{own}.{kind}" if own else "", row, folded=not own)
        for kind, size in sizes.items()
    }


def _vision(o: PiOptions) -> dict[str, Place]:
    width = o.vis_width
    table = _affine(VISION + "embeddings.patch_embedding", (width, 3, o.patch, o.patch), "vision.patch")
    table[VISION + "embeddings.position_embedding.weight"] = Place((o.image_tokens, width), "vision.position")
    for i in range(o.vis_depth):
        theirs, ours = f"{VISION}encoder.layers.{i}.", f"vision.layers.{i}."
        for j, letter in enumerate("qkv"):
            table |= _affine(f"{theirs}self_attn.{letter}_proj", (width, width), ours + "qkv", j * width)
        table |= _affine(theirs + "self_attn.out_proj", (width, width), ours + "out")
        table |= _affine(theirs + "mlp.fc1", (o.vis_mlp, width), ours + "fc1")
        table |= _affine(theirs + "mlp.fc2", (width, o.vis_mlp), ours + "fc2")
        for norm in ("layer_norm1", "layer_norm2"):
            table |= _affine(theirs + norm, (width,), ours + norm)
    table |= _affine(VISION + "post_layernorm", (width,), "vision.post_layernorm")
    return table | _affine(PALIGEMMA + "model.multi_modal_projector.linear", (o.width, width), "projector")


def _language(o: PiOptions) -> dict[str, Place]:
    table = {EMBEDDING: Place((o.vocab, o.width), "embedding")}
    for i in range(o.depth):
        theirs, last = f"{LANGUAGE}layers.{i}.", i + 1 == o.depth
        table |= _gemma(o, theirs, f"language.layers.{i}.", o.width, o.mlp, keys_values_only=last)
        table[theirs + "input_layernorm.weight"] = Place((o.width,), "language.norms", 2 * i)
        after = Place((o.width,)) if last else Place((o.width,), "language.norms", 2 * i + 1)
        table[theirs + "post_attention_layernorm.weight"] = after
    return table


def _expert(o: PiOptions) -> dict[str, Place]:
    table: dict[str, Place] = {}
    for i in range(o.depth):
        table |= _gemma(o, f"{_LAYERS}{i}.", f"expert.layers.{i}.", o.exp_width, o.exp_mlp)
    for j, name in enumerate(_expert_norms(o.depth)):
        if o.variant == "pi05":
            table |= _affine(name + "dense", (3 * o.exp_width, o.exp_width))
        else:
            table[name + "weight"] = Place((o.exp_width,), "expert.norms", j)
    return table


def _expert_norms(depth: int) -> list[str]:
    """Prefixes of the expert's norms, in the order of backbones.gemma.Norm."""
    both = ("input_layernorm.", "post_attention_layernorm.")
    return [*(f"{_LAYERS}{i}.{norm}" for i in range(depth) for norm in both), _FINAL]


def _gemma(
    o: PiOptions, theirs: str, ours: str, width: int, mlp: int, *, keys_values_only: bool = False
) -> dict[str, Place]:
    """The matrices of one layer; one that ends at K and V has no others."""
    queries, keys = o.heads * o.head_dim, o.kv_heads * o.head_dim
    first = 0 if keys_values_only else queries
    attention, feed = theirs + "self_attn.", theirs + "mlp."
    table = {
        attention + "q_proj.weight": Place((queries, width), ours + "qkv.weight"),
        attention + "k_proj.weight": Place((keys, width), ours + "qkv.weight", first),
        attention + "v_proj.weight": Place((keys, width), ours + "qkv.weight", first + keys),
        attention + "o_proj.weight": Place((width, queries), ours + "o.weight"),
        feed + "gate_proj.weight": Place((mlp, width), ours + "gate_up.weight"),
        feed + "up_proj.weight": Place((mlp, width), ours + "gate_up.weight", mlp),
        feed + "down_proj.weight": Place((width, mlp), ours + "down.weight"),
    }
    if keys_values_only:
        kept = (attention + "k_proj.weight", attention + "v_proj.weight")
        table = {name: place if name in kept else Place(place.shape) for name, place in table.items()}
    return table


def fill(
    parameters: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    table: Mapping[str, Place],
    *,
    where: object,
) -> dict[str, Tensor]:
    """Write checkpoint tensors into the parameters, each cast to its parameter's dtype.

    :param tensors: canonical names, complete and of the right shapes; one that comes twice must be the same.
    :return: those that ``fold`` takes, fp32 copies on the CPU.
    :raises WeightsError: the two copies of the token embedding differ.
    """
    folded: dict[str, Tensor] = {}
    placed: set[str] = set()
    for name, tensor in tensors:
        place = table[name]
        if place.folded:
            folded[name] = tensor.to(device="cpu", dtype=torch.float32, copy=True)
        elif place.own:
            _write(parameters[place.own], tensor, place.row, again=name in placed, where=where)
            placed.add(name)
        del tensor  # before the next one is read
    return folded


def _write(parameter: Tensor, tensor: Tensor, row: int, *, again: bool, where: object) -> None:
    """:param again: the rows are written already; ``tensor`` must be the same."""
    own = parameter.view(len(parameter), -1)
    rows = tensor.reshape(-1, own.shape[1])
    own = own[row : row + len(rows)]
    if again:
        _check_same(own, rows, where)
    else:
        own.copy_(rows)


def _check_same(own: Tensor, rows: Tensor, where: object) -> None:
    """The embedding is tied to the output head, and some files hold it under both names."""
    for first in range(0, len(rows), _ROWS):
        mine = own[first : first + _ROWS]
        if not torch.equal(mine, rows[first : first + _ROWS].to(mine)):
            raise WeightsError(
                "the two copies of the token embedding differ",
                got=f"{EMBEDDING} != {TIED_EMBEDDING}",
                where=where,
                do="The file was edited or merged wrongly; export it again.",
            )


def fold(folded: Mapping[str, Tensor], options: PiOptions, time_table: Tensor) -> dict[str, Tensor]:
    """What depends on the weights and the flow time alone, made once.

    pi0.5: ``modulation`` [N, 2*depth+1, 3, width], scale, shift and gate of every norm at every time; the adaRMS
    matrices and the time MLP are then needed no more. Step by step, as the unfolded model does it: the same bits.
    pi0: the action's projection and the first layer of the time MLP are one matrix, ``action_in.weight``
    [width, A], and the time's half with both biases is a row per time, ``time_rows`` [N, width]; made in fp64.

    :param time_table: [N, width] fp32, of every time that is asked for. :return: own name -> fp32 on the CPU.
    """
    if options.variant == "pi0":
        into, bias = (folded[f"action_in_proj.{kind}"].double() for kind in ("weight", "bias"))
        first, first_bias = (folded[f"action_time_mlp_in.{kind}"].double() for kind in ("weight", "bias"))
        action, time = first.chunk(2, dim=1)
        rows = time_table.double() @ time.T + (action @ bias + first_bias)
        return {"action_in.weight": (action @ into).float(), "time_rows": rows.float()}
    norms = _expert_norms(options.depth)
    table = torch.empty(len(time_table), len(norms), 3, options.exp_width)
    for k in range(len(time_table)):
        condition = time_table[k : k + 1]
        for name in ("time_mlp_in", "time_mlp_out"):
            condition = functional.silu(functional.linear(condition, folded[name + ".weight"], folded[name + ".bias"]))
        for j, name in enumerate(norms):
            dense = functional.linear(condition, folded[name + "dense.weight"], folded[name + "dense.bias"])
            table[k, j] = dense.view(3, -1)
    return {"modulation": table}


# --- seeded random weights ---

# Least length of the anchor channel over a typical action's: the final norm's divisor hardly depends on x.
_ANCHOR = 4.0
_BLOCK = 1 << 26  # elements; above this a tensor is made in parts, which changes what its seed means
# Damping of the expert's sub-layers: attention carries the observation into the action, the MLP mostly an
# offset. Measured with these: pi0.5 actions within -1..1, neighbouring steps within 0.1 of each other.
_DAMPING = {"self_attn.o_proj.weight": 0.25, "mlp.down_proj.weight": 0.05}


def random_tensors(
    shapes: Mapping[str, Shape], seed: int, times: Sequence[float], time_table: Tensor
) -> dict[str, Tensor]:
    """All of ``random_stream`` at once, fp32: for small models."""
    return dict(random_stream(shapes, seed, times, time_table))


def random_stream(
    shapes: Mapping[str, Shape],
    seed: int,
    times: Sequence[float],
    time_table: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, Tensor]]:
    """Weights of an untrained model whose actions are finite, bounded, smooth, and moved by the observation.

    Plain random weights would leave the start noise in the actions. Here the action heads form a skeleton
    with v ~ (x - m) / t, m made by the (random) expert from the observation: the flow of a model that has
    learned m alone, so that sampling ends at m and guidance, which looks ahead to x - t v, finds it there.
    It needs an expert wider than the action; below that the heads are plain random, still bounded.

    :param shapes: canonical names and shapes. :param times: [N] flow times. :param time_table: [N, width]
        their embedding. :param dtype: of tensors above 2**26 elements, made block by block; the others are fp32.
    :return: names and tensors, one at a time.
    """
    generator = torch.Generator().manual_seed(seed)
    attracts = shapes["action_in_proj.weight"][0] > shapes["action_in_proj.weight"][1]
    held: dict[str, Tensor] = {}
    for name in sorted(shapes):
        if attracts and name.startswith(("action_", "time_mlp_", _FINAL)):
            held[name] = _random_tensor(name, shapes[name], generator, dtype)
        else:
            yield name, _random_tensor(name, shapes[name], generator, dtype)
    if attracts:
        _attract(held, torch.tensor(times, dtype=torch.float64), time_table.double(), generator)
        yield from held.items()


def _random_tensor(name: str, shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    if ".dense." in name:  # adaRMS: scale and shift start at 0, the gate at 1, all moved a little by the time
        noise, third = torch.randn(shape, generator=generator), shape[0] // 3
        base = torch.cat((torch.zeros(2 * third), torch.ones(third)))
        return noise * (0.1 * shape[1] ** -0.5) if name.endswith("weight") else base
    if "norm" in name:
        gain_around_one = name.startswith(VISION) and name.endswith("weight")
        return torch.randn(shape, generator=generator) * 0.1 + (1.0 if gain_around_one else 0.0)
    if name.endswith("bias"):
        return torch.randn(shape, generator=generator) * 0.02
    damping = next((d for end, d in _DAMPING.items() if name.startswith(EXPERT) and name.endswith(end)), 1.0)
    scale: float = damping * math.prod(shape[1:]) ** -0.5
    if math.prod(shape) <= _BLOCK:
        return torch.randn(shape, generator=generator) * scale
    tensor = torch.empty(shape, dtype=dtype)
    flat = tensor.view(-1)
    for first in range(0, len(flat), _BLOCK):
        part = flat[first : first + _BLOCK]
        part.copy_(torch.randn(part.shape, generator=generator).mul_(scale))
    return tensor


def _attract(tensors: dict[str, Tensor], t: Tensor, table: Tensor, generator: torch.Generator) -> None:
    """Overwrite the action heads: h = Qx + anchor, v ~ Q^T h / t; Q orthonormal, orthogonal to the anchor.

    The final norm divides by |h| / sqrt(width), and |h| is close to the anchor's length. Where 1/t comes from
    depends on how the family takes the time in.
    """
    width, action_dim = tensors["action_in_proj.weight"].shape
    basis, _ = torch.linalg.qr(torch.randn((width, action_dim + 1), generator=generator))
    into, length = basis[:, :action_dim], _ANCHOR * action_dim**0.5
    anchor = basis[:, action_dim] * length
    tensors["action_in_proj.weight"] = into.contiguous()
    tensors["action_in_proj.bias"] = torch.zeros(width)
    tensors["action_out_proj.bias"] = torch.zeros(action_dim)
    if _FINAL + "weight" in tensors:  # pi0: the anchor grows with t, and with it the divisor of the final norm
        small = 1e-3  # silu(z) ~ z/2 for small z: the time MLP adds its two halves, nearly
        tensors["action_time_mlp_in.weight"] = small * torch.cat(
            (torch.eye(width), torch.outer(anchor, _solve(table, t / t.min()))), dim=1
        )
        tensors["action_time_mlp_out.weight"] = torch.eye(width) * (2.0 / small)
        tensors["action_time_mlp_in.bias"] = torch.zeros(width)
        tensors["action_time_mlp_out.bias"] = torch.zeros(width)
        tensors[_FINAL + "weight"] = torch.zeros(width)
        length /= float(t.min())
    else:  # pi0.5: the anchor is constant and the final norm's modulation scales with 1/t
        tensors["action_in_proj.bias"] = anchor
        condition = table
        for name in ("time_mlp_in", "time_mlp_out"):
            weight, bias = tensors[name + ".weight"].double(), tensors[name + ".bias"].double()
            condition = functional.silu(condition @ weight.T + bias)
        modulation = torch.zeros((3 * width, width))
        modulation[:width] = _solve(condition, 1.0 / t - 1.0)
        tensors[_FINAL + "dense.weight"] = modulation
    tensors["action_out_proj.weight"] = into.T * (length * width**-0.5)


def _solve(rows: Tensor, wanted: Tensor) -> Tensor:
    """[width] fp32: the smallest w with rows @ w = wanted, [N, width] and [N] fp64."""
    solution: Tensor = torch.linalg.pinv(rows) @ wanted
    return solution.float()
