"""Stream faults, command input, trajectories, the simulated arm, and the choice of the robot."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_engine.config import RobotConfig, load_robot, resolve
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.sim import load_sim
from phyai_engine.sim.arm_robot import ArmRobot
from phyai_engine.sim.faults import FaultyStream, Freeze, StreamFaults
from phyai_engine.sim.metaworld_robot import MetaWorldRobot
from phyai_engine.sim.robot import CommandInput
from phyai_engine.sim.trajectory import check_trajectory
from phyai_engine.types import F64, ActionType, Refusal

NAN = float("nan")


def robot_file(name: str) -> RobotConfig:
    return load_robot(resolve("robots", name))


@pytest.fixture
def arm() -> ArmRobot:
    return ArmRobot(robot_file("arm7"), seed=3)


def survivors(stream: FaultyStream[int], count: int) -> list[int]:
    for i in range(count):
        stream.push(0.1 * i, i, i)
    return [sample.payload for sample in stream.due(1e9)]


class TestFaults:
    def test_same_seed_drops_the_same_samples_and_streams_differ(self) -> None:
        faults = StreamFaults(drop=0.5)
        first = survivors(FaultyStream("front", 7, faults), 400)
        assert 150 < len(first) < 250
        assert first == survivors(FaultyStream("front", 7, faults), 400)
        assert first != survivors(FaultyStream("wrist", 7, faults), 400)
        assert first != survivors(FaultyStream("front", 8, faults), 400)

    def test_switching_a_fault_does_not_shift_later_drops(self) -> None:
        always = FaultyStream[int]("front", 7, StreamFaults(drop=0.5))
        late = FaultyStream[int]("front", 7)
        for i in range(300):
            if i == 100:
                late.faults = StreamFaults(drop=0.5)
            always.push(i, i, i)
            late.push(i, i, i)
        tail = [s.payload for s in always.due(1e9) if s.payload >= 100]
        got = [s.payload for s in late.due(1e9)]
        assert got == [*range(100), *tail]
        assert late.dropped == 300 - len(got)

    def test_delay_releases_late_and_in_order(self) -> None:
        stream = FaultyStream[str]("front", 0, StreamFaults(delay_s=0.5))
        assert stream.next_due_s == float("inf")
        stream.push(1.0, 10, "a")
        stream.faults = StreamFaults()
        stream.push(1.1, 11, "b")
        assert stream.next_due_s == 1.5
        assert stream.due(1.4) == []
        assert [s.payload for s in stream.due(1.5)] == ["a", "b"]

    @pytest.mark.parametrize(
        ("freeze", "wanted"),
        [
            (Freeze.NONE, [(1, "b"), (2, "c")]),
            (Freeze.FRAME, [(1, "b"), (2, "b")]),
            (Freeze.STAMP, [(1, "b"), (1, "c")]),
            (Freeze.BOTH, [(1, "b"), (1, "b")]),
        ],
    )
    def test_freeze(self, freeze: Freeze, wanted: list[tuple[int, str]]) -> None:
        stream = FaultyStream[str]("front", 0)
        stream.push(0.0, 0, "a")
        stream.faults = StreamFaults(freeze=freeze)
        stream.push(0.1, 1, "b")
        stream.push(0.2, 2, "c")
        stream.faults = StreamFaults()
        stream.push(0.3, 3, "d")
        assert [(s.stamp_ns, s.payload) for s in stream.due(1.0)] == [(0, "a"), *wanted, (3, "d")]

    def test_dropout_windows(self) -> None:
        stream = FaultyStream[int]("front", 0, StreamFaults(dropouts=((0.2, 0.4), (0.75, 5.0))))
        assert survivors(stream, 10) == [0, 1, 4, 5, 6, 7]

    def test_a_long_delay_is_bounded_in_memory(self) -> None:
        stream = FaultyStream[int]("front", 0, StreamFaults(delay_s=9.0), pending_max=4)
        assert survivors(stream, 10) == [0, 1, 2, 3]
        assert stream.dropped == 6

    @pytest.mark.parametrize(
        "wrong",
        [{"delay_s": -1.0}, {"delay_s": NAN}, {"drop": 1.1}, {"drop": NAN}, {"dropouts": ((2.0, 1.0),)}],
    )
    def test_wrong_values_are_refused(self, wrong: dict[str, float]) -> None:
        with pytest.raises(ConfigError):
            StreamFaults(**wrong)  # type: ignore[arg-type]


class TestCommandInput:
    def test_each_delta_is_applied_once_and_the_oldest_dropped(self) -> None:
        commands = CommandInput(ActionType.CARTESIAN_DELTA, timeout_s=0.2, pending_max=3)
        for value in (1.0, 2.0, 3.0, 4.0):
            commands.put(np.array([value]), 0.0)
        taken = [commands.take() for _ in range(4)]
        assert [None if t is None else t[0] for t in taken] == [2.0, 3.0, 4.0, None]
        assert commands.dropped == 1

    def test_the_newest_position_wins(self) -> None:
        commands = CommandInput(ActionType.JOINT_POSITION, timeout_s=0.2)
        commands.put(np.array([1.0]), 0.0)
        commands.put(np.array([2.0]), 0.0)
        taken = commands.take()
        assert taken is not None
        assert taken[0] == 2.0
        assert commands.take() is None
        assert commands.dropped == 0

    def test_silence_is_reported_once_and_discards_what_is_pending(self) -> None:
        commands = CommandInput(ActionType.CARTESIAN_DELTA, timeout_s=0.2)
        assert not commands.expired(100.0)  # nobody has commanded yet
        commands.put(np.array([1.0]), 100.0)
        assert not commands.expired(100.19)
        assert commands.expired(100.21)
        assert not commands.expired(100.3)
        assert commands.take() is None
        commands.put(np.array([1.0]), 101.0)
        assert commands.expired(101.3)
        commands.put(np.array([1.0]), 102.0)
        commands.clear()
        assert not commands.expired(110.0)


def follow(arm: ArmRobot, times: list[float], rows: F64, velocities: F64 | None = None, **options: float) -> None:
    rates = np.full_like(rows, NAN) if velocities is None else velocities
    arm.follow(arm.action_names, np.array(times), rows, rates, **options)


class TestTrajectory:
    def test_linear_from_the_reference_through_the_points_then_held(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        goal = start + 0.1
        follow(arm, [0.1, 0.2], np.stack([goal, start]))
        seen = []
        for _ in range(15):
            arm.step(None)
            seen.append(arm.reference()[0][0] - start[0])
        wanted = [0.02, 0.04, 0.06, 0.08, 0.1, 0.08, 0.06, 0.04, 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        np.testing.assert_allclose(seen, wanted, atol=1e-12)

    def test_cubic_meets_positions_and_velocities(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        rows = np.stack([start + 0.1, start + 0.2])
        rates = np.stack([np.full(7, 1.5), np.zeros(7)])
        follow(arm, [0.1, 0.2], rows, rates)
        position, velocity = {}, {}
        for i in range(1, 12):
            arm.step(None)
            position[i], velocity[i] = arm.reference()
        np.testing.assert_allclose(position[5], rows[0], atol=1e-12)
        np.testing.assert_allclose(velocity[5], rates[0], atol=1e-9)
        # 60 % of the second segment, by the Hermite basis: h01 = u^2 (3 - 2u), h10 = u (1 - u)^2.
        inside = rows[0] + 0.1 * 0.6**2 * (3 - 1.2) + 0.1 * 1.5 * 0.6 * 0.4**2
        np.testing.assert_allclose(position[8], inside, atol=1e-9)
        np.testing.assert_allclose(position[11], rows[1], atol=1e-12)

    def test_the_velocity_is_the_derivative_of_the_position(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        rates = np.stack([np.full(7, -0.7), np.zeros(7)])
        follow(arm, [0.3, 0.5], np.stack([start + 0.3, start - 0.1]), rates)
        for now in (0.05, 0.2, 0.29, 0.31, 0.45):
            arm.step(None, now - 1e-6)
            before = arm.reference()[0]
            arm.step(None, now + 1e-6)
            after = arm.reference()[0]
            arm.step(None, now)
            np.testing.assert_allclose((after - before) / 2e-6, arm.reference()[1], rtol=1e-4, atol=1e-5)

    def test_a_new_one_replaces_the_old_without_a_jump(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        follow(arm, [0.2], (start + 0.2)[None])
        for _ in range(5):
            arm.step(None)
        before = arm.reference()[0]
        follow(arm, [0.2], (start - 0.2)[None])
        arm.step(None)
        np.testing.assert_allclose(arm.reference()[0], before + (start - 0.2 - before) * 0.1, atol=1e-12)

    def test_a_future_start_is_approached_and_a_past_start_joined(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        follow(arm, [0.1], (start + 0.2)[None], start_s=0.1)
        arm.step(None, 0.1)
        np.testing.assert_allclose(arm.reference()[0], start + 0.1, atol=1e-12)
        follow(arm, [0.1, 0.3], np.stack([start, start + 0.2]), start_s=-0.1)
        arm.step(None, 0.1)
        np.testing.assert_allclose(arm.reference()[0], start + 0.1, atol=1e-12)

    def test_one_that_ends_in_the_past_is_refused_and_the_old_goes_on(self, arm: ArmRobot) -> None:
        arm.step(None, 5.0)
        start = arm.reference()[0]
        follow(arm, [0.1], (start + 0.1)[None])
        with pytest.raises(RefusalError, match="past") as refused:
            follow(arm, [0.1], (start - 1.0)[None], start_s=4.0)
        assert refused.value.code is Refusal.STALE
        arm.step(None, 5.1)
        np.testing.assert_allclose(arm.reference()[0], start + 0.1, atol=1e-12)

    @pytest.mark.parametrize(
        ("names", "times", "positions", "velocities", "code"),
        [
            (["a"], [1.0], [[0.0]], [[NAN]], Refusal.MALFORMED),  # partial
            (["a", "b", "c"], [1.0], [[0.0] * 3], [[NAN] * 3], Refusal.MALFORMED),
            (["a", "a"], [1.0], [[0.0] * 2], [[NAN] * 2], Refusal.MALFORMED),
            (["a", "b"], [], np.zeros((0, 2)), np.zeros((0, 2)), Refusal.MALFORMED),  # no points
            (["a", "b"], [0.2, 0.2], [[0.0] * 2] * 2, [[NAN] * 2] * 2, Refusal.MALFORMED),  # equal times
            (["a", "b"], [0.2, 0.1], [[0.0] * 2] * 2, [[NAN] * 2] * 2, Refusal.MALFORMED),
            (["a", "b"], [-0.1], [[0.0] * 2], [[NAN] * 2], Refusal.MALFORMED),
            (["a", "b"], [0.1], [[0.0] * 2], [[0.0, 0.5]], Refusal.MALFORMED),  # moving at the end
            (["a", "b"], [0.1], [[0.0]], [[NAN] * 2], Refusal.MALFORMED),
            (["a", "b"], [0.1], [[0.0, NAN]], [[NAN] * 2], Refusal.NOT_FINITE),
            (["a", "b"], [0.1], [[0.0, 0.0]], [[NAN, np.inf]], Refusal.NOT_FINITE),
            (["a", "b"], [NAN], [[0.0, 0.0]], [[NAN] * 2], Refusal.NOT_FINITE),
        ],
    )
    def test_refusals(
        self, names: list[str], times: list[float], positions: object, velocities: object, code: Refusal
    ) -> None:
        with pytest.raises(RefusalError) as refused:
            check_trajectory(names, ("a", "b"), np.array(times), np.array(positions), np.array(velocities))
        assert refused.value.code is code

    def test_columns_are_matched_by_name(self) -> None:
        rows, rates = np.array([[2.0, 1.0], [4.0, 3.0]]), np.array([[6.0, 5.0], [0.0, 0.0]])
        positions, velocities = check_trajectory(["b", "a"], ("a", "b"), np.array([0.1, 0.2]), rows, rates)
        np.testing.assert_array_equal(positions, [[1.0, 2.0], [3.0, 4.0]])
        np.testing.assert_array_equal(velocities, [[5.0, 6.0], [0.0, 0.0]])


class TestArm:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.lists(st.floats(-4.0, 4.0), min_size=7, max_size=7), min_size=1, max_size=40))
    def test_limits_hold_for_any_commands(self, commands: list[list[float]]) -> None:
        config = robot_file("arm7")
        arm = ArmRobot(config)
        v_max, a_max = config.limit("velocity_max", np.inf), config.limit("acceleration_max", np.inf)
        q, v = arm.measured()
        for command in commands:
            arm.step(np.array(command))
            q_next, v_next = arm.measured()
            assert (np.abs(v_next) <= v_max + 1e-9).all()
            assert (np.abs(v_next - v) <= a_max * arm.dt_s + 1e-9).all()
            assert (np.abs(q_next - q) <= v_max * arm.dt_s + 1e-9).all()
            q, v = q_next, v_next

    @pytest.mark.parametrize("size", [0.01, 0.5, -1.2])
    def test_reaches_the_target_without_overshoot(self, arm: ArmRobot, size: float) -> None:
        start = arm.measured()[0]
        goal = start + size
        arm.step(goal)
        furthest = 0.0
        for _ in range(120):
            arm.step(None)
            furthest = max(furthest, float(((arm.measured()[0] - start) / size).max()))
        np.testing.assert_allclose(arm.measured()[0], np.clip(goal, arm._lower, arm._upper), atol=1e-4)
        assert furthest < 1.0 + 1e-9

    def test_a_small_step_settles_in_the_promised_time(self, arm: ArmRobot) -> None:
        start = arm.measured()[0]
        for _ in range(2):
            arm.step(start + 0.001)
        # Critically damped: 1 - (1 + w t) exp(-w t) at 40 ms with w = 50 rad/s is 0.594.
        np.testing.assert_allclose((arm.measured()[0] - start) / 0.001, 0.594, atol=0.06)

    def test_targets_beyond_the_limits_are_clipped(self, arm: ArmRobot) -> None:
        for _ in range(300):
            arm.step(np.full(7, 10.0))
        upper = robot_file("arm7").limit("upper", np.inf)
        np.testing.assert_allclose(arm.measured()[0], upper, atol=1e-6)

    def test_hold_brakes_and_stays(self, arm: ArmRobot) -> None:
        goal = arm.measured()[0] + 1.0
        for _ in range(12):
            arm.step(goal)
        q, v = arm.measured()
        assert (v > 1.0).all()
        arm.hold()
        slowest = v
        for _ in range(100):
            arm.step(None)
            slowest = np.minimum(slowest, arm.measured()[1])
        stopped, rate = arm.measured()
        braking = v**2 / robot_file("arm7").limit("acceleration_max", np.inf)
        np.testing.assert_allclose(rate, 0.0, atol=1e-3)
        assert (stopped - q <= 1.05 * braking).all()
        assert (slowest > -0.05).all()  # no way back
        assert (goal - stopped > 0.1).all()

    def test_a_command_ends_a_trajectory(self, arm: ArmRobot) -> None:
        start = arm.reference()[0]
        follow(arm, [1.0], (start + 0.5)[None])
        arm.step(start)
        arm.step(None)
        np.testing.assert_array_equal(arm.reference()[0], start)

    def test_reset_repeats_by_seed_and_keeps_controller_time(self, arm: ArmRobot) -> None:
        first = arm.measured()[0]
        arm.step(first + 0.3, 7.0)
        arm.reset(4)
        assert (arm.measured()[0] != first).all()
        arm.reset(3)
        np.testing.assert_array_equal(arm.measured()[0], first)
        assert arm.time_s == 7.0
        follow(arm, [0.02], (first + 0.1)[None])
        arm.step(None, 7.02)
        np.testing.assert_allclose(arm.reference()[0], first + 0.1)

    def test_state_by_topic(self, arm: ArmRobot) -> None:
        state = arm.state()
        assert list(state) == ["joint_states"]
        assert state["joint_states"].names == tuple(f"joint_{i}" for i in range(1, 8))
        np.testing.assert_array_equal(state["joint_states"].position, arm.measured()[0])

    @pytest.mark.parametrize("joint", range(7))
    def test_every_joint_shows_in_some_image(self, arm: ArmRobot, joint: int) -> None:
        before = {camera: arm.render(camera) for camera in ("front", "wrist")}
        goal = arm.measured()[0].copy()
        goal[joint] += 0.3
        for _ in range(60):
            arm.step(goal)
        for image in before.values():
            assert image.shape == (240, 320, 3)
            assert image.dtype == np.uint8
        assert any((arm.render(camera) != image).any() for camera, image in before.items())

    def test_unknown_camera(self, arm: ArmRobot) -> None:
        with pytest.raises(ConfigError, match="front, wrist"):
            arm.render("left")


class TestLoadSim:
    def test_the_robot_file_decides(self) -> None:
        made = load_sim(robot_file("arm7"), task="", seed=0, width=64, height=48)
        assert isinstance(made, ArmRobot)
        assert made.render("front").shape == (48, 64, 3)
        made = load_sim(robot_file("metaworld_sawyer"), task="button-press-topdown-v3", seed=0, width=64, height=48)
        assert isinstance(made, MetaWorldRobot)
        assert made.instruction == "button press topdown"

    @pytest.mark.parametrize("name", ["arm7", "metaworld_sawyer"])
    def test_robot_file_and_robot_agree(self, name: str) -> None:
        config = robot_file(name)
        robot = load_sim(config, task="reach-v3", seed=0, width=64, height=48)
        assert robot.action_names == config.action_names
        assert robot.dt_s == config.dt_s
        published = {(topic, joint) for topic, sample in robot.state().items() for joint in sample.names}
        assert published == {(entry.topic, entry.name) for entry in config.state}

    def test_no_robot_for_joint_velocities(self) -> None:
        with pytest.raises(ConfigError, match="joint_velocity"):
            load_sim(
                msgspec.structs.replace(robot_file("arm7"), action_type="joint_velocity"),
                task="",
                seed=0,
                width=64,
                height=48,
            )
