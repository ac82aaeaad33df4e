"""Newest samples of every input -> one Observation, or a refusal that says which input and why.

No rclpy here: stamps and clock readings are passed in. No locks either: subscriptions and the control tick
run on one single-threaded executor, and nothing else may touch the buffer.

Both clocks are read back to back when a message arrives. That pair makes its stamp monotonic, once; a clock
that is stepped later does not move samples already taken.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phyai_engine.config import Camera, RobotConfig, StateEntry
from phyai_engine.control.stream import Drop, Meter, Sample, Stream, StreamStats, clock_fault
from phyai_engine.errors import ConfigError, ImageError, RefusalError
from phyai_engine.types import F64, U8, Observation, Refusal

JUMP_WINDOW_NS = 3_000_000_000
"""Streams that fell back within this time of each other fell together; each needs two messages to show it."""

MAX_NAMES_SEEN = 256
"""Joint names remembered for messages; a driver that invents names must not fill the memory."""

_JOINT = tuple[float, float]  # position, velocity (NaN = unknown)


class Put(enum.Enum):
    """What became of a message.

    JUMPED: all inputs went back in time together and the buffer emptied itself; the node starts a new epoch.
    """

    KEPT = 1
    DROPPED = 2
    JUMPED = 3


@dataclass(slots=True)
class _CameraInput:
    config: Camera
    stream: Stream[U8]
    meter: Meter
    pixels: bytes = b""
    alike: int = 1  # consecutive frames with these pixels

    @property
    def offset_ns(self) -> int:
        """What the header stamp is later than the exposure."""
        return round(self.config.latency_offset_s * 1e9)


@dataclass(slots=True)
class _JointTopic:
    streams: dict[str, Stream[_JOINT]]
    meter: Meter
    names_seen: set[str] = field(default_factory=set)


class ObservationBuffer:
    """Bounded histories of one robot's inputs.

    :param camera_history: most frames kept per camera. :param joint_history: most samples kept per joint.
        What is older than the slowest camera may be is let go earlier.
    :param accept_unstamped: take messages whose header stamp is 0, with the time of receipt as their stamp.
    :param frozen_frames: refuse a camera after this many frames with the same (subsampled) pixels; 0 = never.
    :param on_arrival: (camera, image) -> the image to keep, such as a smaller one; None keeps it as it came.
    :param future_tolerance_s: how far a stamp may be ahead; simulated time lags by up to a /clock period.
    """

    def __init__(
        self,
        robot: RobotConfig,
        *,
        camera_history: int = 32,
        joint_history: int = 512,
        accept_unstamped: bool = False,
        frozen_frames: int = 0,
        on_arrival: Callable[[str, U8], U8] | None = None,
        future_tolerance_s: float = 0.1,
    ) -> None:
        self._robot = robot
        self._accept_unstamped = accept_unstamped
        self._frozen_frames = frozen_frames
        self._on_arrival = on_arrival
        self._future_s = future_tolerance_s
        self._instruction = ""
        longest = max((c.max_age_s + c.tolerance_s for c in robot.cameras), default=robot.joint_max_age_s)
        span_ns = round((longest + robot.joint_tolerance_s) * 1e9)
        self._cameras = {
            c.name: _CameraInput(
                c,
                Stream(f"camera {c.name!r} ({c.topic})", history=camera_history, span_ns=span_ns),
                Meter(c.name),
            )
            for c in robot.cameras
        }
        self._joints = [
            Stream[_JOINT](f"joint {e.name!r} ({e.topic})", history=joint_history, span_ns=span_ns) for e in robot.state
        ]
        self._topics: dict[str, _JointTopic] = {}
        for entry, stream in zip(robot.state, self._joints, strict=True):
            topic = self._topics.setdefault(entry.topic, _JointTopic({}, Meter(entry.topic)))
            topic.streams[entry.name] = stream
        self._needed = {name: frozenset(topic.streams) for name, topic in self._topics.items()}

    # -- intake ----------------------------------------------------------------------------------------------

    def set_instruction(self, text: str) -> None:
        """Used by the next observation."""
        self._instruction = text

    def needed(self, topic: str) -> frozenset[str]:
        """Joints read from one JointState topic."""
        return self._needed[self._topic(topic).meter.name]

    def put_image(
        self, camera_name: str, image: U8, stamp_ros_ns: int, *, received_ros_ns: int, received_mono_ns: int
    ) -> Put:
        """A frame arrived.

        :param image: [h, w, 3] uint8 RGB; kept, not copied. The size may change from frame to frame.
        :param stamp_ros_ns: header stamp as the driver wrote it.
        :param received_ros_ns: both clocks read back to back at receipt.
        """
        camera = self._camera(camera_name)
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or image.size == 0:
            error = RefusalError(
                Refusal.MALFORMED,
                "not an RGB image",
                got=f"{image.shape} {image.dtype}",
                wanted="[h, w, 3] uint8",
            )
            return self.put_refused(camera_name, error, received_mono_ns)
        stamp_ns, drop = self._check_stamp((camera.stream,), stamp_ros_ns, received_ros_ns)
        stamp_ns -= camera.offset_ns
        if drop is None:
            capture_ns = received_mono_ns - (received_ros_ns - stamp_ns)
            kept = image if self._on_arrival is None else self._on_arrival(camera_name, image)
            drop = camera.stream.put(Sample(stamp_ns, capture_ns, received_mono_ns, kept))
        if drop is None and self._frozen_frames:
            step = max(1, min(image.shape[:2]) // 32)
            pixels = image[::step, ::step].tobytes()
            camera.alike = camera.alike + 1 if pixels == camera.pixels else 1
            camera.pixels = pixels
        camera.meter.count(drop, stamp_ns, received_mono_ns)
        return self._result(drop, (camera.stream,), received_mono_ns)

    def put_joints(
        self,
        topic: str,
        names: Sequence[str],
        positions: F64,
        velocities: F64 | None,
        stamp_ros_ns: int,
        *,
        received_ros_ns: int,
        received_mono_ns: int,
    ) -> Put:
        """A JointState arrived, as :func:`phyai_engine.messages.joint_state_to_arrays` gives it.

        Any subset of the joints, in any order; joints that the robot file does not name are ignored.

        :param topic: as the robot file spells it.
        :param positions: [n], finite for the joints of the robot file. :param velocities: [n], NaN = unknown.
        """
        source = self._topic(topic)
        if len(source.names_seen) < MAX_NAMES_SEEN:
            source.names_seen.update(names)
        present = [(i, source.streams[name]) for i, name in enumerate(names) if name in source.streams]
        streams = tuple(stream for _, stream in present)
        stamp_ns, drop = self._check_stamp(streams, stamp_ros_ns, received_ros_ns)
        if drop is None:
            capture_ns = received_mono_ns - (received_ros_ns - stamp_ns)
            for i, stream in present:
                velocity = float("nan") if velocities is None else float(velocities[i])
                value = (float(positions[i]), velocity)
                drop = stream.put(Sample(stamp_ns, capture_ns, received_mono_ns, value)) or drop
        source.meter.count(drop, stamp_ns, received_mono_ns)
        return self._result(drop, streams, received_mono_ns)

    def put_refused(self, stream_name: str, error: RefusalError | ImageError, received_mono_ns: int) -> Put:
        """A message of a camera or of a JointState topic could not be read.

        It is counted, and the next snapshot that lacks it gives ``error`` as the reason.
        """
        streams: tuple[Stream[Any], ...]
        if stream_name in self._cameras:
            camera = self._cameras[stream_name]
            streams, meter = (camera.stream,), camera.meter
        else:
            source = self._topic(stream_name)
            streams, meter = tuple(source.streams.values()), source.meter
        fault = error if isinstance(error, RefusalError) else RefusalError(Refusal.MALFORMED, str(error))
        for stream in streams:
            stream.heard_mono_ns = received_mono_ns
            stream.fault = fault
        meter.count(Drop.REFUSED, 0, received_mono_ns)
        return Put.DROPPED

    def clear(self) -> None:
        """Forget all samples (activate, deactivate, clock jump). Counters and the instruction stay."""
        for camera in self._cameras.values():
            camera.stream.clear()
            camera.meter.clear()
            camera.pixels, camera.alike = b"", 1
        for stream in self._joints:
            stream.clear()
        for topic in self._topics.values():
            topic.meter.clear()

    # -- observation -----------------------------------------------------------------------------------------

    def snapshot(self, now_ros_ns: int, now_mono_ns: int) -> Observation:
        """Assemble the observation of the newest instant that every camera has seen.

        Without cameras: that every joint has reported. Each camera gives its frame nearest to that instant;
        joints the sample nearest to it, or their newest, as the robot file says. State and velocity are in
        the units of the topics.

        :raises RefusalError: MISSING, STALE, SKEWED, MALFORMED or NOT_FINITE, naming the input.
        """
        if now_ros_ns <= 0:
            raise RefusalError(
                Refusal.MISSING, "there is no time yet", do="use_sim_time is set but nobody publishes /clock."
            )
        for camera in self._cameras.values():
            self._check_heard(camera.stream)
            camera.stream.check_fresh(camera.config.max_age_s, self._future_s, now_ros_ns, now_mono_ns)
            self._check_moving(camera)
        for entry, stream in zip(self._robot.state, self._joints, strict=True):
            self._check_heard(stream, entry)
            stream.check_fresh(self._robot.joint_max_age_s, self._future_s, now_ros_ns, now_mono_ns)
        anchor_ns, anchor = self._anchor()
        frames = {name: self._frame(camera, anchor_ns, anchor, now_ros_ns) for name, camera in self._cameras.items()}
        joints = self._pick_joints(anchor_ns, anchor)
        samples: list[Sample[Any]] = [*frames.values(), *joints]
        oldest = min(samples, key=lambda s: s.stamp_ros_ns)
        values = np.array([s.value for s in joints], dtype=np.float64)
        if not np.isfinite(values[:, 0]).all():
            name = self._robot.state[int(np.argmin(np.isfinite(values[:, 0])))].name
            raise RefusalError(Refusal.NOT_FINITE, f"position of joint {name!r}", wanted="a finite number")
        return Observation(
            images={name: frame.value for name, frame in frames.items()},
            state=values[:, 0].copy(),
            velocity=values[:, 1].copy(),
            instruction=self._instruction,
            oldest_ros_ns=oldest.stamp_ros_ns,
            newest_ros_ns=max(s.stamp_ros_ns for s in samples),
            capture_mono_ns=oldest.capture_mono_ns,
            snapshot_mono_ns=now_mono_ns,
            image_stamps_ros_ns={
                name: frame.stamp_ros_ns + self._cameras[name].offset_ns for name, frame in frames.items()
            },
        )

    def newest_state(self, now_mono_ns: int) -> F64:
        """[S] newest measured positions in topic units, NaN where none arrived within ``joint_max_age_s``."""
        limit_ns = self._robot.joint_max_age_s * 1e9
        newest = [stream.newest for stream in self._joints]
        return np.array(
            [s.value[0] if s is not None and now_mono_ns - s.received_mono_ns <= limit_ns else np.nan for s in newest]
        )

    def measured_actions(self, now_mono_ns: int) -> F64:
        """[A] newest measured value of what each action moves, NaN where nothing fresh is measured."""
        driven = self._robot.measured_index()
        return np.where(driven < 0, np.nan, self.newest_state(now_mono_ns)[driven])

    def camera_stats(self, now_mono_ns: int) -> tuple[StreamStats, ...]:
        """Figures of the cameras, in the robot file's order."""
        return tuple(camera.meter.stats(now_mono_ns) for camera in self._cameras.values())

    def joint_stats(self, now_mono_ns: int) -> tuple[StreamStats, ...]:
        """Figures of the JointState topics."""
        return tuple(topic.meter.stats(now_mono_ns) for topic in self._topics.values())

    # -- rules of the intake ---------------------------------------------------------------------------------

    def _camera(self, name: str) -> _CameraInput:
        if name not in self._cameras:
            raise ConfigError(f"no camera named {name!r}", wanted=f"one of {', '.join(self._cameras) or 'none'}")
        return self._cameras[name]

    def _topic(self, name: str) -> _JointTopic:
        if name not in self._topics:
            raise ConfigError(f"no joint state topic {name!r}", wanted=f"one of {', '.join(self._topics)}")
        return self._topics[name]

    def _check_stamp(
        self, streams: Sequence[Stream[Any]], stamp_ns: int, received_ros_ns: int
    ) -> tuple[int, Drop | None]:
        """The stamp to use, and why the message must be dropped, if it must."""
        drop, fault = None, None
        if received_ros_ns <= 0:
            drop = Drop.NO_CLOCK
            fault = RefusalError(Refusal.MISSING, "messages arrive but there is no time yet", do="Publish /clock.")
        elif stamp_ns <= 0 and self._accept_unstamped:
            stamp_ns = received_ros_ns
        elif stamp_ns <= 0:
            drop = Drop.UNSTAMPED
            fault = RefusalError(
                Refusal.MALFORMED,
                "header.stamp is 0",
                do="Have the driver stamp its messages, or set accept_unstamped to use the time of receipt.",
            )
        elif stamp_ns - received_ros_ns > self._future_s * 1e9:
            drop = Drop.FUTURE_STAMP
            fault = clock_fault((stamp_ns - received_ros_ns) * 1e-9, self._future_s)
        if fault is not None:
            for stream in streams:
                stream.fault = fault
        return stamp_ns, drop

    def _result(self, drop: Drop | None, streams: Sequence[Stream[Any]], now_mono_ns: int) -> Put:
        if any(stream.fell_mono_ns == now_mono_ns for stream in streams) and self._fell_together(now_mono_ns):
            self.clear()
            return Put.JUMPED
        return Put.KEPT if drop is None else Put.DROPPED

    def _fell_together(self, now_mono_ns: int) -> bool:
        """True when every stream that still speaks has gone back by more than a second."""
        streams: list[Stream[Any]] = [*(camera.stream for camera in self._cameras.values()), *self._joints]
        speaking = [
            s for s in streams if s.heard_mono_ns is not None and now_mono_ns - s.heard_mono_ns < JUMP_WINDOW_NS
        ]
        return all(s.fell_mono_ns is not None and now_mono_ns - s.fell_mono_ns < JUMP_WINDOW_NS for s in speaking)

    # -- rules of the observation ----------------------------------------------------------------------------

    def _check_moving(self, camera: _CameraInput) -> None:
        if self._frozen_frames and camera.alike >= self._frozen_frames:
            raise RefusalError(
                Refusal.STALE,
                f"{camera.stream.label} is frozen",
                got=f"{camera.alike} frames with the same pixels",
                wanted=f"fewer than {self._frozen_frames} (frozen_frames)",
                do="Restart its driver.",
            )

    def _check_heard(self, stream: Stream[Any], entry: StateEntry | None = None) -> None:
        """Refuse an input of which nothing usable ever arrived."""
        if stream.newest is not None:
            return
        if stream.fault is not None:
            raise RefusalError(stream.fault.code, f"no usable message from {stream.label}: {stream.fault}")
        if entry is None or not (names := self._topics[entry.topic].names_seen):
            raise RefusalError(Refusal.MISSING, f"no message from {stream.label}", do=self._seen())
        raise RefusalError(
            Refusal.MISSING,
            f"no message names {stream.label}",
            got=", ".join(sorted(names)),
            do=self._seen(),
        )

    def _seen(self) -> str:
        """Which topics have spoken."""
        topics = [c.config.topic for c in self._cameras.values() if c.meter.received]
        topics += [name for name, topic in self._topics.items() if topic.meter.received]
        return f"Topics seen so far: {', '.join(topics) or 'none'}."

    def _anchor(self) -> tuple[int, str]:
        """The instant of the observation and who sets it: the oldest of the newest stamps."""
        streams: list[Stream[Any]] = [camera.stream for camera in self._cameras.values()] or [*self._joints]
        return min((s.newest.stamp_ros_ns, s.label) for s in streams if s.newest is not None)

    def _frame(self, camera: _CameraInput, anchor_ns: int, anchor: str, now_ros_ns: int) -> Sample[U8]:
        frame = camera.stream.nearest(anchor_ns)
        assert frame is not None  # _check_heard refuses otherwise
        _check_skew(camera.stream.label, frame.stamp_ros_ns, camera.config.tolerance_s, anchor_ns, anchor)
        age_s = (now_ros_ns - frame.stamp_ros_ns) * 1e-9
        if age_s > camera.config.max_age_s:
            raise RefusalError(
                Refusal.STALE,
                f"the frame of {camera.stream.label} that matches {anchor} is old",
                got=f"{age_s:.3f} s",
                wanted=f"at most {camera.config.max_age_s:.3f} s",
            )
        return frame

    def _pick_joints(self, anchor_ns: int, anchor: str) -> list[Sample[_JOINT]]:
        if self._robot.joint_sample == "newest":
            # For a policy trained on the newest state with each image, whatever the image's latency: the
            # tolerance then holds between the joints, and freshness bounds the rest.
            picked = [s.newest for s in self._joints if s.newest is not None]
            first = max(range(len(picked)), key=lambda i: picked[i].stamp_ros_ns)
            anchor_ns, anchor = picked[first].stamp_ros_ns, self._joints[first].label
        else:
            picked = [s for s in (stream.nearest(anchor_ns) for stream in self._joints) if s is not None]
        for stream, sample in zip(self._joints, picked, strict=True):
            _check_skew(stream.label, sample.stamp_ros_ns, self._robot.joint_tolerance_s, anchor_ns, anchor)
        return picked


def _check_skew(label: str, stamp_ns: int, tolerance_s: float, anchor_ns: int, anchor: str) -> None:
    skew_s = abs(stamp_ns - anchor_ns) * 1e-9
    if skew_s > tolerance_s:
        raise RefusalError(
            Refusal.SKEWED,
            f"{label} has no sample near the observation's instant, which {anchor} sets",
            got=f"{skew_s:.3f} s away",
            wanted=f"at most {tolerance_s:.3f} s",
        )
