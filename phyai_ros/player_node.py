"""A player beside the controller: plays ActionChunks of a policy node elsewhere, with the same code and no torch.

It obeys PolicyStatus: a newer epoch in which the robot may not move stops it at once, and so does silence. The last
writer checks the epoch here, where the command leaves.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus, PolicyStatus
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.qos import QoSProfile
from sensor_msgs.msg import JointState
from std_srvs.srv import Trigger

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import HandoffSettings
from phyai_engine.safety import Safety
from phyai_engine.timing import ClockOffset, mono_ns
from phyai_engine.types import (
    F64,
    AbortCause,
    ActionType,
    Chunk,
    Refusal,
    SafetyState,
    Schedule,
    StageTimings,
)
from phyai_ros.convert import joint_state_to_arrays, stamp_ns, to_stamp
from phyai_ros.inputs import SENSOR_QOS
from phyai_ros.observation_buffer import ObservationBuffer
from phyai_ros.outputs import StepsOutput
from phyai_ros.player import Player
from phyai_ros.session import COMMAND_QOS, COMMAND_TYPES, LATCHED_QOS
from phyai_ros.spin import StopFlag, run

MOVING = (SafetyState.ARMED, SafetyState.RUNNING, SafetyState.HOLDING)


class PlayerNode(Node):
    """Plays the chunks of one policy node.

    Parameters: ``robot`` (name or path), ``policy`` (name of the policy node), ``status_timeout_s`` (silence of the
    policy node that stops the robot), ``stop_hold_steps``.
    """

    def __init__(
        self,
        stop_flag: StopFlag | None = None,
        *,
        name: str = "player_node",
        **kwargs: Any,
    ) -> None:
        super().__init__(name, **kwargs)
        name_or_path = self.declare_parameter("robot", "").value
        if not name_or_path:
            raise ConfigError("parameter robot is empty", where="player_node", do="Give the policy node's robot file.")
        robot = load_robot(resolve("robots", name_or_path))
        policy = self.declare_parameter("policy", "policy_node").value
        self._status_timeout_ns = round(self.declare_parameter("status_timeout_s", 1.0).value * 1e9)
        holds = self.declare_parameter("stop_hold_steps", 5).value
        self._robot = robot
        self._buffer = ObservationBuffer(robot)
        self._heard_ns = 0
        self._policy_latched = False  # since this player latched
        self._accepted_at = to_stamp(0)
        self._outputs: dict[str, Any] = {"step": self.create_publisher(ActionStep, "~/step", COMMAND_QOS)}
        if robot.command.interface != "none":
            kind = COMMAND_TYPES[robot.command.interface]
            self._outputs["command"] = self.create_publisher(kind, robot.command.topic, COMMAND_QOS)
        self._player = Player(
            robot,
            # The horizon is the chunk's: a first chunk sets it.
            HandoffSettings(Schedule.NAIVE_ASYNC, horizon=1, execution_steps=1, dt_s=robot.dt_s),
            Safety(epoch=0),
            StepsOutput(
                robot,
                lambda key, message: self._outputs[key].publish(message),
                self._now_ros_ns,
            ),
            self._measured if robot.kind is ActionType.JOINT_POSITION else lambda: None,
            stop_hold_steps=holds,
        )
        self._acknowledge = self.create_publisher(ChunkStatus, f"{policy}/chunk_status", QoSProfile(depth=5))
        self.create_subscription(ActionChunk, f"{policy}/chunk", self._guarded(self._on_chunk), COMMAND_QOS)
        self.create_subscription(
            PolicyStatus,
            f"{policy}/status",
            self._guarded(self._on_status),
            LATCHED_QOS,
        )
        for topic in dict.fromkeys(entry.topic for entry in robot.state):
            self.create_subscription(JointState, topic, self._guarded(self._joints(topic)), SENSOR_QOS)
        self.create_service(Trigger, "~/abort", self._guarded(self._on_abort))
        self.create_timer(
            robot.dt_s,
            self._guarded(self._on_tick),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def _on_tick(self) -> None:
        player = self._player
        if player.safety.may_play and mono_ns() - self._heard_ns > self._status_timeout_ns:
            silence = self._status_timeout_ns * 1e-9
            player.abort(AbortCause.ENGINE_LOST, f"no PolicyStatus for {silence:.3f} s")
        player.tick()
        playing = player.handoff.playing
        if playing is not None:
            self._report(
                playing.epoch,
                playing.chunk_id,
                step=max(playing.first_row, playing.next_row - 1),
            )
        else:
            self._report(player.safety.epoch, 0)

    def _on_status(self, message: PolicyStatus) -> None:
        if message.robot_id and message.robot_id != self._robot.robot_id:
            self.get_logger().error(
                f"policy drives robot {message.robot_id!r}, this player {self._robot.robot_id!r}: not obeyed",
                throttle_duration_sec=2.0,
            )
            return
        self._heard_ns = mono_ns()
        if not self._player.safety.latched:
            self._policy_latched = False
        elif message.abort_cause != PolicyStatus.ABORT_NONE:
            self._policy_latched = True
        playing = SafetyState(message.safety_state) in MOVING
        self._player.follow(message.epoch, playing, rearmed=self._policy_latched)

    def _on_chunk(self, message: ActionChunk) -> None:
        player = self._player
        try:
            chunk = self._read(message)
            if message.epoch != player.safety.epoch:
                raise RefusalError(
                    Refusal.WRONG_EPOCH,
                    "another epoch",
                    got=message.epoch,
                    wanted=player.safety.epoch,
                )
            self._check_validity(message)
            self._fit_horizon(len(chunk.actions), message.execution_horizon)
            now = mono_ns()
            player.handoff = player.handoff.expect(chunk.chunk_id, chunk.epoch, message.base_step, now)
            player.accept(chunk, now)
        except RefusalError as error:
            self.get_logger().warning(f"chunk {message.chunk_id}: {error}", throttle_duration_sec=1.0)
            self._report(message.epoch, message.chunk_id, refusal=error.code, text=str(error))
            return
        self._accepted_at = to_stamp(self._now_ros_ns())
        self._report(chunk.epoch, chunk.chunk_id)

    def _read(self, message: ActionChunk) -> Chunk:
        """The message as a chunk, its names and type checked, columns in the robot file's order."""
        names = self._robot.action_names
        if sorted(message.joint_names) != sorted(names) or message.action_type != self._robot.kind:
            raise RefusalError(
                Refusal.MALFORMED,
                "the chunk is for other joints or another action type",
                got=f"{list(message.joint_names)} type {message.action_type}",
                wanted=f"{list(names)} type {int(self._robot.kind)}",
            )
        if stamp_ns(message.dt) != round(self._robot.dt_s * 1e9):
            raise RefusalError(
                Refusal.MALFORMED,
                "the chunk has another control period",
                got=f"{stamp_ns(message.dt) * 1e-9} s",
                wanted=f"{self._robot.dt_s} s",
                do="Give both nodes the same robot file.",
            )
        flat = np.asarray(message.actions, dtype=np.float64)
        if message.horizon < 1 or flat.size != message.horizon * len(names):
            raise RefusalError(
                Refusal.MALFORMED,
                "wrong number of actions",
                got=flat.size,
                wanted=message.horizon * len(names),
            )
        order = [list(message.joint_names).index(name) for name in names]
        actions = flat.reshape(message.horizon, len(names))[:, order]
        return Chunk(message.epoch, message.chunk_id, actions, StageTimings())

    def _check_validity(self, message: ActionChunk) -> None:
        if message.robot_id != self._robot.robot_id:
            raise RefusalError(
                Refusal.MALFORMED, "a chunk for another robot", got=message.robot_id, wanted=self._robot.robot_id
            )
        age_s = (self._now_ros_ns() - stamp_ns(message.header.stamp)) * 1e-9
        validity_s = message.validity.sec + message.validity.nanosec * 1e-9
        if 0 < validity_s < age_s:
            raise RefusalError(
                Refusal.STALE,
                "the chunk is no longer valid",
                got=f"{age_s:.3f} s old",
                wanted=f"at most {validity_s:.3f} s",
                do="Compare the clocks of the two hosts.",
            )

    def _fit_horizon(self, horizon: int, execution_steps: int) -> None:
        """The first chunk of an epoch sets the horizon; the others must have the same."""
        handoff = self._player.handoff
        if handoff.settings.horizon == horizon:
            return
        if handoff.playing is not None:
            raise RefusalError(
                Refusal.MALFORMED, "another horizon in the same epoch", got=horizon, wanted=handoff.settings.horizon
            )
        steps = max(1, min(execution_steps, horizon))
        settings = HandoffSettings(Schedule.NAIVE_ASYNC, horizon, steps, self._robot.dt_s)
        self._player.handoff = replace(handoff, settings=settings)

    def _on_abort(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        newly = self._player.abort(AbortCause.SERVICE, "~/abort of the player was called")
        response.success = True
        response.message = "abort latched, stop sent" if newly else "already latched"
        self._report(self._player.safety.epoch, 0, text=self._player.safety.text)
        return response

    def _joints(self, topic: str) -> Callable[[JointState], None]:
        needed = self._buffer.needed(topic)

        def put(message: JointState) -> None:
            clocks = ClockOffset.sample(self._now_ros_ns, tries=1)
            try:
                names, positions, velocities = joint_state_to_arrays(message, topic=topic, needed=needed)
            except RefusalError as error:
                self._buffer.put_refused(topic, error, clocks.mono_ns)
                return
            self._buffer.put_joints(
                topic,
                names,
                positions,
                velocities,
                stamp_ns(message.header.stamp),
                received_ros_ns=clocks.ros_ns,
                received_mono_ns=clocks.mono_ns,
            )

        return put

    def _measured(self) -> F64:
        return self._buffer.measured_actions(mono_ns())

    def _now_ros_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _report(
        self,
        epoch: int,
        chunk_id: int,
        *,
        step: int = 0,
        refusal: Refusal = Refusal.NONE,
        text: str = "",
    ) -> None:
        message = ChunkStatus(
            robot_id=self._robot.robot_id,
            epoch=epoch,
            chunk_id=chunk_id,
            step=step,
            consumed_steps=self._player.handoff.consumed,
            accepted=refusal is Refusal.NONE,
            refusal=int(refusal),
            text=text,
            safety_state=int(self._player.safety.state),
        )
        message.header.stamp = to_stamp(self._now_ros_ns())
        if message.accepted:
            message.accepted_at = self._accepted_at
        self._acknowledge.publish(message)

    def _guarded(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return callback(*args)
            except Exception as error:
                self.on_spin_error(error)
                return args[-1] if args else None

        return call

    def on_signal(self, name: str) -> None:
        """Stop the robot, paced by the control period."""
        self._player.abort(AbortCause.SIGNAL, f"{name} received")
        self._player.finish_stop()

    def on_spin_error(self, error: Exception) -> bool:
        """A callback raised: stop and latch, go on."""
        self.get_logger().error("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        self._player.abort(AbortCause.EXCEPTION, repr(error))
        return True

    def close(self) -> None:
        """Nothing beyond the node itself."""


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable ``player_node``."""
    return run(PlayerNode, args)


if __name__ == "__main__":
    raise SystemExit(main())
