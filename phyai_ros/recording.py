"""What a policy node records while it is active: what it saw, what it asked its engine, what came back, what it did.

Inputs are kept as the bytes that arrived. ``~/request`` and ``~/chunk`` hold what went to the engine and its answer,
all H rows before any clamp: with the frames that a request names and ``run.json`` it can be computed again.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml
from phyai_policy.msg import ActionChunk, EngineRequest, PolicyStatus
from rclpy.lifecycle import LifecycleNode
from rclpy.serialization import deserialize_message, serialize_message

from phyai_engine import __version__
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.host import host
from phyai_engine.replay.run_file import RunFile
from phyai_engine.timing import mono_ns
from phyai_engine.types import F64, Chunk, Request
from phyai_ros.convert import to_stamp
from phyai_ros.outputs import action_chunk
from phyai_ros.parameters import NodeParameters
from phyai_ros.recorder import Recorder

NOTHING = array.array("d")


class Recording:
    """The recording of one configuration.

    :param params: ``record`` names the folder, whose strftime codes are filled in; ``record_max_mib`` bounds it.
    :param robot_file: kept in ``run.json`` with ``model``, so that the recording alone is enough to run it again.
    :param published: key of the session's publishers -> message type and full topic.
    :param active: inputs and outputs are kept only while this is true; the status always.
    :raises ConfigError: as :class:`Recorder`.
    """

    def __init__(
        self,
        node: LifecycleNode,
        params: NodeParameters,
        robot: RobotConfig,
        robot_file: Path,
        model: ModelConfig,
        published: Mapping[str, tuple[type[Any], str]],
        active: Callable[[], bool],
    ) -> None:
        self._node, self._robot, self._schedule, self._active = node, robot, params.schedule, active
        folder = Path(time.strftime(params.record)).expanduser().absolute()
        self._recorder = Recorder(folder, params.record_max_mib, self._now_ros_ns, node.get_logger().warning)
        self._own = {
            name: node.resolve_topic_name(f"~/{name}") for name in ("status", "request", "chunk")
        }  # ~/chunk is the engine's answer, also where a player elsewhere gets chunks there
        self._published = {key: topic for key, (_, topic) in published.items() if topic not in self._own.values()}
        for name, kind in (("status", PolicyStatus), ("request", EngineRequest), ("chunk", ActionChunk)):
            self._recorder.add(self._own[name], kind)
        for key, topic in self._published.items():
            self._recorder.add(topic, published[key][0])
        self._run = RunFile(
            robot=robot_file.read_text(encoding="utf-8"),
            model=yaml.safe_dump(msgspec.to_builtins(model), sort_keys=False),
            model_name=params.model,
            parameters=asdict(params),
            package=__version__,
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            host=host(),
        )
        self._asked: Request | None = None

    def tap(self, topic: str, kind: type[Any]) -> Callable[[bytes], Any]:
        """For a raw subscription: keeps the bytes of each message and gives the message. Before :meth:`start`."""
        name = self._node.resolve_topic_name(topic)
        self._recorder.add(name, kind)

        def take(content: bytes) -> Any:
            if self._active():
                self._recorder.put(name, content)
            return deserialize_message(content, kind)

        return take

    def start(self) -> None:
        """Begin; every topic is known.

        :raises ConfigError: the folder cannot be made.
        """
        self._recorder.start(self._run)

    def close(self) -> None:
        """See :meth:`Recorder.close`."""
        self._recorder.close()

    @property
    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        return self._recorder.notes

    def sent(self, key: str, message: Any) -> None:
        """One of the session's publishers spoke."""
        if (topic := self._published.get(key)) is not None:
            self._recorder.put(topic, partial(serialize_message, message))

    def told(self, status: PolicyStatus) -> None:
        """~/status was published."""
        self._recorder.put(self._own["status"], partial(serialize_message, status))

    def asked(self, request: Request) -> None:
        """A request went to the engine."""
        taken_ros_ns = self._now_ros_ns() - (mono_ns() - request.observation.snapshot_mono_ns)
        # Without the images: in the queue they would hold the frames' memory, and the bag has them.
        self._asked = request = replace(request, observation=replace(request.observation, images={}))
        self._later("request", partial(engine_request, request, self._robot, self._schedule, taken_ros_ns))

    def answered(self, chunk: Chunk) -> None:
        """The engine answered a request that was not cancelled."""
        asked = self._asked
        if asked is not None and (asked.epoch, asked.chunk_id) == (chunk.epoch, chunk.chunk_id):
            seen = asked.observation
            chunk = replace(chunk, oldest_ros_ns=seen.oldest_ros_ns, newest_ros_ns=seen.newest_ros_ns)
        self._later("chunk", partial(action_chunk, self._robot, chunk, self._now_ros_ns()))

    def _later(self, name: str, make: Callable[[], Any]) -> None:
        """Made and serialised in the recording's thread."""
        self._recorder.put(self._own[name], lambda: serialize_message(make()))

    def _now_ros_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)


def engine_request(request: Request, robot: RobotConfig, schedule: str, stamp_ros_ns: int) -> EngineRequest:
    """A request as a recording keeps it; its images are named by their stamps.

    :param stamp_ros_ns: of the snapshot.
    """
    seen, committed = request.observation, request.committed
    cameras = [camera.name for camera in robot.cameras if camera.name in seen.image_stamps_ros_ns]
    message = EngineRequest(
        robot_id=robot.robot_id,
        epoch=request.epoch,
        chunk_id=request.chunk_id,
        seed=request.seed,
        instruction=seen.instruction,
        state_names=list(robot.state_names),
        state=_doubles(seen.state),
        velocity=_doubles(seen.velocity),
        cameras=cameras,
        image_stamps=[to_stamp(seen.image_stamps_ros_ns[name]) for name in cameras],
        oldest_observation=to_stamp(seen.oldest_ros_ns),
        newest_observation=to_stamp(seen.newest_ros_ns),
        remaining_ms=request.remaining_ms,
        schedule=schedule,
        committed=NOTHING if committed is None else _doubles(committed.actions),
        committed_rows=0 if committed is None else len(committed.actions),
        delay_steps=0 if committed is None else committed.delay_steps,
        execution_steps=0 if committed is None else committed.execution_steps,
    )
    message.header.stamp = to_stamp(stamp_ros_ns)
    return message


def _doubles(values: F64) -> array.array[float]:
    return array.array("d", values.ravel().tolist())
