"""Hands what a node records to a process that writes it, from a thread of its own, behind a bounded queue.

Whoever hands something over appends to the queue and goes on: no control tick ever waits for a disk. What finds the
queue full is dropped and counted by topic. The folder has a bound too: when it is reached the recording ends, whole and
readable, and the robot drives on; so it does when the disk fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from ament_index_python.packages import get_package_share_directory

from phyai_engine.errors import ConfigError
from phyai_engine.replay.bag_writer import FINISHED, FRAME, READY, SIZE, Plan, Result
from phyai_engine.replay.run_file import RunFile

MIB = 1 << 20
QUEUE_BYTES = 64 * MIB
PIPE_BYTES = MIB
MESSAGE_BYTES = 4096
"""What a message that is not serialised yet counts for in the queue."""
CLOSE_S = 5.0
LOOK_S = 0.5
"""How soon it is seen that the writer ended by itself."""

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
        _check_rosbags()
        self._kinds: dict[str, type[Any]] = {}
        self._places: dict[str, int] = {}
        self._queue: deque[tuple[str, int, int, Content]] = deque()
        self._queued_bytes = 0
        self._lock = threading.Condition()
        self._ended = False  # nothing is taken any more
        self._state = "recording"
        self._handed: Counter[str] = Counter()  # to the writer
        self._dropped: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self.writer: subprocess.Popen[bytes] | None = None
        """The process that writes."""

    def add(self, topic: str, kind: type[Any]) -> None:
        """A topic, by its full name, and its message type."""
        self._kinds[topic] = kind

    def start(self, run: RunFile) -> None:
        """Make the folder with ``run.json`` and begin.

        :raises ConfigError: the folder cannot be made.
        """
        self._places = {topic: i for i, topic in enumerate(self._kinds)}
        topics = [(topic, type_name(kind)) for topic, kind in self._kinds.items()]
        plan = msgspec.json.encode(
            Plan(str(self.folder), self._max_mib * MIB, topics, {name: _definition(name) for _, name in topics})
        )
        command = [sys.executable, "-m", "phyai_engine.replay.bag_writer"]
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal is for the node, whose end is the end of the writer's input.
        self.writer = writer = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)
        assert writer.stdin is not None
        assert writer.stdout is not None
        with contextlib.suppress(OSError):  # where the host allows less, the queue waits instead
            fcntl.fcntl(writer.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        try:
            _write(writer, SIZE.pack(len(plan)) + plan)
            line = writer.stdout.readline()
            if line != READY:
                raise ConfigError("the recording cannot be made", got=_state(line), where=self.folder)
            run.save(self.folder)
        except OSError as error:
            raise ConfigError("the recording cannot be made", got=error.strerror, where=self.folder) from error
        self._thread = threading.Thread(target=self._run, name="phyai-recorder", daemon=True)
        self._thread.start()

    def put(self, topic: str, content: Content) -> None:
        """Hand over one message. Never waits for the disk.

        :param content: the serialised message as it arrived, or what serialises it, called in the recording's thread.
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
        if thread.is_alive():
            self._warn(f"the recording {self.folder} is not finished after {CLOSE_S} s: its disk does not keep up")

    @property
    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        with self._lock:
            dropped, handed = +self._dropped, self._handed.total()
        words = ", ".join(f"{topic} {n}" for topic, n in sorted(dropped.items()))
        return {
            "recording": f"{self.folder}: {self._state}, {handed} messages",
            "recording_dropped": f"{sum(dropped.values())} ({words})" if words else "0",
        }

    # Below: the recording's thread.

    def _run(self) -> None:
        writer = self.writer
        assert writer is not None
        assert writer.stdin is not None
        assert writer.stdout is not None
        # BrokenPipeError: the writer ended by itself, and says why.
        with contextlib.suppress(BrokenPipeError):
            while (entry := self._next()) is not None:
                topic, at_ns, _, content = entry
                ours = not isinstance(content, bytes)
                written = content() if callable(content) else content
                with self._lock:
                    self._handed[topic] += 1
                _write(writer, FRAME.pack(self._places[topic], at_ns, len(written), ours))
                _write(writer, written)
        with contextlib.suppress(BrokenPipeError):
            writer.stdin.close()
        with writer.stdout:
            line = writer.stdout.readline()
        self._conclude(line, writer.wait())

    def _next(self) -> tuple[str, int, int, Content] | None:
        """The oldest that waits; None once nothing more will be written."""
        assert self.writer is not None
        with self._lock:
            while not self._lock.wait_for(lambda: self._queue or self._ended, LOOK_S):
                if self.writer.poll() is not None:
                    return None
            if not self._queue:
                return None
            entry = self._queue.popleft()
            self._queued_bytes -= entry[2]
            return entry

    def _conclude(self, line: bytes, code: int) -> None:
        """The writer has ended: what it did not write is counted as dropped."""
        try:
            result = msgspec.json.decode(line, type=Result)
        except msgspec.DecodeError:
            result = Result(f"failed, the writer ended with exit code {code}", [])
        by_itself = result.state != FINISHED
        with self._lock:
            self._ended = True
            self._dropped.update(topic for topic, *_ in self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            for topic, written in zip(self._places, result.written, strict=False):
                self._dropped[topic] += max(0, self._handed[topic] - written)
                self._handed[topic] = written
            self._state = result.state
        if by_itself:
            self._warn(f"recording {self.folder}: {result.state}")


def type_name(kind: type[Any]) -> str:
    """``package/msg/Name`` of a message class."""
    return f"{kind.__module__.partition('.')[0]}/msg/{kind.__name__}"


def _write(writer: subprocess.Popen[bytes], content: bytes) -> None:
    """All of it: one call may take a part. Python's lock is free meanwhile."""
    assert writer.stdin is not None
    left = memoryview(content)
    while left:
        left = left[writer.stdin.write(left) :]


def _state(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=Result).state
    except msgspec.DecodeError:
        return "no answer from the writer"


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


def _check_rosbags() -> None:
    """A robot that records nothing need not have it."""
    if find_spec("rosbags") is None:
        raise ConfigError(
            "a recording needs the package rosbags",
            where="parameter record",
            do="Run `pip install rosbags`, or leave the parameter record empty.",
        )


def _definition(name: str) -> str:
    """Text of the .msg file of a type."""
    package, _, message = name.split("/")
    return Path(get_package_share_directory(package), "msg", f"{message}.msg").read_text(encoding="utf-8")
