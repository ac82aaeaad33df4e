"""Guidance: the recorded runs, the gradient on every axis of the recorded pi0.5, and what a guided step costs here.

About two minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "engine"))

import guidance_cases
import numpy as np
import torch
from evidence import conclude, options
from guidance_cases import GOLDEN, Case
from test_guidance import MODES, chunks_of, guidance_of, row_of, small, weights

from phyai_engine.config import load_model, resolve
from phyai_engine.golden import run_golden
from phyai_engine.models.pi import PiModel
from phyai_engine.rtc import Guidance, GuidanceBuffers
from phyai_engine.solvers import flow_step

Row = tuple[str, str, bool | None]


def recorded() -> list[Row]:
    report = run_golden(GOLDEN / "rtc_lerobot")
    worst: dict[str, tuple[float, float]] = {}
    for c in report.comparisons:
        worst[c.array] = max(worst.get(c.array, (0.0, c.gate)), (c.max_abs, c.gate))
    shown = ("chunk", "u_guided", "vjp_chunk", "vjp_correction", "vjp_chunk fp32", "vjp_correction fp32")
    rows: list[Row] = [(f"rtc_lerobot {a}", f"{worst[a][0]:.1e}, gate {worst[a][1]:.0e}", None) for a in shown]
    count = len({c.name for c in report.comparisons})
    return [*rows, (f"rtc_lerobot: all {count} arrays, three modes", "within their gates", report.passed)]


def gradient(name: str, steps: tuple[int, ...]) -> Row:
    """Every axis of both samples."""
    case = guidance_cases.pi05_tiny(name)
    worst = 0.0
    for step in steps:
        x, error = case.noise(step), case.noise(step + 20)
        grad = case.model.velocity_vjp(case.prefix, x, step)[1](error)
        worst = max(worst, guidance_cases.worst_directional_error(case, x, error, grad, step, directions=None))
    count = len(steps) * case.noise(0).numel()
    text = f"worst {worst:.1e} of the gradient's length, n {count}"
    return f"{name}: fp32 gradient against fp64 central differences, steps {steps}", text, worst < 1e-5


def mixed_batches() -> Row:
    worst = 0.0
    for variant in ("pi0", "pi05"):
        for text in MODES:
            shape, guidance = small(variant), guidance_of(text)
            model = PiModel.from_state(shape, weights(shape))
            rows = [row_of(shape, i, guidance, delay=i % 4, guided=i != 2) for i in range(5)]
            together = chunks_of(model, guidance, rows)
            alone = np.stack([chunks_of(model, guidance, [row])[0] for row in rows])
            worst = max(worst, float(np.abs(together - alone).max()))
    return "rows of a mixed batch against each alone, 7 modes, pi0 and pi0.5", f"{worst:.1e}", worst < 1e-5


def cost(count: int) -> list[Row]:
    """One solver step of pi05_demo, one row, one thread; the modes in turn, so that the machine's moods hit all."""
    model = PiModel.load(load_model(resolve("models", "pi05_demo")))
    spec, o = model.spec, model.options
    inputs = {
        name: torch.ones((1, *buffer.shape), dtype=getattr(torch, buffer.dtype)) for name, buffer in spec.inputs.items()
    }
    prefix, case = model.prefix(inputs), Case(model, model.prefix(inputs), None)
    x, weight = case.noise(0), torch.ones(1, o.action_horizon, o.action_dim)
    modes = {
        text: Guidance.parse(text, 5 if text == "trained" else 0) for text in ("none", "identity", "vjp", "trained")
    }
    took: dict[str, list[float]] = {text: [] for text in modes}
    for i in range(count + 5):
        for text, guidance in modes.items():
            gain = torch.ones(o.num_steps, 1, 1, 1)
            locked = (torch.arange(o.action_horizon) < 5)[None, :, None]
            buffers = GuidanceBuffers(x, weight, gain, locked)
            began = time.perf_counter()
            flow_step(model, prefix, x, 0, spec.times, guidance, buffers)
            if i >= 5:
                took[text].append(time.perf_counter() - began)
    middle = {text: float(np.median(times)) * 1e3 for text, times in took.items()}
    return [
        (f"pi05_demo step, {text}", f"p50 {ms:.2f} ms, {ms / middle['none']:.2f} x none, n {count}", None)
        for text, ms in middle.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    chosen = options(parser)
    torch.set_num_threads(1)
    error = guidance_cases.convention_error(guidance_cases.pi05_tiny())
    rows = [
        *recorded(),
        gradient("pi05_tiny", (0, 4, 9)),
        gradient("pi0_tiny", (0, 9)),
        ("pi05_tiny: vjp chunk in the paper's direction of time against ours", f"{error:.1e}", error < 1e-6),
        mixed_batches(),
        *cost(chosen.count),
    ]
    return conclude("guidance", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
