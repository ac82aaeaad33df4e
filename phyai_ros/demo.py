"""`make demo`: a simulated robot driven over real ROS 2 by separate processes, watched, disturbed, stopped, reported.

Each claim the demo makes is an invariant checked from what was heard on the wire; one that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rich.console import Console
from rich.live import Live
from rich.table import Table
from std_srvs.srv import Trigger

from phyai_engine.config import config_dir, load_robot, resolve
from phyai_engine.errors import EngineTimeoutError, PhyaiError
from phyai_engine.replay.report import write_report, write_summary
from phyai_engine.types import SafetyState
from phyai_ros.demo_checks import check
from phyai_ros.watch import Watch

POLICY, SIM = "policy_node", "sim_robot"
WAIT_S = 60.0


class Scenario:
    """Runs the processes and the story; :attr:`watch` holds what was heard."""

    def __init__(self, node: Node, watch: Watch, out: Path, robot: str, model: str, console: Console) -> None:
        self.watch = watch
        self.exit_codes: dict[str, int] = {}
        self._node, self._out, self._robot, self._model, self._console = node, out, robot, model, console
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(node)
        self._live: Live | None = None
        self._phase = ""
        self._line_due_s = 0.0

    def run(self, seconds: float) -> None:
        """The whole story: about ``seconds`` of motion, a camera dropout, an abort, a re-arm, a stop.

        :raises PhyaiError: a process did not come up or did not answer.
        """
        watch, share = self.watch, seconds / 4
        with ExitStack() as stack:
            if self._console.is_terminal:
                self._live = stack.enter_context(Live(self._view(), console=self._console, refresh_per_second=4))
            self._phase = "starting the simulated robot and the policy node"
            self._start(SIM, "phyai_ros.sim_node", robot=self._robot)
            params = str(config_dir() / "profiles" / "demo.yaml")
            self._start(
                POLICY,
                "phyai_ros.policy_node",
                params,
                robot=self._robot,
                model=self._model,
                instruction="reach the goal",
            )
            self.until(lambda: bool(watch.frames_of("front")), WAIT_S, "the first camera frame")
            self._phase = "configure: loading the model and warming up"
            self._transition(Transition.TRANSITION_CONFIGURE)
            self._transition(Transition.TRANSITION_ACTIVATE)
            self.until(lambda: self._is(SafetyState.RUNNING), WAIT_S, "the first action")
            self._play("the policy drives the robot", 2 * share)
            self._drop_camera("wrist")
            self._play("recovered, driving again", share)
            self._abort()
            self._rearm()
            self._play("re-armed, driving again in a new epoch", share)
            self._phase = "deactivate: a controlled stop"
            watch.event("stop", "deactivate")
            self._transition(Transition.TRANSITION_DEACTIVATE)
            self._spin(0.5)
            self._phase = "done"
            self._refresh()

    def stop(self) -> None:
        """SIGINT to both processes, bounded; SIGKILL to what does not end. Fills :attr:`exit_codes`."""
        for name, process in self._processes.items():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                self.exit_codes[name] = process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                self.exit_codes[name] = process.wait(timeout=5.0)
        self._executor.shutdown(timeout_sec=1.0)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Spin until ``condition`` holds.

        :raises EngineTimeoutError: it does not within ``seconds``.
        :raises PhyaiError: a process ended meanwhile.
        """
        end = time.monotonic() + seconds
        while not condition():
            self._spin_once()
            if time.monotonic() > end:
                raise EngineTimeoutError(f"no {what}", got=f"nothing within {seconds:.0f} s", do=self._logs())

    def imports_torch(self, name: str) -> bool:
        """True when torch's library is mapped into the process (the node must never load it)."""
        pid = self._processes[name].pid
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")

    # ---- the acts -------------------------------------------------------------------------------------------------

    def _play(self, phase: str, seconds: float) -> None:
        self._phase = phase
        self._spin(seconds)

    def _drop_camera(self, camera: str) -> None:
        watch = self.watch
        self._phase = f"camera {camera} is switched off"
        watch.event("camera", f"{camera} off")
        self._set_drop(camera, 1.0)
        self.until(lambda: self._is(SafetyState.HOLDING), 10.0, "hold after the camera dropout")
        self._spin(1.0)
        watch.event("camera", f"{camera} on")
        self._set_drop(camera, 0.0)
        self.until(lambda: self._is(SafetyState.RUNNING), 10.0, "recovery after the camera came back")
        watch.event("note", "recovered")

    def _abort(self) -> None:
        watch = self.watch
        self._phase = "~/abort"
        watch.aborted_epoch = watch.epoch
        # Counted from the moment of the call, not from looking the service up.
        response = self._trigger("abort", lambda: watch.event("abort", "~/abort called"))
        watch.abort_reply_s = watch.now_s - watch.events[-1].t_s
        watch.event("note", f"abort answered after {watch.abort_reply_s * 1e3:.1f} ms: {response.message}")
        self.until(lambda: self._is(SafetyState.LATCHED), 5.0, "latched state after the abort")
        self._spin(1.5)

    def _rearm(self) -> None:
        self._phase = "~/rearm"
        response = self._trigger("rearm")
        end = time.monotonic() + 10.0
        while not response.success and time.monotonic() < end:  # refused without a fresh observation, rightly
            self.watch.event("note", f"re-arm refused: {response.message}")
            self._spin(0.2)
            response = self._trigger("rearm")
        if not response.success:
            raise PhyaiError("re-arm was refused", got=response.message)
        self.watch.event("rearm", response.message)
        self.until(lambda: self._is(SafetyState.RUNNING), 10.0, "motion after the re-arm")

    # ---- processes and services -----------------------------------------------------------------------------------

    def _start(self, name: str, module: str, params_file: str = "", **parameters: str) -> None:
        command = [sys.executable, "-m", module, "--ros-args", "-r", f"__node:={name}"]
        if params_file:
            command += ["--params-file", params_file]
        for key, value in parameters.items():
            command += ["-p", f"{key}:={value}"]
        log = (self._out / f"{name}.log").open("wb")
        # A session of its own: Ctrl-C in the terminal reaches the demo, which then stops the processes in order.
        self._processes[name] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        log.close()

    def _call(
        self, kind: Any, name: str, request: Any, seconds: float, calling: Callable[[], None] = lambda: None
    ) -> Any:
        client = self._node.create_client(kind, name)
        try:
            self.until(client.service_is_ready, WAIT_S, f"service {name}")
            calling()
            future = client.call_async(request)
            self.until(future.done, seconds, f"answer of {name}")
            return future.result()
        finally:
            self._node.destroy_client(client)

    def _transition(self, number: int) -> None:
        request = ChangeState.Request(transition=Transition(id=number))
        began = time.monotonic()
        response = self._call(ChangeState, f"{POLICY}/change_state", request, 180.0)
        label = {1: "configure", 3: "activate", 4: "deactivate"}[number]
        if not response.success:
            raise PhyaiError(f"{label} failed", do=self._logs())
        self.watch.event("lifecycle", f"{label} took {time.monotonic() - began:.3f} s")

    def _trigger(self, service: str, calling: Callable[[], None] = lambda: None) -> Any:
        return self._call(Trigger, f"{POLICY}/{service}", Trigger.Request(), 5.0, calling)

    def _set_drop(self, camera: str, probability: float) -> None:
        value = ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=probability)
        request = SetParameters.Request(parameters=[Parameter(name=f"drop.{camera}", value=value)])
        self._call(SetParameters, f"{SIM}/set_parameters", request, 5.0)

    def _is(self, state: SafetyState) -> bool:
        return self.watch.status is not None and self.watch.status.safety_state == state

    def _logs(self) -> str:
        lines = []
        for name in self._processes:
            tail = (self._out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            lines.append(f"Last lines of {name}.log:\n  " + "\n  ".join(tail))
        return "\n".join(lines)

    # ---- the view -------------------------------------------------------------------------------------------------

    def _spin(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._spin_once()

    def _spin_once(self) -> None:
        self._executor.spin_once(timeout_sec=0.05)
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise PhyaiError(f"{name} ended with exit code {process.returncode}", do=self._logs())
        self._refresh()

    def _refresh(self) -> None:
        now = time.monotonic()
        if now < self._line_due_s:
            return
        if self._live is not None:
            self._line_due_s = now + 0.25
            self._live.update(self._view())
        else:
            self._line_due_s = now + 1.0
            self._console.print(self.watch.line(self._phase), highlight=False)

    def _view(self) -> Table:
        table = Table(title=f"phyai demo · {self._robot} · {self._model}", min_width=78, show_header=False)
        table.add_column(style="bold")
        table.add_column()
        table.add_row("now", self._phase)
        for key, value in self.watch.rows():
            table.add_row(key, value)
        return table


def main(args: list[str] | None = None) -> int:
    """`python -m phyai_ros.demo`; exit code 0 when every invariant held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of report, record and logs")
    parser.add_argument("--robot", default="metaworld_sawyer", help="robot file or name")
    parser.add_argument("--model", default="pi05_demo", help="model file or name")
    parser.add_argument("--seconds", type=float, default=20.0, help="about this much motion")
    options = parser.parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    robot = load_robot(resolve("robots", options.robot))
    rclpy.init()
    node = Node("demo")
    watch = Watch(node, robot, POLICY)
    scenario = Scenario(node, watch, options.out, options.robot, options.model, console)
    torch_in_node = False
    error = ""
    try:
        scenario.run(options.seconds)
        torch_in_node = scenario.imports_torch(POLICY)
    except (PhyaiError, KeyboardInterrupt) as caught:
        error = str(caught) or "interrupted"
    finally:
        scenario.stop()
        node.destroy_node()
        rclpy.try_shutdown()
    return _finish(console, watch, options.out, scenario.exit_codes, torch_in_node, error)


def _finish(
    console: Console, watch: Watch, out: Path, exit_codes: dict[str, int], torch_in_node: bool, error: str
) -> int:
    record = watch.record(check(watch, exit_codes, torch_in_node, error))
    record.save(out / "record.json")
    write_summary(record, out / "summary.json")
    write_report(record, out / "report.html")
    table = Table(title="invariants", show_header=False)
    for invariant in record.invariants:
        mark = "[green]held[/]" if invariant.ok else "[red]BROKEN[/]"
        table.add_row(mark, invariant.name, invariant.detail)
    console.print(table)
    if "random weights" in record.model:
        console.print(f"[yellow]Model: {record.model}. What is shown is the path, not a skill.[/]")
    console.print(f"report: {out / 'report.html'}   record: {out / 'record.json'}")
    return 0 if all(invariant.ok for invariant in record.invariants) else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # rclpy's threads may outlive a broken run; everything is written
