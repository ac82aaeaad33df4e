"""Counter-based start noise."""

from __future__ import annotations

import numpy as np
import pytest

from phyai_engine.noise import standard_normal


def test_values_are_frozen() -> None:
    """A recorded request must be repeatable with any later numpy: these numbers never change."""
    wanted = [[-0.14712793, 0.50211215, -1.09110105], [0.73758703, -0.73446286, -2.10764980]]
    np.testing.assert_allclose(standard_normal(7, 2, 3), wanted, rtol=1e-6)


def test_an_element_depends_on_seed_and_index_alone() -> None:
    long = standard_normal(11, 50, 7)
    np.testing.assert_array_equal(long[:13], standard_normal(11, 13, 7))  # an odd number of elements
    np.testing.assert_array_equal(long.reshape(-1)[:32], standard_normal(11, 1, 32)[0])
    np.testing.assert_array_equal(long, standard_normal(11, 50, 7))


def test_seeds_give_different_noise() -> None:
    noises = [standard_normal(seed, 4, 4) for seed in (0, 1, 2**32, 2**63, -1)]
    for i, first in enumerate(noises):
        for second in noises[i + 1 :]:
            assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("seed", [0, 5])
def test_it_is_standard_normal(seed: int) -> None:
    noise = standard_normal(seed, 500, 100).reshape(-1).astype(np.float64)
    assert noise.dtype == np.float64
    assert np.isfinite(noise).all()
    moments = [noise.mean(), noise.std(), (noise**3).mean(), (noise**4).mean()]
    np.testing.assert_allclose(moments, [0.0, 1.0, 0.0, 3.0], atol=0.08)
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.02  # cosine and sine of one pair are independent


def test_shape_and_dtype() -> None:
    noise = standard_normal(1, 3, 5)
    assert noise.shape == (3, 5)
    assert noise.dtype == np.float32
