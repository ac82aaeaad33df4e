"""The seam of a handoff: jump and jerk of the commands across it, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phyai_engine.control.seam import Seam
from phyai_engine.types import ActionType

POSITION, VELOCITY, DELTA = ActionType.JOINT_POSITION, ActionType.JOINT_VELOCITY, ActionType.CARTESIAN_DELTA
DT = 0.1


def line(offset: float = 0.0, rows: int = 8) -> Any:
    """[rows, 2]: joint 0 moves 0.01 a row, joint 1 rests."""
    return np.stack([0.01 * np.arange(rows) + offset, np.zeros(rows)], axis=1)


def test_a_chunk_that_goes_on_is_like_any_other_step_and_has_no_jerk() -> None:
    seam = Seam.of(line(), 3, line()[2], line()[1], POSITION, DT)
    assert seam.jump == pytest.approx(0.01) and seam.jump_ratio == pytest.approx(1.0)
    assert seam.jerk == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("kind", "jerk"), [(POSITION, 2.0 / DT**3), (VELOCITY, 1.0 / DT**2), (DELTA, 1.0 / DT**3)])
def test_a_jump_is_told_in_full_and_its_jerk_by_what_the_action_is(kind: ActionType, jerk: float) -> None:
    seam = Seam.of(line(0.5), 3, line()[2], line()[1], kind, DT)
    assert seam.jump == pytest.approx(0.51) and seam.jump_ratio == pytest.approx(51.0)
    assert seam.jerk == pytest.approx(0.5 * jerk)  # third differences of a step are 1, -2, 1; second ones 1, -1


def test_the_joint_that_jumps_most_counts() -> None:
    rows = line()
    rows[:, 1] += 0.3
    assert Seam.of(rows, 0, np.zeros(2), None, POSITION, DT).jump == pytest.approx(0.3)


def test_nothing_is_claimed_where_motion_starts_or_too_few_rows_are_known() -> None:
    assert all(math.isnan(v) for v in (Seam.of(line(), 0, None, None, POSITION, DT).jump, Seam().jump_ratio))
    assert not math.isnan(Seam.of(line(), 0, np.zeros(2), None, POSITION, DT).jerk)  # four rows are enough
    last = Seam.of(line(), 7, np.zeros(2), None, POSITION, DT)
    assert last.jump == pytest.approx(0.07) and math.isnan(last.jerk)
    still = Seam.of(np.zeros((8, 2)), 0, np.ones(2), None, POSITION, DT)
    assert still.jump == 1.0 and math.isnan(still.jump_ratio)
    assert math.isnan(Seam.of(np.zeros((1, 2)), 0, np.ones(2), None, POSITION, DT).jump_ratio)
