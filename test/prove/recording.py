"""Does recording delay the control tick? Runs with and without it, interleaved, under two 640x480 cameras at 30 Hz,
joint states at 200 Hz and a model of 80 ms; 50 Hz control.

A run's figures are the median and the 99th percentile of |period - 20 ms|, by the stamps of its commands. Of both the
ratio of the runs' medians, recorded to not recorded, has a bootstrap interval over the runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from evidence import conclude, fake_model, options
from phyai_policy.msg import ActionStep
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rich.progress import Progress

from phyai_engine.messages import stamp_ns
from phyai_engine.replay.bag import Bag
from phyai_ros.processes import Processes

ROBOT, POLICY, DT_S = "metaworld_sawyer", "policy_node", 0.02
SETTLED_TICKS = 50  # the first second: engine and caches come to rest
RESAMPLES = 20_000


@dataclass(frozen=True)
class Run:
    """One run; jitter in ms."""

    recorded: bool
    p50_ms: float
    p99_ms: float
    ticks: int
    dropped: str = "0"
    unheard: str = "0"
    frames: int = 0
    published: int = 0
    mib_s: float = 0.0


class Observer(Node):
    """Hears every command."""

    def __init__(self) -> None:
        super().__init__("observer")
        self.stamps: list[tuple[int, int]] = []
        self.notes: dict[str, str] = {}
        self.create_subscription(ActionStep, f"{POLICY}/step", self._on_step, QoSProfile(depth=200))
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QoSProfile(depth=5))

    def _on_step(self, message: ActionStep) -> None:
        self.stamps.append((message.tick, stamp_ns(message.header.stamp)))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.notes = {pair.key: pair.value for pair in message.status[0].values}


def jitter_ms(stamps: list[tuple[int, int]]) -> np.ndarray:
    """[n] |period - dt| of consecutive ticks."""
    settled = stamps[SETTLED_TICKS:]
    periods = [(b - a) * 1e-9 for (i, a), (j, b) in pairwise(settled) if j == i + 1]
    return np.abs(np.array(periods) - DT_S) * 1e3


def run(model: str, seconds: float, folder: Path, *, record: bool) -> Run:
    """One run, in processes of its own."""
    rclpy.init()
    observer = Observer()
    processes = Processes(observer, folder)
    target = folder / "recording"
    given = {"record": target} if record else {}
    processes.start(POLICY, "phyai_ros.policy_node", robot=ROBOT, model=model, **given)
    try:
        processes.transition(POLICY, "configure")
        processes.transition(POLICY, "activate")
        script = str(Path(__file__).with_name("camera_publisher.py"))
        command = [sys.executable, script, "--robot", ROBOT, "--duration", str(seconds), "--listeners", str(1 + record)]
        cameras = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while cameras.poll() is None:
            processes.turn()
        output, _ = cameras.communicate()
        processes.spin(1.1)  # one more /diagnostics
        processes.transition(POLICY, "deactivate")
    finally:
        processes.stop()
        observer.destroy_node()
        rclpy.try_shutdown()
    jitter = jitter_ms(observer.stamps)
    figures = Run(record, float(np.median(jitter)), float(np.percentile(jitter, 99)), len(jitter))
    if not record:
        return figures
    published = json.loads(output.splitlines()[-1])["published"]
    with Bag(target) as bag:
        frames = [topic for topic in bag.topics.values() if topic.kind.endswith("/Image")]
        size_mib = sum(path.stat().st_size for path in target.iterdir()) / 2**20
        span_s = (bag.end_ns - bag.start_ns) * 1e-9
    shutil.rmtree(target)
    return Run(
        record,
        figures.p50_ms,
        figures.p99_ms,
        figures.ticks,
        dropped=observer.notes.get("recording_dropped", "unknown"),
        unheard=observer.notes.get("recording_unheard", "unknown"),
        frames=sum(topic.messages for topic in frames),
        published=sum(published[topic.name.lstrip("/")] for topic in frames),
        mib_s=size_mib / span_s,
    )


def interval(recorded: np.ndarray, plain: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians and its 95 % percentile bootstrap interval over runs."""
    random = np.random.default_rng(0)

    def medians(values: np.ndarray) -> np.ndarray:
        return np.median(random.choice(values, (RESAMPLES, len(values))), axis=1)

    low, high = np.percentile(medians(recorded) / medians(plain), (2.5, 97.5))
    return float(np.median(recorded) / np.median(plain)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="runs of each kind")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    chosen = options(parser)
    model = fake_model(latency_ms=80.0, horizon=32, num_steps=10)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="prove-recording-") as folder, Progress() as progress:
        # off on, on off, off on, ...: what drifts on the machine meets both alike
        order = [bool((i + 1) // 2 % 2) for i in range(2 * chosen.pairs)]
        for record in progress.track(order, description="runs"):
            runs.append(run(model, chosen.seconds, Path(folder), record=record))
    on, off = [r for r in runs if r.recorded], [r for r in runs if not r.recorded]
    rows: list[tuple[str, str, bool | None]] = []
    for name in ("p50_ms", "p99_ms"):
        recorded, plain = (np.array([getattr(r, name) for r in some]) for some in (on, off))
        ratio, low, high = interval(recorded, plain)
        figure = f"{np.median(recorded):.3f} / {np.median(plain):.3f} ms = {ratio:.3f}, 95 % [{low:.3f}, {high:.3f}]"
        rows.append((f"|period - 20 ms| {name[:3]}, recorded / not (interval holds 1)", figure, low <= 1.0 <= high))
    frames, published = sum(r.frames for r in on), sum(r.published for r in on)
    share = frames / published
    rows += [
        ("runs of each kind; ticks in each", f"{len(on)}; {min(r.ticks for r in runs)} or more", None),
        ("messages dropped by the recorder", ", ".join(r.dropped for r in on), all(r.dropped == "0" for r in on)),
        ("messages sent before the recorder heard the publisher", ", ".join(r.unheard for r in on), None),
        ("frames recorded, of those published", f"{frames} of {published} = {share:.2%}", share >= 0.99),
        ("written", f"{np.median([r.mib_s for r in on]):.1f} MiB/s", None),
    ]
    title = f"recording: {chosen.pairs} runs of {chosen.seconds:.0f} s with and as many without it, interleaved"
    return conclude(title, rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
