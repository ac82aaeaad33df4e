"""The golden check: it passes on the recorded sets, and it finds and names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai_engine.errors import ConfigError
from phyai_engine.golden import MODES, GoldenReport, golden_command, run_golden
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.runner import Runner
from phyai_engine.types import Row
from phyai_engine.weights.pi import checkpoint_name

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
    """A golden folder made by our own model, at other sizes than the recorded ones."""
    options = PiOptions(
        **{
            "variant": "pi05", "vocab": 50, "vis_width": 12, "vis_depth": 1, "vis_mlp": 16, "vis_heads": 3,
            "width": 16, "depth": 2, "mlp": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "exp_width": 12,
            "exp_mlp": 20, "action_dim": 5, "action_horizon": 6, "num_steps": 4, "prompt_len": 7,
            "image_size": 20, "patch": 5, "cameras": ("front", "left"), **changes,
        }
    )  # fmt: skip
    model = PiModel.random(options, seed=8)
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
    samples = {
        **arrays,
        "images": np.stack([arrays[f"image_{c}"] for c in options.cameras], 1),
        "image_mask": np.stack([arrays[f"mask_{c}"] for c in options.cameras], 1),
    }
    zero = np.zeros(chunk[1:], np.float32)
    rows = [
        Row(
            {n: samples[n][i] for n in model.spec.inputs},
            zero,
            zero,
            np.zeros(options.num_steps, np.float32),
            i,
        )
        for i in range(batch)
    ]
    xs: list[Any] = []
    vs: list[Any] = []
    runner = Runner(model, (batch,), lambda k, x, v: (xs.append(x), vs.append(v)), lambda i, *_: arrays["noise"][i])  # type: ignore[func-returns-value]
    arrays["actions"] = np.stack([r.actions for r in runner.run(rows) if r.actions is not None])
    arrays["x_steps"], arrays["v_steps"] = np.stack(xs), np.stack(vs)
    inputs = {n: model.to_device(samples[n]) for n in model.spec.inputs}
    tokens, mask = model.embed(inputs)
    arrays["prefix_embeddings"], arrays["prefix_mask"] = tokens.numpy(), mask.numpy()
    for i, (key, value) in enumerate(model.prefix(inputs).cache):
        arrays[f"prefix_k_layer{i}"], arrays[f"prefix_v_layer{i}"] = key.numpy(), value.numpy()
    garbage = ~arrays["prefix_mask"]
    arrays["prefix_embeddings"][garbage] = np.nan  # masked positions mean nothing and are not compared
    folder.mkdir()
    np.savez(folder / "io.npz", **arrays)
    save_file(
        {checkpoint_name(n): t.contiguous() for n, t in model.state_dict().items()},
        folder / "model.safetensors",
    )
    kept = ("vocab", "vis_width", "vis_mlp", "vis_depth", "vis_heads", "width", "depth", "mlp", "heads")
    dims = {n: getattr(options, n) for n in (*kept, "head_dim", "exp_width", "exp_mlp")}
    (folder / "config.json").write_text(json.dumps({"model": options.variant, "dims": dims, "batch": batch}))
    return folder


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


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with np.load(folder / "io.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    np.savez(folder / "io.npz", **arrays)


def test_a_fault_of_one_step_is_named_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own_set(tmp_path / "own")
    rewrite(folder, lambda arrays: arrays["v_steps"][2, 1].__iadd__(3e-5))
    assert golden_command(str(folder), first_bad=True) == 1
    text = capsys.readouterr().out
    assert "first bad: v_steps[2], mode recorded: max abs 3.0" in text
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
