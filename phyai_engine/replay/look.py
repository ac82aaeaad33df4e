"""How the report's charts look: one palette, one axis style, one way to mark events. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from phyai_engine.replay.record import Event, StepKind

INK, MUTED, GRID, PAPER = "#1c2733", "#5a6675", "#e4e8ed", "#ffffff"
BLUE, TEAL, PURPLE, AMBER, GREEN, GREY = "#2463a6", "#16877a", "#7d54a8", "#c47a12", "#2e7d43", "#8792a0"
RED = "#c0312b"  # only for what went wrong: a miss, an abort, a failed invariant

MARGIN_COLOURS = {"m_ctrl_s": BLUE, "m_cond_s": TEAL, "m_exhaust_s": PURPLE}
STAGE_COLOURS = {
    "l_observe_s": "#9dbbdc",
    "l_transfer_s": "#c9b3de",
    "l_queue_s": "#e8c886",
    "l_inference_s": BLUE,
    "l_actuate_s": "#7fc0b5",
    "other_s": "#c8ced6",
}
SPAN_COLOURS: Mapping[StepKind, str] = {"hold": AMBER, "stop": RED}
CAMERA_COLOURS = (BLUE, AMBER, TEAL, PURPLE, "#8a5a3b", GREY)
EVENT_COLOURS = {"abort": RED, "fault": RED, "stop": RED, "rearm": GREEN, "camera": PURPLE}  # others are grey

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MAX_POINTS = 3000  # per line: above it an SVG chart gets slow to draw and the file grows
MAX_MARKS = 400  # vertical lines per chart
BADGES = 40  # events that get a number; more would be a smear


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a chart's legend. ``form``: line | dash | dotted | dot | ring | cross | area | tint."""

    colour: str
    form: str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart of the page.

    :param figure: None when there is nothing to draw, then ``note`` says why.
    :param note: what the reader sees in it, one or two sentences.
    """

    name: str
    title: str
    note: str
    keys: Sequence[Key]
    figure: go.Figure | None


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Style of one axis. ``title`` carries the unit."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": MUTED}, "standoff": 6},
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": "#c4ccd6",
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#c4ccd6",
        "automargin": True,
        **more,
    }


def time_axis(duration_s: float) -> dict[str, Any]:
    """The x axis of everything that runs along the record; a little wider, so that no mark is cut at its ends."""
    edge = 0.01 * max(duration_s, 1e-3)
    return axis("time since the start of the record [s]", range=[-edge, duration_s + edge])


def dress(figure: go.Figure, height: int, *, top: int = 14, **more: Any) -> go.Figure:
    """The common layout; legends are written in HTML, where they wrap on a phone."""
    layout: Mapping[str, Any] = {
        "template": "none",
        "height": height,
        "margin": {"l": 56, "r": 14, "t": top, "b": 44},
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": FONT, "size": 12, "color": INK},
        "showlegend": False,
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": GREY, "font": {"family": FONT, "color": INK}},
        "dragmode": "zoom",
        **more,
    }
    return figure.update_layout(layout)


def vertical(x: float, colour: str, dash: str = "solid", width: float = 1.0) -> dict[str, Any]:
    """A line over the whole height, between grid and curves."""
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "layer": "between",
        "line": {"color": colour, "width": width, "dash": dash},
    }


def shade(start: float, end: float, colour: str, opacity: float = 0.13) -> dict[str, Any]:
    """A span of time over the whole height, under the curves."""
    return {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": start,
        "x1": end,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": {"width": 0},
        "fillcolor": colour,
        "opacity": opacity,
    }


def event_colour(event: Event) -> str:
    """Colour of an event's mark."""
    return EVENT_COLOURS.get(event.kind, GREY)


@dataclass(frozen=True, slots=True)
class Marks:
    """Events in a chart: lines, numbers above the plot, and the top margin that the numbers need [px]."""

    shapes: list[dict[str, Any]]
    badges: list[dict[str, Any]]
    top_px: int


def event_marks(events: Sequence[Event], duration_s: float, *, above_px: int = 0) -> Marks:
    """Lines and numbers of the events; the numbers are those of the page's list of events.

    A number closer to its neighbour than 1/40 of the width (it would touch it on a phone) goes one row up.

    :param above_px: room left between the plot and the lowest row.
    """
    shapes = [vertical(event.t_s, event_colour(event), width=1.5) for event in events[:MAX_MARKS]]
    badges: list[dict[str, Any]] = []
    ends = [-math.inf] * 3
    rows_used = 0
    width = max(duration_s, 1e-6) / 40
    for number, event in enumerate(events[:BADGES], start=1):
        row = next((i for i, end in enumerate(ends) if event.t_s >= end), ends.index(min(ends)))
        ends[row] = event.t_s + width
        rows_used = max(rows_used, row + 1)
        badges.append(
            {
                "x": event.t_s,
                "xref": "x",
                "y": 1,
                "yref": "paper",
                "yshift": above_px + 9 + 15 * row,
                "text": str(number),
                "showarrow": False,
                "hovertext": f"{event.t_s:.2f} s {event.kind}: {event.text}",
                "font": {"size": 10, "color": PAPER},
                "bgcolor": event_colour(event),
                "borderpad": 2,
            }
        )
    return Marks(shapes, badges, above_px + 12 + 15 * rows_used)


def thin(
    t: NDArray[np.float64], y: NDArray[np.float64], limit: int = MAX_POINTS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most about ``limit`` points of a line: lowest and highest of each stretch, so that no peak is lost.

    NaN, which breaks the line, is kept.
    """
    if len(t) <= limit:
        return t, y
    edges = np.linspace(0, len(t), limit // 2 + 1).astype(int)
    keep = set(np.flatnonzero(np.isnan(y)).tolist())
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = y[first:last]
        keep.add(first + int(np.argmin(np.where(np.isnan(part), np.inf, part))))
        keep.add(first + int(np.argmax(np.where(np.isnan(part), -np.inf, part))))
    index = np.array(sorted(keep))
    return t[index], y[index]
