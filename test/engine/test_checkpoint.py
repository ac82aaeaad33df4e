"""Whole checkpoint folders of both families and both layouts: what is told of them, and that they run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai_engine.config import (
    ModelConfig,
    PromptConfig,
    RelativeActions,
    RobotConfig,
    RtcOptions,
    convert,
    load_robot,
    resolve,
)
from phyai_engine.errors import ConfigError
from phyai_engine.models.pi import PiModel
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.policy import load_policy
from phyai_engine.types import Chunk, Observation, Request
from phyai_engine.weights.checkpoint import describe, model_from

FAMILIES = ("pi0", "pi05")
LAYOUTS = ("openpi", "lerobot")


@pytest.fixture(scope="module")
def robot() -> RobotConfig:
    return load_robot(resolve("robots", "arm7"))


class Written:
    """Checkpoint folders of one family, with what went in."""

    def __init__(self, checkpoints: ModuleType, robot: RobotConfig, family: str, root: Path) -> None:
        self.module, self.root = checkpoints, root
        self.options: PiOptions = checkpoints.sizes(family)
        self.tensors: dict[str, Tensor] = checkpoints.weights(self.options, seed=3)
        self.statistics: dict[str, dict[str, list[float]]] = checkpoints.statistics(robot)

    def write(self, layout: str, **changed: Any) -> Path:
        writer = {"openpi": self.module.write_openpi, "lerobot": self.module.write_lerobot}[layout]
        folder: Path = writer(self.root / layout, self.tensors, self.options, self.statistics, **changed)
        return folder


@pytest.fixture
def make(checkpoints: ModuleType, robot: RobotConfig, tmp_path: Path) -> Callable[[str], Written]:
    return lambda family: Written(checkpoints, robot, family, tmp_path)


def same(one: PiModel, other: PiModel) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- round trips ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_gives_back_what_went_in(make: Callable[[str], Written], family: str, layout: str) -> None:
    written = make(family)
    config = model_from(written.write(layout))
    options = convert({"variant": config.family, **config.options}, PiOptions, where="")
    rule = {"openpi": "accumulate", "lerobot": "direct"}[layout]
    expected = written.module.sizes(family, time_rule=rule, num_steps=10 if layout == "openpi" else 4)
    assert options == expected
    assert same(PiModel.load(config), PiModel.from_state(options, written.tensors))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_runs_from_a_folder_alone(
    make: Callable[[str], Written], robot: RobotConfig, family: str, layout: str
) -> None:
    policy = load_policy(robot, model_from(make(family).write(layout)))
    grey = np.full((48, 64, 3), 100, dtype=np.uint8)
    seen = Observation(
        images={camera.name: grey for camera in robot.cameras},
        state=np.zeros(7),
        velocity=np.zeros(7),
        instruction="pick up the red block",
        oldest_ros_ns=0,
        newest_ros_ns=0,
        capture_mono_ns=0,
        snapshot_mono_ns=0,
    )
    (chunk,) = policy.infer([Request(0, 0, seen, None, seed=1, remaining_ms=float("nan"))])
    assert isinstance(chunk, Chunk), chunk
    assert chunk.actions.shape == (16, 7)
    low, high = (np.array([getattr(a, end) for a in robot.actions]) for end in ("lower", "upper"))
    assert np.isfinite(chunk.actions).all() and ((chunk.actions > low) & (chunk.actions < high)).all()


def _plain(written: Written, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def _legacy(written: Written, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {written.module.legacy(name): tensor for name, tensor in tensors.items()}


def _both_tied(written: Written, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    embedding = tensors["paligemma_with_expert.paligemma.lm_head.weight"]
    return {**tensors, written.module.LANGUAGE + "embed_tokens.weight": embedding.clone()}


def _only_tied(written: Written, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    both = _both_tied(written, tensors)
    return {name: tensor for name, tensor in both.items() if "paligemma.lm_head" not in name}


def _bare(written: Written, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in written.module.UNUSED}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spelled", [_plain, _legacy, _both_tied, _only_tied, _bare])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_spelling_loads_the_same(
    make: Callable[[str], Written],
    family: str,
    spelled: Callable[[Written, dict[str, Tensor]], dict[str, Tensor]],
    sharded: bool,
) -> None:
    written = make(family)
    folder = written.write("openpi")
    stored = spelled(written, written.tensors)
    if sharded:
        written.module.write_shards(folder, stored)
    else:
        save_file(stored, folder / "model.safetensors")
    config = model_from(folder)
    options = convert({"variant": config.family, **config.options}, PiOptions, where="")
    assert same(PiModel.load(config), PiModel.from_state(options, written.tensors))


def test_bfloat16_matrices_are_told_where_no_file_says_it(make: Callable[[str], Written]) -> None:
    written = make("pi05")
    folder = written.write("openpi", converted=False)
    assert model_from(folder).options["dtype"] == "float32"
    kept = {n: t if ".dense." in n or "embeddings" in n else t.bfloat16() for n, t in written.tensors.items()}
    save_file(kept, folder / "model.safetensors")
    assert model_from(folder).options["dtype"] == "bfloat16"


# --- what is told ---


def test_an_openpi_folder(make: Callable[[str], Written]) -> None:
    written = make("pi0")
    found = describe(written.write("openpi"))
    assert (found.family, found.recipe.source) == ("pi0", "openpi")
    config = found.model()
    assert config.resize == "pillow" and config.relative_actions is None
    folder = written.root / "openpi"
    tokenizer = str(folder / "paligemma_tokenizer.model")
    assert config.prompt == PromptConfig(form="plain", max_tokens=48, tokenizer=tokenizer)
    n = config.normalisation
    assert (n.rule, n.eps, n.state_kind, n.actions_kind) == ("openpi", None, "mean_std", "mean_std")
    assert n.actions.keys() == {"mean", "std"}
    assert n.actions["std"] == tuple(written.statistics["actions"]["std"])
    assert any("absolute" in note for note in found.recipe.notes)
    assert not any("horizon" in note for note in found.recipe.notes)


def test_an_openpi_folder_of_a_training_run_lacks_the_horizon(make: Callable[[str], Written]) -> None:
    found = describe(make("pi05").write("openpi", converted=False))
    assert found.options["action_horizon"] == 50
    assert any("50 is assumed" in note for note in found.recipe.notes)
    assert any("discrete_state_input" in note for note in found.recipe.notes)
    config = found.model()
    assert (config.prompt.form, config.prompt.max_tokens) == ("state_bins", 200)
    assert config.normalisation.state.keys() == {"q01", "q99"}


def test_weights_alone_say_so(make: Callable[[str], Written], tmp_path: Path) -> None:
    save_file(make("pi0").tensors, tmp_path / "model.safetensors")
    found = describe(tmp_path)
    assert found.recipe.source == "weights only"
    assert {point.key for point in found.missing} == {"normalisation", "prompt.tokenizer"}
    with pytest.raises(ConfigError, match=r"no tokenizer.*Also missing: no statistics.*which holds model.safetensors"):
        found.model()


def test_a_lerobot_folder(make: Callable[[str], Written]) -> None:
    written = make("pi0")
    names = [f"joint_{i}.pos" for i in range(6)] + ["gripper.pos"]
    folder = written.write(
        "lerobot",
        cameras=("front", "side"),
        relative=True,
        names=names,
        renames={"observation.images.cam_1": "observation.images.front", "observation.state.x": "observation.state"},
        empty_cameras=1,
        n_action_steps=8,
        rtc_training_max_delay=5,
        min_period=0.01,
    )
    found = describe(folder)
    config, recipe = found.model(), found.recipe
    assert recipe.source == "lerobot" and "config.json" in found.told
    assert recipe.cameras == ("front", "side", "empty_camera_0")
    assert recipe.renames == {"cam_1": "front"}
    assert (recipe.execution_steps, recipe.rtc_training_max_delay) == (8, 5)
    assert config.rtc == RtcOptions(guidance="trained", rtc_max_delay=5)
    assert found.model({"rtc": {"guidance": "vjp"}}).rtc.guide.max_delay == 0  # a model file's word stands
    assert (recipe.state_dim, recipe.action_dim, recipe.action_names) == (7, 7, tuple(names))
    assert config.relative_actions == RelativeActions(exclude=("gripper",))
    assert config.resize == "float"
    tokenizer = str(folder / "tokenizer.model")
    assert config.prompt == PromptConfig(form="verbatim", max_tokens=48, tokenizer=tokenizer)
    assert (config.normalisation.rule, config.normalisation.state_kind) == ("lerobot", "mean_std")
    assert config.options["min_period"] == 0.01
    assert np.allclose(config.normalisation.state["std"], written.statistics["state"]["std"])


@pytest.mark.parametrize(
    ("names", "tokens"), [(None, ()), (["a", "b"], ()), (["a", "Left_Gripper"], ("gripper",))], ids=str
)
def test_lerobot_masks_by_the_stored_names(
    make: Callable[[str], Written], names: list[str] | None, tokens: tuple[str, ...]
) -> None:
    config = model_from(make("pi05").write("lerobot", relative=True, names=names))
    assert config.relative_actions == RelativeActions(exclude=tokens)


def test_pi05_of_lerobot_puts_the_state_into_the_prompt(make: Callable[[str], Written]) -> None:
    found = describe(make("pi05").write("lerobot"))
    config = found.model()
    assert (config.prompt.form, config.prompt.max_tokens, config.prompt.padded_state) == ("state_bins", 200, False)
    assert config.normalisation.actions.keys() == {"q01", "q99"}
    assert config.relative_actions is None
    assert any("padded_state" in note for note in found.recipe.notes)


def test_lerobot_s_bfloat16_keeps_vision_in_float32(make: Callable[[str], Written]) -> None:
    options = model_from(make("pi05").write("lerobot", dtype="bfloat16")).options
    assert (options["dtype"], options["vision_dtype"]) == ("bfloat16", "float32")
    assert "vision_dtype" not in model_from(make("pi05").write("lerobot")).options


@pytest.mark.parametrize(
    ("mode", "kind", "expected"),
    [
        ("MEAN_STD", "mean_std", {"mean", "std"}),
        ("MIN_MAX", "min_max", {"min", "max"}),
        ("QUANTILES", "quantile", {"q01", "q99"}),
        ("IDENTITY", "identity", set()),
    ],
)
def test_modes_of_lerobot(make: Callable[[str], Written], mode: str, kind: str, expected: set[str]) -> None:
    folder = make("pi0").write("lerobot")
    edit_steps(folder, "preprocessor", "normalizer_processor", lambda c: c["norm_map"].update(STATE=mode))
    n = model_from(folder).normalisation
    assert (n.state_kind, n.state.keys()) == (kind, expected)
    assert (n.actions_kind, n.actions.keys()) == ("mean_std", {"mean", "std"})


def test_quantile10_uses_q10_and_q90(make: Callable[[str], Written]) -> None:
    written = make("pi0")
    written.statistics["state"] |= {"q10": [-0.5] * 7, "q90": [0.25] * 7}
    folder = written.write("lerobot")
    edit_steps(folder, "preprocessor", "normalizer_processor", lambda c: c["norm_map"].update(STATE="QUANTILE10"))
    n = model_from(folder).normalisation
    assert (n.state_kind, n.state) == ("quantile", {"q01": (-0.5,) * 7, "q99": (0.25,) * 7})


def edit_steps(folder: Path, file: str, step: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change one step's configuration in a processor file."""
    path = folder / f"policy_{file}.json"
    content = json.loads(path.read_text())
    for entry in content["steps"]:
        if entry["registry_name"] == step:
            change(entry["config"])
    path.write_text(json.dumps(content))


def test_eps_of_the_processor_files(make: Callable[[str], Written]) -> None:
    folder = make("pi0").write("lerobot")
    assert model_from(folder).normalisation.eps is None
    for file, step in (("preprocessor", "normalizer_processor"), ("postprocessor", "unnormalizer_processor")):
        edit_steps(folder, file, step, lambda c: c.update(eps=1e-6))
    assert model_from(folder).normalisation.eps == 1e-6


def test_lerobot_before_0_4(make: Callable[[str], Written]) -> None:
    """No processor files: statistics lie among the weights, steps are named num_steps."""
    written = make("pi0")
    folder = written.write("lerobot", num_steps=6, num_inference_steps=None)
    for path in folder.glob("policy_*"):
        path.unlink()
    stored = {written.module.legacy(name): tensor for name, tensor in written.tensors.items()}
    for prefix, part in (("normalize_inputs.buffer_observation_state", "state"),):
        stored |= {f"{prefix}.{n}": torch.tensor(written.statistics[part][n]) for n in ("mean", "std")}
    for prefix in ("normalize_targets.buffer_action", "unnormalize_outputs.buffer_action"):
        stored |= {f"{prefix}.{n}": torch.tensor(written.statistics["actions"][n]) for n in ("mean", "std")}
    save_file(stored, folder / "model.safetensors")
    found = describe(folder)
    config = found.model()
    assert (config.options["num_steps"], config.options["time_rule"]) == (6, "accumulate")
    assert np.allclose(config.normalisation.actions["std"], written.statistics["actions"]["std"])
    assert config.prompt.form == "verbatim"
    assert any("before 0.4" in note for note in found.recipe.notes)
    PiModel.load(config)


def test_a_tokenizer_one_level_below_is_found(make: Callable[[str], Written]) -> None:
    folder = make("pi0").write("openpi")
    (folder / "paligemma_tokenizer.model").rename(folder / "assets" / "tokenizer.model")
    assert model_from(folder).prompt.tokenizer == str(folder / "assets" / "tokenizer.model")


# --- model files ---


def model_file(path: Path, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_model_file_s_own_keys_win(make: Callable[[str], Written], tmp_path: Path) -> None:
    folder = make("pi05").write("openpi")
    path = model_file(
        tmp_path / "models" / "mine.yaml",
        family="pi05",
        checkpoint="../openpi",
        resize="float",
        prompt={"form": "plain", "max_tokens": 64},
        relative_actions={"exclude": []},
        options={"num_steps": 3, "cameras": ["base_0_rgb"]},
    )
    config, plain = model_from(path), model_from(folder)
    assert config.checkpoint == str(folder)
    assert (config.resize, config.relative_actions) == ("float", RelativeActions(exclude=()))
    assert (config.prompt.form, config.prompt.tokenizer) == ("plain", plain.prompt.tokenizer)
    changed = {"num_steps": 3, "cameras": ["base_0_rgb"], "prompt_len": 64}
    assert config.options == {**plain.options, **changed}
    assert config.normalisation == plain.normalisation
    PiModel.load(config)


def test_another_kind_picks_other_statistics(make: Callable[[str], Written], tmp_path: Path) -> None:
    written = make("pi05")
    written.write("openpi")
    path = model_file(tmp_path / "m.yaml", family="pi05", checkpoint="openpi", normalisation={"kind": "mean_std"})
    n = model_from(path).normalisation
    assert n.state.keys() == n.actions.keys() == {"mean", "std"}
    own = {"actions_kind": "identity", "state": {"q01": [0.0] * 7, "q99": [1.0] * 7}}
    path = model_file(tmp_path / "m.yaml", family="pi05", checkpoint="openpi", normalisation=own)
    n = model_from(path).normalisation
    assert (n.state["q99"], n.actions, n.actions_kind) == ((1.0,) * 7, {}, "identity")


def test_what_is_missing_can_be_given(make: Callable[[str], Written], tmp_path: Path) -> None:
    written = make("pi0")
    save_file(written.tensors, tmp_path / "model.safetensors")
    written.module.write_tokenizer(tmp_path / "deep" / "t.model")
    path = model_file(
        tmp_path / "m.yaml",
        family="pi0",
        checkpoint=".",
        prompt={"tokenizer": "deep/t.model"},
        normalisation={"kind": "limits"},
    )
    config = model_from(path)
    assert config.prompt.tokenizer == str(tmp_path / "deep" / "t.model")
    assert (config.normalisation.state_kind, config.normalisation.state) == ("limits", {})


def test_one_of_several_assets(make: Callable[[str], Written], tmp_path: Path) -> None:
    written = make("pi0")
    folder = written.write("openpi", asset="physical-intelligence/libero")
    written.statistics["state"]["mean"] = [0.5] * 7
    written.write("openpi", asset="droid")
    with pytest.raises(
        ConfigError, match=r"several data sets: droid, physical-intelligence/libero.*Choose with `asset:`"
    ):
        model_from(folder)
    path = model_file(tmp_path / "m.yaml", family="pi0", checkpoint="openpi", asset="droid")
    assert model_from(path).normalisation.state["mean"] == (0.5,) * 7
    path = model_file(tmp_path / "m.yaml", family="pi0", checkpoint="openpi", asset="trossen")
    with pytest.raises(ConfigError, match=r"no statistics of asset 'trossen', wanted one of droid, physical"):
        model_from(path)


def test_the_head_count_of_another_vision_tower_is_given(make: Callable[[str], Written], tmp_path: Path) -> None:
    written = make("pi0")
    written.options = written.module.sizes("pi0", vis_width=40, vis_heads=4)
    written.tensors = written.module.weights(written.options)
    folder = written.write("openpi")
    with pytest.raises(ConfigError, match=r"vision tower is 40 wide, no multiple of So400m's 72.*vis_heads: N"):
        model_from(folder)
    path = model_file(tmp_path / "m.yaml", family="pi0", checkpoint="openpi", options={"vis_heads": 4})
    PiModel.load(model_from(path))


def test_shipped_models_and_files_without_a_checkpoint_stay_what_they_are(tmp_path: Path) -> None:
    assert model_from("fake").family == "fake"
    assert model_from("pi05_demo") == model_from(resolve("models", "pi05_demo"))
    assert model_from(model_file(tmp_path / "m.yaml", family="fake")) == ModelConfig(family="fake")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        ({"family": "pi0", "checkpoint": "openpi"}, r"family contradicts the weights, got family pi0, and the weights"),
        ({"family": "pi05", "checkpoint": "nowhere"}, r"no such folder, got .*nowhere.*\$.checkpoint"),
        ({"checkpoint": "openpi", "propmt": {}}, r"unknown key 'propmt'.*Did you mean 'prompt'"),
        ({"checkpoint": "openpi", "prompt": {"form": "plan"}}, r"Invalid enum value 'plan' - at `\$.prompt.form`"),
        ({"family": "pi05", "options": 3}, r"Expected `object`, got `int` - at `\$.options`"),
        ([1], r"Expected `object`, got `array`"),
    ],
)
def test_wrong_model_files(make: Callable[[str], Written], tmp_path: Path, content: Any, fragment: str) -> None:
    make("pi05").write("openpi")
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=fragment):
        model_from(path)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"no model named 'pi06'.*pi05"):
        model_from("pi06")


def test_a_folder_is_described_without_torch(make: Callable[[str], Written]) -> None:
    """The node's process has none, and no safetensors either."""
    folder = make("pi05").write("lerobot")
    script = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'safetensors')))\n"
        "from phyai_engine.weights.checkpoint import model_from\n"
        f"print(model_from({str(folder)!r}).family)"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False)
    assert (ran.returncode, ran.stdout) == (0, "pi05\n"), ran.stderr


def test_the_written_folder_holds_what_the_test_thinks(make: Callable[[str], Written]) -> None:
    written = make("pi05")
    stored = load_file(written.write("lerobot") / "model.safetensors")
    assert all(name.startswith("model.") for name in stored)
    assert {name.removeprefix("model.") for name in stored} == written.tensors.keys()
