"""Normalisation: policy units <-> the model's space, one row of statistics per dimension.

Each kind is ``y = (x - low) / span * gain + base``, in this order so that ``low`` maps to ``base`` exactly:

| kind     | statistics   | low   | span, rule openpi | span, rule lerobot                 | gain | base |
|----------|--------------|-------|-------------------|------------------------------------|------|------|
| identity |              | 0     | 1                 | 1                                  | 1    | 0    |
| limits   | lower, upper | lower | upper - lower     | upper - lower                      | 2    | -1   |
| mean_std | mean, std    | mean  | std + eps         | state: std + eps, actions: std     | 1    | 0    |
| quantile | q01, q99     | q01   | q99 - q01 + eps   | q99 - q01                          | 2    | -1   |
| min_max  | min, max     | min   | (has none)        | max - min                          | 2    | -1   |

The state is only ever normalised, as in training. The span of the actions is that of the way out, model -> robot; the
way in is its exact inverse, so that committed actions come back as they were. lerobot computes in float32, and so does
the state here under its rule: the bins of a prompt fall where they fell in training.

Nothing is clipped. A dimension that was constant (upper == lower, std == 0) carries nothing: it always normalises to
``base`` and unnormalises to ``low``. By the families' formulas it is divided by eps (openpi adds it, lerobot puts it in
the place of a range of exactly 0), which turns a micrometre of noise into 1 or 100. The constant value itself maps to
``base`` by every formula, and an answer y moves from ``low`` by less than eps * (|y| + 1): with std, min_max and limits
nothing that training has shown changes. Of a constant quantile range the 2 % outside of it may have been anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import Normalisation
from phyai_engine.errors import ConfigError
from phyai_engine.types import F64

Floats = NDArray[np.floating[Any]]

# kind -> (names of its two statistics, gain, base)
_KINDS = MappingProxyType(
    {
        "limits": (("lower", "upper"), 2.0, -1.0),
        "mean_std": (("mean", "std"), 1.0, 0.0),
        "quantile": (("q01", "q99"), 2.0, -1.0),
        "min_max": (("min", "max"), 2.0, -1.0),
    }
)
_EPS = MappingProxyType({"openpi": 1e-6, "lerobot": 1e-8})


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The affine map of one vector; see the module's table.

    :param low, span: [n], in the precision that :meth:`normalise` computes in; ``constant``: [n] bool, dimensions
        without information.
    """

    low: Floats
    span: Floats
    constant: NDArray[np.bool_]
    gain: float
    base: float

    def normalise(self, values: Floats) -> Floats:
        """[..., n] policy units -> [..., n]."""
        scaled = (values.astype(self.low.dtype) - self.low) / self.span * self.gain + self.base
        return np.where(self.constant, self.low.dtype.type(self.base), scaled)

    def unnormalise(self, values: Floats) -> F64:
        """[..., n] normalised -> [..., n] float64 policy units."""
        scaled = (values.astype(np.float64) - self.base) / self.gain * self.span + self.low
        return np.where(self.constant, self.low, scaled)

    def spread(self) -> Floats:
        """[n] policy units: about what the training data span; NaN where the statistics do not tell it."""
        untold = self.constant | ((self.low == 0) & (self.span == 1) & (self.gain == 1.0))  # identity
        return np.where(untold, np.nan, self.span * 4.0 / self.gain**2)  # two std, or one range


def scaling(
    config: Normalisation,
    part: Literal["state", "actions"],
    limits: tuple[F64, F64],
    entries: Sequence[str],
    padded: int,
) -> Scaling:
    """The map that a model file asks for.

    :param part: which statistics of the file are used.
    :param limits: (lower, upper), [n] float64 each, policy units: for kind ``limits`` if the file has none.
    :param entries: [n] the robot file's names, for messages.
    :param padded: width of the model's vector. Statistics of exactly that width belong to the padded vector of
        training, the robot's entries first: those behind them are not used. Any other width must be n.
    :raises ConfigError: statistics missing, unknown, of another length, not finite or not ordered; a kind that the
        rule does not have.
    """
    count, where = len(entries), f"normalisation.{part}"
    kind = (config.state_kind if part == "state" else config.actions_kind) or config.kind
    given: Mapping[str, tuple[float, ...]] = getattr(config, part)
    dtype: Any = np.float32 if config.rule == "lerobot" and part == "state" else np.float64
    if kind == "identity":
        _refuse_unknown(given, (), where)
        return Scaling(np.zeros(count, dtype), np.ones(count, dtype), np.zeros(count, np.bool_), gain=1.0, base=0.0)
    if kind == "min_max" and config.rule == "openpi":
        raise ConfigError(
            "openpi has no normalisation by min and max", wanted="rule: lerobot, or another kind", where=where
        )
    names, gain, base = _KINDS[kind]
    _refuse_unknown(given, names, where)
    first, second = limits
    if given or kind != "limits":
        first, second = (_statistic(given, name, count, padded, where) for name in names)
    with np.errstate(over="ignore", invalid="ignore"):  # what is infinite is told below
        first, second = first.astype(dtype), second.astype(dtype)
        width = second if kind == "mean_std" else second - first
        span = width + width.dtype.type(_added(config, kind, part))
    _check_ranges(kind, names, first, second, width, span, entries, where)
    constant = width == 0
    return Scaling(first, np.where(constant, width.dtype.type(1.0), span), constant, gain, base)


def _added(config: Normalisation, kind: str, part: str) -> float:
    """What the rule adds to the width of a range. lerobot adds to std only, and only on the way in."""
    eps = _EPS[config.rule] if config.eps is None else config.eps
    if kind == "limits" or (config.rule == "lerobot" and not (kind == "mean_std" and part == "state")):
        return 0.0
    return eps


def _check_ranges(
    kind: str,
    names: tuple[str, str],
    first: Floats,
    second: Floats,
    width: Floats,
    span: Floats,
    entries: Sequence[str],
    where: str,
) -> None:
    if not np.isfinite(span).all():
        at = int(np.argmin(np.isfinite(span)))
        raise ConfigError(
            f"the range of {entries[at]} is not finite",
            got=f"{names[0]} {first[at]}, {names[1]} {second[at]}",
            wanted=f"finite values for normalisation kind {kind!r}",
            where=f"{where}[{at}]",
        )
    if (width < 0).any():
        at = int(np.argmax(width < 0))
        raise ConfigError(
            "statistics are not ordered",
            got=f"{first[at]}, {second[at]}",
            wanted="std >= 0" if kind == "mean_std" else f"{names[0]} <= {names[1]}",
            where=f"{where}[{at}]",
        )


def _statistic(given: Mapping[str, tuple[float, ...]], name: str, count: int, padded: int, where: str) -> F64:
    if name not in given:
        raise ConfigError(f"{where}.{name} is missing", wanted=f"{count} values, in the robot file's order")
    values = np.array(given[name], dtype=np.float64)
    if values.size != count and not values.size == padded > count:
        raise ConfigError(
            f"{where}.{name} does not fit the robot",
            got=f"{values.size} values",
            wanted=f"{count}, in the robot file's order, or {padded}, the model's padded vector",
            do="Take the statistics of the data set that was recorded with this robot.",
        )
    values = values[:count]
    if not np.isfinite(values).all():
        raise ConfigError(f"{where}.{name} is not finite", got=given[name][:count])
    return values


def _refuse_unknown(given: Mapping[str, object], names: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(
            f"{where} has statistics that this kind does not use: {', '.join(unknown)}",
            wanted=" and ".join(names) or "none",
        )
