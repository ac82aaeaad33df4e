"""Adapter: what a request becomes for a model, and back; committed actions as targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from phyai_engine.adapter import Adapter
from phyai_engine.config import (
    ActionEntry,
    Camera,
    ModelConfig,
    Normalisation,
    PromptConfig,
    RobotConfig,
    RtcOptions,
    StateEntry,
)
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.rtc import gain_table, prefix_weights
from phyai_engine.transforms.image import planes
from phyai_engine.types import BufferSpec, Committed, ModelSpec, Observation, Refusal, Request

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
        ActionEntry(name="j1", state="j1", lower=-1.0, upper=3.0, acceleration_max=1.0),
        ActionEntry(name="j2", state="j2", lower=-2.0, upper=2.0, acceleration_max=1.0),
        ActionEntry(
            name="grip",
            state="gripper",
            lower=0.0,
            upper=1.0,
            acceleration_max=1.0,
            scale=-100.0,
            offset=100.0,
        ),
    ),
    cameras=(
        Camera(name="wrist", topic="wrist/image", role="left_wrist_0_rgb"),
        Camera(name="front", topic="front/image", role="base_0_rgb"),
    ),
)
SPEC = ModelSpec(
    family="test",
    horizon=6,
    action_dim=5,
    times=(1.0, 0.75, 0.5, 0.25),
    inputs={
        "images": BufferSpec((3, 3, 8, 8), "float32"),
        "image_mask": BufferSpec((3,), "bool"),
        "tokens": BufferSpec((60,), "int64"),
        "token_mask": BufferSpec((60,), "bool"),
        "state": BufferSpec((5,), "float32"),
        "anchor": BufferSpec((5,), "float32"),
    },
    cameras=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
)
MODEL = ModelConfig(family="test", normalisation=Normalisation(kind="limits"))


def observe(**changes: Any) -> Observation:
    values: dict[str, Any] = {
        "images": {
            "front": np.full((8, 8, 3), 255, dtype=np.uint8),
            "wrist": np.full((4, 8, 3), 255, dtype=np.uint8),
        },
        "state": np.array([0.25, 1.0, 1.0]),
        "velocity": np.full(3, np.nan),
        "instruction": "push",
        "oldest_ros_ns": 1,
        "newest_ros_ns": 2,
        "capture_mono_ns": 3,
        "snapshot_mono_ns": 4,
    }
    return Observation(**{**values, **changes})


def ask(committed: Committed | None = None, **changes: Any) -> Request:
    return Request(7, 8, observe(**changes), committed, seed=11, remaining_ms=50.0)


def test_every_input_has_the_declared_shape_and_type() -> None:
    row = Adapter(ROBOT, MODEL, SPEC).encode(ask())
    assert {name: (a.shape, str(a.dtype)) for name, a in row.inputs.items()} == {
        name: (b.shape, b.dtype) for name, b in SPEC.inputs.items()
    }
    assert (row.seed, row.epoch, row.delay_steps) == (11, 7, 0)


def test_only_declared_inputs_are_made() -> None:
    spec = replace(SPEC, inputs={"state": SPEC.inputs["state"]})
    assert set(Adapter(ROBOT, MODEL, spec).encode(ask()).inputs) == {"state"}


def test_cameras_go_to_their_roles_and_a_missing_one_is_masked() -> None:
    inputs = Adapter(ROBOT, MODEL, SPEC).encode(ask()).inputs
    front, wrist, right = inputs["images"]
    assert (front == 1).all()
    assert (wrist[:, 2:6] == 1).all()  # 4x8 lies in the middle
    assert (wrist[:, :2] == -1).all()
    assert (right == -1).all()
    assert inputs["image_mask"].tolist() == [True, True, False]


def test_state_is_scaled_then_normalised_by_the_limits_of_what_drives_it_then_padded() -> None:
    state = Adapter(ROBOT, MODEL, SPEC).encode(ask()).inputs["state"]
    # gripper 0.25 -> 75 % closed, of 0..100; j1 1.0 of -1..3; j2 1.0 of -2..2
    np.testing.assert_allclose(state, [0.5, 0.0, 0.5, 0.0, 0.0], atol=1e-7)


def test_state_entries_without_limits_pass_unchanged() -> None:
    robot = RobotConfig(
        robot_id="delta",
        action_type="cartesian_delta",
        dt_s=0.02,
        state=(StateEntry(name="x", scale=2.0),),
        actions=(ActionEntry(name="dx", lower=-1.0, upper=1.0),),
    )
    inputs = Adapter(robot, MODEL, SPEC).encode(ask(state=np.array([0.7]), images={})).inputs
    np.testing.assert_allclose(inputs["state"], [1.4, 0, 0, 0, 0], atol=1e-6)
    assert np.isnan(inputs["anchor"]).all()
    assert not inputs["image_mask"].any()


def test_anchor_is_the_measured_position_as_an_action() -> None:
    adapter = Adapter(ROBOT, MODEL, SPEC)
    anchor = adapter.encode(ask()).inputs["anchor"]
    assert np.isnan(anchor[3:]).all()
    chunk = np.broadcast_to(np.nan_to_num(anchor), (6, 5))
    np.testing.assert_allclose(adapter.decode(chunk, ask())[0], [1.0, 1.0, 0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("plain", "push\n"), ("state_bins", "Task: push, State: 192 128 192;\nAction: ")],
)
def test_prompt(form: Any, wanted: str) -> None:
    model = ModelConfig(
        family="test",
        normalisation=Normalisation(kind="limits"),
        prompt=PromptConfig(form=form, max_tokens=60),
    )
    inputs = Adapter(ROBOT, model, SPEC).encode(ask()).inputs
    valid = inputs["tokens"][inputs["token_mask"]]
    assert valid[0] == 2
    assert bytes(int(i) - 3 for i in valid[1:]).decode() == wanted
    assert (inputs["tokens"][~inputs["token_mask"]] == 0).all()


def test_the_padded_state_is_written_as_wide_as_the_model() -> None:
    prompt = PromptConfig(form="state_bins", max_tokens=60, padded_state=True)
    model = ModelConfig(family="test", normalisation=Normalisation(kind="limits"), prompt=prompt)
    inputs = Adapter(ROBOT, model, SPEC).encode(ask()).inputs
    valid = inputs["tokens"][inputs["token_mask"]]
    assert bytes(int(i) - 3 for i in valid[1:]).decode() == "Task: push, State: 192 128 192 128 128;\nAction: "


def test_a_padded_state_must_hold_the_robots() -> None:
    robot = msgspec.structs.replace(ROBOT, state=(*ROBOT.state, StateEntry(name="j3")))
    spec = replace(SPEC, inputs={"tokens": SPEC.inputs["tokens"]}, action_dim=3)
    model = ModelConfig(family="test", prompt=PromptConfig(padded_state=True))
    with pytest.raises(ConfigError, match=r"padded state of model test is shorter .*two_joints, got 3, wanted >= 4"):
        Adapter(robot, model, spec)


def test_without_a_state_input_the_plain_prompt_does_not_tell_the_state() -> None:
    # openpi's pi05_libero
    spec = replace(SPEC, inputs={name: SPEC.inputs[name] for name in ("tokens", "token_mask")})
    adapter = Adapter(ROBOT, MODEL, spec)
    first, second = (adapter.encode(ask(state=np.array(v))).inputs for v in ([0.0] * 3, [1.0] * 3))
    assert set(first) == {"tokens", "token_mask"}
    np.testing.assert_array_equal(first["tokens"], second["tokens"])


def test_resampler_and_turn_are_those_of_the_files() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (9, 16, 3), dtype=np.uint8)
    turned = msgspec.structs.replace(
        ROBOT, cameras=(ROBOT.cameras[0], msgspec.structs.replace(ROBOT.cameras[1], rotation_deg=180))
    )
    seen = ask(images={"front": picture, "wrist": picture})
    for resize in ("pillow", "float"):
        model = ModelConfig(family="test", resize=resize)  # type: ignore[arg-type]
        front, wrist, _ = Adapter(turned, model, SPEC).encode(seen).inputs["images"]
        np.testing.assert_array_equal(wrist, planes(picture, 8, resize=resize))  # type: ignore[arg-type]
        np.testing.assert_array_equal(front, planes(picture[::-1, ::-1], 8, resize=resize))  # type: ignore[arg-type]
    assert (planes(picture, 8) != planes(picture, 8, resize="float")).any()


# --- actions ---


@pytest.mark.fault(21)
def test_decode_gives_robot_units_and_drops_padding() -> None:
    actions = np.zeros((6, 5), dtype=np.float32)
    actions[1] = [1.0, -1.0, 0.5, 9.0, 9.0]
    decoded = Adapter(ROBOT, MODEL, SPEC).decode(actions, ask())
    assert decoded.shape == (6, 3)
    assert decoded.dtype == np.float64
    np.testing.assert_allclose(decoded[:2], [[1.0, 0.0, 0.5], [3.0, -2.0, 0.25]])


def test_a_constant_action_is_not_a_target() -> None:
    statistics = {"q01": (-1.0, 0.3, 0.0), "q99": (1.0, 0.3, 90.0)}
    state = {"q01": (0.0, 0.0, 0.0), "q99": (1.0, 1.0, 1.0)}
    model = ModelConfig(family="test", normalisation=Normalisation(kind="quantile", actions=statistics, state=state))
    adapter = Adapter(ROBOT, model, SPEC)
    _, known = adapter.encode_actions(np.ones((2, 3)), observe().state)
    assert known.tolist() == [True, False, True, False, False]
    assert adapter.decode(np.ones((6, 5), dtype=np.float32), ask())[0, 1] == 0.3
    row = adapter.encode(ask(Committed(np.ones((2, 3)), 1, 3)))
    assert (row.weight[0] == [1, 0, 1, 0, 0]).all()


# --- committed ---

TAIL = np.array([[0.0, 0.0, 0.5], [0.2, 0.1, 0.5], [0.4, 0.2, 0.75]])


@pytest.mark.fault(4)
@pytest.mark.parametrize("mask", ["exp", "linear", "ones", "zeros"])
@pytest.mark.parametrize("delay", [0, 1, 3, 5])
def test_committed_actions_become_targets(delay: int, mask: Any) -> None:
    model = ModelConfig(family="test", normalisation=Normalisation(kind="limits"), rtc=RtcOptions(mask=mask))
    adapter = Adapter(ROBOT, model, SPEC)
    row = adapter.encode(ask(Committed(TAIL, delay_steps=delay, execution_steps=3)))
    decoded = adapter.decode(row.target, ask())
    np.testing.assert_allclose(decoded[:3], TAIL, atol=1e-6)
    np.testing.assert_allclose(decoded[3:], [TAIL[-1]] * 3, atol=1e-6)  # held, not zero
    wanted = prefix_weights(6, min(delay, 3), 3, mask)
    np.testing.assert_array_equal(row.weight[:, :3], np.repeat(wanted[:, None], 3, axis=1))
    assert (row.weight[:, 3:] == 0).all()
    assert (row.weight[3:] == 0).all()
    assert (row.weight[: min(delay, 3), :3] == 1).all()
    assert row.delay_steps == min(delay, 3)  # of the rows that are there
    np.testing.assert_array_equal(row.gain, gain_table(SPEC.times, 4.0))
    assert row.gain.max() == 4.0


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"guidance": "gauss"}, [1 / t for t in SPEC.times]),
        ({"guidance": "none"}, [0.0] * 4),
        ({"guidance": "prefix_lock"}, [0.0] * 4),
        ({"guidance": "trained", "rtc_max_delay": 3}, [0.0] * 4),
        ({"guidance": "vjp_early:2", "beta": 3.0, "sigma": 0.4}, gain_table(SPEC.times, 3.0, 0.4)),
    ],
)
def test_gains_are_the_modes(options: dict[str, Any], wanted: Any) -> None:
    adapter = Adapter(ROBOT, ModelConfig(family="test", rtc=RtcOptions(**options)), SPEC)
    row = adapter.encode(ask(Committed(TAIL, 1, 3)))
    np.testing.assert_allclose(row.gain, wanted, rtol=1e-6)
    assert row.delay_steps == 1


def test_beta_of_the_model_file() -> None:
    model = ModelConfig(family="test", rtc=RtcOptions(beta=2.5))
    row = Adapter(ROBOT, model, SPEC).encode(ask(Committed(TAIL, 1, 3)))
    assert row.gain.max() == 2.5


@pytest.mark.fault(4)
@pytest.mark.parametrize("committed", [None, Committed(np.zeros((0, 3)), 0, 3)])
def test_nothing_committed_is_plain_sampling(committed: Committed | None) -> None:
    row = Adapter(ROBOT, MODEL, SPEC).encode(ask(committed))
    assert row.target.shape == row.weight.shape == (6, 5)
    assert row.gain.shape == (4,)
    assert not row.target.any()
    assert not row.weight.any()
    assert not row.gain.any()


# --- refusals ---

U8 = np.zeros((4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"images": {"front": U8}}, Refusal.MISSING, "no image of camera 'wrist', got .*front"),
        ({"images": {"front": U8, "wrist": U8, "x": U8}}, Refusal.MALFORMED, "unknown cameras x"),
        ({"images": {"front": U8, "wrist": U8[..., 0]}}, Refusal.MALFORMED, r"'wrist'.*got uint8 \[4, 4\]"),
        ({"images": {"front": U8, "wrist": U8.astype(np.float32)}}, Refusal.MALFORMED, "got float32"),
        ({"images": {"front": U8, "wrist": U8[:0]}}, Refusal.MALFORMED, r"got uint8 \[0, 4, 3\]"),
        ({"state": np.zeros(2)}, Refusal.MALFORMED, r"state: wrong shape.*\[n, 3\] for gripper, j1, j2"),
        ({"state": np.array([0.0, np.nan, 0.0])}, Refusal.NOT_FINITE, "state: j1 is not finite, got nan"),
        ({"state": np.array([0.0, 0.0, -np.inf])}, Refusal.NOT_FINITE, "state: j2 is not finite, got -inf"),
        ({"instruction": "push \udc80"}, Refusal.MALFORMED, r"instruction is no text, got 'push \\udc80'"),
        ({"committed": Committed(TAIL[:, :2], 1, 3)}, Refusal.MALFORMED, "committed actions: wrong shape"),
        (
            {"committed": Committed(TAIL * np.nan, 1, 3)},
            Refusal.NOT_FINITE,
            "committed actions: j1 .* at row 0",
        ),
        ({"committed": Committed(np.zeros((7, 3)), 1, 3)}, Refusal.MALFORMED, "got 7 rows.*at most 6"),
        ({"committed": Committed(TAIL, -1, 3)}, Refusal.MALFORMED, "delay -1"),
    ],
)
def test_unusable_requests_are_refused_by_name(changes: dict[str, Any], code: Refusal, words: str) -> None:
    changes = dict(changes)
    committed = changes.pop("committed", None)
    with pytest.raises(RefusalError, match=words) as caught:
        Adapter(ROBOT, MODEL, SPEC).encode(ask(committed, **changes))
    assert caught.value.code is code


@pytest.mark.fault(20)
@pytest.mark.parametrize(
    ("spec", "model", "words"),
    [
        (
            {"cameras": ("base_0_rgb",)},
            {},
            "camera 'wrist' has a role .*got left_wrist_0_rgb, wanted one of base_0_rgb",
        ),
        ({"cameras": ()}, {}, "the model sees no camera"),
        ({"action_dim": 2}, {}, "fewer actions than robot two_joints, got 2, wanted >= 3"),
        (
            {"inputs": {"state": BufferSpec((2,), "float32")}},
            {},
            "shorter state than robot two_joints has, got 2",
        ),
        ({"inputs": {"sound": BufferSpec((2,), "float32")}}, {}, "needs inputs that nobody makes: sound"),
        ({}, {"prompt": PromptConfig(max_tokens=61)}, "max_tokens exceeds .*got 61, wanted <= 60"),
        ({}, {"prompt": PromptConfig(tokenizer="other")}, "unknown tokenizer 'other'"),
        (
            {"vocabulary": 258},
            {},
            r"model test knows, got 259 of 'bytes', wanted <= 258, at prompt.tokenizer\. .*options.vocab",
        ),
        ({}, {"normalisation": Normalisation(kind="quantile")}, "normalisation.actions.q01 is missing"),
    ],
)
def test_a_robot_and_a_model_that_do_not_fit(spec: dict[str, Any], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Adapter(ROBOT, ModelConfig(family="test", **model), replace(SPEC, **spec))


@pytest.mark.parametrize(("width", "fits"), [(5, True), (3, True), (4, False), (32, False)])
def test_statistics_may_be_those_of_the_models_padded_vectors(width: int, fits: bool) -> None:
    statistics = {"mean": (0.5,) * width, "std": (2.0,) * width}
    for part in ("state", "actions"):
        other = "actions" if part == "state" else "state"
        normalisation = Normalisation(kind="mean_std", **{part: statistics, f"{other}_kind": "identity"})  # type: ignore[arg-type]
        model = ModelConfig(family="test", normalisation=normalisation)
        if fits:
            Adapter(ROBOT, model, SPEC).encode(ask())
        else:
            with pytest.raises(ConfigError, match=rf"{part}.mean does not fit .* got {width} values, wanted 3, .* 5,"):
                Adapter(ROBOT, model, SPEC)


@pytest.mark.parametrize(
    ("statistics", "scale", "fits"),
    [
        ({"kind": "quantile", "state": {"q01": (0.0, -90.0, -80.0), "q99": (100.0, 90.0, 80.0)}}, 1.0, False),
        ({"kind": "quantile", "state": {"q01": (0.0, -90.0, -80.0), "q99": (100.0, 90.0, 80.0)}}, 57.3, True),
        ({"kind": "mean_std", "state": {"mean": (50.0, 0.0, 0.0), "std": (30.0, 40.0, 30.0)}}, 1.0, False),
        # one joint that is held in a narrow range is no other unit; constant joints tell nothing
        ({"kind": "quantile", "state": {"q01": (0.0, -90.0, -1.0), "q99": (100.0, 90.0, 1.0)}}, 1.0, True),
        ({"kind": "quantile", "state": {"q01": (0.0, 9.0, 9.0), "q99": (100.0, 9.0, 9.0)}}, 1.0, True),
    ],
)
def test_degrees_for_radians_are_told(statistics: dict[str, Any], scale: float, fits: bool) -> None:
    robot = msgspec.structs.replace(
        ROBOT,
        state=(ROBOT.state[0], *(msgspec.structs.replace(entry, scale=scale) for entry in ROBOT.state[1:])),
        actions=(*(msgspec.structs.replace(entry, scale=scale) for entry in ROBOT.actions[:2]), ROBOT.actions[2]),
    )
    normalisation = Normalisation(rule="lerobot", actions_kind="identity", **statistics)
    model = ModelConfig(family="test", normalisation=normalisation)
    if fits:
        Adapter(robot, model, SPEC)
    else:
        with pytest.raises(ConfigError, match="other units than those of robot two_joints, got data that span 1"):
            Adapter(robot, model, SPEC)


@pytest.mark.parametrize("changes", [{"vocabulary": 259}, {"vocabulary": 0}, {"vocabulary": 5, "inputs": {}}])
def test_a_vocabulary_that_suffices_is_unknown_or_is_not_used(changes: dict[str, Any]) -> None:
    Adapter(ROBOT, MODEL, replace(SPEC, **changes))


def test_infinite_limits_cannot_normalise_and_are_told_by_the_actions_name() -> None:
    endless = msgspec.structs.replace(ROBOT.actions[1], lower=-np.inf, upper=np.inf)
    robot = msgspec.structs.replace(ROBOT, actions=(ROBOT.actions[0], endless, ROBOT.actions[2]))
    with pytest.raises(ConfigError, match=r"range of j2 is not finite, got lower -inf, upper inf"):
        Adapter(robot, MODEL, SPEC)
    assert Adapter(robot, ModelConfig(family="test"), SPEC).encode(ask()).inputs["anchor"][1] == 1.0


@pytest.mark.parametrize("inputs", [SPEC.inputs, {"tokens": SPEC.inputs["tokens"]}])
@pytest.mark.parametrize("value", [1e39, -1e300, 1.7e308])
def test_what_overflows_in_the_models_space_is_refused(value: float, inputs: Any) -> None:
    adapter = Adapter(ROBOT, MODEL, replace(SPEC, inputs=inputs))
    huge = TAIL.copy()
    huge[1, 2] = value
    with pytest.raises(RefusalError, match=r"actions, normalised: grip is not finite, got .*inf, at row 1") as caught:
        adapter.encode(ask(Committed(huge, 1, 3)))
    assert caught.value.code is Refusal.NOT_FINITE
    with pytest.raises(RefusalError, match="state, normalised: gripper is not finite") as caught:
        adapter.encode(ask(state=np.array([value, 0.0, 0.0])))
    assert caught.value.code is Refusal.NOT_FINITE
