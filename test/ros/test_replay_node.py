"""A bag through a real policy node over DDS: the record, the exit codes, and what is refused."""

from __future__ import annotations

import array
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

from phyai_engine.config import load_robot, resolve
from phyai_engine.replay import record as records
from phyai_engine.replay.bag_writer import BagWriter
from phyai_ros import replay_node
from phyai_ros.convert import to_stamp

pytestmark = pytest.mark.ros
MIB = 1 << 20
START_NS = 1_800_000_000 * 10**9
JOINTS = load_robot(resolve("robots", "arm7")).state_names
HOME = (0.0, -0.4, 0.0, -1.6, 0.0, 1.4, 0.7)


def image(ns: int, number: int) -> Image:
    pixels = array.array("B", bytes((number * 7 + i) % 256 for i in range(24 * 32 * 3)))
    message = Image(height=24, width=32, encoding="rgb8", step=96, data=pixels)
    message.header.stamp = to_stamp(ns)
    return message


def joints(ns: int) -> JointState:
    swing = 0.05 * math.sin((ns - START_NS) * 1e-9)
    message = JointState(name=JOINTS, position=[value + swing for value in HOME])
    message.header.stamp = to_stamp(ns)
    return message


def write_bag(folder: Path, seconds: float, *, wrist: bool = True) -> Path:
    """Two cameras at 20 Hz, joints at 100 Hz, and an instruction."""
    topics = {"/front/image_raw": "sensor_msgs/msg/Image", "/joint_states": "sensor_msgs/msg/JointState"}
    topics |= {"/wrist/image_raw": "sensor_msgs/msg/Image"} if wrist else {}
    bag = BagWriter(folder, 64 * MIB, {**topics, "/some_node/instruction": "std_msgs/msg/String"}, {})

    def write(topic: str, now_ns: int, message: Any) -> None:
        assert bag.write(topic, now_ns, serialize_message(message), trailing=True)

    write("/some_node/instruction", START_NS, String(data="wipe the table"))
    for i in range(round(seconds * 100)):
        now_ns = START_NS + i * 10_000_000
        write("/joint_states", now_ns, joints(now_ns - 1_000_000))
        for topic in topics:
            if i % 5 == 0 and topic.endswith("image_raw"):
                write(topic, now_ns, image(now_ns - 5_000_000, i))
    bag.close()
    return folder


@pytest.fixture(scope="module")
def replayed(
    domain_of_its_own: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Three seconds replayed in processes of their own."""
    tmp = tmp_path_factory.mktemp("replayed")
    bag, out = write_bag(tmp / "bag", 3.0), tmp / "out"
    model = tmp / "model.yaml"
    options = "horizon: 16, action_dim: 8, latency_ms: 30.0, cameras: [base_0_rgb, left_wrist_0_rgb], image_size: 16"
    model.write_text(f"family: fake\nnormalisation: {{kind: limits}}\noptions: {{{options}}}\n")
    domain, lock = domain_of_its_own()
    environment = {**os.environ, "ROS_DOMAIN_ID": str(domain)}
    command = [sys.executable, "-m", "phyai_ros.replay_node", str(bag), "--robot", "arm7", "--model", str(model)]
    command += ["--engine", "thread", "--out", str(out), "--gate", "aborts<=0,p50_margin_ms>=1e6", "-p", "seed:=3"]
    command += ["--record", str(tmp / "again")]
    with lock:
        return run_to_its_end(command, environment, 90.0), out


def run_to_its_end(command: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a replay; whatever happens, none of its processes, each of a session of its own, outlives this."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for member in family:
                member.kill()
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def test_a_replay_that_hangs_leaves_no_process_behind() -> None:
    words = ["sleep", f"60.{os.getpid()}"]
    script = f"import subprocess, time; subprocess.Popen({words}, start_new_session=True); time.sleep(60)"
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_its_end([sys.executable, "-c", script], dict(os.environ), 1.5)
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == words]


def test_the_record_is_of_a_real_node_on_the_bags_clock(replayed: tuple[Any, Path]) -> None:
    ran, out = replayed
    assert (out / "record.json").is_file(), ran.stdout + ran.stderr
    run = records.load(out / "record.json")
    assert (run.mode, run.bag, run.robot_id, run.placement) == ("real-time", "bag", "arm7", "thread")
    assert 2.9 < run.survey.duration_s < 3.1
    assert not run.survey.faults
    assert {name: len(camera.t_s) for name, camera in run.cameras.items()} == {"front": 60, "wrist": 60}
    actions = [step for step in run.steps if step.kind == "action"]
    assert len(actions) > 80, [event.text for event in run.events]
    accepted = [row for row in run.timings if row.outcome == "accepted"]
    assert len(accepted) > 8
    assert not any(event.kind == "abort" for event in run.events)
    measured = [row.m_ctrl_s for row in accepted if math.isfinite(row.m_ctrl_s)]
    assert measured, "the clock ran at rate 1"
    assert run.first_inference_s > 0.02
    assert (out / "report.html").stat().st_size > 100_000
    assert any("messages played, late by p50" in event.text for event in run.events)


def test_the_gate_sets_the_exit_code(replayed: tuple[Any, Path]) -> None:
    ran, out = replayed
    assert ran.returncode == 1
    judged = {entry.name: entry.ok for entry in records.load(out / "record.json").invariants}
    assert judged == {"gate aborts <= 0": True, "gate p50_margin_ms >= 1e+06": False}


def test_parameters_and_the_first_instruction_reach_the_node(replayed: tuple[Any, Path]) -> None:
    from phyai_engine.replay.recorded import open_recording

    _, out = replayed
    with open_recording(out.with_name("again")) as recording:
        asked = [exchange.request for exchange in recording.exchanges(images=False)]
    assert len(asked) > 8
    assert {request.observation.instruction for request in asked} == {"wipe the table"}
    assert [request.seed for request in asked] == [3 + request.chunk_id for request in asked]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No context is made: what is refused is refused before any node exists."""
    monkeypatch.setattr(replay_node.rclpy, "init", lambda args: None)
    monkeypatch.setattr(replay_node, "Node", None)


@pytest.mark.usefixtures("quiet")
def test_a_bag_that_does_not_fit_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bag, out = write_bag(tmp_path / "bag", 0.5, wrist=False), tmp_path / "out"
    assert replay_node.main([str(bag), "--robot", "arm7", "--model", "fake", "--out", str(out)]) == 2
    assert "/wrist/image_raw (camera 'wrist') is missing" in capsys.readouterr().out
    assert not out.exists()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("more", "said"),
    [(["--gate", "p98_margin_ms>=5"], "the gate names no figure"), (["--robot", "arm8"], "arm8")],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    command = [str(tmp_path / "bag"), "--robot", "arm7", "--model", "fake", "--out", str(tmp_path / "out"), *more]
    assert replay_node.main(command) == 2
    assert said in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_parameter_has_a_name_and_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        replay_node.arguments(["bag", "--robot", "arm7", "--model", "fake", "-p", "seed=3"])
    assert "'seed=3' is not NAME:=VALUE" in capsys.readouterr().err
