"""Start noise: a pure function of (seed, element index), made on the host.

The same request therefore gets the same noise on every device, batch slot and replica. Philox's raw words
are a fixed, documented sequence; the Box-Muller transform below is ours because numpy does not promise that
its own normal sampler keeps its stream between versions, and that sampler takes a varying number of words
per value.
"""

from __future__ import annotations

import numpy as np

from phyai_engine.types import F32

_SEED_MASK = (1 << 64) - 1


def standard_normal(seed: int, horizon: int, action_dim: int) -> F32:
    """N(0, 1) noise of one row.

    Elements 2i and 2i+1 in row-major order come from Philox words 2i and 2i+1 of key ``seed``: more rows
    extend the array without changing the earlier ones.

    :param seed: any integer; its low 64 bits are the key. :return: [horizon, action_dim] float32
    """
    count = horizon * action_dim
    pairs = (count + 1) // 2
    words = np.random.Philox(key=seed & _SEED_MASK).random_raw(2 * pairs).reshape(pairs, 2)
    # The upper 53 bits, in (0, 1]: never 0, so that the logarithm stays finite.
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(uniform[:, 0]))
    angle = 2.0 * np.pi * uniform[:, 1]
    normal = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return normal.reshape(-1)[:count].reshape(horizon, action_dim).astype(np.float32)
