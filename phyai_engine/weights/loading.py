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

    :param path: a .safetensors file, or a folder: its ``model.safetensors.index.json`` is followed; without one its
        ``model.safetensors`` is read, and without that one all of its ``*.safetensors``.
    :raises WeightsError: missing or damaged file, shards that disagree with their index, a tensor in two files.
    """
    if path.is_file():
        return _read_file(path)
    if (path / _INDEX).is_file():
        return _read_shards(path)
    if (path / _SINGLE).is_file():
        return _read_file(path / _SINGLE)
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        held = _read_file(file)
        if twice := held.keys() & tensors.keys():
            raise WeightsError("tensors that another file holds too", got=_names(twice), where=file)
        tensors.update(held)
    if not tensors:
        wanted = f"{_SINGLE}, {_INDEX} or other *.safetensors"
        raise WeightsError("no weights", wanted=wanted, where=path, do="Check the checkpoint path.")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path, device="cpu")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read the weights: {error}", where=path, do="Fetch the file again.") from None


def _read_shards(folder: Path) -> dict[str, Tensor]:
    try:
        content = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read the shard index: {error!r}", where=folder / _INDEX) from None
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        text = "cannot read the shard index: no weight_map of tensor names to files"
        raise WeightsError(text, where=folder / _INDEX)
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
