"""pi0 and pi0.5 checkpoints: tensor names, tied and unused tensors, dtypes, and seeded random weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from phyai_engine.errors import WeightsError
from phyai_engine.weights.loading import Shape

_VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model."
_LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
_EXPERT = "paligemma_with_expert.gemma_expert."
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
_TIED_EMBEDDING = _LANGUAGE + "embed_tokens.weight"
# Stored by the reference but read by no inference path.
_UNUSED = (_EXPERT + "lm_head.weight", _LANGUAGE + "norm.weight")

# Our module prefix -> the checkpoint's. Names not listed (the action heads) are the same on both sides.
_PREFIXES = (
    ("vision.patch_embedding.", _VISION + "embeddings.patch_embedding."),
    ("vision.position_embedding.", _VISION + "embeddings.position_embedding."),
    ("vision.layers.", _VISION + "encoder.layers."),
    ("vision.post_layernorm.", _VISION + "post_layernorm."),
    ("projector.", "paligemma_with_expert.paligemma.model.multi_modal_projector.linear."),
    ("embedding.weight", EMBEDDING),
    ("language.layers.", _LANGUAGE + "layers."),
    ("expert.layers.", _EXPERT + "model.layers."),
    ("expert.norm.", _EXPERT + "model.norm."),
)


def checkpoint_name(own: str) -> str:
    """The checkpoint's name of one of PiModel's parameters."""
    for ours, theirs in _PREFIXES:
        if own.startswith(ours):
            return theirs + own[len(ours) :]
    return own


def canonical_tensors(tensors: Mapping[str, Tensor], *, where: object) -> dict[str, Tensor]:
    """Undo the spellings in use: a leading ``model.``, the tied embedding's two names, unused tensors.

    :raises WeightsError: both names of the embedding are stored and differ.
    """
    if tensors and all(name.startswith("model.") for name in tensors):
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in tensors.items() if name not in _UNUSED}
    tied = kept.pop(_TIED_EMBEDDING, None)
    if tied is not None and not torch.equal(kept.setdefault(EMBEDDING, tied), tied):
        raise WeightsError(
            "the two copies of the token embedding differ",
            got=f"{EMBEDDING} != {_TIED_EMBEDDING}",
            where=where,
            do="The file was edited or merged wrongly; export it again.",
        )
    return kept


def parameter_dtype(own: str, dtype: torch.dtype) -> torch.dtype:
    """Matrices of the towers are ``dtype``; norms (with their modulation), patch and position embedding and
    the action heads stay fp32, where bf16 would cost accuracy and save nothing.
    """
    tower = own.startswith(("vision.layers.", "projector.", "embedding.", "language.", "expert."))
    return dtype if tower and "norm" not in own else torch.float32


# --- seeded random weights ---

# Least length of the anchor channel over a typical action's: the final norm's divisor hardly depends on x.
_ANCHOR = 4.0
# Damping of the expert's sub-layers: attention carries the observation into the action, the MLP mostly an
# offset. Measured with these: pi0.5 actions within -1..1, neighbouring steps within 0.1 of each other.
_DAMPING = {"self_attn.o_proj.weight": 0.25, "mlp.down_proj.weight": 0.05}


def random_tensors(
    shapes: Mapping[str, Shape], seed: int, times: Sequence[float], time_table: Tensor
) -> dict[str, Tensor]:
    """Weights of an untrained model whose actions are finite, bounded, smooth, and moved by the observation.

    Plain random weights would leave the start noise in the actions. Here the action heads form a skeleton
    with v ~ (x - m) / t, m made by the (random) expert from the observation: the flow of a model that has
    learned m alone, so that sampling ends at m and guidance, which looks ahead to x - t v, finds it there.
    It needs an expert wider than the action; below that the heads are plain random, still bounded.

    :param shapes: checkpoint names and shapes. :param times: [N] flow times. :param time_table: [N, width]
        their embedding. :return: fp32 tensors under the same names.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random_tensor(name, shapes[name], generator) for name in sorted(shapes)}
    if shapes["action_in_proj.weight"][0] > shapes["action_in_proj.weight"][1]:
        _attract(tensors, torch.tensor(times, dtype=torch.float64), time_table.double(), generator)
    return tensors


def _random_tensor(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if ".dense." in name:  # adaRMS: scale and shift start at 0, the gate at 1, all moved a little by the time
        third = shape[0] // 3
        base = torch.cat((torch.zeros(2 * third), torch.ones(third)))
        return noise * (0.1 * shape[1] ** -0.5) if name.endswith("weight") else base
    if "norm" in name:
        gain_around_one = name.startswith(_VISION) and name.endswith("weight")
        return noise * 0.1 + (1.0 if gain_around_one else 0.0)
    if name.endswith("bias"):
        return noise * 0.02
    damping = next((d for end, d in _DAMPING.items() if name.startswith(_EXPERT) and name.endswith(end)), 1.0)
    scale: float = damping * math.prod(shape[1:]) ** -0.5
    return noise * scale


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
    final = _EXPERT + "model.norm."
    if final + "weight" in tensors:  # pi0: the anchor grows with t, and with it the divisor of the final norm
        small = 1e-3  # silu(z) ~ z/2 for small z: the time MLP adds its two halves, nearly
        tensors["action_time_mlp_in.weight"] = small * torch.cat(
            (torch.eye(width), torch.outer(anchor, _solve(table, t / t.min()))), dim=1
        )
        tensors["action_time_mlp_out.weight"] = torch.eye(width) * (2.0 / small)
        tensors["action_time_mlp_in.bias"] = torch.zeros(width)
        tensors["action_time_mlp_out.bias"] = torch.zeros(width)
        tensors[final + "weight"] = torch.zeros(width)
        length /= float(t.min())
    else:  # pi0.5: the anchor is constant and the final norm's modulation scales with 1/t
        tensors["action_in_proj.bias"] = anchor
        condition = table
        for name in ("time_mlp_in", "time_mlp_out"):
            weight, bias = tensors[name + ".weight"].double(), tensors[name + ".bias"].double()
            condition = functional.silu(condition @ weight.T + bias)
        modulation = torch.zeros((3 * width, width))
        modulation[:width] = _solve(condition, 1.0 / t - 1.0)
        tensors[final + "dense.weight"] = modulation
    tensors["action_out_proj.weight"] = into.T * (length * width**-0.5)


def _solve(rows: Tensor, wanted: Tensor) -> Tensor:
    """[width] fp32: the smallest w with rows @ w = wanted, [N, width] and [N] fp64."""
    solution: Tensor = torch.linalg.pinv(rows) @ wanted
    return solution.float()
