"""What both ends do with sockets: options, receiving without blocking, waking a poll from another thread."""

from __future__ import annotations

import contextlib
import socket as stdlib_socket
from collections.abc import Iterator
from typing import Any

import zmq

from phyai_engine.serve.protocol import MAX_FRAME_BYTES, MAX_FRAMES

_BURST = 64  # messages; a sound peer has a handful on the way


def prepare(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Options of every engine socket, before it binds or connects to ``endpoint``."""
    # Only for an address that is IPv6 itself: libzmq would then take a host name's IPv6 address first, where a server
    # bound to 0.0.0.0 does not listen.
    socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
    socket.setsockopt(zmq.LINGER, 0)  # closing never waits for a peer
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # checked by libzmq before it allocates a frame
    # No high-water mark: a ROUTER drops silently at it, and what queues for a stalled peer is only heartbeats
    # (tens of bytes each) and at most one reply.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, _BURST)  # what a peer that floods may have waiting in our memory


def received(socket: zmq.Socket[bytes]) -> Iterator[list[memoryview]]:
    """The messages that have come, as frames that were not copied; bounded, so that a peer that floods gets no more
    than its turn."""
    for frames in received_frames(socket):
        yield [frame.buffer for frame in frames]


def received_frames(socket: zmq.Socket[bytes]) -> Iterator[list[Any]]:
    """As :func:`received`, as zmq.Frame: they tell whose connection they came over."""
    for _ in range(_BURST):
        if (frames := _receive(socket)) is None:
            return
        yield frames


def _receive(socket: zmq.Socket[bytes]) -> list[Any] | None:
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # a tenth of what raising zmq.Again costs
        return None
    frame: Any = socket.recv(zmq.NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)  # libzmq delivers all parts of a message or none: this does not block
        if len(frames) <= MAX_FRAMES + 1:  # one more than allowed is kept, so that decode refuses the message
            frames.append(frame)
    return frames


class Wake:
    """Wakes a poll from any thread; never blocks and may be called after close."""

    def __init__(self) -> None:
        self._read, self._write = stdlib_socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._read.fileno()

    def set(self) -> None:
        """Make the poll return."""
        # A full buffer means that a wake-up is pending already; a closed socket that nobody polls any more.
        with contextlib.suppress(OSError):
            self._write.send(b"\0")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends."""
        self._read.close()
        self._write.close()
