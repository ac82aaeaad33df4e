"""The study's task: a point mass must pass a wide plate on either side. numpy only, all episodes at once.

Commands are velocities [m/s]; the mass follows with inertia, every executed command is noisy, and the policy sees the
position only. What makes handoffs hard is what demonstrations hide: the side is a coin thrown in mid-flight, and the
demonstrator's hand drifts slowly, so two chunks drawn from one observation rarely agree.

Shapes: n episodes; vectors are (x, y) [.., 2].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phyai_engine.types import F64

HORIZON = 8  # H, rows of a chunk
ACTIONS = 2

Bools = NDArray[np.bool_]


class Task(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """World and demonstrator. Lengths in m, speeds in m/s.

    :param response: share of the difference to the command by which the velocity changes in one step.
    :param action_noise: std of what is added to each executed command.
    :param plate_from, plate_to: its x range; :param plate_half: it covers abs(y) up to here.
    :param decide_from, decide_to: the side is chosen at an x drawn between these.
    :param pass_at: abs(y) the demonstrator heads for; :param return_at: x from which it heads for y = 0 again.
    :param pull: lateral speed per metre to go [1/s], up to ``lateral``.
    :param drift: std of the hand's drift on each axis; :param drift_time_s: its correlation time.
    """

    dt_s: float = 0.1
    cruise: float = 1.0
    response: float = 0.5
    action_noise: float = 0.2
    start_spread: float = 0.1
    plate_from: float = 4.0
    plate_to: float = 4.5
    plate_half: float = 1.0
    goal: float = 6.0
    decide_from: float = 2.4
    decide_to: float = 2.6
    pass_at: float = 1.4
    return_at: float = 4.7
    lateral: float = 1.5
    pull: float = 4.0
    drift: float = 0.15
    drift_time_s: float = 2.0


class Masses(NamedTuple):
    """n point masses at one instant. :param position, velocity: [n, 2] m, m/s."""

    position: F64
    velocity: F64


class Demonstrations(NamedTuple):
    """Training pairs.

    :param observations: [m, 2] positions. :param chunks: [m, H, 2] commands from there on, without noise.
    """

    observations: F64
    chunks: F64


def start(task: Task, n: int, rng: np.random.Generator) -> Masses:
    """Masses at x = 0, in motion."""
    position = np.stack((np.zeros(n), task.start_spread * rng.standard_normal(n)), axis=1)
    return Masses(position, np.tile((task.cruise, 0.0), (n, 1)))


def advance(task: Task, masses: Masses, command: F64, noise: F64) -> Masses:
    """One control period. :param command: [n, 2] m/s. :param noise: [n, 2] standard normal."""
    executed = command + task.action_noise * noise
    velocity = masses.velocity + task.response * (executed - masses.velocity)
    return Masses(masses.position + task.dt_s * velocity, velocity)


def touches(task: Task, position: F64) -> Bools:
    """[n] inside the plate, which is thicker than one step at any speed of the task."""
    x, y = position[:, 0], position[:, 1]
    return (x >= task.plate_from) & (x <= task.plate_to) & (np.abs(y) <= task.plate_half)


def at_goal(task: Task, position: F64) -> Bools:
    """[n] beyond the goal line."""
    return position[:, 0] >= task.goal


def demonstrate(task: Task, episodes: int, seed: int) -> Demonstrations:
    """Every window of H commands before the goal line, of all demonstrations that did not touch the plate."""
    rng = np.random.default_rng(seed)
    masses = start(task, episodes, rng)
    side = rng.choice((-1.0, 1.0), episodes)
    decide_at = rng.uniform(task.decide_from, task.decide_to, episodes)
    drift = task.drift * rng.standard_normal((episodes, ACTIONS))
    kept = np.exp(-task.dt_s / task.drift_time_s)
    fresh = task.drift * np.sqrt(1.0 - kept**2)
    steps = round(1.6 * task.goal / (task.cruise * task.dt_s))  # slow ones end before the goal line: only rare
    positions: F64 = np.empty((steps, episodes, ACTIONS))
    commands: F64 = np.empty_like(positions)
    touched = np.zeros(episodes, dtype=bool)
    for step in range(steps):
        x, y = masses.position.T
        aim = np.where((x >= decide_at) & (x < task.return_at), side * task.pass_at, 0.0)
        lateral = np.clip(task.pull * (aim - y), -task.lateral, task.lateral)
        positions[step] = masses.position
        commands[step] = np.stack((np.full(episodes, task.cruise), lateral), axis=1) + drift
        masses = advance(task, masses, commands[step], rng.standard_normal((episodes, ACTIONS)))
        drift = kept * drift + fresh * rng.standard_normal((episodes, ACTIONS))
        touched |= touches(task, masses.position)
    windows = np.lib.stride_tricks.sliding_window_view(commands, HORIZON, axis=0)  # [steps - H + 1, episodes, 2, H]
    positions = positions[: len(windows)]
    wanted = ~touched & (positions[..., 0] < task.goal)
    return Demonstrations(positions[wanted], windows[wanted].swapaxes(1, 2))
