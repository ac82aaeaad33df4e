"""`phyai serve` over real sockets, from processes apart: the same chunks as a child process, and what it makes of bad
input. PROTOCOL.md states each outcome. Between robot and server is always a network that delays, and by chance.

After every bad case a sound robot, connected from the beginning, still gets its chunks, and the server has not grown.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket as stdlib_socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Faults, Proxy
from served import ROOT, RawRobot, Served

from phyai_engine.config import load_model, load_robot, resolve
from phyai_engine.errors import EngineRefusedError, EngineTimeoutError, ProtocolError, RefusalError
from phyai_engine.serve import keys
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.client import Answered, EngineClient
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.serve.remote_policy import RemotePolicy
from phyai_engine.serve.streams import request_to_wire
from phyai_engine.types import Committed, Observation, Request, StageTimings

ARM = load_robot(resolve("robots", "arm7"))
FRAMES = {camera.name: np.zeros((24, 32, 3), np.uint8) for camera in ARM.cameras}
MIB = 1 << 20
USUAL = Faults(delay_s=0.0005, jitter_s=0.002)


def at_rest() -> np.ndarray[Any, Any]:
    """[S] the middle of every limit."""
    state = np.zeros(len(ARM.state))
    for action, index in zip(ARM.actions, ARM.state_index(), strict=True):
        state[index] = 0.5 * (action.lower + action.upper)
    return state


def request(chunk_id: int, *, epoch: int = 1, **changes: Any) -> Request:
    seen = Observation(FRAMES, at_rest(), np.zeros(len(ARM.state)), "go", 0, 0, 0, 0)
    return Request(epoch, chunk_id, replace(seen, **changes), None, chunk_id, 1000.0)


def hello(robot_id: str, **changes: Any) -> wire.Hello:
    given: dict[str, Any] = {"robot": msgspec.to_builtins(ARM), "model": "m", "robot_id": robot_id, "instance": 1}
    return wire.Hello(**{**given, **changes})


def policy(network: Proxy, robot_id: str, start_timeout_s: float = 20.0, **remote: Any) -> RemotePolicy:
    engine = RemoteEngine(endpoint=network.endpoint, model="m", robot_id=robot_id, **remote)
    return RemotePolicy(ARM, engine, start_timeout_s=start_timeout_s, heartbeat_timeout_s=1.0)


@contextlib.contextmanager
def reached(server: Served) -> Iterator[Proxy]:
    """The network to a server."""
    network = Proxy(server.port, USUAL)
    try:
        yield network
    finally:
        network.close()


@pytest.fixture(scope="module")
def network(server: Served) -> Iterator[Proxy]:
    """To the server that the tests share."""
    with reached(server) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def sound(network: Proxy) -> Iterator[RemotePolicy]:
    """A robot that was there before."""
    with policy(network, "sound") as robot:
        robot.infer(FRAMES, at_rest(), "go")
        yield robot


@pytest.fixture
def robot(server: Served, network: Proxy, sound: RemotePolicy) -> Iterator[RawRobot]:
    """Anybody, without a session yet; afterwards the sound one is asked, and the server is weighed."""
    before = server.rss_bytes()
    raw = RawRobot(network.endpoint)
    yield raw
    raw.close()
    assert sound.infer(FRAMES, at_rest(), "go").chunk.actions.shape == (16, len(ARM.actions))
    assert server.rss_bytes() - before < 48 * MIB


@pytest.fixture
def greeted(robot: RawRobot) -> RawRobot:
    """With a session of its own."""
    robot.send(hello("raw"))
    reply = robot.next()
    assert isinstance(reply, wire.HelloReply)
    assert reply.engine is not None, reply.reason
    return robot


def refused(robot: RawRobot, *words: str) -> wire.ErrorReply:
    """The next message refuses, in these words; a good request is answered after it."""
    error = robot.next()
    assert isinstance(error, wire.ErrorReply), error
    for word in words:
        assert word in error.text, error.text
    robot.send(*request_to_wire(request(1000 + int(time.monotonic() * 1e3) % 10**9)))
    assert isinstance(robot.next(), wire.Reply)
    return error


def frames_of(message: wire.Message, arrays: Any = None) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(message, arrays)]


def test_truncated_frames(greeted: RawRobot) -> None:
    whole = frames_of(*request_to_wire(request(1)))
    greeted.send_frames([whole[0][:-7], *whole[1:]])
    assert refused(greeted, "schema").reason == "protocol"
    greeted.send_frames([*whole[:-1], whole[-1][:-1]])
    refused(greeted, "wrong length")
    greeted.send_frames(whole[:-1])
    refused(greeted, "wrong number of array frames")
    greeted.send_frames([b""])
    refused(greeted, "empty header")


@pytest.mark.fault(24)
def test_what_is_no_message_at_all(greeted: RawRobot) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("executed",))

    version = bytes([wire.PROTOCOL_VERSION])
    for frames in (
        [pickle.dumps(Evil())],
        [version + pickle.dumps(Evil())],
        [version + b"\xc1" * 64],
        [version + b"\xdd\xff\xff\xff\xff"],  # an array of 4 G elements
        [version + b"\x91" * 100_000],  # nested
    ):
        greeted.send_frames(frames)
        refused(greeted)


def test_a_length_field_of_a_gigabyte(server: Served, network: Proxy, robot: RawRobot) -> None:
    greeting = b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    with stdlib_socket.create_connection(("127.0.0.1", network.port), timeout=5.0) as raw:
        raw.sendall(greeting)
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        before = server.rss_bytes()
        raw.sendall(b"\x02" + struct.pack(">Q", 1 << 30) + b"\0" * 1000)
        deadline = time.monotonic() + 5.0
        while raw.recv(4096):  # the server's own greeting, then the end
            assert time.monotonic() < deadline
    assert server.rss_bytes() - before < 32 * MIB


def test_half_a_message_and_silence(network: Proxy, robot: RawRobot) -> None:
    with stdlib_socket.create_connection(("127.0.0.1", network.port)) as raw:
        raw.sendall(b"\xff" + b"\0" * 8)
        time.sleep(0.2)


def test_another_version(robot: RawRobot) -> None:
    frames = frames_of(hello("raw"))
    robot.send_frames([bytes([wire.PROTOCOL_VERSION + 1]) + frames[0][1:]])
    error = robot.next()
    assert isinstance(error, wire.ErrorReply)
    assert f"got {wire.PROTOCOL_VERSION + 1}, wanted {wire.PROTOCOL_VERSION}" in error.text


def test_object_and_foreign_arrays(greeted: RawRobot) -> None:
    whole = frames_of(*request_to_wire(request(1)))
    header = msgspec.msgpack.decode(whole[0][1:])
    for dtype in ("object", ">f8", "O", "float16", "int64"):
        header["arrays"][-1]["dtype"] = dtype
        greeted.send_frames([whole[0][:1] + msgspec.msgpack.encode(header), *whole[1:]])
        refused(greeted, "schema")


def test_big_endian_arrays_arrive_as_what_they_are(sound: RemotePolicy) -> None:
    native = sound.infer(FRAMES, at_rest(), "go", seed=7).chunk.actions
    swapped = sound.infer(FRAMES, at_rest().astype(">f8"), "go", seed=7).chunk.actions
    np.testing.assert_array_equal(native, swapped)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("state", np.zeros((3, len(ARM.state))), "wrong shape"),
        ("state", np.zeros(len(ARM.state)), "wrong form"),
        ("state", np.zeros((2, len(ARM.state)), np.float32), "wrong form"),
        ("state", np.zeros((2, len(ARM.state) + 1)), ""),
        (f"image/{ARM.cameras[0].name}", np.zeros((24, 32, 4), np.uint8), "wrong shape"),
        (f"image/{ARM.cameras[0].name}", np.zeros((0, 32, 3), np.uint8), "wrong shape"),
        ("image/nobody", np.zeros((24, 32, 3), np.uint8), ""),
        (f"jpeg/{ARM.cameras[0].name}", np.frombuffer(b"\xff\xd8\xff no picture", np.uint8), ""),
        ("more", np.zeros(3), "unknown"),
    ],
)
def test_mismatched_arrays(greeted: RawRobot, name: str, array: Any, words: str) -> None:
    message, arrays = request_to_wire(request(1))
    if name.startswith("jpeg/"):
        del arrays[name.replace("jpeg/", "image/")]
    greeted.send(message, {**arrays, name: array})
    refused(greeted, words)


def test_values_that_no_robot_has(greeted: RawRobot) -> None:
    state = at_rest()
    state[0] = np.nan
    greeted.send(*request_to_wire(request(1, state=state)))
    error = greeted.next()
    assert isinstance(error, wire.ErrorReply | wire.Reply)  # a NaN may also come out as one: the handoff refuses it


def test_a_replayed_request(greeted: RawRobot) -> None:
    once = frames_of(*request_to_wire(request(5)))
    greeted.send_frames(once)
    assert isinstance(greeted.next(), wire.Reply)
    greeted.send_frames(once)
    error = greeted.next()
    assert isinstance(error, wire.ErrorReply)
    assert (error.reason, error.chunk_id) == ("duplicate", 5)
    greeted.send(*request_to_wire(request(4)))  # an older one
    assert greeted.next().reason == "duplicate"


def test_a_request_duplicated_while_it_waits(greeted: RawRobot) -> None:
    once = frames_of(*request_to_wire(request(6)))
    greeted.send_frames(once)
    greeted.send_frames(once)
    kinds = sorted(type(message).__name__ for message in greeted.messages(0.5))
    assert kinds == ["ErrorReply", "Reply"]


def test_a_stranger(robot: RawRobot) -> None:
    robot.send(*request_to_wire(request(1)))
    error = robot.next()
    assert isinstance(error, wire.ErrorReply)
    assert (error.reason, error.chunk_id) == ("unknown_session", 1)
    for message in (wire.Alive(), wire.Cancel(epoch=9), wire.Goodbye()):
        robot.send(message)
    robot.send(wire.Reply(epoch=1, chunk_id=1, timings=StageTimings()), {"actions": np.zeros((1, 1))})
    assert all(isinstance(message, wire.ErrorReply) for message in robot.messages(0.3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "pi9"}, "no such model"),
        ({"model": {"family": "fake"}}, "loads no model"),
        ({"robot": {}}, "robot"),
        ({"horizon": 99}, "another horizon"),
        ({"statistics": "other"}, "other statistics"),
    ],
)
def test_a_hello_that_does_not_fit(robot: RawRobot, changes: dict[str, Any], words: str) -> None:
    robot.send(hello("raw", **changes))
    reply = robot.next()
    assert isinstance(reply, wire.HelloReply)
    assert reply.engine is None
    assert words in reply.reason


def test_two_robots_with_one_id(network: Proxy, greeted: RawRobot) -> None:
    with pytest.raises(EngineTimeoutError, match="two robots have one id"), policy(network, "raw", 0.8):
        pass
    greeted.send(*request_to_wire(request(1)))
    assert isinstance(greeted.next(), wire.Reply)  # the first is not disturbed
    greeted.send(wire.Goodbye())
    with policy(network, "raw") as other:
        assert other.infer(FRAMES, at_rest()).chunk.actions.size


def test_a_robot_that_floods_is_slowed_and_nobody_else(sound: RemotePolicy, greeted: RawRobot) -> None:
    for _ in range(2000):
        greeted.send(wire.Alive())
    began = time.monotonic()
    assert sound.infer(FRAMES, at_rest(), "go").round_trip_ms < 1000.0
    assert time.monotonic() - began < 1.5
    errors = [m for m in greeted.messages(1.0) if isinstance(m, wire.ErrorReply)]
    assert len(errors) < 2000


def test_a_server_and_a_child_process_give_the_same_chunks(server: Served, network: Proxy) -> None:
    """Byte for byte, also where the chunk continues committed steps; make prove-remote has a model with weights."""
    signal_ = threading.Event()
    near = EngineClient(ARM, load_model(server.model_file), "process", on_event=signal_.set, warm_up_count=1)
    near.start()
    try:
        with policy(network, "same") as far:
            before: Any = None
            for i in range(1, 9):
                committed = None if before is None or i % 2 else Committed(before[3:], 2, 8)
                asked = replace(request(i, state=at_rest() + 0.01 * i), committed=committed)
                near.submit(asked)
                assert signal_.wait(10.0)
                signal_.clear()
                (event,) = near.poll()
                assert isinstance(event, Answered), event
                before = event.chunk.actions
                seen = asked.observation
                there = far.infer(FRAMES, seen.state, "go", velocity=seen.velocity, committed=committed, seed=i)
                assert there.chunk.actions.tobytes() == before.tobytes()
    finally:
        near.stop()


def test_a_bad_network_costs_time_and_nothing_else(server: Served) -> None:
    with reached(server) as network, policy(network, "far") as robot:
        wanted = robot.infer(FRAMES, at_rest(), "go", seed=9).chunk.actions
        for faults in (Faults(delay_s=0.02, jitter_s=0.02), Faults(loss=0.2, retransmit_s=0.01)):
            network.faults = faults
            for _ in range(4):
                answer = robot.infer(FRAMES, at_rest(), "go", seed=9)
                np.testing.assert_array_equal(answer.chunk.actions, wanted)
                assert answer.chunk.timings.network_ms > 1e3 * faults.delay_s
        network.faults = USUAL
        network.cut()
        mended = threading.Timer(0.5, network.mend)
        mended.start()
        with pytest.raises(RefusalError, match="exhausted: the answer came, got after"):  # a chunk lasts 320 ms
            robot.infer(FRAMES, at_rest(), "go", seed=9)
        mended.join()
        np.testing.assert_array_equal(robot.infer(FRAMES, at_rest(), "go", seed=9).chunk.actions, wanted)
        network.cut()
        robot._client.submit(request(50_000, epoch=robot._epoch))
        time.sleep(0.1)
        network.reset()
        network.mend()
        while not (events := robot._client.poll()):
            time.sleep(0.005)
        assert "lost" in str(events[0].error)  # type: ignore[union-attr]
        until_s = time.monotonic() + 5.0
        while not robot._client.alive:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        robot._chunk_id = 60_000
        np.testing.assert_array_equal(robot.infer(FRAMES, at_rest(), "go", seed=9).chunk.actions, wanted)


_DEAF = """
import sys; sys.path[:0] = [{root!r}, {here!r}]
from test_served import RawRobot, hello, request, request_to_wire
robot = RawRobot({endpoint!r})
robot.send(hello("deaf"))
assert robot.next().engine is not None
print("there", flush=True)
chunk_id = 0
while True:  # it asks, and never reads
    chunk_id += 1
    robot.send(*request_to_wire(request(chunk_id)))
    import time; time.sleep(0.005)
"""


def test_a_robot_that_stops_reading(server: Served, network: Proxy, sound: RemotePolicy) -> None:
    script = _DEAF.format(root=str(ROOT), here=str(Path(__file__).parent), endpoint=network.endpoint)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as deaf:
        try:
            assert deaf.stdout is not None
            assert deaf.stdout.readline() == "there\n"
            before = server.rss_bytes()
            for _ in range(20):
                assert sound.infer(FRAMES, at_rest(), "go").round_trip_ms < 1000.0
                time.sleep(0.05)
            deaf.send_signal(signal.SIGSTOP)  # now it does not even acknowledge
            for _ in range(15):
                assert sound.infer(FRAMES, at_rest(), "go").round_trip_ms < 1000.0
                time.sleep(0.1)  # its session expires meanwhile
            assert server.rss_bytes() - before < 64 * MIB
        finally:
            deaf.kill()


def test_a_server_killed_in_the_middle_of_a_chunk_and_one_told_to_end(tmp_path: Path) -> None:
    server = Served(tmp_path, {"latency_ms": 200.0, "horizon": 64}, served={"buckets": [1]})
    try:
        with reached(server) as network, policy(network, "r1") as robot:
            first = robot.infer(FRAMES, at_rest(), seed=3).chunk.actions
            epoch = robot._epoch
            robot._client.submit(replace(request(10_000, epoch=epoch), seed=3))
            time.sleep(0.15)
            began = time.monotonic()
            server.process.kill()
            while not (events := robot._client.poll()):
                assert time.monotonic() - began < 2.0
                time.sleep(0.01)
            assert "lost" in str(events[0].error)  # type: ignore[union-attr]
            assert time.monotonic() - began < 0.5
            server.kill()
            server.start()
            deadline = time.monotonic() + 10.0
            while not robot._client.alive:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            robot._chunk_id = 20_000
            again = robot.infer(FRAMES, at_rest(), seed=3).chunk.actions
            np.testing.assert_array_equal(first, again)

            robot._client.submit(request(30_000, epoch=epoch))
            time.sleep(0.1)
            assert server.terminate() == 0  # after what was under way
            assert [type(event) for event in robot._client.poll()][:1] == [Answered]  # perhaps that it is gone, too
    finally:
        server.close()


# Wall clocks of both ends leap by an hour, back and forth, several times a second.
_LEAP = """
import itertools, time
_leap = itertools.cycle((0, 3600, -3600, 7200))
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + next(_leap)
time.time_ns = lambda: _time_ns() + next(_leap) * 10**9
"""


def test_clock_steps_on_either_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served(tmp_path, before=f"exec({_LEAP!r})", expiry_s=0.8, served={"buckets": [1]})
    try:
        with reached(server) as network, policy(network, "r1") as robot:
            for offset_s in (0.0, 3600.0, -3600.0, 86400.0):
                monkeypatch.setattr(time, "time", lambda o=offset_s: 1.7e9 + o)
                monkeypatch.setattr(time, "time_ns", lambda o=offset_s: int((1.7e9 + o) * 1e9))
                for _ in range(3):
                    answer = robot.infer(FRAMES, at_rest())
                    assert 0.0 <= answer.chunk.timings.queue_ms < 1000.0
                    assert 0.0 < answer.round_trip_ms < 2000.0
                time.sleep(0.3)
            assert robot.counters["sessions"] == 1
    finally:
        monkeypatch.undo()
        server.close()


def test_keys_decide_who_a_robot_is(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.make_pair(folder, "server")
    keys.add_robot(folder, "r1", keys.make_pair(tmp_path / "robot", "r1"))
    pair = keys.robot_keys(tmp_path / "robot" / "r1.key_secret", folder / "server.key")
    keys.make_pair(tmp_path / "stranger", "r3")  # which nobody added
    stranger = keys.robot_keys(tmp_path / "stranger" / "r3.key_secret", folder / "server.key")
    server = Served(tmp_path, keys=str(folder), expiry_s=0.8, served={"buckets": [1]})
    try:
        with reached(server) as network:
            with pytest.raises(EngineRefusedError, match="not that of its key"), policy(network, "r2", keys=pair):
                pass
            with pytest.raises(EngineTimeoutError, match=r"another key|only one of"), policy(network, "r1", 0.5):
                pass
            with pytest.raises(EngineTimeoutError, match="robots add"), policy(network, "r3", 0.5, keys=stranger):
                pass
            crowd = RawRobot(network.endpoint, pair)  # in, but it never says hello
            for _ in range(300):
                crowd.send(wire.Alive())
            texts = (message.text for message in crowd.messages(10.0))  # type: ignore[union-attr]
            assert "no session" in next(texts)
            assert any("messages per second" in text for text in texts)
            crowd.close()
            time.sleep(0.5)
            with policy(network, "r1", keys=pair) as robot:
                assert robot.infer(FRAMES, at_rest()).chunk.actions.size
                keys.revoke_robot(folder, "r1")
                time.sleep(1.0)
                with pytest.raises(ProtocolError, match="key is not on the list any more"):
                    robot.infer(FRAMES, at_rest(), deadline_s=2.0)
                deadline = time.monotonic() + 5.0
                while robot._client.alive:  # its session is over: a robot's node stops by its heartbeat's limit
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        assert pair.secret.decode() not in server.log()
        assert pair.public not in server.log()
    finally:
        server.close()
