"""Planted defects: each changes one rule of the code under test; a search must name the invariant that it breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from handoff_machine import Bounds

from phyai_engine.control.control_loop import ControlLoop
from phyai_engine.control.player import Player
from phyai_engine.envelope import Envelope
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import Handoff
from phyai_engine.safety import Safety
from phyai_engine.serve.client import Answered, Lost
from phyai_engine.serve.in_flight import InFlight
from phyai_engine.stop import StopPlanner
from phyai_engine.timing import Timing
from phyai_engine.types import AbortCause, SafetyState, Schedule

Patch = AbstractContextManager[Any]
QUICK = Bounds(answers=("ok", "nan"), without=frozenset({"param", "jump", "signal", "beat", "stuck", "restart"}))
BLIND = replace(QUICK, blind=True)
MAILBOX = replace(QUICK, mailbox=True, without=QUICK.without | {"reconfigure", "garbage"})
UNWATCHED = replace(QUICK, age_ticks=0)


@dataclass(frozen=True)
class Mutation:
    """One defect.

    :param breaks: invariants of which any may be the first that it breaks.
    """

    name: str
    breaks: frozenset[str]
    patch: Callable[[], Patch]
    bounds: Bounds = QUICK


def after(kind: type, name: str, change: Callable[..., Any]) -> Callable[[], Patch]:
    """The method's result is passed through ``change(result, self, *args)``."""

    def patch() -> Patch:
        real = getattr(kind, name)
        return mock.patch.object(kind, name, lambda self, *a, **k: change(real(self, *a, **k), self, *a, **k))

    return patch


def instead(kind: type, name: str, work: Callable[..., Any]) -> Callable[[], Patch]:
    """``work(real, self, *args)`` is called instead of the method."""

    def patch() -> Patch:
        real = getattr(kind, name)
        return mock.patch.object(kind, name, lambda self, *a, **k: work(real, self, *a, **k))

    return patch


def constant(kind: type, name: str, value: Any) -> Callable[[], Patch]:
    """A property that is always ``value``."""
    return lambda: mock.patch.object(kind, name, property(lambda self: value))


# ---- epoch and latch ------------------------------------------------------------------------------------------------


def same_epoch(after_: Safety, before: Safety, *_: Any, **__: Any) -> Safety:
    return replace(after_, epoch=before.epoch)


def unlatched(after_: Safety, *_: Any) -> Safety:
    return replace(after_, cause=AbortCause.NONE, text="")


def activate_anyway(real: Any, safety: Safety) -> Safety:
    return real(unlatched(safety))


def last_cause(real: Any, player: Player, cause: AbortCause, text: str) -> bool:
    if player.safety.latched:
        player.safety = replace(player.safety, cause=cause, text=text)
    return real(player, cause, text)


def resumes(after_: Safety, before: Safety) -> Safety:
    """A stop that is over goes back to playing."""
    return replace(after_, state=SafetyState.ARMED) if before.state is SafetyState.STOPPING else after_


def rearm_unseen(real: Any, loop: ControlLoop, now_ros_ns: int, *, active: bool) -> None:
    real(loop, now_ros_ns, active=False)
    loop.player.safety = replace(loop.player.safety, state=SafetyState.ARMED if active else SafetyState.IDLE)


# ---- the stop -------------------------------------------------------------------------------------------------------


def abort_later(real: Any, player: Player, cause: AbortCause, text: str) -> bool:
    """The abort waits for the next tick."""
    vars(player).setdefault("late", (cause, text))
    return True


def second_command(real: Any, player: Player) -> Any:
    """The tick after an abort does not know of the command that the abort published."""
    player._spoken = False
    return real(player)


def zeros(held: Any, *_: Any) -> Any:
    return np.zeros_like(held)


def coasts(plan: Any, *_: Any) -> Any:
    """The stop keeps the speed at which it begins."""
    return replace(plan, rates=np.full_like(plan.rates, plan.rates[0] + 0.1))


def sleeps(real: Any, loop: ControlLoop, now_ros_ns: int) -> None:
    time.sleep(0.01)
    real(loop, now_ros_ns)


# ---- handoff --------------------------------------------------------------------------------------------------------


def skip_by_latency(real: Any, handoff: Handoff, chunk: Any) -> int:
    """Rows are skipped by ticks since the snapshot, also those in which nothing was consumed."""
    row = real(handoff, chunk)
    assert handoff.in_flight is not None
    return min(row + handoff.held - handoff.in_flight.held_at, handoff.settings.horizon - 1)


def accepted_at(change: int) -> Callable[..., Any]:
    """The chunk begins ``change`` rows after the right one."""

    def accept(result: Any, *_: Any) -> Any:
        handoff, facts = result
        row = min(max(0, facts.row + change), handoff.settings.horizon - 1)
        return replace(handoff, playing=replace(handoff.playing, first_row=row, next_row=row)), facts

    return accept


def committed_later(real: Any, handoff: Handoff) -> Any:
    """Committed rows are cut one too late."""
    playing = handoff.playing
    if playing is None or handoff.remaining_steps < 2:
        return real(handoff)
    return real(replace(handoff, playing=replace(playing, next_row=playing.next_row + 1)))


def frozen_rows_change(after_: Handoff, before: Handoff) -> Handoff:
    """Rows that a request was told of are changed while it is in flight."""
    if after_.playing is None or after_.in_flight is None or after_.in_flight.committed is None:
        return after_
    return replace(after_, playing=replace(after_.playing, actions=after_.playing.actions + 0.001))


def committed_written(_: None, loop: ControlLoop, *__: Any) -> None:
    """The array that the engine reads is written while it computes."""
    if loop._request is not None and loop._request.committed is not None:
        loop._request.committed.actions[0] = 0.7


def keeps(name: str) -> Callable[..., Handoff]:
    """What a new epoch must drop stays."""
    return lambda after_, before: replace(after_, **{name: getattr(before, name)})


def never_waits(handoff: Handoff) -> bool:
    """Delays that a chunk cannot cover change nothing."""
    return handoff.settings.schedule is Schedule.SYNC


def begins_again(after_: Handoff, before: Handoff) -> Handoff:
    """The chunk plays from its first row once more when it ran out."""
    if after_.playing is None or after_.remaining_steps:
        return after_
    return replace(after_, playing=replace(after_.playing, next_row=after_.playing.first_row))


# ---- requests and their outcome -------------------------------------------------------------------------------------


def any_answer(real: Any, loop: ControlLoop, event: Answered) -> None:
    """Whatever the engine says is taken for the answer to the newest request: no epoch and no id is checked."""
    if loop._request is not None:
        newest = loop._request
        chunk = replace(event.chunk, epoch=newest.epoch, chunk_id=newest.chunk_id)
        event = replace(event, chunk=chunk)
    real(loop, event)


def twice(real: Any, loop: ControlLoop, event: Answered) -> None:
    """A chunk that was accepted is accepted again."""
    flight, request = loop.player.handoff.in_flight, loop._request
    real(loop, event)
    if request is not None and loop._request is None and loop.player.handoff.playing is not None:
        loop.player.handoff = replace(loop.player.handoff, in_flight=flight)
        loop._request = request


def cancelled_is_ok(real: Any, loop: ControlLoop, event: Any) -> None:
    """A cancelled inference is reported as accepted."""
    if not event.cancelled or loop._request is None or loop._request.chunk_id != event.chunk_id:
        real(loop, event)
        return
    loop.player.handoff, loop._request = loop.player.handoff.drop(event.chunk_id), None
    loop._report(Timing(epoch=event.epoch, chunk_id=event.chunk_id, outcome="accepted"))


def unheard(real: Any, loop: ControlLoop) -> None:
    """The end of the engine is not noticed."""
    events = [e for e in loop._client.poll() if not isinstance(e, Lost)]
    with mock.patch.object(type(loop._client), "poll", return_value=events):
        real(loop)


def not_dropped(real: Any, loop: ControlLoop) -> None:
    """A new epoch leaves the request of the old one awaited."""


def nan_raises(real: Any, envelope: Envelope, actions: Any, **limits: Any) -> None:
    try:
        real(envelope, actions, **limits)
    except RefusalError as error:
        raise ValueError(str(error)) from None


def stale_answers(real: Any, box: InFlight) -> Any:
    """An answer that was queued before its epoch was cancelled still comes as answered."""
    events = list(box._events)
    box._events.clear()
    return events


def cancel_forgets(real: Any, box: InFlight, epoch: int) -> None:
    """A cancelled request that was sent makes room at once."""
    real(box, epoch)
    if box._flight is not None and box._flight.request.epoch <= epoch:
        box._flight = None


def fails_again(real: Any, box: InFlight, chunk: Any) -> None:
    """A late reply makes a second event of a request that was settled."""
    box._queue(Answered(chunk, 0, 0, 0.0))
    real(box, chunk)


def planted(name: str, breaks: str, patch: Callable[[], Patch], bounds: Bounds = QUICK) -> Mutation:
    return Mutation(name, frozenset(breaks.split()), patch, bounds)


MUTATIONS: tuple[Mutation, ...] = (
    planted("the epoch is not bumped on abort", "epoch", after(Safety, "abort", same_epoch)),
    planted("re-arm keeps the epoch", "epoch", after(Safety, "rearm", same_epoch)),
    planted("flush keeps the epoch", "epoch", after(Safety, "flush", same_epoch)),
    planted("deactivate clears the latch", "I7", after(Safety, "deactivate", unlatched)),
    planted("activate clears the latch", "I7", instead(Safety, "activate", activate_anyway)),
    planted("a second abort changes the cause", "I7", instead(Player, "abort", last_cause)),
    planted("a stop that is over plays on", "I7 state", after(Safety, "stopped", resumes)),
    planted("re-arm without an observation", "I7", instead(ControlLoop, "rearm", rearm_unseen), BLIND),
    planted("the stop comes one tick late", "I2", instead(Player, "abort", abort_later)),
    planted("a second command in the tick of the abort", "I4", instead(Player, "tick", second_command)),
    planted("holding commands zero", "I2", after(StopPlanner, "held", zeros)),
    planted("the stop does not slow down", "I2", after(StopPlanner, "plan", coasts)),
    planted("the stop never ends", "I2", after(Safety, "stopped", lambda after_, before: before)),
    planted("a tick waits", "I9", instead(ControlLoop, "tick", sleeps)),
    planted("rows are skipped by latency", "I5", instead(Handoff, "row_for", skip_by_latency)),
    planted("a step is repeated after a handoff", "I5", after(Handoff, "accept", accepted_at(-1))),
    planted("a step is left out after a handoff", "I5", after(Handoff, "accept", accepted_at(1))),
    planted("a chunk that ran out plays again", "I5", after(Handoff, "advance", begins_again)),
    planted("committed rows are cut too late", "I8", instead(Handoff, "committed_now", committed_later)),
    planted(
        "chunks that come too late are asked for in motion",
        "I13",
        lambda: mock.patch.object(Handoff, "waits", property(never_waits)),
    ),
    planted("frozen rows change while in flight", "I5 I8", after(Handoff, "advance", frozen_rows_change)),
    planted("committed rows are written while in flight", "I12", after(ControlLoop, "on_events", committed_written)),
    planted("a new epoch keeps what plays", "I1 I5 I7", after(Handoff, "cleared", keeps("playing")), UNWATCHED),
    planted(
        "a new epoch keeps what is in flight", "I3 I10 I11 exception", after(Handoff, "cleared", keeps("in_flight"))
    ),
    planted("a new epoch leaves its request awaited", "I11", instead(ControlLoop, "_drop_request", not_dropped)),
    planted("no epoch and no id is checked", "I5", instead(ControlLoop, "_answered", any_answer)),
    planted("a duplicate is accepted", "I11", instead(ControlLoop, "_answered", twice)),
    planted("a cancelled result is reported accepted", "I11", instead(ControlLoop, "_failed", cancelled_is_ok)),
    planted("a NaN is not refused", "I5", instead(Envelope, "check", lambda real, self, *a, **k: None)),
    planted("a NaN raises", "exception", instead(Envelope, "check", nan_raises)),
    planted("a request although one is in flight", "I3 exception", constant(Handoff, "due", True)),
    planted("no request when rows run out", "I10", constant(Handoff, "due", False)),
    planted("an engine that ended is not noticed", "I2", instead(ControlLoop, "on_events", unheard)),
    planted("the client answers what was cancelled", "I11", instead(InFlight, "poll", stale_answers), MAILBOX),
    planted("the client sends while the engine computes", "I3", instead(InFlight, "cancel", cancel_forgets), MAILBOX),
    planted("the client answers twice", "I11", instead(InFlight, "answered", fails_again), MAILBOX),
)
