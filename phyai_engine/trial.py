"""The gate that every candidate of an operator goes through: first correct, then timed, then compared.

`phyai tune` and `phyai judge` use it; there is no other. A candidate that differs from the reference, or fails, has no
time and cannot be chosen. Times are medians over repeated calls; on CUDA over replays of one graph with inputs that
take turns, so that neither the host nor the cache is measured.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai_engine.layers.ops import CANDIDATES, OpShape
from phyai_engine.layers.self_check import TOLERANCES, cases, definition, largest_error, map_tensors

_CALLS = 20  # in one graph
_CACHE_BYTES = 256 * 2**20  # of inputs that take turns: more than any last-level cache
_MOST_COPIES = 16
CHANCE = 1.03
"""The same vendor call under two names differs by chance: what is to replace another must win by more than that."""

Load = Callable[[], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Trial:
    """One candidate at one shape.

    :param error: as the self-check has it; None: it failed before. :param us: of one call; None: wrong or failed.
    :param why: the sentence that drops it, empty where nothing does. :param seconds: that the trial took.
    """

    kind: str
    error: float | None
    us: float | None
    why: str
    seconds: float


def attempt(shape: OpShape, kind: str, load: Load, device: torch.device, seed: int = 0) -> Trial:
    """Put one candidate through the gate. :param load: gives it; may fail. :param seed: of the inputs."""
    began = time.perf_counter()

    def ended(error: float | None, us: float | None, why: str) -> Trial:
        return Trial(kind, error, us, why, time.perf_counter() - began)

    error: float | None = None
    try:
        candidate = load()
        error = float(f"{largest_error(shape.op, shape.dtype, shape.dims, candidate, device, seed):.1e}")
        if not error <= TOLERANCES[shape.dtype]:
            return ended(error, None, f"wrong, error {error:.1e}, allowed {TOLERANCES[shape.dtype]:.0e}")
        return ended(error, round(time_us(shape, candidate, device, seed), 2), "")
    except Exception as failure:  # whatever a compiler or a driver raises drops this candidate only
        return ended(error, None, f"fails: {type(failure).__name__}: {str(failure).strip()[:120]}")


def shipped(op: str, device: torch.device) -> dict[str, Load]:
    """Kind -> what gives the candidate, the reference first; there it is alone on a CPU."""
    found: dict[str, Load] = {"reference": lambda: definition(op)}
    if device.type == "cpu":
        return found
    return found | {
        kind: lambda module=module: getattr(importlib.import_module(module), op)
        for kind, module in CANDIDATES[op].items()
    }


def fastest(us: Mapping[str, float], holder: str) -> str:
    """The kind to choose. :param us: kind -> time. :param holder: what has the place until something is faster by more
    than chance; it is also the answer where nothing has a time."""
    return min(us, key=lambda kind: us[kind] * (1.0 if kind == holder else CHANCE), default=holder)


@torch.no_grad()
def time_us(shape: OpShape, candidate: Callable[..., Any], device: torch.device, seed: int = 0) -> float:
    """Of one call, the last case of the self-check: the fullest."""
    args = list(cases(shape.op, shape.dtype, shape.dims, device, seed))[-1]
    if device.type == "cpu":
        candidate(*args)
        return statistics.median(_host_us(candidate, args) for _ in range(3))
    size = sum(tensor.nbytes for tensor in _tensors(args))
    copies = [args, *(map_tensors(args, torch.clone) for _ in range(min(_MOST_COPIES, _CACHE_BYTES // max(size, 1))))]
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
