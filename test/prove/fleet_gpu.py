"""How many robots one GPU serves, and two: pi0.5 at full size, random weights, behind `phyai serve`.

    python test/prove/fleet_gpu.py --out FOLDER            every GPU that is here, two at most; ends within --seconds
    python test/prove/fleet_gpu.py --fake 16:10 ...        a rehearsal without one: 16 ms, 10 ms for each further row

Servers, robots and stall monitors are processes of this host, over TCP. Every server starts at once, and waits while
the others are measured. With two GPUs both are measured at the same time, by one server each, then together by one.
Robots ask at a fixed rate with three 224x224 cameras, raw unless said, every image new; L_critical is from asking to
the chunk in the robot's hands. A part that fails, or for which no time is left, is a row that says so.

Robots per GPU: short runs around what the batcher does in virtual time with this server's own latencies, then one of
at least --requests that counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkout
import numpy as np
from evidence import conclude, host, options, show
from fleet_rig import Fleet, Run, fixed_latency
from fleet_search import Rate, predicted, search

from phyai_engine.timing import miss_upper95

FAST, SLOW = Rate(2.0, 200.0), Rate(1.0, 400.0)
EPS, SCALE = 1e-3, 1.9
OVERLOAD = 100  # robots a GPU at FAST: about twice what one can do
DENSE, POWERS = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 8)
START_STOP_S = 3.0  # of the processes of one run
JPEG = 90
COLUMNS = (
    *("point", "n", "total", "serialise", "network", "queue", "for rows", "inference", "rows", "missed (upper 95 %)"),
    *("not in host stalls", "in time /s", "busy", "cores: front, replicas, robots"),
)
Row = tuple[str, str, "bool | None"]


@dataclass
class Proof:
    """What was measured; for several threads.

    :param end_s: monotonic, when everything must be over.
    """

    given: argparse.Namespace
    end_s: float
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[Row] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, fleet: Fleet, name: str, robots: int, rate: Rate, seconds: float, **more: float) -> dict[str, Any]:
        """One run, its figures kept under ``name``.

        :raises TimeoutError: it would not end in time. :raises Exception: whatever a process of it does.
        """
        if (left_s := self.end_s - time.monotonic()) < (needs_s := seconds + START_STOP_S):
            raise TimeoutError(f"{needs_s:.0f} s do not fit into the {left_s:.0f} s that are left")
        seen = fleet.drive(
            robots=robots, crews=self.given.crews, hz=rate.hz, seconds=seconds, deadline_ms=rate.deadline_ms, **more
        )
        figures = figures_of(seen, robots, rate)
        self.keep(name, figures)
        return figures

    def enough_s(self, robots: int, rate: Rate) -> float:
        """A run of so long has the requests that count."""
        return float(self.given.requests / (robots * rate.hz)) + 0.5

    def keep(self, name: str, figures: dict[str, Any]) -> None:
        """Also in the file: what comes later may not end."""
        with self.lock:
            self.points[name] = figures
            print(f"{time.strftime('%X')} {' | '.join(line(name, figures))}", flush=True)
            if self.given.out:
                (Path(self.given.out) / "fleet_gpu.json").write_text(
                    json.dumps(self.points, indent=1), encoding="utf-8"
                )

    def note(self, what: str, figure: str, held: bool | None = None) -> None:
        """A row of the last table."""
        with self.lock:
            self.notes.append((what, figure, held))
            print(f"{time.strftime('%X')} {what}: {figure}", flush=True)

    def attempt(self, name: str, work: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """What ``work`` returns; None where it fails, which is said."""
        try:
            return work(*arguments, **more)
        except Exception as error:
            missing = isinstance(error, TimeoutError)
            self.note(name, f"{type(error).__name__}: {error}"[:400], None if missing else False)
            return None


def figures_of(seen: Run, robots: int, rate: Rate) -> dict[str, Any]:
    """One run as plain values; stages p50 and p99 in ms."""
    missed = seen.missed(rate.deadline_ms)
    upper = miss_upper95(int(missed.sum()), len(missed))
    answered = seen.answered()
    stages = {
        name: [float(p) for p in np.percentile(ms, (50, 99))] if len(ms) else [float("nan")] * 2
        for name, ms in seen.stages_ms().items()
    }
    return {
        "robots": robots,
        "hz": rate.hz,
        "deadline_ms": rate.deadline_ms,
        "n": len(missed),
        "stages_ms": stages,
        "rows": float(seen.columns["rows"][answered].mean()) if answered.any() else float("nan"),
        "missed": int(missed.sum()),
        "upper": upper,
        "missed_outside_stalls": int((missed & ~seen.stalled()).sum()),
        "in_time_hz": float((~missed).sum()) / seen.seconds(),
        "busy": seen.busy(),
        "cores": seen.cores,
        "inference_ms_by_rows": by_rows(seen),
    }


def by_rows(seen: Run) -> dict[int, list[float]]:
    """Rows of a batch -> median ms of its inference, of that on the device, and how often it was seen."""
    c, answered = seen.columns, seen.answered()
    table = {}
    for rows in sorted(set(c["rows"][answered].astype(int)) - {0}):
        those = answered & (c["rows"] == rows)
        medians = [float(np.median(c[name][those])) for name in ("inference_ms", "device_ms")]
        table[int(rows)] = [*medians, float(those.sum() / rows)]
    return table


def line(name: str, f: dict[str, Any]) -> list[str]:
    """Cells of COLUMNS."""
    pairs = [f"{p50:.1f}/{p99:.1f}" for p50, p99 in f["stages_ms"].values()]
    missed = f"{f['missed'] / f['n']:.1e} ({f['upper']:.1e})"
    cores = ", ".join(f"{f['cores'][who]:.2f}" for who in ("front", "replicas", "robots"))
    cells = [name, str(f["n"]), *pairs, f"{f['rows']:.1f}", missed, str(f["missed_outside_stalls"])]
    return [*cells, f"{f['in_time_hz']:.1f}", f"{f['busy']:.2f}", cores]


# --- parts ---


def overloads(proof: Proof, fleets: dict[str, Fleet], scale: int) -> None:
    """Goodput of each way to set one GPU up; the first is what everything else is measured with."""
    for name in ("dense", "powers of two", "two replicas share it"):
        if (fleet := fleets.get(name)) is not None:
            label = f"{scale} robots, {FAST}: {name}"
            proof.attempt(label, proof.run, fleet, label, scale, FAST, proof.given.screen_s)


def points(proof: Proof, fleet: Fleet, rate: Rate, counts: Sequence[int], where: str = "") -> None:
    """The points that were asked for."""
    for robots in counts:
        label = f"{robots} robots, {rate}{where}"
        proof.attempt(label, proof.run, fleet, label, robots, rate, proof.enough_s(robots, rate))


def most(proof: Proof, fleet: Fleet, rate: Rate, gpus: int) -> int:
    """Robots served within EPS; 0 where none was found."""
    where = f"{gpus} GPU{'s' * (gpus > 1)}, {rate}"
    guess = predicted(fleet.status()["model batch"], rate, gpus, proof.given.buckets)
    proof.note(f"{where}: robots in virtual time", str(guess))

    def screened(robots: int) -> bool:
        figures = proof.run(fleet, f"{where}: search, {robots} robots", robots, rate, proof.given.screen_s)
        return bool(figures["missed"] <= EPS * figures["n"])

    def counted(robots: int) -> bool:
        label = f"{where}: {robots} robots"
        figures = proof.run(fleet, label, robots, rate, proof.enough_s(robots, rate))
        held = figures["missed"] <= EPS * figures["n"]
        if held:
            words = f"{robots}; missed {figures['missed']} of {figures['n']}, upper 95 % {figures['upper']:.1e}"
            proof.note(f"{where}: robots at <= {EPS:g} misses", words)
        return bool(held)

    return search(guess, screened, counted, tries=5 if gpus == 1 else 3) or 0


def warm(proof: Proof, fleet: Fleet, gpus: int) -> None:
    """Not measured: the batcher learns what batches take with such images, the clocks come up."""
    fleet.drive(robots=24 * gpus, crews=proof.given.crews, hz=2.0, seconds=proof.given.warm_s, deadline_ms=400.0)


def one_gpu(proof: Proof, fleets: dict[str, Fleet], rates: Sequence[Rate], found: dict[Any, int]) -> None:
    """Everything that one GPU is asked; ``fleets`` are its servers."""
    for name, each in fleets.items():
        proof.attempt(f"warm-up: {name}", warm, proof, each, 1)
    if (fleet := fleets.get("dense")) is None:
        return
    if FAST in rates:
        overloads(proof, fleets, proof.given.overload)
    for rate in rates:
        points(proof, fleet, rate, proof.given.robots)
        found[1, rate] = proof.attempt(f"1 GPU, {rate}: search", most, proof, fleet, rate, 1) or 0
    if FAST in rates:
        robots = proof.given.robots[0]
        label, seconds = f"{robots} robots, {FAST}: JPEG {JPEG}", proof.enough_s(robots, FAST)
        proof.attempt(label, proof.run, fleet, label, robots, FAST, seconds, jpeg_quality=JPEG)


def two_gpus(proof: Proof, fleet: Fleet, found: dict[Any, int]) -> None:
    """One server with a replica on each GPU, against one GPU."""
    proof.attempt("warm-up: 2 GPUs", warm, proof, fleet, 2)
    robots = 2 * proof.given.overload
    label, single = f"{robots} robots, {FAST}: 2 GPUs", f"{proof.given.overload} robots, {FAST}: dense"
    both = proof.attempt(label, proof.run, fleet, label, robots, FAST, proof.given.screen_s)
    if both is not None and single in proof.points:
        ratio = both["in_time_hz"] / proof.points[single]["in_time_hz"]
        proof.note(f"1 -> 2 GPUs: answers in time, overloaded (>= {SCALE})", f"{ratio:.2f}x", ratio >= SCALE)
    scaled(proof, fleet, FAST, found)
    for rate in (FAST, SLOW):
        points(proof, fleet, rate, proof.given.robots[-1:], ": 2 GPUs")
    scaled(proof, fleet, SLOW, found)
    for rate in (FAST, SLOW):
        points(proof, fleet, rate, proof.given.robots[:-1], ": 2 GPUs")


def scaled(proof: Proof, fleet: Fleet, rate: Rate, found: dict[Any, int]) -> None:
    """Robots on both GPUs against robots on one."""
    served, alone = proof.attempt(f"2 GPUs, {rate}: search", most, proof, fleet, rate, 2), found.get((1, rate))
    if served and alone:
        what = f"1 -> 2 GPUs: robots at <= {EPS:g} misses, {rate} (>= {SCALE})"
        proof.note(what, f"{alone} -> {served}, {served / alone:.2f}x", served / alone >= SCALE)


# --- the whole ---


def started(given: argparse.Namespace, gpus: int) -> dict[tuple[int, str], Fleet]:
    """(GPU, how it is set up) -> server, not yet ready; GPU -1: both."""
    wanted: dict[tuple[int, str], tuple[Sequence[int], Sequence[int]]] = {(0, "dense"): (given.buckets, (0,))}
    if gpus > 1:
        wanted |= {(1, "dense"): (given.buckets, (1,)), (-1, "dense"): (given.buckets, (0, 1))}
    if given.variants:
        wanted |= {(0, "powers of two"): (POWERS, (0,)), (0, "two replicas share it"): (given.buckets, (0, 0))}
    made = {}
    for name, (buckets, devices) in wanted.items():
        if given.fake:
            base, row = (float(ms) for ms in given.fake.split(":"))
            model = fixed_latency(cameras=3, latency_ms=base, row_ms=row, horizon=50, num_steps=10)
            served: dict[str, Any] = {"replicas": len(devices)}
            made[name] = Fleet(model, buckets, robot="aloha", start_s=given.start_s, **served)
        else:
            served = {"devices": list(devices), "share_devices": len(set(devices)) < len(devices), "threads": 4}
            made[name] = Fleet({}, buckets, robot="aloha", model_file=given.model, start_s=given.start_s, **served)
    return made


def awaited(proof: Proof, fleets: dict[tuple[int, str], Fleet], stack: contextlib.ExitStack) -> None:
    """Wait for every server; one that does not start is taken out, and said."""
    for name, fleet in list(fleets.items()):
        if proof.attempt(f"start of {name}", stack.enter_context, fleet) is None:
            del fleets[name]
            continue
        proof.note(f"ready: GPU {name[0]}, {name[1]}", f"{time.monotonic() - proof.end_s + proof.given.seconds:.0f} s")
        for text in fleet.log().splitlines():
            if " rows " in text:
                proof.note("  warm-up (640x480 images)", text.partition("; ")[2])


def gpus_here() -> int:
    """Without torch, which would take memory on each of them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30.0, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return listed.count("GPU ")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=0, help="0: those that are here, two at most")
    parser.add_argument("--seconds", type=float, default=570.0, help="for everything")
    parser.add_argument("--requests", type=int, default=3200, help="of each run that counts")
    parser.add_argument("--robots", type=int, nargs="*", default=[32, 100])
    parser.add_argument("--overload", type=int, default=OVERLOAD, help="robots a GPU")
    parser.add_argument("--screen-s", type=float, default=10.0, help="of a run that only looks")
    parser.add_argument("--warm-s", type=float, default=4.0)
    parser.add_argument("--start-s", type=float, default=240.0, help="for a server to get ready")
    parser.add_argument("--buckets", type=int, nargs="*", default=list(DENSE))
    parser.add_argument("--variants", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--crews", type=int, default=4, help="processes for the robots of one run")
    parser.add_argument("--model", default="pi05")
    parser.add_argument("--fake", default="", help="ms of one row : ms of each further row; no GPU")
    parser.add_argument("--out", default="", help="folder for fleet_gpu.json")
    given = options(parser)
    gpus = given.gpus or min(2, gpus_here()) or 1
    proof, found = Proof(given, time.monotonic() + given.seconds), dict[Any, int]()
    with tempfile.TemporaryDirectory() as site, contextlib.ExitStack() as stack:
        checkout.for_children(Path(site))
        fleets = started(given, gpus)
        awaited(proof, fleets, stack)
        of = [{name: fleet for (gpu, name), fleet in fleets.items() if gpu == index} for index in range(gpus)]
        lanes = [(of[0], (FAST, SLOW))] if gpus == 1 else [(of[0], (FAST,)), (of[1], (SLOW,))]
        threads = [threading.Thread(target=one_gpu, args=(proof, servers, rates, found)) for servers, rates in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if (both := fleets.get((-1, "dense"))) is not None:
            two_gpus(proof, both, found)
        model = f"FAKE {given.fake}" if given.fake else given.model
        title = f"robots on {gpus} GPU{'s' * (gpus > 1)} ({model}; {host()})"
        show(f"{title}, stages p50/p99 ms", COLUMNS, [line(*point) for point in proof.points.items()], log=given.log)
        return conclude(title, proof.notes, log=given.log)  # before the servers end: that, too, takes seconds


if __name__ == "__main__":
    sys.exit(main())
