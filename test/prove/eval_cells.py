"""What a delay costs in closed loop: schedules and guidances at 0, 200 and 400 ms, the same episodes in every cell.

Each cell is one `phyai eval`; its folder below ``--out`` is kept, and an interrupted proof goes on there. One policy
does every task, by its instruction. An hour or more on two cores, two minutes with ``--lanes 12`` on sixteen and a GPU
that draws (``--device cpu``: processes that draw and compute on one GPU take turns there).
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import torch
from evidence import conclude, options, show
from rich.console import Console

from phyai_engine.bench.machine import cores
from phyai_engine.evaluate.command import EvalOptions, evaluate
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.figure import svg_of_cells
from phyai_engine.evaluate.scores import Summary, difference
from phyai_engine.types import Schedule

Row = tuple[str, str, bool | None]
DELAYS_MS = (0.0, 200.0, 400.0)
WAYS = ((Schedule.SYNC, ""), (Schedule.NAIVE_ASYNC, ""), (Schedule.RTC, "identity"), (Schedule.RTC, "trained"))
COLUMNS = ("cell", "n", "success [95 %]", "less than at 0 ms [95 %]", "jerk", "jump p50/p99", "s", "at rest")
N_MIN = 200
DROP_MAX = 0.05
"""A drop whose interval reaches down to this is not shown to be a larger one."""


def folder_of(out: Path, condition: Condition) -> Path:
    """Of one cell."""
    return out / condition.title.replace(", ", "_").replace(" ", "_")


def play(cells: Sequence[EvalOptions], lanes: int) -> list[Summary]:
    """Every cell, ``lanes`` of them at a time, each with a policy of its own and its share of the cores."""
    context = multiprocessing.get_context("spawn")
    share = max(1, cores() // lanes)
    with ProcessPoolExecutor(lanes, mp_context=context, initializer=torch.set_num_threads, initargs=(share,)) as pool:
        return list(pool.map(_one, cells))


def _one(cell: EvalOptions) -> Summary:
    summary = evaluate(cell, Console(stderr=True, quiet=True))
    print(f"{summary.title}: {summary.all.success}", flush=True)
    return summary


def common(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a proof that plays several evaluations."""
    parser.add_argument("model", nargs="?", default="metaworld", help="checkpoint folder, model file or name")
    parser.add_argument("--tasks", default="", metavar="A,B", help="default: all")
    parser.add_argument("--seed", type=int, default=3, help="of scenes and noise")
    parser.add_argument("--lanes", type=int, default=1, help="evaluations at a time")
    parser.add_argument("--workers", type=int, default=0, help="simulators of each; 0: a lane's share of the cores")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path("out/eval-cells"))
    return options(parser)


def evaluation(chosen: argparse.Namespace, condition: Condition, episodes: int) -> EvalOptions:
    """One cell with its share of the cores."""
    return EvalOptions(
        model=chosen.model,
        tasks=tuple(task for task in chosen.tasks.split(",") if task),
        episodes=episodes,
        seed=chosen.seed,
        condition=condition,
        device=chosen.device,
        workers=chosen.workers or max(1, cores() // chosen.lanes - 1),
        out=folder_of(chosen.out, condition),
    )


def row(cell: Summary, drop: str) -> tuple[str, ...]:
    """In the order of ``COLUMNS``."""
    score, jump = cell.all, cell.jump_ratio
    return (
        cell.title,
        str(score.n),
        str(score.success),
        drop,
        "–" if score.jerk is None else f"{score.jerk:.0f}",
        "–" if jump is None else f"{jump.p50:.2f}/{jump.p99:.1f}",
        "–" if score.seconds is None else f"{score.seconds:.1f}",
        f"{cell.held:.0%}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=34, help="of each task in each cell")
    parser.add_argument("--plot", type=Path, help="the figure of the README")
    chosen = common(parser)
    conditions = [
        Condition(schedule=schedule, guidance=guidance, delay_ms=delay_ms)
        for schedule, guidance in WAYS
        for delay_ms in DELAYS_MS
    ]
    cells = play([evaluation(chosen, condition, chosen.episodes) for condition in conditions], chosen.lanes)
    rows: list[tuple[str, ...]] = []
    n = min(cell.all.n for cell in cells)
    claims: list[Row] = [(f"{N_MIN} paired episodes a cell at least", str(n), n >= N_MIN)]
    for condition, cell in zip(conditions, cells, strict=True):
        origin = folder_of(chosen.out, msgspec.structs.replace(condition, delay_ms=0.0))
        lost = difference(origin, folder_of(chosen.out, condition))
        rows.append(row(cell, "" if condition.delay_ms == 0 else str(lost)))
        if condition.schedule is Schedule.RTC and condition.delay_ms == 200:
            claims.append(
                (f"{cell.title}: the interval of what is lost has 5 points or less", str(lost), lost.low <= DROP_MAX)
            )
    if chosen.plot is not None:
        chosen.plot.write_text(svg_of_cells(cells), encoding="utf-8")
    title = f"eval cells: {cells[0].all.n} paired episodes each, {len(cells[0].tasks)} tasks, {chosen.model}"
    show(title, COLUMNS, rows, log=chosen.log)
    return conclude("eval cells: what is promised", claims, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
