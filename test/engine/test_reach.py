"""Worst-case reach: no chunk is accepted from which a stop could leave the limits, and good chunks are."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from phyai_engine.config import RobotConfig
from phyai_engine.errors import RefusalError
from phyai_engine.reach import Reach
from phyai_engine.stop import StopPlanner
from phyai_engine.types import Refusal

Make = Callable[..., RobotConfig]
DT = 0.02


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    """test/prove/reach.py, loaded by path: test folders are not packages."""
    path = Path(__file__).parents[1] / "prove" / "reach.py"
    spec = importlib.util.spec_from_file_location("prove_reach", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("jerk_max", [None, 60.0])
def test_every_violation_of_a_dense_simulation_is_refused(evidence: ModuleType, jerk_max: float | None) -> None:
    seen = evidence.count(150, 0, jerk_max=jerk_max, seed=1)
    assert seen.violations > 50 and seen.missed == 0
    assert seen.violations + seen.refused_without < seen.random  # it does not refuse everything


def test_demonstrations_within_the_limits_are_accepted(evidence: ModuleType) -> None:
    seen = evidence.count(0, 400, seed=2)
    assert seen.demonstrations_refused <= 0.01 * seen.demonstrations


def of(robot: RobotConfig) -> Reach:
    return Reach.of(robot, StopPlanner.of(robot))


def towards_the_limit(gap: float, speed: float = 1.0, rows: int = 10) -> np.ndarray:
    """[rows, 2] joint 1 moves at a speed and its last row is a gap before 2 rad."""
    chunk = np.zeros((rows, 2))
    chunk[:, 1] = 2.0 - gap - speed * DT * np.arange(rows)[::-1]
    return chunk


def test_the_stop_distance_decides_and_the_refusal_says_where(make_robot: Make) -> None:
    reach = of(make_robot())  # 1 rad/s at 5 rad/s^2: 9 steps from 0.9 rad/s down, 0.09 rad
    reach.check(towards_the_limit(0.0901), first_row=0, last_command=np.zeros(2))
    with pytest.raises(RefusalError, match=r"j1 moves too fast to stop within its limits") as error:
        reach.check(towards_the_limit(0.0899), first_row=0, last_command=np.zeros(2))
    assert error.value.code is Refusal.OUT_OF_ENVELOPE
    assert "got 2.0001, wanted -2..2, at row 9" in str(error.value)
    with pytest.raises(RefusalError, match="j1"):
        reach.check(-towards_the_limit(0.0899), first_row=0, last_command=np.zeros(2))
    with pytest.raises(RefusalError, match="row 5"):  # rows before the first that is played say nothing
        reach.check(towards_the_limit(-0.01)[:9], first_row=5, last_command=np.zeros(2))


def test_rows_that_are_not_played_are_not_judged(make_robot: Make) -> None:
    chunk = towards_the_limit(0.1)
    chunk[:4] = [1.99, 0.0]
    chunk[4:, 0] = 0.0
    of(make_robot()).check(chunk, first_row=4, last_command=chunk[4])


def test_motion_from_rest_has_no_speed_in_its_first_row(make_robot: Make) -> None:
    chunk = np.array([[1.995, 0.0], [1.95, 0.0], [1.91, 0.0]])
    reach = of(make_robot(lower=-3.0))
    assert reach.stop_points(chunk, 0, None)[0].tolist() == [1.995, 0.0]
    assert reach.stop_points(chunk, 0, np.zeros(2))[0, 0] < 1.995
    one = np.array([[1.95, 0.0]])  # a chunk of one row: its jump is its motion
    with pytest.raises(RefusalError, match="j0"):
        reach.check(one, first_row=0, last_command=np.array([1.91, 0.0]))


def test_what_is_not_checked_is_said(make_robot: Make) -> None:
    assert of(make_robot()).note == ""
    endless = of(make_robot(upper=np.inf))
    assert "j0, j1" in endless.note
    endless.check(towards_the_limit(-1.0), first_row=0, last_command=None)
    for kind in ("joint_velocity", "cartesian_delta"):
        other = of(make_robot(kind))
        assert kind in other.note
        other.check(towards_the_limit(-9.0), first_row=0, last_command=None)


def test_a_check_of_50_rows_and_14_joints_is_quick(evidence: ModuleType) -> None:
    assert evidence.time_us(repeats=50) < 1000.0  # 56 us on two idle cores; the bound is prove's
