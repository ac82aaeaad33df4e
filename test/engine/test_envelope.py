"""The envelope: whole-chunk refusal that names joint, row, value and limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from phyai_engine.config import ActionEntry, RobotConfig, StateEntry, Workspace, convert
from phyai_engine.envelope import Envelope
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.robot_check import check_robot
from phyai_engine.types import Refusal

Make = Callable[..., RobotConfig]
Check = Callable[..., RefusalError]
DT = 0.02


def smooth(h: int = 5, a: int = 2) -> np.ndarray:
    return np.linspace(0.0, 0.08, h)[:, None].repeat(a, 1)


def refusal(envelope: Envelope, actions: np.ndarray, **given: Any) -> RefusalError:
    with pytest.raises(RefusalError) as error:
        envelope.check(actions, **{"first_row": 0, "last_command": None, "measured": None, **given})
    return error.value


@pytest.fixture
def check(make_robot: Make) -> Check:
    """Checks a chunk that must be refused."""
    return lambda actions, **given: refusal(Envelope.of(make_robot()), actions, **given)


@pytest.mark.fault(23)
@pytest.mark.parametrize("row", [0, 2, 4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_anywhere_refuses_the_whole_chunk(check: Check, row: int, value: float) -> None:
    # strands PR 2923: NaN passes min(hi, max(lo, nan))
    actions = smooth()
    actions[row, 1] = value
    error = check(actions)
    assert error.code is Refusal.NOT_FINITE and "j1" in str(error) and f"row {row}" in str(error)


@pytest.mark.fault(20, 21)
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3), (5, 2, 1), (0, 3)])
def test_wrong_shape_is_refused_and_never_padded(check: Check, shape: tuple[int, ...]) -> None:
    # strands issue 1701: a 4-value action for 6 joints was zero-filled; openpi PR 939: 32-D output for 7 joints
    error = check(np.zeros(shape))
    assert error.code is Refusal.MALFORMED and "j0" in str(error)


def test_limit_rate_seam_and_first_step_name_joint_row_value_and_limit(check: Check) -> None:
    beyond = smooth()
    beyond[3, 0] = 2.1
    assert "j0" in str(check(beyond)) and "2.1" in str(check(beyond)) and "row 3" in str(check(beyond))
    fast = smooth()
    fast[2:, 1] += 0.05
    assert "velocity_max" in str(check(fast)) and "row 2" in str(check(fast))
    assert "seam_jump_max" in str(check(smooth(), last_command=np.array([0.0, 0.3])))
    assert "first_step_max" in str(check(smooth(), measured=np.array([0.5, 0.0])))
    assert check(smooth(), measured=np.array([0.5, 0.0])).code is Refusal.OUT_OF_ENVELOPE
    assert check(smooth(), measured=np.array([0.0, np.nan])).code is Refusal.STALE


def test_an_action_may_have_its_own_first_step_and_seam(make_robot: Make) -> None:
    robot = make_robot(robot={"first_step_max": 0.2, "seam_jump_max": 0.1})
    loose = structs.replace(robot.actions[0], first_step_max=math.inf, seam_jump_max=math.inf)
    tight = structs.replace(robot.actions[1], first_step_max=0.05)
    envelope = Envelope.of(structs.replace(robot, actions=(loose, tight)))
    assert envelope.first_step_max.tolist() == [math.inf, 0.05] and envelope.seam_jump_max.tolist() == [math.inf, 0.1]
    start: dict[str, Any] = {"first_row": 0, "last_command": None, "measured": None}
    envelope.check(smooth(), **{**start, "measured": np.array([2.0, 0.04])})
    envelope.check(smooth(), **{**start, "measured": np.array([np.nan, 0.04])})  # nothing to compare it with is needed
    assert "j1 starts farther" in str(refusal(envelope, smooth(), measured=np.array([0.0, 0.06])))
    assert refusal(envelope, smooth(), measured=np.array([0.0, np.nan])).code is Refusal.STALE
    envelope.check(smooth(), **{**start, "last_command": np.array([2.0, 0.09])})
    assert "j1 jumps" in str(refusal(envelope, smooth(), last_command=np.array([0.0, 0.11])))


def test_rows_that_were_consumed_are_not_rate_checked(make_robot: Make) -> None:
    actions = smooth()
    actions[0] = -1.0
    Envelope.of(make_robot()).check(actions, first_row=1, last_command=actions[1], measured=None)


@pytest.mark.fault(23)
def test_clamp_reports_and_leaves_what_is_not_finite_to_be_refused(make_robot: Make) -> None:
    actions = smooth()
    actions[1, 0], actions[2, 0], actions[3, 1] = 5.0, -5.0, np.nan
    actions[4] = np.inf, -np.inf
    clipped, count = Envelope.of(make_robot()).clamp(actions)
    assert count == 2 and clipped[1, 0] == 2.0 and clipped[2, 0] == -2.0 and np.isnan(clipped[3, 1])
    assert np.isinf(clipped[4]).all(), "an infinite action is no large one: it would be clipped without a word"


# --- accelerations and jerks that a chunk asks for ---


def curve(acceleration: float, jerk: float = 0.0, rows: int = 8) -> np.ndarray:
    """[rows, 2] joint 1 moves with these second and third differences."""
    chunk = np.zeros((rows, 2))
    k = np.arange(rows)
    chunk[:, 1] = acceleration * DT**2 * k * (k - 1) / 2 + jerk * DT**3 * k * (k - 1) * (k - 2) / 6
    return chunk


@pytest.mark.parametrize(
    ("limit", "chunk", "row"),
    [
        ("command_acceleration_max", lambda by: curve(3.0 * by), 2),
        ("command_jerk_max", lambda by: curve(0, 3.0 * by), 3),
    ],
)
def test_rates_of_higher_order_are_limited_inside_a_chunk(
    make_robot: Make, limit: str, chunk: Callable[[float], np.ndarray], row: int
) -> None:
    envelope = Envelope.of(make_robot(**{limit: 3.0}))
    for sign in (1.0, -1.0):
        envelope.check(sign * chunk(0.999), first_row=0, last_command=None, measured=None)
        error = refusal(envelope, sign * chunk(1.001), first_row=0)
        assert f"j1 changes faster than {limit}, got {sign * 3.003:.6g}, wanted -3..3, at row {row}" in str(error)
    Envelope.of(make_robot()).check(chunk(3.0), first_row=0, last_command=None, measured=None)  # no limit given
    consumed = np.vstack([np.ones((2, 2)), chunk(0.9)])
    envelope.check(consumed, first_row=2, last_command=None, measured=None)


def test_accelerations_and_jerks_are_limited_across_the_seam(make_robot: Make) -> None:
    still = np.zeros((4, 2))
    one, two = np.array([0.0, -0.002]), np.array([0.0, -0.004])  # moved at 0.1 rad/s, then at once to rest
    envelope = Envelope.of(make_robot(command_acceleration_max=4.0))
    envelope.check(still, first_row=0, last_command=None, measured=None)
    envelope.check(still, first_row=0, last_command=np.zeros(2), before=np.zeros(2), measured=None)
    error = refusal(envelope, still, last_command=one, before=two)  # -0.002 / dt^2 = -5 at the row after the first
    assert "j1 changes faster than command_acceleration_max, got -5" in str(error) and "row 1" in str(error)
    error = refusal(envelope, still, last_command=np.zeros(2), before=one)
    assert "got -5" in str(error) and "row 0" in str(error)
    jerky = Envelope.of(make_robot(command_jerk_max=200.0))
    error = refusal(jerky, still, last_command=np.zeros(2), before=one)
    assert "command_jerk_max, got 250" in str(error) and "row 1" in str(error)


def test_a_velocity_robot_has_one_difference_less(make_robot: Make) -> None:
    envelope = Envelope.of(make_robot("joint_velocity", command_acceleration_max=5.0, command_jerk_max=300.0))
    rows = np.zeros((4, 2))
    rows[:, 0] = [0.0, 0.09, 0.18, 0.27]
    envelope.check(rows, first_row=0, last_command=None, measured=None)
    rows[3, 0] = 0.29
    assert "j0 changes faster than command_acceleration_max, got 5.5" in str(refusal(envelope, rows))
    rows[:, 0] = [0.0, 0.09, 0.0, 0.0]
    assert "j0 changes faster than command_jerk_max, got -450" in str(refusal(envelope, rows))
    error = refusal(envelope, np.zeros((1, 2)), last_command=np.array([0.2, 0.0]))
    assert "command_acceleration_max" in str(error) and "row 0" in str(error)


# --- the workspace of a Cartesian-delta robot ---

SPACE = {
    "state": ["hand_y", "hand_z"],
    "actions": ["dy", "dz"],
    "metres_per_unit": 0.01,
    "lower": [-0.2, 0.05],
    "upper": [0.2, 0.5],
}


def hand(**changes: Any) -> RobotConfig:
    robot = RobotConfig(
        robot_id="hand",
        action_type="cartesian_delta",
        dt_s=DT,
        state=tuple(StateEntry(name=n) for n in ("hand_x", "hand_z", "hand_y", "gripper")),
        actions=(
            *(ActionEntry(name=n, lower=-1.0, upper=1.0) for n in ("dx", "dy", "dz")),
            ActionEntry(name="gripper", lower=-1.0, upper=1.0, absolute=True),
        ),
        workspace=convert({**SPACE, **changes}, Workspace, where="r.yaml"),
    )
    check_robot(robot, where="r.yaml")
    return robot


def measured(y: float, z: float) -> np.ndarray:
    return np.array([np.nan, y, z, np.nan])  # as measured_index orders it


def test_the_measured_hand_stands_where_its_action_does() -> None:
    state = np.array([1.0, 0.3, 0.1, 7.0])  # x, z, y, gripper
    index = hand().measured_index()
    assert np.where(index < 0, np.nan, state[index])[1:3].tolist() == [0.1, 0.3]
    assert index.tolist() == [-1, 2, 1, -1]


def test_a_chunk_must_keep_the_hand_in_the_box() -> None:
    envelope = Envelope.of(hand())
    down = np.zeros((20, 4))
    down[:, 2] = -1.0  # 10 mm a row
    envelope.check(down, first_row=0, last_command=None, measured=measured(0.0, 0.25))
    error = refusal(envelope, down, measured=measured(0.0, 0.2))
    assert error.code is Refusal.OUT_OF_ENVELOPE
    assert "hand_z [m] leaves the workspace, got 0.04, wanted 0.05..0.5, at row 15" in str(error)
    envelope.check(down, first_row=5, last_command=None, measured=measured(0.0, 0.2))  # the consumed rows are over
    there_and_back = np.zeros((20, 4))
    there_and_back[:10, 1], there_and_back[10:, 1] = 1.0, -1.0
    error = refusal(envelope, there_and_back, measured=measured(0.15, 0.2))  # the worst row counts, not the last
    assert "hand_y" in str(error) and "row 5" in str(error)
    playing = {"last_command": np.zeros(4), "before": np.zeros(4)}
    assert "hand_y" in str(refusal(envelope, there_and_back, measured=measured(0.15, 0.2), **playing))


def test_a_hand_outside_the_box_may_only_come_back() -> None:
    envelope = Envelope.of(hand())
    back = np.zeros((5, 4))
    back[:, 1] = -1.0
    envelope.check(back, first_row=0, last_command=None, measured=measured(0.3, 0.2))
    assert "hand_y" in str(refusal(envelope, -back, measured=measured(0.3, 0.2)))


@pytest.mark.parametrize("seen", [None, measured(np.nan, 0.2), measured(0.0, np.nan)])
def test_without_a_fresh_hand_nothing_is_played(seen: np.ndarray | None) -> None:
    error = refusal(Envelope.of(hand()), np.zeros((5, 4)), measured=seen)
    assert error.code is Refusal.STALE and "hand_" in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": ["hand_y", "hand_w"]}, "unknown state: hand_w, wanted some of hand_x"),
        ({"actions": ["dy", "gripper"]}, "unknown actions: gripper, wanted some of dx, dy, dz"),
        ({"actions": ["dy", "dy"]}, "actions stand twice: dy"),
        ({"lower": [-0.2]}, r"one value per axis is needed, got .*\[2, 2, 1, 2\]"),
        ({"lower": [-0.2, 0.5]}, r"hand_z is not ordered, got 0.5..0.5"),
        ({"upper": [float("nan"), 0.5]}, r"hand_y is not ordered"),
    ],
)
def test_a_workspace_that_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        hand(**changes)
