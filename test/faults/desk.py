"""The real policy node without DDS: its callbacks are called by hand, what it publishes is heard at once.

Time stands still but for :meth:`Desk.pass_time`. The engine is a mailbox (the client's real one) and a worker that the
test moves. The monitor of the exhaustive search watches here too, beside rules about what the node says of itself.
"""

from __future__ import annotations

import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import yaml
from engines import rows
from explore import Violation
from handoff_machine import robot
from invariants import Limits, Monitor
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from node_in_hand import HORIZON, FakeClock, NodeInHand, Worker
from phyai_policy.msg import ActionStep, ChunkTiming, PolicyStatus
from rclpy.context import Context
from rclpy.parameter import Parameter
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import Trigger

from phyai_engine import timing
from phyai_engine.config import Camera, StateEntry
from phyai_engine.control.commands import Command
from phyai_engine.errors import RefusalError
from phyai_engine.safety import Safety
from phyai_engine.types import AbortCause, CommandKind
from phyai_ros import engine as engine_module
from phyai_ros import session as session_module
from phyai_ros.diagnostics import OUTCOMES

DT_NS = 100_000_000
HOLD_S, REQUEST_S = 1.05, 0.85  # max_hold_s and request_timeout_s: `sync` holds during every inference
LIMITS = Limits(REQUEST_S * 1e9 / DT_NS, HOLD_S * 1e9 / DT_NS, 2 + 2 + 1, HORIZON)
OUTCOME_NAMES = {number: name for name, number in OUTCOMES.items()}
TRANSITIONS = {
    name: getattr(Transition, f"TRANSITION_{name.upper()}")
    for name in ("create", "configure", "cleanup", "activate", "deactivate", "destroy")
}


class Desk:
    """One policy node and everything around it.

    :param folder: for the robot and model files. :param parameters: overrides of the node's.
    """

    def __init__(self, context: Context, folder: Path, **parameters: Any) -> None:
        self.mono_ns, self.ros_ns = 10**12, 10**18
        self.pending: list[Any] = []
        self.logger = mock.MagicMock()
        self.clock = FakeClock(self)
        self.worker: Worker | None = None
        self.engine_fails = self.planted = False
        self.monitor: Any = None
        self.status, self.level = PolicyStatus(), b"\x00"
        self.steps = self.commands = self.actions = 0
        self.seen: Counter[Any] = Counter()  # safety states, abort causes and lifecycle states after every step
        self._name = ""
        arm = robot()
        arm = msgspec.structs.replace(
            arm,
            state=(StateEntry(name="joint"),),
            cameras=(Camera(name="front", topic="front/image_raw", role="base_0_rgb", max_age_s=0.35),),
            joint_max_age_s=0.35,
        )
        (folder / "robot.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(arm)), encoding="utf-8")
        (folder / "model.yaml").write_text("family: fake\n", encoding="utf-8")
        given = {
            "robot": str(folder / "robot.yaml"),
            "model": str(folder / "model.yaml"),
            "engine": "thread",
            "stop_hold_steps": 2,
            "max_hold_s": HOLD_S,
            "request_timeout_s": REQUEST_S,
            "max_tick_gap_s": 0.0,
            "status_rate_hz": 2.0,  # not the control period: timers are told apart by it
            **parameters,
        }
        overrides = [Parameter(name, value=value) for name, value in given.items()]
        self._patches = ExitStack()
        for patch in self._patched():
            self._patches.enter_context(patch)
        options = {"enable_communication_interface": False, "start_parameter_services": False, "enable_rosout": False}
        self.node: NodeInHand
        NodeInHand(self, context=context, parameter_overrides=overrides, **options)

    def _patched(self) -> list[Any]:
        sample = timing.ClockOffset.sample
        clocks = staticmethod(lambda ros, mono=None, tries=3: sample(ros, self._mono, tries))
        return [
            mock.patch("time.monotonic_ns", self._mono),
            mock.patch("time.sleep", self._sleep),
            mock.patch("time.time_ns", self._ros),
            mock.patch.object(timing.ClockOffset, "sample", clocks),
            mock.patch.object(engine_module, "EngineClient", lambda *_, on_event, **__: Worker(self, on_event)),
        ]

    def _mono(self) -> int:
        return self.mono_ns

    def _ros(self) -> int:
        return self.ros_ns

    def close(self) -> None:
        self.node.close()
        self._patches.close()
        self.node.destroy_node()

    def _sleep(self, seconds: float) -> None:
        if self._name not in ("deactivate", "cleanup", "signal", "exception", "shutdown"):
            raise Violation("I9", f"{self._name} waits for {seconds} s")
        self.mono_ns += round(seconds * 1e9)
        self.ros_ns += round(seconds * 1e9)

    # ---- what the node says ---------------------------------------------------------------------------------------

    def heard(self, message: Any) -> None:
        """A message was published."""
        if isinstance(message, ActionStep):
            values, rates = np.array(message.values), np.array(message.velocities)
            said = message.tick, message.epoch, message.chunk_id, message.step
            self.commands += 1
            self.actions += message.kind == CommandKind.ACTION
            self.monitor.command(Command(CommandKind(message.kind), values, rates, *said))
        elif isinstance(message, ChunkTiming):
            outcome = OUTCOME_NAMES[message.outcome]
            self.monitor.report(SimpleNamespace(chunk_id=message.chunk_id, outcome=outcome))
        elif isinstance(message, PolicyStatus):
            self._check_status(message)
            self.status = message
        elif hasattr(message, "status"):
            self.level = message.status[0].level

    def _check_status(self, message: PolicyStatus) -> None:
        safety = self.safety
        told = message.safety_state, message.abort_cause, message.epoch, message.abort_text
        if told != (safety.state, safety.cause, safety.epoch, safety.text):
            raise Violation("state", f"status says {told}, it is {safety}")
        if message.epoch < self.status.epoch:
            raise Violation("epoch", f"status falls from {self.status.epoch} to {message.epoch}")

    # ---- events ---------------------------------------------------------------------------------------------------

    @property
    def safety(self) -> Safety:
        return self.node._safety()

    @property
    def label(self) -> str:
        return str(self.node._state_machine.current_state[1])

    @property
    def session(self) -> Any:
        return self.node._session

    def event(self, name: str, work: Callable[[], Any], *, refused: Callable[[Any], bool] = lambda _: False) -> Any:
        """Let one thing happen to the node, and check everything.

        :param refused: whether what ``work`` returns is a no.
        :raises AssertionError: an invariant does not hold.
        """
        try:
            return self._event(name, work, refused)
        except Violation as violation:  # no Exception, so that no guard of the node takes it; Hypothesis wants one
            raise AssertionError(str(violation)) from violation

    def _event(self, name: str, work: Callable[[], Any], refused: Callable[[Any], bool]) -> Any:
        self.steps += 1
        self._name = name
        active, fresh, before = self.label == "active", self._fresh(), self.safety
        monitor, session = self.monitor, self.session
        if monitor is not None:
            monitor.begin(name)
        answer = work()
        no = refused(answer)
        if self.session is not session:  # configured anew, or released
            player = None if self.session is None else self.session.loop.player
            monitor = None if player is None else Monitor(player, LIMITS, lambda c: rows(HORIZON, c))
            self.monitor = monitor
            if monitor is not None:
                monitor.aborted = self.safety.latched
        elif monitor is not None:
            params = session.params
            monitor.end(active=active, fresh=fresh, refused=no, holds_for_ever=params.max_hold_s == 0.0)
        self._check(name, before, rearmed=name == "rearm" and not no)
        self.seen.update((self.safety.state, self.safety.cause.name, self.label))
        return answer

    def _fresh(self) -> bool:
        session = self.session
        if session is None or self.label != "active":
            return False
        try:
            session.buffer.snapshot(self.ros_ns, self.mono_ns)
        except RefusalError:
            return False
        return not np.isnan(session.measured()).any()

    def _check(self, name: str, before: Safety, *, rearmed: bool) -> None:
        safety, status, label = self.safety, self.status, self.label
        if safety.epoch < before.epoch:
            raise Violation("epoch", f"{name}: from {before.epoch} to {safety.epoch}")
        if before.latched and not rearmed and (safety.cause, safety.text) != (before.cause, before.text):
            raise Violation("I7", f"{name}: {before.cause.name} became {safety.cause.name}")
        if (safety.epoch, safety.cause) != (before.epoch, before.cause) or label != status.lifecycle_label:
            told = status.epoch, status.abort_cause, status.lifecycle_label
            if told[:2] != (safety.epoch, safety.cause):
                raise Violation("state", f"{name}: the last status says {told}, it is {safety} {label}")
        if safety.latched and not before.latched and self.level != b"\x02":
            raise Violation("state", f"{name}: /diagnostics does not call the latch an error")
        if label != "active" and safety.may_play:
            raise Violation("state", f"{name}: {safety.state.name} while {label}")
        if safety.cause is AbortCause.EXCEPTION and not self.planted:
            raise Violation("exception", safety.text)
        if self.session is not None and self.monitor is not None:
            counters = self.session.loop.counters
            ended = counters.accepted + counters.refused + counters.failed + counters.cancelled
            if counters.requests != ended + len(self.monitor.awaited):
                raise Violation("I11", f"{name}: {counters} with {len(self.monitor.awaited)} awaited")

    def transition(self, name: str) -> bool:
        """A call of ~/change_state."""
        request = ChangeState.Request(transition=Transition(id=TRANSITIONS[name]))
        change = self.node._LifecycleNodeMixin__on_change_state
        response = self.event(name, lambda: change(request, ChangeState.Response()), refused=lambda r: not r.success)
        return bool(response.success)

    def call(self, service: str) -> Any:
        """A call of one of its Trigger services."""
        [callback] = self.node.callbacks[f"~/{service}"]
        name = {"restart_engine": "restart"}.get(service, service)
        ask = lambda: callback(Trigger.Request(), Trigger.Response())  # noqa: E731
        response = self.event(name, ask, refused=lambda r: not r.success)
        if service == "abort" and not (response.success and self.safety.latched):
            raise Violation("I2", f"abort answered {response.message}")
        return response

    def send(self, topic: str, message: Any, name: str = "message") -> None:
        """A message arrives at every subscription of the topic."""
        for callback in list(self.node.callbacks.get(topic, [])):
            self.event(name, lambda callback=callback: callback(message))

    def joints(self, position: float = 0.075, *, age_ns: int = 0, names: tuple[str, ...] = ("joint",)) -> None:
        message = JointState(name=list(names), position=[position] * len(names))
        message.header.stamp = session_module.to_stamp(self.ros_ns - age_ns)
        self.send("joint_states", message)

    def image(self, *, age_ns: int = 0, step: int = 12) -> None:
        message = Image(height=2, width=4, encoding="rgb8", step=step, data=array.array("B", bytes(24)))
        message.header.stamp = session_module.to_stamp(self.ros_ns - age_ns)
        self.send("front/image_raw", message)

    def look(self) -> None:
        """The executor runs what the engine signalled."""
        while self.pending:
            self.event("deliver", self.pending.pop(0))

    def tick(self, *, sensors: bool = True, look: bool = True) -> None:
        """One control period."""
        self.mono_ns += DT_NS
        self.ros_ns += DT_NS
        if sensors:
            self.joints()
            self.image()
        if look:
            self.look()
        for timer in list(self.node.timers_kept):
            if timer.period_s == DT_NS * 1e-9:
                self.event("tick" if self.label == "active" else "timer", timer.callback)

    def report(self) -> None:
        """The periodic status."""
        self.event("report", self.node._report)

    def jump(self, seconds: float) -> None:
        """The ROS clock is stepped."""
        self.ros_ns += round(seconds * 1e9)
        if self.clock.on_jump is not None and self.session is not None and seconds < 0:
            delta = SimpleNamespace(nanoseconds=round(seconds * 1e9))
            self.event("jump", lambda: self.clock.on_jump(SimpleNamespace(delta=delta)))

    def signal(self) -> None:
        """SIGINT."""
        self.event("signal", lambda: self.node.on_signal("SIGINT"))

    def broken(self) -> None:
        """A callback raises: a message that is no message."""
        self.planted = True
        self.send("joint_states", None, "exception")

    def set(self, name: str, value: Any) -> bool:
        """A set request for one parameter."""
        [result] = self.event("param", lambda: self.node.set_parameters([Parameter(name, value=value)]))
        return bool(result.successful)
