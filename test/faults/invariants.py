"""What must hold on every transition of the handoff/safety machine (design.md section 8), watched from outside.

The monitor hears what leaves the code under test: commands, requests, cancellations, reports. Beside that it reads the
player's public state. It keeps its own account of what was asked, accepted and played, and never trusts theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from explore import Violation

from phyai_engine.control.commands import Command
from phyai_engine.control.player import Player
from phyai_engine.safety import Safety
from phyai_engine.timing import Timing
from phyai_engine.types import F64, CommandKind, Request, SafetyState

DT_S = 0.1  # the control period of every searched robot
NAMES = {
    "I1": "after an abort nothing of an older epoch is commanded, and no action until a re-arm",
    "I2": "an abort commands a stop at once, from every state; the stop comes to rest and ends",
    "I3": "at most one request is awaited; none is sent while the engine computes another",
    "I4": "every tick commands exactly once while there is something to command, never twice",
    "I5": "played rows are contiguous, begin at the count consumed since the snapshot, and are the engine's own",
    "I6": "accepted chunk ids increase",
    "I7": "the latch and its cause leave only by a re-arm; what starts anew has no committed actions",
    "I8": "committed rows are what is played until the handoff",
    "I9": "no callback waits",
    "I10": "a request is sent when rows run out, answered or given up in time, and an accepted chunk plays",
    "I11": "a cancelled, failed or refused inference is never reported accepted; every request has one outcome",
    "I12": "arrays handed to the engine, and the engine's chunks, are never written",
    "I13": "where a chunk came after more than half its rows, the next one is asked for at rest and continues nothing",
    "epoch": "the epoch never falls, and every abort, re-arm, activation, deactivation and flush raises it",
    "state": "safety state, latch and lifecycle agree",
    "exception": "no exception leaves a callback",
}


@dataclass(frozen=True, slots=True)
class Awaited:
    """A request without outcome.

    :param played: count of actions at its snapshot. :param left: rows that were left to play then.
    :param age: in ticks.
    """

    epoch: int
    chunk_id: int
    played: int
    committed: F64 | None
    left: int
    age: int = 0


@dataclass(frozen=True, slots=True)
class Spliced:
    """The newest accepted chunk. ``played``: count of actions at its row 0, None once its first row was played."""

    epoch: int
    chunk_id: int
    played: int | None


@dataclass(frozen=True, slots=True)
class Acted:
    """The last action."""

    chunk_id: int
    row: int
    tick: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the configuration promises [ticks], and the row from which on none may be played.

    :param waits: a chunk that takes longer makes the robot wait for the next; infinity where that is not watched.
    """

    request_ticks: float
    hold_ticks: float
    stop_ticks: int
    last_row: int
    waits: float = math.inf


class Transition:
    """What one event does, and how it found the player."""

    def __init__(self, event: str, player: Player) -> None:
        self.event, self.safety = event, player.safety
        self.said: list[Command] = []
        self.known = player.last_command is not None
        self.left = player.handoff.remaining_steps

    @property
    def actions(self) -> list[Command]:
        """The actions among what was said."""
        return [c for c in self.said if c.kind is CommandKind.ACTION]


class CommandRules:
    """Watches the commands of one player.

    :param rows: chunk_id -> the chunk the engine made for that request.
    """

    def __init__(self, player: Player, limits: Limits, rows: Callable[[int], F64]) -> None:
        self._player, self._limits, self._rows = player, limits, rows
        self.spliced: Spliced | None = None
        self.played = 0  # actions so far
        self.acted: Acted | None = None
        self.spoke: int | None = None  # tick of the last command
        self.speed = 0.0  # of the last command
        self.said_values: F64 | None = None  # what it commanded
        self.aborted = False
        self.stopping = 0  # ticks in a row
        self.now = Transition("", player)

    def begin(self, event: str) -> None:
        """An event is about to happen."""
        self.now = Transition(event, self._player)

    def command(self, command: Command) -> None:
        """A command left."""
        safety = self._player.safety
        self.now.said.append(command)
        if command.epoch != safety.epoch:
            raise Violation("I1", f"a {command.kind.name} of epoch {command.epoch} in epoch {safety.epoch}")
        if command.kind is not CommandKind.STOP and (self.aborted or safety.latched or not safety.may_play):
            raise Violation("I1", f"{command.kind.name} while {safety.state.name}, aborted: {self.aborted}")
        if self.spoke is not None and command.tick <= self.spoke:
            raise Violation("I4", f"tick {command.tick} was already commanded, last {self.spoke}")
        if command.kind is CommandKind.STOP and safety.state is not SafetyState.STOPPING:
            raise Violation("I2", f"a STOP while {safety.state.name}")
        speed = float(np.abs(command.rates).max())
        if command.kind is CommandKind.ACTION:
            self._action(command)
        else:
            self._slows_down(command, speed)
        self.spoke, self.speed, self.said_values = command.tick, speed, command.values

    def after_tick(self, before: Safety, after: Safety) -> None:
        """A control tick is over."""
        newly = after.latched and not before.latched
        if self.now.known and (before.may_play or before.state is SafetyState.STOPPING) and not newly:
            # A stop that came after the tick is the next one's command.
            if self._player.tick_count not in (self.spoke, *(c.tick for c in self.now.said)):
                raise Violation("I4", f"tick {self._player.tick_count} was not commanded while {before.state.name}")
            if self.spliced is not None and self.spliced.played is not None:
                raise Violation("I10", f"{self.spliced} did not play")
        self.stopping += 1
        if after.state is SafetyState.STOPPING and self.stopping > self._limits.stop_ticks:
            raise Violation("I2", f"the stop goes on after {self.stopping} ticks")

    def after_stop(self, after: Safety) -> None:
        """At the end of every event: a stop that is over came to rest."""
        if after.state is SafetyState.STOPPING:
            return
        self.stopping = 0
        if self.speed != 0.0 and CommandKind.STOP in [c.kind for c in self.now.said]:
            raise Violation("I2", f"the stop ends at {self.speed}")

    def _action(self, command: Command) -> None:
        chunk, row, spliced = command.chunk_id, command.step, self.spliced
        if spliced is None or (command.epoch, chunk) != (spliced.epoch, spliced.chunk_id):
            raise Violation("I5", f"row {row} of chunk {chunk} played, accepted: {spliced}")
        if spliced.played is not None:
            if row != self.played - spliced.played:
                played = self.played - spliced.played
                raise Violation("I5", f"chunk {chunk} begins at row {row}, {played} were consumed since")
            self.spliced = replace(spliced, played=None)
        elif self.acted != Acted(chunk, row - 1, command.tick - 1):
            raise Violation("I5", f"row {row} of chunk {chunk} at tick {command.tick} after {self.acted}")
        if not 0 <= row < self._limits.last_row:
            raise Violation("I5", f"row {row} of {self._limits.last_row}")
        if not np.array_equal(command.values, self._rows(chunk)[row]):
            raise Violation("I5", f"row {row} of chunk {chunk} is {command.values}")
        self.acted = Acted(chunk, row, command.tick)
        self.played += 1

    def _slows_down(self, command: Command, speed: float) -> None:
        """STOP and HOLD go on from the last command without a jump, never faster."""
        limit = self.speed if self.now.known else 0.0
        if not speed <= limit + 1e-9:
            raise Violation("I2", f"{command.kind.name} goes {speed} after {limit}")
        if self.now.known and self.said_values is not None:
            jump = float(np.abs(command.values - self.said_values).max())
            if not jump <= limit * DT_S + 1e-9:
                raise Violation("I2", f"{command.kind.name} jumps by {jump} at {limit}")


class Monitor(CommandRules):
    """Watches a policy node's control loop as well.

    :param speaks: its player commands the robot itself, tick by tick.
    """

    def __init__(self, player: Player, limits: Limits, rows: Callable[[int], F64], *, speaks: bool = True) -> None:
        super().__init__(player, limits, rows)
        self._speaks = speaks
        self.awaited: tuple[Awaited, ...] = ()
        self.anew = True  # nothing was asked yet since what played was dropped
        self.slow = False  # the newest chunk that was timed took longer than half its rows
        self.holding = 0  # ticks in a row

    # ---- what the loop says ---------------------------------------------------------------------------------------

    def request(self, request: Request) -> None:
        """A request was submitted."""
        safety, handoff, committed = self._player.safety, self._player.handoff, request.committed
        if not safety.may_play or request.epoch != safety.epoch:
            raise Violation("state", f"a request of epoch {request.epoch} while {safety.state.name} {safety.epoch}")
        if self.awaited:
            raise Violation("I3", f"{request.chunk_id} is asked for while {self.awaited} is awaited")
        if handoff.in_flight is None or handoff.in_flight.chunk_id != request.chunk_id:
            raise Violation("I3", "the player does not know of the request")
        if self.anew and committed is not None:
            raise Violation("I7", f"the first request of a start has {len(committed.actions)} committed actions")
        self.anew = False
        left = self.now.left
        if self.slow and (left or committed is not None):
            raise Violation("I13", f"{request.chunk_id} is asked for with {left} rows left")
        # The tick's own action follows the snapshot, also where the request is submitted after it.
        actions = self.now.actions
        rows = None if committed is None else committed.actions
        self.awaited = (Awaited(request.epoch, request.chunk_id, self.played - len(actions), rows, left),)
        if committed is None:
            return
        if not 0 < committed.delay_steps <= len(committed.actions):
            raise Violation("I8", f"d = {committed.delay_steps} of {len(committed.actions)} committed rows")
        for row, action in zip(committed.actions, actions, strict=False):
            self._same(row, action)

    def report(self, timing: Timing) -> None:
        """A request got its outcome."""
        ended = [a for a in self.awaited if a.chunk_id == timing.chunk_id]
        spliced = self.spliced
        if not self._speaks and timing.outcome == "refused" and spliced and timing.chunk_id == spliced.chunk_id:
            self.spliced = None  # the player elsewhere does not play it
            return
        if not ended:
            raise Violation("I11", f"chunk {timing.chunk_id} is {timing.outcome} but was not awaited")
        if timing.outcome == "accepted":
            self._accept(ended[0])
        self.awaited = tuple(a for a in self.awaited if a.chunk_id != timing.chunk_id)

    def _accept(self, awaited: Awaited) -> None:
        safety = self._player.safety
        if awaited.epoch != safety.epoch or not safety.may_play:
            raise Violation("I11", f"{awaited} accepted while {safety.state.name} {safety.epoch}")
        if self.now.event not in ("answer", "deliver"):
            raise Violation("I11", f"{awaited} accepted by {self.now.event}")
        if self.spliced is not None and awaited.chunk_id <= self.spliced.chunk_id:
            raise Violation("I6", f"chunk {awaited.chunk_id} after {self.spliced.chunk_id}")
        self.spliced, self.holding = Spliced(awaited.epoch, awaited.chunk_id, awaited.played), 0
        if self._speaks and (awaited.left or self.slow):  # a player elsewhere counts in steps of its own
            self.slow = awaited.age > self._limits.waits

    # ---- one transition -------------------------------------------------------------------------------------------

    def end(self, *, active: bool, fresh: bool, refused: bool, holds_for_ever: bool) -> None:
        """An event has happened.

        :param active: the node's lifecycle state before it. :param refused: the call said no.
        :param fresh: an observation could be had, and the robot's pose was known.
        :param holds_for_ever: max_hold_s is 0.
        """
        event, before, after = self.now.event, self.now.safety, self._player.safety
        rearmed = event == "rearm" and not refused
        self._state(before, after)
        self._epoch(before, after, {"rearm": rearmed, "activate": not refused, "deactivate": active, "flush": active})
        self._abort(before, after, active, fresh)
        self._latch(before, after, rearmed, active and not fresh)
        if event == "reconfigure":
            self.spoke = None  # a new player counts ticks anew
        if event in ("tick", "stuck") and active:
            self._tick(before, after, fresh, holds_for_ever)
        if after.state is not SafetyState.HOLDING:
            self.holding = 0
        self.after_stop(after)
        stale = [a for a in self.awaited if a.epoch != after.epoch]
        if stale:
            raise Violation("I11", f"{stale} belongs to an older epoch and got no outcome")

    def _state(self, before: Safety, after: Safety) -> None:
        if after.latched and after.may_play:
            raise Violation("state", f"latched by {after.cause.name} while {after.state.name}")
        if after.state is SafetyState.LATCHED and not after.latched:
            raise Violation("state", "LATCHED without a cause")
        if after.state is SafetyState.UNKNOWN:
            raise Violation("state", "UNKNOWN")

    def _epoch(self, before: Safety, after: Safety, raised: dict[str, bool]) -> None:
        if after.epoch < before.epoch:
            raise Violation("epoch", f"from {before.epoch} to {after.epoch}")
        newly = after.latched and not before.latched
        if (newly or raised.get(self.now.event, False)) and after.epoch == before.epoch:
            raise Violation("epoch", f"{self.now.event} left it at {after.epoch}")
        if before.latched and self.now.event in ("abort", "jump", "signal", "lost") and after.epoch != before.epoch:
            raise Violation("epoch", "a second abort moved it")
        if newly or raised.get(self.now.event, False):  # what played and what was awaited is gone
            self.spliced, self.anew, self.acted, self.slow = None, True, None, False

    def _abort(self, before: Safety, after: Safety, active: bool, measured: bool) -> None:
        event = self.now.event
        if not after.latched and (event in ("abort", "jump", "lost") or (event == "signal" and active)):
            raise Violation("I2", f"not latched after {event}")
        if not after.latched or before.latched or not (self._speaks and active and before.may_play):
            return
        # Where nobody knows where the robot is nothing can be commanded, and nothing was.
        if self.now.known or measured:
            kinds = [c.kind.name for c in self.now.said]
            if "STOP" not in kinds or (event not in ("tick", "stuck") and kinds[0] != "STOP"):
                raise Violation("I2", f"latched by {after.cause.name}, commanded {kinds}")

    def _latch(self, before: Safety, after: Safety, rearmed: bool, blind: bool) -> None:
        if before.latched and not rearmed and (after.cause, after.text) != (before.cause, before.text):
            raise Violation("I7", f"{self.now.event}: {before.cause.name} became {after.cause.name}")
        if rearmed and (after.latched or blind):
            raise Violation("I7", f"re-armed to {after.state.name}, without an observation: {blind}")
        if self.aborted and not rearmed and not after.latched:
            raise Violation("I7", f"{self.now.event}: the latch is gone")
        if not before.may_play and after.may_play and not (rearmed or self.now.event == "activate"):
            raise Violation("I7", f"{self.now.event}: {before.state.name} became {after.state.name} by itself")
        self.aborted = after.latched

    def _tick(self, before: Safety, after: Safety, fresh: bool, for_ever: bool) -> None:
        self.awaited = tuple(replace(a, age=a.age + 1) for a in self.awaited)
        if any(a.age > self._limits.request_ticks + 1 for a in self.awaited):
            raise Violation("I10", f"{self.awaited} is awaited for ever")
        if self._speaks:
            self.after_tick(before, after)
        # A robot that was never moved, or whose player refused what it got, may wait for ever.
        self.holding = min(self.holding + 1, 9) if self._player.last_command is not None else 0
        if after.state is SafetyState.HOLDING and self.holding > self._limits.hold_ticks + 2 and not for_ever:
            raise Violation("I10", f"held for {self.holding} ticks")
        nothing_left = not self.now.left and not self._player.handoff.remaining_steps
        if after.may_play and fresh and not self.awaited and nothing_left:
            raise Violation("I10", f"no request, though nothing is left to play while {after.state.name}")

    def _action(self, command: Command) -> None:
        super()._action(command)
        for awaited in self.awaited:
            k = self.played - 1 - awaited.played
            if awaited.committed is not None and k < len(awaited.committed):
                self._same(awaited.committed[k], command)

    @staticmethod
    def _same(row: F64, command: Command) -> None:
        if not np.array_equal(row, command.values):
            raise Violation("I8", f"committed {row}, played {command.values} (row {command.step})")
