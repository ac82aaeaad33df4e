"""The observer of evidence: a ROS node that listens, and the nodes that it started as processes.

Times are of the observer: from before it does something until the message is in its callback.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Observer:
    """Makes the ROS context; :meth:`close` ends the processes and then it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="prove-"))
        rclpy.init()
        self.node = Node("observer")
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self._started: list[subprocess.Popen[bytes]] = []

    def said(self) -> str:
        """What was heard last, for the message of a wait that was in vain."""
        return "nothing"

    def launch(self, *command: str, namespace: str = "", **parameters: Any) -> subprocess.Popen[bytes]:
        """A node as a process."""
        pairs = [item for key, value in parameters.items() for item in ("-p", f"{key}:={value}")]
        place = ["-r", f"__ns:=/{namespace}"] if namespace else []
        with (self.folder / "nodes.log").open("ab") as log:
            process = subprocess.Popen([sys.executable, *command, "--ros-args", *place, *pairs], stdout=log, stderr=log)
        self._started.append(process)
        return process

    def end_processes(self) -> list[int]:
        """SIGINT to all that run, SIGKILL to what does not end; their exit codes."""
        running = [process for process in self._started if process.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
        codes = []
        for process in running:
            try:
                codes.append(process.wait(timeout=15.0))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return codes

    def close(self) -> list[int]:
        """End everything; exit codes after SIGINT."""
        codes = self.end_processes()
        self.executor.shutdown()
        self.node.destroy_node()
        rclpy.try_shutdown()
        return codes

    # ---- time and calls -------------------------------------------------------------------------------------------

    def until(self, fact: Callable[[], Any], seconds: float = 10.0, what: str = "") -> None:
        """Spin until the fact holds.

        :raises AssertionError: it did not; with what was heard last.
        """
        end = time.monotonic() + seconds
        while not fact():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds} s: {what}; {self.said()}; {self.folder}")
            self.executor.spin_once(timeout_sec=0.02)

    def spin(self, seconds: float) -> None:
        """Let everything run."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.executor.spin_once(timeout_sec=min(0.02, left))

    def call(self, client: Any, request: Any, seconds: float = 10.0) -> Any:
        """The response of a service, within a bound."""
        self.until(client.service_is_ready, 30.0, f"service {client.srv_name}")
        future = client.call_async(request)
        self.until(future.done, seconds, f"answer of {client.srv_name}")
        return future.result()
