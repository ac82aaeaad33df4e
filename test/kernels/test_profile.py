"""Measured profiles: a row decides what is bound, but never over the self-check."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from phyai_kernels import reference

from phyai_engine import doctor
from phyai_engine.config import config_dir, convert, read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.layers import ops, profile
from phyai_engine.layers.ops import CANDIDATES, ByShape, OpShape, load_ops
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


def twice(monkeypatch: pytest.MonkeyPatch, **factors: float) -> None:
    """A candidate of ``linear`` for each kind; a factor other than 1 makes it wrong."""
    kinds = {}
    for kind, factor in factors.items():
        module = ModuleType(f"phyai_kernels.candidate_{kind}")

        def linear(x: Any, weight: Any, bias: Any = None, *, factor: float = factor, kind: str = kind) -> Any:
            return reference.linear(x, weight, bias) * factor

        linear.kind = kind  # type: ignore[attr-defined]
        module.linear = linear  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        kinds[kind] = module.__name__
    monkeypatch.setitem(ops.CANDIDATES, "linear", kinds)


@pytest.mark.gpu
def test_doctor_shows_what_an_edited_row_binds(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of the accelerator's own file, both ways."""
    if device.type == "cpu":
        pytest.skip("a CPU binds the reference anyway")
    monkeypatch.setattr(profile, "config_dir", lambda: tmp_path)
    (tmp_path / "profiles").mkdir()
    dims, name = (968, 2048), profile.accelerator_name(device)
    found = {}
    for choice in ("triton", "reference"):
        row = Measured(op="rms_norm", dtype="bfloat16", dims=dims, choice=choice, us={choice: 1.0})
        save(Profile(accelerator=name, made="by hand", rows=(row,)), profile_path(name))
        found[choice] = {each.topic: each.value for each in doctor.check_kernels(doctor.Machine())}
    assert found["triton"]["kernel rms_norm"].startswith("triton, equals the reference at 1 shape")
    assert found["reference"]["kernel rms_norm"].startswith("reference, measured as the fastest")
    assert f"by profile {profile_path(name).name}" in found["reference"]["kernel rms_norm"]
    assert found["triton"]["kernel attend"] == found["reference"]["kernel attend"]


def test_each_shape_takes_the_kind_that_was_measured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_interpreted", lambda: False)
    twice(monkeypatch, triton=1.0, flashinfer=1.0)
    bound, why = ops._bind("linear", "auto", CPU, {FEW: "flashinfer", MANY: ""}, ops.CANDIDATES["linear"])
    assert isinstance(bound, ByShape)
    assert [bound._table[shape.dtype, shape.dims].kind for shape in (FEW, MANY)] == ["flashinfer", "triton"]
    assert "flashinfer, equals the reference at 1 shape" in why and "triton, equals the reference at 1 shape" in why


def test_a_wrong_kind_leaves_its_shapes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_interpreted", lambda: False)
    twice(monkeypatch, triton=1.0, flashinfer=1.1)
    choices = {FEW: "flashinfer", MANY: "reference"}
    bound, why = ops._bind("linear", "auto", CPU, choices, ops.CANDIDATES["linear"])
    assert [getattr(bound._table[s.dtype, s.dims], "kind", "") for s in (FEW, MANY)] == ["triton", ""]
    assert "flashinfer: is wrong at rows 3" in why
    twice(monkeypatch, triton=1.1, flashinfer=1.1)
    bound, why = ops._bind("linear", "auto", CPU, choices, ops.CANDIDATES["linear"])
    assert bound is None and why.count("is wrong at rows 3") == 2


@pytest.mark.parametrize(
    ("capability", "hip", "tried"),
    [((11, 0), None, "Jetson Thor (sm_110), not measured: triton, then the reference"),
     ((12, 0), None, "(sm_120), not measured: triton"),
     ((8, 9), None, "(sm_89), not measured: triton"),
     ((8, 0), None, "A100 (sm_80), not measured: triton"),
     ((7, 5), None, "any other (any), not measured: triton"),
     ((9, 0), "6.4", "AMD, ROCm (hip), not measured: the reference; the kernels were never run there")],
)  # fmt: skip
def test_an_accelerator_without_a_profile_has_a_rule(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], hip: str | None, tried: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some Board")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    spied(monkeypatch, factor=1.1)
    tries: list[str] = []
    monkeypatch.setattr(ops, "_try_candidate", lambda op, *_: (tries.append(op), (None, "was tried"))[1])
    bound = load_ops("auto", device=torch.device("cuda"), shapes=[FEW])
    assert bound.linear is reference.linear
    assert (
        "by rules, no measured profile some_board.yaml: `phyai tune` writes one; rule for " in bound.reasons["linear"]
    )
    assert tried in bound.reasons["linear"]
    assert tries == ([] if hip else ["linear"])


def test_rules_name_kinds_that_exist_and_one_is_for_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = convert(read_yaml(config_dir() / "profiles" / "rules.yaml"), profile.Rules, where="rules.yaml").rules
    assert {kind for rule in rules for kind in rule.order} <= {kind for kinds in CANDIDATES.values() for kind in kinds}
    assert {"sm_110", "sm_120", "sm_89", "sm_80", "hip", "any"} <= {rule.matches for rule in rules}
    monkeypatch.setattr(profile, "config_dir", lambda: tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "rules.yaml").write_text("rules: [{matches: sm_1, name: x, order: [], why: y}]\n")
    with pytest.raises(ConfigError, match="matches: any"):
        profile.load_rule(CPU)


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
        if path.name != "rules.yaml" and "ros__parameters" not in path.read_text(encoding="utf-8")
    ],
    ids=lambda path: path.stem,
)
def test_shipped_profiles_are_of_this_version(path: Path) -> None:
    shipped = convert(read_yaml(path), Profile, where=str(path))
    assert profile_path(shipped.accelerator).name == path.name
    for row in shipped.rows:
        OpShape(row.op, getattr(torch, row.dtype), row.dims)
        assert row.us[row.choice] <= 1.03 * min(row.us.values())
