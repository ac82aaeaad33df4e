"""The policy in config/policies: what its page says, that it loads by name, and that it does what it is told."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import config_dir, load_robot, resolve
from phyai_engine.policy import Policy, load_policy
from phyai_engine.sim.metaworld_robot import MetaWorldRobot
from phyai_engine.sim.tasks import TASKS
from phyai_engine.train import workers
from phyai_engine.types import F32, Row
from phyai_engine.weights.checkpoint import describe, model_from

FOLDER = config_dir() / "policies" / "metaworld"
ROBOT = load_robot(resolve("robots", "sawyer_20hz"))
CAMERAS = [camera.name for camera in ROBOT.cameras]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ROBOT, model_from("metaworld"))


@pytest.fixture(scope="module")
def window() -> Iterator[MetaWorldRobot]:
    robot = MetaWorldRobot(ROBOT, task="window-open")
    yield robot
    robot.close()


def player(policy: Policy) -> workers.Player:
    spec = policy.spec
    nothing = np.zeros((spec.horizon, spec.action_dim), np.float32)

    def ask(inputs: dict[str, Any], seed: int) -> F32:
        actions = policy.runner.run([Row(inputs, nothing, nothing, np.zeros(len(spec.times), np.float32), seed)])[
            0
        ].actions
        assert actions is not None
        return actions

    return workers.Player(policy.adapter, ask)


def test_its_page_names_its_weights() -> None:
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 20e6


def test_it_is_complete_and_serves_every_way_of_continuing(policy: Policy) -> None:
    found = describe(FOLDER)
    assert not found.missing
    assert found.model().rtc.guidance == "trained"
    assert policy.spec.horizon == 20
    assert policy.runner.guidance.max_delay == 10
    assert found.model({"rtc": {"guidance": "identity"}}).rtc.guidance == "identity"


def test_it_does_what_it_is_told_and_then_the_opposite(policy: Policy, window: MetaWorldRobot) -> None:
    plays = player(policy)
    window.reset(5)
    for task in ("window-open", "window-close"):
        window.set_task(task)
        assert not window.success
        workers.play(window, TASKS[task].phrases[0], plays, CAMERAS, 200)
        assert window.success


def test_it_does_not_do_what_it_is_not_told(policy: Policy, window: MetaWorldRobot) -> None:
    """An open window, and the words to open it: it stays open."""
    window.set_task("window-open")
    window.place(np.array([0.0, 0.5, 0.3]), np.array([0.0, 0.8, 0.16]), 1.0)
    window.set_task("window-close")
    workers.play(window, TASKS["window-open"].phrases[0], player(policy), CAMERAS, 60)
    assert not window.success
