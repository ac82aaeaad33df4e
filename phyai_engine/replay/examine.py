"""Reads the sensors of a bag once, before it is replayed: rates, gaps, skew, stamps, frozen frames -> Survey."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.control.stream import OTHER_CLOCK_S
from phyai_engine.errors import BagError, ImageError, RefusalError
from phyai_engine.messages import compressed_to_rgb, image_to_rgb, joint_state_to_arrays, stamp_ns
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.sensor_faults import Heard, Motion, find_faults, skew_s
from phyai_engine.replay.survey import InputSurvey, Spread, Survey
from phyai_engine.replay.topic_map import TopicMap
from phyai_engine.types import F64


@dataclass(frozen=True, slots=True)
class Examined:
    """What is known of a bag before it is replayed.

    :param ready_ns: receipt of the message with which every input has spoken.
    """

    survey: Survey
    ready_ns: int

    @property
    def clock_offset_ns(self) -> int:
        """Receipt - stamp that all inputs have in common, where stamps are on another clock than the bag; else 0."""
        return round(self.survey.clock_offset_s * 1e9)


def examine(bag: Bag, topics: TopicMap, robot: RobotConfig) -> Examined:
    """One pass over the bag.

    :raises BagError: the bag breaks off, no message of an input can be read, or a joint is never named.
    """
    cameras = {topic: _CameraNotes(camera) for topic, camera in topics.cameras.items()}
    joints = {
        topic: _JointNotes(spelt, [i for i, entry in enumerate(robot.state) if entry.topic == spelt], robot)
        for topic, spelt in topics.joints.items()
    }
    notes: dict[str, _Notes] = {**cameras, **joints}
    measured = _Measured(len(robot.state))
    for message in bag.messages(set(notes)):
        note = notes[message.topic]
        try:
            decoded = bag.decode(message)
        except RefusalError as error:
            note.garbled(message.received_ns, str(error))
            continue
        note.take(message.received_ns, decoded)
        if isinstance(note, _JointNotes):
            measured.add(message.received_ns, note)
    for topic, note in notes.items():
        note.check(topic, bag)
    offset_ns = _common_offset_ns([note.heard(topic) for topic, note in notes.items()])
    inputs = [_on_bag_clock(note.heard(topic), offset_ns) for topic, note in notes.items()]
    motion = measured.motion()
    survey = Survey(
        duration_s=(bag.end_ns - bag.start_ns) * 1e-9,
        messages=sum(len(one.received_ns) for one in inputs),
        inputs=[_survey(one, inputs, bag.start_ns) for one in inputs],
        faults=find_faults(inputs, motion, bag.start_ns),
        warnings=[*bag.warnings, *_clock_words(offset_ns)],
        clock_offset_s=offset_ns * 1e-9,
    )
    return Examined(survey, ready_ns=max(int(one.received_ns[0]) for one in inputs))


# -- one pass ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Notes:
    """Of one input, message by message."""

    received_ns: list[int] = field(default_factory=list)
    stamps_ns: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    unread: int = 0
    reason: str = ""

    def refused(self, received_ns: int, reason: str, stamp: int = 0) -> None:
        """A message that cannot be read: its receipt counts, its stamp where it is known."""
        self.received_ns.append(received_ns)
        self.stamps_ns.append(stamp)
        self.unread += 1
        self.reason = self.reason or reason

    def garbled(self, received_ns: int, reason: str) -> None:
        """A message without fields: its pixels are like no other's."""
        self.refused(received_ns, reason)
        self.digests.append(-len(self.received_ns))

    def take(self, received_ns: int, message: Any) -> None:
        raise NotImplementedError

    def heard(self, topic: str) -> Heard:
        raise NotImplementedError

    def check(self, topic: str, bag: Bag) -> None:
        """:raises BagError: nothing of it can be used."""
        if not self.received_ns:
            raise BagError("an input has no message in the part that can be read", got=topic, where=bag.path)
        if self.unread == len(self.received_ns):
            text = f"none of the {self.unread} messages of an input can be read"
            raise BagError(text, got=self.reason, where=f"{bag.path}: {topic}")


class _CameraNotes(_Notes):
    """Frames are decoded once per size and encoding, which finds what the replay cannot read; pixels are compared."""

    def __init__(self, camera: Camera) -> None:
        super().__init__()
        self._camera = camera
        self._compressed = camera.transport == "compressed"
        self._decode: Callable[[Any], Any] = compressed_to_rgb if self._compressed else image_to_rgb
        self._forms: Counter[str] = Counter()
        self._faults: dict[tuple[object, ...], str] = {}

    def take(self, received_ns: int, message: Any) -> None:
        stamp = stamp_ns(message.header.stamp)
        form: tuple[object, ...]
        if self._compressed:
            form, words = (message.format,), str(message.format)
        else:
            form = (message.encoding, message.height, message.width, message.step, len(message.data))
            words = f"{message.encoding} {message.width}x{message.height}"
        if form not in self._faults:
            try:
                self._decode(message)
                self._faults[form] = ""
            except ImageError as error:
                self._faults[form] = str(error)
        if fault := self._faults[form]:
            self.refused(received_ns, fault, stamp)
        else:
            self.received_ns.append(received_ns)
            self.stamps_ns.append(stamp)
        self._forms[words] += 1
        self.digests.append(zlib.crc32(message.data))

    def heard(self, topic: str) -> Heard:
        return Heard(
            name=self._camera.name,
            topic=topic,
            kind="camera",
            tolerance_s=self._camera.tolerance_s,
            received_ns=np.array(self.received_ns, dtype=np.int64),
            stamps_ns=np.array(self.stamps_ns, dtype=np.int64),
            digests=np.array(self.digests, dtype=np.int64),
            undecodable=self.unread,
            reason=self.reason,
            encodings=tuple(self._forms),
        )


class _JointNotes(_Notes):
    """:ivar seen: joints named so far. :ivar newest: position by index into the robot's state."""

    def __init__(self, spelt: str, indices: Sequence[int], robot: RobotConfig) -> None:
        super().__init__()
        self._spelt, self._tolerance_s = spelt, robot.joint_tolerance_s
        self._index = {robot.state[i].name: i for i in indices}
        self.seen: set[str] = set()
        self.newest: dict[int, float] = {}

    def take(self, received_ns: int, message: Any) -> None:
        stamp = stamp_ns(message.header.stamp)
        self.seen.update(message.name[:256])
        try:
            names, positions, _ = joint_state_to_arrays(message, topic=self._spelt, needed=self._index)
        except RefusalError as error:
            self.refused(received_ns, str(error), stamp)
            return
        self.received_ns.append(received_ns)
        self.stamps_ns.append(stamp)
        for name, value in zip(names, positions.tolist(), strict=True):
            if name in self._index:
                self.newest[self._index[name]] = value

    def heard(self, topic: str) -> Heard:
        return Heard(
            name=self._spelt,
            topic=topic,
            kind="joints",
            tolerance_s=self._tolerance_s,
            received_ns=np.array(self.received_ns, dtype=np.int64),
            stamps_ns=np.array(self.stamps_ns, dtype=np.int64),
            digests=np.array([], dtype=np.int64),
            undecodable=self.unread,
            reason=self.reason,
        )

    def check(self, topic: str, bag: Bag) -> None:
        super().check(topic, bag)
        if missing := self._index.keys() - self.seen:
            raise BagError(
                f"no message of {topic} names {', '.join(sorted(missing))}",
                got=", ".join(sorted(self.seen)) or "no names",
                where=bag.path,
                do="Correct the names in the robot file, or give the robot file of this recording.",
            )


class _Measured:
    """Positions of all joints over time."""

    def __init__(self, joints: int) -> None:
        self._joints = joints
        self._received_ns: list[int] = []
        self._rows: list[list[float]] = []
        self._row = [float("nan")] * joints

    def add(self, received_ns: int, note: _JointNotes) -> None:
        for index, value in note.newest.items():
            self._row[index] = value
        self._received_ns.append(received_ns)
        self._rows.append(list(self._row))

    def motion(self) -> Motion:
        rows = np.array(self._rows, dtype=np.float64).reshape(-1, self._joints)
        return Motion(np.array(self._received_ns, dtype=np.int64), rows)


# -- figures -----------------------------------------------------------------------------------------------------------


def _common_offset_ns(inputs: Sequence[Heard]) -> int:
    """Stamps on another clock (simulated time) are all off alike: by what the promptest input is off; else 0."""
    medians = [float(np.median(late)) for one in inputs if (late := one.lateness_s()).size]
    alike = medians and max(medians) - min(medians) < OTHER_CLOCK_S
    return round(min(medians) * 1e9) if alike and min(abs(m) for m in medians) > OTHER_CLOCK_S else 0


def _clock_words(offset_ns: int) -> list[str]:
    if not offset_ns:
        return []
    return [
        f"all stamps lie {offset_ns * 1e-9:.1f} s before their receipt (simulated time?): "
        "receipt is shifted by that, so that the promptest input has a lateness of 0"
    ]


def _on_bag_clock(one: Heard, offset_ns: int) -> Heard:
    return replace(one, stamps_ns=np.where(one.stamped, one.stamps_ns + offset_ns, 0)) if offset_ns else one


def _survey(one: Heard, inputs: Sequence[Heard], start_ns: int) -> InputSurvey:
    steps, intervals = one.steps_ns(), np.diff(one.received_ns) * 1e-9
    silences, runs = one.silences(), one.equal_runs()
    longest = int(np.argmax(intervals)) if intervals.size else 0
    period_s = one.period_s()
    return InputSurvey(
        name=one.name,
        topic=one.topic,
        kind=one.kind,
        messages=len(one.received_ns),
        rate_hz=1.0 / period_s if period_s > 0 else float("nan"),
        period=_spread(steps[steps > 0] * 1e-9),
        interval=_spread(intervals),
        gaps=len(silences),
        longest_gap_s=float(intervals[longest]) if intervals.size else float("nan"),
        longest_gap_t_s=(int(one.received_ns[longest]) - start_ns) * 1e-9 if intervals.size else float("nan"),
        lateness=_spread(one.lateness_s()),
        skew=_spread(skew_s(one, inputs)),
        backward=int((steps < 0).sum()),
        repeated=int((steps == 0).sum()),
        unstamped=int((~one.stamped).sum()),
        frozen=sum(end - begin for begin, end in runs),
        longest_frozen=max((end - begin for begin, end in runs), default=0),
        undecodable=one.undecodable,
        encodings=one.encodings,
    )


def _spread(values: F64 | Iterable[float]) -> Spread:
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    if not known.size:
        return Spread()
    p50, p99 = np.percentile(known, (50, 99))
    return Spread(p50=float(p50), p99=float(p99), max=float(known.max()))
