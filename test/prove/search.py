"""The handoff/safety machine searched within wider bounds than the tests', planted defects, and 50 000 random steps.

Every state reached within the bounds is visited and the invariants of test/faults/invariants.py are checked on every
transition. About a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "faults"))

import rclpy
from evidence import conclude, options
from explore import Found
from handoff_machine import Bounds, explore
from invariants import NAMES
from link import LINK, explore_link
from link_mutations import LINK_MUTATIONS
from mutations import MUTATIONS, QUICK
from rclpy.context import Context
from rclpy.signals import SignalHandlerOptions
from test_stateful import CAUSES, run

from phyai_engine.types import SafetyState, Schedule

Row = tuple[str, str, bool | None]
ALL = Bounds(blind=True)  # every event, also while the observation is stale


def searches() -> dict[str, Callable[[], Found]]:
    """Title -> search."""
    hold = {Schedule.SYNC: 4.5}  # `sync` holds during every inference
    found: dict[str, Callable[[], Found]] = {}
    for schedule in Schedule:
        bounds = replace(ALL, schedule=schedule, hold_ticks=hold.get(schedule, ALL.hold_ticks))
        found[f"{schedule.value}: H 4, s 2, every event, stale observations"] = functools.partial(explore, bounds)
    answers = ("ok", "nan", "out", "short", "jump")
    five = replace(QUICK, answers=answers, remembered=3, delay_window=2)
    found["rtc: five kinds of chunk, three requests answered late, two delays remembered"] = lambda: explore(five)
    six = replace(QUICK, horizon=6, execution_steps=3, request_ticks=5.5)
    found["rtc: H 6, s 3, d up to 6"] = lambda: explore(six)
    short = replace(QUICK, stop_hold_steps=0)
    found["rtc: no hold after the stop"] = lambda: explore(short)
    found["rtc: mailbox of the client, its thread as late as can be"] = lambda: explore(Bounds(mailbox=True))
    far = replace(QUICK, first_epoch=2**64 - 3)
    found["rtc: epochs across 2**64"] = lambda: explore(far)
    both = replace(LINK, orders=("here", "there"))
    found["chunks: player node, any call or fault of the network, ticks in either order"] = lambda: explore_link(both)
    three = replace(LINK, calls=3)
    found["chunks: any two calls or faults of the network"] = lambda: explore_link(three)
    return found


def mutations() -> Row:
    """All mutations; which of them survive."""
    survived, broken = [], Counter[str]()
    every = [(m, explore) for m in MUTATIONS] + [(m, explore_link) for m in LINK_MUTATIONS.values()]
    for mutation, search in every:
        with mutation.patch():
            violation = search(mutation.bounds, states_max=20_000).violation
        name = "" if violation is None else violation.name
        broken[name] += 1
        if name not in mutation.breaks:
            survived.append(mutation.name)
    caught = ", ".join(f"{name} {broken[name]}" for name in NAMES if broken[name])
    figure = f"{len(every) - len(survived)} of {len(every)} caught, first by: {caught}"
    return "planted defects", figure + "".join(f"; SURVIVED: {s}" for s in survived), not survived


def stateful(rules: int) -> Row:
    """Random runs of the node's own callbacks."""
    context = Context()
    rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
    tally: Counter[Any] = Counter()
    seed = 0
    while tally["rules"] < rules:
        seed += 1
        tally.update(run(context, examples=250, seed=seed))
        print(f"seed {seed}: {tally['rules']} rules, {tally['steps']} callbacks", flush=True)
    rclpy.shutdown(context=context)
    wanted = {*(SafetyState(n) for n in range(1, 7)), *CAUSES, "unconfigured", "inactive", "active"}
    causes = ", ".join(f"{name.lower()} {tally[name]}" for name in CAUSES)
    figure = (
        f"{tally['rules']} rules, {tally['steps']} callbacks, {tally['commands']} commands, seeds 1..{seed}; "
        f"callbacks after an abort by {causes}"
    )
    return "policy node, rules in any order: no broken invariant", figure, wanted <= set(tally)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=50_000, help="of the random runs")
    parser.add_argument("--only", default="", help="only searches whose title has this text")
    chosen = options(parser)
    rows: list[Row] = []
    states = transitions = 0
    for title, search in searches().items():
        if chosen.only not in title:
            continue
        found = search()
        print(f"{title}: {found}", flush=True)
        states, transitions = states + found.states, transitions + found.transitions
        rows.append((title, str(found), found.complete and found.violation is None))
    rows.append(("together", f"{states} states, {transitions} transitions, invariants {', '.join(NAMES)}", None))
    if not chosen.only:
        rows += [mutations(), stateful(chosen.rules)]
    return conclude("search of the handoff and safety machine", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
