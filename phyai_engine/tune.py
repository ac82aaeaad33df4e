"""``phyai tune``: time every candidate of every operator at a model's shapes, and write the accelerator's profile.

Each goes through the gate of trial.py; what it drops is shown with the reason and cannot be chosen.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
import yaml
from rich.console import Console
from rich.table import Table

from phyai_engine.config import convert
from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import OpShape, keep_compiled
from phyai_engine.layers.profile import Measured, Profile, accelerator_name, profile_path
from phyai_engine.models.pi import PiOptions, op_shapes
from phyai_engine.trial import CHANCE, attempt, shipped
from phyai_engine.weights.checkpoint import model_from
from phyai_engine.weights.loading import device_of


def tune_command(models: Sequence[str], device: Literal["auto", "cpu", "cuda"], out: Path | None) -> int:
    """Measure the shapes of some models, print, write.

    :param out: None writes where the selector reads it.
    :raises ConfigError: no such model or device, or the file cannot be written.
    """
    console = Console()
    shapes: list[OpShape] = []
    for model in models:
        config = model_from(model)
        options = convert({"variant": config.family, **config.options}, PiOptions, where=model)
        shapes += op_shapes(options, getattr(torch, options.dtype))
    began = time.perf_counter()
    profile = tune(list(dict.fromkeys(shapes)), device_of(device), " ".join(models), console.print)
    console.print(_table(profile))
    console.print(f"search: {time.perf_counter() - began:.0f} s for {len(profile.rows)} shapes", highlight=False)
    path = out or profile_path(profile.accelerator)
    try:
        save(profile, path)
    except OSError as error:
        raise ConfigError(f"cannot write the profile: {error.strerror}", where=path, do="Give --out.") from None
    console.print(f"wrote {path}", highlight=False)
    return 0


def tune(
    shapes: Sequence[OpShape], device: torch.device, models: str, tell: Callable[[str], None] = lambda _: None
) -> Profile:
    """Measure every shape. :param models: their names, for the record. :param tell: told what drops out, and why."""
    if device.type != "cpu":
        keep_compiled()
    rows = [_measure(shape, device, tell) for shape in shapes]
    made = datetime.datetime.now(datetime.timezone.utc).date()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    text = f"{made}, `phyai tune {models} --device {device.type}`, {versions}"
    return Profile(accelerator=accelerator_name(device), made=text, rows=tuple(rows))


def save(profile: Profile, path: Path) -> None:
    """One line a row, so that a person can compare and edit it. :raises OSError: it cannot be written."""
    lines = [
        "# Measured by `phyai tune`, read by the operator selector (phyai_engine/layers/profile.py). us: median of one",
        "# call. error: |candidate - reference| over the largest value; a kind without `us` was wrong or failed.",
        f"accelerator: {profile.accelerator}",
        f"made: {yaml.safe_dump(profile.made, width=10**6).splitlines()[0]}",
        "rows:",
    ]
    for row in profile.rows:
        plain = msgspec.to_builtins(row) | {"dims": list(row.dims)}
        lines.append("- " + yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6).strip())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measure(shape: OpShape, device: torch.device, tell: Callable[[str], None]) -> Measured:
    trials = [attempt(shape, kind, load, device) for kind, load in shipped(shape.op, device).items()]
    for trial in trials:
        if trial.why:
            tell(f"{shape.op}, {shape}: {trial.kind}: {trial.why}")
    us = {trial.kind: trial.us for trial in trials if trial.us is not None}
    errors = {trial.kind: trial.error for trial in trials if trial.error is not None}
    # The reference gives way even by chance: a fused form that is as fast asks for one launch less of the host.
    choice = min(us, key=lambda kind: us[kind] * (CHANCE if kind == "reference" else 1.0), default="reference")
    dtype = str(shape.dtype).removeprefix("torch.")
    return Measured(op=shape.op, dtype=dtype, dims=shape.dims, choice=choice, us=us, error=errors)


def _table(profile: Profile) -> Table:
    kinds = list(dict.fromkeys(kind for row in profile.rows for kind in row.error))
    table = Table(title=f"{profile.accelerator}: us of one call, {profile.made}", title_justify="left")
    for heading in ("operator", "dtype", "dims", *kinds, "choice"):
        table.add_column(heading, justify="right" if heading in kinds else "left")
    for row in profile.rows:
        figures = [f"{row.us[kind]:.1f}" if kind in row.us else "-" for kind in kinds]
        table.add_row(row.op, row.dtype, " ".join(map(str, row.dims)), *figures, row.choice)
    return table
