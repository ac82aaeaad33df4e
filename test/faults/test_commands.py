"""What leaves for a controller or a player elsewhere: whole, ordered, at rest at its end, never in the past."""

from __future__ import annotations

import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from builtin_interfaces.msg import Duration
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus, PolicyStatus
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile
from trajectory_msgs.msg import JointTrajectory

from phyai_engine.config import load_robot, resolve
from phyai_engine.control.player import Command
from phyai_engine.handoff import Accepted
from phyai_engine.messages import stamp_ns
from phyai_engine.sim.arm_robot import ArmRobot
from phyai_engine.stop import StopPlanner
from phyai_engine.types import Chunk, CommandKind, Refusal, SafetyState, StageTimings
from phyai_ros.convert import to_stamp
from phyai_ros.outputs import StepsOutput, TrajectoryOutput
from phyai_ros.player_node import PlayerNode
from phyai_ros.sim_commands import read_trajectory

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
ARM = load_robot(resolve("robots", "arm7"))
REST = np.array([0.5 * (a.lower + a.upper) for a in ARM.actions])
HORIZON, DT_NS, NOW_NS = 16, 20_000_000, 1_700_000_000_000_000_000
EPOCH = 1 << 62  # later than any that starts from the wall clock


class Sent:
    """A clock, and what a TrajectoryOutput published at its times."""

    def __init__(self) -> None:
        self.now_ns = NOW_NS
        self.messages: list[JointTrajectory] = []
        self.output = TrajectoryOutput(ARM, lambda key, message: self.messages.append(message), lambda: self.now_ns)

    def chunk(self, base_step: int, row: int, rows: int = HORIZON) -> None:
        """A chunk in which every value says which step it is."""
        self.end = base_step + rows
        actions = (base_step + np.arange(rows))[:, None] * 1e-3 + np.arange(7)
        facts = Accepted(row, 2, 8, 0, float("nan"), float("nan"), float("nan"))
        self.output.chunk(Chunk(1, 1, actions, StageTimings()), base_step, facts)

    def steps(self) -> list[tuple[int, int]]:
        """(step, ns at which it is due) of every row in the last message; the deceleration after them is left out."""
        message = self.messages[-1]
        start = stamp_ns(message.header.stamp)
        points = [(round(p.positions[0] * 1e3), start + stamp_ns(p.time_from_start)) for p in message.points]
        return points[: max(0, self.end - points[0][0])]


def check(message: JointTrajectory, now_ns: int) -> None:
    """The rules of joint_trajectory_controller, for every trajectory this package sends."""
    assert message.joint_names == list(ARM.action_names)
    assert len(message.points) >= 1
    stamp = stamp_ns(message.header.stamp)
    assert stamp == 0 or stamp >= now_ns
    times = [stamp_ns(p.time_from_start) for p in message.points]
    assert times[0] > 0
    assert all(a < b for a, b in pairwise(times))
    for point in message.points:
        assert len(point.positions) == 7
        assert np.isfinite(point.positions).all()
        assert len(point.velocities) in (0, 7)
    assert not any(message.points[-1].velocities)
    ArmRobot(ARM).follow(message.joint_names, *read_trajectory(message))  # the simulated controller takes it


@pytest.mark.fault(41, 42)
@pytest.mark.parametrize("late_ns", [0, 1, DT_NS // 2, DT_NS - 1, DT_NS, 3 * DT_NS, 7 * DT_NS, 30 * DT_NS])
def test_a_trajectory_is_whole_ordered_at_rest_and_never_in_the_past(late_ns: int) -> None:
    sent = Sent()
    sent.chunk(0, 0)
    first = dict(sent.steps())
    check(sent.messages[-1], NOW_NS)
    assert list(first) == list(range(HORIZON))
    assert first[0] > NOW_NS
    sent.now_ns += 9 * DT_NS + late_ns
    sent.chunk(8, 1)  # observed at step 8, spliced in at step 9
    check(sent.messages[-1], sent.now_ns)
    second = dict(sent.steps())
    if late_ns > 15 * DT_NS:  # the controller rests at the end of the one before: it goes on there
        assert min(second) == HORIZON
    assert [*second] == list(range(min(second), 8 + HORIZON))  # no step repeated, none left out
    joined = first.keys() & second.keys()
    assert all(first[step] == second[step] for step in joined)  # on the time grid of the one before
    assert min(second.values()) > sent.now_ns


@pytest.mark.fault(41)
def test_after_a_pause_the_steps_start_anew_from_now() -> None:
    sent = Sent()
    sent.chunk(0, 0)
    sent.now_ns += 500 * DT_NS
    sent.chunk(HORIZON, 0)
    check(sent.messages[-1], sent.now_ns)
    steps = sent.steps()
    assert steps[0][0] == HORIZON
    assert 0 < steps[0][1] - sent.now_ns <= 2 * DT_NS
    sent.chunk(2 * HORIZON, 0, rows=1)  # a horizon of one step
    check(sent.messages[-1], sent.now_ns)


@pytest.mark.fault(22, 41, 42)
@pytest.mark.parametrize("speed", [0.0, 0.4, 2.0])
def test_the_stop_is_a_trajectory_of_its_own(speed: float) -> None:
    sent = Sent()
    sent.chunk(0, 0)
    rate = np.full(7, speed)
    sent.output.stop(StopPlanner.of(ARM).plan(REST, rate))
    message = sent.messages[-1]
    check(message, sent.now_ns)
    assert stamp_ns(message.header.stamp) == 0  # now, whatever the clocks say
    positions = np.array([p.positions for p in message.points])
    limit = np.array([a.acceleration_max for a in ARM.actions])
    speeds = np.diff(positions, axis=0, prepend=REST[None]) / ARM.dt_s
    assert (-np.diff(speeds, axis=0, prepend=rate[None]) / ARM.dt_s <= limit + 1e-6).all()
    assert (speeds[-1] == 0).all() if speed == 0 else (np.abs(speeds[-1]) < 1e-9).all()


@pytest.mark.fault(41, 42)
@pytest.mark.parametrize("kind", [CommandKind.ACTION, CommandKind.HOLD, CommandKind.STOP])
def test_a_single_step_for_a_trajectory_controller_names_every_joint(kind: CommandKind) -> None:
    published: dict[str, Any] = {}
    output = StepsOutput(ARM, published.__setitem__, lambda: NOW_NS)
    output.command(Command(kind, REST, np.full(7, 0.3), tick=1, epoch=1))
    check(published["command"], NOW_NS)
    np.testing.assert_array_equal(published["command"].points[0].positions, REST)
    assert published["step"].joint_names == list(ARM.action_names)
    assert len(published["step"].values) == 7


# -- a player elsewhere --------------------------------------------------------------------------------------


class Beside:
    """A player node that was told it may move in EPOCH, in a rig of which only the arm speaks."""

    def __init__(self, make_rig: Make, **parameters: Any) -> None:
        given = [
            Parameter(name, value=value)
            for name, value in {"robot": "arm7", "policy": "elsewhere", **parameters}.items()
        ]
        self.rig = make_rig(others=lambda context: [PlayerNode(context=context, parameter_overrides=given)])
        self.node: PlayerNode = self.rig.others[0]
        peer = self.rig.peer
        peer.create_subscription(ActionStep, "player_node/step", self.rig._on_step, QoSProfile(depth=50))
        self.words: list[ChunkStatus] = []
        peer.create_subscription(ChunkStatus, "elsewhere/chunk_status", self.words.append, QoSProfile(depth=50))
        self._chunks = peer.create_publisher(ActionChunk, "elsewhere/chunk", 1)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._status = peer.create_publisher(PolicyStatus, "elsewhere/status", latched)
        self.alive = True
        self.status = PolicyStatus(robot_id="arm7", epoch=EPOCH, safety_state=PolicyStatus.SAFETY_ARMED)
        peer.create_timer(0.05, self._speak)
        self.rig.until(lambda: self._chunks.get_subscription_count() > 0 and bool(self.words))
        self.rig.until(lambda: self.node._player.safety.epoch == EPOCH)
        self.rig.until(lambda: bool(np.isfinite(self.node._measured()).all()))

    def _speak(self) -> None:
        if self.alive:
            self._status.publish(self.status)

    def chunk(self, **changes: Any) -> ActionChunk:
        """A chunk at rest with a small ramp of its own in every joint."""
        rows = REST + np.arange(HORIZON)[:, None] * 1e-3 * np.arange(1, 8)
        given = {
            "robot_id": "arm7",
            "joint_names": list(ARM.action_names),
            "action_type": int(ARM.kind),
            "dt": Duration(nanosec=DT_NS),
            "horizon": HORIZON,
            "execution_horizon": 8,
            "actions": array.array("d", rows.ravel()),
            "epoch": EPOCH,
            "chunk_id": 1,
            **changes,
        }
        message = ActionChunk(**given)
        message.header.stamp = to_stamp(self.rig.now_ns())
        return message

    def send(self, message: ActionChunk) -> ChunkStatus:
        """Publish a chunk; what the player says of it."""
        self.words.clear()
        self._chunks.publish(message)
        self.rig.until(lambda: any(w.chunk_id == message.chunk_id for w in self.words))
        return next(w for w in self.words if w.chunk_id == message.chunk_id)


@pytest.mark.fault(47)
def test_the_columns_of_a_chunk_are_found_by_name_and_its_rows_stay_in_order(make_rig: Make) -> None:
    beside = Beside(make_rig)
    plain = beside.chunk()
    rows = np.asarray(plain.actions).reshape(HORIZON, 7)
    order = [3, 0, 6, 1, 5, 2, 4]
    named = [ARM.action_names[i] for i in order]
    answer = beside.send(beside.chunk(joint_names=named, actions=array.array("d", rows[:, order].ravel())))
    assert answer.accepted
    steps = beside.rig.steps
    beside.rig.until(lambda: sum(s.kind == CommandKind.ACTION for s in steps) == HORIZON)
    np.testing.assert_array_equal([s.values for s in steps[:HORIZON]], rows)
    assert [s.step for s in steps[:HORIZON]] == list(range(HORIZON))


NAMES = list(ARM.action_names)
ROWS = np.tile(REST, (HORIZON, 1))


def poisoned(row: int, joint: int, value: float) -> Any:
    rows = ROWS.copy()
    rows[row, joint] = value
    return array.array("d", rows.ravel())


WRONG: dict[str, tuple[dict[str, Any], Refusal]] = {
    "partial_names": ({"joint_names": NAMES[:6], "actions": array.array("d", ROWS[:, :6].ravel())}, Refusal.MALFORMED),
    "unknown_name": ({"joint_names": [*NAMES[:6], "joint_8"]}, Refusal.MALFORMED),
    "repeated_name": ({"joint_names": [*NAMES[:6], "joint_1"]}, Refusal.MALFORMED),
    "no_names": ({"joint_names": []}, Refusal.MALFORMED),
    "another_action_type": ({"action_type": 2}, Refusal.MALFORMED),
    "no_action_type": ({"action_type": 0}, Refusal.MALFORMED),
    "no_rows": ({"horizon": 0, "actions": array.array("d")}, Refusal.MALFORMED),
    "too_few_values": ({"actions": array.array("d", ROWS.ravel()[:-1])}, Refusal.MALFORMED),
    "too_many_values": ({"actions": array.array("d", [*ROWS.ravel(), 0.0])}, Refusal.MALFORMED),
    "huge_horizon": ({"horizon": 2**32 - 1}, Refusal.MALFORMED),
    "nan_first": ({"actions": poisoned(0, 0, float("nan"))}, Refusal.NOT_FINITE),
    "nan_last": ({"actions": poisoned(HORIZON - 1, 6, float("nan"))}, Refusal.NOT_FINITE),
    "infinity": ({"actions": poisoned(5, 3, float("-inf"))}, Refusal.NOT_FINITE),
    "beyond_a_limit": ({"actions": poisoned(5, 3, 0.0)}, Refusal.OUT_OF_ENVELOPE),
    "older_epoch": ({"epoch": EPOCH - 1}, Refusal.WRONG_EPOCH),
    "newer_epoch": ({"epoch": EPOCH + 1}, Refusal.WRONG_EPOCH),
    "base_in_the_future": ({"base_step": 5}, Refusal.MALFORMED),
    "another_period": ({"dt": Duration(nanosec=5 * DT_NS)}, Refusal.MALFORMED),
}


@pytest.mark.fault(20, 23)
def test_a_player_refuses_what_it_cannot_play_and_plays_the_next(make_rig: Make) -> None:
    beside = Beside(make_rig)
    found = {}
    for number, (name, (changes, _)) in enumerate(WRONG.items(), start=1):
        answer = beside.send(beside.chunk(**{"actions": array.array("d", ROWS.ravel()), "chunk_id": number, **changes}))
        found[name] = (answer.accepted, answer.refusal)
        assert answer.accepted or answer.text, name
    assert found == {name: (False, code) for name, (_, code) in WRONG.items()}
    assert beside.rig.steps == []
    assert beside.send(beside.chunk(chunk_id=90)).accepted
    for stale in (90, 89):  # a duplicate, and one that was overtaken
        beside.send(beside.chunk(chunk_id=stale, actions=poisoned(0, 0, 0.01)))
        beside.rig.until(lambda: any(w.refusal == Refusal.WRONG_EPOCH for w in beside.words))
    beside.rig.until(lambda: len(beside.rig.steps) >= HORIZON)
    assert {s.chunk_id for s in beside.rig.steps if s.kind == CommandKind.ACTION} == {90}


@pytest.mark.fault(13, 14)
def test_a_player_whose_policy_node_falls_silent_stops_then_is_quiet(make_rig: Make) -> None:
    beside = Beside(make_rig, status_timeout_s=0.3)
    rig = beside.rig
    assert beside.send(beside.chunk()).accepted
    rig.until(lambda: beside.node._player.safety.state is SafetyState.RUNNING)
    beside.alive = False
    rig.until(lambda: beside.node._player.safety.state is SafetyState.LATCHED, 1.5)
    assert "no PolicyStatus for 0.300 s" in beside.node._player.safety.text
    rig.spin(0.1)
    stops = [s for s in rig.steps if s.kind == CommandKind.STOP]
    assert len(stops) == 1 + 5  # it had come to rest before: one step, then the holds
    assert rig.steps[-len(stops) :] == stops
    np.testing.assert_array_equal(stops[-1].values, rig.steps[-7].values)
