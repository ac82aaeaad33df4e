"""Figures of evaluations as SVG: success of each task of one, success and jerk of several against the delay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phyai_engine.evaluate.scores import Summary
from phyai_engine.panel import Panel, key, page
from phyai_engine.types import Schedule

# Colour and dash of each way to hand off, as in the figure of rtc-study: warm where chunks are drawn freely.
SYNC, NAIVE = ("#8792a0", "6 3"), ("#c0312b", "")
GUIDED = {"trained": ("#7d54a8", ""), "vjp": ("#2463a6", "")}
IDENTITY = ("#16877a", "")


def _look(name: str) -> tuple[str, str]:
    fixed = {Schedule.SYNC.value: SYNC, Schedule.NAIVE_ASYNC.value: NAIVE}
    return fixed[name] if name in fixed else GUIDED.get(name.removeprefix("rtc "), IDENTITY)


def svg_of_tasks(summary: Summary) -> str:
    """One evaluation: every task with its interval."""
    names = [score.task for score in summary.tasks]
    panel = _shares(summary.title, 46, 672, list(enumerate(names)), "success, 95 % interval")
    colour, _ = _look(summary.condition.way)
    parts = panel.axes()
    for i, score in enumerate(summary.tasks):
        s = score.success
        parts += [*panel.curve([(i, s.share)], colour), panel.interval(i, s.low, s.high, colour)]
    return page(f"phyai eval, {summary.title}, {summary.all.n} episodes", parts)


def svg_of_cells(cells: Sequence[Summary]) -> str:
    """Several evaluations of the same episodes: success and jerk against the delay, one line per way to hand off."""
    delays = sorted({cell.condition.delay_ms for cell in cells})
    columns = [(delay, f"{delay:.0f}") for delay in delays]
    below = "delay from observation to chunk [ms]"
    success = _shares("success, 95 % interval", 46, 330, columns, below)
    highest = _ceiling(max((cell.all.jerk or 0.0 for cell in cells), default=1.0))
    jerk = Panel(
        "mean jerk of the commands [units / s³]",
        388,
        672,
        [highest * i / 4 for i in range(5)],
        lambda v: f"{v:g}",
        lambda v: v / highest,
        max(delays),
        columns,
        below,
    )
    ways = list(dict.fromkeys(cell.condition.way for cell in cells))
    parts = [*success.axes(), *jerk.axes()]
    for index, name in enumerate(ways):
        nudge = (index - (len(ways) - 1) / 2) * 0.012 * (max(delays) or 1.0)  # or intervals cover one another
        own = sorted((c for c in cells if c.condition.way == name), key=lambda c: c.condition.delay_ms)
        points = [(c.condition.delay_ms + nudge, c.all.success) for c in own]
        look = _look(name)
        parts += success.curve([(x, s.share) for x, s in points], *look)
        parts += [success.interval(x, s.low, s.high, look[0]) for x, s in points]
        parts += jerk.curve([(c.condition.delay_ms + nudge, c.all.jerk) for c in own if c.all.jerk is not None], *look)
        parts += key(name, index, *look)
    return page(f"phyai eval, {min(cell.all.n for cell in cells)} episodes per point", parts)


def _shares(title: str, left: float, right: float, columns: Sequence[tuple[float, str]], below: str) -> Panel:
    return Panel(
        title,
        left,
        right,
        [0.0, 0.25, 0.5, 0.75, 1.0],
        lambda v: f"{100 * v:.0f} %",
        lambda v: v,
        max(value for value, _ in columns),
        columns,
        below,
    )


def _ceiling(value: float) -> float:
    """The next number of two digits above, that four parts divide well."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)
