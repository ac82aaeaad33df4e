"""The policy node as a process of its own: signals, exit codes, and that torch never enters it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from phyai_policy.msg import ActionStep, PolicyStatus

from phyai_engine.types import CommandKind, SafetyState

pytestmark = pytest.mark.ros
Make = Callable[..., Any]


class Outside:
    """A policy node in its own process, in the rig's domain; the rig's own node stays idle and unheard."""

    def __init__(self, rig: Any, fake: dict[str, Any], *, prelude: str = "", **parameters: str) -> None:
        self.rig = rig
        rig.write_model(fake)
        given = {"robot": "arm7", "model": str(rig.model_file), "warm_up_count": "1", **parameters}
        pairs = [item for key, value in given.items() for item in ("-p", f"{key}:={value}")]
        code = f"{prelude}\nfrom phyai_ros.policy_node import main\nraise SystemExit(main())"
        environment = {**os.environ, "ROS_DOMAIN_ID": str(rig.context.get_domain_id())}
        self.log = Path(rig.model_file).with_name("node.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--ros-args", "-r", "__ns:=/out", *pairs],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.steps: list[ActionStep] = []
        self.status = PolicyStatus()
        rig.peer.create_subscription(ActionStep, "/out/policy_node/step", self.steps.append, 50)
        rig.peer.create_subscription(PolicyStatus, "/out/policy_node/status", self._on_status, 10)

    def _on_status(self, message: PolicyStatus) -> None:
        self.status = message

    def transition(self, number: int) -> bool:
        client = self.rig.peer.create_client(ChangeState, "/out/policy_node/change_state")
        assert client.wait_for_service(timeout_sec=15.0), self.log.read_text()
        future = client.call_async(ChangeState.Request(transition=Transition(id=number)))
        self.rig.until(future.done, 30.0)
        return bool(future.result().success)

    def end(self, number: int) -> int:
        """Send a signal, keep the domain alive, return the exit code."""
        self.process.send_signal(number)
        self.rig.until(lambda: self.process.poll() is not None, 10.0)
        self.rig.spin(0.1)
        return int(self.process.returncode)


@pytest.fixture
def outside(make_rig: Make) -> Any:
    made: list[Outside] = []

    def make(fake: dict[str, Any], **kwargs: Any) -> Outside:
        rig = make_rig(namespace="/out")
        made.append(Outside(rig, fake, **kwargs))
        return made[-1]

    yield make
    for node in made:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait(timeout=5)


@pytest.mark.fault(39)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_inference_is_in_flight_gives_a_stop_and_exit_code_0(outside: Any, number: int) -> None:
    # rclpy issue 1287: the default handler shuts the context down before the stop can be published
    node = outside({"latency_ms": 2000.0, "horizon": 250})
    assert node.transition(Transition.TRANSITION_CONFIGURE)
    assert node.transition(Transition.TRANSITION_ACTIVATE)
    node.rig.until(lambda: any(s.kind == CommandKind.ACTION for s in node.steps), 15.0)
    node.rig.until(lambda: any(s.step >= 130 for s in node.steps), 10.0)  # past s: the next inference is in flight
    assert node.end(number) == 0, node.log.read_text()
    assert node.steps[-1].kind == CommandKind.STOP
    assert node.status.abort_cause == PolicyStatus.ABORT_SIGNAL


def test_signal_during_configure_ends_the_process(outside: Any) -> None:
    node = outside({"latency_ms": 20000.0})
    client = node.rig.peer.create_client(ChangeState, "/out/policy_node/change_state")
    assert client.wait_for_service(timeout_sec=15.0)
    client.call_async(ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CONFIGURE)))
    node.rig.spin(1.5)
    began = time.monotonic()
    assert node.end(signal.SIGINT) == 0, node.log.read_text()
    assert time.monotonic() - began < 5.0


BLOCK_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Refuse())
"""


def test_node_without_torch_drives_the_robot(outside: Any) -> None:
    node = outside({"latency_ms": 20.0}, prelude=BLOCK_TORCH)
    assert node.transition(Transition.TRANSITION_CONFIGURE), node.log.read_text()
    assert node.transition(Transition.TRANSITION_ACTIVATE)
    node.rig.until(lambda: sum(s.kind == CommandKind.ACTION for s in node.steps) > 20, 10.0)
    assert node.status.safety_state == SafetyState.RUNNING


def test_node_with_a_torch_model_does_not_load_torch_itself(outside: Any) -> None:
    node = outside({}, model="pi05_demo", robot="metaworld_sawyer")
    assert node.transition(Transition.TRANSITION_CONFIGURE), node.log.read_text()
    maps = Path(f"/proc/{node.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    children = subprocess.run(
        ["ps", "--ppid", str(node.process.pid), "-o", "pid="], capture_output=True, text=True, check=True
    ).stdout.split()
    assert any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in children)
    assert node.end(signal.SIGINT) == 0
