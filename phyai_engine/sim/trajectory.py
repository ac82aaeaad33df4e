"""A joint trajectory as ros2_control's joint_trajectory_controller (JTC, Jazzy defaults) executes it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phyai_engine.errors import RefusalError
from phyai_engine.types import F64, Refusal

END_VELOCITY_MAX = float(np.finfo(np.float32).eps)  # JTC's bound on the last point's velocity


def _refuse(what: str, *, got: object = None, wanted: object = None) -> RefusalError:
    return RefusalError(Refusal.MALFORMED, what, got=got, wanted=wanted, where="joint trajectory")


def check_trajectory(
    names: Sequence[str], joints: Sequence[str], times: F64, positions: F64, velocities: F64
) -> tuple[F64, F64]:
    """Check a received trajectory as JTC does and bring its columns into the robot's joint order.

    :param names: joint names of the message; all of ``joints``, in any order.
    :param times: [n] float64 seconds from the start, strictly increasing.
    :param positions: [n, J] in the order of ``names``; ``velocities`` likewise, NaN rows where absent.
    :returns: positions and velocities in the order of ``joints``.
    :raises RefusalError: the trajectory is refused as a whole.
    """
    if sorted(names) != sorted(joints):
        raise _refuse("wrong joints (partial goals are not accepted)", got=list(names), wanted=list(joints))
    if len(times) == 0:
        raise _refuse("no points", wanted=">= 1")
    wanted = (len(times), len(joints))
    if positions.shape != wanted or velocities.shape != wanted:
        raise _refuse("wrong shape", got=f"{positions.shape}, {velocities.shape}", wanted=wanted)
    with_velocity: NDArray[np.bool_] = np.array([not np.isnan(row).all() for row in velocities])
    finite = np.isfinite(times).all() and np.isfinite(positions).all() and np.isfinite(velocities[with_velocity]).all()
    if not finite:
        raise RefusalError(Refusal.NOT_FINITE, "NaN or infinity", where="joint trajectory")
    if times[0] < 0.0 or (np.diff(times) <= 0.0).any():
        raise _refuse("times do not increase", got=np.round(times, 6).tolist(), wanted="0 <= t0 < t1 < ...")
    if with_velocity[-1] and np.abs(velocities[-1]).max() > END_VELOCITY_MAX:
        raise _refuse("the last point has a velocity", got=velocities[-1].tolist(), wanted="0 or none")
    order = [list(names).index(joint) for joint in joints]
    return positions[:, order], velocities[:, order]


class Trajectory:
    """Reference over controller time: from where it is now, through the points, then at the last one.

    Between two points that both have velocities cubic, else linear; accelerations are not used.

    :param start_s: controller time of the trajectory's zero; ``now_s`` that of its acceptance.
    :param times: [n] float64 seconds; ``positions`` [n, J]; ``velocities`` [n, J], NaN rows where absent.
    :param before: [J] reference at ``now_s``; ``before_velocity`` its rate.
    :raises RefusalError: it would end in the past.
    """

    def __init__(
        self,
        *,
        start_s: float,
        now_s: float,
        times: F64,
        positions: F64,
        velocities: F64,
        before: F64,
        before_velocity: F64,
    ) -> None:
        knots = start_s + times
        if knots[-1] < now_s:
            raise RefusalError(
                Refusal.STALE,
                "the trajectory ends in the past",
                got=f"{knots[-1] - now_s:.3f} s from now",
                where="joint trajectory",
                do="Stamp it 0 (now) or in the future.",
            )
        if knots[0] > now_s:
            knots = np.concatenate([[now_s], knots])
            positions = np.vstack([before, positions])
            velocities = np.vstack([before_velocity, velocities])
        self._knots, self._positions, self._velocities = knots, positions, velocities

    def sample(self, now_s: float) -> tuple[F64, F64]:
        """Position and velocity of the reference at ``now_s``, [J] float64 each."""
        knots, q, v = self._knots, self._positions, self._velocities
        after = int(np.searchsorted(knots, now_s, side="right"))
        if after == 0 or after == len(knots):
            edge = 0 if after == 0 else -1
            return q[edge].copy(), np.zeros(q.shape[1])
        begin, end = after - 1, after
        span = float(knots[end] - knots[begin])
        u = (now_s - float(knots[begin])) / span
        slope = (q[end] - q[begin]) / span
        if np.isnan(v[begin]).any() or np.isnan(v[end]).any():
            return q[begin] + slope * (u * span), slope
        # Cubic Hermite written around the chord: the chord's slope plus what the end velocities bend.
        a, b = v[begin] - slope, v[end] - slope
        position = q[begin] + span * u * (slope + (1.0 - u) * ((1.0 - u) * a - u * b))
        velocity = slope + (1.0 - u) * (1.0 - 3.0 * u) * a + u * (3.0 * u - 2.0) * b
        return position, velocity
