"""How long a batch will take: measured, not assumed. No sockets, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from phyai_engine.errors import EngineError

_MEMORY = 0.98  # an observation counts half after 34 newer ones
_DOUBT = 0.5
_RESIDUALS = 64
_QUANTILE = 0.95
_WILD = 4.0  # an observation counts as at most so many times its prediction: one stall must not teach


class LatencyModel:
    """a + b * rows [ms] plus what it is usually short by, fitted to the warm-up and to every batch since.

    The warm-up's points never fade: where only one size is ever run, they keep a and b apart. They are scaled by what
    batches take against them: robots may send smaller images than the warm-up had, or its host was busy.

    :param measured: (rows, ms) of the warm-up.
    :raises EngineError: nothing was measured.
    """

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        points = [(rows, ms) for rows, ms in measured if math.isfinite(ms) and ms >= 0]
        if not points:
            raise EngineError("no batch was measured", got=list(measured), wanted="(rows, ms) of the warm-up")
        self._prior = _Sums()
        for rows, ms in points:
            self._prior.add(rows, ms)
        self._seen = _Sums()
        self._seen_prior_ms = 0.0  # what the warm-up alone predicts for all that was seen, fading like it
        self._short = deque[float](maxlen=_RESIDUALS)
        self._fit()
        self._warm_up = self.a, self.b

    def predict_ms(self, rows: int) -> float:
        """What a batch of so many rows will take, with 95 % confidence once 64 were seen."""
        return max(0.0, self.a + self.b * rows) + self.slack_ms

    def observe(self, rows: int, ms: float) -> None:
        """A batch took so long."""
        expected = max(0.0, self.a + self.b * rows)
        ms = min(ms, max(_WILD * expected, expected + 1.0))
        self._short.append(ms - expected)
        self._seen.fade(_MEMORY)
        self._seen.add(rows, ms)
        a, b = self._warm_up
        self._seen_prior_ms = _MEMORY * self._seen_prior_ms + max(0.0, a + b * rows)
        self._fit()

    def doubt(self) -> None:
        """What was seen may not hold any more: what comes next counts the more."""
        self._seen.fade(_DOUBT)
        self._seen_prior_ms *= _DOUBT
        for _ in range(len(self._short) // 2):
            self._short.popleft()
        self._fit()

    def _fit(self) -> None:
        measured_ms = self._prior.ms + self._seen_prior_ms
        scale = (self._prior.ms + self._seen.ms) / measured_ms if measured_ms else 1.0
        sums = self._prior.scaled(scale).plus(self._seen)
        spread = sums.n * sums.rows2 - sums.rows**2
        b = (sums.n * sums.product - sums.rows * sums.ms) / spread if spread > 1e-9 * sums.rows2 else 0.0
        self.b = max(0.0, b)
        self.a = (sums.ms - self.b * sums.rows) / sums.n
        ordered = sorted(self._short)
        self.slack_ms = max(0.0, ordered[int(_QUANTILE * (len(ordered) - 1))]) if ordered else 0.0


class _Sums:
    """Of a weighted least-squares line."""

    __slots__ = ("ms", "n", "product", "rows", "rows2")

    def __init__(self) -> None:
        self.n = self.rows = self.rows2 = self.ms = self.product = 0.0

    def add(self, rows: float, ms: float) -> None:
        self.n += 1.0
        self.rows += rows
        self.rows2 += rows * rows
        self.ms += ms
        self.product += rows * ms

    def fade(self, factor: float) -> None:
        for name in _Sums.__slots__:
            setattr(self, name, factor * getattr(self, name))

    def scaled(self, factor: float) -> _Sums:
        """The same with every duration times ``factor``."""
        sums = _Sums()
        for name in _Sums.__slots__:
            setattr(sums, name, getattr(self, name) * (factor if name in ("ms", "product") else 1.0))
        return sums

    def plus(self, other: _Sums) -> _Sums:
        total = _Sums()
        for name in _Sums.__slots__:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total
