"""The whole chain robot -> model -> robot: its inverse, relative actions, and both families' order with real robots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_engine.adapter import Adapter
from phyai_engine.config import (
    ActionEntry,
    ModelConfig,
    Normalisation,
    PromptConfig,
    RelativeActions,
    RobotConfig,
    StateEntry,
    load_robot,
    resolve,
)
from phyai_engine.errors import ConfigError
from phyai_engine.types import BufferSpec, Committed, ModelSpec, Observation, Request

ROBOT = RobotConfig(
    robot_id="two_joints",
    action_type="joint_position",
    dt_s=0.02,
    state=(
        StateEntry(name="gripper", scale=-100.0, offset=100.0),  # topic: 0 closed .. 1 open; policy: percent closed
        StateEntry(name="j1"),
        StateEntry(name="j2"),
    ),
    # not in the order of the state
    actions=(
        ActionEntry(name="j1", state="j1", lower=-1.0, upper=3.0),
        ActionEntry(name="j2", state="j2", lower=-2.0, upper=2.0),
        ActionEntry(name="grip", state="gripper", lower=0.0, upper=1.0, scale=-100.0, offset=100.0),
    ),
)
SPEC = ModelSpec("test", 6, 5, (1.0, 0.5), {"anchor": BufferSpec((5,), "float32")}, ())


def ask(committed: Committed | None = None, state: Any = (0.25, 1.0, 1.0), text: str = "push") -> Request:
    values = np.array(state, dtype=np.float64)
    seen = Observation({}, values, np.full(values.size, np.nan), text, 1, 2, 3, 4)
    return Request(7, 8, seen, committed, seed=11, remaining_ms=50.0)


# --- encode_actions is the inverse of decode: every kind, rule, unit, with and without relative actions ---

STATISTICS: dict[str, dict[str, tuple[float, ...]]] = {
    "identity": {},
    "limits": {},
    "mean_std": {"mean": (0.1, 0.0, 40.0), "std": (0.5, 2.0, 30.0)},
    "quantile": {"q01": (-1.0, -2.0, 0.0), "q99": (1.0, 2.0, 90.0)},
    "min_max": {"min": (-1.0, -2.0, 0.0), "max": (1.0, 2.0, 90.0)},
}
ALOHA_GRIP = msgspec.structs.replace(
    ROBOT,
    state=(StateEntry(name="gripper", units="aloha_gripper"), *ROBOT.state[1:]),
    actions=(
        msgspec.structs.replace(ROBOT.actions[0], scale=-1.0, offset=0.25),
        ROBOT.actions[1],
        msgspec.structs.replace(ROBOT.actions[2], scale=1.0, offset=0.0, units="aloha_gripper"),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    robot=st.sampled_from([ROBOT, ALOHA_GRIP]),
    kind=st.sampled_from(sorted(STATISTICS)),
    rule=st.sampled_from(["openpi", "lerobot"]),
    relative=st.sampled_from([None, ("grip",), (), ("j",)]),
    measured=st.tuples(st.floats(0, 1), st.floats(-1, 3), st.floats(-2, 2)),
    values=st.lists(st.tuples(st.floats(-1, 3), st.floats(-2, 2), st.floats(0, 1)), min_size=1, max_size=6),
)
def test_encode_actions_is_the_inverse_of_decode(
    robot: RobotConfig,
    kind: Any,
    rule: Any,
    relative: tuple[str, ...] | None,
    measured: tuple[float, ...],
    values: list[tuple[float, float, float]],
) -> None:
    given_values = STATISTICS[kind]
    normalisation = Normalisation(
        kind=kind, rule="lerobot" if kind == "min_max" else rule, actions=given_values, state=given_values
    )
    model = ModelConfig(
        family="test",
        normalisation=normalisation,
        relative_actions=None if relative is None else RelativeActions(exclude=relative),
    )
    adapter = Adapter(robot, model, SPEC)
    actions, state = np.array(values), np.array(measured)
    encoded, known = adapter.encode_actions(actions, state)
    assert encoded.shape == (len(values), 5)
    assert encoded.dtype == np.float32
    assert known.tolist() == [True, True, True, False, False]
    assert (encoded[:, 3:] == 0).all()
    np.testing.assert_allclose(adapter.decode(encoded, ask(state=state)), actions, atol=2e-5)


# --- relative actions ---

OFFSETS = ModelConfig(family="test", relative_actions=RelativeActions(exclude=("GRIP",)))


def test_relative_actions_are_offsets_from_the_state_of_the_observation() -> None:
    adapter = Adapter(ROBOT, OFFSETS, SPEC)
    request = ask(state=np.array([0.25, 1.0, -0.5]))  # gripper, j1, j2
    answer = np.zeros((6, 5), dtype=np.float32)
    answer[:, 2] = 75.0  # percent closed: absolute, by its name
    answer[3] = [0.5, -0.25, 50.0, 0.0, 0.0]
    decoded = adapter.decode(answer, request)
    np.testing.assert_allclose(decoded[[0, 5]], [[1.0, -0.5, 0.25]] * 2)  # zero offsets: stay where it is
    np.testing.assert_allclose(decoded[3], [1.5, -0.75, 0.5])  # from the same state for the whole chunk
    encoded, _ = adapter.encode_actions(decoded, request.observation.state)
    np.testing.assert_allclose(encoded, answer, atol=1e-6)


def test_offsets_are_in_policy_units() -> None:
    model = ModelConfig(family="test", relative_actions=RelativeActions(exclude=()))
    adapter = Adapter(ROBOT, model, SPEC)
    answer = np.zeros((6, 5), dtype=np.float32)
    answer[0, 2] = 10.0  # ten percent further closed than 0.75 open
    np.testing.assert_allclose(adapter.decode(answer, ask(state=np.array([0.75, 0.0, 0.0])))[0], [0.0, 0.0, 0.65])


def test_committed_actions_are_taken_relative_to_the_new_state() -> None:
    adapter = Adapter(ROBOT, OFFSETS, SPEC)
    before, now = np.array([0.5, 0.0, 0.0]), np.array([0.5, 0.2, 0.1])
    playing = adapter.decode(np.full((6, 5), 0.3, dtype=np.float32), ask(state=before))
    row = adapter.encode(ask(Committed(playing[1:], 1, 3), state=now))
    np.testing.assert_allclose(row.target[:5, :2], [[0.1, 0.2]] * 5, atol=1e-6)
    np.testing.assert_allclose(adapter.decode(row.target, ask(state=now))[:5], playing[1:], atol=1e-6)


def test_the_anchor_of_a_relative_action_is_no_offset() -> None:
    adapter = Adapter(ROBOT, OFFSETS, SPEC)
    request = ask(state=np.array([0.25, 1.0, -0.5]))
    anchor = adapter.encode(request).inputs["anchor"]
    np.testing.assert_allclose(anchor[:3], [0.0, 0.0, 75.0], atol=1e-6)
    chunk = np.broadcast_to(np.nan_to_num(anchor), (6, 5))
    np.testing.assert_allclose(adapter.decode(chunk, request)[0], [1.0, -0.5, 0.25], atol=1e-6)


def test_limits_of_relative_actions_are_the_largest_offsets() -> None:
    model = ModelConfig(
        family="test",
        normalisation=Normalisation(kind="limits"),
        relative_actions=RelativeActions(exclude=("grip",)),
    )
    answer = np.ones((6, 5), dtype=np.float32)
    decoded = Adapter(ROBOT, model, SPEC).decode(answer, ask(state=np.array([0.5, -1.0, -2.0])))
    np.testing.assert_allclose(decoded[0], [3.0, 2.0, 0.0])  # from one end of the range to the other


@pytest.mark.parametrize(
    ("robot", "exclude", "words"),
    [
        ({"action_type": "joint_velocity"}, (), "takes joint_velocity, which cannot be relative .*Leave relative_act"),
        ({"action_type": "cartesian_delta"}, (), "takes cartesian_delta, which cannot be relative to a state"),
        ({}, ("hand",), r"no action .* has 'hand' in its name, got j1, j2, grip, at relative_actions.exclude.*\[\]"),
        (
            {"actions": (ROBOT.actions[0], msgspec.structs.replace(ROBOT.actions[1], state=""))},
            (),
            "action j2 has no state entry to be relative to, at robot two_joints",
        ),
    ],
)
def test_relative_actions_that_cannot_be(robot: dict[str, Any], exclude: tuple[str, ...], words: str) -> None:
    model = ModelConfig(family="test", relative_actions=RelativeActions(exclude=exclude))
    with pytest.raises(ConfigError, match=words):
        Adapter(msgspec.structs.replace(ROBOT, **robot), model, SPEC)


# --- both families' order of steps, with the robots that are shipped ---

WIDE = ModelSpec(
    family="wide",
    horizon=4,
    action_dim=32,
    times=(1.0, 0.5),
    inputs={
        "images": BufferSpec((3, 3, 8, 8), "float32"),
        "image_mask": BufferSpec((3,), "bool"),
        "tokens": BufferSpec((200,), "int64"),
        "token_mask": BufferSpec((200,), "bool"),
        "state": BufferSpec((32,), "float32"),
    },
    cameras=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
)
ROBOTS = {name: load_robot(resolve("robots", name)) for name in ("aloha", "droid", "libero", "arm7")}
FLIPS = np.array([1, -1, -1, 1, 1, 1, 1] * 2)
GRIPPERS = [6, 13]


def request_of(robot: RobotConfig, state: Any, committed: Committed | None = None) -> Request:
    request = ask(committed, state, text=" fold_the towel ")
    images = {camera.name: np.full((6, 8, 3), 40 * (i + 1), np.uint8) for i, camera in enumerate(robot.cameras)}
    return replace(request, observation=replace(request.observation, images=images))


def text_of(inputs: Any) -> str:
    ids = inputs["tokens"][inputs["token_mask"]]
    assert ids[0] == 2
    return bytes(int(i) - 3 for i in ids[1:]).decode()


def aloha_state(state: Any) -> Any:
    """ALOHA -> policy units, by the triangle of the gripper's horn, rod and rail."""
    policy = FLIPS * state
    rail = 0.01844 + 0.03956 * state[GRIPPERS]
    policy[GRIPPERS] = (np.pi / 2 - np.arccos((0.022**2 + rail**2 - 0.036**2) / (0.044 * rail)) - 0.5476) / 1.082
    return policy


def test_openpi_aloha_pi05() -> None:
    draw = np.random.default_rng(5)
    low, high = draw.uniform(-2.5, -1.5, 32), draw.uniform(1.5, 2.5, 32)
    statistics = {"q01": tuple(low), "q99": tuple(high)}
    model = ModelConfig(
        family="pi05",
        normalisation=Normalisation(kind="quantile", state=statistics, actions=statistics),  # of the padded vectors
        prompt=PromptConfig(form="state_bins", max_tokens=200),
        relative_actions=RelativeActions(),
    )
    adapter, state = Adapter(ROBOTS["aloha"], model, WIDE), draw.uniform(0.1, 0.9, 14)
    request = request_of(ROBOTS["aloha"], state)
    inputs = adapter.encode(request).inputs
    # robot transform -> normalise -> tokenise -> pad
    policy = aloha_state(state)
    normalised = (policy - low[:14]) / (high[:14] - low[:14] + 1e-6) * 2 - 1
    np.testing.assert_allclose(inputs["state"], [*normalised, *[0.0] * 18], atol=1e-6)
    bins = " ".join(str(int(np.floor((value + 1) * 128))) for value in normalised)
    assert text_of(inputs) == f"Task: fold the towel, State: {bins};\nAction: "
    # unnormalise -> absolute -> robot transform, and back
    answer = draw.uniform(-1, 1, (4, 32)).astype(np.float32)
    absolute = (answer[:, :14].astype(np.float64) + 1) / 2 * (high[:14] - low[:14] + 1e-6) + low[:14]
    arms = np.ones(14, dtype=bool)
    arms[GRIPPERS] = False
    absolute[:, arms] += policy[arms]
    wanted = FLIPS * absolute
    wanted[:, GRIPPERS] = (absolute[:, GRIPPERS] + 0.5476 + 0.6213) / 2.1123
    decoded = adapter.decode(answer, request)
    np.testing.assert_allclose(decoded, wanted, atol=1e-9)
    encoded, known = adapter.encode_actions(decoded, state)
    np.testing.assert_allclose(encoded[:, :14], answer[:, :14], atol=1e-6)
    assert known.sum() == 14


def test_openpi_aloha_pi0() -> None:
    draw = np.random.default_rng(5)
    mean, std = draw.normal(size=14), draw.uniform(0.2, 2.0, 14)
    statistics = {"mean": tuple(mean), "std": tuple(std)}
    model = ModelConfig(
        family="pi0", normalisation=Normalisation(kind="mean_std", state=statistics, actions=statistics)
    )
    adapter, state = Adapter(ROBOTS["aloha"], model, WIDE), draw.uniform(0.1, 0.9, 14)
    request = request_of(ROBOTS["aloha"], state)
    inputs = adapter.encode(request).inputs
    np.testing.assert_allclose(inputs["state"][:14], (aloha_state(state) - mean) / (std + 1e-6), atol=1e-6)
    assert (inputs["state"][14:] == 0).all()
    assert text_of(inputs) == "fold the towel\n"
    decoded = adapter.decode(np.zeros((4, 32), dtype=np.float32), request)
    np.testing.assert_allclose(decoded[0, 1], -mean[1])  # absolute: the state adds nothing


def test_lerobot_pi05_with_relative_actions() -> None:
    draw = np.random.default_rng(5)
    robot = ROBOTS["arm7"]
    low, high = draw.uniform(-2.5, -1.5, 7), draw.uniform(1.5, 2.5, 7)
    statistics = {"q01": tuple(low), "q99": tuple(high)}
    model = ModelConfig(
        family="pi05",
        resize="float",
        normalisation=Normalisation(kind="quantile", rule="lerobot", state=statistics, actions=statistics),
        prompt=PromptConfig(form="state_bins", max_tokens=200),
        relative_actions=RelativeActions(exclude=("joint_7",)),
    )
    adapter, state = Adapter(robot, model, WIDE), draw.uniform(-1, 1, 7)
    request = request_of(robot, state)
    inputs = adapter.encode(request).inputs
    normalised = 2 * (state - low) / (high - low) - 1
    np.testing.assert_allclose(inputs["state"], [*normalised, *[0.0] * 25], atol=1e-6)
    bins = " ".join(str(int(np.floor((value + 1) * 128))) for value in normalised)
    assert text_of(inputs) == f"Task: fold the towel, State: {bins};\nAction: "
    answer = draw.uniform(-1, 1, (4, 32)).astype(np.float32)
    wanted = (answer[:, :7].astype(np.float64) + 1) * (high - low) / 2 + low
    wanted[:, :6] += state[:6]
    np.testing.assert_allclose(adapter.decode(answer, request), wanted, atol=1e-9)


def test_lerobot_pi0() -> None:
    draw = np.random.default_rng(5)
    statistics = {"mean": tuple(draw.normal(size=7)), "std": (0.5, 1e-6, 0.2, 1.0, 1.0, 1.0, 0.0)}
    model = ModelConfig(
        family="pi0",
        normalisation=Normalisation(kind="mean_std", rule="lerobot", state=statistics, actions=statistics),
        prompt=PromptConfig(form="verbatim"),
    )
    adapter = Adapter(ROBOTS["arm7"], model, WIDE)
    mean, std = (np.array(statistics[name]) for name in ("mean", "std"))
    request = request_of(ROBOTS["arm7"], mean + 0.5 * std)
    inputs = adapter.encode(request).inputs
    assert text_of(inputs) == " fold_the towel \n"
    np.testing.assert_allclose(inputs["state"][[0, 2, 3]], 0.5 * std[[0, 2, 3]] / (std[[0, 2, 3]] + 1e-8), rtol=1e-5)
    answer = np.full((4, 32), 2.0, dtype=np.float32)
    np.testing.assert_allclose(adapter.decode(answer, request)[0], mean + 2.0 * std, rtol=1e-12)  # no eps: joint_2


def test_committed_actions_survive_the_chain_of_every_robot() -> None:
    draw = np.random.default_rng(5)
    for name, robot in ROBOTS.items():
        relative = None if robot.action_type != "joint_position" else RelativeActions(exclude=())
        model = ModelConfig(family="wide", normalisation=Normalisation(kind="limits"), relative_actions=relative)
        adapter = Adapter(robot, model, WIDE)
        lower, upper = robot.limit("lower", 0.0), robot.limit("upper", 0.0)
        playing = draw.uniform(0.1, 0.9, (3, len(robot.actions))) * (upper - lower) + lower
        state = np.full(len(robot.state), 0.1)
        if relative:
            state[robot.state_index()] = 0.8 * lower + 0.2 * upper
        request = request_of(robot, state, Committed(playing, 1, 3))
        row = adapter.encode(request)
        assert (row.weight[0] == ([1.0] * len(robot.actions) + [0.0] * (32 - len(robot.actions)))).all(), name
        np.testing.assert_allclose(adapter.decode(row.target, request)[:3], playing, atol=1e-5, err_msg=name)
        assert np.abs(row.target).max() <= 1.0 + 1e-6, name
        assert row.inputs["image_mask"].tolist() == [True, True, name == "aloha"]


# --- the robot files ---


def test_aloha_file() -> None:
    robot = ROBOTS["aloha"]
    assert robot.state_names == robot.action_names
    assert robot.state_index().tolist() == list(range(14))
    for entries in (robot.state, robot.actions):
        assert [entry.scale for entry in entries] == FLIPS.tolist()
        assert [i for i, entry in enumerate(entries) if entry.units == "aloha_gripper"] == GRIPPERS
    assert 1 / robot.dt_s == pytest.approx(50)
    left, right = robot.actions[:7], robot.actions[7:]
    assert [(a.lower, a.upper, a.velocity_max) for a in left] == [(a.lower, a.upper, a.velocity_max) for a in right]
    rest = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.5] * 2)  # where ALOHA's runtime parks its arms
    assert ((robot.limit("lower", 0) < rest) & (rest < robot.limit("upper", 0))).all()


def test_droid_file() -> None:
    robot = ROBOTS["droid"]
    adapter = Adapter(robot, ModelConfig(family="pi05"), WIDE)
    answer = np.full((4, 32), 0.5, dtype=np.float32)
    decoded = adapter.decode(answer, request_of(robot, np.zeros(8)))[0]
    np.testing.assert_allclose(decoded * robot.dt_s, [0.1] * 7 + [0.5 / 15])  # half of 0.2 rad a step
    assert decoded[7] == 0.5
    assert robot.actions[7].absolute and not any(action.absolute for action in robot.actions[:7])
    assert 1 / robot.dt_s == pytest.approx(15)


def test_libero_file() -> None:
    robot = ROBOTS["libero"]
    assert (len(robot.state), len(robot.actions), 1 / robot.dt_s) == (8, 7, pytest.approx(20))
    assert [camera.rotation_deg for camera in robot.cameras] == [180, 180]
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    picture[0, 0] = 255
    request = request_of(robot, np.zeros(8))
    seen = replace(request.observation, images={camera.name: picture for camera in robot.cameras})
    images = (
        Adapter(robot, ModelConfig(family="pi05"), WIDE).encode(replace(request, observation=seen)).inputs["images"]
    )
    assert (images[:2, :, 7, 7] == 1).all() and (images[:2, :, 0, 0] == -1).all()
