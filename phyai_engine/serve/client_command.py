"""``phyai client``: a robot's view of a server, with made-up observations."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.errors import EngineError, RefusalError
from phyai_engine.serve.client import Answered
from phyai_engine.serve.keys import key_name, key_pair
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.serve.remote_policy import RemotePolicy
from phyai_engine.timing import Window
from phyai_engine.types import U8

STAGES = ("serialise", "network", "queue", "of it, for more rows", "inference", "round trip")
_START_S = 30.0
_FRAMES = 4  # sets of camera frames, used in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """As the command line takes them. :param frame: shape of the camera frames."""

    endpoint: str
    model: str
    robot: str
    robot_id: str = ""
    key: Path | None = None
    server_key: Path | None = None
    n: int = 100
    hz: float = 5.0
    deadline_ms: float = 1000.0
    frame: tuple[int, int, int] = (480, 640, 3)
    jpeg_quality: int = 0


@dataclass(slots=True)
class Tally:
    """What became of the requests; durations in ms."""

    stages: dict[str, Window] = field(default_factory=lambda: {name: Window(1 << 20) for name in STAGES})
    failures: Counter[str] = field(default_factory=Counter)
    answered: int = 0

    def add(self, answer: Answered) -> None:
        """An answer."""
        timings = answer.chunk.timings
        figures = (
            timings.serialise_ms,
            timings.network_ms,
            timings.queue_ms,
            timings.batch_ms,
            timings.inference_ms,
            answer.round_trip_ms,
        )
        self.answered += 1
        for name, figure in zip(STAGES, figures, strict=True):
            self.stages[name].add(figure)


def client_command(options: ClientOptions) -> int:
    """Ask, print, and say whether all was answered: 0, or 1.

    :raises ConfigError: a file or an option is wrong. :raises EngineError: the server does not accept this robot.
    """
    robot = load_robot(resolve("robots", options.robot))
    keys = key_pair(options.key, options.server_key)
    remote = RemoteEngine(
        endpoint=options.endpoint,
        model=options.model,
        robot_id=options.robot_id or key_name(options.key),
        keys=keys,
        jpeg_quality=options.jpeg_quality,
    )
    console, tally = Console(highlight=False, markup=False), Tally()
    with RemotePolicy(robot, remote, start_timeout_s=_START_S) as policy:
        hello = policy.hello
        assert hello is not None  # inside the session
        console.print(f"{options.endpoint}: {hello.note}; H {hello.horizon}, step {hello.dt_s} s")
        ask_all(policy, robot, options, tally)
        counters = policy.counters
    show(console, tally, counters)
    return 0 if tally.answered == options.n else 1


def ask_all(policy: RemotePolicy, robot: RobotConfig, options: ClientOptions, tally: Tally) -> None:
    """``n`` requests, one after the other, at their rate."""
    state = np.zeros(len(robot.state))
    due_s = time.monotonic()
    for i, frames in zip(range(options.n), _frames(robot, options.frame), strict=False):
        time.sleep(max(0.0, due_s - time.monotonic()))
        due_s = max(time.monotonic(), due_s + 1.0 / options.hz) if options.hz else 0.0
        try:
            tally.add(policy.infer(frames, state, "measure", seed=i, deadline_s=options.deadline_ms * 1e-3))
        except RefusalError as error:
            tally.failures[error.code.name.lower()] += 1
        except EngineError as error:
            tally.failures[error.what] += 1


def _frames(robot: RobotConfig, shape: tuple[int, int, int]) -> Iterator[Mapping[str, U8]]:
    draw = np.random.default_rng(0)
    sets = [
        {camera.name: draw.integers(0, 256, shape, dtype=np.uint8) for camera in robot.cameras} for _ in range(_FRAMES)
    ]
    while True:
        yield from sets


def show(console: Console, tally: Tally, counters: Mapping[str, int]) -> None:
    """The table, and what went wrong."""
    table = Table(title=f"{tally.answered} requests answered, ms", title_justify="left")
    table.add_column("stage")
    for heading in ("p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    for name, window in tally.stages.items():
        p = window.percentiles()
        table.add_row(name, f"{p.p50:.2f}", f"{p.p95:.2f}", f"{p.p99:.2f}", f"{p.max:.2f}")
    console.print(table)
    sent = counters.get("submitted", 0)
    if sent:
        console.print(f"{counters.get('bytes_sent', 0) / sent / 1024:.1f} KiB per request; {_words(counters)}")
    for reason, count in tally.failures.items():
        console.print(f"not answered: {count} x {reason}", style="red")


def _words(counters: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counters.items()) if name != "bytes_sent")
