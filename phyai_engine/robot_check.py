"""What the types of a robot file cannot say: checks that span several of its keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import Struct

from phyai_engine.errors import ConfigError

if TYPE_CHECKING:  # config.py reads a robot file and calls this
    from phyai_engine.config import ActionEntry, RobotConfig, Workspace

# Where infinity means "no limit"; every other number of a robot file is finite.
_MAY_BE_INFINITE = frozenset(
    {
        *("lower", "upper", "velocity_max", "acceleration_max", "jerk_max", "command_acceleration_max"),
        *("command_jerk_max", "first_step_max", "seam_jump_max"),
    }
)


def check_robot(robot: RobotConfig, *, where: str) -> None:
    """Checks that span several keys of a robot file, and those that its types cannot say.

    :raises ConfigError: with the path of the wrong key.
    """
    for kind, names in (
        ("state", robot.state_names),
        ("actions", robot.action_names),
        ("cameras", tuple(c.name for c in robot.cameras)),
        ("camera topics", tuple(c.topic for c in robot.cameras)),
        ("camera roles", tuple(c.role for c in robot.cameras)),
    ):
        if twice := _twice(names):
            raise ConfigError(f"{kind} names stand twice: {', '.join(twice)}", where=where)
    _check_numbers(robot, f"{where}: $")
    for i, entry in enumerate(robot.state):
        _check_numbers(entry, f"{where}: $.state[{i}] ({entry.name})")
    for i, action in enumerate(robot.actions):
        _check_action(robot, action, f"{where}: $.actions[{i}] ({action.name})")
    if robot.action_type.startswith("joint") and (shared := _twice(tuple(a.state for a in robot.actions))):
        raise ConfigError(f"two joint actions drive one state entry: {', '.join(shared)}", where=f"{where}: $.actions")
    for i, camera in enumerate(robot.cameras):
        at = f"{where}: $.cameras[{i}] ({camera.name})"
        _check_numbers(camera, at)
        if camera.max_age_s < camera.tolerance_s:
            raise ConfigError(
                "max_age_s is below tolerance_s", got=camera.max_age_s, wanted=f">= {camera.tolerance_s}", where=at
            )
    command, at = robot.command, f"{where}: $.command"
    if (command.interface == "none") != (not command.topic):
        raise ConfigError(
            "command needs both topic and interface",
            got=f"topic {command.topic!r}, interface {command.interface}",
            where=at,
            do="Give both, or leave `command` out.",
        )
    _check_start_and_stop(robot, f"{where}: $")
    if robot.workspace is not None:
        _check_workspace(robot, robot.workspace, f"{where}: $.workspace")
    wrong = {"joint_trajectory": ("joint_velocity", "cartesian_delta"), "joint_state": ("cartesian_delta",)}
    if robot.action_type in wrong.get(command.interface, ()):
        raise ConfigError(
            f"interface {command.interface} cannot carry {robot.action_type}",
            where=at,
            do="Use float64_multi_array, or let the robot read ~/step.",
        )


def _check_start_and_stop(robot: RobotConfig, at: str) -> None:
    positions = robot.action_type == "joint_position"
    if robot.stop == "hold_measured" and not positions:
        raise ConfigError("stop: hold_measured needs joint positions", got=robot.action_type, where=at)
    if robot.first_step == "ramp":
        slow = [a.name for a in robot.actions if a.velocity_max is None or math.isinf(a.velocity_max)]
        # A ramp starts where the robot is measured, and only a finite first_step_max refuses what is not.
        free = [a.name for a in robot.actions if math.isinf(_own(a.first_step_max, robot.first_step_max))]
        if not positions or free or slow:
            raise ConfigError(
                "first_step: ramp needs joint positions, first_step_max and velocity_max",
                got=f"{robot.action_type}, no first_step_max: {free}, no velocity_max: {slow}",
                where=at,
            )


def _check_workspace(robot: RobotConfig, box: Workspace, at: str) -> None:
    _check_numbers(box, at)
    if robot.action_type != "cartesian_delta":
        raise ConfigError("a workspace needs cartesian_delta", got=robot.action_type, where=at)
    moving = tuple(a.name for a in robot.actions if not a.absolute)
    for kind, names, known in (("state", box.state, robot.state_names), ("actions", box.actions, moving)):
        if double := _twice(names):
            raise ConfigError(f"{kind} stand twice: {', '.join(double)}", where=at)
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"unknown {kind}: {unknown[0]}", wanted=f"some of {', '.join(known)}", where=at)
    lengths = [len(v) for v in (box.state, box.actions, box.lower, box.upper)]
    if len(set(lengths)) > 1:
        raise ConfigError("one value per axis is needed", got=f"state, actions, lower, upper: {lengths}", where=at)
    for axis, lower, upper in zip(box.state, box.lower, box.upper, strict=True):
        if not lower < upper:  # NaN too
            raise ConfigError(f"{axis} is not ordered", got=f"{lower}..{upper}", wanted="lower < upper", where=at)


def _check_action(robot: RobotConfig, action: ActionEntry, at: str) -> None:
    _check_numbers(action, at)
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


def _check_numbers(entry: Struct, at: str) -> None:
    for name in entry.__struct_fields__:
        value = getattr(entry, name)
        if not isinstance(value, float):
            continue
        if math.isnan(value) or (math.isinf(value) and name not in _MAY_BE_INFINITE):
            raise ConfigError(f"{name} is not finite", got=value, where=at)
        if name == "scale" and value == 0.0:
            raise ConfigError("scale is 0", where=at, wanted="a non-zero factor")


def _own(own: float | None, robots: float | None) -> float:
    return next((limit for limit in (own, robots) if limit is not None), math.inf)


def _twice(names: tuple[str, ...]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
