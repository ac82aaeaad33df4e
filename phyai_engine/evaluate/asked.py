"""A policy that is asked and answers at once, as the engine that the control loop knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phyai_engine.errors import PhyaiError
from phyai_engine.serve.in_flight import Answered, Event, Failed
from phyai_engine.types import Chunk, Request

Ask = Callable[[Request], Chunk | PhyaiError]
"""One request -> its chunk, or why there is none. It may wait for others: the clock stands still meanwhile."""


class AskedEngine:
    """The client side of an engine whose answer is there when ``submit`` returns; a HeldLink puts it on the clock."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._events: list[Event] = []

    def submit(self, request: Request) -> None:
        """Ask. What is answered has taken no time: the link in front of it states one."""
        answer = self._ask(request)
        if isinstance(answer, Chunk):
            self._events.append(Answered(answer, 0, 0, 0.0))
        else:
            self._events.append(Failed(request.epoch, request.chunk_id, answer, cancelled=False))

    def cancel(self, epoch: int) -> None:
        """Nothing is ever under way."""

    def poll(self) -> Sequence[Event]:
        events, self._events = self._events, []
        return events
