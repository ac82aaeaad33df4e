"""``phyai sweep``: reads runs and files, shows the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from phyai_engine.errors import ConfigError
from phyai_engine.replay.prices import load_prices
from phyai_engine.replay.recorded_run import run_at
from phyai_engine.replay.success import load_success
from phyai_engine.replay.sweep import Candidate, Grid, show, sweep


def sweep_command(
    runs: Sequence[str],
    *,
    execution_steps: str,
    delay_steps: str,
    horizon: int | None,
    eps: float,
    budget: float | None,
    prices: Path | None,
    success: Sequence[str],
    out: Path | None,
) -> int:
    """What ``phyai sweep`` does.

    :param runs: ``PATH`` or ``NAME=PATH`` of records and recordings.
    :param execution_steps: whole numbers with commas between, or empty; ``delay_steps`` likewise, and ``predicted``.
    :param horizon: H of runs whose chunks were not kept.
    :param success: of evaluations: see :func:`phyai_engine.replay.success.load_success`.
    :returns: exit code: 0 a configuration keeps its deadline within the budget, 1 none does.
    :raises PhyaiError: a run or a file cannot be read, or there is nothing to try.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError("no such folder", where=out.parent, do="Make it, or give another --out.")
    grid = Grid(
        execution_steps=[steps for steps in numbers(execution_steps, "--steps") if steps is not None],
        delay_steps=numbers(delay_steps, "--delay", also="predicted") or (None,),
        eps=eps,
        budget=budget,
    )
    table = load_prices(prices)
    trials = load_success(success) if success else None
    found = sweep([candidate(run, horizon) for run in runs], grid, table, trials)
    if out is not None:
        found.save(out)
    show(found, Console())
    return 0 if found.best is not None else 1


def numbers(text: str, option: str, *, also: str = "") -> list[int | None]:
    """``"10, 15"`` -> [10, 15]. :param also: a word that stands for None.

    :raises ConfigError: something else stands there.
    """
    found: list[int | None] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if also and word == also:
            found.append(None)
        elif word.isdigit():
            found.append(int(word))
        else:
            wanted = "whole numbers with commas between" + (f", or {also}" if also else "")
            raise ConfigError("not a number of steps", got=repr(word), wanted=wanted, where=option)
    return found


def candidate(run: str, horizon: int | None) -> Candidate:
    """One argument of the command.

    :raises PhyaiError: the run cannot be read, or its horizon is not known.
    """
    name, separator, named = run.partition("=")
    separator = "" if Path(run).exists() else separator  # a path may hold one
    path = Path(named if separator else run)
    record = run_at(path)
    rows = len(record.chunks[0].actions) if record.chunks else horizon
    if not rows:
        raise ConfigError("the run does not say its horizon", where=path, do="Give --horizon.")
    return Candidate(name if separator else path.stem, record, rows)
