"""Simulated robots and what can go wrong with them; no ROS. ``load_sim`` makes the one of a robot file."""

from __future__ import annotations

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.sim.arm_robot import ArmRobot
from phyai_engine.sim.metaworld_robot import MetaWorldRobot
from phyai_engine.sim.robot import SimRobot
from phyai_engine.types import ActionType

__all__ = ["SimRobot", "load_sim"]


def load_sim(robot: RobotConfig, *, task: str, seed: int, width: int, height: int) -> SimRobot:
    """The simulated robot for a robot file: Meta-World for Cartesian deltas, the arm for joint positions.

    :param task: Meta-World task such as ``reach-v3``; the arm has no task and ignores it.
    :param width: image width in pixels, the same for every camera; ``height`` likewise.
    :raises ConfigError: no simulated robot takes this action type, or what it needs is not installed.
    """
    if robot.kind is ActionType.CARTESIAN_DELTA:
        return MetaWorldRobot(robot, task=task, seed=seed, width=width, height=height)
    if robot.kind is ActionType.JOINT_POSITION:
        return ArmRobot(robot, seed=seed, width=width, height=height)
    raise ConfigError(
        "no simulated robot takes this action type",
        got=robot.action_type,
        wanted="cartesian_delta or joint_position",
        where=f"robot {robot.robot_id}",
    )
