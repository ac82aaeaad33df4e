"""Many robots in one process: each its own connection and session, asking at a fixed rate or as soon as answered.

    python test/prove/fleet_robots.py ENDPOINT MODEL --robots 16 --hz 5 --seconds 30 --out out.npz

Open loop: a robot asks at its time whether or not its last request was answered, as a camera's clock would have it. A
request is answered in time, late, refused, or lost; times are this process's monotonic clock, which all processes of a
host share.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zmq
from PIL import Image

from phyai_engine.config import load_robot, resolve
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.sockets import prepare
from phyai_engine.serve.streams import SentStreams
from phyai_engine.types import U8, Observation, Request

WAIT_S = 20.0
OUTCOMES = ("lost", "answered", "overloaded", "replaced", "other")
STAGES = ("serialise_ms", "queue_ms", "batch_ms", "inference_ms", "device_ms")
FIELDS = ("robot", "asked_ns", "answered_ns", "outcome", "rows", *STAGES)


@dataclass(eq=False)
class Robot:
    """One connection."""

    index: int
    socket: Any
    streams: SentStreams
    chunk_id: int = 0
    asked: dict[int, int] = field(default_factory=dict)  # chunk_id -> row of the log
    spoke_s: float = 0.0


def picture(rng: np.random.Generator, size: int) -> U8:
    """[size, size, 3]: soft shapes and a camera's noise, so that JPEG takes what it takes of real frames."""
    soft = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    noisy = np.asarray(soft, np.int16) + rng.integers(-4, 5, (size, size, 3))
    return np.clip(noisy, 0, 255).astype(np.uint8)


class Robots:
    """The robots of this process; ``log`` has a row per request, as FIELDS.

    Times are of :class:`phyai_engine.types.StageTimings`; ``device_ms`` is its prefix and steps, of the whole batch.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.config = load_robot(resolve("robots", options.robot))
        self.context: Any = zmq.Context()
        self.poller = zmq.Poller()
        self.log: list[list[float]] = []
        self.robots = [self._connect(options.first + index) for index in range(options.robots)]
        self.by_socket = {robot.socket: robot for robot in self.robots}
        rng = np.random.default_rng(options.first)
        self.frames = [{camera.name: picture(rng, options.size) for camera in self.config.cameras} for _ in range(4)]
        self.state = np.zeros(len(self.config.state))

    def _connect(self, index: int) -> Robot:
        socket = self.context.socket(zmq.DEALER)
        prepare(socket, self.options.endpoint)
        socket.connect(self.options.endpoint)
        self.poller.register(socket, zmq.POLLIN)
        hello = wire.Hello(
            robot=msgspec.to_builtins(self.config), robot_id=f"robot {index}", model=self.options.model, instance=index
        )
        socket.send_multipart(wire.encode(hello))
        return Robot(index, socket, SentStreams(self.options.jpeg_quality))

    def await_sessions(self) -> None:
        """Every robot is let in."""
        waiting, until_s = set(self.robots), time.monotonic() + WAIT_S
        while waiting:
            assert time.monotonic() < until_s, f"{len(waiting)} robots were not let in"
            for socket, _ in self.poller.poll(100):
                message, _ = wire.decode(socket.recv_multipart())
                if isinstance(message, wire.HelloReply):
                    assert message.engine is not None, message.reason
                    waiting.discard(self.by_socket[socket])

    def run(self) -> None:
        """Open loop at ``hz``, from a common start; phases are spread evenly with a drawn jitter."""
        o = self.options
        period_s, rng = 1.0 / o.hz, np.random.default_rng(7 + o.first)
        start_s = o.start_ns / 1e9
        end_s = start_s + o.seconds
        phases = rng.uniform(0.0, period_s, len(self.robots))
        due = [(start_s + phase, index, 0) for index, phase in enumerate(phases)]
        heapq.heapify(due)
        while due or any(robot.asked for robot in self.robots):
            now_s = time.monotonic()
            if now_s > end_s + o.deadline_ms / 1e3 + 1.0:
                break
            while due and due[0][0] <= now_s:
                _, index, k = heapq.heappop(due)
                self._ask(self.robots[index])
                next_s = start_s + phases[index] + (k + 1) * period_s
                if next_s < end_s:
                    heapq.heappush(due, (next_s, index, k + 1))
            wait_s = (due[0][0] - time.monotonic()) if due else 0.05
            self._receive(max(0, int(np.ceil(wait_s * 1e3))))

    def run_closed(self) -> None:
        """Closed loop: the next request when the last is answered, ``requests`` in all."""
        total = self.options.requests
        for robot in self.robots:
            self._ask(robot)
        while len(self.log) < total:
            for robot in self._receive(1000):
                self._ask(robot)
        while any(robot.asked for robot in self.robots) and self._receive(1000):
            pass

    def _ask(self, robot: Robot) -> None:
        robot.chunk_id += 1
        now_ns = time.monotonic_ns()
        images = self.frames[robot.chunk_id % len(self.frames)]
        seen = Observation(images, self.state, self.state, "pick it up", 0, 0, now_ns, now_ns)
        request = Request(1, robot.chunk_id, seen, None, robot.chunk_id, self.options.deadline_ms)
        frames = wire.encode(*robot.streams.to_wire(request))
        encode_ms = (time.monotonic_ns() - now_ns) / 1e6
        robot.asked[robot.chunk_id] = len(self.log)
        self.log.append([robot.index, now_ns, 0, 0, 0, encode_ms, *[np.nan] * (len(STAGES) - 1)])
        robot.socket.send_multipart(frames)
        robot.spoke_s = now_ns / 1e9

    def _receive(self, timeout_ms: int) -> Sequence[Robot]:
        """Robots whose request was settled."""
        settled = []
        for socket, _ in self.poller.poll(timeout_ms):
            robot = self.by_socket[socket]
            for _ in itertools.repeat(None, 16):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                began_ns = time.monotonic_ns()
                message, _ = wire.decode(frames)
                if isinstance(message, (wire.Reply, wire.ErrorReply)) and self._settle(robot, message, began_ns):
                    settled.append(robot)
                if isinstance(message, wire.Heartbeat) and time.monotonic() - robot.spoke_s > 0.5:
                    socket.send_multipart(wire.encode(wire.Alive()))
                    robot.spoke_s = time.monotonic()
        return settled

    def _settle(self, robot: Robot, message: wire.Reply | wire.ErrorReply, began_ns: int) -> bool:
        row = robot.asked.pop(message.chunk_id, None)
        if row is None:
            return False
        entry = self.log[row]
        entry[2] = time.monotonic_ns()
        if isinstance(message, wire.Reply):
            t = message.timings
            serialise_ms = entry[FIELDS.index("serialise_ms")] + (entry[2] - began_ns) / 1e6
            rows = 0 if message.load is None else message.load.rows
            stages = [serialise_ms, t.queue_ms, t.batch_ms, t.inference_ms, t.prefix_ms + t.denoise_ms]
            entry[3:] = [OUTCOMES.index("answered"), rows, *stages]
        else:
            entry[3] = OUTCOMES.index(message.reason) if message.reason in OUTCOMES else len(OUTCOMES) - 1
        return True

    def close(self) -> None:
        """Say goodbye."""
        for robot in self.robots:
            robot.socket.send_multipart(wire.encode(wire.Goodbye()))
            robot.socket.close(linger=200)
        self.context.term()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("model")
    parser.add_argument("--robot", default="arm7")
    parser.add_argument("--robots", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="number of the first robot")
    parser.add_argument("--hz", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=0, help="closed loop, so many in all")
    parser.add_argument("--deadline-ms", type=float, default=100.0)
    parser.add_argument("--size", type=int, default=224, help="of square images")
    parser.add_argument("--jpeg-quality", type=int, default=0, help="of images; 0: raw")
    parser.add_argument("--start-ns", type=int, default=0, help="monotonic; 0: now")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    robots = Robots(options)
    robots.await_sessions()
    print("ready", flush=True)
    if not options.start_ns:
        options.start_ns = int(input())  # monotonic, from who started us
    began_s = time.process_time()
    robots.run_closed() if options.requests else robots.run()
    np.savez(options.out, log=np.array(robots.log, dtype=np.float64))
    robots.close()
    print(f"used {time.process_time() - began_s}", flush=True)


if __name__ == "__main__":
    main()
