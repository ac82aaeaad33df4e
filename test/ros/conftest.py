"""A policy node and the robot around it, on real ROS 2 in one process and one thread.

Every rig has a ROS domain of its own, so that tests do not hear one another. Two robots, all outputs.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

rclpy = pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus  # noqa: E402
from phyai_policy.msg import ActionChunk, ActionStep, ChunkTiming, PolicyStatus  # noqa: E402
from rclpy.context import Context  # noqa: E402
from rclpy.executors import SingleThreadedExecutor  # noqa: E402
from rclpy.lifecycle import TransitionCallbackReturn  # noqa: E402
from rclpy.node import Node  # noqa: E402
from rclpy.parameter import Parameter  # noqa: E402
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy  # noqa: E402
from rclpy.signals import SignalHandlerOptions  # noqa: E402
from sensor_msgs.msg import Image, JointState  # noqa: E402
from std_msgs.msg import String  # noqa: E402
from std_srvs.srv import Trigger  # noqa: E402
from trajectory_msgs.msg import JointTrajectory  # noqa: E402

from phyai_engine.config import RobotConfig, load_robot, resolve  # noqa: E402
from phyai_engine.types import AbortCause, CommandKind, SafetyState  # noqa: E402
from phyai_ros.policy_node import PolicyNode  # noqa: E402

LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


FIRST = os.getpid() % 60
DOMAINS = itertools.cycle(1 + (FIRST + i) % 60 for i in range(60))  # the one used last is the last to be used again


def free_domain() -> tuple[int, socket.socket]:
    """A ROS domain of its own, below those of the Makefile, and the abstract socket that reserves it on this host.

    Never the one just used: its nodes seem to be there for seconds after their end, and do not answer.
    """
    for domain in itertools.islice(DOMAINS, 60):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0phyai-test-domain-{domain}")
        except OSError:
            lock.close()
            continue
        return domain, lock
    raise RuntimeError("all 60 test domains are in use")


class Rig:
    """One policy node with cameras, joints and listeners.

    :param model: options of the fake model. :param parameters: overrides of the node's parameters.
    :param namespace: of the rig's own sensors and listeners; the policy node under test may be another process there.
    :param others: further nodes of this rig: a player, or the simulated robot, which then brings the sensors.
    """

    def __init__(
        self,
        tmp: Path,
        robot: str = "arm7",
        model: dict[str, Any] | None = None,
        others: Callable[[Context], list[Node]] = lambda context: [],
        namespace: str = "",
        **parameters: Any,
    ) -> None:
        self.robot: RobotConfig = load_robot(resolve("robots", robot))
        self.model_file = tmp / "model.yaml"
        self.write_model(model or {})
        self.context = Context()
        domain, self._domain_lock = free_domain()
        rclpy.init(
            context=self.context,
            domain_id=domain,
            signal_handler_options=SignalHandlerOptions.NO,
        )
        given = {
            "robot": robot,
            "model": str(self.model_file),
            "engine": "thread",
            "warm_up_count": 1,
            **parameters,
        }
        overrides = [Parameter(name, value=value) for name, value in given.items()]
        self.node = PolicyNode(context=self.context, parameter_overrides=overrides)
        self.peer = Node("peer", context=self.context, namespace=namespace)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.executor.add_node(self.peer)
        self.others = others(self.context)
        for other in self.others:
            self.executor.add_node(other)
        self.position = {e.name: 0.0 for e in self.robot.state}
        for action in self.robot.actions:
            if action.state:
                self.position[action.state] = 0.5 * (action.lower + action.upper)
        self.steps: list[ActionStep] = []
        self.chunks: list[ActionChunk] = []
        self.trajectories: list[JointTrajectory] = []
        self.timings: list[ChunkTiming] = []
        self.statuses: list[PolicyStatus] = []
        self.diagnostics: list[DiagnosticArray] = []
        self.cameras_on = {c.name: True for c in self.robot.cameras}
        self.joints_on = True
        self.stamp_shift_ns = 0
        self._wire()

    def write_model(self, options: dict[str, Any]) -> None:
        """Replace the model file: the fake model with these options."""
        given = {
            "horizon": 16,
            "action_dim": 8,
            "num_steps": 4,
            "cameras": ["base_0_rgb", "left_wrist_0_rgb"],
            "image_size": 16,
            **options,
        }
        text = {"family": "fake", "normalisation": {"kind": "limits"}, "options": given}
        self.model_file.write_text(yaml.safe_dump(text))

    def _wire(self) -> None:
        sensor = QoSProfile(depth=2)
        self._images = {
            c.name: self.peer.create_publisher(Image, c.topic, sensor)
            for c in self.robot.cameras
            if c.transport == "raw"
        }
        topics = dict.fromkeys(e.topic for e in self.robot.state)
        self._joint_publishers = {t: self.peer.create_publisher(JointState, t, sensor) for t in topics}
        name = "policy_node"
        listen = self.peer.create_subscription
        listen(ActionStep, f"{name}/step", self._on_step, QoSProfile(depth=50))
        listen(ActionChunk, f"{name}/chunk", self.chunks.append, QoSProfile(depth=10))
        listen(ChunkTiming, f"{name}/timing", self.timings.append, QoSProfile(depth=50))
        listen(PolicyStatus, f"{name}/status", self.statuses.append, LATCHED)
        listen(DiagnosticArray, "/diagnostics", self.diagnostics.append, QoSProfile(depth=10))
        listen(JointTrajectory, self.robot.trajectory_topic, self.trajectories.append, QoSProfile(depth=50))
        if not any(node.get_name() == "sim_robot" for node in self.others):
            self.peer.create_timer(0.05, self.send_images)
            self.peer.create_timer(0.01, self.send_joints)
        self._pixels = array.array("B", bytes(32 * 24 * 3))

    def _on_step(self, step: ActionStep) -> None:
        self.steps.append(step)
        for action, value in zip(self.robot.actions, step.values, strict=True):
            if self.robot.action_type == "joint_position":
                self.position[action.state] = value

    def now_ns(self) -> int:
        return self.peer.get_clock().now().nanoseconds + self.stamp_shift_ns

    def stamp(self, message: Any) -> Any:
        ns = self.now_ns()
        message.header.stamp.sec, message.header.stamp.nanosec = ns // 10**9, ns % 10**9
        return message

    def send_images(self) -> None:
        for name, publisher in self._images.items():
            if self.cameras_on[name]:
                message = Image(height=24, width=32, encoding="rgb8", step=96, data=self._pixels)
                publisher.publish(self.stamp(message))

    def send_joints(self) -> None:
        if not self.joints_on:
            return
        for topic, publisher in self._joint_publishers.items():
            names = [e.name for e in self.robot.state if e.topic == topic]
            message = JointState(name=names, position=[self.position[n] for n in names])
            publisher.publish(self.stamp(message))

    def spin(self, seconds: float) -> None:
        """Let everything run for a while."""
        self.until(lambda: False, seconds, must=False)

    def until(self, condition: Callable[[], bool], seconds: float = 5.0, *, must: bool = True) -> bool:
        """Spin until ``condition`` holds; fails the test after ``seconds`` unless ``must`` is false."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                assert not must, f"not reached within {seconds} s; last status: {self.statuses[-1:]}"
                return False
            self.executor.spin_once(timeout_sec=0.01)
        return True

    def configure(self) -> None:
        assert self.node.trigger_configure() is TransitionCallbackReturn.SUCCESS

    def start(self) -> None:
        """configure, activate, and wait for the first action."""
        self.configure()
        assert self.node.trigger_activate() is TransitionCallbackReturn.SUCCESS
        self.until(lambda: any(t.outcome == ChunkTiming.OUTCOME_ACCEPTED for t in self.timings))

    def call(self, service: str, seconds: float = 5.0) -> Any:
        """Call a Trigger service of the node and return the response."""
        client = self.peer.create_client(Trigger, f"policy_node/{service}")
        assert client.wait_for_service(timeout_sec=5.0)
        future = client.call_async(Trigger.Request())
        self.until(future.done, seconds)
        self.peer.destroy_client(client)
        return future.result()

    def told(self, cause: AbortCause) -> None:
        """Wait for the latch, told in PolicyStatus and /diagnostics with its code; it stays although all is well."""
        self.until(lambda: self.safety is SafetyState.LATCHED)
        self.until(lambda: self.status.safety_state == PolicyStatus.SAFETY_LATCHED)
        assert (self.status.abort_cause, self.status.stop_cause) == (cause, cause)
        assert self.status.abort_text
        words = f"abort latched ({cause.name.lower()})"
        self.until(lambda: any(words in a.status[0].message for a in self.diagnostics))
        last = [a.status[0] for a in self.diagnostics if words in a.status[0].message][-1]
        assert last.level == DiagnosticStatus.ERROR
        self.spin(0.1)  # a player elsewhere hears of it
        epoch, count = self.epoch, len(self.steps)
        self.spin(0.2)
        assert self.epoch == epoch
        assert set(self.kinds()[count:]) <= {CommandKind.STOP}

    def resumed(self) -> None:
        """Re-arm, and wait until the robot moves again."""
        self.until(lambda: self.call("rearm").success)
        assert self.status.stop_cause == PolicyStatus.ABORT_NONE
        self.until(lambda: self.safety is SafetyState.RUNNING)

    def block(self, seconds: float, *, lock: Any = None) -> float:
        """A callback on the executor thread that does not return for so long; when it began, in wall-clock seconds."""
        began: list[float] = []

        def stuck(message: String) -> None:
            began.append(time.time())
            with lock or contextlib.nullcontext():
                time.sleep(seconds)

        subscription = self.peer.create_subscription(String, "stuck", stuck, 1)
        publisher = self.peer.create_publisher(String, "stuck", 1)
        self.until(lambda: publisher.get_subscription_count() == 1)
        publisher.publish(String())
        self.until(lambda: bool(began))
        self.peer.destroy_subscription(subscription)
        return began[0]

    @property
    def safety(self) -> SafetyState:
        return self.node._safety().state

    @property
    def epoch(self) -> int:
        return self.node._safety().epoch

    @property
    def status(self) -> PolicyStatus:
        """The newest PolicyStatus."""
        self.until(lambda: bool(self.statuses))
        return self.statuses[-1]

    def kinds(self) -> list[CommandKind]:
        return [CommandKind(s.kind) for s in self.steps]

    def close(self) -> None:
        self.node.close()
        for other in self.others:
            other.close()  # type: ignore[attr-defined]
            other.destroy_node()
        self.executor.shutdown(timeout_sec=1.0)
        self.node.destroy_node()
        self.peer.destroy_node()
        rclpy.shutdown(context=self.context)
        self._domain_lock.close()


@pytest.fixture(scope="session")
def domain_of_its_own() -> Callable[[], tuple[int, socket.socket]]:
    """For tests whose processes talk among themselves."""
    return free_domain


@pytest.fixture(scope="session")
def rig_type() -> type[Rig]:
    """For a rig that a whole module shares."""
    return Rig


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Builds rigs and closes them after the test."""
    rigs: list[Rig] = []

    def make(**kwargs: Any) -> Rig:
        rigs.append(Rig(tmp_path, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(params=["arm7", "metaworld_sawyer"])
def robot(request: pytest.FixtureRequest) -> str:
    """Both robots of the test matrix."""
    return str(request.param)


def values(step: ActionStep) -> np.ndarray:
    """[A] commanded values."""
    return np.asarray(step.values)
