"""Names of pi0 and pi0.5 checkpoints: every spelling in use -> openpi's present one. Needs no torch and no file.

Spellings: openpi's PyTorch export; lerobot's, with one more leading ``model.``; that of lerobot before 0.4 and
transformers before 4.52, where ``model`` stood after ``language_model`` instead of after ``paligemma``; and without
``vision_model``, which transformers dropped in 5.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from typing import Literal

from phyai_engine.errors import WeightsError

Family = Literal["pi0", "pi05"]

PALIGEMMA = "paligemma_with_expert.paligemma."
VISION = PALIGEMMA + "model.vision_tower.vision_model."
LANGUAGE = PALIGEMMA + "model.language_model."
EXPERT = "paligemma_with_expert.gemma_expert."
EMBEDDING = PALIGEMMA + "lm_head.weight"
TIED_EMBEDDING = LANGUAGE + "embed_tokens.weight"

# Stored, and read by no inference path: the expert's embedding and head (never trained), the prefix's final norm, and
# lerobot's statistics of the time when they were buffers of the policy (weights/lerobot.py reads them).
_UNUSED = frozenset(
    {EXPERT + "lm_head.weight", EXPERT + "model.embed_tokens.weight", LANGUAGE + "norm.weight"},
)
STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")

_LEGACY = (
    (PALIGEMMA + "language_model.lm_head.", PALIGEMMA + "lm_head."),
    (PALIGEMMA + "language_model.model.", LANGUAGE),
    (PALIGEMMA + "vision_tower.", PALIGEMMA + "model.vision_tower."),
    (PALIGEMMA + "multi_modal_projector.", PALIGEMMA + "model.multi_modal_projector."),
)
_REFUSED = (
    ("lora_", "a LoRA adapter", "Merge the adapter into the weights and export them again."),
    ("proprio_history_proj.", "a projection of past states (memory)", "Only policies of one observation run here."),
)

_GEMMA = r"layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight"
_NORMS = r"(layers\.\d+\.(input|post_attention)_layernorm|norm)\."
_KNOWN = re.compile(
    "|".join(
        (
            re.escape(VISION) + r"embeddings\.(patch_embedding\.(weight|bias)|position_embedding\.weight)",
            re.escape(VISION) + r"encoder\.layers\.\d+\.(layer_norm[12]|self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"
            r"\.(weight|bias)",
            re.escape(VISION) + r"post_layernorm\.(weight|bias)",
            re.escape(PALIGEMMA) + r"model\.multi_modal_projector\.linear\.(weight|bias)",
            re.escape(EMBEDDING),
            re.escape(LANGUAGE) + _GEMMA,
            re.escape(LANGUAGE) + r"layers\.\d+\.(input|post_attention)_layernorm\.weight",
            re.escape(EXPERT) + r"model\." + _GEMMA,
            re.escape(EXPERT) + r"model\." + _NORMS + r"(weight|dense\.(weight|bias))",
            r"(action_in_proj|action_out_proj|state_proj|(action_)?time_mlp_(in|out))\.(weight|bias)",
        )
    )
)
_PLAIN_EXPERT_NORM = re.compile(re.escape(EXPERT) + r"model\." + _NORMS + "weight")
_DENSE = ".dense.weight"


def canonical(stored: Iterable[str], *, where: object) -> dict[str, str]:
    """Stored name -> openpi's present name, of every tensor that inference reads.

    Tensors that are dropped on purpose are absent. Both names of the tied embedding map to ``EMBEDDING``.

    :param where: the checkpoint, for messages.
    :raises WeightsError: a name that no spelling knows, an unsupported part, one tensor under two spellings, or no
        pi0 or pi0.5 checkpoint at all.
    """
    present = {name: _present(name) for name in stored}
    for name in present:
        for part, what, do in _REFUSED:
            if part in name:
                raise WeightsError(f"the checkpoint holds {what}", got=name, where=where, do=do)
    present = {name: new for name, new in present.items() if new not in _UNUSED and not new.startswith(STATISTICS)}
    kind = _told_by(set(present.values()), where)
    found: dict[str, str] = {}
    for name, new in present.items():
        if kind == "pi05" and (new.startswith("state_proj.") or _PLAIN_EXPERT_NORM.fullmatch(new)):
            continue  # left over where training began from pi0
        found[name] = _time_mlp(new, kind)
    if unknown := sorted(name for name, new in found.items() if not _KNOWN.fullmatch(new)):
        raise WeightsError(
            "tensors that no pi0 or pi0.5 checkpoint has",
            got=", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""),
            where=where,
            do="The checkpoint belongs to another model, or to a variant that is not supported.",
        )
    _refuse_twice(found, where)
    return found


def family(names: Set[str]) -> Family:
    """The family of canonical names.

    :raises WeightsError: they belong to neither.
    """
    return _told_by(names, None)


def _present(name: str) -> str:
    name = name.removeprefix("model.")
    for old, new in _LEGACY:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    tower = PALIGEMMA + "model.vision_tower."
    if name.startswith(tower) and not name.startswith(VISION):
        name = VISION + name[len(tower) :]
    return EMBEDDING if name == TIED_EMBEDDING else name


def _told_by(names: Set[str], where: object) -> Family:
    """adaRMS norms of the expert are pi0.5's alone; without any, the heads tell."""
    if "action_in_proj.weight" in names:
        if any(name.startswith(EXPERT) and name.endswith(_DENSE) for name in names):
            return "pi05"
        if "state_proj.weight" in names or "action_time_mlp_in.weight" in names:
            return "pi0"
        if "time_mlp_in.weight" in names:
            return "pi05"
    raise WeightsError(
        "not the weights of pi0 or pi0.5",
        got=f"{len(names)} tensors, among them {', '.join(sorted(names)[:3])}" if names else "no tensors",
        wanted="action_in_proj with state_proj (pi0) or time_mlp_in (pi0.5)",
        where=where,
        do="pi0-FAST and other families have other heads and are not read as pi0.",
    )


def _time_mlp(name: str, kind: Family) -> str:
    """Some files name pi0.5's time MLP as pi0's, or the other way round."""
    bare = name.removeprefix("action_")
    if not bare.startswith("time_mlp_"):
        return name
    return bare if kind == "pi05" else f"action_{bare}"


def _refuse_twice(found: dict[str, str], where: object) -> None:
    seen: dict[str, str] = {}
    for name, new in found.items():
        other = seen.setdefault(new, name)
        if other != name and new != EMBEDDING:
            raise WeightsError(
                "one tensor is stored under two names",
                got=f"{other} and {name}",
                where=where,
                do="The file was merged from two exports; export it again.",
            )
