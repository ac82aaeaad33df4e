"""A recording of the policy node: what is in it, its bounds, and that the robot never waits for it."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rclpy.lifecycle import TransitionCallbackReturn
from std_msgs.msg import String

from phyai_engine.config import ModelConfig, RobotConfig, convert
from phyai_engine.errors import ConfigError
from phyai_engine.messages import image_to_rgb, stamp_ns
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.run_file import load_run
from phyai_engine.types import CommandKind
from phyai_engine.weights.checkpoint import model_and_notes
from phyai_ros.recording import check_room, check_rosbags

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
LAYOUT = Path(__file__).resolve().parents[2] / "config" / "foxglove" / "recording.json"


def read(folder: Path) -> dict[str, list[Any]]:
    """Every message of a recording by topic, in the order of receipt."""
    found: dict[str, list[Any]] = {}
    with Bag(folder) as bag:
        assert not bag.warnings
        for message in bag.messages(bag.topics):
            found.setdefault(message.topic, []).append(bag.decode(message))
    return found


@pytest.fixture(scope="module")
def recorded(rig_type: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A rig that drove, and the recording of it."""
    tmp = tmp_path_factory.mktemp("recorded")
    rig = rig_type(tmp, record=str(tmp / "run"), schedule="rtc", model={"latency_ms": 30.0})
    try:
        rig.configure()
        rig.handed_over = []
        link = rig.node._session.recording.link
        give = link.give
        link.give = lambda topic, content: (rig.handed_over.append(topic), give(topic, content))
        assert rig.node.trigger_activate() is TransitionCallbackReturn.SUCCESS
        rig.until(lambda: len(rig.timings) > 4, 10.0)
        publisher = rig.peer.create_publisher(String, "policy_node/instruction", 1)
        rig.until(lambda: publisher.get_subscription_count() == 2)  # node and recorder
        publisher.publish(String(data="pick the cup"))
        rig.spin(0.6)
        assert rig.node.trigger_deactivate() is TransitionCallbackReturn.SUCCESS
        rig.spin(0.2)
        assert rig.node.trigger_cleanup() is TransitionCallbackReturn.SUCCESS
    finally:
        rig.close()
    return rig, tmp / "run"


def test_the_recording_holds_what_the_node_saw_and_did(recorded: tuple[Any, Path]) -> None:
    rig, folder = recorded
    found = read(folder)
    assert {"/front/image_raw", "/wrist/image_raw", "/joint_states"} <= found.keys()
    assert [m.data for m in found["/policy_node/instruction"]] == ["pick the cup"]
    steps = [(m.tick, m.kind, tuple(m.values)) for m in found["/policy_node/step"]]
    heard = [(m.tick, m.kind, tuple(m.values)) for m in rig.steps]
    assert len(heard) > 40
    assert steps[-len(heard) :] == heard, "every command, and no other"
    assert [m.chunk_id for m in found["/policy_node/timing"]] == [m.chunk_id for m in rig.timings]
    assert {m.lifecycle_label for m in found["/policy_node/status"]} >= {"active", "inactive"}
    assert len(found["/joint_trajectory_controller/joint_trajectory"]) == len(steps)


def test_every_request_names_frames_that_are_there(recorded: tuple[Any, Path]) -> None:
    rig, folder = recorded
    found = read(folder)
    frames = {
        camera.name: {stamp_ns(m.header.stamp): m for m in found[f"/{camera.topic}"]} for camera in rig.robot.cameras
    }
    requests = found["/policy_node/request"]
    assert len(requests) > 4
    for request in requests:
        assert request.cameras == ["front", "wrist"]
        for name, stamp in zip(request.cameras, request.image_stamps, strict=True):
            assert image_to_rgb(frames[name][stamp_ns(stamp)]).shape == (24, 32, 3)
        assert request.state_names == list(rig.robot.state_names)
        assert len(request.state) == len(request.velocity) == 7
        assert np.isfinite(request.state).all()
    assert requests[0].committed_rows == 0
    assert len(requests[0].committed) == 0
    assert all(len(r.committed) == 7 * r.committed_rows > 0 for r in requests[1:])
    assert [r.seed - r.chunk_id for r in requests] == [0] * len(requests)
    assert requests[0].instruction == "" and requests[-1].instruction == "pick the cup"
    assert all(a.chunk_id < b.chunk_id for a, b in itertools.pairwise(requests))


def test_the_chunks_are_the_engines_answers_from_which_the_commands_were_taken(recorded: tuple[Any, Path]) -> None:
    rig, folder = recorded
    found = read(folder)
    chunks = {m.chunk_id: np.reshape(m.actions, (m.horizon, 7)) for m in found["/policy_node/chunk"]}
    asked = {m.chunk_id: m for m in found["/policy_node/request"]}
    assert chunks.keys() <= asked.keys()
    assert all(len(rows) == 16 for rows in chunks.values())
    for message in found["/policy_node/chunk"]:
        assert message.oldest_observation == asked[message.chunk_id].oldest_observation
    actions = [m for m in rig.steps if m.kind == CommandKind.ACTION]
    assert len(actions) > 20
    for step in actions:
        assert np.array_equal(step.values, chunks[step.chunk_id][step.step])


def test_run_json_is_enough_to_build_robot_and_model_again(recorded: tuple[Any, Path]) -> None:
    rig, folder = recorded
    run = load_run(folder)
    assert convert(yaml.safe_load(run.robot), RobotConfig, where="run.json") == rig.robot
    assert convert(yaml.safe_load(run.model), ModelConfig, where="run.json") == model_and_notes(rig.model_file)[0]
    assert run.model_name == str(rig.model_file)
    assert run.parameters["schedule"] == "rtc"
    assert run.parameters["record_max_mib"] == 4096
    assert run.package and run.host and run.started


def test_off_by_default(make_rig: Make) -> None:
    rig = make_rig()
    rig.start()
    assert rig.node._session.recording is None
    assert not any(s.raw for s in rig.node.subscriptions)


def test_codes_in_the_name_are_filled_in_and_nothing_is_overwritten(make_rig: Make, tmp_path: Path) -> None:
    kept = tmp_path / time.strftime("run-%Y")
    kept.mkdir()
    (kept / "note").write_text("mine")
    rig = make_rig(record=str(tmp_path / "run-%Y"))
    assert rig.node.trigger_configure() is TransitionCallbackReturn.FAILURE
    assert "the recording exists, and nothing is overwritten" in rig.node._last_error
    assert [p.name for p in kept.iterdir()] == ["note"]


def test_a_robot_without_rosbags_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rosbags", None)
    with pytest.raises(ConfigError, match=r"needs the package rosbags.*Run `pip install rosbags`"):
        check_rosbags()


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no room for a recording, got \d+ MiB free, wanted record_max_mib"):
        check_room(tmp_path / "run", 1 << 40)


def test_the_node_pays_nothing_for_what_topics_carry(recorded: tuple[Any, Path]) -> None:
    rig, folder = recorded
    assert set(rig.handed_over) == {"/policy_node/request", "/policy_node/chunk"}
    found = read(folder)
    assert len(rig.handed_over) == len(found["/policy_node/request"]) + len(found["/policy_node/chunk"])


def test_a_recording_that_ends_early_is_told_in_diagnostics_while_the_robot_drives_on(
    make_rig: Make, tmp_path: Path
) -> None:
    rig = make_rig(record=str(tmp_path / "run"))
    rig.start()
    os.kill(rig.node._session.recording.link.process.pid, signal.SIGKILL)
    rig.until(lambda: any("ended with exit code -9" in notes(a).get("recording", "") for a in rig.diagnostics))
    count = len(rig.steps)
    rig.until(lambda: len(rig.steps) > count + 10)
    assert rig.steps[-1].kind == CommandKind.ACTION


def notes(array: Any) -> dict[str, str]:
    return {pair.key: pair.value for pair in array.status[0].values}


def test_the_layout_for_foxglove_names_topics_and_fields_that_a_recording_has(recorded: tuple[Any, Path]) -> None:
    _, folder = recorded
    layout = json.loads(LAYOUT.read_text())
    panels = layout["configById"]
    assert set(panels) == set(re.findall(r'"(\w+!\w+)"', json.dumps(layout["layout"])))
    with Bag(folder) as bag:
        kinds = {name: topic.kind for name, topic in bag.topics.items()}
    paths = [p["value"] for panel in panels.values() for p in panel.get("paths", ())]
    paths += [panel["topicPath"] for panel in panels.values() if "topicPath" in panel]
    paths += [panel["imageMode"]["imageTopic"] for panel in panels.values() if "imageMode" in panel]
    assert len(paths) > 15
    for path in paths:
        topic, _, field = path.partition(".")
        package, _, name = kinds[topic].split("/")
        fields = getattr(importlib.import_module(f"{package}.msg"), name).get_fields_and_field_types()
        assert not field or field.removesuffix("[:]") in fields, path
