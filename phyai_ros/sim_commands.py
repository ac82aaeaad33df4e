"""What the simulated robot receives and reports beside images: commands, trajectories, controller state."""

from __future__ import annotations

import array

import numpy as np
from phyai_policy.msg import ActionStep
from rclpy.node import Node
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from phyai_engine.config import RobotConfig
from phyai_engine.errors import RefusalError
from phyai_engine.messages import stamp_ns
from phyai_engine.sim.arm_robot import ArmRobot
from phyai_engine.sim.robot import JointSample
from phyai_engine.types import F64, Refusal
from phyai_ros.convert import controller_state_type, to_stamp


def joint_message(sample: JointSample, stamp_ros_ns: int) -> JointState:
    """Joint sample -> sensor_msgs/JointState."""
    message = JointState(
        name=list(sample.names),
        position=array.array("d", sample.position.tolist()),
        velocity=array.array("d", sample.velocity.tolist()),
    )
    message.header.stamp = to_stamp(stamp_ros_ns)
    return message


def read_step(message: ActionStep, robot: RobotConfig) -> F64:
    """ActionStep -> [A] float64 in the robot's order.

    :raises RefusalError: other names, another action type, or values that are not finite.
    """
    if message.action_type != int(robot.kind) or sorted(message.joint_names) != sorted(robot.action_names):
        raise RefusalError(
            Refusal.MALFORMED,
            "a command for another robot",
            got=f"type {message.action_type}, {', '.join(message.joint_names)}",
            wanted=f"type {int(robot.kind)}, {', '.join(robot.action_names)}",
        )
    values = np.array(message.values, dtype=np.float64)
    if values.shape != (len(robot.actions),):
        raise RefusalError(Refusal.MALFORMED, "wrong number of values", got=values.size, wanted=len(robot.actions))
    if not np.isfinite(values).all():
        raise RefusalError(Refusal.NOT_FINITE, "NaN or infinity in a command", got=values.tolist())
    names = list(message.joint_names)
    return values[[names.index(name) for name in robot.action_names]]


def read_trajectory(message: JointTrajectory) -> tuple[F64, F64, F64]:
    """JointTrajectory -> times [n] s, positions [n, J], velocities [n, J], NaN rows where a point has none.

    :raises RefusalError: a point that does not hold every joint.
    """
    width = len(message.joint_names)
    for i, point in enumerate(message.points):
        if len(point.positions) != width or len(point.velocities) not in (0, width):
            raise RefusalError(
                Refusal.MALFORMED,
                f"point {i} does not hold every joint",
                got=f"{len(point.positions)} positions, {len(point.velocities)} velocities",
                wanted=width,
            )
    absent = [float("nan")] * width
    times = [stamp_ns(point.time_from_start) * 1e-9 for point in message.points]
    positions = [list(point.positions) for point in message.points]
    velocities = [list(point.velocities) or absent for point in message.points]
    shape = (len(message.points), width)
    return np.array(times), np.array(positions).reshape(shape), np.array(velocities).reshape(shape)


class ControllerState:
    """The controller's state as joint_trajectory_controller reports it: reference and measured joints.

    Without control_msgs (not on the package registries) a JointState carries the reference instead.
    """

    def __init__(self, node: Node, arm: ArmRobot, topic: str) -> None:
        self._arm = arm
        self._type = controller_state_type()
        self._publisher = node.create_publisher(self._type, topic, 10)

    def publish(self, stamp_ros_ns: int) -> None:
        """Report the control period that ran at ``stamp_ros_ns``."""
        position, velocity = self._arm.reference()
        if self._type is JointState:
            sample = JointSample(self._arm.action_names, position, velocity)
            self._publisher.publish(joint_message(sample, stamp_ros_ns))
            return
        message = self._type(joint_names=list(self._arm.action_names))
        message.header.stamp = to_stamp(stamp_ros_ns)
        measured, rate = self._arm.measured()
        message.reference = JointTrajectoryPoint(positions=position.tolist(), velocities=velocity.tolist())
        message.feedback = JointTrajectoryPoint(positions=measured.tolist(), velocities=rate.tolist())
        self._publisher.publish(message)
