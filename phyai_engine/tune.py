"""``phyai tune``: time every candidate of every operator at a model's shapes, and write the accelerator's profile.

A candidate that differs from the reference, or fails, is shown with its reason and cannot be chosen. Times are medians
over repeated calls; on CUDA over replays of one graph with inputs that take turns, so that neither the host nor the
cache is measured.
"""

from __future__ import annotations

import datetime
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import yaml
from phyai_kernels import reference
from rich.console import Console
from rich.table import Table
from torch import Tensor

from phyai_engine.config import convert
from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import CANDIDATES, OpShape, keep_compiled
from phyai_engine.layers.profile import Measured, Profile, accelerator_name, profile_path
from phyai_engine.layers.self_check import TOLERANCES, cases, largest_error
from phyai_engine.models.pi import PiOptions, op_shapes
from phyai_engine.weights.checkpoint import model_from
from phyai_engine.weights.loading import device_of

_CALLS = 20  # in one graph
_CACHE_BYTES = 256 * 2**20  # of inputs that take turns: more than any last-level cache
_MOST_COPIES = 16
_CHANCE = 1.03


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
    profile = tune(list(dict.fromkeys(shapes)), device_of(device), " ".join(models), console.print)
    console.print(_table(profile))
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
    candidates: dict[str, Callable[..., Any]] = {"reference": getattr(reference, shape.op)}
    if device.type != "cpu":
        for kind, module in CANDIDATES[shape.op].items():
            candidates[kind] = getattr(importlib.import_module(module), shape.op)
    us, errors = {}, {}
    for kind, candidate in candidates.items():
        try:
            errors[kind] = float(f"{largest_error(shape.op, shape.dtype, shape.dims, candidate, device):.1e}")
            if errors[kind] <= TOLERANCES[shape.dtype]:
                us[kind] = round(time_us(shape, candidate, device), 2)
            else:
                tell(f"{shape.op}, {shape}: {kind} is wrong, error {errors[kind]:.1e}")
        except Exception as failure:  # whatever a compiler or a driver raises drops this candidate only
            tell(f"{shape.op}, {shape}: {kind} fails: {type(failure).__name__}: {str(failure)[:120]}")
    # The same vendor call under two names differs by chance: the reference must win by more than that.
    choice = min(us, key=lambda kind: us[kind] * (_CHANCE if kind == "reference" else 1.0), default="reference")
    dtype = str(shape.dtype).removeprefix("torch.")
    return Measured(op=shape.op, dtype=dtype, dims=shape.dims, choice=choice, us=us, error=errors)


@torch.no_grad()
def time_us(shape: OpShape, candidate: Callable[..., Any], device: torch.device) -> float:
    """Of one call, the last case of the self-check: the fullest."""
    args = list(cases(shape.op, shape.dtype, shape.dims, device))[-1]
    if device.type == "cpu":
        candidate(*args)
        return statistics.median(_host_us(candidate, args) for _ in range(3))
    size = sum(tensor.nbytes for tensor in _tensors(args))
    copies = [args, *(_cloned(args) for _ in range(min(_MOST_COPIES, _CACHE_BYTES // max(size, 1))))]
    calls = [copies[i % len(copies)] for i in range(_CALLS)]
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        candidate(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            candidate(*call)
    graph.replay()
    return statistics.median(_replay_us(graph) for _ in range(7)) / len(calls)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _host_us(candidate: Callable[..., Any], args: tuple[Any, ...]) -> float:
    began = time.perf_counter()
    candidate(*args)
    return (time.perf_counter() - began) * 1e6


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [t for arg in args for t in (_tensors(arg) if isinstance(arg, tuple) else [arg]) if isinstance(t, Tensor)]


def _cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        arg.clone() if isinstance(arg, Tensor) else _cloned(arg) if isinstance(arg, tuple) else arg for arg in args
    )


def _table(profile: Profile) -> Table:
    kinds = list(dict.fromkeys(kind for row in profile.rows for kind in row.error))
    table = Table(title=f"{profile.accelerator}: us of one call, {profile.made}", title_justify="left")
    for heading in ("operator", "dtype", "dims", *kinds, "choice"):
        table.add_column(heading, justify="right" if heading in kinds else "left")
    for row in profile.rows:
        figures = [f"{row.us[kind]:.1f}" if kind in row.us else "-" for kind in kinds]
        table.add_row(row.op, row.dtype, " ".join(map(str, row.dims)), *figures, row.choice)
    return table
