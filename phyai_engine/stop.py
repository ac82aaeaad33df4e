"""The controlled stop: decelerate, then hold; and the slow way to a first row. Pure: no clock, no ROS.

The stop is modelled on IEC 60204-1 category 2 (decelerate, keep power, hold). It is not a safety-rated function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.types import F64, ActionType

STOP_STEPS_MAX = 500
"""A stop longer than this is a wrong limit, not a stop: ten seconds at 50 Hz."""

RAMP_SHARE = 0.25
"""Part of velocity_max, acceleration_max and jerk_max that a ramp uses: nobody planned that way, so it is slow."""

DECELERATING = "decelerating at acceleration_max, then held"


@dataclass(frozen=True, slots=True, eq=False)
class StopPlan:
    """A bounded sequence of commands that ends at rest. ``values`` [n, A] robot units, ``rates`` [n, A] unit/s.

    :param at_once: the rows do not go on from the motion commanded before, they replace it.
    """

    values: F64
    rates: F64
    at_once: bool = False

    def __len__(self) -> int:
        return len(self.values)


def row_rates(actions: F64, first_row: int, before: F64 | None, dt_s: float) -> F64:
    """[H, A] unit/s at which each row of a chunk moves, zero before ``first_row``.

    At the seam it is the new chunk's own motion, not the jump from ``before`` ([A], commanded last; None = the robot
    stands still and starts from rest). Only a chunk with no row after its first has the jump as its motion.
    """
    rates = np.zeros_like(actions)
    rates[first_row + 1 :] = np.diff(actions[first_row:], axis=0) / dt_s
    if before is not None:
        own = first_row + 1 < len(actions)
        rates[first_row] = rates[first_row + 1] if own else (actions[first_row] - before) / dt_s
    return rates


@dataclass(frozen=True, slots=True, eq=False)
class StopPlanner:
    """Plans decelerate-then-hold for one robot. Per action [A], infinity where the robot file gives no limit.

    :param option: ``decelerate``, ``hold_measured`` or ``stop_publishing``.
    :param velocity_max: unit/s: a seam between two chunks is no motion, so no faster rate is believed.
    :param acceleration_max: unit/s^2. :param jerk_max: unit/s^3, infinity also where it cannot bind: one period is
        long enough to go from no deceleration to ``acceleration_max``.
    :param absolute: bool, values held while a velocity or delta robot stops.
    """

    names: tuple[str, ...]
    kind: ActionType
    option: str
    dt_s: float
    lower: F64
    upper: F64
    velocity_max: F64
    acceleration_max: F64
    jerk_max: F64
    absolute: NDArray[np.bool_]

    @staticmethod
    def of(robot: RobotConfig) -> StopPlanner:
        """The planner a robot file describes.

        :raises ConfigError: a stop from the fastest motion that the file allows takes more than STOP_STEPS_MAX steps.
        """
        acceleration = robot.limit("acceleration_max", math.inf)
        jerk = robot.limit("jerk_max", math.inf)
        planner = StopPlanner(
            names=robot.action_names,
            kind=robot.kind,
            option=robot.stop,
            dt_s=robot.dt_s,
            lower=robot.limit("lower", -math.inf),
            upper=robot.limit("upper", math.inf),
            velocity_max=robot.limit("velocity_max", math.inf),
            acceleration_max=acceleration,
            jerk_max=np.where(jerk * robot.dt_s >= acceleration, math.inf, jerk),
            absolute=np.array([a.absolute for a in robot.actions]),
        )
        planner._check_length(robot.robot_id)
        return planner

    @property
    def needs_value(self) -> bool:
        """True when a stop cannot be commanded without knowing where the robot is."""
        return self.kind is ActionType.JOINT_POSITION

    def plan(self, value: F64, rate: F64, acceleration: F64 | None = None) -> StopPlan:
        """Commands from the next tick on.

        Each joint keeps its direction and loses at most ``acceleration_max * dt`` of speed a step, and where
        ``jerk_max`` binds its deceleration grows and fades by at most ``jerk_max * dt`` a step. It starts from the
        deceleration that was under way; an acceleration is dropped at once, for a stop never makes a joint faster.
        What does not come to rest within STOP_STEPS_MAX steps like that decelerates harder. A limit is never passed: a
        joint that meets one is at rest there, however fast it was (:mod:`phyai_engine.reach` refuses such chunks).

        :param value: [A] last commanded value. :param rate: [A] its rate of change [unit/s].
        :param acceleration: [A] of a position robot [unit/s^2], zero if unknown; a velocity robot's is its ``rate``.
        :returns: position: the target is latched where each joint comes to rest, inside lower..upper; velocity: the
            same on the velocity itself; Cartesian delta: one zero step; absolute values are kept. At least one row;
            the last row is at rest.
        """
        if self.kind is ActionType.CARTESIAN_DELTA:
            held = np.where(self.absolute, value, 0.0)[None, :]
            return StopPlan(held, np.zeros_like(held))
        if self.kind is ActionType.JOINT_VELOCITY:
            speed = np.where(self.absolute, 0.0, value)
            rates = np.sign(speed) * self._speeds(np.abs(speed), -rate * np.sign(speed))
            return StopPlan(np.where(self.absolute, value, rates), np.zeros_like(rates))
        speed = np.clip(rate, -self.velocity_max, self.velocity_max)
        slowing = np.zeros_like(speed) if acceleration is None else -acceleration * np.sign(speed)
        rates = np.sign(speed) * self._speeds(np.abs(speed), slowing)
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

    def stop(
        self, value: F64, rate: F64, acceleration: F64 | None, measured: F64 | None
    ) -> tuple[StopPlan | None, str]:
        """What the robot file wants sent, and the words that say so.

        :param measured: [A], NaN where nothing fresh is measured; asked for by ``hold_measured`` only.
        :returns: None where nothing is to be published.
        """
        if self.option == "stop_publishing":
            return None, "nothing is published: the controller's own command timeout has to stop the robot"
        if self.option == "hold_measured":
            if measured is not None and not np.isnan(measured).any():
                return StopPlan(measured[None, :], np.zeros((1, len(measured))), at_once=True), "held where measured"
            unknown = "anything" if measured is None else self.names[int(np.isnan(measured).argmax())]
            words = f"{DECELERATING}: hold_measured has no fresh value of {unknown}"
            return self.plan(value, rate, acceleration), words
        return self.plan(value, rate, acceleration), DECELERATING

    def distance(self, speed: F64) -> F64:
        """[..., A] unit that :meth:`plan` moves from ``speed`` [..., A] >= 0 on, limits of position left aside.

        Exact without a jerk limit. With one it is an upper bound: the distance of that ramp smoothed by a moving
        average long enough for the jerk, which starts from no deceleration and which the plan never exceeds.
        """
        v = np.minimum(speed, self.velocity_max)
        bound = ~np.isinf(self.jerk_max)
        jerk = np.where(bound, self.jerk_max, 1.0)
        loss = self.dt_s * np.where(bound, np.minimum(self.acceleration_max, np.sqrt(v * jerk)), self.acceleration_max)
        loss = np.where((v > 0.0) & np.isfinite(loss), loss, 1.0)
        steps = np.maximum(1.0, np.ceil(v / loss - 1e-9))
        ramp = v * (steps - 1.0) - loss * steps * (steps - 1.0) * 0.5
        smoothing = np.where(bound, np.ceil(loss / (jerk * self.dt_s**2)), 1.0)
        moves = (v > 0.0) & (bound | np.isfinite(self.acceleration_max))
        far: F64 = np.where(moves, self.dt_s * (ramp + v * (smoothing - 1.0) * 0.5), 0.0)
        return far

    def ramp(self, start: F64, target: F64) -> StopPlan | None:
        """From rest at ``start`` [A] straight to rest at ``target``, at RAMP_SHARE of the limits; position robots.

        All joints follow one minimum-jerk profile, whose largest rates bound those of its steps.

        :returns: None where it would take more than STOP_STEPS_MAX steps.
        """
        way = np.abs(target - start)
        longest_s = max(
            float((15 / 8 * way / (RAMP_SHARE * self.velocity_max)).max()),
            math.sqrt(float((10 / math.sqrt(3.0) * way / (RAMP_SHARE * self.acceleration_max)).max())),
            float((60.0 * way / (RAMP_SHARE * self.jerk_max)).max()) ** (1 / 3),
        )
        steps = max(1, math.ceil(longest_s / self.dt_s))
        if steps > STOP_STEPS_MAX:
            return None
        t = np.minimum(1.0, np.arange(1, steps + 2) / steps)[:, None]  # one row more: at rest
        values = start + t**3 * (10.0 - 15.0 * t + 6.0 * t**2) * (target - start)
        return StopPlan(values, np.diff(values, axis=0, prepend=start[None, :]) / self.dt_s)

    def _check_length(self, robot_id: str) -> None:
        if self.kind is ActionType.CARTESIAN_DELTA:
            return
        fastest = self.velocity_max
        if self.kind is ActionType.JOINT_VELOCITY:
            fastest = np.maximum(np.abs(self.lower), np.abs(self.upper))
        fastest = np.where(self.absolute | np.isinf(fastest), 0.0, fastest)  # unknown: such a stop decelerates harder
        for i, name in enumerate(self.names):
            only = np.where(np.arange(len(fastest)) == i, fastest, 0.0)
            if self._s_curve(only, np.zeros_like(only)) is None:
                raise ConfigError(
                    f"{name} cannot stop within {STOP_STEPS_MAX} steps of {self.dt_s} s",
                    got=f"{fastest[i]:.4g} unit/s, acceleration_max {self.acceleration_max[i]:.4g}, "
                    f"jerk_max {self.jerk_max[i]:.4g}",
                    where=f"robot {robot_id}",
                    do="Raise acceleration_max or jerk_max, or lower the speed.",
                )

    def _steps(self, speed: F64) -> int:
        """Steps of a stop without jerk limit."""
        with np.errstate(invalid="ignore"):
            steps = np.where(speed == 0.0, 0.0, np.ceil(speed / (self.acceleration_max * self.dt_s) - 1e-9))
        return int(max(1.0, steps.max(initial=0.0)))  # rounding adds no step

    def _speeds(self, speed: F64, deceleration: F64) -> F64:
        """[n, A] speeds of a stop from ``speed`` [A] >= 0; the last row is zero."""
        if np.isfinite(self.jerk_max).any() and (curve := self._s_curve(speed, deceleration)) is not None:
            return curve
        count = min(STOP_STEPS_MAX, self._steps(speed))
        loss = np.maximum(self.acceleration_max * self.dt_s, speed / STOP_STEPS_MAX)
        k = np.arange(1, count + 1)[:, None]
        left: F64 = np.maximum(0.0, speed - loss * k)
        left[-1] = 0.0
        return left

    def _s_curve(self, speed: F64, deceleration: F64) -> F64 | None:
        """[n, A] speeds of the fastest stop within both limits; None where STOP_STEPS_MAX steps do not suffice.

        :param deceleration: [A] unit/s^2 under way.
        """
        growth = self.jerk_max * self.dt_s
        finite = np.where(np.isinf(growth), 1.0, growth)
        left, slowing = speed, np.clip(deceleration, 0.0, self.acceleration_max)
        rows = []
        while True:
            # The largest deceleration that can fade by `growth` a step, in q steps, and end exactly at rest.
            wanted = left / self.dt_s
            q = np.maximum(1.0, np.ceil(0.5 * (np.sqrt(1.0 + 8.0 * wanted / finite) - 1.0)))
            fading = np.where(np.isinf(growth), wanted, wanted / q + 0.5 * finite * (q - 1.0))
            slowing = np.minimum(np.minimum(slowing + growth, self.acceleration_max), fading)
            left = left - slowing * self.dt_s
            left = np.where(left <= 1e-12 * speed, 0.0, left)  # rounding adds no step
            rows.append(left)
            if not left.any():
                return np.array(rows)
            if len(rows) == STOP_STEPS_MAX:
                return None
