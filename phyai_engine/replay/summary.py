"""The figures of a run as plain values for JSON: what the report prints and a gate compares. No plotly."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phyai_engine.replay.record import OUTCOMES, Camera, Record, StepKind, StepRow, TimingRow
from phyai_engine.timing import Window, miss_upper95, roofline
from phyai_engine.types import Schedule
from phyai_engine.whole_files import write_json

STAGES = ("l_observe_s", "l_transfer_s", "l_queue_s", "l_inference_s", "l_actuate_s")
SEAM = ("jump", "jump_ratio", "jerk", "frozen_error", "age_last_s")
MARGINS = ("m_ctrl_s", "m_cond_s", "m_exhaust_s")
# Ticks further apart than this are not one motion: the node was inactive in between.
GAP_PERIODS = 5.0


def summary(record: Record) -> dict[str, Any]:
    """Every figure of the report; durations in seconds, None = not measured."""
    accepted = handoffs(record)
    return {
        "version": record.version,
        "robot_id": record.robot_id,
        "model": record.model,
        "random_weights": "random" in record.model.lower(),
        "placement": record.placement,
        "schedule": record.schedule,
        "host": record.host,
        "started": record.started,
        "duration_s": record.duration_s,
        "dt_s": record.dt_s,
        "ok": all(entry.ok for entry in record.invariants) if record.invariants else None,
        "invariants": [msgspec.to_builtins(entry) for entry in record.invariants],
        "handoffs": len(accepted),
        "rejected": _rejected(record),
        "refusals": refusals(record),
        "margins": {name: _margin(accepted, name) for name in MARGINS},
        "stages": {
            name: _percentiles(getattr(row, name) for row in accepted) for name in (*STAGES, "l_critical_s", "l_env_s")
        },
        "roofline": _median_roofline(record, accepted),
        "ticks": _ticks(record),
        "seam": {name: _percentiles(getattr(row, name) for row in accepted) for name in SEAM},
        "fallbacks": _fallbacks(accepted),
        "cameras": {name: _camera(camera) for name, camera in record.cameras.items()},
        "events": [msgspec.to_builtins(event) for event in record.events],
        "mode": record.mode,
        "bag": record.bag,
        "chunk_hash": record.chunk_hash,
        "age": _percentiles(row.age_s for row in accepted),
        "first_inference_s": _or_none(record.first_inference_s),
        "after_idle": _percentiles(row.inference_s for row in record.idle),
        "survey": _none_for_nan(msgspec.to_builtins(record.survey)),
    }


def write_summary(record: Record, path: Path) -> None:
    """:func:`summary` as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, summary(record))


def handoffs(record: Record) -> list[TimingRow]:
    """The accepted chunks, in time order."""
    return sorted((row for row in record.timings if row.outcome == "accepted"), key=lambda row: row.t_s)


def overlapped(record: Record) -> bool:
    """True when inference runs while the chunk before it plays."""
    return record.schedule != Schedule.SYNC.value


def refusals(record: Record) -> dict[str, int]:
    """Count per refusal code, largest first."""
    counts = Counter(dict(record.refusals)) or Counter(
        row.refusal for row in record.timings if row.outcome == "refused"
    )
    return {name: n for name, n in counts.most_common() if n > 0}


def spans(steps: Sequence[StepRow], kind: StepKind, dt_s: float) -> list[tuple[float, float]]:
    """[start, end) of every uninterrupted run of ticks of one kind [s]."""
    found: list[tuple[float, float]] = []
    before: StepRow | None = None
    for row in steps:
        if row.kind == kind:
            follows = before is not None and before.kind == kind and row.t_s - before.t_s < GAP_PERIODS * dt_s
            start = found.pop()[0] if follows else row.t_s
            found.append((start, row.t_s + dt_s))
        before = row
    return found


def _rejected(record: Record) -> dict[str, int]:
    counts: Counter[str] = Counter(row.outcome for row in record.timings)
    return {name: counts[name] for name in OUTCOMES if name != "accepted"}


def _fallbacks(accepted: Sequence[TimingRow]) -> dict[str, int]:
    """Handoffs whose request was made otherwise than configured, by what was done instead, most first."""
    return dict(Counter(row.fallback for row in accepted if row.fallback).most_common())


def _percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """n, min, p01, p50, p95, p99 and max of the measured values."""
    listed = list(values)
    window = Window(max(1, len(listed)))
    for value in listed:
        window.add(value)
    return {name: _or_none(value) for name, value in dataclasses.asdict(window.percentiles()).items()}


def _margin(accepted: Sequence[TimingRow], name: str) -> dict[str, float | None]:
    """Percentiles of one margin and its misses. ``n`` counts the handoffs that had this deadline."""
    values = [value for row in accepted if math.isfinite(value := getattr(row, name))]
    misses = sum(value < 0 for value in values)
    return {
        **_percentiles(values),
        "misses": misses,
        "miss_rate": misses / len(values) if values else None,
        "miss_rate_upper95": miss_upper95(misses, len(values)),
    }


def _median_roofline(record: Record, accepted: Sequence[TimingRow]) -> dict[str, float] | None:
    """The roofline at the medians of the handoffs that have all three durations; None without any."""
    rows = roofline_rows(accepted)
    if not rows:
        return None
    env, inference, critical = (float(figure) for figure in np.median(np.array(rows), axis=0))
    return dataclasses.asdict(roofline(env, inference, critical, overlap=overlapped(record)))


def roofline_rows(accepted: Sequence[TimingRow]) -> list[tuple[float, float, float]]:
    """(L_env, L_inference, L_critical) of the handoffs where all three were measured and are positive [s]."""
    rows = [(row.l_env_s, row.l_inference_s, row.l_critical_s) for row in accepted]
    return [row for row in rows if all(math.isfinite(value) and value > 0 for value in row)]


def _ticks(record: Record) -> dict[str, Any]:
    """What the control ticks commanded. ``played_fraction``: actions among the ticks that were not a stop."""
    counts = Counter(row.kind for row in record.steps)
    held = spans(record.steps, "hold", record.dt_s)
    moving = counts["action"] + counts["hold"]
    return {
        "action": counts["action"],
        "hold": counts["hold"],
        "stop": counts["stop"],
        "played_fraction": counts["action"] / moving if moving else None,
        "hold_spans": len(held),
        "hold_longest_s": max((end - start for start, end in held), default=0.0),
    }


def _camera(camera: Camera) -> dict[str, Any]:
    """Arrivals of one camera. The rate is that from the first frame to the last, gaps included."""
    arrivals = np.asarray(camera.t_s, dtype=np.float64)
    delays = arrivals - np.asarray(camera.stamp_s, dtype=np.float64)
    intervals = np.diff(arrivals)
    longest = int(np.argmax(intervals)) if len(intervals) else 0
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) > 1 else 0.0
    return {
        "frames": len(arrivals),
        "rate_hz": len(intervals) / span if span > 0 else None,
        "interval": _percentiles(intervals.tolist()),
        "longest_gap_at_s": float(arrivals[longest]) if len(intervals) else None,
        "last_frame_s": float(arrivals[-1]) if len(arrivals) else None,
        "delay": _percentiles(delays.tolist()),
        "delivered": _or_none(camera.delivered),
    }


def _none_for_nan(value: Any) -> Any:
    if isinstance(value, float):
        return _or_none(value)
    if isinstance(value, dict):
        return {key: _none_for_nan(entry) for key, entry in value.items()}
    return [_none_for_nan(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
