"""What an hour of a machine costs: a small file that ``phyai sweep`` joins to its rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from phyai_engine.config import Name, NonNegative, config_dir, convert, read_yaml

Share = Annotated[float, Meta(gt=0, le=1)]


class Machine(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One machine. :param match: part of a run's name or hardware. :param per_hour: of use, in the file's currency."""

    name: Name
    match: Name
    per_hour: NonNegative


class Prices(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """config/prices.yaml. :param max_busy: share of the time that a shared server may compute."""

    currency: Name
    max_busy: Share
    machines: tuple[Machine, ...]

    def machine(self, *texts: str) -> Machine | None:
        """The first machine that one of the texts names."""
        whole = "\n".join(texts).lower()
        return next((machine for machine in self.machines if machine.match.lower() in whole), None)

    def per_robot_hour(self, machine: Machine, *, remote: bool, busy: float) -> tuple[float, int]:
        """(cost of one robot's hour, robots that share the machine).

        A machine on the robot serves it alone. A server is shared by as many as keep it below ``max_busy``; one robot
        may take more than that, and then has it alone.
        """
        robots = max(1, math.floor(self.max_busy / busy)) if remote and busy > 0 else 1
        return machine.per_hour / robots, robots


def load_prices(path: Path | None = None) -> Prices:
    """Read a price file; the shipped one, whose numbers are placeholders, if None.

    :raises ConfigError: with the path of the wrong key.
    """
    path = config_dir() / "prices.yaml" if path is None else path
    return convert(read_yaml(path), Prices, where=str(path))
