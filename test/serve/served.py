"""`phyai serve` in a process of its own, and sockets that speak to it as they like."""

from __future__ import annotations

import contextlib
import os
import signal
import socket as stdlib_socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml
import zmq

from phyai_engine.serve import protocol as wire
from phyai_engine.serve.auth import secure_client
from phyai_engine.serve.keys import RobotKeys

ROOT = Path(__file__).resolve().parents[2]
START_S = 40.0
SERVE = "import sys; sys.path[:0] = [{root!r}]; {before}\nfrom phyai_engine.cli import main; main()"


def free_port() -> int:
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A server of the fake model, for arm7, on a TCP port that it keeps when it is started again.

    :param options: of the fake model. :param config: further keys of the server's file. :param before: Python to run
        first in the server's process.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        *,
        robot: str = "arm7",
        model: Mapping[str, Any] | None = None,
        served: Mapping[str, Any] | None = None,
        before: str = "",
        **config: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given = {"horizon": 16, "action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], "image_size": 16}
        content = {"family": "fake", "normalisation": {"kind": "limits"}, "options": {**given, **(options or {})}}
        model_file = folder / "model.yaml"
        model_file.write_text(yaml.safe_dump(model or content), encoding="utf-8")
        self.port = free_port()
        self.endpoint = f"tcp://127.0.0.1:{self.port}"
        self.model_file = model_file
        entry = {"model": str(model_file), "robot": robot, "buckets": [1, 2, 4], **(served or {})}
        self._file, self._log = folder / "serve.yaml", folder / "serve.log"
        self._file.write_text(
            yaml.safe_dump({"endpoint": self.endpoint, "models": {"m": entry}, **config}), encoding="utf-8"
        )
        self._script = SERVE.format(root=str(ROOT), before=before)
        self.process: subprocess.Popen[str]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", self._script, "serve", "--config", str(self._file)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        alarm = threading.Timer(START_S, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        assert line.startswith("ready"), f"{line!r}; its log:\n{self.log()}"

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def tree(self) -> list[psutil.Process]:
        """Front and replicas."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def rss_bytes(self) -> int:
        return sum(p.memory_info().rss for p in self.tree())

    def kill(self) -> None:
        """SIGKILL to the front; its replicas end with it."""
        family = self.tree()
        os.kill(self.process.pid, signal.SIGKILL)
        left = psutil.wait_procs(family, timeout=5.0)[1]
        self.process.wait(5.0)
        assert not left, f"{left} outlived the server"
        assert self.process.stdout is not None
        self.process.stdout.close()

    def terminate(self, seconds: float = 15.0) -> int:
        """SIGTERM, as an operator does; the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def close(self) -> None:
        """Nothing is left. Idempotent."""
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class RawRobot:
    """A DEALER socket that sends whatever it is told."""

    def __init__(self, endpoint: str, keys: RobotKeys | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if keys is not None:
            secure_client(self.socket, keys)
        self.socket.connect(endpoint)

    def send(self, message: wire.Message, arrays: Any = None) -> None:
        self.socket.send_multipart(wire.encode(message, arrays))

    def send_frames(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def messages(self, seconds: float) -> Iterator[wire.Message]:
        """What comes, but heartbeats."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0 and self.socket.poll(int(left_s * 1e3) + 1):
            message, _ = wire.decode(self.socket.recv_multipart())
            if not isinstance(message, wire.Heartbeat):
                yield message

    def next(self, seconds: float = 5.0) -> Any:
        """The next message; None for silence."""
        return next(self.messages(seconds), None)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()
