"""What a chunk costs beside the model: from the snapshot of three 640x480 cameras to actions in robot units.

Images as they come, and resized when they arrived (as the node does it where the family allows it). The model is the
phases vision, prefix and steps by CUDA events; everything else of the call is overhead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import gpu_model
import msgspec
import numpy as np
from evidence import options, show
from gpu_model import percentiles

from phyai_engine.adapter import Adapter
from phyai_engine.bench import synthetic
from phyai_engine.bench.command import BenchOptions, model_config, robot_config
from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiOptions
from phyai_engine.policy import Policy
from phyai_engine.runner import Runner
from phyai_engine.transforms import image as images
from phyai_engine.types import Request

WARM_UP = 20
MODEL = ("vision", "prefix", "step")
WANTED = {"as they come": 6.0, "resized on arrival": 1.5}


def policy_of_full_size() -> tuple[Policy, synthetic.Requests]:
    """pi0.5 behind the bench robot with three cameras and the longest prompt."""
    asked = BenchOptions(model="pi05", device="cuda")
    config = model_config(asked)
    model = gpu_model.full_size(msgspec.convert({"variant": config.family, **config.options}, PiOptions))
    graphs = Graphs(model, shapes=model.captured_shapes((1,))[:1])
    adapter = Adapter(robot_config(asked, config), config, model.spec)
    runner = Runner(model, (1,), graphs=graphs)
    requests = synthetic.requests(adapter, seed=0, prompt_tokens=config.prompt.max_tokens)
    return Policy(adapter, runner, "random weights"), requests


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


def spent(policy: Policy, requests: list[Request], n: int) -> list[dict[str, float]]:
    """ms of each part of n calls, and their whole."""
    watch, results, run, runs = Stopwatch(), [], policy.runner.run, []

    def kept(rows: Any) -> Any:
        results[:] = run(rows)
        return results

    with (
        watch.around("images", images, "planes"),
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    chosen = options(parser)
    where = gpu_model.gpu_or_leave()
    policy, series = policy_of_full_size()
    raw = [series(i) for i in range(4)]
    size = policy.spec.inputs["images"].shape[-1]
    small = [on_arrival(request, size) for request in raw]
    one, other = (policy.infer([request])[0] for request in (raw[0], small[0]))
    same = np.array_equal(one.actions, other.actions)
    found = {"as they come": spent(policy, raw, chosen.n), "resized on arrival": spent(policy, small, chosen.n)}
    names = list(next(iter(found.values()))[0])
    rows = [
        (name, *(f"{statistics.median(run[name] for run in runs):.3f}" for runs in found.values())) for name in names
    ]
    rows.append(("overhead, spread", *(percentiles([run["overhead"] for run in runs]) for runs in found.values())))
    rows.append(("overhead wanted", *(f"<= {WANTED[name]}" for name in found)))
    what = f"pi0.5, three 640x480 cameras, medians of {chosen.n} in ms, same actions: {same}"
    title = f"gpu: beside the model, {what}, {where}"
    show(title, ("part", *found), rows, log=chosen.log)
    held = all(statistics.median(run["overhead"] for run in runs) <= WANTED[name] for name, runs in found.items())
    return 0 if held and same else 1


if __name__ == "__main__":
    sys.exit(main())
