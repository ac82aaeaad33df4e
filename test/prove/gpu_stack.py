"""The expert's layers as clusters: error and bits, time in context, where a layer's time goes; whole requests: gpu.py.

Parts, each a process of its own with a limit, so that one that fails or hangs costs only its own rows:
1. compile: all kernels, into the cache that the other parts read. 2. chain: plain torch and the Triton chain.
3. clusters, and eight bits: the error of two layers against float32, whether runs have the same bits, us a layer in a
   graph of 18 layers, a whole step with both ends, us from the end of the kernel in front.
4. profile: the rows for config/profiles.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import checkout  # noqa: F401 - makes the checkout importable
import torch
from evidence import conclude

Row = tuple[str, str, bool | None]
PARTS = {"compile": 40, "chain": 35, "clusters": 25, "eight bits": 25, "profile": 20}
"""Part -> its limit [s]."""
FORMS = {"clusters": "stack", "eight bits": "stack_fp8"}
WIDTH, INNER, QUERIES, ACTIONS = 1024, 4096, 2048, 32
WANTED_US = 22.9  # ten steps in 4.2 ms


def compile_all(_: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import STAMPS
    from phyai_kernels import stack

    jobs = set()
    for cuts, size in ((stack.MEASURED, 2), (stack.MEASURED_FP8, 1)):
        jobs |= {(name, stack.source(used)) for name, used in stack.end_expressions(ACTIONS, WIDTH, size).values()}
        for name, used in stack.expressions(WIDTH, INNER, QUERIES, 56, cuts, size).values():
            jobs |= {(name, stack.source(used)), (name, STAMPS + stack.source(used))}
    began = time.perf_counter()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        failed = [why for why in pool.map(compile_one, sorted(jobs)) if why]
    text = f"{len(jobs)} kernels in {time.perf_counter() - began:.1f} s{''.join(f'; {why}' for why in failed[:3])}"
    yield "compiled", text, not failed


def compile_one(job: tuple[str, str]) -> str:
    """Why it could not be compiled; empty where it was. :param job: the kernel's expression, and the program."""
    from phyai_kernels import hopper

    from phyai_engine.layers.ops import keep_compiled

    keep_compiled()
    try:
        hopper.compiled(job[1], job[0])
    except RuntimeError as failure:
        return str(failure)[:300]
    return ""


def chain(_: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import Layers

    layers = Layers()
    plain, triton = layers.chain_errors()
    yield "two layers against float32", f"plain torch {plain:.2e}, Triton {triton:.2e}", None
    us, step = layers.chain_us()
    yield "Triton, eight launches a layer", f"{us:.2f} us a layer, step {step:.0f} us", None


def clusters(chosen: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import MOST_ERROR, Layers

    name, op = chosen.part, FORMS[chosen.part]
    layers = Layers(op)
    errors, same = layers.errors(), layers.same_bits()
    text = f"error {errors[0]:.2e}, with both ends {errors[1]:.2e}, the same bits in each run: {same}"
    yield f"{name}: two layers", text, same and max(errors) <= MOST_ERROR[op]
    us, step = layers.us()
    yield f"{name}, five launches a layer", f"{us:.2f} us a layer, step {step:.0f} us", us <= WANTED_US
    yield f"{name}: us from the kernel in front", layers.stamps(), None


def profile(_: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import profile_rows

    for text in profile_rows():
        yield "config/profiles", text, None


RUN: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "compile": compile_all,
    "chain": chain,
    **dict.fromkeys(FORMS, clusters),
    "profile": profile,
}


def run_part(part: str) -> list[Row]:
    """Its rows, made in a process of its own."""
    command = [sys.executable, __file__, "--part", part]
    began, piped = time.perf_counter(), subprocess.PIPE
    child = subprocess.Popen(command, stdout=piped, stderr=piped, text=True, start_new_session=True)
    try:
        out, errors = child.communicate(timeout=PARTS[part])
        why = (
            f"exit {child.returncode}: {' | '.join(errors.strip().splitlines()[-3:])[-500:]}"
            if child.returncode
            else ""
        )
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, errors = child.communicate()
        why = f"not done in {PARTS[part]} s"
    lines = out.splitlines()
    rows: list[Row] = [tuple(json.loads(line[4:])) for line in lines if line.startswith("ROW ")]
    rows += [(part, f"FAILED, {why}", False)] if why else []
    print(f"{part}: {time.perf_counter() - began:.0f} s{', FAILED' if why else ''}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(PARTS), help="this one only, in this process")
    parser.add_argument("--log", action="store_true", help="append the table to LOG.md")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 2
    if chosen.part:
        from phyai_engine.layers.ops import keep_compiled

        keep_compiled()
        for row in RUN[chosen.part](chosen):
            print("ROW " + json.dumps(row), flush=True)
        return 0
    table = [row for part in PARTS for row in run_part(part)]
    return conclude(f"gpu: the expert's layers as clusters, {torch.cuda.get_device_name()}", table, log=chosen.log)


if __name__ == "__main__":
    sys.exit(main())
