"""``phyai judge``: candidates for one operator call through the gate, and what the best gains in a whole request.

A candidate is a Python file with a function of the operator's name. It replaces what is bound only if it equals the
reference and is faster by more than chance; whether that is felt is measured, not multiplied out.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from phyai_engine.errors import ConfigError
from phyai_engine.hotspots import Case, full_request, load_case
from phyai_engine.layers.ops import OpShape, dims_of, dtype_of, keep_compiled, load_ops
from phyai_engine.policy import Policy, captured_graphs
from phyai_engine.runner import Runner
from phyai_engine.trial import Load, Trial, attempt, fastest, shipped
from phyai_engine.types import Row
from phyai_engine.weights.loading import device_of

NOTHING_BETTER = 1
_BOUND = "bound"
_REQUESTS = {"cuda": 50, "cpu": 5}


def judge_command(case_file: Path, candidates: Sequence[Path], *, whole: bool) -> int:
    """Try them, print, and time a request with the best.

    :param whole: also time whole requests of the case's model: a candidate that makes them slower is dropped too.
    :returns: 0 if something beats what is bound, else 1.
    :raises ConfigError: no case, no candidate file, or a device or model that is not there.
    """
    console, case = Console(), load_case(case_file)
    device = device_of(case.device)
    if device.type != "cpu":
        keep_compiled()
    loads: dict[str, Load] = {_BOUND: lambda: bound_at(case.shape, device), **shipped(case.op, device)}
    loads |= {path.name: _loader(path, case.op) for path in candidates}
    trials = [attempt(case.shape, kind, load, device, case.seed) for kind, load in loads.items()]
    best = winner(trials)
    console.print(_table(case, trials, best))
    console.print(f"search: {sum(trial.seconds for trial in trials):.1f} s", highlight=False)
    if best is None:
        return NOTHING_BETTER
    if not whole:
        return 0
    text, gained_ms = _gain(case, trials, best, loads[best.kind])
    console.print(text, highlight=False)
    return 0 if gained_ms > 0 else NOTHING_BETTER


def bound_at(shape: OpShape, device: torch.device) -> Callable[..., Any]:
    """What the selector binds for one call on this accelerator."""
    implementation: Callable[..., Any] = getattr(load_ops("auto", device=device, shapes=[shape]), shape.op)
    return implementation


def winner(trials: Sequence[Trial]) -> Trial | None:
    """What is faster than the bound one by more than chance, None if nothing is."""
    us = {trial.kind: trial.us for trial in trials if trial.us is not None}
    kind = fastest(us, _BOUND)
    return None if kind == _BOUND else next(trial for trial in trials if trial.kind == kind)


def _loader(path: Path, op: str) -> Load:
    if not path.is_file():
        raise ConfigError("no such candidate", got=path, wanted=f"a Python file with a function {op}")

    def load() -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location(f"phyai_candidate_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, op)
        return function

    return load


def _verdict(trial: Trial, best: Trial | None, bound_us: float | None) -> str:
    if trial.why:
        return f"dropped: {trial.why}"
    if trial.kind == _BOUND or bound_us is None or trial.us is None:
        return ""
    if trial is best:
        return "the best"
    return "dropped: a regression" if trial.us > bound_us else "not the best, or within chance"


def _table(case: Case, trials: Sequence[Trial], best: Trial | None) -> Table:
    bound_us = next((trial.us for trial in trials if trial.kind == _BOUND), None)
    table = Table(title=f"phyai judge {case.op}, {case.shape}, on {case.device}", title_justify="left")
    for heading in ("candidate", "error", "us", "of bound", "verdict"):
        table.add_column(heading, justify="left" if heading in ("candidate", "verdict") else "right")
    for trial in trials:
        ratio = "" if trial.us is None or not bound_us else f"{trial.us / bound_us:.2f}"
        error = "" if trial.error is None else f"{trial.error:.1e}"
        us = "" if trial.us is None else f"{trial.us:.2f}"
        table.add_row(trial.kind, error, us, ratio, _verdict(trial, best, bound_us))
    return table


def _gain(case: Case, trials: Sequence[Trial], best: Trial, load: Load) -> tuple[str, float]:
    """One sentence: of the call, of all calls of a request, and what a request shows of it; and that [ms]."""
    us = best.us or float("nan")
    bound_us = next(trial.us for trial in trials if trial.kind == _BOUND) or float("nan")
    policy, row = full_request(case.model, case.device)
    before, after = whole_requests(policy, row, case.shape, load())
    verdict = "" if after < before else "; dropped: a regression of the request"
    text = (
        f"{best.kind}: {bound_us / us:.2f} x as fast; {case.calls} calls a request gain "
        f"{(bound_us - us) * case.calls / 1e3:.3f} ms alone; a request of {case.model}: "
        f"{before:.3f} -> {after:.3f} ms, {before - after:+.3f} ms gained{verdict}"
    )
    return text, before - after


def whole_requests(policy: Policy, row: Row, shape: OpShape, candidate: Callable[..., Any]) -> tuple[float, float]:
    """Medians [ms] of a request as bound, and with the candidate at one shape, in turns."""
    net: Any = policy.runner.model
    key, bound = (shape.dtype, shape.dims), getattr(net.ops, shape.op)

    def mixed(*args: Any) -> Any:
        here = (dtype_of(shape.op, args), tuple(dims_of(shape.op, args))) == key
        return (candidate if here else bound)(*args)

    own = net.ops
    changed = replace(own, **{shape.op: mixed})
    runners = []
    for ops in (own, changed):
        net.ops = ops
        graphs = captured_graphs(net, policy.runner.guidance)
        runners.append(Runner(net, (1,), guidance=policy.runner.guidance, graphs=graphs))
    times: list[list[float]] = [[], []]
    for i in range(_REQUESTS["cuda" if net.to_device(row.target).device.type == "cuda" else "cpu"] + 2):
        for ops, runner, mine in zip((own, changed), runners, times, strict=True):
            net.ops = ops
            began = time.perf_counter()
            runner.run([row])
            if i >= 2:
                mine.append((time.perf_counter() - began) * 1e3)
    net.ops = own
    return statistics.median(times[0]), statistics.median(times[1])
