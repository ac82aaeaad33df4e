"""One input stream: an ordered, bounded history of stamped samples, and what it counts.

A stream survives what stamps do in the field: repeats and steps back are dropped and counted, and a source
that started a new timeline (a looped bag, a restarted simulator, a wrapped device clock) is followed after a
few samples, never starved until its stamps catch up.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from phyai_engine.errors import RefusalError
from phyai_engine.types import Refusal

T = TypeVar("T")

FOLLOW_AFTER = 5
"""A new timeline is followed after this many consecutive samples, in order but older than what is held."""

FALL_NS = 1_000_000_000
"""A step back by more than this is a new timeline of the source, not jitter or reordering on the network."""

OTHER_CLOCK_S = 10.0
"""A stream that runs this far behind or ahead of the clock is on another clock, not late."""


class Drop(str, enum.Enum):
    """Why a sample was dropped; the keys of the counters."""

    EQUAL_STAMP = "equal_stamp"
    BACKWARD_STAMP = "backward_stamp"
    FUTURE_STAMP = "future_stamp"
    UNSTAMPED = "unstamped"
    NO_CLOCK = "no_clock"
    REFUSED = "refused"  # malformed, not finite, or not decodable


@dataclass(frozen=True, slots=True)
class Sample(Generic[T]):
    """One message's worth. ``stamp_ros_ns`` and ``capture_mono_ns`` are one instant, latency taken off."""

    stamp_ros_ns: int
    capture_mono_ns: int
    received_mono_ns: int
    value: T


class Stream(Generic[T]):
    """Samples with strictly increasing stamps.

    :param label: how messages name the stream.
    :param history: most samples kept.
    :param span_ns: samples older than the newest by more than this are let go.
    """

    def __init__(self, label: str, *, history: int, span_ns: int) -> None:
        self.label = label
        self.fault: RefusalError | None = None  # why the newest message was dropped; None once one is kept
        self.fell_mono_ns: int | None = None  # when a new timeline, more than FALL_NS back, was last seen beginning
        self.heard_mono_ns: int | None = None  # last message, kept or not
        self._ring: deque[Sample[T]] = deque(maxlen=history)
        self._span_ns = span_ns
        self._run = 0  # consecutive samples of a possible new timeline
        self._run_stamp_ns = 0

    @property
    def newest(self) -> Sample[T] | None:
        """The newest sample, None before the first."""
        return self._ring[-1] if self._ring else None

    def clear(self) -> None:
        """Forget the samples and everything known about the timeline."""
        self._ring.clear()
        self.fault = self.fell_mono_ns = self.heard_mono_ns = None
        self._run = 0

    def put(self, sample: Sample[T]) -> Drop | None:
        """Append one sample, or say why it was dropped."""
        self.heard_mono_ns = sample.received_mono_ns
        newest = self.newest
        if newest is None or sample.stamp_ros_ns > newest.stamp_ros_ns:
            if self._run:  # the old timeline goes on: what looked like a new one was reordering
                self._run, self.fell_mono_ns = 0, None
            self._append(sample)
            return None
        if sample.stamp_ros_ns == newest.stamp_ros_ns:
            self.fault = RefusalError(Refusal.STALE, "the stamp does not advance", do="Restart its driver.")
            return Drop.EQUAL_STAMP
        back_ns = newest.stamp_ros_ns - sample.stamp_ros_ns
        self._run = self._run + 1 if self._run and sample.stamp_ros_ns > self._run_stamp_ns else 1
        self._run_stamp_ns = sample.stamp_ros_ns
        if self._run >= 2 and back_ns > FALL_NS:
            self.fell_mono_ns = sample.received_mono_ns
        if self._run >= FOLLOW_AFTER:
            self._ring.clear()
            self._run = 0
            self._append(sample)
            return None
        self.fault = RefusalError(Refusal.STALE, "the stamp went backwards", got=f"{back_ns * 1e-9:.3f} s")
        return Drop.BACKWARD_STAMP

    def nearest(self, stamp_ros_ns: int) -> Sample[T] | None:
        """The sample whose stamp is nearest, the newer of two equally near."""
        best: Sample[T] | None = None
        for sample in reversed(self._ring):
            distance = abs(sample.stamp_ros_ns - stamp_ros_ns)
            if best is not None and distance >= abs(best.stamp_ros_ns - stamp_ros_ns):
                break  # stamps increase, so distances only grow from here
            best = sample
        return best

    def check_fresh(self, max_age_s: float, future_s: float, now_ros_ns: int, now_mono_ns: int) -> None:
        """The newest sample, which exists, is fresh by receipt and by stamp, and not in the future.

        :raises RefusalError: STALE, SKEWED (clock fault), or the code for which later messages were dropped.
        """
        newest, fault = self.newest, self.fault
        assert newest is not None  # the buffer has a better word for an input that never spoke
        silent_s = (now_mono_ns - newest.received_mono_ns) * 1e-9
        if silent_s > max_age_s:
            if fault is not None:
                raise RefusalError(fault.code, f"no usable message from {self.label} for {silent_s:.3f} s: {fault}")
            raise RefusalError(
                Refusal.STALE,
                f"{self.label} is silent",
                got=f"{silent_s:.3f} s",
                wanted=f"at most {max_age_s:.3f} s",
            )
        age_s = (now_ros_ns - newest.stamp_ros_ns) * 1e-9
        if -age_s > future_s:
            fault = clock_fault(-age_s, future_s)
            raise RefusalError(fault.code, f"{self.label}: {fault}")
        if age_s > max_age_s:
            raise RefusalError(
                Refusal.STALE,
                f"{self.label} is old by its stamp",
                got=f"{age_s:.3f} s",
                wanted=f"at most {max_age_s:.3f} s",
                do=self._why_old(),
            )

    def _why_old(self) -> str:
        """Every message of the history was already far behind when it arrived: that is another clock."""
        least_lag_ns = min(s.received_mono_ns - s.capture_mono_ns for s in self._ring)
        if least_lag_ns * 1e-9 > OTHER_CLOCK_S:
            return "Stamps of a bag or a simulation? Set use_sim_time (and play the bag with --clock)."
        return "Compare the clocks of the hosts, and the driver's latency with the limit in the robot file."

    def _append(self, sample: Sample[T]) -> None:
        self.fault = None
        self._ring.append(sample)
        while sample.stamp_ros_ns - self._ring[0].stamp_ros_ns > self._span_ns:
            self._ring.popleft()


def clock_fault(ahead_s: float, limit_s: float) -> RefusalError:
    """The refusal of a stamp that lies in the future."""
    if ahead_s > OTHER_CLOCK_S:
        do = "Stamps of another clock: is use_sim_time set here but not in the driver?"
    else:
        do = "Synchronise the clocks of the hosts (chrony, PTP), or correct the driver's stamps."
    return RefusalError(
        Refusal.SKEWED,
        "clock fault: the stamp lies in the future",
        got=f"{ahead_s:.3f} s ahead of the clock",
        wanted=f"at most {limit_s:.3f} s",
        do=do,
    )


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Figures of one stream.

    :param received: messages since the node was configured; ``dropped`` by reason (:class:`Drop`).
    :param rate_hz: kept messages per second over the last 2 s by receipt; 0 when silent, NaN while unknown.
    :param delivered: kept / expected messages over the last 5 s, NaN while unknown. Expected comes from the
        stamps' median period: a stream that loses every second message looks like one of half the rate.
    """

    name: str
    received: int
    dropped: Mapping[str, int]
    rate_hz: float
    delivered: float


class Meter:
    """Counts one stream's messages."""

    RATE_WINDOW_NS = 2_000_000_000
    DELIVERED_WINDOW_NS = 5_000_000_000
    LEAST = 8
    """Fewest messages from which a median period is taken."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.received = 0
        self.dropped: Counter[str] = Counter()
        self._kept: deque[tuple[int, int]] = deque(maxlen=1024)  # (stamp, receipt)

    def count(self, drop: Drop | None, stamp_ros_ns: int, received_mono_ns: int) -> None:
        """One message arrived and was kept (``drop`` None) or dropped."""
        self.received += 1
        if drop is not None:
            self.dropped[drop.value] += 1
            return
        self._kept.append((stamp_ros_ns, received_mono_ns))

    def clear(self) -> None:
        """Forget the timeline; the counts stay."""
        self._kept.clear()

    def stats(self, now_mono_ns: int) -> StreamStats:
        """The figures as of now."""
        return StreamStats(
            self.name,
            self.received,
            MappingProxyType(dict(self.dropped)),
            self._rate_hz(now_mono_ns),
            self._delivered(now_mono_ns),
        )

    def _rate_hz(self, now_mono_ns: int) -> float:
        receipts = [received for _, received in self._kept if now_mono_ns - received <= self.RATE_WINDOW_NS]
        if not receipts and self.received:
            return 0.0
        if len(receipts) < 2 or receipts[-1] == receipts[0]:
            return math.nan
        return (len(receipts) - 1) * 1e9 / (receipts[-1] - receipts[0])

    def _delivered(self, now_mono_ns: int) -> float:
        recent = [pair for pair in self._kept if now_mono_ns - pair[1] <= self.DELIVERED_WINDOW_NS]
        if not recent and self._kept:
            return 0.0
        if len(recent) < self.LEAST:
            return math.nan
        gaps = np.diff(np.array([stamp for stamp, _ in recent], dtype=np.int64)).astype(np.float64)
        # A step back, or one longer than the window, is another timeline and no loss.
        steady = gaps[(gaps > 0) & (gaps < self.DELIVERED_WINDOW_NS)]
        if steady.size < self.LEAST - 1:
            return math.nan
        period = float(np.median(steady))
        # The silence since the newest message counts too, less one period that may simply not be over.
        silent = max(0, int((now_mono_ns - recent[-1][1]) / period) - 1)
        expected = 1 + float(np.maximum(1, np.rint(steady / period)).sum()) + silent
        return (steady.size + 1) / expected
