"""Hands what a node records to a process that writes it, from a thread of its own, behind a bounded queue.

Whoever hands something over appends to the queue and goes on: no control tick ever waits for a disk. What finds the
queue full is dropped and counted by topic. The folder has a bound too: when it is reached the recording ends, whole and
readable, and the robot drives on; so it does when the disk fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import islice
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
BATCH_S = 0.05
"""The recording's thread takes what came in so long at once: woken by every message it would ask for Python's lock
hundreds of times a second, often just when a control tick needs it."""

Content = bytes | Callable[[], bytes]
Entry = tuple[str, int, int, Content]
"""Topic, ROS time [ns], what it counts for in the queue [bytes], and the message."""


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
        self._queue: deque[Entry] = deque()
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
            _write(writer.stdin.fileno(), [SIZE.pack(len(plan)), plan])
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
            while writer.poll() is None:
                ended, batch = self._taken()
                self._hand_over(writer.stdin.fileno(), batch)
                if ended and not batch:
                    break
        with contextlib.suppress(BrokenPipeError):
            writer.stdin.close()
        with writer.stdout:
            line = writer.stdout.readline()
        self._conclude(line, writer.wait())

    def _taken(self) -> tuple[bool, list[Entry]]:
        """Whether the recording has ended, and what waits. It counts for the queue until it is handed over."""
        with self._lock:
            if not self._ended:
                self._lock.wait(BATCH_S)
            batch = list(self._queue)
            self._queue.clear()
            return self._ended, batch

    def _hand_over(self, pipe: int, batch: Sequence[Entry]) -> None:
        buffers: list[bytes] = []
        for topic, at_ns, _, content in batch:
            message = content if isinstance(content, bytes) else content()
            buffers += [FRAME.pack(self._places[topic], at_ns, len(message), content is not message), message]
        with self._lock:
            self._handed.update(topic for topic, *_ in batch)
        _write(pipe, buffers)
        with self._lock:
            self._queued_bytes -= sum(size for _, _, size, _ in batch)

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


def _write(pipe: int, buffers: Sequence[bytes]) -> None:
    """All of them: one call may take a part. Python's lock is free meanwhile."""
    left = deque(memoryview(each) for each in buffers)
    while left:
        taken = os.writev(pipe, list(islice(left, 256)))
        while taken:
            if taken < len(left[0]):
                left[0], taken = left[0][taken:], 0
            else:
                taken -= len(left.popleft())


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
