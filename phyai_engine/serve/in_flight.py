"""What became of each request: the mailbox, the request in flight, the events. No sockets; thread-safe."""

from __future__ import annotations

import collections
import threading
import time
from dataclasses import dataclass, replace

from phyai_engine.errors import CancelledError, EngineError, PhyaiError, RefusalError
from phyai_engine.types import Chunk, Refusal, Request


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A request got its chunk.

    :param submitted_mono_ns: when ``submit`` was called; ``received_mono_ns`` when the reply was read.
    :param round_trip_ms: between the two. The chunk's ``queue_ms`` holds the waits at both ends and its
        ``transfer_ms`` the rest: round trip minus queue minus inference.
    """

    chunk: Chunk
    submitted_mono_ns: int
    received_mono_ns: int
    round_trip_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Failed:
    """A request got no chunk and will not get one. ``cancelled`` when that was asked for."""

    epoch: int
    chunk_id: int
    error: PhyaiError
    cancelled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Lost:
    """The engine is gone: it ended, or its heartbeat expired. The last event of a client whose engine is its own."""

    error: EngineError


Event = Answered | Failed | Lost


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way. ``settled`` once its event is queued; what the engine still says is dropped."""

    request: Request
    submitted_ns: int
    sent_ns: int = 0
    encode_ms: float = 0.0
    repeated: bool = False
    settled: bool = False

    @property
    def ids(self) -> tuple[int, int]:
        return self.request.epoch, self.request.chunk_id


class InFlight:
    """One mailbox, one request in flight, every submitted request ends in exactly one Answered or Failed.

    No call blocks: the lock is only ever held for a few assignments.

    :param waits_for_cancelled: a cancelled request counts as in flight until the engine has let go of it. An engine
        that serves many robots has its own order, and one that never answers must not hold the robot up.
    """

    def __init__(self, *, waits_for_cancelled: bool = True) -> None:
        self._lock = threading.Lock()
        self._waits_for_cancelled = waits_for_cancelled
        self._mailbox: _Flight | None = None
        self._flight: _Flight | None = None
        self._cancelled_epoch = -1
        self._cancel_to_send: int | None = None
        self._events: collections.deque[Event] = collections.deque()
        self._unannounced = False
        self._closed: PhyaiError | None = None
        self._counters: collections.Counter[str] = collections.Counter()

    def submit(self, request: Request) -> None:
        """Put a request in the mailbox; one that still waits there fails as replaced."""
        flight = _Flight(request, time.monotonic_ns())
        with self._lock:
            self._counters["submitted"] += 1
            if self._closed is not None:
                self._fail(flight, self._closed, "closed")
            elif request.epoch <= self._cancelled_epoch:
                self._fail(flight, _cancelled(request), "cancelled")
            else:
                if self._mailbox is not None:
                    self._fail(self._mailbox, EngineError("replaced by a newer request"), "replaced")
                self._mailbox = flight

    def cancel(self, epoch: int) -> None:
        """Cancel ``epoch`` and older, also requests submitted later and answers not yet polled."""
        with self._lock:
            if epoch <= self._cancelled_epoch:
                return
            self._cancelled_epoch = self._cancel_to_send = epoch
            if self._mailbox is not None and self._mailbox.request.epoch <= epoch:
                self._fail(self._mailbox, _cancelled(self._mailbox.request), "cancelled")
                self._mailbox = None
            if self._flight is not None and self._flight.request.epoch <= epoch:
                self._fail(self._flight, _cancelled(self._flight.request), "cancelled")
                if not self._waits_for_cancelled:
                    self._flight = None

    def take_cancel(self) -> int | None:
        """The epoch of a cancel that has not been sent yet."""
        with self._lock:
            epoch, self._cancel_to_send = self._cancel_to_send, None
            return epoch

    def take_request(self) -> Request | None:
        """The request to send now; None while another one is in flight."""
        with self._lock:
            if self._flight is not None or self._mailbox is None:
                return None
            self._flight, self._mailbox = self._mailbox, None
            self._flight.sent_ns = time.monotonic_ns()
            return self._flight.request

    def sent(self, *, encode_ms: float) -> None:
        """The request in flight was encoded; once more, where it had to be sent again."""
        with self._lock:
            if self._flight is not None:
                self._flight.encode_ms += encode_ms

    def again(self, epoch: int, chunk_id: int) -> Request | None:
        """The request in flight, to be sent a second time; None for any other, one that is over, or a third time."""
        with self._lock:
            flight = self._flight
            if flight is None or flight.ids != (epoch, chunk_id) or flight.settled or flight.repeated:
                return None
            flight.repeated = True
            self._counters["repeated"] += 1
            return flight.request

    def answered(self, chunk: Chunk, *, decode_ms: float = 0.0, valid_ms: float = 0.0) -> None:
        """The engine answered; dropped and counted unless it is the answer to the request in flight.

        :param valid_ms: an answer that took longer must not be started any more; 0 = no limit.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            flight = self._release(chunk.epoch, chunk.chunk_id)
            if flight is None:
                return
            timings = chunk.timings
            waited_ms = (flight.sent_ns - flight.submitted_ns) / 1e6
            round_trip_ms = (now_ns - flight.submitted_ns) / 1e6
            if 0.0 < valid_ms < round_trip_ms:
                got, wanted = f"after {round_trip_ms:.0f} ms", f"within {valid_ms:.0f} ms, the length of a chunk"
                self._fail(flight, RefusalError(Refusal.EXHAUSTED, "the answer came", got=got, wanted=wanted), "late")
                return
            queue_ms = timings.queue_ms + waited_ms
            timings = replace(
                timings,
                queue_ms=queue_ms,
                transfer_ms=round_trip_ms - queue_ms - timings.inference_ms,
                serialise_ms=flight.encode_ms + decode_ms,
            )
            self._counters["answered"] += 1
            self._queue(Answered(replace(chunk, timings=timings), flight.submitted_ns, now_ns, round_trip_ms))

    def failed(self, epoch: int, chunk_id: int, error: PhyaiError) -> None:
        """The engine could not answer; dropped and counted unless it means the request in flight."""
        with self._lock:
            flight = self._release(epoch, chunk_id)
            if flight is not None:
                self._fail(flight, error, "cancelled" if isinstance(error, CancelledError) else "failed")

    def failed_unread(self, error: PhyaiError) -> None:
        """Something could not be encoded or read: whatever is in flight will not be answered."""
        with self._lock:
            self._counters["protocol_errors"] += 1
            self._drop_flight(error)

    def unanswered(self, error: PhyaiError) -> None:
        """The connection is gone: what is in flight will not be answered."""
        with self._lock:
            self._drop_flight(error)

    def outdated(self, error: PhyaiError) -> None:
        """What waits in the mailbox was asked too long ago to be sent."""
        with self._lock:
            if self._mailbox is not None:
                self._fail(self._mailbox, error, "failed")
                self._mailbox = None

    def lost(self, error: EngineError) -> None:
        """The engine is gone, but may come back: what is outstanding fails."""
        with self._lock:
            for flight in (self._flight, self._mailbox):
                if flight is not None:
                    self._fail(flight, error, "failed")
            self._flight = self._mailbox = None
            self._counters["lost"] += 1
            self._queue(Lost(error))

    def close(self, error: PhyaiError, *, lost: bool) -> None:
        """End: what is outstanding fails with ``error``, and so does everything submitted from now on."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            for flight in (self._flight, self._mailbox):
                if flight is not None:
                    self._fail(flight, error, "closed" if lost else "cancelled")
            self._flight = self._mailbox = None
            if lost and isinstance(error, EngineError):
                self._counters["lost"] += 1
                self._queue(Lost(error))

    def poll(self) -> list[Event]:
        """The events since the last poll. An answer whose epoch is cancelled by now comes as cancelled."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return [self._recheck(event) for event in events]

    def running(self) -> tuple[int, int, float] | None:
        """Epoch and chunk_id of what the engine has, cancelled or not, and the seconds since it was sent."""
        with self._lock:
            flight = self._flight
            return None if flight is None else (*flight.ids, (time.monotonic_ns() - flight.sent_ns) / 1e9)

    def take_announcement(self) -> bool:
        """True once after events were queued."""
        with self._lock:
            unannounced, self._unannounced = self._unannounced, False
            return unannounced

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] += n

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters; a name that never counted is absent."""
        with self._lock:
            return dict(self._counters)

    def _release(self, epoch: int, chunk_id: int) -> _Flight | None:
        flight = self._flight
        if flight is None or flight.ids != (epoch, chunk_id):
            self._counters["dropped_replies"] += 1  # late, duplicate, reordered, or never asked for
            return None
        self._flight = None
        if flight.settled:
            self._counters["dropped_cancelled"] += 1
            return None
        return flight

    def _drop_flight(self, error: PhyaiError) -> None:
        if self._flight is not None:
            self._fail(self._flight, error, "failed")
        self._flight = None

    def _fail(self, flight: _Flight, error: PhyaiError, counter: str) -> None:
        if flight.settled:
            return
        flight.settled = True
        self._counters[counter] += 1
        self._queue(Failed(*flight.ids, error, cancelled=isinstance(error, CancelledError)))

    def _recheck(self, event: Event) -> Event:
        if isinstance(event, Answered) and event.chunk.epoch <= self._cancelled_epoch:
            self._counters["answered"] -= 1
            self._counters["cancelled"] += 1
            epoch, chunk_id = event.chunk.epoch, event.chunk.chunk_id
            return Failed(epoch, chunk_id, CancelledError("the request was cancelled"), cancelled=True)
        return event

    def _queue(self, event: Event) -> None:
        self._events.append(event)
        self._unannounced = True


def _cancelled(request: Request) -> CancelledError:
    return CancelledError("the request was cancelled", where=f"epoch {request.epoch} chunk {request.chunk_id}")
