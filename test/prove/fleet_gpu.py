"""How many robots one GPU serves: pi0.5 at full size, random weights, behind `phyai serve`; simulated robots before it.

    python test/prove/fleet_gpu.py --points 32:2:200 100:1:400      robots : requests a second of each : deadline in ms

Three 224x224 cameras, raw, every image new; server, robots and the stall monitor are processes of this host, over TCP.
A request's L_critical here is from asking to the chunk in the robot's hands: queue, inference and the rest (transfer).
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from evidence import conclude, host, options
from fleet_rig import Fleet, Run

from phyai_engine.timing import miss_upper95

POINTS = ("32:2:200", "32:1:400", "100:1:400", "100:2:200")
EPS = 1e-3


def row(point: str, run: Run, deadline_ms: float) -> tuple[str, str, bool | None]:
    """One line of the table; nothing is claimed of a point beyond what the GPU can do."""
    missed, answered = run.missed(deadline_ms), run.answered()
    stages = {
        "total": run.total_ms()[answered],
        "queue": run.columns["queue_ms"][answered],
        "inference": run.columns["inference_ms"][answered],
        "transfer": run.transport_ms(),
    }
    figures = [f"{name} {np.percentile(ms, 50):.1f}/{np.percentile(ms, 99):.1f}" for name, ms in stages.items()]
    upper = miss_upper95(int(missed.sum()), len(missed))
    clean = ~run.stalled()
    words = f"p50/p99 ms: {', '.join(figures)}; {run.columns['rows'][answered].mean():.1f} rows a batch; "
    words += f"misses {missed.sum()} of {len(missed)} ({missed.mean():.1e}, upper {upper:.1e})"
    words += f", {(missed & clean).sum()} outside host stalls"
    return point, words, None


def main() -> int:
    """Every point against one server; a point that fails is printed and the next one runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", nargs="*", default=list(POINTS))
    parser.add_argument("--requests", type=int, default=3000, help="of each point")
    parser.add_argument("--longest-s", type=float, default=60.0, help="of a point, whatever the requests")
    parser.add_argument("--model", default="pi05")
    parser.add_argument("--robot", default="aloha")
    parser.add_argument("--buckets", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=4)
    given = options(parser)
    began = time.monotonic()
    rows: list[tuple[str, str, bool | None]] = []
    with Fleet({}, given.buckets, robot=given.robot, model_file=given.model, threads=given.threads) as fleet:
        rows.append(("ready after", f"{time.monotonic() - began:.0f} s", None))
        rows += [("warm-up", line.partition("ready")[2], None) for line in fleet.log().splitlines() if " rows " in line]
        for point in given.points:
            robots, hz, deadline_ms = (float(part) for part in point.split(":"))
            seconds = min(given.longest_s, given.requests / (robots * hz))
            try:
                run = fleet.drive(robots=int(robots), hz=hz, seconds=seconds, deadline_ms=deadline_ms)
                rows.append(row(f"{robots:.0f} robots, {hz:g} Hz, {deadline_ms:g} ms", run, deadline_ms))
            except Exception as error:
                rows.append((point, f"{type(error).__name__}: {error}"[:300], False))
            print(rows[-1], flush=True)
        rows += [(name, value, None) for name, value in fleet.status().items() if name.startswith("model")]
    return conclude(f"Robots on one GPU ({host()})", rows, log=given.log)


if __name__ == "__main__":
    sys.exit(main())
