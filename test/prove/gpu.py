"""What one chunk costs on this machine's GPU, after checks that the answer is right. Needs torch, Triton and no ROS.

1. The golden folders in float32 on the device, their steps as captured graphs, within the gates of the CPU.
2. At full size, random weights: a replay equals the same calls without a graph, bit for bit, also when it is guided or
   smaller than the captured shape; other instructions, masks and seeds capture nothing.
3. Times: pi0.5 with 3 cameras and 200 or 16 prompt tokens and with 2 and 200; pi0 with 3 and 48. 50 actions, 10 steps,
   one request, phases by CUDA events; ceilings of the device measured in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import checkout
import gpu_model
import numpy as np
import torch
from evidence import conclude, options, show
from gpu_model import row

from phyai_engine.bench.ceilings import ceilings
from phyai_engine.golden import run_golden
from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.rtc import IDENTITY, Guidance
from phyai_engine.runner import Runner
from phyai_engine.types import Row

# Variant, cameras, prompt tokens, the median that is wanted [ms] (the project's goals for an H200)
CASES = (("pi05", 3, 200, 13.0), ("pi05", 3, 16, 11.5), ("pi05", 2, 200, 10.8), ("pi0", 3, 48, 12.5))
WARM_UP = 10


def request(o: PiOptions, seed: int, cameras: int, prompt: int, *, guidance: Guidance | None = None) -> Row:
    """A random request of the first cameras. :param guidance: None: without committed actions."""
    seen = [i < cameras for i in range(len(o.cameras))]
    if guidance is None:
        return row(o, seed, prompt=prompt, cameras=seen)
    return row(o, seed, prompt=prompt, cameras=seen, delay=2, guidance=guidance)


def chunk(model: PiModel, asked: Row, graphs: Graphs) -> Any:
    return Runner(model, buckets=(1,), guidance=graphs.guidance, graphs=graphs).run([asked])[0].actions


def check(model: PiModel, graphs: Graphs, cases: Sequence[tuple[int, int]]) -> list[tuple[str, str, bool | None]]:
    """Replays against calls, and that nothing is captured again."""
    o, name = model.options, f"{model.options.variant}, {graphs.guidance.mode.value}"
    shapes = [captured.shape for captured in graphs.shapes]
    called = Graphs(model, guidance=graphs.guidance, replay=False, shapes=shapes)
    requests = [request(o, 5, *case) for case in cases]
    requests += [request(o, 6, *cases[0], guidance=graphs.guidance)]
    requests += [request(o, 7, cases[0][0], cases[0][1] // 2), request(o, 8, 1, 3)]
    equal = [np.array_equal(chunk(model, r, graphs), chunk(model, r, called)) for r in requests]
    finite = all(np.isfinite(chunk(model, r, graphs)).all() for r in requests)
    text = f"{sum(equal)} of {len(equal)} equal, {'all' if finite else 'NOT all'} finite"
    memory = f"{graphs.bytes / 2**20:.0f} MiB, {graphs.seconds:.1f} s"
    return [
        (f"{name}: replay = the same calls, bit for bit", text, all(equal) and finite),
        (f"{name}: shapes captured", f"{graphs.captures}, {memory}", graphs.captures == len(graphs.shapes)),
    ]


def measure(
    model: PiModel, graphs: Graphs, cameras: int, prompt: int, n: int, *, guided: bool
) -> list[dict[str, float]]:
    """Phases of n runs, ms, and their sum."""
    runner = Runner(model, buckets=(1,), guidance=graphs.guidance, graphs=graphs)
    guidance = graphs.guidance if guided else None
    requests = [request(model.options, seed, cameras, prompt, guidance=guidance) for seed in range(4)]
    runs = []
    for i in range(WARM_UP + n):
        phases = dict(runner.run([requests[i % len(requests)]])[0].phases)
        phases["copy_in"] += phases.pop("stage")
        steps = sum(ms for name, ms in phases.items() if name.startswith("step"))
        runs.append({**phases, "steps": steps, "all": sum(phases.values())})
    return runs[WARM_UP:]


def figures(name: str, runs: list[dict[str, float]], wanted: float) -> tuple[str, ...]:
    median = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
    total = sorted(run["all"] for run in runs)
    p99 = total[min(len(total) - 1, int(0.99 * len(total)))]
    phases = (f"{median[phase]:.2f}" for phase in ("copy_in", "vision", "prefix", "steps", "copy_out"))
    return name, str(len(runs)), f"{median['all']:.2f}", f"{p99:.2f}", f"{total[-1]:.2f}", *phases, f"{wanted:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="runs of each row")
    parser.add_argument("--images", choices=("planes", "bytes"), default="bytes", help="how the model takes them")
    chosen = options(parser)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    most = ceilings("cuda", "bfloat16")
    text = f"copy {most.tb_s:.2f} TB/s, {most.side}^3 bf16 product {most.tflop_s:.0f} TFLOP/s"
    held: list[tuple[str, str, bool | None]] = [("ceilings", text, None)]
    torch.cuda.empty_cache()
    for folder in ("pi0_tiny", "pi05_tiny"):
        report = run_golden(checkout.ROOT / "test" / "golden" / folder, "cuda")
        worst = max(c.max_abs for c in report.comparisons)
        held.append((f"golden {folder}, float32 on cuda, steps as graphs", f"worst {worst:.1e}", report.passed))
    table = []
    for variant in ("pi05", "pi0"):
        cases = [case for case in CASES if case[0] == variant]
        began = time.perf_counter()
        longest = max(prompt for *_, prompt, _ in cases)
        o = PiOptions(variant=variant, dtype="bfloat16", prompt_len=longest, images=chosen.images)
        model = gpu_model.full_size(o)
        held.append((f"{variant}: draw weights and check the operators", f"{time.perf_counter() - began:.1f} s", None))
        shapes = {BatchShape(1, cameras, cameras * o.image_tokens + prompt) for _, cameras, prompt, _ in cases}
        graphs = Graphs(model, shapes=sorted(shapes, reverse=True))
        held += check(model, graphs, [(cameras, prompt) for _, cameras, prompt, _ in cases])
        for _, cameras, prompt, wanted in cases:
            runs = measure(model, graphs, cameras, prompt, chosen.n, guided=False)
            table.append(figures(f"{variant} {cameras}/{prompt}", runs, wanted))
        _, cameras, prompt, wanted = cases[0]
        for guidance in (IDENTITY, Guidance.parse("vjp")):
            if guidance != graphs.guidance:
                graphs = Graphs(model, guidance=guidance, shapes=[graphs.shapes[0].shape])
                held += check(model, graphs, [(cameras, prompt)])
            runs = measure(model, graphs, cameras, prompt, chosen.n // 4, guided=True)
            table.append(figures(f"{variant} {cameras}/{prompt} {guidance.mode.value}", runs, wanted))
        del model, graphs
        torch.cuda.empty_cache()
    code = conclude(f"gpu: checks, {where}", held, log=chosen.log)
    columns = (
        "cameras/tokens",
        "n",
        "p50 ms",
        "p99",
        "max",
        "copy in",
        "vision",
        "prefix",
        "steps",
        "copy out",
        "wanted",
    )
    show(f"gpu: one chunk, bf16, images as {chosen.images}, {where}", columns, table, log=chosen.log)
    return code


if __name__ == "__main__":
    sys.exit(main())
