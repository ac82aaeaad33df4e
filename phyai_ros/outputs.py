"""The three ways a command leaves the node: steps, a trajectory for a controller, chunks for a player elsewhere.

Every output takes ``publish(topic key, message)``; the node gates it by its own state, because a LifecyclePublisher
that is disabled drops silently and one that was never disabled keeps publishing.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from phyai_engine.config import RobotConfig
from phyai_engine.control.commands import Command, PlaysHere
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import Accepted
from phyai_engine.stop import StopPlan, StopPlanner, row_rates
from phyai_engine.timing import mono_ns
from phyai_engine.types import F64, ActionType, Chunk, Refusal
from phyai_ros.convert import to_stamp

ACKNOWLEDGE_S = 0.5
"""A chunk that the player elsewhere has not shown to play within this time was lost."""

Publish = Callable[[str, Any], None]
Now = Callable[[], int]


def to_duration(seconds: float) -> Duration:
    """Seconds -> builtin_interfaces/Duration."""
    ns = round(seconds * 1e9)
    return Duration(sec=ns // 1_000_000_000, nanosec=ns % 1_000_000_000)


def trajectory(
    names: list[str], values: F64, rates: F64, dt_s: float, stamp_ns: int = 0, *, first_s: float | None = None
) -> JointTrajectory:
    """A JointTrajectory that joint_trajectory_controller accepts: all joints in every point, times increase from dt.

    :param values: [n, A] with n >= 1. :param rates: [n, A] unit/s; the last point comes to rest.
    :param first_s: time of the first point, dt if not given.
    :param stamp_ns: 0 = start on receipt, else a ROS time that is not past.
    """
    message = JointTrajectory(joint_names=names)
    message.header.stamp = to_stamp(stamp_ns)
    last = len(values) - 1
    message.points = [
        JointTrajectoryPoint(
            positions=values[i].tolist(),
            velocities=(rates[i] if i < last else np.zeros_like(rates[i])).tolist(),
            time_from_start=to_duration((dt_s if first_s is None else first_s) + i * dt_s),
        )
        for i in range(len(values))
    ]
    return message


def action_chunk(robot: RobotConfig, chunk: Chunk, stamp_ros_ns: int) -> ActionChunk:
    """A chunk as the engine answered it, all H rows; nothing is said of when it is to be played."""
    message = ActionChunk(
        robot_id=robot.robot_id,
        joint_names=list(robot.action_names),
        action_type=int(robot.kind),
        dt=to_duration(robot.dt_s),
        horizon=len(chunk.actions),
        actions=array.array("d", chunk.actions.ravel().tolist()),
        epoch=chunk.epoch,
        chunk_id=chunk.chunk_id,
        oldest_observation=to_stamp(chunk.oldest_ros_ns),
        newest_observation=to_stamp(chunk.newest_ros_ns),
        predicted_margin_s=math.nan,
    )
    message.header.stamp = to_stamp(stamp_ros_ns)
    return message


class StepsOutput(PlaysHere):
    """``~/step`` on every tick, and the robot's own command interface when the robot file names one."""

    def __init__(self, robot: RobotConfig, publish: Publish, now_ros_ns: Now) -> None:
        self._robot, self._publish, self._now = robot, publish, now_ros_ns
        self._names = list(robot.action_names)
        self._dt = to_duration(robot.dt_s)
        self._rates = robot.kind is ActionType.JOINT_POSITION

    def command(self, command: Command) -> None:
        stamp = to_stamp(self._now())
        message = ActionStep(
            robot_id=self._robot.robot_id,
            joint_names=self._names,
            action_type=int(self._robot.kind),
            kind=int(command.kind),
            values=array.array("d", command.values.tolist()),
            velocities=array.array("d", command.rates.tolist() if self._rates else []),
            tick=command.tick,
            epoch=command.epoch,
            chunk_id=command.chunk_id,
            step=command.step,
            dt=self._dt,
        )
        message.header.stamp = stamp
        self._publish("step", message)
        if (native := self._native(command, stamp)) is not None:
            self._publish("command", native)

    def _native(self, command: Command, stamp: Time) -> Any:
        interface = self._robot.command.interface
        if interface == "joint_trajectory":
            # No velocities: the controller refuses a trajectory whose last point moves, and this one has one point.
            point = JointTrajectoryPoint(positions=command.values.tolist(), time_from_start=self._dt)
            return JointTrajectory(joint_names=self._names, points=[point])
        if interface == "float64_multi_array":
            return Float64MultiArray(data=command.values.tolist())
        if interface == "joint_state":
            message = JointState(name=self._names)
            message.header.stamp = stamp
            values = command.values.tolist()
            if self._robot.kind is ActionType.JOINT_VELOCITY:
                message.velocity = values
            else:
                message.position = values
            return message
        return None


class TrajectoryOutput:
    """joint_trajectory_controller plays. Consumed steps are counted from the controller's own time.

    A row with absolute index c (counted from activation) begins at ``origin + (c - origin_step) * dt`` on the
    controller's clock and is reached one dt later. A new chunk joins that grid, so no row is repeated or skipped; after
    a pause the grid starts anew one dt from now. Every chunk is followed by a deceleration, in case no other comes.
    """

    ticks = False

    def __init__(self, robot: RobotConfig, publish: Publish, now_ros_ns: Now) -> None:
        if robot.kind is not ActionType.JOINT_POSITION:
            raise ConfigError(
                "output trajectory needs a robot with joint positions",
                got=robot.action_type,
                wanted="action_type: joint_position",
                do="Use output steps or chunks.",
            )
        if robot.stop == "stop_publishing" or robot.first_step == "ramp":
            raise ConfigError(
                "output trajectory cannot keep the robot file's word",
                got=f"stop: {robot.stop}, first_step: {robot.first_step}",
                wanted="a stop that is sent (the controller would play its trajectory to the end), and no ramp",
                do="Use output steps or chunks.",
            )
        self._robot, self._publish, self._now = robot, publish, now_ros_ns
        self._names = list(robot.action_names)
        self._dt_ns = round(robot.dt_s * 1e9)
        self._planner = StopPlanner.of(robot)
        self._controller_ns = self._heard_mono_ns = 0
        self._nowhere: F64 = np.full(len(robot.actions), math.nan)
        self.reset(0)

    def reset(self, consumed: int) -> None:
        """Forget the grid: nothing is playing."""
        self._origin_ns = self._origin_step = self._end_step = self._controller_ns = 0
        self._handed: list[tuple[int, int, F64]] = []  # first step played, step of row 0, rows; the newest last
        self._tail: tuple[F64, F64] | None = None  # rows and rates after the newest chunk's last row
        self._rest = self._nowhere  # where the robot stood when the grid began
        self._stopped: tuple[int, F64, F64] | None = None  # ROS time of row 0, rows and rates of the last stop
        self._moving: tuple[F64, F64, int] | None = None  # as motion said last, and the ROS time when that is reached

    def on_controller_state(self, stamp_ros_ns: int) -> None:
        """The controller's newest time stamp."""
        self._controller_ns, self._heard_mono_ns = stamp_ros_ns, mono_ns()

    def command(self, command: Command) -> None:
        """The controller plays; no command per tick."""

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None:
        now = self._now()
        step = base_step + facts.row
        paused = self._origin_ns == 0 or step >= self._end_step
        if not paused and (begin := self._begin_ns(step)) < now:
            # Rows whose time has come are played from the chunk before, which they continue. Where that one has run
            # out meanwhile the robot stands at its end: the rows after it are not skipped, for that would be a jump.
            step += math.ceil((now - begin) / self._dt_ns)
            paused, step = step > self._end_step, min(step, self._end_step)
        if paused:
            at_rest_ns = now if self._stopped is None else max(now, self._reached_ns(len(self._stopped[1]) - 1))
            self._rest = self._nowhere
            if self._tail is not None:
                values, _ = self._tail
                at_rest_ns = max(at_rest_ns, self._begin_ns(self._end_step + len(values) - 1))
                self._rest = values[-1]
            self._origin_ns, self._origin_step = at_rest_ns + self._dt_ns, step
        rows = chunk.actions[step - base_step :]
        if len(rows) == 0:
            return
        self._end_step = base_step + len(chunk.actions)
        self._handed = [*self._handed[-1:], (step, base_step, chunk.actions)]
        last = row_rates(chunk.actions, step - base_step, None, self._robot.dt_s)[-1]
        plan = self._planner.plan(rows[-1], last)
        moves = len(plan) if last.any() else 0
        points = np.vstack([rows, plan.values[:moves]])
        self._tail = points[len(rows) - 1 :], np.vstack([last, plan.rates[:moves]])
        rates = np.gradient(points, self._robot.dt_s, axis=0) if len(points) > 1 else np.zeros_like(points)
        message = trajectory(self._names, points, rates, self._robot.dt_s, self._begin_ns(step))
        self._publish("trajectory", message)

    def motion(self) -> tuple[F64, F64] | None:
        """The row being executed now and its rate, by our own grid: the controller's state may lag or be silent."""
        self._moving = self._motion(self._now())
        return None if self._moving is None else self._moving[:2]

    def _motion(self, now: int) -> tuple[F64, F64, int] | None:
        if self._origin_ns == 0:
            return self._stopping(now)
        step = self._origin_step + (now - self._origin_ns) // self._dt_ns
        if step < self._origin_step:  # handed over, but not begun
            return self._stopping(now) or (self._rest, np.zeros_like(self._rest), now + self._dt_ns)
        reached_ns = self._begin_ns(step + 1)
        if (row := step - self._end_step) >= 0:
            assert self._tail is not None  # the chunk that ended brought it
            values, rates = self._tail
            row = min(row + 1, len(values) - 1)
            return values[row], rates[row], reached_ns
        first, base, rows = self._chunk_at(step)
        before = None if first == self._handed[0][0] else self._row(first - 1)
        return rows[step - base], row_rates(rows, first - base, before, self._robot.dt_s)[step - base], reached_ns

    def _stopping(self, now: int) -> tuple[F64, F64, int] | None:
        """As motion, while a stop without a latch decelerates."""
        if self._stopped is None:
            return None
        began_ns, values, rates = self._stopped
        row = max(0, math.ceil((now - began_ns) / self._dt_ns))
        return (values[row], rates[row], self._reached_ns(row)) if row < len(values) else None

    def _reached_ns(self, row: int) -> int:
        assert self._stopped is not None
        return self._stopped[0] + row * self._dt_ns

    def stop(self, plan: StopPlan) -> None:
        """The row being executed is finished at its own time, then the plan; at once where nothing was playing.

        The controller puts a cubic through the points: the velocity of each is the mean of the steps before and after
        it, with which a constant deceleration is met exactly. In the last two steps, where a joint comes to rest
        between points, the cubic asks for up to twice the deceleration.
        """
        values, rates, now, lead_ns = plan.values, plan.rates, self._now(), self._dt_ns
        # The plan starts from what motion() said; a row may have ended since.
        if self._moving is not None and not plan.at_once and not np.isnan(self._moving[0]).any():
            value, rate, reached_ns = self._moving
            values, rates = np.vstack([value, values]), np.vstack([rate, rates])
            lead_ns = min(self._dt_ns, max(1_000_000, reached_ns - now))
        through = 0.5 * (rates + np.vstack([rates[1:], np.zeros_like(rates[:1])]))
        self._publish("trajectory", trajectory(self._names, values, through, self._robot.dt_s, first_s=lead_ns * 1e-9))
        self.reset(0)
        self._stopped = now + lead_ns, values, rates

    def ready(self) -> RefusalError | None:
        """Without the controller's state nobody knows what it plays."""
        if self._heard_mono_ns and mono_ns() - self._heard_mono_ns < ACKNOWLEDGE_S * 1e9:
            return None
        return RefusalError(
            Refusal.MISSING,
            f"no controller state for {ACKNOWLEDGE_S} s",
            where=self._robot.controller_state_topic,
            do="Is joint_trajectory_controller active, and control_msgs installed here?",
        )

    def heard_mono_ns(self) -> int:
        return self._heard_mono_ns

    def take_rejection(self) -> RefusalError | None:
        return self.ready() if self._origin_ns else None

    def consumed(self) -> int | None:
        if self._origin_ns == 0 or self._controller_ns == 0:
            return None
        begun = (self._controller_ns - self._origin_ns) // self._dt_ns + 1
        return min(self._end_step, self._origin_step + max(0, begun))

    def since_step_s(self) -> float | None:
        """By our own grid, which the controller's row follows: exact also where its state lags."""
        consumed = self.consumed()
        newest = (self._origin_step if consumed is None else consumed) - 1
        return (self._now() - self._begin_ns(newest)) * 1e-9

    def begun(self) -> tuple[int, int] | None:
        """The grid says at which row a chunk begins when it is handed over."""
        return None

    def _begin_ns(self, step: int) -> int:
        """ROS time at which a step begins."""
        return self._origin_ns + (step - self._origin_step) * self._dt_ns

    def _row(self, step: int) -> F64:
        """The row that plays at an absolute step."""
        _, base, rows = self._chunk_at(step)
        row: F64 = rows[step - base]
        return row

    def _chunk_at(self, step: int) -> tuple[int, int, F64]:
        """First step played, step of row 0 and rows of the chunk that plays at an absolute step."""
        for handed in reversed(self._handed):
            if step >= handed[0]:
                return handed
        raise IndexError(f"step {step} is older than the rows kept")


class ChunksOutput:
    """A player node beside the controller plays; it acknowledges with ChunkStatus."""

    ticks = False

    def __init__(self, robot: RobotConfig, publish: Publish, now_ros_ns: Now) -> None:
        self._robot, self._publish, self._now = robot, publish, now_ros_ns
        self._reported: int | None = None
        self._offset = 0  # the player's count minus ours
        self._heard_mono_ns = self._stepped_mono_ns = 0  # newest word of the player, and of those that it has stepped
        self._listening = False  # since the newest word of the player; its silence is told once
        self._sent: tuple[int, int, int] | None = None  # epoch, chunk_id, base_step until the player acknowledges them
        self._sent_mono_ns = 0
        self._began: tuple[int, int] | None = None  # chunk_id and row
        self._rejection: RefusalError | None = None

    def reset(self, consumed: int) -> None:
        """Join the two counts here."""
        self._sent = self._began = self._rejection = None
        self._offset = (self._reported or 0) - consumed

    def on_status(self, message: ChunkStatus) -> None:
        """A ChunkStatus arrived. A player that is new, or restarted, counts on from where ours stands."""
        self._heard_mono_ns, self._listening = mono_ns(), True
        if self._reported is None or message.consumed_steps < self._reported:
            self._offset += message.consumed_steps - (self._reported or 0)
            if self._reported is not None:
                self._rejection = RefusalError(Refusal.MISSING, "the player node restarted", where="~/chunk_status")
        if message.consumed_steps != self._reported:
            self._stepped_mono_ns = self._heard_mono_ns
        self._reported = message.consumed_steps
        if self._sent is not None and self._sent[:2] == (message.epoch, message.chunk_id):
            base_step, self._sent = self._sent[2], None
            if message.accepted:
                self._began = message.chunk_id, message.consumed_steps - base_step
            else:
                self._rejection = RefusalError(Refusal(message.refusal), message.text, where="the player node")

    def begun(self) -> tuple[int, int] | None:
        """Its count when it first named the chunk: it may have stepped while the chunk was on its way."""
        began, self._began = self._began, None
        return began

    def ready(self) -> RefusalError | None:
        """A player node speaks on every tick."""
        if self._heard_mono_ns and mono_ns() - self._heard_mono_ns <= ACKNOWLEDGE_S * 1e9:
            return None
        return self._missing(f"no ChunkStatus for {ACKNOWLEDGE_S} s")

    def heard_mono_ns(self) -> int:
        return self._heard_mono_ns

    def motion(self) -> tuple[F64, F64] | None:
        """The player stops by itself, from what it commanded last."""
        return None

    def take_rejection(self) -> RefusalError | None:
        """The player refused the last chunk, never showed that it has it, restarted, or fell silent."""
        rejection, self._rejection = self._rejection, None
        limit_ns, now = ACKNOWLEDGE_S * 1e9, mono_ns()
        if self._sent is not None and now - self._sent_mono_ns > limit_ns:
            what = f"no ChunkStatus named the chunk within {ACKNOWLEDGE_S} s"
        elif self._listening and self._sent is None and now - self._heard_mono_ns > limit_ns:
            what = f"no ChunkStatus for {ACKNOWLEDGE_S} s"
        else:
            return rejection
        self._sent, self._listening = None, False
        return self._missing(what)

    @staticmethod
    def _missing(what: str) -> RefusalError:
        return RefusalError(Refusal.MISSING, what, where="~/chunk_status", do="Is player_node up?")

    def command(self, command: Command) -> None:
        """The player node publishes the commands."""

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None:
        base = max(0, base_step + self._offset)
        message = action_chunk(self._robot, chunk, self._now())
        message.first_valid_step = facts.row
        message.base_step = base
        message.execution_horizon = facts.execution_steps
        message.predicted_margin_s = facts.m_cond_s
        message.validity = to_duration(len(chunk.actions) * self._robot.dt_s)
        self._sent, self._sent_mono_ns, self._rejection = (chunk.epoch, chunk.chunk_id, base), mono_ns(), None
        self._publish("chunk", message)

    def stop(self, plan: StopPlan) -> None:
        """PolicyStatus carries the stop: its new epoch and safety state make the player stop at once."""

    def consumed(self) -> int | None:
        return None if self._reported is None else self._reported - self._offset

    def since_step_s(self) -> float | None:
        """At most a period: whether a step is late is told by the player's count, not by when its word arrived."""
        return min(self._robot.dt_s, (mono_ns() - self._stepped_mono_ns) * 1e-9)
