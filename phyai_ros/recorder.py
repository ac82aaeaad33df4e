"""Writes a rosbag2 folder (mcap) from a thread of its own, behind a bounded queue.

Whoever hands something over appends to the queue and goes on: no control tick ever waits for a disk. What finds the
queue full is dropped and counted by topic. The folder has a bound too: when it is reached the recording ends, whole and
readable, and the robot drives on; so it does when the disk fails.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ament_index_python.packages import get_package_share_directory

from phyai_engine.errors import ConfigError
from phyai_engine.replay.run_file import RunFile

MIB = 1 << 20
QUEUE_BYTES = 64 * MIB
CHUNK_BYTES = MIB
"""What the bag's writer collects before it writes: lost when the process is killed."""
MESSAGE_BYTES = 4096
"""What a message that is not serialised yet counts for in the queue."""
CLOSE_S = 5.0
SWITCH_S = 0.0005
"""The interpreter's lock is handed to a thread that waits for it after this long, not after 5 ms, while a recording
runs: its thread shares that lock with the control tick."""

Content = bytes | Callable[[], bytes]


class Recorder:
    """One recording: :meth:`add` the topics, :meth:`start`, :meth:`put` from any thread, :meth:`close`.

    :param folder: made by :meth:`start`; one that exists is never touched.
    :param max_mib: bound of the folder on disk.
    :param now_ros_ns: the clock of the bag. Nothing is recorded while it stands at 0.
    :param warn: told, from the recording's thread, when the recording ends by itself.
    :raises ConfigError: the folder exists, the disk has no room for it, or the package rosbags is missing.
    """

    def __init__(
        self, folder: Path, max_mib: int, now_ros_ns: Callable[[], int], warn: Callable[[str], object]
    ) -> None:
        self.folder, self._max_mib, self._now_ros_ns, self._warn = folder, max_mib, now_ros_ns, warn
        _check_room(folder, max_mib)
        self._bag = _writer(folder)
        self._file = folder / f"{folder.name}.mcap"
        self._kinds: dict[str, type[Any]] = {}
        self._types: Any = None
        self._connections: dict[str, Any] = {}
        self._queue: deque[tuple[str, int, int, Content]] = deque()
        self._queued_bytes = 0
        self._lock = threading.Condition()
        self._ended = False  # nothing is taken any more
        self._state = "recording"
        self._written: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()

    def add(self, topic: str, kind: type[Any]) -> None:
        """A topic, by its full name, and its message type."""
        self._kinds[topic] = kind

    def start(self, run: RunFile) -> None:
        """Make the folder with ``run.json`` and begin.

        :raises ConfigError: the folder cannot be made.
        """
        self._types = _definitions(self._kinds.values())
        try:
            self._bag.open()
            run.save(self.folder)
        except OSError as error:
            raise ConfigError("the recording cannot be made", got=error.strerror, where=self.folder) from error
        for topic, kind in self._kinds.items():
            self._connections[topic] = self._bag.add_connection(topic, type_name(kind), typestore=self._types)
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="phyai-recorder", daemon=True)
        self._thread.start()

    def put(self, topic: str, content: Content) -> None:
        """Hand over one message. Never waits for the disk.

        :param content: the serialised message, or what makes it, called in the recording's thread.
        """
        now = self._now_ros_ns()
        size = len(content) if isinstance(content, bytes) else MESSAGE_BYTES
        with self._lock:
            if self._ended or now <= 0:
                return
            if self._queued_bytes + size > QUEUE_BYTES:
                self._dropped[topic] += 1
                return
            self._queue.append((topic, now, size, content))
            self._queued_bytes += size
            self._lock.notify()

    def close(self) -> None:
        """Write what is queued and finish the file, within CLOSE_S. Idempotent."""
        with self._lock:
            self._ended = True
            self._lock.notify()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(CLOSE_S)
        sys.setswitchinterval(self._switch_s)
        if thread.is_alive():
            self._warn(f"the recording {self.folder} is not finished after {CLOSE_S} s: its disk does not keep up")

    @property
    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        with self._lock:
            dropped = dict(self._dropped)
        words = ", ".join(f"{topic} {n}" for topic, n in sorted(dropped.items()))
        return {
            "recording": f"{self.folder}: {self._state}, {self._written.total()} messages",
            "recording_dropped": f"{sum(dropped.values())} ({words})" if words else "0",
        }

    # Below: the recording's thread.

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                topic, at_ns, size, content = entry
                if self._full(size):
                    self._end(f"stopped, the next message would pass record_max_mib ({self._max_mib} MiB)")
                    break
                written = content if isinstance(content, bytes) else self._exact(topic, content())
                self._bag.write(self._connections[topic], at_ns, written)
                self._written[topic] += 1
        except Exception as error:  # a disk that is full or gone: the robot drives on without a recording
            self._end(f"failed, {type(error).__name__}: {error}")
        try:
            self._bag.close()
        except Exception as error:
            self._end(f"failed, the file could not be finished: {error}")
        if self._state == "recording":
            self._state = "finished"

    def _next(self) -> tuple[str, int, int, Content] | None:
        """The oldest that waits; None once the recording has ended and nothing waits any more."""
        with self._lock:
            self._lock.wait_for(lambda: self._queue or self._ended)
            if not self._queue:
                return None
            entry = self._queue.popleft()
            self._queued_bytes -= entry[2]
            return entry

    def _exact(self, topic: str, content: bytes) -> bytes:
        """A message that we serialised, without what follows its last field: rmw counts an alignment for every empty
        sequence of doubles that it never writes, and readers which check the length refuse such a message."""
        reader = self._types.get_msgdef(type_name(self._kinds[topic]))
        read = reader.deserialize_cdr_le if content[1] else reader.deserialize_cdr_be
        _, length = read(memoryview(content)[4:], 0, reader.cls, self._types)
        return content[: 4 + length]

    def _full(self, size: int) -> bool:
        bound = self._max_mib * MIB
        index = bound // 256 + 2**16  # what closing the file adds, with room to spare
        return self._file.stat().st_size + CHUNK_BYTES + size + index > bound

    def _end(self, why: str) -> None:
        """The recording ends by itself: what waits is let go and counted."""
        with self._lock:
            self._ended = True
            self._dropped.update(topic for topic, *_ in self._queue)
            self._queue.clear()
            self._queued_bytes = 0
        self._state = why
        self._warn(f"recording {self.folder}: {why}")


def type_name(kind: type[Any]) -> str:
    """``package/msg/Name`` of a message class."""
    return f"{kind.__module__.partition('.')[0]}/msg/{kind.__name__}"


def _check_room(folder: Path, max_mib: int) -> None:
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


def _writer(folder: Path) -> Any:
    """rosbags' writer, imported only here: a robot that records nothing need not have it."""
    try:
        from rosbags.rosbag2 import StoragePlugin, Writer  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "a recording needs the package rosbags",
            got=error,
            where="parameter record",
            do="Run `pip install rosbags`, or leave the parameter record empty.",
        ) from error
    return Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)


def _definitions(kinds: Any) -> Any:
    """A typestore that knows ROS's own messages and, from their .msg files, this package's."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore  # noqa: PLC0415

    types = get_typestore(Stores.ROS2_JAZZY)
    for name in {type_name(kind) for kind in kinds}:
        if name not in types.fielddefs:
            package, _, message = name.split("/")
            text = Path(get_package_share_directory(package), "msg", f"{message}.msg").read_text(encoding="utf-8")
            types.register(get_types_from_msg(text, name))
    return types
