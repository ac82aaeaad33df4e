"""Files a person wrote: what is read, and that everything wrong is a ConfigError with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phyai_engine.config import (
    CommandOutput,
    ModelConfig,
    RelativeActions,
    RobotConfig,
    config_dir,
    convert,
    load_model,
    load_robot,
    read_yaml,
)
from phyai_engine.errors import ConfigError
from phyai_engine.robot_check import check_robot

NAN, INF = float("nan"), float("inf")
JOINT = {"name": "j", "state": "j", "lower": -1.0, "upper": 1.0, "acceleration_max": 1.0}


def robot(**changes: Any) -> RobotConfig:
    values = {"robot_id": "r", "action_type": "joint_position", "dt_s": 0.02, "state": [{"name": "j"}]}
    made = convert({**values, "actions": [JOINT], **changes}, RobotConfig, where="r.yaml")
    check_robot(made, where="r.yaml")
    return made


# --- YAML ---


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: \xff\xfe\n", "can't decode byte 0xff"),
        (b"a: 2026-13-45\n", "month must be in 1..12"),
        (b"a: " + b"[" * 3000, "recursion"),
        (b"a: !!int ''\n", ""),
        (b"a: &x {b: *x}\n", "recursive"),
        (b"a: &x [*x]\n", "recursive"),
        (b"a: *missing\n", "undefined alias"),
        (b"a: b: c\n", "mapping values"),
    ],
)
def test_what_is_not_yaml_is_told_with_the_file(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s)not YAML: .*{words}") as caught:
        read_yaml(path)
    assert caught.value.where == path


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the file") as caught:
            read_yaml(path)
        assert caught.value.where == path


def test_merge_keys_bring_what_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "merge.yaml"
    path.write_text(
        """
first: &first {lower: 1, upper: 2}
second: &second {<<: *first, upper: 3}
third: {<<: *second, name: a}
both: {lower: 5, <<: [*first, *second]}
other: {<<: [*second, *first]}
""",
        encoding="utf-8",
    )
    read = read_yaml(path)
    assert read["second"] == {"lower": 1, "upper": 3}
    assert read["third"] == {"lower": 1, "upper": 3, "name": "a"}
    assert read["both"] == {"lower": 5, "upper": 2}
    assert read["other"] == {"lower": 1, "upper": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a]\n: 1\n", r"a key is a list or a mapping, got \['a'\]"),
        ("? {a: 1}\n: 1\n", r"a key is a list or a mapping"),
        ("<<: 1\n", "`<<` merges mappings only, got 1"),
        ("<<: [1]\n", "`<<` merges mappings only, got 1"),
    ],
)
def test_keys_that_are_no_keys_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{words}.*keys.yaml:1"):
        read_yaml(path)


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "a: &x {b: 1}\nc:\n  <<: *x\n  d: 1\n  'd': 2\n"])
def test_a_repeated_key_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text, encoding="utf-8")
    line = text.count("\n")
    with pytest.raises(ConfigError, match=rf"key '[ad]' stands twice, at .*twice.yaml:{line}\. Keep one"):
        read_yaml(path)


def test_the_shipped_files_load() -> None:
    robots, models = (sorted((config_dir() / kind).glob("*.yaml")) for kind in ("robots", "models"))
    assert [load_robot(path).robot_id for path in robots] == [path.stem for path in robots]
    assert all(load_model(path).family for path in models)
    assert models


# --- what spans several keys ---


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    ("key", "at", "changes"),
    [
        ("dt_s", r"\$", lambda v: {"dt_s": v}),
        ("joint_max_age_s", r"\$", lambda v: {"joint_max_age_s": v}),
        ("scale", r"\$.state\[0\] \(j\)", lambda v: {"state": [{"name": "j", "scale": v}]}),
        ("offset", r"\$.state\[0\] \(j\)", lambda v: {"state": [{"name": "j", "offset": v}]}),
        ("scale", r"\$.actions\[0\] \(j\)", lambda v: {"actions": [{**JOINT, "scale": v}]}),
        ("offset", r"\$.actions\[0\] \(j\)", lambda v: {"actions": [{**JOINT, "offset": -v}]}),
        (
            "latency_offset_s",
            r"\$.cameras\[0\] \(c\)",
            lambda v: {"cameras": [{"name": "c", "topic": "c", "role": "c", "latency_offset_s": v}]},
        ),
    ],
)
def test_numbers_are_finite(key: str, at: str, changes: Any, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key} is not finite, got .*, at r.yaml: {at}$|float.*\.{key}`, at r.yaml$"
    ):
        robot(**changes(value))


@pytest.mark.parametrize(
    "key",
    [
        *("lower", "upper", "velocity_max", "acceleration_max", "jerk_max"),
        *("command_acceleration_max", "command_jerk_max", "first_step_max", "seam_jump_max"),
    ],
)
def test_a_limit_may_be_infinite_but_is_a_number(key: str) -> None:
    endless = {**JOINT, key: -INF if key == "lower" else INF}
    assert getattr(robot(actions=[endless]).actions[0], key) == endless[key]
    with pytest.raises(ConfigError, match=rf"{key} is not finite, got nan|float.*\.{key}`"):  # the type refuses it
        robot(actions=[{**JOINT, key: NAN}])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": [{"name": "j", "scale": 0.0}]}, r"scale is 0, .*state\[0\] \(j\)"),
        ({"actions": [{**JOINT, "scale": 0.0}]}, r"scale is 0, .*actions\[0\] \(j\)"),
        ({"actions": [JOINT, {**JOINT, "name": "k"}]}, r"two joint actions drive one state entry: j, at .*actions"),
        ({"actions": [JOINT, JOINT]}, "actions names stand twice: j"),
        ({"actions": [{**JOINT, "lower": 1.0}]}, r"limits are not ordered, got 1.0..1.0"),
        ({"actions": [{**JOINT, "state": "x"}]}, "unknown state entry, got x, wanted one of j"),
        ({"actions": [{**JOINT, "state": ""}]}, "needs the state entry it drives"),
        ({"actions": [{**JOINT, "acceleration_max": None}]}, "acceleration_max is missing"),
        ({"actions": [JOINT], "first_step": "ramp", "first_step_max": 0.1}, r"ramp needs .*no velocity_max: \['j'\]"),
        (
            {"actions": [{**JOINT, "velocity_max": 1.0}], "first_step": "ramp"},
            r"ramp needs .*no first_step_max: \['j'\]",
        ),
        (
            {
                "actions": [{**JOINT, "velocity_max": 1.0, "first_step_max": INF}],
                "first_step": "ramp",
                "first_step_max": 0.1,
            },
            r"ramp needs .*no first_step_max: \['j'\]",
        ),
        ({"action_type": "joint_velocity", "stop": "hold_measured"}, "hold_measured needs joint positions"),
        ({"stop": "torque_off"}, "Invalid enum value 'torque_off'"),
        (
            {"action_type": "cartesian_delta", "actions": [{**JOINT, "command_jerk_max": 1.0}]},
            "deltas have no command_acceleration_max",
        ),
        (
            {"workspace": {"state": ["j"], "actions": ["j"], "metres_per_unit": 1.0, "lower": [0.0], "upper": [1.0]}},
            r"a workspace needs cartesian_delta, got joint_position, at r.yaml: \$.workspace",
        ),
        (
            {"cameras": [{"name": "c", "topic": "c", "role": "c", "max_age_s": 0.01}]},
            r"max_age_s is below tolerance_s, got 0.01, wanted >= 0.05, at .*cameras\[0\] \(c\)",
        ),
        ({"command": {"interface": "joint_state"}}, "needs both topic and interface"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        robot(**changes)


def test_cartesian_actions_may_share_a_state_entry() -> None:
    deltas = [{"name": name, "state": "j", "lower": -1.0, "upper": 1.0} for name in ("dx", "dy")]
    assert robot(action_type="cartesian_delta", actions=deltas).action_names == ("dx", "dy")


def test_an_unknown_key_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'uper', at r.yaml: \$.actions\[0\]. Did you mean 'upper'"):
        robot(actions=[{**JOINT, "uper": 1.0}])


@pytest.mark.parametrize(
    ("kind", "command", "words"),
    [
        ("joint_velocity", CommandOutput(topic="t", interface="joint_trajectory"), "cannot carry joint_velocity"),
        ("cartesian_delta", CommandOutput(topic="t", interface="joint_trajectory"), "cannot carry cartesian_delta"),
        ("cartesian_delta", CommandOutput(topic="t", interface="joint_state"), "cannot carry cartesian_delta"),
        ("joint_position", CommandOutput(topic="t"), "needs both topic and interface"),
        ("joint_position", CommandOutput(interface="joint_state"), "needs both topic and interface"),
    ],
)
def test_a_command_interface_carries_what_the_actions_mean(kind: str, command: CommandOutput, words: str) -> None:
    # velocities sent as the positions of a trajectory would drive the arm to them
    with pytest.raises(ConfigError, match=words):
        check_robot(robot(action_type=kind, command=command), where="r.yaml")


CAMERA = {"name": "c", "topic": "c", "role": "c"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cameras": [{**CAMERA, "rotation_deg": 90}]}, r"Invalid enum value 90 - at `\$.cameras\[0\].rotation_deg`"),
        ({"state": [{"name": "j", "units": "aloha"}]}, r"Invalid enum value 'aloha' - at `\$.state\[0\].units`"),
    ],
)
def test_values_of_a_robot_file_that_do_not_exist(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        robot(**changes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"normalisation": {"kind": "minmax"}}, r"Invalid enum value 'minmax' - at `\$.normalisation.kind`, at m.yaml"),
        ({"normalisation": {"rule": "other"}}, r"'other' - at `\$.normalisation.rule`"),
        ({"normalisation": {"eps": -1.0}}, r"`float` >= 0.0 - at `\$.normalisation.eps`"),
        ({"prompt": {"form": "state"}}, r"'state' - at `\$.prompt.form`"),
        ({"resize": "bilinear"}, r"'bilinear' - at `\$.resize`"),
        ({"rtc": {"guidance": "vjp_early"}}, r"'vjp_early', wanted one of none, .*K >= 1.* - at `\$.rtc`, at m.yaml"),
        ({"rtc": {"guidance": "trained"}}, r"'trained' and rtc_max_delay 0, wanted the longest.* - at `\$.rtc`"),
        ({"rtc": {"sigma": 0.0}}, r"`float` > 0.0 - at `\$.rtc.sigma`"),
        ({"rtc": {"max_delay": 3}}, r"unknown key 'max_delay', at m.yaml: \$.rtc.*mean 'rtc_max_delay'"),
        ({"relative_actions": {"excluded": []}}, r"unknown key 'excluded', at m.yaml: \$.relative_.*mean 'exclude'"),
        ({"relative_actions": {"exclude": [""]}}, r"length >= 1 - at `\$.relative_actions.exclude\[0\]`"),
    ],
)
def test_values_of_a_model_file_that_do_not_exist(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert({"family": "pi0", **content}, ModelConfig, where="m.yaml")


def test_relative_actions_leave_grippers_out_unless_told() -> None:
    assert convert({"family": "pi0"}, ModelConfig, where="m").relative_actions is None
    model = convert({"family": "pi0", "relative_actions": {}}, ModelConfig, where="m")
    assert model.relative_actions == RelativeActions(exclude=("gripper",))
