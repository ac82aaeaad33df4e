"""Everything of the policy node that lives from configure to cleanup.

Opening may fail at any line; whatever was made until then is released in reverse order, so that a failed configure
leaves nothing behind and a hundred cycles leak nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus, ChunkTiming
from rclpy.clock import Clock, JumpThreshold, TimeJump
from rclpy.clock_type import ClockType
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.timer import Timer
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from phyai_engine.config import ModelConfig, load_robot, resolve
from phyai_engine.errors import EngineRefusedError
from phyai_engine.handoff import HandoffSettings
from phyai_engine.safety import Safety
from phyai_engine.serve.client import EngineClient, EngineHello
from phyai_engine.timing import SimRate, TickMeter, Timing, mono_ns
from phyai_engine.types import F64, AbortCause, ActionType, SafetyState, Schedule
from phyai_engine.weights.checkpoint import model_and_notes
from phyai_ros import parameters
from phyai_ros.control_loop import ControlLoop, LoopSettings
from phyai_ros.convert import choose_decoder, controller_state_type, stamp_ns, to_stamp
from phyai_ros.diagnostics import Facts, chunk_timing, in_ms
from phyai_ros.inputs import SENSOR_QOS, Guard, Inputs
from phyai_ros.observation_buffer import ObservationBuffer
from phyai_ros.outputs import ChunksOutput, StepsOutput, TrajectoryOutput
from phyai_ros.player import Output, Player

COMMAND_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE)  # never transient_local: no old motion
LATCHED_QOS = QoSProfile(
    depth=1,
    reliability=ReliabilityPolicy.RELIABLE,
    durability=DurabilityPolicy.TRANSIENT_LOCAL,
)
COMMAND_TYPES = {
    "joint_trajectory": JointTrajectory,
    "float64_multi_array": Float64MultiArray,
    "joint_state": JointState,
}
OUTPUTS: dict[str, type[Any]] = {
    "steps": StepsOutput,
    "trajectory": TrajectoryOutput,
    "chunks": ChunksOutput,
}


class Session:
    """One configuration: robot, engine, buffer, player, publishers and subscriptions.

    :param safety: epoch and latch, which outlive a session; read back from ``player.safety``.
    :param guard: wraps every callback. :param give_up: true when the process was told to end while the engine starts.
    :param on_engine: called on the executor thread after the engine finished something.
    :param abort: stops the robot and latches, for the cause found here.
    :raises PhyaiError: a file, a parameter or the engine is wrong; everything is released.
    """

    def __init__(
        self,
        node: LifecycleNode,
        safety: Safety,
        *,
        guard: Guard,
        give_up: Callable[[], bool],
        on_engine: Callable[[], None],
        abort: Callable[[AbortCause, str], object],
        on_instruction: Callable[[str], None],
    ) -> None:
        self.publishing = False
        self._node, self._guard, self._abort = node, guard, abort
        self._publishers: dict[str, Any] = {}
        self._stack = ExitStack()
        self._timers: list[Timer] = []
        self._ticked_mono_ns = 0
        try:
            self._open(safety, give_up, on_engine, on_instruction)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.disable()
        self._stack.close()

    def activate(self, on_tick: Callable[[], None]) -> None:
        """Start a new epoch and the control tick.

        :raises LatchedError: the abort latch is set.
        """
        self.buffer.clear()
        self.loop.activate()
        self.jitter.reset()
        self.publishing = True
        # Under simulated time the tick follows /clock like the robot does; the abort path needs no timer.
        clock = self._node.get_clock() if self._simulated else Clock(clock_type=ClockType.STEADY_TIME)
        self._timers = [self._node.create_timer(self.robot.dt_s, self._guard(on_tick), clock=clock)]
        if self._simulated:  # a paused /clock must not leave a stop half published
            steady = Clock(clock_type=ClockType.STEADY_TIME)
            self._timers.append(
                self._node.create_timer(self.robot.dt_s, self._guard(self._keep_stopping), clock=steady)
            )

    def tick(self) -> None:
        """One control tick."""
        now, now_ros = mono_ns(), self.now_ros_ns()
        self._ticked_mono_ns = now
        self.jitter.tick(now)
        self.sim_rate.add(now_ros, now)
        self.loop.tick(now_ros)

    def _keep_stopping(self) -> None:
        """Steady time: goes on with a stop while the simulated clock stands still."""
        if mono_ns() - self._ticked_mono_ns > 2e9 * self.robot.dt_s and self.loop.player.stopping:
            self.loop.player.tick()

    def disable(self) -> None:
        """No publisher speaks and no tick runs. Done by hand: rclpy leaves publishers enabled in on_error."""
        self.publishing = False
        for timer in self._timers:
            self._node.destroy_timer(timer)
        self._timers = []

    def publish(self, key: str, message: Any) -> None:
        """The one publish path: nothing leaves while the node is not active."""
        if self.publishing:
            self._publishers[key].publish(message)

    def apply(self, params: parameters.NodeParameters) -> None:
        """Take over the parameters that may change while configured."""
        self.params = params
        self.loop.settings = replace(self.loop.settings, hold_max_s=params.max_hold_s)

    def facts(self, safety: Safety, lifecycle_id: int, lifecycle_label: str) -> Facts:
        """Everything a report says of this instant."""
        loop, client = self.loop, self.client
        notes = {
            **self.notes,
            "heartbeat_age_ms": in_ms(client.last_heartbeat_age_s()),
            "margins_unusable": self.sim_rate.reason,
            **{f"engine_{name}": str(n) for name, n in client.counters.items()},
        }
        faults = list(self.faults.values())
        if self.publishing and self.now_ros_ns() == 0:  # then no tick runs either, to refuse anything
            faults.append("there is no time yet: use_sim_time is set but nobody publishes /clock")
        return Facts(
            robot_id=self.robot.robot_id,
            lifecycle_id=lifecycle_id,
            lifecycle_label=lifecycle_label,
            safety=safety,
            placement=self.params.engine,
            schedule=self.params.schedule,
            counters=loop.counters,
            margins=loop.margins.percentiles(),
            inference=loop.inference.percentiles(),
            jitter=self.jitter.jitter(),
            ticks=loop.player.tick_count,
            cameras=self.buffer.camera_stats(mono_ns()),
            joints=self.buffer.joint_stats(mono_ns()),
            notes=notes,
            faults=tuple(faults),
        )

    def now_ros_ns(self) -> int:
        """The node's ROS time."""
        return int(self._node.get_clock().now().nanoseconds)

    def measured(self) -> F64:
        """[A] newest measured value of what each action drives, NaN where nothing fresh is measured."""
        return self.buffer.measured_actions(mono_ns())

    def _open(
        self,
        safety: Safety,
        give_up: Callable[[], bool],
        on_engine: Callable[[], None],
        on_instruction: Callable[[str], None],
    ) -> None:
        node = self._node
        self.params = params = parameters.read(node)
        robot_file = resolve("robots", params.robot)
        self.robot = robot = load_robot(robot_file)
        model, assumed = model_and_notes(params.model)
        for note in assumed:
            node.get_logger().warning(f"{params.model}: {note}")
        self._simulated = bool(node.get_parameter("use_sim_time").value)
        self.sim_rate = SimRate(self._simulated)
        self.jitter = TickMeter(robot.dt_s)
        decode, why = choose_decoder(params.decoder)
        self.buffer = ObservationBuffer(
            robot,
            accept_unstamped=params.accept_unstamped,
            frozen_frames=params.frozen_frames,
        )
        self.buffer.set_instruction(params.instruction)
        try:
            hello = self._start_engine(model, give_up, on_engine)
        except EngineRefusedError as error:  # only here are both files known
            raise EngineRefusedError(str(error), where=f"model {params.model}, robot {robot_file}") from error
        params.check_against(hello.horizon, robot.dt_s)
        warm_up = ", ".join(f"{t:.1f}" for t in hello.warm_up_ms)
        self.notes = {"decoder": why, "model": hello.note, "warm_up_ms": warm_up}
        node.get_logger().info(f"engine ready ({params.engine}): {hello.note}; warm-up {warm_up} ms; {why}")
        self._make_publishers(hello.horizon)
        output = self._make_output()
        self._make_loop(safety, hello, output)
        inputs = Inputs(
            node,
            robot,
            self.buffer,
            decode,
            guard=self._guard,
            active=lambda: self.publishing,
            on_instruction=on_instruction,
            on_jump=partial(self._abort, AbortCause.CLOCK_JUMP),
        )
        self.faults = inputs.faults
        self._stack.callback(inputs.destroy)
        # The handle must stay alive: the callback dies with it.
        threshold = JumpThreshold(
            min_forward=None,
            min_backward=Duration(nanoseconds=-1),
            on_clock_change=True,
        )
        jumps = node.get_clock().create_jump_callback(threshold, post_callback=self._jumped)
        self._stack.callback(jumps.unregister)

    def _start_engine(
        self, model: ModelConfig, give_up: Callable[[], bool], on_engine: Callable[[], None]
    ) -> EngineHello:
        node, params, log = self._node, self.params, self._node.get_logger()
        signal = node.create_guard_condition(self._guard(on_engine))
        self._stack.callback(node.destroy_guard_condition, signal)
        self.client = EngineClient(
            self.robot,
            model,
            params.engine,  # type: ignore[arg-type]  # its choices are checked by the table
            on_event=signal.trigger,
            start_timeout_s=params.engine_start_timeout_s,
            heartbeat_timeout_s=params.engine_heartbeat_s,
            threads=params.engine_threads,
            warm_up_count=params.warm_up_count,
        )
        self._stack.callback(self.client.stop)
        return self.client.start(lambda phase: log.info(f"engine: {phase}"), give_up=give_up)

    def _jumped(self, jump: TimeJump) -> None:
        reason = f"the ROS clock jumped by {jump.delta.nanoseconds * 1e-9:.3f} s"
        self._guard(partial(self._abort, AbortCause.CLOCK_JUMP, reason))()

    def _make_publishers(self, horizon: int) -> None:
        robot = self.robot
        wanted: dict[str, tuple[type[Any], str]] = {"timing": (ChunkTiming, "~/timing")}
        if self.params.output == "steps":
            wanted["step"] = (ActionStep, "~/step")
            if robot.command.interface != "none":
                wanted["command"] = (
                    COMMAND_TYPES[robot.command.interface],
                    robot.command.topic,
                )
        elif self.params.output == "trajectory":
            wanted["trajectory"] = (JointTrajectory, robot.trajectory_topic)
        else:
            wanted["chunk"] = (ActionChunk, "~/chunk")
        for key, (kind, topic) in wanted.items():
            qos = QoSProfile(depth=10) if key == "timing" else COMMAND_QOS
            if key == "chunk":  # a chunk that was not delivered while it is valid must never be
                qos = QoSProfile(
                    depth=1, reliability=ReliabilityPolicy.RELIABLE, lifespan=Duration(seconds=horizon * robot.dt_s)
                )
            publisher = self._node.create_lifecycle_publisher(kind, topic, qos)
            self._publishers[key] = publisher
            self._stack.callback(self._node.destroy_lifecycle_publisher, publisher)

    def _make_output(self) -> Output:
        output: Output = OUTPUTS[self.params.output](self.robot, self.publish, self.now_ros_ns)
        if isinstance(output, TrajectoryOutput):
            follow = output.on_controller_state
            kind = controller_state_type()
            self._listen(kind, self.robot.controller_state_topic, lambda m: follow(stamp_ns(m.header.stamp)))
        elif isinstance(output, ChunksOutput):
            self._listen(ChunkStatus, "~/chunk_status", partial(self._acknowledged, output))
        return output

    def _acknowledged(self, output: ChunksOutput, message: ChunkStatus) -> None:
        output.on_status(message)
        state, ours = message.safety_state, self.loop.player.safety.epoch
        # Our own stop leaves the player STOPPING in our epoch, never LATCHED: a latch is its own.
        if (state == SafetyState.LATCHED and message.epoch >= ours) or (
            state == SafetyState.STOPPING and message.epoch > ours
        ):
            self._abort(AbortCause.SERVICE, message.text or "the player node latched")

    def _listen(self, kind: type[Any], topic: str, callback: Callable[[Any], None]) -> None:
        subscription = self._node.create_subscription(kind, topic, self._guard(callback), SENSOR_QOS)
        self._stack.callback(self._node.destroy_subscription, subscription)

    def _make_loop(self, safety: Safety, hello: EngineHello, output: Output) -> None:
        params, robot, horizon = self.params, self.robot, hello.horizon
        schedule = Schedule(params.schedule)
        settings = HandoffSettings(
            schedule=schedule,
            horizon=horizon,
            execution_steps=params.execution_horizon or max(1, horizon // 2),
            dt_s=robot.dt_s,
            delay_init_steps=params.delay_init_steps or _warm_delay(hello, robot.dt_s),
            delay_window=params.delay_window,
        )
        player = Player(
            robot,
            settings,
            safety,
            output,
            self.measured if robot.kind is ActionType.JOINT_POSITION else lambda: None,
            stop_hold_steps=params.stop_hold_steps,
            clamp=params.envelope == "clamp",
        )
        self.loop = ControlLoop(
            LoopSettings(
                dt_s=robot.dt_s,
                schedule=schedule,
                seed=params.seed,
                request_timeout_s=params.request_timeout_s,
                hold_max_s=params.max_hold_s,
            ),
            self.buffer.snapshot,
            self.client,
            player,
            mono_ns,
            self._report,
            lambda: self.sim_rate.reason,
            self._refused,
        )

    def _refused(self, text: str) -> None:
        self._node.get_logger().warning(f"refused: {text}", throttle_duration_sec=2.0)

    def _report(self, timing: Timing) -> None:
        self.publish(
            "timing",
            chunk_timing(timing, self.robot.robot_id, to_stamp(self.now_ros_ns())),
        )


def _warm_delay(hello: EngineHello, dt_s: float) -> int:
    """Steps the median warm-up inference takes, and one more for what lies outside the model; at most half a chunk."""
    steps = math.ceil(float(np.median(hello.warm_up_ms)) * 1e-3 / dt_s) + 1
    return min(steps, hello.horizon // 2)
