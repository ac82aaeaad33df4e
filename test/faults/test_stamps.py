"""Cameras that pause, stamps of another clock, and /clock that is absent, stands still or jumps, on a running node."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from diagnostic_msgs.msg import DiagnosticStatus
from phyai_policy.msg import ChunkTiming, PolicyStatus
from rclpy.lifecycle import TransitionCallbackReturn
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

from phyai_engine.config import resolve
from phyai_engine.types import AbortCause, CommandKind, Refusal, SafetyState
from phyai_ros.convert import to_stamp

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
SUCCESS = TransitionCallbackReturn.SUCCESS
S = 10**9


def activate(rig: Any) -> None:
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS


def accepted(rig: Any) -> int:
    return sum(t.outcome == ChunkTiming.OUTCOME_ACCEPTED for t in rig.timings)


def assert_no_row_repeats(rig: Any) -> None:
    """Within a chunk the rows played follow one another."""
    played = [s for s in rig.steps if s.kind == CommandKind.ACTION]
    for a, b in itertools.pairwise(played):
        assert b.chunk_id > a.chunk_id or b.step == a.step + 1


@pytest.fixture
def patient(tmp_path: Path) -> str:
    """The arm with cameras that may be 1 s old, so that a busy machine does not decide the test."""
    text = yaml.safe_load(resolve("robots", "arm7").read_text())
    for camera in text["cameras"]:
        camera["max_age_s"] = 1.0
    path = tmp_path / "patient.yaml"
    path.write_text(yaml.safe_dump(text))
    return str(path)


# -- cameras and bags ----------------------------------------------------------------------------------------


@pytest.mark.fault(9)
def test_a_camera_that_pauses_250_ms_is_within_its_limit(make_rig: Make, patient: str) -> None:
    rig = make_rig(robot=patient, model={"latency_ms": 20.0})
    rig.start()
    rig.cameras_on["wrist"] = False
    before = accepted(rig)
    rig.spin(0.25)
    rig.cameras_on["wrist"] = True
    rig.until(lambda: accepted(rig) >= before + 2)
    assert "wrist" not in rig.status.last_refusal_text
    assert rig.status.refusals[Refusal.STALE] == 0 or "joint" in rig.status.last_refusal_text
    assert not rig.node._safety().latched


@pytest.mark.fault(9)
def test_a_camera_that_dies_holds_then_latches_and_the_node_lives(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 20.0}, max_hold_s=0.3)
    rig.start()
    rig.cameras_on["wrist"] = False
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    assert rig.node._safety().cause is AbortCause.EXHAUSTED
    assert "camera 'wrist' (wrist/image_raw) is silent" in rig.status.last_refusal_text
    kinds = [kind for kind, _ in itertools.groupby(rig.kinds())]
    assert kinds == [CommandKind.ACTION, CommandKind.HOLD, CommandKind.STOP]
    refused = rig.call("rearm")
    assert not refused.success
    assert "wrist" in refused.message
    rig.cameras_on["wrist"] = True
    rig.spin(0.2)
    assert rig.call("rearm").success
    rig.until(lambda: rig.safety is SafetyState.RUNNING)


def test_a_camera_of_5_hz_beside_one_of_20_is_enough(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 20.0})
    rig.cameras_on["wrist"] = False

    def slow() -> None:
        message = Image(height=24, width=32, encoding="rgb8", step=96, data=rig._pixels)
        rig._images["wrist"].publish(rig.stamp(message))

    rig.peer.create_timer(0.2, slow)
    rig.start()
    rig.until(lambda: accepted(rig) >= 5)
    assert rig.status.refusals[Refusal.SKEWED] == 0
    assert_no_row_repeats(rig)


def test_a_gap_of_half_a_second_in_all_inputs_is_held_over(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 20.0})
    rig.start()
    rig.joints_on, rig.cameras_on = False, dict.fromkeys(rig.cameras_on, False)
    rig.spin(0.5)
    assert rig.safety is SafetyState.HOLDING
    before = accepted(rig)
    rig.joints_on, rig.cameras_on = True, dict.fromkeys(rig.cameras_on, True)
    rig.until(lambda: accepted(rig) >= before + 2)
    assert not rig.node._safety().latched
    assert_no_row_repeats(rig)


# -- stamps of another clock ---------------------------------------------------------------------------------


@pytest.mark.fault(13)
@pytest.mark.parametrize(("shift_s", "word"), [(3600, "use_sim_time"), (3, "chrony")])
def test_stamps_ahead_of_the_clock_end_the_motion(make_rig: Make, shift_s: int, word: str) -> None:
    rig = make_rig(model={"latency_ms": 20.0})
    rig.start()
    rig.stamp_shift_ns = shift_s * S
    rig.until(lambda: rig.safety is SafetyState.HOLDING)
    rig.until(lambda: "clock fault" in rig.status.last_refusal_text)
    assert rig.status.last_refusal == Refusal.SKEWED
    assert word in rig.status.last_refusal_text
    rig.spin(0.3)
    resting = np.array([s.values for s in rig.steps[-5:]])
    assert {s.kind for s in rig.steps[-5:]} == {CommandKind.HOLD}
    assert (resting == resting[0]).all()
    rig.stamp_shift_ns = 0
    rig.until(lambda: rig.safety is SafetyState.RUNNING)


@pytest.mark.fault(37)
@pytest.mark.parametrize("shift_s", [-3600, -30])
def test_recorded_stamps_never_move_the_arm_and_name_the_parameter(make_rig: Make, shift_s: int) -> None:
    rig = make_rig()
    rig.stamp_shift_ns = shift_s * S
    activate(rig)
    rig.until(lambda: "use_sim_time" in rig.status.last_refusal_text)
    assert rig.status.last_refusal == Refusal.STALE
    assert f"got {-shift_s}." in rig.status.last_refusal_text
    assert rig.steps == []


# -- simulated time ------------------------------------------------------------------------------------------


class SimTime:
    """/clock of a simulation or a bag; the rig's sensors stamp with it."""

    def __init__(self, rig: Any, start_s: float = 100.0) -> None:
        self.ns, self.runs = round(start_s * S), True
        self._last = time.monotonic_ns()
        self._publisher = rig.peer.create_publisher(Clock, "/clock", 10)
        rig.now_ns = lambda: self.ns
        rig.peer.create_timer(0.005, self._publish)

    def _publish(self) -> None:
        now = time.monotonic_ns()
        if self.runs:
            self.ns += now - self._last
        self._last = now
        self._publisher.publish(Clock(clock=to_stamp(self.ns)))


def in_sim_time(make_rig: Make) -> tuple[Any, SimTime]:
    rig = make_rig(model={"latency_ms": 20.0}, use_sim_time=True)
    clock = SimTime(rig)
    rig.start()
    return rig, clock


def test_without_a_clock_nothing_moves_and_the_abort_works(make_rig: Make) -> None:
    rig = make_rig(use_sim_time=True, diagnostics_rate_hz=10.0)
    activate(rig)
    rig.spin(0.3)
    assert rig.steps == []
    policy = rig.diagnostics[-1].status[0]
    assert policy.level == DiagnosticStatus.ERROR
    assert policy.message == "there is no time yet: use_sim_time is set but nobody publishes /clock"
    assert rig.call("abort").success
    assert rig.safety is SafetyState.LATCHED
    refused = rig.call("rearm")
    assert not refused.success
    assert "/clock" in refused.message


def test_a_clock_that_stands_still_pauses_the_steps(make_rig: Make) -> None:
    rig, clock = in_sim_time(make_rig)
    rig.spin(0.2)
    clock.runs = False
    rig.spin(0.1)
    count = len(rig.steps)
    rig.spin(0.3)
    assert len(rig.steps) == count
    clock.runs = True
    rig.until(lambda: len(rig.steps) > count + 20)
    assert not rig.node._safety().latched
    assert_no_row_repeats(rig)


@pytest.mark.fault(22)
def test_an_abort_while_the_clock_stands_still_is_published_at_once(make_rig: Make) -> None:
    rig, clock = in_sim_time(make_rig)
    rig.until(lambda: len(rig.steps) > 3)
    clock.runs = False
    rig.spin(0.1)
    assert rig.call("abort").success
    rig.until(lambda: rig.kinds()[-1:] == [CommandKind.STOP], 1.0)
    clock.runs = True
    rig.until(lambda: rig.safety is SafetyState.LATCHED)


@pytest.mark.fault(13, 36)
@pytest.mark.parametrize("jump_s", [-60.0, -0.5])
def test_a_clock_that_goes_back_stops_the_arm_and_a_rearm_follows_the_new_timeline(
    make_rig: Make, jump_s: float
) -> None:
    rig, clock = in_sim_time(make_rig)
    epoch, count = rig.epoch, len(rig.timings)
    clock.ns += round(jump_s * S)
    rig.until(lambda: rig.node._safety().latched)
    assert rig.node._safety().cause is AbortCause.CLOCK_JUMP
    assert "jumped by -" in rig.node._safety().text
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    rig.spin(0.2)
    assert rig.status.abort_cause == PolicyStatus.ABORT_CLOCK_JUMP
    assert all(s.epoch == epoch for s in rig.steps if s.kind == CommandKind.ACTION)
    assert rig.call("rearm").success
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
    rig.until(lambda: any(t.epoch == rig.epoch for t in rig.timings[count:]))  # another topic: it may come later
    first = next(t for t in rig.timings[count:] if t.epoch == rig.epoch)
    assert first.delay_steps == 0
    assert np.isnan(first.m_cond_s)


def test_a_clock_that_leaps_ahead_waits_for_fresh_inputs(make_rig: Make) -> None:
    rig, clock = in_sim_time(make_rig)
    before, count, began = accepted(rig), len(rig.steps), time.monotonic()
    clock.ns += 60 * S
    rig.until(lambda: accepted(rig) >= before + 3)
    assert len(rig.steps) - count <= (time.monotonic() - began) / rig.robot.dt_s + 3  # the ticks are not made up for
    assert not rig.node._safety().latched
    ticks = [s.tick for s in rig.steps]
    assert ticks == sorted(set(ticks))
    assert_no_row_repeats(rig)


@pytest.mark.fault(36)
def test_a_bag_that_loops_on_wall_time_latches_once_and_can_be_rearmed(make_rig: Make) -> None:
    """Stamps fall by 60 s while the node's own clock goes on; later they agree with it again."""
    rig = make_rig(model={"latency_ms": 20.0})
    rig.start()
    rig.stamp_shift_ns = -60 * S
    rig.until(lambda: rig.node._safety().latched)
    assert rig.node._safety().cause is AbortCause.CLOCK_JUMP
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    refused = rig.call("rearm")
    assert not refused.success
    rig.stamp_shift_ns = 0
    rig.spin(0.3)
    assert rig.call("rearm").success
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
