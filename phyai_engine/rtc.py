"""Real-time chunking in the solver: weights of the committed actions, gains, and the guided velocity.

t = 1 is noise and t = 0 data, u = noise - action (the checkpoint's direction); tau = 1 - t is the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phyai_engine.types import F32

WeightKind = Literal["exp", "linear", "ones", "zeros"]


def prefix_weights(horizon: int, start: int, end: int, kind: WeightKind = "exp") -> F32:
    """How firmly each step of the new chunk follows the committed actions, W.

    :param horizon: H. :param start: d, steps that are executed before the handoff: weight 1.
    :param end: H - s, steps that have a target: weight 0 from here on; a later ``start`` is moved down to it.
    :param kind: decay over [start, end): ``linear`` c, ``exp`` c(e^c - 1)/(e - 1), ``ones``, ``zeros``.
    :return: [H] float32
    """
    if start < 0 or not 0 <= end <= horizon:
        raise ValueError(f"start={start}, end={end}, horizon={horizon}: wanted 0 <= start and 0 <= end <= horizon")
    start = min(start, end)
    index = np.arange(horizon)
    c = np.clip((end - index) / (end - start + 1), 0.0, 1.0)
    shapes: dict[str, NDArray[np.float64]] = {
        "exp": c * np.expm1(c) / (math.e - 1.0),
        "linear": c,
        "ones": (index < end).astype(np.float64),
        "zeros": (index < start).astype(np.float64),
    }
    if kind not in shapes:
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(shapes)}")
    return shapes[kind].astype(np.float32)


def gain_table(times: Sequence[float], beta: float, sigma: float = 1.0) -> F32:
    """Guidance gain of every step: k = min(beta, (s^2 tau^2 + (1-tau)^2) / (s^2 tau (1-tau))).

    :param times: flow times t. :param beta: upper bound, reached at tau = 0 and tau = 1 where k is infinite.
    :param sigma: prior standard deviation s of the actions; 1 is the paper's.
    :return: [N] float32
    """
    tau = 1.0 - np.asarray(times, dtype=np.float64)
    over = sigma**2 * tau**2 + (1.0 - tau) ** 2
    under = sigma**2 * tau * (1.0 - tau)
    inside = under > 0.0  # explicit: the ends would divide by 0
    gain = np.full(tau.shape, float(beta))
    gain[inside] = np.minimum(beta, over[inside] / under[inside])
    return gain.astype(np.float32)


def guide_identity(x: Any, u: Any, t: float, *, target: Any, weight: Any, gain: Any) -> Any:
    """Velocity pulled towards the target; the denoiser's Jacobian is taken as the identity: no backward pass.

    u' = u - k W (Y - x0), x0 = x - t u. Where k W = 0 and all values are finite the result equals u exactly.

    :param x, u, target, weight: [B, H, A]. :param gain: [B, 1, 1], k of each row. numpy or torch, fp32.
    """
    return u - gain * weight * (target - (x - t * u))
