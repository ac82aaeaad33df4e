"""~/abort call -> stop message in the caller, for models of 2 ms to 10 s a chunk in an engine process, and while that
engine is wedged: stopped by SIGSTOP, or holding its interpreter lock for ever.

Node, simulated arm and caller are three processes. Most aborts fall while an inference runs, some while a chunk plays.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from evidence import conclude, options
from rich.progress import Progress
from stand import Stand, end_hard
from std_srvs.srv import Trigger

from phyai_engine.types import AbortCause, SafetyState

OUT = Path("out/prove")
LATENCIES_MS = (2.0, 20.0, 200.0, 2000.0, 10000.0)
P99_MS, MAX_MS = 12.0, 30.0
PLAYING = 0.15  # share of the aborts that wait until a chunk plays
NODE = {"request_timeout_s": 600.0, "max_observation_age_s": 600.0, "max_hold_s": 0.0, "max_misses": 0}


@dataclass
class Series:
    """Aborts under one condition; times in ms from the call."""

    name: str
    stop_ms: list[float] = field(default_factory=list)
    reply_ms: list[float] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    old: int = 0
    codes: list[int] = field(default_factory=list)


def abort(stand: Stand, series: Series) -> None:
    """One call, its stop, its reply, the latch, the re-arm."""
    state = SafetyState(stand.status.safety_state).name.lower()
    series.states[state] = series.states.get(state, 0) + 1
    began = time.monotonic()
    future = stand.triggers["abort"].call_async(Trigger.Request())
    future.add_done_callback(lambda _: series.reply_ms.append((time.monotonic() - began) * 1e3))
    series.stop_ms.append(stand.safe(began, hold=False))
    stand.until(future.done, what="answer of ~/abort")
    stand.latched(AbortCause.SERVICE)
    stand.rearm()
    del stand.heard[:], stand.statuses[:-1], stand.timings[:], stand.chunks[:]


def measure(stand: Stand, latency_s: float, count: int, series: Series, progress: Progress) -> None:
    """Aborts at random instants, once the node knows where its robot is: before it has nothing to say to it."""
    stand.until(lambda: stand.hears_joints, what="the node hears the joints")
    for _ in progress.track(range(count), description=series.name):
        stand.spin(random.uniform(0.02, min(1.5, max(0.3, latency_s))))
        if random.random() < PLAYING and not series.name.endswith("wedged"):
            stand.until(lambda: stand.status.safety_state == SafetyState.RUNNING, 3 * latency_s + 10.0, "RUNNING")
            stand.spin(random.uniform(0.0, 0.3))
        abort(stand, series)
    series.old = stand.old


def at_latency(latency_ms: float, count: int, progress: Progress) -> Series:
    """A healthy engine."""
    series = Series(f"{latency_ms:g} ms a chunk")
    horizon = max(50, round(2 * latency_ms / 20.0))
    stand = Stand({"latency_ms": latency_ms, "horizon": horizon}, NODE)
    try:
        measure(stand, latency_ms * 1e-3, count, series, progress)
    finally:
        series.codes = stand.close()
    return series


def wedged(kind: str, count: int, progress: Progress) -> Series:
    """An engine that does nothing any more; its heartbeat has 30 s, so that it is not ended meanwhile."""
    series = Series(f"{kind}, wedged")
    model = {"latency_ms": 20.0, "horizon": 50}
    if kind == "GIL held":
        model |= {"gil_hold_s": 3000.0, "grace_runs": 2}
    while len(series.stop_ms) < count:
        stand = Stand(model, {**NODE, "engine_heartbeat_s": 30.0})
        try:
            stand.moving()
            if kind == "SIGSTOP":
                end_hard(stand.engine_pid, signal.SIGSTOP)
            stand.spin(1.5)  # the request that wedges has been made
            measure(stand, 0.2, min(50, count - len(series.stop_ms)), series, progress)
        finally:
            series.codes += stand.close()
    return series


def picture(all_series: list[Series]) -> None:
    """out/prove/abort.{json,html,svg}."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "abort.json").write_text(json.dumps([vars(s) for s in all_series], indent=1), encoding="utf-8")
    figure = go.Figure([go.Box(y=s.stop_ms, name=s.name, boxpoints="all", showlegend=False) for s in all_series])
    figure.add_hline(y=P99_MS, line_dash="dot", annotation_text=f"p99 bound {P99_MS:g} ms")
    figure.update_layout(title="~/abort call to stop message in the caller", yaxis_title="ms", yaxis_rangemode="tozero")
    figure.write_html(OUT / "abort.html", include_plotlyjs=True)
    (OUT / "abort.svg").write_text(svg(all_series), encoding="utf-8")


def svg(all_series: list[Series]) -> str:
    """Every abort as a point, one column a condition, the bounds as lines."""
    column, height, left, top = 110, 240, 50, 20
    width = left + column * len(all_series) + 10
    chance = random.Random(0)

    def y(ms: float) -> float:
        return top + height * (1.0 - min(ms, MAX_MS) / MAX_MS)

    style = "font:11px sans-serif;background:#fff"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 60}" style="{style}">']
    for ms in (0.0, 6.0, P99_MS, 18.0, 24.0, MAX_MS):
        colour = "#c33" if ms in (P99_MS, MAX_MS) else "#ddd"
        out.append(f'<path d="M{left} {y(ms):.1f}H{width}" stroke="{colour}"/>')
        out.append(f'<text x="{left - 6}" y="{y(ms) + 4:.1f}" text-anchor="end">{ms:g} ms</text>')
    for i, series in enumerate(all_series):
        middle = left + column * (i + 0.5)
        for ms in series.stop_ms:
            x = middle + chance.uniform(-0.3, 0.3) * column
            out.append(f'<circle cx="{x:.1f}" cy="{y(ms):.1f}" r="1.5" fill="#269" fill-opacity=".4"/>')
        p99 = np.percentile(series.stop_ms, 99)
        for line, words in enumerate((series.name, f"n {len(series.stop_ms)}, p99 {p99:.1f} ms")):
            at = height + top + 15 + 14 * line
            out.append(f'<text x="{middle:.0f}" y="{at}" text-anchor="middle">{words}</text>')
    return "\n".join([*out, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="aborts at each latency; half as many for each wedge")
    parser.add_argument("--seed", type=int, default=1)
    chosen = options(parser)
    random.seed(chosen.seed)
    with Progress() as progress:
        all_series = [at_latency(ms, chosen.count, progress) for ms in LATENCIES_MS]
        all_series += [wedged(kind, max(1, chosen.count // 2), progress) for kind in ("SIGSTOP", "GIL held")]
    picture(all_series)
    rows: list[tuple[str, str, bool | None]] = []
    for s in all_series:
        p50, p99 = np.percentile(s.stop_ms, [50, 99])
        states = ", ".join(f"{k} {v}" for k, v in sorted(s.states.items()))
        figure = f"p50 {p50:.2f}, max {max(s.stop_ms):.2f}, n {len(s.stop_ms)} ({states})"
        rows.append((f"{s.name}: call -> stop message ms", figure, bool(max(s.stop_ms) <= MAX_MS)))
    times = np.concatenate([s.stop_ms for s in all_series])
    replies = np.concatenate([s.reply_ms for s in all_series])
    p50, p99 = np.percentile(times, [50, 99])
    figure = f"p50 {p50:.2f}, p99 {p99:.2f}, max {times.max():.2f}, n {len(times)}"
    medians = [float(np.median(s.stop_ms)) for s in all_series]
    old, codes = sum(s.old for s in all_series), [c for s in all_series for c in s.codes]
    rows += [
        (f"all: call -> stop message ms (p99 <= {P99_MS:g})", figure, bool(p99 <= P99_MS)),
        ("medians of the conditions ms, least and greatest", f"{min(medians):.2f}, {max(medians):.2f}", None),
        ("call -> reply ms", f"p50 {np.median(replies):.2f}, max {replies.max():.2f}", None),
        ("old-epoch actions after a stop", str(old), old == 0),
        ("exit codes after SIGINT", "all 0" if not any(codes) else str(codes), not any(codes)),
    ]
    return conclude("abort: call -> stop, by model latency and with a wedged engine", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
