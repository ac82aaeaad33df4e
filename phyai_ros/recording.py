"""What a policy node records: what it heard, what it asked its engine, what came back, what it did.

A process of its own hears inputs and outputs itself (recorder.py) and keeps inputs while the node is active. The node
hands over ``~/request`` and ``~/chunk``, what went to the engine and its answer, all H rows before any clamp: with the
frames that a request names and ``run.json`` it can be computed again.
"""

from __future__ import annotations

import array
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import yaml
from phyai_policy.msg import ActionChunk, EngineRequest, PolicyStatus
from rclpy.lifecycle import LifecycleNode
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage, Image

from phyai_engine import __version__
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.host import host
from phyai_engine.replay.run_file import RunFile
from phyai_engine.timing import mono_ns
from phyai_engine.types import F64, Chunk, Request
from phyai_ros.convert import to_stamp
from phyai_ros.outputs import action_chunk
from phyai_ros.parameters import NodeParameters
from phyai_ros.recorder_link import Heard, Plan, RecorderLink

MIB = 1 << 20
FRAME_DEPTH, DEPTH = 30, 1000
"""Messages that wait for the recorder: a second of frames, seconds of anything else."""
NOTHING = array.array("d")


class Recording:
    """The recording of one configuration; it has begun when this returns.

    :param params: ``record`` names the folder, whose strftime codes are filled in; ``record_max_mib`` bounds it.
    :param robot_file: kept in ``run.json`` with ``model``, so that the recording alone is enough to run it again.
    :param inputs: full topic -> message type of the node's inputs. :param published: likewise of what it publishes.
    :param give_up: true when the process was told to end meanwhile.
    :raises ConfigError: the folder exists or cannot be made, the disk has no room for it, the package rosbags is
        missing, or the recorder does not hear the node.
    """

    def __init__(
        self,
        node: LifecycleNode,
        params: NodeParameters,
        robot: RobotConfig,
        robot_file: Path,
        model: ModelConfig,
        *,
        inputs: Mapping[str, type[Any]],
        published: Mapping[str, type[Any]],
        give_up: Callable[[], bool],
    ) -> None:
        self._node, self._robot, self._schedule = node, robot, params.schedule
        folder = Path(time.strftime(params.record)).expanduser().absolute()
        check_room(folder, params.record_max_mib)
        check_rosbags()
        # ~/chunk is the engine's answer, also where a player elsewhere gets chunks there.
        status, self._requests, self._chunks = map(node.resolve_topic_name, ("~/status", "~/request", "~/chunk"))
        outputs = {status: PolicyStatus, **{t: kind for t, kind in published.items() if t != self._chunks}}
        heard = {topic: _heard(kind, node.count_publishers(topic), gated=False) for topic, kind in outputs.items()}
        heard |= {topic: _heard(kind, node.count_publishers(topic), gated=True) for topic, kind in inputs.items()}
        plan = Plan(
            name=f"{node.get_name()}_recorder",
            namespace=node.get_namespace(),
            domain=node.context.get_domain_id(),
            clock=node.resolve_topic_name("/clock") if node.get_parameter("use_sim_time").value else "",
            folder=str(folder),
            max_mib=params.record_max_mib,
            run=run_file(params, robot_file, model),
            heard=heard,
            given={self._requests: type_name(EngineRequest), self._chunks: type_name(ActionChunk)},
            cameras={camera.name: node.resolve_topic_name(camera.topic) for camera in robot.cameras},
        )
        self.link = RecorderLink(plan, node.get_logger().warning)
        self._folder = folder
        try:
            self.link.start(give_up)
            self.link.wait(lambda: all(self._is_heard(topic, plan.name) for topic in outputs), give_up)
        except BaseException:
            self.link.close()
            raise
        if unseen := self.link.progress.unseen:
            node.get_logger().warning(f"recording {folder}: has not found the publishers of {', '.join(unseen)} yet")
        self._asked: Request | None = None

    def activate(self, on: bool) -> None:
        """From now on inputs are kept, or not."""
        self.link.activate(on)

    def close(self) -> None:
        """See :meth:`RecorderLink.close`."""
        self.link.close()

    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        progress = self.link.look()
        blind = f", not known of {', '.join(progress.uncounted)}" if progress.uncounted else ""
        return {
            "recording": f"{self._folder}: {progress.state}, {progress.messages} messages",
            "recording_dropped": _counts(self.link.dropped) + blind,
            "recording_unheard": _counts(progress.unheard),
            "recording_incomplete": f"{progress.incomplete} requests name a frame that is not in it",
        }

    def asked(self, request: Request) -> None:
        """A request went to the engine."""
        now_ros_ns = int(self._node.get_clock().now().nanoseconds)
        taken_ros_ns = now_ros_ns - (mono_ns() - request.observation.snapshot_mono_ns)
        self._asked = request
        message = engine_request(request, self._robot, self._schedule, taken_ros_ns)
        self.link.give(self._requests, serialize_message(message))

    def answered(self, chunk: Chunk) -> None:
        """The engine answered a request that was not cancelled."""
        message = action_chunk(self._robot, chunk, int(self._node.get_clock().now().nanoseconds))
        asked = self._asked
        if asked is not None and (asked.epoch, asked.chunk_id) == (chunk.epoch, chunk.chunk_id):
            message.oldest_observation = to_stamp(asked.observation.oldest_ros_ns)
            message.newest_observation = to_stamp(asked.observation.newest_ros_ns)
        self.link.give(self._chunks, serialize_message(message))

    def _is_heard(self, topic: str, recorder: str) -> bool:
        """The recorder's subscription is known here, which is when publications begin to reach it."""
        there = self._node.get_subscriptions_info_by_topic(topic)
        return any((e.node_name, e.node_namespace) == (recorder, self._node.get_namespace()) for e in there)


def run_file(params: NodeParameters, robot_file: Path, model: ModelConfig) -> RunFile:
    """What ran."""
    return RunFile(
        robot=robot_file.read_text(encoding="utf-8"),
        model=yaml.safe_dump(msgspec.to_builtins(model), sort_keys=False),
        model_name=params.model,
        parameters=asdict(params),
        package=__version__,
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        host=host(),
    )


def type_name(kind: type[Any]) -> str:
    """``package/msg/Name`` of a message class."""
    return f"{kind.__module__.partition('.')[0]}/msg/{kind.__name__}"


def check_room(folder: Path, max_mib: int) -> None:
    """Nothing is overwritten, and no disk is filled.

    :raises ConfigError: the folder exists, or its disk has no room for ``max_mib``.
    """
    if folder.exists():
        raise ConfigError(
            "the recording exists, and nothing is overwritten",
            got=folder,
            where="parameter record",
            do="Name another folder; codes such as %Y%m%d-%H%M%S in the name are filled in.",
        )
    parent = next(path for path in folder.parents if path.exists())
    if (free_mib := shutil.disk_usage(parent).free // MIB) < max_mib:
        raise ConfigError(
            "the disk has no room for a recording",
            got=f"{free_mib} MiB free",
            wanted=f"record_max_mib, {max_mib} MiB",
            where=parent,
            do="Lower record_max_mib or make room.",
        )


def check_rosbags() -> None:
    """A robot that records nothing need not have it.

    :raises ConfigError: it is not there.
    """
    if find_spec("rosbags") is None:
        raise ConfigError(
            "a recording needs the package rosbags",
            where="parameter record",
            do="Run `pip install rosbags`, or leave the parameter record empty.",
        )


def _counts(counts: Mapping[str, int]) -> str:
    words = ", ".join(f"{topic} {n}" for topic, n in sorted(counts.items()))
    return f"{sum(counts.values())} ({words})" if words else "0"


def _heard(kind: type[Any], publishers: int, *, gated: bool) -> Heard:
    depth = FRAME_DEPTH if kind in (Image, CompressedImage) else DEPTH
    return Heard(type_name(kind), depth, gated, publishers)


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
