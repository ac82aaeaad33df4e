"""The server with replicas of its own: who is let in, what runs where, what is lost with a replica, how it ends.

The front runs in a thread of this process, its replicas are children with the stand-in policy; robots are raw sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import yaml
import zmq

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError, EngineError, EngineTimeoutError, PhyaiError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.host import ProcessHost
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.serve.remote_policy import RemotePolicy
from phyai_engine.serve.server import Server, server_status
from phyai_engine.serve.server_config import ServerConfig, load_server
from phyai_engine.serve.streams import SentStreams, request_to_wire
from phyai_engine.types import Refusal, Request

Make = Callable[..., Request]
WAIT_S = 20.0


class Robot:
    """A raw robot: a DEALER socket and a hello."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, hello: wire.Hello) -> None:
        self.socket, self.hello, self.phases = context.socket(zmq.DEALER), hello, list[str]()
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.send(hello)

    def send(self, message: wire.Message | Request, arrays: Any = None, **changes: Any) -> None:
        """A message, or a request with its arrays and some fields changed."""
        if isinstance(message, Request):
            message, arrays = request_to_wire(message)
            message = msgspec.structs.replace(message, **changes)
        self.socket.send_multipart(wire.encode(message, arrays))

    def next(self, timeout_s: float = WAIT_S) -> Any:
        """The next message that is no heartbeat; None when none comes."""
        until_s = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((until_s - time.monotonic()) * 1e3))):
            message, _ = wire.decode(self.socket.recv_multipart())
            if not isinstance(message, wire.Heartbeat):
                return message
            self.phases.append(message.phase)
        return None

    def ready(self) -> wire.EngineHello:
        """The server's answer to the hello, which must be yes."""
        reply = self.next()
        assert isinstance(reply, wire.HelloReply)
        assert reply.engine is not None, reply.reason
        return reply.engine

    def refused(self) -> wire.HelloReply:
        """The server's answer to the hello, which must be no."""
        reply = self.next()
        assert isinstance(reply, wire.HelloReply) and reply.engine is None
        return reply


class Running:
    """A server in a thread."""

    def __init__(self, config: ServerConfig, robot: RobotConfig) -> None:
        self.endpoint, self._robot = config.endpoint, robot
        self.context: zmq.Context[Any] = zmq.Context()
        self.error: PhyaiError | None = None
        self.server: Server | None = None
        self._ids, self._robots = itertools.count(1), list[Robot]()
        self._made = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(config,))
        self.thread.start()
        assert self._made.wait(WAIT_S)

    def _serve(self, config: ServerConfig) -> None:
        try:
            with Server(config) as self.server:
                self._made.set()
                self.server.run()
        except PhyaiError as error:
            self.error = error
        finally:
            self._made.set()

    def robot(self, robot_id: str = "", model: Any = "m", instance: int = 1, **changes: Any) -> Robot:
        """A robot that said hello, by default with an id that no other has."""
        robot_id = robot_id or f"robot {next(self._ids)}"
        hello = wire.Hello(
            robot=msgspec.to_builtins(self._robot), robot_id=robot_id, model=model, instance=instance, **changes
        )
        return self.connect(hello)

    def connect(self, hello: wire.Hello) -> Robot:
        """A robot that said this."""
        self._robots.append(Robot(self.context, self.endpoint, hello))
        return self._robots[-1]

    def status(self) -> dict[str, str]:
        """What it says of itself."""
        return dict(server_status(self.endpoint, timeout_s=WAIT_S))

    def await_replicas(self, words: str) -> None:
        """Wait until so many are up, the robots showing that they live."""
        until_s = time.monotonic() + WAIT_S
        while f"ready, {words} " not in self.status()["m"]:
            assert time.monotonic() < until_s
            for robot in self._robots:
                robot.send(wire.Alive())
            time.sleep(0.02)

    def replicas(self) -> list[psutil.Process]:
        """Its children."""
        assert self.server is not None
        places = [place for pool in self.server.pools.values() for place in pool.places]
        return [psutil.Process(place.replica.host.pid) for place in places if place.replica is not None]

    def end(self) -> None:
        """Stop it; nothing may be left."""
        if self.server is not None:
            self.server.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        for robot in self._robots:
            robot.socket.close()
        self.context.term()


Open = Callable[..., Running]


@pytest.fixture(scope="module")
def boot(boot_with_stand_in: Callable[[str], str]) -> Iterator[None]:
    """Replicas load the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessHost, "_BOOT", boot_with_stand_in(ProcessHost._BOOT))
        yield


@contextlib.contextmanager
def _servers(folder: Path, robot: RobotConfig) -> Iterator[Open]:
    """Makes servers of stand-ins; ends them all, with their replicas."""
    (folder / "robot.yaml").write_text(yaml.safe_dump(_plain(robot)), encoding="utf-8")
    had, running = psutil.Process().children(), list[Running]()

    def make(*, models: dict[str, Any] | None = None, options: dict[str, Any] | None = None, **rest: Any) -> Running:
        model = folder / f"model{len(running)}.yaml"
        model.write_text(yaml.safe_dump({"family": "stand_in", "options": options or {}}), encoding="utf-8")
        whole = {}
        for name, served in (models or {"m": {}}).items():
            whole[name] = {"model": str(model), "robot": str(folder / "robot.yaml"), **served}
        content = {"endpoint": f"ipc://{folder}/front{len(running)}", "models": whole, **rest}
        (folder / "serve.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        running.append(Running(load_server(str(folder / "serve.yaml")), robot))
        return running[-1]

    yield make
    for each in running:
        each.end()
    assert set(psutil.Process().children()) <= set(had)


@pytest.fixture
def serve(tmp_path: Path, robot: RobotConfig, boot: None) -> Iterator[Open]:
    """Servers of this test alone."""
    with _servers(tmp_path, robot) as make:
        yield make


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory, robot: RobotConfig, boot: None) -> Iterator[Running]:
    """A server for the tests that leave it as it was."""
    with _servers(tmp_path_factory.mktemp("common"), robot) as make:
        yield make()


def _plain(robot: RobotConfig) -> Any:
    return msgspec.json.decode(msgspec.json.encode(robot))


def test_robots_wait_for_the_warm_up_and_are_told(serve: Open, make_request: Make) -> None:
    running = serve(options={"load_s": 1.0}, heartbeat_s=0.05)
    one = running.robot("r1")
    engine = one.ready()
    assert "loading" in one.phases
    assert (engine.horizon, engine.action_names, engine.heartbeat_s, engine.expiry_s) == (
        5,
        ("lift", "turn"),
        0.05,
        3.0,
    )
    assert engine.pid == os.getpid() and engine.boot
    one.send(make_request(1, 1, images=False, value=0.25), remaining_ms=5000.0)
    reply = one.next()
    assert isinstance(reply, wire.Reply)
    assert reply.valid_ms == pytest.approx(500.0) and reply.load is not None and reply.load.robots == 1
    two = running.robot("r2")  # of another instance and another id: at once
    assert two.ready().boot == engine.boot
    assert running.status()["robots"] == "r1, r2"


def test_requests_of_many_robots_run_in_one_batch(common: Running, make_request: Make) -> None:
    robots = [common.robot() for i in range(5)]
    for each in robots:
        each.ready()
    robots[0].send(make_request(1, 1, "sleep 0.3", images=False), remaining_ms=5000.0)
    time.sleep(0.1)
    for each in robots[1:]:
        each.send(make_request(1, 1, images=False), remaining_ms=5000.0)
    replies = [each.next() for each in robots]
    assert [reply.load.rows for reply in replies] == [1, 4, 4, 4, 4]
    for timings in (reply.timings for reply in replies[1:]):  # they waited for the replica, not for one another
        assert 0.0 <= timings.batch_ms < 50.0 < timings.queue_ms


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "no such model, got other, wanted one of m"),
        ({"model": {"family": "fake"}}, "loads no model for a robot"),
        ({"horizon": 50}, "another horizon, got 5, wanted 50"),
        ({"statistics": "feed"}, "other statistics"),
        ({"robot_id": "unwanted"}, ""),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_with_the_reason(
    common: Running, robot: RobotConfig, changes: dict[str, Any], words: str
) -> None:
    common.robot().ready()
    if words:
        refusal = common.robot(**changes).refused()
        assert words in refusal.reason and refusal.retry_s == 0.0
    else:  # the model itself does not want it, which its replicas find out
        unwanted = {**_plain(robot), "robot_id": "unwanted"}
        other = common.connect(wire.Hello(robot=unwanted, model="m", robot_id="x"))
        assert "not this robot" in other.refused().reason


def test_one_id_one_robot_and_a_reconnect_takes_over(serve: Open, make_request: Make) -> None:
    running = serve(expiry_s=1.0)
    first = running.robot("r1", instance=7)
    first.ready()
    refusal = running.robot("r1", instance=8).refused()
    assert "in use" in refusal.reason and 0.0 < refusal.retry_s <= 1.0
    again = running.robot("r1", instance=7)
    again.ready()
    first.send(make_request(1, 1, images=False))
    assert first.next().reason == "unknown_session"
    time.sleep(1.3)  # silent: its session expires, and another instance may have the id
    running.robot("r1", instance=8).ready()
    assert running.status()["sessions ended: expired"] == "1"


def test_alive_keeps_a_session(serve: Open, make_request: Make) -> None:
    running = serve(expiry_s=1.5)
    one = running.robot()
    one.ready()
    for _ in range(5):
        time.sleep(0.35)
        one.send(wire.Alive())
    one.send(make_request(1, 1, images=False), remaining_ms=5000.0)
    assert isinstance(one.next(), wire.Reply)
    one.send(wire.Goodbye())
    one.send(make_request(1, 2, images=False))
    assert one.next().reason == "unknown_session"


def test_a_session_ends_when_the_server_is_full(serve: Open) -> None:
    running = serve(sessions_max=1)
    running.robot("r1").ready()
    refusal = running.robot("r2").refused()
    assert "no room" in refusal.reason and refusal.retry_s > 0


def test_deltas_are_made_whole_or_asked_for(common: Running, make_request: Make) -> None:
    one, sent = common.robot(), SentStreams()
    one.ready()
    for chunk_id in (1, 2):
        message, arrays = sent.to_wire(replace(make_request(1, chunk_id, "say 1", images=False), remaining_ms=5000.0))
        assert (message.instruction is None) == (chunk_id == 2)
        one.send(message, arrays)
        assert isinstance(one.next(), wire.Reply)
    sent.to_wire(make_request(1, 3, "say 2", images=False))  # never arrives
    one.send(*sent.to_wire(replace(make_request(1, 4, "say 2", images=False), remaining_ms=5000.0)))
    answer = one.next()
    assert (answer.reason, answer.chunk_id) == ("keyframe", 4) and "instruction" in answer.text
    sent.forget()
    one.send(*sent.to_wire(replace(make_request(1, 4, "say 2", images=False), remaining_ms=5000.0)))
    assert isinstance(one.next(), wire.Reply)


def test_what_cannot_be_in_time_is_refused_at_once(common: Running, make_request: Make) -> None:
    one, two = common.robot(), common.robot()
    one.ready()
    two.ready()
    one.send(make_request(1, 1, "sleep 1.0", images=False), remaining_ms=5000.0)
    time.sleep(0.2)
    began = time.monotonic()
    two.send(make_request(1, 1, images=False), remaining_ms=3.5)  # 3 of them are kept for the way back
    refusal = two.next()
    assert (refusal.reason, refusal.refusal) == ("overloaded", Refusal.OVERLOADED)
    assert time.monotonic() - began < 0.5
    two.send(make_request(1, 2, images=False), remaining_ms=-1.0)  # it holds: late is better than never
    assert two.next().reason == "overloaded"  # but not after hold_ms, 500


def test_the_newest_replaces_and_a_cancel_ends_both(common: Running, make_request: Make) -> None:
    one, two = common.robot(), common.robot()
    one.ready()
    two.ready()
    one.send(make_request(1, 1, "sleep 2.0", images=False), remaining_ms=5000.0)
    time.sleep(0.2)
    for chunk_id in (1, 2):
        two.send(make_request(1, chunk_id, images=False), remaining_ms=5000.0)
    assert (two.next().reason, two.next(0.1)) == ("replaced", None)
    for each in (two, one):
        each.send(wire.Cancel(epoch=1))
        assert each.next(1.0).reason == "cancelled"  # the running one at its next step
    one.send(make_request(1, 3, images=False))
    assert one.next().reason == "cancelled"  # an epoch that is over stays over
    one.send(make_request(2, 3, images=False))
    assert one.next().reason == "duplicate"
    one.send(make_request(2, 4, images=False), remaining_ms=5000.0)
    assert isinstance(one.next(), wire.Reply)


def test_what_a_row_raises_is_that_rows_alone(common: Running, make_request: Make) -> None:
    robots = [common.robot() for i in range(3)]
    for each in robots:
        each.ready()
    robots[0].send(make_request(1, 1, "sleep 0.3", images=False), remaining_ms=5000.0)
    time.sleep(0.1)
    robots[1].send(make_request(1, 1, "refuse", images=False), remaining_ms=5000.0)
    robots[2].send(make_request(1, 1, images=False), remaining_ms=5000.0)
    kinds = [each.next() for each in robots]
    assert [type(kind) for kind in kinds] == [wire.Reply, wire.ErrorReply, wire.Reply]
    assert kinds[1].reason == "failed" and "not this one" in kinds[1].text


def test_a_lost_replica_fails_its_requests_and_is_replaced(serve: Open, make_request: Make) -> None:
    running = serve()
    one = running.robot()
    one.ready()
    one.send(make_request(1, 1, "sleep 9", images=False), remaining_ms=5000.0)
    time.sleep(0.3)
    (replica,) = running.replicas()
    replica.kill()
    failed = one.next(2.0)
    assert failed.reason == "failed" and "SIGKILL" in failed.text and failed.chunk_id == 1
    one.send(make_request(1, 2, images=False), remaining_ms=100.0)
    assert one.next().reason == "overloaded"  # there is none just now
    running.await_replicas("1 of 1")
    one.send(make_request(1, 3, images=False), remaining_ms=5000.0)
    assert isinstance(one.next(), wire.Reply)  # in the same session
    assert [child.pid for child in running.replicas()] != [replica.pid]


def test_one_of_two_replicas_is_enough(serve: Open, make_request: Make) -> None:
    running = serve(models={"m": {"replicas": 2, "buckets": [1]}})
    robots = [running.robot(f"r{i}") for i in range(2)]
    for each in robots:
        each.ready()
    running.await_replicas("2 of 2")
    began = time.monotonic()
    for each in robots:
        each.send(make_request(1, 1, "sleep 0.5", images=False), remaining_ms=5000.0)
    assert all(isinstance(each.next(), wire.Reply) for each in robots)
    assert time.monotonic() - began < 0.9  # side by side
    running.replicas()[0].kill()
    running.await_replicas("1 of 2")
    for chunk_id in (2, 3):
        robots[0].send(make_request(1, chunk_id, images=False), remaining_ms=5000.0)
        assert isinstance(robots[0].next(), wire.Reply)


def test_robots_of_a_model_with_a_memory_stay_where_it_is(serve: Open, make_request: Make) -> None:
    running = serve(models={"m": {"replicas": 2}}, options={"keeps_state": True})
    robots = [running.robot(f"r{i}") for i in range(2)]
    for each in robots:
        each.ready()
    running.await_replicas("2 of 2")
    pids = []
    for chunk_id in (1, 2, 3):
        for each in robots:
            each.send(make_request(1, chunk_id, "pid", images=False), remaining_ms=5000.0)
        pids.append([each.next().text for each in robots])
    assert pids[0] == pids[1] == pids[2] and pids[0][0] != pids[0][1]
    one, sent = robots[0], SentStreams()
    for chunk_id in (4, 5):  # keyed from now on
        one.send(*sent.to_wire(replace(make_request(1, chunk_id, "pid", images=False), remaining_ms=5000.0)))
        assert one.next().text == pids[0][0]
    psutil.Process(int(pids[0][0].split()[1])).kill()
    running.await_replicas("1 of 2")
    one.send(*sent.to_wire(replace(make_request(1, 6, "pid", images=False), remaining_ms=5000.0)))
    assert one.next().reason == "keyframe"  # what the model remembered is gone: begin with everything
    sent.forget()
    one.send(*sent.to_wire(replace(make_request(1, 6, "pid", images=False), remaining_ms=5000.0)))
    assert one.next().text == pids[0][1]
    assert running.status()["robots whose model state was lost"] == "1"


def test_several_models_side_by_side(serve: Open, make_request: Make) -> None:
    running = serve(models={"a": {}, "b": {"window_ms": 0.0}})
    one, two = running.robot("r1", "a"), running.robot("r2", "b")
    one.ready()
    two.ready()
    one.send(make_request(1, 1, "sleep 1.0", images=False), remaining_ms=5000.0)
    two.send(make_request(1, 1, images=False), remaining_ms=500.0)
    assert isinstance(two.next(), wire.Reply)
    assert isinstance(one.next(), wire.Reply)
    assert {"a answered", "b answered"} <= running.status().keys()


def test_a_model_that_cannot_be_loaded_is_said(serve: Open) -> None:
    running = serve(options={"load_s": 0.5, "load_error": "the weights are torn"})
    assert "the weights are torn" in running.robot().refused().reason
    running.thread.join(WAIT_S)  # there is nothing that it could serve
    assert isinstance(running.error, EngineError) and "the weights are torn" in str(running.error)


def test_it_drains_before_it_ends(serve: Open, make_request: Make) -> None:
    running = serve()
    one, two = running.robot("r1"), running.robot("r2")
    one.ready()
    two.ready()
    one.send(make_request(1, 1, "sleep 0.6", images=False), remaining_ms=5000.0)
    time.sleep(0.2)
    assert running.server is not None
    running.server.stop()
    assert isinstance(one.next(), wire.Goodbye) and isinstance(two.next(), wire.Goodbye)
    two.send(make_request(1, 1, images=False), remaining_ms=5000.0)
    assert two.next().reason == "overloaded"
    late = running.robot("r3").refused()
    assert "shutting down" in late.reason and late.retry_s > 0
    assert isinstance(one.next(), wire.Reply)
    running.thread.join(WAIT_S)
    assert running.error is None


def test_a_drain_is_bounded(serve: Open, make_request: Make) -> None:
    running = serve(drain_s=0.3)
    one = running.robot()
    one.ready()
    one.send(make_request(1, 1, "deaf 30", images=False), remaining_ms=5000.0)
    time.sleep(0.2)
    began = time.monotonic()
    running.end()
    assert time.monotonic() - began < 8.0  # the replica is killed at half of its 5 s


def test_limits_hold_per_robot(serve: Open, make_request: Make) -> None:
    running = serve(limits={"messages_hz": 20.0, "message_bytes": 4000})
    greedy, modest = running.robot("r1"), running.robot("r2")
    greedy.ready()
    modest.ready()
    for _ in range(60):
        greedy.send(wire.Alive())
    assert "more than 20 messages per second" in greedy.next().text
    modest.send(make_request(1, 1, images=False), remaining_ms=5000.0)
    assert isinstance(modest.next(), wire.Reply)


def test_the_metrics_page_has_the_same_figures(serve: Open, make_request: Make, unused_port: int) -> None:
    pytest.importorskip("prometheus_client", reason="the serve extra is not installed")
    running = serve(metrics_port=unused_port)
    one = running.robot()
    one.ready()
    one.send(make_request(1, 1, images=False), remaining_ms=5000.0)
    one.next()
    with urllib.request.urlopen(f"http://127.0.0.1:{unused_port}/metrics", timeout=5) as page:
        text = page.read().decode()
    assert 'phyai_requests_total{model="m",outcome="answered"} 1.0' in text
    assert 'phyai_now{model="m",what="replicas"} 1.0' in text
    with pytest.raises(ConfigError, match="metrics page cannot be served"):
        Server(msgspec.structs.replace(load_server_like(running), metrics_port=unused_port))


def load_server_like(running: Running) -> ServerConfig:
    """A file of the same models at another address."""
    assert running.server is not None
    return msgspec.structs.replace(running.server.config, endpoint=running.endpoint + "x")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": {"m": {"devices": [0, 0]}}}, "two replicas on device 0.*share_devices"),
        ({"models": {"m": {"devices": [0]}, "n": {"devices": [0]}}}, "two replicas on device 0.*models m and n"),
        ({"models": {"m": {"devices": [0], "replicas": 2}}}, "both say how many"),
        ({"expiry_s": 0.5}, "between two signs of life"),
        ({"models": {"m": {"window_ms": 21}}}, "<= 20"),
        ({"models": {}}, "length >= 1"),
        ({"model": {}}, "Did you mean 'models'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    content: dict[str, Any] = {"models": {"m": {}}, **change}
    for served in content.get("models", {}).values():
        served |= {"model": "fake", "robot": "arm7"}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_server(str(tmp_path / "serve.yaml"))


def test_devices_may_be_shared_when_that_is_said(tmp_path: Path) -> None:
    served = {"model": "fake", "robot": "arm7", "devices": [0, 0], "share_devices": True}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"models": {"m": served}}), encoding="utf-8")
    assert load_server(str(tmp_path / "serve.yaml")).models["m"].places == (0, 0)


@pytest.mark.parametrize("name", ["local", "gpu"])
def test_the_shipped_files_are_right(name: str) -> None:
    assert load_server(name).models


def test_a_public_address_needs_keys() -> None:
    config = msgspec.structs.replace(load_server("local"), endpoint="tcp://0.0.0.0:5599")
    with pytest.raises(ConfigError, match="no keys"):
        Server(config)


def test_ipv6(serve: Open, robot: RobotConfig, unused_port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this host has no IPv6 loopback: {error}")
    endpoint = f"tcp://[::1]:{unused_port}"
    assert serve(endpoint=endpoint).status()["robots"] == "none"
    with RemotePolicy(robot, RemoteEngine(endpoint=endpoint, model="m"), start_timeout_s=WAIT_S) as policy:
        images = {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in robot.cameras}
        assert policy.infer(images, np.zeros(len(robot.state)), deadline_s=WAIT_S).chunk.actions.size


def test_a_silent_server_is_said() -> None:
    with pytest.raises(EngineTimeoutError, match="does not answer"):
        server_status("tcp://127.0.0.1:9", timeout_s=0.2)
