"""Names what is wrong with the sensors of a bag. Every limit stands here with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phyai_engine.control.observation_buffer import JUMP_WINDOW_NS
from phyai_engine.control.stream import FALL_NS, OTHER_CLOCK_S
from phyai_engine.replay.survey import Fault, FaultKind
from phyai_engine.types import F64

I64 = NDArray[np.int64]

LATE_S = 0.05
"""Behind the promptest other camera. Cameras of one kind differ by less than a frame at 30 Hz."""
LATE_ALONE_S = 0.1
"""Behind the joints, for a robot's only camera: exposure and transfer of a slow one take half of this."""
STALL_S, STALL_PERIODS = 0.25, 3.0
"""A silence is a stall from both on: a slow camera is no stall, nor a late frame of a fast one."""
GAP_S = 1.0
FROZEN_FRAMES, FROZEN_S, MOVED = 5, 0.25, 0.02
"""Equal frames in a row, for so long, while a joint moved by so much (rad, m): a robot at rest looks the same."""
FUTURE_S = 0.1
"""As the node's buffer."""
REPEATED_SHARE = 0.01

ALL = "all inputs"
_GRAVEST: tuple[FaultKind, ...] = (
    *("looped", "gap", "undecodable", "clock", "frozen", "stall", "late"),
    *("repeated_stamp", "backward_stamp", "unstamped", "future_stamp", "skewed"),
)


class Window(NamedTuple):
    """A silence of one input, by receipt [ns]."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) * 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """Everything heard of one input, in the order of receipt.

    :param received_ns: [n]. :param stamps_ns: [n], 0 = unstamped, on the clock of ``received_ns``.
    :param digests: [n] of the pixels; empty for joints.
    :param tolerance_s: largest distance of its stamp from an observation's instant.
    """

    name: str
    topic: str
    kind: Literal["camera", "joints"]
    tolerance_s: float
    received_ns: I64
    stamps_ns: I64
    digests: I64
    undecodable: int = 0
    reason: str = ""
    encodings: tuple[str, ...] = ()

    @property
    def stamped(self) -> NDArray[np.bool_]:
        """[n] which messages have a stamp."""
        return self.stamps_ns > 0

    def lateness_s(self) -> F64:
        """Receipt - stamp of every stamped message."""
        late_ns: I64 = (self.received_ns - self.stamps_ns)[self.stamped]
        return np.asarray(late_ns * 1e-9, dtype=np.float64)

    def steps_ns(self) -> I64:
        """From one stamp to the next, of the stamped messages."""
        return np.diff(self.stamps_ns[self.stamped])

    def period_s(self) -> float:
        """Median of the steps forward, NaN without any."""
        steps = self.steps_ns()
        forward = steps[steps > 0]
        return float(np.median(forward)) * 1e-9 if forward.size else float("nan")

    def silences(self) -> list[Window]:
        """Stalls and gaps."""
        intervals = np.diff(self.received_ns)
        if not intervals.size:
            return []
        limit = max(STALL_S * 1e9, STALL_PERIODS * float(np.median(intervals)))
        at = self.received_ns.tolist()
        return [Window(at[i], at[i + 1]) for i in np.flatnonzero(intervals > limit)]

    def equal_runs(self) -> list[tuple[int, int]]:
        """First and last index of every run of frames with the same pixels, two or more."""
        if len(self.digests) < 2:
            return []
        edges = np.flatnonzero(np.diff(self.digests) != 0)
        begins, ends = np.r_[0, edges + 1], np.r_[edges, len(self.digests) - 1]
        return [(int(b), int(e)) for b, e in zip(begins, ends, strict=True) if e > b]


@dataclass(frozen=True, slots=True, eq=False)
class Motion:
    """Measured joints: ``positions`` [n, S] at ``received_ns`` [n], NaN where not yet known."""

    received_ns: I64
    positions: F64

    def between(self, begin_ns: int, end_ns: int) -> float:
        """How far the joint that moved most moved [rad or m]."""
        first, last = np.searchsorted(self.received_ns, (begin_ns, end_ns))
        rows = self.positions[first : last + 1]
        rows = rows[np.isfinite(rows).all(axis=1)]
        return float((rows.max(axis=0) - rows.min(axis=0)).max()) if len(rows) else 0.0


def find_faults(inputs: Sequence[Heard], motion: Motion, start_ns: int) -> tuple[Fault, ...]:
    """Every fault, the gravest first. :param start_ns: where ``t_s`` counts from."""
    found = [
        *_timeline(inputs, start_ns),
        *_silent(inputs, start_ns),
        *(fault for each in inputs for fault in _own(each, motion, start_ns)),
        *_late(inputs, start_ns),
        *_skewed(inputs, start_ns),
    ]
    return tuple(sorted(found, key=lambda fault: (_GRAVEST.index(fault.kind), fault.t_s)))


def skew_s(one: Heard, others: Sequence[Heard]) -> F64:
    """[n] distance of each stamp to the nearest of every other input that is not slower, the farthest of those."""
    stamps = one.stamps_ns[one.stamped]
    farthest = np.full(len(stamps), np.nan)
    for other in others:
        if other is one or not other.period_s() <= 1.2 * one.period_s():
            continue
        grid = np.sort(other.stamps_ns[other.stamped])
        right = np.clip(np.searchsorted(grid, stamps), 1, len(grid) - 1)
        nearest = np.minimum(np.abs(stamps - grid[right - 1]), np.abs(grid[right] - stamps)) * 1e-9
        farthest = np.fmax(farthest, nearest)
    return farthest


def _timeline(inputs: Sequence[Heard], start_ns: int) -> Iterator[Fault]:
    """Stamps that go back: of all inputs together (a loop), or of one."""
    falls = {one.name: one.received_ns[one.stamped][1:][one.steps_ns() < -FALL_NS] for one in inputs}
    first = next(iter(falls.values()), np.array([], dtype=np.int64))
    loops = [at for at in first if all((np.abs(fall - at) < JUMP_WINDOW_NS).any() for fall in falls.values())]
    if loops:
        text = f"go back in time together, {_times(len(loops))} (a bag played in a loop, a clock that was set)"
        yield Fault(ALL, "looped", text, _t_s(int(loops[0]), start_ns))
    for one in inputs:
        back = one.steps_ns() < 0
        times = one.received_ns[one.stamped][1:][back]
        alone = [int(at) for at in times if not any(abs(int(at) - int(loop)) < JUMP_WINDOW_NS for loop in loops)]
        if alone:
            worst = -int(one.steps_ns()[back].min()) * 1e-9
            text = f"has stamps older than the one before, {_times(len(alone))}, by up to {worst:.3f} s"
            yield Fault(one.name, "backward_stamp", text, _t_s(alone[0], start_ns))


def _silent(inputs: Sequence[Heard], start_ns: int) -> Iterator[Fault]:
    """Stalls and gaps: those that all inputs share are the recording's."""
    silences = {one.name: one.silences() for one in inputs}
    shared: list[Window] = []
    if len(inputs) > 1:
        first, *others = silences.values()
        shared = [w for w in first if all(any(_overlap(w, v) for v in other) for other in others)]
        silences = {n: [w for w in ws if not any(_overlap(w, s) for s in shared)] for n, ws in silences.items()}
    for name, windows in ((ALL, shared), *silences.items()):
        verb = "are" if name == ALL else "is"
        if gaps := [w for w in windows if w.seconds >= GAP_S]:
            yield Fault(name, "gap", _silence(gaps, verb), _t_s(gaps[0].begin_ns, start_ns))
        if stalls := [w for w in windows if w.seconds < GAP_S]:
            yield Fault(name, "stall", _silence(stalls, verb), _t_s(stalls[0].begin_ns, start_ns))


def _own(one: Heard, motion: Motion, start_ns: int) -> Iterator[Fault]:
    """What one input shows by itself."""
    name, n = one.name, len(one.received_ns)
    t0 = _t_s(int(one.received_ns[0]), start_ns) if n else 0.0
    if one.undecodable:
        yield Fault(name, "undecodable", f"has {one.undecodable} of {n} messages that cannot be read: {one.reason}", t0)
    frozen = [(b, e) for b, e in one.equal_runs() if _is_frozen(one, b, e, motion)]
    if frozen:
        lengths = [(int(one.received_ns[e]) - int(one.received_ns[b])) * 1e-9 for b, e in frozen]
        frames = sum(e - b + 1 for b, e in frozen)
        text = f"repeats the same picture while the robot moves, {_times(len(frozen))}, longest {max(lengths):.2f} s"
        yield Fault(name, "frozen", f"{text} ({frames} frames)", _t_s(int(one.received_ns[frozen[0][0]]), start_ns))
    if missing := int((~one.stamped).sum()):
        yield Fault(name, "unstamped", f"has no stamp in {missing} of {n} messages (accept_unstamped)", t0)
    same = one.received_ns[one.stamped][1:][one.steps_ns() == 0]
    if len(same) > max(FROZEN_FRAMES, REPEATED_SHARE * n):
        text = f"repeats the stamp before in {len(same)} of {n} messages"
        yield Fault(name, "repeated_stamp", text, _t_s(int(same[0]), start_ns))
    late = one.lateness_s()
    if abs(middle := _middle_s(one)) > OTHER_CLOCK_S:
        text = f"is on another clock: its stamps lie {middle:.1f} s before their receipt (median)"
        yield Fault(name, "clock", text, t0)
    elif ahead := int((late < -FUTURE_S).sum()):
        text = f"has stamps up to {-float(late.min()):.3f} s ahead of their receipt, in {ahead} of {n} messages"
        yield Fault(name, "future_stamp", text, t0)


def _late(inputs: Sequence[Heard], start_ns: int) -> Iterator[Fault]:
    """Messages that come long after their stamp where others do not."""
    prompt = {one.name: middle for one in inputs if abs(middle := _middle_s(one)) <= OTHER_CLOCK_S}
    cameras = {one.name for one in inputs if one.kind == "camera"} & prompt.keys()
    for one in inputs:
        others = {n: m for n, m in prompt.items() if n != one.name}
        peers = {n: m for n, m in others.items() if n in cameras}
        among = peers if one.kind == "camera" and peers else others
        if one.name not in prompt or not among:
            continue
        best = min(among, key=lambda name: among[name])
        limit = LATE_ALONE_S if one.kind == "camera" and not peers else LATE_S
        if prompt[one.name] - among[best] > limit:
            slowest = float(np.percentile(one.lateness_s(), 99))
            text = f"arrives {_ms(prompt[one.name])} after its stamp (median; p99 {_ms(slowest)})"
            text += f", {best} after {_ms(among[best])}"
            yield Fault(one.name, "late", text, _t_s(int(one.received_ns[0]), start_ns))


def _skewed(inputs: Sequence[Heard], start_ns: int) -> Iterator[Fault]:
    """Stamps that are far from everybody's; an input on another clock was named already."""
    near = [one for one in inputs if abs(_middle_s(one)) <= OTHER_CLOCK_S]
    for one in near:
        distances = skew_s(one, near)
        known = distances[np.isfinite(distances)]
        if known.size and (middle := float(np.median(known))) > one.tolerance_s:
            text = f"is stamped {_ms(middle)} from the nearest sample of another input (median)"
            text += f", more than its tolerance of {_ms(one.tolerance_s)}"
            yield Fault(one.name, "skewed", text, _t_s(int(one.received_ns[0]), start_ns))


def _middle_s(one: Heard) -> float:
    """Its median lateness; NaN where nothing is stamped."""
    late = one.lateness_s()
    return float(np.median(late)) if late.size else float("nan")


def _is_frozen(one: Heard, begin: int, end: int, motion: Motion) -> bool:
    first, last = int(one.received_ns[begin]), int(one.received_ns[end])
    long = end - begin + 1 >= FROZEN_FRAMES and last - first >= FROZEN_S * 1e9
    # A late frame shows the robot as it stood earlier: at rest, where it has begun to move since.
    middle = _middle_s(one)
    late_ns = round(middle * 1e9) if abs(middle) <= OTHER_CLOCK_S else 0
    return long and motion.between(first - late_ns, last - late_ns) > MOVED


def _overlap(one: Window, other: Window) -> bool:
    """True when they share more than half of the shorter one."""
    shared = min(one.end_ns, other.end_ns) - max(one.begin_ns, other.begin_ns)
    return 2 * shared > min(one.end_ns - one.begin_ns, other.end_ns - other.begin_ns)


def _silence(windows: Sequence[Window], verb: str) -> str:
    longest = max(window.seconds for window in windows)
    if len(windows) == 1:
        return f"{verb} silent for {longest:.2f} s"
    starts = np.diff([window.begin_ns for window in windows]) * 1e-9
    regular = len(windows) >= 3 and float(starts.max() - starts.min()) < 0.3 * float(np.median(starts))
    every = f", about every {float(np.median(starts)):.1f} s" if regular else ""
    return f"{verb} silent {_times(len(windows))}{every}, for up to {longest:.2f} s"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _t_s(at_ns: int, start_ns: int) -> float:
    return (at_ns - start_ns) * 1e-9
