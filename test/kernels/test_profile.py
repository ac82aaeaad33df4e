"""Measured profiles: a row decides what is bound, but never over the self-check."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from phyai_kernels import reference

from phyai_engine.config import config_dir, convert, read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.layers import ops, profile
from phyai_engine.layers.ops import ByShape, OpShape, load_ops
from phyai_engine.layers.profile import Measured, Profile, load_profile, profile_path
from phyai_engine.tune import save, tune

CPU = torch.device("cpu")
FEW, MANY = OpShape("linear", torch.float32, (3, 20, 8)), OpShape("linear", torch.float32, (70, 20, 8))


def spied(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> list[int]:
    """Make a counting function the only candidate of ``linear``. :return: rows of each call."""
    calls: list[int] = []

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        calls.append(len(x))
        return reference.linear(x, weight, bias) * factor

    module = ModuleType("phyai_kernels.candidate")
    module.linear = linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ops.CANDIDATES, "linear", {"triton": module.__name__})
    return calls


def made(**choices: str) -> Profile:
    """A profile with a row for each of the two shapes."""
    dims = {"few": FEW.dims, "many": MANY.dims}
    rows = [
        Measured(op="linear", dtype="float32", dims=dims[name], choice=choice, us={})
        for name, choice in choices.items()
    ]
    return Profile(accelerator="none", made="by hand", rows=tuple(rows))


def test_a_row_changes_what_is_bound(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spied(monkeypatch)

    def bound(**choices: str) -> tuple[Any, str]:
        chosen = load_ops("triton", device=device, shapes=[FEW, MANY], profile=made(**choices))
        return chosen.linear, chosen.reasons["linear"]

    implementation, why = bound(few="triton", many="triton")
    assert implementation.__name__ == "linear" and why.startswith("triton, equals the reference at 2 shapes")
    implementation, why = bound(few="triton", many="reference")
    assert isinstance(implementation, ByShape)
    assert "triton, equals the reference at 1 shape," in why and "the reference, measured as faster, at rows 70" in why
    calls.clear()
    for rows in (3, 70):
        implementation(torch.ones(rows, 20, device=device), torch.ones(8, 20, device=device))
    assert calls == [3]
    assert bound(few="reference", many="reference") == (reference.linear, "reference, measured as the fastest")
    assert bound(many="a kind of another version")[0].__name__ == "linear"


def test_a_wrong_candidate_is_not_bound_whatever_the_profile_says(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    spied(monkeypatch, factor=1.1)
    chosen = load_ops("triton", device=device, shapes=[FEW], profile=made(few="triton"))
    assert chosen.linear is reference.linear
    assert "is wrong at rows 3" in chosen.reasons["linear"]


def test_a_call_of_another_size_takes_the_nearest_row() -> None:
    table = {
        (torch.float32, (1, 20, 8)): "one",
        (torch.float32, (70, 20, 8)): "many",
        (torch.bfloat16, (9, 20, 8)): "b",
    }
    chosen = ByShape("linear", {key: (lambda *_, name=name: name) for key, name in table.items()})
    weight = torch.ones(8, 20)
    assert [chosen(torch.ones(rows, 20), weight) for rows in (1, 2, 50, 400)] == ["one", "one", "many", "many"]
    assert chosen(torch.ones(70, 20).bfloat16(), weight.bfloat16()) == "b"


def test_without_a_profile_the_rules_decide_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "config_dir", lambda: tmp_path)
    assert profile_path("NVIDIA H200").name == "h200.yaml"
    assert profile_path("NVIDIA GeForce RTX 4090").name == "geforce_rtx_4090.yaml"
    found, origin = load_profile(CPU)
    assert found is None and origin == "rules, no measured profile cpu.yaml: `phyai tune` writes one"
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "cpu.yaml").write_text("accelerator: cpu\nmade: x\nrows: [{op: linear}]\n")
    with pytest.raises(ConfigError, match="rows"):
        load_profile(CPU)


def test_what_tune_writes_is_what_the_selector_reads(tmp_path: Path) -> None:
    shapes = [FEW, OpShape("gated_up", torch.bfloat16, (3, 20, 8))]
    measured = tune(shapes, CPU, "a model")
    assert [(row.op, row.dtype, row.dims, row.choice) for row in measured.rows] == [
        ("linear", "float32", (3, 20, 8), "reference"),
        ("gated_up", "bfloat16", (3, 20, 8), "reference"),
    ]
    assert all(row.us["reference"] > 0 for row in measured.rows)
    path = tmp_path / "cpu.yaml"
    save(measured, path)
    assert convert(read_yaml(path), Profile, where="cpu.yaml") == measured


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted((config_dir() / "profiles").glob("*.yaml"))
        if "ros__parameters" not in path.read_text(encoding="utf-8")
    ],
    ids=lambda path: path.stem,
)
def test_shipped_profiles_are_of_this_version(path: Path) -> None:
    shipped = convert(read_yaml(path), Profile, where=str(path))
    assert profile_path(shipped.accelerator).name == path.name
    for row in shipped.rows:
        OpShape(row.op, getattr(torch, row.dtype), row.dims)
        assert row.us[row.choice] <= 1.03 * min(row.us.values())
