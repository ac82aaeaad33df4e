"""The parameter table: rows, cross-checks, the shipped files, and a real node that declares and sets them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from phyai_engine.errors import ConfigError
from phyai_ros import parameters
from phyai_ros.parameters import (
    NAMES,
    PLAYER_TABLE,
    TABLE,
    NodeParameters,
    check_file,
    check_value,
    unknown_name,
    validate,
)

FOLDER = Path(__file__).resolve().parents[2] / "config" / "profiles"
# Beside them stand measured profiles of accelerators, which are no parameters.
PROFILES = sorted(path for path in FOLDER.glob("*.yaml") if "ros__parameters" in path.read_text(encoding="utf-8"))
ROWS = {row.name: row for row in TABLE}


# -- the table -----------------------------------------------------------------------------------------------


def test_every_row_is_described_and_its_default_passes() -> None:
    assert len(NAMES) == len(set(NAMES)) == len(TABLE)
    for row in TABLE:
        assert type(row.default) is row.kind, row.name
        assert row.text.endswith("."), row.name
        assert check_value(row, row.default) == "", row.name
        assert (row.low is None) == (row.high is None), row.name
        numeric = row.kind in (int, float)
        assert numeric == (row.low is not None), f"{row.name}: numbers have a range, others have none"


def test_the_parameters_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        NodeParameters().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_hold_s", 10, "max_hold_s must be a double, got 10 (an integer): write 10.0"),
        ("max_hold_s", math.nan, "max_hold_s must be finite, got nan"),
        ("max_hold_s", math.inf, "max_hold_s must be finite, got inf"),
        ("max_hold_s", -0.5, "max_hold_s must be at least 0, got -0.5"),
        ("request_timeout_s", 601.0, "request_timeout_s must be at most 600, got 601.0"),
        ("delay_window", 0, "delay_window must be at least 1, got 0"),
        ("seed", 1.0, "seed must be an integer, got 1.0 (a double)"),
        ("seed", True, "seed must be an integer, got True (true or false)"),
        ("accept_unstamped", 1, "accept_unstamped must be true or false, got 1 (an integer)"),
        ("instruction", 5, "instruction must be a string, got 5 (an integer)"),
        ("robot", None, "robot must be a string, got None (NoneType)"),
        (
            "engine",
            "proces",
            "engine must be one of thread, process, remote, got 'proces'. Did you mean 'process'?",
        ),
        ("schedule", "", "schedule must be one of sync, naive_async, rtc, got ''"),
    ],
)
def test_a_wrong_value_is_named_with_its_limit(name: str, value: Any, reason: str) -> None:
    assert check_value(ROWS[name], value) == reason
    with pytest.raises(ConfigError) as caught:
        NodeParameters(**{name: value})
    assert str(caught.value) == reason


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine": "remote"}, "engine_endpoint is empty"),
        ({"engine_endpoint": "tcp://gpu:5555"}, "the engine is local, got engine: process"),
        ({"engine_key": "r1.key_secret"}, "are of engine: remote"),
        (
            {"engine": "remote", "engine_endpoint": "tcp://gpu:5555", "engine_key": "r1.key_secret"},
            "one of engine_key and engine_server_key is empty",
        ),
        ({"frozen_frames": 1}, "frozen_frames is 1"),
        (
            {"schedule": "sync", "max_hold_s": 1.0},
            "max_hold_s is below request_timeout_s, got 1.0, wanted >= 5.0",
        ),
    ],
)
def test_rows_that_do_not_fit_each_other(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NodeParameters(**given)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 25),
        ({"execution_horizon": 48}, 48),  # 48 + 2 = 50 just fits
        ({"schedule": "sync", "execution_horizon": 50}, 50),
        ({"schedule": "naive_async", "execution_horizon": 1}, 1),
        ({"delay_init_steps": 25}, 25),
    ],
)
def test_the_execution_horizon_that_fits_a_chunk_of_50(given: dict[str, Any], steps: int) -> None:
    assert NodeParameters(**given).check_against(50, 0.02) == steps


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"execution_horizon": 51}, "execution_horizon is longer than a chunk, got 51, wanted <= 50"),
        ({"execution_horizon": 49, "delay_init_steps": 2}, r"longer than a chunk, got 49 \+ 2, wanted <= 50"),
        ({"delay_init_steps": 26}, r"longer than a chunk, got 25 \+ 26, wanted <= 50"),
        (
            {"max_observation_age_s": 0.5},
            r"max_observation_age_s is shorter than .*, got 0.5, wanted > 0.500 \(25 steps\)",
        ),
        (
            {"execution_horizon": 1, "delay_init_steps": 2},
            "delay_init_steps is above execution_horizon, got 2, wanted <= 1",
        ),
    ],
)
def test_horizons_that_do_not_fit_a_chunk_of_50(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NodeParameters(**given).check_against(50, 0.02)


@pytest.mark.parametrize("name", ["max_hold_s", "request_timeout_s"])
def test_durations_shorter_than_a_step(name: str) -> None:
    short = replace(NodeParameters(), **{name: 0.05})
    with pytest.raises(ConfigError, match=f"{name} is shorter than a step, got 0.05, wanted >= 0.1"):
        short.check_against(50, 0.1)


def test_a_horizon_of_one_still_plays_one_step() -> None:
    assert NodeParameters(schedule="sync").check_against(1, 0.02) == 1


# -- set requests --------------------------------------------------------------------------------------------


def test_fixed_rows_may_be_set_only_while_not_configured() -> None:
    current = NodeParameters(robot="arm7", model="fake")
    assert validate({"robot": "other"}, None) == ""
    assert "robot is fixed while the node is configured" in validate({"robot": "other"}, current)
    assert validate({"robot": "arm7"}, current) == ""  # no change
    assert validate({"instruction": "lift", "max_hold_s": 3.0}, current) == ""
    assert validate({"use_sim_time": True, "qos_overrides./x": 1}, current) == ""


def test_a_set_request_is_checked_as_a_whole() -> None:
    current = NodeParameters(schedule="sync", max_hold_s=6.0)
    assert "max_hold_s is below request_timeout_s" in validate({"max_hold_s": 4.0}, current)
    assert "must be finite" in validate({"max_hold_s": math.nan}, None)
    assert current.max_hold_s == 6.0


# -- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.name)
def test_shipped_files_fit_the_table(path: Path) -> None:
    assert check_file(path) == ()


def test_the_default_profile_shows_every_row_with_its_default() -> None:
    assert [p.name for p in PROFILES][:1] == ["default.yaml"]
    content = yaml.safe_load(PROFILES[0].read_text(encoding="utf-8"))
    assert content["/**/policy_node"]["ros__parameters"] == {row.name: row.default for row in TABLE}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "policy_node: {ros__parameters: {max_hold_s: 10}}",
            "policy_node: max_hold_s must be a double, got 10",
        ),
        (
            "/**: {ros__parameters: {execution_horizn: 4}}",
            "unknown parameter 'execution_horizn'. Did you mean 'execution",
        ),
        ("policy_node: {parameters: {}}", "policy_node: wanted one key, `ros__parameters:`"),
        ("[]", "no node name at the top"),
    ],
)
def test_wrong_files_are_told_apart(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text, encoding="utf-8")
    (problem,) = check_file(path)
    assert words in problem
    assert str(path) in problem


def test_names_of_libraries_are_not_ours_to_judge() -> None:
    assert unknown_name("use_sim_time") == unknown_name("qos_overrides./a.subscription.depth") == ""
    assert unknown_name("frozen_frame") == "unknown parameter 'frozen_frame'. Did you mean 'frozen_frames'?"


# -- a real node ---------------------------------------------------------------------------------------------


class Nodes:
    """Makes nodes on contexts of their own and takes them down."""

    def __init__(self) -> None:
        self.open: list[tuple[Any, Any]] = []

    def make(self, *arguments: str, namespace: str = "", **overrides: Any) -> Any:
        import rclpy
        from rclpy.context import Context
        from rclpy.node import Node
        from rclpy.parameter import Parameter

        context = Context()
        rclpy.init(args=list(arguments), context=context)
        node = Node(
            "policy_node",
            namespace=namespace,
            context=context,
            parameter_overrides=[Parameter(name, value=value) for name, value in overrides.items()],
        )
        self.open.append((node, context))
        return node

    def close(self) -> None:
        import rclpy

        for node, context in self.open:
            node.destroy_node()
            rclpy.shutdown(context=context)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def set_on(node: Any, **values: Any) -> Any:
    from rclpy.parameter import Parameter

    return node.set_parameters_atomically([Parameter(name, value=value) for name, value in values.items()])


@pytest.mark.ros
def test_a_node_declares_and_reads_every_row(nodes: Nodes) -> None:
    node = nodes.make(robot="arm7", model="fake", max_hold_s=2.5)
    assert parameters.declare(node) == ()
    assert parameters.read(node) == NodeParameters(robot="arm7", model="fake", max_hold_s=2.5)
    for row in TABLE:
        descriptor = node.describe_parameter(row.name)
        assert descriptor.description == row.text
        ranges = [*descriptor.integer_range, *descriptor.floating_point_range]
        assert [(r.from_value, r.to_value) for r in ranges] == ([] if row.low is None else [(row.low, row.high)])
        assert ("fixed while" in descriptor.additional_constraints) is not row.live


@pytest.mark.ros
@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            {"max_hold_s": 10},
            r"max_hold_s must be a double, got 10 \(an integer\): write 10.0, at parameters of /policy",
        ),
        ({"delay_window": 0}, "delay_window must be at least 1, got 0"),
        ({"instruction": 1}, "instruction must be a string"),
        ({"engine": "gpu"}, "engine must be one of thread, process, remote, got 'gpu'"),
        ({"status_rate_hz": math.nan}, "status_rate_hz must be finite, got nan"),
    ],
)
def test_a_wrong_override_ends_with_a_clear_word(nodes: Nodes, override: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parameters.declare(nodes.make(**override))


@pytest.mark.ros
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({}, "parameter robot is empty, at /policy_node"),
        ({"robot": "arm7"}, "parameter model is empty"),
        ({"robot": "arm7", "model": "fake", "engine": "remote"}, "engine_endpoint is empty"),
    ],
)
def test_read_refuses_what_does_not_fit_together(nodes: Nodes, override: dict[str, Any], words: str) -> None:
    node = nodes.make(**override)
    parameters.declare(node)
    with pytest.raises(ConfigError, match=words):
        parameters.read(node)


@pytest.mark.ros
def test_an_unknown_override_is_reported(nodes: Nodes) -> None:
    (problem,) = parameters.declare(nodes.make(max_holds_s=1.0, use_sim_time=False))
    assert problem == "unknown parameter 'max_holds_s'. Did you mean 'max_hold_s'?"


@pytest.mark.ros
def test_set_requests_reach_the_value_in_force_or_are_refused(nodes: Nodes) -> None:
    node = nodes.make(robot="arm7", model="fake")
    parameters.declare(node)
    held: list[NodeParameters] = []
    parameters.watch(node, lambda: held[-1] if held else None, lambda value, changed: held.append(value))
    assert set_on(node, robot="other").successful  # not configured: any row
    assert held == []
    assert not set_on(node, engine="gpu").successful
    assert not set_on(node, max_hold_s=math.nan).successful
    held.append(parameters.read(node))
    refusal = set_on(node, robot="arm7")
    assert (refusal.successful, "fixed while" in refusal.reason) == (False, True)
    assert set_on(node, instruction="lift", max_hold_s=4.0).successful
    assert (held[-1].instruction, held[-1].max_hold_s, held[-1].robot) == ("lift", 4.0, "other")
    assert len(held) == 2
    assert not set_on(node, instruction="drop", robot="arm7").successful  # all or nothing
    assert held[-1].instruction == node.get_parameter("instruction").value == "lift"


@pytest.mark.ros
@pytest.mark.parametrize("namespace", ["", "line_2/robot_1"])
@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.name)
def test_shipped_files_reach_a_node_in_any_namespace(nodes: Nodes, path: Path, namespace: str) -> None:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))["/**/policy_node"]["ros__parameters"]
    node = nodes.make("--ros-args", "--params-file", str(path), namespace=namespace, robot="arm7", model="fake")
    assert parameters.declare(node) == ()
    read = parameters.read(node)
    given = {name: value for name, value in content.items() if name not in ("robot", "model")}
    assert {name: getattr(read, name) for name in given} == given
    overrides = {name for name in NAMES if name in node._parameter_overrides}
    assert overrides == {*content, "robot", "model"}


@pytest.mark.ros
def test_the_player_node_has_a_table_too(nodes: Nodes) -> None:
    node = nodes.make(robot="arm7", max_tick_gap_s=0.25)
    parameters.declare(node, PLAYER_TABLE)
    for row in PLAYER_TABLE:
        assert check_value(row, row.default) == ""
        assert node.describe_parameter(row.name).description == row.text
    assert node.get_parameter("max_tick_gap_s").value == 0.25
    with pytest.raises(ConfigError, match=r"status_timeout_s must be at least 0.2, got 0.0"):
        parameters.declare(nodes.make(status_timeout_s=0.0), PLAYER_TABLE)
