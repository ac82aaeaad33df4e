"""The kept camera frames in time order, each with what was commanded near it."""

from __future__ import annotations

import base64
import bisect
from collections.abc import Sequence
from html import escape

from phyai_engine.replay.record import FrameRow, Record, StepRow
from phyai_engine.replay.verdict import number

FRAME_BYTES = 1_800_000  # JPEG bytes on the page: with plotly.js (4.8 MB) it stays below 8 MB
NEAR_S = 0.5  # a frame further than this from any control tick shows no command


def strips(record: Record) -> str:
    """One strip of pictures per camera, as HTML."""
    cameras = dict.fromkeys(frame.camera for frame in record.frames)
    if not cameras:
        return '<p class="empty">No camera frame was kept in the record.</p>'
    return "".join(_strip(record, name) for name in cameras)


def _strip(record: Record, camera: str) -> str:
    """The kept frames of one camera in time order, each with what was commanded at that time."""
    every = sorted((frame for frame in record.frames if frame.camera == camera), key=lambda frame: frame.t_s)
    total = sum(len(frame.jpeg) for frame in record.frames)
    stride = -(-total // FRAME_BYTES)  # rounded up: show every stride-th
    shown = every[::stride] if stride > 1 else every
    times = [row.t_s for row in record.steps]
    cells = "".join(_frame(record, frame, times) for frame in shown)
    some = f", every {stride}th of the {len(every)} kept" if stride > 1 else ""
    return (
        f'<h3>{escape(camera)} <span class="note">{len(shown)} frames{some}</span></h3><div class="strip">{cells}</div>'
    )


def _frame(record: Record, frame: FrameRow, times: Sequence[float]) -> str:
    row = _nearest(record.steps, times, frame.t_s)
    kind, did, values = "", "no control tick near", ""
    if row is not None:
        kind = row.kind
        did = f"chunk {row.chunk_id}, step {row.step}" if row.kind == "action" else row.kind
        named = zip(record.action_names, row.values, strict=True)
        values = "".join(f"<span>{escape(name)} {number(value)}</span>" for name, value in named)
    image = base64.b64encode(frame.jpeg).decode("ascii")
    return (
        f'<figure><img alt="{escape(frame.camera)} at {frame.t_s:.2f} s" src="data:image/jpeg;base64,{image}">'
        f'<figcaption class="{kind}"><b>{frame.t_s:.2f} s</b> {did}'
        f'<div class="values">{values}</div></figcaption></figure>'
    )


def _nearest(steps: Sequence[StepRow], times: Sequence[float], t_s: float) -> StepRow | None:
    """The control tick closest to ``t_s``, None when there is none within NEAR_S."""
    i = bisect.bisect_left(times, t_s)
    near = [j for j in (i - 1, i) if 0 <= j < len(times) and abs(times[j] - t_s) <= NEAR_S]
    return steps[min(near, key=lambda j: abs(times[j] - t_s))] if near else None
