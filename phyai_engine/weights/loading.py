"""Strict loading: every tensor is matched by name, shape and kind before one is read, and read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from phyai_engine.errors import ConfigError, WeightsError
from phyai_engine.weights.header import Shape, Stored, stored_tensors

# The format's words for what a model computes with; fp8 and integers need scales, which nobody reads here.
_DTYPES = MappingProxyType({"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
_FLOATING = frozenset({*_DTYPES, *(str(dtype) for dtype in _DTYPES.values())})


class Described(Protocol):
    """A tensor, or what a file's header says of one."""

    @property
    def shape(self) -> Collection[int]:
        """Its sizes."""

    @property
    def dtype(self) -> object:
        """torch's, or the format's word."""


def device_of(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Where a model's parameters are placed as they are read; ``auto`` is the accelerator where there is one.

    :raises ConfigError: ``cuda`` is asked for and torch has none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device",
            got=f"device: cuda, with torch {torch.__version__}",
            where="device",
            do="Install torch for CUDA and check the driver with nvidia-smi, or write `device: auto`.",
        )
    cuda = name != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def stream_tensors(path: Path, names: Mapping[str, str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint one after the other, on the CPU in their stored dtype, largest first.

    Nothing is mapped: in memory is the tensor that is being looked at, and no other. The largest come while the model
    is still empty.

    :param path: a .safetensors file, or a folder, as ``header.stored_tensors`` takes it.
    :param names: those to read, and what to call them; None = all, as they are.
    :raises WeightsError: as ``stored_tensors``; a file that cannot be read or changed meanwhile; a dtype that is not
        floating point of 16, 32 or 64 bits.
    """
    stored = stored_tensors(path)
    for own in sorted(stored, key=lambda own: stored[own].start - stored[own].stop):
        if names is None or own in names:
            yield own if names is None else names[own], _read(own, stored[own])


def _read(name: str, entry: Stored) -> Tensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightsError(f"{name} is {entry.dtype}, not floating point (16, 32 or 64 bits)", where=entry.file)
    tensor = torch.empty(entry.shape, dtype=dtype)
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.start)
            count = stream.readinto(content)
    except OSError as error:
        raise WeightsError(f"cannot read the weights: {error.strerror}", where=entry.file) from None
    if count != len(content):
        text = f"cannot read the weights: the file ends inside {name}"
        raise WeightsError(text, where=entry.file, do="Fetch the file again.")
    return tensor


def check_tensors(found: Iterable[tuple[str, Described]], expected: Mapping[str, Shape], *, where: object) -> None:
    """Demand exactly the expected floating-point tensors.

    :param found: canonical names, of which the tied embedding's may come twice.
    :raises WeightsError: naming what is missing, unexpected, mis-shaped, or not floating point.
    """
    entries = sorted(found, key=lambda entry: entry[0])
    names = {name for name, _ in entries}
    problems = []
    if absent := expected.keys() - names:
        problems.append(f"missing: {_names(absent)}")
    if extra := names - expected.keys():
        problems.append(f"unexpected: {_names(extra)}")
    common = [(name, entry) for name, entry in entries if name in expected]
    for name, entry in common:
        if tuple(entry.shape) != expected[name]:
            problems.append(f"{name} has shape {list(entry.shape)}, wanted {list(expected[name])}")
    for name, entry in common:
        if str(entry.dtype) not in _FLOATING:
            problems.append(f"{name} is {entry.dtype}, not floating point (16, 32 or 64 bits)")
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
