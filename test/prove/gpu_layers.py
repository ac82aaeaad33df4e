"""What gpu_stack.py measures: 2 and 18 layers of an expert."""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import checkout  # noqa: F401 - makes the checkout importable
import msgspec
import numpy as np
import torch
import yaml
from msgspec.structs import replace
from phyai_kernels import hopper, reference, stack
from torch import Tensor

from phyai_engine.layers.profile import Measured
from phyai_engine.layers.self_check import cases, map_tensors, widen
from phyai_engine.models.pi import PiOptions, op_shapes
from phyai_engine.trial import attempt, fastest

DIMS = (1, 50, 1024, 4096, 8, 1, 256, 1018)  # batch, tokens, width, inner, heads, kv_heads, head_dim, columns
DEPTH = 18
MOST_ERROR = {"stack": 1e-2, "stack_fp8": 2.5e-2}
"""Relative L2 of two layers; plain torch in bfloat16 has 6e-3 of the first."""
KERNELS = ("project", "attend", "o", "gated", "down")
STAMPS = """
__device__ unsigned long long stamps[512 * 8];
__device__ __forceinline__ void stamp(int i) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (threadIdx.x == 0) stamps[(blockIdx.y * gridDim.x + blockIdx.x) * 8 + i] = now;
}
#define STAMP(i) stamp(i)
"""
"""In front of a program: each block notes when it has 0 begun, 1 asked for weights, 2 waited for the kernel in front,
3 its first rows, 4 its product, 5 the other blocks' sums, 6 ended."""


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@torch.no_grad()
def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Of a call, which ran before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            call()
    for _ in range(3):
        graph.replay()
    return graph


def replay_us(call: Callable[[], Any], replays: int = 8, rounds: int = 5) -> float:
    """Median over rounds of one replay."""
    graph, times = captured(call), []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / replays * 1e3)
    return statistics.median(times)


class Layers:
    """Inputs of two layers, without ends and with them, and of 18 whose weights no cache holds.

    :param op: ``stack`` or ``stack_fp8``. :param cuts: what is bound unless given.
    """

    def __init__(self, op: str = "stack", cuts: Any = None) -> None:
        self.op, self.form = op, getattr(stack, op)
        self.cuts = cuts or (stack.MEASURED if op == "stack" else stack.MEASURED_FP8)
        *_, self.plain, self.between = cases(op, torch.bfloat16, DIMS, torch.device("cuda"))
        exact = getattr(reference, op)
        self.wanted = [exact(*map_tensors(args, widen)) for args in (self.plain, self.between)]
        x, weights, norms, keys, values, *rest = self.plain
        deep = tuple(map_tensors(weights[i % 2], torch.clone) for i in range(DEPTH))
        turns = (*(norms[i % 4] for i in range(2 * DEPTH)), norms[-1])
        slabs = (slab.repeat(DEPTH // 2, 1, 1, 1, 1) for slab in (keys, values))
        self.deep = x, deep, turns, *slabs, *rest
        self.deep_between = self.between[0], *self.deep[1:], None, self.between[-1]
        self.triton = triton_operators()

    def chain_errors(self) -> list[float]:
        """Of two layers, relative L2: plain torch's, the Triton chain's."""
        args = (map_tensors(self.plain, torch.clone) for _ in range(2))
        return [
            relative(reference.stack(*own, ops), self.wanted[0])
            for own, ops in zip(args, (None, self.triton), strict=True)
        ]

    def chain_us(self) -> tuple[float, float]:
        """The Triton chain's: a layer, a whole step with both ends."""
        step = (*self.deep_between[:9], self.triton, self.deep_between[10])
        layers = replay_us(lambda: reference.stack(*self.deep, self.triton))
        return layers / DEPTH, replay_us(lambda: reference.stack(*step))

    def _run(self, args: tuple[Any, ...]) -> Tensor:
        found: Tensor = self.form(*map_tensors(args, torch.clone), cuts=self.cuts)
        torch.cuda.synchronize()
        return found

    def errors(self) -> list[float]:
        """Of two layers, relative L2: without ends, with them."""
        pairs = zip((self.plain, self.between), self.wanted, strict=True)
        return [relative(self._run(args), wanted) for args, wanted in pairs]

    def same_bits(self) -> bool:
        """Of five runs with both ends."""
        first, *others = (self._run(self.between) for _ in range(5))
        return all(torch.equal(first, other) for other in others)

    def us(self) -> tuple[float, float]:
        """A layer, a whole step with both ends."""
        layers = replay_us(lambda: self.form(*self.deep, cuts=self.cuts))
        return layers / DEPTH, replay_us(lambda: self.form(*self.deep_between, cuts=self.cuts))

    def stamps(self) -> str:
        """Of the last layer's kernels, us from the end of the kernel in front, medians of 30 replays: the wait's end,
        first rows, product, sums, end; of the last block, in brackets of the middle one.
        """
        modules: dict[str, Any] = {}

        def load(source: str, name: str, device: int) -> Any:
            binary, lowered = hopper.compiled(STAMPS + source, name)
            modules[name] = hopper._value(hopper.driver.cuModuleLoadData(binary))
            return hopper._value(hopper.driver.cuModuleGetFunction(modules[name], lowered))

        with mock.patch.object(hopper, "load", load):
            stack.kernels.cache_clear()
            graph = captured(lambda: self.form(*self.deep, cuts=self.cuts))
        stack.kernels.cache_clear()
        found = stack.expressions(*DIMS[2:4], DIMS[4] * DIMS[6], 56, self.cuts, 2 if self.op == "stack" else 1)
        seen = []
        for _ in range(30):
            graph.replay()
            torch.cuda.synchronize()
            tables = [_stamps(modules[found[name][0]]) for name in KERNELS]
            seen.append(_apart(tables))
        middle = np.median(np.array(seen), 0)
        words = []
        for name, last, median in zip(KERNELS, middle[::2], middle[1::2], strict=True):
            words.append(" ".join([name, *(f"{a:.1f}({b:.1f})" for a, b in zip(last, median, strict=True))]))
        return "; ".join(words)


def _apart(tables: Sequence[Any]) -> list[Any]:
    """us from the end of the kernel in front, stamps 2 to 6: of each kernel's last block, then of its middle one."""
    begins = [tables[0][:, 2].max() - 500, *(table[:, 6].max() for table in tables[:-1])]
    pairs = zip(tables, begins, strict=True)
    return [(each(table, 0)[2:] - begin) / 1e3 for table, begin in pairs for each in (np.max, np.median)]


def _stamps(module: Any) -> Any:
    """[blocks, 7], ns, of the blocks that ran."""
    pointer, size = hopper._value(hopper.driver.cuModuleGetGlobal(module, b"stamps"))
    host = np.zeros(size // 8, np.uint64)
    hopper._value(hopper.driver.cuMemcpyDtoH(host.ctypes.data, pointer, size))
    table = host.reshape(-1, 8)[:, :7].astype(np.int64)
    return table[table[:, 6] > 0]


def triton_operators() -> Any:
    """What a stack is made of without a fused form, by name."""
    names = ("rms_norm", "ada_rms_norm", "project_rotate", "attend", "linear_norm", "gated_up", "linear")
    return SimpleNamespace(**{name: getattr(importlib.import_module(f"phyai_kernels.{name}"), name) for name in names})


def _same(form: Any) -> Any:
    return form


def profile_rows() -> list[str]:
    """Rows for both models' stacks. ``reference`` of ``stack`` is the loop over Triton's operators, which the form
    replaces; of coded weights there is no such loop.
    """
    shapes = [
        shape
        for options in (PiOptions(variant="pi05", prompt_len=200), PiOptions(variant="pi0", prompt_len=48))
        for shape in op_shapes(replace(options, dtype="bfloat16", quant="w8a8_fp8"), torch.bfloat16)
        if shape.op in MOST_ERROR
    ]
    triton = triton_operators()

    def chain(*args: Any) -> Any:
        return reference.stack(*args[:9], triton, *args[10:])

    kinds: dict[str, dict[str, Any]] = {
        "stack": {"reference": chain, "cuda": stack.stack}, "stack_fp8": {"cuda": stack.stack_fp8}
    }  # fmt: skip
    lines = []
    for shape in dict.fromkeys(shapes):
        trials = [
            attempt(shape, kind, functools.partial(_same, form), torch.device("cuda"))
            for kind, form in kinds[shape.op].items()
        ]
        us = {trial.kind: trial.us for trial in trials if trial.us is not None}
        errors = {trial.kind: trial.error for trial in trials if trial.error is not None}
        choice = fastest(us, next(iter(us), "reference"))
        row = Measured(op=shape.op, dtype="bfloat16", dims=shape.dims, choice=choice, us=us, error=errors)
        plain = msgspec.to_builtins(row) | {"dims": list(row.dims)}
        lines.append("- " + yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=10**6).strip())
    return lines
