"""The same episodes over ROS topics in real time and in process on a virtual clock: the same success, deadlines kept.

Policy node, simulated robot and driver are processes of their own on this machine; 20 Hz control, the simulation's time
runs as fast as the wall clock. A quarter of an hour for 120 episodes; nothing else should run.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from evidence import conclude, options
from rich.console import Console

from phyai_engine.evaluate.command import EvalOptions
from phyai_engine.evaluate.command import evaluate as in_process
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.scores import Summary
from phyai_engine.types import Schedule
from phyai_ros import evaluate as over_ros

Row = tuple[str, str, bool | None]
SLOWER_MAX = 0.01


def judge(ros: Summary, engine: Summary) -> list[Row]:
    """What is claimed of the two."""
    a, b = ros.all.success, engine.all.success
    margin = ros.margin_p01_s
    of_tasks = "; ".join(f"{score.task} {score.successes}/{score.n}" for score in ros.tasks)
    rows: list[Row] = [
        ("success over topics", f"{a}, n {ros.all.n}: {of_tasks}", None),
        ("success in process", f"{b}, n {engine.all.n}", None),
        (
            "the intervals overlap",
            f"{a.low:.3f}..{a.high:.3f} and {b.low:.3f}..{b.high:.3f}",
            max(a.low, b.low) <= min(a.high, b.high),
        ),
        (
            "the margin that 99 % of the handoffs had is positive",
            "none was measured" if margin is None else f"{margin * 1e3:.1f} ms, n {ros.handoffs}, missed {ros.misses}",
            margin is not None and margin > 0,
        ),
        ("100 episodes at least", str(ros.all.n), ros.all.n >= 100),
    ]
    if ros.delay_steps is not None:
        d = ros.delay_steps
        rows.append(("delay over topics", f"d' p50 {d.p50:.0f}, p99 {d.p99:.0f} steps; aborts {ros.aborted}", None))
    return rows


def real_time(logs: Path) -> Row:
    """What the last simulated robot said of its pace when it ended."""
    said = re.findall(r"\d+ control periods in .* s, ([\d.]+) of real time", (logs / "sim_robot.log").read_text())
    what = f"the simulation keeps real time within {SLOWER_MAX:.0%} (last scene)"
    return what, f"{said[-1]} of it" if said else "not told", bool(said) and abs(float(said[-1]) - 1.0) <= SLOWER_MAX


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="metaworld", help="checkpoint folder, model file or name")
    parser.add_argument("--tasks", default="", metavar="A,B", help="default: all")
    parser.add_argument("--episodes", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=4, help="of the scenes")
    parser.add_argument("--schedule", default="rtc", choices=[s.value for s in Schedule])
    parser.add_argument("--delay-ms", type=float, default=100.0, help="of the run in process: about what it is here")
    parser.add_argument("--out", type=Path, default=Path("out/eval-ros"))
    chosen = options(parser)
    console = Console(stderr=True)
    shared = ["--tasks", chosen.tasks, "--episodes", str(chosen.episodes), "--seed", str(chosen.seed)]
    own = [chosen.model, *shared, "--schedule", chosen.schedule, "--out", str(chosen.out / "ros")]
    ros = over_ros.evaluate(over_ros.parser().parse_args(own), lambda text: console.print(text, highlight=False))
    engine = in_process(
        EvalOptions(
            model=chosen.model,
            tasks=tuple(task for task in chosen.tasks.split(",") if task),
            episodes=chosen.episodes,
            seed=chosen.seed,
            condition=Condition(schedule=Schedule(chosen.schedule), delay_ms=chosen.delay_ms),
            out=chosen.out / "in-process",
        ),
        console,
    )
    title = f"eval over ROS: {chosen.schedule}, 20 Hz, {chosen.model}"
    return conclude(title, [*judge(ros, engine), real_time(chosen.out / "ros")], log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
