"""A scripted expert for the tasks of sim/tasks.py: what demonstrations are made with.

Meta-World's own policies know only the start of their own task. In the shared scenes, from any position of the object
and after the other task, they opened 5 of 10 drawers and turned 20 of 40 faucets: the hand stands on the wrong side of
the handle and pushes against it. This one goes around, from wherever hand and object are.
"""

from __future__ import annotations

import numpy as np

from phyai_engine.sim.metaworld_robot import MetaWorldRobot
from phyai_engine.sim.tasks import Task, progress
from phyai_engine.types import F64

_GAIN_PER_M = 14.0  # command for a distance that is left
_REACH_M = 0.03  # how near the hand must be to a way to stay on it
_ENTER_M = 0.02  # and to begin it
_ALONG_M = (-0.025, 0.05)  # from the place before the object to where the hand still pushes it
_DONE = 0.97  # of the travel: well beyond where the task counts as solved
_UP = np.array([0.0, 0.0, 1.0])


class Expert:
    """Of one task; without memory, so that what it does can be learned from what is seen.

    :param speed: largest command, a share of Meta-World's. :param bend: m by which the way to the object swings out, to
        one side (positive) or to the other.
    """

    def __init__(self, task: Task, *, speed: float = 0.5, bend: float = 0.0) -> None:
        self.task, self._speed, self._bend = task, speed, bend

    def action(self, robot: MetaWorldRobot) -> F64:
        """[4], dx dy dz gripper, for the scene as it stands."""
        if progress(self.task, *robot.joint(self.task)) >= _DONE:
            return np.array([0.0, 0.0, 0.0, self.task.grip.gripper])
        wanted = self._way(robot) * _GAIN_PER_M
        largest = float(np.abs(wanted).max())
        return np.append(wanted * min(1.0, self._speed / max(largest, 1e-9)), self.task.grip.gripper)

    def _way(self, robot: MetaWorldRobot) -> F64:
        """[3] m, from the hand to where it should go next."""
        place, push = _before(robot, self.task)
        clear = np.array(self.task.grip.clear)
        out = clear / np.linalg.norm(clear)
        off: F64 = robot.hand - place
        along, height = float(off @ push), float(off @ out)
        across = off - along * push - height * out
        if np.linalg.norm(across) < _REACH_M and abs(height) < _REACH_M and _ALONG_M[0] < along < _ALONG_M[1]:
            ahead: F64 = push * 0.1 - across - height * out
            return ahead
        aside = across + along * push
        if np.linalg.norm(aside) < _ENTER_M or (np.linalg.norm(aside) < _REACH_M and height < _clearance(clear)):
            return -off
        if height < _clearance(clear):
            away: F64 = out * (float(np.linalg.norm(clear)) - height)
            return away
        return clear - off + self._swing(aside, out)

    def _swing(self, aside: F64, out: F64) -> F64:
        distance = float(np.linalg.norm(aside))
        share = min(1.0, max(0.0, distance - 0.05) / 0.1)
        return np.asarray(np.cross(out, aside / distance) * (self._bend * share), dtype=np.float64)


def _clearance(clear: F64) -> float:
    return 0.8 * float(np.linalg.norm(clear))


def _before(robot: MetaWorldRobot, task: Task) -> tuple[F64, F64]:
    """Where the hand stands before it moves the object [3] m, and the unit vector of the motion."""
    grip = task.grip
    part = robot.position_of(*grip.part)
    push = np.array(grip.push)
    if push.any():
        return part + np.array(grip.offset), push
    arm = (part - robot.position_of("body", task.scene.body)) * (1.0, 1.0, 0.0)
    arm /= np.linalg.norm(arm)
    push = np.cross(_UP, arm) * (1.0 if task.end == "upper" else -1.0)
    back, inward, up = grip.offset
    return part - push * back - arm * inward + _UP * up, push
