"""The observation buffer: what it assembles, what it refuses and in which words, that it never starves."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from phyai_engine.config import RobotConfig
from phyai_engine.control.observation_buffer import ObservationBuffer, Put
from phyai_engine.errors import ConfigError, ImageError, RefusalError
from phyai_engine.types import U8, Observation, Refusal

MS = 1_000_000
S = 1000 * MS
ROS_0 = 1_700_000_000 * S  # ROS time at monotonic MONO_0
MONO_0 = 50 * S


def robot(**changes: Any) -> RobotConfig:
    base: dict[str, Any] = {
        "robot_id": "r",
        "action_type": "joint_position",
        "dt_s": 0.02,
        "state": [{"name": "a"}, {"name": "b"}, {"name": "grip", "topic": "gripper/joint_states"}],
        "actions": [{"name": "a", "state": "a", "lower": -1, "upper": 1, "acceleration_max": 1.0}],
        "cameras": [
            {"name": "front", "topic": "front/image", "role": "base"},
            {"name": "wrist", "topic": "wrist/image", "role": "hand"},
        ],
    }
    return msgspec.convert(base | changes, RobotConfig)


def frame(value: int = 0, shape: tuple[int, int] = (4, 6)) -> U8:
    return np.full((*shape, 3), value, dtype=np.uint8)


class Feed:
    """Puts samples at a time in ms, received ``lag`` ms after their stamp."""

    def __init__(self, config: RobotConfig | None = None, **options: Any) -> None:
        self.buffer = ObservationBuffer(config or robot(), **options)

    @staticmethod
    def _receipt(at_ms: float) -> dict[str, int]:
        ns = round(at_ms * MS)
        return {"received_ros_ns": ROS_0 + ns, "received_mono_ns": MONO_0 + ns}

    def image(self, name: str, stamp_ms: float, value: int = 0, *, lag: float = 5, at: float | None = None) -> Put:
        receipt = self._receipt(stamp_ms + lag if at is None else at)
        return self.buffer.put_image(name, frame(value), ROS_0 + round(stamp_ms * MS), **receipt)

    def joints(
        self,
        stamp_ms: float,
        values: dict[str, float],
        *,
        topic: str = "joint_states",
        velocities: list[float] | None = None,
        lag: float = 1,
        at: float | None = None,
    ) -> Put:
        return self.buffer.put_joints(
            topic,
            tuple(values),
            np.array([*values.values()]),
            None if velocities is None else np.array(velocities),
            ROS_0 + round(stamp_ms * MS),
            **self._receipt(stamp_ms + lag if at is None else at),
        )

    def arm(self, stamp_ms: float, a: float = 0.0, b: float = 0.0, **options: Any) -> Put:
        self.joints(stamp_ms, {"grip": 0.5}, topic="gripper/joint_states", **options)
        return self.joints(stamp_ms, {"a": a, "b": b}, **options)

    def all(self, stamp_ms: float, value: int = 0) -> list[Put]:
        return [
            self.image("front", stamp_ms, value),
            self.image("wrist", stamp_ms, value),
            self.arm(stamp_ms),
        ]

    def snapshot(self, at_ms: float) -> Observation:
        ns = round(at_ms * MS)
        return self.buffer.snapshot(ROS_0 + ns, MONO_0 + ns)

    def refused(self, at_ms: float) -> tuple[Refusal, str]:
        with pytest.raises(RefusalError) as caught:
            self.snapshot(at_ms)
        return caught.value.code, str(caught.value)


# -- what is assembled ---------------------------------------------------------------------------------------


@pytest.mark.fault(16)
def test_an_observation_holds_the_named_values_in_the_robot_files_order() -> None:
    feed = Feed()
    feed.buffer.set_instruction("pick the cup")
    feed.image("front", 100, 1)
    feed.image("wrist", 102, 2)
    feed.joints(101, {"extra": 9.0, "b": 0.2, "a": 0.1}, velocities=[9.0, math.nan, 0.3])  # permuted, partly unknown
    feed.joints(99, {"grip": 0.04}, topic="gripper/joint_states")
    seen = feed.snapshot(110)
    assert {name: int(image[0, 0, 0]) for name, image in seen.images.items()} == {"front": 1, "wrist": 2}
    assert seen.state.tolist() == [0.1, 0.2, 0.04]
    np.testing.assert_array_equal(seen.velocity, [0.3, np.nan, np.nan])
    assert seen.instruction == "pick the cup"
    assert seen.oldest_ros_ns == ROS_0 + 99 * MS
    assert seen.newest_ros_ns == ROS_0 + 102 * MS
    assert seen.capture_mono_ns == MONO_0 + 99 * MS
    assert seen.snapshot_mono_ns == MONO_0 + 110 * MS
    assert seen.image_stamps_ros_ns == {"front": ROS_0 + 100 * MS, "wrist": ROS_0 + 102 * MS}


@pytest.mark.fault(16)
def test_two_publishers_of_one_topic_are_merged_per_joint() -> None:
    feed = Feed(robot(cameras=[]))
    feed.joints(100, {"a": 0.1})
    feed.joints(98, {"b": 0.2})  # behind the other publisher: its own stream, so kept
    feed.joints(100, {"grip": 0.3}, topic="gripper/joint_states")
    assert feed.snapshot(105).state.tolist() == [0.1, 0.2, 0.3]
    feed.joints(110, {"a": 0.5})
    feed.joints(108, {"b": 0.2})
    feed.joints(110, {"grip": 0.3}, topic="gripper/joint_states")
    assert feed.snapshot(112).state.tolist() == [0.5, 0.2, 0.3]


def test_frames_nearest_to_the_oldest_of_the_newest_are_paired() -> None:
    feed = Feed()
    for i in range(6):  # 30 Hz, the wrist half a period behind and one frame late
        feed.image("front", i * 33, 10 + i)
    for i in range(4):
        feed.image("wrist", i * 33 + 16, 20 + i)
    feed.arm(120)
    seen = feed.snapshot(175)  # the instant is the wrist's 115 ms: 99 and 132 are front frames near it
    assert seen.images["wrist"][0, 0, 0] == 23
    assert seen.images["front"][0, 0, 0] == 13


@pytest.mark.parametrize(("sample", "a"), [("nearest", 0.100), ("newest", 0.140)])
def test_joint_sample_follows_the_robot_file(sample: str, a: float) -> None:
    feed = Feed(robot(joint_sample=sample))
    feed.image("front", 100)
    feed.image("wrist", 100)
    for t in range(90, 141, 2):
        feed.arm(t, a=t * 1e-3)
    assert feed.snapshot(142).state[0] == pytest.approx(a)


def test_of_two_equally_near_samples_the_newer_is_taken() -> None:
    feed = Feed()
    feed.image("front", 100)
    feed.image("wrist", 100)
    feed.arm(95, a=95.0)
    feed.arm(105, a=105.0)
    assert feed.snapshot(110).state[0] == 105.0


def test_without_cameras_the_slowest_joint_sets_the_instant() -> None:
    feed = Feed(robot(cameras=[]))
    for t in (100, 110, 120):
        feed.joints(t, {"a": t * 1.0, "b": 0.0})
    feed.joints(111, {"grip": 0.5}, topic="gripper/joint_states")
    assert feed.snapshot(125).state[0] == 110.0


def test_a_camera_may_change_its_size() -> None:
    feed = Feed()
    feed.all(100)
    receipt = feed._receipt(135)
    assert feed.buffer.put_image("front", frame(7, (8, 8)), ROS_0 + 133 * MS, **receipt) is Put.KEPT
    feed.image("wrist", 133)
    feed.arm(133)
    assert feed.snapshot(140).images["front"].shape == (8, 8, 3)


def test_latency_is_taken_off_the_stamp() -> None:
    cameras = [{"name": "front", "topic": "front/image", "role": "base", "latency_offset_s": 0.03}]
    feed = Feed(robot(cameras=cameras))
    for t in range(60, 101, 10):
        feed.arm(t, a=float(t))
    feed.image("front", 100)  # stamped at receipt; exposed at 70
    seen = feed.snapshot(106)
    assert seen.state[0] == 70.0
    assert seen.oldest_ros_ns == ROS_0 + 70 * MS
    assert seen.capture_mono_ns == MONO_0 + 70 * MS
    assert seen.image_stamps_ros_ns == {"front": ROS_0 + 100 * MS}, "the frame's own name on its topic"


def test_a_clock_stepped_after_receipt_does_not_move_the_capture() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(100)
    seen = feed.buffer.snapshot(ROS_0 + 150 * MS, MONO_0 + 105 * MS)  # ROS time was stepped by 45 ms
    assert seen.capture_mono_ns == MONO_0 + 100 * MS


def test_newest_state_is_nan_where_nothing_fresh_arrived() -> None:
    feed = Feed()
    feed.joints(100, {"a": 0.1})
    np.testing.assert_array_equal(feed.buffer.newest_state(MONO_0 + 105 * MS), [0.1, np.nan, np.nan])
    np.testing.assert_array_equal(feed.buffer.newest_state(MONO_0 + 500 * MS), [np.nan] * 3)


# -- missing, stale, skewed ----------------------------------------------------------------------------------


def test_a_camera_that_never_spoke_is_missing_and_says_what_did() -> None:
    feed = Feed()
    feed.image("front", 100)
    feed.arm(100)
    code, text = feed.refused(105)
    assert code is Refusal.MISSING
    assert text == (
        "missing: no message from camera 'wrist' (wrist/image). "
        "Topics seen so far: front/image, joint_states, gripper/joint_states."
    )


def test_a_joint_no_message_names_is_missing_by_name() -> None:
    feed = Feed()
    feed.all(100)
    other = Feed()
    other.image("front", 100)
    other.image("wrist", 100)
    other.joints(100, {"a": 0.1, "c": 0.2})
    other.joints(100, {"grip": 0.1}, topic="gripper/joint_states")
    code, text = other.refused(105)
    assert code is Refusal.MISSING
    assert "no message names joint 'b' (joint_states), got a, c." in text
    assert feed.snapshot(105).state.shape == (3,)


def test_before_the_first_clock_message_there_is_no_time() -> None:
    feed = Feed()
    put = feed.buffer.put_image("front", frame(), 5 * S, received_ros_ns=0, received_mono_ns=MONO_0)
    assert put is Put.DROPPED
    assert feed.buffer.camera_stats(MONO_0)[0].dropped == {"no_clock": 1}
    with pytest.raises(RefusalError, match="/clock") as caught:
        feed.buffer.snapshot(0, MONO_0)
    assert caught.value.code is Refusal.MISSING


@pytest.mark.fault(9)
def test_a_camera_that_dies_is_stale_after_its_limit_and_recovers() -> None:
    feed = Feed()
    feed.all(100)
    for t in range(110, 401, 10):
        feed.image("front", t)
        feed.arm(t)
    assert feed.snapshot(350).images["wrist"].shape == (4, 6, 3)  # 250 ms without a frame: within max_age_s
    code, text = feed.refused(406)
    assert code is Refusal.STALE
    assert text == "stale: camera 'wrist' (wrist/image) is silent, got 0.301 s, wanted at most 0.300 s"
    feed.image("wrist", 400)
    assert feed.snapshot(408).newest_ros_ns == ROS_0 + 400 * MS


@pytest.mark.fault(13)
def test_fresh_by_receipt_but_old_by_stamp_is_stale() -> None:
    feed = Feed()
    feed.image("front", 100, lag=320)
    feed.image("wrist", 419)
    feed.arm(419)
    code, text = feed.refused(421)
    assert code is Refusal.STALE
    assert "camera 'front' (front/image) is old by its stamp, got 0.321 s, wanted at most 0.300 s" in text
    assert "use_sim_time" not in text


def test_joint_states_have_their_own_limit() -> None:
    feed = Feed()
    feed.all(100)
    for t in (133, 166, 199):
        feed.image("front", t)
        feed.image("wrist", t)
    code, text = feed.refused(202)  # joints: received at 101, limit 100 ms
    assert code is Refusal.STALE
    assert "joint 'a' (joint_states) is silent, got 0.101 s, wanted at most 0.100 s" in text


def test_cameras_too_far_apart_are_skewed() -> None:
    feed = Feed()
    feed.image("front", 100)
    feed.image("wrist", 151)
    feed.arm(100)
    code, text = feed.refused(160)
    assert code is Refusal.SKEWED
    assert "camera 'wrist' (wrist/image) has no sample near" in text
    assert "camera 'front' (front/image) sets, got 0.051 s away, wanted at most 0.050 s" in text


def test_joints_too_far_from_the_image_are_skewed() -> None:
    feed = Feed()
    feed.image("front", 100)
    feed.image("wrist", 100)
    feed.arm(151)
    assert feed.refused(155)[0] is Refusal.SKEWED


def test_a_frame_that_matches_a_slow_camera_must_itself_be_fresh() -> None:
    cameras = [
        {"name": "front", "topic": "front/image", "role": "base", "max_age_s": 0.1},
        {"name": "wrist", "topic": "wrist/image", "role": "hand", "max_age_s": 0.5},
    ]
    feed = Feed(robot(cameras=cameras))
    for t in range(100, 301, 20):
        feed.image("front", t)
        feed.arm(t)
    feed.image("wrist", 120)
    code, text = feed.refused(310)
    assert code is Refusal.STALE
    assert "frame of camera 'front'" in text
    assert "got 0.190 s, wanted at most 0.100 s" in text


@pytest.mark.fault(37)
def test_a_bag_on_wall_time_asks_for_sim_time() -> None:
    feed = Feed()
    for t in range(0, 200, 10):  # recorded an hour ago
        feed.image("front", t - 3_600_000, at=t)
        feed.image("wrist", t - 3_600_000, at=t)
        feed.arm(t - 3_600_000, at=t)
    code, text = feed.refused(195)
    assert code is Refusal.STALE
    assert "got 3600.0" in text
    assert "use_sim_time" in text


def test_a_gap_in_a_bag_is_stale_then_over() -> None:
    feed = Feed()
    for t in (*range(0, 501, 20), *range(1000, 1101, 20)):
        feed.all(t)
        if t == 500:
            assert feed.refused(900)[0] is Refusal.STALE
    assert feed.snapshot(1106).newest_ros_ns == ROS_0 + 1100 * MS


# -- stamps --------------------------------------------------------------------------------------------------


def test_equal_and_backward_stamps_are_dropped_and_counted() -> None:
    feed = Feed(robot(cameras=[]))
    assert feed.joints(100, {"a": 1.0, "b": 1.0}) is Put.KEPT
    assert feed.joints(100, {"a": 2.0, "b": 2.0}) is Put.DROPPED
    assert feed.joints(95, {"a": 3.0, "b": 3.0}, at=102) is Put.DROPPED
    assert feed.joints(110, {"a": 4.0, "b": 4.0}) is Put.KEPT
    stats = feed.buffer.joint_stats(MONO_0 + 112 * MS)[0]
    assert (stats.name, stats.received) == ("joint_states", 4)
    assert stats.dropped == {"equal_stamp": 1, "backward_stamp": 1}
    feed.joints(110, {"grip": 0.0}, topic="gripper/joint_states")
    assert feed.snapshot(112).state[0] == 4.0


def test_a_driver_with_a_frozen_stamp_is_stale_in_those_words() -> None:
    feed = Feed()
    for t in range(100, 500, 20):
        feed.image("front", 100, at=t + 1)
        feed.image("wrist", t)
        feed.arm(t)
    code, text = feed.refused(485)
    assert code is Refusal.STALE
    assert "camera 'front' (front/image) for 0.384 s: stale: the stamp does not advance" in text
    assert feed.buffer.camera_stats(MONO_0 + 485 * MS)[0].dropped == {"equal_stamp": 19}


def test_an_old_fault_is_forgotten_once_a_frame_is_kept() -> None:
    feed = Feed()
    feed.all(100)
    feed.image("front", 100, at=110)
    feed.image("front", 120)
    for t in range(120, 460, 20):
        feed.image("wrist", t)
        feed.arm(t)
    assert "camera 'front' (front/image) is silent, got 0.320 s" in feed.refused(445)[1]


def test_a_stamp_in_the_future_is_a_clock_fault() -> None:
    feed = Feed()
    feed.all(100)
    for t in range(120, 460, 20):
        feed.image("front", t + 1500, at=t)
        feed.image("wrist", t)
        feed.arm(t)
    code, text = feed.refused(445)
    assert code is Refusal.SKEWED
    assert "clock fault: the stamp lies in the future, got 1.500 s ahead of the clock" in text
    assert "front" in text
    assert feed.buffer.camera_stats(MONO_0 + 445 * MS)[0].dropped == {"future_stamp": 17}


@pytest.mark.fault(13)
def test_wall_stamps_under_simulated_time_name_the_parameter() -> None:
    feed = Feed(robot(cameras=[]))
    names, values = ("a", "b"), np.zeros(2)
    feed.buffer.put_joints("joint_states", names, values, None, ROS_0, received_ros_ns=5 * S, received_mono_ns=MONO_0)
    with pytest.raises(RefusalError, match="use_sim_time") as caught:
        feed.buffer.snapshot(5 * S, MONO_0)
    assert caught.value.code is Refusal.SKEWED


def test_small_clock_differences_are_no_fault() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(100, at=50)
    assert feed.snapshot(51).oldest_ros_ns == ROS_0 + 100 * MS


def test_ros_time_that_went_back_before_the_flush_is_a_clock_fault() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(5000)
    with pytest.raises(RefusalError, match="clock fault") as caught:
        feed.buffer.snapshot(ROS_0 + 100 * MS, MONO_0 + 5001 * MS)
    assert caught.value.code is Refusal.SKEWED


def test_unstamped_messages_are_refused_unless_asked_for() -> None:
    strict, lenient = Feed(robot(cameras=[])), Feed(robot(cameras=[]), accept_unstamped=True)
    for feed in (strict, lenient):
        for topic, names in (("joint_states", ("a", "b")), ("gripper/joint_states", ("grip",))):
            feed.buffer.put_joints(topic, names, np.zeros(len(names)), None, 0, **feed._receipt(100))
    code, text = strict.refused(101)
    assert code is Refusal.MALFORMED
    assert "header.stamp is 0" in text
    assert "accept_unstamped" in text
    assert strict.buffer.joint_stats(MONO_0)[0].dropped == {"unstamped": 1}
    assert lenient.snapshot(101).oldest_ros_ns == ROS_0 + 100 * MS


# -- new timelines -------------------------------------------------------------------------------------------


@pytest.mark.fault(36)
def test_a_looped_bag_jumps_once_and_recovers_within_two_slow_periods() -> None:
    feed = Feed()
    for t in range(0, 60_000, 100):
        feed.image("front", t)
        feed.image("wrist", t + 1)
        for dt in range(0, 100, 10):
            feed.arm(t + dt)
    puts: list[tuple[int, Put]] = []
    for t in range(0, 1000, 10):  # the bag starts again, the ROS clock with it; monotonic time goes on
        receipt = {
            "received_ros_ns": ROS_0 + (t + 2) * MS,
            "received_mono_ns": MONO_0 + (60_000 + t + 2) * MS,
        }
        stamp = ROS_0 + t * MS
        for name in ("front", "wrist") if t % 100 == 0 else ():
            puts.append((t, feed.buffer.put_image(name, frame(), stamp, **receipt)))
        puts.append((t, feed.buffer.put_joints("joint_states", ("a", "b"), np.ones(2), None, stamp, **receipt)))
        feed.buffer.put_joints("gripper/joint_states", ("grip",), np.ones(1), None, stamp, **receipt)
    jumps = [t for t, put in puts if put is Put.JUMPED]
    assert jumps == [100]  # when the second frame of each camera confirmed it
    seen = feed.buffer.snapshot(ROS_0 + 905 * MS, MONO_0 + 60_905 * MS)
    assert seen.state.tolist() == [1.0, 1.0, 1.0]
    assert seen.images["front"].shape == (4, 6, 3)
    assert seen.newest_ros_ns <= ROS_0 + 990 * MS


def test_one_camera_whose_clock_wraps_is_followed_without_a_jump() -> None:
    feed = Feed()
    for t in range(0, 1000, 20):
        feed.all(t)
    puts = []
    for t in range(1000, 1200, 20):
        puts.append(feed.image("front", t - 4_260_000, at=t + 5))  # device clock of 71 min
        feed.image("wrist", t)
        feed.arm(t)
    assert puts[:4] == [Put.DROPPED] * 4
    assert set(puts[4:]) == {Put.KEPT}
    assert feed.refused(1190)[0] is Refusal.STALE  # its stamps are old now, and say so
    assert feed.buffer.camera_stats(MONO_0 + 1190 * MS)[0].dropped == {"backward_stamp": 4}


def test_a_single_stray_stamp_changes_nothing() -> None:
    feed = Feed(robot(cameras=[]))
    for t in range(0, 200, 10):
        feed.arm(t)
        if t == 100:
            assert feed.arm(t - 50_000, at=105) is Put.DROPPED
    assert feed.snapshot(192).oldest_ros_ns == ROS_0 + 190 * MS


def test_reordered_stamps_never_become_a_timeline() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(1000)
    for i in range(20):  # backward, but not in order among themselves
        assert feed.joints(990 - i, {"a": 9.0}, at=1001) is Put.DROPPED
    assert feed.snapshot(1002).state[0] == 0.0


def test_a_step_back_of_all_inputs_below_a_second_is_followed_without_a_jump() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(1000)
    puts = [feed.arm(500 + i * 10, a=float(i), at=1001 + i * 10) for i in range(6)]
    assert puts == [Put.DROPPED] * 4 + [Put.KEPT] * 2


def test_samples_between_those_of_another_publisher_never_become_a_timeline() -> None:
    feed = Feed(robot(cameras=[]))
    for t in range(1000, 1400, 10):  # the second publisher of joint a is two seconds behind
        assert feed.arm(t) is Put.KEPT
        assert feed.joints(t - 2000, {"a": 9.0}, at=t + 2) is Put.DROPPED
    assert feed.snapshot(1395).state[0] == 0.0


def test_a_new_timeline_is_followed_even_by_one_stream_and_a_small_step() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(1000)
    puts = [feed.joints(500 + i * 10, {"a": float(i), "b": 0.0}, at=1001 + i) for i in range(6)]
    assert puts == [Put.DROPPED] * 4 + [Put.KEPT] * 2
    assert feed.buffer.newest_state(MONO_0 + 1010 * MS)[0] == 5.0


def test_clear_forgets_samples_but_not_counts_and_takes_any_stamp() -> None:
    feed = Feed()
    feed.all(60_000)
    feed.image("front", 60_000)
    feed.buffer.clear()
    assert feed.refused(60_001)[0] is Refusal.MISSING
    assert feed.buffer.camera_stats(MONO_0)[0].received == 2
    assert feed.all(10) == [Put.KEPT] * 3
    assert feed.snapshot(16).oldest_ros_ns == ROS_0 + 10 * MS


# -- refused messages, frozen cameras, bounds ----------------------------------------------------------------


def test_a_camera_of_which_nothing_decodes_says_why() -> None:
    feed = Feed()
    feed.image("wrist", 100)
    feed.arm(100)
    feed.buffer.put_refused("front", ImageError("unknown encoding 'yuv999'"), MONO_0 + 101 * MS)
    code, text = feed.refused(105)
    assert code is Refusal.MALFORMED
    assert "camera 'front' (front/image): malformed: unknown encoding 'yuv999'" in text
    assert feed.buffer.camera_stats(MONO_0)[0].dropped == {"refused": 1}


def test_joint_states_that_turn_nan_refuse_as_not_finite_once_the_last_good_one_is_old() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(100)
    error = RefusalError(Refusal.NOT_FINITE, "position of joint 'b'", got=math.nan)
    for t in range(110, 250, 10):
        feed.buffer.put_refused("joint_states", error, MONO_0 + t * MS)
        feed.joints(t, {"grip": 0.0}, topic="gripper/joint_states")
    code, text = feed.refused(245)
    assert code is Refusal.NOT_FINITE
    assert "position of joint 'b', got nan" in text


@pytest.mark.parametrize("image", [np.zeros((4, 6), np.uint8), np.zeros((4, 6, 3)), np.zeros((0, 6, 3), np.uint8)])
def test_what_is_no_rgb_image_is_refused(image: Any) -> None:
    feed = Feed()
    assert feed.buffer.put_image("front", image, ROS_0, **feed._receipt(1)) is Put.DROPPED
    assert feed.refused(2)[0] is Refusal.MALFORMED


def test_a_state_that_is_not_finite_never_leaves_the_buffer() -> None:
    feed = Feed(robot(cameras=[]))
    feed.arm(100, b=math.inf)
    code, text = feed.refused(101)
    assert code is Refusal.NOT_FINITE
    assert "'b'" in text


def test_a_frozen_camera_is_refused_when_asked_for() -> None:
    feed, trusting = Feed(frozen_frames=3), Feed()
    for f in (feed, trusting):
        for i, t in enumerate(range(100, 200, 20)):
            f.image("front", t, 7 if i >= 2 else i)
            f.image("wrist", t, i)
            f.arm(t)
    code, text = feed.refused(190)
    assert code is Refusal.STALE
    assert "camera 'front' (front/image) is frozen, got 3 frames" in text
    assert trusting.snapshot(190).images["front"][0, 0, 0] == 7
    feed.image("front", 200, 8)
    assert feed.snapshot(206).images["wrist"][0, 0, 0] == 4


def test_images_are_changed_as_they_arrive_and_judged_as_they_came() -> None:
    """A frozen camera is told by the pixels that it sent."""
    seen: list[str] = []

    def smaller(camera: str, image: U8) -> U8:
        seen.append(camera)
        return image[:2, :2] * 0

    feed = Feed(frozen_frames=3, on_arrival=smaller)
    for i, t in enumerate(range(100, 200, 20)):
        feed.all(t, value=i)
    assert set(seen) == {"front", "wrist"}
    assert feed.snapshot(190).images["front"].shape == (2, 2, 3)


def test_history_is_bounded_by_count_and_by_age() -> None:
    feed = Feed(camera_history=4, joint_history=8)
    for t in range(0, 4000, 10):
        feed.all(t)
    assert len(feed.buffer._cameras["wrist"].stream._ring) == 4
    assert [len(stream._ring) for stream in feed.buffer._joints] == [8, 8, 8]
    slow = Feed()
    for t in range(0, 10_000, 200):
        slow.image("front", t)
    assert len(slow.buffer._cameras["front"].stream._ring) <= 3  # 0.4 s at 5 Hz, though 32 would fit


def test_unknown_names_are_a_defect_of_the_caller() -> None:
    feed = Feed()
    with pytest.raises(ConfigError, match="no camera named 'back', wanted one of front, wrist"):
        feed.image("back", 1)
    with pytest.raises(ConfigError, match="no joint state topic 'arm'"):
        feed.joints(1, {"a": 0.0}, topic="arm")
    assert feed.buffer.needed("joint_states") == {"a", "b"}


# -- figures -------------------------------------------------------------------------------------------------


def test_rate_and_delivered_fraction() -> None:
    feed = Feed()
    for i in range(120):  # 40 Hz for 3 s, every tenth frame lost
        if i % 10 != 5:
            feed.image("front", i * 25)
    front, wrist = feed.buffer.camera_stats(MONO_0 + 2982 * MS)
    assert front.delivered == pytest.approx(108 / 120)
    assert front.rate_hz == pytest.approx(36.0, rel=0.02)
    assert math.isnan(wrist.delivered)
    assert math.isnan(wrist.rate_hz)


def test_delivered_falls_while_a_camera_is_silent() -> None:
    feed = Feed()
    for i in range(41):  # 20 Hz for 2 s
        feed.image("front", i * 50)
    assert feed.buffer.camera_stats(MONO_0 + 2010 * MS)[0].delivered == 1.0
    assert feed.buffer.camera_stats(MONO_0 + 3005 * MS)[0].delivered == pytest.approx(41 / 60)
    late = feed.buffer.camera_stats(MONO_0 + 9000 * MS)[0]
    assert (late.delivered, late.rate_hz) == (0.0, 0.0)


def test_jitter_is_no_loss() -> None:
    feed = Feed()
    rng = np.random.default_rng(0)
    for i in range(100):
        feed.image("front", i * 33 + float(rng.uniform(-8, 8)), lag=20)
    assert feed.buffer.camera_stats(MONO_0 + 3300 * MS)[0].delivered == 1.0


def test_few_frames_give_no_fraction() -> None:
    feed = Feed()
    for i in range(7):
        feed.image("front", i * 50)
    assert math.isnan(feed.buffer.camera_stats(MONO_0 + 310 * MS)[0].delivered)
