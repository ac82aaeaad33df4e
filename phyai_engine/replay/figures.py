"""Charts of the handoffs: margins, stages of L_critical, control-time roofline, seams. Needs plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from phyai_engine.replay.look import (
    AMBER,
    BLUE,
    GREY,
    INK,
    MARGIN_COLOURS,
    MUTED,
    RED,
    STAGE_COLOURS,
    Chart,
    Key,
    axis,
    dress,
    event_marks,
    shade,
    time_axis,
    vertical,
)
from phyai_engine.replay.record import Record, TimingRow
from phyai_engine.replay.summary import MARGINS, STAGES, handoffs, overlapped, roofline_rows
from phyai_engine.replay.verdict import why_no_handoffs, why_no_margins
from phyai_engine.timing import Roofline, roofline

MARGIN_NAMES = {"m_ctrl_s": "M_ctrl", "m_cond_s": "M_cond", "m_exhaust_s": "M_exhaust"}
STAGE_NAMES = {
    "l_observe_s": "observe",
    "l_transfer_s": "transfer",
    "l_queue_s": "queue",
    "l_inference_s": "inference",
    "l_actuate_s": "actuate",
    "other_s": "not attributed",
}
DEADLINE = {"zeroline": True, "zerolinecolor": RED, "zerolinewidth": 1.2}  # margin 0
MAX_BARS = 300  # above it bars are thinner than a pixel: boxes instead


def _finite(rows: Sequence[TimingRow], name: str) -> list[tuple[float, float]]:
    """(t, value in ms) of the rows where ``name`` was measured."""
    return [(row.t_s, value * 1e3) for row in rows if math.isfinite(value := getattr(row, name))]


def margin_cdf(record: Record, other: Record | None = None) -> Chart:
    """Distribution of the margins, the compared run dashed."""
    figure = go.Figure()
    keys: list[Key] = []
    # M_ctrl is one of the two others at each handoff, mostly M_cond: that one is wide, and M_ctrl on top.
    for name in reversed(MARGINS):
        values = sorted(value for _, value in _finite(handoffs(record), name))
        if not values:
            continue
        share = np.arange(1, len(values) + 1) / len(values) * 100
        figure.add_scatter(
            x=[values[0], *values],
            y=[0.0, *share],
            line={"shape": "hv", "color": MARGIN_COLOURS[name], "width": 6 if name == "m_cond_s" else 2},
            opacity=0.5 if name == "m_cond_s" else 1.0,
            hovertemplate=f"{MARGIN_NAMES[name]} ≤ %{{x:.1f}} ms: %{{y:.1f}} %<extra></extra>",
        )
        keys.insert(0, Key(MARGIN_COLOURS[name], "line", f"{MARGIN_NAMES[name]} (n = {len(values)})"))
    if other is not None and (values := sorted(v for _, v in _finite(handoffs(other), "m_ctrl_s"))):
        share = np.arange(1, len(values) + 1) / len(values) * 100
        figure.add_scatter(
            x=values,
            y=share,
            line={"shape": "hv", "color": INK, "width": 1.5, "dash": "dash"},
            hovertemplate="other run: M_ctrl ≤ %{x:.1f} ms: %{y:.1f} %<extra></extra>",
        )
        keys.append(Key(INK, "dash", f"M_ctrl of the other run (n = {len(values)})"))
    title = "Margin: distribution"
    if not figure.data:
        return Chart("margin-cdf", title, why_no_margins(record), (), None)
    ends = [float(end) for line in figure.data for end in (line.x[0], line.x[-1])]
    edge = 0.04 * (max(0.0, *ends) - min(0.0, *ends))
    dress(
        figure,
        330,
        xaxis=axis("margin at handoff [ms]", range=[min(0.0, *ends) - edge, max(0.0, *ends) + edge], **DEADLINE),
        yaxis=axis("share of handoffs at or below [%]", range=[0, 102]),
    )
    return Chart("margin-cdf", title, "Left of the red line the handoff came too late.", keys, figure)


def margin_timeline(record: Record) -> Chart:
    """Margins over time, misses marked, events as vertical lines."""
    rows = handoffs(record)
    title = "Margin: over the run"
    figure = go.Figure()
    symbols = {"m_exhaust_s": "circle", "m_cond_s": "circle-open", "m_ctrl_s": "circle"}
    sizes = {"m_exhaust_s": 5, "m_cond_s": 11, "m_ctrl_s": 6}
    if len(rows) > 200:  # they would cover one another
        sizes = {"m_exhaust_s": 3, "m_cond_s": 6, "m_ctrl_s": 3}
    keys: list[Key] = []
    for name in reversed(MARGINS):
        points = _finite(rows, name)
        if not points:
            continue
        figure.add_scatter(
            x=[t for t, _ in points],
            y=[value for _, value in points],
            mode="markers",
            marker={"symbol": symbols[name], "size": sizes[name], "color": MARGIN_COLOURS[name]},
            hovertemplate=f"{MARGIN_NAMES[name]} %{{y:.1f}} ms at %{{x:.2f}} s<extra></extra>",
        )
        form = "ring" if name == "m_cond_s" else "dot"
        keys.insert(0, Key(MARGIN_COLOURS[name], form, MARGIN_NAMES[name]))
    missed = [point for point in _finite(rows, "m_ctrl_s") if point[1] < 0]
    if not figure.data:
        return Chart("margin-time", title, why_no_margins(record), (), None)
    if missed:
        figure.add_scatter(
            x=[t for t, _ in missed],
            y=[value for _, value in missed],
            mode="markers",
            marker={"symbol": "x", "size": 11, "color": RED},
            hovertemplate="missed by %{y:.1f} ms at %{x:.2f} s<extra></extra>",
        )
        keys.append(Key(RED, "cross", f"missed ({len(missed)})"))
    marks = event_marks(record.events, record.duration_s)
    dress(
        figure,
        330,
        top=marks.top_px,
        xaxis=time_axis(record.duration_s),
        yaxis=axis("margin [ms]", rangemode="tozero", **DEADLINE),
        shapes=marks.shapes,
        annotations=marks.badges,
    )
    return Chart(
        "margin-time",
        title,
        "M_ctrl is the binding deadline of each handoff. Numbers are the events listed above.",
        keys,
        figure,
    )


def _other_s(row: TimingRow) -> float:
    """The part of L_critical that no stage covers [s]: waiting for the executor, submitting."""
    known = sum(value for name in STAGES if math.isfinite(value := getattr(row, name)))
    return max(0.0, row.l_critical_s - known) if math.isfinite(row.l_critical_s) else math.nan


def stages(record: Record) -> Chart:
    """What L_critical is made of: a bar per handoff with its budget, or boxes when there are many."""
    rows = handoffs(record)
    title = "Where the critical path goes"
    if not rows:
        return Chart("stages", title, why_no_handoffs(record), (), None)
    parts = {name: [getattr(row, name) * 1e3 for row in rows] for name in STAGES}
    parts["other_s"] = [_other_s(row) * 1e3 for row in rows]
    parts = {name: values for name, values in parts.items() if any(math.isfinite(v) for v in values)}
    figure = go.Figure()
    if len(rows) > MAX_BARS:
        for name, values in parts.items():
            figure.add_box(y=values, name=STAGE_NAMES[name], marker_color=STAGE_COLOURS[name], boxpoints="outliers")
        dress(figure, 340, xaxis=axis("stage"), yaxis=axis("duration [ms]", rangemode="tozero"))
        return Chart("stages", title, f"{len(rows)} handoffs: quartiles and outliers per stage.", (), figure)
    index = list(range(1, len(rows) + 1))
    for name, values in parts.items():
        figure.add_bar(
            x=index,
            y=values,
            marker={"color": STAGE_COLOURS[name], "line": {"width": 0}},
            customdata=[[row.chunk_id, row.t_s] for row in rows],
            hovertemplate=f"{STAGE_NAMES[name]} %{{y:.1f}} ms"
            "<br>chunk %{customdata[0]} at %{customdata[1]:.2f} s<extra></extra>",
        )
    figure.add_scatter(
        x=index,
        y=[(row.m_ctrl_s + row.l_critical_s) * 1e3 for row in rows],
        mode="markers",
        marker={"symbol": "line-ew", "size": 12, "line": {"width": 2, "color": INK}},
        hovertemplate="budget B_ctrl %{y:.1f} ms<extra></extra>",
    )
    dress(
        figure,
        340,
        barmode="stack",
        bargap=0.25,
        xaxis=axis("handoff, in time order", range=[0.4, len(rows) + 0.6]),
        yaxis=axis("capture to first step published [ms]", rangemode="tozero"),
    )
    keys = [Key(STAGE_COLOURS[name], "area", STAGE_NAMES[name]) for name in parts]
    note = "L_critical of each handoff, stacked by stage."
    if any(math.isfinite(row.m_ctrl_s) for row in rows):
        note += " A bar above its budget mark is a miss; no mark means that handoff had no deadline."
        keys.append(Key(INK, "line", "budget B_ctrl"))
    return Chart("stages", title, note, keys, figure)


def control_roofline(record: Record, other: Record | None = None) -> Chart:
    """Y over X with both bounds, every handoff and the median; of the compared run the median alone."""
    title = "Control-time roofline"
    rows = roofline_rows(handoffs(record))
    if not rows:
        why = "No handoff has both an L_env and an L_inference." if handoffs(record) else why_no_handoffs(record)
        return Chart("roofline", title, why, (), None)
    overlap = overlapped(record)
    points = [roofline(*row, overlap=overlap) for row in rows]
    middle = _median_roofline(rows, overlap)
    low = min(0.1, *(min(p.x, p.x_crit) / 2 for p in points))
    high = max(10.0, *(p.x * 2 for p in points))
    curve = np.geomspace(low, high, 200)
    figure = go.Figure()
    for y, colour, dash in ((np.minimum(1, curve), INK, "solid"), (curve / (1 + curve), GREY, "dash")):
        figure.add_scatter(x=curve, y=y, line={"color": colour, "width": 1.8, "dash": dash}, hoverinfo="skip")
    figure.add_scatter(
        x=[p.x for p in points],
        y=[p.y for p in points],
        mode="markers",
        marker={"size": 7, "color": BLUE, "opacity": 0.45},
        hovertemplate="X %{x:.2f}, Y %{y:.3f}<extra>handoff</extra>",
    )
    figure.add_scatter(
        x=[middle.x],
        y=[middle.y],
        mode="markers",
        marker={"size": 13, "color": BLUE, "line": {"color": "#ffffff", "width": 2}},
        hovertemplate="median: X %{x:.2f}, Y %{y:.3f}<extra></extra>",
    )
    keys = _roofline_keys(middle)
    if other is not None and (seen := roofline_rows(handoffs(other))):
        point = _median_roofline(seen, overlapped(other))
        figure.add_scatter(
            x=[point.x],
            y=[point.y],
            mode="markers",
            marker={"symbol": "circle-open", "size": 13, "color": INK, "line": {"width": 2}},
            hovertemplate="other run, median: X %{x:.2f}, Y %{y:.3f}<extra></extra>",
        )
        keys.append(Key(INK, "ring", f"other run, at its medians: X = {point.x:.2f}, Y = {point.y:.2f}"))
    dress(
        figure,
        330,
        xaxis=axis("X = L_env / L_inference [1], log scale", type="log", dtick=1, exponentformat="none"),
        yaxis=axis("Y = L_env / L_control [1]", range=[0, 1.06]),
        shapes=[vertical(middle.x_crit, AMBER, "dash", 1.5), shade(low, 1.0, RED, 0.05)],
    )
    note = "Y = 1: the robot never waits. Below X = 1 (shaded) inference takes longer than the motion it buys."
    return Chart("roofline", title, note, keys, figure)


def _median_roofline(rows: Sequence[tuple[float, float, float]], overlap: bool) -> Roofline:
    env, inference, critical = (float(value) for value in np.median(np.array(rows), axis=0))
    return roofline(env, inference, critical, overlap=overlap)


def _roofline_keys(middle: Roofline) -> list[Key]:
    return [
        Key(INK, "line", "overlapped: min(1, X)"),
        Key(GREY, "dash", "sequential: X / (1 + X)"),
        Key(BLUE, "dot", f"handoffs; large: at the medians, X = {middle.x:.2f}, Y = {middle.y:.2f}"),
        Key(AMBER, "dash", f"X_crit = L_env / L_critical = {middle.x_crit:.2f}"),
    ]


def seams(record: Record) -> Chart:
    """Jump ratio of each handoff."""
    title = "Seams"
    rows = [row for row in handoffs(record) if math.isfinite(row.jump_ratio)]
    if not rows:
        why = "No seam: no chunk followed another." if handoffs(record) else why_no_handoffs(record)
        return Chart("seams", title, why, (), None)
    figure = go.Figure()
    figure.add_scatter(
        x=[row.t_s for row in rows],
        y=[row.jump_ratio for row in rows],
        mode="markers",
        marker={"size": 7, "color": BLUE},
        customdata=[[row.chunk_id, row.jump, row.jerk] for row in rows],
        hovertemplate="chunk %{customdata[0]}: jump %{customdata[1]:.4g}, ratio %{y:.2f}, jerk %{customdata[2]:.3g}"
        "<extra></extra>",
    )
    marks = event_marks(record.events, record.duration_s)
    like_any = {**vertical(0, MUTED, "dot", 1.5), "xref": "paper", "yref": "y", "x1": 1, "y0": 1, "y1": 1}
    dress(
        figure,
        330,
        top=marks.top_px,
        xaxis=time_axis(record.duration_s),
        yaxis=axis("jump / median step in the chunk [1]", rangemode="tozero"),
        shapes=[*marks.shapes, like_any],
        annotations=marks.badges,
    )
    keys = [Key(BLUE, "dot", "handoff"), Key(MUTED, "dash", "1 = like any other step")]
    return Chart(
        "seams",
        title,
        "Largest |first new step − last command| over the actions, relative to the chunk's own steps.",
        keys,
        figure,
    )
