"""A checkpoint folder of either family drives the simulated arm: only the node's parameter ``model`` differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rclpy.parameter import Parameter

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.types import CommandKind, SafetyState
from phyai_ros.sim_node import SimNode

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
REACH_RAD = 0.1  # of the actions around mid-range, where the simulated arm rests: within first_step_max


def near_rest(checkpoints: ModuleType, robot: RobotConfig) -> dict[str, dict[str, list[float]]]:
    """Statistics of a data set in which the arm hardly left its rest."""
    middle = np.array([(a.lower + a.upper) / 2 for a in robot.actions])
    spread: dict[str, list[float]] = checkpoints.spread(list(middle - REACH_RAD), list(middle + REACH_RAD))
    return {"state": spread, "actions": spread}


def write(kind: str, family: str, folder: Path, checkpoints: ModuleType) -> Path:
    robot = load_robot(resolve("robots", "arm7"))
    options = checkpoints.sizes(family, image_size=112, action_horizon=50, num_steps=10)
    tensors, statistics = checkpoints.weights(options, seed=3), near_rest(checkpoints, robot)
    writer = {"openpi": checkpoints.write_openpi, "lerobot": checkpoints.write_lerobot}[kind]
    return Path(writer(folder, tensors, options, statistics))


@pytest.mark.parametrize(("kind", "family"), [("openpi", "pi05"), ("lerobot", "pi05"), ("lerobot", "pi0")])
def test_a_folder_drives_the_simulated_robot(
    kind: str, family: str, make_rig: Make, tmp_path: Path, checkpoints: ModuleType
) -> None:
    folder = write(kind, family, tmp_path / kind, checkpoints)

    def arm(context: Any) -> list[Any]:
        return [SimNode(context=context, parameter_overrides=[Parameter("robot", value="arm7")])]

    rig = make_rig(others=arm, engine="process", engine_threads=1)
    rig.node.set_parameters([Parameter("model", value=str(folder))])
    rig.node.set_parameters([Parameter("instruction", value="pick up the red block")])
    said: list[str] = []
    rig.node.get_logger = lambda: SimpleNamespace(
        **{level: lambda text, **_: said.append(text) for level in ("debug", "info", "warning", "error")}
    )
    rig.start()
    if kind == "openpi":  # no file tells whether actions are offsets: that must not pass in silence
        assert any("relative_actions" in text for text in said), said
    rig.until(lambda: rig.kinds().count(CommandKind.ACTION) > 60, 20.0)
    assert rig.safety is SafetyState.RUNNING
    assert str(folder) in rig.node._session.notes["model"]
    played = [step for step in rig.steps if step.kind == CommandKind.ACTION]
    assert len({step.chunk_id for step in played}) >= 2
    middle = np.array([(a.lower + a.upper) / 2 for a in rig.robot.actions])
    reached = np.abs(np.array([step.values for step in played]) - middle)
    assert 1e-3 < reached.max() < 2 * REACH_RAD  # statistics were used: without them it would be radians


def test_a_folder_without_statistics_is_told_at_configure(
    make_rig: Make, tmp_path: Path, checkpoints: ModuleType
) -> None:
    folder = write("openpi", "pi05", tmp_path / "openpi", checkpoints)
    next(folder.rglob("norm_stats.json")).unlink()
    rig = make_rig()
    rig.node.set_parameters([Parameter("model", value=str(folder))])
    rig.node.trigger_configure()
    assert "statistics" in rig.node._last_error
    assert str(folder) in rig.node._last_error
