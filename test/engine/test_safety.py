"""Epoch, latch, stop planner and envelope."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phyai_engine.config import ActionEntry, RobotConfig, StateEntry
from phyai_engine.envelope import Envelope
from phyai_engine.errors import RefusalError
from phyai_engine.safety import LatchedError, Safety, StopPlanner
from phyai_engine.types import AbortCause, Refusal, SafetyState

DT = 0.02


def robot(kind: str = "joint_position", joints: int = 2, **limits: float) -> RobotConfig:
    names = [f"j{i}" for i in range(joints)]
    entry = {"lower": -2.0, "upper": 2.0, "velocity_max": 2.0, "acceleration_max": 5.0, **limits}
    return RobotConfig(
        robot_id="r",
        action_type=kind,  # type: ignore[arg-type]
        dt_s=DT,
        state=tuple(StateEntry(name=n) for n in names),
        actions=tuple(
            ActionEntry(name=n, state=n, absolute=kind != "joint_position" and i == joints - 1, **entry)
            for i, n in enumerate(names)
        ),
        first_step_max=0.2,
        seam_jump_max=0.1,
    )


def test_abort_bumps_the_epoch_once_and_keeps_the_first_cause() -> None:
    safety = Safety(epoch=10).activate()
    aborted = safety.abort(AbortCause.SERVICE, "first")
    assert aborted.epoch == safety.epoch + 1 and aborted.state is SafetyState.STOPPING
    assert aborted.abort(AbortCause.SIGNAL, "second") == aborted
    assert aborted.stopped().state is SafetyState.LATCHED


def test_latch_survives_deactivate_and_only_rearm_clears_it() -> None:
    safety = Safety(epoch=10).activate().abort(AbortCause.SERVICE, "x").stopped().deactivate()
    assert safety.latched
    with pytest.raises(LatchedError, match="rearm"):
        safety.activate()
    rearmed = safety.rearm(active=False)
    assert not rearmed.latched and rearmed.epoch > safety.epoch
    assert rearmed.activate().state is SafetyState.ARMED


def test_abort_while_inactive_latches_without_a_stop() -> None:
    safety = Safety(epoch=1).abort(AbortCause.SERVICE, "x")
    assert safety.latched and safety.state is SafetyState.LATCHED and not safety.may_play


def test_epoch_grows_with_every_change_that_invalidates_chunks() -> None:
    safety, seen = Safety(epoch=5), [5]
    for change in (
        lambda s: s.activate(),
        lambda s: s.flush(),
        lambda s: s.abort(AbortCause.SERVICE, ""),
        lambda s: s.rearm(active=True),
        lambda s: s.stop(),
        lambda s: s.deactivate(),
    ):
        safety = change(safety)
        seen.append(safety.epoch)
    assert seen == sorted(set(seen))


@pytest.mark.fault(22)
def test_position_stop_decelerates_in_the_direction_of_motion_and_ends_at_rest() -> None:
    # ros2_controllers PR 2163: holding at once at 1 rad/s faults drives
    planner = StopPlanner.of(robot())
    plan = planner.plan(np.array([0.5, 0.0]), np.array([1.0, 0.0]))
    positions = np.concatenate([[0.5], plan.values[:, 0]])
    speed = np.diff(positions) / DT
    assert len(plan) == 10  # 1 rad/s over 5 rad/s^2 * 0.02 s
    assert (np.diff(np.concatenate([[1.0], speed])) >= -5.0 * DT - 1e-9).all()
    assert (speed >= -1e-12).all() and speed[-1] == pytest.approx(0.0)
    assert positions[-1] == pytest.approx(0.5 + sum((1.0 - 0.1 * k) * DT for k in range(1, 11)))
    assert (plan.values[:, 1] == 0.0).all() and (plan.rates[-1] == 0.0).all()


@pytest.mark.fault(45)
def test_stop_from_rest_is_one_hold_and_never_zero() -> None:
    # axol issue 247 and ros2.md: a zero sent to a position interface drives the arm to 0 rad
    planner = StopPlanner.of(robot())
    plan = planner.plan(np.array([1.2, -0.7]), np.zeros(2))
    assert plan.values.tolist() == [[1.2, -0.7]]
    assert planner.held(np.array([1.2, -0.7])).tolist() == [1.2, -0.7]


def test_stop_respects_limits_and_does_not_move_a_robot_that_stands_beyond_them() -> None:
    planner = StopPlanner.of(robot())
    plan = planner.plan(np.array([1.99, -2.3]), np.array([2.0, 0.0]))
    assert plan.values[:, 0].max() <= 2.0
    assert (plan.values[:, 1] == -2.3).all()


@given(
    value=st.lists(st.floats(-2, 2), min_size=2, max_size=2),
    rate=st.lists(st.floats(-2, 2), min_size=2, max_size=2),
)
def test_stop_is_bounded_inside_limits_and_at_rest(value: list[float], rate: list[float]) -> None:
    plan = StopPlanner.of(robot()).plan(np.array(value), np.array(rate))
    assert 1 <= len(plan) <= 21
    assert np.isfinite(plan.values).all() and (np.abs(plan.values) <= 2.0).all()
    assert (plan.rates[-1] == 0).all() or np.abs(plan.values[-1]).max() == pytest.approx(2.0)


@pytest.mark.fault(22, 45)
def test_velocity_stop_ramps_to_zero_and_keeps_absolute_values() -> None:
    planner = StopPlanner.of(robot("joint_velocity", joints=3))
    plan = planner.plan(np.array([1.0, -0.5, 0.8]), np.zeros(3))
    assert plan.values[-1].tolist() == [0.0, 0.0, 0.8]
    assert (np.diff(np.abs(np.concatenate([[1.0], plan.values[:, 0]]))) <= 0).all()
    assert planner.held(np.array([0.0, 0.0, 0.8])).tolist() == [0.0, 0.0, 0.8]


@pytest.mark.fault(45)
def test_cartesian_delta_stop_is_zero_but_the_gripper_keeps_its_grip() -> None:
    planner = StopPlanner.of(robot("cartesian_delta", joints=4))
    assert planner.plan(np.array([0.3, 0.1, -0.2, 1.0]), np.zeros(4)).values.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def smooth(h: int = 5, a: int = 2) -> np.ndarray:
    return np.linspace(0.0, 0.08, h)[:, None].repeat(a, 1)


def check(actions: np.ndarray, **kwargs: object) -> RefusalError:
    envelope = Envelope.of(robot())
    options = {"first_row": 0, "last_command": None, "measured": None, **kwargs}
    with pytest.raises(RefusalError) as error:
        envelope.check(actions, **options)  # type: ignore[arg-type]
    return error.value


@pytest.mark.fault(23)
@pytest.mark.parametrize("row", [0, 2, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_anywhere_refuses_the_whole_chunk(row: int, value: float) -> None:
    # strands PR 2923: NaN passes min(hi, max(lo, nan))
    actions = smooth()
    actions[row, 1] = value
    error = check(actions)
    assert error.code is Refusal.NOT_FINITE and "j1" in str(error) and f"row {row}" in str(error)


@pytest.mark.fault(20, 21)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 1), (0, 3)])
def test_wrong_shape_is_refused_and_never_padded(shape: tuple[int, ...]) -> None:
    # strands issue 1701: a 4-value action for 6 joints was zero-filled; openpi PR 939: 32-D output for 7 joints
    error = check(np.zeros(shape))
    assert error.code is Refusal.MALFORMED and "j0" in str(error)


def test_limit_rate_seam_and_first_step_name_joint_row_value_and_limit() -> None:
    beyond = smooth()
    beyond[3, 0] = 2.1
    assert "j0" in str(check(beyond)) and "2.1" in str(check(beyond)) and "row 3" in str(check(beyond))
    fast = smooth()
    fast[2:, 1] += 0.05
    assert "velocity_max" in str(check(fast)) and "row 2" in str(check(fast))
    assert "seam_jump_max" in str(check(smooth(), last_command=np.array([0.0, 0.3])))
    assert "first_step_max" in str(check(smooth(), measured=np.array([0.5, 0.0])))
    assert check(smooth(), measured=np.array([0.5, 0.0])).code is Refusal.OUT_OF_ENVELOPE


def test_rows_that_were_consumed_are_not_rate_checked() -> None:
    actions = smooth()
    actions[0] = -1.0
    Envelope.of(robot()).check(actions, first_row=1, last_command=actions[1], measured=None)


@pytest.mark.fault(23)
def test_clamp_reports_and_leaves_nan_to_be_refused() -> None:
    actions = smooth()
    actions[1, 0], actions[2, 0], actions[3, 1] = 5.0, -5.0, np.nan
    clipped, count = Envelope.of(robot()).clamp(actions)
    assert count == 2 and clipped[1, 0] == 2.0 and clipped[2, 0] == -2.0 and np.isnan(clipped[3, 1])
