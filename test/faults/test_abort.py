"""Abort at every small phase of a request, the stop's bound, and what motion starts from afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import ActionEntry, RobotConfig
from phyai_engine.control.player import Player
from phyai_engine.errors import EngineDiedError, EngineError, RefusalError
from phyai_engine.handoff import HandoffSettings
from phyai_engine.safety import LatchedError, Safety
from phyai_engine.serve.client import Failed, Lost
from phyai_engine.types import AbortCause, CommandKind, Refusal, SafetyState, Schedule

Make = Callable[..., Any]
DT_S, HORIZON, SPEED = 0.02, 16, 1.0


def before_the_request(loop: Any) -> None:
    loop.tick(5)
    assert len(loop.engine.requests) == 1


def at_the_request(loop: Any) -> None:
    loop.tick(9)
    assert len(loop.engine.requests) == 2  # submitted in this very tick


def during_inference(loop: Any) -> None:
    loop.tick(12)


def between_result_and_publish(loop: Any) -> None:
    loop.tick(12)
    loop.reply(loop.ramp(SPEED, np.full(2, 8 * SPEED * DT_S)))


def after_the_handoff(loop: Any) -> None:
    loop.tick(12)
    loop.answer(loop.ramp(SPEED, np.full(2, 8 * SPEED * DT_S)))


def after_the_first_step(loop: Any) -> None:
    after_the_handoff(loop)
    loop.tick()


def after_a_failure(loop: Any) -> None:
    loop.tick(12)
    request = loop.engine.requests[-1]
    loop.engine.events.append(Failed(request.epoch, request.chunk_id, EngineError("planted"), cancelled=False))
    loop.loop.on_events()


def while_holding(loop: Any) -> None:
    loop.tick(25)
    assert loop.safety is SafetyState.HOLDING


PHASES = [
    before_the_request,
    at_the_request,
    during_inference,
    between_result_and_publish,
    after_the_handoff,
    after_the_first_step,
    after_a_failure,
    while_holding,
]


def late_words(loop: Any) -> None:
    """The engine answers everything it was ever asked, and fails it, and dies."""
    for request in loop.engine.requests:
        loop.reply(loop.ramp(0.5, loop.commands[-1].values), request)
        loop.engine.events.append(Failed(request.epoch, request.chunk_id, EngineError("late"), cancelled=True))
    loop.loop.on_events()


@pytest.mark.fault(14, 22, 45)
@pytest.mark.parametrize("abort_twice", [False, True])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__)
def test_an_abort_at_any_phase_is_a_bounded_stop_of_a_new_epoch(
    bench: Make, phase: Callable[[Any], None], abort_twice: bool
) -> None:
    loop = bench(stop_hold_steps=5)
    loop.start(SPEED)
    phase(loop)
    epoch, count, speed = loop.player.safety.epoch, len(loop.commands), loop.commands[-1].rates.copy()
    assert loop.loop.abort(AbortCause.SERVICE, "first") is True
    assert loop.kinds()[count:] == [CommandKind.STOP]  # published before the call returns
    if abort_twice:
        assert loop.loop.abort(AbortCause.SIGNAL, "second") is False
    assert epoch in loop.engine.cancelled
    for _ in range(30):
        late_words(loop)
        loop.tick()
    stop = loop.commands[count:]
    assert {c.kind for c in stop} == {CommandKind.STOP}
    assert {c.epoch for c in stop} == {epoch + 1}
    braking = max(1, round(np.abs(speed).max() / (5.0 * DT_S)))
    # Then quiet: others may drive the robot. Rounding of the speed may cost one more step at rest.
    assert braking + 5 <= len(stop) <= braking + 6
    ticks = [c.tick for c in loop.commands]
    assert ticks == sorted(set(ticks))  # one command a tick, the stop's first included
    values = np.array(loop.values()[count - 1 :])
    speeds = np.diff(values) / DT_S
    assert (np.diff([speed[0], *speeds]) >= -5.0 * DT_S - 1e-9).all()
    assert (speeds >= -1e-12).all()
    assert values[-6:] == pytest.approx(np.full(6, values[-1]))  # held where it came to rest, never let go or zeroed
    assert values[-1] > 0
    assert loop.safety is SafetyState.LATCHED
    assert (loop.player.safety.cause, loop.player.safety.text) == (AbortCause.SERVICE, "first")


@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_before_the_first_chunk_holds_the_measured_pose(bench: Make, answered: bool) -> None:
    loop = bench(stop_hold_steps=5)
    loop.state = np.array([0.7, -0.4])
    loop.loop.activate()
    loop.tick(3)
    if answered:
        loop.reply(loop.ramp())
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.loop.on_events()
    loop.tick(20)
    assert len(loop.commands) == 6
    assert set(loop.kinds()) == {CommandKind.STOP}
    np.testing.assert_array_equal([c.values for c in loop.commands], [[0.7, -0.4]] * 6)


def test_an_abort_of_an_arm_never_seen_commands_nothing(bench: Make) -> None:
    loop = bench()
    loop.state = np.array([0.7, np.nan])
    loop.loop.activate()
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.tick(3)
    assert loop.commands == []
    assert loop.safety is SafetyState.LATCHED


def test_an_abort_while_inactive_latches_and_says_nothing(bench: Make) -> None:
    loop = bench()
    assert loop.loop.abort(AbortCause.SERVICE, "") is True
    loop.tick(3)
    assert loop.commands == []
    with pytest.raises(LatchedError):
        loop.loop.activate()
    loop.loop.rearm(0, active=False)
    loop.start()
    loop.tick(2)
    assert loop.kinds() == [CommandKind.ACTION] * 2


def test_an_abort_during_the_stop_of_a_deactivation_latches_and_lets_it_end(bench: Make) -> None:
    loop = bench(stop_hold_steps=5)
    loop.start(1.0)
    loop.tick(8)
    loop.loop.stop()
    loop.tick(3)
    assert loop.loop.abort(AbortCause.SERVICE, "") is True
    loop.tick(30)
    assert 15 <= loop.kinds().count(CommandKind.STOP) <= 16
    assert (np.diff(loop.values()) >= -1e-12).all()
    assert loop.safety is SafetyState.LATCHED


def test_an_engine_that_dies_is_an_abort_that_waits_for_nothing(bench: Make) -> None:
    loop = bench()
    loop.start()
    loop.tick(9)
    loop.engine.events.append(Lost(EngineDiedError("exit code 13")))
    count = len(loop.commands)
    loop.loop.on_events()
    assert loop.kinds()[count:] == [CommandKind.STOP]
    assert loop.player.safety.cause is AbortCause.ENGINE_LOST


@pytest.mark.parametrize("kind", ["joint_velocity", "cartesian_delta"])
@pytest.mark.fault(45)
def test_a_gripper_keeps_its_grip_when_the_arm_is_stopped(bench: Make, kind: Any) -> None:
    """Zeros stop a velocity or delta robot, but a gripper that is commanded zero lets go."""
    loop = bench()
    limits: Any = {"lower": -1.0, "upper": 1.0, "acceleration_max": 10.0}
    robot = RobotConfig(
        robot_id="hand",
        action_type=kind,
        dt_s=DT_S,
        state=loop.robot.state,
        actions=(
            ActionEntry(name="x", state="shoulder", **limits),
            ActionEntry(name="grip", state="elbow", absolute=True, **limits),
        ),
    )
    settings = HandoffSettings(Schedule.NAIVE_ASYNC, HORIZON, 8, DT_S)
    loop.player = loop.loop.player = Player(robot, settings, Safety(epoch=1), loop.written, lambda: None)
    loop.loop.activate()
    loop.tick()
    loop.answer(np.tile([0.4, 0.9], (HORIZON, 1)))
    loop.tick(3)
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.tick(10)
    stop = [c.values.tolist() for c in loop.commands if c.kind is CommandKind.STOP]
    assert [grip for _, grip in stop] == [0.9] * len(stop)
    assert stop[-1][0] == 0.0
    assert stop[0][0] == (0.2 if kind == "joint_velocity" else 0.0)
    loop.loop.rearm(0, active=False)  # and a later abort, before anything was commanded, still keeps it
    loop.loop.activate()
    loop.loop.abort(AbortCause.SERVICE, "")
    assert loop.commands[-1].values.tolist() == [0.0, 0.9]


# -- what motion starts from ---------------------------------------------------------------------------------


def latched(loop: Any) -> None:
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.tick(30)


def rearmed(loop: Any) -> None:
    loop.loop.rearm(0, active=True)


def stopped(loop: Any) -> None:
    loop.loop.stop()
    loop.tick(30)
    loop.player.deactivate()


def activated(loop: Any) -> None:
    loop.loop.activate()


@pytest.mark.fault(15)
@pytest.mark.parametrize(("away", "back"), [(latched, rearmed), (stopped, activated)], ids=["rearm", "activate"])
def test_motion_starts_from_where_the_arm_was_moved_to(bench: Make, away: Any, back: Any) -> None:
    loop = bench()
    loop.start()
    loop.tick(6)
    away(loop)
    last = loop.commands[-1].values.copy()
    loop.state = last + 0.6  # somebody moved it
    back(loop)
    loop.tick()
    assert loop.engine.requests[-1].committed is None
    np.testing.assert_array_equal(loop.engine.requests[-1].observation.state, last + 0.6)
    count = len(loop.commands)
    loop.answer(loop.ramp(0.5, last))  # a model that goes on where the last command was
    assert loop.timings[-1].refusal == "out_of_envelope"
    assert "starts farther from the measured value than first_step_max" in loop.timings[-1].text
    loop.tick(3)
    assert loop.commands[count:] == []
    loop.answer(loop.ramp(0.5))
    assert np.isnan(loop.timings[-1].jump)  # there is no last command to jump from
    loop.tick(2)
    np.testing.assert_allclose(loop.values()[count:], [last[0] + 0.6, last[0] + 0.61])
    assert loop.commands[count].rates.tolist() == [0.0, 0.0]


@pytest.mark.fault(15)
def test_an_abort_after_the_arm_was_moved_holds_the_new_pose(bench: Make) -> None:
    loop = bench()
    loop.start()
    loop.tick(6)
    latched(loop)
    loop.state = np.array([-0.5, 1.1])
    rearmed(loop)
    loop.tick()
    count = len(loop.commands)
    loop.loop.abort(AbortCause.SERVICE, "")
    loop.tick(30)
    assert {tuple(c.values) for c in loop.commands[count:]} == {(-0.5, 1.1)}


def test_rearm_without_a_fresh_observation_leaves_the_latch(bench: Make) -> None:
    loop = bench()
    loop.start()
    latched(loop)
    epoch = loop.player.safety.epoch
    loop.blind = RefusalError(Refusal.STALE, "camera 'front' is silent")
    with pytest.raises(RefusalError, match="front"):
        rearmed(loop)
    assert loop.safety is SafetyState.LATCHED
    assert loop.player.safety.epoch == epoch


# -- refusals end in the latch -------------------------------------------------------------------------------


@pytest.mark.fault(7, 23)
def test_a_model_that_only_gives_nan_holds_then_latches(bench: Make) -> None:
    loop = bench(hold_max_s=0.4)
    loop.start()
    for _ in range(60):
        loop.tick()
        if loop.player.handoff.in_flight is not None:
            loop.answer(np.full((HORIZON, 2), np.nan))
    assert {t.refusal for t in loop.timings[1:] if t.outcome != "cancelled"} == {"not_finite"}
    assert loop.player.safety.cause is AbortCause.EXHAUSTED
    assert loop.safety is SafetyState.LATCHED
    assert np.isfinite([c.values for c in loop.commands]).all()
    held = loop.kinds().count(CommandKind.HOLD)
    assert held * DT_S == pytest.approx(0.4, abs=0.05)
