"""One episode in closed loop: delays by count, equal runs for equal seeds, success judged by the scene, faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import ModelConfig, Normalisation, RobotConfig, load_robot, resolve
from phyai_engine.errors import ConfigError, EngineError, PhyaiError
from phyai_engine.evaluate.closed_loop import ClosedLoop, PolicyFacts
from phyai_engine.evaluate.condition import Condition, Fault
from phyai_engine.evaluate.faults import STALE_S, wired_wrong, wrong_statistics
from phyai_engine.evaluate.manifest import Episode
from phyai_engine.evaluate.record import EpisodeRecord, mean_jerk
from phyai_engine.sim.robot import JointSample
from phyai_engine.types import F64, U8, Chunk, Request, Schedule, StageTimings

H = 16
ROBOT = load_robot(resolve("robots", "sawyer_20hz"))
EPISODE = Episode(task="none", instruction="count", scene_seed=7, noise_seed=1000)
FACTS = PolicyFacts(horizon=H, max_delay=0)


@dataclass
class CountingRobot:
    """A robot without physics: its hand shows how many periods have passed, its cameras show the seed and the period.

    It is solved after ``solved_after`` commands.
    """

    solved_after: int = 10_000
    action_names: tuple[str, ...] = ROBOT.action_names
    dt_s: float = ROBOT.dt_s
    instruction: str = ""
    period: int = 0
    seed: int = -1
    commands: list[F64 | None] = field(default_factory=list)

    @property
    def success(self) -> bool:
        return len([c for c in self.commands if c is not None]) >= self.solved_after

    def reset(self, seed: int) -> None:
        self.seed, self.period = seed, 0
        self.commands.clear()

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        self.commands.append(None if command is None else command.copy())
        self.period += 1

    def state(self) -> dict[str, JointSample]:
        names = ("hand_x", "hand_y", "hand_z", "gripper")
        position = np.array([self.period, 10.0, 20.0, 0.5])
        unread = JointSample(("joint",), np.zeros(1), np.zeros(1))
        return {"hand_state": JointSample(names, position, np.zeros(4)), "joint_states": unread}

    def render(self, camera: str) -> U8:
        image = np.zeros((4, 4, 3), np.uint8)
        image[..., 0], image[..., 1] = self.period, 1 if camera == "wrist" else 0
        return image

    def hold(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class Counter:
    """A policy whose row r of a chunk seen in period p commands (1 + p + r) / 1000: the period that it is meant for."""

    requests: list[Request] = field(default_factory=list)
    scale: float = 1e-3

    def __call__(self, request: Request) -> Chunk | PhyaiError:
        self.requests.append(request)
        period = request.observation.state[0]
        actions = np.zeros((H, 4))
        actions[:, 0] = (1 + period + np.arange(H)) * self.scale
        return Chunk(request.epoch, request.chunk_id, actions, StageTimings())


def play(
    condition: Condition, ask: Callable[[Request], Any] | None = None, sim: CountingRobot | None = None, **more: Any
) -> tuple[EpisodeRecord, CountingRobot]:
    sim = sim or CountingRobot()
    wired = wired_wrong(sim, condition.fault)
    return ClosedLoop(ROBOT, wired, more.get("facts", FACTS), condition, EPISODE, ask or Counter()).play(3), sim


@pytest.mark.parametrize("schedule", [Schedule.NAIVE_ASYNC, Schedule.RTC])
@pytest.mark.parametrize("delay_ms", [0.0, 50.0, 200.0, 400.0])
def test_every_tick_plays_the_row_of_its_own_instant(schedule: Schedule, delay_ms: float) -> None:
    record, sim = play(Condition(schedule=schedule, delay_ms=delay_ms, seconds_max=4.0))
    first = next(i for i, command in enumerate(sim.commands) if command is not None)
    d = max(1, round(delay_ms / 50))
    assert first == d and record.held == d  # the first chunk is waited for at rest, and none of its rows is skipped
    played = np.array([command[0] for command in sim.commands[first:] if command is not None])
    assert len(played) == len(sim.commands) - first == 80 - d
    own = np.arange(1 + first, 81) * 1e-3
    # Until the first handoff rows are late by the ticks that the first chunk was waited for, then never again.
    handoff = first + H // 2 + d
    np.testing.assert_allclose(played[: handoff - first], own[: handoff - first] - d * 1e-3, atol=1e-12)
    np.testing.assert_allclose(played[handoff - first :], own[handoff - first :], atol=1e-12)
    assert set(record.delay_steps) == {d} and record.misses == 0 and record.handoffs > 5
    assert not record.aborted and not record.fallbacks and not record.success


@pytest.mark.parametrize("delay_ms", [0.0, 200.0])
def test_sync_rests_while_it_waits(delay_ms: float) -> None:
    record, sim = play(Condition(delay_ms=delay_ms, seconds_max=4.0))
    d = max(1, round(delay_ms / 50))
    moving = [command is not None and bool(command[:3].any()) for command in sim.commands]
    assert moving == [i % (H // 2 + d) >= d for i in range(80)]
    assert record.held == sum(not m for m in moving)
    assert set(record.delay_steps) == {0}


def test_committed_rows_are_asked_to_be_continued_with_the_stated_delay() -> None:
    ask = Counter()
    play(Condition(schedule=Schedule.RTC, delay_ms=200.0, seconds_max=3.0), ask)
    assert ask.requests[0].committed is None
    for request in ask.requests[1:]:
        assert request.committed is not None
        assert request.committed.delay_steps == 4 and len(request.committed.actions) == H // 2
    assert [r.seed - 1000 for r in ask.requests] == list(range(1, len(ask.requests) + 1))
    assert {r.observation.instruction for r in ask.requests} == {"count"}


def test_what_a_checkpoint_cannot_continue_is_not_asked_for() -> None:
    condition = Condition(schedule=Schedule.RTC, delay_ms=200.0, seconds_max=3.0)
    record, _ = play(condition, facts=PolicyFacts(horizon=H, max_delay=3))
    assert set(record.fallbacks) == {"sync"}


def test_equal_seeds_give_equal_commands_and_success_ends_the_episode() -> None:
    a, sim = play(Condition(seconds_max=4.0), sim=CountingRobot(solved_after=20))
    b, _ = play(Condition(seconds_max=4.0), sim=CountingRobot(solved_after=20))
    assert a.success and a.commands == b.commands and a.ticks == len(sim.commands) < 80
    assert sim.seed == 7 and (a.number, a.task, a.instruction, a.scene_seed) == (3, "none", "count", 7)
    other, _ = play(Condition(seconds_max=4.0), Counter(scale=2e-3), CountingRobot(solved_after=20))
    assert other.commands != a.commands


def test_values_beyond_the_limits_are_clipped_or_their_chunk_refused() -> None:
    far = Counter(scale=1.0)
    clipped, sim = play(Condition(seconds_max=1.0), far)
    assert clipped.accepted and max(c[0] for c in sim.commands if c is not None) == 1.0
    refused, sim = play(Condition(seconds_max=1.0, clamp=False), far)
    assert not refused.accepted and refused.refusals["out_of_envelope"] == refused.requests - 1 > 1  # one in flight
    assert all(command is None for command in sim.commands)


def test_a_policy_that_fails_is_a_failed_episode_and_a_failed_smoke_request() -> None:
    def fails(request: Request) -> PhyaiError:
        return EngineError("no")

    record, _ = play(Condition(seconds_max=1.0), fails)
    assert not record.success and record.failed == record.requests - 1 > 1
    with pytest.raises(EngineError, match=r"first request .* no"):
        ClosedLoop(ROBOT, CountingRobot(), FACTS, Condition(), EPISODE, fails).smoke()
    ClosedLoop(ROBOT, CountingRobot(), FACTS, Condition(delay_ms=400), EPISODE, Counter()).smoke()


def test_impossible_conditions_are_refused() -> None:
    with pytest.raises(ConfigError, match="longer than a chunk, got 800 ms, 16 steps"):
        play(Condition(delay_ms=800.0))
    with pytest.raises(ConfigError, match="execution horizon"):
        play(Condition(execution_horizon=17))


# Faults


def seen(fault: Fault, periods: float = 3.0) -> tuple[list[Request], CountingRobot]:
    ask, sim = Counter(), CountingRobot()
    play(Condition(fault=fault, seconds_max=periods), ask, sim)
    return ask.requests, sim


def test_swapped_cameras_and_permuted_joints() -> None:
    requests, _ = seen(Fault.SWAPPED_CAMERAS)
    images = requests[1].observation.images
    assert images["front"][0, 0, 1] == 1 and images["wrist"][0, 0, 1] == 0
    requests, sim = seen(Fault.PERMUTED_JOINTS)
    assert requests[1].observation.state.tolist() == [
        0.5,
        float(requests[1].observation.images["front"][0, 0, 0]),
        10,
        20,
    ]
    commands = np.array([c for c in sim.commands if c is not None])
    assert not commands[:, 0].any() and commands[:, 1].any()


def test_stale_observations_are_old_behind_fresh_stamps() -> None:
    requests, _ = seen(Fault.STALE_OBSERVATIONS)
    late = round(STALE_S / ROBOT.dt_s)
    for i, request in enumerate(requests):
        period = max(0, round(request.observation.snapshot_mono_ns * 1e-9 / ROBOT.dt_s) - 20 - late)
        assert request.observation.state[0] == period, i
        assert request.observation.images["front"][0, 0, 0] == period, i
        assert request.observation.capture_mono_ns == request.observation.snapshot_mono_ns


def test_wrong_statistics_need_statistics() -> None:
    given = Normalisation(kind="quantile", actions={"q01": (-1.0, 0.0), "q99": (1.0, 2.0)}, state={"q01": (3.0,)})
    wrong = wrong_statistics(ModelConfig(family="pi05", normalisation=given)).normalisation
    assert wrong.actions["q99"] != given.actions["q99"] and wrong.state["q01"] != (3.0,)
    with pytest.raises(ConfigError, match="no statistics"):
        wrong_statistics(ModelConfig(family="fake"))


def test_jerk_leaves_the_gripper_out() -> None:
    def robot(name: str) -> RobotConfig:
        return load_robot(resolve("robots", name))

    steps = np.zeros((5, 4))
    steps[2, 3] = 1.0
    assert mean_jerk(steps, robot("sawyer_20hz")) == 0.0
    steps[2, 0] = 1.0
    assert mean_jerk(steps, robot("sawyer_20hz")) == pytest.approx((1 + 2 + 1) / 3 / 0.05**3)
    assert mean_jerk(steps[:2], robot("sawyer_20hz")) is None
