"""The lifecycle node: transitions, services, reports.

configure loads the engine and warms it up (this node's services wait meanwhile; nothing moves before activate),
activate takes milliseconds, deactivate stops the robot before publishers are disabled, and ``~/abort`` works in every
state. All callbacks run on one SingleThreadedExecutor thread; inference runs elsewhere, behind EngineClient.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from phyai_policy.msg import PolicyStatus
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile
from rclpy.timer import Timer
from std_srvs.srv import Trigger

from phyai_engine.config import RobotConfig
from phyai_engine.control.control_loop import headline
from phyai_engine.errors import EngineError, PhyaiError, RefusalError
from phyai_engine.safety import Safety
from phyai_engine.timing import mono_ns
from phyai_engine.types import F64, AbortCause
from phyai_ros import diagnostics, parameters
from phyai_ros.fleet_stop import FleetStop
from phyai_ros.session import Session
from phyai_ros.spin import StopFlag, guarded, run
from phyai_ros.topics import LATCHED_QOS

SUCCESS, FAILURE, ERROR = (
    TransitionCallbackReturn.SUCCESS,
    TransitionCallbackReturn.FAILURE,
    TransitionCallbackReturn.ERROR,
)


class PolicyNode(LifecycleNode):
    """Drives one robot with one policy.

    :param stop_flag: true once the process was asked to end; a configure in progress then gives up.
    """

    def __init__(
        self,
        stop_flag: StopFlag | None = None,
        *,
        name: str = "policy_node",
        **kwargs: Any,
    ) -> None:
        super().__init__(name, **kwargs)
        for problem in parameters.declare(self):
            self.get_logger().warning(problem)
        self._flag = stop_flag if stop_flag is not None else StopFlag()
        # The epoch starts at wall-clock ns: a restarted node can never reuse a number of its former life.
        self._idle_safety = Safety(epoch=time.time_ns())
        self._session: Session | None = None
        self._kept: tuple[RobotConfig, F64 | None] | None = None  # the robot of the session before, its last command
        self._guarded = partial(guarded, self.on_spin_error)
        self._last_error = ""
        self._diagnostics_due_ns = 0
        self._announced = False  # the latch, to log and /diagnostics
        self._stop_cause = AbortCause.NONE  # of a stop without a latch
        self._status = self.create_publisher(PolicyStatus, "~/status", LATCHED_QOS)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", QoSProfile(depth=1))
        self.create_service(Trigger, "~/abort", self._guarded(self._on_abort))
        self.create_service(Trigger, "~/rearm", self._guarded(self._on_rearm))
        self.create_service(Trigger, "~/restart_engine", self._guarded(self._on_restart_engine))
        self._fleet_stop = self._listen_to_the_fleet()
        parameters.watch(
            self,
            lambda: None if self._session is None else self._session.params,
            self._apply,
        )
        self._report_timer = self._start_reports()
        self._report()

    def _start_reports(self) -> Timer:
        self._diagnostics_period_ns = round(1e9 / self.get_parameter("diagnostics_rate_hz").value)
        period = 1.0 / self.get_parameter("status_rate_hz").value
        return self.create_timer(period, self._guarded(self._report), clock=Clock(clock_type=ClockType.STEADY_TIME))

    def _listen_to_the_fleet(self) -> FleetStop:
        topic = self.get_parameter("fleet_stop_topic").value
        return FleetStop(self, topic, self._guarded, partial(self._abort, AbortCause.FLEET_STOP))

    # ---- transitions ----------------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        def configure() -> None:
            self.destroy_timer(self._report_timer)
            self._report_timer = self._start_reports()
            if self._fleet_stop.topic != self.get_parameter("fleet_stop_topic").value:
                before, self._fleet_stop = self._fleet_stop, self._listen_to_the_fleet()
                before.close()  # last: where the new topic is no name, the old one is still heard
            self._session = Session(
                self,
                self._idle_safety,
                self._kept,
                guard=self._guarded,
                give_up=lambda: bool(self._flag),
                on_engine=self._on_engine,
                abort=self._abort,
                on_stuck=self._report_latch,
                on_instruction=self._set_instruction,
            )

        return self._transition("configure", configure)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        def activate() -> None:
            if self._flag:
                raise PhyaiError("the process is ending", got=self._flag.name)
            self._configured().activate(self._on_tick, self._on_beat)
            self._stop_cause = AbortCause.NONE
            super(PolicyNode, self).on_activate(state)  # enables the publishers; no tick runs before we return

        return self._transition("activate", activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        def deactivate() -> None:
            self._stop_robot()
            super(PolicyNode, self).on_deactivate(state)

        return self._transition("deactivate", deactivate)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._transition("cleanup", self._release)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        def shutdown() -> None:
            self._stop_robot()
            self._release()

        return self._transition("shutdown", shutdown)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured with everything released; finalized would be a dead node."""
        self.get_logger().error(f"error processing after: {self._last_error}")
        return self._transition("error processing", self._release)

    def _transition(self, name: str, work: Callable[[], None]) -> TransitionCallbackReturn:
        """Run one transition; rclpy swallows exceptions of transition callbacks, so they are logged here.

        A PhyaiError is the user's to mend: FAILURE, the node stays in the state before. Anything else: ERROR, after a
        stop, and on_error releases everything.
        """
        began = mono_ns()
        try:
            work()
        except PhyaiError as error:
            self._last_error = f"{name}: {error}"
            self.get_logger().error(self._last_error)
            if self._session is not None:
                self._session.disable()
            result = FAILURE
        except Exception as error:
            self._last_error = f"{name}: {error!r}"
            self.get_logger().error(f"{name} raised:\n{traceback.format_exc()}")
            self._abort(AbortCause.EXCEPTION, self._last_error)
            if self._session is not None:
                self._session.finish_stop()
                self._session.disable()
            result = ERROR
        else:
            self.get_logger().info(f"{name} took {(mono_ns() - began) * 1e-6:.1f} ms")
            result = SUCCESS
        self._report()
        return result

    def _configured(self) -> Session:
        if self._session is None:
            raise PhyaiError("the node is not configured", do="Call configure first.")
        return self._session

    def _stop_robot(self) -> None:
        session = self._session
        if session is None:
            return
        if session.publishing:
            self._stop_cause = AbortCause.DEACTIVATE
        session.stop()
        self._report()  # for a player elsewhere this is the stop: it must not wait for the engine to end

    def _release(self) -> None:
        """Free the session; the epoch and the latch stay. Idempotent."""
        session, self._session = self._session, None
        if session is None:
            return
        session.disable()
        session.loop.player.deactivate()
        self._idle_safety = session.loop.player.safety
        self._kept = session.robot, session.loop.player.kept
        session.close()

    # ---- callbacks ------------------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        session = self._session
        if session is not None and session.publishing:
            session.tick()
            self._announce_abort()

    def _on_beat(self) -> None:
        if self._session is not None:
            self._session.beat()
            self._announce_abort()

    def _on_engine(self) -> None:
        if self._session is not None:
            self._session.on_events()
            self._announce_abort()

    def _on_abort(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        session = self._session
        newly = self._abort(AbortCause.SERVICE, "~/abort was called")
        sent = f"stop: {session.loop.player.stop_sent}" if session is not None and session.publishing else "not active"
        response.success = True
        response.message = f"abort latched, {sent}" if newly else "already latched"
        response.message += f", now {self._safety().state.name.lower()}"
        return response

    def _on_rearm(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        session, safety = self._session, self._safety()
        if not safety.latched:
            response.message = "the abort latch is not set"
        elif self._flag:  # a moment is left to publish the stop in; nothing would stop the robot after it
            response.message = f"the process is ending ({self._flag.name})"
        elif self._fleet_stop.stopped:
            response.message = f"{self._fleet_stop.topic} still says stop"
        elif session is None:
            self._idle_safety = safety.rearm(active=False)
            response.success = True
        elif session.loop.player.stopping:
            response.message = "the stop is still being published: call again"
        elif not session.client.alive:
            response.message = session.client.connection or "the engine is gone: call ~/restart_engine first"
        else:
            try:
                session.rearm()
                response.success = True
            except RefusalError as error:
                response.message = f"not ready: {error}"
        if response.success:
            self._announced, self._stop_cause = False, AbortCause.NONE
            response.message = f"re-armed, epoch {self._safety().epoch}"
            self._report()
        return response

    def _on_restart_engine(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """A new engine for one that died, hangs or leaks. This node's callbacks wait meanwhile: nothing moves then."""
        session = self._session
        if session is None:
            response.message = "the node is not configured: configure starts an engine"
        elif session.loop.player.stopping:
            response.message = "the stop is still being published: call again"
        elif session.loop.player.safety.may_play:
            response.message = "the robot may move: call ~/abort or deactivate first"
        else:
            try:
                response.message = session.restart_engine()
                response.success = True
            except EngineError as error:
                response.message = str(error)
                self._abort(AbortCause.ENGINE_LOST, f"the engine was not restarted: {headline(error)}")
            self._report()
        return response

    def _set_instruction(self, text: str) -> None:
        session = self._session
        if session is None:
            return
        session.buffer.set_instruction(text)
        if session.params.instruction_change == "flush" and session.publishing:
            session.flush()
            self._report()  # a player elsewhere plays the old epoch until it hears of the new one

    def _apply(self, params: parameters.NodeParameters, changed: Collection[str]) -> None:
        self._configured().apply(params)
        if "seed" in changed:  # also the same again: the count of chunks begins anew
            self._configured().loop.reseed(params.seed)
        if "instruction" in changed:  # also when the text is the parameter's old one: the topic may have set another
            self._set_instruction(params.instruction)

    # ---- the stop -------------------------------------------------------------------------------------------------

    def _safety(self) -> Safety:
        return self._idle_safety if self._session is None else self._session.loop.player.safety

    def _abort(self, cause: AbortCause, text: str) -> bool:
        """Stop from any state. The stop is published before anything else happens. True if newly latched."""
        session = self._session
        if session is None:
            newly = not self._idle_safety.latched
            self._idle_safety = self._idle_safety.abort(cause, text)
        else:
            newly = session.abort(cause, text)
            if cause is AbortCause.CLOCK_JUMP:
                session.buffer.clear()
        self._announce_abort()
        return newly

    def _announce_abort(self) -> None:
        """Tell a latch that is new, whoever set it: the loop, this node, or the sentry while this thread was stuck."""
        safety = self._safety()
        if safety.latched and not self._announced:
            self._announced = True
            self._diagnostics_due_ns = 0
            self._report_latch()  # a player elsewhere waits for this word; the figures below take milliseconds
            self._report()
            self.get_logger().error(f"abort latched ({safety.cause.name.lower()}): {safety.text}")

    def _report_latch(self) -> None:
        """The latch alone, at once; also from the sentry's thread, while the executor is stuck."""
        facts = replace(self._told, safety=self._safety(), stop_cause=self._safety().cause)
        self._status.publish(diagnostics.policy_status(facts, self.get_clock().now().to_msg()))

    def on_signal(self, name: str) -> None:
        """SIGINT or SIGTERM: stop the robot over the living context."""
        if self._session is not None and self._session.publishing:
            self._abort(AbortCause.SIGNAL, f"{name} received")
            self._session.finish_stop()

    def on_spin_error(self, error: Exception) -> bool:
        """A callback raised: controlled stop and latch; go on unless the parameter on_exception says exit."""
        self.get_logger().error("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        self._abort(AbortCause.EXCEPTION, repr(error))
        return self._session is None or self._session.params.on_exception == "latch"

    def close(self) -> None:
        """Release everything, from any state."""
        self._release()

    # ---- reports --------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        self._told = facts = self._facts()
        stamp = self.get_clock().now().to_msg()
        self._status.publish(diagnostics.policy_status(facts, stamp))
        now = mono_ns()
        if now >= self._diagnostics_due_ns:
            self._diagnostics_due_ns = now + self._diagnostics_period_ns
            self._diagnostics.publish(diagnostics.diagnostic_array(facts, self.get_fully_qualified_name(), stamp))

    def _facts(self) -> diagnostics.Facts:
        state_id, label = self._state_machine.current_state
        safety = self._safety()
        if self._session is None:
            facts = diagnostics.Facts("", state_id, label, safety)
        else:
            facts = self._session.facts(safety, state_id, label)
        return replace(
            facts,
            stop_cause=safety.cause if safety.latched else self._stop_cause,
            fleet_stop=bool(self._fleet_stop.stopped),
            notes={**facts.notes, "fleet_stop": self._fleet_stop.words},
        )

    def _LifecycleNodeMixin__on_change_state(self, request: Any, response: Any) -> Any:
        """Answer an invalid transition with success=False; rclpy 7 raises out of the service and ends the node."""
        possible = {label: number for number, label, *_ in self._state_machine.available_transitions}
        asked = request.transition
        if asked.label not in possible if asked.label else asked.id not in possible.values():
            self.get_logger().warning(
                f"transition {asked.label or asked.id} refused in state {self._state_machine.current_state[1]}, "
                f"possible: {', '.join(sorted(possible))}"
            )
            response.success = False
            return response
        return super()._LifecycleNodeMixin__on_change_state(request, response)  # type: ignore[misc]


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable ``policy_node``."""
    return run(PolicyNode, args)


if __name__ == "__main__":
    raise SystemExit(main())
