"""How often a configuration succeeds: what `phyai eval` found, or a file of rates, for `phyai sweep` to join.

A rate belongs to a configuration only if it was evaluated under as much delay: of several evaluations the one with the
shortest delay that is not shorter counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from phyai_engine.config import Name, convert, read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.condition import Fault
from phyai_engine.evaluate.run_folder import IN_PROCESS, read_run
from phyai_engine.evaluate.scores import summarise

Rate = Annotated[float, Meta(ge=0, le=1)]
Steps = Annotated[int, Meta(ge=0)]


class Trials(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Success of one configuration in evaluation.

    :param run: part of a run's name or model. :param n: trials.
    :param schedule: empty: of any. :param execution_steps: None: of any; 0: half of the horizon.
    :param delay_steps: from observation to chunk, None: of any.
    """

    run: Name
    success: Rate
    n: Annotated[int, Meta(ge=1)]
    schedule: str = ""
    execution_steps: Steps | None = None
    delay_steps: Steps | None = None

    def names(self, *texts: str) -> bool:
        """Whether it is of a run with one of these names."""
        return self.run.lower() in "\n".join(texts).lower()


class Rates(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of success rates, JSON or YAML."""

    trials: tuple[Trials, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What rates are looked up for.

    :param names: of the run and its model. :param delay_steps: from observation to chunk.
    """

    names: tuple[str, str]
    schedule: str
    horizon: int
    execution_steps: int
    delay_steps: int


@dataclass(frozen=True, slots=True)
class Success:
    """All rates that were given."""

    trials: tuple[Trials, ...]

    def of(self, wanted: Configuration) -> Trials | None:
        """The rate of a configuration; None where none was evaluated so, or under less delay only."""

        def fits(entry: Trials) -> bool:
            own = entry.execution_steps if entry.execution_steps != 0 else max(1, wanted.horizon // 2)
            return (
                entry.names(*wanted.names)
                and entry.schedule in ("", wanted.schedule)
                and own in (None, wanted.execution_steps)
                and (entry.delay_steps is None or entry.delay_steps >= wanted.delay_steps)
            )

        def order(entry: Trials) -> tuple[bool, float]:
            """What says more goes first."""
            delay = math.inf if entry.delay_steps is None else entry.delay_steps
            return entry.execution_steps is None, delay

        return min(filter(fits, self.trials), key=order, default=None)

    def strangers(self, names: Sequence[tuple[str, str]]) -> list[str]:
        """Of which run rates were given that are of none of these."""
        return sorted({t.run for t in self.trials if not any(t.names(*each) for each in names)})


def load_success(given: Sequence[str]) -> Success:
    """Read ``PATH`` or ``NAME=PATH``: folders of `phyai eval`, files of rates.

    :param given: NAME is part of the name or model of the runs that a folder's rate is of; without it, its own model.
    :raises ConfigError: with the path of the wrong key; an evaluation that is not whole, or of a planted fault.
    """
    trials: list[Trials] = []
    for text in given:
        name, separator, rest = text.partition("=")
        if Path(text).exists():  # a path may hold one
            name, separator, rest = "", "", text
        path = Path(rest if separator else text)
        if path.is_dir():
            trials.append(_evaluated(path, name if separator else ""))
        elif separator:
            raise ConfigError("not an evaluation", got=path, wanted="the folder that `phyai eval` wrote", where=text)
        else:
            trials += convert(read_yaml(path), Rates, where=str(path)).trials
    return Success(tuple(trials))


def _evaluated(folder: Path, name: str) -> Trials:
    run, found = read_run(folder), summarise(folder)
    if run.condition.fault is not Fault.NONE:
        raise ConfigError("an evaluation of a planted fault", got=run.condition.fault.value, where=folder)
    if run.driver == IN_PROCESS:
        delay = run.condition.delay_ticks(run.dt_s)
    else:  # it was what it was
        delay = 0 if found.delay_steps is None else math.ceil(found.delay_steps.p50)
    return Trials(
        run=name or run.provenance.weights,
        success=found.all.success.share,
        n=found.all.n,
        schedule=run.condition.schedule.value,
        execution_steps=run.condition.execution_horizon,
        delay_steps=delay,
    )
