"""~/abort at each microphase of a request. A cycle starts and ends with a robot that moves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from cases import Case, aborted
from lifecycle_msgs.msg import Transition
from stand import Stand
from std_srvs.srv import Trigger

from phyai_engine.types import AbortCause, CommandKind

LATENCY_S = 0.2
AT_ONCE_MS = 30.0


def fresh(stand: Stand) -> float:
    """Abort and re-arm: a new request starts with the next tick. When the re-arm was answered."""
    aborted(stand)
    stand.rearm()
    return time.monotonic()


def at_phase(wait: Callable[[Stand], None], stand: Stand) -> float:
    """An abort some time after a fresh request."""
    fresh(stand)
    wait(stand)
    took = aborted(stand)
    stand.resume()
    return took


def computing(stand: Stand) -> None:
    """The engine has the request."""
    stand.spin(random.uniform(0.03, LATENCY_S - 0.03))


def between(stand: Stand) -> None:
    """About when the result comes: request within a tick, then the latency, then the engine's own time."""
    stand.spin(LATENCY_S + random.uniform(0.0, 0.03))


def published(stand: Stand) -> None:
    """The first row was heard."""
    since = time.monotonic()
    stand.until(lambda: stand.kinds(CommandKind.ACTION, since), 3.0, "ACTION")


def twice(stand: Stand) -> float:
    """Two calls at once: one latch, one stop, both answered."""
    began = time.monotonic()
    futures = [stand.triggers["abort"].call_async(Trigger.Request()) for _ in range(2)]
    took = stand.safe(began, hold=False)
    stand.until(lambda: all(f.done() for f in futures), what="both answers")
    assert sorted(f.result().message.split(",")[0] for f in futures) == ["abort latched", "already latched"]
    stand.latched(AbortCause.SERVICE)
    assert len({m.epoch for at, m in stand.heard if at > began and m.kind == CommandKind.STOP}) == 1
    stand.resume()
    return took


def inactive(stand: Stand) -> None:
    """Latches without a word, and activation is refused."""
    stand.change(Transition.TRANSITION_DEACTIVATE)
    since = time.monotonic()
    assert stand.trigger("abort").success
    stand.until(lambda: stand.status.abort_cause == AbortCause.SERVICE, what="the latch")
    stand.change(Transition.TRANSITION_ACTIVATE, refused=True)
    stand.spin(0.1)
    assert not [at for at, _ in stand.heard if at > since], "a command while inactive"
    stand.rearm()
    stand.change(Transition.TRANSITION_ACTIVATE)
    stand.moving()


def in_a_row(stand: Stand) -> float:
    """Abort and re-arm without waiting for motion."""
    took = aborted(stand)
    stand.rearm()
    del stand.heard[:-400], stand.statuses[:-50]
    return took


def cases() -> Iterator[Case]:
    """Every phase."""
    model = {"latency_ms": LATENCY_S * 1e3, "horizon": 50}
    phases: dict[str, Callable[[Stand], float]] = {
        "before inference": partial(at_phase, lambda stand: None),
        "during inference": partial(at_phase, computing),
        "between result and publication": partial(at_phase, between),
        "after publication": partial(at_phase, published),
        "twice": twice,
    }
    for name, run in phases.items():
        yield Case(f"~/abort {name}", "ABORT_SERVICE", AT_ONCE_MS, "~/rearm", run=run, stand=partial(Stand, model))
    yield Case(
        "~/abort while inactive", "ABORT_SERVICE", None, "~/rearm, activate", run=inactive, stand=partial(Stand, model)
    )
    short = {"latency_ms": 20.0, "horizon": 50}
    yield Case(
        "~/abort 100 times in a row",
        "ABORT_SERVICE",
        AT_ONCE_MS,
        "~/rearm",
        factor=2,
        run=in_a_row,
        stand=partial(Stand, short),
    )
