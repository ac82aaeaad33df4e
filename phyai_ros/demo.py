"""`make demo`: a simulated robot driven over real ROS 2 by separate processes, watched, disturbed, stopped, reported.

Each claim the demo makes is an invariant checked from what was heard on the wire; one that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import rclpy
from rclpy.node import Node
from rich.console import Console
from rich.live import Live
from rich.table import Table

from phyai_engine.config import config_dir, load_robot, resolve
from phyai_engine.errors import PhyaiError
from phyai_engine.replay.report import write_report, write_summary
from phyai_engine.types import SafetyState
from phyai_ros.demo_checks import check
from phyai_ros.processes import WAIT_S, Processes
from phyai_ros.watch import Watch

POLICY, SIM = "policy_node", "sim_robot"


class Scenario:
    """Runs the processes and the story; :attr:`watch` holds what was heard.

    :param record: folder that the policy node records into; None for no recording.
    """

    def __init__(
        self, node: Node, watch: Watch, out: Path, robot: str, model: str, console: Console, record: Path | None = None
    ) -> None:
        self.watch = watch
        self.processes = Processes(node, out, self._refresh)
        self._robot, self._model, self._console, self._record = robot, model, console, record
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
            self._start()
            self.processes.until(lambda: bool(watch.sensors.arrivals("front")), WAIT_S, "the first camera frame")
            self._phase = "configure: loading the model and warming up"
            self._transition("configure")
            self._transition("activate")
            self._until(SafetyState.RUNNING, WAIT_S, "the first action")
            self._play("the policy drives the robot", 2 * share)
            self._drop_camera("wrist")
            self._play("recovered, driving again", share)
            self._abort()
            self._rearm()
            self._play("re-armed, driving again in a new epoch", share)
            self._phase = "deactivate: a controlled stop"
            watch.event("stop", "deactivate")
            self._transition("deactivate")
            self.processes.spin(0.5)
            self._phase = "done"
            self._refresh()

    # ---- the acts -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.processes.start(SIM, "phyai_ros.sim_node", robot=self._robot)
        self.processes.start(
            POLICY,
            "phyai_ros.policy_node",
            str(config_dir() / "profiles" / "demo.yaml"),
            robot=self._robot,
            model=self._model,
            instruction="reach the goal",
            **({} if self._record is None else {"record": self._record.absolute()}),
        )

    def _play(self, phase: str, seconds: float) -> None:
        self._phase = phase
        self.processes.spin(seconds)

    def _drop_camera(self, camera: str) -> None:
        watch = self.watch
        self._phase = f"camera {camera} is switched off"
        watch.event("camera", f"{camera} off")
        self._set_drop(camera, 1.0)
        self._until(SafetyState.HOLDING, 10.0, "hold after the camera dropout")
        self.processes.spin(1.0)
        watch.event("camera", f"{camera} on")
        self._set_drop(camera, 0.0)
        self._until(SafetyState.RUNNING, 10.0, "recovery after the camera came back")
        watch.event("note", "recovered")

    def _abort(self) -> None:
        watch = self.watch
        self._phase = "~/abort"
        watch.aborted_epoch = watch.epoch
        # Counted from the moment of the call, not from looking the service up.
        response = self.processes.trigger(POLICY, "abort", lambda: watch.event("abort", "~/abort called"))
        watch.abort_reply_s = watch.now_s - watch.events[-1].t_s
        watch.event("note", f"abort answered after {watch.abort_reply_s * 1e3:.1f} ms: {response.message}")
        self._until(SafetyState.LATCHED, 5.0, "latched state after the abort")
        self.processes.spin(1.5)

    def _rearm(self) -> None:
        self._phase = "~/rearm"
        response = self.processes.trigger(POLICY, "rearm")
        end = time.monotonic() + 10.0
        while not response.success and time.monotonic() < end:  # refused without a fresh observation, rightly
            self.watch.event("note", f"re-arm refused: {response.message}")
            self.processes.spin(0.2)
            response = self.processes.trigger(POLICY, "rearm")
        if not response.success:
            raise PhyaiError("re-arm was refused", got=response.message)
        self.watch.event("rearm", response.message)
        self._until(SafetyState.RUNNING, 10.0, "motion after the re-arm")

    def _transition(self, label: str) -> None:
        self.watch.event("lifecycle", f"{label} took {self.processes.transition(POLICY, label):.3f} s")

    def _set_drop(self, camera: str, probability: float) -> None:
        self.processes.set_parameter(SIM, f"drop.{camera}", probability)

    def _until(self, state: SafetyState, seconds: float, what: str) -> None:
        watch = self.watch
        self.processes.until(lambda: watch.status is not None and watch.status.safety_state == state, seconds, what)

    # ---- the view -------------------------------------------------------------------------------------------------

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
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="have the policy node record into a new folder")
    options = parser.parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    robot = load_robot(resolve("robots", options.robot))
    rclpy.init()
    node = Node("demo")
    watch = Watch(node, robot, POLICY)
    scenario = Scenario(node, watch, options.out, options.robot, options.model, console, options.record)
    torch_in_node = False
    error = ""
    try:
        scenario.run(options.seconds)
        torch_in_node = scenario.processes.imports_torch(POLICY)
    except (PhyaiError, KeyboardInterrupt) as caught:
        error = str(caught) or "interrupted"
    finally:
        scenario.processes.stop()
        node.destroy_node()
        rclpy.try_shutdown()
    return _finish(console, watch, options.out, scenario.processes.exit_codes, torch_in_node, error)


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
