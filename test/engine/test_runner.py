"""Batching, guidance per row, and cancellation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phyai_engine.errors import EngineError
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.noise import standard_normal
from phyai_engine.rtc import gain_table, prefix_weights
from phyai_engine.runner import Runner
from phyai_engine.types import BufferSpec, ModelSpec, Row

H, A, N = 4, 3, 5


class ToyModel:
    """v = x - goal: enough to see who got whose inputs, and how often the model ran."""

    def __init__(self) -> None:
        times = tuple(1.0 - k / N for k in range(N))
        inputs = {"goal": BufferSpec((A,), "float32"), "scale": BufferSpec((), "float32")}
        self.spec = ModelSpec("toy", H, A, times, inputs, ())
        self.batches: list[int] = []
        self.steps: list[int] = []

    def to_device(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def to_host(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def prefix(self, inputs: Mapping[str, Any], on_phase: Callable[[str], None] = lambda _: None) -> Any:
        on_phase("prefix")
        self.batches.append(len(inputs["goal"]))
        return inputs["goal"][:, None, :] * inputs["scale"][:, None, None]

    def velocity(self, prefix: Any, x: Any, step: int) -> Any:
        self.steps.append(step)
        return x - prefix


def toy_row(seed: int, *, guided: bool = False) -> Row:
    goal = np.full(A, seed, np.float32)
    weight = np.zeros((H, A), np.float32)
    weight[:2] = 1.0 if guided else 0.0
    return Row(
        inputs={"goal": goal, "scale": np.array(0.1, np.float32)},
        target=np.full((H, A), 3.0, np.float32),
        weight=weight,
        gain=np.full(N, 2.0, np.float32),
        seed=seed,
    )


def actions_of(runner: Runner, rows: list[Row]) -> np.ndarray:
    results = runner.run(rows)
    assert all(not r.cancelled and r.actions is not None for r in results)
    return np.stack([r.actions for r in results if r.actions is not None])


def test_a_plain_row_is_the_euler_solution() -> None:
    actions = actions_of(Runner(ToyModel()), [toy_row(4)])[0]
    x, goal = standard_normal(4, H, A), np.float32(0.4)
    for _ in range(N):
        x = x - (x - goal) / N
    np.testing.assert_allclose(actions, x, atol=1e-6)


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_rows_are_padded_to_a_bucket_and_stay_in_order(count: int, bucket: int) -> None:
    model = ToyModel()
    rows = [toy_row(i + 1, guided=i % 2 == 0) for i in range(count)]
    together = actions_of(Runner(model), rows)
    assert model.batches == [bucket]
    assert model.steps == list(range(N))  # the prefix once, the velocity once per step
    alone = np.stack([actions_of(Runner(ToyModel()), [row])[0] for row in rows])
    np.testing.assert_array_equal(together, alone)


def test_guidance_moves_guided_rows_and_steps_only() -> None:
    plain, guided = (actions_of(Runner(ToyModel()), [toy_row(2, guided=g)])[0] for g in (False, True))
    assert np.abs(guided - 3.0)[:2].max() < np.abs(plain - 3.0)[:2].min()
    np.testing.assert_array_equal(guided[2:], plain[2:])


def test_each_row_has_its_own_gain_at_each_step() -> None:
    gains = np.array([[0.5, 1.0, 2.0, 1.5, 0.25], [2.0, 0.0, 0.5, 1.0, 3.0]], np.float32)
    rows = [replace(toy_row(i, guided=True), gain=gains[i]) for i in range(2)]
    for i, actions in enumerate(actions_of(Runner(ToyModel()), rows)):
        x, goal = standard_normal(i, H, A), np.float32(0.1 * i)
        for k in range(N):
            ahead = x - (1.0 - k / N) * (x - goal)
            x = x - (x - goal - gains[i, k] * rows[i].weight * (3.0 - ahead)) / N
        np.testing.assert_allclose(actions, x, atol=1e-5)


def test_what_stands_under_weight_zero_is_not_read() -> None:
    row = toy_row(2, guided=True)
    target = row.target.copy()
    target[2:] = np.nan
    hidden = actions_of(Runner(ToyModel()), [replace(row, target=target), toy_row(1)])
    np.testing.assert_array_equal(hidden[0], actions_of(Runner(ToyModel()), [row])[0])


def test_on_step_sees_every_step_before_its_update() -> None:
    seen: list[tuple[int, np.ndarray]] = []
    model = ToyModel()
    runner = Runner(model, on_step=lambda k, x, v: seen.append((k, x - v / N)))
    actions = actions_of(runner, [toy_row(1)])
    assert [k for k, _ in seen] == list(range(N))
    np.testing.assert_allclose(seen[-1][1], actions, atol=1e-6)


def test_a_cancelled_row_has_no_actions_and_the_others_finish() -> None:
    rows = [toy_row(1), toy_row(2), toy_row(3)]
    model = ToyModel()
    runner = Runner(model, on_step=lambda k, x, v: rows[1].cancel.cancel() if k == 1 else None)
    results = runner.run(rows)
    assert [r.cancelled for r in results] == [False, True, False]
    assert results[1].actions is None
    assert len(model.steps) == N
    np.testing.assert_array_equal(results[2].actions, actions_of(Runner(ToyModel()), [toy_row(3)])[0])


def test_the_batch_stops_once_every_real_row_is_cancelled() -> None:
    rows = [toy_row(1), toy_row(2), toy_row(3)]  # padded to 4: the fourth must not keep the batch alive
    model = ToyModel()

    def cancel(step: int, x: Any, velocity: Any) -> None:
        rows[step].cancel.cancel()

    results = Runner(model, on_step=cancel).run(rows)
    assert model.steps == [0, 1, 2]
    assert all(r.cancelled and r.actions is None for r in results)


def test_a_cancel_during_the_last_step_still_counts() -> None:
    row = toy_row(1)
    runner = Runner(ToyModel(), on_step=lambda k, x, v: row.cancel.cancel() if k == N - 1 else None)
    result = runner.run([row])[0]
    assert result.cancelled
    assert result.actions is None


def test_rows_cancelled_beforehand_run_nothing() -> None:
    row = toy_row(1)
    row.cancel.cancel()
    model = ToyModel()
    result = Runner(model).run([row])[0]
    assert result.cancelled
    assert np.isnan(result.denoise_ms)
    assert model.batches == []


def test_every_phase_is_announced_as_it_begins() -> None:
    result = Runner(ToyModel()).run([toy_row(1)])[0]
    steps = [f"step {i}" for i in range(len(ToyModel().spec.times))]
    assert list(result.phases) == ["stage", "copy_in", "prefix", *steps, "copy_out"]


class EventClock:
    """As CUDA events: every phase takes 1 ms on the device, whenever the host says it begins."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.waits = self.drops = 0

    def __call__(self, phase: str) -> None:
        self.seen.append(phase)

    def take(self) -> dict[str, float]:
        self.waits += 1
        seen, self.seen = self.seen, []
        return {phase: float(seen.count(phase)) for phase in seen[:-1]}

    def drop(self) -> None:
        self.drops += 1
        self.seen = []

    def named(self, phase: str) -> Any:
        return nullcontext()


def test_prefix_and_steps_are_told_apart_by_the_clock_and_not_by_the_hosts_calls() -> None:
    clock = EventClock()
    result = Runner(ToyModel(), clock=clock).run([toy_row(1)])[0]
    assert (result.prefix_ms, result.denoise_ms) == (3.0, N + 1.0)
    assert clock.waits == 1


def test_a_cancelled_batch_waits_for_no_clock_and_leaves_nothing_in_it() -> None:
    clock, row = EventClock(), toy_row(1)
    runner = Runner(ToyModel(), on_step=lambda k, x, v: row.cancel.cancel() if k == 1 else None, clock=clock)
    result = runner.run([row])[0]
    assert result.cancelled and clock.waits == 0
    assert np.isnan(result.prefix_ms) and np.isnan(result.denoise_ms)
    assert set(runner.run([toy_row(2)])[0].phases.values()) == {1.0}, "the cancelled run's phases are counted"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {"goal": np.zeros(A, np.float32)}}, r"wrong inputs, got \['goal'\].*scale.*row 1"),
        (
            {"inputs": {"goal": np.zeros(A + 1, np.float32), "scale": np.array(1, np.float32)}},
            r"float32 \[4\], wanted float32 \[3\], at row 1, input 'goal'",
        ),
        (
            {"inputs": {"goal": np.zeros(A, np.float64), "scale": np.array(1, np.float32)}},
            "got float64.*wanted float32",
        ),
        ({"target": np.zeros((H, A + 1), np.float32)}, "row 1, target"),
        ({"weight": np.zeros((H, 1), np.float32)}, "row 1, weight"),
        ({"gain": np.zeros(N - 1, np.float32)}, "row 1, gain"),
        ({"gain": np.full(N, np.inf, np.float32)}, "gain is not finite, at row 1"),
        ({"weight": np.full((H, A), np.nan, np.float32)}, "weight is not finite"),
        (
            {"weight": np.ones((H, A), np.float32), "target": np.full((H, A), np.nan, np.float32)},
            "target is not finite, at row 1. Give weight 0",
        ),
    ],
)
def test_a_row_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Runner(ToyModel()).run([toy_row(0), replace(toy_row(1), **change)])


@pytest.mark.parametrize("count", [0, 9])
def test_batches_of_no_bucket_are_refused(count: int) -> None:
    with pytest.raises(EngineError, match=f"got {count} rows, wanted 1 to 8"):
        Runner(ToyModel()).run([toy_row(1)] * count)


def test_a_model_that_returns_another_shape_is_named() -> None:
    model = ToyModel()
    model.to_host = lambda array: np.asarray(array)[:, :-1]  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"got float32 \[1, 3, 3\], wanted float32 \[1, 4, 3\], at model toy"):
        Runner(model).run([toy_row(1)])


def pi_row(options: PiOptions, seed: int, *, prompt: int, cameras: list[bool], guided: bool) -> Row:
    generator = np.random.default_rng(seed)
    size, chunk = options.image_size, (options.action_horizon, options.action_dim)
    inputs = {
        "images": generator.uniform(-1, 1, (len(cameras), 3, size, size)).astype(np.float32),
        "image_mask": np.array(cameras),
        "tokens": generator.integers(0, options.vocab, options.prompt_len),
        "token_mask": np.arange(options.prompt_len) < prompt,
    }
    if options.variant == "pi0":
        inputs["state"] = generator.uniform(-1, 1, options.action_dim).astype(np.float32)
    weights = prefix_weights(options.action_horizon, 2, 5)[:, None] * np.float32(guided)
    return Row(
        inputs=inputs,
        target=generator.uniform(-1, 1, chunk).astype(np.float32),
        weight=np.broadcast_to(weights, chunk).copy(),
        gain=gain_table([1.0 - k / options.num_steps for k in range(options.num_steps)], beta=5.0),
        seed=seed,
    )


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_a_mixed_batch_equals_its_rows_alone(variant: str) -> None:
    options = PiOptions(
        variant=variant,  # type: ignore[arg-type]
        vocab=64, vis_width=16, vis_depth=1, vis_mlp=32, vis_heads=2, width=32, depth=2, mlp=64, heads=4,
        kv_heads=2, head_dim=8, exp_width=24, exp_mlp=48, action_dim=5, action_horizon=8, num_steps=5,
        prompt_len=9, image_size=20, patch=4, cameras=("base", "wrist"),
    )  # fmt: skip
    runner = Runner(PiModel.random(options, seed=3))
    rows = [
        pi_row(options, 1, prompt=9, cameras=[True, True], guided=False),
        pi_row(options, 2, prompt=2, cameras=[False, True], guided=True),
        pi_row(options, 3, prompt=5, cameras=[True, False], guided=False),
        pi_row(options, 4, prompt=7, cameras=[True, True], guided=True),
    ]
    together = actions_of(runner, rows)
    alone = np.stack([actions_of(runner, [row])[0] for row in rows])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    unguided = actions_of(runner, [replace(row, weight=np.zeros_like(row.weight)) for row in rows])
    np.testing.assert_array_equal(together[[0, 2]], unguided[[0, 2]])
    assert np.abs(together - unguided)[[1, 3], :2].max(axis=(1, 2)).min() > 0.05
    assert np.abs(together[0] - together[2]).max() > 0.01


def test_the_runner_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\nfrom phyai_engine import models, noise, rtc, runner, solvers"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
