"""``--gate``: figures of a run compared with limits, for scripts and CI. ``p99_margin_ms>=5,miss_rate<=1e-3``."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from phyai_engine.errors import ConfigError
from phyai_engine.replay.record import Invariant, Record, TimingRow
from phyai_engine.replay.summary import handoffs, spans
from phyai_engine.timing import miss_upper95

Figure = Callable[[Record], float]

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
)
_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(>=|<=|>|<)\s*([-+.0-9a-z]+)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison."""

    name: str
    comparison: str
    limit: float

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {self.limit:g}"


def parse_gate(text: str) -> tuple[Condition, ...]:
    """The conditions of ``--gate``, which are separated by commas and must all hold.

    :raises ConfigError: not of that form, or a figure that does not exist.
    """
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        if match is None:
            raise ConfigError(
                "a condition of the gate cannot be read",
                got=repr(part),
                wanted="NAME>=NUMBER (also <=, >, <), several separated by commas",
                where="--gate",
                do=f"Names: {', '.join(FIGURES)}.",
            )
        name, comparison, number = match.groups()
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, n=1)
            raise ConfigError(
                "the gate names no figure",
                got=name,
                wanted=f"one of {', '.join(FIGURES)}",
                where="--gate",
                do=f"Did you mean {near[0]!r}?" if near else None,
            )
        conditions.append(Condition(name, comparison, _number(number, part)))
    return tuple(conditions)


def judge(conditions: Iterable[Condition], record: Record) -> tuple[Invariant, ...]:
    """Each condition on one run. A figure that was not measured fulfils none."""
    return tuple(_judged(condition, FIGURES[condition.name](record)) for condition in conditions)


def _judged(condition: Condition, value: float) -> Invariant:
    if math.isnan(value):
        return Invariant(f"gate {condition}", ok=False, detail=f"{condition.name} was not measured")
    ok = _OPERATORS[condition.comparison](value, condition.limit)
    return Invariant(f"gate {condition}", ok=ok, detail=f"{condition.name} is {value:.6g}")


def _number(text: str, part: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError("a limit of the gate is no number", got=repr(part), wanted="5 or 1e-3", where="--gate")
    return number


# -- figures -----------------------------------------------------------------------------------------------------------


def _column(record: Record, name: str) -> list[float]:
    return [value for row in handoffs(record) if math.isfinite(value := float(getattr(row, name)))]


def _longest_ms(record: Record, *, name: str, percent: float) -> float:
    """A percentile of a duration: ``percent`` of the handoffs took at most this."""
    values = _column(record, name)
    return float(np.percentile(values, percent)) * 1e3 if values else math.nan


def _kept_ms(record: Record, *, name: str, percent: float) -> float:
    """A percentile of a margin: ``percent`` of the handoffs had at least this."""
    return _longest_ms(record, name=name, percent=100.0 - percent)


def _misses(record: Record) -> float:
    margins = _column(record, "m_ctrl_s")
    return float(sum(margin < 0 for margin in margins)) if margins else math.nan


def _miss_rate(record: Record) -> float:
    margins = _column(record, "m_ctrl_s")
    return _misses(record) / len(margins) if margins else math.nan


def _miss_bound(record: Record) -> float:
    margins = _column(record, "m_ctrl_s")
    return miss_upper95(int(_misses(record)), len(margins)) if margins else math.nan


def _refused_chunks(record: Record) -> float:
    return float(sum(row.outcome == "refused" for row in record.timings))


def _hold_s(record: Record) -> float:
    held: Sequence[tuple[float, float]] = spans(record.steps, "hold", record.dt_s)
    return max((end - begin for begin, end in held), default=0.0) if record.steps else math.nan


def _after_idle_ms(record: Record) -> float:
    return max((row.inference_s for row in record.idle), default=math.nan) * 1e3


def _named(prefix: str, column: str, figure: Callable[..., float], extreme: str) -> dict[str, Figure]:
    """``p50_..._ms`` to ``p99.9``, and the worst of all."""
    percents = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "p999": 99.9, extreme: 100.0}
    assert column in TimingRow.__struct_fields__
    return {f"{p}_{prefix}_ms": partial(figure, name=column, percent=percent) for p, percent in percents.items()}


FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        **_named("margin", "m_ctrl_s", _kept_ms, "min"),
        **_named("cond_margin", "m_cond_s", _kept_ms, "min"),
        **_named("exhaust_margin", "m_exhaust_s", _kept_ms, "min"),
        **_named("critical", "l_critical_s", _longest_ms, "max"),
        **_named("inference", "l_inference_s", _longest_ms, "max"),
        **_named("observe", "l_observe_s", _longest_ms, "max"),
        **_named("transfer", "l_transfer_s", _longest_ms, "max"),
        **_named("queue", "l_queue_s", _longest_ms, "max"),
        **_named("actuate", "l_actuate_s", _longest_ms, "max"),
        **_named("age", "age_s", _longest_ms, "max"),
        "misses": _misses,
        "miss_rate": _miss_rate,
        "miss_rate_upper95": _miss_bound,
        "handoffs": lambda record: float(len(handoffs(record))),
        "refusals": lambda record: float(sum(record.refusals.values())),
        "refused_chunks": _refused_chunks,
        "longest_hold_s": _hold_s,
        "aborts": lambda record: float(sum(event.kind == "abort" for event in record.events)),
        "first_inference_ms": lambda record: record.first_inference_s * 1e3,
        "max_after_idle_ms": _after_idle_ms,
        "sensor_faults": lambda record: float(len(record.survey.faults)),
    }
)
"""What a gate may name. ``p99_margin_ms``: 99 % of the handoffs had at least this margin; of a latency, at most."""
