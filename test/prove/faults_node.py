"""Faults of sensors, clock, executor, process and operator. A cycle starts and ends with a robot that moves."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from cases import Case, aborted
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from phyai_policy.msg import PolicyStatus
from stand import Stand, end_hard
from std_msgs.msg import Bool, Float32

from phyai_engine.types import AbortCause, CommandKind, Refusal

AT_ONCE_MS = 30.0
MODEL = {"latency_ms": 20.0, "horizon": 16}
DUE, HOLD_S, CAMERA_HZ, PERIOD_S = 5, 0.4, 12.0, 0.02
PLAYS_S = MODEL["horizon"] * PERIOD_S  # what is left to play when nothing new can be computed
FROZEN_FRAMES = 10
GAP_S = 0.5
BLOCKED = (str(Path(__file__).with_name("blocked_node.py")),)


def silent(name: str, stand: Stand, *, value: Any, normal: Any) -> float:
    """A stream goes wrong: refusals, what is left plays out, hold, latch."""
    began = time.monotonic()
    stand.set_sim(**{name: value})
    took = stand.safe(began)
    stand.latched(AbortCause.EXHAUSTED)
    assert stand.status.last_refusal == Refusal.STALE, stand.status.last_refusal_text
    stand.set_sim(**{name: normal})
    if name.startswith("freeze"):  # an arm at rest gives equal pixels for ever: forget the frames before
        stand.change(Transition.TRANSITION_DEACTIVATE)
        stand.rearm()
        stand.change(Transition.TRANSITION_ACTIVATE)
        stand.moving()
    else:
        stand.resume()
    return took


def fleet(stand: Stand) -> float:
    """The latched topic; while it says stop a re-arm is refused."""
    stand.spin(random.uniform(0.0, 0.1))
    began = time.monotonic()
    stand.fleet.publish(Bool(data=True))
    took = stand.safe(began, hold=False)
    stand.latched(AbortCause.FLEET_STOP)
    assert not stand.trigger("rearm").success
    stand.fleet.publish(Bool(data=False))
    stand.until(lambda: not stand.status.fleet_stop, what="go")
    stand.resume()
    return took


def block(stand: Stand, *, publisher: list[Any], seconds: float, cause: AbortCause) -> float:
    """A callback that does not return, or raises (seconds below 0)."""
    if stand not in publisher:
        publisher[:] = [stand, stand.node.create_publisher(Float32, "policy_node/block", 1)]
        stand.until(publisher[1].get_subscription_count, what="~/block")
    began = time.monotonic()
    publisher[1].publish(Float32(data=seconds))
    took = stand.safe(began, hold=False)
    stand.latched(cause)
    stand.resume()
    return took


def paused_process(stand: Stand) -> float:
    """The whole process stands still, nothing inside it can act; counts from when it goes on."""
    end_hard(stand.policy.pid, signal.SIGSTOP)
    stand.spin(1.5 * GAP_S)
    began = end_hard(stand.policy.pid, signal.SIGCONT)
    took = stand.safe(began, hold=False)
    stand.latched(AbortCause.TICK_OVERRUN)
    stand.resume()
    return took


def clock_back(stand: Stand) -> float:
    """/clock jumps back by 60 s."""
    assert stand.clock is not None
    began = time.monotonic()
    stand.clock.ns -= 60 * 10**9
    took = stand.safe(began, hold=False)
    stand.latched(AbortCause.CLOCK_JUMP)
    stand.resume()
    return took


def clock_paused(stand: Stand) -> float:
    """/clock stands still and the robot with it; ~/abort is not delayed and its stop is published to the end."""
    assert stand.clock is not None
    stand.clock.runs = False
    stand.spin(0.1)
    since = time.monotonic()
    stand.spin(0.2)
    assert not [at for at, _ in stand.heard if at > since], "a command while the clock stood still"
    took = aborted(stand)
    stand.clock.runs = True
    stand.resume()
    return took


def ended(number: int | None, stand: Stand) -> float:
    """SIGINT or SIGTERM, by turns: stop, exit code 0. A new process goes on."""
    chosen = number or random.choice((signal.SIGINT, signal.SIGTERM))
    began = end_hard(stand.policy.pid, chosen)
    took = stand.safe(began, hold=False)
    stand.until(lambda: stand.status.abort_cause == AbortCause.SIGNAL, what="ABORT_SIGNAL")
    code = stand.policy.wait(timeout=10.0)
    assert code == 0, f"exit code {code}"
    stand.start_policy()
    stand.moving()
    return took


def deactivated(stand: Stand) -> float:
    """Stops before the publishers are disabled; no latch."""
    began = time.monotonic()
    request = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_DEACTIVATE))
    future = stand.change_state.call_async(request)
    took = stand.safe(began, hold=False)
    stand.until(future.done, what="answer of deactivate")
    stand.until(lambda: stand.status.stop_cause == PolicyStatus.ABORT_DEACTIVATE, what="stop_cause")
    assert stand.status.abort_cause == AbortCause.NONE
    for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_DEACTIVATE):
        stand.change(transition, refused=True)
    stand.change(Transition.TRANSITION_ACTIVATE)
    stand.moving()
    return took


def wrong_state(stand: Stand) -> None:
    """Transitions that an active node does not have are refused and disturb nothing."""
    since = time.monotonic()
    for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE, Transition.TRANSITION_CLEANUP):
        stand.change(transition, refused=True)
    stand.moving()
    assert not stand.kinds(CommandKind.STOP, since) + stand.kinds(CommandKind.HOLD, since)


def cases() -> Iterator[Case]:
    """Every fault of the node and its surroundings."""
    node = {"execution_horizon": DUE, "max_hold_s": HOLD_S}
    plain, exhausted = partial(Stand, MODEL, node), "REFUSAL_STALE; ABORT_EXHAUSTED"
    frozen = partial(silent, "freeze__front", value="frame", normal="none")
    frozen_ms = ((FROZEN_FRAMES + 1) / CAMERA_HZ + PLAYS_S) * 1e3 + 60.0
    yield Case(
        f"camera frozen (frozen_frames {FROZEN_FRAMES})",
        exhausted,
        frozen_ms,
        "deactivate, ~/rearm, activate",
        run=frozen,
        stand=partial(Stand, MODEL, {**node, "frozen_frames": FROZEN_FRAMES}),
    )
    for name, stream, age_s, rate in (
        ("camera", "front", 0.5, CAMERA_HZ),
        ("joint states", "joint_states", 0.1, 100.0),
    ):
        dies = partial(silent, f"drop__{stream}", value=1.0, normal=0.0)
        bound = (age_s + 1 / rate + PLAYS_S) * 1e3 + 60.0
        yield Case(f"{name}: dies (max age {age_s} s)", exhausted, bound, "~/rearm", run=dies, stand=plain)
    yield Case("fleet stop", "ABORT_FLEET_STOP", AT_ONCE_MS, "topic false, ~/rearm", run=fleet, stand=plain)
    blocked, overrun = partial(Stand, MODEL, node, policy=BLOCKED), AbortCause.TICK_OVERRUN
    run = partial(block, publisher=[None], seconds=1.0, cause=overrun)
    bound = 1.25 * GAP_S * 1e3 + 30.0  # the sentry looks four times within the gap
    yield Case(
        "executor blocked 1 s (max_tick_gap_s 0.5)", "ABORT_TICK_OVERRUN", bound, "~/rearm", run=run, stand=blocked
    )
    run = partial(block, publisher=[None], seconds=-1.0, cause=AbortCause.EXCEPTION)
    yield Case("exception in a callback", "ABORT_EXCEPTION", AT_ONCE_MS, "~/rearm", run=run, stand=blocked)
    yield Case(
        "policy node paused 0.75 s (SIGSTOP), from SIGCONT",
        "ABORT_TICK_OVERRUN",
        AT_ONCE_MS,
        "~/rearm",
        run=paused_process,
        stand=plain,
    )
    timed = partial(Stand, MODEL, node, simulated=True)
    yield Case("/clock back 60 s", "ABORT_CLOCK_JUMP", AT_ONCE_MS, "~/rearm", run=clock_back, stand=timed)
    yield Case("~/abort while /clock is paused", "ABORT_SERVICE", AT_ONCE_MS, "~/rearm", run=clock_paused, stand=timed)
    signals = partial(ended, None)
    yield Case("SIGINT, SIGTERM", "ABORT_SIGNAL", 100.0 + AT_ONCE_MS, "start again", run=signals, stand=plain)
    yield Case("deactivate in motion", "stop_cause DEACTIVATE", AT_ONCE_MS, "activate", run=deactivated, stand=plain)
    yield Case(
        "lifecycle calls in the wrong state", "refused: goes on", None, "none needed", run=wrong_state, stand=plain
    )
