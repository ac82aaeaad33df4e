"""``phyai inspect``: facts, findings, exit codes, and the files that it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.config import RobotConfig, convert, load_model, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.weights.checkpoint import model_from, swapped_cameras

Make = Callable[..., Path]


@pytest.fixture
def make(checkpoints: ModuleType, tmp_path: Path) -> Make:
    """Writes a folder for the robot arm7."""
    robot = load_robot(resolve("robots", "arm7"))

    def write(layout: str = "openpi", family: str = "pi05", **changed: Any) -> Path:
        options = checkpoints.sizes(family)
        writer = {"openpi": checkpoints.write_openpi, "lerobot": checkpoints.write_lerobot}[layout]
        folder: Path = writer(
            tmp_path / layout, checkpoints.weights(options), options, checkpoints.statistics(robot), **changed
        )
        return folder

    return write


def run(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error), lines unbroken."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def as_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_a_usable_folder(make: Make) -> None:
    code, out, _ = run(make("lerobot", renames={"observation.images.front": "observation.images.base_0_rgb"}))
    assert code == 0, out
    for fact in (
        "pi05 (the weights are those of pi05, as config.json says)",
        "16 steps, of which 16 are executed",
        "base_0_rgb, left_wrist_0_rgb, right_wrist_0_rgb",
        "recorded as front",
        "7 of 32 dimensions, absolute",
        "state_bins, at most 200 tokens",
        "tokenizer.model",
        "110 used, 110 expected",
        "model.paligemma_with_expert.gemma_expert.lm_head.weight",
        "statistics of actions: quantile",
        "-3.0718",
        "usable",
    ):
        assert fact in out, fact


def test_as_json(make: Make) -> None:
    folder = make("lerobot", "pi0", rtc_training_max_delay=4, relative=True, names=["gripper"] * 7)
    code, found = as_json(folder)
    assert code == 0 and found["usable"]
    assert (found["family"], found["source"], found["state_dim"]) == ("pi0", "lerobot", 7)
    assert found["tensors"]["used"] == found["tensors"]["expected"] == 105
    assert found["tensors"]["dtypes"] == {"F32": 107}
    assert found["statistics"]["state"]["mean"][5] == pytest.approx(1.8675)
    assert found["rtc_training_max_delay"] == 4
    assert found["relative_actions"] == {"exclude": ["gripper"]}
    assert "delays up to 4 steps" in run(folder)[1]
    assert "relative to the state but those named gripper" in run(folder)[1]


def test_the_files_that_it_writes(make: Make, tmp_path: Path) -> None:
    folder, out = make(), tmp_path / "mine.yaml"
    code, said, _ = run(folder, "--write", out)
    assert code == 0 and "wrote" in said
    assert load_model(out).checkpoint == str(folder)
    assert model_from(out) == model_from(folder)
    robot = tmp_path / "mine_robot.yaml"
    with pytest.raises(ConfigError, match=r"FILL_IN.*at `\$.action_type`"):
        load_robot(robot)
    text = robot.read_text().replace("action_type: FILL_IN", "action_type: joint_velocity")
    with pytest.raises(ConfigError, match=r"Expected `float`, got `str` - at `\$.dt_s`"):
        load_robot(write(robot, text))
    text = text.replace("dt_s: FILL_IN", "dt_s: 0.02").replace("lower: FILL_IN", "lower: -1.0")
    for i in range(1, 8):
        text = text.replace(f"name: action_{i}", f"name: action_{i}, state: state_{i}")
    with pytest.raises(ConfigError, match=r"Expected `float`, got `str` - at `\$.actions\[0\].upper`"):
        load_robot(write(robot, text))
    load_robot(write(robot, text.replace("FILL_IN", "1.0")))
    assert run(folder, "--robot", robot)[0] == 0
    code, _, error = run(folder, "--write", out)
    assert code == 2 and "cannot write the file: File exists" in error


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_names_of_the_data_set_name_the_robot_file(make: Make) -> None:
    names = [f"joint_{i}.pos" for i in range(1, 8)]
    renames = {"observation.images.front": "observation.images.base_0_rgb"}
    text = as_json(make("lerobot", names=names, relative=True, renames=renames, empty_cameras=1))[1]["robot_yaml"]
    found = yaml.safe_load(text)
    assert found["action_type"] == "joint_position"
    assert [entry["name"] for entry in found["state"]] == [f"joint_{i}" for i in range(1, 8)]
    assert found["actions"][2] == {
        "name": "joint_3",
        "state": "joint_3",
        **dict.fromkeys(("lower", "upper", "velocity_max", "acceleration_max"), "FILL_IN"),
    }
    assert {"name": "front", "topic": "front/image_raw", "role": "base_0_rgb"} in found["cameras"]
    assert len(found["cameras"]) == 3
    assert "training data: q01 -2.897, q99 2.897" in text


def test_names_that_yaml_would_read_as_something_else(make: Make) -> None:
    names = ["1.pos", "on", "a, b", "null", "x: y", "0.5", "joint"]
    text = as_json(make("lerobot", names=names))[1]["robot_yaml"]
    found = yaml.safe_load(text)
    wanted = ["1", *names[1:]]
    assert [entry["name"] for entry in found["state"]] == wanted
    assert [entry["state"] for entry in found["actions"]] == wanted
    assert "training value = scale * robot value + offset" in text


def test_everything_that_is_missing_is_told_at_once(make: Make) -> None:
    folder = make("openpi", "pi0")
    (folder / "paligemma_tokenizer.model").unlink()
    (folder / "assets" / "trossen" / "norm_stats.json").unlink()
    code, found = as_json(folder)
    assert code == 1 and not found["usable"]
    tokenizer, statistics = found["missing"]
    assert tokenizer.startswith(f"no tokenizer in {folder}") and "Copy PaliGemma's" in tokenizer
    assert statistics.startswith(f"no statistics in {folder}, which holds assets, config.json")
    assert found["model_yaml"].count("# MISSING: ") == 2
    code, out, _ = run(folder)
    assert code == 1 and "missing no tokenizer" in out and "usable" not in out


def test_bad_statistics_and_missing_tensors_are_findings(make: Make, checkpoints: ModuleType) -> None:
    from safetensors.torch import load_file, save_file

    folder = make("openpi", "pi0")
    stats = folder / "assets" / "trossen" / "norm_stats.json"
    stats.write_text(stats.read_text().replace("1.8675", "NaN"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["state_proj.bias"]
    tensors["state_proj.weight"] = tensors["state_proj.weight"][:, :31].contiguous()
    save_file(tensors, folder / "model.safetensors")
    code, found = as_json(folder)
    assert code == 1
    first, second, third = found["missing"]
    assert "statistics are not finite" in first
    assert second == "tensors are missing: state_proj.bias. Fetch the checkpoint again."
    assert third == "state_proj.weight has shape [40, 31], wanted [40, 32]."


def test_a_model_file_with_a_checkpoint(make: Make, tmp_path: Path) -> None:
    folder = make("openpi", "pi0", asset="a")
    make("openpi", "pi0", asset="b")
    assert as_json(folder)[0] == 1
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({"checkpoint": "openpi", "asset": "b", "options": {"num_steps": 3}}))
    code, found = as_json(path)
    assert code == 0, found["missing"]
    assert found["assets"] == ["a", "b"]
    own = yaml.safe_load(found["model_yaml"])
    assert own == {"family": "pi0", "checkpoint": str(folder), "asset": "b", "options": {"num_steps": 3}}


@pytest.mark.parametrize(
    ("argument", "fragment"),
    [("fake", "the model file names no checkpoint"), ("nowhere/at/all", "no model named"), (".", "no weights")],
)
def test_what_cannot_be_read_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, fragment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(argument)
    assert code == 2 and fragment in error


def robot_file(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = yaml.safe_load(resolve("robots", "arm7").read_text())
    change(content)
    return write(tmp_path / "robot.yaml", yaml.safe_dump(content))


def test_a_robot_that_fits(make: Make) -> None:
    code, out, _ = run(make(), "--robot", "arm7")
    assert code == 0
    assert "No camera of arm7 has the role right_wrist_0_rgb" in out


def swap(content: dict[str, Any]) -> None:
    first, second = content["cameras"]
    first["role"], second["role"] = second["role"], first["role"]


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (swap, "camera front (front/image_raw) has the role left_wrist_0_rgb, and wrist"),
        (lambda c: c["cameras"][0].update(role="top"), "top"),
        (
            lambda c: (c["actions"].pop(), c["state"].pop()),
            "state: the robot file has 6 entries, the policy was trained",
        ),
    ],
)
def test_a_robot_that_does_not_fit(make: Make, tmp_path: Path, change: Any, fragment: str) -> None:
    code, found = as_json(make(), "--robot", robot_file(tmp_path, change))
    assert code == 1
    assert any(fragment in text for text in found["misfits"]), found["misfits"]


def test_relative_actions_by_other_names(make: Make, tmp_path: Path) -> None:
    names = [f"joint_{i}" for i in range(1, 7)] + ["gripper"]
    folder = make("lerobot", relative=True, names=names)
    code, found = as_json(folder, "--robot", "arm7")
    assert code == 1
    assert any(
        "action joint_7: absolute in training (as gripper), relative by its name here" in t for t in found["misfits"]
    )


def test_joints_in_another_order(make: Make, tmp_path: Path) -> None:
    names = [f"joint_{i}.pos" for i in range(1, 8)]
    folder = make("lerobot", names=names)
    for key in ("state", "actions"):
        path = robot_file(tmp_path, lambda c, key=key: c[key].reverse())
        code, found = as_json(folder, "--robot", path)
        assert code == 1
        assert [t for t in found["misfits"] if t.startswith(f"{key}: another order than in training")]
        assert "joint_1, joint_2" in found["misfits"][0]


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_what_a_model_file_answers_is_no_longer_assumed(make: Make, tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    text = f"family: pi05\ncheckpoint: {make()}\nprompt: {{form: plain, max_tokens: 200}}\n"
    _, out, _ = run(write(model, text))
    assert "plain, at most 200 tokens" in out and "state_bins, at" not in out
    assert "assumed to be absolute" in out and "assumed to be part of the prompt" not in out
    _, out, _ = run(write(model, text + "relative_actions: {exclude: []}\n"))
    assert "relative to the state" in out and "assumed" not in out


@pytest.mark.parametrize(
    ("exclude", "names", "tokens"),
    [
        ("gripper.pos", ["wrist.pos", "gripper.pos"], ["gripper"]),
        ("gripper.pos", ["gripper_roll.pos", "gripper.pos"], ["gripper.pos"]),  # bare it would mean both
        (".pos", ["wrist.pos", "gripper.pos"], [".pos"]),
    ],
)
def test_an_excluded_joint_with_lerobot_s_suffix(make: Make, exclude: str, names: list[str], tokens: list[str]) -> None:
    folder = make("lerobot", relative=True, names=names)

    def change(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step["registry_name"] == "relative_actions_processor":
                step["config"]["exclude_joints"] = [exclude]

    edit_json(folder / "policy_preprocessor.json", change)
    assert as_json(folder)[1]["relative_actions"] == {"exclude": tokens}


def test_a_fine_tune_of_the_base_s_folder_keeps_its_inputs(make: Make) -> None:
    """lerobot-train --policy.path=lerobot/pi05_base --rename_map=...: the state is still the base's padded one."""
    folder = make("lerobot")
    edit_json(folder / "config.json", lambda c: c["input_features"]["observation.state"].update(shape=[32]))
    code, found = as_json(folder)
    assert (code, found["state_dim"]) == (0, 7)
    edit_json(folder / "config.json", lambda c: c["input_features"]["observation.state"].update(shape=[14]))
    code, _, error = run(folder)
    assert code == 2 and "disagree on observation.state, got 14 dimensions and 7" in error


def test_aloha_s_grippers_in_lerobot_s_old_units_are_refused(make: Make) -> None:
    code, _, error = run(make("lerobot", "pi0", adapt_to_pi_aloha=True))
    assert code == 2 and "adapt_to_pi_aloha: true" in error


def test_without_torch_the_tensors_are_not_compared(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "phyai_engine.models.pi", None)
    code, found = as_json(make())
    assert code == 0
    assert found["tensors"]["expected"].startswith("unknown without")


# --- cameras ---


@pytest.mark.parametrize(
    ("cameras", "swapped"),
    [
        ([("left_wrist", "a", "right_wrist_0_rgb"), ("right_wrist", "b", "left_wrist_0_rgb")], True),
        ([("a", "left/wrist/image", "right_wrist_0_rgb"), ("b", "right/wrist/image", "left_wrist_0_rgb")], True),
        ([("front", "a", "left_wrist_0_rgb"), ("hand", "b", "base_0_rgb")], True),
        ([("left_wrist", "a", "left_wrist_0_rgb"), ("right_wrist", "b", "right_wrist_0_rgb")], False),
        ([("exterior_left", "a", "base_0_rgb"), ("wrist", "b", "left_wrist_0_rgb")], False),
        ([("cam_1", "a", "base_0_rgb"), ("cam_2", "b", "left_wrist_0_rgb")], False),
        ([("left_wrist", "a", "right_wrist_0_rgb"), ("x", "b", "left_wrist_0_rgb")], False),
        ([("wrist", "a", "left_wrist_0_rgb"), ("left_wrist", "b", "right_wrist_0_rgb")], False),
    ],
)
def test_swapped_cameras_are_named(cameras: list[tuple[str, str, str]], swapped: bool) -> None:
    entries = [{"name": name, "topic": topic, "role": role} for name, topic, role in cameras]
    plain = yaml.safe_load(resolve("robots", "arm7").read_text())
    mine = convert({**plain, "cameras": entries}, RobotConfig, where="")
    found = swapped_cameras(mine, [role for _, _, role in cameras])
    assert len(found) == swapped
    if swapped:
        assert all(word in found[0] for camera in cameras for word in camera)
    assert swapped_cameras(mine, ["other"]) == []


def test_the_shipped_robots_have_no_swapped_cameras() -> None:
    folder = resolve("robots", "arm7").parent
    for path in sorted(folder.glob("*.yaml")):
        robot = load_robot(path)
        assert swapped_cameras(robot, [camera.role for camera in robot.cameras]) == [], path
