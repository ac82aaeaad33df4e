"""What a safetensors file holds, read from its header alone: no torch, no weights in memory.

A file is 8 bytes n (little endian), n bytes of JSON, then the tensors; the JSON gives each one's dtype, shape and byte
range after itself. The ranges lie in order, without gaps, to the end of the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phyai_engine.errors import WeightsError

Shape = tuple[int, ...]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# lerobot keeps statistics beside the weights; they are no part of the model.
_NOT_WEIGHTS = ("policy_preprocessor", "policy_postprocessor")
_LONGEST_HEADER = 100_000_000  # bytes, as the format's own library has it

# What numpy reads as it is, and bits per element of the rest.
_NUMPY = MappingProxyType(
    {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
)
_BITS = MappingProxyType(
    {"BOOL": 8, "BF16": 16, "U16": 16, "U32": 32, "U64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
    | {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
)


class _Entry(msgspec.Struct):
    """One tensor as the header has it."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file. :param dtype: in the format's words: F32, BF16, ...

    :param start, stop: its bytes in the file.
    """

    shape: Shape
    dtype: str
    file: Path
    start: int
    stop: int


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by name.

    :param path: a .safetensors file, or a folder: its ``model.safetensors.index.json`` is followed; without one its
        ``model.safetensors`` is read, and without that one all of its ``*.safetensors`` but lerobot's statistics.
    :raises WeightsError: missing or damaged file, shards that disagree with their index, a tensor in two files.
    """
    tensors: dict[str, Stored] = {}
    for file, listed in weight_files(path).items():
        held = _header(file)
        if listed is not None and listed != held.keys():
            names = ", ".join(sorted(listed ^ held.keys())[:5])
            raise WeightsError("a shard and the index disagree", got=names, where=file)
        if twice := held.keys() & tensors.keys():
            raise WeightsError("tensors that another file holds too", got=", ".join(sorted(twice)[:8]), where=file)
        tensors.update(held)
    return tensors


def weight_files(path: Path) -> dict[Path, frozenset[str] | None]:
    """The files of a checkpoint, in the order in which they are read, each with the names that an index lists.

    :raises WeightsError: no weights, or an index that cannot be read.
    """
    if path.is_file():
        return {path: None}
    if (path / INDEX).is_file():
        index = _index(path / INDEX)
        shards = sorted(set(index.values()))
        return {path / s: frozenset(name for name, file in index.items() if file == s) for s in shards}
    if (path / SINGLE).is_file():
        return {path / SINGLE: None}
    found = [f for f in sorted(path.glob("*.safetensors")) if not f.name.startswith(_NOT_WEIGHTS)]
    if not found:
        wanted = f"{SINGLE}, {INDEX} or other *.safetensors"
        raise WeightsError("no weights", wanted=wanted, where=path, do="Check the checkpoint path.")
    return dict.fromkeys(found)


def read_small(path: Path, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Some small tensors of one file, as numpy arrays; those that the file does not hold are absent.

    :raises WeightsError: damaged file, or a dtype that numpy does not have.
    """
    held = _header(path)
    wanted = [name for name in names if name in held]
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with path.open("rb") as stream:
            for name in wanted:
                tensor = held[name]
                stream.seek(tensor.start)
                content = stream.read(tensor.stop - tensor.start)
                if tensor.dtype == "BF16":  # the upper half of a float32
                    wide = np.frombuffer(content, "<u2").astype("<u4") << np.uint32(16)
                    arrays[name] = wide.view("<f4").reshape(tensor.shape)
                elif tensor.dtype in _NUMPY:
                    arrays[name] = np.frombuffer(content, _NUMPY[tensor.dtype]).reshape(tensor.shape)
                else:
                    raise WeightsError(f"{name} is {tensor.dtype}", wanted="floating point or integers", where=path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    return arrays


def _index(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"cannot read the shard index: {error!r}", where=path) from None
    index = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        text = "cannot read the shard index: no weight_map of tensor names to files"
        raise WeightsError(text, where=path)
    return index


def _header(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise _unreadable(path, f"its {size} bytes do not hold a header of {length}")
            content = json.loads(stream.read(length).decode("utf-8"))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"its header is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _unreadable(path, "its header is not a mapping")
    start = 8 + length
    tensors = {name: _stored(path, name, entry, start) for name, entry in content.items() if name != "__metadata__"}
    _check_ranges(path, tensors, start, size)
    return tensors


def _stored(path: Path, name: str, entry: object, start: int) -> Stored:
    try:
        found = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise _unreadable(path, f"its header does not describe {name}: {error}") from None
    dtype, shape, (first, last) = found.dtype, found.shape, found.data_offsets
    bits = 8 * np.dtype(_NUMPY[dtype]).itemsize if dtype in _NUMPY else _BITS.get(dtype)
    if bits is None:
        raise _unreadable(path, f"{name} has the unknown dtype {dtype}")
    if (last - first) * 8 != math.prod(shape) * bits:
        raise _unreadable(path, f"{name} has {last - first} bytes, which is not {dtype} {list(shape)}")
    return Stored(shape, dtype, path, start + first, start + last)


def _check_ranges(path: Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != at:
            raise _unreadable(path, f"{name} begins at byte {tensor.start}, the tensor before it ends at {at}")
        at = tensor.stop
    if at != size:
        raise _unreadable(path, f"it has {size} bytes, its header describes {at}")


def _unreadable(path: Path, reason: str) -> WeightsError:
    return WeightsError(f"cannot read the weights: {reason}", where=path, do="Fetch the file again.")
