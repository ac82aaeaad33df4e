"""Tasks that share scenes: how they are judged, that they begin anywhere, and that the expert solves them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.sim.expert import Expert
from phyai_engine.sim.metaworld_robot import TARGET_LEAD_M, MetaWorldRobot
from phyai_engine.sim.tasks import TASKS, Task, is_solved, other_task, progress


@pytest.fixture(scope="module")
def scenes() -> Iterator[dict[str, MetaWorldRobot]]:
    made: dict[str, MetaWorldRobot] = {}
    yield made
    for robot in made.values():
        robot.close()


def scene(scenes: dict[str, MetaWorldRobot], task: Task) -> MetaWorldRobot:
    key = task.scene.environment
    if key not in scenes:
        scenes[key] = MetaWorldRobot(load_robot(resolve("robots", "sawyer_20hz")), task=task.name)
    scenes[key].set_task(task.name)
    return scenes[key]


def test_every_scene_has_two_tasks_and_every_phrase_one() -> None:
    phrases = [phrase for task in TASKS.values() for phrase in task.phrases]
    assert len(set(phrases)) == len(phrases)
    for task in TASKS.values():
        other = other_task(task)
        assert other.scene == task.scene
        assert other.end != task.end
        assert other_task(other) == task


def test_solved_within_a_tenth_of_the_travel() -> None:
    opened = TASKS["drawer-open"]  # at the lower end
    for position, solved in ((-0.16, True), (-0.145, True), (-0.143, False), (0.0, False)):
        assert is_solved(opened, position, (-0.16, 0.0)) is solved
    assert is_solved(TASKS["drawer-close"], -0.015, (-0.16, 0.0))
    assert progress(opened, -0.04, (-0.16, 0.0)) == pytest.approx(0.25)


@pytest.mark.parametrize("name", TASKS)
def test_the_expert_does_the_task_and_then_undoes_it(scenes: dict[str, MetaWorldRobot], name: str) -> None:
    task = TASKS[name]
    robot = scene(scenes, task)
    robot.reset(11)
    for asked in (task, other_task(task)):
        robot.set_task(asked.name)
        assert not robot.success
        assert robot.instruction == asked.phrases[0]
        expert = Expert(asked, speed=0.6)
        for _ in range(150):
            robot.step(expert.action(robot))
            if robot.success:
                break
        assert robot.solved()
        assert not robot.solved(other_task(asked))


def test_the_expert_rests_once_it_is_done(scenes: dict[str, MetaWorldRobot]) -> None:
    robot = scene(scenes, TASKS["drawer-close"])
    robot.place(np.array([0.0, 0.5, 0.3]), np.array([0.0, 0.9, 0.0]), 1.0)
    assert not Expert(TASKS["drawer-close"]).action(robot)[:3].any()


def test_starts_repeat_by_seed_and_are_not_solved(scenes: dict[str, MetaWorldRobot]) -> None:
    task = TASKS["window-open"]
    robot = scene(scenes, task)
    starts = []
    for seed in (3, 4, 5, 6, 3):
        robot.reset(seed)
        assert not robot.solved()
        starts.append(np.append(robot.hand, robot.joint(task)[0]))
    np.testing.assert_array_equal(starts[0], starts[4])
    assert np.ptp(np.stack(starts), axis=0).min() > 0.01


def test_the_target_never_runs_away_from_a_blocked_hand(scenes: dict[str, MetaWorldRobot]) -> None:
    robot = scene(scenes, TASKS["drawer-open"])
    robot.reset(1)
    for _ in range(60):
        robot.step(np.array([0.0, 0.0, -1.0, 1.0]))  # against the table
    assert np.abs(robot._env.data.mocap_pos[0] - robot.hand).max() <= TARGET_LEAD_M + 0.02
    low = robot.hand[2]
    for _ in range(4):
        robot.step(np.array([0.0, 0.0, 1.0, 1.0]))
    assert robot.hand[2] > low + 0.03


def test_a_task_of_another_scene_is_refused(scenes: dict[str, MetaWorldRobot]) -> None:
    robot = scene(scenes, TASKS["drawer-open"])
    with pytest.raises(ConfigError, match="drawer-close"):
        robot.set_task("window-open")
    with pytest.raises(ConfigError, match="drawer-open, drawer-close"):
        MetaWorldRobot(load_robot(resolve("robots", "sawyer_20hz")), task="drawer-turn")
    plain = MetaWorldRobot(load_robot(resolve("robots", "metaworld_sawyer")))
    with pytest.raises(ConfigError, match="no such task"):
        plain.set_task("drawer-open")
    with pytest.raises(ConfigError, match="drawer-open"):
        plain.place(np.zeros(3), np.zeros(3), 0.0)
    assert plain.instruction == "reach"


def test_scenes_of_one_thread_do_not_disturb_each_other(scenes: dict[str, MetaWorldRobot]) -> None:
    """A context of OpenGL is the thread's: whichever was made last would draw everything."""
    drawer, window = (scene(scenes, TASKS[name]) for name in ("drawer-open", "window-open"))
    drawer.reset(2)
    alone = drawer.render("front")
    window.reset(2)
    other = window.render("front")
    np.testing.assert_array_equal(drawer.render("front"), alone)
    np.testing.assert_array_equal(window.render("front"), other)
