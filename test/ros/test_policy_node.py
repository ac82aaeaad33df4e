"""The policy node on real ROS 2: both robots, the outputs, the stop, the envelope, the lifecycle."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from phyai_policy.msg import ActionStep, ChunkStatus, ChunkTiming, PolicyStatus
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from phyai_engine.types import AbortCause, CommandKind, Refusal, SafetyState
from phyai_ros.player_node import PlayerNode
from phyai_ros.sim_node import SimNode

pytestmark = pytest.mark.ros
SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)
Make = Callable[..., Any]


def actions(steps: list[ActionStep]) -> list[ActionStep]:
    return [s for s in steps if s.kind == CommandKind.ACTION]


def absolute_rows(rig: Any) -> list[tuple[int, int]]:
    """(chunk_id, row) of every action played."""
    return [(s.chunk_id, s.step) for s in actions(rig.steps)]


@pytest.mark.fault(2)
@pytest.mark.parametrize("schedule", ["sync", "naive_async", "rtc"])
def test_drives_the_robot_without_repeating_or_skipping_a_step(make_rig: Make, robot: str, schedule: str) -> None:
    rig = make_rig(robot=robot, model={"latency_ms": 50.0}, schedule=schedule)
    rig.start()
    rig.until(lambda: len(actions(rig.steps)) > 60, 10.0)
    played = absolute_rows(rig)
    ticks = [s.tick for s in rig.steps]
    assert ticks == sorted(set(ticks)), "more than one command in a tick"
    accepted = {t.chunk_id: t for t in rig.timings if t.outcome == ChunkTiming.OUTCOME_ACCEPTED}
    for (chunk_a, row_a), (chunk_b, row_b) in itertools.pairwise(played):
        if chunk_a == chunk_b:
            assert row_b == row_a + 1
        else:
            assert row_b == accepted[chunk_b].delay_steps
    if schedule == "sync":
        assert CommandKind.HOLD in rig.kinds()
        assert all(row == 0 for row in (t.delay_steps for t in accepted.values()))
    else:
        assert CommandKind.HOLD not in rig.kinds()[5:]


def test_timing_terms_add_up_and_margins_are_published(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 50.0})
    rig.start()
    rig.spin(1.0)
    timing = [t for t in rig.timings if t.outcome == ChunkTiming.OUTCOME_ACCEPTED][-1]
    assert 0.05 <= timing.l_inference_s < 0.5
    terms = timing.l_observe_s + timing.l_transfer_s + timing.l_queue_s + timing.l_inference_s + timing.l_actuate_s
    assert timing.l_critical_s == pytest.approx(terms, abs=5e-3)
    assert timing.l_serialise_s + timing.l_network_s == pytest.approx(timing.l_transfer_s, abs=1e-6)
    elapsed = timing.l_critical_s - timing.l_observe_s
    assert timing.m_cond_s == pytest.approx(timing.delay_predicted_steps * rig.robot.dt_s - elapsed, abs=0.02)
    assert np.isfinite([timing.m_ctrl_s, timing.m_exhaust_s, timing.jump, timing.l_env_s]).all()
    rig.until(lambda: rig.status.handoffs > 3)
    status = rig.status
    assert np.isfinite([status.margin_p50_s, status.margin_p01_s, status.inference_p99_s]).all()
    assert status.lifecycle_label == "active" and status.safety_state == PolicyStatus.SAFETY_RUNNING
    rig.until(lambda: bool(rig.diagnostics))
    keys = {v.key for v in rig.diagnostics[-1].status[0].values}
    assert {"margin_p50_ms", "misses", "tick_jitter_p99_ms", "decoder", "model"} <= keys
    assert rig.diagnostics[-1].status[0].hardware_id == "arm7"


@pytest.mark.fault(14, 22)
def test_abort_stops_at_once_and_nothing_of_the_old_epoch_follows(make_rig: Make, robot: str) -> None:
    rig = make_rig(robot=robot, model={"latency_ms": 80.0})
    rig.start()
    rig.spin(0.5)
    before = rig.epoch
    response = rig.call("abort")
    assert response.success and response.message.startswith("abort latched, stop: decelerat")
    rig.spin(0.6)
    stop = next(i for i, s in enumerate(rig.steps) if s.kind == CommandKind.STOP)
    after = rig.steps[stop:]
    assert all(s.kind == CommandKind.STOP and s.epoch > before for s in after)
    assert rig.safety is SafetyState.LATCHED
    count = len(rig.steps)
    rig.spin(0.3)
    assert len(rig.steps) == count, "the stop sequence is bounded, then the node is quiet"
    if robot == "arm7":
        last = np.array([s.values for s in rig.steps[stop - 1 :]])
        speed = np.abs(np.diff(last, axis=0)) / rig.robot.dt_s
        limit = np.array([a.acceleration_max for a in rig.robot.actions])
        lost = -np.diff(speed, axis=0) / rig.robot.dt_s
        assert (lost <= limit + 1e-6).all() and (speed[-1] == 0).all()
    else:
        assert all(s.values[:3].tolist() == [0.0, 0.0, 0.0] for s in after)
    status = rig.status
    assert status.abort_cause == PolicyStatus.ABORT_SERVICE and status.safety_state == PolicyStatus.SAFETY_LATCHED
    assert rig.call("abort").message.startswith("already latched")


def test_rearm_needs_fresh_observations_and_starts_without_committed_actions(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 30.0})
    rig.start()
    assert not rig.call("rearm").success
    rig.call("abort")
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    rig.cameras_on = dict.fromkeys(rig.cameras_on, False)
    rig.spin(0.7)
    refused = rig.call("rearm")
    assert not refused.success and "camera" in refused.message and rig.safety is SafetyState.LATCHED
    rig.cameras_on = dict.fromkeys(rig.cameras_on, True)
    rig.spin(0.3)
    seen = len(rig.timings)
    assert rig.call("rearm").success
    rig.until(lambda: len(rig.timings) > seen)
    first = rig.timings[seen]
    assert first.delay_steps == 0 and np.isnan(first.m_cond_s)
    rig.until(lambda: rig.safety is SafetyState.RUNNING)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_abort_does_not_wait_for_a_hanging_engine(make_rig: Make, engine: str) -> None:
    rig = make_rig(model={"latency_ms": 20.0, "hang_on_request": 3, "grace_runs": 1}, engine=engine)
    rig.start()
    rig.until(lambda: rig.safety is SafetyState.HOLDING)
    assert rig.call("abort", seconds=0.5).success
    rig.until(lambda: rig.safety is SafetyState.LATCHED, 0.5)


def test_abort_while_inactive_latches_and_activate_is_refused_until_rearm(make_rig: Make) -> None:
    rig = make_rig()
    assert rig.call("abort").success
    rig.configure()
    assert rig.node.trigger_activate() is FAILURE
    assert rig.call("rearm").success
    assert rig.node.trigger_activate() is SUCCESS
    assert not rig.steps, "nothing is published before the first observation gave a chunk"


@pytest.mark.fault(23)
@pytest.mark.parametrize("row", [0, 7, 15])
def test_nan_anywhere_refuses_the_whole_chunk(make_rig: Make, row: int) -> None:
    rig = make_rig(model={"nan_at": row, "grace_runs": 1})
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: rig.status.refusals[Refusal.NOT_FINITE] > 0)
    assert not rig.steps
    assert "not_finite" in rig.status.last_refusal_text


def test_chunk_that_leaves_the_envelope_is_refused_and_the_latch_follows_the_hold(
    make_rig: Make, tmp_path: Any
) -> None:
    # the motion circles with 0.1 of half a range: a robot file with a seam limit of 1 mrad cannot accept it
    rig = make_rig(model={"latency_ms": 5.0}, max_hold_s=0.4, request_timeout_s=0.3)
    rig.start()
    tight = dict.fromkeys(("first_step_max", "seam_jump_max"), 1e-9)
    from dataclasses import replace

    session = rig.node._session
    session.loop.player.envelope = replace(session.loop.player.envelope, **tight)
    rig.until(lambda: rig.status.refusals[Refusal.OUT_OF_ENVELOPE] > 0)
    assert "joint_" in rig.status.last_refusal_text
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    assert rig.node._safety().cause is AbortCause.EXHAUSTED


@pytest.mark.fault(9)
def test_camera_dropout_is_refused_held_and_recovered(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 20.0})
    rig.start()
    rig.cameras_on["wrist"] = False
    rig.until(lambda: rig.safety is SafetyState.HOLDING)
    rig.until(lambda: rig.status.refusals[Refusal.STALE] > 0)
    assert "wrist" in rig.status.last_refusal_text
    rig.spin(0.2)
    held = [s for s in rig.steps if s.kind == CommandKind.HOLD]
    rig.cameras_on["wrist"] = True
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
    assert held, "a hold is published, not silence"


@pytest.mark.fault(16)
def test_partial_and_permuted_joints_are_mapped_by_name(make_rig: Make) -> None:
    # kuka_drivers issue 254: joints in another order than expected
    rig = make_rig()
    rig.joints_on = False
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    names = [e.name for e in rig.robot.state]
    want = {n: 0.1 * i - 0.4 for i, n in enumerate(names)}
    want["joint_6"] = 1.0

    def feed() -> None:
        for part in (names[4:][::-1], [*names[:4][::-1], "not_a_joint"]):
            message = JointState(
                name=part, position=[want.get(n, 9.9) for n in part], velocity=[float("nan")] * len(part)
            )
            rig._joint_publishers["joint_states"].publish(rig.stamp(message))

    timer = rig.peer.create_timer(0.01, feed)
    rig.until(lambda: bool(rig.timings))
    rig.peer.destroy_timer(timer)
    session = rig.node._session
    now = rig.node.get_clock().now().nanoseconds
    state = session.buffer.newest_state(time.monotonic_ns())
    assert now > 0 and state.tolist() == pytest.approx([want[n] for n in names])


@pytest.mark.fault(18)
def test_bad_messages_are_counted_and_never_end_the_node(make_rig: Make) -> None:
    rig = make_rig()
    rig.start()
    images = rig._images["front"]
    images.publish(rig.stamp(Image(height=4, width=4, encoding="32FC1", step=16, data=bytes(64))))
    images.publish(rig.stamp(Image(height=4, width=4, encoding="rgb8", step=12, data=bytes(7))))
    images.publish(Image(height=4, width=4, encoding="rgb8", step=12, data=bytes(48)))  # unstamped
    joints = rig._joint_publishers["joint_states"]
    names = [e.name for e in rig.robot.state]
    joints.publish(rig.stamp(JointState(name=names, position=[0.0] * 3)))
    joints.publish(rig.stamp(JointState(name=[names[0]] * 7, position=[0.0] * 7)))
    joints.publish(rig.stamp(JointState(name=names, position=[float("nan")] * 7)))
    rig.spin(0.3)
    front = next(c for c in rig.node._session.buffer.camera_stats(0) if c.name == "front")
    assert sum(front.dropped.values()) == 3
    assert sum(rig.node._session.buffer.joint_stats(0)[0].dropped.values()) >= 3
    assert rig.safety is SafetyState.RUNNING


@pytest.mark.fault(43)
def test_exception_in_a_callback_stops_and_latches(make_rig: Make) -> None:
    # rclpy issue 983: an exception vanishes, or ends the process without a stop
    rig = make_rig()
    rig.start()

    def broken(now_ros_ns: int) -> None:
        raise ZeroDivisionError("planted")

    tick = rig.node._session.loop.tick
    rig.node._session.loop.tick = broken
    rig.until(lambda: rig.safety is SafetyState.STOPPING)
    rig.node._session.loop.tick = tick
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    assert rig.node._safety().cause is AbortCause.EXCEPTION
    assert any(s.kind == CommandKind.STOP for s in rig.steps) or rig.until(
        lambda: any(s.kind == CommandKind.STOP for s in rig.steps), 1.0
    )


def test_engine_that_dies_stops_the_robot(make_rig: Make) -> None:
    rig = make_rig(engine="process", model={"latency_ms": 20.0, "crash_on_request": 3, "grace_runs": 1})
    rig.start()
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    safety = rig.node._safety()
    assert safety.cause is AbortCause.ENGINE_LOST and "13" in safety.text
    refused = rig.call("rearm")
    assert not refused.success and "engine" in refused.message
    assert rig.node.trigger_deactivate() is SUCCESS and rig.node.trigger_cleanup() is SUCCESS
    rig.write_model({})
    rig.configure()
    assert rig.call("rearm").success and rig.node.trigger_activate() is SUCCESS


def test_engine_error_is_counted_and_the_next_request_goes_on(make_rig: Make) -> None:
    rig = make_rig(model={"fail_every": 3, "grace_runs": 1})
    rig.start()
    rig.until(lambda: any(t.outcome == ChunkTiming.OUTCOME_ENGINE_ERROR for t in rig.timings))
    assert "fail_every" in next(t.text for t in rig.timings if t.outcome == ChunkTiming.OUTCOME_ENGINE_ERROR)
    count = len(rig.timings)
    rig.until(lambda: any(t.outcome == ChunkTiming.OUTCOME_ACCEPTED for t in rig.timings[count:]))


@pytest.mark.fault(36)
def test_looped_stamps_flush_and_latch(make_rig: Make) -> None:
    # ros_comm PR 1438: a looping bag blocks synchronisation for ever
    rig = make_rig()
    rig.start()
    rig.stamp_shift_ns = -60 * 10**9
    rig.until(lambda: rig.node._safety().latched)
    assert rig.node._safety().cause in (AbortCause.CLOCK_JUMP, AbortCause.EXHAUSTED)


@pytest.mark.fault(37)
def test_constant_offset_asks_for_use_sim_time(make_rig: Make) -> None:
    # rosbag2 issue 1056
    rig = make_rig()
    rig.stamp_shift_ns = -3600 * 10**9
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: "use_sim_time" in rig.status.last_refusal_text)
    assert not rig.steps


def test_instruction_keep_and_flush(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    epoch = rig.epoch
    rig.node.set_parameters([Parameter("instruction", value="pick the cube")])
    assert rig.epoch == epoch and rig.node._session.buffer._instruction == "pick the cube"
    rig.node.set_parameters([Parameter("instruction_change", value="flush")])
    publisher = rig.peer.create_publisher(String, "policy_node/instruction", 1)
    rig.spin(0.2)
    publisher.publish(String(data="drop it"))
    rig.until(lambda: rig.epoch > epoch)
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
    assert rig.node._session.buffer._instruction == "drop it"


def test_a_seed_that_is_set_counts_the_chunks_anew(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    seeds: list[int] = []
    rig.node._session._engine.asked = lambda request: seeds.append(request.seed)
    for _ in range(2):  # also where it is the same again
        seeds.clear()
        rig.node.set_parameters([Parameter("seed", value=5000)])
        rig.until(lambda: len(seeds) >= 2)
        assert seeds[:2] == [5001, 5002]


def test_fixed_parameter_cannot_change_while_configured(make_rig: Make) -> None:
    rig = make_rig()
    rig.configure()
    result = rig.node.set_parameters([Parameter("schedule", value="sync")])[0]
    assert not result.successful and "fixed" in result.reason


@pytest.mark.fault(14)
def test_deactivate_stops_before_it_goes_quiet_and_activate_starts_a_new_epoch(make_rig: Make, robot: str) -> None:
    rig = make_rig(robot=robot)
    rig.start()
    rig.spin(0.3)
    epoch = rig.epoch
    assert rig.node.trigger_deactivate() is SUCCESS
    rig.spin(0.2)
    assert rig.steps[-1].kind == CommandKind.STOP and rig.safety is SafetyState.IDLE
    ticks = [s.tick for s in rig.steps]
    assert ticks == sorted(set(ticks)), "at most one command in a tick, also where the stop begins"
    count = len(rig.steps)
    rig.spin(0.2)
    assert len(rig.steps) == count
    assert rig.node.trigger_activate() is SUCCESS and rig.epoch > epoch
    rig.until(lambda: rig.safety is SafetyState.RUNNING)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"robot": "arm8"}, "arm8"),
        ({"model": "nope.yaml"}, "nope.yaml"),
        ({"execution_horizon": 99}, "execution_horizon"),
        ({"engine": "remote", "engine_endpoint": "tcp://gpu-server:5555"}, "phyai keygen"),
        (
            {"engine": "remote", "engine_endpoint": "tcp://127.0.0.1:1", "engine_start_timeout_s": 1.0},
            "the connection was refused",
        ),
    ],
)
def test_failed_configure_says_why_and_releases_everything(make_rig: Make, broken: dict[str, Any], words: str) -> None:
    rig = make_rig()
    rig.node.set_parameters([Parameter(name, value=value) for name, value in broken.items()])
    threads = threading.active_count()
    assert rig.node.trigger_configure() is FAILURE
    assert words in rig.node._last_error
    assert rig.node._session is None and threading.active_count() == threads
    assert rig.node._state_machine.current_state[1] == "unconfigured"


def test_model_that_cannot_be_loaded_is_a_failure_with_its_reason(make_rig: Make) -> None:
    rig = make_rig(model={"horizont": 3})
    assert rig.node.trigger_configure() is FAILURE
    assert "horizont" in rig.node._last_error and "horizon" in rig.node._last_error


def test_invalid_transition_is_refused_and_the_node_lives(make_rig: Make) -> None:
    # rclpy issue 1209: `cleanup` while unconfigured kills the node
    from lifecycle_msgs.msg import Transition
    from lifecycle_msgs.srv import ChangeState, GetState

    rig = make_rig()
    client = rig.peer.create_client(ChangeState, "policy_node/change_state")
    assert client.wait_for_service(timeout_sec=5.0)
    future = client.call_async(ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CLEANUP)))
    rig.until(future.done)
    assert future.result().success is False
    state = rig.peer.create_client(GetState, "policy_node/get_state")
    assert state.wait_for_service(timeout_sec=5.0)
    future = state.call_async(GetState.Request())
    rig.until(future.done)
    assert future.result().current_state.label == "unconfigured"
    rig.configure()


@pytest.mark.fault(43)
def test_unexpected_error_in_a_transition_is_reported_and_released(make_rig: Make) -> None:
    rig = make_rig()
    rig.configure()

    def broken(*callbacks: Any) -> None:
        raise OSError("planted")

    rig.node._session.activate = broken
    assert rig.node.trigger_activate() is ERROR
    assert "planted" in rig.node._last_error and rig.node._session is None
    assert rig.node._state_machine.current_state[1] == "unconfigured"
    assert rig.node._safety().cause is AbortCause.EXCEPTION


def test_unexpected_error_in_deactivate_still_publishes_the_whole_stop(make_rig: Make) -> None:
    rig = make_rig()
    rig.start()
    rig.spin(0.3)

    def broken() -> None:
        raise OSError("planted")

    rig.node._session.loop.stop = broken
    assert rig.node.trigger_deactivate() is ERROR
    rig.spin(0.2)
    stops = [s for s in rig.steps if s.kind == CommandKind.STOP]
    assert stops and not any(stops[-1].velocities) and rig.steps[-1] is stops[-1]
    assert rig.node._session is None and rig.node._safety().cause is AbortCause.EXCEPTION


def test_shutdown_from_active_stops_first(make_rig: Make) -> None:
    rig = make_rig()
    rig.start()
    assert rig.node.trigger_shutdown() is SUCCESS
    rig.spin(0.2)
    assert rig.steps[-1].kind == CommandKind.STOP and rig.node._session is None


def test_reconfigure_leaks_nothing(make_rig: Make) -> None:
    rig = make_rig()

    def cycle() -> None:
        rig.configure()
        assert rig.node.trigger_activate() is SUCCESS
        rig.spin(0.02)
        assert rig.node.trigger_deactivate() is SUCCESS
        assert rig.node.trigger_cleanup() is SUCCESS

    def counts() -> tuple[int, int, int, int]:
        gc.collect()
        entities = len(list(rig.node.subscriptions)) + len(list(rig.node.publishers)) + len(list(rig.node.timers))
        return (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            entities,
            len(list(rig.node.guards)),
        )

    for _ in range(3):
        cycle()
    first = counts()
    for _ in range(5):
        cycle()
    assert counts() == first


@pytest.mark.fault(41, 42)
def test_trajectory_output_is_played_by_the_controller(make_rig: Make) -> None:
    def sim(context: Any) -> list[Any]:
        given = {"robot": "arm7", "command_source": "trajectory"}
        return [SimNode(context=context, parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])]

    rig = make_rig(output="trajectory", model={"latency_ms": 50.0}, others=sim)
    rig.start()
    rig.until(lambda: len(rig.trajectories) >= 5)
    times = [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in rig.trajectories[-1].points]
    assert (np.diff(times) > 0).all() and times[0] > 0
    assert all(sorted(t.joint_names) == sorted(rig.robot.action_names) for t in rig.trajectories)
    assert not any(rig.trajectories[-1].points[-1].velocities)
    delays = [t.delay_steps for t in rig.timings if t.outcome == ChunkTiming.OUTCOME_ACCEPTED][1:]
    assert delays and all(1 <= d <= 6 for d in delays), delays
    count = len(rig.trajectories)
    rig.call("abort")
    rig.until(lambda: len(rig.trajectories) > count)
    stop = rig.trajectories[-1]
    assert stop.header.stamp.sec == 0 and not any(stop.points[-1].velocities) and len(stop.points) >= 1
    assert rig.safety is SafetyState.LATCHED


def test_chunks_output_is_played_by_a_player_elsewhere(make_rig: Make, robot: str) -> None:
    def player(context: Any) -> list[Any]:
        return [PlayerNode(context=context, parameter_overrides=[Parameter("robot", value=robot)])]

    rig = make_rig(robot=robot, output="chunks", model={"latency_ms": 50.0}, others=player)
    from rclpy.qos import QoSProfile

    acknowledged: list[ChunkStatus] = []
    rig.peer.create_subscription(ActionStep, "player_node/step", rig._on_step, QoSProfile(depth=50))
    rig.peer.create_subscription(ChunkStatus, "policy_node/chunk_status", acknowledged.append, QoSProfile(depth=50))
    rig.start()
    rig.until(lambda: len({s.chunk_id for s in actions(rig.steps)}) >= 5)
    played = absolute_rows(rig)
    for (chunk_a, row_a), (chunk_b, row_b) in itertools.pairwise(played):
        assert row_b == row_a + 1 if chunk_a == chunk_b else 0 <= row_b <= 7
    assert acknowledged[-1].consumed_steps >= len(played) - 3
    before = rig.epoch
    rig.call("abort")
    rig.until(lambda: any(s.kind == CommandKind.STOP for s in rig.steps), 0.5)
    rig.spin(0.4)
    stop = next(i for i, s in enumerate(rig.steps) if s.kind == CommandKind.STOP)
    assert all(s.kind == CommandKind.STOP and s.epoch > before for s in rig.steps[stop:])
    assert rig.call("rearm").success
    count = len(rig.steps)
    rig.until(lambda: any(s.kind == CommandKind.ACTION for s in rig.steps[count:]))


def test_chunk_that_no_player_acknowledges_is_counted_and_requested_again(make_rig: Make) -> None:
    rig = make_rig(output="chunks", model={"latency_ms": 5.0})
    publisher = rig.peer.create_publisher(ChunkStatus, "policy_node/chunk_status", 5)
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: "no ChunkStatus for" in rig.status.last_refusal_text)
    assert rig.chunks == []  # to a player that was never heard nothing is handed

    def alive() -> bool:
        publisher.publish(ChunkStatus())
        return len({c.chunk_id for c in rig.chunks}) >= 2

    rig.until(lambda: alive() and "named the chunk" in rig.status.last_refusal_text)


def test_nothing_is_re_armed_while_the_player_is_silent_and_its_latch_is_told_back(make_rig: Make) -> None:
    rig = make_rig(output="chunks", model={"latency_ms": 5.0})
    publisher = rig.peer.create_publisher(ChunkStatus, "policy_node/chunk_status", 5)
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS

    def latched(number: int) -> bool:
        publisher.publish(ChunkStatus(latch=number, abort_cause=int(AbortCause.SERVICE), text="planted"))
        return rig.status.player_latch == number and rig.status.abort_cause == AbortCause.SERVICE

    rig.until(lambda: latched(7))
    rig.until(lambda: False, 0.6, must=False)
    assert "no ChunkStatus" in rig.call("rearm").message
    rig.until(lambda: latched(7) and rig.call("rearm").success)
    rig.until(lambda: rig.status.abort_cause == AbortCause.NONE and rig.status.player_latch == 7)
    rig.until(lambda: latched(8))  # another latch, whatever was re-armed before


def test_chunk_that_the_player_refuses_is_requested_again(make_rig: Make) -> None:
    rig = make_rig(output="chunks", model={"latency_ms": 5.0})
    publisher = rig.peer.create_publisher(ChunkStatus, "policy_node/chunk_status", 5)
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS

    def alive() -> bool:
        publisher.publish(ChunkStatus())
        return bool(rig.chunks)

    rig.until(alive)
    first = rig.chunks[-1]
    refusal = ChunkStatus(epoch=first.epoch, chunk_id=first.chunk_id, refusal=int(Refusal.WRONG_EPOCH), text="planted")

    def refused() -> bool:
        publisher.publish(refusal)  # again and again: a busy node's queue of five keeps the newest
        return bool(rig.status.refusals[Refusal.WRONG_EPOCH])

    def asked_again() -> bool:
        publisher.publish(ChunkStatus())
        return bool(rig.chunks[-1].chunk_id > first.chunk_id)

    rig.until(refused)
    rig.until(asked_again)
    assert rig.status.refusals[Refusal.WRONG_EPOCH] == 1  # each refusal once, however often it is told


def test_trajectory_without_controller_state_is_not_believed(make_rig: Make) -> None:
    rig = make_rig(output="trajectory")
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    rig.until(lambda: "controller state" in rig.status.last_refusal_text)


def test_trajectory_for_a_delta_robot_is_a_users_error(make_rig: Make) -> None:
    rig = make_rig(robot="metaworld_sawyer", output="trajectory")
    assert rig.node.trigger_configure() is FAILURE
    assert "joint_position" in rig.node._last_error and not rig.node._safety().latched


def test_compressed_cameras_drive_the_robot_too(make_rig: Make, tmp_path: Any) -> None:
    import io

    from PIL import Image as Picture
    from sensor_msgs.msg import CompressedImage

    from phyai_engine.config import resolve

    text = resolve("robots", "arm7").read_text()
    file = tmp_path / "arm7_jpeg.yaml"
    file.write_text(text.replace("/image_raw, ", "/image_raw/compressed, transport: compressed, "))
    rig = make_rig(robot=str(file))
    jpeg = io.BytesIO()
    Picture.new("RGB", (32, 24), (200, 30, 10)).save(jpeg, "JPEG", quality=95)
    publishers = [rig.peer.create_publisher(CompressedImage, c.topic, 2) for c in rig.robot.cameras]

    def send() -> None:
        for publisher in publishers:
            publisher.publish(rig.stamp(CompressedImage(format="rgb8; jpeg compressed bgr8", data=jpeg.getvalue())))

    rig.peer.create_timer(0.05, send)
    rig.start()
    session = rig.node._session
    image = session.buffer.snapshot(rig.now_ns(), time.monotonic_ns()).images["front"]
    assert image.shape == (24, 32, 3) and np.abs(image[12, 16].astype(int) - [200, 30, 10]).max() < 8


def test_images_are_resized_as_they_arrive_when_asked(make_rig: Make) -> None:
    rig = make_rig(model={"image_size": 24}, resize_images="arrival")
    rig.start()
    rig.until(lambda: bool(rig.timings))
    seen = rig.node._session.buffer.snapshot(rig.now_ns(), time.monotonic_ns())
    assert {image.shape for image in seen.images.values()} == {(24, 24, 3)}


def test_stop_is_finished_while_the_simulated_clock_stands_still(make_rig: Make) -> None:
    from rosgraph_msgs.msg import Clock as ClockMessage

    rig = make_rig(use_sim_time=True)
    publisher = rig.peer.create_publisher(ClockMessage, "/clock", 10)

    def publish() -> None:
        publisher.publish(ClockMessage(clock=rig.peer.get_clock().now().to_msg()))

    clock = rig.peer.create_timer(0.005, publish)
    rig.spin(0.2)
    rig.start()
    rig.until(lambda: len(actions(rig.steps)) > 10)
    rig.peer.destroy_timer(clock)
    rig.spin(0.1)
    rig.call("abort")
    rig.until(lambda: rig.safety is SafetyState.LATCHED, 3.0)
    rig.spin(0.1)
    assert rig.steps[-1].kind == CommandKind.STOP and not any(rig.steps[-1].velocities)
