"""From the records of an evaluation to its figures: success with intervals, smoothness, handoffs, differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.record import EpisodeRecord
from phyai_engine.evaluate.run_folder import read_run, whole_records
from phyai_engine.intervals import Interval, Spread, paired_difference, spread, wilson


class Score(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one task, or of all together.

    :param seconds: mean robot time of the successes; None without one. :param jerk: mean over the episodes.
    """

    task: str
    n: int
    successes: int
    success: Interval
    seconds: float | None
    jerk: float | None


class Summary(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One evaluation.

    :param tasks: in the manifest's order; ``all`` the whole, ``task_mean`` the mean share over the tasks.
    :param held: share of the ticks without an action of a chunk. :param delay_steps: d' of the handoffs.
    :param frozen_error: mean over the episodes that have one [units of the actions].
    :param handoffs: with a deadline; ``misses`` those after it. :param margin_s: M_ctrl, in real time only.
    """

    title: str
    driver: str
    condition: Condition
    tasks: tuple[Score, ...]
    all: Score
    task_mean: float
    held: float
    chunks: int
    failed: int
    refusals: dict[str, int]
    fallbacks: dict[str, int]
    aborted: int
    handoffs: int
    misses: int
    delay_steps: Spread | None
    jump_ratio: Spread | None
    frozen_error: float | None
    margin_p01_s: float | None
    wall_s: float


def summarise(path: Path) -> Summary:
    """Everything of one folder.

    :raises ConfigError: it is incomplete, or no evaluation.
    """
    run, records = read_run(path), whole_records(path)
    dt_s = run.dt_s
    by_task: dict[str, list[EpisodeRecord]] = {}
    for record in records:
        by_task.setdefault(record.task, []).append(record)
    tasks = tuple(score(task, found, dt_s) for task, found in by_task.items())
    frozen = [record.frozen_error for record in records if record.frozen_error is not None]
    margins = np.array([margin for record in records for margin in record.margins_s])
    ticks = sum(record.ticks for record in records)
    return Summary(
        title=run.title,
        driver=run.driver,
        condition=run.condition,
        tasks=tasks,
        all=score("all", records, dt_s),
        task_mean=float(np.mean([task.success.share for task in tasks])),
        held=sum(record.held for record in records) / max(ticks, 1),
        chunks=sum(record.accepted for record in records),
        failed=sum(record.failed for record in records),
        refusals=_summed([record.refusals for record in records]),
        fallbacks=_summed([record.fallbacks for record in records]),
        aborted=sum(bool(record.aborted) for record in records),
        handoffs=sum(record.handoffs for record in records),
        misses=sum(record.misses for record in records),
        delay_steps=spread(np.array([float(d) for record in records for d in record.delay_steps])),
        jump_ratio=spread(np.array([ratio for record in records for ratio in record.jump_ratios])),
        frozen_error=float(np.mean(frozen)) if frozen else None,
        margin_p01_s=float(np.percentile(margins, 1)) if len(margins) else None,
        wall_s=round(sum(record.wall_s for record in records), 1),
    )


def score(task: str, records: Sequence[EpisodeRecord], dt_s: float) -> Score:
    """Of some records, at least one."""
    solved = [record for record in records if record.success]
    jerks = [record.jerk for record in records if record.jerk is not None]
    return Score(
        task=task,
        n=len(records),
        successes=len(solved),
        success=wilson(len(solved), len(records)),
        seconds=float(np.mean([record.ticks for record in solved])) * dt_s if solved else None,
        jerk=float(np.mean(jerks)) if jerks else None,
    )


def difference(first: Path, second: Path) -> Interval:
    """Success of the first minus that of the second, over pairs of the same episode.

    :raises ConfigError: one is incomplete, or their manifests differ.
    """
    if read_run(first).manifest_sha256 != read_run(second).manifest_sha256:
        raise ConfigError("the evaluations have other manifests", got=second, wanted=f"that of {first}")
    pairs = Counter((a.success, b.success) for a, b in zip(whole_records(first), whole_records(second), strict=True))
    return paired_difference(*(pairs[key] for key in ((True, True), (True, False), (False, True), (False, False))))


def _summed(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
