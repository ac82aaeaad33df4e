"""Writes recordings as a policy node does, without ROS: a real policy answers, and rosbags writes the bag."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from phyai_engine.config import ModelConfig, RobotConfig, convert
from phyai_engine.policy import Policy, load_policy
from phyai_engine.replay.run_file import RunFile
from phyai_engine.types import Chunk, Committed, Observation, Request

ROOT = Path(__file__).resolve().parents[2]
T0_NS = 1_700_000_000_000_000_000
EVERY_NS = 100_000_000
H = 8
NODE = "/arm/policy_node"
ROBOT = """
robot_id: pair
action_type: joint_position
dt_s: 0.02
state: [{name: lift}, {name: turn}]
actions:
  - {name: lift, state: lift, lower: -2.0, upper: 2.0, acceleration_max: 5.0}
  - {name: turn, state: turn, lower: -2.0, upper: 2.0, acceleration_max: 5.0}
cameras:
  - {name: front, topic: front/image, role: base_0_rgb}
  - {name: wrist, topic: /wrist/image/compressed, role: left_wrist_0_rgb, transport: compressed}
"""
FAKE: dict[str, Any] = {
    "family": "fake",
    "normalisation": {"kind": "limits"},
    "options": {"horizon": H, "action_dim": 4, "num_steps": 4, "cameras": ["base_0_rgb", "left_wrist_0_rgb"]},
}
_DTYPES = {"uint8": "u1", "uint32": "u4", "uint64": "u8", "float64": "f8"}
_OWN = ("ActionChunk", "ActionStep", "ChunkTiming", "EngineRequest", "PolicyStatus")


@dataclass(slots=True)
class Script:
    """What the recorded run does.

    :param lost: (camera, request) whose frame is not in the bag. :param unanswered: requests without an answer.
    :param late: requests whose frame of camera front was recorded 50 ms later, after the request.
    :param epochs: of each request. :param changed: request -> added to its recorded actions.
    :param unstamped: camera front has no stamps. :param refused: by code, in the last status.
    :param parameters: of the node.
    """

    requests: int = 6
    model: Mapping[str, Any] = field(default_factory=lambda: FAKE)
    lost: Collection[tuple[str, int]] = ()
    unanswered: Collection[int] = ()
    late: Collection[int] = ()
    epochs: Sequence[int] = ()
    changed: Mapping[int, float] = field(default_factory=dict)
    unstamped: bool = False
    refused: Mapping[int, int] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"engine": "process", "schedule": "rtc"})


def write_recording(folder: Path, script: Script | None = None) -> Path:
    """One recording in a folder that does not exist yet; returns it."""
    script = script or Script()
    robot = convert(yaml.safe_load(ROBOT), RobotConfig, where="robot")
    policy = load_policy(robot, convert(dict(script.model), ModelConfig, where="model"))
    bag = _Bag(folder)
    RunFile(
        robot=ROBOT,
        model=yaml.safe_dump(dict(script.model)),
        model_name="fake",
        parameters=dict(script.parameters),
        package="0.1.0",
        started="2026-01-02T03:04:05+00:00",
        host="a processor, 2 cores",
    ).save(folder)
    _drive(bag, policy, script)
    bag.close()
    return folder


def frame(camera: str, index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[24, 32, 3] of one camera before its JPEG, if it has one; no two are alike."""
    rng = np.random.default_rng([index, len(camera)])
    return np.repeat(np.repeat(rng.integers(0, 255, (6, 8, 3), np.uint8), 4, axis=0), 4, axis=1)


def _drive(bag: _Bag, policy: Policy, script: Script) -> None:
    from phyai_engine.messages import compressed_to_rgb

    committed: Committed | None = None
    for k in range(script.requests):
        now = T0_NS + k * EVERY_NS
        front, wrist = frame("front", k), bag.jpeg(frame("wrist", k))
        if ("front", k) not in script.lost:
            bag.image("/arm/front/image", now, front, stamped=not script.unstamped, late=k in script.late)
        if ("wrist", k) not in script.lost:
            bag.compressed("/wrist/image/compressed", now + 1_000_000, wrist)
        state = np.array([0.1 * k, -0.05 * k])
        bag.joints("/arm/joint_states", now + 2_000_000, ("lift", "turn"), state)
        seen = Observation(
            images={"front": front, "wrist": compressed_to_rgb(wrist)},
            state=state,
            velocity=np.array([np.nan, 0.5]),
            instruction=f"step {k // 3}",
            oldest_ros_ns=now,
            newest_ros_ns=now + 2_000_000,
            capture_mono_ns=0,
            snapshot_mono_ns=0,
            # Without a stamp: when the node received it, a little after it was recorded.
            image_stamps_ros_ns={"front": now + 5_200_000 * script.unstamped, "wrist": now + 1_000_000},
        )
        epoch = script.epochs[k] if script.epochs else 7
        request = Request(epoch, 11 + k, seen, committed, seed=40 + k, remaining_ms=160.0)
        bag.request(now + 10_000_000, request)
        (answer,) = policy.infer([request])
        assert isinstance(answer, Chunk), answer
        actions = answer.actions + script.changed.get(k, 0.0)
        committed = Committed(actions[4:], delay_steps=1, execution_steps=4)
        if k not in script.unanswered:
            bag.answer(now + 30_000_000, request, actions, first=k == 0)
    bag.status(T0_NS + script.requests * EVERY_NS, script.refused)


class _Bag:
    """An mcap bag that knows this package's messages."""

    def __init__(self, folder: Path) -> None:
        from rosbags.rosbag2 import StoragePlugin, Writer
        from rosbags.typesys import Stores, get_types_from_msg, get_typestore

        self.types = get_typestore(Stores.ROS2_JAZZY)
        for name in _OWN:
            text = (ROOT / "msg" / f"{name}.msg").read_text(encoding="utf-8")
            self.types.register(get_types_from_msg(text, f"phyai_policy/msg/{name}"))
        self._writer = Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)
        self._writer.open()
        self._connections: dict[str, Any] = {}

    def close(self) -> None:
        self._writer.close()

    def put(self, topic: str, received_ns: int, kind: str, /, **fields: Any) -> None:
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(topic, kind, typestore=self.types)
        message = self.types.types[kind](**fields)
        self._writer.write(self._connections[topic], received_ns, self.types.serialize_cdr(message, kind))

    def own(self, name: str, received_ns: int, kind: str, /, **fields: Any) -> None:
        """A message of this package on ``~/name``; what is not given is zero or empty."""
        text = (ROOT / "msg" / f"{kind}.msg").read_text(encoding="utf-8")
        declared = re.findall(r"^([\w/]+(?:\[\])?) (\w+)(?=\s|$)", text, re.MULTILINE)
        blank = {field: self._zero(wanted) for wanted, field in declared}
        self.put(f"{NODE}/{name}", received_ns, f"phyai_policy/msg/{kind}", **{**blank, **fields})

    def _zero(self, wanted: str) -> Any:
        if wanted.endswith("[]"):
            dtype = _DTYPES.get(wanted[:-2])
            return [] if dtype is None else np.zeros(0, dtype)
        if wanted in _DTYPES:
            return 0.0 if wanted == "float64" else 0
        named = {
            "bool": False,
            "string": "",
            "std_msgs/Header": self.header(0),
            "builtin_interfaces/Time": self.stamp(0),
            "builtin_interfaces/Duration": self.types.types["builtin_interfaces/msg/Duration"](sec=0, nanosec=0),
        }
        return named[wanted]

    def stamp(self, ros_ns: int) -> Any:
        return self.types.types["builtin_interfaces/msg/Time"](sec=ros_ns // 10**9, nanosec=ros_ns % 10**9)

    def header(self, ros_ns: int) -> Any:
        return self.types.types["std_msgs/msg/Header"](stamp=self.stamp(ros_ns), frame_id="")

    def image(
        self,
        topic: str,
        stamp_ns: int,
        pixels: np.ndarray[Any, np.dtype[np.uint8]],
        *,
        stamped: bool = True,
        late: bool = False,
    ) -> None:
        height, width, _ = pixels.shape
        self.put(
            topic,
            stamp_ns + 5_000_000 + 50_000_000 * late,
            "sensor_msgs/msg/Image",
            header=self.header(stamp_ns * stamped),
            height=height,
            width=width,
            encoding="rgb8",
            is_bigendian=0,
            step=3 * width,
            data=pixels.reshape(-1),
        )

    def jpeg(self, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Any:
        """A CompressedImage without a stamp yet."""
        import io

        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        content = np.frombuffer(file.getvalue(), np.uint8)
        return self.types.types["sensor_msgs/msg/CompressedImage"](header=self.header(0), format="jpeg", data=content)

    def compressed(self, topic: str, stamp_ns: int, image: Any) -> None:
        self.put(
            topic,
            stamp_ns + 5_000_000,
            "sensor_msgs/msg/CompressedImage",
            header=self.header(stamp_ns),
            format=image.format,
            data=image.data,
        )

    def joints(self, topic: str, stamp_ns: int, names: Sequence[str], positions: np.ndarray[Any, Any]) -> None:
        self.put(
            topic,
            stamp_ns + 1_000_000,
            "sensor_msgs/msg/JointState",
            header=self.header(stamp_ns),
            name=list(names),
            position=positions,
            velocity=np.zeros(0),
            effort=np.zeros(0),
        )

    def request(self, received_ns: int, request: Request) -> None:
        seen, committed = request.observation, request.committed
        self.own(
            "request",
            received_ns,
            "EngineRequest",
            header=self.header(received_ns),
            robot_id="pair",
            epoch=request.epoch,
            chunk_id=request.chunk_id,
            seed=request.seed,
            instruction=seen.instruction,
            state_names=["lift", "turn"],
            state=seen.state,
            velocity=seen.velocity,
            cameras=list(seen.image_stamps_ros_ns),
            image_stamps=[self.stamp(ns) for ns in seen.image_stamps_ros_ns.values()],
            oldest_observation=self.stamp(seen.oldest_ros_ns),
            newest_observation=self.stamp(seen.newest_ros_ns),
            remaining_ms=request.remaining_ms,
            schedule="rtc",
            committed=np.zeros(0) if committed is None else committed.actions.reshape(-1),
            committed_rows=0 if committed is None else len(committed.actions),
            delay_steps=0 if committed is None else committed.delay_steps,
            execution_steps=0 if committed is None else committed.execution_steps,
        )

    def answer(self, received_ns: int, request: Request, actions: np.ndarray[Any, Any], *, first: bool) -> None:
        """The chunk, its timing and the two steps that are played of it."""
        names, ids = ["lift", "turn"], {"epoch": request.epoch, "chunk_id": request.chunk_id}
        self.own(
            "chunk",
            received_ns,
            "ActionChunk",
            joint_names=names,
            horizon=len(actions),
            actions=actions.reshape(-1),
            **ids,
        )
        figures = {"l_observe_s": 0.01, "l_inference_s": 0.015, "l_critical_s": 0.03, "age_s": 0.03}
        deadline = {"m_ctrl_s": float("nan") if first else 0.02, "l_env_s": float("nan") if first else 0.08}
        timing = {**figures, **deadline, "m_cond_s": float("nan"), "m_exhaust_s": float("nan"), "outcome": 1}
        self.own("timing", received_ns + 1_000_000, "ChunkTiming", **timing, **ids)
        for row in (1, 2):
            self.own(
                "step",
                received_ns + row * 20_000_000,
                "ActionStep",
                joint_names=names,
                kind=1,
                values=actions[row],
                tick=row,
                step=row,
                **ids,
            )

    def status(self, received_ns: int, refused: Mapping[int, int]) -> None:
        counts = np.zeros(10, np.uint64)
        for code, n in refused.items():
            counts[code] = n
        names, shares = ["front", "wrist"], np.array([0.9, np.nan])
        common = {"camera_names": names, "camera_delivered": shares, "camera_rates_hz": np.zeros(2), "refusals": counts}
        self.own("status", received_ns, "PolicyStatus", lifecycle_label="active", **common)
        self.own(
            "status",
            received_ns + 1,
            "PolicyStatus",
            lifecycle_label="active",
            abort_cause=1,
            abort_text="~/abort called",
            **common,
        )
