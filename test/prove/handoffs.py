"""Handoffs of the real node that drives the simulated arm, with injected inference delays and three schedules.

The model's plans go to one side of the path or the other, as its noise chooses, so that chunks which are not made to
continue one another differ in kind. What is counted is what the commands say on the wire. A chunk has 32 steps of
20 ms, s is 16: 400 ms are beyond H - s, and the node must fall back.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from evidence import conclude, fake_model, options
from phyai_policy.msg import ActionStep, ChunkTiming
from stand import Stand

from phyai_engine.types import CommandKind

Row = tuple[str, str, bool | None]
HORIZON, S, SPREAD_MS = 32, 16, 20.0
DELAYS_MS = (0.0, 50.0, 100.0, 200.0, 400.0)
MODEL = {
    "horizon": HORIZON,
    "num_steps": 10,
    "image_size": 16,
    "period_steps": 400.0,
    "detour": 0.006,  # a change of sides from one step to the next is below the arm's velocity_max
    "latency_spread_ms": SPREAD_MS,
}


@dataclass(frozen=True)
class Case:
    """One condition. :param model: changes of the fake model. :param player: a player node plays."""

    title: str
    schedule: str
    model: Mapping[str, float]
    guidance: str = ""
    player: bool = False


@dataclass
class Heard:
    """What one condition showed. :param bases: chunk_id -> steps played before its row 0, in the player's count."""

    steps: Sequence[ActionStep]
    timings: Sequence[ChunkTiming]
    bases: Mapping[int, int] = field(default_factory=dict)


def accepted(timings: Iterable[ChunkTiming]) -> list[ChunkTiming]:
    """The handoffs."""
    return [t for t in timings if t.outcome == ChunkTiming.OUTCOME_ACCEPTED]


def count_bases(timings: Iterable[ChunkTiming]) -> dict[int, int]:
    """chunk_id -> step of its row 0: each request is cut s rows into the chunk before."""
    bases: dict[int, int] = {}
    base = 0
    for i, timing in enumerate(accepted(timings)):
        base += timing.execution_steps if i else 0
        bases[timing.chunk_id] = base
    return bases


def wrong_steps(heard: Heard) -> list[str]:
    """Every action that is not the step after the one before, in a row of actions or across a hold."""
    played = [s for s in heard.steps if s.kind == CommandKind.ACTION and s.chunk_id in heard.bases]
    wrong = []
    for a, b in pairwise(played):
        before, now = heard.bases[a.chunk_id] + a.step, heard.bases[b.chunk_id] + b.step
        if now != before + 1:
            wrong.append(f"chunk {b.chunk_id} row {b.step} is step {now} after step {before}")
    return wrong


def jumps(steps: Sequence[ActionStep]) -> dict[int, float]:
    """chunk_id -> largest |its first row - the command before| on the wire."""
    found: dict[int, float] = {}
    for a, b in pairwise(steps):
        if b.kind == CommandKind.ACTION and b.chunk_id != a.chunk_id and b.tick == a.tick + 1:
            found[b.chunk_id] = float(np.abs(np.array(b.values) - np.array(a.values)).max())
    return found


def late_by_count(heard: Heard) -> tuple[int, int]:
    """Conditioned handoffs told late whose first row played was not beyond d; and those beyond d told in time."""
    first: dict[int, int] = {}
    for step in heard.steps:
        if step.kind == CommandKind.ACTION:
            first.setdefault(step.chunk_id, step.step)
    falsely = unseen = 0
    for t in accepted(heard.timings):
        if t.chunk_id in first and not np.isnan(t.m_cond_s):
            late = first[t.chunk_id] > t.delay_predicted_steps
            falsely += t.m_cond_s < 0 and not late
            unseen += late and t.m_cond_s >= 0
    return falsely, unseen


def percentiles(values: Iterable[float], form: str = ".3g") -> str:
    """p50, p99 and n of what was measured."""
    finite = np.array([v for v in values if np.isfinite(v)])
    if not len(finite):
        return "-"
    return f"p50 {np.percentile(finite, 50):{form}}, p99 {np.percentile(finite, 99):{form}}, n {len(finite)}"


def listen(case: Case, handoffs: int) -> Heard:
    """Drive until so many handoffs were heard."""
    rtc = {"guidance": case.guidance} if case.guidance else {}
    parameters: dict[str, Any] = {
        "model": fake_model(rtc, **{**MODEL, **case.model}),
        "schedule": case.schedule,
        "execution_horizon": S,
    }
    stand = Stand(parameters=parameters, player={} if case.player else None)
    try:
        stand.until(lambda: len(stand.timings) > handoffs, 4.0 + handoffs, f"{handoffs} handoffs of {case.title}")
        steps, timings = [m for _, m in stand.heard], [t for _, t in stand.timings]
        bases = {c.chunk_id: c.base_step for c in stand.chunks} if case.player else count_bases(timings)
    finally:
        stand.close()
    return Heard(steps, timings, bases)


def judge(case: Case, heard: Heard) -> list[Row]:
    """The rows of one condition."""
    handoffs, wrong = accepted(heard.timings), wrong_steps(heard)
    played = sum(s.kind == CommandKind.ACTION for s in heard.steps)
    holds = sum(s.kind == CommandKind.HOLD for s in heard.steps)
    refused = len(heard.timings) - len(handoffs)
    fallbacks = Counter(t.fallback for t in handoffs if t.fallback)
    late = sum(t.m_cond_s < 0 for t in handoffs)
    out = sum(t.m_exhaust_s < 0 for t in handoffs)
    told = ", ".join(f"{name} {n}" for name, n in fallbacks.most_common()) or "none"
    text = (
        f"wrong steps {len(wrong)} of {played}; holds {holds}; late {late}, ran out {out}, refused {refused} "
        f"of {len(heard.timings)}; fallback {told}; d' p99 {np.percentile([t.delay_steps for t in handoffs], 99):.0f}"
    )
    held = not wrong and ("sync" in fallbacks or case.schedule == "sync" or case.model["latency_ms"] < 320.0)
    if case.player:  # where this process plays, a late tick makes a handoff late in time and not in steps
        falsely, unseen = late_by_count(heard)
        text += f"; told late though no step was {falsely}, told in time though one was {unseen}"
        held = held and not falsely
    rows: list[Row] = [(case.title, text, held)]
    wire = jumps(heard.steps)
    ratios = percentiles(t.jump_ratio for t in handoffs)
    seams = (
        f"jump ratio {ratios}; jump {percentiles(wire.values())} rad; jerk {percentiles(t.jerk for t in handoffs)}; "
        f"frozen error {percentiles(t.frozen_error for t in handoffs)} rad; "
        f"action age {percentiles((t.age_last_s for t in handoffs), '.2f')} s"
    )
    same = all(abs(wire[t.chunk_id] - t.jump) < 1e-9 for t in handoffs if t.chunk_id in wire and np.isfinite(t.jump))
    rows.append((f"{case.title}: seams", seams, same if not case.player else None))
    return rows


def cases(guidance: Sequence[str]) -> list[Case]:
    """Every schedule at every delay, and three in which delays change or a player node plays."""
    modes = [("sync", ""), ("naive_async", ""), *(("rtc", g) for g in guidance)]
    found = [
        Case(f"{schedule} {g}".strip() + f", {ms:.0f} ms", schedule, {"latency_ms": ms}, g)
        for schedule, g in modes
        for ms in DELAYS_MS
    ]
    now_and_then = {"latency_ms": 50.0, "slow_every": 12, "slow_ms": 300.0}
    found += [
        Case(f"{schedule}, 50 ms, every 12th 350 ms", schedule, now_and_then, guidance[0] if schedule == "rtc" else "")
        for schedule in ("naive_async", "rtc")
    ]
    return [*found, Case("rtc, 100 ms, output chunks", "rtc", {"latency_ms": 100.0}, guidance[0], player=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handoffs", type=int, default=100, help="of each condition")
    parser.add_argument("--only", default="", help="only conditions whose title has this text")
    parser.add_argument("--guidance", nargs="*", default=[""], help="of rtc; the model's default if not given")
    chosen = options(parser)
    rows: list[Row] = []
    for case in cases(chosen.guidance):
        if chosen.only not in case.title:
            continue
        found = judge(case, listen(case, chosen.handoffs))
        print(*(f"{what}: {measured} {held}" for what, measured, held in found), sep="\n", flush=True)
        rows += found
    title = f"handoffs: {chosen.handoffs} each, injected delay + up to {SPREAD_MS:.0f} ms, H {HORIZON}, s {S}, 50 Hz"
    return conclude(title, rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
