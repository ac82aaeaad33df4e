"""``phyai sweep``: which configuration keeps its deadline, from recorded latencies, and what it costs.

A run brings model, placement and precision with its latencies; the sweep adds execution horizon and delay by
simulation (simulate.py). Prices (prices.py) and success rates of evaluations (success.py) are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from phyai_engine.errors import ConfigError
from phyai_engine.replay.prices import Prices
from phyai_engine.replay.record import Record
from phyai_engine.replay.simulate import Latencies, Simulated, simulate
from phyai_engine.replay.success import Configuration, Success, Trials
from phyai_engine.replay.verdict import ms, number, percent
from phyai_engine.timing import miss_upper95
from phyai_engine.types import F64, Schedule
from phyai_engine.whole_files import write_json

Keeps = Literal["yes", "unproven", "no", "no deadline"]
VERSION = 1


@dataclass(frozen=True, slots=True)
class Grid:
    """What is tried.

    :param execution_steps: empty: a quarter, half and three quarters of each run's horizon.
    :param delay_steps: None in it: predicted as the node does.
    :param eps: largest accepted miss rate. :param budget: of one robot's hour; None: any.
    """

    execution_steps: Sequence[int] = ()
    delay_steps: Sequence[int | None] = (None,)
    eps: float = 1e-3
    budget: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError("eps is out of range", got=self.eps, wanted="between 0 and 1: a miss rate")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One recorded run. :param name: for the table. :param horizon: H of its chunks."""

    name: str
    record: Record
    horizon: int


class SweepRow(Struct, frozen=True, kw_only=True):
    """One configuration; durations in seconds, None = not known.

    :param execution_steps: s. :param delay_steps: d of every request; None: predicted.
    :param n: handoffs with a deadline; ``miss_upper95`` the upper 95 % bound of their miss rate.
    :param keeps: ``yes``: the bound is within eps; ``unproven``: the rate is, but n is too small to say.
    :param age_p95_s: of the observation behind the last action of a chunk.
    :param robots: that share the machine. :param cost: of one robot's hour. :param affordable: within the budget.
    :param success: of ``success_n`` trials in evaluation, under a delay of ``success_delay_steps`` where that is known.
    """

    run: str
    model: str
    placement: str
    host: str
    schedule: str
    horizon: int
    execution_steps: int
    delay_steps: int | None
    n: int
    misses: int
    miss_upper95: float
    keeps: Keeps
    margin_p50_s: float | None
    margin_p01_s: float | None
    played_fraction: float
    age_p95_s: float | None
    busy: float | None
    machine: str | None
    robots: int
    cost: float | None
    affordable: bool
    success: float | None
    success_n: int
    success_delay_steps: int | None


class Sweep(Struct, frozen=True, kw_only=True):
    """All rows, best first.

    :param skipped: configurations that break d <= s <= H - d. :param strangers: success rates that are of no run.
    :param unrated: configurations without a success rate, in words, where some were given.
    """

    version: int = VERSION
    eps: float
    budget: float | None
    currency: str
    skipped: int
    strangers: Sequence[str] = ()
    unrated: Sequence[str] = ()
    rows: Sequence[SweepRow]

    @property
    def best(self) -> SweepRow | None:
        """The first row that keeps the deadline, proven or not, within the budget."""
        return next((row for row in self.rows if row.keeps in ("yes", "unproven") and row.affordable), None)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, self)


def sweep(candidates: Sequence[Candidate], grid: Grid, prices: Prices, success: Success | None = None) -> Sweep:
    """Simulate every run with every execution horizon and delay that it allows.

    :raises ConfigError: a run without latencies, or nothing to try.
    """
    rows, skipped, unrated = [], 0, list[str]()
    for candidate in candidates:
        latencies = Latencies.of(candidate.record, candidate.name)
        for steps in dict.fromkeys(grid.execution_steps or _parts(candidate.horizon)):
            for delay in grid.delay_steps:
                if not _possible(candidate.horizon, steps, delay):
                    skipped += 1
                    continue
                run = simulate(latencies, horizon=candidate.horizon, execution_steps=steps, delay_steps=delay)
                trials = None if success is None else success.of(_configuration(candidate, latencies, steps))
                rows.append(_row(candidate, steps, delay, run, grid, prices, trials))
                if success is not None and trials is None:
                    late = latencies.delay_steps * latencies.dt_s * 1e3
                    unrated.append(f"{candidate.name} with s = {steps} ({late:.0f} ms)")
    if not rows:
        raise ConfigError(
            "nothing to try",
            got=f"{skipped} configurations, none with d <= s <= H - d",
            wanted=f"s within the horizon of {', '.join(f'{c.name} ({c.horizon})' for c in candidates)}",
        )
    return Sweep(
        eps=grid.eps,
        budget=grid.budget,
        currency=prices.currency,
        skipped=skipped,
        unrated=list(dict.fromkeys(unrated)),
        strangers=[] if success is None else success.strangers([(c.name, c.record.model) for c in candidates]),
        rows=sorted(rows, key=_order),
    )


def _parts(horizon: int) -> Iterable[int]:
    """A quarter, half and three quarters of the horizon, whole steps."""
    return [max(1, horizon * part // 4) for part in (1, 2, 3)]


def _possible(horizon: int, steps: int, delay: int | None) -> bool:
    return 1 <= steps <= horizon if delay is None else 0 <= delay <= steps <= horizon - delay and steps >= 1


def _configuration(candidate: Candidate, latencies: Latencies, steps: int) -> Configuration:
    return Configuration(
        names=(candidate.name, candidate.record.model),
        schedule=latencies.schedule.value,
        horizon=candidate.horizon,
        execution_steps=steps,
        delay_steps=latencies.delay_steps,
    )


def _row(
    candidate: Candidate,
    steps: int,
    delay: int | None,
    run: Simulated,
    grid: Grid,
    prices: Prices,
    trials: Trials | None,
) -> SweepRow:
    record = candidate.record
    machine = prices.machine(candidate.name, record.host)
    cost, robots = None, 1
    if machine is not None:
        cost, robots = prices.per_robot_hour(machine, remote=record.placement == "remote", busy=run.busy)
    n = len(run.margin_s)
    return SweepRow(
        run=candidate.name,
        model=record.model,
        placement=record.placement,
        host=record.host,
        schedule=record.schedule,
        horizon=candidate.horizon,
        execution_steps=steps,
        delay_steps=delay,
        n=n,
        misses=run.misses,
        miss_upper95=miss_upper95(run.misses, n),
        keeps=_keeps(run, grid.eps, record.schedule),
        margin_p50_s=_percentile(run.margin_s, 50),
        margin_p01_s=_percentile(run.margin_s, 1),
        played_fraction=run.played_fraction,
        age_p95_s=_percentile(run.age_s, 95),
        busy=None if math.isnan(run.busy) else run.busy,
        machine=None if machine is None else machine.name,
        robots=robots,
        cost=cost,
        affordable=grid.budget is None or (cost is not None and cost <= grid.budget),
        success=None if trials is None else trials.success,
        success_n=0 if trials is None else trials.n,
        success_delay_steps=None if trials is None else trials.delay_steps,
    )


def _keeps(run: Simulated, eps: float, schedule: str) -> Keeps:
    n = len(run.margin_s)
    if schedule == Schedule.SYNC.value:
        return "no deadline"
    if not n or run.misses / n > eps:
        return "no"
    return "yes" if miss_upper95(run.misses, n) <= eps else "unproven"


def _percentile(values: F64, share: float) -> float | None:
    return float(np.percentile(values, share)) if len(values) else None


def _order(row: SweepRow) -> tuple[bool, int, float, float, float]:
    """Best first: affordable, keeps its deadline, succeeds most, costs least, acts on the freshest observation."""
    rank = {"yes": 0, "unproven": 1, "no deadline": 2, "no": 3}[row.keeps]
    success = -1.0 if row.success is None else row.success
    cost = math.inf if row.cost is None else row.cost
    return not row.affordable, rank, -success, cost, math.inf if row.age_p95_s is None else row.age_p95_s


def show(found: Sweep, console: Console) -> None:
    """The table, and the sentence that it comes to."""
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in ("H", "s", "d", "deadline", "missed", "at most", "margin p50", "p01", "action in", "age p95"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("robots", f"{found.currency}/robot h", "success"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        colour = {"yes": "green", "unproven": "yellow", "no": "red"}.get(row.keeps, "default")
        table.add_row(
            row.run,
            str(row.horizon),
            str(row.execution_steps),
            "predicted" if row.delay_steps is None else str(row.delay_steps),
            f"[{colour}]{row.keeps}[/]" + ("" if row.affordable else " [red]too dear[/]"),
            f"{row.misses} of {row.n}",
            percent(row.miss_upper95) if row.n else "–",
            ms(row.margin_p50_s),
            ms(row.margin_p01_s),
            percent(row.played_fraction),
            ms(row.age_p95_s),
            "–" if row.machine is None else str(row.robots),
            number(row.cost, ".3f"),
            "–" if row.success is None else f"{percent(row.success)} of {row.success_n}",
        )
    console.print(table)
    for sentence in conclusions(found):
        console.print(sentence, highlight=False, markup=False)


def conclusions(found: Sweep) -> list[str]:
    """What the table comes to, in words."""
    within = "" if found.budget is None else f" within {found.budget:g} {found.currency} per robot and hour"
    best = found.best
    if best is None:
        sentences = [f"No configuration keeps its deadline at eps {found.eps:g}{within}."]
    else:
        delay = "predicted" if best.delay_steps is None else str(best.delay_steps)
        sentences = [
            f"Best at eps {found.eps:g}{within}: {best.run} with s = {best.execution_steps}, d {delay}"
            f"{'' if best.cost is None else f', {best.cost:.3f} {found.currency} per robot and hour'}."
        ]
    if best is not None and best.keeps == "unproven":
        wanted = math.ceil(math.log(0.05) / math.log1p(-found.eps))
        sentences.append(
            f"Unproven: {best.misses} of {best.n} missed; a bound of {found.eps:g} takes {wanted} handoffs without a "
            "miss."
        )
    if any(row.robots > 1 for row in found.rows):
        sentences.append("A shared server: queueing as in the recorded run; measure it under that many robots.")
    if found.skipped:
        sentences.append(f"{found.skipped} configurations break d <= s <= H - d and were left out.")
    if found.strangers:
        sentences.append(f"Success rates of {', '.join(found.strangers)} match no run: give NAME=FOLDER.")
    if found.unrated:
        sentences.append(
            f"No success rate under the delay of {'; '.join(found.unrated)}: evaluate with that --delay-ms."
        )
    if unknown := sorted({row.run for row in found.rows if row.machine is None}):
        sentences.append(f"No price matches {', '.join(unknown)}: a budget leaves such runs out.")
    return sentences
