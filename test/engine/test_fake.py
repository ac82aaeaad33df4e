"""The fake model: exact flow, smooth motion that goes on where it was left, latency and faults."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import ModelConfig, load_model, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.models.fake import DETOUR_ROWS, FakeModel, FakeOptions
from phyai_engine.rtc import Guidance, gain_table, prefix_weights
from phyai_engine.runner import RowResult, Runner
from phyai_engine.types import F32, CancelToken, Row

POSITIONS = np.array([0.3, -0.2, 0.0, 0.0, 0.05], dtype=np.float32)


def row(spec: Any, anchor: F32, seed: int = 0, **changes: Any) -> Row:
    shape = (spec.horizon, spec.action_dim)
    values: dict[str, Any] = {
        "inputs": {"anchor": anchor},
        "target": np.zeros(shape, np.float32),
        "weight": np.zeros(shape, np.float32),
        "gain": np.zeros(len(spec.times), np.float32),
        "seed": seed,
    }
    return Row(**{**values, **changes})


def run(options: FakeOptions, anchor: F32, seed: int = 0) -> F32:
    model = FakeModel(options)
    actions = Runner(model).run([row(model.spec, anchor, seed)])[0].actions
    assert actions is not None
    return actions


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_sampling_arrives_at_the_target_from_any_noise(steps: int) -> None:
    options = FakeOptions(num_steps=steps, action_dim=5)
    first, second = run(options, POSITIONS, seed=1), run(options, POSITIONS, seed=2)
    np.testing.assert_allclose(first, second, atol=1e-6)
    np.testing.assert_allclose(first[0], POSITIONS, atol=1e-6)


def test_motion_is_slow_from_any_start_and_ends_on_the_circle() -> None:
    options = FakeOptions(horizon=1000, action_dim=5, amplitude=0.1, period_steps=200)
    path = run(options, POSITIONS)
    pace = 2 * np.pi * 0.1 / 200
    assert np.abs(np.diff(path, axis=0)).max() <= 1.01 * pace + 1e-6
    for pair in (path[:, 0:2], path[:, 2:4]):  # from far outside, and from the very middle
        np.testing.assert_allclose(np.hypot(*pair[-200:].T), 0.1, atol=1e-4)
        np.testing.assert_allclose(pair[-1], pair[-201], atol=1e-3)  # one period
    np.testing.assert_allclose(path[:, 4], POSITIONS[4], atol=1e-6)  # the odd one out


def test_the_next_chunk_goes_on_where_the_last_was_left() -> None:
    options = FakeOptions(horizon=40, action_dim=5)
    first = run(options, POSITIONS)
    second = run(options, first[15])
    np.testing.assert_allclose(second[:25], first[15:], atol=1e-5)


def test_rates_and_deltas_swing_around_zero() -> None:
    motion = run(FakeOptions(horizon=16, action_dim=2, amplitude=0.1), np.full(2, np.nan, np.float32))
    assert np.abs(motion).max() == pytest.approx(0.1)
    np.testing.assert_allclose(motion[:8].sum(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(motion[0], 0, atol=1e-6)


def test_guidance_pulls_the_frozen_rows_to_the_committed_actions() -> None:
    model = FakeModel(FakeOptions(action_dim=5, num_steps=10))
    anchor = POSITIONS
    plain = run(model.options, anchor)
    target = plain + np.float32(0.2)
    weight = np.repeat(prefix_weights(16, 4, 10)[:, None], 5, axis=1)
    guided = row(model.spec, anchor, target=target, weight=weight, gain=gain_table(model.spec.times, 10.0))
    actions = Runner(model).run([guided])[0].actions
    assert actions is not None
    error = np.abs(actions - target).max(axis=1)
    assert error[:4].max() <= 0.2 * 0.1  # the last step's gain is 9.11 of 10
    assert (np.diff(error[3:10]) > 0).all()
    np.testing.assert_allclose(actions[10:], plain[10:], atol=1e-6)


@pytest.mark.parametrize("text", ["vjp", "trained"])
def test_the_other_modes_act_as_on_a_real_model(text: str) -> None:
    """``trained`` keeps the first d rows; the flow's true gradient at its target is 0, so ``vjp`` pulls nothing."""
    model, guidance = FakeModel(FakeOptions(action_dim=5, num_steps=10)), Guidance.parse(text, max_delay=6)
    plain = run(model.options, POSITIONS)
    target, weight = plain + np.float32(0.2), np.ones((16, 5), np.float32)
    asked = row(model.spec, POSITIONS, target=target, weight=weight, gain=gain_table(model.spec.times, 10.0))
    actions = Runner(model, guidance=guidance).run([replace(asked, delay_steps=4)])[0].actions
    assert actions is not None
    kept = 4 if text == "trained" else 0
    np.testing.assert_array_equal(actions[:kept], target[:kept])
    np.testing.assert_allclose(actions[kept:], plain[kept:], atol=1e-5)


def test_the_rows_of_a_batch_do_not_mix() -> None:
    model = FakeModel(FakeOptions(action_dim=5))
    anchors = [POSITIONS, -POSITIONS, np.full(5, np.nan, np.float32)]
    results = Runner(model).run([row(model.spec, anchor, seed=i) for i, anchor in enumerate(anchors)])
    for i, (anchor, result) in enumerate(zip(anchors, results, strict=True)):
        np.testing.assert_array_equal(result.actions, run(model.options, anchor, seed=i))


@pytest.mark.parametrize("busy", [False, True])
def test_latency(busy: bool) -> None:
    started = time.perf_counter()
    run(FakeOptions(action_dim=5, latency_ms=60, busy=busy), POSITIONS)
    assert 0.055 <= time.perf_counter() - started <= 0.5


def test_cancelling_takes_effect_between_steps() -> None:
    model = FakeModel(FakeOptions(action_dim=5, num_steps=10, latency_ms=1100))
    cancel = CancelToken()
    results: list[RowResult] = []
    thread = threading.Thread(
        target=lambda: results.extend(Runner(model).run([row(model.spec, POSITIONS, cancel=cancel)]))
    )
    thread.start()
    time.sleep(0.15)
    cancel.cancel()
    started = time.perf_counter()
    thread.join(timeout=5)
    assert time.perf_counter() - started <= 0.6  # a step is 0.1 s, the rest of the run 0.95 s
    assert results[0].cancelled
    assert results[0].actions is None


def test_a_detour_goes_to_one_side_or_the_other_and_held_rows_sway_it() -> None:
    model = FakeModel(FakeOptions(horizon=32, action_dim=5, num_steps=10, detour=0.05))
    path = run(FakeOptions(horizon=32, action_dim=5), POSITIONS)
    shape = np.minimum(np.arange(32) / DETOUR_ROWS, 1.0)[:, None]
    sides = []
    for seed in range(20):
        away = (run(model.options, POSITIONS, seed) - path) / 0.05
        sides.append(float(away[-1, 0]))
        np.testing.assert_allclose(away, sides[-1] * np.broadcast_to(shape, away.shape), atol=1e-3)
    assert np.min(np.abs(sides)) > 0.95 and 4 <= np.sum(np.array(sides) > 0) <= 16
    weight = np.repeat(prefix_weights(32, 10, 20)[:, None], 5, axis=1)
    for side in (1.0, -1.0):
        target = (path + side * 0.05 * shape).astype(np.float32)
        held = [
            row(model.spec, POSITIONS, seed, target=target, weight=weight, gain=gain_table(model.spec.times, 10.0))
            for seed in range(8)
        ]
        ends = np.stack([result.actions[-1] for result in Runner(model).run(held)])  # type: ignore[index]
        assert np.mean((ends - path[-1])[:, 0] * side > 0.04) >= 0.75  # free rows follow the held ones


def test_a_delta_takes_no_detour() -> None:
    still = np.full(2, np.nan, np.float32)
    np.testing.assert_array_equal(
        run(FakeOptions(action_dim=2, detour=0.1), still, 1), run(FakeOptions(action_dim=2), still, 1)
    )


def test_latency_varies_by_the_number_of_the_run_alone() -> None:
    options = FakeOptions(action_dim=5, latency_ms=10, latency_spread_ms=20, slow_every=4, slow_ms=500, grace_runs=2)

    def latencies() -> list[float]:
        model, found = FakeModel(options), []
        for _ in range(10):
            model._runs += 1
            found.append(model._latency_ms(1))
        return found

    first = latencies()
    assert first == latencies()
    slow = [i for i, latency in enumerate(first) if latency > 500]
    assert slow == [5, 9]  # the fourth and the eighth after the grace runs
    quick = [latency for latency in first if latency < 500]
    assert min(quick) >= 10 and max(quick) <= 30 and np.ptp(quick) > 5


# --- faults ---


def test_nan_in_one_row_of_the_chunk() -> None:
    actions = run(FakeOptions(action_dim=5, nan_at=3), POSITIONS)
    assert np.isnan(actions[3]).all()
    assert np.isfinite(np.delete(actions, 3, axis=0)).all()


def test_every_third_run_fails_after_the_grace_runs() -> None:
    model = FakeModel(FakeOptions(action_dim=5, fail_every=3, grace_runs=4))
    failed = []
    for _ in range(10):
        try:
            model.prefix({"anchor": POSITIONS[None]})
            failed.append(False)
        except RuntimeError:
            failed.append(True)
    assert failed == [False] * 6 + [True] + [False] * 2 + [True]


def in_a_process(options: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    code = f"""
import numpy as np
from phyai_engine.models.fake import FakeModel, FakeOptions
model = FakeModel(FakeOptions(action_dim=2, {options}))
for i in range(3):
    model.prefix({{"anchor": np.zeros((1, 2), np.float32)}})
    print(i, flush=True)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_process_ends_at_the_second_run() -> None:
    ended = in_a_process("crash_on_request=2", 30)
    assert (ended.returncode, ended.stdout) == (13, "0\n")


def test_the_second_run_never_returns() -> None:
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        in_a_process("hang_on_request=2", 2.0)
    assert caught.value.stdout == b"0\n"


def test_it_holds_the_interpreter_lock() -> None:
    model = FakeModel(FakeOptions(action_dim=5, gil_hold_s=0.3))
    ended, turns = threading.Event(), []
    other = threading.Thread(target=lambda: [turns.append(time.monotonic()) for _ in iter(ended.is_set, True)])
    other.start()
    model.prefix({"anchor": POSITIONS[None]})
    ended.set()
    other.join(5.0)
    assert max(np.diff(turns)) > 0.25


def test_it_floods_both_streams() -> None:
    ended = in_a_process("flood_log_mb=1, grace_runs=1", 30)
    assert ended.stderr.count("floods its log") == ended.stdout.count("floods its log") == 2 * (1_000_000 // 128)


def test_it_runs_out_of_memory_and_goes_on_with_little() -> None:
    code = """
import numpy as np
from phyai_engine.models.fake import FakeModel, FakeOptions
model = FakeModel(FakeOptions(action_dim=2, oom_on_request=2))
for _ in range(3):
    try:
        model.prefix({"anchor": np.zeros((1, 2), np.float32)})
        print("ran")
    except MemoryError:
        print("no memory")
try:
    bytearray(64 << 20)
except MemoryError:
    print("never much again")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.splitlines() == ["ran", "no memory", "ran", "never much again"]


# --- options ---


def test_unknown_options_and_checkpoints_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'latency'.*options.*Did you mean 'latency_ms'"):
        FakeModel.load(ModelConfig(family="fake", options={"latency": 3}))
    with pytest.raises(ConfigError, match=r"nan_at is 16, beyond the horizon of 16"):
        FakeModel.load(ModelConfig(family="fake", options={"nan_at": 16}))
    with pytest.raises(ConfigError, match=r"no weights, got weights/x"):
        FakeModel.load(ModelConfig(family="fake", checkpoint="weights/x"))


def test_the_shipped_file_loads() -> None:
    model = FakeModel.load(load_model(resolve("models", "fake")))
    assert model.spec.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    assert model.spec.inputs["images"].shape == (2, 3, 64, 64)
