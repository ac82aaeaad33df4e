"""Clocks, windows and the roofline of the control loop.

Durations come from CLOCK_MONOTONIC only. A message stamp becomes monotonic once, at receipt, by a
:class:`ClockOffset` sampled there; where simulated time does not run at rate 1 that is meaningless, which
:class:`SimRate` says with a reason.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from phyai_engine.errors import ConfigError

_NS = 1_000_000_000


def mono_ns() -> int:
    """CLOCK_MONOTONIC of this host [ns]."""
    return time.monotonic_ns()


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """ROS time and monotonic time of one instant.

    :param ros_ns: ROS time. :param mono_ns: monotonic time of the same instant.
    :param error_ns: half the time the pair took to read: ``mono_ns`` is at most this far off.
    """

    ros_ns: int
    mono_ns: int
    error_ns: int

    @staticmethod
    def sample(
        ros_now_ns: Callable[[], int], mono: Callable[[], int] = time.monotonic_ns, tries: int = 3
    ) -> ClockOffset:
        """Read the clocks back to back, ``tries`` times; the tightest pair wins (a preempted one is wide)."""
        best: ClockOffset | None = None
        for _ in range(max(1, tries)):
            before = mono()
            ros = ros_now_ns()
            gap = mono() - before
            if best is None or gap < 2 * best.error_ns:
                best = ClockOffset(ros_ns=ros, mono_ns=before + gap // 2, error_ns=(gap + 1) // 2)
        assert best is not None
        return best

    @property
    def offset_ns(self) -> int:
        """ROS time minus monotonic time."""
        return self.ros_ns - self.mono_ns


class SimRate:
    """How fast ROS time runs against monotonic time; margins are only meaningful at rate 1.

    :param simulated: the node's use_sim_time. False: always usable.
    :param span_s: monotonic time over which the rate is taken; nothing is claimed before half of it was seen.
    :param tolerance: largest accepted |rate - 1|. /clock at 100 Hz alone makes 1 % over a span of 1 s.
    """

    def __init__(self, simulated: bool, *, span_s: float = 2.0, tolerance: float = 0.05) -> None:
        self._simulated = simulated
        self._span_ns = round(span_s * _NS)
        self._tolerance = tolerance
        self._pairs: deque[tuple[int, int]] = deque(maxlen=256)

    def add(self, ros_ns: int, mono_ns: int) -> None:
        """One reading of both clocks. A ROS clock that goes back starts the estimate anew."""
        pairs = self._pairs
        if ros_ns <= 0:  # no /clock yet
            pairs.clear()
            return
        if pairs and ros_ns < pairs[-1][0]:
            pairs.clear()
        if pairs and len(pairs) == pairs.maxlen and mono_ns - pairs[0][1] < self._span_ns:
            pairs.pop()  # called too often: thin out at the end so that the span stays long enough
        pairs.append((ros_ns, mono_ns))
        while len(pairs) > 2 and mono_ns - pairs[1][1] >= self._span_ns:
            pairs.popleft()

    @property
    def rate(self) -> float:
        """ROS seconds per monotonic second; 1.0 without simulated time, NaN while unknown."""
        if not self._simulated:
            return 1.0
        if len(self._pairs) < 2:
            return math.nan
        (ros_0, mono_0), (ros_1, mono_1) = self._pairs[0], self._pairs[-1]
        seen = mono_1 - mono_0
        return (ros_1 - ros_0) / seen if 2 * seen >= self._span_ns and seen > 0 else math.nan

    @property
    def reason(self) -> str:
        """Why margins are NaN; empty when they are meaningful."""
        rate = self.rate
        if math.isnan(rate):
            return "simulated time: no /clock yet" if not self._pairs else "simulated time: its rate is not known yet"
        if rate == 0.0:
            return "simulated time is paused"
        if abs(rate - 1.0) > self._tolerance:
            return f"simulated time runs at {rate:.2f} x real time, margins need rate 1"
        return ""

    @property
    def usable(self) -> bool:
        """True when durations between stamps equal durations of this host's clock."""
        return not self.reason


Outcome = Literal["accepted", "refused", "cancelled", "engine_error"]


class Timing(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One handoff or rejection, in the names of design.md section 7: ChunkTiming.msg without its header.

    Durations in seconds of one monotonic clock, NaN = not measured.

    :param refusal: lower-case name of the refusal code, "none" unless refused. :param text: the reason in words.
    :param fallback: of the request, see :class:`phyai_engine.handoff.Fallback`; empty: as configured.
    """

    epoch: int
    chunk_id: int
    outcome: Outcome
    refusal: str = "none"
    text: str = ""
    fallback: str = ""
    l_observe_s: float = math.nan
    l_transfer_s: float = math.nan
    l_serialise_s: float = math.nan
    l_network_s: float = math.nan
    l_queue_s: float = math.nan
    l_batch_s: float = math.nan
    l_inference_s: float = math.nan
    l_actuate_s: float = math.nan
    l_critical_s: float = math.nan
    l_env_s: float = math.nan
    m_ctrl_s: float = math.nan
    m_cond_s: float = math.nan
    m_exhaust_s: float = math.nan
    delay_predicted_steps: int = 0
    delay_steps: int = 0
    execution_steps: int = 0
    hold_steps: int = 0
    age_s: float = math.nan
    age_last_s: float = math.nan
    jump: float = math.nan
    jump_ratio: float = math.nan
    jerk: float = math.nan
    frozen_error: float = math.nan


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Figures of one window; all NaN when ``n`` is 0. Linear interpolation between order statistics."""

    n: int
    min: float
    p01: float
    p50: float
    p95: float
    p99: float
    max: float


class Window:
    """The newest ``size`` finite values. The caller leaves warm-up out."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError("a window needs room", got=size, wanted=">= 1 values")
        self._values: deque[float] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Append one value. NaN (not measured) and infinity are left out: ``n`` counts measurements."""
        if math.isfinite(value):
            self._values.append(value)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    def percentiles(self) -> Percentiles:
        """n, min, p01, p50, p95, p99 and max."""
        if not self._values:
            return Percentiles(0, *(math.nan,) * 6)
        figures = np.percentile(np.array(self._values), (0, 1, 50, 95, 99, 100))
        return Percentiles(len(self._values), *(float(f) for f in figures))


class TickMeter:
    """Jitter of a periodic tick: |period - dt| in seconds.

    :param dt_s: nominal period. :param size: ticks in the window.
    """

    def __init__(self, dt_s: float, size: int = 1024) -> None:
        self._dt_s = dt_s
        self._jitter = Window(size)
        self._last_mono_ns: int | None = None

    def tick(self, now_mono_ns: int) -> None:
        """One tick began now."""
        if self._last_mono_ns is not None:
            self._jitter.add(abs((now_mono_ns - self._last_mono_ns) * 1e-9 - self._dt_s))
        self._last_mono_ns = now_mono_ns

    def reset(self) -> None:
        """The tick was stopped on purpose: the pause is no jitter, and old figures no longer describe it."""
        self._jitter.clear()
        self._last_mono_ns = None

    def jitter(self) -> Percentiles:
        """Percentiles of the jitter [s]."""
        return self._jitter.percentiles()


@dataclass(frozen=True, slots=True)
class Roofline:
    """Where the loop stands; the names are those of the timing model.

    :param x: L_env / L_inference. :param x_crit: L_env / L_critical.
    :param y_seq: X / (1 + X), the bound of a sequential loop.
    :param y_overlap: min(1, X), the bound of an overlapped one.
    :param y: L_env / L_control, what the loop reaches with its whole critical path.
    """

    x: float
    y_seq: float
    y_overlap: float
    x_crit: float
    y: float


def roofline(l_env_s: float, l_inference_s: float, l_critical_s: float, *, overlap: bool = True) -> Roofline:
    """Place one configuration on the roofline. NaN in, NaN out.

    :param l_env_s: execution time of the steps between two handoffs.
    :param overlap: L_control is max(L_critical, L_env) (chunks overlap inference), else their sum.
    :raises ConfigError: a duration is not positive.
    """
    for name, value in (
        ("l_env_s", l_env_s),
        ("l_inference_s", l_inference_s),
        ("l_critical_s", l_critical_s),
    ):
        if value <= 0:
            raise ConfigError("a duration must be positive", got=value, wanted="> 0 s", where=name)
    x = l_env_s / l_inference_s
    l_control_s = np.maximum(l_critical_s, l_env_s) if overlap else l_critical_s + l_env_s
    return Roofline(
        x=x,
        y_seq=x / (1 + x),
        y_overlap=float(np.minimum(1.0, x)),
        x_crit=l_env_s / l_critical_s,
        y=float(l_env_s / l_control_s),
    )


def miss_upper95(misses: int, n: int) -> float:
    """One-sided upper 95 % bound of a miss rate (Clopper and Pearson, Biometrika 26, 1934).

    The p at which at most ``misses`` of ``n`` have probability 5 %; about 3/n for none of n, 1.0 for n = 0.

    :raises ConfigError: misses outside 0..n.
    """
    if not 0 <= misses <= n:
        raise ConfigError("misses are out of range", got=misses, wanted=f"0..{n}")
    if misses == n:
        return 1.0
    low, high = misses / n, 1.0
    for _ in range(64):  # halves to below one unit in the last place
        p = (low + high) / 2
        if _beta_cdf(misses + 1, n - misses, p) < 0.95:
            low = p
        else:
            high = p
    return (low + high) / 2


def _beta_cdf(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) = P(Binomial(a + b - 1, x) >= a) for whole a and b."""
    if x <= 0.0 or x >= 1.0:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below the mean
        return 1.0 - _beta_cdf(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of I_x(a, b), modified Lentz method (Abramowitz and Stegun 26.5.8)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 100_000):  # about sqrt(max(a, b)) rounds are needed
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + term * d
            c = 1.0 + term / c
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value
