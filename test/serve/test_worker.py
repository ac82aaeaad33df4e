"""The worker loop over a raw socket: what it answers to clients without EngineClient's manners."""

from __future__ import annotations

import os
import pickle
import socket as stdlib_socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from phyai_engine.config import RobotConfig
from phyai_engine.serve import protocol as wire
from phyai_engine.serve import streams
from phyai_engine.serve.worker import serve
from phyai_engine.types import Request

Make = Callable[..., Request]


class Peer:
    """One raw client."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.beats: list[tuple[float, wire.Heartbeat]] = []

    def send(self, message: wire.Message | Request) -> None:
        """A message, or a request with its arrays."""
        parts = streams.request_to_wire(message) if isinstance(message, Request) else (message, {})
        self.socket.send_multipart(wire.encode(*parts))

    def receive(self, timeout_s: float = 3.0) -> Any:
        """The next message that is no heartbeat; None when there is none."""
        deadline = time.monotonic() + timeout_s
        while self.socket.poll(max(0, int((deadline - time.monotonic()) * 1e3))):
            message, _ = wire.decode(self.socket.recv_multipart())
            if not isinstance(message, wire.Heartbeat):
                return message
            self.beats.append((time.monotonic(), message))
        return None


class Running:
    """A worker in a thread."""

    def __init__(self, load: Any, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self.ended: list[bool] = []
        self.peers: list[Peer] = []
        self.thread = threading.Thread(
            target=lambda: self.ended.append(serve(endpoint, context=self.context, load=load))
        )
        self.thread.start()

    def peer(self) -> Peer:
        """A new client."""
        self.peers.append(Peer(self.context, self.endpoint))
        return self.peers[-1]

    def close(self) -> None:
        """Have the first peer shut it down."""
        self.peers[0].send(wire.Goodbye())
        self.thread.join(3.0)
        assert not self.thread.is_alive()
        for peer in self.peers:
            peer.socket.close()
        self.context.term()


@pytest.fixture
def worker(stand_in: Any, tmp_path: Path) -> Iterator[Running]:
    """Over ipc, so that there is a real transport below."""
    running = Running(stand_in.load_policy, f"ipc://{tmp_path}/w")
    yield running
    running.close()


@pytest.fixture
def hello(robot: RobotConfig) -> wire.Hello:
    """A hello that is accepted."""
    return wire.Hello(
        robot=msgspec.to_builtins(robot),
        model={"family": "stand_in", "options": {"load_s": 0.2}},
        parent_pid=os.getpid(),
        warm_up_count=2,
    )


def _ready(worker: Running, hello: wire.Hello) -> Peer:
    peer = worker.peer()
    peer.send(hello)
    reply = peer.receive()
    assert isinstance(reply, wire.HelloReply)
    assert reply.engine is not None
    assert len(reply.engine.warm_up_ms) == 2
    assert {"phyai_engine", "python", "numpy"} <= set(reply.engine.versions)
    return peer


def test_heartbeats_tell_the_phase_and_go_on_meanwhile(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    assert "loading" in {beat.phase for _, beat in peer.beats}
    peer.beats.clear()
    peer.send(make_request(3, 4, "deaf 0.5"))
    assert isinstance(peer.receive(), wire.Reply)
    busy = [(at, beat) for at, beat in peer.beats if beat.phase == "busy"]
    assert {(beat.epoch, beat.chunk_id) for _, beat in busy} == {(3, 4)}
    assert 5 <= len(busy) <= 12  # every 50 ms of 500, on a busy machine
    peer.beats.clear()
    assert peer.receive(0.15) is None
    assert {(beat.phase, beat.epoch, beat.chunk_id) for _, beat in peer.beats} == {("idle", 0, 0)}


def test_mailbox_of_one_replaces_and_says_so(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    peer.send(make_request(1, 1, "sleep 0.2"))
    time.sleep(0.05)
    for chunk_id in (2, 3, 4):
        peer.send(make_request(1, chunk_id))
    for chunk_id in (2, 3):
        replaced = peer.receive()
        assert isinstance(replaced, wire.ErrorReply)
        assert (replaced.reason, replaced.chunk_id) == ("replaced", chunk_id)
    first, last = peer.receive(), peer.receive()
    assert (first.chunk_id, last.chunk_id) == (1, 4)
    assert 50.0 < last.timings.queue_ms < 200.0
    assert last.timings.inference_ms >= 0.0


@pytest.mark.parametrize("running", ["sleep 3", "deaf 0.3"])
def test_cancelled_requests_never_answer(worker: Running, hello: wire.Hello, make_request: Make, running: str) -> None:
    peer = _ready(worker, hello)
    peer.send(make_request(5, 1, running))
    time.sleep(0.05)
    peer.send(make_request(5, 2))  # queued
    peer.send(wire.Cancel(epoch=5))
    peer.send(make_request(5, 3, "deaf 2"))  # late: not even begun
    began = time.monotonic()
    replies = [peer.receive() for _ in range(3)]
    assert {(r.reason, r.chunk_id) for r in replies} == {("cancelled", 1), ("cancelled", 2), ("cancelled", 3)}
    assert time.monotonic() - began < 1.0
    peer.send(make_request(6, 4))
    assert isinstance(peer.receive(), wire.Reply)


def test_a_cancel_of_an_older_epoch_touches_nothing(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    peer.send(make_request(5, 1, "sleep 0.1"))
    peer.send(wire.Cancel(epoch=4))
    assert isinstance(peer.receive(), wire.Reply)


def test_a_second_client_is_refused_and_cannot_disturb(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    first, second = _ready(worker, hello), worker.peer()
    first.send(make_request(1, 1, "sleep 0.3"))
    second.send(hello)
    reply = second.receive()
    assert isinstance(reply, wire.HelloReply)
    assert reply.engine is None
    assert "serves a client already" in reply.reason
    for message in (wire.Cancel(epoch=9), wire.Goodbye(), make_request(1, 2)):
        second.send(message)
        error = second.receive()
        assert (error.reason, "before the hello" in error.text) == ("protocol", True)
    answer = first.receive()
    assert isinstance(answer, wire.Reply)
    assert answer.chunk_id == 1
    first.send(hello)
    assert "already" in first.receive().reason


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 0),
        ({"guidance": "vjp", "rtc_max_delay": 4}, 0),  # it was trained with delays, and is not asked to use that
        ({"guidance": "trained", "rtc_max_delay": 4}, 4),
    ],
)
def test_the_hello_tells_the_longest_delay(worker: Running, hello: wire.Hello, options: Any, limit: int) -> None:
    peer = worker.peer()
    peer.send(msgspec.structs.replace(hello, model={"family": "stand_in", "rtc": options}))
    assert peer.receive().engine.rtc_max_delay == limit


def test_requests_before_the_engine_is_ready_are_refused(
    worker: Running, hello: wire.Hello, make_request: Make
) -> None:
    peer = worker.peer()
    peer.send(make_request())
    assert peer.receive().reason == "protocol"
    peer.send(hello)
    peer.send(make_request())
    assert peer.receive().reason == "protocol"
    assert isinstance(peer.receive(), wire.HelloReply)


def test_a_wrong_configuration_is_refused_with_its_path(worker: Running, hello: wire.Hello) -> None:
    peer = worker.peer()
    for change, text in (
        ({"robot": {**hello.robot, "robot_ide": "x"}}, "Did you mean 'robot_id'"),
        ({"robot": {**hello.robot, "actions": []}}, "actions"),
        ({"model": {}}, "family"),
        (
            {"model": {"family": "stand_in", "options": {"load_error": "no weights"}}},
            "PhyaiError: no weights",
        ),
    ):
        peer.send(msgspec.structs.replace(hello, **change))
        reply = peer.receive()
        assert isinstance(reply, wire.HelloReply)
        assert reply.engine is None
        assert text in reply.reason
    peer.send(hello)  # the engine is still there for a better one
    assert peer.receive().engine is not None


class _Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.abort, ())


@pytest.mark.fault(24)
def test_garbage_is_answered_and_survived(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    good = [bytes(f) for f in wire.encode(*streams.request_to_wire(make_request()))]
    too_big = wire.ArraySpec(name="a", dtype="uint8", shape=(0, 2**31 - 1, 2**31 - 1, 2**31 - 1))
    header = {"message": {"kind": "heartbeat", "phase": "idle"}, "arrays": [too_big]}
    for frames in (
        [b"\x02" + msgspec.msgpack.encode(header), b""],
        [pickle.dumps(_Bomb())],
        [b"\x02" + pickle.dumps(_Bomb())],
        [b""],
        [os.urandom(100)],
        [b"\x03" + good[0][1:], *good[1:]],
        good[:-1],
        [*good[:-1], good[-1][:-1]],
        [b"x"] * 60,
        [bytes(f) for f in wire.encode(wire.Heartbeat(phase="idle"))],
    ):
        peer.socket.send_multipart(frames)
        error = peer.receive()
        assert isinstance(error, wire.ErrorReply)
        assert error.reason == "protocol"
    peer.send(make_request(1, 8))
    assert isinstance(peer.receive(), wire.Reply)


def test_a_gigabyte_frame_is_dropped_by_the_transport(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    before = psutil.Process().memory_info().rss
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as raw:
        raw.settimeout(2.0)
        raw.connect(worker.endpoint.removeprefix("ipc://"))
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31))  # ZMTP 3.0 greeting
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
        raw.sendall(b"\x02" + struct.pack(">Q", 1 << 30) + bytes(1000))  # a long frame of 1 GiB begins
        while raw.recv(4096):  # until the worker closes the connection
            pass
    assert psutil.Process().memory_info().rss - before < 64 << 20
    peer.send(make_request(1, 8))
    assert isinstance(peer.receive(), wire.Reply)


def test_text_that_cannot_be_encoded_does_not_cost_the_hello(stand_in: Any, hello: wire.Hello) -> None:
    def load(*configs: Any) -> Any:
        policy = stand_in.load_policy(*configs)
        policy.note = "weights of /w/\udcff"
        return policy

    running = Running(load, "inproc://w")
    peer = running.peer()
    peer.send(hello)
    reply = peer.receive()
    running.close()
    assert reply.engine.note == "weights of /w/?"


def test_shutdown_leaves_a_hung_model_behind_and_says_so(stand_in: Any, hello: wire.Hello, make_request: Make) -> None:
    running = Running(stand_in.load_policy, "inproc://w")
    peer = _ready(running, hello)
    peer.send(make_request(1, 1, "deaf 1.0"))
    time.sleep(0.05)
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 0.8
    assert running.ended == [False]
    time.sleep(0.6)


@pytest.mark.parametrize("others", [(), ("notes.txt",)])
def test_a_child_whose_parent_is_gone_already_ends(tmp_path: Path, others: tuple[str, ...]) -> None:
    folder = tmp_path / "phyai-1-x"
    folder.mkdir()
    for name in others:
        (folder / name).touch()
    root = str(Path(__file__).resolve().parents[2])
    script = f"import sys; sys.path.insert(0, {root!r}); from phyai_engine.serve.worker import main; main()"
    arguments = ["--endpoint", f"ipc://{folder}/w", "--parent-pid", "1"]
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=10, check=False)
    assert ended.returncode == 1
    # It takes the folder of its socket along, and nothing else.
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([*others, *([folder.name] if others else [])])


def test_a_batch_of_two_robots_is_answered_row_by_row(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = worker.peer()
    peer.send(msgspec.structs.replace(hello, batches=(1, 2)))
    reply = peer.receive()
    assert reply.engine.batch_ms == ((1, 1.5), (2, 2.5))
    other = {**hello.robot, "robot_id": "other"}
    peer.send(wire.Join(slot=1, robot=other))
    assert peer.receive() == wire.JoinReply(slot=1)
    for robot, reason in (({**other, "robot_id": "unwanted"}, "not this robot"), ({"robot_id": 3}, "join: robot")):
        peer.send(wire.Join(slot=2, robot=robot))
        assert reason in peer.receive().reason
    rows = [make_request(1, 5, "sleep 0.1"), replace(make_request(1, 5, "refuse"), slot=1), make_request(2, 6)]
    for left, row in zip((2, 1, 0), rows, strict=True):
        message, arrays = streams.request_to_wire(row)
        peer.socket.send_multipart(wire.encode(msgspec.structs.replace(message, rows_left=left), arrays))
    answers = [peer.receive() for _ in rows]
    assert [(answer.slot, answer.epoch, answer.chunk_id) for answer in answers] == [(0, 1, 5), (1, 1, 5), (0, 2, 6)]
    assert [type(answer) for answer in answers] == [wire.Reply, wire.ErrorReply, wire.Reply]
    peer.send(wire.Leave(slot=1))


def test_a_cancel_means_its_slot_alone(worker: Running, hello: wire.Hello, make_request: Make) -> None:
    peer = _ready(worker, hello)
    peer.send(wire.Join(slot=1, robot=hello.robot))
    assert peer.receive() == wire.JoinReply(slot=1)
    for left, row in ((1, make_request(1, 5, "sleep 0.3")), (0, replace(make_request(1, 6), slot=1))):
        message, arrays = streams.request_to_wire(row)
        peer.socket.send_multipart(wire.encode(msgspec.structs.replace(message, rows_left=left), arrays))
    peer.send(wire.Cancel(slot=1, epoch=1))
    answers = {answer.slot: answer for answer in (peer.receive(), peer.receive())}  # a queued row is told at once
    assert isinstance(answers[0], wire.Reply)
    assert answers[1].reason == "cancelled"


def test_a_reference_to_what_was_never_sent_asks_for_a_keyframe(
    worker: Running, hello: wire.Hello, make_request: Make
) -> None:
    peer = _ready(worker, hello)
    sent = streams.SentStreams()
    sent.to_wire(make_request(1, 1, images=False))  # lost
    peer.socket.send_multipart(wire.encode(*sent.to_wire(make_request(1, 2, images=False))))
    refused = peer.receive()
    assert (refused.reason, refused.epoch, refused.chunk_id) == ("keyframe", 1, 2)
    sent.forget()
    for chunk_id in (2, 3):
        peer.socket.send_multipart(wire.encode(*sent.to_wire(make_request(1, chunk_id, images=False))))
        assert isinstance(peer.receive(), wire.Reply)
