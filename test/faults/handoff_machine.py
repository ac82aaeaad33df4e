"""The closed model: the real Player and ControlLoop, an engine that does what it likes, and the node's few rules."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from engines import MailboxEngine, WildEngine, rows
from explore import Event, Found, Frame, Search, Violation, fork
from invariants import DT_S, Limits, Monitor

from phyai_engine.config import ActionEntry, RobotConfig, StateEntry
from phyai_engine.control.commands import Command
from phyai_engine.control.control_loop import ControlLoop, LoopSettings
from phyai_engine.control.player import Player
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import Accepted, HandoffSettings
from phyai_engine.safety import LatchedError, Safety
from phyai_engine.timing import Timing
from phyai_engine.types import (
    F64,
    AbortCause,
    Chunk,
    Observation,
    Refusal,
    Schedule,
)

DT_NS = round(DT_S * 1e9)
POSE = np.array([0.075])


@dataclass(frozen=True)
class Bounds:
    """What one search covers.

    :param answers: what a delivered chunk may be: ok, nan, out (of the limits), short (a row missing), jump (a seam).
    :param remembered: requests the engine may still answer, the newest included.
    :param request_ticks: request_timeout_s; ``hold_ticks`` max_hold_s, both [ticks].
    :param mailbox: the client's real mailbox lies before the engine; ``prompt``: its thread is never late.
    :param blind: also every call while observation and joint states are stale.
    :param without: events left out. :param calls: calls and faults in one run, link machine only.
    :param orders: which side may tick first in a period; likewise.
    """

    schedule: Schedule = Schedule.RTC
    horizon: int = 4
    execution_steps: int = 2
    delay_init_steps: int = 1
    delay_window: int = 1
    request_ticks: float = 3.5
    hold_ticks: float = 2.5
    misses_max: int = 2
    age_ticks: float = 8.5
    stop_hold_steps: int = 1
    remembered: int = 2
    answers: tuple[str, ...] = ("ok", "nan")
    blind: bool = False
    mailbox: bool = False
    prompt: bool = False
    first_epoch: int = 100
    without: frozenset[str] = frozenset()
    calls: int = 3
    orders: tuple[str, ...] = ("here", "there")


def robot() -> RobotConfig:
    """One joint: half a radian a second is lost in two steps."""
    limits: Any = {"lower": -2.0, "upper": 2.0, "velocity_max": 2.0, "acceleration_max": 3.0}
    return RobotConfig(
        robot_id="one_joint",
        action_type="joint_position",
        dt_s=DT_S,
        state=(StateEntry(name="joint"),),
        actions=(ActionEntry(name="joint", state="joint", **limits),),
        first_step_max=0.4,
        seam_jump_max=0.4,
    )


class Steps:
    """Output ``steps``: hands every command to the monitor."""

    ticks = True

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def command(self, command: Command) -> None:
        self._machine.monitor.command(command)

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None: ...
    def stop(self, plan: Any) -> None: ...
    def consumed(self) -> None: ...
    def since_step_s(self) -> None: ...
    def begun(self) -> None: ...
    def ready(self) -> None: ...
    def motion(self) -> None: ...
    def take_rejection(self) -> None: ...
    def reset(self, consumed: int) -> None: ...


def given_rates(player: Player) -> dict[str, Any]:
    """Canonical attributes of a player: rates of rows that were played matter no more."""
    rates, playing = vars(player).get("_rates"), player.handoff.playing
    if rates is None or playing is None:
        return {"_rates": None}
    return {"_rates": [round(r, 5) for r in rates[playing.next_row :].ravel().tolist()]}


class World:
    """What is neither code under test nor engine nor monitor."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * DT_NS
        self.active = False  # the node's lifecycle state
        self.holds_for_ever = False  # the live parameter max_hold_s is 0
        self.calls = 0  # so far


class Machine:
    """One policy node's control path, its engine and the world around it.

    The node's own rules are written out here: ticks only while active, re-arm only when the stop is over, the engine
    alive and an observation fresh, configure only while inactive. test_stateful.py runs the node's.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.world = bounds, World()
        self.seen: set[Any] = set()  # states, outcomes and refusals, for tests that all of them did come up
        self._blind = self._may_sleep = False
        self._slept = 0
        self._robot = robot()
        self._output = self._make_output()
        self.player = self._make_player()
        last_row = bounds.execution_steps if bounds.schedule is Schedule.SYNC else bounds.horizon
        # Of one remembered delay the monitor keeps its own account.
        waits = bounds.horizon / 2 if bounds.delay_window == 1 and bounds.schedule is not Schedule.SYNC else math.inf
        limits = Limits(bounds.request_ticks, bounds.hold_ticks, 2 + bounds.stop_hold_steps + 1, last_row, waits)
        self.monitor = self._make_monitor(limits)
        self.engine = self._make_engine()
        self.loop = self._make_loop()
        self._parts = [self.world, self.player, self.loop, self.engine, self.monitor]
        if bounds.mailbox:
            self._parts.append(self.engine.box)
        self._new = {name: fork(vars(part)) for name, part in (("player", self.player), ("loop", self.loop))}

    def _make_output(self) -> Any:
        return Steps(self)

    def _make_monitor(self, limits: Limits) -> Monitor:
        return Monitor(self.player, limits, lambda chunk_id: rows(self.bounds.horizon, chunk_id))

    def _make_engine(self) -> Any:
        b = self.bounds
        if b.mailbox:
            return MailboxEngine(b.horizon, b.answers, b.prompt, self.monitor)
        return WildEngine(b.horizon, b.answers, b.remembered, self.monitor)

    def _make_player(self) -> Player:
        b = self.bounds
        settings = HandoffSettings(
            b.schedule, b.horizon, b.execution_steps, DT_S, b.delay_init_steps, delay_window=b.delay_window
        )
        safety = Safety(epoch=b.first_epoch)
        holds = b.stop_hold_steps
        return Player(self._robot, settings, safety, self._output, self._measured, stop_hold_steps=holds)

    def _make_loop(self) -> ControlLoop:
        b = self.bounds
        settings = LoopSettings(
            DT_S,
            b.schedule,
            request_timeout_s=b.request_ticks * DT_S,
            hold_max_s=b.hold_ticks * DT_S,
            misses_max=b.misses_max,
            observation_age_s=b.age_ticks * DT_S,
            tick_gap_s=DT_S,  # five periods at least
            window=1,
        )
        return ControlLoop(settings, self._snapshot, self.engine, self.player, self._mono_ns, self._report)

    # ---- what is searched -----------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[Any]:
        return self._parts

    def frames(self) -> list[Frame]:
        handoff, monitor = self.player.handoff, self.monitor
        ids = set(self.engine.ids)
        ids.update(x.chunk_id for x in (handoff.playing, handoff.in_flight, monitor.spliced) if x is not None)
        frame = {
            "epoch": self.player.safety.epoch,
            "ids": sorted(ids),
            "consumed": handoff.consumed,
            "held": handoff.held,
            "tick": self.player.tick_count,
            "played": monitor.played,
            "now_ns": self.world.now_ns,
            "given": given_rates(self.player),
        }
        return [frame] * len(self._parts)

    def events(self) -> list[Event]:
        if self.engine.full:  # the node looks at what its engine says before long
            return self.engine.events()
        latched = self.player.safety.latched
        calls = ["tick", "stuck", "beat", "flush", "deactivate"] if self.world.active else ["activate", "reconfigure"]
        calls += ["abort", "jump", "signal", "param", "restart", *(["rearm"] if latched else [])]
        found: list[Event] = [(name,) for name in calls if name not in self.bounds.without]
        if self.bounds.blind:
            found += [(name, "blind") for name in calls if name in ("tick", "abort", "rearm")]
        found += [e for e in self.engine.events() if e[0] not in self.bounds.without]
        if self.bounds.blind and self.player.last_command is None:
            found += [(*e, "blind") for e in found if e[0] == "answer"]
        return found

    def apply(self, event: Event) -> None:
        name, args = event[0], event[1:]
        self._blind = "blind" in args
        monitor, active, refused = self.monitor, self.world.active, False
        monitor.begin(name)
        call = getattr(self, f"_{name}", None)
        self._may_sleep = False
        try:
            if call is not None:
                refused = call() is False
            else:
                self.engine.apply(name, *(a for a in args if a != "blind"))
                if self.engine.events_at_once or name == "deliver":
                    self.loop.on_events()
        except Violation:
            raise
        except Exception as error:
            raise Violation("exception", f"{name}: {error!r}") from error
        monitor.end(active=active, fresh=not self._blind, refused=refused, holds_for_ever=self.world.holds_for_ever)
        self.engine.check()
        self.seen.add(self.player.safety.state)

    # ---- the node's events; False where it says no ----------------------------------------------------------------

    def _tick(self) -> None:
        self.world.now_ns += DT_NS
        self.loop.tick(self.world.now_ns)

    def _stuck(self) -> None:
        """The executor was blocked: the next tick is late by many periods."""
        self.world.now_ns += 7 * DT_NS
        self._tick()

    def _beat(self) -> None:
        self.loop.beat()

    def _abort(self) -> None:
        self.loop.abort(AbortCause.SERVICE, "~/abort was called")

    def _jump(self) -> None:
        self.loop.abort(AbortCause.CLOCK_JUMP, "the clock went back")

    def _signal(self) -> None:
        if self.world.active:
            self.loop.abort(AbortCause.SIGNAL, "SIGINT")
            self._finish()

    def _rearm(self) -> bool:
        if self.player.stopping or self.engine.lost:
            return False
        try:
            self.loop.rearm(self.world.now_ns, active=self.world.active)
        except RefusalError:
            return False
        return True

    def _flush(self) -> None:
        self.loop.flush()

    def _activate(self) -> bool:
        try:
            self.loop.activate()
        except LatchedError:
            return False
        self.world.active = True
        return True

    def _deactivate(self) -> None:
        self.loop.stop()
        self._finish()
        self.world.active = False
        self.player.deactivate()

    def _restart(self) -> bool:
        """~/restart_engine: only where the robot may not move."""
        if self.player.stopping or self.player.safety.may_play:
            return False
        self.engine.renew()
        return True

    def _reconfigure(self) -> None:
        """cleanup, configure: player, loop and engine are new; the epoch and the latch stay."""
        self.player.deactivate()
        safety = self.player.safety
        self.player.__dict__ = {**self._new["player"], "safety": safety}
        self.loop.__dict__ = fork(self._new["loop"])
        self.engine.renew()
        self._param_is(self.world.holds_for_ever)

    def _param(self) -> None:
        self._param_is(not self.world.holds_for_ever)

    def _param_is(self, for_ever: bool) -> None:
        self.world.holds_for_ever = for_ever
        hold_s = 0.0 if for_ever else self.bounds.hold_ticks * DT_S
        self.loop.settings = replace(self.loop.settings, hold_max_s=hold_s)

    def _finish(self) -> None:
        self._may_sleep, self._slept = True, 0
        self.player.finish_stop()
        self._may_sleep = False

    # ---- what the code under test calls ---------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Stands for time.sleep."""
        if not self._may_sleep:
            raise Violation("I9", f"a callback waits for {seconds} s")
        self._slept += 1
        if self._slept > 50:
            raise Violation("I2", "the stop does not end")

    def _mono_ns(self) -> int:
        return self.world.now_ns

    def _measured(self) -> F64:
        return np.full(1, np.nan) if self._blind else POSE.copy()

    def _snapshot(self, now_ros_ns: int, now_mono_ns: int) -> Observation:
        if self._blind:
            raise RefusalError(Refusal.STALE, "the camera is silent")
        return Observation({}, POSE.copy(), POSE * np.nan, "", 1, 1, now_mono_ns, now_mono_ns)

    def _report(self, timing: Timing) -> None:
        self.seen.update((timing.outcome, timing.refusal))
        self.monitor.report(timing)


@contextlib.contextmanager
def asleep(machine: Machine) -> Iterator[None]:
    """While this runs nobody sleeps; nothing but the stop runs meanwhile."""
    with mock.patch("time.sleep", machine.sleep):
        yield


def explore(bounds: Bounds, kind: type[Machine] = Machine, **options: Any) -> Found:
    """Search one configuration."""
    machine = kind(bounds)
    with asleep(machine):
        return Search(machine, DT_NS, **options).run()
