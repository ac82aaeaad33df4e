"""The study's plot as one SVG: success and median jump ratio against the delay. Written by hand: no plotly needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from phyai_engine.rtc_study.result import Study
from phyai_engine.rtc_study.sampling import Method
from phyai_engine.rtc_study.scores import Cell

INK, MUTED, GRID = "#1c2733", "#5a6675", "#e4e8ed"
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
WIDTH, HEIGHT = 860, 340
TOP, BOTTOM = 44, 286  # of both panels


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. :param left, right: pixels. :param place: share of the height of a value, 0 below, 1 above."""

    title: str
    left: float
    right: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    place: Callable[[float], float]
    last: int

    def x(self, delay: float) -> float:
        return self.left + 14 + delay / max(self.last, 1) * (self.right - self.left - 28)

    def y(self, value: float) -> float:
        return BOTTOM - min(max(self.place(value), 0.0), 1.0) * (BOTTOM - TOP)


def svg(study: Study) -> str:
    """The whole file."""
    last = max(study.delays())
    highest = max([cell.jump_ratio.p50 for cell in study.cells if cell.jump_ratio], default=1.0)
    power = max(3, math.ceil(math.log2(max(highest, 1.0)) + 0.1))
    lowest = min(3, math.floor(4 * min(cell.success.low for cell in study.cells))) / 4  # the axis starts at a quarter
    success = Panel(
        "success, 95 % interval",
        46,
        330,
        [tick for tick in (0.0, 0.25, 0.5, 0.75, 1.0) if tick >= lowest],
        lambda v: f"{100 * v:.0f} %",
        lambda v: (v - lowest) / (1.0 - lowest),
        last,
    )
    jumps = Panel(
        "jump at the handoff / step in the chunk, median",
        388,
        672,
        [2.0**k for k in range(-1, power + 1)],
        lambda v: f"{v:g}",
        lambda v: (math.log2(max(v, 1e-6)) + 1) / (power + 1),
        last,
    )
    n = max(cell.episodes for cell in study.cells)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{INK}" role="img">',
        f"<title>{escape(f'phyai rtc-study, {n} episodes per point')}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *_axes(success),
        *_axes(jumps),
        _line(jumps.left, jumps.y(1), jumps.right, jumps.y(1), MUTED, 1.2, "2 3"),
    ]
    methods = study.methods()
    for index, method in enumerate(methods):
        cells = [cell for cell in study.cells if cell.method == method.value]
        nudge = (index - (len(methods) - 1) / 2) * 0.03  # so that intervals do not cover one another
        parts += _curve(success, method, cells, lambda c: c.success.share, nudge, _interval)
        parts += _curve(jumps, method, cells, lambda c: c.jump_ratio.p50 if c.jump_ratio else None, nudge, None)
        parts += _key(method, index)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(panel: Panel) -> list[str]:
    parts = [f'<text x="{panel.left}" y="{TOP - 18}" font-weight="600">{escape(panel.title)}</text>']
    for tick in panel.ticks:
        y = panel.y(tick)
        parts.append(_line(panel.left, y, panel.right, y, GRID, 1.0))
        parts.append(
            f'<text x="{panel.left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{panel.label(tick)}</text>'
        )
    for delay in range(panel.last + 1):
        parts.append(
            f'<text x="{panel.x(delay):.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="{MUTED}">{delay}</text>'
        )
    middle = (panel.left + panel.right) / 2
    parts.append(
        f'<text x="{middle}" y="{BOTTOM + 38}" text-anchor="middle" fill="{MUTED}">inference delay d [steps]</text>'
    )
    return parts


def _curve(
    panel: Panel,
    method: Method,
    cells: Sequence[Cell],
    value: Callable[[Cell], float | None],
    nudge: float,
    interval: Callable[[Panel, float, Cell, str], str] | None,
) -> list[str]:
    colour, dash = LOOK[method]
    points = [(panel.x(c.delay_steps + nudge), panel.y(v), c) for c in cells if (v := value(c)) is not None]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    broken = f' stroke-dasharray="{dash}"' if dash else ""
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{broken}/>']
    for x, y, cell in points:
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>')
        if interval is not None:
            parts.append(interval(panel, x, cell, colour))
    return parts


def _interval(panel: Panel, x: float, cell: Cell, colour: str) -> str:
    return _line(x, panel.y(cell.success.low), x, panel.y(cell.success.high), colour, 1.2)


def _key(method: Method, index: int) -> list[str]:
    colour, dash = LOOK[method]
    y = TOP + 10 + 22 * index
    return [
        _line(700, y, 726, y, colour, 2.0, dash),
        f'<text x="734" y="{y + 4}">{method.value}</text>',
    ]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dash: str = "") -> str:
    broken = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{broken}/>'
    )
