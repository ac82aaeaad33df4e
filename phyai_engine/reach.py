"""Worst-case reach: could the robot still stop within its limits, whenever a stop came while a chunk plays?

A stop may come after any row that may still be played: a longer delay between the call and the stop only means a
later row, and after the last one the robot decelerates by itself. From each such row the distance that the stop needs
at the row's own speed is added; the interval of all stop points of a joint must stay inside lower..upper.

What is assumed: the robot follows its commands (its tracking error fits between ``lower``..``upper`` and what is in the
way behind them); its drives can hold ``acceleration_max`` at every pose and load; a seam between two chunks is no
motion (StopPlanner); what moves is the joint, so nothing is said of a collision inside the limits.
Checked for joint positions that have both limits; a joint with infinite acceleration_max stops where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.envelope import refuse_beyond
from phyai_engine.stop import StopPlanner, row_rates
from phyai_engine.types import F64, ActionType

SLACK = 1e-9
"""Relative: a stop point that is its limit but for rounding is inside."""


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """The check of one robot.

    :param note: what is not checked and why, empty where all is; for the log and diagnostics.
    """

    planner: StopPlanner
    active: bool
    note: str

    @staticmethod
    def of(robot: RobotConfig, planner: StopPlanner) -> Reach:
        """The check a robot file allows."""
        if robot.kind is not ActionType.JOINT_POSITION:
            return Reach(planner, False, f"worst-case reach is not checked: {robot.action_type} has no stop distance")
        open_ended = np.isinf(planner.lower) | np.isinf(planner.upper)
        names = [name for name, open_ in zip(robot.action_names, open_ended, strict=True) if open_]
        note = f"worst-case reach is not checked beyond infinite limits of {', '.join(names)}" if names else ""
        return Reach(planner, True, note)

    def stop_points(self, actions: F64, first_row: int, before: F64 | None) -> F64:
        """[H - first_row, A] where each joint would rest if the stop came after each row.

        :param before: [A] commanded last, None when motion starts.
        """
        rates = row_rates(actions, first_row, before, self.planner.dt_s)[first_row:]
        points: F64 = actions[first_row:] + np.sign(rates) * self.planner.distance(np.abs(rates))
        return points

    def check(self, actions: F64, *, first_row: int, last_command: F64 | None) -> None:
        """Refuse a chunk from which a stop could not end within the limits.

        :param actions: [n, A] the rows that may be played, finite and within their limits.
        :param first_row: row that is played first. :param last_command: [A], None when motion starts.
        :raises RefusalError: OUT_OF_ENVELOPE, naming joint, row, stop point and limits.
        """
        if not self.active:
            return
        planner = self.planner
        refuse_beyond(
            planner.names,
            self.stop_points(actions, first_row, last_command),
            planner.lower - SLACK * np.maximum(1.0, np.abs(planner.lower)),
            planner.upper + SLACK * np.maximum(1.0, np.abs(planner.upper)),
            "moves too fast to stop within its limits: a stop after this row would end there",
            row_0=first_row,
            do="Slow down towards the limit, or raise acceleration_max if the drives can.",
        )
