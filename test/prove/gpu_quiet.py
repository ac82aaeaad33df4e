"""How soon a cancelled chunk leaves the GPU quiet, and what a graph each step costs.

1. T_quiet: from the cancellation, at a random moment of the chunk, until the device has nothing left to do; each step a
   graph of its own (the product), and all steps as one graph, which cannot be left.
2. The whole chunk both ways, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import gpu_model
import numpy as np
import torch
from evidence import options, show
from gpu_model import interleaved, percentiles, row

from phyai_engine.graphs import CapturedShape, Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.rtc import PLAIN
from phyai_engine.runner import Runner
from phyai_engine.types import CancelToken, Row

LONGEST = 1.02  # of the median of one graph for all steps


class OneGraph(CapturedShape):
    """All steps as one graph, beside the product's own."""

    def _capture(self) -> None:
        super()._capture()
        self._reset(False)
        self._whole = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._whole, pool=self._pool):
            for step in range(len(self._model.spec.times)):
                self._advance(step, False)

    def step(self, step: int) -> tuple[Any, Any]:
        if step == 0:
            self._whole.replay()
        return self.x[False][step], self.velocity[False][step]


def runners(model: PiModel) -> dict[str, Runner]:
    """Both forms, of the largest shape."""
    shapes = model.captured_shapes((1,))[:1]
    steps = Graphs(model, guidance=PLAIN, shapes=shapes)
    whole = Graphs(model, guidance=PLAIN, shapes=[])
    whole.shapes = [OneGraph(model, shapes[0], PLAIN, pool=torch.cuda.graph_pool_handle(), replay=True)]
    named = {"a graph each step": steps, "one graph for all steps": whole}
    return {name: Runner(model, (1,), guidance=PLAIN, graphs=graphs) for name, graphs in named.items()}


def quiet(runner: Runner, request: Row, n: int, chunk_ms: float) -> list[float]:
    """[ms] of each cancellation that came in time."""
    draw, found = np.random.default_rng(0), []
    for _ in range(n):
        token, ended = CancelToken(), []
        thread = threading.Thread(
            target=lambda token=token, ended=ended: ended.append(runner.run([replace(request, cancel=token)])[0])
        )
        thread.start()
        time.sleep(draw.uniform(0.0, chunk_ms) / 1e3)
        token.cancel()
        began = time.perf_counter()
        thread.join()
        torch.cuda.synchronize()
        passed = (time.perf_counter() - began) * 1e3
        if ended[0].cancelled:
            found.append(passed)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    chosen = options(parser)
    where = gpu_model.gpu_or_leave()
    model = gpu_model.full_size(PiOptions(dtype="bfloat16"))
    request = row(model.options, 1, prompt=200)
    named = runners(model)
    actions = [runner.run([request])[0].actions for runner in named.values()]
    calls = [lambda i, runner=runner: runner.run([request]) for runner in named.values()]
    times = interleaved(calls, chosen.n)
    medians = [statistics.median(each) for each in times]
    table = []
    for (name, runner), each, median in zip(named.items(), times, medians, strict=True):
        spans = quiet(runner, request, chosen.n, median)
        ratio = f"{median / medians[1]:.4f}"
        table.append((name, percentiles(each), ratio, f"{percentiles(spans)}, n {len(spans)}"))
    same = np.array_equal(*actions)
    held = same and medians[0] <= LONGEST * medians[1]
    columns = ("steps", "ms a chunk", f"of one graph (<= {LONGEST})", "T_quiet ms")
    title = f"gpu: cancellation, pi0.5 3/200, bf16, n {chosen.n}, same bits: {same}, {where}"
    show(title, columns, table, log=chosen.log)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
