"""Normalisation: policy units <-> the model's space, one row of statistics per dimension.

Each kind is ``y = (x - low) / span * gain + base``, in this order so that ``low`` maps to ``base`` exactly:

| kind     | statistics     | low   | span              | gain | base |
|----------|----------------|-------|-------------------|------|------|
| identity |                | 0     | 1                 | 1    | 0    |
| limits   | lower, upper   | lower | upper - lower     | 2    | -1   |
| mean_std | mean, std      | mean  | std + eps         | 1    | 0    |
| quantile | q01, q99       | q01   | q99 - q01 + eps   | 2    | -1   |

Nothing is clipped. A dimension that was constant (upper == lower, std == 0) carries nothing: it always
normalises to ``base`` and unnormalises to ``low``; dividing by eps would turn a micrometre of noise into 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import Normalisation
from phyai_engine.errors import ConfigError
from phyai_engine.types import F64

# kind -> (names of its two statistics, gain, base)
_KINDS = MappingProxyType(
    {
        "limits": (("lower", "upper"), 2.0, -1.0),
        "mean_std": (("mean", "std"), 1.0, 0.0),
        "quantile": (("q01", "q99"), 2.0, -1.0),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """The affine map of one vector; see the module's table.

    :param low, span: [n] float64; ``constant``: [n] bool, dimensions without information.
    """

    low: F64
    span: F64
    constant: NDArray[np.bool_]
    gain: float
    base: float

    def normalise(self, values: NDArray[np.floating[Any]]) -> F64:
        """[..., n] policy units -> [..., n] float64."""
        scaled = (values - self.low) / self.span * self.gain + self.base
        return np.where(self.constant, self.base, scaled)

    def unnormalise(self, values: NDArray[np.floating[Any]]) -> F64:
        """[..., n] normalised -> [..., n] float64 policy units."""
        scaled = (values.astype(np.float64) - self.base) / self.gain * self.span + self.low
        return np.where(self.constant, self.low, scaled)


def identity(count: int) -> Scaling:
    """The map that changes nothing."""
    return Scaling(np.zeros(count), np.ones(count), np.zeros(count, dtype=np.bool_), gain=1.0, base=0.0)


def scaling(config: Normalisation, part: str, limits: tuple[F64, F64], entries: Sequence[str]) -> Scaling:
    """The map that a model file asks for.

    :param part: ``state`` or ``actions``: which statistics of the file are used.
    :param limits: (lower, upper), [n] float64 each, policy units: for kind ``limits`` if the file has none.
    :param entries: [n] the robot file's names, for messages.
    :raises ConfigError: statistics missing, unknown, of another length, not finite or not ordered.
    """
    count = limits[0].size
    where = f"normalisation.{part}"
    given: Mapping[str, tuple[float, ...]] = getattr(config, part)
    if config.kind == "identity":
        _refuse_unknown(given, (), where)
        return identity(count)
    names, gain, base = _KINDS[config.kind]
    _refuse_unknown(given, names, where)
    first, second = limits
    if given or config.kind != "limits":
        first, second = (_statistic(given, name, count, where) for name in names)
    if config.kind == "mean_std":
        low, width, rule = first, second, "std >= 0"
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # infinite limits are told below
            low, width, rule = first, second - first, f"{names[0]} <= {names[1]}"
    span = width + (0.0 if config.kind == "limits" else config.eps)
    if not np.isfinite(span).all():
        at = int(np.argmin(np.isfinite(span)))
        raise ConfigError(
            f"the range of {entries[at]} is not finite",
            got=f"{names[0]} {first[at]}, {names[1]} {second[at]}",
            wanted=f"finite values for normalisation kind {config.kind!r}",
            where=f"{where}[{at}]",
        )
    if (width < 0).any():
        at = int(np.argmax(width < 0))
        raise ConfigError(
            "statistics are not ordered",
            got=f"{first[at]}, {second[at]}",
            wanted=rule,
            where=f"{where}[{at}]",
        )
    constant = width == 0
    return Scaling(low, np.where(constant, 1.0, span), constant, gain, base)


def _statistic(given: Mapping[str, tuple[float, ...]], name: str, count: int, where: str) -> F64:
    if name not in given:
        raise ConfigError(f"{where}.{name} is missing", wanted=f"{count} values, in the robot file's order")
    values = np.array(given[name], dtype=np.float64)
    if values.size != count:
        raise ConfigError(
            f"{where}.{name} does not fit the robot",
            got=f"{values.size} values",
            wanted=f"{count}, in the robot file's order",
            do="Take the statistics of the data set that was recorded with this robot.",
        )
    if not np.isfinite(values).all():
        raise ConfigError(f"{where}.{name} is not finite", got=given[name])
    return values


def _refuse_unknown(given: Mapping[str, object], names: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ConfigError(
            f"{where} has statistics that this kind does not use: {', '.join(unknown)}",
            wanted=" and ".join(names) or "none",
        )
