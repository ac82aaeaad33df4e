"""Robots whose engine is one server: it is killed and started again; the network is cut for 2 s, and loses 30 %.

Real policy nodes over ROS, each with its arm; `phyai serve` with a model of 20 ms; a proxy for the network's faults.
Two settings of engine_heartbeat_s: above the outage the robots hold when their chunk ends and go on by themselves,
below it they stop, latch, and are re-armed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import numpy as np
from evidence import conclude, options
from fleet_stand import CHUNK_S, DT_S, FleetStand
from phyai_policy.msg import ChunkTiming, PolicyStatus
from proxy import Faults
from rich.progress import Progress

from phyai_engine.types import AbortCause, CommandKind

CUT_S = 2.0
SLACK_S = 0.15
PATIENT = {"engine_heartbeat_s": 20.0, "request_timeout_s": 30.0, "max_hold_s": 60.0, "max_misses": 0}
STRICT = {"engine_heartbeat_s": 1.0}
SAFE = (CommandKind.HOLD, CommandKind.STOP)
Row = tuple[str, str, bool | None]


@dataclass
class Outage:
    """Cycles of one kind of outage, all robots; seconds."""

    name: str
    bound_s: float
    safe_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    stops: int = 0
    old: int = 0

    def rows(self, robots: int) -> list[Row]:
        """What was measured."""
        n = f"n {len(self.safe_s)} ({robots} robots)"
        kept = bool(self.safe_s) and max(self.safe_s) <= self.bound_s
        safe = f"p50 {np.median(self.safe_s):.3f} s, max {max(self.safe_s):.3f} s, {n}"
        back = f"p50 {np.median(self.back_s):.2f} s, max {max(self.back_s):.2f} s"
        return [
            (f"{self.name}: begin -> every robot holds or stops (<= {self.bound_s:.2f} s)", safe, kept),
            (f"{self.name}: recovery, see above", back, None),
            (f"{self.name}: old actions afterwards", str(self.old), self.old == 0),
        ]


def kill_and_restart(stand: FleetStand, outage: Outage, *, rearm: bool) -> None:
    """SIGKILL the server; start it again; recovery counts from its word `ready`."""
    began = time.monotonic()
    stand.server.process.kill()
    if rearm:
        outage.safe_s += stand.each((CommandKind.STOP,), began, 10.0, "STOP")
        stand.latched(AbortCause.ENGINE_LOST)
    else:
        outage.safe_s += stand.each(SAFE, began, 10.0, "HOLD")
    stand.server.kill()
    stand.server.start()
    recover(stand, outage, time.monotonic(), rearm=rearm)


def cut(stand: FleetStand, outage: Outage, *, rearm: bool) -> None:
    """Nothing passes for CUT_S; recovery counts from its end."""
    began = time.monotonic()
    stand.proxy.cut()
    if rearm:
        outage.safe_s += stand.each((CommandKind.STOP,), began, 10.0, "STOP")
        stand.latched(AbortCause.ENGINE_LOST)
    else:
        outage.safe_s += stand.each(SAFE, began, 10.0, "HOLD")
    stand.spin(max(0.0, began + CUT_S - time.monotonic()))
    stand.proxy.mend()
    recover(stand, outage, time.monotonic(), rearm=rearm)


def recover(stand: FleetStand, outage: Outage, since: float, *, rearm: bool) -> None:
    """Every robot moves again; and then so for more than a chunk."""
    if rearm:
        stand.spin(0.5)  # nobody moves by himself
        assert not any(r.first((CommandKind.ACTION,), since) for r in stand.robots), "it resumed by itself"
        outage.back_s += stand.rearmed()
    else:
        outage.back_s += stand.each((CommandKind.ACTION,), since, 30.0, "every robot to move again")
        outage.stops += sum(1 for r in stand.robots if r.first((CommandKind.STOP,), since - 60.0))
    stand.spin(CHUNK_S + 0.2)
    outage.old = stand.old
    stand.moving()


def outages(count: int, robots: int, progress: Progress) -> list[Row]:
    """Both outages under both settings."""
    rows: list[Row] = []
    for words, parameters, rearm in (("holds", PATIENT, False), ("latches", STRICT, True)):
        # A chunk that was accepted as it began lasts so long; with a limit below, the stop comes first.
        bound_s = (STRICT["engine_heartbeat_s"] if rearm else CHUNK_S) + SLACK_S
        kill = Outage(f"server SIGKILL, restart ({words})", bound_s)
        network = Outage(f"cut of {CUT_S:g} s ({words})", bound_s)
        stand = FleetStand(robots, parameters)
        try:
            for _ in progress.track(range(count), description=words):
                kill_and_restart(stand, kill, rearm=rearm)
                cut(stand, network, rearm=rearm)
        finally:
            codes = stand.close()
        rows += [*kill.rows(robots), *network.rows(robots)]
        if not rearm:
            rows.append(("stops among them", str(kill.stops + network.stops), kill.stops + network.stops == 0))
        rows.append(("exit codes of the nodes", "all 0" if not any(codes) else str(codes), not any(codes)))
    return rows


def lossy(seconds: float, robots: int, jpeg_quality: int) -> list[Row]:
    """30 % of the segments are lost and come again; the robots go on, and hold where a chunk comes too late."""
    stand = FleetStand(robots, {**PATIENT, "engine_jpeg_quality": jpeg_quality})
    try:
        stand.moving()
        stand.proxy.faults = Faults(delay_s=0.005, jitter_s=0.005, loss=0.3)
        began = time.monotonic()
        stand.spin(seconds)
        stand.proxy.faults = Faults()
        heard = [m for r in stand.robots for at, m in r.heard if at > began]
        timings = [t for r in stand.robots for t in r.timings]
        ran = time.monotonic() - began
        stand.moving()
    finally:
        codes = stand.close()
    kinds = {kind: sum(m.kind == kind for m in heard) for kind in (CommandKind.ACTION, *SAFE)}
    accepted = [t for t in timings if t.outcome == ChunkTiming.OUTCOME_ACCEPTED]
    late = sum(t.refusal == PolicyStatus.REFUSAL_EXHAUSTED for t in timings)
    transfer = np.array([t.l_transfer_s for t in accepted]) * 1e3
    p50, p99 = np.percentile(transfer, [50, 99])
    share = kinds[CommandKind.HOLD] / max(1, sum(kinds.values()))
    ticks = f"{kinds[CommandKind.ACTION]} actions, {kinds[CommandKind.HOLD]} holds ({share:.1%})"
    images = f"JPEG {jpeg_quality}" if jpeg_quality else "raw images"
    return [
        (
            f"30 % of segments lost, {images}, {ran:.0f} s, {robots} robots: ticks",
            ticks,
            sum(kinds.values()) * DT_S > 0.9 * ran,
        ),
        ("  chunks accepted; refused because they took longer than a chunk lasts", f"{len(accepted)}; {late}", None),
        ("  transfer ms of those accepted", f"p50 {p50:.0f}, p99 {p99:.0f}", None),
        ("  stops", str(kinds[CommandKind.STOP]), kinds[CommandKind.STOP] == 0),
        ("  old actions", str(stand.old), stand.old == 0),
        ("  exit codes of the nodes", "all 0" if not any(codes) else str(codes), not any(codes)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="outages of each kind under each setting")
    parser.add_argument("--robots", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="under loss")
    chosen = options(parser)
    with Progress() as progress:
        rows = outages(chosen.count, chosen.robots, progress)
    for jpeg_quality in (0, 80):
        rows += lossy(chosen.seconds, chosen.robots, jpeg_quality)
    return conclude("fleet faults: robots whose engine server or network fails", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
