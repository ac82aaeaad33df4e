"""Headers of safetensors files, read without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from phyai_engine.errors import WeightsError
from phyai_engine.weights.header import read_small, stored_tensors, weight_files


def test_what_a_file_holds(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(()), "c": torch.zeros(0, 4)}, file)
    for path in (file, tmp_path):
        found = stored_tensors(path)
        assert {name: (t.shape, t.dtype, t.file) for name, t in found.items()} == {
            "a": ((2, 3), "BF16", file),
            "b": ((), "F32", file),
            "c": ((0, 4), "F32", file),
        }
        assert found["a"].stop - found["a"].start == 12


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
)
def test_small_tensors_are_read_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.tensor([[0.0, 1.0, 2.5], [3.0, 100.0, 7.0]]).to(dtype)
    save_file({"x": values, "y": torch.zeros(5)}, tmp_path / "s.safetensors")
    read = read_small(tmp_path / "s.safetensors", ["x", "absent"])
    assert read.keys() == {"x"}
    assert np.array_equal(read["x"], values.double().numpy())
    assert read["x"].shape == (2, 3)


def test_an_odd_dtype_is_named(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3).to(torch.float8_e4m3fn)}, tmp_path / "s.safetensors")
    assert stored_tensors(tmp_path)["x"].dtype == "F8_E4M3"
    with pytest.raises(WeightsError, match=r"x is F8_E4M3"):
        read_small(tmp_path / "s.safetensors", ["x"])


def test_statistics_beside_the_weights_are_not_weights(tmp_path: Path) -> None:
    for name in ("policy_preprocessor_step_3_normalizer_processor", "policy_postprocessor_step_0_x"):
        save_file({"action.mean": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"no weights, wanted model.safetensors"):
        weight_files(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "part.safetensors")
    assert stored_tensors(tmp_path).keys() == {"a"}


def write(path: Path, header: object, body: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "body", "length", "fragment"),
    [
        (b"", b"", 0, "do not hold a header of 0"),
        ({"a": ONE}, bytes(8), 1 << 40, "do not hold a header of 1099511627776"),
        (b"{]", b"", None, "its header is not JSON"),
        (b"\xff\xfe", b"", None, "its header is not JSON"),
        ([1], b"", None, "its header is not a mapping"),
        ({"a": 1}, b"", None, "does not describe a: Expected `object`"),
        ({"a": {**ONE, "shape": [-2]}}, bytes(8), None, "does not describe a: Expected `int` >= 0"),
        ({"a": {**ONE, "dtype": "F33"}}, bytes(8), None, "a has the unknown dtype F33"),
        ({"a": {**ONE, "shape": [3]}}, bytes(8), None, r"a has 8 bytes, which is not F32 \[3\]"),
        ({"a": ONE}, bytes(4), None, r"it has \d+ bytes, its header describes \d+"),
        ({"a": ONE}, bytes(9), None, r"it has \d+ bytes, its header describes \d+"),
        ({"a": ONE, "b": {**ONE, "data_offsets": [4, 12]}}, bytes(12), None, "b begins at byte"),
    ],
)
def test_damage_is_told(tmp_path: Path, header: object, body: bytes, length: int | None, fragment: str) -> None:
    file = tmp_path / "model.safetensors"
    write(file, header, body, length)
    with pytest.raises(WeightsError, match=rf"cannot read the weights: .*{fragment}.*at .*model.safetensors"):
        stored_tensors(tmp_path)


def test_a_file_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"cannot read the weights: Is a directory"):
        stored_tensors(tmp_path)
