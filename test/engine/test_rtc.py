"""Weights, gains and identity guidance of real-time chunking."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from phyai_engine.rtc import gain_table, guide_identity, prefix_weights
from phyai_engine.solvers import flow_times


def test_linear_weights_of_the_published_example() -> None:
    weights = prefix_weights(10, start=2, end=6, kind="linear")
    np.testing.assert_allclose(weights, [1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0], atol=1e-7)
    assert weights.dtype == np.float32


def test_exponential_weights_follow_the_linear_ones() -> None:
    c = np.array([1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0])
    wanted = c * (np.exp(c) - 1) / (math.e - 1)
    np.testing.assert_allclose(prefix_weights(10, 2, 6, "exp"), wanted, atol=1e-7)


def test_ones_and_zeros_are_the_two_hard_masks() -> None:
    assert prefix_weights(5, 1, 3, "ones").tolist() == [1, 1, 1, 0, 0]
    assert prefix_weights(5, 1, 3, "zeros").tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("kind", ["exp", "linear", "ones", "zeros"])
def test_a_delay_beyond_the_overlap_is_cut_to_it(kind: str) -> None:
    assert prefix_weights(6, 5, 3, kind).tolist() == [1, 1, 1, 0, 0, 0]  # type: ignore[arg-type]
    assert prefix_weights(6, 0, 0, kind).tolist() == [0] * 6  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 7), (0, -1)])
def test_impossible_ranges_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="wanted 0 <= start"):
        prefix_weights(6, start, end)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="one of exp, linear, ones, zeros"):
        prefix_weights(6, 1, 2, "cosine")  # type: ignore[arg-type]


def test_gains_of_ten_steps() -> None:
    wanted = [10, 9.11, 4.25, 2.76, 2.17, 2.00, 2.17, 2.76, 4.25, 9.11]
    gains = gain_table(flow_times(10, "accumulate"), beta=10.0)
    np.testing.assert_allclose(gains, wanted, atol=6e-3)
    assert gains.dtype == np.float32
    assert gain_table(flow_times(10, "direct"), beta=5.0).max() == 5.0


def test_gain_ends_are_beta_and_divide_nothing_by_zero() -> None:
    with np.errstate(all="raise"):
        assert gain_table((1.0, 0.0), beta=7.0).tolist() == [7.0, 7.0]


def test_a_narrow_prior_raises_the_gain() -> None:
    tau, sigma = 0.3, 0.2
    r2 = (1 - tau) ** 2 * sigma**2 / (sigma**2 * tau**2 + (1 - tau) ** 2)
    np.testing.assert_allclose(gain_table((0.7,), 1e6, sigma), [(1 - tau) / (tau * r2)], rtol=1e-6)


def test_both_conventions_sample_the_same_actions() -> None:
    """The guidance's sign: the paper's x += (v + k g)/N, tau upwards, is our x -= u'/N, t downwards."""
    generator = np.random.default_rng(3)
    steps, shape = 8, (2, 6, 3)
    mixing = generator.standard_normal((3, 3)) * 0.5
    target, start = generator.standard_normal((2, *shape))
    weight = prefix_weights(6, 2, 4)[:, None].astype(np.float64)
    times = tuple(1.0 - k / steps for k in range(steps))
    gains = gain_table(times, beta=5.0).astype(np.float64)

    def u_net(x: np.ndarray, t: float) -> np.ndarray:
        return np.tanh(x @ mixing + t)

    ours = paper = start
    for k, t in enumerate(times):
        guided = guide_identity(
            ours, u_net(ours, t), t, target=target, weight=weight, gain=np.full((2, 1, 1), gains[k])
        )
        ours = ours - guided / steps
        v = -u_net(paper, t)
        error = weight * (target - (paper + t * v))  # 1 - tau = t
        paper = paper + (v + gains[k] * error) / steps
    np.testing.assert_allclose(ours, paper, atol=1e-12)
    unguided = np.abs(start - target)[:, :2].mean()
    assert np.abs(ours - target)[:, :2].mean() < 0.2 * unguided  # and it pulls towards the target, not away


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_rows_without_weight_or_gain_are_untouched_bit_for_bit(kind: type) -> None:
    generator = np.random.default_rng(1)
    x, u, target = (kind(generator.standard_normal((3, 5, 4)).astype(np.float32)) for _ in range(3))
    weight = np.ones((3, 5, 4), np.float32)
    weight[0] = 0.0
    gain = np.array([9.0, 0.0, 2.0], np.float32)[:, None, None]
    guided = guide_identity(x, u, 0.7, target=target, weight=kind(weight), gain=kind(gain))
    np.testing.assert_array_equal(np.asarray(guided[:2]), np.asarray(u[:2]))
    assert np.abs(np.asarray(guided[2] - u[2])).min() > 0.0
    assert guided.dtype == u.dtype
