"""The golden check: it passes on the recorded sets, and it finds and names what is wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import plain_pi as plain

from phyai_engine.errors import ConfigError, PhyaiError
from phyai_engine.golden import MODES, GoldenReport, golden_command, run_golden
from phyai_engine.models.pi import PiModel, PiOptions, time_embedding
from phyai_engine.weights.pi import random_tensors

GOLDEN = Path(__file__).parents[1] / "golden"
EXPERT = "paligemma_with_expert.gemma_expert.model."
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight"


@pytest.mark.parametrize("name", ["pi0_tiny", "pi05_tiny"])
def test_the_recorded_sets_pass_in_every_mode(name: str) -> None:
    report = run_golden(GOLDEN / name)
    assert report.passed, report.first_bad
    with np.load(GOLDEN / name / "io.npz") as recorded:
        inputs = {n for n in recorded.files if n.startswith(("image_", "mask_"))}
        wanted = set(recorded.files) - inputs - {"tokens", "token_mask", "state", "noise"}
        steps = len(recorded["v_steps"])
    compared = {(c.name, c.step, c.mode) for c in report.comparisons}
    assert {c[0] for c in compared} == wanted
    assert len(compared) == len(MODES) * (len(wanted) - 2 + 2 * steps)
    worst = {c.name: 0.0 for c in report.comparisons}
    for c in report.comparisons:
        worst[c.name] = max(worst[c.name], c.max_abs)
    assert worst["actions"] < 3e-6  # reached 1.2e-6: a real mistake of 5e-6 should not hide under the gate
    assert 0.0 < worst["prefix_embeddings"] < 6e-6


def own_set(folder: Path, **changes: Any) -> Path:
    """A golden folder recorded from the plain forward pass in fp64, at other sizes than the shipped ones."""
    options = PiOptions(
        **{
            "variant": "pi05", "vocab": 50, "vis_width": 12, "vis_depth": 1, "vis_mlp": 16, "vis_heads": 3,
            "width": 16, "depth": 2, "mlp": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "exp_width": 12,
            "exp_mlp": 20, "action_dim": 5, "action_horizon": 6, "num_steps": 4, "prompt_len": 7,
            "image_size": 20, "patch": 5, "cameras": ("front", "left"), **changes,
        }
    )  # fmt: skip
    times = options.spec().times
    tensors = random_tensors(PiModel.expected(options), 8, times, time_embedding(times, options))
    generator = np.random.default_rng(1)
    batch, size = 3, options.image_size
    chunk = (batch, options.action_horizon, options.action_dim)
    arrays: dict[str, Any] = {
        "tokens": generator.integers(0, options.vocab, (batch, options.prompt_len)),
        "token_mask": np.arange(options.prompt_len) < np.array([[7], [3], [5]]),
        "state": generator.uniform(-1, 1, (batch, options.action_dim)).astype(np.float32),
        "noise": generator.standard_normal(chunk).astype(np.float32),
    }
    for camera in options.cameras:
        arrays[f"image_{camera}"] = generator.uniform(-1, 1, (batch, 3, size, size)).astype(np.float32)
        arrays[f"mask_{camera}"] = np.array([True, camera != "left", True])
    arrays |= recorded(plain.PlainPi(options, tensors), arrays)
    garbage = ~arrays["prefix_mask"]
    arrays["prefix_embeddings"][garbage] = np.nan  # masked positions mean nothing and are not compared
    folder.mkdir()
    np.savez(folder / "io.npz", **arrays)
    save_file(tensors, folder / "model.safetensors")
    kept = ("vocab", "vis_width", "vis_mlp", "vis_depth", "vis_heads", "width", "depth", "mlp", "heads")
    dims = {n: getattr(options, n) for n in (*kept, "head_dim", "exp_width", "exp_mlp")}
    (folder / "config.json").write_text(json.dumps({"model": options.variant, "dims": dims, "batch": batch}))
    return folder


def recorded(model: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """What a folder holds besides its inputs."""
    options = model.o
    inputs = {name: torch.from_numpy(arrays[name]) for name in ("tokens", "token_mask", "state")}
    for name, kind in (("images", "image"), ("image_mask", "mask")):
        inputs[name] = torch.from_numpy(np.stack([arrays[f"{kind}_{c}"] for c in options.cameras], axis=1))
    prefix = model.prefix(inputs)
    x, xs, vs = torch.from_numpy(arrays["noise"]).double(), [], []
    for time in options.spec().times:
        xs.append(x)
        vs.append(model.velocity(prefix, x, time))
        x = x - vs[-1] / options.num_steps
    made = {"actions": x, "x_steps": torch.stack(xs), "v_steps": torch.stack(vs), "prefix_embeddings": prefix.tokens}
    for i in range(options.depth):
        made |= {f"prefix_k_layer{i}": prefix.keys[i], f"prefix_v_layer{i}": prefix.values[i]}
    return {"prefix_mask": prefix.mask.numpy(), **{name: tensor.float().numpy() for name, tensor in made.items()}}


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_sizes_come_from_the_folder(tmp_path: Path, variant: str) -> None:
    """Two cameras, three samples, two K/V heads, and a config.json without its optional keys."""
    report = run_golden(own_set(tmp_path / "own", variant=variant))
    assert report.passed, report.first_bad
    assert {c.name for c in report.comparisons} >= {"prefix_k_layer0", "prefix_v_layer1"}


def test_one_camera_and_one_step(tmp_path: Path) -> None:
    report = run_golden(own_set(tmp_path / "own", cameras=("only",), num_steps=1))
    assert report.passed, report.first_bad


def broken_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> GoldenReport:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return run_golden(folder)


def scale_by(name: str, factor: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] * factor

    return change


def swap_scale_and_shift(tensors: dict[str, Tensor]) -> None:
    for kind in ("weight", "bias"):
        name = f"{EXPERT}layers.1.input_layernorm.dense.{kind}"
        scale, shift, gate = tensors[name].chunk(3)
        tensors[name] = torch.cat((shift, scale, gate))


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (scale_by(PROJECTOR, 1.001), "prefix_embeddings"),
        (scale_by(LANGUAGE + "layers.0.self_attn.k_proj.weight", 1.001), "prefix_k_layer0"),
        (scale_by(LANGUAGE + "layers.1.self_attn.v_proj.weight", 1.001), "prefix_v_layer1"),
        (scale_by(EXPERT + "layers.0.mlp.up_proj.weight", 1.05), "v_steps[0]"),
        (swap_scale_and_shift, "v_steps[0]"),
    ],
)  # fmt: skip
def test_the_first_bad_array_is_where_the_fault_is(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], first: str
) -> None:
    report = broken_weights(own_set(tmp_path / "own"), change)
    assert not report.passed
    assert report.first_bad is not None
    assert report.first_bad.label == first


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with np.load(folder / "io.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    np.savez(folder / "io.npz", **arrays)


def configure(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_a_fault_of_one_step_is_named_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays["v_steps"][2, 1].__iadd__(3e-5))
    assert golden_command(str(folder), first_bad=True) == 1
    text = capsys.readouterr().out
    assert "first bad: v_steps[2], mode recorded: max abs 3." in text
    assert "prefix_embeddings" not in text


def test_an_error_below_the_gate_passes_and_nan_fails(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays["actions"].__iadd__(5e-6))
    assert run_golden(folder).passed
    rewrite(folder, lambda arrays: arrays["actions"].__setitem__((0, 0, 0), np.nan))
    bad = run_golden(folder).first_bad
    assert bad is not None
    assert bad.name == "actions"


def test_another_shape_and_an_absent_layer_fail(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays.update(prefix_k_layer9=arrays["prefix_k_layer1"]))
    bad = run_golden(folder).first_bad
    assert bad is not None
    assert bad.name == "prefix_k_layer9"
    rewrite(
        folder,
        lambda arrays: (arrays.pop("prefix_k_layer9"), arrays.update(actions=arrays["actions"][:, 1:])),
    )
    bad = run_golden(folder).first_bad
    assert bad is not None
    assert bad.name == "actions"


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (lambda a: [a.pop(n) for n in list(a) if n.startswith(("prefix_", "v_", "act"))], "prefix_embeddings"),
        (lambda a: a.pop("prefix_k_layer0"), "prefix_k_layer0"),
        (lambda a: a.pop("prefix_v_layer1"), "prefix_v_layer1"),
        (lambda a: a.pop("x_steps"), "x_steps"),
        (lambda a: (a.pop("v_steps"), a.pop("actions")), "v_steps"),
        (lambda a: a.pop("actions"), "actions"),
    ],
)
def test_an_array_that_every_folder_must_hold_fails_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], first: str
) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, change)
    assert golden_command(str(folder), first_bad=False) == 1
    assert f"first bad: {first}, mode recorded: not recorded" in capsys.readouterr().out


def cut(*names: str) -> Callable[[dict[str, Any]], object]:
    return lambda arrays: arrays.update({n: arrays[n][:2] for n in names})


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (cut("x_steps"), "x_steps"),
        (cut("v_steps"), "v_steps"),
        (cut("x_steps", "v_steps"), "x_steps"),
        (lambda a: a.update(x_steps=np.concatenate((a["x_steps"], a["actions"][None]))), "x_steps"),
        (lambda a: a.update(v_steps=a["v_steps"][:0]), "v_steps"),
        (lambda a: a.update(x_steps=np.float32(1)), "x_steps"),
        (lambda a: a.update(v_steps=a["v_steps"][:, :, 1:]), "v_steps[0]"),
        (lambda a: a.update(actions=np.array(["x"])), "actions"),
        (lambda a: a.update(prefix_mask=a["prefix_mask"][:, 1:]), "prefix_mask"),
        (lambda a: a.update(prefix_k_layer0=a["prefix_k_layer0"][:, 0]), "prefix_k_layer0"),
    ],
)
def test_an_array_of_another_shape_fails_alone(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], first: str
) -> None:
    folder = own_set(tmp_path / "own")
    configure(folder, num_steps=4)
    rewrite(folder, change)
    report = run_golden(folder)
    assert report.first_bad is not None
    assert report.first_bad.label == first
    assert "recorded as" in report.first_bad.fault
    changed = {"x_steps", "v_steps"} if first == "x_steps" else {report.first_bad.name}
    assert {c.name for c in report.comparisons if not c.passed} <= changed
    assert report.table().row_count == 9  # every array has its line


def test_the_configured_step_count_is_the_models(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")
    for steps in (3, 5):
        configure(folder, num_steps=steps)
        bad = run_golden(folder).first_bad
        assert bad is not None
        assert bad.label == "x_steps"


def test_without_a_recorded_mask_our_own_tells_the_valid_positions(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")  # NaN is recorded elsewhere
    rewrite(folder, lambda arrays: arrays.pop("prefix_mask"))
    assert run_golden(folder).passed


def test_other_spellings_of_the_same_folder_pass(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own", variant="pi0")
    other = {"tokens": "int32", "state": "float64", "noise": "float64", "prefix_mask": "uint8"}
    for camera in ("front", "left"):
        other |= {f"image_{camera}": "float64", f"mask_{camera}": "uint8"}
    rewrite(folder, lambda arrays: arrays.update({n: arrays[n].astype(t) for n, t in other.items()}))
    configure(folder, variant="dummy", patch=None, prompt_len=None, dtype="torch.float32", seed=3, model=None)
    configure(folder, model_type="pi0")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i in range(2):
        save_file({n: tensors[n] for n in sorted(tensors)[i::2]}, folder / f"part{i}.safetensors")
    report = run_golden(folder)
    assert report.passed, report.first_bad


def test_bfloat16_is_measured(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")
    configure(folder, dtype="bfloat16")
    bad = run_golden(folder).first_bad
    assert bad is not None
    assert 1e-4 < bad.max_abs < 1.0


def test_an_array_that_nobody_compares_fails_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays.update(hidden_step0=np.zeros(3)))
    assert golden_command(str(folder), first_bad=False) == 1
    assert "not compared: hidden_step0" in capsys.readouterr().out


def test_the_command_prints_every_array_with_its_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden_command(str(own_set(tmp_path / "own")), first_bad=False) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.endswith("ok")}
    assert rows.keys() >= {
        "prefix_mask",
        "prefix_embeddings",
        "prefix_k_layer0",
        "x_steps",
        "v_steps",
        "actions",
    }
    assert "4x3x6x5" in rows["v_steps"]
    assert "2.0e-05" in rows["v_steps"]
    assert "all 9 arrays within their gates" in lines[-1]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "not a golden folder"),
        ({"config.json": "[]"}, "config.json is not an object"),
        ({"config.json": '{"model": "gdn"}'}, "got 'gdn', wanted one of pi0, pi05"),
        ({"config.json": '{"model_type": "Gr00tN1d7"}'}, "got 'Gr00tN1d7', wanted one of pi0, pi05"),
    ],
)
def test_folders_that_cannot_be_run_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], message: str
) -> None:
    np.savez(tmp_path / "io.npz", x=np.zeros(1))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert golden_command(str(tmp_path), first_bad=False) == 2
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a["tokens"].__setitem__((0, 0), 50), "token ids outside the vocabulary"),
        (lambda a: a["tokens"].__setitem__((0, 0), -1), "token ids outside the vocabulary, got -1 to"),
        (lambda a: a.update(tokens=a["tokens"] + 0.5), "tokens does not fit the model, got float64"),
        (lambda a: a.update(tokens=a["tokens"][:2]), "tokens does not fit the model, got int64 [2, 7]"),
        (lambda a: a.update(noise=a["noise"][:0]), "noise does not fit the model, got float32 [0, 6, 5]"),
        (lambda a: a.update(noise=np.float32(0)), "'noise' is not recorded, or not with 3 axes"),
        (lambda a: a.pop("tokens"), "'tokens' is not recorded, or not with 2 axes"),
        (lambda a: a.update(mask_left=np.array(["a", "b", "c"])), "mask_left does not fit the model"),
    ],
)
def test_inputs_that_the_model_cannot_take_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, change)
    assert golden_command(str(folder), first_bad=False) == 2
    text = capsys.readouterr().out
    assert message in text
    assert str(folder) in text


def test_content_under_a_false_mask_is_free(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays["tokens"].__setitem__((1, 6), -(10**6)))
    assert run_golden(folder).passed


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dims": [1]}, "dims is not an object"),
        ({"dims": None}, "does not fit the model"),
        ({"head_dim": 0, "dims": {}}, "$.head_dim"),
        ({"cameras": "front"}, "$.cameras"),
        ({"cameras": ["front", "top"]}, "'image_top' is not recorded"),
    ],
)
def test_configurations_that_cannot_be_run_are_named(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    folder = own_set(tmp_path / "own")
    configure(folder, **keys)
    with pytest.raises(PhyaiError) as caught:
        run_golden(folder)
    assert message in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda content: b"", "EOFError"),
        (lambda content: content[:5000], "BadZipFile"),
        (lambda content: content[:3000] + bytes([content[3000] ^ 255]) + content[3001:], "BadZipFile"),
    ],
)
def test_a_damaged_recording_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], cause: str) -> None:
    folder = own_set(tmp_path / "own")
    (folder / "io.npz").write_bytes(damage((folder / "io.npz").read_bytes()))
    with pytest.raises(ConfigError, match=f"not a golden folder: {cause}.*own"):
        run_golden(folder)


def test_whatever_else_fails_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(PiModel, "velocity", fail)
    with pytest.raises(ConfigError, match=r"the folder cannot be run: RuntimeError: out of luck, at .*pi0_tiny"):
        run_golden(GOLDEN / "pi0_tiny")


def test_missing_inputs_and_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays.pop("mask_left"))
    with pytest.raises(ConfigError, match="'mask_left' is not recorded"):
        run_golden(folder)
    shutil.copy(GOLDEN / "pi0_tiny" / "model.safetensors", folder / "model.safetensors")
    assert golden_command(str(folder), first_bad=True) == 2
    assert "does not fit the model" in capsys.readouterr().out


def test_the_matmul_precision_is_given_back(tmp_path: Path) -> None:
    folder = own_set(tmp_path / "own")  # recorded at full precision, as every golden folder is
    torch.set_float32_matmul_precision("medium")
    try:
        assert run_golden(folder).passed
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
