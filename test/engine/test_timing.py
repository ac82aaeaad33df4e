"""Clocks, windows, bounds and the roofline, against exact values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest

from phyai_engine.errors import ConfigError
from phyai_engine.timing import (
    ClockOffset,
    SimRate,
    TickMeter,
    Window,
    miss_upper95,
    mono_ns,
    roofline,
)

S = 1_000_000_000
MS = 1_000_000


def reading(*values: int) -> Callable[[], int]:
    stream: Iterator[int] = iter(values)
    return lambda: next(stream)


def test_mono_ns_does_not_go_back() -> None:
    readings = [mono_ns() for _ in range(100)]
    assert readings == sorted(readings)


def test_clock_offset_takes_the_tightest_pair() -> None:
    # Three tries: gaps of 40, 4 and 20 ns around ROS readings of 1000, 2000 and 3000.
    mono = reading(100, 140, 200, 204, 300, 320)
    offset = ClockOffset.sample(reading(1000, 2000, 3000), mono, tries=3)
    assert offset == ClockOffset(ros_ns=2000, mono_ns=202, error_ns=2)
    assert offset.offset_ns == 1798


def test_clock_offset_error_covers_an_odd_gap() -> None:
    assert ClockOffset.sample(reading(10), reading(0, 5), tries=1) == ClockOffset(10, 2, 3)


def test_rate_without_simulated_time_is_always_usable() -> None:
    rate = SimRate(simulated=False)
    assert (rate.rate, rate.usable, rate.reason) == (1.0, True, "")


@pytest.mark.parametrize(
    ("speed", "usable", "words"),
    [
        (1.0, True, ""),
        (1.04, True, ""),
        (2.0, False, "runs at 2.00 x real time"),
        (0.5, False, "runs at 0.50 x real time"),
        (0.0, False, "paused"),
    ],
)
def test_sim_rate(speed: float, usable: bool, words: str) -> None:
    rate = SimRate(simulated=True, span_s=2.0)
    for i in range(31):
        rate.add(5 * S + round(i * 100 * MS * speed), 7 * S + i * 100 * MS)
    assert rate.rate == pytest.approx(speed)
    assert rate.usable is usable
    assert words in rate.reason


def test_sim_rate_needs_a_clock_and_half_the_span() -> None:
    rate = SimRate(simulated=True, span_s=2.0)
    rate.add(0, 1 * S)
    assert "no /clock" in rate.reason
    rate.add(1 * S, 1 * S)
    rate.add(1 * S + 900 * MS, 1 * S + 900 * MS)
    assert math.isnan(rate.rate)
    assert "not known yet" in rate.reason
    rate.add(2 * S, 2 * S)
    assert rate.usable


def test_sim_rate_starts_anew_after_a_backward_clock() -> None:
    rate = SimRate(simulated=True, span_s=2.0)
    for i in range(30):
        rate.add(100 * S + i * 100 * MS, i * 100 * MS)
    rate.add(1 * S, 3 * S)
    assert math.isnan(rate.rate)
    for i in range(1, 30):
        rate.add(1 * S + i * 100 * MS, 3 * S + i * 100 * MS)
    assert rate.rate == pytest.approx(1.0)


def test_sim_rate_forgets_an_old_pause_and_survives_frequent_calls() -> None:
    rate = SimRate(simulated=True, span_s=2.0)
    ros = 1 * S
    for i in range(8000):  # 1 kHz, paused for the first 4 s
        ros += MS if i > 4000 else 0
        rate.add(ros, i * MS)
    assert rate.rate == pytest.approx(1.0, abs=0.01)


def test_window_percentiles_of_1_to_101() -> None:
    window = Window(101)
    for value in [*range(1000), *range(1, 102)]:  # the first thousand fall out
        window.add(float(value))
    figures = window.percentiles()
    assert (figures.n, figures.min, figures.p01, figures.p50) == (101, 1.0, 2.0, 51.0)
    assert (figures.p95, figures.p99, figures.max) == (96.0, 100.0, 101.0)


def test_window_leaves_unmeasured_values_out() -> None:
    window = Window(4)
    assert window.percentiles().n == 0
    assert math.isnan(window.percentiles().p99)
    for value in (math.nan, 1.0, math.inf, 3.0):
        window.add(value)
    assert (window.percentiles().n, window.percentiles().p50) == (2, 2.0)
    window.clear()
    assert len(window) == 0


def test_window_without_room() -> None:
    with pytest.raises(ConfigError, match="got 0, wanted >= 1"):
        Window(0)


def test_tick_meter_measures_the_deviation_from_the_period() -> None:
    meter = TickMeter(0.020, size=10)
    for at_ms in (0, 20, 45, 60):  # periods 20, 25, 15
        meter.tick(at_ms * MS)
    figures = meter.jitter()
    assert figures.n == 3
    assert (figures.min, figures.max) == (pytest.approx(0.0, abs=1e-12), pytest.approx(0.005))
    meter.reset()
    meter.tick(10 * S)  # the pause is no jitter
    meter.tick(10 * S + 21 * MS)
    assert meter.jitter().n == 1
    assert meter.jitter().max == pytest.approx(0.001)


# Upper ends of the one-sided 95 % Clopper-Pearson interval: beta quantiles from another implementation.
@pytest.mark.parametrize(
    ("misses", "n", "bound"),
    [
        (0, 0, 1.0),
        (0, 1, 0.95),
        (0, 10, 0.2588655508930522),
        (1, 10, 0.39416330243650466),
        (9, 10, 0.9948838031081763),
        (10, 10, 1.0),
        (0, 300, 0.009936081944457708),
        (3, 300, 0.025641393082609616),
        (50, 100, 0.5863782853690882),
        (5000, 100000, 0.05114832194700964),
    ],
)
def test_miss_upper95(misses: int, n: int, bound: float) -> None:
    assert miss_upper95(misses, n) == pytest.approx(bound, rel=1e-10)


@pytest.mark.parametrize(("misses", "n"), [(0, 7), (2, 9), (6, 7), (13, 40)])
def test_miss_upper95_is_where_the_binomial_reaches_five_percent(misses: int, n: int) -> None:
    p = Fraction(miss_upper95(misses, n))
    cdf = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(misses + 1))
    assert float(cdf) == pytest.approx(0.05, rel=1e-9)


def test_no_miss_is_the_rule_of_three() -> None:
    assert miss_upper95(0, 10_000) == pytest.approx(3 / 10_000, rel=2e-3)


@pytest.mark.parametrize(("misses", "n"), [(-1, 10), (11, 10)])
def test_miss_upper95_refuses_impossible_counts(misses: int, n: int) -> None:
    with pytest.raises(ConfigError, match=r"wanted 0\.\.10"):
        miss_upper95(misses, n)


def test_roofline_values() -> None:
    line = roofline(0.5, 0.25, 0.4)
    assert (line.x, line.y_overlap, line.x_crit, line.y) == (2.0, 1.0, 1.25, 1.0)
    assert line.y_seq == pytest.approx(2 / 3)
    assert roofline(0.5, 0.25, 0.4, overlap=False).y == pytest.approx(0.5 / 0.9)


def test_roofline_below_the_ridge() -> None:
    line = roofline(0.2, 0.4, 0.5)
    assert (line.x, line.y_overlap) == (0.5, 0.5)
    assert line.y_seq == pytest.approx(1 / 3)
    assert line.x_crit == pytest.approx(0.4)
    assert line.y == pytest.approx(0.4)  # L_control is L_critical, not L_inference


def test_roofline_passes_unknown_on_and_refuses_zero() -> None:
    line = roofline(math.nan, 0.4, 0.5)
    assert all(math.isnan(v) for v in (line.x, line.y_seq, line.y_overlap, line.x_crit, line.y))
    with pytest.raises(ConfigError, match="l_inference_s"):
        roofline(0.2, 0.0, 0.5)
