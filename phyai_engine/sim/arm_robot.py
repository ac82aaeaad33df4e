"""A light joint-position arm in numpy: limits, a plausible response, trajectories, drawn camera images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.sim.arm_images import ArmImages
from phyai_engine.sim.robot import JointSample
from phyai_engine.sim.trajectory import Trajectory, check_trajectory
from phyai_engine.types import F64, U8

BANDWIDTH_RAD_S = 50.0  # of the critically damped response: 63 % of a small step after 43 ms
SUBSTEPS = 8  # of one control period; keeps bandwidth * substep well inside the stable region
RESET_SPREAD_RAD = 0.05  # how far seeds move the start away from mid-range


class ArmRobot:
    """Each joint follows its target, critically damped, within its velocity and acceleration limits.

    The target is the last command or, after :meth:`follow`, a trajectory. Targets outside the position limits
    are clipped as an arm's own firmware would. Starts at mid-range, moved a little by the seed.

    :param robot: a joint_position robot file; one action per state entry, no change of units.
    """

    instruction = "move the arm"
    success = False

    def __init__(self, robot: RobotConfig, *, seed: int = 0, width: int = 320, height: int = 240) -> None:
        _check_supported(robot)
        self.action_names = robot.action_names
        self.dt_s = robot.dt_s
        self.time_s = 0.0
        self._lower = robot.limit("lower", -np.inf)
        self._upper = robot.limit("upper", np.inf)
        self._v_max = robot.limit("velocity_max", np.inf)
        self._a_max = robot.limit("acceleration_max", np.inf)
        by_state = {action.state: i for i, action in enumerate(robot.actions)}
        self._topics: dict[str, tuple[tuple[str, ...], list[int]]] = {}
        for topic in dict.fromkeys(entry.topic for entry in robot.state):
            names = tuple(entry.name for entry in robot.state if entry.topic == topic)
            self._topics[topic] = (names, [by_state[name] for name in names])
        self._images = ArmImages(tuple(c.name for c in robot.cameras), width, height)
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """At rest near mid-range, holding there; controller time goes on."""
        spread = np.random.Generator(np.random.Philox(seed)).uniform(
            -RESET_SPREAD_RAD, RESET_SPREAD_RAD, self._lower.size
        )
        # Replaced whole, never written in place: the rendering thread reads it without a lock.
        self._position: F64 = np.clip(0.5 * (self._lower + self._upper) + spread, self._lower, self._upper)
        self._velocity: F64 = np.zeros_like(self._position)
        self._reference = self._position
        self._reference_velocity: F64 = np.zeros_like(self._position)
        self._trajectory: Trajectory | None = None

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        """See :meth:`SimRobot.step`. A command replaces a trajectory."""
        self.time_s = self.time_s + self.dt_s if now_s is None else now_s
        if command is not None:
            self._trajectory = None
            self._reference = np.clip(command, self._lower, self._upper)
            self._reference_velocity = np.zeros_like(self._reference)
        elif self._trajectory is not None:
            self._reference, self._reference_velocity = self._trajectory.sample(self.time_s)
        self._advance(np.clip(self._reference, self._lower, self._upper))

    def _advance(self, target: F64) -> None:
        h = self.dt_s / SUBSTEPS
        position, velocity = self._position, self._velocity
        for _ in range(SUBSTEPS):
            error = target - position
            # 2w(w/2*e - v) is the critically damped response; far away the wanted speed is bounded by the
            # limit and by what can be braked at half the limit, so that a large step does not overshoot.
            bound = np.minimum(self._v_max, np.sqrt(self._a_max * np.abs(error)))
            wanted = np.clip(0.5 * BANDWIDTH_RAD_S * error, -bound, bound)
            change = np.clip(2.0 * BANDWIDTH_RAD_S * (wanted - velocity), -self._a_max, self._a_max) * h
            velocity = velocity + change
            position = position + velocity * h
        self._position, self._velocity = position, velocity

    def hold(self) -> None:
        """Brake each joint at half its acceleration limit, as :meth:`step` does, and stay there."""
        self._trajectory = None
        stop = self._position + self._velocity * np.abs(self._velocity) / self._a_max
        self._reference = np.clip(stop, self._lower, self._upper)
        self._reference_velocity = np.zeros_like(stop)

    def follow(
        self,
        names: Sequence[str],
        times: F64,
        positions: F64,
        velocities: F64,
        *,
        start_s: float | None = None,
    ) -> None:
        """Replace what is being done by a trajectory, from now on. Arrays as in :func:`check_trajectory`.

        :param start_s: controller time of its zero; None: now (a message stamped 0).
        :raises RefusalError: it is malformed or over; what was being done goes on.
        """
        positions, velocities = check_trajectory(names, self.action_names, times, positions, velocities)
        self._trajectory = Trajectory(
            start_s=self.time_s if start_s is None else start_s,
            now_s=self.time_s,
            times=times,
            positions=positions,
            velocities=velocities,
            before=self._reference,
            before_velocity=self._reference_velocity,
        )

    def reference(self) -> tuple[F64, F64]:
        """Position and velocity the controller asks for at ``time_s``, [J] float64 each, as the actions."""
        return self._reference, self._reference_velocity

    def measured(self) -> tuple[F64, F64]:
        """Position and velocity of the joints, [J] float64 each, in the order of the actions."""
        return self._position, self._velocity

    def state(self) -> dict[str, JointSample]:
        """See :meth:`SimRobot.state`; rad and rad/s."""
        return {
            topic: JointSample(names, self._position[index], self._velocity[index])
            for topic, (names, index) in self._topics.items()
        }

    def render(self, camera: str) -> U8:
        """See :meth:`SimRobot.render`; drawn, 1 ms at 320x240."""
        return self._images.draw(camera, self._position)

    def close(self) -> None:
        """Nothing to free."""


def _check_supported(robot: RobotConfig) -> None:
    where = f"robot {robot.robot_id}"
    driven = [action.state for action in robot.actions]
    if robot.action_type != "joint_position" or sorted(driven) != sorted(robot.state_names):
        raise ConfigError(
            "the simulated arm needs joint positions and one action per state entry",
            got=f"{robot.action_type}, actions drive {', '.join(driven)}",
            wanted=f"joint_position driving {', '.join(robot.state_names)}",
            where=where,
        )
    units = [(e.name, e.scale, e.offset, e.units) for e in robot.actions]
    units += [(e.name, e.scale, e.offset, e.units) for e in robot.state]
    changed = [name for name, *rest in units if rest != [1.0, 0.0, "affine"]]
    if changed:
        raise ConfigError("the simulated arm does not change units", got=changed, wanted="scale 1", where=where)
