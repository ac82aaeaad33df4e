"""What a policy node and the process that records it say to each other, and the node's end of it.

A pair of sockets that keep messages apart. Neither side ever waits for the other: what the node cannot hand over is
dropped and counted, what the recorder cannot tell is told the next time. The end of the node, also when it is killed,
is the end of what the recorder hears.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from phyai_engine.errors import ConfigError
from phyai_engine.replay.run_file import RunFile

MESSAGE_BYTES = 1 << 18
"""Largest message either way: a plan with robot file and model, or a request of a wide robot."""
SOCKET_BYTES = 1 << 20
"""Asked of the kernel for what waits in between; Linux grants 416 kB unless net.core.wmem_max says more."""
START_S = 20.0
CLOSE_S = 5.0
LOOK_S = 0.05


class Heard(Struct, frozen=True):
    """A topic that the recorder subscribes to.

    :param kind: message type. :param depth: messages that wait for the recorder.
    :param gated: kept only while the node is active. :param publishers: known to the node when it configures.
    """

    kind: str
    depth: int
    gated: bool
    publishers: int = 0


class Plan(Struct, frozen=True):
    """What is recorded.

    :param name, namespace: of the recorder as a node. :param domain: ROS domain.
    :param clock: full name of the /clock that time follows; empty: the system's time.
    :param folder: is made; must not exist. :param max_mib: its bound on disk.
    :param heard: by full name. :param given: full name -> message type of what the node hands over.
    :param cameras: name -> topic: where the frames are that an EngineRequest names.
    """

    name: str
    namespace: str
    domain: int
    clock: str
    folder: str
    max_mib: int
    run: RunFile
    heard: Mapping[str, Heard]
    given: Mapping[str, str]
    cameras: Mapping[str, str]


class Active(Struct, frozen=True, tag=True):
    """The node began or ceased to take its inputs. :param at_ns: system time."""

    at_ns: int
    on: bool


class Given(Struct, frozen=True, tag=True):
    """A serialised message that no topic carries. :param at_ns: system time."""

    at_ns: int
    topic: str
    content: bytes


class Progress(Struct, frozen=True):
    """How the recording stands; the first one says that it has begun.

    :param state: in words. :param ended: nothing is recorded any more.
    :param messages: written. :param dropped: by topic: that were missed in between.
    :param unheard: by topic: that a publisher which came later sent before it was heard.
    :param uncounted: topics whose losses cannot be seen: several publishers, or a middleware that numbers nothing.
    :param incomplete: requests that name a frame which is not in the bag.
    :param unseen: topics whose publishers had not been found when it began.
    """

    state: str
    ended: bool = False
    messages: int = 0
    dropped: Mapping[str, int] = {}
    unheard: Mapping[str, int] = {}
    uncounted: tuple[str, ...] = ()
    incomplete: int = 0
    unseen: tuple[str, ...] = ()


RECORDING, FINISHED = "recording", "finished"


class RecorderLink:
    """Starts the recorder, tells it what no topic carries, and knows how it stands. On one thread.

    :param warn: told once when the recording ends by itself.
    """

    def __init__(self, plan: Plan, warn: Callable[[str], object]) -> None:
        self._plan, self._warn = plan, warn
        self._dropped: Counter[str] = Counter()  # by this end
        self._owed: list[bytes] = []  # what must not be lost and found no room
        self._closed = False
        self.progress = Progress("starting")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        command = [sys.executable, "-m", "phyai_ros.recorder"]
        with theirs:
            # A session of its own: Ctrl-C in the terminal is for the node, whose end is the end of its input.
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)

    def start(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Returns when the recording has begun.

        :param give_up: true when the process was told to end meanwhile.
        :raises ConfigError: it cannot be made, or does not begin within START_S.
        """
        plan = msgspec.json.encode(self._plan)
        if len(plan) > MESSAGE_BYTES:
            raise self._error(f"{len(plan)} bytes of robot file, model and topics, wanted at most {MESSAGE_BYTES}")
        self._socket.send(plan)
        self._socket.setblocking(False)
        self.wait(lambda: self.progress.state == RECORDING, give_up)

    def wait(self, condition: Callable[[], bool], give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for a step of its beginning. :raises ConfigError: as :meth:`start`."""
        end = time.monotonic() + START_S
        while not condition():
            if self.progress.ended:
                raise self._error(self.progress.state)
            if give_up():
                raise self._error("the node is ending")
            if time.monotonic() > end:
                raise self._error(f"not begun after {START_S:.0f} s")
            time.sleep(LOOK_S)
            self.look()

    def activate(self, on: bool) -> None:
        """From now on inputs are kept, or not."""
        self._owed.append(msgspec.msgpack.encode(Active(time.time_ns(), on)))
        self._pay()

    def give(self, topic: str, content: bytes) -> None:
        """Hand over one serialised message. Never waits."""
        if not self.progress.ended and not self._send(msgspec.msgpack.encode(Given(time.time_ns(), topic, content))):
            self._dropped[topic] += 1

    def look(self) -> Progress:
        """How it stands now."""
        self._pay()
        while not self.progress.ended:
            try:
                told = self._socket.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                told = b""
            if not told and self.process.poll() is None:
                break  # its end of the socket is closed before there is an exit code
            self._take(told)
        return self.progress

    def close(self) -> None:
        """End the recording: what was heard is written and the file finished, within CLOSE_S. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # it ended before
            self._socket.shutdown(socket.SHUT_WR)
        end = time.monotonic() + CLOSE_S
        while not self.look().ended and time.monotonic() < end:
            time.sleep(0.005)
        if not self.progress.ended:
            self._warn(f"the recording {self._plan.folder} is not finished after {CLOSE_S:.0f} s: it goes on by itself")
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_S)
        self._socket.close()

    @property
    def dropped(self) -> Counter[str]:
        """By topic: that were missed, or could not be handed over."""
        return self._dropped + Counter(self.progress.dropped)

    def _take(self, told: bytes) -> None:
        began = self.progress.state == RECORDING
        if told:
            self.progress = msgspec.json.decode(told, type=Progress)
        else:  # it was killed, or is broken
            state = f"failed, the recorder ended with exit code {self.process.returncode}"
            self.progress = msgspec.structs.replace(self.progress, state=state, ended=True)
        if began and self.progress.ended and self.progress.state != FINISHED:
            self._warn(f"recording {self._plan.folder}: {self.progress.state}")

    def _pay(self) -> None:
        while self._owed and self._send(self._owed[0]):
            del self._owed[0]

    def _send(self, message: bytes) -> bool:
        try:
            self._socket.send(message)
        except ConnectionError:  # it has ended, and says why
            return True
        except OSError:  # no room, or larger than any room
            return False
        return True

    def _error(self, got: str) -> ConfigError:
        return ConfigError("the recording cannot be made", got=got, where=Path(self._plan.folder))
