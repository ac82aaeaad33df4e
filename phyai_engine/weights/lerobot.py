"""lerobot's folders: ``config.json``, ``policy_preprocessor.json``, ``policy_postprocessor.json`` and their statistics.

The two processor files list what is done to an observation before the model and to its actions after it, step by step.
A step that is not known here would change what the policy sees: it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from phyai_engine.config import Kind, PromptConfig, RelativeActions, convert
from phyai_engine.errors import ConfigError
from phyai_engine.weights.header import Stored, read_small
from phyai_engine.weights.pi_names import Family
from phyai_engine.weights.recipe import (
    Missing,
    Part,
    Recipe,
    Statistics,
    Values,
    find_tokenizer,
    no_statistics,
    no_tokenizer,
    read_json,
)

T = TypeVar("T")
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "paligemma_tokenizer.model")
_FEATURES: Mapping[Part, str] = MappingProxyType({"state": "observation.state", "actions": "action"})
_TYPES: Mapping[Part, str] = MappingProxyType({"state": "STATE", "actions": "ACTION"})
_MODES: Mapping[str, Kind] = MappingProxyType(
    {
        "IDENTITY": "identity",
        "MEAN_STD": "mean_std",
        "MIN_MAX": "min_max",
        "QUANTILES": "quantile",
        "QUANTILE10": "quantile",  # the same formula with q10 and q90
    }
)
_STATISTICS = ("mean", "std", "min", "max", "q01", "q99", "q10", "q90")
_EPS = 1e-8  # of the rule; a file may give another
_DEFAULTS = MappingProxyType({"pi0": ("MEAN_STD", 48), "pi05": ("QUANTILES", 200)})
_NORMALISE, _UNNORMALISE = "normalizer_processor", "unnormalizer_processor"
_RELATIVE, _ABSOLUTE = "relative_actions_processor", "absolute_actions_processor"
_RENAME, _TOKENIZE = "rename_observations_processor", "tokenizer_processor"
_NEW_LINE, _STATE_PROMPT = "pi0_new_line_processor", "pi05_prepare_state_tokenizer_processor_step"
_PLAIN_STEPS = ("to_batch_processor", "device_processor")
_KNOWN = MappingProxyType(
    {
        PREPROCESSOR: (*_PLAIN_STEPS, _RENAME, _RELATIVE, _NEW_LINE, _STATE_PROMPT, _NORMALISE, _TOKENIZE),
        POSTPROCESSOR: (*_PLAIN_STEPS, _ABSOLUTE, _UNNORMALISE),
    }
)


class Feature(Struct, frozen=True):
    """One input or output of the policy."""

    type: str
    shape: tuple[int, ...] = ()


class Config(Struct, frozen=True, kw_only=True):
    """The keys of ``config.json`` that inference needs; ``num_steps`` ended with lerobot 0.4."""

    type: str
    input_features: dict[str, Feature] | None = None
    output_features: dict[str, Feature] | None = None
    normalization_mapping: dict[str, str] | None = None
    n_obs_steps: int = 1
    chunk_size: int | None = None
    n_action_steps: int | None = None
    num_inference_steps: int | None = None
    min_period: float | None = None
    max_period: float | None = None
    tokenizer_max_length: int | None = None
    image_resolution: tuple[int, int] | None = None
    empty_cameras: int = 0
    dtype: str | None = None
    use_relative_actions: bool = False
    relative_exclude_joints: list[str] | None = None
    action_feature_names: list[str] | None = None
    rtc_training_max_delay: int = 0
    num_steps: int | None = None
    max_state_dim: int = 32
    # refused where they are true
    adapt_to_pi_aloha: bool = False
    use_visual_memory: bool = False
    use_proprioceptive_memory: bool = False
    use_peft: bool = False
    use_delta_joint_actions_aloha: bool = False


class _Step(Struct, frozen=True, kw_only=True):
    registry_name: str = ""
    class_: str = field(default="", name="class")
    config: dict[str, Any] = field(default_factory=dict)
    state_file: str | None = None


class _Normalise(Struct, frozen=True):
    """Of the normalising steps."""

    eps: float = _EPS
    features: dict[str, Feature] = field(default_factory=dict)
    norm_map: dict[str, str] = field(default_factory=dict)
    normalize_observation_keys: list[str] | None = None


class _Relative(Struct, frozen=True):
    enabled: bool = False
    exclude_joints: list[str] | None = None
    action_names: list[str] | None = None


class _Tokenize(Struct, frozen=True):
    max_length: int | None = None
    padding_side: str = "right"
    tokenizer_name: str | None = None


class _Rename(Struct, frozen=True):
    rename_map: dict[str, str] = field(default_factory=dict)


class _StatePrompt(Struct, frozen=True):
    include_state_in_prompt: bool = True


class _Steps:
    """The steps of one processor file by name; none where the file is absent.

    :raises ConfigError: no steps, or one that is not supported.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self.path = folder / file
        self.by_name: dict[str, _Step] = {}
        if not self.path.is_file():
            return
        for step in convert(read_json(self.path).get("steps"), list[_Step], where=f"{self.path}: steps"):
            name = step.registry_name or step.class_
            if name not in _KNOWN[file]:
                raise ConfigError(
                    "a processing step that is not supported",
                    got=name,
                    wanted=f"one of {', '.join(_KNOWN[file])}",
                    where=self.path,
                    do="Leaving it out would show the policy something else than in training.",
                )
            self.by_name[name] = step

    def config(self, name: str, kind: type[T]) -> T:
        """A step's configuration, its defaults where the file does not have the step."""
        given = self.by_name[name].config if name in self.by_name else {}
        return convert(given, kind, where=f"{self.path}: {name}")


def read_recipe(folder: Path, family: Family, config: Config, stored: Mapping[str, Stored]) -> Recipe:
    """What a lerobot folder says.

    :param config: of ``config.json``. :param stored: the weights' file, which held the statistics before lerobot 0.4.
    :raises ConfigError: a part that is not supported, by name; files that cannot be read or contradict each other.
    """
    before, after = _Steps(folder, PREPROCESSOR), _Steps(folder, POSTPROCESSOR)
    refuse_unsupported(folder, config, before)
    missing: list[Missing] = []
    prompt = _prompt(folder, family, config, before, missing)
    statistics = _statistics(config, family, before, after, stored)
    missing += [
        no_statistics(folder, part, "A base checkpoint has none: fine-tune it on the robot's data")
        for part, found in statistics.items()
        if not found.values and found.kind != "identity"
    ]
    cameras = _cameras(config)
    if not cameras:
        what = "config.json names no camera (no VISUAL entry in input_features)"
        missing.append(Missing("options.cameras", what, "Give `options: {cameras: [...]}` in a model file."))
    relative, names = _relative(config, before, after)
    renames = before.config(_RENAME, _Rename).rename_map
    return Recipe(
        source="lerobot",
        statistics=statistics,
        prompt=prompt,
        cameras=cameras,
        renames={_role(old): _role(new) for old, new in renames.items() if old.startswith("observation.image")},
        options=_options(config),
        rule="lerobot",
        eps=_eps(before, after),
        resize="float",
        relative=relative,
        state_dim=_dim(folder, config.input_features, statistics, "state", padded=config.max_state_dim),
        action_dim=_dim(folder, config.output_features, statistics, "actions"),
        action_names=names,
        execution_steps=config.n_action_steps,
        rtc_training_max_delay=config.rtc_training_max_delay,
        notes=_notes(config, prompt),
        missing=tuple(missing),
    )


def refuse_unsupported(folder: Path, config: Config, before: _Steps) -> None:
    """Refuse what this engine would silently leave out.

    :raises ConfigError: naming the key.
    """
    for key, what in (
        ("use_visual_memory", "a memory of past images"),
        ("use_proprioceptive_memory", "a memory of past states"),
        ("use_peft", "an adapter (PEFT) beside its weights: merge it and save the policy again"),
        ("use_delta_joint_actions_aloha", "deltas of ALOHA's joints"),
        # between 0.4 and 1.5 rad, other numbers than openpi's `units: aloha_gripper`
        ("adapt_to_pi_aloha", "ALOHA's grippers in the units of lerobot before 0.4"),
    ):
        if getattr(config, key):
            raise ConfigError(f"not supported: the policy has {what}", got=f"{key}: true", where=folder / "config.json")
    if config.n_obs_steps != 1:
        raise ConfigError(
            "not supported: the policy sees several observations at once",
            got=f"n_obs_steps: {config.n_obs_steps}",
            wanted=1,
            where=folder / "config.json",
        )
    for where, modes in (
        (folder / "config.json", config.normalization_mapping or {}),
        (before.path, before.config(_NORMALISE, _Normalise).norm_map),
    ):
        if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
            raise ConfigError(
                "not supported: images are normalised by statistics",
                got=f"VISUAL: {modes['VISUAL']}",
                wanted="IDENTITY",
                where=where,
            )


def _options(config: Config) -> dict[str, Any]:
    options: dict[str, Any] = {
        "action_horizon": config.chunk_size,
        "num_steps": config.num_inference_steps or config.num_steps,
        "min_period": config.min_period,
        "max_period": config.max_period,
        "dtype": config.dtype,
        "time_rule": "accumulate" if _is_old(config) else "direct",
    }
    if config.dtype == "bfloat16":
        options["vision_dtype"] = "float32"  # as lerobot keeps it
    return {name: value for name, value in options.items() if value is not None}


def _is_old(config: Config) -> bool:
    return config.num_steps is not None and config.num_inference_steps is None


def _notes(config: Config, prompt: PromptConfig) -> tuple[str, ...]:
    notes = []
    if config.chunk_size is None:
        notes.append("config.json gives no chunk_size: the horizon is assumed to be 50, lerobot's default.")
    if _is_old(config):
        notes.append(
            "Written by lerobot before 0.4, which padded images at the top and the left; here they are centred, as "
            "lerobot does since."
        )
    if config.dtype == "bfloat16":
        notes.append(
            "The vision tower computes in float32, as lerobot's does; `options: {vision_dtype: same}` is faster."
        )
    if prompt.form == "state_bins":
        notes.append(
            "The prompt holds bins of the robot's own state. lerobot's first pi0.5 versions padded the state before: "
            "for a checkpoint of that time give `prompt: {padded_state: true}`."
        )
    return tuple(notes)


def _prompt(folder: Path, family: Family, config: Config, before: _Steps, missing: list[Missing]) -> PromptConfig:
    expected = _STATE_PROMPT if family == "pi05" else _NEW_LINE
    if before.by_name and expected not in before.by_name:
        raise ConfigError(
            f"no step forms the prompt of {family}", got=", ".join(before.by_name), wanted=expected, where=before.path
        )
    if not before.config(_STATE_PROMPT, _StatePrompt).include_state_in_prompt:
        raise ConfigError("not supported: a prompt without the state", where=before.path)
    step = before.config(_TOKENIZE, _Tokenize)
    if step.padding_side != "right":
        raise ConfigError("not supported: prompts padded on the left", where=before.path)
    limit = step.max_length or config.tokenizer_max_length or _DEFAULTS[family][1]
    # tokenizer_name is a hub's name, or a folder that was saved along
    named = folder / (step.tokenizer_name or ".")
    tokenizer = (named.is_dir() and find_tokenizer(named, TOKENIZERS)) or find_tokenizer(folder, TOKENIZERS)
    if tokenizer is None:
        missing.append(no_tokenizer(folder, TOKENIZERS))
    form = "state_bins" if family == "pi05" else "verbatim"
    return PromptConfig(form=form, max_tokens=limit, tokenizer=str(tokenizer or ""))  # type: ignore[arg-type]


# --- statistics ---


def _statistics(
    config: Config, family: Family, before: _Steps, after: _Steps, stored: Mapping[str, Stored]
) -> dict[Part, Statistics]:
    """The state's of the preprocessor, the actions' of the postprocessor, which alone makes commands."""
    if not before.by_name and not after.by_name:
        return {
            "state": _inside(config, family, stored, "state", "normalize_inputs.buffer_observation_state."),
            "actions": _inside(config, family, stored, "actions", "unnormalize_outputs.buffer_action."),
        }
    state, actions, trained = (
        _of_step(before, _NORMALISE, "state", family),
        _of_step(after, _UNNORMALISE, "actions", family),
        _of_step(before, _NORMALISE, "actions", family),
    )
    if trained.values and actions.values and trained != replace(actions, where=trained.where):
        raise ConfigError(
            "the two processor files have different statistics of the actions",
            got=f"{trained.where} and {actions.where}",
            where=before.path.parent,
            do="They were saved by different runs; take both of one.",
        )
    return {"state": state, "actions": actions}


def _of_step(steps: _Steps, name: str, part: Part, family: Family) -> Statistics:
    if name not in steps.by_name:
        return Statistics(_MODES[_DEFAULTS[family][0]])
    config, feature = steps.config(name, _Normalise), _FEATURES[part]
    mode = config.norm_map.get(_TYPES[part], "IDENTITY")
    kind, only = _kind(mode, steps.path), config.normalize_observation_keys
    if kind == "identity" or (part == "state" and only is not None and feature not in only):
        return Statistics("identity")
    file = steps.by_name[name].state_file
    if not file or feature not in config.features:
        return Statistics(kind)
    path = steps.path.parent / file
    if not path.is_file():
        raise ConfigError("the file of the statistics is missing", got=file, where=steps.path, do="Copy it there.")
    return Statistics(kind, _values(read_small(path, _names(f"{feature}.")), mode, path), str(path))


def _inside(config: Config, family: Family, stored: Mapping[str, Stored], part: Part, prefix: str) -> Statistics:
    """Statistics among the weights, as they were stored before lerobot 0.4."""
    mode = (config.normalization_mapping or {}).get(_TYPES[part], _DEFAULTS[family][0])
    kind = _kind(mode, "config.json: normalization_mapping")
    names = [name for name in _names(prefix) if name in stored]
    if not names:
        return Statistics(kind)
    file = stored[names[0]].file
    return Statistics(kind, _values(read_small(file, names), mode, file), str(file))


def _names(prefix: str) -> list[str]:
    return [prefix + name for name in _STATISTICS]


def _values(arrays: Mapping[str, NDArray[Any]], mode: str, where: Path) -> dict[str, Values]:
    values: dict[str, Values] = {}
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ConfigError(f"{name} is no vector", got=list(array.shape), where=where)
        values[name.rpartition(".")[2]] = tuple(array.astype(np.float64).tolist())
    if mode == "QUANTILE10":
        return {ours: values[theirs] for ours, theirs in (("q01", "q10"), ("q99", "q90")) if theirs in values}
    return values


def _kind(mode: str, where: object) -> Kind:
    if mode not in _MODES:
        raise ConfigError("unknown normalisation mode", got=mode, wanted=f"one of {', '.join(_MODES)}", where=where)
    return _MODES[mode]


def _eps(before: _Steps, after: _Steps) -> float | None:
    given = {
        steps.config(name, _Normalise).eps
        for steps, name in ((before, _NORMALISE), (after, _UNNORMALISE))
        if name in steps.by_name
    }
    if len(given) > 1:
        raise ConfigError("the two processor files have different eps", got=sorted(given), where=before.path.parent)
    return next(iter(given - {_EPS}), None)


# --- features ---


def _cameras(config: Config) -> tuple[str, ...]:
    seen = [_role(name) for name, feature in (config.input_features or {}).items() if feature.type == "VISUAL"]
    return tuple(dict.fromkeys([*seen, *(f"empty_camera_{i}" for i in range(config.empty_cameras))]))


def _role(name: str) -> str:
    return name.removeprefix("observation.images.").removeprefix("observation.")


def _dim(
    folder: Path,
    features: Mapping[str, Feature] | None,
    statistics: Mapping[Part, Statistics],
    part: Part,
    padded: int | None = None,
) -> int | None:
    """:param padded: what a base checkpoint names as its dimensions; a fine-tune of its folder keeps its inputs."""
    feature, counted = (features or {}).get(_FEATURES[part]), statistics[part].dims
    if feature is None or len(feature.shape) != 1 or (counted is not None and counted < feature.shape[0] == padded):
        return counted
    if counted is not None and feature.shape[0] != counted:
        raise ConfigError(
            f"config.json and the statistics disagree on {_FEATURES[part]}",
            got=f"{feature.shape[0]} dimensions and {counted}",
            where=folder,
            do="The statistics belong to another data set.",
        )
    return feature.shape[0]


def _relative(config: Config, before: _Steps, after: _Steps) -> tuple[RelativeActions | None, tuple[str, ...]]:
    """Whether actions are offsets, and the names of the actions."""
    step = before.config(_RELATIVE, _Relative)
    if not before.by_name:
        step = _Relative(config.use_relative_actions, config.relative_exclude_joints, config.action_feature_names)
    elif after.by_name and step.enabled != after.config(_ABSOLUTE, _Relative).enabled:
        raise ConfigError(
            "one processor file makes actions relative, the other does not make them absolute again",
            got=f"{_RELATIVE} {step.enabled}, {_ABSOLUTE} {not step.enabled}",
            where=before.path.parent,
        )
    names = tuple(step.action_names or config.action_feature_names or ())
    if not step.enabled:
        return None, names
    # lerobot's mask is made of names: without them, and for a token in no name, all are relative.
    masked = [name.lower() for name in step.action_names or ()]
    tokens = [token.lower() for token in step.exclude_joints or () if token]
    used = [token for token in tokens if any(token in name for name in masked)]
    # "gripper.pos" is lerobot's name of what ROS calls "gripper"
    bare, joints = ([text.removesuffix(".pos") for text in texts] for texts in (used, masked))
    same = all(any(b in j for b in bare) == any(u in m for u in used) for j, m in zip(joints, masked, strict=True))
    return RelativeActions(exclude=tuple(bare if same and all(bare) else used)), names
