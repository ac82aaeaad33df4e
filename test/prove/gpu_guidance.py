"""Guidance in CUDA graphs: the way back's operators, what a layer of it costs, its error and bits, what a mode costs.

Each part is a process of its own with a time limit, so that one that fails leaves the others. ``definition`` is the way
back in separate torch operators (kernels/backward.py), ``triton`` its fused forms, whatever the profile names.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import gpu_model
import numpy as np
import torch
from evidence import conclude, options, show
from gpu_model import graph_ms, interleaved, percentiles, relative_l2, row, staged
from torch import Tensor

from phyai_engine.graphs import Graphs
from phyai_engine.layers.ops import BACK, REFERENCE, Ops, OpShape, keep_compiled, load_ops
from phyai_engine.models.pi import PiModel, PiOptions, op_shapes
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.rtc import Guidance
from phyai_engine.runner import Runner
from phyai_engine.trial import attempt, shipped
from phyai_engine.types import Row

Held = list[tuple[str, str, bool | None]]
# Mode, the largest median over that of `none` that is wanted.
MODES = (("none", None), ("identity", 1.02), ("gauss", 1.02), ("vjp_early:3", 1.45), ("vjp", None))
CUDA = torch.device("cuda")
WITH_GRADIENT = ("vjp_early:3", "vjp")
LAYER_US = 85.0  # wanted: with the forward 33 us a layer-step, three guided steps then cost less than 0.45 of a chunk
# Full size where the gradient is; the towers in front of it only have to fill the slab.
EXPERT = {"vocab": 1024, "vis_width": 64, "vis_depth": 1, "vis_mlp": 64, "vis_heads": 2, "width": 64, "mlp": 64}


def back_shapes(dtype: str) -> list[OpShape]:
    """The way back of the released pi0.5."""
    shapes = op_shapes(PiOptions(dtype=dtype), getattr(torch, dtype))  # type: ignore[arg-type]
    return [shape for shape in shapes if shape.op in BACK]


def bound(dtype: str) -> dict[str, Ops]:
    """The expert's operators as the product binds them on the way forward, with either way back."""
    shapes = op_shapes(PiOptions(dtype=dtype), getattr(torch, dtype))  # type: ignore[arg-type]
    own = [shape for shape in shapes if PiOptions().action_horizon in shape.dims]
    forward = load_ops("auto", device=CUDA, shapes=[shape for shape in own if shape.op not in BACK])
    fused = load_ops("triton", device=CUDA, shapes=back_shapes(dtype))
    for op in BACK:
        if getattr(fused, op) is getattr(REFERENCE, op):
            print(f"NOT fused: {op}: {fused.reasons[op]}")
    return {"definition": forward, "triton": replace(forward, **{op: getattr(fused, op) for op in BACK})}


# --- operators ---


def operators(log: bool, n: int) -> int:
    """Each fused form against its definition."""
    keep_compiled()
    rows, held = [], []
    for shape in dict.fromkeys((*back_shapes("bfloat16"), *back_shapes("float32"))):
        old, new = (attempt(shape, kind, load, CUDA) for kind, load in shipped(shape.op, CUDA).items())
        figures = [f"{each.us:.2f}" if each.us is not None else "-" for each in (old, new)]
        rows.append((shape.op, str(shape), *figures, f"{new.error}", new.why))
        held.append(new.why == "")
    columns = ("operator", "shape", "definition us", "triton us", "error", "dropped")
    show(f"gpu: the way back's operators, {_where()}", columns, rows, log=log)
    return 0 if all(held) else 1


def cuts(op: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Other ways to cut an operator than its ``plan``: in words, and plan's result -> another."""
    module = importlib.import_module("phyai_kernels.linear_back")

    def cut(spans: int, columns: int) -> Callable[..., Any]:
        return lambda plan: (
            lambda outputs, inputs, **sizes: module.cut(outputs, inputs, spans, columns=columns, **sizes)
        )

    def changed(**values: int) -> Callable[..., Any]:
        return lambda plan: lambda *sizes, **more: plan(*sizes, **more)._replace(**values)

    found: dict[str, Sequence[tuple[str, Callable[..., Any]]]] = {
        "linear_back": [(f"{c} columns, {s} spans", cut(s, c)) for c, s in ((16, 1), (32, 2), (64, 1), (64, 4))],
        "norm_back": [(f"{c} columns, {s} spans", cut(s, c)) for c, s in ((32, 2), (32, 8), (64, 4), (64, 8))],
        "gated_up_back": [
            ("4 warps", changed(warps=4)),
            ("3 stages", changed(stages=3)),
            ("steps of 64", changed(inputs=64, down=64)),
            ("16 outputs", changed(outputs=16)),
        ],
        "attend_back": [
            ("spans of 128", changed(span=128)),
            ("spans of 192", changed(span=192)),
            ("2 stages", changed(stages=2)),
            ("second kernel: 128 values", changed(part=128)),
            ("4 warps", changed(warps=4)),
        ],
    }
    yield "as planned", lambda plan: plan
    yield from found.get(op, ())


def variants(log: bool, n: int) -> int:
    """Each operator cut in other ways, bf16."""
    keep_compiled()
    rows = []
    for shape in back_shapes("bfloat16"):
        module = importlib.import_module(f"phyai_kernels.{shape.op}")
        if shape.dtype != torch.bfloat16 or not hasattr(module, "plan"):
            continue
        times = []
        for words, other in cuts(shape.op):
            with mock.patch.object(module, "plan", other(module.plan)):
                trial = attempt(shape, words, functools.partial(getattr, module, shape.op), CUDA)
            times.append((trial.us or float("inf"), words, trial.why))
        best = min(times)
        rows += [
            (shape.op, str(shape), words, why or f"{us:.2f}", "best" if (us, words, why) == best else "")
            for us, words, why in times
        ]
    show(f"gpu: cuts, {_where()}", ("operator", "shape", "cut", "us", ""), rows, log=log)
    return 0


# --- the expert at full size ---


def expert(dtype: str) -> PiModel:
    """Its matrices of unit scale, not damped as an untrained model's: a wrong gradient must show."""
    model = gpu_model.full_size(PiOptions(dtype=dtype, kernels="reference", **EXPERT))  # type: ignore[arg-type]
    draw = torch.Generator("cuda").manual_seed(2)
    for matrix in model.expert.parameters():
        matrix.copy_(torch.randn(matrix.shape, generator=draw, device="cuda") * matrix.shape[1] ** -0.5)
    return model


def passes(model: PiModel, ops: Ops) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The forward pass of a step, and it with the gradient of its result; on seeded buffers."""
    model.ops = ops
    o = model.options
    prefix = model.encode(staged(model, BatchShape(1, 3, 3 * o.image_tokens + 200), (True, True, True), 200))
    draw = torch.Generator("cuda").manual_seed(3)
    x, error = (torch.randn((1, o.action_horizon, o.action_dim), generator=draw, device="cuda") for _ in range(2))

    def gradient() -> Tensor:
        return model.velocity_vjp(prefix, x, 2)[1](error)

    return lambda: model.velocity(prefix, x, 2), gradient


def layer(log: bool, n: int) -> int:
    """What the gradient costs beside the forward pass, and how exact it is."""
    rows, found, held = [], {}, []
    for dtype in ("float32", "bfloat16"):
        model, depth = expert(dtype), PiOptions().depth
        for name, ops in bound(dtype).items():
            forward, gradient = passes(model, ops)
            found[dtype, name] = gradient().cpu()
            error = relative_l2(found[dtype, name], found["float32", "definition"])
            ms, both = graph_ms(forward, n), graph_ms(gradient, n)
            us = (both - ms) * 1e3 / depth
            rows.append((dtype, name, f"{error:.2e}", f"{ms:.3f}", f"{both:.3f}", f"{us:.1f}"))
            if name == "triton":
                plain = relative_l2(found[dtype, "definition"], found["float32", "definition"])
                exact = error <= (1e-4 if dtype == "float32" else 1.25 * plain)
                held.append((f"{dtype}: as exact as the definition", f"{error:.2e}, {plain:.2e}", exact))
                if dtype == "bfloat16":
                    held.append(("us a layer", f"{us:.1f}, wanted {LAYER_US}", us <= LAYER_US))
        del model
        torch.cuda.empty_cache()
    columns = ("dtype", "way back", "relative L2 to fp32", "forward ms", "with gradient ms", "us a layer")
    show(f"gpu: a guided step of the expert, heads included, n {n}, {_where()}", columns, rows, log=log)
    return conclude(f"gpu: the way back, {_where()}", held, log=log)


def graphs_of(model: PiModel, mode: str) -> Graphs:
    return Graphs(model, guidance=Guidance.parse(mode), shapes=model.captured_shapes((1,))[:1])


def runner_of(model: PiModel, graphs: Graphs) -> Runner:
    return Runner(model, (1,), guidance=graphs.guidance, graphs=graphs)


def agreement(model: PiModel, name: str, modes: Sequence[str]) -> Held:
    """Captured against the same calls on the same buffers, and against the plain batch."""
    held: Held = []
    for mode in modes:
        graphs, guidance = graphs_of(model, mode), Guidance.parse(mode)
        called = Graphs(model, guidance=guidance, replay=False, shapes=[graphs.shapes[0].shape])
        request = row(model.options, 3, prompt=200, delay=4, guidance=guidance)
        runs = [runner_of(model, each).run([request])[0].actions for each in (graphs, called)]
        plain = Runner(model, (1,), guidance=guidance).run([request])[0].actions
        again = runner_of(model, graphs).run([request])[0].actions
        error, words = relative_l2(runs[0], plain), f"{model.options.dtype}, {name}, {mode}"
        equal = np.array_equal(runs[0], runs[1]) and np.array_equal(runs[0], again)
        held.append((f"{words}: replay = the same calls = again, bits", f"{equal}", equal))
        limit = error <= 1e-3 if model.options.dtype == "float32" else None
        held.append((f"{words}: against the plain batch, relative L2", f"{error:.1e}", limit))
    return held


def bits(log: bool, n: int) -> int:
    """The expert at full size in both dtypes, with the fused way back."""
    held: Held = []
    for dtype in ("float32", "bfloat16"):
        model = expert(dtype)
        model.ops = bound(dtype)["triton"]
        held += agreement(model, "triton", WITH_GRADIENT)
        del model
        torch.cuda.empty_cache()
    return conclude(f"gpu: captured guidance, the expert at full size, {_where()}", held, log=log)


# --- whole chunks ---


def costs(log: bool, n: int) -> int:
    """One request of each mode in turn, the gradient's modes with either way back; pi0.5 3/200, bf16, full size."""
    model = gpu_model.full_size(PiOptions(dtype="bfloat16"))
    product, fused = model.ops, bound("bfloat16")["triton"]
    ways = {
        "definition": replace(product, **{op: getattr(REFERENCE, op) for op in BACK}),
        "triton": replace(product, **{op: getattr(fused, op) for op in BACK}),
    }
    entries, runners = [], []
    for (mode, wanted), (name, ops) in itertools.product(MODES, ways.items()):
        if mode not in WITH_GRADIENT and name == "triton":
            continue
        model.ops = ops
        entries.append((mode, name if mode in WITH_GRADIENT else "", wanted))
        runners.append(runner_of(model, graphs_of(model, mode)))
    requests = [
        [row(model.options, seed, prompt=200, delay=4, guidance=runner.guidance) for seed in range(4)]
        for runner in runners
    ]

    def call(runner: Runner, own: Sequence[Row], i: int) -> object:
        return runner.run([own[i % len(own)]])

    pairs = zip(runners, requests, strict=True)
    times = interleaved([functools.partial(call, *pair) for pair in pairs], n)
    medians = [statistics.median(each) for each in times]
    ratios = [median / medians[0] for median in medians]
    table = [
        (mode, name, str(n), percentiles(own), f"{ratio:.3f}", "" if wanted is None else f"<= {wanted}")
        for (mode, name, wanted), own, ratio in zip(entries, times, ratios, strict=True)
    ]
    columns = ("guidance", "way back", "n", "ms a chunk", "over none", "wanted")
    show(f"gpu: cost of guidance, pi0.5 3/200, bf16, {_where()}", columns, table, log=log)
    held: Held = [
        (f"{mode} {name}", f"{ratio:.3f}, wanted {wanted}", ratio <= wanted)
        for (mode, name, wanted), ratio in zip(entries, ratios, strict=True)
        if wanted is not None and name != "definition"
    ]
    model.ops = ways["triton"]
    held += agreement(model, "triton", ("vjp",))
    return conclude(f"gpu: guidance, whole chunks, {_where()}", held, log=log)


# Part -> what it runs, and its time limit [s].
PARTS: dict[str, tuple[Callable[[bool, int], int], int]] = {
    "operators": (operators, 80),
    "layer": (layer, 60),
    "costs": (costs, 120),
    "bits": (bits, 60),
    "variants": (variants, 80),
}


def _where() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=40, help="requests of each mode, replays of a step")
    parser.add_argument("--only", choices=PARTS, help="one part alone, in this process")
    chosen = options(parser)
    gpu_model.gpu_or_leave()
    if chosen.only:
        with torch.no_grad():
            return PARTS[chosen.only][0](chosen.log, chosen.n)
    words, code = [], 0
    for part, (_, limit_s) in PARTS.items():
        command = [sys.executable, __file__, "--only", part, "--n", str(chosen.n), *(["--log"] if chosen.log else [])]
        began = time.perf_counter()
        try:
            ended = subprocess.run(command, timeout=limit_s, check=False).returncode
            verdict = "held" if ended == 0 else f"FAILED or missed, exit code {ended}"
        except subprocess.TimeoutExpired:
            ended, verdict = 1, f"ENDED after {limit_s} s"
        code = max(code, ended)
        words.append(f"{part}: {verdict}, {time.perf_counter() - began:.0f} s")
    print("\n".join(words))
    return code


if __name__ == "__main__":
    sys.exit(main())
