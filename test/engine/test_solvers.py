"""Time grids and the Euler step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phyai_engine.solvers import euler_step, flow_times


def test_accumulated_times_are_rounded_to_fp32_after_every_step() -> None:
    t, wanted = torch.tensor(1.0), []
    for _ in range(10):
        wanted.append(t.item())
        t = t + torch.tensor(-0.1)
    assert flow_times(10, "accumulate") == tuple(wanted)
    assert flow_times(10, "accumulate") != flow_times(10, "direct")


@pytest.mark.parametrize("rule", ["accumulate", "direct"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
def test_every_step_has_a_time_from_one_downwards(rule: str, steps: int) -> None:
    times = flow_times(steps, rule)  # type: ignore[arg-type]
    assert len(times) == steps
    np.testing.assert_allclose(times, 1.0 - np.arange(steps) / steps, atol=1e-6)
    assert all(float(np.float32(t)) == t for t in times)


def test_no_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        flow_times(0, "direct")


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_euler_follows_its_closed_form_on_a_linear_field(steps: int) -> None:
    start = np.array([[[1.0, -2.0]]], dtype=np.float32)
    x = start
    for _ in range(steps):
        x = euler_step(x, 0.5 * x, steps)
    np.testing.assert_allclose(x, start * (1.0 - 0.5 / steps) ** steps, rtol=1e-6)
    assert x.dtype == np.float32


def test_numpy_and_torch_take_the_same_step() -> None:
    generator = np.random.default_rng(0)
    x, v = generator.standard_normal((2, 1, 5, 3)).astype(np.float32)
    ours = euler_step(torch.from_numpy(x), torch.from_numpy(v), 7).numpy()
    np.testing.assert_array_equal(ours, euler_step(x, v, 7))
