"""A mixed batch against single requests, and what many requests leave behind, on a GPU.

1. Four requests in one batch, different in prompt length, camera mask, committed actions, delay and seed, one without
   committed actions and one cancelled: each equals its own run, bit for bit in the same bucket of graphs, and within
   rounding (float32) where it runs alone in the bucket of one.
2. Instruction, state, valid tokens and masks change with every request: nothing is captured again, memory stays.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import gpu_model
import numpy as np
import torch
from evidence import conclude, options
from gpu_model import relative_l2, row

from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.rtc import Guidance
from phyai_engine.runner import Runner
from phyai_engine.types import CancelToken, Row

Held = list[tuple[str, str, bool | None]]
BATCH, ACROSS = 4, 1e-5
MODES = ("identity", "vjp_early:3")


def rows_of(o: PiOptions, guidance: Guidance) -> list[Row]:
    """The third is cancelled."""
    return [
        row(o, 1, prompt=200, delay=2, guidance=guidance),
        row(o, 2, prompt=16, cameras=(True, False, True), delay=5, guidance=guidance),
        row(o, 3, prompt=48, cameras=(False, True, True), delay=1, guidance=guidance),
        row(o, 4, prompt=97, cameras=(True, True, False)),
    ]


def mixed(model: PiModel, mode: str) -> Held:
    """See 1. of the module."""
    guidance, name = Guidance.parse(mode), f"{model.options.variant} {model.options.dtype}, {mode}"
    shapes = model.captured_shapes((BATCH,))[:1] + model.captured_shapes((1,))
    graphs = Graphs(model, guidance=guidance, shapes=shapes)
    batches, single = (Runner(model, (size,), guidance=guidance, graphs=graphs) for size in (BATCH, 1))
    rows = rows_of(model.options, guidance)
    token = CancelToken()
    dropped = [rows[0], rows[1], replace(rows[2], cancel=token), rows[3]]
    together = batches.run(rows)
    cancelling = Runner(
        model,
        (BATCH,),
        on_step=lambda step, *_: token.cancel() if step == 3 else None,
        guidance=guidance,
        graphs=graphs,
    )
    without = cancelling.run(dropped)
    alone = [batches.run([each])[0].actions for each in rows]
    apart = [single.run([each])[0].actions for each in rows]
    same = [np.array_equal(found.actions, wanted) for found, wanted in zip(together, alone, strict=True)]
    rest = [np.array_equal(without[i].actions, alone[i]) for i in (0, 1, 3)]
    errors = [relative_l2(found.actions, wanted) for found, wanted in zip(together, apart, strict=True)]
    exact = model.options.dtype == "float32"
    return [
        (f"{name}: in a batch of {BATCH} = alone in that bucket, bits", f"{sum(same)} of {len(same)}", all(same)),
        (
            f"{name}: beside one cancelled at step 3, which says so",
            f"{sum(rest)} of 3; {'' if without[2].cancelled else 'NOT '}cancelled",
            all(rest) and without[2].cancelled and without[2].actions is None,
        ),
        (
            f"{name}: against the bucket of one, largest relative L2",
            f"{max(errors):.1e}",
            max(errors) <= ACROSS if exact else None,
        ),
        (f"{name}: captured", _captured(graphs), None),
    ]


def _captured(graphs: Graphs) -> str:
    buckets = ", ".join(f"{s.shape.batch}x({s.shape.images} images, {s.shape.length})" for s in graphs.shapes)
    return f"{graphs.bytes / 2**20:.0f} MiB, {graphs.seconds:.1f} s: {buckets}"


def many(o: PiOptions, count: int) -> Held:
    """See 2. of the module. Few layers and steps of full width: every buffer and path of the whole, in less time."""
    model = gpu_model.full_size(o)
    guidance = Guidance.parse("vjp_early:3")
    graphs = Graphs(model, (1,), guidance=guidance)
    runner = Runner(model, (1,), guidance=guidance, graphs=graphs)
    draw = np.random.default_rng(0)
    base = row(o, 0, prompt=200, delay=2, guidance=guidance)
    began = torch.cuda.CUDAGraph.capture_begin
    before, finite = None, True
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", autospec=True, side_effect=began) as captures:
        for i in range(count + 100):
            if i == 100:  # the first ones fill caches of the allocator and of the interpreter
                before = _memory()
            finite &= bool(np.isfinite(runner.run([_changed(base, i, draw, o)])[0].actions).all())
        after = _memory()
    assert before is not None
    grown = [b - a for a, b in zip(before, after, strict=True)]
    text = "tensors {:+d} B, allocations {:+d}, reserved {:+d} B, resident {:+.1f} MiB".format(*grown)
    flat = grown[0] == grown[1] == grown[2] == 0 and grown[3] < 8
    return [
        (f"{count} requests, all of them different: captured again", str(captures.call_count), not captures.call_count),
        (f"memory over {count} requests", text, flat),
        ("all finite", str(finite), finite),
        ("2 layers, 4 steps of full width: captured", _captured(graphs), None),
    ]


def _changed(base: Row, i: int, draw: np.random.Generator, o: PiOptions) -> Row:
    inputs = dict(base.inputs)
    inputs["tokens"] = draw.integers(0, o.vocab, o.prompt_len)
    inputs["token_mask"] = np.arange(o.prompt_len) < draw.integers(1, o.prompt_len + 1)
    inputs["image_mask"] = np.array([(True, True, True), (True, False, True), (False, True, False)][i % 3])
    if o.variant == "pi0":
        inputs["state"] = draw.uniform(-1, 1, o.action_dim).astype(np.float32)
    weight = base.weight if i % 2 else np.zeros_like(base.weight)
    return replace(base, inputs=inputs, weight=weight, seed=i, delay_steps=i % 3)


def _memory() -> Sequence[float]:
    torch.cuda.synchronize()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    stats = torch.cuda.memory_stats()
    return torch.cuda.memory_allocated(), stats["allocation.all.allocated"], torch.cuda.memory_reserved(), rss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--only", choices=("mixed", "many"), help="one part of the proof")
    chosen = options(parser)
    where, held = gpu_model.gpu_or_leave(), []
    models = (("pi05", "float32"), ("pi05", "bfloat16"), ("pi0", "float32")) if chosen.only != "many" else ()
    for variant, dtype in models:
        model = gpu_model.full_size(PiOptions(variant=variant, dtype=dtype, prompt_buckets=(48,)))
        for mode in MODES if variant == "pi05" else MODES[:1]:
            held += mixed(model, mode)
        del model
        torch.cuda.empty_cache()
    if chosen.only != "mixed":
        few = PiOptions(variant="pi0", dtype="bfloat16", vis_depth=2, depth=2, num_steps=4, prompt_buckets=(48,))
        held += many(few, chosen.requests)
    return conclude(f"gpu: batches and many requests, {where}", held, log=chosen.log)


if __name__ == "__main__":
    sys.exit(main())
