"""The Meta-World robot: physics, task, and off-screen rendering (needs EGL)."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.errors import ConfigError, PhyaiError
from phyai_engine.sim.metaworld_robot import MetaWorldRobot


def robot_file(name: str) -> RobotConfig:
    return load_robot(resolve("robots", name))


@pytest.fixture(scope="module")
def sawyer() -> MetaWorldRobot:
    return MetaWorldRobot(robot_file("metaworld_sawyer"), seed=3, width=160, height=120)


class TestMetaWorld:
    def test_a_delta_moves_the_hand_and_no_command_lets_it_rest(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        start = sawyer.state()["hand_state"]
        assert start.names == ("hand_x", "hand_y", "hand_z", "gripper")
        for _ in range(10):
            sawyer.step(np.array([1.0, 0.0, 0.0, -1.0]))
        moved = sawyer.state()["hand_state"]
        assert moved.position[0] - start.position[0] > 0.03
        assert moved.velocity[0] > 0.1
        for _ in range(60):
            sawyer.step(None)
        rest = sawyer.state()
        assert np.abs(rest["hand_state"].velocity[:3]).max() < 0.01
        assert np.abs(rest["joint_states"].velocity).max() < 0.05

    def test_velocities_are_per_second_of_ros_time(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        before = sawyer.state()["joint_states"].position
        sawyer.step(np.array([0.0, 1.0, 0.0, -1.0]))
        after = sawyer.state()["joint_states"]
        np.testing.assert_allclose(after.velocity, (after.position - before) / 0.02)

    def test_the_grip_is_kept_without_commands(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        for _ in range(30):
            sawyer.step(np.array([0.0, 0.0, 0.0, 1.0]))
        closed = sawyer.state()["hand_state"].position[3]
        for _ in range(30):
            sawyer.step(None)
        assert closed < 0.5
        assert abs(sawyer.state()["hand_state"].position[3] - closed) < 0.05

    def test_no_end_after_500_steps(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        for _ in range(510):
            sawyer.step(None)

    def test_solving_the_task_is_remembered_until_reset(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        assert not sawyer.success
        for _ in range(150):
            tcp = sawyer._env.tcp_center
            away = np.clip((sawyer._env._target_pos - tcp) * 20.0, -1.0, 1.0)
            sawyer.step(np.array([*away, -1.0]))
        assert sawyer.success
        for _ in range(20):
            sawyer.step(np.array([0.0, -1.0, 1.0, -1.0]))
        assert sawyer.success
        sawyer.reset(3)
        assert not sawyer.success

    def test_reset_repeats_by_seed(self, sawyer: MetaWorldRobot) -> None:
        goals = []
        for seed in (5, 6, 5):
            sawyer.reset(seed)
            goals.append(np.array(sawyer._env._target_pos))
        np.testing.assert_array_equal(goals[0], goals[2])
        assert (goals[0] != goals[1]).any()

    def test_rendering_in_its_thread_while_stepping(self, sawyer: MetaWorldRobot) -> None:
        sawyer.reset(3)
        images: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = []
        seen, moved = threading.Event(), threading.Event()

        def cameras() -> None:
            images.extend((sawyer.render("front"), sawyer.render("wrist")))
            seen.set()
            moved.wait(10.0)
            images.append(sawyer.render("front"))
            sawyer.close()

        thread = threading.Thread(target=cameras)
        thread.start()
        assert seen.wait(30.0)
        for _ in range(40):
            sawyer.step(np.array([1.0, 0.0, 0.5, -1.0]))
        moved.set()
        thread.join(30.0)
        front, wrist, later = images
        assert front.shape == wrist.shape == (120, 160, 3)
        assert front.dtype == np.uint8
        assert min(front.std(), wrist.std()) > 20.0
        assert (front != later).any(axis=-1).mean() > 0.01
        # Upright: the grey wall fills the upper right, the table the lower half.
        assert front[:20, -40:].std() < 5.0 < front[-40:, 40:].std()

    def test_a_second_rendering_thread_is_refused(self, sawyer: MetaWorldRobot) -> None:
        sawyer.render("front")
        errors: list[Exception] = []

        def elsewhere() -> None:
            for call in (lambda: sawyer.render("front"), sawyer.close):
                try:
                    call()
                except PhyaiError as error:
                    errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10.0)
        sawyer.close()
        assert len(errors) == 2

    def test_unknown_task_and_camera_name_what_exists(self, sawyer: MetaWorldRobot) -> None:
        with pytest.raises(ConfigError, match="button-press-topdown-v3"):
            MetaWorldRobot(robot_file("metaworld_sawyer"), task="reach-v9")
        with pytest.raises(ConfigError, match="front, wrist"):
            sawyer.render("left")

    @pytest.mark.parametrize(("module", "do"), [("metaworld.env_dict", "sim"), ("mujoco.egl", "libegl1")])
    def test_what_is_missing_is_named(self, monkeypatch: pytest.MonkeyPatch, module: str, do: str) -> None:
        unrendered = MetaWorldRobot(robot_file("metaworld_sawyer"), width=32, height=32)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=do):
            MetaWorldRobot(robot_file("metaworld_sawyer")).render("front")
        unrendered.step(None)  # physics needs no OpenGL
