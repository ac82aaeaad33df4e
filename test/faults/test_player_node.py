"""A player elsewhere: its own latch, what each side does when the other is lost, and a clock that stands still."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from phyai_policy.msg import ActionStep, ChunkStatus, PolicyStatus
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Bool

from phyai_engine.errors import RefusalError
from phyai_engine.types import AbortCause, CommandKind, Refusal, SafetyState
from phyai_ros.player_node import PlayerNode
from phyai_ros.sim_node import SimNode

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def stamp_s(step: ActionStep) -> float:
    return float(step.header.stamp.sec + step.header.stamp.nanosec * 1e-9)


def blind(*_: Any) -> Any:
    raise RefusalError(Refusal.STALE, "planted")


# -- a player node -------------------------------------------------------------------------------------------


class World:
    """A policy node whose chunks a player node plays."""

    def __init__(self, make_rig: Make, simulated: bool = False, **parameters: Any) -> None:
        def player(context: Any) -> list[Node]:
            given = {"robot": "arm7", "max_tick_gap_s": parameters.pop("player_gap_s", 0.5), "use_sim_time": simulated}
            overrides = [Parameter(name, value=value) for name, value in given.items()]
            return [PlayerNode(context=context, parameter_overrides=overrides)]

        model = {"latency_ms": 20.0}
        self.rig = make_rig(output="chunks", model=model, others=player, use_sim_time=simulated, **parameters)
        self.player: PlayerNode = self.rig.others[0]
        self.acknowledged: list[ChunkStatus] = []
        listen = self.rig.peer.create_subscription
        listen(ActionStep, "player_node/step", self.rig._on_step, QoSProfile(depth=50))
        listen(ChunkStatus, "policy_node/chunk_status", self.acknowledged.append, QoSProfile(depth=50))

    def start(self) -> None:
        self.rig.start()
        self.rig.until(lambda: sum(s.kind == CommandKind.ACTION for s in self.rig.steps) > 10)

    def stopped(self, cause: AbortCause) -> None:
        """Both are latched with the cause, and a re-arm of the policy node leads out."""
        rig, player = self.rig, self.player._player
        rig.until(lambda: player.safety.state is SafetyState.LATCHED)
        assert player.safety.cause is cause
        rig.until(lambda: self.acknowledged[-1].safety_state == SafetyState.LATCHED)
        assert self.acknowledged[-1].abort_cause == cause
        rig.told(cause)
        assert rig.status.abort_text == f"the player node: {player.safety.text}"
        assert rig.kinds()[-1] == CommandKind.STOP
        rig.resumed()
        count = len(rig.steps)
        rig.until(lambda: any(s.kind == CommandKind.ACTION for s in rig.steps[count:]))


def test_the_players_own_latch_reaches_the_policy_node_with_its_cause(make_rig: Make) -> None:
    world = World(make_rig)
    world.start()
    world.player.on_signal("SIGTERM")
    world.stopped(AbortCause.SIGNAL)
    world.player.on_spin_error(ZeroDivisionError("planted"))
    world.stopped(AbortCause.EXCEPTION)
    world.player._on_abort(None, type("Response", (), {})())
    world.stopped(AbortCause.SERVICE)


def test_a_policy_node_that_is_not_heard_stops_its_player(make_rig: Make) -> None:
    world = World(make_rig)
    world.start()
    rig, report = world.rig, world.rig.node._report
    rig.node._report = lambda: None
    rig.node._status.publish, publish = (lambda message: None), rig.node._status.publish
    rig.until(lambda: world.player._player.safety.latched, 3.0)
    rig.node._report, rig.node._status.publish = report, publish
    world.stopped(AbortCause.POLICY_LOST)


def test_a_fleet_stop_latches_player_and_policy_node(make_rig: Make) -> None:
    world = World(make_rig)
    fleet = world.rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED)
    world.start()
    fleet.publish(Bool(data=True))
    world.rig.told(AbortCause.FLEET_STOP)
    assert world.player._player.safety.latched
    fleet.publish(Bool(data=False))
    world.rig.until(lambda: not world.rig.status.fleet_stop)
    world.rig.resumed()
    count = len(world.rig.steps)
    world.rig.until(lambda: any(s.kind == CommandKind.ACTION for s in world.rig.steps[count:]))


def test_a_player_under_a_fleet_stop_of_its_own_obeys_no_policy_node(make_rig: Make) -> None:
    world = World(make_rig, fleet_stop_topic="")  # the policy node does not listen
    fleet = world.rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED)
    world.start()
    fleet.publish(Bool(data=True))
    world.rig.until(lambda: world.rig.safety is SafetyState.LATCHED)
    world.rig.spin(0.3)
    world.rig.until(lambda: world.rig.call("rearm").success)
    count = len(world.rig.steps)
    world.rig.spin(0.5)
    assert CommandKind.ACTION not in world.rig.kinds()[count:]
    assert world.player._player.safety.latched


def test_a_re_arm_against_the_fleets_word_does_not_count_once_the_fleet_says_go(make_rig: Make) -> None:
    world = World(make_rig, fleet_stop_topic="")
    fleet = world.rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED)
    world.start()
    fleet.publish(Bool(data=True))
    world.rig.until(lambda: world.rig.safety is SafetyState.LATCHED)
    world.rig.spin(0.3)
    world.rig.until(lambda: world.rig.call("rearm").success)
    loop = world.rig.node._session.loop
    loop._snapshot, snapshot = blind, loop._snapshot  # a slow policy: its first chunk comes after the fleet's go
    world.rig.spin(0.3)
    fleet.publish(Bool(data=False))
    world.rig.spin(0.3)
    count = len(world.rig.steps)
    loop._snapshot = snapshot
    world.rig.told(AbortCause.FLEET_STOP)  # the policy node hears that its player is still latched
    assert CommandKind.ACTION not in world.rig.kinds()[count:]
    world.rig.resumed()


def test_a_frozen_player_node_stops_when_it_goes_on(make_rig: Make) -> None:
    """The whole process slept, the sentry with it: whichever thread is first must see the gap."""
    world = World(make_rig, player_gap_s=0.2, max_tick_gap_s=0.0)
    world.start()
    world.player._sentry.close()
    count = len(world.rig.steps)
    time.sleep(0.6)
    world.stopped(AbortCause.TICK_OVERRUN)
    assert world.rig.kinds()[count] == CommandKind.STOP


def test_a_blocked_player_node_stops_by_its_sentry(make_rig: Make) -> None:
    world = World(make_rig, player_gap_s=0.2, max_tick_gap_s=0.0)
    world.start()
    began = world.rig.block(0.8)
    world.rig.spin(0.1)
    stops = [s for s in world.rig.steps if s.kind == CommandKind.STOP]
    assert 0.15 < stamp_s(stops[0]) - began < 0.5
    world.stopped(AbortCause.TICK_OVERRUN)


def test_a_blocked_policy_node_tells_its_player_to_stop(make_rig: Make) -> None:
    """The stop of `output: chunks` is a PolicyStatus: the sentry must publish it, as nobody else can."""
    world = World(make_rig, player_gap_s=0.0, max_tick_gap_s=0.2)
    world.start()
    heard: list[PolicyStatus] = []
    world.rig.peer.create_subscription(PolicyStatus, "policy_node/status", heard.append, 50)
    began = world.rig.block(0.8)
    world.rig.until(lambda: any(m.abort_cause for m in heard))
    first = next(m for m in heard if m.abort_cause)
    stamp = first.header.stamp.sec + first.header.stamp.nanosec * 1e-9
    assert first.abort_cause == PolicyStatus.ABORT_TICK_OVERRUN
    assert 0.15 < stamp - began < 0.5
    assert first.robot_id == "arm7"


def test_a_player_node_that_restarts_does_not_move_the_robot_again(make_rig: Make) -> None:
    world = World(make_rig)
    world.start()
    count = world.acknowledged[-1].consumed_steps
    assert count > 5
    new = ChunkStatus(robot_id="arm7", epoch=world.rig.epoch, consumed_steps=0, accepted=True)
    world.rig.peer.create_publisher(ChunkStatus, "policy_node/chunk_status", 5).publish(new)
    world.rig.told(AbortCause.PLAYER_LOST)
    assert world.rig.status.abort_text == "the player node restarted"
    world.rig.until(lambda: world.rig.kinds()[-1] == CommandKind.STOP)


def test_a_player_node_that_falls_silent_is_lost(make_rig: Make) -> None:
    world = World(make_rig, player_timeout_s=1.0)
    world.start()
    world.rig.executor.remove_node(world.player)
    world.player.close()
    world.rig.told(AbortCause.PLAYER_LOST)
    assert "nothing was heard of what plays the chunks for 1." in world.rig.status.abort_text


def test_a_controller_that_falls_silent_is_lost(make_rig: Make) -> None:
    def sim(context: Any) -> list[Node]:
        given = {"robot": "arm7", "command_source": "trajectory"}
        return [SimNode(context=context, parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])]

    rig = make_rig(output="trajectory", model={"latency_ms": 20.0}, others=sim, player_timeout_s=1.0)
    rig.start()
    rig.until(lambda: len(rig.trajectories) >= 3)
    state = rig.robot.controller_state_topic
    for subscription in list(rig.node.subscriptions):
        if subscription.topic_name.endswith(state):
            rig.node.destroy_subscription(subscription)
    rig.until(lambda: rig.trajectories[-1].header.stamp.sec == 0)  # stopped as soon as nobody knows what it plays
    assert not any(rig.trajectories[-1].points[-1].velocities)
    rig.told(AbortCause.PLAYER_LOST)


# -- simulated time ------------------------------------------------------------------------------------------


class SimClock:
    """/clock at the rate of real time, while it is on."""

    def __init__(self, rig: Any) -> None:
        self.on, self.ns = True, 1_000_000_000
        publisher = rig.peer.create_publisher(Clock, "/clock", 10)

        def publish() -> None:
            if self.on:
                self.ns += 5_000_000
                message = Clock()
                message.clock.sec, message.clock.nanosec = divmod(self.ns, 1_000_000_000)
                publisher.publish(message)

        rig.peer.create_timer(0.005, publish)
        rig.now_ns = lambda: self.ns


def test_a_player_node_ticks_on_the_simulated_clock(make_rig: Make) -> None:
    world = World(make_rig, simulated=True)
    clock = SimClock(world.rig)
    world.rig.spin(0.3)
    world.start()
    clock.on = False
    world.rig.spin(0.2)
    count = len(world.rig.steps)
    world.rig.spin(0.5)
    assert len(world.rig.steps) == count  # the robot stands still with its world
    clock.on = True
    world.rig.until(lambda: len(world.rig.steps) > count + 5)
    assert world.rig.kinds()[-1] == CommandKind.ACTION
    clock.on = False
    world.rig.spin(0.1)
    world.player._abort(AbortCause.SERVICE, "planted")
    world.rig.until(lambda: world.player._player.safety.state is SafetyState.LATCHED)  # finished on steady time
    world.rig.spin(0.1)
    assert not np.any(world.rig.steps[-1].velocities)


def test_a_hanging_engine_is_noticed_while_the_simulated_clock_stands_still(make_rig: Make) -> None:
    model = {"latency_ms": 20.0, "hang_on_request": 3, "grace_runs": 1}
    rig = make_rig(model=model, use_sim_time=True, request_timeout_s=0.6)
    clock = SimClock(rig)
    rig.spin(0.3)
    rig.start()
    rig.until(lambda: rig.node._session.loop.counters.requests == 3)
    clock.on = False
    rig.told(AbortCause.INFERENCE_DEADLINE)


def test_a_policy_node_that_is_not_heard_is_noticed_while_the_simulated_clock_stands_still(make_rig: Make) -> None:
    world = World(make_rig, simulated=True)
    clock = SimClock(world.rig)
    world.rig.spin(0.3)
    world.start()
    clock.on = False
    world.rig.node._status.publish = lambda message: None
    world.rig.until(lambda: world.player._player.safety.latched, 3.0)
    assert world.player._player.safety.cause is AbortCause.POLICY_LOST
