"""`ros2 run phyai_policy evaluate [MODEL]`: the episodes of a manifest over topics, in real time.

Policy node and simulated robot are processes of their own; this one places the scene, sets the noise seed, says the
instruction, activates the node, watches for success and deactivates it. It first asks one request that is no episode.
What it writes is what `phyai eval` writes, with measured margins.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import rclpy
import yaml
from rclpy.node import Node
from rclpy.utilities import remove_ros_args
from rich.console import Console
from std_msgs.msg import Bool, String

from phyai_engine.config import ModelConfig, RobotConfig, config_dir, load_robot, resolve
from phyai_engine.errors import EngineError, PhyaiError
from phyai_engine.evaluate.command import ROBOT, conclude, filmed, model_config
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.film import save_film
from phyai_engine.evaluate.manifest import Episode, chosen
from phyai_engine.evaluate.provenance import Provenance
from phyai_engine.evaluate.record import EpisodeRecord, Tally
from phyai_engine.evaluate.run_folder import ROS, Run, RunFolder
from phyai_engine.evaluate.scores import Summary
from phyai_engine.evaluate.table import table
from phyai_engine.policy import weights_note
from phyai_engine.replay.sensor_rows import SensorRows
from phyai_engine.sim.tasks import TASKS
from phyai_engine.types import AbortCause, SafetyState, Schedule
from phyai_ros.film import Film
from phyai_ros.processes import WAIT_S, Processes
from phyai_ros.topics import LATCHED_QOS
from phyai_ros.watch import Watch

POLICY, SIM = "policy_node", "sim_robot"
PROFILE = config_dir() / "profiles" / "demo.yaml"
FAILED = 2
SETTLE_S = 0.1  # a topic's message and a service's call are not ordered: what was said is heard by then
AFTER_S = 0.2  # the last report


class Evaluation:
    """Drives the nodes through episodes.

    :param out: folder of their logs and of the films. :param films: numbers of the episodes that are filmed.
    """

    def __init__(
        self, node: Node, robot: RobotConfig, condition: Condition, out: Path, films: frozenset[int] = frozenset()
    ) -> None:
        self.watch = Watch(node, robot, POLICY, sensors=SensorRows(robot))  # cameras are not for us to hear
        self.processes = Processes(node, out)
        self._node, self._robot, self._condition = node, robot, condition
        self._films, self._filmed = out / "films", films
        self._instruction = node.create_publisher(String, f"{POLICY}/instruction", 1)
        self._solved = False
        self._scene = ""
        node.create_subscription(Bool, f"{SIM}/success", self._on_success, LATCHED_QOS)

    def start(self, robot_file: Path, model: str) -> None:
        """Load the policy.

        :raises PhyaiError: the node did not come up.
        """
        self._robot_file = robot_file
        self.processes.start(
            POLICY,
            "phyai_ros.policy_node",
            str(PROFILE),
            robot=robot_file,
            model=model,
            schedule=self._condition.schedule.value,
            execution_horizon=self._condition.execution_horizon,
        )
        self.processes.transition(POLICY, "configure")

    def smoke(self, episode: Episode) -> None:
        """Up to the first chunk: whether robot, model and scene work together, before hundreds of episodes are played.

        :raises EngineError: the first request is not answered by a chunk that may be played.
        """
        self._begin(episode)
        self.processes.until(lambda: bool(self.watch.timings), WAIT_S, "answer to the first request of the evaluation")
        first = self.watch.timings[0]
        if first.outcome != "accepted":
            raise EngineError("the first request of the evaluation failed", got=first.text or first.outcome)
        self.processes.transition(POLICY, "deactivate")

    def play(self, number: int, episode: Episode) -> EpisodeRecord:
        """One episode.

        :raises PhyaiError: a node ended, or does not answer.
        """
        watch, processes = self.watch, self.processes
        film = Film(self._node, self._robot.cameras) if number in self._filmed else None
        self._begin(episode)
        if film is not None:
            film.frames.clear()  # of the scene before
        began_s, self._solved = watch.now_s, False
        while not self._solved and not self._latched() and watch.now_s - began_s < self._condition.seconds_max:
            processes.turn(0.01)
        ended_s, solved = watch.now_s, self._solved
        processes.transition(POLICY, "deactivate")
        processes.spin(AFTER_S)
        record = self._record(number, episode, solved, began_s, ended_s)
        if self._latched():
            processes.trigger(POLICY, "rearm")
        if film is not None:
            film.close()
            save_film(film.frames, self._films / f"{number:05d}.gif")
        return record

    def _begin(self, episode: Episode) -> None:
        """The scene, the seed and the words of an episode; then the node is active."""
        watch, processes = self.watch, self.processes
        self._place(episode)
        processes.set_parameter(POLICY, "seed", episode.noise_seed)
        self._instruction.publish(String(data=episode.instruction))
        processes.spin(SETTLE_S)
        watch.begin()
        watch.status = None
        processes.transition(POLICY, "activate")

    def _place(self, episode: Episode) -> None:
        """The robot of another scene is another process."""
        processes = self.processes
        task = TASKS.get(episode.task)
        scene = episode.task if task is None else task.scene.environment
        if scene != self._scene:
            if self._scene:
                processes.end(SIM)
            processes.start(
                SIM, "phyai_ros.sim_node", robot=self._robot_file, task=episode.task, seed=episode.scene_seed
            )
            self._scene = scene
        else:
            processes.set_parameter(SIM, "task", episode.task)
            processes.set_parameter(SIM, "seed", episode.scene_seed)
        processes.trigger(SIM, "reset")

    def _latched(self) -> bool:
        status = self.watch.status
        return status is not None and status.safety_state == SafetyState.LATCHED

    def _on_success(self, message: Bool) -> None:
        self._solved = message.data

    def _record(self, number: int, episode: Episode, solved: bool, began_s: float, ended_s: float) -> EpisodeRecord:
        watch, status = self.watch, self.watch.status
        assert status is not None  # a transition ends with a report
        steps = [step for step in watch.steps if began_s <= step.t_s <= ended_s]
        margins = [t.m_ctrl_s for t in watch.timings if np.isfinite(t.m_ctrl_s)]
        cause = AbortCause(status.abort_cause)
        return EpisodeRecord.of(
            number,
            episode,
            self._robot,
            success=solved,
            ticks=round((ended_s - began_s) / self._robot.dt_s),
            actions=sum(step.kind == "action" for step in steps),
            values=np.array([step.values for step in steps]).reshape(len(steps), len(self._robot.actions)),
            timings=watch.timings,
            tally=Tally(
                requests=int(status.requests),
                failed=sum(t.outcome == "engine_error" for t in watch.timings),
                refusals=[int(n) for n in status.refusals],
                handoffs=len(margins),
                misses=sum(margin < 0 for margin in margins),
            ),
            aborted="" if cause is AbortCause.NONE else f"{cause.name.lower()}: {status.abort_text}",
            wall_s=ended_s - began_s,
            margins=True,
        )


def evaluate(options: argparse.Namespace, say: Callable[[str], None]) -> Summary:
    """Play what is not played yet, then aggregate.

    :raises PhyaiError: a file is wrong, or a node failed; what was recorded stays, and the same command goes on there.
    """
    robot_file = resolve("robots", options.robot).absolute()
    robot = load_robot(robot_file)
    manifest = chosen(options.manifest, [t for t in options.tasks.split(",") if t], options.episodes, options.seed)
    condition = Condition(
        schedule=Schedule(options.schedule),
        guidance=options.guidance,
        execution_horizon=options.execution_horizon,
        dtype=options.dtype,
        seconds_max=options.seconds,
    )
    config = model_config(options.model, condition, options.device)
    # The engine is another process' child: what it chose and bound stands in policy_node.log.
    provenance = Provenance.of(options.model, config, weights_note(config), config.device, {})
    folder = RunFolder(options.out, Run.of(ROS, robot, condition, manifest, provenance), manifest)
    if not (waiting := folder.waiting()):
        return conclude(options.out)
    rclpy.init()
    node = Node("evaluation")
    evaluation = Evaluation(node, robot, condition, options.out, filmed(manifest, options.films))
    try:
        changed = options.guidance or options.dtype or options.device != "auto"
        evaluation.start(robot_file, str(_model_file(options.out, config)) if changed else options.model)
        evaluation.smoke(waiting[0][1])
        say(f"{len(waiting)} of {len(manifest)} episodes to play")
        for number, episode in waiting:
            record = evaluation.play(number, episode)
            folder.add(record)
            say(f"{number + 1:4d} {record.task}: {'solved' if record.success else 'NOT solved'}, {record.wall_s:.1f} s")
    finally:
        evaluation.processes.stop()
        node.destroy_node()
        rclpy.try_shutdown()
    return conclude(options.out)


def _model_file(out: Path, config: ModelConfig) -> Path:
    """What the node loads where the condition changes the model."""
    path = (out / "model.yaml").absolute()
    path.write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False), encoding="utf-8")
    return path


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("model", nargs="?", default="metaworld", help="checkpoint folder, model file or shipped name")
    made.add_argument("--robot", default=ROBOT, help="robot file or name")
    made.add_argument("--manifest", type=Path, help="episodes; without it they are made")
    made.add_argument("--tasks", default="", metavar="A,B", help="default: all of the simulator's tasks")
    made.add_argument("--episodes", type=int, default=20, help="of each task")
    made.add_argument("--seed", type=int, default=1, help="of the scenes and the noise")
    made.add_argument("--schedule", default="rtc", choices=[s.value for s in Schedule])
    made.add_argument("--guidance", default="", help="of rtc, as in a model file; default: the model's own")
    made.add_argument("--execution-horizon", type=int, default=0, help="steps of a chunk to execute; 0: half of it")
    made.add_argument("--seconds", type=float, default=15.0, help="after which an episode has failed")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: as the model file says")
    made.add_argument("--dtype", default="", choices=["", "float32", "bfloat16"], help="default: the model's")
    made.add_argument("--films", type=int, default=0, help="GIFs of so many episodes of each task")
    made.add_argument("--out", type=Path, default=Path("out/eval-ros"), help="an interrupted run goes on there")
    return made


def main(args: list[str] | None = None) -> int:
    """Entry point. 0: every episode was played; 2: not."""
    options = parser().parse_args(remove_ros_args(sys.argv if args is None else ["evaluate", *args])[1:])
    console = Console(stderr=True)
    try:
        summary = evaluate(options, lambda text: console.print(text, highlight=False))
    except PhyaiError as error:
        console.print(str(error), style="red", highlight=False)
        return FAILED
    Console().print(table(summary))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # rclpy's threads may outlive a broken run; everything is written
