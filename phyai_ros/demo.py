"""`make demo`: a simulated robot solves tasks over real ROS 2, is told others, disturbed, stopped, and reported.

Each claim the demo makes is an invariant checked from what was heard on the wire; one that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import rclpy
from rclpy.node import Node
from rich.console import Console
from rich.live import Live
from rich.table import Table
from std_msgs.msg import Bool, String

from phyai_engine.config import config_dir, load_robot, resolve
from phyai_engine.errors import PhyaiError
from phyai_engine.replay.record import Invariant
from phyai_engine.replay.report import write_report, write_summary
from phyai_engine.sim.tasks import TASKS, Task, other_task
from phyai_engine.types import SafetyState
from phyai_ros.demo_checks import Act, check
from phyai_ros.processes import WAIT_S, Processes
from phyai_ros.topics import LATCHED_QOS
from phyai_ros.watch import Watch

POLICY, SIM = "policy_node", "sim_robot"
BEGUN_S = 1.0  # of motion before something happens to it
SHOWN_S = 0.5  # of what was reached
SEED = 1  # of the scene


class Scenario:
    """Runs the processes and the story; :attr:`watch` holds what was heard, :attr:`acts` what was asked and solved.

    :param task: first of the two tasks of its scene, which take turns; None for a robot without tasks.
    :param seconds: longest time for one instruction. :param record: folder that the policy node records into.
    """

    def __init__(
        self,
        node: Node,
        watch: Watch,
        out: Path,
        robot: str,
        model: str,
        task: Task | None,
        seconds: float,
        console: Console,
        record: Path | None = None,
    ) -> None:
        self.watch = watch
        self.processes = Processes(node, out, self._refresh)
        self.acts: list[Act] = []
        self._robot, self._model, self._console, self._record = robot, model, console, record
        self._task, self._seconds = task, seconds
        self._solved = False
        self._instruction = node.create_publisher(String, f"{POLICY}/instruction", 1)
        node.create_subscription(Bool, f"{SIM}/success", self._on_success, LATCHED_QOS)
        self._live: Live | None = None
        self._phase = ""
        self._line_due_s = 0.0

    def run(self) -> None:
        """The whole story: four instructions, a camera dropout in the third, an abort and a re-arm in the fourth.

        :raises PhyaiError: a process did not come up or did not answer.
        """
        watch = self.watch
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
            self._ask(told=True)
            self._ask()
            self._ask(lambda: self._drop_camera("wrist"))
            self._ask(self._interrupt)
            self._phase = "deactivate: a controlled stop"
            watch.event("stop", "deactivate")
            self._transition("deactivate")
            self.processes.spin(0.5)
            self._phase = "done"
            self._refresh()

    # ---- the acts -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        asked = {} if self._task is None else {"task": self._task.name, "seed": SEED}
        self.processes.start(SIM, "phyai_ros.sim_node", "", robot=self._robot, **asked)
        self.processes.start(
            POLICY,
            "phyai_ros.policy_node",
            str(config_dir() / "profiles" / "demo.yaml"),
            robot=self._robot,
            model=self._model,
            instruction=self._words(),
            **({} if self._record is None else {"record": self._record.absolute()}),
        )

    def _ask(self, meanwhile: Callable[[], None] | None = None, *, told: bool = False) -> None:
        """One instruction until it is carried out, or its time is over; then the scene's other task is next.

        :param meanwhile: what happens to the robot once it moves. :param told: it was the node's parameter.
        """
        watch, words = self.watch, self._words()
        if not told:
            if self._task is not None:
                self.processes.set_parameter(SIM, "task", self._task.name)
            self._solved = False
            self._instruction.publish(String(data=words))
        watch.event("instruction", words)
        began_s = watch.now_s
        self._phase = f'"{words}"'
        if meanwhile is not None:
            self.processes.spin(BEGUN_S)
            meanwhile()
            self._phase = f'"{words}", going on'
        end_s = watch.now_s + self._seconds
        while not self._solved and watch.now_s < end_s:
            self.processes.turn()
        seconds = watch.now_s - began_s
        if self._task is not None:
            self.acts.append(Act(words, self._solved, seconds))
            watch.event("note", f"{words}: {'solved' if self._solved else 'NOT solved'} after {seconds:.1f} s")
            self._task = other_task(self._task)
        self.processes.spin(SHOWN_S)

    def _words(self) -> str:
        return "reach the goal" if self._task is None else self._task.phrases[0]

    def _on_success(self, message: Bool) -> None:
        self._solved = message.data

    def _interrupt(self) -> None:
        self._abort()
        self._rearm()

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
        table.add_row("solved", "; ".join(map(str, self.acts)) or "-")
        for key, value in self.watch.rows():
            table.add_row(key, value)
        return table


def main(args: list[str] | None = None) -> int:
    """`python -m phyai_ros.demo`; exit code 0 when every invariant held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of report, record and logs")
    parser.add_argument("--robot", default="sawyer_20hz", help="robot file or name")
    parser.add_argument("--model", default="metaworld", help="checkpoint folder, model file or name")
    parser.add_argument("--task", default="drawer-open", choices=[*TASKS, "none"], help="the first; none: no task")
    parser.add_argument("--seconds", type=float, default=15.0, help="longest time for one instruction")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="have the policy node record into a new folder")
    options = parser.parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if sys.stdout.isatty() else 140)
    robot = load_robot(resolve("robots", options.robot))
    rclpy.init()
    node = Node("demo")
    watch = Watch(node, robot, POLICY)
    scenario = Scenario(
        node,
        watch,
        options.out,
        options.robot,
        options.model,
        TASKS.get(options.task),
        options.seconds,
        console,
        options.record,
    )
    torch_in_node = False
    error = ""
    try:
        scenario.run()
        torch_in_node = scenario.processes.imports_torch(POLICY)
    except (PhyaiError, KeyboardInterrupt) as caught:
        error = str(caught) or "interrupted"
    finally:
        scenario.processes.stop()
        node.destroy_node()
        rclpy.try_shutdown()
    invariants = check(watch, scenario.acts, scenario.processes.exit_codes, torch_in_node, error)
    return _finish(console, watch, options.out, invariants)


def _finish(console: Console, watch: Watch, out: Path, invariants: list[Invariant]) -> int:
    record = watch.record(invariants)
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
