"""Everything of the policy node that lives from configure to cleanup.

Opening may fail at any line; whatever was made until then is released in reverse order, so that a failed configure
leaves nothing behind and a hundred cycles leak nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from phyai_policy.msg import ChunkStatus, ChunkTiming
from rclpy.clock import JumpThreshold, TimeJump
from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile

from phyai_engine.config import ModelConfig, RobotConfig, load_robot, resolve
from phyai_engine.control.commands import Output
from phyai_engine.control.control_loop import ControlLoop, LoopSettings
from phyai_engine.control.observation_buffer import ObservationBuffer
from phyai_engine.control.player import Player
from phyai_engine.errors import EngineRefusedError
from phyai_engine.handoff import Fallback, HandoffSettings, assumed_delay_steps
from phyai_engine.messages import stamp_ns
from phyai_engine.policy import arrival_size
from phyai_engine.safety import Safety
from phyai_engine.serve.client import EngineClient, EngineHello
from phyai_engine.timing import SimRate, TickMeter, Timing, mono_ns
from phyai_engine.transforms.image import fitted_on_arrival
from phyai_engine.types import F64, AbortCause, Schedule
from phyai_engine.watchdog import Watchdogs
from phyai_ros import parameters
from phyai_ros.convert import choose_decoder, controller_state_type, to_stamp
from phyai_ros.diagnostics import Facts, chunk_timing
from phyai_ros.engine import Engine, client_of, model_of
from phyai_ros.inputs import Inputs
from phyai_ros.outputs import ACKNOWLEDGE_S, ChunksOutput, StepsOutput, TrajectoryOutput
from phyai_ros.recording import Recording
from phyai_ros.spin import Guard
from phyai_ros.ticker import Sentry, Ticker
from phyai_ros.topics import SENSOR_QOS, command_topics

OUTPUTS: dict[str, type[Any]] = {
    "steps": StepsOutput,
    "trajectory": TrajectoryOutput,
    "chunks": ChunksOutput,
}


class Session:
    """One configuration: robot, engine, buffer, player, publishers and subscriptions.

    :param safety: epoch and latch, which outlive a session; read back from ``player.safety``.
    :param kept: the robot of the session before and its last command: a gripper that is stopped keeps its value.
    :param guard: wraps every callback. :param give_up: true when the process was told to end while the engine starts.
    :param on_engine: called on the executor thread after the engine finished something.
    :param abort: stops the robot and latches, for the cause found here.
    :param on_stuck: called by the sentry's thread after it stopped the robot.
    :raises PhyaiError: a file, a parameter or the engine is wrong; everything is released.
    """

    def __init__(
        self,
        node: LifecycleNode,
        safety: Safety,
        kept: tuple[RobotConfig, F64 | None] | None,
        *,
        guard: Guard,
        give_up: Callable[[], bool],
        on_engine: Callable[[], None],
        abort: Callable[[AbortCause, str], object],
        on_stuck: Callable[[], None],
        on_instruction: Callable[[str], None],
    ) -> None:
        self.publishing = False
        self._node, self._guard, self._abort = node, guard, abort
        self._publishers: dict[str, Any] = {}
        self._stack = ExitStack()
        self._ticker: Ticker | None = None
        self._give_up, self._on_stuck = give_up, on_stuck
        self._refusal = ""  # not logged yet
        self._fallback = Fallback.NONE  # as logged last
        self._player_consumed = 0  # as the player elsewhere last said, as the next
        self.player_latch = 0
        self.recording: Recording | None = None
        try:
            self._open(safety, kept, on_engine, on_instruction)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.disable()
        self._stack.close()

    def activate(self, on_tick: Callable[[], None], on_beat: Callable[[], None]) -> None:
        """Start a new epoch and the control tick.

        :param on_beat: called on steady time beside it where time is simulated.
        :raises LatchedError: the abort latch is set.
        """
        self.buffer.clear()
        with self.lock:
            self.loop.activate()
        self.jitter.reset()
        self.publishing = True
        if self.recording is not None:
            self.recording.activate(True)
        # Under simulated time the tick follows /clock like the robot does; the abort path needs no timer.
        self._ticker = Ticker(
            self._node,
            self.robot.dt_s,
            self._guard,
            simulated=self._simulated,
            sentry=self._sentry,
            player=self.loop.player,
            on_tick=on_tick,
            on_beat=on_beat,
        )

    @property
    def lock(self) -> Any:
        """Whoever uses the loop or its player holds it; a log line, which may block, is written without it."""
        return self._sentry.lock

    def tick(self) -> None:
        """One control tick."""
        now, now_ros = mono_ns(), self.now_ros_ns()
        self.jitter.tick(now)
        self.sim_rate.add(now_ros, now)
        with self.lock:
            self.loop.tick(now_ros)
        self._log_refusal()
        self._log_fallback()

    def on_events(self) -> None:
        """The engine finished something."""
        with self.lock:
            self.loop.on_events()
        self._log_refusal()

    def abort(self, cause: AbortCause, text: str) -> bool:
        """Stop now. True if the latch was newly set."""
        with self.lock:
            return self.loop.abort(cause, text)

    def stop(self) -> None:
        """The whole controlled stop of a deactivation, then silence. Bounded by the stop plan."""
        with self.lock:
            self.loop.stop()
        self.finish_stop()
        self.disable()
        with self.lock:
            self.loop.player.deactivate()
        self.buffer.clear()

    def finish_stop(self) -> None:
        """Publish what remains of a stop, paced by the control period."""
        with self.lock:
            self.loop.player.finish_stop()

    def rearm(self) -> None:
        """Clear the latch.

        :raises RefusalError: the observation is not fresh.
        """
        self._sentry.beat()  # this thread may come from the restart of an engine
        with self.lock:
            self.loop.rearm(self.now_ros_ns(), active=self.publishing)

    def flush(self) -> None:
        """A new epoch for a new instruction."""
        with self.lock:
            self.loop.flush()

    def beat(self) -> None:
        """A turn on steady time, which goes on while /clock stands still."""
        with self.lock:
            self.loop.beat()

    def disable(self) -> None:
        """No publisher speaks and no tick runs. Done by hand: rclpy leaves publishers enabled in on_error."""
        if self.publishing and self.recording is not None:
            self.recording.activate(False)
        self.publishing = False
        ticker, self._ticker = self._ticker, None
        if ticker is not None:
            ticker.close()

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
        loop, handoff = self.loop, self.loop.player.handoff
        notes = {
            **self.notes,
            **self._engine.notes,
            **({} if self.recording is None else self.recording.notes()),
            "margins_unusable": self.sim_rate.reason,
            "stop_sent": loop.player.stop_sent,
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
            fallback=handoff.fallback,
            fallback_text=handoff.fallback_text,
            windows=loop.windows,
            jitter=self.jitter.jitter(),
            ticks=loop.player.tick_count,
            cameras=self.buffer.camera_stats(mono_ns()),
            joints=self.buffer.joint_stats(mono_ns()),
            player_latch=self.player_latch,
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
        kept: tuple[RobotConfig, F64 | None] | None,
        on_engine: Callable[[], None],
        on_instruction: Callable[[str], None],
    ) -> None:
        node = self._node
        self.params = params = parameters.read(node)
        robot_file = resolve("robots", params.robot)
        self.robot = robot = load_robot(robot_file)
        model, assumed = model_of(params)
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
            on_arrival=fitted_on_arrival(robot, arrival_size(model)) if params.resize_images == "arrival" else None,
        )
        self.buffer.set_instruction(params.instruction)
        try:
            hello = self._start_engine(model, on_engine)
        except EngineRefusedError as error:  # only here are both files known
            raise EngineRefusedError(str(error), where=f"model {params.model}, robot {robot_file}") from error
        params.check_against(hello.horizon, robot.dt_s)
        warm_up = ", ".join(f"{t:.1f}" for t in hello.warm_up_ms)
        self.notes = {"decoder": why, "model": hello.note, "warm_up_ms": warm_up}
        node.get_logger().info(f"engine ready ({params.engine}): {hello.note}; warm-up {warm_up} ms; {why}")
        self._make_publishers(command_topics(robot, params.output, hello.horizon))
        output = self._make_output()
        # Another robot, or other columns: the values mean something else there.
        same = kept and (kept[0].robot_id, kept[0].action_names) == (robot.robot_id, robot.action_names)
        self._make_loop(safety, kept[1] if kept and same else None, hello, output)
        inputs = Inputs(
            node,
            robot,
            self.buffer,
            decode,
            self._guard,
            active=lambda: self.publishing,
            on_instruction=on_instruction,
            on_jump=partial(self._abort, AbortCause.CLOCK_JUMP),
        )
        self.faults = inputs.faults
        self._stack.callback(inputs.destroy)
        if params.record:
            self._record(robot_file, model, inputs)
        # The handle must stay alive: the callback dies with it.
        threshold = JumpThreshold(
            min_forward=None,
            min_backward=Duration(nanoseconds=-1),
            on_clock_change=True,
        )
        jumps = node.get_clock().create_jump_callback(threshold, post_callback=self._jumped)
        self._stack.callback(jumps.unregister)

    def _record(self, robot_file: Path, model: ModelConfig, inputs: Inputs) -> None:
        self.recording = recording = Recording(
            self._node,
            self.params,
            self.robot,
            robot_file,
            model,
            inputs=inputs.topics,
            published={p.topic_name: p.msg_type for p in self._publishers.values()},
            give_up=self._give_up,
        )
        self._stack.callback(recording.close)
        self._engine.asked, self._engine.answered = recording.asked, recording.answered

    def _start_engine(self, model: ModelConfig, on_engine: Callable[[], None]) -> EngineHello:
        node, params, log = self._node, self.params, self._node.get_logger()
        signal = node.create_guard_condition(self._guard(on_engine))
        self._stack.callback(node.destroy_guard_condition, signal)
        make = partial(client_of, self.robot, model, params, node.get_namespace(), signal.trigger)
        self._engine = Engine(make, lambda phase: log.info(f"engine: {phase}"), self._give_up)
        self._stack.callback(self._engine.stop)
        return self._engine.start()

    @property
    def client(self) -> EngineClient:
        """The engine that answers now."""
        return self._engine.client

    def restart_engine(self) -> str:
        """Another engine process; see :meth:`Engine.restart`. The robot may not move: latched or not active."""
        return self._engine.restart(self.params.engine_start_timeout_s)

    def _jumped(self, jump: TimeJump) -> None:
        reason = f"the ROS clock jumped by {jump.delta.nanoseconds * 1e-9:.3f} s"
        self._guard(partial(self._abort, AbortCause.CLOCK_JUMP, reason))()

    def _make_publishers(self, topics: dict[str, tuple[type[Any], str, QoSProfile]]) -> None:
        topics = {**topics, "timing": (ChunkTiming, "~/timing", QoSProfile(depth=10))}
        for key, (kind, topic, qos) in topics.items():
            publisher = self._node.create_lifecycle_publisher(kind, topic, qos)
            self._publishers[key] = publisher
            self._stack.callback(self._node.destroy_lifecycle_publisher, publisher)

    def _make_output(self) -> Output:
        output: Output = OUTPUTS[self.params.output](self.robot, self.publish, self.now_ros_ns)
        if isinstance(output, TrajectoryOutput):
            follow = partial(self._follow, output)
            self._listen(controller_state_type(), self.robot.controller_state_topic, follow)
        elif isinstance(output, ChunksOutput):
            self._listen(ChunkStatus, "~/chunk_status", partial(self._acknowledged, output))
        return output

    def _follow(self, output: TrajectoryOutput, message: Any) -> None:
        with self.lock:
            output.on_controller_state(stamp_ns(message.header.stamp))

    def _acknowledged(self, output: ChunksOutput, message: ChunkStatus) -> None:
        with self.lock:
            output.on_status(message)
            safety = self.loop.player.safety
        restarted, self._player_consumed = message.consumed_steps < self._player_consumed, message.consumed_steps
        if message.latch not in (0, self.player_latch):
            self.player_latch = message.latch
            cause = AbortCause(message.abort_cause) or AbortCause.SERVICE
            self._abort(cause, f"the player node: {message.text or 'latched'}")
        elif restarted and safety.may_play:  # it would move the robot again, and nobody asked for that
            self._abort(AbortCause.PLAYER_LOST, "the player node restarted")

    def _listen(self, kind: type[Any], topic: str, callback: Callable[[Any], None]) -> None:
        subscription = self._node.create_subscription(kind, topic, self._guard(callback), SENSOR_QOS)
        self._stack.callback(self._node.destroy_subscription, subscription)

    def _make_loop(self, safety: Safety, kept: F64 | None, hello: EngineHello, output: Output) -> None:
        params, robot, horizon = self.params, self.robot, hello.horizon
        schedule = Schedule(params.schedule)
        settings = HandoffSettings(
            schedule=schedule,
            horizon=horizon,
            execution_steps=params.execution_horizon or max(1, horizon // 2),
            dt_s=robot.dt_s,
            delay_slack_steps=params.delay_slack_steps,
            delay_init_steps=params.delay_init_steps or assumed_delay_steps(hello.warm_up_ms, horizon, robot.dt_s),
            delay_window=params.delay_window,
            delay_limit_steps=hello.rtc_max_delay,
        )
        player = Player(
            robot,
            settings,
            safety,
            output,
            self.measured,
            stop_hold_steps=params.stop_hold_steps,
            clamp=params.envelope == "clamp",
            kept=kept,
        )
        self.loop = ControlLoop(
            LoopSettings(
                dt_s=robot.dt_s,
                schedule=schedule,
                seed=params.seed,
                simulated=self._simulated,
                acknowledge_s=ACKNOWLEDGE_S,
                tick_gap_s=params.max_tick_gap_s,
                request_timeout_s=params.request_timeout_s,
                observation_age_s=params.max_observation_age_s,
                player_timeout_s=0.0 if output.ticks else params.player_timeout_s,
                misses_max=params.max_misses,
                hold_max_s=params.max_hold_s,
            ),
            self.buffer.snapshot,
            self._engine,
            player,
            mono_ns,
            self._report,
            lambda: self.sim_rate.reason,
            self._refused,
        )
        limit_s = Watchdogs(self.loop.settings).tick_limit_s(robot.dt_s)
        self._sentry = Sentry(player, robot.dt_s, limit_s, self.loop.abort, self._on_stuck)

    def _refused(self, text: str) -> None:
        self._refusal = text

    def _log_refusal(self) -> None:
        text, self._refusal = self._refusal, ""
        if text:
            self._node.get_logger().warning(f"refused: {text}", throttle_duration_sec=2.0)

    def _log_fallback(self) -> None:
        handoff = self.loop.player.handoff
        if handoff.fallback is self._fallback:
            return
        self._fallback = handoff.fallback
        text = f"falls back to {handoff.fallback.value}: {handoff.fallback_text}"
        if handoff.fallback is Fallback.NONE:
            text = "runs as configured again"
        self._node.get_logger().warning(f"schedule {self.params.schedule} {text}")

    def _report(self, timing: Timing) -> None:
        self.publish(
            "timing",
            chunk_timing(timing, self.robot.robot_id, to_stamp(self.now_ros_ns())),
        )
