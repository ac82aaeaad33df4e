"""Figures of one cell: success with its interval, seams, jerk, frozen rows, time.

A jump is the largest |first new command - last command| over the actions, its ratio that over the median step-to-step
change of the new chunk: the node's own definition (``jump_ratio`` of ChunkTiming.msg). Comparing with the old chunk's
row of the same tick, as papers do, has no such row at d = s = H/2.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phyai_engine.intervals import Interval, Spread, spread, wilson
from phyai_engine.rtc_study.play import Played, Timeline
from phyai_engine.types import F64


class Cell(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One method at one delay. None where the figure does not exist (no handoff, no success, no frozen row).

    :param success: goal line reached without touching the plate. :param touched: episodes that touched it.
    :param jump_ratio: over all handoffs of all episodes while they ran; in ``sync`` from the last row before the stop.
    :param jerk_mean_m_s3: over all ticks. :param jerk_handoff_p99_m_s3: over handoffs and the ticks beside them.
    :param frozen_error_m_s: mean difference of the rows that the old chunk plays before the handoff.
    :param seconds_to_goal: mean of the successes, stops included.
    """

    method: str
    delay_steps: int
    execution_steps: int
    episodes: int
    successes: int
    success: Interval
    touched: int
    jump_ratio: Spread | None
    jerk_mean_m_s3: float
    jerk_handoff_p99_m_s3: float | None
    frozen_error_m_s: float | None
    seconds_to_goal: float | None


def score(method: str, played: Played, dt_s: float) -> Cell:
    """All figures of one cell."""
    success = played.reached & ~played.touched
    count, n = int(success.sum()), len(success)
    ratios = jump_ratios(played)
    jerk, beside = jerks(played, dt_s)
    return Cell(
        method=method,
        delay_steps=played.timeline.delay,
        execution_steps=played.timeline.execute,
        episodes=n,
        successes=count,
        success=wilson(count, n),
        touched=int(played.touched.sum()),
        jump_ratio=spread(ratios),
        jerk_mean_m_s3=float(jerk.mean()),
        jerk_handoff_p99_m_s3=float(np.percentile(beside, 99)) if len(beside) else None,
        frozen_error_m_s=frozen_error(played),
        seconds_to_goal=float(played.ticks[success].mean() * dt_s) if count else None,
    )


def handoffs(played: Played) -> list[tuple[int, int]]:
    """(chunk, tick of its first row) of every handoff from one chunk to another that was played."""
    ticks = [(chunk, played.timeline.handoff(chunk)) for chunk in range(1, len(played.chunks))]
    return [(chunk, tick) for chunk, tick in ticks if tick < len(played.commands)]


def jump_ratios(played: Played) -> F64:
    """[m] over all handoffs and the episodes that ran then."""
    stood = played.timeline.delay if played.timeline.stops else 0
    ratios = [np.empty(0)]
    for chunk, tick in handoffs(played):
        on = played.running[tick]
        jump = np.abs(played.commands[tick, on] - played.commands[tick - 1 - stood, on]).max(axis=1)
        within = np.abs(np.diff(played.chunks[chunk, on], axis=1)).max(axis=2)  # [m, H - 1]
        ratios.append(jump / np.median(within, axis=1))
    return np.concatenate(ratios)


def jerks(played: Played, dt_s: float) -> tuple[F64, F64]:
    """Largest second difference of the velocity commands over the axes [m/s^3]: of all ticks, of those at handoffs."""
    c = played.commands
    jerk = np.abs(c[2:] - 2 * c[1:-1] + c[:-2]).max(axis=2) / dt_s**2  # [T - 2, n], around tick 1, 2, ...
    on = played.running[2:]
    centres = _beside(played.timeline, handoffs(played), len(jerk))
    return jerk[on], jerk[centres][on[centres]]


def _beside(timeline: Timeline, found: list[tuple[int, int]], rows: int) -> NDArray[np.intp]:
    """Rows of the jerk array at a handoff and one tick before and after it; in ``sync`` also where the stop begins."""
    stops = [timeline.observed(chunk) for chunk, _ in found] if timeline.stops else []
    ticks = {tick + by for tick in [*(tick for _, tick in found), *stops] for by in (-1, 0, 1)}
    return np.array(sorted(tick - 1 for tick in ticks if 0 <= tick - 1 < rows), dtype=np.intp)


def frozen_error(played: Played) -> float | None:
    """Mean |A_new[:d] - Y[:d]| [m/s] over the chunks drawn while another played; None without such rows."""
    d, s = played.timeline.delay, played.timeline.execute
    if d == 0 or played.timeline.stops or len(played.chunks) < 2:
        return None
    on = np.stack([played.running[played.timeline.observed(chunk)] for chunk in range(1, len(played.chunks))])
    apart = np.abs(played.chunks[1:, :, :d] - played.chunks[:-1, :, s : s + d])
    return float(apart[on].mean())
