"""What a golden check found: every recorded array against its gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import JustifyMethod
from rich.table import Table

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Device = Literal["auto", "cpu", "cuda"]

NUMBERS = "biuf"  # numpy's kinds of dtype that hold real numbers

# How a recorded sample is run: as recorded, as a batch of one, and beside other rows, two of them guided.
MODES = ("recorded", "alone", "mixed")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded array, or one step of it, in one mode; the error is over all samples.

    :param name: as recorded; a folder with several cases puts ``case/`` in front of the array's name.
    :param shape: as recorded, batch included; empty if not recorded.
    :param max_abs: NaN if a value is not finite, or if there is a fault.
    :param fault: why the values could not be compared; empty if they were.
    """

    name: str
    step: int | None
    mode: str
    shape: tuple[int, ...]
    max_abs: float
    rel_l2: float
    gate: float
    fault: str = ""

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.max_abs <= self.gate

    @property
    def array(self) -> str:
        """Its name without the case."""
        return self.name.rpartition("/")[2]

    @property
    def label(self) -> str:
        """Array name with its step, as in ``v_steps[3]``."""
        return self.name if self.step is None else f"{self.name}[{self.step}]"


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """All comparisons of one folder, in the order of the dataflow.

    :param not_compared: recorded arrays that are neither inputs nor known to the family; they fail the
        report.
    """

    folder: Path
    family: str
    comparisons: tuple[Comparison, ...]
    not_compared: tuple[str, ...]

    @property
    def first_bad(self) -> Comparison | None:
        """The earliest array that leaves its gate: what follows it may only inherit its error."""
        return next((c for c in self.comparisons if not c.passed), None)

    @property
    def passed(self) -> bool:
        """Every recorded array was compared and is within its gate."""
        return bool(self.comparisons) and self.first_bad is None and not self.not_compared

    def table(self) -> Table:
        """One line per array: the largest absolute error of each mode, over all cases and steps, and its gate."""
        title = f"{self.folder.name} ({self.family}): max abs error per mode, worst relative L2"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in ("array", "shape", *MODES, "rel L2", "gate", ""):
            justify: JustifyMethod = "left" if column in ("array", "shape", "") else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for name in dict.fromkeys(c.array for c in self.comparisons):
            same = [c for c in self.comparisons if c.array == name]
            steps = {c.step for c in same} - {None}
            shape = "x".join(str(n) for n in (*([len(steps)] if steps else []), *same[0].shape))
            errors = [max((c.max_abs for c in same if c.mode == m), key=_nan_last) for m in MODES]
            relative = max((c.rel_l2 for c in same), key=_nan_last)
            figures = [f"{e:.1e}" for e in (*errors, relative, same[0].gate)]
            verdict = "[green]ok[/]" if all(c.passed for c in same) else "[red]BAD[/]"
            table.add_row(name, shape, *figures, verdict)
        for name in self.not_compared:
            table.add_row(name, "", *["-"] * 5, "[red]?[/]")
        return table


def _nan_last(value: float) -> tuple[bool, float]:
    return np.isnan(value), value


def errors_of(ours: Array, theirs: Array) -> tuple[float, float]:
    """Largest absolute and relative L2 error of equally shaped arrays; NaN as soon as one value is NaN."""
    difference = ours.astype(np.float64) - theirs.astype(np.float64)
    norm = max(float(np.linalg.norm(theirs.astype(np.float64))), 1e-30)
    return float(np.abs(difference).max(initial=0.0)), float(np.linalg.norm(difference)) / norm
