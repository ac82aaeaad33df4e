"""A result for people: facts and warnings, then the table of phases."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from phyai_engine.bench.ceilings import Ceilings
from phyai_engine.bench.result import Figures, Result
from phyai_engine.runner import STEP

_GIB, _MIB = 2**30, 2**20


def show(result: Result, console: Console) -> None:
    """Print everything; the table comes last."""
    for name, value in facts(result):
        console.print(f"[bold]{name:9}[/] ", end="")
        console.print(value, markup=False, highlight=False)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    if not result.chunk.good:
        chunk = result.chunk
        console.print(f"NOT FINITE: {chunk.not_finite} of {chunk.runs} chunks hold a NaN or an infinity", style="red")
    console.print(phase_table(result))
    if result.ceilings is not None:
        console.print(rate_table(result, result.ceilings))


def facts(result: Result) -> list[tuple[str, str]]:
    """(name, sentence) of what the table does not hold."""
    subject, place, warm = result.subject, result.environment, result.warm_up
    on = f"{place.device}, {place.cores} cores, {place.threads} threads" if subject.device == "cpu" else place.device
    bound: dict[str, list[str]] = {}
    for op, choice in place.kernels.items():  # "triton, equals the reference at ..."
        bound.setdefault(choice.partition(",")[0], []).append(op)
    prompt = f"{subject.prompt_tokens} prompt tokens" if subject.prompt_tokens else "no prompt"
    rows = [
        ("model", f"{subject.model} ({subject.weights})"),
        ("robot", f"{subject.robot}, {subject.cameras} cameras 640x480, {prompt}"),
        ("device", f"{subject.device}: {on}; torch {place.torch}, Python {place.python}"),
        ("kernels", "; ".join(f"{kind}: {', '.join(ops)}" for kind, ops in bound.items()) or "the model's own"),
        ("load", f"{result.load_s:.1f} s"),
        ("memory", _memory(result)),
    ]
    if warm.first_ms is not None:
        others = f", then {Figures.of(list(warm.others_ms)).p50_ms:.1f} ms (p50)" if warm.others_ms else ""
        rows.append(("warm-up", f"first run {warm.first_ms:.1f} ms{others}, {1 + len(warm.others_ms)} runs, apart"))
    chunk = result.chunk
    shapes = " -> ".join("x".join(map(str, shape)) for shape in (chunk.model, chunk.robot))
    rows.append(("chunk", f"{shapes} (model -> robot), {'all finite' if chunk.good else 'not finite'}"))
    return rows


def _memory(result: Result) -> str:
    m = result.memory
    ratio = "" if m.peak_ratio is None else f" = {m.peak_ratio:.2f} x weights"
    weights = f"weights {_size(m.weights)}" if m.weights else "no weights"
    if m.peak_device is None:
        return f"{weights}, peak {_size(m.peak_rss)} resident{ratio}"
    return f"{weights}, peak {_size(m.peak_device)} on the device{ratio}, {_size(m.peak_rss)} resident"


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def phase_table(result: Result) -> Table:
    """The steps as three rows; the JSON file has each."""
    table = Table(title=f"phyai bench {result.subject.model}, phases on the {result.phase_clock}", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for heading in ("n", "p50 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    steps = [name for name in result.phases if name.startswith(STEP)]
    for name, figures in result.phases.items():
        if name not in steps:
            _row(table, _TITLES.get(name, name), figures)
        elif name == steps[0]:
            _row(table, name, figures)
            _row(table, f"each of {len(steps)} steps", result.steps)
            _row(table, "all steps", result.steps_sum)
    table.add_section()
    _row(table, "staging to copy out", result.model)
    _row(table, "end to end", result.end_to_end)
    return table


def rate_table(result: Result, most: Ceilings) -> Table:
    """What each phase achieved at its median, and what the ceilings of this run would allow."""
    peak = f"copy {most.tb_s:.3g} TB/s, {most.side}^3 {most.dtype} product {most.tflop_s:.3g} TFLOP/s"
    table = Table(title=f"achieved, against {peak}", title_justify="left")
    table.add_column("phase", no_wrap=True)
    for heading in ("GFLOP", "MB", "TFLOP/s", "TB/s", "floor ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for phase, rate in result.rates.items():
        figures = (rate.flop / 1e9, rate.bytes / 1e6, rate.tflop_s, rate.tb_s, rate.floor_ms)
        table.add_row("each step" if phase == "step" else phase, *(f"{figure:.3g}" for figure in figures))
    return table


_TITLES = {"encode": "pre-processing", "stage": "staging", "copy_in": "copy in", "copy_out": "copy out"}


def _row(table: Table, name: str, f: Figures) -> None:
    table.add_row(name, str(f.n), f"{f.p50_ms:.2f}", f"{f.p99_ms:.2f}", f"{f.max_ms:.2f}")
