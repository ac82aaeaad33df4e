"""A player beside the controller: plays ActionChunks of a policy node elsewhere, with the same code and no torch.

It obeys PolicyStatus: a newer epoch in which the robot may not move stops it at once, and so does silence. The last
writer checks the epoch here, where the command leaves. It has a latch of its own, with the policy node's ways into it
(``~/abort``, fleet stop, signals, exceptions, a late tick) and one more: its policy node is silent. Only a re-arm of
the policy node, which latches with it, leads out.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from phyai_policy.msg import ActionChunk, ChunkStatus, PolicyStatus
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_srvs.srv import Trigger

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.control.observation_buffer import ObservationBuffer
from phyai_engine.control.player import Player
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.handoff import HandoffSettings
from phyai_engine.messages import stamp_ns
from phyai_engine.safety import Safety
from phyai_engine.timing import mono_ns
from phyai_engine.types import F64, AbortCause, Chunk, Refusal, SafetyState, Schedule, StageTimings
from phyai_engine.watchdog import Watchdogs, WatchdogSettings, late_tick
from phyai_ros import parameters
from phyai_ros.convert import to_stamp
from phyai_ros.fleet_stop import FleetStop
from phyai_ros.inputs import JointInputs
from phyai_ros.outputs import StepsOutput
from phyai_ros.parameters import PLAYER_TABLE
from phyai_ros.spin import StopFlag, guarded, run
from phyai_ros.ticker import Sentry, Ticker
from phyai_ros.topics import COMMAND_QOS, LATCHED_QOS, command_topics

MOVING = (SafetyState.ARMED, SafetyState.RUNNING, SafetyState.HOLDING)
# As it is published, but deeper: a latch and the re-arm after it may be said between two turns of this node.
STATUS_QOS = QoSProfile(depth=10, reliability=LATCHED_QOS.reliability, durability=LATCHED_QOS.durability)


class PlayerNode(Node):
    """Plays the chunks of one policy node.

    Its parameters are ``parameters.PLAYER_TABLE``. With ``use_sim_time`` it ticks on /clock, as the policy node does.
    """

    def __init__(
        self,
        stop_flag: StopFlag | None = None,
        *,
        name: str = "player_node",
        **kwargs: Any,
    ) -> None:
        super().__init__(name, **kwargs)
        parameters.declare(self, PLAYER_TABLE)
        given = {row.name: self.get_parameter(row.name).value for row in PLAYER_TABLE}
        if not given["robot"]:
            raise ConfigError("parameter robot is empty", where="player_node", do="Give the policy node's robot file.")
        self._robot = robot = load_robot(resolve("robots", given["robot"]))
        self._guarded = partial(guarded, self.on_spin_error)
        self._status_timeout_ns = round(given["status_timeout_s"] * 1e9)
        self._flag = stop_flag if stop_flag is not None else StopFlag()
        self._heard_ns = self._turned_ns = 0
        self._latch = mono_ns()  # a number for the newest latch of its own; a restarted player has others
        self._was_latched = False
        self._accepted_at = to_stamp(0)
        self._buffer = ObservationBuffer(robot)
        self._outputs = {
            key: self.create_publisher(kind, topic, qos)
            for key, (kind, topic, qos) in command_topics(robot, "steps").items()
        }
        self._player = self._make_player(robot, given["stop_hold_steps"])
        self._tick_limit_s = Watchdogs(WatchdogSettings(tick_gap_s=given["max_tick_gap_s"])).tick_limit_s(robot.dt_s)
        self._sentry = Sentry(self._player, robot.dt_s, self._tick_limit_s, self._player.abort, self._report_playing)
        self._lock = self._sentry.lock
        policy = given["policy"]
        self._acknowledge = self.create_publisher(ChunkStatus, f"{policy}/chunk_status", QoSProfile(depth=5))
        self.create_subscription(ActionChunk, f"{policy}/chunk", self._guarded(self._on_chunk), COMMAND_QOS)
        self.create_subscription(PolicyStatus, f"{policy}/status", self._guarded(self._on_status), STATUS_QOS)
        self._joints = JointInputs(
            self, robot, self._buffer, self._guarded, active=lambda: True, on_jump=lambda reason: None
        )
        self.create_service(Trigger, "~/abort", self._guarded(self._on_abort))
        on_stop = partial(self._abort, AbortCause.FLEET_STOP)
        self._fleet_stop = FleetStop(self, given["fleet_stop_topic"], self._guarded, on_stop)
        self._ticker = Ticker(
            self,
            robot.dt_s,
            self._guarded,
            simulated=bool(self.get_parameter("use_sim_time").value),
            sentry=self._sentry,
            player=self._player,
            on_tick=self._on_tick,
            on_beat=self._check_policy,
        )

    def _make_player(self, robot: RobotConfig, stop_hold_steps: int) -> Player:
        return Player(
            robot,
            # The horizon is each chunk's.
            HandoffSettings(Schedule.NAIVE_ASYNC, horizon=1, execution_steps=1, dt_s=robot.dt_s),
            Safety(epoch=0),
            StepsOutput(
                robot,
                lambda key, message: self._outputs[key].publish(message),
                self._now_ros_ns,
            ),
            self._measured,
            stop_hold_steps=stop_hold_steps,
        )

    def _on_tick(self) -> None:
        self._check_policy()
        with self._lock:
            self._player.tick()
        self._report_playing()

    def _check_policy(self) -> None:
        """Steady time, also while /clock stands still: the policy node's status does not follow /clock either.

        The sentry sees no late tick where the whole process was frozen and this thread is the first to go on.
        """
        now = mono_ns()
        gap_s, self._turned_ns = (now - self._turned_ns) * 1e-9, now
        if not self._player.safety.may_play:
            return
        if 0 < self._tick_limit_s < gap_s:
            self._abort(AbortCause.TICK_OVERRUN, late_tick(gap_s, self._tick_limit_s))
        elif now - self._heard_ns > self._status_timeout_ns:
            silence = self._status_timeout_ns * 1e-9
            self._abort(AbortCause.POLICY_LOST, f"no PolicyStatus for {silence:.3f} s (status_timeout_s)")

    def _abort(self, cause: AbortCause, text: str) -> bool:
        """Stop and latch; True if newly latched."""
        with self._lock:
            newly = self._player.abort(cause, text)
        if newly:
            self._report_playing()
            self.get_logger().error(f"abort latched ({cause.name.lower()}): {text}")
        return newly

    def _on_status(self, message: PolicyStatus) -> None:
        if message.robot_id and message.robot_id != self._robot.robot_id:
            self.get_logger().error(
                f"policy drives robot {message.robot_id!r}, this player {self._robot.robot_id!r}: not obeyed",
                throttle_duration_sec=2.0,
            )
            return
        self._heard_ns = mono_ns()
        playing = SafetyState(message.safety_state) in MOVING
        with self._lock:
            rearmed = message.player_latch == self._number_latch()
            if playing and (self._fleet_stop.stopped or self._flag):
                self._latch += rearmed  # a re-arm against the fleet's word is void, also once the fleet says go
                return
            self._player.follow(message.epoch, playing, rearmed=rearmed)
            self._number_latch()

    def _number_latch(self) -> int:
        """Number of the newest latch of its own; it may have been set on the sentry's thread. The lock is held."""
        latched = self._player.safety.latched
        self._latch += latched and not self._was_latched
        self._was_latched = latched
        return self._latch

    def _on_chunk(self, message: ActionChunk) -> None:
        try:
            chunk = self._read(message)
            with self._lock:
                self._take(message, chunk)
        except RefusalError as error:
            self._report(message.epoch, message.chunk_id, refusal=error.code, text=str(error))
            self.get_logger().warning(f"chunk {message.chunk_id}: {error}", throttle_duration_sec=1.0)
            return
        self._accepted_at = to_stamp(self._now_ros_ns())
        self._report(chunk.epoch, chunk.chunk_id)

    def _take(self, message: ActionChunk, chunk: Chunk) -> None:
        player = self._player
        if message.epoch != player.safety.epoch:
            raise RefusalError(Refusal.WRONG_EPOCH, "another epoch", got=message.epoch, wanted=player.safety.epoch)
        self._check_validity(message)
        self._fit_horizon(len(chunk.actions), message.execution_horizon)
        now = mono_ns()
        player.handoff = player.handoff.expect(chunk.chunk_id, chunk.epoch, message.base_step, now)
        player.accept(chunk, now)

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
        """Every chunk brings its own: fewer rows while the robot waits for each. What plays keeps its end."""
        handoff = self._player.handoff
        steps = max(1, min(execution_steps, horizon))
        settings = HandoffSettings(Schedule.NAIVE_ASYNC, horizon, steps, self._robot.dt_s)
        self._player.handoff = replace(handoff, settings=settings)

    def _on_abort(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        newly = self._abort(AbortCause.SERVICE, "~/abort of the player was called")
        response.success = True
        response.message = f"abort latched, stop: {self._player.stop_sent}" if newly else "already latched"
        return response

    def _measured(self) -> F64:
        return self._buffer.measured_actions(mono_ns())

    def _now_ros_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _report_playing(self) -> None:
        """What is being played; also from the sentry's thread."""
        playing = self._player.handoff.playing
        if playing is not None:
            self._report(playing.epoch, playing.chunk_id, step=max(playing.first_row, playing.next_row - 1))
        else:
            self._report(self._player.safety.epoch, 0)

    def _report(
        self,
        epoch: int,
        chunk_id: int,
        *,
        step: int = 0,
        refusal: Refusal = Refusal.NONE,
        text: str = "",
    ) -> None:
        with self._lock:
            safety, latch = self._player.safety, self._number_latch()
        message = ChunkStatus(
            robot_id=self._robot.robot_id,
            epoch=epoch,
            chunk_id=chunk_id,
            step=step,
            consumed_steps=self._player.handoff.consumed,
            accepted=refusal is Refusal.NONE,
            refusal=int(refusal),
            text=text or safety.text,
            safety_state=int(safety.state),
            abort_cause=int(safety.cause),
            latch=latch if safety.latched else 0,
        )
        message.header.stamp = to_stamp(self._now_ros_ns())
        if message.accepted:
            message.accepted_at = self._accepted_at
        self._acknowledge.publish(message)

    def on_signal(self, name: str) -> None:
        """Stop the robot, paced by the control period."""
        self._abort(AbortCause.SIGNAL, f"{name} received")
        with self._lock:
            self._player.finish_stop()

    def on_spin_error(self, error: Exception) -> bool:
        """A callback raised: stop and latch, go on."""
        self._abort(AbortCause.EXCEPTION, repr(error))
        self.get_logger().error("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        return True

    def close(self) -> None:
        """End the ticks and the sentry."""
        self._ticker.close()


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable ``player_node``."""
    return run(PlayerNode, args)


if __name__ == "__main__":
    raise SystemExit(main())
