"""The process that records: what it keeps, its bounds, what it counts as missed, and that nobody waits for it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rclpy
from builtin_interfaces.msg import Time
from phyai_policy.msg import EngineRequest
from rclpy.context import Context
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.serialization import serialize_message
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image
from std_msgs.msg import String

from phyai_engine.errors import ConfigError
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.run_file import RunFile, load_run
from phyai_ros.convert import to_stamp
from phyai_ros.recorder_link import Heard, Plan, Progress, RecorderLink
from phyai_ros.topics import SENSOR_QOS

pytestmark = pytest.mark.ros
MIB = 1 << 20
DEPTH = 100
BIG = "x" * (MIB - 1)
SMALL = serialize_message(String(data="kept"))
RUN = RunFile(robot="", model="", model_name="")


def plan_of(folder: Path, domain: int, *, simulated: bool, gated: bool) -> Plan:
    """A String topic /t, a camera, and what is handed over on /given and /request; 16 MiB."""
    return Plan(
        name="recorder",
        namespace="/",
        domain=domain,
        clock="/clock" if simulated else "",
        folder=str(folder),
        max_mib=16,
        run=RUN,
        heard={
            "/t": Heard("std_msgs/msg/String", DEPTH, gated, publishers=1),
            "/image": Heard("sensor_msgs/msg/Image", 10, gated=False, publishers=1),
            "/later": Heard("std_msgs/msg/String", DEPTH, gated=False),
        },
        given={"/given": "std_msgs/msg/String", "/request": "phyai_policy/msg/EngineRequest"},
        cameras={"front": "/image"},
    )


def wait(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Scene:
    """A recorder, and a node that publishes, in a domain of its own."""

    def __init__(self, folder: Path, domain: int, *, simulated: bool = False, gated: bool = False) -> None:
        self.folder, self.said = folder, list[str]()
        self.context = Context()
        rclpy.init(context=self.context, domain_id=domain, signal_handler_options=SignalHandlerOptions.NO)
        self.node = Node("publisher", context=self.context, start_parameter_services=False)
        self.publisher = self.node.create_publisher(String, "/t", QoSProfile(depth=DEPTH))
        self.images = self.node.create_publisher(Image, "/image", 10)
        self._clock = self.node.create_publisher(Clock, "/clock", 10)
        self.link = RecorderLink(plan_of(folder, domain, simulated=simulated, gated=gated), self.said.append)
        self.link.start()
        wait(lambda: self.publisher.get_subscription_count() == self.images.get_subscription_count() == 1)
        wait(lambda: self._clock.get_subscription_count() == simulated)

    def publish(self, *texts: str) -> None:
        for text in texts:
            self.publisher.publish(String(data=text))
            time.sleep(0.002)

    def tick(self, seconds: int) -> None:
        time.sleep(0.05)
        self._clock.publish(Clock(clock=Time(sec=seconds)))
        time.sleep(0.05)

    def until(self, condition: Callable[[Progress], bool]) -> Progress:
        wait(lambda: condition(self.link.look()))
        return self.link.progress

    def recorded(self) -> dict[str, list[tuple[int, Any]]]:
        """Topic -> (time of receipt, message), once it is finished."""
        self.link.close()
        found: dict[str, list[tuple[int, Any]]] = {}
        with Bag(self.folder) as bag:
            assert not bag.warnings
            for message in bag.messages(bag.topics):
                found.setdefault(message.topic, []).append((message.received_ns, bag.decode(message)))
        return found

    def close(self) -> None:
        if self.link.process.poll() is None:
            os.kill(self.link.process.pid, signal.SIGCONT)
        self.link.close()
        self.node.destroy_node()
        rclpy.shutdown(context=self.context)


@pytest.fixture
def make(tmp_path: Path, domain_of_its_own: Callable[[], Any]) -> Iterator[Callable[..., Scene]]:
    """Makes the scene of a test, and closes it."""
    domain, lock = domain_of_its_own()
    made: list[Scene] = []

    def scene(**given: bool) -> Scene:
        made.append(Scene(tmp_path / "run", domain, **given))
        return made[-1]

    yield scene
    for one in made:
        one.close()
    lock.close()


def texts(found: dict[str, list[tuple[int, Any]]], topic: str = "/t") -> list[str]:
    return [message.data for _, message in found.get(topic, [])]


def test_what_is_heard_is_kept_at_the_time_of_its_receipt(make: Callable[..., Scene]) -> None:
    scene = make()
    began = time.time_ns()
    scene.publish("a")
    time.sleep(0.05)  # on its way
    between = time.time_ns()
    scene.link.give("/given", SMALL)
    scene.publish("b")
    found = scene.recorded()
    assert texts(found) == ["a", "b"] and texts(found, "/given") == ["kept"]
    (a, _), (b, _) = found["/t"]
    ((given, _),) = found["/given"]
    assert began < a < between < given < b < time.time_ns()
    assert load_run(scene.folder) == RUN
    assert scene.link.progress == Progress("finished", ended=True, messages=3)
    assert not scene.said


def test_only_the_thread_that_writes_is_of_the_idle_class(make: Callable[..., Scene]) -> None:
    """Whoever shares a lock with an idle thread waits until nothing else wants the processor."""
    pid = make().link.process.pid
    wait(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE)
    others = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid]
    assert len(others) > 3
    assert {os.sched_getscheduler(task) for task in others} == {os.sched_getscheduler(0)}
    assert {os.getpriority(os.PRIO_PROCESS, task) for task in others} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_inputs_are_kept_while_active_and_what_waited_for_the_node_before(make: Callable[..., Scene]) -> None:
    """As many as the node's queues hold, and none that is older than a moment."""
    scene = make(gated=True)
    scene.publish("old")
    time.sleep(0.2)
    for letter in "abcdefgh":
        scene.publisher.publish(String(data=letter))
    time.sleep(0.03)  # on its way, here and below
    scene.link.activate(True)
    scene.publish("active")
    time.sleep(0.03)
    scene.link.activate(False)
    scene.publish("after")
    time.sleep(0.2)
    scene.publish("late")
    time.sleep(0.03)
    scene.link.activate(True)
    scene.link.give("/given", SMALL)
    found = scene.recorded()
    assert texts(found) == [*"abcdefgh"[-SENSOR_QOS.depth :], "active", "late"]
    assert texts(found, "/given") == ["kept"]


def test_nothing_is_recorded_before_there_is_time_which_then_is_the_clocks(make: Callable[..., Scene]) -> None:
    scene = make(simulated=True)
    scene.publish("before time")
    scene.tick(5)
    scene.publish("at 5", "too")
    scene.tick(6)
    scene.link.give("/given", SMALL)
    found = scene.recorded()
    assert [(ns, m.data) for ns, m in found["/t"]] == [(5 * 10**9, "at 5"), (5 * 10**9, "too")]
    assert [ns for ns, _ in found["/given"]] == [6 * 10**9]
    assert not scene.link.dropped


def test_the_folder_stays_within_its_bound_and_the_file_is_whole(make: Callable[..., Scene]) -> None:
    scene = make()
    for _ in range(40):
        scene.publish(BIG)
        time.sleep(0.02)
    told = scene.until(lambda progress: progress.ended)
    assert told.state == "stopped, the next message would pass record_max_mib (16 MiB)"
    size = sum(path.stat().st_size for path in scene.folder.iterdir())
    assert 10 * MIB < size <= 16 * MIB
    assert scene.link.process.wait(5.0) == 0
    assert len(scene.recorded()["/t"]) == told.messages > 10
    assert len(scene.said) == 1


def test_what_was_missed_is_counted_by_the_publishers_numbers(make: Callable[..., Scene]) -> None:
    """More within one turn of the recorder than its queue holds."""
    scene = make()
    scene.publish("first")
    scene.until(lambda progress: progress.messages == 1)
    for i in range(8 * DEPTH):
        scene.publisher.publish(String(data=f"{i}"))
    time.sleep(0.2)
    scene.publish("last")
    kept = texts(scene.recorded())
    assert kept[0] == "first" and kept[-1] == "last"
    assert scene.link.dropped == {"/t": 8 * DEPTH + 2 - len(kept)}
    assert scene.link.dropped["/t"] >= DEPTH


def test_what_a_publisher_that_comes_later_sent_before_it_was_heard_is_counted_apart(
    make: Callable[..., Scene],
) -> None:
    scene, context = make(), Context()
    domain = scene.context.get_domain_id()
    rclpy.init(context=context, domain_id=domain, signal_handler_options=SignalHandlerOptions.NO)
    node = Node("later", context=context, start_parameter_services=False)
    later = node.create_publisher(String, "/later", QoSProfile(depth=1))
    for i in range(5):
        later.publish(String(data=f"{i}"))  # nobody knows of it yet
    wait(lambda: later.get_subscription_count() == 1)
    time.sleep(0.1)
    later.publish(String(data="heard"))
    kept = texts(scene.recorded(), "/later")
    node.destroy_node()
    rclpy.shutdown(context=context)
    assert kept[-1] == "heard"
    assert scene.link.progress.unheard == {"/later": 6 - len(kept)} != {"/later": 0}
    assert not scene.link.dropped


def test_losses_among_several_publishers_are_said_to_be_unknown(make: Callable[..., Scene]) -> None:
    scene = make()
    second = scene.node.create_publisher(String, "/t", QoSProfile(depth=5))
    wait(lambda: second.get_subscription_count() == 1)
    for _ in range(50):
        second.publish(String(data="second"))
        scene.publish("first")
    assert set(texts(scene.recorded())) == {"first", "second"}
    assert (scene.link.progress.uncounted, scene.link.dropped) == (("/t",), {})


def test_handing_over_never_waits_for_the_recorder_and_drops_are_counted(make: Callable[..., Scene]) -> None:
    """What is handed over may be lost; that the node became active may not."""
    scene = make(gated=True)
    os.kill(scene.link.process.pid, signal.SIGSTOP)
    content = serialize_message(String(data="x" * 10_000))
    began = time.monotonic()
    for _ in range(500):
        scene.link.give("/given", content)
    scene.link.activate(True)
    assert time.monotonic() - began < 0.5
    dropped = scene.link.dropped["/given"]
    assert 0 < dropped < 500
    os.kill(scene.link.process.pid, signal.SIGCONT)
    scene.until(lambda progress: progress.messages == 500 - dropped)
    scene.publish("active")
    found = scene.recorded()
    assert len(found["/given"]) == 500 - dropped
    assert texts(found) == ["active"]


def test_a_request_whose_frame_was_missed_is_counted(make: Callable[..., Scene]) -> None:
    scene = make()
    image = Image(height=1, width=1, encoding="rgb8", step=3, data=bytes(3))
    image.header.stamp = to_stamp(1_000_000_007)

    def kept() -> bool:
        """Best effort: one that is lost is published again."""
        scene.images.publish(image)
        time.sleep(0.1)
        return scene.link.look().messages > 0

    wait(kept)
    for stamp_ns in (1_000_000_007, 1_000_000_008):
        request = EngineRequest(cameras=["front"], image_stamps=[to_stamp(stamp_ns)])
        scene.link.give("/request", serialize_message(request))
    found = scene.recorded()
    assert found["/image"] and len(found["/request"]) == 2
    assert scene.link.progress.incomplete == 1


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(make: Callable[..., Scene]) -> None:
    scene = make()
    resource.prlimit(scene.link.process.pid, resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
    for _ in range(6):
        scene.publish(BIG)
    scene.until(lambda progress: progress.ended)
    assert "File too large" in scene.link.progress.state
    assert scene.link.dropped["/t"] > 0
    scene.link.give("/given", SMALL)
    assert scene.link.process.wait(5.0) == 1
    assert len(scene.said) == 1


def test_a_recorder_that_is_killed_is_told(make: Callable[..., Scene]) -> None:
    scene = make()
    os.kill(scene.link.process.pid, signal.SIGKILL)
    scene.until(lambda progress: progress.ended)
    assert scene.link.progress.state == "failed, the recorder ended with exit code -9"
    scene.link.give("/given", SMALL)
    scene.link.activate(True)
    assert len(scene.said) == 1


def test_the_file_is_finished_when_the_node_is_killed(tmp_path: Path, domain_of_its_own: Callable[[], Any]) -> None:
    script = (
        "import os, signal, sys, time, msgspec\n"
        "from phyai_ros.recorder_link import Plan, RecorderLink\n"
        "link = RecorderLink(msgspec.json.decode(sys.argv[1], type=Plan), print); link.start()\n"
        "link.give('/given', bytes.fromhex(sys.argv[2])); time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    )
    domain, lock = domain_of_its_own()
    plan = msgspec.json.encode(plan_of(tmp_path / "run", domain, simulated=False, gated=False)).decode()
    with lock:
        killed = subprocess.run([sys.executable, "-c", script, plan, SMALL.hex()], check=False, timeout=60)
        assert killed.returncode == -signal.SIGKILL
        wait((tmp_path / "run" / "metadata.yaml").exists)
    with Bag(tmp_path / "run") as bag:
        assert not bag.warnings
        assert [bag.decode(message).data for message in bag.messages(["/given"])] == ["kept"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    link = RecorderLink(plan_of(tmp_path / "file" / "run", 0, simulated=False, gated=False), print)
    with pytest.raises(ConfigError, match=r"the recording cannot be made, got failed, NotADirectoryError"):
        link.start()
    link.close()
    assert link.process.returncode == 1
