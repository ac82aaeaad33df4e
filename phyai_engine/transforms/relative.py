"""Relative actions: which of a robot's actions the model gives as offsets from the state of the observation.

The whole chunk is relative to that one state, in policy units: after the actions are unnormalised, before they become
robot units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import RelativeActions, RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.types import ActionType

_WHERE = "relative_actions"


def relative_mask(robot: RobotConfig, config: RelativeActions | None) -> NDArray[np.bool_]:
    """[A] bool, False for all where the model's actions are absolute.

    An action is excluded when its name contains an excluded text, in upper or lower case, as lerobot matches them.

    :raises ConfigError: the robot takes rates or deltas, an action drives no state entry, or an excluded text is in
        no action's name (a gripper of another name would be driven by offsets).
    """
    if config is None:
        return np.zeros(len(robot.actions), dtype=np.bool_)
    if robot.kind is not ActionType.JOINT_POSITION:
        raise ConfigError(
            f"robot {robot.robot_id} takes {robot.action_type}, which cannot be relative to a state",
            wanted="action_type: joint_position",
            where=_WHERE,
            do="Leave relative_actions out.",
        )
    names = [action.name.lower() for action in robot.actions]
    excluded = [text.lower() for text in config.exclude]
    unused = [text for text in excluded if not any(text in name for name in names)]
    if unused:
        raise ConfigError(
            f"no action of robot {robot.robot_id} has {unused[0]!r} in its name",
            got=", ".join(robot.action_names),
            where=f"{_WHERE}.exclude",
            do="Exclude the actions that the policy gives as absolute values; `exclude: []` where there are none.",
        )
    mask = np.array([not any(text in name for text in excluded) for name in names], dtype=np.bool_)
    undriven = np.flatnonzero(mask & (robot.state_index() < 0))
    if undriven.size:
        raise ConfigError(
            f"action {robot.action_names[undriven[0]]} has no state entry to be relative to",
            where=f"robot {robot.robot_id}",
            do="Name it with `state:`, or exclude the action.",
        )
    return mask
