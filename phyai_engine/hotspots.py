"""``phyai hotspots``: which operator calls a request spends its time in, each as a case for ``phyai judge``.

One request runs without graphs under torch's profiler, every operator call inside a named range: on CUDA the time of
the kernels that a range launched, on the CPU its own. What no operator of ours does is one line of the table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import yaml
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from phyai_engine.bench import synthetic
from phyai_engine.bench.command import BenchOptions, model_config, robot_config
from phyai_engine.config import convert, read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import Ops, OpShape, dims_of, dtype_of
from phyai_engine.layers.self_check import TOLERANCES, definition
from phyai_engine.policy import Policy, load_policy
from phyai_engine.runner import Runner
from phyai_engine.types import Row

Device = Literal["auto", "cpu", "cuda"]
_RUNS = 3
_RANGE = "phyai operator"


class Case(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operator at one shape, apart from its model.

    :param reference: the definition that a candidate must equal. :param dims: as OpShape has them.
    :param seed: of the inputs. :param calls: in one request. :param us: of one call when it was found, by the kind
        ``bound``. :param share: of the request's time. :param model: whose request it was.
    """

    op: str
    reference: str
    dtype: str
    dims: tuple[int, ...]
    seed: int = 0
    calls: int
    us: float
    share: float
    bound: str
    model: str
    device: Device

    @property
    def shape(self) -> OpShape:
        """:raises ConfigError: an unknown dtype. :raises EngineError: an unknown operator or wrong sizes."""
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCES}
        if self.dtype not in dtypes:
            raise ConfigError("unknown dtype", got=self.dtype, wanted=f"one of {', '.join(dtypes)}", where="dtype")
        return OpShape(self.op, dtypes[self.dtype], self.dims)


def hotspots_command(model: str, device: Device, top: int, out: Path) -> int:
    """Measure one request, print the table, write the cases.

    :raises ConfigError: no such model or device, a model without operators of ours, or a folder that cannot be written.
    """
    policy, row = full_request(model, device)
    found, total_us = hotspots(policy, row, model, device)
    Console().print(_table(found, total_us, model))
    # A last layer without queries is not a call that a candidate is chosen for.
    written = [case for case in found if min(case.dims) >= 1][:top]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for rank, case in enumerate(written, 1):
            save(case, out / f"{rank:02d}_{case.op}_{'x'.join(map(str, case.dims))}_{case.dtype}.yaml")
    except OSError as error:
        raise ConfigError(f"cannot write the cases: {error.strerror}", where=out, do="Give --out.") from None
    Console().print(f"wrote {len(written)} cases to {out}: phyai judge CASE [CANDIDATE.py]", highlight=False)
    return 0


def full_request(model: str, device: Device) -> tuple[Policy, Row]:
    """A model with a synthetic robot, and a request with all cameras and the longest prompt.

    :raises ConfigError: as :func:`hotspots_command`.
    """
    options = BenchOptions(model=model, device=device)
    config = model_config(options)
    policy = load_policy(robot_config(options, config), config)
    if not isinstance(getattr(policy.runner.model, "ops", None), Ops):
        raise ConfigError("this model has no operators of ours", got=model, wanted="pi0 or pi0.5", where="MODEL")
    requests = synthetic.requests(policy.adapter, seed=0, prompt_tokens=config.prompt.max_tokens)
    return policy, policy.adapter.encode(requests(0))


def hotspots(policy: Policy, row: Row, model: str, device: Device) -> tuple[list[Case], float]:
    """The calls of one request, longest first, and the request's whole time [us]."""
    net: Any = policy.runner.model
    runner = Runner(net, (1,), guidance=policy.runner.guidance)
    on_cuda = net.to_device(row.target).device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with _named_ranges(net) as counts:
        runner.run([row])  # compiles
        counts.clear()
        with profile(activities=activities, acc_events=True) as measured:
            for _ in range(_RUNS):
                runner.run([row])
            if on_cuda:
                torch.cuda.synchronize()
    spent, total = _times(measured, on_cuda)
    found = []
    for (op, dtype, dims), count in counts.items():
        us = spent.get(_label(op, dtype, dims), 0.0) / count
        if not us:  # it only calls others
            continue
        found.append(
            Case(
                op=op,
                reference=f"{definition(op).__module__}.{op}",
                dtype=dtype,
                dims=dims,
                calls=count // _RUNS,
                us=round(us, 2),
                share=round(us * count / max(total, 1e-9), 4),
                bound=net.ops.reasons.get(op, "reference").partition(",")[0],
                model=model,
                device=device,
            )
        )
    return sorted(found, key=lambda case: -case.share), total / _RUNS


@contextmanager
def _named_ranges(net: Any) -> Iterator[Counter[tuple[str, str, tuple[int, ...]]]]:
    """The model's operators inside ranges of their names, and how often each was called with which sizes."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def inside(op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            key = op, str(dtype_of(op, args)).removeprefix("torch."), tuple(dims_of(op, args))
            counts[key] += 1
            with record_function(_label(*key)):
                return implementation(*args)

        return call

    bound: Ops = net.ops
    names = [field.name for field in fields(Ops) if field.name != "reasons"]
    kept: dict[str, Any] = {name: inside(name, getattr(bound, name)) for name in names}
    net.ops = replace(bound, **kept)
    try:
        yield counts
    finally:
        net.ops = bound


def _label(op: str, dtype: str, dims: Sequence[int]) -> str:
    return f"{_RANGE} {op} {dtype} {' '.join(map(str, dims))}"


def _times(measured: Any, on_cuda: bool) -> tuple[dict[str, float], float]:
    """Range -> us in it but in no range inside it, and of everything. Kernels that overlap count each in full."""
    events, spent, total = measured.events(), dict[str, float](), 0.0
    if not on_cuda:
        for event in events:
            total += event.self_cpu_time_total
            if event.name.startswith(_RANGE):
                spent[event.name] = spent.get(event.name, 0.0) + event.cpu_time_total - _inner(event)
        return spent, total
    on_device = [e for e in events if str(e.device_type).endswith("CUDA")]
    # On the device a range reaches from its first kernel to its last; what it waits for in between is not its time.
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_device if e.name.startswith(_RANGE))
    starts = [start for start, *_ in spans]
    for kernel in on_device:
        if kernel.name.startswith(_RANGE):
            continue
        at, us = kernel.time_range.start, float(kernel.time_range.elapsed_us())
        total += us
        within = (spans[i] for i in reversed(range(bisect_right(starts, at))) if spans[i][1] >= at)
        if (innermost := next(within, None)) is not None:
            spent[innermost[2]] = spent.get(innermost[2], 0.0) + us
    return spent, total


def _inner(event: Any) -> float:
    """us of the ranges inside an event."""
    return sum(e.cpu_time_total if e.name.startswith(_RANGE) else _inner(e) for e in event.cpu_children)


def save(case: Case, path: Path) -> None:
    """One case as a file. :raises OSError: it cannot be written."""
    text = yaml.safe_dump(msgspec.to_builtins(case) | {"dims": list(case.dims)}, sort_keys=False)
    head = f"# `phyai judge {path.name} CANDIDATE.py`: the file holds a function `{case.op}` like the reference.\n"
    path.write_text(head + text, encoding="utf-8")


def load_case(path: Path) -> Case:
    """:raises ConfigError: no such file, or not a case."""
    return convert(read_yaml(path), Case, where=str(path))


def _table(found: Sequence[Case], total_us: float, model: str) -> Table:
    title = f"phyai hotspots {model}: {total_us / 1e3:.2f} ms of computation in a request"
    table = Table(title=title, title_justify="left")
    for heading in ("operator", "dtype", "dims", "calls", "us", "%"):
        numbers = heading in ("calls", "us", "%")
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=heading != "dims", overflow="fold")
    for case in found:
        figures = str(case.calls), f"{case.us:.1f}", f"{100 * case.share:.1f}"
        table.add_row(f"{case.op}, {case.bound}", case.dtype, "x".join(map(str, case.dims)), *figures)
    rest = 100 * (1 - sum(case.share for case in found))
    table.add_row("all that is no operator", "", "", "", "", f"{rest:.1f}")
    return table
