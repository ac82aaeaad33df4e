"""Strict safetensors loading: every tensor is matched by name and shape, or the load fails naming it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phyai_engine.errors import WeightsError

Shape = tuple[int, ...]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU in their stored dtype.

    :param path: a .safetensors file, or a folder with ``model.safetensors`` or
        ``model.safetensors.index.json``.
    :raises WeightsError: missing or damaged file, or shards that disagree with their index.
    """
    if path.is_file():
        return _read_file(path)
    if (path / _INDEX).is_file():
        return _read_shards(path)
    if (path / _SINGLE).is_file():
        return _read_file(path / _SINGLE)
    raise WeightsError("no weights", wanted=f"{_SINGLE} or {_INDEX}", where=path, do="Check the checkpoint path.")


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path, device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read the weights: {error}", where=path, do="Fetch the file again.") from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    try:
        index: dict[str, str] = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read the shard index: {error!r}", where=folder / _INDEX) from None
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(index.values())):
        held = _read_file(folder / shard)
        listed = {name for name, file in index.items() if file == shard}
        if listed != set(held):
            names = ", ".join(sorted(listed ^ set(held))[:5])
            raise WeightsError("a shard and the index disagree", got=names, where=folder / shard)
        tensors.update(held)
    return tensors


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Shape], *, where: object) -> None:
    """Demand exactly the expected floating-point tensors.

    :raises WeightsError: naming what is missing, unexpected, mis-shaped, or not floating point.
    """
    problems = []
    if absent := expected.keys() - tensors.keys():
        problems.append(f"missing: {_names(absent)}")
    if extra := tensors.keys() - expected.keys():
        problems.append(f"unexpected: {_names(extra)}")
    common = sorted(expected.keys() & tensors.keys())
    for name in common:
        if tuple(tensors[name].shape) != expected[name]:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, wanted {list(expected[name])}")
    problems += [f"{n} is {tensors[n].dtype}, not floating point" for n in common if not tensors[n].is_floating_point()]
    if problems:
        raise WeightsError(
            "the checkpoint does not fit the model: " + "; ".join(problems[:12]),
            where=where,
            do="Check the model's options against the checkpoint's configuration.",
        )


def _names(names: Iterable[str], limit: int = 8) -> str:
    ordered = sorted(names)
    text = ", ".join(ordered[:limit])
    return text if len(ordered) <= limit else f"{text} and {len(ordered) - limit} more"
