"""Records what a policy node hears and says, in a process of its own: ``python -m phyai_ros.recorder``.

It subscribes to everything itself, so that the node pays nothing for a frame, a joint sample or a command, and is told
by the node only what no topic carries. Messages are stamped when the middleware received them. One thread empties the
middleware's queues, another, which runs when nothing else wants the processor, writes. Only that one is of the idle
class: it shares no lock with the middleware, whose threads every publisher would wait for in the end.

It never asks a publisher for anything: all its subscriptions are best effort, which every publisher matches without an
acknowledgement. What it missed it knows by the publisher's numbers.

Its standard input is a socket: see recorder_link.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import rclpy
from ament_index_python.packages import get_package_share_directory
from phyai_policy.msg import EngineRequest
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from rclpy.signals import SignalHandlerOptions
from rclpy.subscription import Subscription

from phyai_engine.messages import stamp_ns
from phyai_engine.replay.bag_writer import BagWriter
from phyai_engine.replay.recorded import RECEIPT_NS, REQUEST_TYPE
from phyai_ros.recorder_link import FINISHED, MESSAGE_BYTES, RECORDING, Active, Given, Heard, Plan, Progress
from phyai_ros.topics import SENSOR_QOS

MIB = 1 << 20
TURN_S = 0.04
QUEUE_BYTES = 64 * MIB
"""What may wait to be written. The rest waits in the middleware, where the newest push out the oldest."""
SETTLE_NS = 20_000_000
"""What is younger waits a turn: a message may be on its way that was received before it."""
SEEN_S = 3.0
"""How long it waits for publishers that the node knows."""
LAST_S = 0.1
"""What was published before the node ended is received within this."""
TELL_S = 0.25
BEFORE_NS = 100_000_000
"""What the node was activated after by less than this may have waited in its queues, and is what it sees first."""
NAMED_NS = 1_000_000_000
"""A frame that a request names is received by then, or was missed."""
FRAMES = 300
"""Of each camera, whose stamps are remembered that long."""
CLOCK_DEPTH = 2000
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


class Event(NamedTuple):
    """Something received, and what is to be done about it.

    :ivar at_ns: system time. :ivar topic: of a message to be kept; else empty. :ivar size: of what waits, in bytes.
    """

    at_ns: int
    topic: str
    size: int
    act: Callable[[int], None]


class FullError(Exception):
    """The next message would pass the folder's bound."""


class Recorder:
    """One recording.

    :param link: the node's messages; its end ends the recording.
    :raises OSError: the folder cannot be made.
    """

    def __init__(self, plan: Plan, node: Node, link: socket.socket) -> None:
        self._plan, self._link = plan, link
        kinds = {topic: heard.kind for topic, heard in plan.heard.items()} | dict(plan.given)
        texts = {kind: _definition(kind) for kind in kinds.values()}
        self._bag = BagWriter(Path(plan.folder), plan.max_mib * MIB, kinds, texts)
        plan.run.save(Path(plan.folder))
        self._active = False
        self._clock_ns = 0
        # Filled by the collecting thread, which says until when it is complete.
        self._collected: deque[Event] = deque()
        self._complete_ns, self._collected_bytes, self._written_bytes = 0, 0, 0
        self._failure: Exception | None = None
        self._ending = threading.Event()
        self._collecting = threading.Thread(target=self._run, name="phyai-collector", daemon=True)
        self._waiting: deque[Event] = deque()  # in the order of receipt
        # Inputs from before the node is active, as many as its own queues hold.
        self._before = {topic: deque[Event](maxlen=SENSOR_QOS.depth) for topic, h in plan.heard.items() if h.gated}
        self._written, self._dropped = 0, Counter[str]()
        self._unheard = Counter[str]()
        # Of the newest message of each topic, by its publisher, who begins at 1.
        self._numbers = {topic: 0 for topic, heard in plan.heard.items() if not heard.publishers}
        self._uncounted: set[str] = set()
        self._frames = {topic: deque[tuple[int, int]](maxlen=FRAMES) for topic in plan.cameras.values()}
        self._named: deque[tuple[int, list[tuple[str, int]]]] = deque()
        self._incomplete, self._unseen = 0, tuple[str, ...]()
        self._told_s, self._told = 0.0, b""
        self._subscriptions = {topic: _subscribe(node, topic, heard) for topic, heard in plan.heard.items()}
        clock = Heard("rosgraph_msgs/msg/Clock", CLOCK_DEPTH, gated=False)
        self._clock = _subscribe(node, plan.clock, clock) if plan.clock else None

    def meet(self) -> None:
        """Wait for the publishers that the node knows, within SEEN_S."""
        end = time.monotonic() + SEEN_S
        while unseen := [
            topic
            for topic, heard in self._plan.heard.items()
            if self._subscriptions[topic].get_publisher_count() < heard.publishers
        ]:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        self._unseen = tuple(unseen)

    def run(self) -> None:
        """Record until the node ends. The calling thread stays in the idle class.

        :raises FullError: the folder is full. :raises OSError: the disk is full or gone.
        """
        self._collecting.start()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread: what drives the robot goes first
        while self._turn():
            self._tell(RECORDING)
            time.sleep(TURN_S)
        time.sleep(LAST_S)
        self._stop_collecting()
        self._collect()
        self._write(time.time_ns())
        self._check_named(sys.maxsize)

    def close(self, state: str) -> None:
        """Finish the file and say how it ended."""
        self._stop_collecting()
        waiting = [*self._waiting, *self._collected]
        self._dropped.update(e.topic for e in waiting if self._active or e.topic not in self._before)
        try:
            self._bag.close()
        except Exception as error:  # of the disk, or of what a failed write left behind
            state = state if state.startswith("failed") else failure(error)
        self._tell(state, ended=True)

    def _turn(self) -> bool:
        """Everything received since the last turn. False once the node has ended."""
        if self._failure is not None:
            raise self._failure
        complete_ns = self._complete_ns  # first: what the node says of a time was said before that of which it is
        alive = self._hear()
        self._write(complete_ns - SETTLE_NS)
        self._check_named(complete_ns)
        return alive

    # ---- the collecting thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(TURN_S / 2):
                if self._collected_bytes - self._written_bytes < QUEUE_BYTES:
                    self._collect()
        except Exception as error:  # of ROS; raised again by the thread that writes
            self._failure = error

    def _stop_collecting(self) -> None:
        self._ending.set()
        if self._collecting.ident is not None:  # it was started
            self._collecting.join()

    def _collect(self) -> None:
        """Empty the queues of the middleware. Without an executor, whose turn for each of some hundred messages a
        second costs more than the messages."""
        now_ns = time.time_ns()
        for topic, subscription in self._subscriptions.items():
            act = self._input if topic in self._before else self._keep
            alone = subscription.get_publisher_count() <= 1
            for content, info in _taken(subscription):
                number = info["publication_sequence_number"] if alone else None
                event = Event(_received(info), topic, len(content), partial(act, topic, content, number))
                self._collected_bytes += event.size
                self._collected.append(event)
        if self._clock is not None:
            for content, info in _taken(self._clock):
                self._collected.append(Event(_received(info), "", 0, partial(self._set_clock, _stamp(content))))
        self._complete_ns = now_ns

    # ---- the writing thread ---------------------------------------------------------------------------------------

    def _hear(self) -> bool:
        """What the node said. False once it has ended."""
        while True:
            try:
                said = self._link.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not said:
                return False
            message = msgspec.msgpack.decode(said, type=Active | Given)
            if isinstance(message, Active):
                self._waiting.append(Event(message.at_ns, "", 0, partial(self._set_active, message.on)))
            else:
                act = partial(self._given, message.topic, message.content)
                self._waiting.append(Event(message.at_ns, message.topic, 0, act))

    def _write(self, until_ns: int) -> None:
        """What was received by then, in the order of receipt."""
        while self._collected:
            self._waiting.append(self._collected.popleft())
        self._waiting = deque(sorted(self._waiting, key=lambda event: event.at_ns))
        while self._waiting and self._waiting[0].at_ns <= until_ns:
            event = self._waiting[0]
            event.act(event.at_ns)
            self._waiting.popleft()  # not before: what could not be written is counted
            self._written_bytes += event.size

    def _set_clock(self, clock_ns: int, at_ns: int) -> None:
        self._clock_ns = clock_ns

    def _set_active(self, on: bool, at_ns: int) -> None:
        self._active = on
        before = [e for events in self._before.values() for e in events if e.at_ns > at_ns - BEFORE_NS]
        for events in self._before.values():
            events.clear()
        for event in sorted(before, key=lambda event: event.at_ns):
            event.act(event.at_ns)

    def _input(self, topic: str, content: bytes, number: int | None, at_ns: int) -> None:
        if self._active:
            self._keep(topic, content, number, at_ns)
        else:
            self._numbers.pop(topic, None)  # what is missed now is not missed by the recording
            self._before[topic].append(Event(at_ns, topic, 0, partial(self._input, topic, content, number)))

    def _given(self, topic: str, content: bytes, at_ns: int) -> None:
        self._put(topic, content, at_ns, trailing=True)
        if self._plan.given[topic] == REQUEST_TYPE:
            request = deserialize_message(content, EngineRequest)
            frames = zip(request.cameras, map(stamp_ns, request.image_stamps), strict=True)
            self._named.append((at_ns, [(self._plan.cameras[camera], stamp) for camera, stamp in frames]))

    def _keep(self, topic: str, content: bytes, number: int | None, at_ns: int) -> None:
        """A message that was heard; what its publisher numbered in between was missed."""
        if number is None:
            self._uncounted.add(topic)
            self._numbers.pop(topic, None)
        else:
            before = self._numbers.get(topic, number - 1)
            if 0 < before < number:
                self._dropped[topic] += number - before - 1
            else:  # a publisher that came while this was recorded
                self._unheard[topic] += number - 1
            self._numbers[topic] = number
        if (ros_ns := self._put(topic, content, at_ns)) and topic in self._frames:
            self._frames[topic].append((_stamp(content), ros_ns))

    def _put(self, topic: str, content: bytes, at_ns: int, *, trailing: bool = False) -> int:
        """Into the bag, by the clock of the bag; that time, or 0 while there is none and nothing is written."""
        ros_ns = self._clock_ns if self._clock is not None else at_ns
        if ros_ns <= 0:
            return 0
        if not self._bag.write(topic, ros_ns, content, trailing=trailing):
            raise FullError
        self._written += 1
        return ros_ns

    # ---- told -----------------------------------------------------------------------------------------------------

    def _check_named(self, now_ns: int) -> None:
        """Is every frame in the bag that a request of a while ago names?"""
        while self._named and self._named[0][0] + NAMED_NS < now_ns:
            _, frames = self._named.popleft()
            self._incomplete += not all(self._has(topic, stamp) for topic, stamp in frames)

    def _has(self, topic: str, wanted_ns: int) -> bool:
        """A frame without a stamp is named by its receipt, as recorded.py finds it again."""
        return any(
            stamp == wanted_ns or (stamp == 0 and 0 <= wanted_ns - ros_ns < RECEIPT_NS)
            for stamp, ros_ns in self._frames[topic]
        )

    def _tell(self, state: str, *, ended: bool = False) -> None:
        """The node, now and then, if anything changed."""
        if not ended and time.monotonic() - self._told_s < TELL_S:
            return
        self._told_s = time.monotonic()
        progress = Progress(
            state,
            ended,
            messages=self._written,
            dropped=+self._dropped,
            unheard=+self._unheard,
            uncounted=tuple(sorted(self._uncounted)),
            incomplete=self._incomplete,
            unseen=self._unseen,
        )
        if (told := msgspec.json.encode(progress)) != self._told:
            with contextlib.suppress(OSError):  # it has ended, or hears nothing at the moment
                self._link.send(told)
                self._told = told


def record(plan: Plan, node: Node, link: socket.socket) -> bool:
    """Record to the end, whatever that is. True if the file is whole."""
    try:
        recorder = Recorder(plan, node, link)
    except Exception as error:  # of the disk, of rosbags, or of ROS
        link.send(msgspec.json.encode(Progress(failure(error), ended=True)))
        return False
    state = FINISHED
    try:
        recorder.meet()
        recorder.run()
    except FullError:
        state = f"stopped, the next message would pass record_max_mib ({plan.max_mib} MiB)"
    except Exception as error:
        state = failure(error)
    recorder.close(state)
    return not state.startswith("failed")


def keep_memory() -> None:
    """Have the C library reuse the memory of frames: by default it gives each back to the kernel, which clears it page
    by page for the next. That was half of what this process cost (4 copies of 0.9 MB: 1.4 ms, and 0.6 without)."""
    with contextlib.suppress(AttributeError):  # a C library that has no such setting
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 32 * MIB)
        libc.mallopt(M_TRIM_THRESHOLD, 256 * MIB)


def failure(error: Exception) -> str:
    """How a recording ended that failed."""
    return f"failed, {type(error).__name__}: {error}"


def _subscribe(node: Node, topic: str, heard: Heard) -> Subscription:
    package, _, name = heard.kind.split("/")
    qos = QoSProfile(depth=heard.depth, reliability=ReliabilityPolicy.BEST_EFFORT)
    return node.create_subscription(getattr(import_module(f"{package}.msg"), name), topic, print, qos, raw=True)


def _taken(subscription: Subscription) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """What waits in a subscription: the serialised message and when and what of its publisher it is."""
    with subscription.handle:
        while (message := subscription.handle.take_message(subscription.msg_type, True)) is not None:
            yield message


def _received(info: dict[str, Any]) -> int:
    """When the middleware received a message; one that does not say so: now."""
    return int(info["received_timestamp"]) or time.time_ns()


def _stamp(content: bytes) -> int:
    """The time at the beginning of a serialised message [ns]: header.stamp of an image, or /clock's."""
    order = "<" if content[1] else ">"
    sec, nanosec = struct.unpack_from(f"{order}iI", content, 4)
    return int(sec) * 1_000_000_000 + int(nanosec)


def _definition(kind: str) -> str:
    """Text of the .msg file of a type."""
    package, _, name = kind.split("/")
    return Path(get_package_share_directory(package), "msg", f"{name}.msg").read_text(encoding="utf-8")


def main() -> int:
    """Exit code 0: the file is whole."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the end of the node says when to end
        signal.signal(number, signal.SIG_IGN)
    keep_memory()
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):  # a node's priority is not for what records it
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as link:
        plan = msgspec.json.decode(link.recv(MESSAGE_BYTES), type=Plan)
        link.setblocking(False)
        rclpy.init(args=[], domain_id=plan.domain, signal_handler_options=SignalHandlerOptions.NO)
        node = Node(
            plan.name,
            namespace=plan.namespace,
            use_global_arguments=False,
            enable_rosout=False,
            start_parameter_services=False,
        )
        whole = record(plan, node, link)
    node.destroy_node()
    rclpy.try_shutdown()
    return 0 if whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
