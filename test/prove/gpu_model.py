"""What the proofs on a GPU share: full-size models with random weights, and requests of them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import checkout  # noqa: F401 - makes the checkout importable
import numpy as np
import torch

from phyai_engine.models.pi import PiModel, PiOptions, time_embedding
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.rtc import IDENTITY, Guidance, prefix_weights
from phyai_engine.types import CancelToken, Row
from phyai_engine.weights import pi


def full_size(options: PiOptions) -> PiModel:
    """An untrained model on the GPU. Its weights are drawn there: the product's own draw takes 40 s of one core."""
    on_gpu, normal, times = torch.Generator("cuda").manual_seed(1), torch.randn, options.spec().times

    def randn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
        return normal(tuple(shape), generator=on_gpu, device="cuda").cpu()

    table, dtype = time_embedding(times, options), getattr(torch, options.dtype)
    with mock.patch.object(pi.torch, "randn", randn):
        tensors = dict(pi.random_stream(PiModel.expected(options), 1, times, table, dtype))
    return PiModel.from_state(options, tensors, device="cuda")


def row(
    options: PiOptions,
    seed: int,
    *,
    prompt: int,
    cameras: Sequence[bool] = (True, True, True),
    delay: int | None = None,
    guidance: Guidance = IDENTITY,
    cancel: CancelToken | None = None,
) -> Row:
    """A random request. :param delay: d, with half a chunk of committed actions; None: there are none."""
    draw = np.random.default_rng(seed)
    seen, horizon = np.array(cameras), options.action_horizon
    chunk = (horizon, options.action_dim)
    image = (len(seen), *options.image.shape)
    pixels = draw.integers(0, 256, image) if options.images == "bytes" else draw.uniform(-1, 1, image)
    inputs = {
        "images": pixels.astype(options.image.dtype),
        "image_mask": seen,
        "tokens": draw.integers(0, options.vocab, options.prompt_len),
        "token_mask": np.arange(options.prompt_len) < prompt,
    }
    if options.variant == "pi0":
        inputs["state"] = draw.uniform(-1, 1, options.action_dim).astype(np.float32)
    weights = np.zeros(horizon, np.float32) if delay is None else prefix_weights(horizon, delay, horizon // 2)
    return Row(
        inputs=inputs,
        target=draw.uniform(-1, 1, chunk).astype(np.float32),
        weight=np.broadcast_to(weights[:, None], chunk).copy(),
        gain=guidance.gains(options.spec().times, beta=float(options.num_steps)),
        seed=seed,
        delay_steps=delay or 0,
        cancel=cancel or CancelToken(),
    )


def relative_l2(found: Any, wanted: Any) -> float:
    """|found - wanted| / |wanted|, in fp64; infinite where something is not finite."""
    found, wanted = (np.asarray(array, np.float64) for array in (found, wanted))
    if not (np.isfinite(found).all() and np.isfinite(wanted).all()):
        return float("inf")
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def interleaved(calls: Sequence[Callable[[int], object]], n: int, warm_up: int = 10) -> list[list[float]]:
    """ms of each call on the host's clock, taking turns, so that a change of the clock rate meets all alike.

    :param calls: given the number of the run; return when the device is done.
    """
    times: list[list[float]] = [[] for _ in calls]
    for i in range(warm_up + n):
        for call, own in zip(calls, times, strict=True):
            began = time.perf_counter()
            call(i)
            if i >= warm_up:
                own.append((time.perf_counter() - began) * 1e3)
    return times


def percentiles(times: Sequence[float]) -> str:
    """p50, p99 and the largest."""
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"p50 {statistics.median(ordered):.2f}, p99 {p99:.2f}, max {ordered[-1]:.2f}"


@torch.no_grad()
def graph_ms(call: Callable[[], Any] | None, n: int) -> float:
    """Median of n replays of a call that was captured; 0 without one."""
    return statistics.median(graph_times(call, n)) if call is not None else 0.0


@torch.no_grad()
def graph_times(call: Callable[[], Any], n: int) -> list[float]:
    """n replays of a call that was captured, in order of their time [ms]."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for i in range(5 + n):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end))
    return sorted(times)


def staged(model: PiModel, shape: BatchShape, cameras: Sequence[bool], prompt: int) -> dict[str, torch.Tensor]:
    """A request on the device, arranged in a shape."""
    inputs = row(model.options, 1, prompt=prompt, cameras=cameras).inputs
    host = {name: np.zeros(spec.shape, spec.dtype) for name, spec in model.staged(shape).items()}
    model.stage(shape, [inputs], host)
    return {name: model.to_device(array) for name, array in host.items()}


def gpu_or_leave() -> str:
    """The accelerator's name; ends the process where there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device")
        sys.exit(2)
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
