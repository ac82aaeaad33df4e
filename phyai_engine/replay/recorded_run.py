"""A recording -> the record of that run: what the report shows and ``phyai diff`` and ``phyai sweep`` compare."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from phyai_engine.errors import BagError, ImageError
from phyai_engine.messages import compressed_to_rgb, image_to_rgb, stamp_ns
from phyai_engine.policy import MODELS, weights_note
from phyai_engine.replay.examine import examine
from phyai_engine.replay.record import (
    Camera,
    ChunkRow,
    Event,
    FrameRow,
    Joints,
    Record,
    StepRow,
    TimingRow,
    chunk_hash,
    load,
)
from phyai_engine.replay.recorded import Recording, is_recording, open_recording
from phyai_engine.replay.rows import frame_row, step_row, timing_row
from phyai_engine.replay.survey import Survey
from phyai_engine.replay.topic_map import map_topics
from phyai_engine.types import AbortCause, Refusal

FRAME_EVERY_S = 1.5
JOINTS_EVERY_S = 0.05


def run_at(path: Path) -> Record:
    """The record of a run: of a recording folder, or as a file holds it.

    :raises PhyaiError: it cannot be read.
    """
    if not is_recording(path):
        return load(path)
    with open_recording(path) as recording:
        return record_of(recording)


def record_of(recording: Recording) -> Record:
    """Read the whole recording once.

    :raises BagError: the bag cannot be read.
    """
    heard = _Heard(recording)
    topics = heard.topics()
    for topic, received_ns, message in recording.messages(topics):
        topics[topic]((received_ns - recording.bag.start_ns) * 1e-9, message)
    return heard.record()


def _survey(recording: Recording) -> Survey:
    """What the sensors did; where the bag does not hold every input, as a cut one, only the reason."""
    try:
        topics = map_topics(recording.robot, recording.bag, recording.namespace)
        return examine(recording.bag, topics, recording.robot).survey
    except BagError as error:
        return Survey(warnings=[*recording.warnings, str(error)])


class _Heard:
    """Rows as they come."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._robot = recording, recording.robot
        self._events: list[Event] = []
        self._steps: list[StepRow] = []
        self._timings: list[TimingRow] = []
        self._chunks: list[ChunkRow] = []
        self._frames: list[FrameRow] = []
        self._arrivals: dict[str, list[tuple[float, float]]] = {c.name: [] for c in self._robot.cameras}
        self._positions: dict[str, float] = {}
        self._joints: list[tuple[float, list[float]]] = []
        self._delivered: dict[str, float] = {}
        self._status: Any = None

    def topics(self) -> Mapping[str, Callable[[float, Any], None]]:
        """Topic in the bag -> what takes its messages."""
        name = self._recording.topic
        cameras = {t: partial(self._image, c.name, c.transport) for t, c in self._recording.camera_topics().items()}
        joints = {name(entry.topic): self._joint_state for entry in self._robot.state}
        return {
            **cameras,
            **joints,
            name("~/step"): lambda t_s, message: self._steps.append(step_row(t_s, message)),
            name("~/timing"): lambda t_s, message: self._timings.append(timing_row(t_s, message)),
            name("~/chunk"): self._chunk,
            name("~/status"): self._take_status,
        }

    def record(self) -> Record:
        recording, status = self._recording, self._status
        run, model = recording.run, recording.model
        counts = [] if status is None else status.refusals
        refused = {Refusal(code).name.lower(): int(n) for code, n in enumerate(counts) if n}
        return Record(
            robot_id=self._robot.robot_id,
            action_names=self._robot.action_names,
            action_type=self._robot.action_type,
            dt_s=self._robot.dt_s,
            model=weights_note(model) if model.family in MODELS else model.family,
            placement=str(run.parameters.get("engine", "unknown")),
            schedule=str(run.parameters.get("schedule", "unknown")),
            started=run.started,
            host=run.host,
            events=self._events,
            steps=self._steps,
            timings=self._timings,
            joints=Joints(
                names=self._robot.state_names,
                t_s=[t_s for t_s, _ in self._joints],
                positions=[row for _, row in self._joints],
            ),
            cameras={
                name: Camera(
                    t_s=[t_s for t_s, _ in rows],
                    stamp_s=[stamp_s for _, stamp_s in rows],
                    delivered=self._delivered.get(name, float("nan")),
                )
                for name, rows in self._arrivals.items()
            },
            frames=self._frames,
            refusals=refused,
            bag=recording.folder.name,
            survey=_survey(recording),
            chunks=self._chunks,
            chunk_hash=chunk_hash(self._chunks),
        )

    def _image(self, camera: str, transport: str, t_s: float, message: Any) -> None:
        stamped_ns = stamp_ns(message.header.stamp)
        stamp_s = (stamped_ns - self._recording.bag.start_ns) * 1e-9 if stamped_ns else math.nan
        self._arrivals[camera].append((t_s, stamp_s))
        kept = [frame.t_s for frame in self._frames if frame.camera == camera]
        if kept and t_s - kept[-1] < FRAME_EVERY_S:
            return
        with contextlib.suppress(ImageError):  # the survey counts those that cannot be read
            image = (compressed_to_rgb if transport == "compressed" else image_to_rgb)(message)
            self._frames.append(frame_row(t_s, camera, image))

    def _joint_state(self, t_s: float, message: Any) -> None:
        self._positions.update(zip(message.name, map(float, message.position), strict=False))
        whole = all(name in self._positions for name in self._robot.state_names)
        if whole and (not self._joints or t_s - self._joints[-1][0] >= JOINTS_EVERY_S):
            self._joints.append((t_s, [self._positions[name] for name in self._robot.state_names]))

    def _chunk(self, t_s: float, message: Any) -> None:
        width = max(1, len(message.joint_names))
        rows = [float(value) for value in message.actions]
        self._chunks.append(
            ChunkRow(
                t_s=t_s,
                epoch=int(message.epoch),
                chunk_id=int(message.chunk_id),
                actions=[rows[i : i + width] for i in range(0, len(rows), width)],
            )
        )

    def _take_status(self, t_s: float, message: Any) -> None:
        """A change of the lifecycle state or of the latch is an event."""
        before, self._status = self._status, message
        for name, share in zip(message.camera_names, message.camera_delivered, strict=True):
            if not math.isnan(share):  # unknown again once the node is deactivated
                self._delivered[name] = float(share)
        if before is None or before.lifecycle_label != message.lifecycle_label:
            self._events.append(Event(t_s, "lifecycle", f"policy node {message.lifecycle_label}"))
        was = 0 if before is None else before.abort_cause
        if message.abort_cause and message.abort_cause != was:
            cause = AbortCause(message.abort_cause).name.lower()
            self._events.append(Event(t_s, "abort", f"{cause}: {message.abort_text}"))
        elif was and not message.abort_cause:
            self._events.append(Event(t_s, "rearm", "armed again"))
