"""What an engine process writes: its last lines are kept, the rest is forwarded to our stderr. Both are bounded.

However much it writes, the client's I/O thread does a few reads per period and nothing per line: a process that writes
more than READ_BYTES in a period waits in its own write. A stderr of ours that nobody reads stops the forwarding thread
alone. Lines that are not forwarded are dropped and counted.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Sequence
from typing import IO

TAIL_LINES = 50
PERIOD_S = 0.05
READ_BYTES = 1 << 20  # per stream and period, and what its pipe is asked to hold: 20 MB/s before it has to wait
FORWARD_BYTES = 1 << 16  # likewise: 1.3 MB/s
_QUEUE_BYTES = 1 << 18
_TAIL_BYTES = 1 << 14
_LINE_BYTES = 4096  # a longer one is forwarded in parts
_FLUSH_S = 0.2
_STDERR_FD = 2


class ChildOutput:
    """The read ends of a child's streams. For one thread.

    :param streams: stdout, stderr: the last is asked first for the last lines.
    """

    def __init__(self, streams: Sequence[IO[bytes]]) -> None:
        self._streams = [_Stream(pipe) for pipe in streams]
        self._forward = _Forward()
        self._next_s = 0.0
        self._dropped_bytes = 0

    def pump(self) -> None:
        """Move on what was written, at most once per period. Never blocks."""
        if (now_s := time.monotonic()) < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        dropped = self._dropped_bytes
        for stream in self._streams:
            block = stream.read()
            kept = block if len(block) <= FORWARD_BYTES else block[: block.rfind(b"\n", 0, FORWARD_BYTES) + 1]
            self._dropped_bytes += len(block) - len(kept) + self._forward.put(kept)
        if dropped != self._dropped_bytes:
            self._forward.put(b"(%d bytes of the engine's output were dropped)\n" % (self._dropped_bytes - dropped))

    def lines(self) -> tuple[str, ...]:
        """The last lines, printable; also of what was not read yet."""
        self._next_s = 0.0
        self.pump()
        return next((lines for stream in reversed(self._streams) if (lines := stream.lines())), ())

    @property
    def dropped_bytes(self) -> int:
        """What was not forwarded."""
        return self._dropped_bytes

    def close(self) -> None:
        """Forward what is left, give it a moment to be written, and close the pipes. Idempotent."""
        self._next_s = 0.0
        self.pump()
        for stream in self._streams:
            self._dropped_bytes += self._forward.put(stream.end())
        self._forward.close()


class _Stream:
    """One pipe, its tail, and the line that is not complete yet."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self._tail = self._partial = b""
        os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(OSError, AttributeError):  # not Linux, or above what this user may have
            fcntl.fcntl(pipe.fileno(), fcntl.F_SETPIPE_SZ, READ_BYTES)

    def read(self) -> bytes:
        """Whole lines, some READ_BYTES at most; b"" when there is nothing."""
        if self.pipe.closed:
            return b""
        try:
            block = os.read(self.pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return b""
        if not block:
            return self.end()
        block = block.replace(b"\r", b"\n")
        self._tail = (self._tail + block)[-_TAIL_BYTES:]
        joined = self._partial + block
        whole, newline, rest = joined.rpartition(b"\n")
        if len(rest) > _LINE_BYTES:
            whole, newline, rest = joined, b"\n", b""
        self._partial = rest
        return whole + newline

    def end(self) -> bytes:
        """Close the pipe: what is left is a line."""
        self.pipe.close()
        rest, self._partial = self._partial, b""
        return rest and rest + b"\n"

    def lines(self) -> tuple[str, ...]:
        """The last ones that are not empty; what cannot be printed, or put in a message, is replaced."""
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in self._tail.decode(errors="replace"))
        return tuple(line for line in text.split("\n") if line.strip())[-TAIL_LINES:]


class _Forward:
    """Writes to our stderr in a thread of its own: whoever has to read it may never do so."""

    def __init__(self) -> None:
        self._blocks: collections.deque[bytes] = collections.deque()
        self._queued_bytes = 0
        self._closed = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="phyai-engine-log", daemon=True)
        self._thread.start()

    def put(self, block: bytes) -> int:
        """Queue whole lines; the number of bytes there was no room for."""
        if not block:
            return 0
        with self._condition:
            if self._queued_bytes + len(block) > _QUEUE_BYTES:
                return len(block)
            self._blocks.append(block)
            self._queued_bytes += len(block)
            self._condition.notify()
        return 0

    def close(self) -> None:
        """End once everything is written. A thread that is stuck in a write ends when that does."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(_FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._blocks or self._closed)
                if not self._blocks:
                    return
                block = self._blocks.popleft()
            size = len(block)
            with contextlib.suppress(OSError):  # closed, or a disk that is full: there is no better place to say so
                while block:
                    block = block[os.write(_STDERR_FD, block) :]
            with self._condition:
                self._queued_bytes -= size
