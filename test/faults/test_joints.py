"""Joint states as drivers send them: in any order, in parts, with fields left out, with values that are no numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from sensor_msgs.msg import JointState

from phyai_engine.config import load_robot, resolve
from phyai_engine.control.observation_buffer import ObservationBuffer, Put
from phyai_engine.errors import RefusalError
from phyai_engine.messages import joint_state_to_arrays
from phyai_engine.types import CommandKind, Refusal, SafetyState

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
ARM = load_robot(resolve("robots", "arm7"))
NAMES = list(ARM.state_names)
WANT = {name: 0.1 * i - 0.4 for i, name in enumerate(NAMES)}
TOPIC = "joint_states"
NAN, INF = math.nan, math.inf


class Arm:
    """The buffer behind a JointState topic; messages arrive 10 ms apart."""

    def __init__(self) -> None:
        self.buffer = ObservationBuffer(ARM)
        self.now_ns = 10**12

    def hear(self, message: JointState) -> Put:
        self.now_ns += 10_000_000
        try:
            names, positions, velocities = joint_state_to_arrays(message, needed=self.buffer.needed(TOPIC))
        except RefusalError as error:
            return self.buffer.put_refused(TOPIC, error, self.now_ns)
        clocks = {"received_ros_ns": self.now_ns, "received_mono_ns": self.now_ns}
        return self.buffer.put_joints(TOPIC, names, positions, velocities, self.now_ns, **clocks)

    @property
    def state(self) -> list[float]:
        return list(self.buffer.newest_state(self.now_ns))


def state(names: list[str], **fields: Any) -> JointState:
    return JointState(name=names, position=[WANT.get(n, 9.9) for n in names], **fields)


ORDERS = [list(order) for order in itertools.islice(itertools.permutations(NAMES), 0, 5040, 97)]


@pytest.mark.fault(16)
@pytest.mark.parametrize("extra", [[], ["gripper_finger"]])
def test_any_order_is_mapped_by_name(extra: list[str]) -> None:
    arm = Arm()
    for order in ORDERS:
        names = [*order[:3], *extra, *order[3:]]
        assert arm.hear(state(names, velocity=[NAN] * len(names), effort=[NAN] * len(names))) is Put.KEPT
        assert arm.state == [WANT[n] for n in NAMES]


@pytest.mark.fault(16)
def test_parts_from_two_drivers_make_one_state_and_a_missing_joint_is_not_guessed() -> None:
    arm = Arm()
    arm.hear(state(NAMES[5:2:-1]))
    np.testing.assert_array_equal(arm.state, [WANT[n] if 3 <= i <= 5 else NAN for i, n in enumerate(NAMES)])
    arm.hear(state([NAMES[6], *NAMES[:3]]))
    assert arm.state == [WANT[n] for n in NAMES]


@pytest.mark.fault(18)
@pytest.mark.parametrize("velocity", [[], [NAN] * 7, [INF] + [0.0] * 6])
@pytest.mark.parametrize("effort", [[], [NAN] * 7, [0.0] * 2, [0.0] * 9])
def test_fields_that_may_be_left_out_may_be_left_out(velocity: list[float], effort: list[float]) -> None:
    arm = Arm()
    assert arm.hear(state(NAMES, velocity=velocity, effort=effort)) is Put.KEPT
    assert arm.state == [WANT[n] for n in NAMES]


@pytest.mark.fault(18)
@pytest.mark.parametrize("count", [0, 1, 6, 8, 100])
def test_positions_that_do_not_fit_the_names_change_nothing(count: int) -> None:
    arm = Arm()
    arm.hear(state(NAMES))
    assert arm.hear(JointState(name=NAMES, position=[0.0] * count)) is Put.DROPPED
    assert arm.hear(JointState(name=NAMES[:3], position=[0.0] * count)) is Put.DROPPED
    assert arm.state == [WANT[n] for n in NAMES]
    assert arm.buffer.joint_stats(arm.now_ns)[0].dropped == {"refused": 2}


@pytest.mark.fault(16)
@pytest.mark.parametrize("twice", NAMES)
def test_a_name_that_stands_twice_is_refused(twice: str) -> None:
    arm = Arm()
    arm.hear(state(NAMES))
    assert arm.hear(JointState(name=[*NAMES, twice], position=[0.0] * 8)) is Put.DROPPED
    assert arm.state == [WANT[n] for n in NAMES]


@pytest.mark.fault(23)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_position_that_is_no_number_refuses_the_whole_message(bad: float) -> None:
    arm = Arm()
    arm.hear(state(NAMES))
    for index, name in enumerate(NAMES):
        message = JointState(name=NAMES, position=[0.0] * 7)
        message.position[index] = bad
        with pytest.raises(RefusalError, match=f"position of joint '{name}', got {bad}") as refused:
            joint_state_to_arrays(message)
        assert refused.value.code is Refusal.NOT_FINITE
        assert arm.hear(message) is Put.DROPPED
    assert arm.state == [WANT[n] for n in NAMES]  # not one of the finite zeros beside it was taken


@pytest.mark.fault(16, 23)
def test_an_encoder_that_turns_nan_holds_the_arm_and_names_the_joint(make_rig: Make) -> None:
    rig = make_rig(model={"latency_ms": 10.0})
    rig.start()
    good = rig.send_joints
    rig.joints_on = False
    publisher = rig._joint_publishers[TOPIC]

    def broken() -> None:
        message = JointState(name=NAMES[::-1], position=[rig.position[n] for n in NAMES[::-1]])
        message.position[NAMES[::-1].index("joint_5")] = NAN
        publisher.publish(rig.stamp(message))

    timer = rig.peer.create_timer(0.01, broken)
    rig.until(lambda: rig.safety is SafetyState.HOLDING)
    rig.until(lambda: "joint_5" in rig.status.last_refusal_text)
    assert rig.status.last_refusal == Refusal.NOT_FINITE
    rig.until(lambda: rig.steps[-1].kind == CommandKind.HOLD)
    assert np.isfinite([s.values for s in rig.steps]).all()
    rig.peer.destroy_timer(timer)
    rig.joints_on = True
    good()
    rig.until(lambda: rig.safety is SafetyState.RUNNING)
