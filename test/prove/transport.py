"""Two 640x480 cameras at 30 Hz and joint states at 200 Hz into the real node for a minute, at 50 Hz control.

Frames carry their number, so losses and repeats are counted without trusting stamps; transport time is the stamp of
publication to the node's callback, on one host's clock. The publisher is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from evidence import conclude, fake_model, options
from phyai_policy.msg import ActionStep
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter

from phyai_engine.types import CommandKind
from phyai_ros.policy_node import PolicyNode

Row = tuple[str, str, bool | None]


def camera_rows(cameras: Any, frames: Any, published: Any) -> list[Row]:
    """Delivery and transport time of each camera."""
    rows: list[Row] = []
    for camera in cameras:
        got = [number for number, _ in frames[camera.name]]
        times = np.array([ms for _, ms in frames[camera.name]])
        sent = published["published"][camera.topic]
        share = len(set(got)) / sent
        (p50, p99), worst = np.percentile(times, [50, 99]), times.max()
        rows += [
            (f"{camera.name}: frames delivered", f"{len(set(got))} of {sent} = {share:.2%}", share >= 0.99),
            (f"{camera.name}: frames twice", str(len(got) - len(set(got))), len(got) == len(set(got))),
            (
                f"{camera.name}: transport ms",
                f"p50 {p50:.2f}, p99 {p99:.2f}, max {worst:.2f}, n {len(times)}",
                bool(p99 <= 10),
            ),
        ]
    return rows


def command_rows(steps: list[ActionStep], timings: list[Any]) -> list[Row]:
    """One command a tick; row after row; a new chunk starts at the count of consumed steps."""
    played = [s for s in steps if s.kind == CommandKind.ACTION]
    ticks = [s.tick for s in steps]
    first = {t.chunk_id: t.delay_steps for t in timings}
    wrong = sum(
        b.step != (a.step + 1 if a.chunk_id == b.chunk_id else first.get(b.chunk_id, -1)) for a, b in pairwise(played)
    )
    twice = len(ticks) - len(set(ticks))
    return [
        ("commands; ticks with two", f"{len(steps)}; {twice}", twice == 0),
        ("steps repeated or skipped outside HOLD", f"{wrong} of {len(played)}", wrong == 0),
        ("holds", str(sum(s.kind == CommandKind.HOLD for s in steps)), None),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    chosen = options(parser)
    rclpy.init()
    given = {
        "robot": "metaworld_sawyer",
        "model": fake_model(latency_ms=80.0, horizon=32, num_steps=10),
        "engine": "process",
    }
    node = PolicyNode(parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    assert node.trigger_configure() is TransitionCallbackReturn.SUCCESS
    session = node._session
    assert session is not None
    frames: dict[str, list[tuple[int, float]]] = defaultdict(list)
    steps: list[ActionStep] = []
    timings: list[Any] = []
    put, publish = session.buffer.put_image, session.publish

    def put_image(name: str, image: Any, stamp: int, **clocks: int) -> Any:
        number = int.from_bytes(image.reshape(-1)[:8].tobytes(), "little")
        frames[name].append((number, (clocks["received_ros_ns"] - stamp) * 1e-6))
        return put(name, image, stamp, **clocks)

    def keep(key: str, message: Any) -> None:
        {"step": steps, "timing": timings}.get(key, []).append(message)
        publish(key, message)

    session.buffer.put_image = put_image  # type: ignore[method-assign]
    session.loop.player._output._publish = keep  # type: ignore[attr-defined]
    session.publish = keep  # type: ignore[method-assign]
    assert node.trigger_activate() is TransitionCallbackReturn.SUCCESS
    script = str(Path(__file__).with_name("camera_publisher.py"))
    command = [sys.executable, script, "--duration", str(chosen.seconds)]
    publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + chosen.seconds + 30.0
    while publisher.poll() is None and time.monotonic() < end:
        executor.spin_once(timeout_sec=0.05)
    output, _ = publisher.communicate(timeout=5.0)
    published = json.loads(output.splitlines()[-1])
    jitter, counters = session.jitter.jitter(), session.loop.counters
    node.trigger_deactivate()
    node.close()
    rclpy.shutdown()

    rows = [*camera_rows(session.robot.cameras, frames, published), *command_rows(steps, timings)]
    rows += [
        (
            "tick |period - 20 ms|",
            f"p50 {jitter.p50 * 1e3:.2f}, p99 {jitter.p99 * 1e3:.2f}, max {jitter.max * 1e3:.2f}",
            None,
        ),
        ("handoffs; late; ran out", f"{counters.handoffs}; {counters.misses_cond}; {counters.misses_exhaust}", None),
        ("publisher's own lateness ms", f"p50 {published['late_ms']['p50']}, p99 {published['late_ms']['p99']}", None),
    ]
    title = f"transport: {chosen.seconds:.0f} s, 2 x 640x480 at 30 Hz, joints 200 Hz, control 50 Hz"
    return conclude(title, rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
