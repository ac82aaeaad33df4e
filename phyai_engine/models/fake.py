"""A model without weights or torch: smooth deterministic motion, a chosen latency, and faults on demand.

Its flow is exact: ``v = (x - E[actions | x]) / t``. Without ``detour`` sampling arrives at the one target from any
noise; with it at one of two, which the noise chooses, and rows that guidance holds sway the others. Cancellation acts
as on a real model. Faults count the runs since it was loaded, after ``grace_runs``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from phyai_engine.config import ModelConfig, convert
from phyai_engine.errors import ConfigError
from phyai_engine.solvers import flow_times
from phyai_engine.types import F32, F64, BufferSpec, ModelSpec

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]

DETOUR_ROWS = 4
"""Rows within which a detour is reached."""

_EXIT_CODE = 13
_SPARE_BYTES = 16 << 20
_LOG_LINE = b"the fake model floods its log, as configured (flood_log_mb) ".ljust(127, b".") + b"\n"


class FakeOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the fake model does.

    :param latency_ms: of one run, spread over the prefix and the steps. :param row_ms: added for each row of the batch
        beyond the first, padding included. :param latency_spread_ms: up to this much is
        added, evenly distributed. :param slow_every: every n-th run takes ``slow_ms`` longer.
    :param busy: spend it holding the interpreter lock instead of sleeping.
    :param amplitude: of the motion, 1 = half the normalised range.
    :param detour: a position's plan leaves the path by as much to one side or the other (same unit) within
        DETOUR_ROWS, all positions of a chunk to the same side: chunks of one scene then differ in kind.
    :param period_steps: rows of one cycle of a position. :param nan_at: row of the chunk that is NaN.
    :param fail_every: raise at every n-th run. :param crash_on_request: end the process at the n-th run.
    :param hang_on_request: never return from the n-th run. :param oom_on_request: run out of memory in the n-th run:
        the process may hold little more from then on. :param gil_hold_s: hold the interpreter lock that long in every
        run. :param flood_log_mb: megabytes written to stdout, and as many to stderr, in every run. 0 switches a fault
        off.
    :param grace_runs: first runs, such as the warm-up, in which nothing goes wrong and which are not counted.
    """

    horizon: Count = 16
    action_dim: Count = 8
    num_steps: Count = 4
    cameras: tuple[str, ...] = ()
    image_size: Count = 64
    latency_ms: Annotated[float, Meta(ge=0)] = 0.0
    row_ms: Annotated[float, Meta(ge=0)] = 0.0
    latency_spread_ms: Annotated[float, Meta(ge=0)] = 0.0
    slow_every: CountOrZero = 0
    slow_ms: Annotated[float, Meta(ge=0)] = 0.0
    busy: bool = False
    amplitude: Annotated[float, Meta(gt=0, le=0.9)] = 0.1
    period_steps: Annotated[float, Meta(ge=4)] = 200.0
    detour: Annotated[float, Meta(ge=0, le=0.1)] = 0.0
    nan_at: CountOrZero | None = None
    fail_every: CountOrZero = 0
    crash_on_request: CountOrZero = 0
    hang_on_request: CountOrZero = 0
    oom_on_request: CountOrZero = 0
    gil_hold_s: Annotated[float, Meta(ge=0, le=4000)] = 0.0
    flood_log_mb: CountOrZero = 0
    grace_runs: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.nan_at is not None and self.nan_at >= self.horizon:
            raise ValueError(f"nan_at is {self.nan_at}, beyond the horizon of {self.horizon}")


@dataclass(frozen=True, slots=True, eq=False)
class FakePrefix:
    """Where the flow ends: ``target`` [B, H, A] float32, plus or minus ``side``, likewise."""

    target: F32
    side: F32


class FakeModel:
    """See the module. Not for concurrent calls."""

    spec: ModelSpec

    def __init__(self, options: FakeOptions) -> None:
        self.options = options
        inputs = {"anchor": BufferSpec((options.action_dim,), "float32")}
        if options.cameras:
            size = options.image_size
            inputs["images"] = BufferSpec((len(options.cameras), 3, size, size), "float32")
        self.spec = ModelSpec(
            family="fake",
            horizon=options.horizon,
            action_dim=options.action_dim,
            times=flow_times(options.num_steps, "direct"),
            inputs=inputs,
            cameras=options.cameras,
        )
        self._runs = -options.grace_runs
        self._share_s = 0.0  # of this run's latency, what each call spends, its own computing included
        self._spent_s = 0.0  # monotonic time at which the next call is to be done

    @classmethod
    def load(cls, config: ModelConfig) -> FakeModel:
        """The model a file describes.

        :raises ConfigError: wrong options, or a checkpoint, which a fake model has none of.
        """
        if config.checkpoint:
            raise ConfigError("the fake model has no weights", got=config.checkpoint, where="checkpoint")
        return cls(convert(config.options, FakeOptions, where="options"))

    def to_device(self, array: NDArray[np.generic]) -> NDArray[np.generic]:
        """See :class:`phyai_engine.models.Model`."""
        return array

    def to_host(self, array: Any) -> NDArray[np.generic]:
        """See :class:`phyai_engine.models.Model`."""
        host: NDArray[np.generic] = array
        return host

    def prefix(self, inputs: Mapping[str, Any], on_phase: Callable[[str], None] = lambda _: None) -> FakePrefix:
        """Plan the motion from ``anchor`` [B, A]; the configured faults happen here."""
        on_phase("prefix")
        self._runs += 1
        self._share_s = self._latency_ms(len(inputs["anchor"])) / 1e3 / (self.options.num_steps + 1)
        self._spent_s = time.monotonic()
        if self._runs > 0:
            self._go_wrong()
        self._spend()
        anchors = inputs["anchor"]
        rows = np.arange(self.options.horizon, dtype=np.float32)[None, :, None]
        reached = np.float32(self.options.detour) * np.minimum(rows / DETOUR_ROWS, 1.0)
        side = (reached * np.isfinite(anchors)[:, None, :]).astype(np.float32)
        return FakePrefix(np.stack([self._motion(anchor) for anchor in anchors]), side)

    def velocity(self, prefix: FakePrefix, x: F32, step: int, clean: NDArray[np.bool_] | None = None) -> F32:
        """(x - E[actions | x]) / t. :param x: [B, H, A] float32. :param clean: no effect: no token sees another."""
        self._spend()
        v: F32 = (x - self._expected(prefix, x, step)) / np.float32(self.spec.times[step])
        if self.options.nan_at is not None and self._runs > 0:
            v[:, self.options.nan_at] = np.nan
        return v

    def velocity_vjp(self, prefix: FakePrefix, x: F32, step: int) -> tuple[F32, Callable[[F32], F32]]:
        """The Jacobian is (I - dE/dx) / t. Without a detour E does not depend on x, and guided along it nothing is
        pulled: the flow ends at its target from anywhere.
        """
        t = np.float32(self.spec.times[step])
        slope = self._slope(prefix, x, step)

        def pull(error: F32) -> F32:
            along = (error * prefix.side).sum(axis=(1, 2), keepdims=True)
            pulled: F32 = (error - slope * along * prefix.side) / t
            return pulled

        return self.velocity(prefix, x, step), pull

    def _expected(self, prefix: FakePrefix, x: F32, step: int) -> F32:
        """[B, H, A]: mean of the two ends, weighed by how likely each is given x = t noise + (1 - t) actions."""
        if not self.options.detour:
            return prefix.target
        expected: F32 = prefix.target + prefix.side * np.tanh(self._odds(prefix, x, step)).astype(np.float32)
        return expected

    def _odds(self, prefix: FakePrefix, x: F32, step: int) -> F64:
        """[B, 1, 1]: half their logarithm."""
        t = self.spec.times[step]
        away = (x - (1.0 - t) * prefix.target) * prefix.side
        odds: F64 = (1.0 - t) / t**2 * away.sum(axis=(1, 2), keepdims=True, dtype=np.float64)
        return odds

    def _slope(self, prefix: FakePrefix, x: F32, step: int) -> F32:
        """[B, 1, 1]: of tanh over the sum of x along the side."""
        t = self.spec.times[step]
        slope = (1.0 - t) / t**2 * (1.0 - np.tanh(self._odds(prefix, x, step)) ** 2)
        return slope.astype(np.float32)

    def _motion(self, anchor: F32) -> F32:
        """[A] -> [H, A], row 0 where the robot is.

        Where an action commands a position, positions are taken in pairs. Each pair approaches a circle of
        radius ``amplitude`` around the middle of its ranges and runs round it, by about
        ``2 pi amplitude / period_steps`` a row. The path depends on the measured position alone, so that the
        next chunk goes on where the last one was left, in the same sense. An odd position out does not move.
        Rates and deltas, which have no anchor, swing twice per chunk around 0.
        """
        o = self.options
        swing = o.amplitude * np.sin(4 * np.pi / o.horizon * np.arange(o.horizon))
        motion = np.repeat(swing[:, None], o.action_dim, axis=1)
        positions = np.flatnonzero(np.isfinite(anchor))
        motion[:, positions] = anchor[positions]
        pairs = positions[: len(positions) // 2 * 2].reshape(-1, 2)
        first, second = anchor[pairs].astype(np.float64).T
        radius, angle = np.hypot(first, second), np.arctan2(second, first)
        pace = 2 * np.pi * o.amplitude / o.period_steps
        for row in range(1, o.horizon):
            outwards = np.clip(o.amplitude - radius, -pace, pace)
            radius = radius + outwards
            angle = angle + np.sqrt(pace**2 - outwards**2) / np.maximum(radius, o.amplitude)
            motion[row, pairs] = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
        return motion.astype(np.float32)

    def _go_wrong(self) -> None:
        o = self.options
        if o.flood_log_mb:
            for stream in (1, 2):
                _write(stream, _LOG_LINE * (o.flood_log_mb * 1_000_000 // len(_LOG_LINE)))
        if o.gil_hold_s:  # PyDLL keeps the lock during the call
            ctypes.PyDLL(None).usleep(int(o.gil_hold_s * 1e6))
        if self._runs == o.crash_on_request:
            os._exit(_EXIT_CODE)
        if self._runs == o.oom_on_request:
            _exhaust_memory()
        while self._runs == o.hang_on_request:
            time.sleep(0.05)
        if o.fail_every and self._runs % o.fail_every == 0:
            raise RuntimeError(f"the fake model fails at run {self._runs}, as configured (fail_every)")

    def _latency_ms(self, rows: int) -> float:
        """This run's, equal in every process: it depends on the number of the run and its rows alone."""
        o = self.options
        latency_ms = o.latency_ms + o.row_ms * (rows - 1)
        if o.latency_spread_ms:
            latency_ms += o.latency_spread_ms * np.random.Generator(np.random.Philox(key=self._runs % 2**64)).random()
        slow = o.slow_every and self._runs > 0 and self._runs % o.slow_every == 0
        return latency_ms + o.slow_ms if slow else latency_ms

    def _spend(self) -> None:
        """This call's share of the latency."""
        self._spent_s += self._share_s
        if not self.options.busy:
            time.sleep(max(0.0, self._spent_s - time.monotonic()))
            return
        while time.monotonic() < self._spent_s:
            pass


def _write(stream: int, block: bytes) -> None:
    while block:
        block = block[os.write(stream, block) :]


def _exhaust_memory() -> None:
    """:raises MemoryError: always, once the few MiB that this process may still have are used up."""
    used_bytes = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _SPARE_BYTES, hard))
    blocks = []
    while True:
        blocks.append(bytearray(1 << 20))
