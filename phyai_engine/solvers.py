"""Solvers of the flow from noise (t=1) to actions (t=0), and their time grids.

Only arithmetic operators are applied to arrays: numpy and torch both work, and torch is not imported.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

TimeRule = Literal["accumulate", "direct"]


def flow_times(steps: int, rule: TimeRule) -> tuple[float, ...]:
    """The flow time of each step, 1 first, as the fp32 value the reference feeds to the time embedding.

    The rules differ by up to 1e-7, which the fastest sinusoid turns into 1.5e-4 rad; each checkpoint family
    has one.

    :param rule: ``accumulate``: t <- fp32(t + fp32(-1/N)); ``direct``: fp32(1 - k/N).
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, wanted >= 1")
    if rule == "direct":
        return tuple(float(np.float32(1.0 + k * (-1.0 / steps))) for k in range(steps))
    times, t, dt = [], np.float32(1.0), np.float32(-1.0 / steps)
    for _ in range(steps):
        times.append(float(t))
        t = np.float32(t + dt)
    return tuple(times)


def euler_step(x: Any, velocity: Any, steps: int) -> Any:
    """One of N equal explicit Euler steps: x - v/N. :param x, velocity: [B, H, A] fp32, numpy or torch."""
    return x + (-1.0 / steps) * velocity
