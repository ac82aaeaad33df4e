"""The study's plot as one SVG: success and median jump ratio against the delay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phyai_engine.panel import MUTED, Panel, key, line, page
from phyai_engine.rtc_study.result import Study
from phyai_engine.rtc_study.sampling import Method
from phyai_engine.rtc_study.scores import Cell

# Colour and dash: warm for what draws its chunks freely, cool for what conditions them.
LOOK = {
    Method.SYNC: ("#8792a0", "6 3"),
    Method.NAIVE_ASYNC: ("#c0312b", ""),
    Method.TEMPORAL_ENSEMBLE: ("#c47a12", ""),
    Method.BID: ("#8a5a3b", "6 3"),
    Method.IDENTITY: ("#16877a", ""),
    Method.GAUSS: ("#2e7d43", "2 3"),
    Method.VJP: ("#2463a6", ""),
    Method.VJP_EARLY: ("#5f9bd8", "6 3"),
    Method.TRAINED: ("#7d54a8", ""),
}


def svg(study: Study) -> str:
    """The whole file."""
    highest = max([cell.jump_ratio.p50 for cell in study.cells if cell.jump_ratio], default=1.0)
    success, jumps = _panels(study, highest)
    n = max(cell.episodes for cell in study.cells)
    parts = [
        *success.axes(),
        *jumps.axes(),
        line(jumps.left, jumps.y(1), jumps.right, jumps.y(1), MUTED, 1.2, "2 3"),
    ]
    methods = study.methods()
    for index, method in enumerate(methods):
        cells = [cell for cell in study.cells if cell.method == method.value]
        nudge = (index - (len(methods) - 1) / 2) * 0.03  # so that intervals do not cover one another
        parts += _curves(success, jumps, cells, nudge, *LOOK[method])
        parts += key(method.value, index, *LOOK[method])
    return page(f"phyai rtc-study, {n} episodes per point", parts)


def _panels(study: Study, highest: float) -> tuple[Panel, Panel]:
    last = max(study.delays())
    power = max(3, math.ceil(math.log2(max(highest, 1.0)) + 0.1))
    lowest = min(3, math.floor(4 * min(cell.success.low for cell in study.cells))) / 4  # the axis starts at a quarter
    columns = [(float(delay), str(delay)) for delay in range(last + 1)]
    below = "inference delay d [steps]"
    success = Panel(
        "success, 95 % interval",
        46,
        330,
        [tick for tick in (0.0, 0.25, 0.5, 0.75, 1.0) if tick >= lowest],
        lambda v: f"{100 * v:.0f} %",
        lambda v: (v - lowest) / (1.0 - lowest),
        last,
        columns,
        below,
    )
    jumps = Panel(
        "jump at the handoff / step in the chunk, median",
        388,
        672,
        [2.0**k for k in range(-1, power + 1)],
        lambda v: f"{v:g}",
        lambda v: (math.log2(max(v, 1e-6)) + 1) / (power + 1),
        last,
        columns,
        below,
    )
    return success, jumps


def _curves(success: Panel, jumps: Panel, cells: Sequence[Cell], nudge: float, colour: str, dash: str) -> list[str]:
    parts = success.curve([(c.delay_steps + nudge, c.success.share) for c in cells], colour, dash)
    parts += [success.interval(c.delay_steps + nudge, c.success.low, c.success.high, colour) for c in cells]
    ratios = [(c.delay_steps + nudge, c.jump_ratio.p50) for c in cells if c.jump_ratio]
    return [*parts, *jumps.curve(ratios, colour, dash)]
