"""Messages, services, parameters, lifecycle calls and faults in any order against the policy node's real callbacks.

Hypothesis chooses; every callback is checked by desk.Desk. A short run here, 50 000 rules with ``make prove-search``.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

sys.path.insert(0, str(Path(__file__).parent))

import rclpy
from desk import TRANSITIONS, Desk
from rclpy.context import Context
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool, String

from phyai_engine.safety import Safety
from phyai_engine.types import AbortCause, SafetyState

pytestmark = pytest.mark.ros
CAUSES = (
    "SERVICE",
    "FLEET_STOP",
    "CLOCK_JUMP",
    "EXCEPTION",
    "ENGINE_LOST",
    "SIGNAL",
    "INFERENCE_DEADLINE",
    "EXHAUSTED",
)
PARAMETERS = [
    ("max_hold_s", 0.0),
    ("max_hold_s", 1.05),
    ("max_hold_s", float("nan")),
    ("max_hold_s", "long"),
    ("instruction", "fold the towel"),
    ("instruction_change", "flush"),
    ("instruction_change", "keep"),
    ("instruction_change", "maybe"),
    ("schedule", "sync"),
]


class NodeMachine(RuleBasedStateMachine):
    """One node, from unconfigured on.

    :param tally: counts steps, safety states and aborts over all runs.
    """

    context: Context
    tally: Counter[Any]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.desk: Desk

    @initialize(
        schedule=st.sampled_from(["rtc", "naive_async", "sync"]), holds=st.sampled_from([0, 2]), running=st.booleans()
    )
    def begin(self, schedule: str, holds: int, running: bool) -> None:
        self.desk = Desk(self.context, Path(self.folder.name), schedule=schedule, stop_hold_steps=holds)
        if running:
            self.recover()

    @rule(ticks=st.integers(1, 12), every=st.integers(1, 4))
    def drive(self, ticks: int, every: int) -> None:
        """Sensors speak, the engine answers every so many ticks."""
        for i in range(ticks):
            self.desk.tick()
            if i % every == 0 and self.desk.worker is not None:
                self.desk.worker.finish("ok")

    @rule(ticks=st.integers(1, 14), kind=st.sampled_from(["nan", "out", "fail"]))
    def starve(self, ticks: int, kind: str) -> None:
        """The engine answers, but nothing that can be played."""
        for _ in range(ticks):
            self.desk.tick()
            if self.desk.worker is not None:
                self.desk.worker.finish(kind)

    @rule()
    def recover(self) -> None:
        """Whatever happened, an operator gets the robot moving again by the calls that are written in the README."""
        desk = self.desk
        self.fleet(False)
        if desk.label == "unconfigured":
            assert desk.transition("configure")
        self.drive(8, 1)  # a stop is finished, old stamps are followed
        if desk.worker is not None and not desk.worker.alive:
            if desk.safety.may_play:
                desk.call("abort")
                self.drive(8, 1)
            assert desk.call("restart_engine").success
        if desk.safety.latched:
            answer = desk.call("rearm")
            assert answer.success, answer.message
        if desk.label == "inactive":
            assert desk.transition("activate")
        actions = desk.actions
        self.drive(12, 1)
        assert desk.actions > actions, f"{desk.safety}, {desk.status.last_refusal_text}"

    @rule(ticks=st.integers(1, 14), sensors=st.booleans(), look=st.booleans())
    def wait(self, ticks: int, sensors: bool, look: bool) -> None:
        """The engine is busy; perhaps the sensors are silent, or the executor is late to see what it said."""
        for _ in range(ticks):
            self.desk.tick(sensors=sensors, look=look)

    @rule(kind=st.sampled_from(["ok", "nan", "out", "short", "jump", "fail", "cancelled"]), look=st.booleans())
    def answer(self, kind: str, look: bool) -> None:
        if self.desk.worker is not None:
            self.desk.worker.finish(kind)
        if look:
            self.desk.look()

    @rule()
    def answer_again(self) -> None:
        if self.desk.worker is not None:
            self.desk.worker.repeat()

    @rule()
    def engine_dies(self) -> None:
        if self.desk.worker is not None:
            self.desk.worker.die()

    @rule(fails=st.booleans())
    def restart(self, fails: bool) -> None:
        self.desk.engine_fails = fails
        self.desk.call("restart_engine")
        self.desk.engine_fails = False

    @rule(name=st.sampled_from(sorted(TRANSITIONS)), fails=st.booleans())
    def transition(self, name: str, fails: bool = False) -> None:
        self.desk.engine_fails = fails and name == "configure"
        self.desk.transition(name)
        self.desk.engine_fails = False

    @rule(service=st.sampled_from(["abort", "rearm", "rearm"]))
    def call(self, service: str) -> None:
        self.desk.call(service)

    @rule(times=st.integers(2, 5))
    def abort_and_rearm(self, times: int) -> None:
        for _ in range(times):
            self.desk.call("abort")
            self.desk.call("rearm")

    @rule(stop=st.booleans())
    def fleet(self, stop: bool) -> None:
        self.desk.send("/fleet_stop", Bool(data=stop), "fleet")

    @rule(text=st.sampled_from(["", "pick", "place"]))
    def instruct(self, text: str) -> None:
        session = self.desk.session
        flushes = session is not None and session.params.instruction_change == "flush" and session.publishing
        self.desk.send("~/instruction", String(data=text), "flush" if flushes else "message")

    @rule(change=st.sampled_from(PARAMETERS))
    def set(self, change: tuple[str, Any]) -> None:
        self.desk.set(*change)

    @rule(
        position=st.sampled_from([0.075, 0.09, float("nan"), float("inf"), 1e300]),
        age_ms=st.sampled_from([0, 0, 200, 5_000, -5_000]),
        names=st.sampled_from([("joint",), (), ("other",), ("joint", "joint")]),
    )
    def joints(self, position: float, age_ms: int, names: tuple[str, ...]) -> None:
        self.desk.joints(position, age_ns=age_ms * 1_000_000, names=names)

    @rule(age_ms=st.sampled_from([0, 0, 200, 5_000]), step=st.sampled_from([12, 12, 5, 0]))
    def image(self, age_ms: int, step: int) -> None:
        self.desk.image(age_ns=age_ms * 1_000_000, step=step)

    @rule(seconds=st.sampled_from([-60.0, -0.5, 0.5, 60.0]))
    def jump(self, seconds: float) -> None:
        self.desk.jump(seconds)

    @rule()
    def exception(self) -> None:
        self.desk.broken()

    @rule()
    def signal(self) -> None:
        self.desk.signal()

    @rule()
    def report(self) -> None:
        self.desk.report()

    @invariant()
    def count(self) -> None:
        """Counts the rules; what must hold is checked after every callback, in desk.Desk."""
        self.tally["rules"] += 1

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            self.tally["steps"] += self.desk.steps
            self.tally["commands"] += self.desk.commands
            self.tally.update(self.desk.seen)
            self.desk.close()
        self.folder.cleanup()


def run(context: Context, *, examples: int, seed: int | None = None, shrink: bool = True) -> Counter[Any]:
    """Runs of up to 40 rules; how often every safety state, abort cause and lifecycle state was left behind.

    :param seed: None: the same runs every time. :param shrink: a failure is told by its shortest run.
    """
    machine = type("Run", (NodeMachine,), {"context": context, "tally": Counter()})
    if seed is not None:
        machine._hypothesis_internal_use_seed = seed
    chosen = settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    run_state_machine_as_test(machine, settings=chosen)
    return machine.tally


@pytest.fixture
def context() -> Any:
    """A ROS context of its own; nothing is communicated in it."""
    context = Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
    yield context
    rclpy.shutdown(context=context)


def test_no_order_of_events_breaks_an_invariant(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    tally = run(context, examples=60)
    with capsys.disabled():
        print(f"\n  {tally['rules']} rules, {tally['steps']} callbacks, {tally['commands']} commands", end=" ")
    assert tally["rules"] > 1_000
    assert tally["commands"] > 500
    assert {*(SafetyState(n) for n in range(1, 7)), "unconfigured", "inactive", "active"} <= set(tally)
    assert len(set(CAUSES) & set(tally)) >= 6


def test_the_checks_see_a_planted_defect(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Safety.deactivate
    monkeypatch.setattr(Safety, "deactivate", lambda safety: replace(real(safety), cause=AbortCause.NONE))
    with pytest.raises(AssertionError, match="I7"):
        run(context, examples=200, shrink=False)
