"""The launch files, run for real: processes, lifecycle, signals, exit codes. What is seen is seen over ROS.

launch and launch_ros are on no package registry. To run these tests beside ROS from wheels, put the public sources of
github.com/ros2/launch and github.com/ros2/launch_ros on PYTHONPATH (folders launch/launch, launch/launch_xml,
launch/launch_yaml, launch_ros/launch_ros) and install osrf-pycommon and lark.
"""

# ruff: noqa: E402 - what follows the check of the path needs what it looks for

from __future__ import annotations

import array
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

for _module in ("rclpy", "phyai_policy", "launch_ros", "osrf_pycommon"):  # `launch` is also our folder
    if find_spec(_module) is None:
        pytest.skip(
            f"{_module} is not importable: run `make test` for ROS, and for launch put the public sources of "
            "ros2/launch and ros2/launch_ros on PYTHONPATH (the head of this file says which folders)",
            allow_module_level=True,
        )

import rclpy
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from phyai_policy.msg import ActionStep, PolicyStatus
from rcl_interfaces.srv import GetParameters
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python
from rclpy.qos import DurabilityPolicy, QoSProfile, qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from phyai_engine.config import load_robot, resolve

pytestmark = pytest.mark.ros

LAUNCH = Path(__file__).parents[2] / "launch"
POLICY, DEMO, FLEET = (LAUNCH / f"{name}.launch.py" for name in ("policy", "demo", "fleet"))
PROFILE = LAUNCH.parent / "config" / "fastdds.xml"
PROFILE_VARIABLES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
START_S = 60.0  # bound on starting Python processes on a busy machine; seconds are usual
FAKE = ("robot:=arm7", "model:=fake", "engine:=thread")
_domains = itertools.count(os.getpid() % 90)

# What `ros2 launch` does with a file and its arguments.
SERVICE = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

terminal, path, *arguments = sys.argv[1:]
service = LaunchService(argv=arguments, noninteractive=terminal == "no_terminal")
included = IncludeLaunchDescription(
    PythonLaunchDescriptionSource(path), launch_arguments=[tuple(a.split(":=", 1)) for a in arguments]
)
service.include_launch_description(LaunchDescription([included]))
sys.exit(service.run())
"""


class Peer:
    """The robot of a policy node in this process: cameras, joints that follow the commands, and ears.

    :param player: name of the node whose steps are heard.
    """

    def __init__(self, domain: int, namespace: str = "", *, player: str = "policy_node", drive: bool = True) -> None:
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain, signal_handler_options=SignalHandlerOptions.NO)
        self.node = Node("peer", context=self.context, namespace=namespace)
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.robot = load_robot(resolve("robots", "arm7"))
        self.position = {a.state: 0.5 * (a.lower + a.upper) for a in self.robot.actions}
        self.steps: list[tuple[float, ActionStep]] = []
        self.statuses: list[PolicyStatus] = []
        self.node.create_subscription(ActionStep, f"{player}/step", self._on_step, QoSProfile(depth=50))
        self.node.create_subscription(PolicyStatus, "policy_node/status", self.statuses.append, LATCHED)
        if drive:
            publish = self.node.create_publisher
            self._images = [publish(Image, c.topic, QoSProfile(depth=2)) for c in self.robot.cameras]
            self._joints = publish(JointState, "joint_states", QoSProfile(depth=2))
            self._pixels = array.array("B", bytes(32 * 24 * 3))
            self.node.create_timer(0.05, self._send_images)
            self.node.create_timer(0.01, self._send_joints)

    def _on_step(self, step: ActionStep) -> None:
        self.steps.append((time.monotonic(), step))
        self.position.update(zip([a.state for a in self.robot.actions], step.values, strict=False))

    def _send_images(self) -> None:
        for publisher in self._images:
            image = Image(height=24, width=32, encoding="rgb8", step=96, data=self._pixels)
            image.header.stamp = self.node.get_clock().now().to_msg()
            publisher.publish(image)

    def _send_joints(self) -> None:
        joints = JointState(name=list(self.position), position=list(self.position.values()))
        joints.header.stamp = self.node.get_clock().now().to_msg()
        self._joints.publish(joints)

    def watch(self, kind: type[Any], topic: str) -> list[Any]:
        seen: list[Any] = []
        self.node.create_subscription(kind, topic, seen.append, qos_profile_sensor_data)
        return seen

    def call(self, kind: type[Any], name: str, request: Any) -> Any:
        client = self.node.create_client(kind, name)
        assert client.wait_for_service(START_S), f"no service {name}"
        future = client.call_async(request)
        while not future.done():
            self.executor.spin_once(timeout_sec=0.05)
        self.node.destroy_client(client)
        return future.result()

    def state(self) -> int:
        """Id of the lifecycle state, from the node's own service."""
        return int(self.call(GetState, "policy_node/get_state", GetState.Request()).current_state.id)

    def change(self, transition: int) -> bool:
        request = ChangeState.Request(transition=Transition(id=transition))
        return bool(self.call(ChangeState, "policy_node/change_state", request).success)

    def kinds(self, after: float = 0.0) -> list[int]:
        return [step.kind for when, step in self.steps if when > after]

    def acting(self) -> bool:
        return ActionStep.KIND_ACTION in self.kinds()

    def close(self) -> None:
        self.executor.shutdown(timeout_sec=1.0)
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


class Launched:
    """A launch in a process group of its own, as a terminal would start it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._family: list[psutil.Process] = []
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self._log.read_text()

    def pids(self, name: str) -> list[int]:
        """Of every process of an executable, oldest first."""
        return [int(p) for p in re.findall(rf"\[{name}-\d+\]: process started with pid \[(\d+)\]", self.text())]

    def interrupt(self, *, whole_group: bool = True) -> float:
        """SIGINT to everything, as Ctrl-C in a terminal, or to launch alone. Returns when (monotonic s)."""
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        now = time.monotonic()
        (os.killpg if whole_group else os.kill)(self.process.pid, signal.SIGINT)
        return now

    def survivors(self) -> list[psutil.Process]:
        """Descendants that outlived the launch."""
        return psutil.wait_procs(self._family, timeout=5.0)[1]

    def end(self) -> None:
        """Whatever happened before, nothing is left."""
        if self.process.poll() is None:
            self._family += psutil.Process(self.process.pid).children(recursive=True)
        for kill in [partial(os.killpg, self.process.pid, signal.SIGKILL), *(p.kill for p in self._family)]:
            try:
                kill()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        self.process.wait(10.0)


class World:
    """One ROS domain with launches and peers."""

    def __init__(self, folder: Path) -> None:
        self.domain = 101 + next(_domains) % 100
        self._folder = folder
        self._launched: list[Launched] = []
        self._peers: list[Peer] = []
        self._stand_in: list[str] = []
        if find_spec("composition_interfaces") is None:
            # launch_ros imports it for composable nodes, which are not used here; there is no wheel of it.
            place = folder / "stand_in" / "composition_interfaces"
            place.mkdir(parents=True)
            (place / "__init__.py").touch()
            (place / "srv.py").write_text("class LoadNode:\n    Request = object\n")
            self._stand_in = [str(place.parent)]

    def launch(
        self, file: Path, *arguments: str, command: list[str] | None = None, **environment: str | None
    ) -> Launched:
        """Start a launch file. :param environment: variables to set, or with None to unset."""
        settings: dict[str, str | None] = {
            **os.environ,
            "ROS_DOMAIN_ID": str(self.domain),
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *self._stand_in]),
            "PYTHONUNBUFFERED": "1",
            "ROS_LOG_DIR": str(self._folder / "ros_log"),
            **environment,
        }
        command = command or [sys.executable, "-c", SERVICE, "terminal"]
        known = {name: value for name, value in settings.items() if value is not None}
        log = self._folder / f"launch_{len(self._launched)}.txt"
        self._launched.append(Launched([*command, str(file), *arguments], known, log))
        return self._launched[-1]

    def peer(self, namespace: str = "", **options: Any) -> Peer:
        self._peers.append(Peer(self.domain, namespace, **options))
        return self._peers[-1]

    def until(self, condition: Callable[[], bool], seconds: float = START_S) -> None:
        """Spin the peers until it holds."""
        end = time.monotonic() + seconds
        while not condition():
            logs = "\n".join(launched.text() for launched in self._launched)
            assert time.monotonic() < end, f"not within {seconds} s; launch said:\n{logs}"
            for peer in self._peers:
                peer.executor.spin_once(timeout_sec=0.01)
            if not self._peers:
                time.sleep(0.02)

    def spin(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def exit_code(self, launched: Launched, seconds: float = START_S) -> int:
        self.until(lambda: launched.process.poll() is not None, seconds)
        return int(launched.process.returncode)

    def close(self) -> None:
        for launched in self._launched:
            launched.end()
        for peer in self._peers:
            peer.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def params_file(tmp_path: Path, **values: Any) -> str:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({"/**/policy_node": {"ros__parameters": values}}))
    return f"params_file:={path}"


@pytest.mark.fault(44)
@pytest.mark.parametrize("started_by", ["LaunchService", "ros2 launch"])
def test_autostart_reaches_active_and_actions_flow(world: World, started_by: str) -> None:
    command = None
    if started_by == "ros2 launch":
        ros2 = shutil.which("ros2")
        if ros2 is None or find_spec("ros2launch") is None:
            pytest.skip("ros2cli and ros2launch are not installed: the same file ran through LaunchService")
        command = [sys.executable, ros2, "launch"]
    peer = world.peer()
    launched = world.launch(POLICY, *FAKE, command=command)
    world.until(lambda: any(s.lifecycle_label == "active" for s in peer.statuses))
    assert peer.state() == State.PRIMARY_STATE_ACTIVE
    world.until(peer.acting)
    # Without a terminal `ros2 launch` passes the signal on, so it alone gets it.
    launched.interrupt(whole_group=command is None)
    assert world.exit_code(launched) == 0, launched.text()
    assert "[policy_node-1]: process has finished cleanly" in launched.text()
    assert launched.survivors() == []


@pytest.mark.fault(39)
@pytest.mark.parametrize("whole_group", [True, False], ids=["ctrl_c", "to_launch_only"])
def test_sigint_while_inference_is_in_flight_sends_the_stop(world: World, tmp_path: Path, whole_group: bool) -> None:
    """Engine in a child process, 2 s per chunk; a chunk lasts 8 s, so the robot moves while the next is computed."""
    cameras = ["base_0_rgb", "left_wrist_0_rgb"]
    options = {"horizon": 400, "action_dim": 8, "cameras": cameras, "image_size": 16, "latency_ms": 2000.0}
    model = tmp_path / "slow.yaml"
    model.write_text(yaml.safe_dump({"family": "fake", "normalisation": {"kind": "limits"}, "options": options}))
    given = params_file(tmp_path, engine="process", warm_up_count=1, execution_horizon=50)
    peer = world.peer()
    terminal = "terminal" if whole_group else "no_terminal"
    command = [sys.executable, "-c", SERVICE, terminal]
    launched = world.launch(POLICY, "robot:=arm7", f"model:={model}", given, command=command)

    def in_flight() -> bool:
        last = peer.statuses[-1] if peer.statuses else PolicyStatus()
        return last.chunks_accepted >= 1 and last.requests > last.chunks_accepted + last.chunks_refused

    world.until(in_flight)
    assert peer.kinds()[-1] == ActionStep.KIND_ACTION
    when = launched.interrupt(whole_group=whole_group)
    code = world.exit_code(launched, 20.0)
    took = time.monotonic() - when
    world.spin(0.2)
    kinds = peer.kinds(after=when)
    assert ActionStep.KIND_STOP in kinds, launched.text()
    first = kinds.index(ActionStep.KIND_STOP)
    assert ActionStep.KIND_ACTION not in kinds[first:]
    stopped = next(t for t, step in peer.steps if t > when and step.kind == ActionStep.KIND_STOP)
    print(f"SIGINT -> stop {1e3 * (stopped - when):.1f} ms, -> launch ended {took:.2f} s")
    # launch ends its own ROS node, up to 1 s, before it passes the signal on.
    assert stopped - when < (0.5 if whole_group else 2.0)
    assert peer.statuses[-1].abort_cause == PolicyStatus.ABORT_SIGNAL
    assert code == 0, launched.text()
    assert "[policy_node-1]: process has finished cleanly" in launched.text()
    assert launched.survivors() == []


def test_without_autostart_it_waits_and_arguments_win_over_the_file(world: World, tmp_path: Path) -> None:
    given = params_file(tmp_path, robot="metaworld_sawyer", engine="thread", seed=5)
    peer = world.peer(drive=False)
    unset = dict.fromkeys((*PROFILE_VARIABLES, "RMW_IMPLEMENTATION"))
    launched = world.launch(POLICY, given, "robot:=arm7", "instruction:=7", "autostart:=false", **unset)
    world.until(lambda: bool(peer.statuses))
    names = ["robot", "engine", "seed", "instruction"]
    answer = peer.call(GetParameters, "policy_node/get_parameters", GetParameters.Request(names=names))
    assert [parameter_value_to_python(v) for v in answer.values] == ["arm7", "thread", 5, "7"]
    world.spin(1.0)
    assert peer.state() == State.PRIMARY_STATE_UNCONFIGURED
    environment = psutil.Process(launched.pids("policy_node")[0]).environ()
    assert {environment[name] for name in PROFILE_VARIABLES} == {str(PROFILE)}
    assert environment["RMW_IMPLEMENTATION"] == "rmw_fastrtps_cpp"
    launched.interrupt()
    assert world.exit_code(launched) == 0


def test_a_persons_dds_profile_is_left_alone(world: World, tmp_path: Path) -> None:
    own = tmp_path / "own.xml"
    own.write_text(PROFILE.read_text())
    peer = world.peer(drive=False)
    fast, old = PROFILE_VARIABLES[1], PROFILE_VARIABLES[0]
    launched = world.launch(POLICY, "autostart:=false", **{fast: str(own), old: None})
    world.until(lambda: bool(peer.statuses))
    environment = psutil.Process(launched.pids("policy_node")[0]).environ()
    assert environment[fast] == str(own)
    assert old not in environment


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("robot:=arm7", "model:=fak"), ("Did you mean 'fake'?", "could not be configured")),
        (("robot:=arm7", "model:=fake", "FILE"), ("max_hold_s must be a double", "ended with exit code 1")),
        (("params_file:=/no/such.yaml",), ("/no/such.yaml does not exist",)),
        (("engine:=cloud",), ("Valid options are: ['', 'thread', 'process', 'remote']",)),
    ],
    ids=["configure_fails", "node_dies", "no_params_file", "no_such_choice"],
)
def test_what_cannot_work_ends_with_a_reason(
    world: World, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    wrong = params_file(tmp_path, max_hold_s=10)
    launched = world.launch(POLICY, *[wrong if a == "FILE" else a for a in arguments])
    assert world.exit_code(launched) == 1
    for word in words:
        assert word in launched.text()


@pytest.mark.fault(44)
def test_two_robots_in_one_domain_and_one_fleet_stop(world: World, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"left": {"instruction": "wave"}, "cell/right": None}))
    left, right = world.peer("left"), world.peer("cell/right")
    launched = world.launch(FLEET, f"fleet:={fleet}", *FAKE)
    world.until(lambda: left.acting() and right.acting())
    assert left.state() == right.state() == State.PRIMARY_STATE_ACTIVE
    asked = GetParameters.Request(names=["instruction", "fleet_stop_topic"])
    given = {p: p.call(GetParameters, "policy_node/get_parameters", asked).values for p in (left, right)}
    assert [parameter_value_to_python(v) for v in given[left]] == ["wave", "/fleet_stop"]
    assert [parameter_value_to_python(v) for v in given[right]] == ["", "/fleet_stop"]
    assert left.call(Trigger, "policy_node/abort", Trigger.Request()).success
    when = time.monotonic()
    world.until(lambda: left.statuses[-1].safety_state == PolicyStatus.SAFETY_LATCHED)
    world.spin(0.3)
    assert ActionStep.KIND_ACTION not in left.kinds(after=when)
    assert ActionStep.KIND_ACTION in right.kinds(after=when)
    assert right.statuses[-1].abort_cause == PolicyStatus.ABORT_NONE
    names = {name for name, _ in right.node.get_topic_names_and_types()}
    own = {name for name in names if "policy" in name or "joint" in name or "image" in name}
    assert own
    assert all(name.startswith(("/left/", "/cell/right/")) for name in own), own

    assert left.call(Trigger, "policy_node/rearm", Trigger.Request()).success
    left.steps.clear()
    world.until(left.acting)
    stop = left.node.create_publisher(Bool, "/fleet_stop", LATCHED)
    world.until(lambda: stop.get_subscription_count() >= 2)
    stop.publish(Bool(data=True))
    for peer in (left, right):
        world.until(lambda peer=peer: peer.statuses[-1].safety_state == PolicyStatus.SAFETY_LATCHED)
        assert peer.statuses[-1].abort_cause == PolicyStatus.ABORT_FLEET_STOP
        assert not peer.call(Trigger, "policy_node/rearm", Trigger.Request()).success
    launched.interrupt()
    assert world.exit_code(launched) == 0, launched.text()


def test_a_robot_that_fails_leaves_the_others_alone(world: World, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"lame": {"model": "fak"}, "sound": {}}))
    sound = world.peer("sound")
    launched = world.launch(FLEET, f"fleet:={fleet}", *FAKE)
    world.until(sound.acting)
    world.until(lambda: "could not be configured" in launched.text())
    os.kill(launched.pids("policy_node")[0], signal.SIGKILL)
    world.until(lambda: "ended with exit code -9" in launched.text())
    sound.steps.clear()
    world.until(sound.acting)
    launched.interrupt()
    assert world.exit_code(launched) == 0, launched.text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fleet:=left,left",), "each once"),
        (("fleet:=left,right", "fleet_stop_topic:=stop"), "must begin with /"),
        (("fleet:=FILE",), "fleet_stop_topic cannot differ"),
    ],
    ids=["twice", "relative_stop", "own_stop"],
)
def test_a_fleet_that_could_not_be_stopped_as_one_is_refused(
    world: World, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    fleet = tmp_path / "fleet.yaml"
    fleet.write_text(yaml.safe_dump({"left": {"fleet_stop_topic": "/mine"}}))
    launched = world.launch(FLEET, *(a.replace("FILE", str(fleet)) for a in arguments), *FAKE)
    assert world.exit_code(launched) == 1
    assert words in launched.text()


def test_a_persons_deactivate_and_configure_are_not_overruled(world: World) -> None:
    peer = world.peer()
    launched = world.launch(POLICY, *FAKE)
    world.until(peer.acting)
    for transition, state in (
        (Transition.TRANSITION_DEACTIVATE, State.PRIMARY_STATE_INACTIVE),
        (Transition.TRANSITION_CLEANUP, State.PRIMARY_STATE_UNCONFIGURED),
        (Transition.TRANSITION_CONFIGURE, State.PRIMARY_STATE_INACTIVE),
    ):
        assert peer.change(transition)
        world.spin(0.7)
        assert peer.state() == state
    launched.interrupt()
    assert world.exit_code(launched) == 0


@pytest.mark.parametrize("killed", ["active", "configuring"])
def test_a_respawned_node_does_not_move_by_itself(world: World, tmp_path: Path, killed: str) -> None:
    peer = world.peer()
    given = params_file(tmp_path, warm_up_count=100 if killed == "configuring" else 1)
    launched = world.launch(POLICY, *FAKE, given, "respawn:=true")
    busy = "engine: starting" if killed == "configuring" else "activate took"
    world.until(lambda: busy in launched.text())
    os.kill(launched.pids("policy_node")[0], signal.SIGKILL)
    world.until(lambda: len(launched.pids("policy_node")) > 1)
    peer.statuses.clear()
    world.until(lambda: bool(peer.statuses))
    assert "stays unconfigured" in launched.text()
    world.spin(1.0)
    assert peer.state() == State.PRIMARY_STATE_UNCONFIGURED
    assert peer.change(Transition.TRANSITION_CONFIGURE)
    world.spin(1.0)
    assert peer.state() == State.PRIMARY_STATE_INACTIVE
    launched.interrupt()
    assert world.exit_code(launched) == 0


@pytest.mark.parametrize(
    ("robot", "output", "joints"),
    [
        ("metaworld_sawyer", "steps", "hand_state"),
        ("arm7", "trajectory", "joint_states"),
        ("arm7", "chunks", "joint_states"),
    ],
)
def test_the_demo_moves_its_robot(world: World, robot: str, output: str, joints: str) -> None:
    peer = world.peer("demo", player="player_node" if output == "chunks" else "policy_node", drive=False)
    seen = peer.watch(JointState, joints)
    arguments = ("namespace:=demo", f"robot:={robot}", "model:=fake", "engine:=thread", f"output:={output}")
    launched = world.launch(DEMO, *arguments)
    world.until(lambda: bool(seen) and any(s.safety_state == PolicyStatus.SAFETY_RUNNING for s in peer.statuses))
    start = list(seen[-1].position)
    world.until(lambda: max(abs(a - b) for a, b in zip(seen[-1].position, start, strict=True)) > 2e-3, 20.0)
    if output == "trajectory":
        assert not peer.steps
    else:
        world.until(peer.acting)
    assert len(launched.pids("player_node")) == (output == "chunks")
    launched.interrupt()
    assert world.exit_code(launched) == 0, launched.text()
    assert "process has died" not in launched.text()
    assert launched.survivors() == []


def test_a_demo_without_its_robot_ends(world: World) -> None:
    launched = world.launch(DEMO, "model:=fake", "task:=reach-v9", "autostart:=false")
    assert world.exit_code(launched) == 1
    assert "the simulated robot ended with exit code 1" in launched.text()
    assert "got reach-v9" in launched.text()
