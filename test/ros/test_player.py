"""The player and its outputs without ROS communication: what a stop starts from, and players elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from phyai_policy.msg import ChunkStatus

from phyai_engine.config import RobotConfig, Workspace, load_robot, resolve
from phyai_engine.control.commands import Command
from phyai_engine.control.player import Player
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import Fallback, HandoffSettings
from phyai_engine.robot_check import check_robot
from phyai_engine.safety import Safety
from phyai_engine.sim.trajectory import Trajectory
from phyai_engine.types import AbortCause, Chunk, CommandKind, Refusal, SafetyState, Schedule, StageTimings
from phyai_ros import outputs
from phyai_ros.outputs import ChunksOutput, TrajectoryOutput

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
    def since_step_s(self) -> None: ...
    def begun(self) -> None: ...
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


def driven(robot: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Controller, Player]:
    """A controller and the active player that drives it."""
    controller = Controller(robot, monkeypatch)
    player = Player(robot, settings(), Safety(1), controller.output, lambda: middle(robot))
    player.activate()
    return controller, player


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
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    controller.wait(4 * DT_NS)
    player.flush()
    assert len(controller.sent) == 2 and not any(controller.sent[-1].points[-1].velocities)
    assert player.last_command is not None
    assert player.last_command.tolist() == list(controller.sent[-1].points[-1].positions)


def test_controller_that_falls_silent_is_stopped_and_given_nothing_more(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm, 0.5))
    controller.wait(2 * DT_NS)
    assert player.take_rejection() is None
    controller.wait(600_000_000, heard=False)
    rejected = player.take_rejection()
    assert rejected is not None and rejected[0] == 1 and len(controller.sent) == 2
    with pytest.raises(RefusalError, match="controller state"):
        give(player, 2, still(arm))
    assert len(controller.sent) == 2


def test_a_row_that_ends_while_a_stop_is_planned_does_not_turn_it_back(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    for _ in range(6):
        controller.wait(DT_NS)
        player.tick()
    controller.wait(DT_NS - 3000)

    def now() -> int:
        controller.now += 2000  # every look at the clock
        return controller.now

    monkeypatch.setattr(controller.output, "_now", now)
    player.abort(AbortCause.SERVICE, "")
    speeds = np.diff(positions(controller.sent[-1])[:, 0]) / DT
    assert speeds[0] == pytest.approx(0.7) and (np.diff(speeds) <= 1e-9).all()  # 1 rad/s less 15 rad/s^2 * 20 ms


def test_a_chunk_that_has_not_begun_is_stopped_where_the_robot_stands(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    for _ in range(30):  # to its end, and rest
        controller.wait(DT_NS)
        player.tick()
    rest = positions(controller.sent[0])[-1]
    give(player, 2, np.repeat(rest[None], H, axis=0))
    controller.wait(2_000_000)
    player.abort(AbortCause.SERVICE, "")
    assert np.abs(positions(controller.sent[-1]) - rest).max() < 1e-9, "the speed before the rest is over"


def test_a_trajectory_that_runs_out_decelerates_and_the_next_one_waits_for_rest(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    rows = moving(arm)
    give(player, 1, rows)
    first = controller.sent[0]
    assert np.array_equal(positions(first)[:H], rows)
    tail = positions(first)[H - 1 :, 0]
    speed = np.diff(tail) / DT
    assert len(tail) > 3 and (np.diff(speed) < 0).all() and speed[-1] == pytest.approx(0.0, abs=1e-6)
    assert (np.abs(np.diff(speed, prepend=1.0)) <= arm.actions[0].acceleration_max * DT + 1e-9).all()
    for _ in range(H + 2):  # two rows into the deceleration
        controller.wait(DT_NS)
        player.tick()
    assert player.handoff.consumed == H and player.handoff.held >= 1
    assert player.last_command is not None and player.last_command[0] == pytest.approx(tail[-1])
    give(player, 2, np.repeat(positions(first)[-1:], H, axis=0))
    second = controller.sent[1].header.stamp.sec * 10**9 + controller.sent[1].header.stamp.nanosec
    began = first.header.stamp.sec * 10**9 + first.header.stamp.nanosec
    assert second - began >= len(first.points) * DT_NS  # the tail is played to its end


def test_a_flush_reaches_a_first_chunk_that_has_not_begun(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    controller.wait(2_000_000)
    player.flush()
    assert len(controller.sent) == 2, "the controller would play the old epoch to its end"
    assert np.abs(positions(controller.sent[-1]) - middle(arm)).max() < 1e-9


def test_an_abort_while_a_flush_decelerates_goes_on_with_it(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, player = driven(arm, monkeypatch)
    rows = still(arm)
    rows[:, 1] += 2.0 * DT * np.arange(H)
    give(player, 1, rows)
    for _ in range(8):
        controller.wait(DT_NS)
        player.tick()
    controller.wait(DT_NS // 2)
    player.flush()
    flushed = controller.sent[-1]
    controller.wait(DT_NS)
    here = np.interp(DT, times(flushed), positions(flushed)[:, 1])
    player.abort(AbortCause.SERVICE, "")
    stop = controller.sent[-1]
    assert stop is not flushed and positions(stop)[-1, 1] == pytest.approx(positions(flushed)[-1, 1])
    assert (positions(stop)[0, 1] - here) / times(stop)[0] < 2.0, "no jump to where the flush would have come to rest"


def test_a_chunk_after_a_flush_begins_when_the_robot_is_at_rest(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    for _ in range(8):
        controller.wait(DT_NS)
        player.tick()
    flushed_ns = controller.now
    player.flush()
    flushed = controller.sent[-1]
    give(player, 2, np.repeat(positions(flushed)[-1:], H, axis=0))
    stamp = controller.sent[-1].header.stamp
    begins_s = (stamp.sec * 10**9 + stamp.nanosec - flushed_ns) * 1e-9
    assert begins_s == pytest.approx(times(flushed)[-1] + DT)
    player.abort(AbortCause.SERVICE, "")  # before it begins: the deceleration goes on
    assert positions(controller.sent[-1])[-1, 0] == pytest.approx(positions(flushed)[-1, 0])
    assert len(controller.sent[-1].points) >= len(flushed.points)


@pytest.mark.parametrize("late", [0, 3, 8])
def test_rows_after_the_end_of_the_chunk_before_are_never_skipped(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    # The controller's state is late, though not silent, and its chunk runs out before the next one comes.
    controller, player = driven(arm, monkeypatch)
    rows = moving(arm)
    give(player, 1, rows)
    for tick in range(21 + late):
        if tick == 10:
            player.handoff = player.handoff.begin(2, player.safety.epoch, 0)
        controller.wait(DT_NS, heard=tick < 12)
        player.tick()
    chunk = rows + (rows[1] - rows[0]) * 10  # goes on from row 10
    player.accept(Chunk(player.safety.epoch, 2, chunk, StageTimings()), 0)
    assert positions(controller.sent[-1])[0, 0] - rows[-1, 0] == pytest.approx(DT), "one step beyond where it rests"
    for _ in range(H):
        controller.wait(DT_NS)
        player.tick()
    assert player.handoff.consumed == 10 + H and player.handoff.remaining_steps == 0


def test_an_aloha_may_open_its_gripper_at_once_but_not_jump_with_a_joint() -> None:
    robot = load_robot(resolve("robots", "aloha"))
    here = np.array([0.0, -0.96, 1.16, 0.0, -0.3, 0.0, 0.0] * 2)
    player = Player(robot, settings(), Safety(1), Steps(), lambda: here)
    player.activate()
    shut = np.repeat(here[None], H, axis=0)
    rows = shut.copy()
    rows[:, 6] = rows[H // 2 :, 13] = 1.0
    give(player, 1, rows)
    for _ in range(H):
        player.tick()
    give(player, 2, shut)
    player.tick()
    for joint in range(6):
        jump = shut.copy()
        jump[:, joint] += 0.35
        with pytest.raises(RefusalError, match="seam_jump_max"):
            give(player, 3 + joint, jump)
    player.abort(AbortCause.SERVICE, "")
    player.rearm(active=True)
    for joint in range(6):
        jump = shut.copy()
        jump[:, joint] += 0.35
        with pytest.raises(RefusalError, match="first_step_max"):
            give(player, 10 + joint, jump)


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


def test_a_chunk_that_was_on_its_way_while_the_player_stepped_on_took_that_much_longer(
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

    def word(steps: int, chunk_id: int) -> None:
        epoch = player.safety.epoch
        output.on_status(ChunkStatus(consumed_steps=500 + steps, epoch=epoch, chunk_id=chunk_id, accepted=True))
        player.catch_up()

    word(0, 1)
    for steps in range(1, 11):
        now += DT_NS
        word(steps, 1)
    assert player.handoff.delays == (), "from standstill there is no delay to learn"
    player.handoff = player.handoff.begin(2, player.safety.epoch, now)
    now += DT_NS
    word(11, 1)
    now += DT_NS // 2
    word(11, 1)  # says nothing new
    assert output.since_step_s() == pytest.approx(DT / 2)
    spliced = player.accept(Chunk(player.safety.epoch, 2, still(arm), StageTimings()), now)
    assert spliced.facts.row == 1 and sent[-1].base_step == 510
    assert spliced.facts.m_exhaust_s == pytest.approx((10 - 0.5) * DT)
    now += 3 * DT_NS
    assert output.since_step_s() == DT, "by its count no step is late"
    word(13, 2)
    word(13, 2)
    assert player.handoff.delays == (3,) and output.begun() is None
    assert player.handoff.playing is not None and player.handoff.playing.next_row == 3


def test_a_player_elsewhere_gets_fewer_rows_while_the_robot_waits_for_each_chunk(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    player.handoff = replace(player.handoff, delays=(H,))
    assert player.handoff.fallback is Fallback.SYNC
    give(player, 1, moving(arm))
    controller.wait(2 * DT_NS)
    assert np.array_equal(positions(controller.sent[-1])[:10], moving(arm)[:10])  # s = 10
    assert positions(controller.sent[-1])[-1, 0] < moving(arm)[12, 0], "and comes to rest after them"


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


# --- the stop that the robot file wants ---


def changed(robot: RobotConfig, *, joints: dict[str, Any] | None = None, **changes: Any) -> RobotConfig:
    """A robot file with other keys; ``joints`` in every action."""
    actions = tuple(msgspec.structs.replace(a, **(joints or {})) for a in robot.actions)
    made = msgspec.structs.replace(robot, actions=actions, **changes)
    check_robot(made, where="r.yaml")
    return made


def started(robot: RobotConfig, measured: Any = None, rate: float = 1.0, ticks: int = 8) -> tuple[Player, Steps]:
    """A player in the middle of a motion of joint 1."""
    out = Steps()
    player = Player(robot, settings(), Safety(1), out, measured or (lambda: middle(robot)))
    player.activate()
    give(player, 1, moving(robot, rate))
    for _ in range(ticks):
        player.tick()
    return player, out


def stops(out: Steps) -> list[Command]:
    return [c for c in out.commands if c.kind is CommandKind.STOP]


@pytest.mark.fault(45)
def test_hold_measured_latches_the_measured_pose_once(arm: RobotConfig) -> None:
    here = [middle(arm)]
    player, out = started(changed(arm, stop="hold_measured"), lambda: here[0])
    here[0] = middle(arm) + 0.01
    player.abort(AbortCause.SERVICE, "")
    latched, here[0] = here[0], middle(arm) - 0.2  # the arm sags: the target does not follow
    player.finish_stop()
    assert len(stops(out)) == 6 and all(c.values.tolist() == latched.tolist() for c in stops(out))
    assert player.stop_sent == "held where measured"


def test_hold_measured_without_a_fresh_measure_decelerates_and_says_so(arm: RobotConfig) -> None:
    here = [middle(arm)]
    player, out = started(changed(arm, stop="hold_measured"), lambda: here[0])
    last = out.commands[-1]
    here[0] = np.where(np.arange(7) == 2, np.nan, middle(arm))
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    assert "joint_3" in player.stop_sent and "decelerating" in player.stop_sent
    first = stops(out)[0]
    assert 0 < first.values[0] - last.values[0] < last.rates[0] * DT and not stops(out)[-1].rates.any()


def test_stop_publishing_publishes_nothing_and_says_who_has_to_act(arm: RobotConfig) -> None:
    player, out = started(changed(arm, stop="stop_publishing"))
    count = len(out.commands)
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    for _ in range(5):
        assert player.tick() is None
    assert len(out.commands) == count and player.safety.state is SafetyState.LATCHED
    assert "command timeout" in player.stop_sent
    player.rearm(active=True)
    assert player.stop_sent == ""


@pytest.mark.parametrize("changes", [{"stop": "stop_publishing"}, {"first_step": "ramp"}])
def test_a_controller_that_plays_by_itself_is_not_left_alone(arm: RobotConfig, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="output trajectory"):
        TrajectoryOutput(changed(arm, **changes), lambda key, message: None, lambda: 0)


def test_a_stop_in_the_middle_of_a_hold_goes_on_with_its_deceleration(arm: RobotConfig) -> None:
    soft = changed(arm, joints={"jerk_max": 100.0, "acceleration_max": 10.0})
    player, out = started(soft, ticks=H)
    for _ in range(4):  # the chunk ran out: the hold decelerates
        player.tick()
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    rates = np.array([c.rates[0] for c in out.commands[H - 1 :]])
    slowing = -np.diff(rates) / DT
    assert (np.abs(np.diff(slowing)) / DT <= 100.0 + 1e-6).all() and slowing.max() > 5.0
    assert rates[-1] == 0.0 and (slowing >= -1e-9).all()


def test_a_hold_goes_on_with_the_deceleration_of_the_chunk(arm: RobotConfig) -> None:
    soft = changed(arm, joints={"jerk_max": 100.0, "acceleration_max": 10.0})
    out = Steps()
    player = Player(soft, settings(), Safety(1), out, lambda: middle(arm))
    player.activate()
    rows = still(arm)
    k = np.arange(H)
    rows[:, 0] += DT * (1.5 * k - 0.05 * k * (k - 1) / 2)  # slows down at 2.5 rad/s^2, 0.6 rad/s are left
    give(player, 1, rows)
    for _ in range(H + 1):
        player.tick()
    before, last = out.commands[-2].rates[0], out.commands[-1].rates[0]
    assert before - last == pytest.approx((2.5 + 100.0 * DT) * DT)


def test_hold_measured_for_a_controller_is_one_point_at_once(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(arm, monkeypatch)
    here = [middle(arm)]
    player = Player(changed(arm, stop="hold_measured"), settings(), Safety(1), controller.output, lambda: here[0])
    player.activate()
    give(player, 1, moving(arm))
    controller.wait(5 * DT_NS)
    here[0] = middle(arm) + 0.03
    player.abort(AbortCause.SERVICE, "")
    assert positions(controller.sent[-1]).tolist() == [here[0].tolist()]
    assert not any(controller.sent[-1].points[0].velocities)


def test_a_seam_into_a_slower_chunk_is_not_taken_for_a_deceleration(arm: RobotConfig) -> None:
    soft = changed(arm, joints={"jerk_max": 100.0, "acceleration_max": 10.0})
    player, out = started(soft)
    at = out.commands[-1].values
    rows = still(arm) - middle(arm) + at
    rows[:, 0] += 0.5 * DT * np.arange(1, H + 1)
    give(player, 2, rows)
    player.tick()
    player.abort(AbortCause.SERVICE, "")
    assert stops(out)[0].rates[0] == pytest.approx(0.5 - 100.0 * DT * DT)  # an s-curve from no deceleration


def test_the_cubic_of_a_stop_keeps_to_the_deceleration(arm: RobotConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, moving(arm))
    controller.wait(6 * DT_NS)  # a row has just begun
    player.abort(AbortCause.SERVICE, "")
    stop = controller.sent[-1]
    step, first = np.eye(7)[0], np.array(stop.points[0].velocities)
    sent = Trajectory(
        start_s=0.0,
        now_s=0.0,
        times=times(stop),
        positions=positions(stop),
        velocities=np.array([p.velocities for p in stop.points]),
        before=positions(stop)[0] - DT * step,
        before_velocity=first + 15.0 * DT * step,
    )
    last = times(stop)[-1]
    t = np.arange(times(stop)[0], last, 1e-4)
    speed = np.array([sent.sample(at)[1][0] for at in t])
    slowing = -np.diff(speed) / 1e-4
    middle_part = t[1:] < last - 2 * DT - 1e-9
    assert first[0] == pytest.approx(1.0 - 0.5 * 15.0 * DT) and middle_part.sum() > 100
    assert (slowing[middle_part] <= 15.0 * (1 + 1e-3)).all() and (slowing[middle_part] >= 15.0 * (1 - 1e-3)).all()
    assert (np.abs(slowing) <= 30.0 * (1 + 1e-3)).all() and speed[-1] == pytest.approx(0.0, abs=1e-2)


def test_a_trajectory_stop_in_the_first_row_of_a_chunk_takes_no_jump_for_motion(
    arm: RobotConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, player = driven(arm, monkeypatch)
    give(player, 1, still(arm))
    controller.wait(5 * DT_NS)
    player.catch_up()
    give(player, 2, still(arm) + 0.14)  # within seam_jump_max
    controller.wait(DT_NS)
    player.abort(AbortCause.SERVICE, "")
    assert np.abs(positions(controller.sent[-1]) - middle(arm) - 0.14).max() < 1e-9


# --- what is refused before it plays ---


def test_a_chunk_from_which_no_stop_stays_within_the_limits_is_refused_whole(arm: RobotConfig) -> None:
    player, out = started(arm, ticks=2)
    rows = still(arm)
    rows[:, 0] = arm.actions[0].upper - 0.001 - 2.0 * DT * np.arange(H)[::-1]  # 2 rad/s right up to the limit
    player._value = rows[0]
    playing = player.handoff.playing
    with pytest.raises(RefusalError, match="joint_1 moves too fast to stop within its limits") as error:
        give(player, 2, rows)
    assert error.value.code is Refusal.OUT_OF_ENVELOPE and player.handoff.playing is playing
    assert player.handoff.in_flight is None
    clamping = Player(arm, settings(), Safety(1), out, lambda: rows[0], clamp=True)
    clamping.activate()
    rows[-1, 0] += 0.1  # clamped: whoever asks for that wants the joint to run into its limit
    assert give(clamping, 1, rows).clamped == 1


def test_sync_is_judged_by_the_rows_it_plays(arm: RobotConfig) -> None:
    rows = still(arm)
    rows[:, 0] = arm.actions[0].upper - 0.001 - 2.0 * DT * np.arange(H)[::-1]
    for schedule, s, fits in ((Schedule.SYNC, 10, True), (Schedule.RTC, 10, False)):
        player = Player(arm, settings(schedule, s), Safety(1), Steps(), lambda: rows[0])
        player.activate()
        if fits:
            give(player, 1, rows)
            continue
        with pytest.raises(RefusalError, match="too fast to stop"):
            give(player, 1, rows)


def test_accelerations_are_checked_across_the_seam(arm: RobotConfig) -> None:
    careful = changed(arm, joints={"command_acceleration_max": 10.0})
    player, out = started(careful, rate=0.5, ticks=10)
    at = out.commands[-1].values
    rows = still(arm) - middle(arm) + at
    with pytest.raises(RefusalError, match="joint_1 changes faster than command_acceleration_max, got -25"):
        give(player, 2, rows)  # 0.5 rad/s to rest in one step
    rows[:, 0] += 0.5 * DT * np.arange(1, H + 1)
    give(player, 3, rows)


def test_the_workspace_is_checked_from_the_measured_hand_while_the_robot_moves() -> None:
    robot = load_robot(resolve("robots", "metaworld_sawyer"))
    box = Workspace(state=("hand_z",), actions=("dz",), metres_per_unit=0.01, lower=(0.05,), upper=(0.5,))
    robot = changed(robot, workspace=box)
    here = np.array([np.nan, np.nan, 0.3, np.nan])
    player = Player(robot, settings(), Safety(1), Steps(), lambda: here)
    player.activate()
    down = np.zeros((H, 4))
    down[:, 2] = -1.0
    give(player, 1, down)
    player.tick()
    here[2] = 0.2
    with pytest.raises(RefusalError, match="leaves the workspace") as error:
        give(player, 2, down)
    assert "hand_z" in str(error.value)
    here[2] = np.nan
    with pytest.raises(RefusalError, match="no fresh measured value of hand_z") as error:
        give(player, 3, down)
    assert error.value.code is Refusal.STALE


# --- a first step that is too far away ---


def follows(out: Steps, arm: RobotConfig) -> Callable[[], np.ndarray]:
    """What is measured of a robot that stands where it was commanded last."""
    return lambda: out.commands[-1].values if out.commands else middle(arm)


def far(
    arm: RobotConfig, here: Callable[[], np.ndarray] | None = None, **changes: Any
) -> tuple[Player, Steps, np.ndarray]:
    """A player whose first chunk starts 0.5 rad from the measured pose, with a ramp allowed."""
    out = Steps()
    robot = changed(arm, **{"first_step": "ramp", **changes})
    player = Player(robot, settings(), Safety(1), out, here or follows(out, arm))
    player.activate()
    rows = still(arm)
    rows[:, 0] += 0.5
    with pytest.raises(
        RefusalError, match=r"a ramp of \d+ steps .first_step. takes the robot .*first_step_max"
    ) as error:
        give(player, 1, rows)
    assert error.value.code is Refusal.OUT_OF_ENVELOPE
    return player, out, rows


def test_a_ramp_leads_to_the_first_row_and_then_the_next_chunk_fits(arm: RobotConfig) -> None:
    player, out, rows = far(arm)
    for chunk_id in range(2, 200):  # every tick another chunk: none fits until the robot is near enough
        player.tick()
        if abs(out.commands[-1].values[0] - rows[0, 0]) <= 0.15:
            break
        with pytest.raises(RefusalError, match="seam_jump_max") as error:
            give(player, chunk_id, rows)
        assert "ramp" not in str(error.value)
    give(player, 200, rows)
    assert all(c.kind is CommandKind.HOLD for c in out.commands) and player.handoff.consumed == 0
    assert player.handoff.held == len(out.commands) and player.safety.state is SafetyState.ARMED
    values = np.array([c.values for c in out.commands])
    rates = np.diff(values, axis=0, prepend=middle(arm)[None]) / DT
    assert (np.abs(rates[:, 0]) <= 0.25 * 2.175 + 1e-9).all() and (rates[:, 1:] == 0).all()
    assert (np.abs(np.diff(rates[:, 0], prepend=0.0)) / DT <= 0.25 * 15.0 + 1e-6).all()
    command = player.tick()
    assert command is not None and command.kind is CommandKind.ACTION and command.step == 0


def test_an_abort_of_a_ramp_decelerates_from_it(arm: RobotConfig) -> None:
    player, out, _ = far(arm)
    for _ in range(20):
        player.tick()
    speed = out.commands[-1].rates[0]
    player.abort(AbortCause.SERVICE, "")
    player.finish_stop()
    assert speed > 0.1 and 0 <= stops(out)[0].rates[0] < speed and not stops(out)[-1].rates.any()


def test_a_chunk_that_still_does_not_fit_gets_another_ramp(arm: RobotConfig) -> None:
    player, out, rows = far(arm)
    for _ in range(200):
        player.tick()
    assert out.commands[-1].values.tolist() == rows[0].tolist()
    elsewhere = rows.copy()
    elsewhere[:, 1] += 0.3
    with pytest.raises(RefusalError, match="a ramp of"):
        give(player, 2, elsewhere)
    give(player, 3, rows)  # begun: from now on a far chunk is only refused, also from rest
    for _ in range(H + 5):
        player.tick()
    with pytest.raises(RefusalError) as error:
        give(player, 4, elsewhere)
    assert "ramp" not in str(error.value)


@pytest.mark.parametrize("obeys", [True, False])
def test_a_ramp_does_not_end_the_limit_of_the_first_step(arm: RobotConfig, obeys: bool) -> None:
    # Without seam_jump_max the chunk that began the ramp would be accepted a tick later, and jump.
    player, out, rows = far(arm, None if obeys else lambda: middle(arm), seam_jump_max=None)
    player.tick()
    with pytest.raises(RefusalError, match="first_step_max"):
        give(player, 2, rows)
    for _ in range(200):
        player.tick()
    assert out.commands[-1].values.tolist() == rows[0].tolist()
    if obeys:
        give(player, 3, rows)
    else:  # its drives are off
        with pytest.raises(RefusalError, match="first_step_max"):
            give(player, 3, rows)


def test_a_flush_ends_a_ramp(arm: RobotConfig) -> None:
    player, out, _ = far(arm)
    for _ in range(40):
        player.tick()
    reached, speed = out.commands[-1].values[0], out.commands[-1].rates[0]
    player.flush()  # the row it leads to was made for another instruction
    for _ in range(200):
        player.tick()
    assert speed > 0.1 and abs(out.commands[-1].values[0] - reached) <= speed**2 / (2 * 15.0) + 1e-9
    assert all(c.kind is CommandKind.HOLD and c.rates[0] >= 0 for c in out.commands)


def test_no_ramp_for_a_chunk_that_is_wrong_in_itself_or_without_a_measure(arm: RobotConfig) -> None:
    robot = changed(arm, first_step="ramp")
    here = [middle(arm)]
    out = Steps()
    player = Player(robot, settings(), Safety(1), out, lambda: here[0])
    player.activate()
    rows = still(arm) + 0.5
    rows[5:, 0] += 0.5  # faster than velocity_max
    with pytest.raises(RefusalError, match="velocity_max") as error:
        give(player, 1, rows)
    here[0] = np.full(7, np.nan)
    with pytest.raises(RefusalError, match="no fresh measured value"):
        give(player, 2, still(arm) + 0.5)
    player.tick()
    assert "ramp" not in str(error.value) and out.commands == []


def test_before_a_player_node_the_first_step_is_the_nodes_to_judge(arm: RobotConfig) -> None:
    sent: list[Any] = []
    robot = changed(arm, first_step="ramp")
    output = ChunksOutput(robot, lambda key, message: sent.append(message), lambda: 0)
    player = Player(robot, settings(), Safety(1), output, lambda: middle(arm))
    player.activate()
    output.on_status(ChunkStatus())
    give(player, 1, still(arm) + 0.5)
    assert len(sent) == 1
