"""Units of the robot file: affine ones, and the maps of ALOHA's grippers against openpi's published constants."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phyai_engine.config import ActionEntry, StateEntry
from phyai_engine.transforms.units import PolicyUnits

STATE = PolicyUnits.of(
    (StateEntry(name="j", scale=-1.0), StateEntry(name="g", units="aloha_gripper"), StateEntry(name="k", offset=2.0)),
    "state",
)
ACTIONS = PolicyUnits.of(
    (
        ActionEntry(name="g", lower=0.0, upper=1.0, units="aloha_gripper"),
        ActionEntry(name="j", lower=0.0, upper=1.0, scale=-100.0, offset=100.0),
    ),
    "actions",
)


def test_affine_units() -> None:
    np.testing.assert_allclose(STATE.to_policy(np.array([0.5, 0.0, 0.5]))[[0, 2]], [-0.5, 2.5])
    np.testing.assert_allclose(ACTIONS.to_policy(np.array([[0.0, 0.25]]))[0, 1], 75.0)
    np.testing.assert_allclose(ACTIONS.to_robot(np.array([[0.0, 75.0]]))[0, 1], 0.25)


@pytest.mark.parametrize("value", [-0.1, 0.0, 0.3, 0.5, 0.9, 1.0])
def test_the_state_of_an_aloha_gripper_is_the_angle_of_its_motor(value: float) -> None:
    # The triangle of horn, rod and rail, by the law of cosines: the motor's angle is measured from the rail's normal.
    rail, horn, rod = 0.01844 + value * (0.05800 - 0.01844), 0.022, 0.036
    between = math.acos((horn**2 + rail**2 - rod**2) / (2 * horn * rail)) if value < 1 else 0.0
    wanted = (math.pi / 2 - between - 0.5476) / (1.6296 - 0.5476)
    assert STATE.to_policy(np.array([0.0, value, 0.0]))[1] == pytest.approx(wanted, abs=1e-9)


def test_the_ends_of_an_aloha_gripper() -> None:
    closed, opened = (STATE.to_policy(np.array([0.0, v, 0.0]))[1] for v in (0.0, 1.0))
    assert closed == pytest.approx(-1.0798, abs=1e-4)  # by hand: asin(-0.58174) = -0.62085 rad
    assert opened == pytest.approx((math.pi / 2 - 0.5476) / 1.082, abs=1e-9)
    closed, opened = ACTIONS.to_policy(np.array([[0.0, 0.0], [1.0, 0.0]]))[:, 0]
    assert closed == pytest.approx(-0.6213 - 0.5476)
    assert opened == pytest.approx(1.4910 - 0.5476)


def test_state_and_action_of_an_aloha_gripper_have_different_maps() -> None:
    measured = STATE.to_policy(np.array([0.0, 0.5, 0.0]))[1]
    commanded = ACTIONS.to_policy(np.array([0.5, 0.0]))[0]
    assert abs(measured - commanded) > 0.02
    assert ACTIONS.to_policy(np.array([0.25, 0.0]))[0] == pytest.approx(0.25 * 2.1123 - 1.1689)  # not divided by 1.082


@given(st.floats(-0.11, 1.0))
def test_an_aloha_gripper_comes_back(value: float) -> None:
    state, actions = np.array([0.3, value, -0.2]), np.array([[value, 0.4]])
    np.testing.assert_allclose(STATE.to_robot(STATE.to_policy(state)), state, atol=1e-12)
    np.testing.assert_allclose(ACTIONS.to_robot(ACTIONS.to_policy(actions)), actions, atol=1e-12)


def test_beyond_its_range_the_angle_stays_at_its_end_and_nothing_else_changes() -> None:
    given_values = np.array([[0.0, 5.0, 0.0], [0.0, -5.0, 0.0], [0.0, np.nan, 0.0]])
    policy = STATE.to_policy(given_values)
    np.testing.assert_allclose(policy[:2, 1], [(math.pi / 2 - 0.5476) / 1.082, (-math.pi / 2 - 0.5476) / 1.082])
    assert np.isnan(policy[2, 1])
    assert given_values[0, 1] == 5.0  # the caller's array is not written
    np.testing.assert_allclose(STATE.to_robot(policy)[:2, 1], [1.0, -0.11223], atol=1e-5)
