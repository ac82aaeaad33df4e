"""Engines of the closed model: one that does what it likes, and the client's real mailbox before a worker that does.

``WildEngine`` answers what it was ever asked, in any order, any number of times, also what was cancelled: nothing
between the loop and the engine is trusted. ``MailboxEngine`` puts phyai_engine/serve/in_flight.py between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from explore import Event, Violation, fork
from invariants import Monitor

from phyai_engine.errors import CancelledError, EngineDiedError, EngineError, ProtocolError
from phyai_engine.serve.client import Answered, Failed, Lost
from phyai_engine.serve.in_flight import InFlight
from phyai_engine.types import F64, Chunk, Request, StageTimings

NOTHING = StageTimings()


def rows(horizon: int, chunk_id: int) -> F64:
    """[H, 1] what the engine answers: 0.5 rad/s, the chunk's id in the ninth decimal, where no state looks."""
    return 0.05 * np.arange(horizon, dtype=np.float64)[:, None] + 1e-9 * chunk_id


def spoiled(actions: F64, kind: str) -> F64:
    """A chunk that must be refused, or the chunk itself for ``ok``."""
    if kind == "ok":
        return actions
    if kind == "short":
        return actions[:-1]
    wrong = actions.copy()
    wrong[-1] = {"nan": np.nan, "out": 5.0, "jump": wrong[-1]}[kind]
    return wrong + 0.8 if kind == "jump" else wrong  # beyond seam_jump_max from every row, also after a hold


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A request the engine got, and what its arrays held then."""

    epoch: int
    chunk_id: int
    request: Request
    prints: bytes

    @staticmethod
    def of(request: Request) -> Ask:
        return Ask(request.epoch, request.chunk_id, request, held(request))


def held(request: Request) -> bytes:
    """The bytes of everything the engine may read."""
    committed = b"" if request.committed is None else request.committed.actions.tobytes()
    return committed + request.observation.state.tobytes()


@dataclass(frozen=True, slots=True)
class Owed:
    """A request that got no event yet."""

    epoch: int
    chunk_id: int


class WildEngine:
    """Answers anything it remembers, at any time.

    :param answers: what a chunk may be, as ``spoiled`` takes it. :param remembered: requests, the newest included.
    ``events_at_once``: the loop looks at once at what it says.
    """

    events_at_once = True
    full = False

    def __init__(self, horizon: int, answers: tuple[str, ...], remembered: int, monitor: Monitor) -> None:
        self._horizon, self._answers, self._remembered = horizon, answers, remembered
        self._monitor = monitor
        self.asks: tuple[Ask, ...] = ()
        self.lost = False
        self.cancelled_epoch = -1
        self._events: list[Any] = []

    @property
    def ids(self) -> list[int]:
        """Chunk ids it knows."""
        return [ask.chunk_id for ask in self.asks]

    def submit(self, request: Request) -> None:
        if request.epoch <= self.cancelled_epoch:
            raise Violation("I11", f"chunk {request.chunk_id} is asked for in a cancelled epoch")
        self._monitor.request(request)
        self.asks = (*self.asks, Ask.of(request))[-self._remembered :]
        if self.lost:
            self._events.append(Failed(request.epoch, request.chunk_id, EngineDiedError("gone"), cancelled=False))

    def cancel(self, epoch: int) -> None:
        self.cancelled_epoch = max(epoch, self.cancelled_epoch)

    def poll(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def events(self) -> list[Event]:
        """What it may do now."""
        if self.lost:
            return []
        answers = [("answer", i, kind) for i in range(len(self.asks)) for kind in self._answers]
        fails = [(name, i) for i in range(len(self.asks)) for name in ("fail", "cancelled")]
        return [*answers, *fails, ("lost",)]

    def apply(self, name: str, *args: Any) -> None:
        """Let it happen."""
        if name == "lost":
            self.lost = True
            self._events.append(Lost(EngineDiedError("exit code 13")))
            return
        ask = self.asks[args[0]]
        if name == "answer":
            actions = spoiled(rows(self._horizon, ask.chunk_id), args[1])
            self._events.append(Answered(Chunk(ask.epoch, ask.chunk_id, actions, NOTHING), 0, 0, 0.0))
        else:
            error = CancelledError("it was cancelled") if name == "cancelled" else EngineError("it failed")
            self._events.append(Failed(ask.epoch, ask.chunk_id, error, cancelled=name == "cancelled"))

    def renew(self) -> None:
        """A new engine; the old one's words may still come."""
        self.lost, self.cancelled_epoch = False, -1

    def check(self) -> None:
        """:raises Violation: an array the engine was given has changed."""
        for ask in self.asks:
            if held(ask.request) != ask.prints:
                raise Violation("I12", f"an array of request {ask.chunk_id} was written")


class MailboxEngine:
    """The client without its sockets: requests and replies pass the real InFlight, in steps of the I/O thread.

    :param prompt: that thread runs at once after every call, else whenever it likes.
    """

    events_at_once = False

    def __init__(self, horizon: int, answers: tuple[str, ...], prompt: bool, monitor: Monitor) -> None:
        self._horizon, self._answers, self._prompt, self._monitor = horizon, answers, prompt, monitor
        self.box = InFlight()
        self._new = fork(vars(self.box))
        self.computing: Ask | None = None
        self.told = False  # the worker heard that what it computes is cancelled
        self.answered: Chunk | None = None  # its last reply, which may come again
        self.signalled = self.lost = False
        self.cancelled_epoch = -1
        self.owed: tuple[Owed, ...] = ()

    @property
    def full(self) -> bool:
        """More requests than the loop can have without looking at what became of them."""
        return len(self.owed) > 2

    @property
    def ids(self) -> list[int]:
        """Chunk ids it knows."""
        asked = [self.computing, self.answered]
        return [*(o.chunk_id for o in self.owed), *(a.chunk_id for a in asked if a is not None)]

    def submit(self, request: Request) -> None:
        self._monitor.request(request)
        self.owed = (*self.owed, Owed(request.epoch, request.chunk_id))
        self.box.submit(request)
        self._called()

    def cancel(self, epoch: int) -> None:
        self.cancelled_epoch = max(epoch, self.cancelled_epoch)
        self.box.cancel(epoch)
        self._called()

    def poll(self) -> list[Any]:
        events = self.box.poll()
        for event in events:
            if isinstance(event, Lost):
                continue
            ended = event.chunk if isinstance(event, Answered) else event
            owed = Owed(ended.epoch, ended.chunk_id)
            if isinstance(event, Answered) and owed.epoch <= self.cancelled_epoch:
                raise Violation("I11", f"{owed} comes as answered, cancelled up to {self.cancelled_epoch}")
            if owed not in self.owed:
                raise Violation("I11", f"{owed} has a second outcome")
            self.owed = tuple(o for o in self.owed if o != owed)
        return events

    def events(self) -> list[Event]:
        """What it may do now."""
        found: list[Event] = [("deliver",)] if self.signalled else []
        if self.lost:
            return found
        found += [("died",), ("garbage",), *[("io",)] * (not self._prompt)]
        if self.computing is not None:
            found += [*(("answer", kind) for kind in self._answers), ("fail",)]
            found += [("cancelled",)] if self.told else []
        if self.answered is not None:
            found.append(("again",))
        return found

    def apply(self, name: str, *args: Any) -> None:
        """Let it happen."""
        ask = self.computing
        if name == "deliver":
            self.signalled = False
        elif name == "io":
            self._send()
        elif name == "died":
            self.box.close(EngineDiedError("exit code 13"), lost=True)
            self.lost, self.computing = True, None
        elif name == "garbage":
            self.box.failed_unread(ProtocolError("not a message"))
            self.computing = None
        elif name == "again":
            assert self.answered is not None
            self.box.answered(self.answered)
        elif ask is not None:
            self.computing = None
            if name == "answer":
                actions = spoiled(rows(self._horizon, ask.chunk_id), args[0])
                self.answered = Chunk(ask.epoch, ask.chunk_id, actions, NOTHING)
                self.box.answered(self.answered)
            else:
                error = CancelledError("it was cancelled") if name == "cancelled" else EngineError("it failed")
                self.box.failed(ask.epoch, ask.chunk_id, error)
        if self._prompt and not self.lost:
            self._send()
        self._announce()

    def _called(self) -> None:
        """The node called; where the I/O thread has ended, whoever submits announces."""
        if self._prompt and not self.lost:
            self._send()
        if self._prompt or self.lost:
            self._announce()

    def _announce(self) -> None:
        """The node is called once events are queued."""
        self.signalled |= self.box.take_announcement()

    def _send(self) -> None:
        if (epoch := self.box.take_cancel()) is not None and self.computing is not None:
            self.told |= self.computing.epoch <= epoch
        request = self.box.take_request()
        if request is None:
            return
        if self.computing is not None:
            raise Violation("I3", f"{request.chunk_id} is sent while the engine computes {self.computing.chunk_id}")
        self.computing, self.told = Ask.of(request), False

    def renew(self) -> None:
        """A new client and a new engine."""
        self.box.__dict__ = fork(self._new)
        self.computing = self.answered = None
        self.told = self.signalled = self.lost = False
        self.cancelled_epoch, self.owed = -1, ()

    def check(self) -> None:
        """:raises Violation: an array the engine was given has changed."""
        if self.computing is not None and held(self.computing.request) != self.computing.prints:
            raise Violation("I12", f"an array of request {self.computing.chunk_id} was written")
