"""Two machines and the network between them: the control loop with output ``chunks``, and the real player node.

Everything arrives at once, but for what ``Bounds.calls`` allows: that many calls of services and faults of the network
in one run, at any moment: a message that comes late or twice, out of order, or a cut that swallows what is periodic and
holds back the rest until it is mended. Both sides tick in every period, in either order.
"""

from __future__ import annotations

import contextlib
import tempfile
from bisect import bisect_right as bisect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import rclpy
import yaml
from elsewhere import Elsewhere, Network, Packet, Snapshot, settle
from engines import rows
from explore import Event, Found, Frame, Search, Violation
from handoff_machine import DT_NS, Bounds, Machine, given_rates
from invariants import DT_S, CommandRules, Limits, Monitor, Spliced, Transition
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus, PolicyStatus
from rclpy.context import Context
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from std_srvs.srv import Trigger

from phyai_engine.control.commands import Command
from phyai_engine.control.control_loop import Counters
from phyai_engine.control.player import Player
from phyai_engine.messages import stamp_ns
from phyai_engine.safety import Safety
from phyai_engine.types import F64, AbortCause, CommandKind, Schedule
from phyai_ros import outputs, player_node
from phyai_ros.outputs import ChunksOutput
from phyai_ros.session import Session

STATUS_TICKS = 3.5  # silence of the policy node after which the player stops
LINK = Bounds(
    schedule=Schedule.NAIVE_ASYNC,
    horizon=2,
    execution_steps=1,
    remembered=1,
    answers=("ok",),
    request_ticks=1.5,
    hold_ticks=1.5,
    misses_max=0,
    age_ticks=0,
    calls=2,
    orders=("here",),
)
FREE = ("tick", "answer", "mend", "word", "chunk")  # everything else counts


class Witness(CommandRules):
    """Watches the player elsewhere."""

    def __init__(self, player: Player, limits: Limits, rows_of: Callable[[int], F64]) -> None:
        super().__init__(player, limits, rows_of)
        self.forbidden_epoch = -1  # a status said that the robot may not move in it
        self.silent = 0  # ticks since a status arrived
        self.latched = False
        self.rearmed = False  # the policy node was re-armed since this player latched

    def command(self, command: Command) -> None:
        super().command(command)
        if command.kind is CommandKind.ACTION and command.epoch <= self.forbidden_epoch:
            raise Violation("I1", f"ACTION of epoch {command.epoch}, forbidden up to {self.forbidden_epoch}")

    def look(self) -> None:
        """Before anything else happens to it: has the player latched?"""
        if self._player.safety.latched and not self.latched:
            self.rearmed = False
        self.latched = self._player.safety.latched

    def end(self, event: str, *, stopped: bool) -> None:
        """An event has happened.

        :param stopped: it was an abort of this player.
        """
        before, after = self.now.safety, self._player.safety
        if after.cause is AbortCause.EXCEPTION:
            raise Violation("exception", after.text)
        if after.epoch < before.epoch and event != "robot_restart":
            raise Violation("epoch", f"the player's: from {before.epoch} to {after.epoch}")
        if stopped and not after.latched:
            raise Violation("I2", "the player's abort did not latch")
        if stopped and before.may_play and not self.now.said:
            raise Violation("I2", "the player's abort commanded nothing")
        if before.latched and not after.latched and event != "robot_restart" and not self.rearmed:
            raise Violation("I7", f"{event}: the player's latch ({before.cause.name}) left without a re-arm since")
        self.look()
        if after.epoch != before.epoch:
            self.acted = self.spliced = None
        self.aborted = after.latched
        if event == "tick":
            self.silent = min(self.silent + 1, 9)
            self.after_tick(before, after)
            if after.may_play and self.silent > STATUS_TICKS + 1:
                raise Violation("I10", f"it may move {self.silent} ticks after the last word of its policy node")
        self.after_stop(after)


class LinkMachine(Machine):
    """A policy node's control path, the network, and a player node beside the controller."""

    def __init__(self, bounds: Bounds, context: Context) -> None:
        self.network, self._late = Network(), False
        self._prompt: list[Any] = []  # what arrives once this callback is over
        super().__init__(bounds)
        file = Path(tempfile.mkdtemp()) / "robot.yaml"
        file.write_text(yaml.safe_dump(msgspec.to_builtins(self._robot)), encoding="utf-8")
        given = {
            "robot": str(file),
            "status_timeout_s": STATUS_TICKS * DT_S,
            "stop_hold_steps": bounds.stop_hold_steps,
            "max_tick_gap_s": 0.0,
        }
        overrides = [Parameter(name, value=value) for name, value in given.items()]
        options = {"start_parameter_services": False, "enable_rosout": False}
        self.node = Elsewhere(self, context=context, parameter_overrides=overrides, **options)
        settle(self.node, context)
        self.remote = self.node._player
        limits = Limits(0, 0, 2 + bounds.stop_hold_steps + 1, bounds.horizon)
        self.witness = Witness(self.remote, limits, lambda c: rows(bounds.horizon, c))
        self.receiver = Receiver(self)
        self._parts += [self._output, self.receiver, self.network, self.node, self.remote, self.witness]
        for name in ("node", "remote", "witness", "monitor", "receiver"):
            self._new[name] = vars(getattr(self, name)).copy()
        self._new["output"] = vars(self._output).copy()

    def _make_output(self) -> Any:
        return ChunksOutput(self._robot, self._send_chunk, self._mono_ns)

    def _make_monitor(self, limits: Limits) -> Monitor:
        return Monitor(self.player, limits, lambda c: rows(self.bounds.horizon, c), speaks=False)

    # ---- what is searched -----------------------------------------------------------------------------------------

    def frames(self) -> list[Frame]:
        near, far, network = self.player, self.remote, self.network
        packets = [*network.chunks, *network.statuses]
        things = [near.handoff.playing, near.handoff.in_flight, far.handoff.playing, far.handoff.in_flight]
        things += [self.monitor.spliced, self.witness.spliced, *packets, *self.engine.asks]
        ids = sorted({t.chunk_id for t in things if t is not None})
        epochs = {t.epoch for t in things if t is not None} | {near.safety.epoch, far.safety.epoch}
        epochs = sorted(epochs | {self.witness.forbidden_epoch})
        now = self.world.now_ns
        common = {"epoch": epochs, "ids": ids, "now_ns": now, "reported": far.handoff.consumed}
        common["latch"] = self.node._latch
        numbers = {"consumed": near.handoff.consumed, "held": near.handoff.held, "tick": near.tick_count}
        here = {**common, **numbers, "played": 0, "given": self._given_here(epochs, ids)}
        numbers = {"consumed": far.handoff.consumed, "held": far.handoff.held, "tick": far.tick_count}
        there = {**common, **numbers, "played": self.witness.played, "given": given_rates(far)}
        return [here] * 7 + [there] * 4

    def _given_here(self, epochs: list[int], ids: list[int]) -> dict[str, Any]:
        output, silent = vars(self._output), vars(self.loop)["_silent"]
        sent, began = output["_sent"], output["_began"]
        consumed = self.player.handoff.consumed
        return {
            **given_rates(self.player),
            "cancelled_epoch": self.engine.cancelled_epoch < self.player.safety.epoch,
            "_sent": sent
            and [
                len(epochs) - bisect(epochs, sent[0]),
                len(ids) - bisect(ids, sent[1]),
                min(9, self.remote.handoff.consumed - sent[2]),
            ],
            "_began": began and [len(ids) - bisect(ids, began[0]), min(9, began[1])],
            "_offset": self.remote.handoff.consumed - consumed - output["_offset"],
            "_silent": silent and [min(9, (self.world.now_ns - since) // DT_NS) for since in silent],
        }

    def events(self) -> list[Event]:
        network, left = self.network, self.bounds.calls - self.world.calls
        found: list[Event] = [*(("tick", side) for side in self.bounds.orders), *[("mend",)] * network.cut]
        found += [e for e in self.engine.events() if e[0] == "answer"]
        late = [(name, i) for name, i, packet in self._packets() if not packet.arrived and not network.cut]
        if left < 1:
            return found + late
        calls = ["flush", "deactivate", "abort"] if self.world.active else ["activate"]
        calls += ["rearm"] * self.player.safety.latched
        found += [
            (name,)
            for name in (*calls, "robot_abort", "robot_restart", "policy_restart", *["sever"] * (not network.cut))
        ]
        found += [(f"{name}_again", i) for name, i, packet in self._packets() if packet.arrived and not network.cut]
        found += [(*e, "late") for e in found if e[0] == "answer"]
        found += [(name, "late") for name in calls] * (left > 1)
        return [e for e in found + late if e[0] not in self.bounds.without]

    def _packets(self) -> list[tuple[str, int, Packet]]:
        network = self.network
        chunks = [("chunk", i, packet) for i, packet in enumerate(network.chunks)]
        return chunks + [("word", i, packet) for i, packet in enumerate(network.statuses)]

    def apply(self, event: Event) -> None:
        name, args = event[0], [a for a in event[1:] if a != "late"]
        self._late = "late" in event or self.network.cut
        active, refused, before = self.world.active, False, self.player.safety
        self.monitor.begin(name)
        self.witness.begin(name)
        self.world.calls += (name not in FREE) + ("late" in event)
        try:
            if name == "answer":
                self.engine.apply(name, *args)
                self.loop.on_events()
            else:
                refused = getattr(self, f"_{name}")(*args) is False
            while self._prompt:
                self._prompt.pop(0)()
        except Violation:
            raise
        except Exception as error:
            raise Violation("exception", f"{name}: {error!r}") from error
        self.monitor.end(active=active, fresh=True, refused=refused, holds_for_ever=False)
        if name == "rearm" and not refused:
            self.witness.rearmed = True
        if self.player.safety.epoch != before.epoch:  # the node reports at once what it did
            self.network.statuses = (*self.network.statuses, self._status())[-2:]
            if not self._late:
                self._word(len(self.network.statuses) - 1)
        self.witness.end(name, stopped=name == "robot_abort")
        if self.world.calls >= self.bounds.calls:  # nothing can come twice any more
            network = self.network
            network.chunks = tuple(packet for packet in network.chunks if not packet.arrived)
            network.statuses = tuple(packet for packet in network.statuses if not packet.arrived)

    # ---- events ---------------------------------------------------------------------------------------------------

    def _tick(self, first: str) -> None:
        """A period: both sides tick, PolicyStatus and ChunkStatus pass."""
        self.world.now_ns += DT_NS
        sides = [self._tick_here, self.node.callbacks["tick"]]
        for tick in sides if first == "here" else reversed(sides):
            tick()
            while self._prompt:
                self._prompt.pop(0)()
        if not self.network.cut:
            self._heard(self._status())

    def _tick_here(self) -> None:
        newest = self.engine.ids[-1:]
        heard = self.network.heard_consumed
        if self.world.active:
            self.loop.tick(self.world.now_ns)
        if self.engine.ids[-1:] != newest:
            known = heard is not None  # else the policy node does not know yet that the player restarted
            consumed = self.remote.handoff.consumed
            self.network.snapshot = Snapshot(self.engine.ids[-1], heard, consumed) if known else None

    def _sever(self) -> None:
        self.network.cut = True

    def _mend(self) -> None:
        self.network.cut = False

    def _status(self) -> Packet:
        """PolicyStatus as it would be sent now."""
        safety = self.player.safety
        state, latch = int(safety.state), self.receiver.player_latch
        message = PolicyStatus(robot_id="one_joint", safety_state=state, epoch=safety.epoch, player_latch=latch)
        return Packet(safety.epoch, state=state, player_latch=latch, message=message)

    def _word(self, i: int) -> None:
        """A PolicyStatus that told a change arrives."""
        packet, statuses = self.network.statuses[i], self.network.statuses
        self.network.statuses = (*statuses[:i], replace(packet, arrived=True), *statuses[i + 1 :])
        self._heard(packet)

    def _heard(self, packet: Packet) -> None:
        self.witness.look()
        self.node.callbacks["status"](packet.message)
        self.witness.silent = 0
        if packet.state not in player_node.MOVING:
            self.witness.forbidden_epoch = max(self.witness.forbidden_epoch, packet.epoch)

    def _chunk(self, i: int) -> None:
        """An ActionChunk arrives."""
        packet, chunks = self.network.chunks[i], self.network.chunks
        self.network.chunks = (*chunks[:i], replace(packet, arrived=True), *chunks[i + 1 :])
        before = self.remote.handoff.playing
        self.node.callbacks["chunk"](packet.message)
        playing = self.remote.handoff.playing
        if playing is before or playing is None:
            return
        if packet.epoch != playing.epoch or packet.chunk_id != playing.chunk_id:
            raise Violation("I1", f"chunk {packet.chunk_id} of epoch {packet.epoch} plays as one of {playing.epoch}")
        if before is not None and before.epoch == packet.epoch and before.chunk_id >= packet.chunk_id:
            raise Violation("I6", f"chunk {packet.chunk_id} after {before.chunk_id}")
        self.witness.spliced = Spliced(playing.epoch, playing.chunk_id, packet.base_step)

    _word_again, _chunk_again = _word, _chunk

    def _robot_abort(self) -> None:
        self.node.callbacks["abort"](Trigger.Request(), Trigger.Response())

    def _robot_restart(self) -> None:
        latch = self.node._latch + 1000  # a new life's numbers were never used
        self.node.__dict__ = {**self._new["node"], "_latch": latch}
        self.remote.__dict__ = {**self._new["remote"]}
        self.witness.__dict__ = {**self._new["witness"], "now": self.witness.now}

        self.network.snapshot = self.network.heard_consumed = None

    def _policy_restart(self) -> None:
        """Another policy node of the same name: its epochs are higher, its chunk ids and counts begin anew."""
        safety = Safety(epoch=self.player.safety.epoch + 10)
        new = self._new
        self.player.__dict__ = {**new["player"], "safety": safety}
        self.loop.__dict__ = {**new["loop"], "counters": Counters()}
        self._output.__dict__, self.receiver.__dict__ = {**new["output"]}, {**new["receiver"]}
        self.monitor.__dict__ = {**new["monitor"], "now": Transition("policy_restart", self.player)}
        self.engine.asks, self.world.active = (), False
        self.engine.renew()
        self.network.snapshot, self.network.heard_consumed = None, 0

    # ---- what is published ----------------------------------------------------------------------------------------

    def _send_chunk(self, key: str, message: ActionChunk) -> None:
        at, taken = stamp_ns(message.header.stamp), self.network.snapshot
        if taken is not None and taken.chunk_id == message.chunk_id:
            base = message.base_step
            if not taken.heard_consumed <= base <= taken.consumed_steps:
                raise Violation("I5", f"base_step {base} of chunk {message.chunk_id}, taken at {taken}")
        packet = Packet(message.epoch, message.chunk_id, message.base_step, stamp_ns=at, message=message)
        self.network.chunks = (*self.network.chunks, packet)[-2:]
        if not self._late:
            self._prompt.append(lambda: self._chunk(len(self.network.chunks) - 1))

    def published(self, message: Any) -> None:
        """The player node published something."""
        if isinstance(message, ChunkStatus):
            if not self.network.cut:
                self.network.heard_consumed = message.consumed_steps
                receiver: Any = self.receiver
                self._prompt.append(lambda: Session._acknowledged(receiver, self._output, message))
        elif isinstance(message, ActionStep):
            values, rates = np.array(message.values), np.array(message.velocities)
            kind = CommandKind(message.kind)
            said = message.tick, message.epoch, message.chunk_id, message.step
            self.witness.command(Command(kind, values, rates, *said))


class Receiver:
    """What Session._acknowledged needs of a session."""

    def __init__(self, machine: LinkMachine) -> None:
        self.loop, self.lock = machine.loop, nullcontext()
        self._player_consumed = self.player_latch = 0
        self._abort = machine.loop.abort


@contextlib.contextmanager
def linked(bounds: Bounds) -> Iterator[LinkMachine]:
    """A link machine whose clocks stand still between ticks."""
    context = Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
    with ExitStack() as stack:
        stack.callback(rclpy.shutdown, context=context)
        machine = LinkMachine(bounds, context)
        stack.callback(machine.node.destroy_node)
        stack.enter_context(mock.patch("time.sleep", machine.sleep))
        for module in (outputs, player_node):
            stack.enter_context(mock.patch.object(module, "mono_ns", machine._mono_ns))
        stack.enter_context(mock.patch.object(outputs, "ACKNOWLEDGE_S", 3.5 * DT_S))
        yield machine


def explore_link(bounds: Bounds, **options: Any) -> Found:
    """Search both machines."""
    with linked(bounds) as machine:
        return Search(machine, DT_NS, age_max=5, **options).run()
