"""The engine server under load: deadlines, overload, leaks, bad bytes, and what the transport costs.

    make prove-fleet                         everything, some 20 minutes; alone on the machine
    make prove-fleet ARGS="--only load"      one part: load, overload, leak, fuzz, transport

The model takes 22 ms and 1 ms for each further row of a batch; robots ask at 5 Hz with 100 ms to answer. Server and
replica, robots, and the stall monitor are processes of their own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from evidence import conclude, host, options
from fleet_rig import Fleet, fixed_latency

from phyai_engine.timing import miss_upper95

Row = tuple[str, str, "bool | None"]
ROBOTS, HZ, DEADLINE_MS = 32, 5.0, 100.0
OVERLOAD = 1.5
BUCKETS = (1, 2, 4, 8)
CAPACITY_HZ = BUCKETS[-1] / 0.029


def load(given: argparse.Namespace) -> list[Row]:
    """Must-show 2, first half."""
    seconds = given.requests / (ROBOTS * HZ)
    with Fleet(fixed_latency(), BUCKETS) as fleet:
        run = fleet.drive(robots=ROBOTS, hz=HZ, seconds=seconds, deadline_ms=DEADLINE_MS)
    missed, n, clean = run.missed(DEADLINE_MS), len(run.robot), ~run.stalled()
    clean_missed = int((missed & clean).sum())
    upper = miss_upper95(int(missed.sum()), n)
    return [
        (f"load: {ROBOTS} robots, {HZ:g} Hz, {DEADLINE_MS:g} ms", f"n {n}, {run.words()}", None),
        ("load: misses", f"{missed.sum()} of {n}, {missed.mean():.2e}, upper 95 % {upper:.2e}", upper <= 1e-3),
        (
            "load: misses where the monitor saw no gap > 20 ms",
            f"{clean_missed} of {clean.sum()}; {len(run.gaps)} gaps, worst {run.worst_gap_ms():.0f} ms",
            clean_missed == 0,
        ),
    ]


def overload(given: argparse.Namespace) -> list[Row]:
    """Must-show 2, second half: the batcher against first in, first out, at 1.5 times the capacity."""
    robots = round(OVERLOAD * CAPACITY_HZ / HZ)
    rows: list[Row] = []
    goodput: dict[str, float] = {}
    for name, queue in (("ours", "deadline"), ("FIFO", "fifo"), ("FIFO, newest of a robot only", "fifo_newest")):
        with Fleet(fixed_latency(), BUCKETS, queue=queue) as fleet:
            run = fleet.drive(robots=robots, hz=HZ, seconds=given.overload_s, deadline_ms=DEADLINE_MS)
        missed = run.missed(DEADLINE_MS)
        goodput[name] = float((~missed).sum()) / given.overload_s
        rows.append((f"overload: {robots} robots, {name}", f"goodput {goodput[name]:.0f}/s; {run.words()}", None))
        if queue == "deadline":
            rates = np.array([missed[run.robot == robot].mean() for robot in range(robots)])
            ratio = rates.max() / rates.mean()
            rows.append(
                (
                    "overload: worst robot",
                    f"misses {rates.max():.3f}, mean {rates.mean():.3f}, {ratio:.2f} x",
                    bool(ratio <= 2.0),
                )
            )
    best = max(goodput["FIFO"], goodput["FIFO, newest of a robot only"])
    rows.append(
        (
            "overload: goodput against the better FIFO",
            f"{goodput['ours']:.0f}/s against {best:.0f}/s, {goodput['ours'] / max(best, 1e-9):.2f} x",
            goodput["ours"] >= 1.3 * best,
        )
    )
    return rows


def leak(given: argparse.Namespace) -> list[Row]:
    """Must-show 3: memory and descriptors of front and replica over many requests on a model of 0 ms."""
    with Fleet(fixed_latency(latency_ms=0.0, row_ms=0.0, num_steps=1, horizon=2), BUCKETS) as fleet:
        run = fleet.drive(robots=16, requests=given.leak_requests, deadline_ms=5000.0, sample_s=2.0)
    rows: list[Row] = []
    for name, samples in run.memory.items():
        done, rss, descriptors = samples[len(samples) // 4 :].T  # the first quarter fills pools and windows
        slope = float(np.polyfit(done / 1e5, rss / 1e6, 1)[0])
        figure = f"{slope:+.2f} MB per 100k requests, {rss[0] / 1e6:.1f} -> {rss[-1] / 1e6:.1f} MB, n {int(done[-1])}"
        rows.append((f"leak: {name}, RSS", figure, slope <= 1.0))
        change = int(descriptors.max() - descriptors.min())
        rows.append((f"leak: {name}, descriptors", f"{int(descriptors[-1])}, changed by {change}", change <= 2))
    rows.append(("leak: rate", f"{run.rate_hz():.0f} requests/s", None))
    return rows


def transport(given: argparse.Namespace) -> list[Row]:
    """Must-show 5: three 224x224 cameras, every image new, raw, over TCP on this host."""
    with Fleet(fixed_latency(latency_ms=0.0, row_ms=0.0, cameras=3), (1,), robot="aloha") as fleet:
        rows: list[Row] = []
        for name, robots in (("one robot", 1), ("four robots", 4)):
            run = fleet.drive(robots=robots, hz=10.0, seconds=given.transport_s, deadline_ms=1000.0)
            stages = run.stages_ms()
            held = bool(np.median(run.transport_ms()) <= 2.0) if robots == 1 else None
            of = f"transport: {name}, 3 x 224x224"
            rows.append((f"{of}: serialise, robot to server and back", _percentiles(run.transport_ms()), held))
            rows.append((f"{of}: and the server's way to its replica and back", _percentiles(stages["queue"]), None))
    return rows


def _percentiles(ms: Any) -> str:
    p50, p99 = np.percentile(ms, (50, 99))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, n {len(ms)}"


def fuzz(given: argparse.Namespace) -> list[Row]:
    """Must-show 4."""
    import fleet_fuzz  # here: the other parts also run where hypothesis is not installed

    return fleet_fuzz.fuzz(given.fuzz_inputs)


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "load": load,
    "overload": overload,
    "leak": leak,
    "fuzz": fuzz,
    "transport": transport,
}


def main() -> int:
    """Every part in turn; a part that fails to run is a claim that does not hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=tuple(PARTS), nargs="*", default=list(PARTS))
    parser.add_argument("--requests", type=int, default=30_400)
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--leak-requests", type=int, default=600_000)
    parser.add_argument("--fuzz-inputs", type=int, default=1_000_000)
    parser.add_argument("--transport-s", type=float, default=30.0)
    given = options(parser)
    rows: list[Row] = []
    for name in given.only:
        began = time.monotonic()
        try:
            found = PARTS[name](given)
        except Exception as error:  # the other parts still run
            found = [(name, f"{type(error).__name__}: {error}"[:300], False)]
        for row in found:  # as they come: the table is minutes away
            print(*row, sep=" | ", file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rows += found
    return conclude(f"Engine server under load ({host()})", rows, log=given.log)


if __name__ == "__main__":
    sys.exit(main())
