"""Publish pre-rendered frames and joint states on an exact schedule: the load of the transport evidence.

Two (``--cameras``) rgb8 streams of a moving pattern at ``--rate``, JointState at ``--joint-rate``; every
message is stamped with the time of its publication. The first eight bytes of a frame are its number, uint64
little-endian, so a receiver counts losses and repeats without trusting stamps. On SIGINT, SIGTERM or after
``--duration`` it prints one JSON line: messages published per topic, how late the schedule ran, seconds.

    python test/prove/camera_publisher.py --robot metaworld_sawyer --duration 60
"""

from __future__ import annotations

import argparse
import array
import heapq
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
import rclpy
from rclpy.node import Node
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image, JointState

from phyai_engine.config import load_robot, resolve

PATTERNS = 30  # distinct frames per camera: one second of motion at 30 Hz
COUNTER_BYTES = 8
DISCOVERY_S = 5.0  # bound on waiting for a subscriber of every topic


def make_frames(width: int, height: int, phase: float) -> list[array.array[int]]:
    """:data:`PATTERNS` frames of a bar and a gradient that move, as the flat bytes of [h, w, 3] rgb8."""
    rows, columns = np.mgrid[0:height, 0:width]
    frames = []
    for i in range(PATTERNS):
        turn = 2.0 * np.pi * (i / PATTERNS + phase)
        image = np.empty((height, width, 3), dtype=np.uint8)
        image[..., 0] = 127.5 * (1.0 + np.sin(columns * 0.03 + turn))
        image[..., 1] = 127.5 * (1.0 + np.cos(rows * 0.04 - turn))
        image[..., 2] = 255 * (np.abs(columns - (0.5 + 0.4 * np.cos(turn)) * width) < 20)
        frames.append(array.array("B", image.tobytes()))
    return frames


class ImageStream:
    """One camera. Messages and their buffers are made once; a publication only writes number and stamp."""

    def __init__(self, node: Node, topic: str, frame_id: str, size: tuple[int, int], phase: float) -> None:
        qos = QoSProfile(depth=2, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE)
        self._clock, self._publisher = node.get_clock(), node.create_publisher(Image, topic, qos)
        self._messages = []
        width, height = size
        for pixels in make_frames(width, height, phase):
            message = Image(height=height, width=width, encoding="rgb8", step=3 * width, data=pixels)
            message.header.frame_id = frame_id
            self._messages.append(message)
        self.topic, self.count = topic, 0

    def publish(self) -> None:
        message = self._messages[self.count % PATTERNS]
        message.data[:COUNTER_BYTES] = array.array("B", self.count.to_bytes(COUNTER_BYTES, "little"))
        message.header.stamp = self._clock.now().to_msg()
        self._publisher.publish(message)
        self.count += 1

    def subscribers(self) -> int:
        return int(self._publisher.get_subscription_count())


class JointStream:
    """One JointState publisher whose joints swing slowly."""

    def __init__(self, node: Node, topic: str, names: tuple[str, ...], rate_hz: float) -> None:
        self._clock, self._publisher = node.get_clock(), node.create_publisher(JointState, topic, 10)
        self._rate_hz = rate_hz
        self._message = JointState(name=list(names))
        self._phase = np.linspace(0.0, 1.0, len(names))
        self.topic, self.count = topic, 0

    def publish(self) -> None:
        turn = 0.5 * self.count / self._rate_hz + self._phase
        self._message.position = array.array("d", (0.2 * np.sin(turn)).tolist())
        self._message.velocity = array.array("d", (0.1 * np.cos(turn)).tolist())
        self._message.header.stamp = self._clock.now().to_msg()
        self._publisher.publish(self._message)
        self.count += 1

    def subscribers(self) -> int:
        return int(self._publisher.get_subscription_count())


Stream = ImageStream | JointStream


def play(streams: list[tuple[Stream, float]], ending: threading.Event, duration_s: float) -> tuple[float, list[float]]:
    """Publish each stream at its rate until ``ending`` or ``duration_s``; lateness never shifts the schedule.

    :returns: seconds played, and the lateness of every message in milliseconds.
    """
    begin = time.monotonic()
    # The streams start a millisecond apart, as cameras with one trigger and separate drivers do.
    due = [(begin + 0.001 * i, i) for i in range(len(streams))]
    heapq.heapify(due)
    late_ms = []
    while due[0][0] - begin < duration_s:
        at, i = due[0]
        if ending.wait(max(0.0, at - time.monotonic())):
            break
        stream, rate_hz = streams[i]
        late_ms.append((time.monotonic() - at) * 1e3)
        stream.publish()
        heapq.heapreplace(due, (begin + 0.001 * i + stream.count / rate_hz, i))
    return time.monotonic() - begin, late_ms


def stop_on_signal(ending: threading.Event) -> Callable[[int, FrameType | None], None]:
    """A signal handler that only sets the flag."""

    def catch(number: int, frame: FrameType | None) -> None:
        ending.set()

    return catch


def arguments(args: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--robot", default="metaworld_sawyer", help="robot file whose topics and joints are used")
    parser.add_argument("--cameras", type=int, default=2, help="how many of its cameras")
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--rate", type=float, default=30.0, help="frames per second of each camera")
    parser.add_argument("--joint-rate", type=float, default=200.0, help="joint states per second and publisher")
    parser.add_argument("--duration", type=float, default=float("inf"), help="seconds; until a signal if not given")
    parser.add_argument("--listeners", type=int, default=1, help="subscriptions of each topic that it waits for")
    return parser.parse_args(args)


def main(args: list[str] | None = None) -> int:
    """Wait for subscribers (bounded), publish, print the counts."""
    chosen = arguments(args)
    robot = load_robot(resolve("robots", chosen.robot))
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop_on_signal(ending))
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = Node("camera_publisher")
    streams: list[tuple[Stream, float]] = []
    for i, camera in enumerate(robot.cameras[: chosen.cameras]):
        image = ImageStream(node, camera.topic, camera.name, (chosen.width, chosen.height), i / 2)
        streams.append((image, chosen.rate))
    for topic in dict.fromkeys(entry.topic for entry in robot.state):
        names = tuple(entry.name for entry in robot.state if entry.topic == topic)
        streams.append((JointStream(node, topic, names, chosen.joint_rate), chosen.joint_rate))
    until = time.monotonic() + DISCOVERY_S
    while time.monotonic() < until and any(stream.subscribers() < chosen.listeners for stream, _ in streams):
        if ending.wait(0.05):
            break
    seconds, late_ms = play(streams, ending, chosen.duration)
    late = np.array(late_ms or [0.0])
    counts = {
        "published": {stream.topic: stream.count for stream, _ in streams},
        "seconds": round(seconds, 3),
        "late_ms": {"p50": round(float(np.median(late)), 3), "p99": round(float(np.quantile(late, 0.99)), 3)},
    }
    print(json.dumps(counts), flush=True)
    node.destroy_node()
    rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
