"""What the types of a robot file cannot say: numbers that are finite, keys that go together. Called by check_robot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from phyai_engine.errors import ConfigError

if TYPE_CHECKING:
    from phyai_engine.config import ActionEntry, RobotConfig, Workspace

# Where infinity means "no limit"; every other number of a robot file is finite.
_MAY_BE_INFINITE = frozenset(
    {
        *("lower", "upper", "velocity_max", "acceleration_max", "jerk_max", "command_acceleration_max"),
        *("command_jerk_max", "first_step_max", "seam_jump_max"),
    }
)


def check_start_and_stop(robot: RobotConfig, at: str) -> None:
    positions = robot.action_type == "joint_position"
    if robot.stop == "hold_measured" and not positions:
        raise ConfigError("stop: hold_measured needs joint positions", got=robot.action_type, where=at)
    if robot.first_step == "ramp":
        slow = [a.name for a in robot.actions if a.velocity_max is None or math.isinf(a.velocity_max)]
        if not positions or robot.first_step_max is None or slow:
            raise ConfigError(
                "first_step: ramp needs joint positions, first_step_max and velocity_max",
                got=f"{robot.action_type}, first_step_max {robot.first_step_max}, no velocity_max: {slow}",
                where=at,
            )


def check_workspace(robot: RobotConfig, box: Workspace, at: str) -> None:
    check_numbers(box, at)
    if robot.action_type != "cartesian_delta":
        raise ConfigError("a workspace needs cartesian_delta", got=robot.action_type, where=at)
    moving = tuple(a.name for a in robot.actions if not a.absolute)
    for kind, names, known in (("state", box.state, robot.state_names), ("actions", box.actions, moving)):
        if double := twice(names):
            raise ConfigError(f"{kind} stand twice: {', '.join(double)}", where=at)
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"unknown {kind}: {unknown[0]}", wanted=f"some of {', '.join(known)}", where=at)
    lengths = [len(v) for v in (box.state, box.actions, box.lower, box.upper)]
    if len(set(lengths)) > 1:
        raise ConfigError("one value per axis is needed", got=f"state, actions, lower, upper: {lengths}", where=at)
    for axis, lower, upper in zip(box.state, box.lower, box.upper, strict=True):
        if not lower < upper:  # NaN too
            raise ConfigError(f"{axis} is not ordered", got=f"{lower}..{upper}", wanted="lower < upper", where=at)


def check_action(robot: RobotConfig, action: ActionEntry, at: str) -> None:
    check_numbers(action, at)
    if not action.lower < action.upper:
        raise ConfigError(
            "limits are not ordered", got=f"{action.lower}..{action.upper}", wanted="lower < upper", where=at
        )
    if action.state and action.state not in robot.state_names:
        raise ConfigError(
            "unknown state entry", got=action.state, wanted=f"one of {', '.join(robot.state_names)}", where=at
        )
    if robot.action_type.startswith("joint") and not action.state:
        raise ConfigError("a joint action needs the state entry it drives", where=at, do="Add `state: NAME`.")
    if robot.action_type == "joint_position" and action.acceleration_max is None:
        raise ConfigError(
            "acceleration_max is missing", where=at, do="A stop decelerates at this limit; give it in rad/s^2."
        )
    checked = action.command_acceleration_max is not None or action.command_jerk_max is not None
    if checked and robot.action_type == "cartesian_delta":
        raise ConfigError("deltas have no command_acceleration_max or command_jerk_max", where=at)


def check_numbers(entry: Struct, at: str) -> None:
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        if not isinstance(value, float):
            continue
        if math.isnan(value) or (math.isinf(value) and name not in _MAY_BE_INFINITE):
            raise ConfigError(f"{name} is not finite", got=value, where=at)
        if name == "scale" and value == 0.0:
            raise ConfigError("scale is 0", where=at, wanted="a non-zero factor")


def twice(names: tuple[str, ...]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
