"""The expert's layers as clusters: each form's error and time in context, then whole requests with it and without.

Parts, each a process of its own with a limit, so that one that fails or hangs costs only its own rows:
1. compile: all kernels, into the cache that the other parts read. 2. chain: plain torch and the Triton chain.
3. each form: the error of two layers against float32, whether runs have the same bits, us a layer in a graph of 18
   layers, a whole step with both ends, where a layer's time goes.
4. pi05, pi0: whole requests with the Triton chain, and with the fastest correct form.
5. profile: the rows for config/profiles.
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
from typing import Any

import checkout  # noqa: F401 - makes the checkout importable
import torch
from evidence import conclude

Row = tuple[str, str, bool | None]
FORMS = (
    "as it is",
    "gate/up ahead",
    "both ahead",
    "o 32 wide",
    "QKV 32 wide",
    "both 32 wide",
    "x of gate/up in turns",
    "two groups",
)
PARTS = {"compile": 30, "chain": 35, **dict.fromkeys(FORMS, 20), "pi05": 120, "pi0": 60, "profile": 15}
"""Part -> its limit [s]. A form's part measures the form."""
WIDTH, INNER, QUERIES, ACTIONS = 1024, 4096, 2048, 32
BOUND = "Triton chain"
WANTED_US, WANTED_STEPS_MS = 22.0, 4.2


def cuts_of(form: str) -> Any:
    """How a form cuts the layers; without a name as kernels/stack.py does. Imported where there is a GPU only."""
    from phyai_kernels.stack import MEASURED, AttendCut, Cut, Cuts

    base = Cuts(attend=AttendCut(16, 64, 1))
    both = base._replace(ahead=("gate_up", "down"))
    o, qkv = {"o": Cut(32, 4)}, {"project": Cut(32, 2, 1, 2)}
    made = (
        base,
        base._replace(ahead=("gate_up",)),
        both,
        both._replace(**o),
        both._replace(**qkv),
        both._replace(**o, **qkv),
        both._replace(gated=Cut(128, 2, 2, 2)),
        both._replace(attend=AttendCut(16, 64, 2)),
    )
    return dict(zip(FORMS, made, strict=True)).get(form, MEASURED)


def compile_all(_: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import STAMPS
    from phyai_kernels import stack

    jobs = {(name, stack.source(used)) for name, used in stack.end_expressions(ACTIONS, WIDTH).values()}
    for form in FORMS:
        for name, used in stack.expressions(WIDTH, INNER, QUERIES, 56, cuts_of(form)).values():
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


def one_form(chosen: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import MOST_ERROR, Layers

    layers, cuts = Layers(), cuts_of(chosen.part)
    errors, same = layers.errors(cuts), layers.same_bits(cuts)
    right = same and max(errors) <= MOST_ERROR
    text = f"error {errors[0]:.2e}, with both ends {errors[1]:.2e}, the same bits in each run: {same}"
    yield f"{chosen.part}: two layers", text, right
    us, step = layers.us(cuts)
    yield chosen.part, f"{us:.2f} us a layer, step {step:.0f} us", us <= WANTED_US
    if right:
        print(f"US {us}", flush=True)
    yield f"{chosen.part}: us from the kernel in front", layers.stamps(cuts), None


def requests(chosen: argparse.Namespace) -> Iterator[Row]:
    import gpu
    import gpu_layers
    import gpu_model

    from phyai_engine.models.pi import PiOptions

    cases = [case for case in gpu.CASES if case[0] == chosen.part]
    o = PiOptions(variant=chosen.part, dtype="bfloat16", prompt_len=max(prompt for *_, prompt, _ in cases))
    model, found = gpu_model.full_size(o), {}
    for name in (BOUND, "stack"):
        gpu_layers.bind(model, name, cuts_of(chosen.form))
        found[name] = gpu_layers.captured(model, cases)
        checks = gpu.check(model, found[name], [case[1:3] for case in cases])
        text = "; ".join(f"{what.partition(': ')[2]}: {text}" for what, text, _ in checks)
        yield f"{chosen.part} {name}", text, all(held for *_, held in checks)
    for _, cameras, prompt, wanted in cases:
        asked = gpu.request(o, 5, cameras, prompt)
        plain = gpu.chunk(model, asked, found[BOUND])
        for name, graphs in found.items():
            apart = gpu_model.relative_l2(gpu.chunk(model, asked, graphs), plain)
            runs = gpu.measure(model, graphs, cameras, prompt, chosen.n, guided=False)
            _, n, p50, p99, most, copy, vision, prefix, steps, *_ = gpu.figures(name, runs, wanted)
            phases = f"copy in {copy}, vision {vision}, prefix {prefix}, steps {steps}"
            held = None if name == BOUND else float(p50) <= wanted and float(steps) <= WANTED_STEPS_MS
            text = f"p50 {p50} p99 {p99} max {most} (n {n}); {phases}; {apart:.1e} from it"
            yield f"{chosen.part} {cameras}/{prompt}, {name}", text, held


def profile(chosen: argparse.Namespace) -> Iterator[Row]:
    from gpu_layers import profile_rows

    for text in profile_rows(cuts_of(chosen.form)):
        yield "config/profiles", text, None


RUN: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "compile": compile_all,
    "chain": chain,
    **dict.fromkeys(FORMS, one_form),
    "pi05": requests,
    "pi0": requests,
    "profile": profile,
}


def run_part(part: str, n: int, form: str) -> tuple[list[Row], list[float]]:
    """In a process of its own. :param form: for whole requests. :return: its rows, and a form's us if it is right."""
    command = [sys.executable, __file__, "--part", part, "--n", str(n), "--form", form]
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
    return rows, [float(line[3:]) for line in lines if line.startswith("US ")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200, help="requests of each row")
    parser.add_argument("--part", choices=list(PARTS), help="this one only, in this process")
    parser.add_argument("--form", default="", choices=("", *FORMS), help="for whole requests; the fastest unless given")
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
    table: list[Row] = []
    times: dict[str, float] = {}
    for part in PARTS:
        form = chosen.form or min(times, key=lambda name: times[name], default="")
        rows, us = run_part(part, chosen.n, form)
        table += rows
        times |= dict.fromkeys(FORMS[FORMS.index(part) :][:1], us[0]) if us else {}
    table.append(("the form of the whole requests", form or "as kernels/stack.py has it", None))
    return conclude(f"gpu: the expert's layers as clusters, {torch.cuda.get_device_name()}", table, log=chosen.log)


if __name__ == "__main__":
    sys.exit(main())
