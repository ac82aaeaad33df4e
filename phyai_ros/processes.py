"""Nodes as processes of their own, the calls to them, and the turns of our own executor in between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from std_srvs.srv import Trigger

from phyai_engine.errors import EngineTimeoutError, PhyaiError

WAIT_S = 60.0
TRANSITION_S = 180.0
TRANSITIONS = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
}


class Processes:
    """Starts nodes, talks to them through ``node``, ends them.

    :param logs: folder of their output, ``NAME.log``.
    :param on_turn: called in every turn of the executor.
    """

    def __init__(self, node: Node, logs: Path, on_turn: Callable[[], None] = lambda: None) -> None:
        self.exit_codes: dict[str, int] = {}
        """Name -> exit code, filled by :meth:`end` and :meth:`stop`."""
        self._node, self._logs, self._on_turn = node, logs, on_turn
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(node)

    def start(self, name: str, module: str, params_file: str = "", **parameters: object) -> None:
        """Start ``module`` as the node ``name``; a parameter given here wins over the file's."""
        command = [sys.executable, "-m", module, "--ros-args", "-r", f"__node:={name}"]
        if params_file:
            command += ["--params-file", params_file]
        for key, value in parameters.items():
            command += ["-p", f"{key}:={value}"]
        with self._log(name).open("wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches us, who then stop the processes in order.
            self._running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def stop(self) -> None:
        """SIGINT to every process, bounded; SIGKILL to what does not end."""
        for name in list(self._running):
            self.end(name)
        self._executor.shutdown(timeout_sec=1.0)

    def end(self, name: str) -> None:
        """SIGINT to one process, bounded; SIGKILL if it does not end."""
        process = self._running.pop(name)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            self.exit_codes[name] = process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            self.exit_codes[name] = process.wait(timeout=5.0)

    def imports_torch(self, name: str) -> bool:
        """True when torch's library is mapped into the process (the node must never load it)."""
        pid = self._running[name].pid
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")

    # ---- time -----------------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float = 0.05) -> None:
        """One callback, or none within ``timeout_s``.

        :raises PhyaiError: a process ended.
        """
        self._executor.spin_once(timeout_sec=timeout_s)
        for name, process in self._running.items():
            if process.poll() is not None:
                raise PhyaiError(f"{name} ended with exit code {process.returncode}", do=self.last_lines())
        self._on_turn()

    def spin(self, seconds: float) -> None:
        """Turn for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Turn until ``condition`` holds.

        :raises EngineTimeoutError: it does not within ``seconds``.
        :raises PhyaiError: a process ended meanwhile.
        """
        end = time.monotonic() + seconds
        while not condition():
            self.turn()
            if time.monotonic() > end:
                raise EngineTimeoutError(f"no {what}", got=f"nothing within {seconds:.0f} s", do=self.last_lines())

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(
        self, kind: Any, name: str, request: Any, seconds: float, calling: Callable[[], None] = lambda: None
    ) -> Any:
        """The answer of a service.

        :param calling: called at the moment of the call, when the service has been found.
        :raises EngineTimeoutError: no such service, or no answer within ``seconds``.
        """
        client = self._node.create_client(kind, name)
        try:
            self.until(client.service_is_ready, WAIT_S, f"service {name}")
            calling()
            future = client.call_async(request)
            self.until(future.done, seconds, f"answer of {name}")
            return future.result()
        finally:
            self._node.destroy_client(client)

    def set_parameter(self, name: str, parameter: str, value: str | float) -> None:
        """Change a parameter of node ``name``.

        :raises PhyaiError: it refuses, with its reason.
        """
        request = SetParameters.Request(parameters=[Parameter(parameter, value=value).to_parameter_msg()])
        (result,) = self.call(SetParameters, f"{name}/set_parameters", request, 5.0).results
        if not result.successful:
            raise PhyaiError(f"{name} refuses the parameter {parameter}", got=result.reason)

    def trigger(self, name: str, service: str, calling: Callable[[], None] = lambda: None) -> Any:
        """The answer of a Trigger service of node ``name``."""
        return self.call(Trigger, f"{name}/{service}", Trigger.Request(), 5.0, calling)

    def transition(self, name: str, label: str) -> float:
        """A lifecycle transition of node ``name``: ``configure``, ``activate`` or ``deactivate``. Seconds it took.

        :raises PhyaiError: the node refused it, or does not answer; with its last lines.
        """
        request = ChangeState.Request(transition=Transition(id=TRANSITIONS[label]))
        self._meet(name)
        began = time.monotonic()
        if not self.call(ChangeState, f"{name}/change_state", request, TRANSITION_S).success:
            raise PhyaiError(f"{label} of {name} failed", do=self.last_lines())
        return time.monotonic() - began

    def _meet(self, name: str) -> None:
        """Wait until node ``name`` answers. What a killed node of that name left behind looks ready, and never does.

        :raises EngineTimeoutError: it does not answer.
        """
        end = time.monotonic() + WAIT_S
        while True:
            try:
                self.call(GetState, f"{name}/get_state", GetState.Request(), 1.0)
                return
            except EngineTimeoutError:
                if time.monotonic() > end:
                    raise

    def last_lines(self) -> str:
        """The end of every log."""
        lines = []
        for name in self._running:
            tail = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            lines.append(f"Last lines of {name}.log:\n  " + "\n  ".join(tail))
        return "\n".join(lines)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"
