"""Epoch, abort latch and controlled stop. Pure: no clock, no ROS.

The stop is modelled on IEC 60204-1 category 2 (decelerate, keep power, hold). It is not a safety-rated function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import RobotConfig
from phyai_engine.errors import PhyaiError
from phyai_engine.types import F64, AbortCause, ActionType, SafetyState

STOP_STEPS_MAX = 500  # a ramp longer than this is a wrong limit, not a stop


class LatchedError(PhyaiError):
    """The abort latch is set; only re-arm clears it."""


@dataclass(frozen=True, slots=True)
class Safety:
    """Epoch and latch. The epoch only grows; nothing of an older epoch is ever played.

    :param epoch: starts at boot wall-clock ns, so that a restarted node cannot reuse a number.
    """

    epoch: int
    state: SafetyState = SafetyState.IDLE
    cause: AbortCause = AbortCause.NONE
    text: str = ""

    @property
    def latched(self) -> bool:
        """True from an abort until :meth:`rearm`."""
        return self.cause is not AbortCause.NONE

    @property
    def may_play(self) -> bool:
        """True when a row of the current epoch may be commanded."""
        return self.state in (
            SafetyState.ARMED,
            SafetyState.RUNNING,
            SafetyState.HOLDING,
        )

    def activate(self) -> Safety:
        """IDLE -> ARMED in a new epoch.

        :raises LatchedError: the latch is set.
        """
        if self.latched:
            raise LatchedError(
                f"the abort latch is set by {self.cause.name.lower()}",
                got=self.text or None,
                do="Call ~/rearm first.",
            )
        return replace(self, epoch=self.epoch + 1, state=SafetyState.ARMED)

    def abort(self, cause: AbortCause, text: str) -> Safety:
        """Set the latch and bump the epoch. The first cause is kept; a second abort changes nothing."""
        if self.latched:
            return self
        active = self.state is not SafetyState.IDLE
        state = SafetyState.STOPPING if active else SafetyState.LATCHED
        return replace(self, epoch=self.epoch + 1, state=state, cause=cause, text=text)

    def stop(self) -> Safety:
        """A controlled stop without latch (deactivation), in a new epoch."""
        return replace(self, epoch=self.epoch + 1, state=SafetyState.STOPPING) if self.may_play else self

    def stopped(self) -> Safety:
        """The stop sequence has been published."""
        if self.state is not SafetyState.STOPPING:
            return self
        return replace(self, state=SafetyState.LATCHED if self.latched else SafetyState.IDLE)

    def rearm(self, *, active: bool) -> Safety:
        """Clear the latch in a new epoch. The caller has checked that the cause is gone and observations are fresh."""
        state = SafetyState.ARMED if active else SafetyState.IDLE
        return replace(self, epoch=self.epoch + 1, state=state, cause=AbortCause.NONE, text="")

    def deactivate(self) -> Safety:
        """-> IDLE in a new epoch; a set latch stays set."""
        return replace(self, epoch=self.epoch + 1, state=SafetyState.IDLE)

    def flush(self) -> Safety:
        """A new epoch: what was computed for the old instruction or timeline is never played."""
        state = SafetyState.ARMED if self.may_play else self.state
        return replace(self, epoch=self.epoch + 1, state=state)

    def playing(self, rows_left: bool) -> Safety:
        """ARMED/HOLDING -> RUNNING when a row is played, RUNNING -> HOLDING when none is left."""
        if not self.may_play:
            return self
        if rows_left:
            state = SafetyState.RUNNING
        else:
            state = SafetyState.ARMED if self.state is SafetyState.ARMED else SafetyState.HOLDING
        return replace(self, state=state)


@dataclass(frozen=True, slots=True, eq=False)
class StopPlan:
    """A bounded sequence of commands that ends at rest. ``values`` [n, A] robot units, ``rates`` [n, A] unit/s."""

    values: F64
    rates: F64

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class StopPlanner:
    """Plans decelerate-then-hold for one robot.

    :param velocity_max: [A] unit/s: a seam between two chunks is no motion, so no faster rate is believed.
    :param acceleration_max: [A] unit/s^2, infinity where the robot file gives none.
    :param absolute: [A] bool, values held while a velocity or delta robot stops.
    """

    kind: ActionType
    dt_s: float
    lower: F64
    upper: F64
    velocity_max: F64
    acceleration_max: F64
    absolute: NDArray[np.bool_]

    @staticmethod
    def of(robot: RobotConfig) -> StopPlanner:
        """The planner a robot file describes."""
        return StopPlanner(
            kind=robot.kind,
            dt_s=robot.dt_s,
            lower=robot.limit("lower", -math.inf),
            upper=robot.limit("upper", math.inf),
            velocity_max=robot.limit("velocity_max", math.inf),
            acceleration_max=robot.limit("acceleration_max", math.inf),
            absolute=np.array([a.absolute for a in robot.actions]),
        )

    @property
    def needs_value(self) -> bool:
        """True when a stop cannot be commanded without knowing where the robot is."""
        return self.kind is ActionType.JOINT_POSITION

    def plan(self, value: F64, rate: F64) -> StopPlan:
        """Commands from the next tick on.

        :param value: [A] last commanded value. :param rate: [A] its rate of change [unit/s] (position robots).
        :returns: position: each joint keeps its direction and loses ``acceleration_max * dt`` of speed a step, its
            target latched where it comes to rest, inside lower..upper; velocity: the same on the velocity itself;
            Cartesian delta: one zero step, absolute values kept. At least one row; the last row is at rest.
        """
        if self.kind is ActionType.CARTESIAN_DELTA:
            held = np.where(self.absolute, value, 0.0)[None, :]
            return StopPlan(held, np.zeros_like(held))
        if self.kind is ActionType.JOINT_POSITION:
            speed = np.clip(rate, -self.velocity_max, self.velocity_max)
        else:
            speed = np.where(self.absolute, 0.0, value)
        loss = self.acceleration_max * self.dt_s
        with np.errstate(invalid="ignore"):
            steps = np.where(speed == 0.0, 0.0, np.ceil(np.abs(speed) / loss - 1e-9))  # rounding adds no step
        count = int(min(STOP_STEPS_MAX, max(1.0, steps.max(initial=0.0))))
        k = np.arange(1, count + 1)[:, None]
        with np.errstate(invalid="ignore"):
            left = np.maximum(0.0, np.abs(speed) - np.where(np.isinf(loss), np.inf, loss * k))
        rates = np.sign(speed) * left
        rates[-1] = 0.0
        if self.kind is ActionType.JOINT_VELOCITY:
            return StopPlan(np.where(self.absolute, value, rates), np.zeros_like(rates))
        # A robot that already stands beyond a limit is not moved by the stop: the limit only stops further motion.
        lower, upper = np.minimum(self.lower, value), np.maximum(self.upper, value)
        values = np.clip(value + np.cumsum(rates * self.dt_s, axis=0), lower, upper)
        # A joint that meets its limit is at rest there: its rate must not point through the limit.
        moved = np.diff(values, axis=0, prepend=value[None, :])
        return StopPlan(values, moved / self.dt_s)

    def held(self, value: F64) -> F64:
        """[A] command that keeps the robot at rest after :meth:`plan`."""
        if self.kind is ActionType.JOINT_POSITION:
            return value
        return np.where(self.absolute, value, 0.0)
