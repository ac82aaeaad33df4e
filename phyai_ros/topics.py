"""QoS profiles, and the topics on which commands leave."""

from __future__ import annotations

from typing import Any

from phyai_policy.msg import ActionChunk, ActionStep
from rclpy.duration import Duration
from rclpy.qos import DurabilityPolicy, HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from phyai_engine.config import RobotConfig

SENSOR_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST,
    depth=5,
    reliability=ReliabilityPolicy.BEST_EFFORT,
    durability=DurabilityPolicy.VOLATILE,
)
COMMAND_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)  # never transient_local: no old motion
LATCHED_QOS = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
COMMAND_TYPES = {
    "joint_trajectory": JointTrajectory,
    "float64_multi_array": Float64MultiArray,
    "joint_state": JointState,
}


def command_topics(robot: RobotConfig, output: str, horizon: int = 0) -> dict[str, tuple[type[Any], str, QoSProfile]]:
    """Key of phyai_ros.outputs -> message type, topic and QoS of what one output publishes.

    :param horizon: rows of a chunk, for the lifespan of ``output: chunks``.
    """
    if output == "trajectory":
        return {"trajectory": (JointTrajectory, robot.trajectory_topic, COMMAND_QOS)}
    if output == "chunks":  # a chunk that was not delivered while it is valid must never be
        lifespan = Duration(seconds=horizon * robot.dt_s)
        qos = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, lifespan=lifespan)
        return {"chunk": (ActionChunk, "~/chunk", qos)}
    topics: dict[str, tuple[type[Any], str, QoSProfile]] = {"step": (ActionStep, "~/step", COMMAND_QOS)}
    if robot.command.interface != "none":
        topics["command"] = (COMMAND_TYPES[robot.command.interface], robot.command.topic, COMMAND_QOS)
    return topics
