"""Writes a recording in a process of its own: ``python -m phyai_engine.replay.bag_writer``.

Python's lock would make a control tick wait for a writer in its process. Here nobody waits: the process runs when
nothing else wants the processor, and what it reads from its standard input is all that it knows. When that ends, also
because the other side was killed, it finishes the file. Started and fed by :mod:`phyai_ros.recorder`.

Input: a length (uint32) and a :class:`Plan` as JSON, then messages: :data:`FRAME` and the serialised bytes.
Output: the line ``ready``, and at the end a :class:`Result` as JSON.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

FRAME = struct.Struct("<HqI?")
"""Topic (its place in the plan), ROS time [ns], length [bytes], and whether bytes may follow the last field."""
SIZE = struct.Struct("<I")
READY = b"ready\n"
CHUNK_BYTES = 1 << 20
"""What rosbags' writer collects before it writes: lost when this process is killed."""


class Plan(Struct, frozen=True):
    """What is written.

    :param topics: (full name, message type) of each. :param definitions: text of the .msg file of each type.
    :param max_bytes: bound of the folder on disk.
    """

    folder: str
    max_bytes: int
    topics: Sequence[tuple[str, str]]
    definitions: Mapping[str, str]


class Result(Struct, frozen=True):
    """How it ended. :param state: in words. :param written: messages of each topic of the plan."""

    state: str
    written: Sequence[int]


FINISHED = "finished"


def typestore(definitions: Mapping[str, str]) -> Any:
    """A typestore that knows ROS's own messages and those of ``definitions``."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore  # noqa: PLC0415

    types = get_typestore(Stores.ROS2_JAZZY)
    for name, text in definitions.items():
        if name not in types.fielddefs:
            types.register(get_types_from_msg(text, name))
    return types


class BagWriter:
    """The folder and its file. :raises OSError: the folder cannot be made."""

    def __init__(self, plan: Plan) -> None:
        from rosbags.rosbag2 import StoragePlugin, Writer  # noqa: PLC0415

        folder = Path(plan.folder)
        self._types = typestore(plan.definitions)
        self._bag = Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)
        self._bag.open()
        self._file = folder / f"{folder.name}.mcap"
        self._kinds = [kind for _, kind in plan.topics]
        self._connections = [self._bag.add_connection(name, kind, typestore=self._types) for name, kind in plan.topics]
        self._max_bytes = plan.max_bytes
        self.written = [0] * len(plan.topics)

    def run(self, stream: IO[bytes]) -> str:
        """Write until the stream ends or the folder is full. How it ended, in words.

        :raises OSError: the disk is full or gone.
        """
        while len(head := stream.read(FRAME.size)) == FRAME.size:
            topic, at_ns, length, trailing = FRAME.unpack(head)
            content = stream.read(length)
            if len(content) < length:  # the other side was killed
                break
            if self._full(length):
                return f"stopped, the next message would pass record_max_mib ({self._max_bytes >> 20} MiB)"
            exact = self._exact(self._kinds[topic], content) if trailing else content
            self._bag.write(self._connections[topic], at_ns, exact)
            self.written[topic] += 1
        return FINISHED

    def close(self) -> None:
        """Finish the file."""
        self._bag.close()

    def _exact(self, kind: str, content: bytes) -> bytes:
        """A message of rmw's serialiser, without what follows its last field: for every empty sequence of doubles it
        counts an alignment that it never writes, and readers which check the length refuse such a message."""
        reader = self._types.get_msgdef(kind)
        read: Callable[..., Any] = reader.deserialize_cdr_le if content[1] else reader.deserialize_cdr_be
        _, length = read(memoryview(content)[4:], 0, reader.cls, self._types)
        return content[: 4 + length]

    def _full(self, size: int) -> bool:
        index = self._max_bytes // 256 + 2**16  # what closing the file adds, with room to spare
        return self._file.stat().st_size + CHUNK_BYTES + size + index > self._max_bytes


def main() -> int:
    """Exit code 0: the file is whole."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the end of the input says when to end
        signal.signal(number, signal.SIG_IGN)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # what drives the robot goes first
    stream, answer = sys.stdin.buffer, sys.stdout.buffer
    plan = msgspec.json.decode(stream.read(SIZE.unpack(stream.read(SIZE.size))[0]), type=Plan)
    written: Sequence[int] = [0] * len(plan.topics)
    try:
        bag = BagWriter(plan)
        answer.write(READY)
        answer.flush()
        written = bag.written
        try:
            state = bag.run(stream)
        finally:
            bag.close()
    except Exception as error:
        state = f"failed, {type(error).__name__}: {error}"
    answer.write(msgspec.json.encode(Result(state, written)) + b"\n")
    answer.flush()
    return 0 if not state.startswith("failed") else 1


if __name__ == "__main__":
    raise SystemExit(main())
