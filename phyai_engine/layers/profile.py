"""Measured profiles: which implementation of an operator is the fastest for one shape on one accelerator.

``phyai tune`` writes them, the operator selector reads them. A row is a figure, not a promise: what it names must still
equal the reference here before it is bound. An accelerator without a profile has a rule instead, which nobody measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from msgspec import Struct

from phyai_engine.config import config_dir, convert, read_yaml
from phyai_engine.errors import ConfigError


class Measured(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of one operator.

    :param dtype: torch's name. :param dims: as OpShape has them. :param choice: ``reference`` or a kind of candidate.
    :param us: kind -> microseconds, median; empty where whole requests decided, not this call.
    :param error: kind -> as the self-check has it; what is missing in ``us`` was wrong or failed.
    """

    op: str
    dtype: str
    dims: tuple[int, ...]
    choice: str
    us: dict[str, float]
    error: dict[str, float] = {}


class Profile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One accelerator's file in config/profiles.

    :param accelerator: its full name. :param made: when, with what, by which command.
    """

    accelerator: str
    made: str
    rows: tuple[Measured, ...]

    def choices(self) -> Mapping[tuple[str, str, tuple[int, ...]], str]:
        """(op, dtype, dims) -> kind."""
        return {(row.op, row.dtype, row.dims): row.choice for row in self.rows}


class Rule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an accelerator without a profile tries.

    :param matches: architecture as :func:`architecture` has it; ``any`` is the rest. :param name: of such hardware.
    :param order: kinds of candidate, best first; the reference serves where none passes. :param why: for people.
    """

    matches: str
    name: str
    order: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        tried = ", then ".join((*self.order, "the reference"))
        return f"rule for {self.name} ({self.matches}), not measured: {tried}; {self.why}"


class Rules(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """config/profiles/rules.yaml."""

    rules: tuple[Rule, ...]


def architecture(device: torch.device) -> str:
    """``sm_90`` and so on, ``hip`` for AMD's, else the kind of device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def load_rule(device: torch.device) -> Rule:
    """The rule of a device's architecture.

    :raises ConfigError: the file does not hold rules, or no rule for the rest.
    """
    path = config_dir() / "profiles" / "rules.yaml"
    rules = convert(read_yaml(path), Rules, where=str(path)).rules
    found = {rule.matches: rule for rule in rules}
    rule = found.get(architecture(device), found.get("any"))
    if rule is None:
        raise ConfigError("no rule for the rest", got=sorted(found), wanted="one with `matches: any`", where=path)
    return rule


def accelerator_name(device: torch.device) -> str:
    """As the driver calls it; the kind of device where there is no name."""
    named = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if named else device.type


def profile_path(accelerator: str) -> Path:
    """Where the profile of an accelerator is, or would be: ``NVIDIA H200`` has ``h200.yaml``."""
    short = re.sub(r"^(nvidia|amd|intel)\W+", "", accelerator.lower())
    return config_dir() / "profiles" / f"{re.sub(r'[^a-z0-9]+', '_', short).strip('_')}.yaml"


def load_profile(device: torch.device) -> tuple[Profile | None, str]:
    """The profile of a device, None if it has none, and where it is from or what stands in for it.

    :raises ConfigError: the file is not a profile.
    """
    path = profile_path(accelerator_name(device))
    if not path.is_file():
        return None, f"rules, no measured profile {path.name}: `phyai tune` writes one"
    return convert(read_yaml(path), Profile, where=str(path)), f"profile {path.name}"
