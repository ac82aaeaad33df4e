"""What eight bits cost and give at full size on this machine's GPU: the error of each part, and the time of each phase.

Errors are judged where they show: weights of unit scale, whose velocities are as large as the noise and depend on the
observation (the shipped random weights contract towards their answer and would hide them). Velocities are compared at
the states of the float32 run; the last figure is that of (action - noise). Both as relative L2 against float32, with
those of bfloat16 through torch's own operators beside them. Needs torch, Triton, an NVIDIA GPU of 8.9 or more, no ROS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import NamedTuple

import checkout  # noqa: F401 - puts the checkout on the path
import msgspec
import numpy as np
import torch
from evidence import conclude, options, show
from gpu import CASES, chunk, figures, measure, request
from torch import Tensor

from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.models.pi_coded import every_site
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.weights.pi_names import VISION

MOST, OWN = 4.0, 1.25  # times the error of bfloat16 through torch's operators
WANTED = {("pi05", 3, 200): 9.0}
# What is left in 16 bits so that one part is judged alone; the expert is coded as a whole or not at all.
PARTS = {
    "prefix": ("expert.*",),
    "expert": ("language.*",),
    "qkv": ("*.o", "*.gate_up", "*.down"),
    "o": ("*.qkv", "*.gate_up", "*.down"),
    "mlp": ("*.qkv", "*.o"),
    "layers 0-5": ("*.[6-9].*", "*.1[0-9].*"),
    "layers 6-17": ("*.layers.[0-5].*",),
    "all": (),
}


class Errors(NamedTuple):
    """Relative L2: velocity, mean and largest over the steps; action - noise."""

    mean: float
    largest: float
    action: float


def unit_weights(o: PiOptions, seed: int) -> dict[str, Tensor]:
    """Every matrix keeps the length of what it multiplies; norms near 1."""
    draw, made = torch.Generator("cuda").manual_seed(seed), {}
    for name, shape in PiModel.expected(o).items():
        tensor = torch.randn(shape, generator=draw, device="cuda")
        if "norm" in name and ".dense." not in name:
            tensor = tensor * 0.1 + (name.startswith(VISION) and name.endswith("weight"))
        else:
            tensor *= 0.02 if name.endswith("bias") else tensor[0].numel() ** -0.5
        made[name] = tensor
    return made


def inputs(o: PiOptions, seed: int) -> dict[str, Tensor]:
    asked = request(o, seed, len(o.cameras), o.prompt_len)
    return {name: torch.tensor(array[None], device="cuda") for name, array in asked.inputs.items()}


@torch.no_grad()
def trajectory(model: PiModel, seen: Mapping[str, Tensor], noise: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """x before each step, the velocities, and the action."""
    prefix, times = model.prefix(seen), (*model.spec.times, 0.0)
    states, velocities = [noise], []
    for k in range(len(times) - 1):
        velocities.append(model.velocity(prefix, states[-1], k))
        states.append(states[-1] + (times[k + 1] - times[k]) * velocities[-1])
    return states[:-1], velocities, states[-1]


def errors(model: PiModel, seen: Mapping[str, Tensor], exact: tuple[list[Tensor], list[Tensor], Tensor]) -> Errors:
    states, velocities, action = exact
    prefix = model.prefix(seen)
    apart = [_relative(model.velocity(prefix, x, k), velocities[k]) for k, x in enumerate(states)]
    found = trajectory(model, seen, states[0])[2]
    return Errors(float(np.mean(apart)), max(apart), _relative(found - states[0], action - states[0]))


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="runs of each row")
    parser.add_argument("--variant", choices=("pi05", "pi0"), default="pi05")
    parser.add_argument("--images", choices=("planes", "bytes"), default="bytes", help="how the model takes them")
    parser.add_argument("--parts", nargs="*", choices=(*PARTS,), default=[*PARTS], help="whose errors are told")
    chosen = options(parser)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    cases = [case[1:3] for case in CASES if case[0] == chosen.variant]
    longest = max(prompt for _, prompt in cases)
    half = PiOptions(variant=chosen.variant, dtype="bfloat16", prompt_len=longest, images=chosen.images)
    tensors, seen = unit_weights(half, 1), inputs(half, 0)
    noise = torch.randn((1, half.action_horizon, half.action_dim), generator=torch.Generator("cuda"), device="cuda")

    def model(**changes: object) -> PiModel:
        return PiModel.from_state(msgspec.structs.replace(half, **changes), tensors, device="cuda")

    exact = trajectory(model(dtype="float32", kernels="reference"), seen, noise)
    length = float(torch.stack(exact[1]).norm() / noise.norm() / len(exact[1]) ** 0.5)
    plain = errors(model(kernels="reference"), seen, exact)
    rows = [("bfloat16, torch's operators", *(f"{e:.2e}" for e in plain), "", "", "")]
    held: list[tuple[str, str, bool | None]] = [("|velocity| / |noise|", f"{length:.2f}", None)]
    for part, keep in {"bfloat16": None, **{part: PARTS[part] for part in chosen.parts}}.items():
        coded = model() if keep is None else model(quant="w8a8_fp8", quant_keep=keep)
        found = errors(coded, seen, exact)
        times = [f"{a / b:.2f}" for a, b in zip(found, plain, strict=True)]
        rows.append((part, *(f"{e:.2e}" for e in found), *times))
        worst = max(a / b for a, b in zip(found, plain, strict=True))
        if part == "bfloat16":
            held.append(("own bfloat16: error over that of torch's", f"{worst:.2f} (<= {OWN})", worst <= OWN))
        if part in ("expert", "all"):
            held.append((f"{part}: the expert is coded", coded.ops.reasons["stack_fp8"], bool(coded.coded)))
        if part == "all":
            held.append(("all matrices: error over that of bfloat16", f"{worst:.2f} (<= {MOST})", worst <= MOST))
        del coded
    timed = [
        line for quant in ("none", "w8a8_fp8") for line in _timed(model(quant=quant), quant, cases, chosen.n, held)
    ]
    held.append(("matrices coded", str(len(every_site(half))), None))
    code = conclude(f"fp8, {chosen.variant}: checks, {where}", held, log=chosen.log)
    columns = ("coded", "velocity", "largest", "action", "velocity / bf16", "largest / bf16", "action / bf16")
    show(f"fp8, {chosen.variant}: error against float32, relative L2, {where}", columns, rows, log=chosen.log)
    head = ("quant cameras/tokens", "n", "p50 ms", "p99", "max", "copy in", "vision", "prefix", "steps", "copy out")
    show(
        f"fp8, {chosen.variant}: one chunk, images as {chosen.images}, {where}",
        (*head, "wanted"),
        timed,
        log=chosen.log,
    )
    return code


def _timed(
    model: PiModel, quant: str, cases: list[tuple[int, int]], n: int, held: list[tuple[str, str, bool | None]]
) -> list[tuple[str, ...]]:
    o = model.options
    shapes = {BatchShape(1, cameras, cameras * o.image_tokens + prompt) for cameras, prompt in cases}
    graphs = Graphs(model, shapes=sorted(shapes, reverse=True))
    called = Graphs(model, guidance=graphs.guidance, replay=False, shapes=[c.shape for c in graphs.shapes])
    requests = [request(o, 5, *case) for case in cases]
    equal = [np.array_equal(chunk(model, r, graphs), chunk(model, r, called)) for r in requests]
    text = f"{sum(equal)} of {len(equal)}"
    held.append((f"quant {quant}: replay = the same calls, bit for bit", text, all(equal)))
    lines = []
    for cameras, prompt in cases:
        runs = measure(model, graphs, cameras, prompt, n, guided=False)
        wanted = WANTED.get((o.variant, cameras, prompt), float("nan"))
        lines.append(figures(f"{quant} {cameras}/{prompt}", runs, wanted))
    return lines


if __name__ == "__main__":
    sys.exit(main())
