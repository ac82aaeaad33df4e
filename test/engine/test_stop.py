"""The stop planner: what every stop keeps, for every robot and motion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.stop import RAMP_SHARE, STOP_STEPS_MAX, StopPlanner, row_rates

Make = Callable[..., RobotConfig]
DT = 0.02
NEAR = 1e-9  # relative


def drawn(low: float, high: float) -> Any:
    """Two values, one per joint."""
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(np.array)


acceleration_max = st.floats(0.5, 50.0)
jerk_max = st.one_of(st.none(), st.floats(2.0, 5000.0))
period = st.sampled_from([0.005, 0.02, 0.1])
patient = settings(deadline=None)  # a busy host is no failure


def rates_of(values: np.ndarray, start: np.ndarray, dt_s: float) -> np.ndarray:
    return np.diff(values, axis=0, prepend=start[None]) / dt_s


# --- every stop ---


@patient
@given(value=drawn(-2, 2), rate=drawn(-2, 2), now=drawn(-60, 60), a_max=acceleration_max, j_max=jerk_max, dt_s=period)
def test_a_position_stop_slows_down_within_its_limits_and_ends_at_rest(
    make_robot: Make, value: Any, rate: Any, now: Any, a_max: float, j_max: float | None, dt_s: float
) -> None:
    limits = {"acceleration_max": a_max, "jerk_max": j_max, "lower": -1e3, "upper": 1e3, "velocity_max": None}
    planner = StopPlanner.of(make_robot(dt_s=dt_s, **limits))
    assume(planner._s_curve(np.abs(rate), np.zeros(2)) is not None)  # what does not fit is tested below
    plan = planner.plan(value, rate, now)
    assert np.isfinite(plan.values).all() and 1 <= len(plan) <= STOP_STEPS_MAX
    speeds = planner._speeds(np.abs(rate), -now * np.sign(rate))
    assert not plan.rates[-1].any() and not speeds[-1].any(), "exactly at rest"
    rates = np.vstack([np.abs(rate), speeds])
    np.testing.assert_allclose(plan.rates, speeds * np.sign(rate), atol=1e-9)  # the rows are that motion
    assert (np.diff(rates, axis=0) <= 0).all(), "no joint gets faster, the first row included"
    assert (speeds >= 0).all(), "no joint turns back"
    slowing = -np.diff(np.vstack([rates, np.zeros(2)]), axis=0) / dt_s
    assert (slowing <= a_max * (1 + NEAR)).all()
    if j_max is not None:
        jerk = np.abs(np.diff(slowing, axis=0)) / dt_s
        assert (jerk <= max(j_max, 0.0) * (1 + 1e-6) + 1e-6 * a_max).all()
        under_way = np.clip(-now * np.sign(rate), 0.0, a_max)
        assert ((slowing[0] - under_way) / dt_s <= j_max * (1 + 1e-6)).all(), "the deceleration grows from what it was"


@patient
@given(value=drawn(-2, 2), rate=drawn(-2, 2), j_max=jerk_max)
def test_a_stop_never_passes_a_limit(make_robot: Make, value: Any, rate: Any, j_max: float | None) -> None:
    plan = StopPlanner.of(make_robot(jerk_max=j_max)).plan(value, rate)
    assert (np.abs(plan.values) <= 2.0).all() and not plan.rates[-1].any()
    moved = rates_of(plan.values, value, DT) * np.sign(rate)
    assert (moved >= -1e-12).all()
    np.testing.assert_allclose(moved * np.sign(rate), plan.rates, atol=1e-12)


@patient
@given(value=drawn(-2, 2), rate=drawn(-20, 20), a_max=acceleration_max, j_max=jerk_max)
def test_a_velocity_stop_is_the_same_on_the_velocity(
    make_robot: Make, value: Any, rate: Any, a_max: float, j_max: float | None
) -> None:
    robot = make_robot("joint_velocity", joints=3, acceleration_max=a_max, jerk_max=j_max, velocity_max=None)
    start, change = np.append(value, 0.8), np.append(rate, 0.0)
    values = StopPlanner.of(robot).plan(start, change).values
    assert (values[:, 2] == 0.8).all(), "an absolute value is kept"
    speed = np.abs(np.vstack([start, values]))[:, :2]
    assert values[-1].tolist() == [0.0, 0.0, 0.8] and len(values) <= STOP_STEPS_MAX
    assert (values[:, :2] * np.sign(value) >= 0).all()
    assert (np.diff(speed, axis=0) <= 0).all() and (-np.diff(speed, axis=0) <= a_max * DT * (1 + NEAR)).all()


@patient
@given(speed=drawn(0, 3), slowing=drawn(0, 50), a_max=acceleration_max, j_max=jerk_max, dt_s=period)
def test_the_distance_is_never_less_than_what_a_stop_takes(
    make_robot: Make, speed: Any, slowing: Any, a_max: float, j_max: float | None, dt_s: float
) -> None:
    limits = {"acceleration_max": a_max, "jerk_max": j_max, "lower": -1e3, "upper": 1e3, "velocity_max": None}
    planner = StopPlanner.of(make_robot(dt_s=dt_s, **limits))
    taken = planner.plan(np.zeros(2), speed, -slowing).values[-1]
    bound = planner.distance(speed)
    assert (taken <= bound * (1 + NEAR) + 1e-12).all()
    if j_max is None and planner._steps(speed) <= STOP_STEPS_MAX:
        np.testing.assert_allclose(bound, taken, rtol=1e-9, atol=1e-12)  # exact


# --- what a stop is, by the numbers ---


@pytest.mark.fault(22)
def test_position_stop_decelerates_in_the_direction_of_motion_and_ends_at_rest(make_robot: Make) -> None:
    # ros2_controllers PR 2163: holding at once at 1 rad/s faults drives
    plan = StopPlanner.of(make_robot()).plan(np.array([0.5, 0.0]), np.array([1.0, 0.0]))
    positions = np.concatenate([[0.5], plan.values[:, 0]])
    speed = np.diff(positions) / DT
    assert len(plan) == 10  # 1 rad/s over 5 rad/s^2 * 0.02 s
    assert (np.diff(np.concatenate([[1.0], speed])) >= -5.0 * DT - 1e-9).all()
    assert (speed >= -1e-12).all() and speed[-1] == pytest.approx(0.0)
    assert positions[-1] == pytest.approx(0.5 + sum((1.0 - 0.1 * k) * DT for k in range(1, 11)))
    assert (plan.values[:, 1] == 0.0).all() and (plan.rates[-1] == 0.0).all()


def test_a_jerk_limited_stop_is_an_s_curve(make_robot: Make) -> None:
    # growth 1 rad/s^2 a step: 1, 2, 3 -> full 3, then fading again. 2+2+... = 0.36 rad/s lost in 8 steps.
    planner = StopPlanner.of(make_robot(acceleration_max=3.0, jerk_max=50.0))
    plan = planner.plan(np.zeros(2), np.array([0.36, 0.0]))
    slowing = -np.diff(np.concatenate([[0.36], plan.rates[:, 0], [0.0]])) / DT
    assert slowing == pytest.approx([1, 2, 3, 3, 3, 3, 2, 1, 0])
    braking = planner.plan(np.zeros(2), np.array([0.30, 0.0]), np.array([-2.0, 0.0]))  # from its third row on
    assert braking.rates[:, 0] == pytest.approx(plan.rates[2:, 0])
    faster = planner.plan(np.zeros(2), np.array([0.36, 0.0]), np.array([2.0, 0.0]))  # an acceleration is dropped
    assert faster.rates[:, 0] == pytest.approx(plan.rates[:, 0])


def test_a_jerk_limit_that_cannot_bind_changes_nothing(make_robot: Make) -> None:
    value, rate = np.array([0.1, -0.3]), np.array([1.33, -0.7])
    plain = StopPlanner.of(make_robot()).plan(value, rate)
    limited = StopPlanner.of(make_robot(jerk_max=5.0 / DT)).plan(value, rate)  # one period suffices
    assert limited.values.tolist() == plain.values.tolist()
    limited = StopPlanner.of(make_robot(jerk_max=4.0 / DT)).plan(value, rate)
    assert limited.rates[0, 0] == pytest.approx(rate[0] - 4.0 * DT)


@pytest.mark.fault(45)
def test_stop_from_rest_is_one_hold_and_never_zero(make_robot: Make) -> None:
    # axol issue 247 and ros2.md: a zero sent to a position interface drives the arm to 0 rad
    for planner in (StopPlanner.of(make_robot()), StopPlanner.of(make_robot(jerk_max=20.0))):
        plan = planner.plan(np.array([1.2, -0.7]), np.zeros(2))
        assert plan.values.tolist() == [[1.2, -0.7]]
        assert planner.held(np.array([1.2, -0.7])).tolist() == [1.2, -0.7]


def test_stop_does_not_move_a_robot_that_stands_beyond_its_limits(make_robot: Make) -> None:
    plan = StopPlanner.of(make_robot()).plan(np.array([1.99, -2.3]), np.array([2.0, 0.0]))
    assert plan.values[:, 0].max() <= 2.0
    assert (plan.values[:, 1] == -2.3).all()


@pytest.mark.fault(22, 45)
def test_velocity_stop_ramps_to_zero_and_keeps_absolute_values(make_robot: Make) -> None:
    planner = StopPlanner.of(make_robot("joint_velocity", joints=3))
    plan = planner.plan(np.array([1.0, -0.5, 0.8]), np.zeros(3))
    assert plan.values[-1].tolist() == [0.0, 0.0, 0.8]
    assert (np.diff(np.abs(np.concatenate([[1.0], plan.values[:, 0]]))) <= 0).all()
    assert planner.held(np.array([0.0, 0.0, 0.8])).tolist() == [0.0, 0.0, 0.8]


def test_a_velocity_robot_without_acceleration_max_stops_in_one_step(make_robot: Make) -> None:
    planner = StopPlanner.of(make_robot("joint_velocity", joints=3, acceleration_max=None, jerk_max=None))
    assert planner.plan(np.array([1.0, -0.5, 0.8]), np.zeros(3)).values.tolist() == [[0.0, 0.0, 0.8]]


@pytest.mark.fault(45)
def test_cartesian_delta_stop_is_zero_but_the_gripper_keeps_its_grip(make_robot: Make) -> None:
    planner = StopPlanner.of(make_robot("cartesian_delta", joints=4))
    assert planner.plan(np.array([0.3, 0.1, -0.2, 1.0]), np.zeros(4)).values.tolist() == [[0.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("speed", [0.5 * (1 + 1e-12), 1.2 * (1 - 1e-12), 8e-10, 5e-324])
@pytest.mark.parametrize("limits", [{}, {"jerk_max": 100.0}])
def test_rounding_adds_no_step_and_leaves_no_speed(make_robot: Make, limits: Any, speed: float) -> None:
    planner = StopPlanner.of(make_robot(**limits))
    plan = planner.plan(np.zeros(2), np.array([speed, 0.0]))
    assert not plan.rates[-1].any() and np.isfinite(plan.values).all()
    assert (planner.distance(np.array([speed, 0.0])) >= 0).all()
    if not limits:
        assert len(plan) == max(1, round(speed / 0.1))


@pytest.mark.parametrize("limits", [{"acceleration_max": 0.19}, {"jerk_max": 0.05}])
def test_a_robot_that_cannot_stop_in_time_is_refused(make_robot: Make, limits: Any) -> None:
    with pytest.raises(ConfigError, match=r"j0 cannot stop within 500 steps of 0.02 s, got 2 unit/s, acceleration_max"):
        StopPlanner.of(make_robot(**limits))
    with pytest.raises(ConfigError, match="j0 cannot stop"):
        StopPlanner.of(make_robot("joint_velocity", velocity_max=None, **limits))  # its speed is `upper`


@pytest.mark.parametrize("limits", [{}, {"jerk_max": 1.0}])
def test_a_speed_that_nobody_announced_is_lost_in_time_all_the_same(make_robot: Make, limits: Any) -> None:
    planner = StopPlanner.of(make_robot(velocity_max=None, lower=-1e6, upper=1e6, **limits))
    plan = planner.plan(np.zeros(2), np.array([300.0, 1.0]))
    assert len(plan) <= STOP_STEPS_MAX and not plan.rates[-1].any()
    steps = np.diff(np.concatenate([[300.0], plan.rates[:, 0]]))
    np.testing.assert_allclose(steps, -300.0 / STOP_STEPS_MAX, atol=1e-6)  # evenly, not at the last step


# --- which stop is sent ---


def test_the_robot_file_says_which_stop_is_sent(make_robot: Make) -> None:
    value, rate, nothing = np.array([0.5, 0.0]), np.array([1.0, 0.0]), np.zeros(2)
    plan, words = StopPlanner.of(make_robot()).stop(value, rate, nothing, None)
    assert plan is not None and len(plan) == 10 and "decelerating" in words
    holding = StopPlanner.of(make_robot(robot={"stop": "hold_measured"}))
    plan, words = holding.stop(value, rate, nothing, np.array([0.48, 0.01]))
    assert plan is not None and plan.at_once and plan.values.tolist() == [[0.48, 0.01]] and "measured" in words
    for stale, name in ((np.array([0.48, np.nan]), "j1"), (None, "anything")):
        plan, words = holding.stop(value, rate, nothing, stale)
        assert plan is not None and len(plan) == 10, "no fresh measure: decelerate instead"
        assert "decelerating" in words and f"no fresh value of {name}" in words
    plan, words = StopPlanner.of(make_robot(robot={"stop": "stop_publishing"})).stop(value, rate, nothing, value)
    assert plan is None and "command timeout" in words


# --- the motion of a chunk ---


def test_a_seam_is_no_motion_but_a_chunk_of_one_row_has_no_other() -> None:
    rows = np.array([[9.0], [1.0], [1.1], [1.3]])
    assert row_rates(rows, 1, np.array([0.0]), 0.1)[:, 0] == pytest.approx([0, 1, 1, 2])
    assert row_rates(rows, 1, None, 0.1)[:, 0] == pytest.approx([0, 0, 1, 2])  # motion starts from rest
    assert row_rates(rows, 3, np.array([1.1]), 0.1)[:, 0] == pytest.approx([0, 0, 0, 2])


# --- the way to a first row ---


@patient
@given(start=drawn(-1, 1), target=drawn(-1, 1), a_max=st.floats(1.0, 50.0), j_max=jerk_max)
def test_a_ramp_is_straight_slow_and_ends_at_rest(
    make_robot: Make, start: Any, target: Any, a_max: float, j_max: float | None
) -> None:
    assume(j_max is None or j_max > 20.0)
    planner = StopPlanner.of(make_robot(acceleration_max=a_max, jerk_max=j_max))
    plan = planner.ramp(start, target)
    assert plan is not None and len(plan) <= STOP_STEPS_MAX + 1
    assert plan.values[-1] == pytest.approx(target, abs=1e-12) and not plan.rates[-1].any()
    still = np.zeros((1, 2))
    rates = np.vstack([still, rates_of(plan.values, start, DT), still])
    assert (np.abs(rates) <= 2.0 * RAMP_SHARE * (1 + NEAR)).all()
    change = np.diff(rates, axis=0) / DT
    assert (np.abs(change) <= a_max * RAMP_SHARE * (1 + 1e-6) + 1e-9).all()
    if j_max is not None and np.isfinite(planner.jerk_max).all():
        jerk = np.diff(np.vstack([still, change]), axis=0) / DT
        assert (np.abs(jerk) <= j_max * RAMP_SHARE * (1 + 1e-6) + 1e-6).all()
    way = plan.values - start
    np.testing.assert_allclose(way[:, 0] * (target - start)[1], way[:, 1] * (target - start)[0], atol=1e-12)


def test_a_ramp_that_would_take_too_long_is_none(make_robot: Make) -> None:
    planner = StopPlanner.of(make_robot(velocity_max=0.05, acceleration_max=1.0))
    assert planner.ramp(np.zeros(2), np.array([1.0, 0.0])) is None
