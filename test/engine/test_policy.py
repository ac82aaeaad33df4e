"""Policy: requests in, chunks or errors out; the shipped model files on the shipped robots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from phyai_engine.config import (
    ActionEntry,
    Camera,
    ModelConfig,
    Normalisation,
    RobotConfig,
    RtcOptions,
    StateEntry,
    load_model,
    load_robot,
    resolve,
)
from phyai_engine.errors import CancelledError, ConfigError, EngineError, PhyaiError, RefusalError
from phyai_engine.policy import MODELS, Policy, arrival_size, load_policy
from phyai_engine.types import F64, CancelToken, Chunk, Committed, Observation, Refusal, Request

ROBOT = RobotConfig(
    robot_id="two_joints",
    action_type="joint_position",
    dt_s=0.02,
    state=(StateEntry(name="j1"), StateEntry(name="j2")),
    actions=tuple(
        ActionEntry(name=name, state=name, lower=-2.0, upper=2.0, acceleration_max=1.0) for name in ("j1", "j2")
    ),
    cameras=(Camera(name="front", topic="image", role="base_0_rgb"),),
)


def fake_file(**options: Any) -> ModelConfig:
    return ModelConfig(
        family="fake",
        normalisation=Normalisation(kind="limits"),
        options={"cameras": ["base_0_rgb"], "action_dim": 4, **options},
    )


def fake(**options: Any) -> Policy:
    return load_policy(ROBOT, fake_file(**options))


def tiny(**options: Any) -> ModelConfig:
    """The smallest pi0.5."""
    widths = {"vis_width": 16, "vis_mlp": 16, "vis_heads": 2, "width": 16, "mlp": 16, "exp_width": 16, "exp_mlp": 16}
    heads = {"vis_depth": 1, "depth": 1, "heads": 2, "head_dim": 8, "vocab": 259, "prompt_len": 48}
    rest = {"action_dim": 2, "action_horizon": 4, "num_steps": 2, "image_size": 28, "cameras": ["base_0_rgb"]}
    return ModelConfig(family="pi05", options={**widths, **heads, **rest, **options})


def ask(robot: RobotConfig = ROBOT, chunk_id: int = 1, committed: Committed | None = None, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "images": {c.name: np.full((48, 64, 3), 90, dtype=np.uint8) for c in robot.cameras},
        "state": np.zeros(len(robot.state)),
        "velocity": np.zeros(len(robot.state)),
        "instruction": "push the block",
        "oldest_ros_ns": 1,
        "newest_ros_ns": 2,
        "capture_mono_ns": 3,
        "snapshot_mono_ns": 4,
    }
    return Request(5, chunk_id, Observation(**{**values, **changes}), committed, seed=chunk_id, remaining_ms=50.0)


def chunk_of(answer: Chunk | PhyaiError) -> Chunk:
    assert isinstance(answer, Chunk), answer
    return answer


def test_a_chunk_carries_its_request_its_actions_in_robot_units_and_its_stages() -> None:
    chunk = chunk_of(fake(latency_ms=20).infer([ask(chunk_id=9, state=np.array([1.0, -0.5]))])[0])
    assert (chunk.epoch, chunk.chunk_id) == (5, 9)
    assert chunk.actions.shape == (16, 2)
    assert chunk.actions.dtype == np.float64
    np.testing.assert_allclose(chunk.actions[0], [1.0, -0.5], atol=1e-5)
    t = chunk.timings
    assert t.prefix_ms >= 4
    assert t.prefix_ms + t.denoise_ms >= 20
    assert 0 < t.encode_ms + t.prefix_ms + t.denoise_ms + t.decode_ms <= t.inference_ms
    assert np.isnan([t.queue_ms, t.transfer_ms]).all()


@pytest.mark.parametrize("guidance", ["none", "identity", "gauss", "vjp", "vjp_early:1", "prefix_lock", "trained"])
def test_every_guidance_of_a_model_file_answers(guidance: str) -> None:
    """From the committed actions in robot units to those of the chunk; locked rows come back as they were sent."""
    model = structs.replace(
        tiny(), normalisation=Normalisation(kind="limits"), rtc=RtcOptions(guidance=guidance, rtc_max_delay=2)
    )
    policy = load_policy(ROBOT, model)
    assert len(policy.warm_up(2)) == 2
    committed = Committed(np.array([[0.5, -1.0], [0.6, -0.9], [0.7, -0.8]]), delay_steps=2, execution_steps=1)
    free, guided = (chunk_of(policy.infer([ask(committed=c)])[0]).actions for c in (None, committed))
    assert np.isfinite(guided).all()
    assert (np.abs(guided - free).max() > 1e-3) == (guidance != "none")
    if guidance in ("gauss", "prefix_lock", "trained"):
        np.testing.assert_allclose(guided[:2], committed.actions[:2], atol=1e-5)


def test_one_bad_request_does_not_lose_the_others() -> None:
    requests = [ask(chunk_id=1), ask(chunk_id=2, state=np.array([np.nan, 0.0])), ask(chunk_id=3)]
    answers = fake().infer(requests)
    assert [chunk_of(answers[i]).chunk_id for i in (0, 2)] == [1, 3]
    assert isinstance(answers[1], RefusalError)
    assert answers[1].code is Refusal.NOT_FINITE


@pytest.mark.parametrize("side", ["encode", "decode"])
def test_a_defect_in_one_row_does_not_lose_the_others(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = fake()
    encode, decode = policy.adapter.encode, policy.adapter.decode
    if side == "encode":
        monkeypatch.setattr(policy.adapter, "encode", lambda r, c=None: encode(r, c) if r.chunk_id != 2 else 1 / 0)
    else:
        monkeypatch.setattr(policy.adapter, "decode", lambda x, r: decode(x, r) if r.chunk_id != 2 else 1 / 0)
    answers = policy.infer([ask(chunk_id=1), ask(chunk_id=2), ask(chunk_id=3)])
    assert [chunk_of(answers[i]).chunk_id for i in (0, 2)] == [1, 3]
    bad = answers[1]
    assert type(bad) is EngineError
    assert "ZeroDivisionError" in str(bad)
    assert isinstance(bad.__cause__, ZeroDivisionError)


def test_an_instruction_that_is_no_text_is_refused_alone() -> None:
    answers = load_policy(ROBOT, tiny()).infer([ask(chunk_id=1), ask(chunk_id=2, instruction="\ud800")])
    assert chunk_of(answers[0]).chunk_id == 1
    assert isinstance(answers[1], RefusalError)
    assert answers[1].code is Refusal.MALFORMED


def test_a_cancelled_row_is_never_a_chunk() -> None:
    cancels = [CancelToken(), CancelToken()]
    cancels[0].cancel()
    answers = fake().infer([ask(chunk_id=1), ask(chunk_id=2)], cancels)
    assert isinstance(answers[0], CancelledError)
    assert chunk_of(answers[1]).chunk_id == 2


@pytest.mark.fault(23)
def test_a_chunk_with_a_nan_is_refused_by_step_and_action() -> None:
    answer = fake(nan_at=3).infer([ask()])[0]
    assert isinstance(answer, RefusalError)
    assert answer.code is Refusal.NOT_FINITE
    assert "action j1 is not finite, got nan, at step 3" in str(answer)


def test_what_the_model_raises_is_an_answer_and_a_batch_is_tried_row_by_row() -> None:
    policy = fake(fail_every=4)
    # runs: 1 the batch of two; 2, 3 alone; 4 the next batch fails, 5 and 6 are its rows
    policy.infer([ask(), ask()])
    policy.infer([ask()])
    policy.infer([ask()])
    assert all(isinstance(answer, Chunk) for answer in policy.infer([ask(), ask()]))
    answer = fake(fail_every=1).infer([ask()])[0]
    assert type(answer) is EngineError
    assert "the model raised RuntimeError: the fake model fails at run 1" in str(answer)
    assert isinstance(answer.__cause__, RuntimeError)


def test_more_requests_than_the_largest_batch() -> None:
    answers = fake().infer([ask(chunk_id=i + 1) for i in range(11)])
    assert [chunk_of(answer).chunk_id for answer in answers] == list(range(1, 12))
    assert fake().infer([]) == []


def test_warm_up_takes_as_long_as_the_model_and_reports_a_model_that_fails() -> None:
    durations = fake(latency_ms=20).warm_up(3)
    assert len(durations) == 3
    assert min(durations) >= 19
    with pytest.raises(EngineError, match="fails at run 2"):
        fake(fail_every=2).warm_up(2)


def test_committed_actions_are_continued() -> None:
    policy = fake(num_steps=10)
    plain = chunk_of(policy.infer([ask()])[0]).actions
    committed = Committed(plain[:8] + 0.3, delay_steps=3, execution_steps=8)
    guided = chunk_of(policy.infer([ask(committed=committed)])[0]).actions
    np.testing.assert_allclose(guided[:3], committed.actions[:3], atol=0.3 * 0.1)
    np.testing.assert_allclose(guided[8:], plain[8:], atol=1e-5)


# --- loading ---


def test_a_vocabulary_below_the_tokenizers_is_found_at_loading() -> None:
    with pytest.raises(ConfigError, match=r"knows, got 259 of 'bytes', wanted <= 258, at prompt.tokenizer"):
        load_policy(ROBOT, tiny(vocab=258))


def test_unknown_families_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown model family 'pi06', wanted one of pi0, pi05, fake"):
        load_policy(ROBOT, ModelConfig(family="pi06"))
    assert set(MODELS) == {"pi0", "pi05", "fake"}


def test_the_note_says_what_the_weights_are() -> None:
    assert fake().note == "fake, no weights: synthetic motion"


def test_the_fake_model_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
from phyai_engine.config import load_model, load_robot, resolve
from phyai_engine.policy import load_policy
policy = load_policy(load_robot(resolve("robots", "arm7")), load_model(resolve("models", "fake")))
print(len(policy.warm_up(2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


ROBOTS = ("metaworld_sawyer", "arm7")


@pytest.fixture(scope="module", params=["pi05_demo", "pi0_demo"])
def demo(request: pytest.FixtureRequest) -> Iterator[Policy]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: more threads only wait for one another
    robot, model = (
        load_robot(resolve("robots", "metaworld_sawyer")),
        load_model(resolve("models", request.param)),
    )
    yield load_policy(robot, model)
    torch.set_num_threads(threads)


def play(policy: Policy, count: int) -> list[F64]:
    """Chunks of a robot that sees something else each time, each continuing the last from its step 10 on."""
    random = np.random.default_rng(0)
    robot = policy.adapter.robot
    chunks: list[F64] = []
    for i in range(count):
        committed = Committed(chunks[-1][10:], delay_steps=4, execution_steps=10) if chunks else None
        request = ask(
            robot,
            chunk_id=i + 1,
            committed=committed,
            images={c.name: random.integers(0, 256, (30, 40, 3), dtype=np.uint8) for c in robot.cameras},
            state=random.uniform(-0.5, 1.0, len(robot.state)),
        )
        chunks.append(chunk_of(policy.infer([request])[0]).actions)
    return chunks


def test_the_demo_moves_gently_within_the_limits_and_without_seams(demo: Policy) -> None:
    assert demo.note.endswith("seeded random weights: its motions mean nothing")
    chunks = play(demo, 6)
    robot = demo.adapter.robot
    middle = (robot.limit("upper", 0) + robot.limit("lower", 0)) / 2
    half = (robot.limit("upper", 0) - robot.limit("lower", 0)) / 2
    assert max(np.abs((chunk - middle) / half).max() for chunk in chunks) < 0.95
    assert max(np.abs(np.diff(chunk / half, axis=0)).max() for chunk in chunks) < 0.1
    frozen = [np.abs(new[:4] - old[10:14]).max() for old, new in pairwise(chunks)]
    assert max(frozen) < 0.05
    assert np.stack(chunks).std(axis=0).max() > 0.02  # what it sees matters


def test_the_demo_depends_on_the_instruction_and_hardly_on_the_noise(demo: Policy) -> None:
    base, other = (chunk_of(demo.infer([ask(demo.adapter.robot, instruction=text)])[0]) for text in ("push", "open"))
    assert np.abs(base.actions - other.actions).max() > 1e-3
    again = chunk_of(demo.infer([replace(ask(demo.adapter.robot, instruction="push"), seed=99)])[0])
    assert np.abs(base.actions - again.actions).max() < 0.05


@pytest.mark.parametrize("robot_name", ROBOTS)
def test_the_fake_model_on_the_shipped_robots_starts_where_they_are(robot_name: str) -> None:
    robot = load_robot(resolve("robots", robot_name))
    policy = load_policy(robot, load_model(resolve("models", "fake")))
    state = np.full(len(robot.state), -0.4)
    actions = chunk_of(policy.infer([ask(robot, state=state)])[0]).actions
    driven = robot.state_index()
    start = np.where(driven >= 0, state[driven], 0.0)
    np.testing.assert_allclose(actions[0], start, atol=1e-5)
    rates = np.abs(np.diff(actions, axis=0)).max(axis=0) / robot.dt_s
    assert (rates <= robot.limit("velocity_max", np.inf)).all()


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({"family": "pi05"}, 224),
        ({"family": "pi0", "options": {"image_size": 96}}, 96),
        ({"family": "fake"}, 64),
        ({"family": "pi05", "resize": "float"}, 0),
        ({"family": "pi05", "options": {"image_size": "large"}}, 0),
        ({"family": "of another version"}, 0),
    ],
)
def test_images_may_arrive_in_the_models_size_where_its_resampler_ends_in_bytes(
    change: dict[str, Any], size: int
) -> None:
    assert arrival_size(ModelConfig(**change)) == size


def test_robots_that_joined_are_answered_in_one_batch_each_as_its_own_policy_would() -> None:
    other = structs.replace(ROBOT, dt_s=0.5, robot_id="other")
    wide = structs.replace(
        ROBOT, actions=tuple(structs.replace(action, upper=2.0 * action.upper) for action in ROBOT.actions)
    )
    policy = fake()
    policy.join(1, other)
    policy.join(2, wide)
    requests = [replace(ask(chunk_id=9, state=np.array([0.5, -0.5])), slot=slot) for slot in (0, 1, 2, 3)]
    *together, stranger = policy.infer(requests)
    assert isinstance(stranger, EngineError) and "no robot has joined" in str(stranger)
    for mixed, robot in zip(together, (ROBOT, other, wide), strict=True):
        alone = load_policy(robot, fake_file()).infer([requests[0]])[0]
        np.testing.assert_array_equal(chunk_of(mixed).actions, chunk_of(alone).actions)
    assert np.abs(chunk_of(together[2]).actions - chunk_of(together[0]).actions).max() > 1e-3  # its limits are others
    policy.leave(1)
    assert isinstance(policy.infer([requests[1]])[0], EngineError)
    with pytest.raises(ConfigError):
        policy.join(4, structs.replace(ROBOT, cameras=(structs.replace(ROBOT.cameras[0], role="tail"),)))


def test_rows_of_a_batch_cost_what_the_file_says_padding_included() -> None:
    policy = load_policy(ROBOT, fake_file(latency_ms=5.0, row_ms=20.0), (1, 4))
    assert policy.runner.buckets == (1, 4)
    one, three = min(policy.warm_up(2)), min(policy.warm_up(2, rows=3))
    assert one >= 5.0 and three >= 65.0 and three - one > 40.0
