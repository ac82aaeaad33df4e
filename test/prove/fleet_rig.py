"""A server, robots and a stall monitor as processes, and what they saw."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
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
SLACK_S = 60.0  # beyond its time, for a process that drives robots to end
TICKS = os.sysconf("SC_CLK_TCK")
_SERVE = "import sys; sys.path.insert(0, {here!r}); from fleet_queues import serve; serve(*sys.argv[1:])"


def fixed_latency(*, cameras: int = 0, **options: float) -> dict[str, Any]:
    """Model file: 22 ms, and 1 ms for each further row."""
    chosen: dict[str, Any] = {
        "latency_ms": 22.0,
        "row_ms": 1.0,
        "num_steps": 2,
        "horizon": 8,
        "action_dim": 16,
        **options,
    }
    if cameras:
        chosen |= {"cameras": list(ROLES[:cameras]), "image_size": 224}
    return {"family": "fake", "normalisation": {"kind": "limits"}, "options": chosen}


@dataclass
class Run:
    """What the robots saw; one entry per request in each array.

    :param gaps: [n, 2] monotonic ns, of the stall monitor.
    :param memory: process -> [n, 3] requests done, RSS, descriptors.
    :param cores: processors that front, replicas and robots kept busy, on average.
    """

    columns: dict[str, Any]
    gaps: Any
    memory: dict[str, Any] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)

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

    def stages_ms(self) -> dict[str, Any]:
        """Name -> [answered]: they add up to the first, but for the wait for more rows, which is part of the queue."""
        c = {name: column[self.answered()] for name, column in self.columns.items()}
        return {
            "total": self.total_ms()[self.answered()],
            "serialise": c["serialise_ms"],
            "network": self.transport_ms() - c["serialise_ms"],
            "queue": c["queue_ms"],
            "for rows": c["batch_ms"],
            "inference": c["inference_ms"],
        }

    def seconds(self) -> float:
        """From the first question to the last."""
        asked = self.columns["asked_ns"]
        return float(np.ptp(asked)) / 1e9

    def busy(self) -> float:
        """Devices that computed at a time, on average: prefix and steps of every batch, counted once."""
        c, answered = self.columns, self.answered() & (self.columns["rows"] > 0)
        return float((c["device_ms"][answered] / c["rows"][answered]).sum()) / 1e3 / self.seconds()

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
    """A server with one model; a context manager that waits until it is ready, and ends it.

    :param queue: ``deadline`` is the product's; fleet_queues.py has the others. :param start_s: to get ready.
    """

    def __init__(
        self,
        model: dict[str, Any],
        buckets: Sequence[int],
        *,
        robot: str = "arm7",
        queue: str = "deadline",
        model_file: str = "",
        start_s: float = 600.0,
        **served: Any,
    ) -> None:
        self._start_s = start_s
        self._left = contextlib.ExitStack()
        self.folder = Path(self._left.enter_context(tempfile.TemporaryDirectory()))
        (self.folder / "model.yaml").write_text(yaml.safe_dump(model), encoding="utf-8")
        self._robot = self._robot_file(robot, bool(model.get("options", {}).get("cameras")) or bool(model_file))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        one = {"model": model_file or str(self.folder / "model.yaml"), "robot": self._robot, "buckets": list(buckets)}
        config = {"endpoint": self.endpoint, "models": {"model": {**one, **served}}}
        (self.folder / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-c", _SERVE.format(here=str(HERE)), str(self.folder / "serve.yaml"), queue]
        log = self._left.enter_context((self.folder / "log").open("w", encoding="utf-8"))
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def __enter__(self) -> Fleet:
        if not _line(self._server, self._start_s).startswith("ready"):
            said = self.log()
            self.__exit__()
            raise RuntimeError(f"the server did not start: {said[-2000:]}")
        until_s = time.monotonic() + self._start_s  # it is ready with its first replica
        while not (up := re.search(r"ready, (\d+) of (\d+)", self.status()["model"])) or up[1] != up[2]:
            if time.monotonic() > until_s:
                self.__exit__()
                raise RuntimeError(f"not every replica started: {self.status()['model']}")
            time.sleep(0.2)
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

    def drive(self, *, robots: int, crews: int = 2, sample_s: float = 0.0, **options: float) -> Run:
        """Run robots against it, with the monitor beside them.

        :param crews: processes that the robots are spread over. :param options: of fleet_robots.py.
        """
        crews = min(crews, robots)
        with contextlib.ExitStack() as stack:
            monitor = _started(stack, [str(HERE / "stall_monitor.py"), str(self.folder / "gaps.npy")])
            running = [self._crew(stack, index, robots, crews, options) for index in range(crews)]
            for process in (monitor, *running):  # they start side by side
                assert _line(process, SLACK_S) == "ready\n", f"robots or monitor did not start: {self.log()[-2000:]}"
            watched = {"front": [self._server.pid], "replicas": self._replicas()}
            before, began_s = {name: _cpu_s(pids) for name, pids in watched.items()}, time.monotonic()
            start = f"{time.monotonic_ns() + 500_000_000}\n"
            for crew in running:
                assert crew.stdin is not None
                crew.stdin.write(start)
                crew.stdin.flush()
            memory = self._sample(running, sample_s) if sample_s else {}
            bound_s = None if "requests" in options else options["seconds"] + SLACK_S
            said = [_line(crew, bound_s).split() for crew in running]
            took_s = time.monotonic() - began_s
            assert all(words[:1] == ["used"] for words in said), f"a crew of robots failed: {said}"
            cores = {name: (_cpu_s(pids) - before[name]) / took_s for name, pids in watched.items()}
            cores["robots"] = sum(float(words[1]) for words in said) / took_s
            assert monitor.stdin is not None
            monitor.stdin.close()
            monitor.wait(SLACK_S)
        logs = [np.load(self.folder / f"{index}.npz")["log"] for index in range(crews)]
        columns = dict(zip(FIELDS, np.concatenate(logs).T, strict=True))
        return Run(columns, np.load(self.folder / "gaps.npy"), memory, cores)

    def _crew(
        self, stack: contextlib.ExitStack, index: int, robots: int, crews: int, options: dict[str, float]
    ) -> subprocess.Popen[str]:
        """One of ``crews`` processes, with its share of the robots and of the requests."""
        first, last = robots * index // crews, robots * (index + 1) // crews
        command = [str(HERE / "fleet_robots.py"), self.endpoint, "model", "--robots", str(last - first)]
        command += ["--first", str(first), "--robot", self._robot, "--out", str(self.folder / f"{index}.npz")]
        share = {**options, **({"requests": options["requests"] // crews} if "requests" in options else {})}
        command += [word for name, value in share.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return _started(stack, command)

    def _replicas(self) -> list[int]:
        """Their processes, as the server told when each was ready."""
        return [int(pid) for pid in re.findall(r"is ready, pid (\d+)", self.log())]

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


def _started(stack: contextlib.ExitStack, arguments: list[str]) -> subprocess.Popen[str]:
    """A Python process that ends with ``stack`` at the latest."""
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _line(process: subprocess.Popen[str], bound_s: float | None) -> str:
    """The next line that a process writes; "" where it ended, or was killed because it said nothing in time."""
    assert process.stdout is not None
    alarm = threading.Timer(bound_s or threading.TIMEOUT_MAX, process.kill)
    alarm.start()
    try:
        return process.stdout.readline()
    finally:
        alarm.cancel()


def _cpu_s(pids: Sequence[int]) -> float:
    """Processor time that these processes have used; one that is gone counts nothing."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
            total += (int(after_name[11]) + int(after_name[12])) / TICKS
    return total
