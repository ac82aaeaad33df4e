"""Writes small rosbag2 recordings of a moving two-joint robot, whole and spoilt, with rosbags."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image as Picture
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

START_NS = 1_700_000_000_000_000_000
JOINTS = ("j0", "j1")
TOPICS = {"front": "/front/image_raw", "wrist": "/wrist/image_raw"}
ROLES = {"front": "base_0_rgb", "wrist": "left_wrist_0_rgb"}
STORE = get_typestore(Stores.ROS2_JAZZY)
MAGIC = b"\x89MCAP0\r\n"

Arrival = Callable[[str, float], "float | None"]


@dataclass(slots=True, kw_only=True)
class Script:
    """What is recorded; every function takes an input (camera name, or ``joints``) and the time of a sample [s].

    :param received: when the recorder gets it, None = never. :param stamp: what its header says [s], None = 0.
    :param shown: the instant that a picture shows. :param encoding: of raw images.
    :param compressed: cameras that send CompressedImage.
    :param topics: of the cameras. :param instruction: recorded once; empty = none.
    :param cycles: the same stamps again so many times, as a bag that was recorded from a looped one.
    """

    seconds: float = 2.0
    camera_hz: float = 20.0
    joint_hz: float = 100.0
    size: tuple[int, int] = (24, 32)
    cameras: Sequence[str] = ("front", "wrist")
    joint_names: Sequence[str] = JOINTS
    received: Arrival = lambda name, t: t + (0.001 if name == "joints" else 0.006)
    stamp: Arrival = lambda name, t: t
    shown: Callable[[str, float], float] = lambda name, t: t
    encoding: str = "rgb8"
    compressed: Sequence[str] = ()
    topics: Mapping[str, str] = field(default_factory=lambda: TOPICS)
    instruction: str = "wave"
    cycles: int = 1


def position(t: float) -> list[float]:
    """Of the joints [rad]."""
    return [0.1 * float(np.sin(2.0 * t)), 0.1 * float(np.cos(2.0 * t))]


def write_bag(
    folder: Path,
    script: Script | None = None,
    *,
    storage: Literal["mcap", "sqlite3"] = "mcap",
    compression: Literal["", "file", "message", "storage"] = "",
) -> Path:
    """One recording in a folder that does not exist yet; returns it."""
    script = script or Script()
    writer = Writer(folder, version=9, storage_plugin=StoragePlugin[storage.upper()])
    if compression:
        writer.set_compression(CompressionMode[compression.upper()], CompressionFormat.ZSTD)
    with writer:
        kinds = {name: _kind(name, script) for name in script.cameras}
        connections = {
            name: writer.add_connection(script.topics.get(name, f"/{name}"), kind, typestore=STORE)
            for name, kind in kinds.items()
        }
        connections["joints"] = writer.add_connection("/joint_states", "sensor_msgs/msg/JointState", typestore=STORE)
        if script.instruction:
            told = writer.add_connection("/policy_node/instruction", "std_msgs/msg/String", typestore=STORE)
            text = STORE.types["std_msgs/msg/String"](data=script.instruction)
            writer.write(told, START_NS, STORE.serialize_cdr(text, "std_msgs/msg/String"))
        for received_s, name, kind, message in sorted(_messages(script), key=lambda row: row[0]):
            writer.write(connections[name], START_NS + round(received_s * 1e9), STORE.serialize_cdr(message, kind))
    return folder


def storage_file(folder: Path) -> Path:
    """The one storage file of a recording."""
    (file,) = (f for f in folder.iterdir() if f.name != "metadata.yaml")
    return file


def records(content: bytes, at: int = len(MAGIC), end: int | None = None) -> list[tuple[int, int, int]]:
    """(opcode, offset, end) of every record of an mcap file, or of the part of it that is given."""
    found, end = [], len(content) - len(MAGIC) if end is None else end
    while at < end:
        opcode, length = struct.unpack_from("<BQ", content, at)
        found.append((opcode, at, at + 9 + length))
        at += 9 + length
    return found


def chunks(content: bytes) -> list[tuple[int, int, int]]:
    """(offset, end, messages) of every chunk of an mcap file that is not compressed."""
    whole = [(at, end) for opcode, at, end in records(content) if opcode == 0x06]
    return [(at, end, sum(op == 0x05 for op, _, _ in records(content, at + 9 + 40, end))) for at, end in whole]


def without_index(content: bytes) -> bytes:
    """An mcap file whose writer made no summary."""
    end_of_data = next(end for opcode, _, end in records(content) if opcode == 0x0F)
    return content[:end_of_data] + struct.pack("<BQQQI", 0x02, 20, 0, 0, 0) + MAGIC


def _kind(name: str, script: Script) -> str:
    return f"sensor_msgs/msg/{'CompressedImage' if name in script.compressed else 'Image'}"


def _messages(script: Script) -> list[tuple[float, str, str, Any]]:
    rows = []
    rates = {**dict.fromkeys(script.cameras, script.camera_hz), "joints": script.joint_hz}
    for cycle in range(script.cycles):
        for name, rate in rates.items():
            for k in range(round(script.seconds * rate)):
                t = k / rate
                received, stamp = script.received(name, t), script.stamp(name, t)
                if received is not None:
                    stamp_ns = 0 if stamp is None else START_NS + round(stamp * 1e9)
                    kind, message = _message(name, t, stamp_ns, script)
                    rows.append((received + cycle * script.seconds, name, kind, message))
    return rows


def _message(name: str, t: float, stamp_ns: int, script: Script) -> tuple[str, Any]:
    stamp = STORE.types["builtin_interfaces/msg/Time"](sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    header = STORE.types["std_msgs/msg/Header"](stamp=stamp, frame_id=name)
    if name == "joints":
        kind = "sensor_msgs/msg/JointState"
        values = np.array((position(t) * len(script.joint_names))[: len(script.joint_names)])
        names = list(script.joint_names)
        return kind, STORE.types[kind](header, names, values, np.zeros_like(values), np.array([]))
    picture = frame(name, script.shown(name, t), script.size)
    kind = _kind(name, script)
    if name in script.compressed:
        jpeg = io.BytesIO()
        Picture.fromarray(picture).save(jpeg, "JPEG")
        return kind, STORE.types[kind](header, "jpeg", np.frombuffer(jpeg.getvalue(), np.uint8))
    height, width, _ = picture.shape
    return kind, STORE.types[kind](header, height, width, script.encoding, 0, 3 * width, picture.reshape(-1))


def frame(name: str, t: float, size: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[h, w, 3] of one camera at one instant; no two instants look alike."""
    rng = np.random.default_rng([round(t * 1e6), len(name)])
    return rng.integers(0, 255, (*size, 3), dtype=np.uint8)
