"""The player and its outputs without ROS communication: what a stop starts from, and players elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from phyai_policy.msg import ChunkStatus

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import HandoffSettings
from phyai_engine.safety import Safety
from phyai_engine.types import AbortCause, Chunk, Refusal, SafetyState, Schedule, StageTimings
from phyai_ros import outputs
from phyai_ros.outputs import ChunksOutput, TrajectoryOutput
from phyai_ros.player import Command, Player

pytestmark = pytest.mark.ros
H, DT = 20, 0.02
DT_NS = 20_000_000


class Steps:
    """Output steps that keeps what was commanded."""

    ticks = True

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def chunk(self, *_: Any) -> None: ...
    def stop(self, *_: Any) -> None: ...
    def reset(self, consumed: int) -> None: ...
    def consumed(self) -> None: ...
    def ready(self) -> None: ...
    def motion(self) -> None: ...
    def take_rejection(self) -> None: ...


def settings(schedule: Schedule = Schedule.NAIVE_ASYNC, s: int = 10) -> HandoffSettings:
    return HandoffSettings(schedule, H, s, DT, delay_init_steps=1)


@pytest.fixture
def arm() -> RobotConfig:
    return load_robot(resolve("robots", "arm7"))


def middle(robot: RobotConfig) -> np.ndarray:
    return np.array([0.5 * (a.lower + a.upper) for a in robot.actions])


def give(player: Player, chunk_id: int, actions: np.ndarray, now: int = 0) -> Any:
    player.handoff = player.handoff.begin(chunk_id, player.safety.epoch, now)
    return player.accept(Chunk(player.safety.epoch, chunk_id, actions, StageTimings()), now)


def still(robot: RobotConfig) -> np.ndarray:
    return np.repeat(middle(robot)[None], H, axis=0)


def test_abort_right_after_a_seam_does_not_take_the_jump_for_motion(arm: RobotConfig) -> None:
    out = Steps()
    player = Player(arm, settings(), Safety(1), out, lambda: middle(arm))
    player.activate()
    give(player, 1, still(arm))
    for _ in range(10):
        player.tick()
    give(player, 2, still(arm) + 0.14)  # within seam_jump_max
    player.tick()
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    reached = out.commands[-1].values - (middle(arm) + 0.14)
    assert np.abs(reached).max() < 1e-9, "the arm was at rest on both sides of the seam"


def test_abort_of_a_delta_robot_that_was_never_commanded_leaves_its_gripper_alone() -> None:
    robot = load_robot(resolve("robots", "metaworld_sawyer"))
    out = Steps()
    player = Player(robot, settings(), Safety(1), out, lambda: None)
    player.activate()
    assert player.abort(AbortCause.SERVICE, "")
    assert out.commands == [] and player.safety.state is SafetyState.LATCHED


def test_start_with_a_stale_joint_is_refused(arm: RobotConfig) -> None:
    measured = middle(arm)
    measured[3] = np.nan
    player = Player(arm, settings(), Safety(1), Steps(), lambda: measured)
    player.activate()
    with pytest.raises(RefusalError, match="joint_4") as error:
        give(player, 1, still(arm))
    assert error.value.code is Refusal.STALE


class Controller:
    """A TrajectoryOutput with a clock moved by hand and the controller in step with it."""

    def __init__(self, robot: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10**18
        self.sent: list[Any] = []
        monkeypatch.setattr(outputs, "mono_ns", lambda: self.now)
        self.output = TrajectoryOutput(robot, lambda key, message: self.sent.append(message), lambda: self.now)
        self.output.on_controller_state(self.now)

    def wait(self, ns: int, *, heard: bool = True) -> None:
        self.now += ns
        if heard:
            self.output.on_controller_state(self.now)


def moving(robot: RobotConfig, rate: float = 1.0) -> np.ndarray:
    rows = still(robot)
    rows[:, 0] += rate * DT * np.arange(H)
    return rows


def positions(message: Any) -> np.ndarray:
    return np.array([p.positions for p in message.points])


def times(message: Any) -> np.ndarray:
    return np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points])


@pytest.mark.parametrize("silent_ns", [0, 260_000_000])
def test_trajectory_stop_continues_the_motion_without_a_jump(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch, silent_ns: int
) -> None:
    controller = Controller(arm, monkeypatch)
    player = Player(arm, settings(), Safety(1), controller.output, lambda: np.full(7, np.nan))
    player.activate()
    monkeypatch.setattr(player, "_measured", lambda: middle(arm))
    give(player, 1, moving(arm))
    monkeypatch.setattr(player, "_measured", lambda: np.full(7, np.nan))  # joint states are gone by now
    controller.wait(3 * DT_NS + 7_000_000)
    controller.wait(silent_ns, heard=False)
    begun = (3 * DT_NS + 7_000_000 + silent_ns) // DT_NS - 1  # the grid starts one dt after the handoff
    player.abort(AbortCause.SERVICE, "")
    stop = controller.sent[-1]
    assert stop.header.stamp.sec == 0 and (np.diff(times(stop)) > 0).all() and times(stop)[0] > 0
    at = middle(arm)[0] + DT * begun  # the row being executed is finished
    joint = positions(stop)[:, 0]
    assert joint[0] == pytest.approx(at)
    speed = np.diff(joint) / DT
    assert (speed >= -1e-9).all() and speed[0] <= 1.0 and speed[-1] == pytest.approx(0.0, abs=1e-6)
    assert not any(stop.points[-1].velocities)


def test_flush_brings_a_trajectory_to_rest(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(arm, monkeypatch)
    player = Player(arm, settings(), Safety(1), controller.output, lambda: middle(arm))
    player.activate()
    give(player, 1, moving(arm))
    controller.wait(4 * DT_NS)
    player.flush()
    assert len(controller.sent) == 2 and not any(controller.sent[-1].points[-1].velocities)
    assert player.last_command is not None
    assert player.last_command.tolist() == list(controller.sent[-1].points[-1].positions)


def test_controller_that_falls_silent_is_stopped_and_given_nothing_more(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(arm, monkeypatch)
    player = Player(arm, settings(), Safety(1), controller.output, lambda: middle(arm))
    player.activate()
    give(player, 1, moving(arm, 0.5))
    controller.wait(2 * DT_NS)
    assert player.take_rejection() is None
    controller.wait(600_000_000, heard=False)
    rejected = player.take_rejection()
    assert rejected is not None and rejected[0] == 1 and len(controller.sent) == 2
    with pytest.raises(RefusalError, match="controller state"):
        give(player, 2, still(arm))
    assert len(controller.sent) == 2


def test_controller_clock_that_goes_back_is_followed(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(arm, monkeypatch)
    controller.output.on_controller_state(controller.now + 60 * 10**9)
    controller.output.on_controller_state(controller.now)
    player = Player(arm, settings(), Safety(1), controller.output, lambda: middle(arm))
    player.activate()
    give(player, 1, still(arm))
    controller.wait(5 * DT_NS)
    assert controller.output.consumed() == 5


@pytest.mark.parametrize(("schedule", "rows"), [(Schedule.SYNC, 5), (Schedule.RTC, H)])
def test_player_elsewhere_gets_only_the_rows_it_may_play(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch, schedule: Schedule, rows: int
) -> None:
    controller = Controller(arm, monkeypatch)
    player = Player(arm, settings(schedule, 5), Safety(1), controller.output, lambda: middle(arm))
    player.activate()
    give(player, 1, still(arm))
    assert len(controller.sent[-1].points) == rows


def test_player_node_that_restarts_or_falls_silent_is_noticed(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 10**18
    monkeypatch.setattr(outputs, "mono_ns", lambda: now)
    sent: list[Any] = []
    output = ChunksOutput(arm, lambda key, message: sent.append(message), lambda: now)
    player = Player(arm, settings(), Safety(1), output, lambda: middle(arm))
    player.activate()
    output.on_status(ChunkStatus(consumed_steps=500))
    give(player, 1, still(arm))
    assert sent[-1].base_step == 500
    epoch = player.safety.epoch
    output.on_status(ChunkStatus(consumed_steps=507, epoch=epoch, chunk_id=1, accepted=True))
    player.catch_up()
    assert player.take_rejection() is None and player.handoff.consumed == 7
    output.on_status(ChunkStatus(consumed_steps=0, epoch=epoch))
    rejected = player.take_rejection()
    assert rejected is not None and "restarted" in str(rejected[1]) and player.handoff.due
    give(player, 2, still(arm))
    assert sent[-1].base_step == 0
    output.on_status(ChunkStatus(consumed_steps=1, epoch=epoch, chunk_id=2, accepted=True))
    now += 600_000_000
    rejected = player.take_rejection()
    assert rejected is not None and "no ChunkStatus" in str(rejected[1])


def test_player_finishes_its_stop_before_it_obeys_a_re_arm(arm: RobotConfig) -> None:
    out = Steps()
    player = Player(arm, settings(), Safety(0), out, lambda: middle(arm))
    player.follow(10, True, rearmed=False)
    player.handoff = player.handoff.expect(1, 10, 0, 0)
    player.accept(Chunk(10, 1, moving(arm), StageTimings()), 0)
    for _ in range(8):
        player.tick()
    player.follow(11, False, rearmed=False)
    player.follow(12, True, rearmed=False)
    assert player.stopping
    player.finish_stop()
    assert not out.commands[-1].rates.any()
    player.follow(12, True, rearmed=False)
    assert player.safety.state is SafetyState.ARMED and player.safety.epoch == 12


def test_latch_of_a_player_is_cleared_only_by_a_re_arm(arm: RobotConfig) -> None:
    player = Player(arm, settings(), Safety(0), Steps(), lambda: middle(arm))
    player.follow(10, True, rearmed=False)
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    player.follow(50, True, rearmed=False)  # a flush
    assert player.safety.latched
    player.follow(51, True, rearmed=True)
    assert not player.safety.latched and player.safety.epoch == 51
