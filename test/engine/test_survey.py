"""What the sensors of a bag did: figures of every input, planted faults by name, and nothing for a clean bag."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import RobotConfig
from phyai_engine.errors import BagError
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.examine import Examined, examine
from phyai_engine.replay.sensor_faults import Heard, Motion, find_faults
from phyai_engine.replay.survey import Fault, InputSurvey
from phyai_engine.replay.topic_map import map_topics

Make = Callable[..., RobotConfig]
T0 = 1_700_000_000_000_000_000
S = 1_000_000_000


@pytest.fixture
def examined(bags: ModuleType, bag_robot: Make, tmp_path: Path) -> Callable[..., Examined]:
    """Writes a recording and examines it; arguments are those of bags.Script."""

    def make(robot: RobotConfig | None = None, **script: Any) -> Examined:
        robot = robot or bag_robot()
        folder = bags.write_bag(tmp_path / f"bag{len(list(tmp_path.iterdir()))}", bags.Script(**script))
        with Bag(folder) as bag:
            return examine(bag, map_topics(robot, bag), robot)

    return make


def named(faults: Any) -> list[tuple[str, str]]:
    return [(fault.where, fault.kind) for fault in faults]


def of(found: Examined, name: str) -> InputSurvey:
    return next(one for one in found.survey.inputs if one.name == name)


# -- whole bags --------------------------------------------------------------------------------------------------------


def test_a_clean_bag_has_figures_and_no_fault(examined: Callable[..., Examined]) -> None:
    found = examined()
    survey = found.survey
    assert survey.faults == ()
    assert survey.warnings == []
    assert (survey.messages, survey.clock_offset_s) == (280, 0.0)
    assert survey.duration_s == pytest.approx(1.991)
    assert [(one.name, one.topic, one.kind, one.messages) for one in survey.inputs] == [
        ("front", "/front/image_raw", "camera", 40),
        ("wrist", "/wrist/image_raw", "camera", 40),
        ("joint_states", "/joint_states", "joints", 200),
    ]
    front, joints = of(found, "front"), of(found, "joint_states")
    assert (front.rate_hz, joints.rate_hz) == (pytest.approx(20.0), pytest.approx(100.0))
    assert front.encodings == ("rgb8 32x24",)
    assert (front.period.p50, front.interval.max) == (pytest.approx(0.05), pytest.approx(0.05))
    assert (front.lateness.p50, joints.lateness.max) == (pytest.approx(0.006), pytest.approx(0.001))
    assert front.skew.max <= 0.01 + 1e-6
    assert np.isnan(joints.skew.p50)  # no other input is as fast
    assert (front.gaps, front.frozen, front.backward, front.repeated, front.unstamped) == (0, 0, 0, 0, 0)
    assert found.ready_ns == T0 + 6_000_000


def test_a_late_camera_is_named(examined: Callable[..., Examined]) -> None:
    found = examined(received=lambda name, t: t + {"front": 0.006, "wrist": 0.086, "joints": 0.001}[name])
    (fault,) = found.survey.faults
    assert (fault.where, fault.kind) == ("wrist", "late")
    assert fault.text == "arrives 86 ms after its stamp (median; p99 86 ms), front after 6 ms"
    assert of(found, "wrist").lateness.p50 == pytest.approx(0.086)


def test_a_stall_every_five_seconds_is_named(examined: Callable[..., Examined]) -> None:
    def stalled(name: str, t: float) -> float | None:
        return None if name == "front" and t % 5.0 > 4.65 else t + 0.005

    found = examined(received=stalled, seconds=21.0, camera_hz=10.0, joint_hz=50.0, size=(4, 4))
    (fault,) = found.survey.faults
    assert (fault.where, fault.kind) == ("front", "stall")
    assert fault.text == "is silent 4 times, about every 5.0 s, for up to 0.40 s"
    assert fault.t_s == pytest.approx(4.6 + 0.005)
    assert of(found, "front").gaps == 4


def test_a_gap_of_seconds_is_named_and_one_of_all_inputs_is_the_recording_s(examined: Callable[..., Examined]) -> None:
    alone = examined(received=lambda name, t: None if name == "wrist" and 1.0 < t < 3.5 else t, seconds=5.0)
    assert named(alone.survey.faults) == [("wrist", "gap")]
    assert alone.survey.faults[0].text == "is silent for 2.50 s"
    shared = examined(received=lambda name, t: None if 1.0 < t < 3.5 else t, seconds=5.0)
    assert named(shared.survey.faults) == [("all inputs", "gap")]
    assert shared.survey.faults[0].text == "are silent for 2.50 s"


def test_frozen_frames_are_named_while_the_robot_moves(examined: Callable[..., Examined]) -> None:
    def frozen(name: str, t: float) -> float:
        return 0.8 if name == "wrist" and 0.8 <= t < 1.6 else t

    found = examined(shown=frozen)
    (fault,) = found.survey.faults
    assert (fault.where, fault.kind) == ("wrist", "frozen")
    assert fault.text == "repeats the same picture while the robot moves, once, longest 0.75 s (16 frames)"
    assert fault.t_s == pytest.approx(0.806)
    assert (of(found, "wrist").frozen, of(found, "wrist").longest_frozen) == (15, 15)


def test_a_robot_at_rest_looks_the_same_and_is_no_fault(
    examined: Callable[..., Examined], bags: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bags, "position", lambda t: [0.2, 0.3])
    found = examined(shown=lambda name, t: 0.0)
    assert found.survey.faults == ()
    assert of(found, "front").longest_frozen == 39


def test_a_late_picture_of_a_robot_at_rest_is_not_frozen(
    examined: Callable[..., Examined], bags: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bags, "position", lambda t: [max(0.0, t - 1.0), 0.3])
    late = {"front": 0.006, "wrist": 0.086, "joints": 0.001}
    found = examined(received=lambda name, t: t + late[name], shown=lambda name, t: max(t, 1.0))
    assert named(found.survey.faults) == [("wrist", "late")]


def test_looped_stamps_are_named(examined: Callable[..., Examined]) -> None:
    found = examined(seconds=1.5, cycles=3)
    (fault,) = found.survey.faults
    assert (fault.where, fault.kind) == ("all inputs", "looped")
    assert fault.text.startswith("go back in time together, 2 times")
    assert fault.t_s == pytest.approx(1.5, abs=0.02)


def test_stamps_that_repeat_fail_or_run_ahead_are_named(examined: Callable[..., Examined]) -> None:
    def stamp(name: str, t: float) -> float | None:
        if name == "wrist":
            return None if t < 0.2 else t
        if name == "front":
            return min(t, 1.2)
        return t + 0.5 if t > 1.7 else t

    found = examined(stamp=stamp)
    assert set(named(found.survey.faults)) >= {
        ("wrist", "unstamped"),
        ("front", "repeated_stamp"),
        ("joint_states", "future_stamp"),
    }
    assert (of(found, "wrist").unstamped, of(found, "front").repeated) == (4, 15)


def test_stamps_of_another_clock_are_shifted_if_all_are_and_named_if_one_is(examined: Callable[..., Examined]) -> None:
    simulated = examined(stamp=lambda name, t: t - 1_600_000_000.0)
    assert simulated.survey.faults == ()
    assert simulated.clock_offset_ns == pytest.approx(1_600_000_000 * S + 1_000_000, abs=1000)
    assert of(simulated, "front").lateness.p50 == pytest.approx(0.005, abs=1e-5)
    (words,) = simulated.survey.warnings
    assert words.startswith("all stamps lie 1600000000.0 s before their receipt (simulated time?)")
    one = examined(stamp=lambda name, t: t - 3600.0 if name == "wrist" else t)
    assert named(one.survey.faults) == [("wrist", "clock")]
    assert one.clock_offset_ns == 0


def test_an_encoding_that_cannot_be_read_is_refused_or_counted(
    examined: Callable[..., Examined], bags: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BagError, match=r"none of the 40 messages of an input can be read, got .*rgb12.*/front/image"):
        examined(encoding="rgb12")
    make = bags._message

    def sometimes(name: str, t: float, stamp_ns: int, script: Any) -> Any:
        kind, message = make(name, t, stamp_ns, script)
        if name == "front" and 1.0 < t < 1.3:
            message.encoding = "rgb12"
        return kind, message

    monkeypatch.setattr(bags, "_message", sometimes)
    found = examined()
    (fault,) = found.survey.faults
    assert (fault.where, fault.kind) == ("front", "undecodable")
    assert fault.text.startswith("has 5 of 40 messages that cannot be read: ")
    assert of(found, "front").encodings == ("rgb8 32x24", "rgb12 32x24")


def test_compressed_cameras_are_surveyed(examined: Callable[..., Examined], bag_robot: Make) -> None:
    robot = bag_robot(("front",), transport="compressed")
    found = examined(robot, cameras=("front",), compressed=("front",))
    assert found.survey.faults == ()
    assert of(found, "front").encodings == ("jpeg",)


def test_joints_that_are_never_named_are_refused(examined: Callable[..., Examined]) -> None:
    with pytest.raises(BagError, match=r"no message of /joint_states names j1, got j0, x"):
        examined(joint_names=("j0", "x"))


# -- the rules alone ---------------------------------------------------------------------------------------------------


def heard(name: str, stamps_s: Any, *, late_s: float = 0.005, kind: Any = "camera", tolerance_s: float = 0.05) -> Heard:
    stamps = (np.asarray(stamps_s) * S).astype(np.int64) + T0
    return Heard(
        name=name,
        topic=f"/{name}",
        kind=kind,
        tolerance_s=tolerance_s,
        received_ns=stamps + round(late_s * S),
        stamps_ns=stamps,
        digests=np.arange(len(stamps)) if kind == "camera" else np.array([], dtype=np.int64),
    )


def faults(*inputs: Heard) -> tuple[Fault, ...]:
    return find_faults(inputs, Motion(np.array([T0]), np.zeros((1, 2))), T0)


GRID = np.arange(0, 10, 0.1)


def test_an_only_camera_is_held_against_the_joints() -> None:
    joints = heard("joints", np.arange(0, 10, 0.01), late_s=0.001, kind="joints")
    assert faults(heard("front", GRID, late_s=0.09), joints) == ()
    assert named(faults(heard("front", GRID, late_s=0.12), joints)) == [("front", "late")]


def test_slow_cameras_and_jitter_are_no_faults() -> None:
    rng = np.random.default_rng(0)
    slow = heard("slow", np.arange(0, 10, 0.9) + rng.uniform(-0.05, 0.05, 12), tolerance_s=0.5)
    assert faults(slow, heard("front", GRID + rng.uniform(-0.02, 0.02, 100))) == ()


def test_one_stamp_that_steps_back_is_that_input_s() -> None:
    stamps = GRID.copy()
    stamps[40] -= 0.25
    found = faults(heard("front", GRID), heard("wrist", stamps))
    assert ("wrist", "backward_stamp") in named(found)
    assert not any(fault.kind == "looped" for fault in found)


def test_cameras_that_are_never_near_each_other_are_skewed() -> None:
    found = faults(heard("front", GRID, tolerance_s=0.04), heard("wrist", GRID + 0.05, tolerance_s=0.08))
    assert named(found) == [("front", "skewed")]
    assert found[0].text == (
        "is stamped 50 ms from the nearest sample of another input (median), more than its tolerance of 40 ms"
    )


def test_the_gravest_fault_comes_first() -> None:
    late = heard("late", GRID, late_s=0.2)
    holed = heard("holed", GRID[(GRID < 4) | (GRID > 7)])
    assert [fault.kind for fault in faults(late, holed)] == ["gap", "late"]
