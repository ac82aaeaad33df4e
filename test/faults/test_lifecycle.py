"""Exceptions, resuming, and two robots in one domain, on a running node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from diagnostic_msgs.msg import DiagnosticStatus
from phyai_policy.msg import ActionStep, ChunkTiming
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image, JointState

from phyai_engine.safety import Safety
from phyai_engine.types import AbortCause, CommandKind, SafetyState
from phyai_ros.policy_node import PolicyNode

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
SUCCESS = TransitionCallbackReturn.SUCCESS


@pytest.mark.fault(11, 43)
@pytest.mark.parametrize(
    ("owner", "name"),
    [("buffer", "put_image"), ("buffer", "put_joints"), ("loop", "tick"), ("loop", "on_events"), ("client", "submit")],
)
def test_an_exception_in_any_callback_stops_is_reported_and_wedges_nothing(
    make_rig: Make, owner: str, name: str
) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, diagnostics_rate_hz=10.0)
    rig.start()
    target = getattr(rig.node._session, owner)
    right = getattr(target, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        setattr(target, name, right)
        raise ZeroDivisionError("planted")

    setattr(target, name, broken)
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    safety = rig.node._safety()
    assert safety.cause is AbortCause.EXCEPTION
    assert "planted" in safety.text
    rig.until(lambda: rig.kinds()[-1:] == [CommandKind.STOP])
    rig.until(lambda: "planted" in rig.status.abort_text)
    rig.until(lambda: any("planted" in a.status[0].message for a in rig.diagnostics))
    assert (
        next(a for a in rig.diagnostics if "planted" in a.status[0].message).status[0].level == DiagnosticStatus.ERROR
    )
    heard = [c.received for c in rig.node._session.buffer.camera_stats(0)]
    rig.spin(0.15)
    assert all(c.received > n for c, n in zip(rig.node._session.buffer.camera_stats(0), heard, strict=True))
    assert rig.call("rearm").success
    rig.until(lambda: rig.safety is SafetyState.RUNNING)


@pytest.mark.fault(15)
@pytest.mark.parametrize("way", ["rearm", "activate"])
def test_motion_resumes_from_where_the_arm_was_moved_to(make_rig: Make, way: str) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    rig.until(lambda: len(rig.steps) > 5)
    if way == "rearm":
        rig.call("abort")
        rig.until(lambda: rig.safety is SafetyState.LATCHED)
    else:
        assert rig.node.trigger_deactivate() is SUCCESS
    rig.spin(0.1)
    last = np.array(rig.steps[-1].values)
    for name in rig.position:  # a person moves the arm
        rig.position[name] -= 0.5
    moved = np.array([rig.position[a.state] for a in rig.robot.actions])
    rig.spin(0.2)
    count, seen = len(rig.steps), len(rig.timings)
    assert rig.call("rearm").success if way == "rearm" else rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: len(rig.steps) > count + 3)
    first = np.array(rig.steps[count].values)
    assert rig.steps[count].kind == CommandKind.ACTION
    assert np.abs(first - moved).max() < 0.02
    assert (np.abs(first - last) > 0.4).all()
    assert np.abs(rig.steps[count].velocities).max() == 0.0
    new = next(t for t in rig.timings[seen:] if t.outcome == ChunkTiming.OUTCOME_ACCEPTED)
    assert new.delay_steps == 0
    assert np.isnan(new.m_cond_s)


@pytest.mark.fault(14, 45)
def test_after_its_stop_the_node_leaves_the_robot_to_others(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, stop_hold_steps=3)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)
    speed = np.abs(rig.steps[-1].velocities)
    assert rig.node.trigger_deactivate() is SUCCESS
    rig.spin(0.1)
    stop = [s for s in rig.steps if s.kind == CommandKind.STOP]
    limits = np.array([a.acceleration_max for a in rig.robot.actions]) * rig.robot.dt_s
    assert len(stop) <= np.ceil((speed + 0.1) / limits).max() + 3
    resting = np.array(stop[-1].values)
    assert all(np.array_equal(s.values, resting) for s in stop[-3:])
    middle = np.array([0.5 * (a.lower + a.upper) for a in rig.robot.actions])
    assert np.abs(resting - middle).max() < 0.5  # held where it was, which is zero for no joint that stood elsewhere
    assert not np.any(stop[-1].velocities)
    published = len(rig.steps), len(rig.trajectories)
    rig.spin(0.3)
    assert (len(rig.steps), len(rig.trajectories)) == published


class Second:
    """Another arm of the same kind in the same domain, in a namespace of its own."""

    def __init__(self, rig: Any, node: PolicyNode) -> None:
        self.node = node
        self.steps: list[ActionStep] = []
        self.peer = Node("peer", context=rig.context, namespace="right")
        rig.executor.add_node(self.peer)
        images = [self.peer.create_publisher(Image, c.topic, QoSProfile(depth=2)) for c in rig.robot.cameras]
        joints = self.peer.create_publisher(JointState, "joint_states", QoSProfile(depth=2))
        position = [rig.position[n] + 0.1 for n in rig.robot.state_names]

        def speak() -> None:
            for publisher in images:
                publisher.publish(rig.stamp(Image(height=24, width=32, encoding="rgb8", step=96, data=rig._pixels)))
            joints.publish(rig.stamp(JointState(name=rig.robot.state_names, position=position)))

        self.peer.create_timer(0.03, speak)
        self.peer.create_subscription(ActionStep, "policy_node/step", self.steps.append, QoSProfile(depth=50))


def test_two_robots_in_one_domain_do_not_hear_one_another(make_rig: Make) -> None:
    def another(context: Any) -> list[Node]:
        given = {"robot": "arm7", "engine": "thread", "warm_up_count": 1}
        overrides = [Parameter(name, value=value) for name, value in given.items()]
        return [PolicyNode(context=context, namespace="right", parameter_overrides=overrides)]

    rig = make_rig(others=another)
    right = Second(rig, rig.others[0])
    right.node.set_parameters([Parameter("model", value=str(rig.model_file))])
    assert right.node.trigger_configure() is SUCCESS
    assert right.node.trigger_activate() is SUCCESS
    rig.start()
    rig.until(lambda: len(rig.steps) > 5 and len(right.steps) > 5)
    left = np.array(rig.steps[0].values)
    np.testing.assert_allclose(np.array(right.steps[0].values) - left, 0.1, atol=0.02)
    assert rig.call("abort").success
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    count, latched = len(right.steps), len(rig.steps)
    rig.until(lambda: len(right.steps) > count + 10)
    assert {s.kind for s in right.steps[count:]} == {CommandKind.ACTION}
    assert len(rig.steps) - latched <= 6  # what was on its way
    assert rig.kinds()[-1:] == [CommandKind.STOP]
    assert {s.epoch for s in right.steps}.isdisjoint(s.epoch for s in rig.steps)
    right.node.trigger_deactivate()
    rig.executor.remove_node(right.peer)
    right.peer.destroy_node()


def test_a_node_that_was_told_to_end_moves_no_robot_in_its_last_moments(make_rig: Make) -> None:
    """The executor turns for 0.2 s after the stop, and nothing would stop the robot after that."""
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    rig.node._flag.name = "SIGTERM"
    rig.node.on_signal("SIGTERM")
    rig.spin(0.1)
    assert rig.call("rearm").message == "the process is ending (SIGTERM)"
    assert rig.node.trigger_deactivate() is SUCCESS
    rig.node._idle_safety = rig.node._session.loop.player.safety = Safety(epoch=rig.epoch)
    assert rig.node.trigger_activate() is TransitionCallbackReturn.FAILURE
    assert "the process is ending" in rig.node._last_error
