"""How smooth a handoff is: the jump and the jerk of the commands across it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phyai_engine.types import F64, ActionType

ORDER = {ActionType.JOINT_POSITION: 3, ActionType.JOINT_VELOCITY: 2, ActionType.CARTESIAN_DELTA: 2}
"""Differences of the commanded values that make a jerk."""


@dataclass(frozen=True, slots=True)
class Seam:
    """NaN where nothing was commanded before: motion starts.

    :param jump: largest |first new row - last command| over the actions [units of the action].
    :param jump_ratio: jump / median over the chunk of the same measure between its rows: 1 = like any other step.
    :param jerk: largest |jerk| over the actions and the commands that touch the seam [1/s^3 of a position or of what
        deltas add up to, 1/s^2 of a velocity].
    """

    jump: float = math.nan
    jump_ratio: float = math.nan
    jerk: float = math.nan

    @staticmethod
    def of(actions: F64, row: int, last: F64 | None, before: F64 | None, kind: ActionType, dt_s: float) -> Seam:
        """The seam between what was commanded and a chunk that begins at ``row``.

        :param actions: [H, A]. :param last: [A] commanded last, None when nothing was; ``before`` the tick before.
        """
        if last is None:
            return Seam()
        jump = float(np.abs(actions[row] - last).max())
        steps = np.abs(np.diff(actions, axis=0)).max(axis=1)
        typical = float(np.median(steps)) if len(steps) else 0.0
        order = ORDER[kind]
        commanded = [last] if before is None else [before, last]
        # No more new rows than make every difference reach across the seam.
        points = np.vstack([*commanded, actions[row : row + order]])
        jerk = math.nan
        if len(points) > order:
            per_s = 1 if kind is ActionType.CARTESIAN_DELTA else 0  # a delta is a difference already
            jerk = float(np.abs(np.diff(points, n=order, axis=0)).max()) / dt_s ** (order + per_s)
        return Seam(jump, jump / typical if typical > 0 else math.nan, jerk)
