"""Charts along the run's time: commands with measured joints, other joints, camera rates. Needs plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from phyai_engine.replay.look import (
    BLUE,
    CAMERA_COLOURS,
    GREY,
    INK,
    MAX_MARKS,
    SPAN_COLOURS,
    Chart,
    Key,
    axis,
    dress,
    event_marks,
    shade,
    thin,
    time_axis,
    vertical,
)
from phyai_engine.replay.record import Record
from phyai_engine.replay.summary import GAP_PERIODS, handoffs, spans

UNITS = {
    "joint_position": "rad or m",
    "joint_velocity": "rad/s or m/s",
    "cartesian_delta": "command units per step",
}
F64 = NDArray[np.float64]
Line = tuple[F64, F64]


def commands(record: Record) -> Chart:
    """One row per action: commanded values, measured ones where the names match, handoffs, hold and stop."""
    title = "Commands"
    if not record.steps:
        return Chart("commands", title, "No control tick was recorded.", (), None)
    unit = UNITS.get(record.action_type, "robot units")
    t, values = _broken(
        np.array([row.t_s for row in record.steps]),
        np.array([row.values for row in record.steps], dtype=np.float64),
        GAP_PERIODS * record.dt_s,
    )
    measured = _measured(record)
    rows = [
        (f"{name} [{unit}]", thin(t, values[:, i]), measured.get(name)) for i, name in enumerate(record.action_names)
    ]
    figure = _stacked(rows, record, 112)
    keys = [Key(BLUE, "line", "commanded")]
    if any(line is not None for _, _, line in rows):
        keys.append(Key(GREY, "line", "measured"))
    if 0 < len(handoffs(record)) <= MAX_MARKS:
        keys.append(Key(INK, "dotted", "handoff"))
    keys += [
        Key(colour, "tint", kind)
        for kind, colour in SPAN_COLOURS.items()
        if any(row.kind == kind for row in record.steps)
    ]
    return Chart("commands", title, "What each control tick commanded, at most one per tick.", keys, figure)


def measured_joints(record: Record) -> Chart | None:
    """The joints that no action is named after (a Cartesian robot's); None when there are none."""
    measured = _measured(record)
    names = [name for name in record.joints.names if name not in record.action_names]
    if not names or not record.joints.t_s:
        return None
    rows = [(f"{name} [rad or m]", measured[name], None) for name in names]
    figure = _stacked(rows, record, 84)
    return Chart("joints", f"Measured joints ({len(names)})", "As the robot published them.", (), figure)


def camera_rates(record: Record) -> Chart:
    """Frames per second of each camera over the run."""
    title = "Camera rates"
    seen = {name: camera.t_s for name, camera in record.cameras.items() if camera.t_s}
    if not seen:
        return Chart("cameras", title, "No camera frame was recorded.", (), None)
    width = max(1.0, record.duration_s / 120)
    bins = max(1, int(record.duration_s / width))
    edges = np.arange(bins + 1) * width
    figure, keys = go.Figure(), []
    for i, (name, arrivals) in enumerate(seen.items()):
        colour = CAMERA_COLOURS[i % len(CAMERA_COLOURS)]
        rates = np.histogram(np.asarray(arrivals), edges)[0] / width
        figure.add_scatter(
            x=(edges[:-1] + edges[1:]) / 2,
            y=rates,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": 5},
            hovertemplate=f"{name} %{{y:.1f}} Hz<extra></extra>",
        )
        keys.append(Key(colour, "line", name))
    marks = event_marks(record.events, record.duration_s)
    dress(
        figure,
        280,
        top=marks.top_px,
        xaxis=time_axis(record.duration_s),
        yaxis=axis("frames received [Hz]", rangemode="tozero"),
        shapes=marks.shapes,
        annotations=marks.badges,
        hovermode="x",
    )
    return Chart("cameras", title, f"Arrivals counted over {width:.3g} s.", keys, figure)


def camera_lateness(record: Record) -> Chart:
    """Stamp to arrival of each camera's frames over the run, a point per frame."""
    title = "Camera timing"
    figure, keys = go.Figure(), []
    for i, (name, camera) in enumerate(record.cameras.items()):
        late = (np.asarray(camera.t_s, dtype=np.float64) - np.asarray(camera.stamp_s, dtype=np.float64)) * 1e3
        known = np.isfinite(late)
        if not known.any():
            continue
        t, late = thin(np.asarray(camera.t_s, dtype=np.float64)[known], late[known])
        colour = CAMERA_COLOURS[i % len(CAMERA_COLOURS)]
        figure.add_scatter(
            x=t,
            y=late,
            mode="markers",
            marker={"size": 4, "color": colour},
            hovertemplate=f"{name}: %{{y:.1f}} ms after its stamp, at %{{x:.2f}} s<extra></extra>",
        )
        keys.append(Key(colour, "dot", f"{name} (median {np.median(late):.1f} ms)"))
    if not figure.data:
        return Chart("camera-late", title, "No frame with a stamp was recorded.", (), None)
    marks = event_marks(record.events, record.duration_s)
    dress(
        figure,
        280,
        top=marks.top_px,
        xaxis=time_axis(record.duration_s),
        yaxis=axis("stamp to arrival [ms]", rangemode="tozero"),
        shapes=marks.shapes,
        annotations=marks.badges,
    )
    note = "How long after its stamp each frame arrived. A camera above the others is late; a hole is a stall."
    return Chart("camera-late", title, note, keys, figure)


def _measured(record: Record) -> dict[str, Line]:
    joints = record.joints
    if not joints.t_s:
        return {}
    t = np.asarray(joints.t_s, dtype=np.float64)
    typical = float(np.median(np.diff(t))) if len(t) > 1 else 0.0
    t, positions = _broken(t, np.array(joints.positions, dtype=np.float64), max(0.2, 10 * typical))
    return {name: thin(t, positions[:, i]) for i, name in enumerate(joints.names)}


def _broken(t: F64, values: F64, gap_s: float) -> tuple[F64, F64]:
    """A NaN row after every pause longer than ``gap_s``, so that no line crosses it. values: [n, A]."""
    pauses = np.flatnonzero(np.diff(t) > gap_s) + 1
    return np.insert(t, pauses, t[pauses - 1]), np.insert(values, pauses, np.nan, axis=0)


def _stacked(rows: Sequence[tuple[str, Line, Line | None]], record: Record, row_height: int) -> go.Figure:
    """Rows of (title, line, line behind it) under one another with one time axis."""
    marks = event_marks(record.events, record.duration_s, above_px=20)
    height = row_height * len(rows) + 44 + marks.top_px
    figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=min(0.3 / len(rows), 28 / height)
    )
    for number, (_, line, behind) in enumerate(rows, start=1):
        lines = [(line, BLUE, 1.5)] if behind is None else [(behind, GREY, 1.2), (line, BLUE, 1.5)]
        for (t, y), colour, width in lines:
            figure.add_scatter(
                x=t.astype(np.float32),
                y=y.astype(np.float32),
                mode="lines",
                line={"shape": "hv", "color": colour, "width": width},
                hovertemplate="%{y:.4g} at %{x:.2f} s<extra></extra>",
                row=number,
                col=1,
            )
    dress(figure, height, top=marks.top_px)
    below = time_axis(record.duration_s)
    figure.update_xaxes({**below, "title": None})
    figure.update_xaxes(below, row=len(rows), col=1)
    figure.update_yaxes(axis("", nticks=4))
    titles = [_row_title(figure, number, text) for number, (text, _, _) in enumerate(rows, start=1)]
    return figure.update_layout(shapes=[*_motion_marks(record), *marks.shapes], annotations=[*titles, *marks.badges])


def _motion_marks(record: Record) -> list[dict[str, Any]]:
    """Hold and stop shaded, handoffs dotted."""
    shaded = [
        shade(start, end, colour)
        for kind, colour in SPAN_COLOURS.items()
        for start, end in spans(record.steps, kind, record.dt_s)[:MAX_MARKS]
    ]
    accepted = handoffs(record)
    if len(accepted) > MAX_MARKS:
        return shaded
    return shaded + [vertical(row.t_s, "#aab4bf", "dot") for row in accepted]


def _row_title(figure: go.Figure, number: int, text: str) -> dict[str, Any]:
    top = figure.layout["yaxis" if number == 1 else f"yaxis{number}"].domain[1]
    return {
        "text": text,
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": top,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": INK},
        "bgcolor": "rgba(255,255,255,0.85)",
    }
