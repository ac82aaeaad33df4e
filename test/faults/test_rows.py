"""Every row of public fault reports that this package answers for is held by a test.

A test says which rows it covers with ``@pytest.mark.fault(16, 18)``: it shows the right behaviour for that kind of
input, not merely that nothing crashes. This table is the list of rows; the titles are ours, the links are the reports.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parents[1]
GITHUB = "https://github.com/"

# row: (what people saw, the reports)
ROWS: dict[int, tuple[str, tuple[str, ...]]] = {
    2: ("the arm steps back at every new chunk", ("NVIDIA/Isaac-GR00T/issues/272",)),
    3: ("the first chunk begins in its middle", ("huggingface/lerobot/pull/4223",)),
    4: ("a short list of committed actions is filled up with zeros", ("huggingface/lerobot/pull/4454",)),
    5: ("committed actions are cut where they stood when inference began", ("strands-labs/robots/pull/3402",)),
    7: ("the robot waits without end for a chunk and nobody is told", ("huggingface/lerobot/issues/2356",)),
    9: ("a camera that pauses for 250 ms ends the run", ("huggingface/lerobot/issues/1675",)),
    11: ("an exception in a callback wedges the synchroniser", ("ros2/message_filters/issues/169",)),
    12: (
        "NumPy 2 breaks the image bridge; big-endian images",
        ("ros-perception/vision_opencv/issues/535", "ros-perception/vision_opencv/pull/556"),
    ),
    13: ("the arm moves on when stamps come from another clock", ("moveit/moveit2/issues/772",)),
    14: (
        "stop messages without end take the robot from its other controllers",
        ("moveit/moveit/issues/3049", "moveit/moveit2/issues/2127"),
    ),
    15: (
        "on resume the arm jumps to where it was last commanded",
        ("moveit/moveit2/pull/707", "moveit/moveit2/pull/1904"),
    ),
    16: (
        "joints in another order; NaN in fields nobody reads",
        ("kroshu/kuka_drivers/issues/254", "UniversalRobots/Universal_Robots_ROS_Driver/issues/619"),
    ),
    18: ("joint states with empty or short arrays are read out of bounds", ("ros-navigation/navigation2/issues/6165",)),
    20: (
        "an action with too few values drives the other joints to zero",
        ("strands-labs/robots/issues/1701", "strands-labs/robots/pull/1704"),
    ),
    21: ("the padded output of a model reaches the robot", ("Physical-Intelligence/openpi/pull/939",)),
    22: (
        "stopping at once from speed faults the drives",
        ("ros-controls/ros2_controllers/pull/2163", "frankarobotics/franka_ros2/issues/174"),
    ),
    23: ("NaN slips through a clamp", ("strands-labs/robots/pull/2923",)),
    24: (
        "pickled payloads run code",
        ("huggingface/lerobot/issues/3047", "huggingface/lerobot/pull/3574"),
    ),
    26: (
        "a late reply is taken for the next one",
        ("zeromq/libzmq/issues/1227", "zeromq/pyzmq/issues/1741", "vnpy/vnpy/issues/3792"),
    ),
    28: (
        "padded image rows are read as pixels",
        ("ros-perception/vision_opencv/issues/115", "ros-perception/vision_opencv/pull/394"),
    ),
    30: (
        "the byte order of YUV 4:2:2 is guessed",
        ("ros-drivers/usb_cam/issues/263", "NVIDIA-ISAAC-ROS/isaac_ros_apriltag/issues/27"),
    ),
    33: (
        "red and blue are swapped and nobody notices",
        ("VSLAM-LAB/VSLAM-LAB/issues/132", "intel/ros2_intel_realsense/issues/48"),
    ),
    36: (
        "a looping bag stops synchronisation for ever",
        ("ros/ros_comm/pull/1438", "ros2/message_filters/pull/136"),
    ),
    37: ("recorded stamps against wall time: everything is old", ("ros2/rosbag2/issues/1056",)),
    38: (
        "no images and one warning: the QoS does not match",
        ("abizovnuralem/go2_ros2_sdk/issues/146", "ros-perception/image_pipeline/issues/770"),
    ),
    39: ("no stop is sent on Ctrl-C", ("ros2/rclpy/issues/1287", "ros2/rclpy/issues/532")),
    41: (
        "the controller refuses a trajectory that ends in the past or has no points",
        ("moveit/moveit2/issues/287", "moveit/moveit/pull/2375", "ros-controls/ros2_controllers/pull/1090"),
    ),
    42: ("a trajectory that leaves a joint out", ("ros-controls/ros2_controllers/pull/346",)),
    43: ("an exception in a callback vanishes", ("ros2/rclpy/issues/983",)),
    44: ("autostart activates before the node is configured", ("ros2/launch_ros/issues/445",)),
    45: ("the arm drops when it is stopped", ("almond-bot/axol/issues/247",)),
    47: ("the steps of a chunk are played in scrambled order", ("Robbyant/lingbot-va/issues/29",)),
}


def _rows(decorator: ast.expr) -> list[int]:
    """The rows of one ``@pytest.mark.fault(...)``; [] for any other decorator."""
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault"):
        return []
    return [int(ast.literal_eval(argument)) for argument in decorator.args]


def _covered() -> dict[int, list[str]]:
    """Row -> the tests that say they cover it."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for row in (row for decorator in node.decorator_list for row in _rows(decorator)):
                    found[row].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_row_has_a_test() -> None:
    covered = _covered()
    missing = [f"{row}: {title} ({GITHUB}{links[0]})" for row, (title, links) in ROWS.items() if row not in covered]
    assert not missing, "no test is marked with @pytest.mark.fault for\n" + "\n".join(missing)


def test_marks_name_rows_of_the_table() -> None:
    unknown = {row: tests for row, tests in _covered().items() if row not in ROWS}
    assert not unknown
