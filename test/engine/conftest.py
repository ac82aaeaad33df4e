"""Shared by the engine tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phyai_engine.config import ActionEntry, Camera, RobotConfig, StateEntry
from phyai_engine.robot_check import check_robot


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tiny tensors gain nothing from a second thread; on two busy cores it made them four times slower."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _beside(name: str) -> ModuleType:
    """A module of this folder, loaded by path: test folders are not packages."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def recordings() -> ModuleType:
    """The module recordings.py, which writes what a policy node records."""
    return _beside("recordings")


@pytest.fixture(scope="session")
def make_robot() -> Callable[..., RobotConfig]:
    """Makes checked robots of equal joints j0, j1, ...; the last one of a velocity or delta robot is absolute."""

    def make(
        kind: Any = "joint_position", joints: int = 2, *, dt_s: float = 0.02, robot: Any = None, **limits: Any
    ) -> RobotConfig:
        names = [f"j{i}" for i in range(joints)]
        entry = {"lower": -2.0, "upper": 2.0, "velocity_max": 2.0, "acceleration_max": 5.0, **limits}
        made = RobotConfig(
            robot_id="r",
            action_type=kind,
            dt_s=dt_s,
            state=tuple(StateEntry(name=n) for n in names),
            actions=tuple(
                ActionEntry(name=n, state=n, absolute=kind != "joint_position" and i == joints - 1, **entry)
                for i, n in enumerate(names)
            ),
            **{"first_step_max": 0.2, "seam_jump_max": 0.1, **(robot or {})},
        )
        check_robot(made, where="r.yaml")
        return made

    return make


@pytest.fixture(scope="session")
def bags() -> ModuleType:
    """The module bags.py, which writes bags of a robot's sensors."""
    return _beside("bags")


@pytest.fixture(scope="session")
def bag_robot(make_robot: Callable[..., RobotConfig], bags: ModuleType) -> Callable[..., RobotConfig]:
    """Makes the robot of the recordings of bags.py; arguments change its cameras.

    Its limits are wide: the robot of a recording does not go where it is told.
    """

    def make(cameras: tuple[str, ...] = ("front", "wrist"), **changes: Any) -> RobotConfig:
        made = [
            Camera(name=name, topic=f"{name}/image_raw", role=bags.ROLES[name], **{"tolerance_s": 0.06, **changes})
            for name in cameras
        ]
        return make_robot(
            velocity_max=20.0, acceleration_max=50.0, robot={"cameras": tuple(made), "seam_jump_max": 1.0}
        )

    return make
