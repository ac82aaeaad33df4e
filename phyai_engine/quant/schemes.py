"""Schemes by name: what weights and activations are coded as, and what shares one scale. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Granularity = Literal["tensor", "row", "group"]


@dataclass(frozen=True, slots=True)
class Format:
    """A format of numbers. :param largest: what it can hold; a scale brings the largest value there."""

    name: str
    bits: int
    largest: float


E4M3 = Format("float8_e4m3fn", 8, 448.0)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is multiplied with what.

    :param weights, activations: None: they stay as they are. :param weight_scale, activation_scale: what shares one.
    :param calibrated: activations' scales are constants that must be measured before the model is coded.
    """

    name: str
    weights: Format | None
    weight_scale: Granularity
    activations: Format | None
    activation_scale: Granularity
    calibrated: bool


W8A8_FP8 = Scheme("w8a8_fp8", E4M3, "row", E4M3, "tensor", calibrated=True)

SCHEMES: Mapping[str, Scheme] = MappingProxyType({scheme.name: scheme for scheme in (W8A8_FP8,)})
