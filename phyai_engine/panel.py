"""One pair of axes in an SVG, written by hand: figures for the README need no plotting library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

INK, MUTED, GRID = "#1c2733", "#5a6675", "#e4e8ed"
WIDTH, HEIGHT = 860, 340
TOP, BOTTOM = 44, 286  # of every panel


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. :param left, right: pixels. :param place: share of the height of a value, 0 below, 1 above.

    :param ticks: values with a line; ``label`` writes them. :param columns: value and text of each mark below;
        ``last`` is the value at the right end, the left one is 0. :param below: what the columns are.
    """

    title: str
    left: float
    right: float
    ticks: Sequence[float]
    label: Callable[[float], str]
    place: Callable[[float], float]
    last: float
    columns: Sequence[tuple[float, str]]
    below: str

    def x(self, value: float) -> float:
        return self.left + 14 + value / (self.last or 1) * (self.right - self.left - 28)

    def y(self, value: float) -> float:
        return BOTTOM - min(max(self.place(value), 0.0), 1.0) * (BOTTOM - TOP)

    def axes(self) -> list[str]:
        """Title, lines and marks."""
        parts = [f'<text x="{self.left}" y="{TOP - 18}" font-weight="600">{escape(self.title)}</text>']
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(line(self.left, y, self.right, y, GRID, 1.0))
            parts.append(
                f'<text x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{self.label(tick)}</text>'
            )
        for value, text in self.columns:
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{BOTTOM + 18}" text-anchor="middle" fill="{MUTED}">'
                f"{escape(text)}</text>"
            )
        middle = (self.left + self.right) / 2
        parts.append(
            f'<text x="{middle}" y="{BOTTOM + 38}" text-anchor="middle" fill="{MUTED}">{escape(self.below)}</text>'
        )
        return parts

    def curve(self, points: Sequence[tuple[float, float]], colour: str, dash: str = "") -> list[str]:
        """A line with dots. :param points: (value below, value) in order."""
        placed = [(self.x(a), self.y(b)) for a, b in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        broken = f' stroke-dasharray="{dash}"' if dash else ""
        parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{broken}/>']
        return [*parts, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in placed)]

    def interval(self, value: float, low: float, high: float, colour: str) -> str:
        """A vertical line at ``value``."""
        return line(self.x(value), self.y(low), self.x(value), self.y(high), colour, 1.2)


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float, dash: str = "") -> str:
    """One straight line, pixels."""
    broken = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{broken}/>'
    )


def key(text: str, index: int, colour: str, dash: str = "") -> list[str]:
    """One row of the legend, right of the panels."""
    y = TOP + 10 + 22 * index
    return [line(700, y, 726, y, colour, 2.0, dash), f'<text x="734" y="{y + 4}">{escape(text)}</text>']


def page(title: str, parts: Sequence[str]) -> str:
    """The whole file."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
