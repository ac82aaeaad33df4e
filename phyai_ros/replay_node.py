"""`ros2 run phyai_policy replay BAG --robot R --model M`: does the policy keep its deadline on this bag?

The bag's inputs are played over DDS with /clock, in real time, against a policy node in a process of its own; what it
does is heard on the wire. Joints are the bag's: the robot on it does not obey, and a stop that latches is re-armed.
`phyai replay` does the same without ROS, also faster than real time or step by step.

Exit code 0: replayed, and the gate passed; 1: the gate did not, or the bag is not one run of a robot; 2: it could not
be replayed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import rclpy
from msgspec import structs
from rclpy.node import Node
from rclpy.utilities import remove_ros_args
from rich.console import Console
from std_srvs.srv import Trigger

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.errors import PhyaiError
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.command import exit_code, show, write_results
from phyai_engine.replay.examine import Examined, examine
from phyai_engine.replay.gate import judge, parse_gate
from phyai_engine.replay.record import Record
from phyai_engine.replay.sensor_rows import SensorRows, sensors_of
from phyai_engine.replay.topic_map import TopicMap, map_topics
from phyai_engine.types import AbortCause, SafetyState
from phyai_ros.bag_player import BagPlayer
from phyai_ros.processes import Processes
from phyai_ros.watch import Watch

POLICY = "policy_node"
HEARD_S = 10.0  # for discovery
AFTER_S = 0.5  # the last chunk and its report
NOT_REPLAYED = 2


class Replay:
    """One bag through one policy node.

    :param sensors: of the bag. :param out: folder of the policy node's log.
    """

    def __init__(
        self,
        node: Node,
        bag: Bag,
        topics: TopicMap,
        robot: RobotConfig,
        examined: Examined,
        sensors: SensorRows,
        out: Path,
    ) -> None:
        self.watch = Watch(node, robot, POLICY, sensors=sensors)
        self.processes = Processes(node, out, self._look)
        self._player = BagPlayer(node, bag, topics, POLICY, examined.clock_offset_ns)
        self._rearm = node.create_client(Trigger, f"{POLICY}/rearm")
        self._rearming: Any = None
        self._latched = 0

    def run(self, params_file: str, parameters: dict[str, object]) -> None:
        """Bring the node up, play, stop it.

        :raises PhyaiError: the node did not come up, or ended. :raises BagError: the bag breaks off.
        """
        watch, processes = self.watch, self.processes
        processes.start(POLICY, "phyai_ros.policy_node", params_file, use_sim_time="true", **parameters)
        for label in ("configure", "activate"):
            watch.event("lifecycle", f"{label} took {processes.transition(POLICY, label):.3f} s")
        processes.until(lambda: self._player.heard, HEARD_S, "subscription of the policy node to every topic")
        self._player.instruct()
        watch.begin()
        played = self._player.play(processes.turn)
        late = played.lateness
        watch.event(
            "note",
            f"{played.messages} messages played, late by p50 {late.p50 * 1e3:.2f} ms, p99 {late.p99 * 1e3:.2f} ms, "
            f"at most {late.max * 1e3:.1f} ms",
        )
        processes.spin(AFTER_S)
        watch.event("stop", "deactivate")
        processes.transition(POLICY, "deactivate")
        processes.spin(AFTER_S)

    def _look(self) -> None:
        """A latch is an event. It is re-armed as soon as the node allows it: one bad minute does not end the
        measurement, and nobody is moved by that."""
        status = self.watch.status
        if status is None:
            return
        if status.abort_cause != self._latched:
            self._latched = status.abort_cause
            cause = AbortCause(self._latched).name.lower()
            what = ("abort", f"{cause}: {status.abort_text}") if self._latched else ("rearm", "re-armed by the replay")
            self.watch.event(*what)  # type: ignore[arg-type]
        if self._rearming is not None and self._rearming.done():
            self._rearming = None
        if status.safety_state == SafetyState.LATCHED and self._rearming is None:
            self._rearming = self._rearm.call_async(Trigger.Request())


def replay(options: argparse.Namespace) -> Record:
    """Replay, and everything that is known of it.

    :raises PhyaiError: see :meth:`Replay.run`; the bag does not fit the robot; nothing was written then.
    """
    robot_file = resolve("robots", options.robot)
    robot = load_robot(robot_file)
    parameters: dict[str, object] = {
        "robot": robot_file.absolute(),
        "model": options.model,
        "engine": options.engine,
        **({} if options.record is None else {"record": options.record.absolute()}),
        **dict(options.parameter),
    }
    with Bag(options.bag) as bag:
        topics = map_topics(robot, bag, options.recorded_namespace)
        examined = examine(bag, topics, robot)
        sensors = sensors_of(bag, topics, robot, examined.clock_offset_ns)
        options.out.mkdir(parents=True, exist_ok=True)
        node = Node("replay")
        run = Replay(node, bag, topics, robot, examined, sensors, options.out)
        try:
            run.run(options.params, parameters)
        finally:
            run.processes.stop()
            node.destroy_node()
        warm_up = run.watch.warm_up_s
        return structs.replace(
            run.watch.record([]),
            mode="real-time",
            bag=bag.name,
            survey=examined.survey,
            **({"first_inference_s": warm_up[0]} if warm_up else {}),
        )


def _parameter(text: str) -> tuple[str, str]:
    name, separator, value = text.partition(":=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:=VALUE")
    return name, value


def arguments(args: list[str]) -> argparse.Namespace:
    """The command line."""
    words = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(prog="replay", description=words[1], epilog=words[-1])
    parser.add_argument("bag", type=Path, metavar="BAG", help="rosbag2 folder, .mcap or .db3 file")
    parser.add_argument("--robot", required=True, help="robot file, or the name of a shipped one")
    parser.add_argument("--model", required=True, help="model file, name of a shipped one, or checkpoint folder")
    parser.add_argument(
        "--engine",
        default="process",
        choices=("process", "thread", "remote"),
        help="where inference runs; remote: name the server with -p engine_endpoint:=tcp://HOST:PORT",
    )
    parser.add_argument("--params", default="", metavar="FILE", help="parameters file of the policy node")
    parser.add_argument(
        "-p", "--parameter", type=_parameter, action="append", default=[], metavar="NAME:=VALUE", help="one parameter"
    )
    parser.add_argument(
        "--recorded-namespace", default="", metavar="NS", help="of the recorded robot, where its topics have one"
    )
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="have the node record the run into a new folder")
    parser.add_argument("--out", type=Path, help="folder of report, record and log; out/replay/ and the bag's name")
    parser.add_argument("--gate", default="", metavar="RULES", help='such as "p99_margin_ms>=5,miss_rate<=1e-3"')
    options = parser.parse_args(args)
    options.out = options.out or Path("out") / "replay" / options.bag.resolve().name
    return options


def main(args: list[str] | None = None) -> int:
    """Entry point of the executable ``replay``."""
    options = arguments(remove_ros_args(sys.argv)[1:] if args is None else args)
    console = Console(width=None if sys.stdout.isatty() else 140)
    rclpy.init(args=args)
    try:
        conditions = parse_gate(options.gate) if options.gate else ()
        record = replay(options)
        record = structs.replace(record, invariants=judge(conditions, record))
        write_results(record, options.out)
        show(record, options.out, console)
    except (PhyaiError, KeyboardInterrupt) as error:
        console.print(str(error) or "interrupted", style="red", markup=False, highlight=False)
        return NOT_REPLAYED
    finally:
        rclpy.try_shutdown()
    return exit_code(record)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # rclpy's threads may outlive a broken run; everything is written
