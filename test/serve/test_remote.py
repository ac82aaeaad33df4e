"""``engine: remote`` against a scripted server, over TCP and through a bad network."""

from __future__ import annotations

import contextlib
import itertools
import socket as stdlib_socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Faults, Proxy
from scripted_server import ScriptedServer, engine_hello

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import (
    CancelledError,
    ConfigError,
    EngineRefusedError,
    EngineTimeoutError,
    RefusalError,
)
from phyai_engine.serve import keys
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.auth import Gate
from phyai_engine.serve.client import Answered, Failed, Lost
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.types import Refusal, Request, StageTimings

Make = Callable[..., Request]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    """Makes servers; ends them all."""
    servers: list[ScriptedServer] = []

    def make(*arguments: Any, **options: Any) -> ScriptedServer:
        servers.append(ScriptedServer(*arguments, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def proxied(serve: Callable[..., ScriptedServer]) -> Iterator[tuple[ScriptedServer, Proxy]]:
    server = serve()
    proxy = Proxy(server.port)
    yield server, proxy
    proxy.close()


@pytest.fixture
def connect(open_session: Any) -> Callable[..., Any]:
    """A client of a server or a proxy, with its events."""

    def make(end: Any, *, remote: dict[str, Any] | None = None, **rest: Any) -> Any:
        endpoint = end if isinstance(end, str) else end.endpoint
        rest.setdefault("start_timeout_s", 5.0)
        return open_session("remote", remote=RemoteEngine(endpoint=endpoint, model="m", **(remote or {})), **rest)

    return make


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def silent(server: ScriptedServer, peer: bytes, request: Request) -> None:
    """No answer."""


# -- one request -----------------------------------------------------------------------------------------------------


def test_a_request_is_answered_and_its_time_is_told_apart(proxied: Any, connect: Any, make_request: Make) -> None:
    server, proxy = proxied
    session = connect(proxy, remote={"robot_id": "r7"})
    (hello,) = server.hellos
    assert (hello.robot_id, hello.model, hello.parent_pid, hello.robot["robot_id"]) == ("r7", "m", 0, "test")
    assert session.client.alive
    assert session.client.pid is None
    assert "connected to tcp://" in session.client.connection
    assert isinstance(session.ask(make_request(3, 1)), Answered)
    proxy.faults = Faults(delay_s=0.05)
    event = session.ask(make_request(3, 2, value=0.25, committed=True))
    assert isinstance(event, Answered)
    np.testing.assert_array_equal(event.chunk.actions, np.full((5, 2), 0.25))
    timings = event.chunk.timings
    assert (timings.inference_ms, timings.queue_ms) == (1.0, pytest.approx(0.5, abs=20.0))
    assert 0.0 < timings.serialise_ms < 50.0
    assert timings.network_ms > 95.0  # both ways
    assert timings.serialise_ms + timings.network_ms == pytest.approx(timings.transfer_ms)
    assert timings.queue_ms + timings.inference_ms + timings.transfer_ms == pytest.approx(event.round_trip_ms)


def test_only_what_changed_travels(serve: Any, connect: Any, make_request: Make) -> None:
    server = serve(cameras=("top", "wrist"))
    session = connect(server)
    still = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    whole = make_request(1, 1, "pick the red block")

    def ask(chunk_id: int, **images: Any) -> Any:
        observation = replace(whole.observation, images={"top": still, **images})
        answer = session.ask(replace(whole, chunk_id=chunk_id, observation=observation))
        assert isinstance(answer, Answered)
        return server.requests()[-1]

    assert ask(1, wrist=still + 1).instruction == "pick the red block"
    second = ask(2, wrist=still + 2)
    assert second.instruction is None
    first_size, second_size = server.sizes
    assert first_size - second_size > still.nbytes
    assert ask(3, wrist=(still + 2).copy()).keys == second.keys  # the same content, though another array
    assert server.sizes[-1] < 600
    peer = next(iter(server.kept))
    server.kept[peer]._kept.clear()  # the server forgot: it asks for the whole, and gets it
    assert ask(4, wrist=still + 2).instruction == "pick the red block"
    assert [m.chunk_id for m in server.requests()] == [1, 2, 3, 4, 4]
    assert server.sizes[-1] >= first_size - 100
    assert session.client.counters["repeated"] == 1


def test_a_server_that_never_keeps_anything_is_told_once(serve: Any, connect: Any, make_request: Make) -> None:
    def forgetful(server: ScriptedServer, peer: bytes, request: Request) -> None:
        ids = {"epoch": request.epoch, "chunk_id": request.chunk_id}
        server.send(peer, wire.ErrorReply(reason="keyframe", error_type="", text="what?", **ids))

    server = serve(forgetful)
    event = connect(server).ask(make_request())
    assert isinstance(event, Failed)
    assert len(server.requests()) == 2


def test_jpeg_is_smaller_and_close(serve: Any, connect: Any, make_request: Make) -> None:
    seen: list[Any] = []
    server = serve(lambda s, peer, request: (seen.append(request.observation.images["top"]), s.reply(peer, request)))
    y, x = np.mgrid[:120, :160]
    image = np.stack((y, x, (x + y) // 2), axis=-1).astype(np.uint8)
    whole = make_request()
    request = replace(whole, observation=replace(whole.observation, images={"top": image}))
    assert isinstance(connect(server, remote={"jpeg_quality": 90}).ask(request), Answered)
    assert server.sizes[0] < image.nbytes / 5
    assert np.abs(seen[0].astype(int) - image).mean() < 3.0


@pytest.mark.fault(26)
def test_late_duplicate_and_reordered_replies_are_dropped(serve: Any, connect: Any, make_request: Make) -> None:
    def answer(server: ScriptedServer, peer: bytes, request: Request) -> None:
        server.reply(peer, request, chunk_id=request.chunk_id + 1)
        server.reply(peer, request, epoch=request.epoch - 1)
        server.reply(peer, request)
        server.reply(peer, request)
        server.reply(peer, request, chunk_id=request.chunk_id - 1)

    session = connect(serve(answer))
    for chunk_id in (2, 3, 4):
        event = session.ask(make_request(5, chunk_id))
        assert isinstance(event, Answered)
        assert (event.chunk.epoch, event.chunk.chunk_id) == (5, chunk_id)
    until(lambda: session.client.counters.get("dropped_replies") == 12)
    assert session.client.poll() == []


def test_a_cancel_is_told_at_once_and_travels(serve: Any, connect: Any, make_request: Make) -> None:
    server = serve(silent)
    session = connect(server)
    session.client.submit(make_request(4, 1))
    until(lambda: bool(server.requests()))
    session.client.cancel(4)
    event = session.next(0.2)
    assert isinstance(event, Failed)
    assert isinstance(event.error, CancelledError)
    until(lambda: wire.Cancel(epoch=4) in server.heard)


def test_overloaded_is_a_refusal_with_its_code(serve: Any, connect: Any, make_request: Make) -> None:
    def busy(server: ScriptedServer, peer: bytes, request: Request) -> None:
        code = {"reason": "overloaded", "refusal": Refusal.OVERLOADED}
        ids = {"epoch": request.epoch, "chunk_id": request.chunk_id}
        server.send(peer, wire.ErrorReply(error_type="", text="it would take 300 ms", **code, **ids))

    session = connect(serve(busy))
    began = time.monotonic()
    for chunk_id in range(1, 9):
        event = session.ask(make_request(1, chunk_id))
        assert isinstance(event, Failed)
        assert isinstance(event.error, RefusalError)
        assert event.error.code is Refusal.OVERLOADED
    assert time.monotonic() - began > 0.5  # told later each time, so that it asks less often
    session.client.submit(make_request(1, 9))
    session.client.cancel(1)
    assert isinstance(session.next(0.1), Failed)  # a cancel never waits


def test_remaining_time_is_of_when_it_was_sent(serve: Any, connect: Any, make_request: Make) -> None:
    server = serve()
    session = connect(server)
    request = make_request()
    assert request.remaining_ms == 80.0
    time.sleep(0.05)
    session.ask(request)
    assert server.requests()[0].remaining_ms < 31.0


# -- loss and recovery -----------------------------------------------------------------------------------------------


def test_a_killed_server_fails_what_is_in_flight_at_once_and_the_next_one_serves(
    serve: Any, connect: Any, make_request: Make
) -> None:
    server = serve(silent)
    session = connect(server, heartbeat_timeout_s=2.0)
    session.client.submit(make_request(1, 1, "go"))
    until(lambda: bool(server.requests()))
    began = time.monotonic()
    server.close()
    event = session.next()
    assert isinstance(event, Failed)
    assert "lost" in str(event.error)
    assert time.monotonic() - began < 0.5
    session.client.submit(make_request(1, 2, "go"))  # while it is away
    time.sleep(0.3)
    assert not session.client.alive
    again = serve(port=server.port)
    waited = session.next()
    assert isinstance(waited, Failed)  # it would answer an observation of the past
    assert "ask again" in str(waited.error)
    answer = session.ask(make_request(1, 3, "go"))
    assert isinstance(answer, Answered)
    assert again.requests()[0].instruction == "go"  # whole: the new server knows nothing
    assert [m.instance for m in again.hellos] == [m.instance for m in server.hellos]
    assert again.hellos[0].horizon == 5  # what the robot's plans are made for
    assert session.client.alive
    counters = session.client.counters
    assert (counters["sessions"], counters["disconnected"]) == (2, 1)
    assert "lost" not in counters


def test_silence_is_lost_once_and_the_client_comes_back(proxied: Any, connect: Any, make_request: Make) -> None:
    _, proxy = proxied
    session = connect(proxy, heartbeat_timeout_s=0.4)
    assert isinstance(session.ask(make_request(1, 1)), Answered)
    proxy.cut()
    began = time.monotonic()
    session.client.submit(make_request(1, 2))
    failed, lost = session.next(), session.next()
    assert isinstance(failed, Failed)
    assert isinstance(lost, Lost)
    assert 0.3 < time.monotonic() - began < 0.9
    assert "no heartbeat" in str(lost.error)
    assert not session.client.alive
    time.sleep(0.6)
    assert session.client.poll() == []  # told once
    proxy.mend()
    until(lambda: bool(session.client.alive))
    assert isinstance(session.ask(make_request(2, 3)), Answered)
    proxy.cut()
    assert isinstance(session.next(), Lost)  # and once again


def test_a_cut_shorter_than_the_limit_is_only_late(proxied: Any, connect: Any, make_request: Make) -> None:
    server, proxy = proxied
    session = connect(proxy, heartbeat_timeout_s=1.5)
    proxy.cut()
    session.client.submit(make_request(1, 1))
    time.sleep(0.5)
    assert not server.requests()
    proxy.mend()
    event = session.next()
    assert isinstance(event, Answered)
    assert event.round_trip_ms > 450.0
    assert session.client.counters["sessions"] == 1


def test_a_chunk_that_comes_after_its_time_is_not_played(proxied: Any, connect: Any, make_request: Make) -> None:
    server, proxy = proxied

    def reply(server: ScriptedServer, peer: bytes, request: Request) -> None:
        ids = {"epoch": request.epoch, "chunk_id": request.chunk_id}
        message = wire.Reply(**ids, timings=StageTimings(queue_ms=0.0, inference_ms=1.0), valid_ms=200.0)
        server.send(peer, message, {"actions": np.zeros((5, 2))})

    server.answer = reply
    session = connect(proxy, heartbeat_timeout_s=2.0)
    assert isinstance(session.ask(make_request(1, 1)), Answered)
    proxy.cut()
    session.client.submit(make_request(1, 2))
    time.sleep(0.4)
    proxy.mend()
    event = session.next()
    assert isinstance(event, Failed)
    assert isinstance(event.error, RefusalError)
    assert event.error.code is Refusal.EXHAUSTED
    assert session.client.counters["late"] == 1


def test_a_reset_connection_is_made_again(proxied: Any, connect: Any, make_request: Make) -> None:
    server, proxy = proxied
    session = connect(proxy)
    for chunk_id in (1, 2, 3):
        assert isinstance(session.ask(make_request(1, chunk_id)), Answered)
        proxy.reset()
        until(lambda n=chunk_id: len(server.hellos) == n + 1 and bool(session.client.alive))  # type: ignore[misc]
    assert session.client.counters["sessions"] >= 3


def test_loss_costs_time_but_no_chunk(proxied: Any, connect: Any, make_request: Make) -> None:
    _, proxy = proxied
    session = connect(proxy, heartbeat_timeout_s=5.0)
    proxy.faults = Faults(delay_s=0.002, jitter_s=0.005, loss=0.3, retransmit_s=0.02)
    for chunk_id in range(1, 21):
        event = session.ask(make_request(1, chunk_id, value=chunk_id / 32))
        assert isinstance(event, Answered)
        assert event.chunk.actions[0, 0] == chunk_id / 32


def test_a_server_that_forgot_the_session_is_greeted_again(serve: Any, connect: Any, make_request: Make) -> None:
    server = serve()
    session = connect(server)
    server.kept.clear()
    event = session.ask(make_request(1, 1))
    assert isinstance(event, Failed)
    assert "ended this session" in str(event.error)
    until(lambda: len(server.hellos) == 2 and bool(session.client.alive))
    assert isinstance(session.ask(make_request(1, 2)), Answered)


def test_a_goodbye_lets_what_is_in_flight_come_and_asks_nothing_more(
    serve: Any, connect: Any, make_request: Make
) -> None:
    asked: list[tuple[bytes, Request]] = []
    server = serve(lambda s, peer, request: asked.append((peer, request)))
    session = connect(server, heartbeat_timeout_s=3.0)
    session.client.submit(make_request(1, 1))
    until(lambda: bool(asked))
    server.send(asked[0][0], wire.Goodbye(reason="it drains"))
    session.client.submit(make_request(1, 2))
    time.sleep(0.2)
    assert len(asked) == 1
    server.reply(*asked[0])
    event = session.next()
    assert isinstance(event, Answered)
    until(lambda: len(server.hellos) == 2)
    assert isinstance(session.next(), Failed)  # what waited meanwhile
    session.client.submit(make_request(1, 3))
    until(lambda: len(asked) == 2)


def test_signs_of_life_keep_an_idle_session(serve: Any, connect: Any) -> None:
    server = serve(greet=lambda hello: wire.HelloReply(engine=engine_hello(expiry_s=0.2)))
    connect(server)
    until(lambda: server.heard.count(wire.Alive()) >= 5)
    still = serve(greet=lambda hello: wire.HelloReply(engine=engine_hello(expiry_s=0.0)))
    connect(still)
    time.sleep(0.3)
    assert wire.Alive() not in still.heard


def test_stop_says_goodbye_and_never_waits_for_a_dead_server(proxied: Any, connect: Any) -> None:
    server, proxy = proxied
    session = connect(proxy)
    assert session.client.stop()
    until(lambda: wire.Goodbye() in server.heard)
    other = connect(proxy)
    proxy.cut()
    began = time.monotonic()
    assert other.client.stop()
    assert time.monotonic() - began < 1.0


# -- the handshake ---------------------------------------------------------------------------------------------------


def test_a_refusal_ends_the_start_with_its_reason(serve: Any, connect: Any) -> None:
    server = serve(greet=lambda hello: wire.HelloReply(reason=f"no model {hello.model}: there are pi05, groot"))
    with pytest.raises(EngineRefusedError, match="no model m: there are pi05"):
        connect(server)
    assert len(server.hellos) == 1


def test_a_refusal_that_may_pass_is_tried_again(serve: Any, connect: Any) -> None:
    count = itertools.count()

    def greet(hello: wire.Hello) -> wire.HelloReply:
        if next(count) < 2:
            return wire.HelloReply(reason="robot test is connected already", retry_s=0.1)
        return wire.HelloReply(engine=engine_hello())

    server = serve(greet=greet)
    assert connect(server).client.alive
    assert len(server.hellos) == 3
    stubborn = serve(greet=lambda hello: wire.HelloReply(reason="robot test is connected already", retry_s=0.1))
    with pytest.raises(EngineTimeoutError, match="connected already"):
        connect(stubborn, start_timeout_s=0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action_names": ("lift",)}, "other actions than the robot"),
        ({"heartbeat_s": 0.5}, "heartbeat is too slow"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(serve: Any, connect: Any, changes: dict[str, Any], words: str) -> None:
    server = serve(greet=lambda hello: wire.HelloReply(engine=engine_hello(**changes)))
    with pytest.raises(EngineRefusedError, match=words):
        connect(server)


def test_a_server_that_comes_back_as_another_is_not_used(serve: Any, connect: Any, make_request: Make) -> None:
    server = serve()
    session = connect(server, heartbeat_timeout_s=0.5)
    server.close()
    wrong = serve(port=server.port, greet=lambda hello: wire.HelloReply(engine=engine_hello(action_names=("lift",))))
    assert isinstance(session.next(), Lost)
    assert not session.client.alive
    assert "other actions" in session.client.connection
    wrong.close()
    serve(port=server.port)
    until(lambda: bool(session.client.alive))  # the right one again


def test_nobody_there_is_told_with_the_reason_within_the_bound(connect: Any) -> None:
    with stdlib_socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="the connection was refused"):
            connect(f"tcp://127.0.0.1:{port}", start_timeout_s=0.4)
        assert time.monotonic() - began < 2.0
        held.listen()  # connects, and says nothing
        with pytest.raises(EngineTimeoutError, match="did not accept this robot"):
            connect(f"tcp://127.0.0.1:{port}", start_timeout_s=0.4)


def test_a_server_that_is_no_engine_is_told(connect: Any) -> None:
    def talk(listener: stdlib_socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 4)
                peer.close()

    with stdlib_socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(EngineTimeoutError, match="it broke off the handshake: no engine server"):
            connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", start_timeout_s=0.4)
        listener.shutdown(stdlib_socket.SHUT_RDWR)
    thread.join(2.0)


def test_another_version_is_named(connect: Any) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, bytes([wire.PROTOCOL_VERSION + 1]) + b"\x80"])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(EngineRefusedError, match="another protocol version"):
            connect(f"tcp://127.0.0.1:{port}")
        thread.join()
    context.term()


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet_keys(tmp_path: Path) -> Path:
    """A server's folder with robot r1 on its list."""
    keys.make_pair(tmp_path, "server")
    keys.add_robot(tmp_path, "r1", keys.make_pair(tmp_path / "robot", "r1"))
    return tmp_path


def test_beyond_this_host_keys_are_needed() -> None:
    with pytest.raises(ConfigError, match="keygen"):
        RemoteEngine(endpoint="tcp://gpu-server:5555", model="m")


def test_a_known_key_connects_and_an_unknown_one_is_told(
    serve: Any, connect: Any, make_request: Make, fleet_keys: Path
) -> None:
    pair = keys.robot_keys(fleet_keys / "robot" / "r1.key_secret", fleet_keys / "server.key")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gate(context, keys.server_keys(fleet_keys))
    server = serve(context=context, guard=gate.guard)
    try:
        session = connect(server, remote={"keys": pair}, heartbeat_timeout_s=0.5)
        assert isinstance(session.ask(make_request()), Answered)
        assert session.client.stop()
        keys.revoke_robot(fleet_keys, "r1")
        with pytest.raises(EngineTimeoutError, match="phyai robots add"):
            connect(server, remote={"keys": pair}, start_timeout_s=0.4)
        keys.make_pair(fleet_keys / "impostor", "server")
        wrong = keys.robot_keys(fleet_keys / "robot" / "r1.key_secret", fleet_keys / "impostor" / "server.key")
        with pytest.raises(EngineTimeoutError, match="or one with another key"):
            connect(server, remote={"keys": wrong}, start_timeout_s=0.4)
        with pytest.raises(EngineTimeoutError, match=r"another key|only one of"):
            connect(server, start_timeout_s=0.4)
        with pytest.raises(EngineTimeoutError, match=r"another key|only one of"):
            connect(serve(), remote={"keys": pair}, start_timeout_s=0.4)
    finally:
        server.close()
        gate.close()
        context.term()


# -- without torch ---------------------------------------------------------------------------------------------------

_ROBOT = """
import sys
sys.path[:0] = [{root!r}]

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rclpy"):
            raise ImportError(name + " is not on this robot")

sys.meta_path.insert(0, NoTorch())
from phyai_engine.cli import main
sys.argv[1:] = {arguments!r}
main()
"""


def test_the_command_needs_neither_torch_nor_ros(serve: Any) -> None:
    arm = load_robot(resolve("robots", "arm7"))
    hello = engine_hello(action_names=arm.action_names, dt_s=arm.dt_s)
    server = serve(greet=lambda _: wire.HelloReply(engine=hello), cameras=tuple(c.name for c in arm.cameras))
    arguments = ["client", server.endpoint, "m", "--robot", "arm7", "-n", "5", "--hz", "0"]
    script = _ROBOT.format(root=str(ROOT), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30.0, check=False)
    assert done.returncode == 0, done.stderr
    assert "network" in done.stdout and "serialise" in done.stdout
    assert len(server.requests()) >= 5
