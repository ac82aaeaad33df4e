"""One model of a server: its replicas, the queue in front of them, and what becomes of each when a replica is lost."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.serve.batcher import Ask, Batcher, Dropped
from phyai_engine.serve.latency import LatencyModel
from phyai_engine.serve.protocol import (
    Array,
    EngineHello,
    ErrorKind,
    ErrorReply,
    Hello,
    HelloReply,
    JoinReply,
    Message,
    Phase,
    Reply,
)
from phyai_engine.serve.replica import Replica
from phyai_engine.serve.server_config import ServedModel
from phyai_engine.types import Refusal

_RESTART_PAUSE_S = 1.0  # doubled with every loss before a replica got ready
_RESTART_PAUSE_MAX_S = 60.0
_LAST_EPOCH = (1 << 63) - 1
_log = logging.getLogger(__name__)


class Front(Protocol):
    """What a pool tells, each within the call that found it out."""

    def answered(self, ask: Ask, reply: Reply, arrays: dict[str, Array], rows: int) -> None:
        """A request has its chunk, from a batch of so many rows."""

    def failed(self, ask: Ask, error: ErrorReply) -> None:
        """A request gets none."""

    def joined(self, slot: int, reason: str) -> None:
        """A robot can ask; or cannot, for ``reason``."""

    def ready(self, pool: Pool) -> None:
        """The first replica has warmed up."""

    def forgotten(self, slot: int) -> None:
        """What a model remembered of a robot is lost with its replica."""


@dataclass(slots=True)
class Place:
    """Where a replica runs, and how often one was lost there."""

    device: int | None
    replica: Replica | None = None
    killed: Replica | None = None  # the one before, until the kernel has ended it
    losses: int = 0
    again_s: float = 0.0
    rows: int = 0  # of the batch that runs


class Pool:
    """For the front's thread only.

    :param start_timeout_s: for a replica to get ready.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        served: ServedModel,
        model: ModelConfig,
        robot: RobotConfig,
        *,
        start_timeout_s: float,
    ) -> None:
        self.name, self.served = name, served
        self.engine: EngineHello | None = None
        self.batcher: Batcher | None = None
        self.failure = ""  # why the model cannot be served: no replica ever ran, and the last one ended so
        self._context, self._start_timeout_s = context, start_timeout_s
        self._hello = Hello(
            robot=msgspec.to_builtins(robot), model=msgspec.to_builtins(model), batches=served.buckets, warm_up_count=3
        )
        self._robots: dict[int, dict[str, Any]] = {}
        self._joining: dict[int, set[int]] = {}  # slot -> replicas that have not answered yet
        self._pins: dict[int, int] = {}
        self.places = [Place(device) for device in served.places]

    # --- what the front does ---

    def start(self) -> None:
        """Start every replica; :meth:`Front.ready` follows."""
        for index in range(len(self.places)):
            self._start(index)

    def sockets(self) -> list[Any]:
        """What a poll must watch: sockets, and descriptors that tell that a process ended."""
        replicas = [place.replica for place in self.places if place.replica is not None]
        return [r.socket for r in replicas] + [fd for r in replicas if (fd := r.host.fileno()) >= 0]

    @property
    def phase(self) -> Phase:
        """Of the farthest replica."""
        phases = [place.replica.phase for place in self.places if place.replica is not None]
        order: tuple[Phase, ...] = ("busy", "idle", "warming", "loading")
        return next((phase for phase in order if phase in phases), "loading")

    @property
    def up(self) -> int:
        """Replicas that are ready."""
        return sum(place.replica is not None and place.replica.engine is not None for place in self.places)

    def running(self) -> int:
        """Requests that replicas have."""
        return sum(len(place.replica.running) for place in self.places if place.replica is not None)

    def join(self, slot: int, robot: dict[str, Any], front: Front) -> None:
        """Tell every replica of a robot; :meth:`Front.joined` follows when all know it."""
        self._robots[slot] = robot
        ready = [p.replica for p in self.places if p.replica is not None and p.replica.engine is not None]
        self._joining[slot] = {replica.index for replica in ready}
        for replica in ready:
            replica.join(slot, robot)
        self._settle_join(slot, front)

    def leave(self, slot: int, robot_id: str) -> None:
        """A robot is gone: what it asked is forgotten, and how it was served."""
        if self._robots.pop(slot, None) is None:
            return
        self._joining.pop(slot, None)
        self._pins.pop(slot, None)
        if self.batcher is not None:
            self.batcher.cancel(slot, _LAST_EPOCH)
            self.batcher.forget(robot_id)
        for place in self.places:
            if place.replica is not None:
                place.replica.cancel(slot, _LAST_EPOCH)
                place.replica.leave(slot)

    def submit(self, ask: Ask, now_ns: int, front: Front) -> None:
        """Queue a request, or refuse it at once."""
        assert self.batcher is not None  # a robot joins only when a replica is ready
        assert self.engine is not None
        if self.engine.keeps_state:
            ask.replica = self._pin(ask.slot)
        self._drop(self.batcher.offer(ask, now_ns), front)

    def cancel(self, slot: int, epoch: int, front: Front) -> None:
        """End the slot's requests up to ``epoch``."""
        if self.batcher is not None and (ask := self.batcher.cancel(slot, epoch)) is not None:
            front.failed(ask, error_of(ask, "cancelled"))
        for place in self.places:
            if place.replica is not None:
                place.replica.cancel(slot, epoch)

    def turn(self, front: Front) -> None:
        """Take what the replicas said, replace the lost ones, start what can start."""
        now_s = time.monotonic()
        for index, place in enumerate(self.places):
            if place.killed is not None and place.killed.gone():
                place.killed = None
            if place.replica is None:
                if now_s >= place.again_s and not self.failure and place.killed is None:
                    self._start(index)
                continue
            self._listen(place, place.replica, now_s, front)
        self._dispatch(time.monotonic_ns(), front)

    def wake_ns(self, now_ns: int) -> int | None:
        """When the next :meth:`turn` may be due although nothing comes."""
        return None if self.batcher is None else self.batcher.wake_ns(now_ns)

    def ask_to_end(self) -> None:
        """Tell every replica; :meth:`end` waits for them."""
        for place in self.places:
            if place.replica is not None:
                place.replica.ask_to_end()

    def end(self, until_s: float) -> bool:
        """Wait until ``until_s`` (monotonic), killing those that do not end; True when nothing is left of them."""
        ended = True
        for place in self.places:
            if place.replica is not None:
                ended &= place.replica.end(until_s)
            elif place.killed is not None:
                ended &= place.killed.gone(until_s)
            place.replica = place.killed = None
        return ended

    # --- replicas ---

    def _start(self, index: int) -> None:
        place = self.places[index]
        place.replica = Replica(
            self._context,
            index,
            self._hello,
            device=place.device,
            threads=self.served.threads,
            start_timeout_s=self._start_timeout_s,
        )

    def _listen(self, place: Place, replica: Replica, now_s: float, front: Front) -> None:
        for message, arrays in replica.receive():
            self._on_message(place, message, arrays, front)
            if place.replica is not replica:  # lost by its own word
                return
        if cause := replica.lost(now_s):
            self._lose(place, cause, front)

    def _on_message(self, place: Place, message: Message, arrays: dict[str, Array], front: Front) -> None:
        replica = place.replica
        assert replica is not None
        if isinstance(message, (Reply, ErrorReply)):
            self._on_answer(place, replica, message, arrays, front)
        elif isinstance(message, JoinReply):
            if message.reason and message.slot in self._joining:
                del self._joining[message.slot]
                front.joined(message.slot, message.reason)
            elif message.slot in self._joining:
                self._joining[message.slot].discard(replica.index)
                self._settle_join(message.slot, front)
        elif isinstance(message, HelloReply) and message.engine is not None:
            self._on_ready(place, replica, message.engine, front)
        elif isinstance(message, HelloReply):
            self._lose(place, message.reason, front)
        else:
            _log.error("%s: replica %d sent a %s", self.name, replica.index, type(message).__name__)

    def _on_ready(self, place: Place, replica: Replica, engine: EngineHello, front: Front) -> None:
        replica.engine, place.losses, self.failure = engine, 0, ""
        measured = engine.batch_ms or tuple((1, ms) for ms in engine.warm_up_ms)
        _log.info(
            "%s: replica %d is ready, pid %d: %s; %s",
            self.name,
            replica.index,
            engine.pid,
            engine.note,
            ", ".join(f"{rows} rows {ms:.1f} ms" for rows, ms in measured),
        )
        for slot, robot in self._robots.items():
            replica.join(slot, robot)
        first = self.batcher is None
        if self.batcher is None:
            self.engine = engine
            self.batcher = Batcher(self.served.buckets, LatencyModel(measured), window_ms=self.served.window_ms)
        self.batcher.add(replica.index)
        if first:
            front.ready(self)

    def _on_answer(
        self, place: Place, replica: Replica, message: Reply | ErrorReply, arrays: dict[str, Array], front: Front
    ) -> None:
        ask = replica.released(message.slot, message.epoch, message.chunk_id)
        if ask is None:
            _log.warning("%s: replica %d answered what nobody asked", self.name, replica.index)
            return
        assert self.batcher is not None
        now_ns = time.monotonic_ns()
        if isinstance(message, Reply):
            self.batcher.answered(ask, now_ns)
            front.answered(ask, message, arrays, place.rows)
        else:
            front.failed(ask, message)
        if not replica.running:
            self.batcher.finished(replica.index, now_ns)

    def _lose(self, place: Place, cause: str, front: Front) -> None:
        """A replica is gone: answer what it had, start another one after a while."""
        replica = place.replica
        assert replica is not None
        was_ready, place.replica = replica.engine is not None, None
        if self.batcher is not None:
            self.batcher.lose(replica.index)
        tail = " | ".join(replica.host.tail()[-5:])
        _log.error("%s: replica %d is lost: %s. %s", self.name, replica.index, cause, tail)
        for ask in replica.running.values():
            front.failed(ask, error_of(ask, "failed", f"its replica was lost: {cause}"))
        replica.kill()
        place.killed = replica
        for slot in [slot for slot, index in self._pins.items() if index == replica.index]:
            del self._pins[slot]
            front.forgotten(slot)
        for slot in list(self._joining):
            self._joining[slot].discard(replica.index)
            self._settle_join(slot, front)
        place.losses += 1
        place.again_s = time.monotonic() + min(_RESTART_PAUSE_MAX_S, _RESTART_PAUSE_S * 2.0 ** (place.losses - 1))
        if not was_ready and self.batcher is None:
            self.failure = cause  # it never ran: a wrong file does not mend itself

    def _settle_join(self, slot: int, front: Front) -> None:
        if self._joining.get(slot) == set():
            del self._joining[slot]
            front.joined(slot, "")

    def _pin(self, slot: int) -> int:
        """The replica that remembers this robot: of those that are up, the one with the fewest."""
        if slot not in self._pins:
            up = [p.replica.index for p in self.places if p.replica is not None and p.replica.engine is not None]
            pinned = list(self._pins.values())
            self._pins[slot] = min(up, key=pinned.count, default=-1)
        return self._pins[slot]

    # --- batches ---

    def _dispatch(self, now_ns: int, front: Front) -> None:
        if self.batcher is None:
            return
        for index in self.batcher.free():
            asks, dropped = self.batcher.take(index, now_ns)
            self._drop(dropped, front)
            place = self.places[index]
            if asks and place.replica is not None:
                place.rows = len(asks)
                place.replica.run(asks)

    def _drop(self, dropped: list[Dropped], front: Front) -> None:
        for drop in dropped:
            front.failed(drop.ask, error_of(drop.ask, drop.reason))


_TEXTS = {
    "replaced": "replaced by a newer request",
    "cancelled": "the request was cancelled",
    "overloaded": "the answer would come too late",
}


def error_of(ask: Ask, reason: ErrorKind, text: str = "") -> ErrorReply:
    """What a request that does not run is answered."""
    return ErrorReply(
        reason=reason,
        error_type="",
        text=text or _TEXTS[reason],
        refusal=Refusal.OVERLOADED if reason == "overloaded" else Refusal.NONE,
        epoch=ask.epoch,
        chunk_id=ask.chunk_id,
    )
