"""A recording read back: every request that the engine was asked, with its frames, and every answer it gave.

A recording is a folder with a bag and ``run.json`` (run_file.py). The frames of a request are found on the cameras' own
topics by the stamps that EngineRequest.msg names, so that they are stored once.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml

from phyai_engine.config import Camera, ModelConfig, RobotConfig, convert
from phyai_engine.errors import BagError, ConfigError
from phyai_engine.messages import compressed_to_rgb, image_to_rgb, stamp_ns
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.run_file import NAME, RunFile, load_run
from phyai_engine.replay.topic_map import resolved
from phyai_engine.robot_check import check_robot
from phyai_engine.types import F64, U8, Committed, Observation, Request

REQUEST_TYPE = "phyai_policy/msg/EngineRequest"

RECEIPT_NS = 10_000_000
"""From the recorder's receipt of a frame to the node's, at most."""
LATE_NS = 1_000_000_000
"""A frame may have been received by the recorder after the node, which used it at once: by no more than this."""

Number = tuple[int, int]
"""(epoch, chunk), both counted from the first of a run: the same in a run that did the same at another time."""


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """One request of a recording and the engine's answer to it.

    :param t_s: of the request, since the first message of the recording.
    :param request: its images are empty unless they were asked for.
    :param actions: [H, A] float64 robot units, as the engine gave them; None where no answer was recorded.
    :param missing: cameras whose frame the recording does not hold.
    :param inputs: digest of all that the engine was given, frames by their stamps.
    """

    t_s: float
    number: Number
    request: Request
    actions: F64 | None
    missing: tuple[str, ...]
    inputs: bytes


class Numbering:
    """Numbers chunks as they come: epochs and the chunks within each from 0."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}

    def __call__(self, epoch: int, chunk_id: int) -> Number:
        first = self._first.setdefault(epoch, chunk_id)
        return list(self._first).index(epoch), chunk_id - first


@dataclass(slots=True, eq=False)
class _Asked:
    """A request as it stands in the bag."""

    received_ns: int
    message: Any
    frames: dict[str, int]  # camera -> stamp
    images: dict[str, U8] = field(default_factory=dict)


class Recording:
    """One recording. Use it as a context, as its bag. Frames are decoded as they are needed.

    :param node: full name of the policy node, which its own topics begin with.
    """

    def __init__(self, folder: Path, bag: Bag, run: RunFile, node: str) -> None:
        self.folder, self.bag, self.run, self.node = folder, bag, run, node
        where = folder / NAME
        self.robot = convert(_parsed(run.robot, "robot", where), RobotConfig, where=f"{where}: robot")
        check_robot(self.robot, where=f"{where}: robot")
        self.model = convert(_parsed(run.model, "model", where), ModelConfig, where=f"{where}: model")

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.bag.close()

    @property
    def warnings(self) -> Sequence[str]:
        """What was wrong with the bag as a file."""
        return self.bag.warnings

    @property
    def namespace(self) -> str:
        """Of the node."""
        return self.node.rpartition("/")[0]

    @property
    def threads(self) -> int:
        """CPU threads that its engine had; 0 = its library's default."""
        return int(self.run.parameters.get("engine_threads", 0))

    def camera_topics(self) -> dict[str, Camera]:
        """Topic in the bag -> camera."""
        return {self.topic(camera.topic): camera for camera in self.robot.cameras}

    def topic(self, name: str) -> str:
        """A topic of the robot file, or ``~/x``, as it is called in the bag."""
        return f"{self.node}/{name[2:]}" if name.startswith("~/") else resolved(name, self.namespace)

    def messages(self, topics: Collection[str]) -> Iterator[tuple[str, int, Any]]:
        """(topic, time of receipt [ns], message) of those topics that the bag has, in the order of receipt."""
        for received in self.bag.messages([topic for topic in topics if topic in self.bag.topics]):
            yield received.topic, received.received_ns, self.bag.decode(received)

    def exchanges(self, *, images: bool = True) -> Iterator[Exchange]:
        """Every request in the order it was made."""
        asked, answers = self._engine_messages()
        numbering = Numbering()
        source = self._with_images(asked) if images else iter(asked)
        for entry in source:
            message = entry.message
            key = int(message.epoch), int(message.chunk_id)
            yield Exchange(
                t_s=(entry.received_ns - self.bag.start_ns) * 1e-9,
                number=numbering(*key),
                request=_request(message, entry.images, self.robot),
                actions=answers.get(key),
                missing=tuple(name for name in entry.frames if name not in entry.images) if images else (),
                inputs=_digest(message, entry.frames),
            )

    def _engine_messages(self) -> tuple[list[_Asked], dict[tuple[int, int], F64]]:
        asked: list[_Asked] = []
        answers: dict[tuple[int, int], F64] = {}
        for topic, received_ns, message in self.messages([self.topic("~/request"), self.topic("~/chunk")]):
            if topic == self.topic("~/request"):
                self._check(message)
                frames = dict(zip(message.cameras, map(stamp_ns, message.image_stamps), strict=True))
                asked.append(_Asked(received_ns, message, frames))
            else:
                rows = np.asarray(message.actions, dtype=np.float64).reshape(int(message.horizon), -1)
                answers[int(message.epoch), int(message.chunk_id)] = rows
        return asked, answers

    def _check(self, message: Any) -> None:
        got = tuple(message.state_names)
        if got != self.robot.state_names:
            raise BagError(
                "the requests are of another robot than the robot file",
                got=", ".join(got),
                wanted=", ".join(self.robot.state_names),
                where=self.folder,
            )

    def _with_images(self, asked: list[_Asked]) -> Iterator[_Asked]:
        """Each request once its frames were seen, or can no longer come; only frames that are wanted are decoded."""
        uses = Counter((camera, stamp) for entry in asked for camera, stamp in entry.frames.items())
        held: dict[tuple[str, int], U8] = {}
        waiting = deque(asked)

        def ready(until_ns: float) -> Iterator[_Asked]:
            while waiting and waiting[0].received_ns <= until_ns:
                entry = waiting[0]
                there = {camera: held.get((camera, stamp)) for camera, stamp in entry.frames.items()}
                if any(image is None for image in there.values()) and entry.received_ns + LATE_NS > until_ns:
                    return
                waiting.popleft()
                entry.images.update({camera: image for camera, image in there.items() if image is not None})
                for camera, stamp in entry.frames.items():
                    uses[camera, stamp] -= 1
                    if not uses[camera, stamp]:
                        held.pop((camera, stamp), None)
                yield entry

        topics = self.camera_topics()
        wanted = {
            camera.name: sorted(stamp for name, stamp in uses if name == camera.name) for camera in topics.values()
        }
        for topic, received_ns, message in self.messages(topics):
            yield from ready(received_ns - 1)
            camera = topics[topic]
            key = camera.name, stamp_ns(message.header.stamp) or _receipt(received_ns, wanted[camera.name])
            if uses[key] > 0:
                held[key] = (compressed_to_rgb if camera.transport == "compressed" else image_to_rgb)(message)
        yield from ready(float("inf"))


def open_recording(folder: Path) -> Recording:
    """Open what a policy node recorded.

    :raises ConfigError: there is no run.json, or its files do not fit.
    :raises BagError: the bag cannot be read, or holds no request of an engine.
    """
    run = load_run(folder)
    bag = Bag(folder)
    try:
        return Recording(folder, bag, run, _node(bag))
    except BaseException:
        bag.close()
        raise


def _node(bag: Bag) -> str:
    found = [topic.name for topic in bag.topics.values() if topic.kind == REQUEST_TYPE]
    if len(found) != 1:
        raise BagError(
            "not the recording of one policy node",
            got=f"{len(found)} topics of type {REQUEST_TYPE}",
            wanted="one, with requests in it",
            where=bag.path,
            do="Record with the node's parameter `record` while it is active.",
        )
    return found[0].removesuffix("/request")


def is_recording(path: Path) -> bool:
    """True for a folder with a run.json."""
    return (path / NAME).is_file()


def _receipt(received_ns: int, wanted: Sequence[int]) -> int:
    """The wanted stamp of a frame that had none: the node read its clock a little after the frame was recorded."""
    after = bisect.bisect_left(wanted, received_ns)
    return wanted[after] if after < len(wanted) and wanted[after] - received_ns < RECEIPT_NS else 0


def _parsed(text: str, what: str, where: Path) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the {what} is not YAML: {error}", where=where) from None


def _request(message: Any, images: Mapping[str, U8], robot: RobotConfig) -> Request:
    """What the engine was asked. Durations have no meaning any more: monotonic times are 0."""
    committed = None
    if message.committed_rows:
        committed = Committed(
            actions=np.array(message.committed, dtype=np.float64).reshape(int(message.committed_rows), -1),
            delay_steps=int(message.delay_steps),
            execution_steps=int(message.execution_steps),
        )
        if committed.actions.shape[1] != len(robot.actions):
            raise BagError(
                "committed rows do not fit the robot",
                got=f"{committed.actions.shape[1]} columns",
                wanted=len(robot.actions),
                where=f"request {message.chunk_id} of epoch {message.epoch}",
            )
    observation = Observation(
        images=dict(images),
        state=np.array(message.state, dtype=np.float64),
        velocity=np.array(message.velocity, dtype=np.float64),
        instruction=str(message.instruction),
        oldest_ros_ns=stamp_ns(message.oldest_observation),
        newest_ros_ns=stamp_ns(message.newest_observation),
        capture_mono_ns=0,
        snapshot_mono_ns=0,
    )
    return Request(
        epoch=int(message.epoch),
        chunk_id=int(message.chunk_id),
        observation=observation,
        committed=committed,
        seed=int(message.seed),
        remaining_ms=float(message.remaining_ms),
    )


def _digest(message: Any, frames: Mapping[str, int]) -> bytes:
    words = message.instruction, int(message.seed), int(message.delay_steps), sorted(frames.items())
    digest = hashlib.sha256(repr(words).encode())
    for array in (message.state, message.velocity, message.committed):
        digest.update(np.asarray(array, dtype="<f8").tobytes() + b"|")
    return digest.digest()
