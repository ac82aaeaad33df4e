"""How a policy was trained to be fed and read, as the files beside its weights tell it. Needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from phyai_engine.config import Kind, PromptConfig, RelativeActions
from phyai_engine.errors import ConfigError

Part = Literal["state", "actions"]
PARTS: tuple[Part, Part] = ("state", "actions")
Values = tuple[float, ...]
Source = Literal["openpi", "lerobot", "weights only"]
# The statistics that each kind needs, in the order in which they must be: the first at most the second.
NEEDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"mean_std": ("mean", "std"), "quantile": ("q01", "q99"), "min_max": ("min", "max")}
)


@dataclass(frozen=True, slots=True)
class Missing:
    """Something the folder does not hold and a model file can give.

    :param key: where a model file gives it. :param what: a clause. :param do: what the reader should do.
    """

    key: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of one vector.

    :param values: statistic -> a value per dimension, all that are stored. :param where: their file.
    """

    kind: Kind
    values: Mapping[str, Values] = field(default_factory=dict)
    where: str = ""

    @property
    def dims(self) -> int | None:
        """Number of dimensions; None without statistics."""
        return next((len(v) for v in self.values.values()), None)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the files beside the weights say. ``None`` and empty: they do not say.

    :param options: of PiOptions. :param cameras: the model's cameras in order.
    :param renames: the data set's name of a camera -> the model's.
    :param state_dim, action_dim: of the robot it was trained on. :param action_names: likewise.
    :param rule, eps: of the normalisation; :class:`phyai_engine.config.Normalisation` explains them.
    :param execution_steps: of each chunk, as it was evaluated.
    :param rtc_training_max_delay: longest prefix of committed actions seen in training, steps.
    :param notes: what was assumed, and what a reader should know. :param missing: what must be given.
    """

    source: Source
    statistics: Mapping[Part, Statistics]
    prompt: PromptConfig
    cameras: tuple[str, ...] = ()
    renames: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: Literal["openpi", "lerobot"] = "openpi"
    eps: float | None = None
    resize: Literal["pillow", "float"] = "pillow"
    relative: RelativeActions | None = None
    state_dim: int | None = None
    action_dim: int | None = None
    action_names: tuple[str, ...] = ()
    assets: tuple[str, ...] = ()
    execution_steps: int | None = None
    rtc_training_max_delay: int = 0
    notes: tuple[str, ...] = ()
    missing: tuple[Missing, ...] = ()

    def open_notes(self, own: Mapping[str, Any]) -> tuple[str, ...]:
        """The notes that a model file's own keys do not answer."""
        return tuple(note for note in self.notes if not _is_answered(note, own))


def read_json(path: Path) -> dict[str, Any]:
    """One mapping.

    :raises ConfigError: missing file, no JSON, or another value than a mapping.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=path) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", where=path, do="Fetch the file again.") from None
    if not isinstance(content, dict):
        raise ConfigError("not a mapping", got=type(content).__name__, where=path)
    return content


def picked(statistics: Statistics, kind: str, part: Part) -> dict[str, Values]:
    """The two statistics that a kind needs; none for kinds that need none.

    :raises ConfigError: missing, of different lengths, not finite, or not ordered.
    """
    if kind not in NEEDS:
        return {}
    where = f"{statistics.where}: {part}" if statistics.where else part
    for name in NEEDS[kind]:
        if name not in statistics.values:
            raise ConfigError(
                f"the statistics have no {name}",
                got=", ".join(sorted(statistics.values)) or "none",
                wanted=f"{' and '.join(NEEDS[kind])} for normalisation kind {kind!r}",
                where=where,
                do="Compute them over the training data, or give `normalisation:` in a model file.",
            )
    low, high = (statistics.values[name] for name in NEEDS[kind])
    first, second = NEEDS[kind]
    if len(low) != len(high):
        raise ConfigError(
            "statistics of different lengths", got=f"{first} {len(low)}, {second} {len(high)}", where=where
        )
    for at, (a, b) in enumerate(zip(low, high, strict=True)):
        if not (math.isfinite(a) and math.isfinite(b)):
            raise ConfigError("statistics are not finite", got=f"{first} {a}, {second} {b}", where=f"{where}[{at}]")
        if (b < 0) if kind == "mean_std" else (b < a):
            rule = "std >= 0" if kind == "mean_std" else f"{first} <= {second}"
            raise ConfigError("statistics are not ordered", got=f"{a}, {b}", wanted=rule, where=f"{where}[{at}]")
    return {first: low, second: high}


def no_statistics(folder: Path, part: Part | None, do: str) -> Missing:
    """The finding that the folder holds no statistics, with what it holds."""
    there = ", ".join(sorted(child.name for child in folder.iterdir())[:12])
    of = "" if part is None else f" of the {part}"
    return Missing(
        "normalisation" if part is None else f"normalisation.{part}",
        f"no statistics{of} in {folder}, which holds {there}",
        f"{do}, or give `normalisation:` in a model file.",
    )


def find_tokenizer(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of the names that the folder holds, itself or one level below."""
    below = sorted(child for child in folder.iterdir() if child.is_dir())
    return next((at / name for name in names for at in (folder, *below) if (at / name).is_file()), None)


def no_tokenizer(folder: Path, names: tuple[str, ...]) -> Missing:
    """The finding that none of the names is there."""
    return Missing(
        "prompt.tokenizer",
        f"no tokenizer in {folder} ({', '.join(names)})",
        "Copy PaliGemma's (of google/paligemma-3b-pt-224; openpi names it paligemma_tokenizer.model) into the folder, "
        "or give `prompt: {tokenizer: FILE}` in a model file.",
    )


def _is_answered(note: str, own: Mapping[str, Any]) -> bool:
    """The model file has the keys that a note asks for; it names them as `YAML`."""
    asked = [yaml.safe_load(text) for text in re.findall("`(.+?)`", note)]
    asked = [keys for keys in asked if isinstance(keys, dict)]

    def has(given: object, wanted: object) -> bool:
        if not isinstance(wanted, dict) or not isinstance(given, Mapping):
            return True
        return all(key in given for key in wanted)

    return bool(asked) and all(key in own and has(own[key], keys[key]) for keys in asked for key in keys)
