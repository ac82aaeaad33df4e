"""Every way into the latch on a real node: the stop is heard, the code is told, and nothing resumes by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from phyai_policy.msg import ActionStep, PolicyStatus
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from phyai_engine.types import AbortCause, CommandKind, SafetyState
from phyai_ros.policy_node import PolicyNode
from phyai_ros.spin import free_output

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def stamp_s(step: ActionStep) -> float:
    return float(step.header.stamp.sec + step.header.stamp.nanosec * 1e-9)


# -- fleet stop ----------------------------------------------------------------------------------------------


def test_a_fleet_stop_stops_and_keeps_the_latch_until_it_is_taken_back(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    fleet = rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED)
    rig.start()
    rig.spin(0.3)
    epoch = rig.epoch
    fleet.publish(Bool(data=True))
    rig.until(lambda: rig.kinds()[-1:] == [CommandKind.STOP])
    rig.told(AbortCause.FLEET_STOP)
    assert rig.status.fleet_stop
    assert all(s.epoch <= epoch for s in rig.steps if s.kind != CommandKind.STOP)
    refused = rig.call("rearm")
    assert not refused.success
    assert refused.message == "/fleet_stop still says stop"
    fleet.publish(Bool(data=False))
    rig.until(lambda: not rig.status.fleet_stop)
    rig.spin(0.2)
    assert rig.safety is SafetyState.LATCHED  # go is no re-arm
    rig.resumed()


def test_a_fleet_stop_from_before_the_node_started_is_obeyed(make_rig: Make) -> None:
    rig = make_rig()
    rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED).publish(Bool(data=True))
    rig.until(lambda: rig.node._safety().latched)
    rig.spin(0.1)
    given = [Parameter("robot", value="arm7"), Parameter("model", value=str(rig.model_file))]
    late = PolicyNode(context=rig.context, namespace="late", parameter_overrides=given)
    rig.others.append(late)
    rig.executor.add_node(late)
    rig.until(lambda: late._safety().latched)  # unconfigured
    assert late._safety().cause is AbortCause.FLEET_STOP
    assert late.trigger_configure() is SUCCESS
    assert late.trigger_activate() is FAILURE
    assert "fleet_stop" in late._last_error
    assert late._on_rearm(Trigger.Request(), Trigger.Response()).message == "/fleet_stop still says stop"


@pytest.mark.parametrize("reliability", list(ReliabilityPolicy)[1:3], ids=lambda r: r.name.lower())
def test_a_fleet_stop_is_heard_whatever_its_qos(make_rig: Make, reliability: ReliabilityPolicy) -> None:
    """Somebody types `ros2 topic pub`, which is not transient_local."""
    rig = make_rig(model={"latency_ms": 10.0}, fleet_stop_topic="line_2/stop")
    fleet = rig.peer.create_publisher(Bool, "line_2/stop", QoSProfile(depth=1, reliability=reliability))
    rig.start()
    rig.until(lambda: fleet.get_subscription_count() >= 1)
    rig.spin(0.2)
    fleet.publish(Bool(data=True))
    rig.told(AbortCause.FLEET_STOP)
    fleet.publish(Bool(data=False))
    rig.until(lambda: not rig.status.fleet_stop)
    rig.resumed()


def test_a_fleet_stop_after_another_cause_leaves_the_first_and_forbids_the_rearm(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    fleet = rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED)
    rig.start()
    rig.call("abort")
    fleet.publish(Bool(data=True))
    rig.until(lambda: rig.status.fleet_stop)
    assert rig.status.abort_cause == PolicyStatus.ABORT_SERVICE
    assert "/fleet_stop" in rig.call("rearm").message


def test_no_topic_and_another_topic(make_rig: Make) -> None:
    rig = make_rig(fleet_stop_topic="")
    assert rig.node._fleet_stop.words == "no topic"
    rig.node.set_parameters([Parameter("fleet_stop_topic", value="stop")])
    rig.configure()
    fleet = rig.peer.create_publisher(Bool, "/stop", LATCHED)
    fleet.publish(Bool(data=True))
    rig.until(lambda: rig.node._safety().cause is AbortCause.FLEET_STOP)


def test_a_topic_that_is_no_name_is_a_users_error(make_rig: Make) -> None:
    rig = make_rig()
    rig.node.set_parameters([Parameter("fleet_stop_topic", value="no topic")])
    assert rig.node.trigger_configure() is FAILURE
    assert "fleet_stop_topic is no topic name, got 'no topic'" in rig.node._last_error
    rig.node.set_parameters([Parameter("fleet_stop_topic", value="/fleet_stop")])
    rig.start()
    rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED).publish(Bool(data=True))
    rig.told(AbortCause.FLEET_STOP)


# -- a stuck executor ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("robot", ["arm7", "metaworld_sawyer"])
def test_a_blocked_executor_does_not_block_the_stop(make_rig: Make, robot: str) -> None:
    rig = make_rig(robot=robot, model={"latency_ms": 10.0}, max_tick_gap_s=0.2, stop_hold_steps=3)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)
    epoch = rig.epoch
    began = rig.block(1.0)
    rig.spin(0.2)
    stops = [s for s in rig.steps if s.kind == CommandKind.STOP]
    assert 0.15 < stamp_s(stops[0]) - began < 0.5
    assert stamp_s(stops[-1]) - began < 1.0  # the whole of it, paced, while the executor slept
    assert not np.any(stops[-1].velocities)
    ticks = [s.tick for s in rig.steps]
    assert ticks == sorted(set(ticks))
    assert all(s.epoch <= epoch for s in rig.steps if s.kind != CommandKind.STOP)
    rig.told(AbortCause.TICK_OVERRUN)
    assert "no control tick for 0.2" in rig.status.abort_text
    rig.resumed()


def test_a_stop_begun_by_the_sentry_is_finished_by_the_executor(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, max_tick_gap_s=0.2, stop_hold_steps=30)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)
    rig.block(0.4)
    rig.told(AbortCause.TICK_OVERRUN)
    stops = [s for s in rig.steps if s.kind == CommandKind.STOP]
    assert len(stops) > 30
    ticks = [s.tick for s in stops]
    assert ticks[0] + len(ticks) <= ticks[-1] + 2  # the tick between two writers may be silent, none is taken twice
    assert len(set(ticks)) == len(ticks)
    gaps = np.diff([stamp_s(s) for s in stops])
    assert (gaps < 0.5 * rig.robot.dt_s).sum() <= 3  # where the hand changes, not from then on


def test_a_stop_that_was_under_way_is_finished_while_the_executor_is_stuck(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, max_tick_gap_s=0.2, stop_hold_steps=3)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)
    began = time.time()
    rig.node._abort(AbortCause.SERVICE, "planted")
    time.sleep(0.8)
    until = time.time()
    rig.spin(0.2)
    stops = [s for s in rig.steps if s.kind == CommandKind.STOP]
    assert stamp_s(stops[1]) - began < 0.5
    assert stamp_s(stops[-1]) < until
    assert not np.any(stops[-1].velocities)
    rig.told(AbortCause.SERVICE)


def test_a_callback_stuck_with_the_player_in_its_hands_latches_on_return(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, max_tick_gap_s=0.2)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)
    count = len(rig.steps)
    began = rig.block(0.6, lock=rig.node._session.lock)
    rig.told(AbortCause.TICK_OVERRUN)
    after = [s for s in rig.steps[count:] if stamp_s(s) > began + 0.05]
    assert {s.kind for s in after} == {CommandKind.STOP}
    assert stamp_s(after[0]) > began + 0.55
    rig.resumed()


def test_what_breaks_the_sentry_is_told_and_ends_no_watch(make_rig: Make, capfd: Any) -> None:
    rig = make_rig(model={"latency_ms": 10.0}, max_tick_gap_s=0.2)
    rig.start()
    rig.until(lambda: len(rig.steps) > 20)

    def broken(*args: Any) -> None:
        rig.node._session._sentry._announce = right
        raise ZeroDivisionError("planted in the sentry")

    right, rig.node._session._sentry._announce = rig.node._session._sentry._announce, broken
    began = rig.block(0.8)
    rig.spin(0.2)
    stops = [stamp_s(s) - began for s in rig.steps if s.kind == CommandKind.STOP]
    assert stops[-1] < 0.8
    assert rig.safety is SafetyState.LATCHED
    assert rig.node._safety().cause is AbortCause.TICK_OVERRUN
    assert "planted in the sentry" in capfd.readouterr().err
    rig.resumed()
    rig.block(0.5)  # and it goes on watching
    rig.told(AbortCause.TICK_OVERRUN)


def test_short_delays_are_none_of_the_sentrys_business(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    rig.block(0.3)
    rig.spin(0.2)
    assert rig.safety is SafetyState.RUNNING


# -- the others ----------------------------------------------------------------------------------------------


def test_deactivation_stops_with_its_code_and_without_a_latch(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    assert rig.status.stop_cause == PolicyStatus.ABORT_NONE
    assert rig.node.trigger_deactivate() is SUCCESS
    rig.until(lambda: rig.status.lifecycle_label == "inactive")
    assert (rig.status.stop_cause, rig.status.abort_cause) == (
        PolicyStatus.ABORT_DEACTIVATE,
        PolicyStatus.ABORT_NONE,
    )
    rig.spin(0.1)
    count = len(rig.steps)
    rig.spin(0.3)
    assert len(rig.steps) == count  # only activate moves it again
    assert rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
    rig.until(lambda: rig.status.stop_cause == PolicyStatus.ABORT_NONE)


def test_a_signal_latches_with_its_code(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    rig.node.on_signal("SIGTERM")
    assert rig.node._safety().text == "SIGTERM received"
    rig.told(AbortCause.SIGNAL)


def test_an_engine_that_dies_while_inactive_forbids_activation(make_rig: Make) -> None:
    rig = make_rig(engine="process")
    rig.configure()
    os.kill(rig.node._session.client.pid, signal.SIGKILL)
    rig.told(AbortCause.ENGINE_LOST)
    assert "\n" not in rig.status.abort_text
    assert rig.node.trigger_activate() is FAILURE
    assert "~/restart_engine" in rig.call("rearm").message


def test_a_reconfigured_robot_keeps_its_grip_when_it_is_stopped(make_rig: Make) -> None:
    rig = make_rig(robot="metaworld_sawyer", model={"latency_ms": 10.0})
    rig.start()
    rig.until(lambda: len(rig.steps) > 10)
    assert rig.node.trigger_deactivate() is SUCCESS
    assert rig.node.trigger_cleanup() is SUCCESS
    rig.spin(0.1)
    grip = rig.steps[-1].values[3]
    assert grip != 0.0
    rig.cameras_on = dict.fromkeys(rig.cameras_on, False)  # nothing is commanded in the new session
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    count = len(rig.steps)
    rig.call("abort")
    rig.until(lambda: len(rig.steps) > count)
    assert list(rig.steps[-1].values) == [0.0, 0.0, 0.0, grip]


# -- another engine ------------------------------------------------------------------------------------------


def test_an_engine_is_restarted_on_request_and_the_robot_only_after_a_rearm(make_rig: Make) -> None:
    rig = make_rig(engine="process", model={"latency_ms": 10.0})
    assert "not configured" in rig.call("restart_engine").message
    rig.start()
    refused = rig.call("restart_engine")
    assert not refused.success
    assert "the robot may move" in refused.message
    first = rig.node._session.client.pid
    os.kill(first, signal.SIGKILL)
    rig.told(AbortCause.ENGINE_LOST)
    assert "SIGKILL" in rig.status.abort_text
    assert any(v.key == "engine_crash" and "SIGKILL" in v.value for v in rig.diagnostics[-1].status[0].values)
    assert "~/restart_engine" in rig.call("rearm").message
    epoch = rig.epoch
    answer = rig.call("restart_engine", 20.0)
    assert answer.success, answer.message
    second = rig.node._session.client.pid
    assert f"pid {first} -> {second}" in answer.message
    rig.spin(0.3)
    assert (rig.safety, rig.epoch) == (SafetyState.LATCHED, epoch)  # an engine is no re-arm
    rig.resumed()
    rig.until(lambda: rig.status.chunks_accepted >= 3)
    count = len(rig.diagnostics)
    rig.until(lambda: len(rig.diagnostics) > count)
    assert not any(v.key == "engine_crash" and v.value for v in rig.diagnostics[-1].status[0].values)


@pytest.mark.parametrize("fault", ["hangs", "is stopped"])
def test_an_engine_that_cannot_answer_is_replaced(make_rig: Make, fault: str) -> None:
    hangs = {"hang_on_request": 3, "grace_runs": 1} if fault == "hangs" else {}
    rig = make_rig(engine="process", model={"latency_ms": 10.0, **hangs}, request_timeout_s=0.6, engine_heartbeat_s=0.5)
    rig.start()
    first = rig.node._session.client.pid
    if fault == "is stopped":
        os.kill(first, signal.SIGSTOP)
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    assert rig.node._safety().cause in (AbortCause.INFERENCE_DEADLINE, AbortCause.ENGINE_LOST)
    answer = rig.call("restart_engine", 20.0)
    assert answer.success, answer.message
    assert not os.path.exists(f"/proc/{first}")
    rig.resumed()


def test_an_engine_is_restarted_while_inactive_and_a_failure_latches(make_rig: Make) -> None:
    rig = make_rig(engine="process")
    rig.configure()
    assert rig.call("restart_engine", 20.0).success
    assert rig.node.trigger_activate() is SUCCESS
    assert rig.node.trigger_deactivate() is SUCCESS
    rig.node._session._engine._memory_bytes = 1 << 60
    rig.node._session.params = replace(rig.node._session.params, engine_start_timeout_s=1.0)
    refused = rig.call("restart_engine", 20.0)
    assert not refused.success
    assert "MiB, wanted 1099511627776 MiB" in refused.message
    assert rig.node._safety().cause is AbortCause.ENGINE_LOST
    assert rig.node.trigger_activate() is FAILURE
    rig.node._session._engine._memory_bytes = 0
    assert rig.call("restart_engine", 20.0).success  # and the next request succeeds
    assert rig.call("rearm").success
    assert rig.node.trigger_activate() is SUCCESS


def test_another_horizon_is_another_configuration(make_rig: Make) -> None:
    rig = make_rig(engine="process")
    rig.configure()
    model = rig.node._session._engine._make.args[1]
    other = structs.replace(model, options={**model.options, "horizon": 20})
    make = rig.node._session._engine._make
    rig.node._session._engine._make = partial(make.func, make.args[0], other, *make.args[2:], **make.keywords)
    refused = rig.call("restart_engine", 20.0)
    assert "another horizon, got 20, wanted 16" in refused.message
    assert rig.node._safety().cause is AbortCause.ENGINE_LOST


# -- output that nobody reads --------------------------------------------------------------------------------


def fill(descriptor: int) -> None:
    while True:
        os.write(descriptor, bytes(4096))


def test_output_that_nobody_reads_is_lost_and_nobody_waits(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    shared = os.dup(writer)  # the descriptor of whoever started us
    free_output(writer)
    with pytest.raises(BlockingIOError):
        fill(writer)
    assert os.get_blocking(shared)
    for descriptor in (reader, writer, shared):
        os.close(descriptor)
    free_output(writer)  # closed: as it was
    with (tmp_path / "log").open("wb") as file:
        file.write(b"before")
        file.flush()
        free_output(file.fileno())
        os.write(file.fileno(), b" and after")
    assert (tmp_path / "log").read_bytes() == b"before and after"


def test_a_log_that_nobody_reads_does_not_freeze_the_node(make_rig: Make) -> None:
    """rclpy's logger holds the interpreter lock while it writes: no thread of the node would ever run again."""
    rig = make_rig(namespace="/out")
    rig.write_model({"latency_ms": 20.0})
    given = {"robot": "arm7", "model": str(rig.model_file), "warm_up_count": "1"}
    pairs = [item for key, value in given.items() for item in ("-p", f"{key}:={value}")]
    words = [sys.executable, "-m", "phyai_ros.policy_node", "--ros-args", "-r", "__ns:=/out", "--log-level", "debug"]
    reader, writer = os.pipe()
    environment = {**os.environ, "ROS_DOMAIN_ID": str(rig.context.get_domain_id())}
    process = subprocess.Popen([*words, *pairs], stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    os.set_blocking(reader, False)
    steps: list[tuple[float, ActionStep]] = []

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 1 << 20)

    try:
        timer = rig.peer.create_timer(0.005, drain)
        heard = steps.append
        rig.peer.create_subscription(ActionStep, "/out/policy_node/step", lambda m: heard((time.monotonic(), m)), 50)
        client = rig.peer.create_client(ChangeState, "/out/policy_node/change_state")
        rig.until(client.service_is_ready, 15.0)
        for number in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
            future = client.call_async(ChangeState.Request(transition=Transition(id=number)))
            rig.until(future.done, 30.0)
            assert future.result().success
        rig.until(lambda: len(steps) > 10, 15.0)
        rig.peer.destroy_timer(timer)
        rig.spin(2.5)  # 64 KiB of pipe are full after half a second
        assert len(os.read(reader, 1 << 17)) > 60_000
        until = time.monotonic()
        assert until - steps[-1][0] < 0.5
        assert CommandKind.STOP not in {m.kind for _, m in steps}  # a busy machine may hold between two chunks
        process.send_signal(signal.SIGTERM)
        rig.until(lambda: process.poll() is not None, 10.0)
        assert process.returncode == 0
        assert steps[-1][1].kind == CommandKind.STOP
    finally:
        process.kill()
        process.wait(timeout=5.0)
        os.close(reader)
