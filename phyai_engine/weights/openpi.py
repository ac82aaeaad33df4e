"""openpi's folders: ``model.safetensors``, ``assets/ASSET/norm_stats.json`` and, after a conversion, ``config.json``.

Nothing in them names the prompt's form or says whether actions are offsets: those are openpi's defaults here, and a
model file corrects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from phyai_engine.config import Kind, PromptConfig
from phyai_engine.errors import ConfigError
from phyai_engine.weights.pi_names import Family
from phyai_engine.weights.recipe import (
    PARTS,
    Missing,
    Part,
    Recipe,
    Source,
    Statistics,
    Values,
    find_tokenizer,
    no_statistics,
    no_tokenizer,
    read_json,
)

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
TOKENIZERS = ("paligemma_tokenizer.model", "tokenizer.model", "tokenizer.json")
HORIZON = 50  # openpi's default
_PROMPTS = MappingProxyType({"pi0": ("plain", 48), "pi05": ("state_bins", 200)})
_KINDS: Mapping[Family, Kind] = MappingProxyType({"pi0": "mean_std", "pi05": "quantile"})


class Config(Struct, frozen=True):
    """What openpi's converter writes; it also names the Gemma variants, whose dimensions the weights tell."""

    action_dim: int | None = None
    action_horizon: int | None = None
    precision: str | None = None


def read_recipe(folder: Path, family: Family, config: Config | None, asset: str = "") -> Recipe:
    """What an openpi folder says, filled up with openpi's defaults.

    :param config: of ``config.json``; None without one. :param asset: which statistics, where there are several.
    :raises ConfigError: unknown asset, statistics that cannot be read.
    """
    notes, missing = [], []
    options: dict[str, Any] = {"time_rule": "accumulate"}
    if config is not None and config.action_horizon is not None:
        options["action_horizon"] = config.action_horizon
    else:
        options["action_horizon"] = HORIZON
        notes.append(
            f"No file gives the horizon: {HORIZON} is assumed, openpi's default. `options: {{action_horizon: N}}`"
        )
    if config is not None and config.precision in ("bfloat16", "float32"):
        options["dtype"] = config.precision
    form, tokens = _PROMPTS[family]
    if family == "pi05":
        notes.append(
            "The state is assumed to be part of the prompt; where it was not (discrete_state_input=False, as in "
            "pi05_libero), give `prompt: {form: plain, max_tokens: 200}`."
        )
    notes.append(
        "Actions are assumed to be absolute; where training used openpi's DeltaActions (its ALOHA configurations), "
        "give `relative_actions: {exclude: [gripper]}`."
    )
    tokenizer = find_tokenizer(folder, TOKENIZERS)
    if tokenizer is None:
        missing.append(no_tokenizer(folder, TOKENIZERS))
    assets = _assets(folder)
    statistics, lacking = _statistics(assets, asset, _KINDS[family], folder)
    source: Source = "openpi" if config is not None or (folder / "assets").is_dir() else "weights only"
    return Recipe(
        source=source,
        statistics=statistics,
        prompt=PromptConfig(form=form, max_tokens=tokens, tokenizer=str(tokenizer or "")),  # type: ignore[arg-type]
        cameras=CAMERAS,
        options=options,
        state_dim=statistics["state"].dims,
        action_dim=statistics["actions"].dims,
        assets=tuple(assets),
        notes=tuple(notes),
        missing=(*missing, *lacking),
    )


def _assets(folder: Path) -> dict[str, Path]:
    """Asset id -> its file; an id may hold slashes, like a data set's name."""
    root = folder / "assets"
    files = sorted(root.rglob("norm_stats.json")) if root.is_dir() else []
    return {file.parent.relative_to(root).as_posix(): file for file in files}


def _statistics(
    assets: Mapping[str, Path], asset: str, kind: Kind, folder: Path
) -> tuple[dict[Part, Statistics], list[Missing]]:
    none: dict[Part, Statistics] = {part: Statistics(kind) for part in PARTS}
    if asset and asset not in assets:
        listed = ", ".join(assets) or "none"
        raise ConfigError(f"no statistics of asset {asset!r}", wanted=f"one of {listed}", where=folder / "assets")
    if not assets:
        return none, [no_statistics(folder, None, "Copy the training run's assets/ASSET/norm_stats.json there")]
    if not asset and len(assets) > 1:
        return none, [
            Missing(
                "asset",
                f"statistics of several data sets: {', '.join(assets)}",
                f"Choose with `asset:` in a model file, e.g. `asset: {next(iter(assets))}`.",
            )
        ]
    path = assets[asset or next(iter(assets))]
    content = read_json(path).get("norm_stats")
    if not isinstance(content, dict):
        raise ConfigError("no statistics: no mapping `norm_stats`", where=path)
    return {part: Statistics(kind, _values(content.get(part), path, part), str(path)) for part in PARTS}, []


def _values(entry: object, path: Path, part: Part) -> dict[str, Values]:
    if not isinstance(entry, dict):
        raise ConfigError(f"no statistics of {part}", wanted="mean, std, q01, q99", where=path)
    values: dict[str, Values] = {}
    for name, numbers in entry.items():
        if numbers is None:
            continue
        if not isinstance(numbers, list) or not all(isinstance(n, (int, float)) for n in numbers):
            raise ConfigError(f"{name} is no list of numbers", where=f"{path}: {part}")
        values[name] = tuple(float(n) for n in numbers)
    return values
