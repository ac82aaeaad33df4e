"""Every fault in time that the robot's side meets, on real processes and DDS: what tells it, how soon a safe command
is heard, whether an action of an ended epoch was heard (never), and what brings the robot back.

Times run from the fault, or from when it can be noticed where it happens inside a process (+- a tick), to the first
STOP or HOLD in the observer's process. Every cycle recovers and waits until the robot moves again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import faults_abort
import faults_engine
import faults_node
import faults_player
import numpy as np
from cases import Case
from evidence import options, show
from rich.progress import Progress

GROUPS = {
    "abort": faults_abort.cases,
    "engine": faults_engine.cases,
    "node": faults_node.cases,
    "player": faults_player.cases,
}
COLUMNS = (
    "fault",
    "detected by",
    "bound ms",
    "to safe command ms: p50 / p99 / max, n",
    "old-epoch actions",
    "recovery",
)
OUT = Path("out/prove/faults.json")


def prove(case: Case, count: int, progress: Progress) -> dict[str, Any]:
    """Run the cycles of one case on one stand."""
    task, began = progress.add_task(case.name, total=count), time.monotonic()
    times: list[float] = []
    done, old, failure, stand = 0, 0, "", None
    try:
        stand = case.stand()
        stand.moving()
        for _ in range(count):
            took = case.run(stand)
            times += [] if took is None else [took]
            done += 1
            progress.advance(task)
    except Exception as error:  # a broken cycle is a result, and the others still count
        failure = f"{type(error).__name__}: {error}"
        progress.console.print(traceback.format_exc(), markup=False)
    finally:
        if stand is not None:
            old = stand.old
            codes = stand.close()
            if any(codes) and not failure:
                failure = f"exit codes {codes}"
    late = [t for t in times if case.bound_ms is not None and t > case.bound_ms]
    seconds = time.monotonic() - began
    held = not failure and not late and old == 0
    line = f"{case.name}: n {done}, old {old}, {seconds:.0f} s {'' if held else 'BROKEN ' + failure}"
    progress.console.print(line, markup=False)
    progress.remove_task(task)
    return {"case": case, "times": times, "n": done, "old": old, "failure": failure, "held": held, "late": len(late)}


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """What is printed of it."""
    case, times = result["case"], np.array(result["times"])
    measured = f"no stop, n {result['n']}"
    if len(times):
        p50, p99 = np.percentile(times, [50, 99])
        measured = f"{p50:.1f} / {p99:.1f} / {times.max():.1f}, n {len(times)}"
    if case.notes:
        measured += "; " + ", ".join(f"{k} {v}" for k, v in case.notes.items())
    recovery = f"{case.recovery}: moved again {result['n']} of {result['n'] + bool(result['failure'])}"
    broken = f"BROKEN: {result['failure'] or str(result['late']) + ' late'}"
    return (
        case.name,
        case.detected,
        "" if case.bound_ms is None else f"{case.bound_ms:.0f}",
        measured,
        str(result["old"]),
        recovery if result["held"] else broken,
    )


def chosen_cases(only: str) -> Iterator[Case]:
    """Of one group, or those whose name has the words."""
    for group, cases in GROUPS.items():
        for case in cases():
            if only in ("", group) or (only not in GROUPS and only in case.name):
                yield case


def own_domains() -> Iterator[int]:
    """A ROS domain for each case: what a killed process leaves in shared memory must not disturb the next one."""
    first = int(os.environ.get("ROS_DOMAIN_ID", "61"))
    for i in count():
        os.environ["ROS_DOMAIN_ID"] = str(61 + (first - 61 + i) % 39)
        yield i


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="cycles of each fault")
    parser.add_argument("--only", default="", help=f"a group ({', '.join(GROUPS)}) or words of a fault's name")
    parser.add_argument("--seed", type=int, default=1)
    chosen = options(parser)
    random.seed(chosen.seed)
    with Progress() as progress:
        cases = zip(chosen_cases(chosen.only), own_domains(), strict=False)
        results = [prove(case, chosen.count * case.factor, progress) for case, _ in cases]
    if not results:
        parser.error(f"no fault is called {chosen.only!r}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps([{**r, "case": r["case"].name} for r in results], indent=1), encoding="utf-8")
    title = f"faults: {len(results)} kinds, n {chosen.count} each"
    show(title, COLUMNS, [row(r) for r in results], log=chosen.log)
    return 0 if all(r["held"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
