"""Solvers of the flow from noise (t=1) to actions (t=0), and their time grids.

Arrays are numpy's or torch's; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from phyai_engine.rtc import PLAIN, FlowModel, Guidance, GuidanceBuffers, guided_velocity, lock_prefix

TimeRule = Literal["accumulate", "direct"]
StepCallback = Callable[[int, Any, Any], None]


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
    scale = -1.0 / steps
    if getattr(x, "is_cuda", False):
        return x.add(velocity, alpha=scale)  # one kernel; numpy and torch's CPU round the product first
    return x + scale * velocity


def flow_step(
    model: FlowModel,
    prefix: Any,
    x: Any,
    step: int,
    times: Sequence[float],
    guidance: Guidance = PLAIN,
    buffers: GuidanceBuffers | None = None,
) -> tuple[Any, Any]:
    """One guided step, the same in a captured program as outside: what varies between requests is in ``buffers``.

    :param x: [B, H, A], as ``hold_prefix`` or the step before left it. :param times: flow time of each step.
    :return: the velocity that was applied, and x after it.
    """
    velocity = guided_velocity(model, prefix, x, step, times[step], guidance, buffers)
    return velocity, hold_prefix(euler_step(x, velocity, len(times)), guidance, buffers)


def hold_prefix(x: Any, guidance: Guidance, buffers: GuidanceBuffers | None) -> Any:
    """x with its first d actions overwritten, where the mode does that: before the first step and after each."""
    if buffers is None or not guidance.locks:
        return x
    return lock_prefix(x, buffers.target, buffers.locked)


def euler_flow(
    model: FlowModel,
    prefix: Any,
    x: Any,
    times: Sequence[float],
    guidance: Guidance = PLAIN,
    buffers: GuidanceBuffers | None = None,
    *,
    goes_on: Callable[[int], bool] = lambda _: True,
    on_step: StepCallback | None = None,
) -> Any:
    """From noise to actions.

    :param x: [B, H, A], noise. :param goes_on: asked before each step; the first False ends the flow.
    :param on_step: told (step, x before it, the velocity that was applied).
    :return: like x; None if it was ended.
    """
    x = hold_prefix(x, guidance, buffers)
    for step in range(len(times)):
        if not goes_on(step):
            return None
        velocity, after = flow_step(model, prefix, x, step, times, guidance, buffers)
        if on_step is not None:
            on_step(step, x, velocity)
        x = after
    return x
