"""What this machine can do at most, measured in the run that is compared with it: a copy, and a large product."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from phyai_engine.models import Work

_COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes: more than any cache
_SIDE = {"cuda": 8192, "cpu": 1024}
_RUNS = 7


class Ceilings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """:param tb_s: of a copy, bytes read and written. :param tflop_s: of a square product of random values."""

    tb_s: float
    tflop_s: float
    side: int
    dtype: str


class Rate(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a phase achieved at its median. :param floor_ms: the longer of its work's two times at the ceilings."""

    flop: float
    bytes: float
    tflop_s: float
    tb_s: float
    floor_ms: float


def ceilings(device: str, dtype: str) -> Ceilings:
    """Of a device of torch. :param dtype: torch's name."""
    torch = importlib.import_module("torch")
    kind = "cuda" if device.startswith("cuda") else "cpu"
    source = torch.empty(_COPIED[kind], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    side = _SIDE[kind]
    a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
    wait: Callable[[], object] = torch.cuda.synchronize if kind == "cuda" else lambda: None
    copy_s, product_s = (_median_s(call, wait) for call in (lambda: target.copy_(source), lambda: a @ b))
    return Ceilings(
        tb_s=2 * source.nbytes / copy_s / 1e12, tflop_s=2 * side**3 / product_s / 1e12, side=side, dtype=dtype
    )


def rates(work: Mapping[str, Work], medians_ms: Mapping[str, float], most: Ceilings) -> dict[str, Rate]:
    """Phase -> what it achieved. :param medians_ms: of each phase of ``work``, not 0."""
    return {
        phase: Rate(
            flop=each.flop,
            bytes=each.bytes,
            tflop_s=each.flop / medians_ms[phase] / 1e9,
            tb_s=each.bytes / medians_ms[phase] / 1e9,
            floor_ms=max(each.flop / most.tflop_s, each.bytes / most.tb_s) / 1e9,
        )
        for phase, each in work.items()
        if medians_ms.get(phase)
    }


def _median_s(call: Callable[[], Any], wait: Callable[[], object]) -> float:
    call()
    wait()
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
