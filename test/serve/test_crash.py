"""What is known of an engine that is lost, and what a worker that goes wrong may not do to its client."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from phyai_engine.errors import CancelledError, EngineDiedError, EngineRefusedError, EngineTimeoutError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.client import Answered, CrashReport, Failed, Lost
from phyai_engine.serve.sockets import prepare, received
from phyai_engine.types import Request, StageTimings

Make = Callable[..., Request]


def _crash(session: Any) -> CrashReport:
    crash = session.client.crash
    assert isinstance(crash, CrashReport)
    return crash


def test_the_report_is_a_value_and_the_error_says_the_same(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    assert session.client.crash is None
    session.client.submit(make_request(7, 3, "say 200"))
    assert isinstance(session.next(), Answered)
    session.client.submit(make_request(7, 4, "sleep 9"))
    time.sleep(0.2)
    os.kill(session.client.pid, signal.SIGKILL)
    _, lost = session.next(), session.next()
    crash = _crash(session)
    assert (crash.cause, crash.pid) == ("killed by SIGKILL", session.client.pid)
    assert (crash.phase, crash.epoch, crash.chunk_id) == ("busy", 7, 4)
    assert 0.2 <= crash.phase_s < 0.5
    assert crash.last_lines[-1].startswith("line 199 ")  # of stdout, as stderr is empty
    assert isinstance(lost, Lost)
    where = f"got killed by SIGKILL, at pid {crash.pid}, busy with chunk 4 of epoch 7 for {crash.phase_s:.2f} s"
    assert where in str(lost.error) and "when memory is short" in str(lost.error)
    assert str(crash).startswith(f"killed by SIGKILL, pid {crash.pid}, busy with chunk 4 of epoch 7 for ")
    session.client.stop()
    assert session.client.crash == crash


def test_a_cancelled_request_still_runs_until_the_engine_lets_go(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    session.client.submit(make_request(7, 3, "deaf 9"))
    time.sleep(0.1)
    session.client.cancel(7)
    os.kill(session.client.pid, signal.SIGKILL)
    failed, _ = session.next(), session.next()
    assert isinstance(failed.error, CancelledError)
    assert (_crash(session).epoch, _crash(session).chunk_id) == (7, 3)


def test_an_engine_between_requests_is_idle(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    assert isinstance(session.ask(make_request(1, 1, "sleep 0.2")), Answered)  # its last heartbeat said busy
    os.kill(session.client.pid, signal.SIGTERM)
    assert isinstance(session.next(), Lost)
    assert (_crash(session).cause, _crash(session).ran[:9]) == ("killed by SIGTERM", "idle for ")


def test_an_engine_that_is_ended_on_purpose_is_no_crash_and_traces_nothing(
    open_session: Any, make_request: Make, capfd: Any
) -> None:
    session = open_session("process")
    assert isinstance(session.ask(make_request(1, 1)), Answered)
    time.sleep(0.15)
    assert session.client.stop(ask=False)
    assert session.client.crash is None
    assert capfd.readouterr().err == ""


def test_one_that_is_lost_is_not_asked_to_end(open_session: Any) -> None:
    session = open_session("process", heartbeat_timeout_s=0.3)
    pid = session.client.pid
    os.kill(pid, signal.SIGSTOP)
    assert isinstance(session.next(), Lost)
    until = time.monotonic() + 0.5
    while psutil.pid_exists(pid):  # its memory is wanted by the next
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_thread_that_leaves_is_gone(open_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai_engine.serve.worker.serve", lambda *_, **__: sys.exit(3))
    session = open_session("thread", start=False)
    with pytest.raises(EngineDiedError, match="SystemExit: 3"):
        session.client.start()


@pytest.mark.parametrize("options", [{"load_s": 0.2, "load_exit": 7}, {"load_s": 30}], ids=["ends", "hangs"])
def test_a_start_that_fails_is_reported_too(open_session: Any, options: dict[str, Any]) -> None:
    session = open_session("process", start=False, options={**options, "load_say": "step 1 of 2"}, start_timeout_s=1.5)
    with pytest.raises((EngineDiedError, EngineTimeoutError), match=r"(?s)pid \d+, loading for .*step 1 of 2"):
        session.client.start()
    crash = _crash(session)
    assert crash.phase == "loading"
    if "load_exit" not in options:  # where it hung
        assert crash.cause == "still loading"
        assert any("stand_in.py" in line for line in crash.last_lines)


def test_a_refusal_is_no_crash_and_traces_nothing(open_session: Any, capfd: Any) -> None:
    session = open_session("process", start=False, options={"load_error": "no weights there"})
    with pytest.raises(EngineRefusedError):
        session.client.start()
    assert session.client.crash is None
    assert "most recent call first" not in capfd.readouterr().err


def test_an_engine_whose_compute_thread_dies_is_told_at_once(
    open_session: Any, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory, even an error's own handling may raise; a heartbeat that goes on would hide it for ever."""

    def fails(error: BaseException) -> None:
        raise MemoryError

    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    session = open_session("thread")
    monkeypatch.setattr("phyai_engine.serve.compute._failure", fails)
    began = time.monotonic()
    failed, lost = session.ask(make_request(1, 1, "raise")), session.next()
    assert time.monotonic() - began < 0.4
    assert isinstance(failed, Failed) and isinstance(lost, Lost)
    assert "the compute thread ended" in str(lost.error)


def test_a_worker_that_fails_ends_the_process_with_its_trace(open_session: Any, make_request: Make) -> None:
    """Also under an inference that never ends: finalising the interpreter would wait for it, or abort."""
    session = open_session("process")
    began = time.monotonic()
    session.client.submit(make_request(1, 1, "break the worker"))
    failed, lost = session.next(), session.next()
    assert time.monotonic() - began < 1.0
    assert isinstance(failed, Failed) and isinstance(lost, Lost)
    crash = _crash(session)
    assert crash.cause == "exit code 1"
    assert "RuntimeError: the worker broke" in crash.last_lines


def test_memory_that_runs_out_ends_the_engine_first(open_session: Any) -> None:
    ours = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
    pid = open_session("process").client.pid
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii")) >= max(500, ours)


def test_torch_in_the_process_gets_its_thread_count(open_session: Any, make_request: Make) -> None:
    session = open_session("process", options={"torch": True}, threads=3)
    assert "3 threads" in str(session.ask(make_request(1, 1, "threads")).error)


def test_what_a_peer_sends_is_bounded_in_memory_and_in_time(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.DEALER) as peer, context.socket(zmq.ROUTER) as socket:
        endpoint = f"ipc://{tmp_path}/s"
        prepare(socket, endpoint)
        socket.bind(endpoint)
        peer.linger, peer.sndhwm = 0, 1
        peer.connect(f"ipc://{tmp_path}/s")
        sent, until = 0, time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(zmq.Again):
                peer.send(bytes(20_000), zmq.NOBLOCK)
                sent += 1
        assert 64 < sent < 200  # the rest waits with its sender
        assert len(list(received(socket))) == 64
    context.term()


def test_an_engine_that_floods_the_socket_gets_its_turn_only(
    open_session: Any, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def serve(endpoint: str, *, context: Any, load: object, threads: int) -> bool:
        with context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(endpoint)
            peer, *_ = socket.recv_multipart()
            engine = wire.EngineHello(
                horizon=2, action_names=("lift", "turn"), dt_s=0.1, note="", warm_up_ms=(), pid=1, versions={}
            )
            socket.send_multipart([peer, *wire.encode(wire.HelloReply(engine=engine))])
            actions = np.zeros((2, 2))
            late = wire.encode(wire.Reply(epoch=0, chunk_id=0, timings=StageTimings()), {"actions": actions})
            until = time.monotonic() + 5.0
            while time.monotonic() < until and not socket.poll(0):
                socket.send_multipart([peer, *late])
            ended.set()
        return True

    monkeypatch.setattr("phyai_engine.serve.worker.serve", serve)
    session = open_session()
    time.sleep(0.2)
    before = psutil.Process().memory_info().rss
    began = time.monotonic()
    session.client.submit(make_request(1, 1))  # is sent, all the same
    assert ended.wait(1.0)
    assert session.client.stop(1.0)
    assert time.monotonic() - began < 2.0
    assert session.client.counters["dropped_replies"] > 100
    assert psutil.Process().memory_info().rss - before < 64 << 20
