"""The real engine process goes wrong under the real control loop: the stop waits for nothing, the loss is told in time
with what is known of it, a request brings another engine. And: what is cancelled stays cancelled, in every race."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import psutil
import pytest

from phyai_engine.adapter import Adapter
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.control.control_loop import ControlLoop
from phyai_engine.errors import CancelledError
from phyai_engine.models.fake import FakeModel
from phyai_engine.policy import Policy
from phyai_engine.runner import Runner
from phyai_engine.serve.client import Answered, EngineClient, Event, Failed
from phyai_engine.serve.host import ProcessHost
from phyai_engine.serve.output import TAIL_LINES
from phyai_engine.serve.restart import restart
from phyai_engine.types import AbortCause, CancelToken, Chunk, CommandKind, Observation, Request, SafetyState

HEARTBEAT_S = 0.4
BUSY_S = 0.3  # what a test machine that is busy with other tests may add to a bound
WARM_UP = 1


def ask(epoch: int, chunk_id: int) -> Request:
    """A request of a robot at rest."""
    now = time.monotonic_ns()
    seen = Observation({}, np.zeros(2), np.full(2, np.nan), "", 1, 1, now, now)
    return Request(epoch, chunk_id, seen, None, seed=chunk_id, remaining_ms=80.0)


def config(**options: Any) -> ModelConfig:
    """The fake model, which does nothing wrong while it warms up."""
    return ModelConfig(family="fake", options={"action_dim": 2, "grace_runs": WARM_UP, **options})


Open = Callable[..., EngineClient]


@pytest.fixture
def engines(bench: Any) -> Iterator[Open]:
    """Makes clients of real processes, not started; stops them all."""
    clients: list[EngineClient] = []
    robot: RobotConfig = bench().robot

    def make(on_event: Callable[[], None] = lambda: None, heartbeat_s: float = HEARTBEAT_S, **options: Any) -> Any:
        clients.append(
            EngineClient(
                robot,
                config(**options),
                "process",
                on_event=on_event,
                heartbeat_timeout_s=heartbeat_s,
                warm_up_count=WARM_UP,
            )
        )
        return clients[-1]

    yield make
    for client in clients:
        assert client.stop()


def taken(client: EngineClient, signalled: threading.Event, timeout_s: float = 5.0) -> list[Event]:
    """The next events; fails when none comes."""
    until = time.monotonic() + timeout_s
    while not (events := client.poll()):
        assert signalled.wait(max(0.0, until - time.monotonic())), "no event came"
        signalled.clear()
    return events


# -- faults --------------------------------------------------------------------------------------------------


class Drive:
    """The node's loop and player on the real clock, with a perfect arm, over a client of a real process."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.lost_s = 0.0
        self.took_ms: list[float] = []  # of every call that may publish

    def begin(self, client: EngineClient) -> None:
        """Start the engine and the loop."""
        self.client = client
        client.start()
        bench = self.bench
        self.loop = ControlLoop(
            bench.loop.settings, bench._snapshot, client, bench.player, time.monotonic_ns, bench.timings.append
        )
        self.loop.activate()

    def on_event(self) -> None:
        """The client's I/O thread."""
        if self.client.crash is not None and not self.lost_s:
            self.lost_s = time.monotonic()

    def tick(self) -> None:
        """One control tick, and the wait for the next."""
        began = time.monotonic()
        self.loop.on_events()
        self.loop.tick(time.time_ns())
        self.took_ms.append((time.monotonic() - began) * 1e3)
        if self.bench.commands:
            self.bench.state = self.bench.commands[-1].values.copy()
        time.sleep(max(0.0, began + 0.02 - time.monotonic()))

    def until(self, fact: Callable[[], bool], timeout_s: float) -> None:
        """Tick until it holds."""
        until = time.monotonic() + timeout_s
        while not fact():
            assert time.monotonic() < until, "it never came"
            self.tick()

    def abort_and_rearm(self) -> None:
        """One abort, whose first stop command must be written before it returns, and back."""
        if self.bench.player.safety.latched:  # the loss of the engine came first
            self.loop.rearm(0, active=True)
            self.tick()
        before, began = len(self.bench.commands), time.monotonic()
        assert self.loop.abort(AbortCause.SERVICE, "")
        self.took_ms.append((time.monotonic() - began) * 1e3)
        assert [c.kind for c in self.bench.commands[before:]] == [CommandKind.STOP]
        self.tick()
        self.loop.rearm(0, active=True)
        self.tick()  # asks the engine


@dataclass
class Fault:
    """:param options: of the fake model. :param signal: sent to the process. :param boot: code run in the process.
    :param cause: of the loss. :param last_lines: a word in them; "" = there are none."""

    options: dict[str, Any] = field(default_factory=dict)
    signal: int = 0
    boot: str = ""
    cause: str = ""
    last_lines: str = ""


# From the sixth answer on; {wild} is what happens instead of sending.
_WILD = """
import os, time
from phyai_engine.serve import worker
send, answers = worker._Worker._send, []
def wild(self, peer, message, arrays=None):
    answers.extend([0] * (type(message).__name__ == "Reply"))
    if len(answers) < 6:
        return send(self, peer, message, arrays)
    {wild}
worker._Worker._send = wild
main()
"""
SILENT = r"0\.\d\d s of silence"
FAULTS = {
    "is killed": Fault(signal=signal.SIGKILL, cause="killed by SIGKILL"),
    "is stopped": Fault(signal=signal.SIGSTOP, cause=f"{SILENT}, its process stopped"),
    "holds its lock for ever": Fault({"gil_hold_s": 3000.0, "grace_runs": 6}, cause=SILENT, last_lines="fake.py"),
    "dies flooding": Fault(
        {"flood_log_mb": 4, "crash_on_request": 6}, cause="exit code 13", last_lines="floods its log"
    ),
    "closes its socket": Fault(
        boot=_WILD.format(wild="self._socket.close(); time.sleep(60)"),
        cause=f"{SILENT}, its process asleep",
        last_lines="in wild",
    ),
    "writes garbage": Fault(
        boot=_WILD.format(wild="[self._socket.send_multipart([peer, os.urandom(40)]) for _ in range(500)]"),
        cause=SILENT,
        last_lines="worker.py",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_stop_waits_for_nothing_and_another_engine_can_be_had(
    bench: Any, engines: Open, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault, drive = FAULTS[name], Drive(bench())
    with monkeypatch.context() as patch:
        if fault.boot:
            patch.setattr(ProcessHost, "_BOOT", ProcessHost._BOOT.replace("main()\n", fault.boot))
        drive.begin(engines(drive.on_event, **fault.options))
    client = drive.client
    drive.until(lambda: drive.loop.counters.accepted >= 2, 5.0)
    began = time.monotonic()
    if fault.signal:
        os.kill(client.pid, fault.signal)
    for _ in range(10):
        drive.abort_and_rearm()
    drive.until(lambda: drive.lost_s > 0, 5.0)
    for _ in range(10):  # and the engine is being ended
        drive.abort_and_rearm()
    assert np.percentile(drive.took_ms, 90) < 5.0
    assert max(drive.took_ms) < 100.0  # a busy test machine; no wait for an engine is as short

    accepted = drive.loop.counters.accepted
    crash, pid = client.crash, client.pid
    assert crash is not None
    assert re.search(fault.cause, crash.cause)
    assert (crash.pid, crash.phase) == (pid, "busy" if crash.chunk_id else "idle")
    if fault.signal:
        assert drive.lost_s - began < BUSY_S + (HEARTBEAT_S if "silence" in crash.cause else 0.0)
    if "silence" in crash.cause:
        assert HEARTBEAT_S <= float(crash.cause.split()[0]) < HEARTBEAT_S + BUSY_S
    assert client.stop()
    assert client.crash is not None
    lines = client.crash.last_lines  # now with where its threads were
    assert len(lines) <= TAIL_LINES and sum(map(len, lines)) < 20_000
    assert any(fault.last_lines in line for line in lines) if fault.last_lines else lines == ()

    drive.loop.abort(AbortCause.SERVICE, "")
    successor, hello = restart(client, lambda: engines(drive.on_event), memory_bytes=1 << 20, timeout_s=1.0)
    assert not psutil.pid_exists(pid)
    assert hello.pid == successor.pid != pid
    drive.loop._client = drive.client = successor
    for _ in range(20):
        drive.tick()
    assert drive.bench.safety is SafetyState.LATCHED  # a new engine moves nothing by itself
    assert drive.loop.counters.accepted == accepted
    drive.loop.rearm(0, active=True)
    drive.until(lambda: drive.loop.counters.accepted > accepted, 5.0)


@pytest.mark.parametrize("options", [{"gil_hold_s": 1.0}, {"flood_log_mb": 4}, {"oom_on_request": 2}], ids=str)
def test_an_engine_that_comes_back_delays_nothing_and_is_not_lost(bench: Any, engines: Open, options: Any) -> None:
    drive = Drive(bench())
    drive.begin(engines(drive.on_event, heartbeat_s=3.0, **options))
    drive.until(lambda: drive.loop.counters.failed >= ("oom_on_request" in options), 5.0)
    for _ in range(20):
        drive.abort_and_rearm()
    accepted = drive.loop.counters.accepted
    drive.until(lambda: drive.loop.counters.accepted > accepted, 5.0)
    assert np.percentile(drive.took_ms, 90) < 5.0
    assert max(drive.took_ms) < 100.0
    assert drive.client.alive and drive.client.crash is None
    assert (drive.client.counters.get("log_bytes_dropped", 0) > 1e6) == ("flood_log_mb" in options)
    if "oom_on_request" in options:  # told as a failure of that request; the memory it had is free again
        assert "MemoryError" in next(t.text for t in drive.bench.timings if t.outcome == "engine_error")


# -- cancellation --------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_engine_within_one_step(engines: Open) -> None:
    signalled = threading.Event()
    client = engines(signalled.set, latency_ms=1650.0, num_steps=10)  # a step takes 150 ms
    client.start()
    client.submit(ask(1, 1))
    time.sleep(0.4)
    began = time.monotonic()
    client.cancel(1)
    (event,) = taken(client, signalled)
    assert isinstance(event, Failed) and event.cancelled
    assert time.monotonic() - began < 0.1  # told at once
    while not client.counters.get("dropped_cancelled"):  # the engine's own word
        time.sleep(0.002)
        assert time.monotonic() - began < 0.15 + BUSY_S, "it goes on"  # to its end it were 1.2 s
    client.submit(ask(2, 2))
    (event,) = taken(client, signalled)
    assert isinstance(event, Answered) and event.chunk.chunk_id == 2


def test_no_race_between_answer_and_cancel_gives_a_cancelled_chunk(engines: Open) -> None:
    signalled, rng = threading.Event(), random.Random(4)
    client = engines(signalled.set, latency_ms=3.0)
    client.start()
    rounds = 150
    for epoch in range(1, rounds + 1):
        client.submit(ask(epoch, epoch))
        time.sleep(rng.uniform(0.0, 0.010))
        client.cancel(epoch)
        (event,) = taken(client, signalled)
        assert isinstance(event, Failed) and event.cancelled
        assert (event.epoch, isinstance(event.error, CancelledError)) == (epoch, True)
    client.submit(ask(rounds + 1, rounds + 1))
    (event,) = taken(client, signalled)
    assert isinstance(event, Answered)
    counters = client.counters
    assert (counters["submitted"], counters["answered"], counters["cancelled"]) == (rounds + 1, 1, rounds)
    assert 10 < counters["dropped_cancelled"] < rounds - 10  # late replies, and answers that waited for the poll
    assert "dropped_replies" not in counters


def batch(bench: Any, cancels: list[CancelToken], on_step: Any = None, to_host: Any = None) -> list[Any]:
    """Three requests of one batch."""
    model = FakeModel.load(config())
    if to_host is not None:
        model.to_host = to_host  # type: ignore[method-assign]
    policy = Policy(Adapter(bench().robot, config(), model.spec), Runner(model, on_step=on_step), "")
    return policy.infer([ask(1, i) for i in (1, 2, 3)], cancels)


@pytest.mark.parametrize("when", ["first step", "last step", "after the last step"])
def test_a_marked_row_never_reports_ok_and_the_others_are_untouched(bench: Any, when: str) -> None:
    wanted = batch(bench, [CancelToken() for _ in range(3)])
    cancels = [CancelToken() for _ in range(3)]
    steps = count()

    def on_step(step: int, x: Any, velocity: Any) -> None:
        next(steps)
        if {"first step": 0, "last step": 3}.get(when) == step:
            cancels[1].cancel()

    def to_host(array: Any) -> Any:
        if when == "after the last step":
            cancels[1].cancel()
        return array

    answers = batch(bench, cancels, on_step, to_host)
    assert [type(answer) for answer in answers] == [Chunk, CancelledError, Chunk]
    assert next(steps) == 4  # the batch ran to its end
    for i in (0, 2):
        np.testing.assert_array_equal(answers[i].actions, wanted[i].actions)
