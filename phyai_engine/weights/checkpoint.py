"""A checkpoint folder -> what it holds (:func:`describe`) -> the model file that runs it (:func:`model_from`).

Needs no torch: it runs in the node's process, and reads headers and small files only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from phyai_engine.config import Kind, ModelConfig, RobotConfig, convert, read_yaml, resolve
from phyai_engine.errors import ConfigError, WeightsError
from phyai_engine.weights import lerobot, openpi
from phyai_engine.weights.header import Shape, Stored, stored_tensors
from phyai_engine.weights.pi_names import EMBEDDING, EXPERT, LANGUAGE, VISION, Family, canonical, family
from phyai_engine.weights.recipe import NEEDS, PARTS, Missing, Part, Recipe, picked, read_json

_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD_DIM = 72  # of SigLIP So400m, the vision tower of every published checkpoint
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder holds.

    :param told: how the family was told. :param stored: stored name -> tensor. :param names: stored name -> openpi's
        name, of the tensors that inference reads. :param options: of PiOptions, from shapes and files.
    :param missing: what a model file must add before the checkpoint can run.
    """

    folder: Path
    family: Family
    told: str
    stored: Mapping[str, Stored]
    names: Mapping[str, str]
    options: Mapping[str, Any]
    recipe: Recipe
    missing: tuple[Missing, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        """openpi's name -> shape."""
        return {new: self.stored[name].shape for name, new in self.names.items()}

    def model(self, own: Mapping[str, Any] | None = None, *, where: object = None) -> ModelConfig:
        """The model file's own keys over what the folder says.

        :param own: of a model file, as read. :param where: that file.
        :raises ConfigError: what is missing, with what exists; statistics that cannot be used; a contradiction.
        """
        own = own or {}
        if (given := own.get("family", self.family)) != self.family:
            raise ConfigError(
                "the model file's family contradicts the weights",
                got=f"family {given}, and {self.told}",
                where=where,
                do=f"Write `family: {self.family}`, or give another checkpoint.",
            )
        if unmet := self.unmet(own):
            first, *rest = unmet
            also = f" Also missing: {'; '.join(point.what for point in rest)}." if rest else ""
            raise ConfigError(first.what, where=where or self.folder, do=first.do + also)
        recipe = self.recipe
        prompt = {**msgspec.to_builtins(recipe.prompt), **_mapping(own, "prompt")}
        told = {
            "family": self.family,
            "resize": recipe.resize,
            "relative_actions": msgspec.to_builtins(recipe.relative),
            **own,
            "checkpoint": str(self.folder),
            "normalisation": self._normalisation(_mapping(own, "normalisation")),
            "prompt": prompt,
            "rtc": {**_rtc(recipe), **_mapping(own, "rtc")},
            "options": {**self.options, "prompt_len": prompt["max_tokens"], **_mapping(own, "options")},
        }
        return convert(told, ModelConfig, where=str(where or self.folder))

    def unmet(self, own: Mapping[str, Any]) -> tuple[Missing, ...]:
        """What neither the folder nor the model file's own keys give."""
        normalisation = _mapping(own, "normalisation")
        kinds, statistics = self._kinds(normalisation), self.recipe.statistics
        bare = [p for p in PARTS if p not in normalisation and kinds[p] in NEEDS and not statistics[p].values]

        def is_met(key: str) -> bool:
            if key in ("asset", "normalisation"):
                return not bare
            table, _, name = key.rpartition(".")
            return name not in bare if table == "normalisation" else name in _mapping(own, table)

        return tuple(point for point in self.missing if not is_met(point.key))

    def _kinds(self, own: Mapping[str, Any]) -> dict[Part, Kind]:
        """Of each vector: a model file's, else the folder's."""
        statistics = self.recipe.statistics
        return {part: own.get(f"{part}_kind") or own.get("kind") or statistics[part].kind for part in PARTS}

    def _normalisation(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Of a model file: the kinds it asks for, with this checkpoint's statistics where it has none of its own."""
        recipe = self.recipe
        merged: dict[str, Any] = {"rule": recipe.rule, **({} if recipe.eps is None else {"eps": recipe.eps}), **own}
        for part, kind in self._kinds(own).items():
            merged[f"{part}_kind"] = kind
            if part not in own:
                merged[part] = picked(recipe.statistics[part], kind, part)
                self._refuse_too_many(part)
        return merged

    def _refuse_too_many(self, part: Part) -> None:
        """pi0.5's state is text: its length is free."""
        dims, most = self.recipe.statistics[part].dims or 0, self.options["action_dim"]
        if dims > most and (part == "actions" or self.family == "pi0"):
            raise ConfigError(
                f"the statistics of the {part} have {dims} dimensions",
                wanted=f"at most {most}, the model's",
                where=self.recipe.statistics[part].where,
                do="They belong to another checkpoint.",
            )


def _rtc(recipe: Recipe) -> dict[str, Any]:
    """A checkpoint that was trained to continue a prefix does it that way, unless the model file says otherwise."""
    longest = recipe.rtc_training_max_delay
    return {"guidance": "trained", "rtc_max_delay": longest} if longest else {}


def _mapping(own: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return own.get(key) or {}


def model_from(name: str | Path) -> ModelConfig:
    """The model of a checkpoint folder, of a model file, or of a shipped model file by its name.

    A model file with ``checkpoint:`` gets the folder's own description as defaults; paths in it are relative to it.

    :raises ConfigError: what is missing or wrong, where, and what exists.
    :raises WeightsError: the folder's weights cannot be read or belong to another model.
    """
    return model_and_notes(name)[0]


def model_and_notes(name: str | Path) -> tuple[ModelConfig, tuple[str, ...]]:
    """As ``model_from``, with what had to be assumed because no file tells it."""
    checkpoint, own, where = opened(name)
    if checkpoint is None:
        return convert(own, ModelConfig, where=str(where)), ()
    return checkpoint.model(own, where=where), checkpoint.recipe.open_notes(own)


def opened(name: str | Path) -> tuple[Checkpoint | None, dict[str, Any], Path]:
    """What ``model_from`` goes by: the checkpoint, if there is one, the model file's own keys, and their file."""
    if str(name) and Path(name).is_dir():
        return describe(Path(name)), {}, Path(name)
    path = resolve("models", str(name))
    own = read_yaml(path)
    checked = convert({"family": "pi0", **own} if isinstance(own, dict) else own, ModelConfig, where=str(path))
    if not checked.checkpoint or checked.family not in ("pi0", "pi05"):
        return None, own, path
    folder = path.parent / checked.checkpoint
    if not folder.is_dir():
        raise ConfigError(
            "no such folder", got=folder, where=f"{path}: $.checkpoint", do="A path is relative to the file."
        )
    if checked.prompt.tokenizer != "bytes":
        own = {**own, "prompt": {**_mapping(own, "prompt"), "tokenizer": str(path.parent / checked.prompt.tokenizer)}}
    return describe(folder, asset=checked.asset), own, path


def describe(folder: Path, *, asset: str = "") -> Checkpoint:
    """Read what a folder holds, from headers and small files.

    :param asset: which statistics of an openpi folder, where it holds several.
    :raises ConfigError: a file beside the weights is wrong or asks for something that is not supported.
    :raises WeightsError: the weights cannot be read, or belong to another model.
    """
    folder = Path(folder).resolve()
    _refuse_folder(folder)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    source = _source(folder, config)
    where = str(folder / "config.json")
    settings = convert(config, lerobot.Config, where=where) if source == "lerobot" else None
    stored = stored_tensors(folder)
    names = canonical(stored, where=folder)
    kind = family(set(names.values()))
    told = f"the weights are those of {kind}"
    if settings is not None:
        if settings.type != kind:
            raise ConfigError(
                "config.json contradicts the weights",
                got=f"type {settings.type!r}, and {told}",
                where=where,
                do="The two files are of different checkpoints.",
            )
        recipe = lerobot.read_recipe(folder, kind, settings, stored)
        told = f"{told}, as config.json says"
    else:
        converted = None if config is None else convert(config, openpi.Config, where=where)
        recipe = openpi.read_recipe(folder, kind, converted, asset)
    used = {new: stored[name] for name, new in names.items()}
    _refuse_dtypes(used, folder)
    dims = _dims(used, folder)
    _agree(where, config or {}, settings, dims)
    missing = list(recipe.missing)
    if "vis_heads" not in dims:
        missing.append(
            Missing(
                "options.vis_heads",
                f"the vision tower is {dims['vis_width']} wide, no multiple of So400m's {_HEAD_DIM} per head",
                "Give `options: {vis_heads: N}` in a model file.",
            )
        )
    options = {"dtype": _dtype(used), **dims, **recipe.options, "cameras": list(recipe.cameras)}
    return Checkpoint(folder, kind, told, stored, names, options, recipe, tuple(missing))


def _refuse_folder(folder: Path) -> None:
    """Folders that are another kind of checkpoint, or the folder above one."""
    if not folder.is_dir():
        raise ConfigError("no such folder", got=folder, do="Give the folder that holds the weights.")
    try:
        held = {child.name for child in folder.iterdir()}
    except OSError as error:
        raise ConfigError(f"cannot read the folder: {error.strerror}", where=folder) from None
    if found := held.intersection(_ADAPTERS):
        raise WeightsError(
            "an adapter (LoRA, PEFT), not a whole checkpoint",
            got=", ".join(sorted(found)),
            where=folder,
            do="Merge it into its base and save the policy again.",
        )
    if any(name.endswith(".safetensors") for name in held):
        return
    if "params" in held or "_CHECKPOINT_METADATA" in held:
        raise WeightsError(
            "a JAX checkpoint (orbax, params/), which is not read",
            where=folder,
            do="Convert it with openpi's examples/convert_jax_model_to_pytorch.py.",
        )
    if below := sorted({file.parent for file in folder.glob("*/*.safetensors")}):
        raise WeightsError("no weights", where=folder, do=f"Did you mean {', '.join(str(at) for at in below[:4])}?")


def _source(folder: Path, config: Mapping[str, Any] | None) -> str:
    where = folder / "config.json"
    if config is None:
        if (folder / lerobot.PREPROCESSOR).is_file():
            raise ConfigError("lerobot's config.json is missing", where=where, do="Copy it from the training run.")
        return "openpi"
    if (kind := config.get("type")) is not None:
        if kind not in ("pi0", "pi05"):
            raise ConfigError(f"policies of type {kind!r} are not read", wanted="pi0 or pi05", where=where)
        return "lerobot"
    if not {"action_horizon", "action_dim", "paligemma_variant"}.intersection(config):
        wanted = "`type` (lerobot) or `action_horizon` (openpi)"
        raise ConfigError(
            "a config.json of neither openpi nor lerobot", got=", ".join(config), wanted=wanted, where=where
        )
    return "openpi"


# --- from the tensors ---


def _refuse_dtypes(used: Mapping[str, Stored], folder: Path) -> None:
    wrong = {name: tensor.dtype for name, tensor in used.items() if tensor.dtype not in _FLOATS}
    if wrong:
        name = min(wrong)
        raise WeightsError(
            "tensors are not floating point of 16 bits or more",
            got=f"{name} {wrong[name]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""),
            wanted=f"one of {', '.join(_FLOATS)}",
            where=folder,
            do="Quantised exports are not read; use the checkpoint that they were made from.",
        )


def _dtype(used: Mapping[str, Stored]) -> str:
    """Of the towers' matrices; norms and heads may be stored wider."""
    matrices = [t.dtype for name, t in used.items() if "_proj.weight" in name and name.startswith((LANGUAGE, EXPERT))]
    return "bfloat16" if matrices and set(matrices) == {"BF16"} else "float32"


def _dims(used: Mapping[str, Stored], folder: Path) -> dict[str, Any]:
    """PiOptions from shapes. Every published Gemma has one K/V head: a row of k_proj per dimension of a head."""

    def shape(name: str, rank: int) -> Shape:
        if name not in used:
            raise WeightsError("a tensor is missing", got=name, where=folder, do="Fetch the checkpoint again.")
        if len(found := used[name].shape) != rank:
            raise WeightsError(f"{name} has shape {list(found)}", wanted=f"{rank} dimensions", where=folder)
        return found

    vocab, width = shape(EMBEDDING, 2)
    vis_width, _, patch, _ = shape(VISION + "embeddings.patch_embedding.weight", 4)
    grid = math.isqrt(shape(VISION + "embeddings.position_embedding.weight", 2)[0])
    queries = shape(LANGUAGE + "layers.0.self_attn.q_proj.weight", 2)[0]
    head_dim = shape(LANGUAGE + "layers.0.self_attn.k_proj.weight", 2)[0]
    exp_width, action_dim = shape("action_in_proj.weight", 2)
    dims = {
        "vocab": vocab,
        "vis_width": vis_width,
        "vis_depth": _depth(used, VISION + "encoder.layers."),
        "vis_mlp": shape(VISION + "encoder.layers.0.mlp.fc1.weight", 2)[0],
        "width": width,
        "depth": _depth(used, LANGUAGE + "layers."),
        "mlp": shape(LANGUAGE + "layers.0.mlp.gate_proj.weight", 2)[0],
        "heads": max(1, queries // max(1, head_dim)),
        "kv_heads": 1,
        "head_dim": head_dim,
        "exp_width": exp_width,
        "exp_mlp": shape(EXPERT + "model.layers.0.mlp.gate_proj.weight", 2)[0],
        "action_dim": action_dim,
        "image_size": grid * patch,
        "patch": patch,
    }
    return dims if vis_width % _HEAD_DIM else {**dims, "vis_heads": vis_width // _HEAD_DIM}


def _depth(names: Iterable[str], prefix: str) -> int:
    return len({name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)})


def _agree(where: str, config: Mapping[str, Any], settings: lerobot.Config | None, dims: Mapping[str, Any]) -> None:
    """What config.json says of the weights is what they are."""
    told = {"action_dim": config.get("action_dim")} if settings is None else {}
    if settings is not None and settings.image_resolution is not None:
        height, width = settings.image_resolution
        told["image_size"] = height if height == width else f"{height}x{width}"
    for key, value in told.items():
        if value is not None and value != dims[key]:
            raise ConfigError(
                f"config.json contradicts the weights in {key}",
                got=f"{value}, and {dims[key]} in the weights",
                where=where,
                do="The two files are of different checkpoints.",
            )


# --- cameras ---

_ALIKE = MappingProxyType(
    {
        **dict.fromkeys(("base", "front", "high", "top", "head", "overhead", "exterior", "external", "scene"), "base"),
        **dict.fromkeys(("wrist", "hand", "gripper"), "wrist"),
    }
)
_TELLING = frozenset({"base", "wrist", "left", "right", "low", "back", "side"})


def swapped_cameras(robot: RobotConfig, roles: Sequence[str]) -> list[str]:
    """Pairs of cameras that each fit the other's role better than their own, by the words in names and topics.

    :param roles: the model's cameras. :return: a sentence per pair; empty where nothing speaks for a swap.
    """
    cameras = [camera for camera in robot.cameras if camera.role in roles]
    found = []
    for i, one in enumerate(cameras):
        for other in cameras[i + 1 :]:
            words, others = (_telling(f"{camera.name} {camera.topic}") for camera in (one, other))
            role, others_role = _telling(one.role), _telling(other.role)
            if len(words & others_role) > len(words & role) and len(others & role) > len(others & others_role):
                found.append(
                    f"camera {one.name} ({one.topic}) has the role {one.role}, and {other.name} ({other.topic}) has "
                    f"{other.role}: each fits the other's role better. Swap the two roles in the robot file."
                )
    return found


def _telling(text: str) -> frozenset[str]:
    """The words that say where a camera is."""
    words = re.findall(r"[a-z]+", text.lower())
    return frozenset(_ALIKE.get(word, word) for word in words) & _TELLING
