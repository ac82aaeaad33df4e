"""A new engine on request: the old one is gone first, memory is waited for, nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from phyai_engine.errors import EngineError, EngineRefusedError, EngineTimeoutError
from phyai_engine.serve.client import Answered
from phyai_engine.serve.host import ProcessHost
from phyai_engine.serve.restart import host_available_bytes, restart
from phyai_engine.types import Request

Make = Callable[..., Request]
ENOUGH: dict[str, Any] = {"memory_bytes": 1 << 20, "timeout_s": 2.0}


def _unstarted(open_session: Any, placement: str = "thread", **rest: Any) -> Callable[[], Any]:
    return lambda: open_session(placement, start=False, **rest).client


def test_memory_is_waited_for_and_the_wait_is_bounded(open_session: Any) -> None:
    free = iter([1 << 20, 3 << 20, 7 << 20])
    old = open_session("process").client
    asked: list[bool] = []

    def available() -> int:
        asked.append(psutil.pid_exists(old.pid))
        return next(free)

    client, hello = restart(
        old,
        _unstarted(open_session),
        memory_bytes=5 << 20,
        timeout_s=5.0,
        available_bytes=available,
    )
    assert asked == [False, False, False]  # first gone, then asked
    assert client.alive and hello.horizon == 5

    made: list[Any] = []  # nothing to take: it is not even asked for
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"not enough free memory.* got 64 MiB, wanted 256 MiB.* within 0\.3 s"):
        restart(client, made.pop, memory_bytes=256 << 20, timeout_s=0.3, available_bytes=lambda: 64 << 20)
    assert 0.3 <= time.monotonic() - began < 1.0
    assert not client.alive  # there is none now, and the same call may be made again
    again, _ = restart(client, _unstarted(open_session), **ENOUGH)
    assert again.alive


def test_a_host_that_does_not_tell_is_not_waited_for(open_session: Any) -> None:
    old = open_session().client
    client, _ = restart(
        old, _unstarted(open_session), memory_bytes=1 << 60, timeout_s=0.0, available_bytes=lambda: None
    )
    assert client.alive
    free = host_available_bytes()
    assert free is not None and 0 < free <= psutil.virtual_memory().total


def test_a_wait_for_memory_can_be_given_up(open_session: Any) -> None:
    old = open_session().client
    began = time.monotonic()
    with pytest.raises(EngineError, match="interrupted"):
        restart(
            old,
            _unstarted(open_session),
            memory_bytes=1 << 60,
            timeout_s=30.0,
            give_up=lambda: time.monotonic() > began + 0.2,
        )
    assert time.monotonic() - began < 2.0


def test_a_start_that_fails_leaves_none_and_may_be_tried_again(open_session: Any) -> None:
    old = open_session("process").client
    phases: list[str] = []
    with pytest.raises(EngineRefusedError, match="no weights there"):
        restart(
            old,
            _unstarted(open_session, "process", options={"load_error": "no weights there"}),
            progress=phases.append,
            **ENOUGH,
        )
    assert "starting" in phases
    assert engines() == []
    client, _ = restart(old, _unstarted(open_session, "process"), **ENOUGH)
    assert client.alive


def test_a_thread_that_hangs_cannot_be_replaced_and_that_is_said(open_session: Any, make_request: Make) -> None:
    hung = open_session("thread")
    hung.client.submit(make_request(1, 1, "deaf 0.8"))
    time.sleep(0.05)
    with pytest.raises(EngineTimeoutError, match=rf"did not end, got pid {os.getpid()} still there.* restart the node"):
        restart(hung.client, _unstarted(open_session), **ENOUGH)
    time.sleep(0.6)  # let it end: warnings about it would fall into other tests


def test_a_process_that_outlives_the_bound_holds_up_nobody_and_may_end_later(
    open_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one inside a driver call does: SIGKILL waits for the kernel."""
    old = open_session("process").client
    os.kill(old.pid, signal.SIGSTOP)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessHost, "kill", lambda host: None)
        with pytest.raises(EngineTimeoutError, match=rf"pid {old.pid} still there"):
            restart(old, _unstarted(open_session), **ENOUGH)
    assert time.monotonic() - began < 3.0
    os.kill(old.pid, signal.SIGKILL)
    time.sleep(0.2)
    client, _ = restart(old, _unstarted(open_session), **ENOUGH)
    assert client.alive and not psutil.pid_exists(old.pid)


def test_a_restart_does_not_ask_but_says_what_held_the_old_one(
    open_session: Any, make_request: Make, capfd: Any
) -> None:
    session = open_session("process")
    session.client.submit(make_request(1, 1, "deaf 9"))
    time.sleep(0.1)
    restart(session.client, _unstarted(open_session), **ENOUGH)
    said = capfd.readouterr().err
    assert "leaving without it" not in said
    assert "in _act" in said


def engines() -> list[psutil.Process]:
    """Our child processes, but for the one that multiprocessing keeps for as long as we live."""
    return [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.mark.parametrize("end", ["asked", signal.SIGKILL, signal.SIGSTOP])
def test_twenty_one_restarts_leave_nothing(
    open_session: Any, make_request: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = psutil.Process()
    session = open_session("process", heartbeat_timeout_s=0.3)

    def live() -> tuple[int, int, int]:
        nonlocal session
        pid = session.client.pid
        if end == "asked":
            assert session.client.stop()
        else:
            os.kill(pid, end)
        old, session = session, open_session("process", start=False, heartbeat_timeout_s=0.3)
        restart(old.client, lambda: session.client, **ENOUGH)
        assert not psutil.pid_exists(pid)
        assert isinstance(session.ask(make_request(1, 1)), Answered)
        assert list(tmp_path.iterdir()) == []  # gone as soon as it is connected
        return threading.active_count(), process.num_fds(), len(engines())

    first = live()
    assert [live() for _ in range(6)][-1] == first
    assert first[2] == 1
