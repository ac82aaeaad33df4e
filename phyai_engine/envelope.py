"""Limits a chunk must respect before any of its rows is played. Whole-chunk refusal; nothing is silently clamped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import RobotConfig
from phyai_engine.errors import RefusalError
from phyai_engine.types import F64, ActionType, Refusal

VELOCITY, ACCELERATION, JERK = "velocity_max", "command_acceleration_max", "command_jerk_max"
FIRST_STEP, SEAM_JUMP = "first_step_max", "seam_jump_max"


def refuse_beyond(
    names: tuple[str, ...], values: F64, lower: F64, upper: F64, text: str, *, row_0: int = 0, do: str | None = None
) -> None:
    """Refuse ``values`` [n, A] as a whole where one leaves ``lower``..``upper``, each [A] or [n, A].

    :param row_0: row of the chunk that ``values[0]`` belongs to.
    :raises RefusalError: OUT_OF_ENVELOPE, naming the first such row, its name, value and limits.
    """
    bad = (values < lower) | (values > upper)
    if not bad.any():
        return
    row, column = (int(i) for i in np.argwhere(bad)[0])
    low, high = (np.broadcast_to(limit, values.shape)[row, column] for limit in (lower, upper))
    raise RefusalError(
        Refusal.OUT_OF_ENVELOPE,
        f"{names[column]} {text}",
        got=f"{values[row, column]:.6g}",
        wanted=f"{low:.6g}..{high:.6g}",
        where=f"row {row + row_0}",
        do=do,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """The workspace of a Cartesian-delta robot.

    :param columns: [n] the action that moves each axis. :param lower: [n] m; ``upper`` likewise.
    """

    axes: tuple[str, ...]
    columns: NDArray[np.intp]
    metres_per_unit: float
    lower: F64
    upper: F64

    @staticmethod
    def of(robot: RobotConfig) -> Box | None:
        """The box a robot file describes, None where it has none."""
        space = robot.workspace
        if space is None:
            return None
        columns = np.array([robot.action_names.index(name) for name in space.actions], dtype=np.intp)
        return Box(space.state, columns, space.metres_per_unit, np.array(space.lower), np.array(space.upper))

    def check(self, actions: F64, first_row: int, hand: F64) -> None:
        """Refuse a chunk that would take the hand out, from where it is measured, with the rows from ``first_row`` on.

        A hand that is already outside may move back, but no further out.

        :param hand: [n] m, NaN where nothing fresh is measured.
        :raises RefusalError: STALE or OUT_OF_ENVELOPE.
        """
        if (unknown := np.isnan(hand)).any():
            raise RefusalError(
                Refusal.STALE,
                f"no fresh measured value of {self.axes[int(unknown.argmax())]}",
                wanted="the hand's position, for the workspace",
            )
        way = hand + self.metres_per_unit * np.cumsum(actions[first_row:, self.columns], axis=0)
        lower, upper = np.minimum(self.lower, hand), np.maximum(self.upper, hand)
        refuse_beyond(self.axes, way, lower - 1e-9, upper + 1e-9, "[m] leaves the workspace", row_0=first_row)


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Per-action limits of one robot, [A] each, robot units; infinity where the robot file gives none.

    :param acceleration_max: largest acceleration that the rows ask for, not the stop's; ``jerk_max`` likewise.
    :param first_step_max: largest |first commanded value - measured| when motion starts, position robots only; as
        ``seam_jump_max`` the action's own number, or else the robot's.
    :param seam_jump_max: largest |first new row - last commanded| at a handoff.
    """

    names: tuple[str, ...]
    kind: ActionType
    dt_s: float
    lower: F64
    upper: F64
    velocity_max: F64
    acceleration_max: F64
    jerk_max: F64
    first_step_max: F64
    seam_jump_max: F64
    box: Box | None

    @staticmethod
    def of(robot: RobotConfig) -> Envelope:
        """The envelope a robot file describes."""
        return Envelope(
            names=robot.action_names,
            kind=robot.kind,
            dt_s=robot.dt_s,
            lower=robot.limit("lower", -math.inf),
            upper=robot.limit("upper", math.inf),
            velocity_max=robot.limit(VELOCITY, math.inf),
            acceleration_max=robot.limit(ACCELERATION, math.inf),
            jerk_max=robot.limit(JERK, math.inf),
            first_step_max=robot.limit(FIRST_STEP, math.inf if robot.first_step_max is None else robot.first_step_max),
            seam_jump_max=robot.limit(SEAM_JUMP, math.inf if robot.seam_jump_max is None else robot.seam_jump_max),
            box=Box.of(robot),
        )

    def check(
        self,
        actions: F64,
        *,
        first_row: int,
        last_command: F64 | None,
        measured: F64 | None,
        before: F64 | None = None,
    ) -> None:
        """Refuse the chunk as a whole, naming action, row, value and limit.

        :param actions: [H, A]. All rows must be finite and within the limits; rates are checked from ``first_row`` on.
        :param last_command: [A] value commanded by the last tick, None when motion starts. :param before: [A] by the
            tick before that: with it accelerations and jerks are checked across the seam too.
        :param measured: [A] measured value of what each action moves, NaN where there is none; None when unknown, or
            when motion has begun and no workspace asks for it.
        :raises RefusalError: MALFORMED, NOT_FINITE, STALE or OUT_OF_ENVELOPE.
        """
        self._shaped(actions)
        finite = np.isfinite(actions)
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            raise RefusalError(
                Refusal.NOT_FINITE,
                f"{self.names[column]} is not finite",
                got=actions[row, column],
                where=f"row {row}",
            )
        self._within(actions, self.lower, self.upper, "is outside its limits", 0)
        if self.kind is ActionType.CARTESIAN_DELTA:
            if self.box is not None:
                hand = np.full(len(self.names), math.nan) if measured is None else measured
                self.box.check(actions, first_row, hand[self.box.columns])
            return
        self._check_rates(actions[first_row:], first_row, last_command, before)
        if self.kind is not ActionType.JOINT_POSITION:
            return
        if last_command is not None:
            text = "jumps from the last command by more than seam_jump_max"
            self._near(actions[first_row], last_command, self.seam_jump_max, text, first_row)
        if measured is not None:
            self._check_first_step(actions[first_row], measured, first_row)

    def clamp(self, actions: F64) -> tuple[F64, int]:
        """Rows clipped to lower..upper, and how many values were changed. NaN and Inf are left for :meth:`check`.

        :raises RefusalError: MALFORMED.
        """
        self._shaped(actions)  # clip would spread a chunk of one column over every joint
        finite = np.isfinite(actions)
        clipped = np.where(finite, np.clip(actions, self.lower, self.upper), actions)
        return clipped, int(np.count_nonzero((clipped != actions) & finite))

    def _shaped(self, actions: F64) -> None:
        if actions.ndim != 2 or actions.shape[1] != len(self.names):
            raise RefusalError(
                Refusal.MALFORMED,
                "wrong chunk shape",
                got=actions.shape,
                wanted=f"[H, {len(self.names)}] for {', '.join(self.names)}",
            )

    def _check_rates(self, rows: F64, first_row: int, last_command: F64 | None, before: F64 | None) -> None:
        """The first, second and third differences of positions; of velocities the first is an acceleration."""
        limits = [(self.acceleration_max, ACCELERATION), (self.jerk_max, JERK)]
        if self.kind is ActionType.JOINT_POSITION:
            # The step across the seam is seam_jump_max's to judge: a policy plans anew there.
            self._differ(rows, 1, self.velocity_max, VELOCITY, first_row)
        earlier = [c for c in (before, last_command) if c is not None] if last_command is not None else []
        joined = np.vstack([*earlier, rows]) if earlier else rows
        order = 2 if self.kind is ActionType.JOINT_POSITION else 1
        for limit, name in limits:
            self._differ(joined, order, limit, name, first_row - len(earlier))
            order += 1

    def _differ(self, rows: F64, order: int, limit: F64, name: str, row_0: int) -> None:
        if np.isinf(limit).all() or len(rows) <= order:
            return
        rates = np.diff(rows, n=order, axis=0) / self.dt_s**order
        self._within(rates, -limit, limit, f"changes faster than {name}", row_0 + order)

    def _within(self, values: F64, lower: F64, upper: F64, text: str, row_0: int) -> None:
        # A relative tolerance of 1e-9 keeps a value that was written as its own limit from being refused.
        slack = 1e-9 * np.maximum(1.0, np.abs(np.where(np.isfinite(upper), upper, 1.0)))
        refuse_beyond(self.names, values, lower - slack, upper + slack, text, row_0=row_0)

    def _check_first_step(self, first: F64, measured: F64, row: int) -> None:
        unknown = np.isnan(measured) & np.isfinite(self.first_step_max)
        if unknown.any():
            raise RefusalError(
                Refusal.STALE,
                f"no fresh measured value of {self.names[int(np.argmax(unknown))]}",
                wanted="one to compare the first step with (first_step_max)",
            )
        text = "starts farther from the measured value than first_step_max"
        self._near(first, measured, self.first_step_max, text, row)

    def _near(self, first: F64, reference: F64, limit: F64, text: str, row: int) -> None:
        distance = np.abs(first - reference)[None, :]
        refuse_beyond(self.names, distance, np.zeros(len(first)), limit, text, row_0=row)
