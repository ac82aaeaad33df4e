"""An evaluation must be able to fail: what is wired wrong on purpose has to cost success, beyond any doubt of n.

Cameras swapped, joints permuted, another robot's statistics, a driver that sends old images with fresh stamps: each at
least 20 points below the right wiring, with intervals apart. What it costs the node to notice is proven elsewhere.
"""

from __future__ import annotations

import argparse

from eval_cells import common, evaluation, play
from evidence import conclude

from phyai_engine.evaluate.condition import Condition, Fault
from phyai_engine.evaluate.scores import Summary

Row = tuple[str, str, bool | None]
LOSS = 0.2


def judge(right: Summary, wrong: Summary) -> Row:
    """One fault against the right wiring."""
    a, b = right.all.success, wrong.all.success
    lost = a.share - b.share
    name = wrong.condition.fault.value.replace("_", " ")
    return (
        f"{name} costs 20 points, intervals apart",
        f"{b}, {100 * lost:.1f} points lost",
        lost >= LOSS and b.high < a.low,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=17, help="of each task with each fault")
    chosen = common(parser)
    conditions = [Condition(fault=fault) for fault in Fault]
    right, *wrong = play([evaluation(chosen, condition, chosen.episodes) for condition in conditions], chosen.lanes)
    rows: list[Row] = [("wired right", f"{right.all.success}, n {right.all.n} each", None)]
    rows += [judge(right, each) for each in wrong]
    return conclude(f"eval faults: sync, no delay, {chosen.model}", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
