"""A server, robots and a stall monitor as processes, and what they saw."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fleet_robots import FIELDS, OUTCOMES

from phyai_engine.config import read_yaml, resolve
from phyai_engine.serve.server import server_status

HERE = Path(__file__).resolve().parent
ROLES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PROCESSES = 2  # that the robots are spread over
_SERVE = "import sys; sys.path.insert(0, {here!r}); from fleet_queues import serve; serve(*sys.argv[1:])"


def fixed_latency(*, cameras: int = 0, **options: float) -> dict[str, Any]:
    """Model file: 22 ms, and 1 ms for each further row."""
    chosen = {"latency_ms": 22.0, "row_ms": 1.0, "num_steps": 2, "horizon": 8, "action_dim": 16, **options}
    if cameras:
        chosen |= {"cameras": list(ROLES[:cameras]), "image_size": 224}
    return {"family": "fake", "normalisation": {"kind": "limits"}, "options": chosen}


@dataclass
class Run:
    """What the robots saw; one entry per request in each array.

    :param gaps: [n, 2] monotonic ns, of the stall monitor.
    :param memory: process -> [n, 3] requests done, RSS, descriptors.
    """

    columns: dict[str, Any]
    gaps: Any
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def robot(self) -> Any:
        """[n]: whose."""
        return self.columns["robot"]

    def total_ms(self) -> Any:
        """[n]: from asking to the answer or refusal; inf where none came."""
        asked, answered = self.columns["asked_ns"], self.columns["answered_ns"]
        return np.where(answered > 0, (answered - asked) / 1e6, np.inf)

    def answered(self) -> Any:
        """[n] bool: with a chunk."""
        return self.columns["outcome"] == OUTCOMES.index("answered")

    def missed(self, deadline_ms: float) -> Any:
        """[n] bool: no chunk within the deadline."""
        return ~(self.answered() & (self.total_ms() <= deadline_ms))

    def stalled(self) -> Any:
        """[n] bool: the monitor saw a gap between asking and 150 ms later."""
        asked = self.columns["asked_ns"]
        hit = np.zeros(len(asked), bool)
        for begin, end in self.gaps:
            hit |= (asked < end) & (asked + 150e6 > begin)
        return hit

    def worst_gap_ms(self) -> float:
        """Of the monitor's."""
        return float(np.max(self.gaps[:, 1] - self.gaps[:, 0]) / 1e6) if len(self.gaps) else 0.0

    def transport_ms(self) -> Any:
        """[answered]: what is neither queue nor inference."""
        c, answered = self.columns, self.answered()
        return (self.total_ms() - c["queue_ms"] - c["inference_ms"])[answered]

    def rate_hz(self) -> float:
        """Answers per second."""
        answered = self.columns["answered_ns"]
        return float(len(answered) / ((answered.max() - self.columns["asked_ns"].min()) / 1e9))

    def words(self) -> str:
        """Outcomes and percentiles."""
        kinds = [f"{name} {n}" for i, name in enumerate(OUTCOMES) if (n := int((self.columns["outcome"] == i).sum()))]
        if not self.answered().any():
            return ", ".join(kinds)
        p50, p99, worst = np.percentile(self.total_ms()[self.answered()], (50, 99, 100))
        rows = self.columns["rows"][self.answered()].mean()
        return f"{', '.join(kinds)}; p50 {p50:.1f}, p99 {p99:.1f}, max {worst:.1f} ms, {rows:.1f} rows a batch"


class Fleet:
    """A server with one model; a context manager that ends it.

    :param queue: ``deadline`` is the product's; fleet_queues.py has the others.
    """

    def __init__(
        self,
        model: dict[str, Any],
        buckets: Sequence[int],
        *,
        robot: str = "arm7",
        queue: str = "deadline",
        model_file: str = "",
        **served: Any,
    ) -> None:
        self._left = contextlib.ExitStack()
        self.folder = Path(self._left.enter_context(tempfile.TemporaryDirectory()))
        (self.folder / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
        self._robot = self._robot_file(robot, bool(model.get("options", {}).get("cameras")) or bool(model_file))
        self.endpoint = f"tcp://127.0.0.1:{20_000 + os.getpid() % 20_000}"
        one = {"model": model_file or str(self.folder / "model.yaml"), "robot": self._robot, "buckets": list(buckets)}
        config = {"endpoint": self.endpoint, "models": {"model": {**one, **served}}}
        (self.folder / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-c", _SERVE.format(here=str(HERE)), str(self.folder / "serve.yaml"), queue]
        log = self._left.enter_context((self.folder / "log").open("w", encoding="utf-8"))
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def __enter__(self) -> Fleet:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith("ready"):
            said = self.log()
            self.__exit__()
            raise RuntimeError(f"the server did not start: {said[-2000:]}")
        return self

    def __exit__(self, *error: object) -> None:
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(15.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        if error and error[0] is not None:
            print(self.log()[-3000:], file=sys.stderr)
        assert self._server.stdout is not None
        self._server.stdout.close()
        self._left.close()

    def log(self) -> str:
        """What the server wrote."""
        return (self.folder / "log").read_text(encoding="utf-8") if (self.folder / "log").exists() else ""

    def drive(self, *, robots: int, sample_s: float = 0.0, **options: float) -> Run:
        """Run robots against it, with the monitor beside them."""
        with contextlib.ExitStack() as stack:
            monitor = self._start(stack, [str(HERE / "stall_monitor.py"), str(self.folder / "gaps.npy")])
            crews, first = [], 0
            for index in range(min(PROCESSES, robots)):
                count = robots // PROCESSES + (index < robots % PROCESSES) if robots >= PROCESSES else robots
                crew = [str(HERE / "fleet_robots.py"), self.endpoint, "model", "--robots", str(count)]
                crew += ["--first", str(first), "--robot", self._robot, "--out", str(self.folder / f"{index}.npz")]
                share = {**options, **({"requests": options["requests"] // PROCESSES} if "requests" in options else {})}
                crew += [word for name, value in share.items() for word in (f"--{name.replace('_', '-')}", str(value))]
                crews.append(self._start(stack, crew))
                first += count
            start = f"{time.monotonic_ns() + 500_000_000}\n"
            for crew_process in crews:
                assert crew_process.stdin is not None
                crew_process.stdin.write(start)
                crew_process.stdin.flush()
            memory = self._sample(crews, sample_s) if sample_s else {}
            for crew_process in crews:
                assert crew_process.wait() == 0, "a crew of robots failed"
            assert monitor.stdin is not None
            monitor.stdin.close()
            monitor.wait()
        logs = [np.load(self.folder / f"{index}.npz")["log"] for index in range(len(crews))]
        columns = dict(zip(FIELDS, np.concatenate(logs).T, strict=True))
        return Run(columns, np.load(self.folder / "gaps.npy"), memory)

    def _start(self, stack: contextlib.ExitStack, arguments: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"{arguments[0]} did not start: {self.log()}"
        return process

    def _sample(self, crews: list[subprocess.Popen[str]], every_s: float) -> dict[str, Any]:
        import psutil

        front = psutil.Process(self._server.pid)
        watched = {"front": front, "replica": front.children()[0]}
        samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in watched}
        while any(crew.poll() is None for crew in crews):
            done = float(self.status().get("model answered", "0"))
            for name, process in watched.items():
                samples[name].append((done, process.memory_info().rss, process.num_fds()))
            time.sleep(every_s)
        return {name: np.array(rows, dtype=np.float64) for name, rows in samples.items()}

    def status(self) -> dict[str, str]:
        """What the server says of itself."""
        return dict(server_status(self.endpoint, timeout_s=20.0))

    def _robot_file(self, robot: str, cameras: bool) -> str:
        """A robot without cameras, unless the model looks at them: the images would only cost time here."""
        if cameras:
            return robot
        plain = {key: value for key, value in read_yaml(resolve("robots", robot)).items() if key != "cameras"}
        path = self.folder / "robot.yaml"
        path.write_text(yaml.safe_dump(plain), encoding="utf-8")
        return str(path)
