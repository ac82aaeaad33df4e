"""What a chunk costs beside the model: from the snapshot of three 640x480 cameras to actions in robot units.

1. Images as they come, and resized when they arrived (as the node does it where the family allows it); as planes that
   the host makes, and as bytes that the device spreads; frames side by side on several cores, and one after the other;
   lerobot's resampler. The model is the phases vision, prefix and steps by CUDA events; everything else of the call is
   overhead. Planes and bytes must give the same actions, bit for bit.
2. The first chunk after ten seconds without requests, with and without ``keep_warm``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import gpu_model
import msgspec
import numpy as np
from evidence import options, show
from gpu_model import percentiles
from msgspec import structs

from phyai_engine.adapter import Adapter
from phyai_engine.bench import synthetic
from phyai_engine.bench.command import BenchOptions, model_config, robot_config
from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.models.pi_options import Images
from phyai_engine.policy import Policy
from phyai_engine.runner import Runner
from phyai_engine.transforms import image as images
from phyai_engine.types import F64, Request

WARM_UP = 20
REST_S = 10.0
MODEL = ("vision", "prefix", "step")


class Case(NamedTuple):
    """One column. :param wanted: of the overhead's median, ms; 0: nothing is claimed."""

    name: str
    form: Images
    wanted: float = 0.0
    arrival: bool = False
    in_turn: bool = False
    resize: str = "pillow"


CASES = (
    Case("planes, on arrival", "planes", arrival=True),
    Case("bytes, on arrival", "bytes", wanted=1.5, arrival=True),
    Case("planes, raw", "planes"),
    Case("bytes, raw", "bytes", wanted=6.0),
    Case("bytes, raw, in turn", "bytes", in_turn=True),
    Case("float, raw", "planes", wanted=6.0, resize="float"),
)


class Desk:
    """pi0.5 of full size behind the bench robot with three cameras and the longest prompt, in both forms."""

    def __init__(self) -> None:
        self._asked = BenchOptions(model="pi05", device="cuda")
        self._config = model_config(self._asked)
        given = {"variant": self._config.family, **self._config.options}
        self._model = gpu_model.full_size(msgspec.convert(given, PiOptions))
        self._runners: dict[Images, Runner] = {}
        series = synthetic.requests(
            self.policy("planes", "pillow").adapter, seed=0, prompt_tokens=self._config.prompt.max_tokens
        )
        self.raw = [series(i) for i in range(4)]
        self.small = [on_arrival(request, self._model.options.image_size) for request in self.raw]

    def policy(self, form: Images, resize: str) -> Policy:
        """The same weights in each. Graphs are captured once a form."""
        if form not in self._runners:
            model = in_form(self._model, form)
            graphs = Graphs(model, shapes=model.captured_shapes((1,))[:1])
            self._runners[form] = Runner(model, (1,), graphs=graphs)
        config = structs.replace(self._config, resize=resize)
        runner = self._runners[form]
        adapter = Adapter(robot_config(self._asked, config), config, runner.model.spec)
        return Policy(adapter, runner, "random weights")


def in_form(model: PiModel, form: Images) -> PiModel:
    """The same parameters under other options."""
    other = copy.copy(model)
    other.options = structs.replace(model.options, images=form)
    other.spec = other.options.spec()
    return other


def on_arrival(request: Request, size: int) -> Request:
    """The request as a node makes it that resized its images when they came."""
    small = {name: images.resize_pad(frame, size) for name, frame in request.observation.images.items()}
    return replace(request, observation=replace(request.observation, images=small))


class Stopwatch:
    """ms spent in some functions, which are replaced while it runs."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    def around(self, name: str, owner: Any, attribute: str) -> Any:
        """A patch of that function. :param name: under which its time stands."""
        function = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - began) * 1e3
            return result

        return mock.patch.object(owner, attribute, call)


def spent(policy: Policy, requests: Sequence[Request], n: int) -> list[dict[str, float]]:
    """ms of each part of n calls, and their whole."""
    watch, results, run, runs = Stopwatch(), [], policy.runner.run, []

    def kept(rows: Any) -> Any:
        results[:] = run(rows)
        return results

    with (
        watch.around("images", Adapter, "_images"),
        watch.around("prompt", type(policy.adapter._prompt), "__call__"),
        mock.patch.object(policy.runner, "run", kept),
    ):
        for i in range(WARM_UP + n):
            watch.ms.clear()
            began = time.perf_counter()
            timings = policy.infer([requests[i % len(requests)]])[0].timings
            whole = (time.perf_counter() - began) * 1e3
            phases = results[0].phases
            model = sum(ms for name, ms in phases.items() if name.startswith(MODEL))
            beside = {
                **watch.ms,
                "other encoding": timings.encode_ms - sum(watch.ms.values()),
                **{name: ms for name, ms in phases.items() if not name.startswith(MODEL)},
                "decode": timings.decode_ms,
                "calls between": whole - timings.encode_ms - timings.decode_ms - sum(phases.values()),
            }
            runs.append(beside | {"overhead": whole - model, "model": model, "snapshot to chunk": whole})
    return runs[WARM_UP:]


def itemised(found: Mapping[Case, Sequence[Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """p50 / p99 of each part, ms."""
    rows = []
    for part in next(iter(found.values()))[0]:
        cells = []
        for runs in found.values():
            times = sorted(run[part] for run in runs)
            cells.append(f"{statistics.median(times):.3f} / {times[min(len(times) - 1, int(0.99 * len(times)))]:.3f}")
        rows.append((part, *cells))
    wanted = (f"<= {case.wanted}" if case.wanted else "" for case in found)
    return [*rows, ("overhead wanted, p50", *wanted)]


def measured(desk: Desk, n: int) -> tuple[dict[Case, list[dict[str, float]]], bool]:
    """All columns, and whether all of one resampler gave the same actions."""
    found, seen = {}, {}
    for case in CASES:
        policy, requests = desk.policy(case.form, case.resize), desk.small if case.arrival else desk.raw
        with mock.patch.object(images, "cores", return_value=1) if case.in_turn else nullcontext():
            found[case] = spent(policy, requests, n)
            actions: F64 = np.stack([policy.infer([request])[0].actions for request in requests])
        seen.setdefault(case.resize, []).append(actions)
        overhead = [run["overhead"] for run in found[case]]
        print(f"{case.name}: beside the model {percentiles(overhead)} ms", flush=True)
    return found, all(np.array_equal(each[0], other) for each in seen.values() for other in each)


def after_rest(policy: Policy, requests: Sequence[Request], every_s: float) -> list[float]:
    """ms of the first five chunks after a rest. :param every_s: between two ``keep_warm``; 0: none."""
    for i in range(50):
        policy.infer([requests[i % len(requests)]])
    end = time.perf_counter() + REST_S
    while (left := end - time.perf_counter()) > 0:
        time.sleep(min(left, every_s or left))
        if every_s:
            policy.keep_warm()
    times = []
    for request in [*requests, requests[0]]:
        began = time.perf_counter()
        policy.infer([request])
        times.append((time.perf_counter() - began) * 1e3)
    return times


def rested(desk: Desk, median_ms: float, repeats: int) -> list[tuple[str, ...]]:
    """The table of 2. of the module, of bytes that were resized on arrival."""
    policy, table = desk.policy("bytes", "pillow"), []
    for _ in range(repeats):
        for every_s in (0.0, 1.0):
            first, *rest = after_rest(policy, desk.small, every_s)
            name = f"keep_warm_s: {every_s:.1f}" if every_s else "nothing"
            table.append((name, f"{first:.2f}", f"{first - median_ms:+.2f}", ", ".join(f"{ms:.2f}" for ms in rest)))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2, help="rests of each kind; each takes ten seconds")
    chosen = options(parser)
    where = gpu_model.gpu_or_leave()
    desk = Desk()
    found, same = measured(desk, chosen.n)
    what = f"pi0.5 3/200, three 640x480 cameras, p50 / p99 of {chosen.n} in ms, same actions: {same}"
    columns = ("part", *(case.name for case in found))
    show(f"gpu: beside the model, {what}, {where}", columns, itemised(found), log=chosen.log)
    medians = {case: statistics.median(run["overhead"] for run in runs) for case, runs in found.items()}
    whole = statistics.median(run["snapshot to chunk"] for run in found[CASES[1]])
    if chosen.repeats:
        columns = (f"in {REST_S:.0f} s without requests", "first ms", "over the median", "the next four")
        table = rested(desk, whole, chosen.repeats)
        show(f"gpu: the first chunk after a rest, pi0.5 3/200, {where}", columns, table, log=chosen.log)
    held = all(median <= case.wanted for case, median in medians.items() if case.wanted)
    return 0 if held and same else 1


if __name__ == "__main__":
    sys.exit(main())
