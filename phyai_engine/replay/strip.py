"""The kept camera frames in time order, each with what was commanded near it and the chunk that it came from."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from phyai_engine.replay.record import ChunkRow, FrameRow, Record, StepRow
from phyai_engine.replay.verdict import number
from phyai_engine.types import F64

FRAME_BYTES = 1_800_000  # JPEG bytes on the page: with plotly.js (4.8 MB) it stays below 8 MB
NEAR_S = 0.5  # a frame further than this from any control tick shows no command
PLAN = (168, 46)  # width and height of the drawing of a chunk [px]
PLAN_POINTS = 25  # per action
PLAN_COLOURS = ("#2463a6", "#c47a12", "#16877a", "#7d54a8", "#8a5a3b", "#8792a0", "#c0312b", "#2e7d43")


@dataclass(frozen=True, slots=True, eq=False)
class Plans:
    """Draws chunks, each action scaled by its own range over the whole run.

    :param chunks: (epoch, chunk id) -> [H, A]. :param lower: [A], smallest values; ``span`` [A] their ranges.
    """

    chunks: Mapping[tuple[int, int], F64]
    lower: F64
    span: F64

    @staticmethod
    def of(rows: Sequence[ChunkRow]) -> Plans | None:
        """None without chunks."""
        if not rows:
            return None
        chunks = {(row.epoch, row.chunk_id): np.asarray(row.actions, dtype=np.float64) for row in rows}
        every = np.concatenate(list(chunks.values()))
        lower, upper = every.min(axis=0), every.max(axis=0)
        return Plans(chunks, lower, np.where(upper > lower, upper - lower, 1.0))

    def draw(self, played: StepRow) -> str:
        """The chunk of one control tick as SVG, with a line at the row that it played; empty if it was not kept."""
        rows = self.chunks.get((played.epoch, played.chunk_id))
        if rows is None:
            return ""
        width, height = PLAN
        index = np.unique(np.linspace(0, len(rows) - 1, PLAN_POINTS).astype(int))
        x = index / max(1, len(rows) - 1) * width
        y = height - 3 - (rows[index] - self.lower) / self.span * (height - 6)
        lines = "".join(
            f'<polyline fill="none" stroke="{PLAN_COLOURS[i % len(PLAN_COLOURS)]}" stroke-width="1.2" points="'
            f'{" ".join(f"{px:.0f},{py:.1f}" for px, py in zip(x, column, strict=True))}"/>'
            for i, column in enumerate(y.T)
        )
        now = played.step / max(1, len(rows) - 1) * width
        return (
            f'<svg class="plan" viewBox="0 0 {width} {height}" role="img" aria-label="chunk {played.chunk_id}">{lines}'
            f'<path d="M{now:.0f} 0V{height}" stroke="#1c2733" stroke-width="1.5"/></svg>'
        )


def strips(record: Record) -> str:
    """One strip of pictures per camera, as HTML."""
    cameras = dict.fromkeys(frame.camera for frame in record.frames)
    if not cameras:
        return '<p class="empty">No camera frame was kept in the record.</p>'
    plans = Plans.of(record.chunks)
    key = ""
    if plans is not None:
        names = (
            f'<span style="color:{PLAN_COLOURS[i % len(PLAN_COLOURS)]}">{escape(name)}</span>'
            for i, name in enumerate(record.action_names)
        )
        key = (
            '<p class="note">Below each frame the chunk that played then: every action over the rows of the chunk, '
            f"within its range over the run; the line is the row played. {' '.join(names)}</p>"
        )
    return key + "".join(_strip(record, name, plans) for name in cameras)


def _strip(record: Record, camera: str, plans: Plans | None) -> str:
    """The kept frames of one camera in time order, each with what was commanded at that time."""
    every = sorted((frame for frame in record.frames if frame.camera == camera), key=lambda frame: frame.t_s)
    total = sum(len(frame.jpeg) for frame in record.frames)
    stride = -(-total // FRAME_BYTES)  # rounded up: show every stride-th
    shown = every[::stride] if stride > 1 else every
    times = [row.t_s for row in record.steps]
    cells = "".join(_frame(record, frame, times, plans) for frame in shown)
    some = f", every {stride}th of the {len(every)} kept" if stride > 1 else ""
    return (
        f'<h3>{escape(camera)} <span class="note">{len(shown)} frames{some}</span></h3><div class="strip">{cells}</div>'
    )


def _frame(record: Record, frame: FrameRow, times: Sequence[float], plans: Plans | None) -> str:
    row = _nearest(record.steps, times, frame.t_s)
    kind, did, values, plan = "", "no control tick near", "", ""
    if row is not None:
        kind = row.kind
        did = f"chunk {row.chunk_id}, step {row.step}" if row.kind == "action" else row.kind
        named = zip(record.action_names, row.values, strict=True)
        values = "".join(f"<span>{escape(name)} {number(value)}</span>" for name, value in named)
        plan = plans.draw(row) if plans is not None and row.kind == "action" else ""
    image = base64.b64encode(frame.jpeg).decode("ascii")
    return (
        f'<figure><img alt="{escape(frame.camera)} at {frame.t_s:.2f} s" src="data:image/jpeg;base64,{image}">'
        f'<figcaption class="{kind}"><b>{frame.t_s:.2f} s</b> {did}'
        f'{plan}<div class="values">{values}</div></figcaption></figure>'
    )


def _nearest(steps: Sequence[StepRow], times: Sequence[float], t_s: float) -> StepRow | None:
    """The control tick closest to ``t_s``, None when there is none within NEAR_S."""
    i = bisect.bisect_left(times, t_s)
    near = [j for j in (i - 1, i) if 0 <= j < len(times) and abs(times[j] - t_s) <= NEAR_S]
    return steps[min(near, key=lambda j: abs(times[j] - t_s))] if near else None
