"""Limits a chunk must respect before any of its rows is played. Whole-chunk refusal; nothing is silently clamped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import RobotConfig
from phyai_engine.errors import RefusalError
from phyai_engine.types import F64, ActionType, Refusal


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Per-action limits of one robot, [A] each, robot units; infinity where the robot file gives none.

    :param first_step_max: largest |first commanded value - measured| when motion starts, position robots only.
    :param seam_jump_max: largest |first new row - last commanded| at a handoff.
    """

    names: tuple[str, ...]
    kind: ActionType
    dt_s: float
    lower: F64
    upper: F64
    velocity_max: F64
    first_step_max: float
    seam_jump_max: float

    @staticmethod
    def of(robot: RobotConfig) -> Envelope:
        """The envelope a robot file describes."""
        return Envelope(
            names=robot.action_names,
            kind=robot.kind,
            dt_s=robot.dt_s,
            lower=robot.limit("lower", -math.inf),
            upper=robot.limit("upper", math.inf),
            velocity_max=robot.limit("velocity_max", math.inf),
            first_step_max=math.inf if robot.first_step_max is None else robot.first_step_max,
            seam_jump_max=math.inf if robot.seam_jump_max is None else robot.seam_jump_max,
        )

    def check(
        self,
        actions: F64,
        *,
        first_row: int,
        last_command: F64 | None,
        measured: F64 | None,
    ) -> None:
        """Refuse the chunk as a whole, naming action, row, value and limit.

        :param actions: [H, A]. All rows must be finite and within the limits; rates are checked from ``first_row`` on.
        :param last_command: [A] value commanded by the last tick, None when motion starts.
        :param measured: [A] measured value of what each action drives, NaN where there is none; None when unknown.
        :raises RefusalError: MALFORMED, NOT_FINITE or OUT_OF_ENVELOPE.
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
        self._bound(actions, self.lower, self.upper, "is outside its limits", 0)
        if self.kind is not ActionType.JOINT_POSITION:
            return
        rates = np.diff(actions[first_row:], axis=0) / self.dt_s
        self._bound(
            rates,
            -self.velocity_max,
            self.velocity_max,
            "changes faster than velocity_max",
            first_row + 1,
        )
        first = actions[first_row]
        if last_command is not None:
            self._near(
                first,
                last_command,
                self.seam_jump_max,
                "jumps from the last command by more than seam_jump_max",
            )
        elif measured is not None:
            unknown = np.isnan(measured)
            if unknown.any() and math.isfinite(self.first_step_max):
                raise RefusalError(
                    Refusal.STALE,
                    f"no fresh measured value of {self.names[int(np.argmax(unknown))]}",
                    wanted="one to compare the first step with (first_step_max)",
                )
            self._near(
                first,
                measured,
                self.first_step_max,
                "starts farther from the measured value than first_step_max",
            )

    def clamp(self, actions: F64) -> tuple[F64, int]:
        """Rows clipped to lower..upper, and how many values were changed. NaN is left for :meth:`check` to refuse.

        :raises RefusalError: MALFORMED.
        """
        self._shaped(actions)  # clip would spread a chunk of one column over every joint
        clipped = np.clip(actions, self.lower, self.upper)
        return clipped, int(np.count_nonzero((clipped != actions) & np.isfinite(actions)))

    def _shaped(self, actions: F64) -> None:
        if actions.ndim != 2 or actions.shape[1] != len(self.names):
            raise RefusalError(
                Refusal.MALFORMED,
                "wrong chunk shape",
                got=actions.shape,
                wanted=f"[H, {len(self.names)}] for {', '.join(self.names)}",
            )

    def _bound(self, values: F64, lower: F64, upper: F64, text: str, row_0: int) -> None:
        # A relative tolerance of 1e-9 keeps a value that was written as its own limit from being refused.
        slack = 1e-9 * np.maximum(1.0, np.abs(np.where(np.isfinite(upper), upper, 1.0)))
        self._refuse(
            (values < lower - slack) | (values > upper + slack),
            values,
            lower,
            upper,
            text,
            row_0,
        )

    def _near(self, first: F64, reference: F64, limit: float, text: str) -> None:
        distance = np.abs(first - reference)[None, :]
        self._refuse(
            distance > limit,
            distance,
            np.zeros(len(first)),
            np.full(len(first), limit),
            text,
            0,
        )

    def _refuse(
        self,
        bad: NDArray[np.bool_],
        values: F64,
        lower: F64,
        upper: F64,
        text: str,
        row_0: int,
    ) -> None:
        if not bad.any():
            return
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise RefusalError(
            Refusal.OUT_OF_ENVELOPE,
            f"{self.names[column]} {text}",
            got=f"{values[row, column]:.6g}",
            wanted=f"{lower[column]:.6g}..{upper[column]:.6g}",
            where=f"row {row + row_0}",
        )
