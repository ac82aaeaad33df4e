"""A remote engine against one in a child process: the same chunks byte for byte, and what a request costs in bytes.

Twice: the same requests to both engines, plain and continuing committed steps (RTC); and a policy node with
`engine: remote` over ROS, whose recorded requests are then asked again of a child process. float32 on the CPU, batches
of one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import rclpy
import yaml
from evidence import conclude, options
from rclpy.node import Node

from phyai_engine.config import RobotConfig, config_dir, load_model, load_robot, read_yaml, resolve
from phyai_engine.serve.client import Answered, EngineClient
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.types import F64, Committed, Observation, Request
from phyai_ros.processes import Processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from served import Served

ROBOT, CAMERA = "metaworld_sawyer", (224, 224, 3)
Row = tuple[str, str, bool | None]


class Engine:
    """A client, and how to wait for it."""

    def __init__(self, robot: RobotConfig, endpoint: str, model: Any, *, jpeg_quality: int = 0) -> None:
        self._signal = threading.Event()
        remote = RemoteEngine(endpoint=endpoint, model="m", jpeg_quality=jpeg_quality) if endpoint else None
        self.client = EngineClient(
            robot,
            model if remote is None else None,
            "process" if remote is None else "remote",
            on_event=self._signal.set,
            heartbeat_timeout_s=10.0,
            remote=remote,
        )
        self.hello = self.client.start()

    def ask(self, request: Request) -> F64:
        """[H, A] its chunk."""
        self.client.submit(request)
        assert self._signal.wait(120.0)
        self._signal.clear()
        (event,) = self.client.poll()
        assert isinstance(event, Answered), event
        return event.chunk.actions


def requests(robot: RobotConfig, count: int) -> Iterator[tuple[Request, bool]]:
    """Random ones, and for each whether it is to continue the chunk before."""
    rng = np.random.default_rng(1)
    state = np.zeros(len(robot.state))
    for i in range(1, count + 1):
        images = {camera.name: rng.integers(0, 256, CAMERA, dtype=np.uint8) for camera in robot.cameras}
        words = ("reach the goal", "push the block")[i // 8 % 2]
        now_ns, moved = time.monotonic_ns(), state + rng.normal(0, 0.01, state.shape)
        seen = Observation(images, moved, np.zeros_like(state), words, 0, 0, now_ns, now_ns)
        yield Request(1, i, seen, None, seed=i, remaining_ms=10_000.0), i % 2 == 0


def same_requests(model: str, count: int) -> list[Row]:
    """Both engines get the same; RTC continues what the child process answered before."""
    robot = load_robot(resolve("robots", ROBOT))
    content = read_yaml(config_dir() / "models" / f"{model}.yaml")
    server = Served(Path(tempfile.mkdtemp()), robot=ROBOT, model=content, served={"buckets": [1]})
    try:
        near, far = Engine(robot, "", load_model(server.model_file)), Engine(robot, server.endpoint, None)
        try:
            equal, before = {True: 0, False: 0}, None
            s = near.hello.horizon // 2
            for plain, continues in requests(robot, count):
                committed = Committed(before[4:], 3, s) if continues and before is not None else None
                request = replace(plain, committed=committed)
                before = near.ask(request)
                equal[continues] += before.tobytes() == far.ask(request).tobytes()
        finally:
            near.client.stop()
            far.client.stop()
    finally:
        server.close()
    fresh, rtc = count - count // 2, count // 2
    return [
        (f"{model}: equal chunks, remote and process, plain", f"{equal[False]} of {fresh}", equal[False] == fresh),
        (f"{model}: equal chunks, remote and process, RTC", f"{equal[True]} of {rtc}", equal[True] == rtc),
    ]


@contextmanager
def remote_node(folder: Path, model: str) -> Iterator[tuple[Processes, Path]]:
    """A policy node on a server, with its simulated robot; recording."""
    content = read_yaml(config_dir() / "models" / f"{model}.yaml")
    server = Served(folder, robot=ROBOT, model=content, served={"buckets": [1]})
    rclpy.init()
    node = Node("observer")
    processes = Processes(node, folder)
    record = folder / "run"
    try:
        processes.start("sim_robot", "phyai_ros.sim_node", robot=ROBOT)
        processes.start(
            "policy_node",
            "phyai_ros.policy_node",
            robot=ROBOT,
            model="m",
            engine="remote",
            engine_endpoint=server.endpoint,
            instruction="reach the goal",
            record=record,
        )
        yield processes, record
    finally:
        processes.stop()
        server.close()
        node.destroy_node()
        rclpy.try_shutdown()


def recorded_node(model: str, seconds: float) -> list[Row]:
    """What the node asked and was answered, asked again of a child process."""
    folder = Path(tempfile.mkdtemp())
    with remote_node(folder, model) as (processes, record):
        for label in ("configure", "activate"):
            processes.transition("policy_node", label)
        processes.spin(seconds)
        torch = processes.imports_torch("policy_node")
    # The server's model is known here; the recording knows only its name there.
    own = folder / "own.yaml"
    own.write_text(yaml.safe_dump(read_yaml(config_dir() / "models" / f"{model}.yaml")), encoding="utf-8")
    program = ["-c", "from phyai_engine.cli import main; main()", "replay", str(record), "--recorded"]
    done = subprocess.run(
        [sys.executable, *program, "--model", str(own)], capture_output=True, text=True, timeout=600.0, check=False
    )
    told = next((line for line in done.stdout.splitlines() if "chunks have the same" in line), done.stderr[-300:])
    return [
        (
            f"{model}: node with engine: remote, {seconds:g} s over ROS, asked again of a process",
            told,
            not done.returncode,
        ),
        ("the node's process holds torch", "yes" if torch else "no", not torch),
    ]


def sizes(count: int) -> list[Row]:
    """Bytes that left, per request, three cameras of 224x224."""
    robot = load_robot(resolve("robots", "aloha"))
    robot = msgspec.structs.replace(robot, cameras=robot.cameras[:3])
    horizon = {"horizon": 50, "action_dim": 32, "cameras": [c.role for c in robot.cameras], "image_size": 32}
    model = {"family": "fake", "normalisation": {"kind": "limits"}, "options": horizon}
    server = Served(Path(tempfile.mkdtemp()), robot="aloha", model=model, served={"buckets": [1]})
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(224), np.arange(224))[..., None].repeat(3, -1)
    rows: list[Row] = []
    try:
        for words, moving, quality in (
            ("all three cameras changed, raw", 3, 0),
            ("one of three changed, raw", 1, 0),
            ("none changed", 0, 0),
            ("all three changed, JPEG 90", 3, 90),
            ("one of three changed, JPEG 90", 1, 90),
        ):
            engine = Engine(robot, server.endpoint, None, jpeg_quality=quality)
            frames = {c.name: (smooth % 256).astype(np.uint8) for c in robot.cameras}
            state, first = np.zeros(len(robot.state)), 0
            for i in range(1, count + 2):
                for camera in robot.cameras[:moving]:
                    noise = rng.integers(-4, 5, CAMERA)
                    frames[camera.name] = ((smooth + i + noise) % 256).astype(np.uint8)
                seen = Observation(dict(frames), state, state, "put the red cube into the box", 0, 0, 0, 0)
                engine.ask(Request(1, i, seen, None, i, 10_000.0))
                first = first or engine.client.counters["bytes_sent"]  # the key: everything, and the hello
            sent = (engine.client.counters["bytes_sent"] - first) / count
            engine.client.stop()
            full = 3 * int(np.prod(CAMERA))
            rows.append((f"bytes per request: {words}", f"{sent:.0f} ({full / sent:.1f}x less than raw images)", None))
    finally:
        server.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="requests to both engines")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the node")
    chosen = options(parser)
    rows = [*same_requests("pi05_demo", chosen.count), *same_requests("fake", chosen.count)]
    rows += recorded_node("pi05_demo", chosen.seconds)
    rows += sizes(50)
    return conclude("remote engine: the same chunks as a child process, and bytes per request", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
