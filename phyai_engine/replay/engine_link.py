"""The engine as a replay sees it: answering as it does, or held so that its answers come on a virtual clock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from phyai_engine.control.control_loop import Client
from phyai_engine.errors import EngineTimeoutError
from phyai_engine.serve.client import Answered, Event, Failed, Lost
from phyai_engine.types import Request, StageTimings

ANSWER_TIMEOUT_S = 600.0
"""Longest wait for one answer on a virtual clock: full-size models on a CPU take minutes."""

NEVER_NS = 1 << 63


class Link(Client, Protocol):
    """An engine on a replay's clock."""

    def due_ns(self) -> int:
        """When :meth:`poll` has the next event; NEVER_NS where the clock will be woken instead."""


class LiveLink:
    """The engine in real time: its events come when they come, and wake the clock."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def cancel(self, epoch: int) -> None:
        self._engine.cancel(epoch)

    def poll(self) -> Sequence[Event]:
        return self._engine.poll()

    def due_ns(self) -> int:
        return NEVER_NS


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    due_ns: int
    epoch: int
    event: Event


class HeldLink:
    """An engine whose answers come on a virtual clock: asked at once, waited for, and kept until they are due.

    :param clock_ns: the virtual clock. :param latency_ms: from request to answer; None: as long as it took to compute.
    :param answered: set by the engine's client after it queued an event.
    """

    def __init__(
        self, engine: Client, clock_ns: Callable[[], int], answered: threading.Event, latency_ms: float | None
    ) -> None:
        self._engine, self._clock_ns, self._answered, self._latency_ms = engine, clock_ns, answered, latency_ms
        self._held: deque[_Held] = deque()

    def submit(self, request: Request) -> None:
        """Have it answered now; the clock stands still meanwhile.

        :raises EngineTimeoutError: no answer within ANSWER_TIMEOUT_S.
        """
        now_ns = self._clock_ns()
        self._engine.submit(request)
        event = self._await(request)
        if isinstance(event, Answered):
            event = self._on_clock(event, now_ns)
            self._held.append(_Held(event.received_mono_ns, request.epoch, event))
        else:
            self._held.append(_Held(now_ns, request.epoch, event))

    def cancel(self, epoch: int) -> None:
        self._engine.cancel(epoch)
        self._held = deque(held for held in self._held if held.epoch > epoch)

    def poll(self) -> Sequence[Event]:
        now_ns, events = self._clock_ns(), []
        while self._held and self._held[0].due_ns <= now_ns:
            events.append(self._held.popleft().event)
        return events

    def due_ns(self) -> int:
        return self._held[0].due_ns if self._held else NEVER_NS

    def _await(self, request: Request) -> Event:
        while True:
            events = self._engine.poll()
            if lost := [event for event in events if isinstance(event, Lost)]:
                return lost[0]  # more than the failure of one request, which comes with it
            for event in events:
                if not isinstance(event, Lost) and _ids(event) == (request.epoch, request.chunk_id):
                    return event
            if not self._answered.wait(ANSWER_TIMEOUT_S):
                raise EngineTimeoutError("the engine did not answer", wanted=f"within {ANSWER_TIMEOUT_S:.0f} s")
            self._answered.clear()

    def _on_clock(self, event: Answered, now_ns: int) -> Answered:
        """The answer as if it came when it is due. With a stated latency nothing in it depends on this machine."""
        if self._latency_ms is None:
            due_ns, chunk, took_ms = now_ns + round(event.round_trip_ms * 1e6), event.chunk, event.round_trip_ms
        else:
            took_ms, due_ns = self._latency_ms, now_ns + round(self._latency_ms * 1e6)
            stated = StageTimings(queue_ms=0.0, inference_ms=took_ms, transfer_ms=0.0)
            chunk = replace(event.chunk, timings=stated)
        return Answered(chunk, submitted_mono_ns=now_ns, received_mono_ns=due_ns, round_trip_ms=took_ms)


def _ids(event: Answered | Failed) -> tuple[int, int]:
    return (event.chunk.epoch, event.chunk.chunk_id) if isinstance(event, Answered) else (event.epoch, event.chunk_id)
