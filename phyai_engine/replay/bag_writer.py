"""Writes one recording: a folder with an mcap bag, bounded on disk, of messages that are serialised already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
"""What rosbags' writer collects before it writes: lost when the process is killed."""


def typestore(definitions: Mapping[str, str]) -> Any:
    """A typestore that knows ROS's own messages and those of ``definitions``."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore  # noqa: PLC0415

    types = get_typestore(Stores.ROS2_JAZZY)
    for name, text in definitions.items():
        if name not in types.fielddefs:
            types.register(get_types_from_msg(text, name))
    return types


class BagWriter:
    """The folder and its file.

    :param folder: is made; must not exist. :param max_bytes: bound of the folder.
    :param topics: full name -> message type of each.
    :param definitions: message type -> text of its .msg file, of those that are not ROS's own.
    :raises OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int, topics: Mapping[str, str], definitions: Mapping[str, str]) -> None:
        from rosbags.rosbag2 import StoragePlugin, Writer  # noqa: PLC0415

        self._types = typestore(definitions)
        self._bag = Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)
        self._bag.open()
        self._file = folder / f"{folder.name}.mcap"
        self._kinds = dict(topics)
        self._connections = {
            name: self._bag.add_connection(name, kind, typestore=self._types) for name, kind in topics.items()
        }
        self._max_bytes = max_bytes

    def write(self, topic: str, at_ns: int, content: bytes, *, trailing: bool = False) -> bool:
        """One message. False, and nothing is written, where it would pass the folder's bound.

        :param at_ns: its time of receipt in the bag.
        :param trailing: bytes may follow its last field.
        :raises OSError: the disk is full or gone.
        """
        if self._full(len(content)):
            return False
        self._bag.write(self._connections[topic], at_ns, self._exact(topic, content) if trailing else content)
        return True

    def close(self) -> None:
        """Finish the file."""
        self._bag.close()

    def _exact(self, topic: str, content: bytes) -> bytes:
        """A message of rmw's serialiser, without what follows its last field: for every empty sequence of doubles it
        counts an alignment that it never writes, and readers which check the length refuse such a message."""
        reader = self._types.get_msgdef(self._kinds[topic])
        read: Callable[..., Any] = reader.deserialize_cdr_le if content[1] else reader.deserialize_cdr_be
        _, length = read(memoryview(content)[4:], 0, reader.cls, self._types)
        return content[: 4 + length]

    def _full(self, size: int) -> bool:
        index = self._max_bytes // 256 + 2**16  # what closing the file adds, with room to spare
        return self._file.stat().st_size + CHUNK_BYTES + size + index > self._max_bytes
