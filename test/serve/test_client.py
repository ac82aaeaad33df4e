"""EngineClient over both placements, with a stand-in policy."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import (
    CancelledError,
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineRefusedError,
    EngineTimeoutError,
    RefusalError,
)
from phyai_engine.serve import protocol as wire
from phyai_engine.serve.client import Answered, EngineClient, Failed, Lost
from phyai_engine.serve.host import ProcessHost
from phyai_engine.types import Refusal, Request, StageTimings

Make = Callable[..., Request]
PLACEMENTS = ("thread", "process")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_start_answer_stop(open_session: Any, make_request: Make, placement: str) -> None:
    phases: list[str] = []
    session = open_session(placement, start=False, options={"load_s": 0.2})
    client = session.client
    assert not client.alive
    hello = client.start(phases.append)
    assert (hello.horizon, hello.action_names, hello.dt_s) == (5, ("lift", "turn"), 0.1)
    assert (hello.note, hello.warm_up_ms, hello.pid) == ("a stand-in", (1.5, 1.5, 1.5), client.pid)
    assert "loading" in phases
    assert (client.pid == os.getpid()) == (placement == "thread")
    assert client.alive

    event = session.ask(make_request(3, 7, value=0.25, committed=True))
    assert isinstance(event, Answered)
    chunk, timings = event.chunk, event.chunk.timings
    assert (chunk.epoch, chunk.chunk_id) == (3, 7)
    np.testing.assert_array_equal(chunk.actions, np.full((5, 2), 0.25))
    assert timings.encode_ms == 0.25
    assert np.isnan(timings.prefix_ms)
    total_ms = timings.queue_ms + timings.inference_ms + timings.transfer_ms
    assert total_ms == pytest.approx(event.round_trip_ms)
    assert min(timings.queue_ms, timings.inference_ms, timings.transfer_ms) >= 0.0
    assert event.round_trip_ms == pytest.approx((event.received_mono_ns - event.submitted_mono_ns) / 1e6)

    assert client.stop()
    assert client.stop()
    assert not client.alive
    if placement == "process":
        assert not psutil.pid_exists(hello.pid)
    client.submit(make_request(4))  # after the end: told, not lost in silence
    (failed,) = client.poll()
    assert isinstance(failed, Failed)
    assert failed.cancelled


def test_remote_and_wrong_use_are_refused(robot: RobotConfig, open_session: Any, stand_in: Any) -> None:
    model = ModelConfig(family="fake")
    with pytest.raises(ConfigError, match="remote"):
        EngineClient(robot, model, "remote", on_event=lambda: None)
    with pytest.raises(ConfigError, match="load function"):
        EngineClient(robot, model, "process", on_event=lambda: None, load=stand_in.load_policy)
    session = open_session()
    with pytest.raises(EngineError, match="before"):
        session.client.start()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_newest_wins_and_one_is_in_flight(open_session: Any, make_request: Make, placement: str) -> None:
    session = open_session(placement)
    session.client.submit(make_request(1, 1, "sleep 0.3"))
    time.sleep(0.1)
    session.client.submit(make_request(1, 2))
    session.client.submit(make_request(1, 3))
    replaced, first, last = session.next(), session.next(), session.next()
    assert isinstance(replaced, Failed)
    assert (replaced.chunk_id, replaced.cancelled) == (2, False)
    assert "replaced" in str(replaced.error)
    assert isinstance(first, Answered)
    assert first.chunk.chunk_id == 1
    assert isinstance(last, Answered)
    assert last.chunk.chunk_id == 3
    assert last.chunk.timings.queue_ms > 100.0  # it waited for the first, on our side of the wire
    assert last.chunk.timings.transfer_ms < 90.0
    assert session.client.counters == {"submitted": 3, "replaced": 1, "answered": 2}


@pytest.mark.fault(26)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("instruction", "bound_s"), [("sleep 5", 0.5), ("deaf 0.4", 1.0)])
def test_cancel_is_told_at_once_and_never_answers(
    open_session: Any, make_request: Make, placement: str, instruction: str, bound_s: float
) -> None:
    session = open_session(placement)
    client = session.client
    client.submit(make_request(5, 1, instruction))
    time.sleep(0.1)
    began = time.monotonic()
    client.cancel(5)
    event = session.next()
    assert time.monotonic() - began < 0.2
    assert isinstance(event, Failed)
    assert event.cancelled
    assert isinstance(event.error, CancelledError)
    client.submit(make_request(5, 2))  # of the cancelled epoch: too late
    late = session.next()
    assert isinstance(late, Failed)
    assert late.cancelled
    answer = session.ask(make_request(6, 3))
    assert isinstance(answer, Answered)
    assert answer.chunk.chunk_id == 3
    assert time.monotonic() - began < bound_s
    assert client.poll() == []
    assert client.counters["dropped_cancelled"] == 1


def test_an_answer_that_waits_for_poll_can_still_be_cancelled(open_session: Any, make_request: Make) -> None:
    queued = threading.Event()
    client = open_session(on_event=queued.set).client
    client.submit(make_request(1, 1))
    assert queued.wait(2.0)
    client.cancel(1)
    (event,) = client.poll()
    assert isinstance(event, Failed)
    assert event.cancelled
    assert client.counters == {"submitted": 1, "answered": 0, "cancelled": 1}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_whatever_the_model_raises_the_engine_survives(open_session: Any, make_request: Make, placement: str) -> None:
    session = open_session(placement)
    for instruction, text in {
        "raise": "ValueError: a defect .*stand_in.py:",
        "none": "not one result per request",
        "refuse": "not this one",
        "exit": "SystemExit: 3",
    }.items():
        failed = session.ask(make_request(1, 1, instruction))
        assert isinstance(failed, Failed)
        assert not failed.cancelled
        with pytest.raises(EngineError, match=text):
            raise failed.error
    assert isinstance(session.ask(make_request(1, 2)), Answered)


def test_sigkill_is_told_within_200_ms(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    client = session.client
    client.submit(make_request(1, 1, "sleep 9"))
    time.sleep(0.1)
    began = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    failed, lost = session.next(), session.next()
    assert time.monotonic() - began < 0.2
    assert isinstance(failed, Failed)
    assert not failed.cancelled
    assert isinstance(lost, Lost)
    assert isinstance(lost.error, EngineDiedError)
    assert "killed by SIGKILL" in str(lost.error)
    assert not client.alive
    refused = session.ask(make_request(1, 2))
    assert isinstance(refused, Failed)
    assert refused.error is lost.error
    assert client.stop()


def test_crash_report_has_cause_and_last_lines(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    assert isinstance(session.ask(make_request(1, 1, "abort")), Failed)
    lost = session.next()
    assert isinstance(lost, Lost)
    assert "killed by SIGABRT" in str(lost.error)
    assert "about to abort" in str(lost.error)
    assert "stand_in.py" in str(lost.error)  # faulthandler's trace


def test_a_stopped_child_is_lost_by_expiry_and_killed(open_session: Any, make_request: Make) -> None:
    session = open_session("process", heartbeat_timeout_s=0.4)
    pid = session.client.pid
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    lost = session.next()
    assert 0.3 < time.monotonic() - began < 1.0
    assert isinstance(lost, Lost)
    assert isinstance(lost.error, EngineTimeoutError)
    assert session.client.stop()
    assert not psutil.pid_exists(pid)


def test_a_stall_of_our_own_does_not_blame_the_engine(open_session: Any, make_request: Make) -> None:
    stalls = iter([0.6])
    session = open_session(heartbeat_timeout_s=0.3, on_event=lambda: time.sleep(next(stalls, 0.0)))
    session.client.submit(make_request(1, 1))
    time.sleep(1.0)  # the I/O thread sleeps for 0.6 s of it
    assert session.client.alive
    (event,) = session.client.poll()
    assert isinstance(event, Answered)


def test_a_model_that_holds_the_childs_lock_does_not_delay_us(open_session: Any, make_request: Make) -> None:
    session = open_session("process", heartbeat_timeout_s=3.0)
    client = session.client
    client.submit(make_request(1, 1, "hold 0.5"))
    time.sleep(0.1)
    took_s: list[float] = []
    for i in range(50):
        began = time.perf_counter()
        client.submit(make_request(1, 2 + i))
        client.cancel(1)
        client.poll()
        took_s.append(time.perf_counter() - began)
        time.sleep(0.002)
    took_s.sort()
    assert took_s[45] < 0.02
    assert took_s[-1] < 0.2  # a busy test machine pauses us, the child would for 0.4 s
    assert client.last_heartbeat_age_s() > 0.1  # the child is silent indeed
    assert isinstance(session.ask(make_request(2, 99)), Answered)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_fake_model_answers(robot: RobotConfig, make_request: Make, placement: str) -> None:
    model = ModelConfig(family="fake", options={"horizon": 6, "action_dim": 2, "fail_every": 2, "grace_runs": 1})
    signal_ = threading.Event()
    client = EngineClient(robot, model, placement, on_event=signal_.set, warm_up_count=1)  # type: ignore[arg-type]
    try:
        hello = client.start()
        assert hello.horizon == 6
        assert len(hello.warm_up_ms) == 1
        for chunk_id, kind in ((1, Answered), (2, Failed)):
            client.submit(make_request(1, chunk_id, images=False))
            assert signal_.wait(5.0)
            signal_.clear()
            (event,) = client.poll()
            assert isinstance(event, kind)
        assert isinstance(event, Failed)
        assert "the model raised RuntimeError" in str(event.error)
        assert "fake.py:" in str(event.error)
        client.submit(make_request(1, 3, images=True))
        assert signal_.wait(5.0)
        (event,) = client.poll()
        assert isinstance(event, Failed)
        assert isinstance(event.error, RefusalError)  # with its code, for the node to count
        assert event.error.code is Refusal.MALFORMED
        assert str(event.error).count("malformed") == 1
    finally:
        assert client.stop()


def test_start_reports_a_refusal(open_session: Any) -> None:
    for placement in PLACEMENTS:
        session = open_session(placement, start=False, options={"load_error": "no weights there"})
        with pytest.raises(EngineRefusedError, match="PhyaiError: no weights there"):
            session.client.start()
        assert session.client.stop()


def test_start_reports_a_death_with_its_last_words(open_session: Any) -> None:
    session = open_session("process", start=False, options={"load_exit": 7})
    with pytest.raises(EngineDiedError, match=r"exit code 7(.|\n)*the disk is on fire"):
        session.client.start()
    assert session.client.poll() == []


def test_start_is_bounded(open_session: Any) -> None:
    session = open_session("process", start=False, options={"load_s": 30}, start_timeout_s=0.8)
    began = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"within 0\.8 s"):
        session.client.start()
    assert time.monotonic() - began < 3.5
    assert not psutil.pid_exists(session.client.pid)


def test_stop_ends_a_start_in_another_thread(open_session: Any) -> None:
    session = open_session("process", start=False, options={"load_s": 30})
    timer = threading.Timer(0.5, session.client.stop)
    timer.start()
    began = time.monotonic()
    with pytest.raises(EngineError, match="stopped before"):
        session.client.start()
    assert time.monotonic() - began < 3.0
    timer.join()


def test_start_ends_when_it_is_told_to_give_up_or_its_progress_raises(open_session: Any) -> None:
    began = time.monotonic()
    session = open_session("process", start=False, options={"load_s": 30})
    with pytest.raises(EngineError, match="interrupted"):
        session.client.start(give_up=lambda: time.monotonic() > began + 0.4)
    assert not psutil.pid_exists(session.client.pid)
    session = open_session("process", start=False, options={"load_s": 30})
    with pytest.raises(ZeroDivisionError):
        session.client.start(lambda phase: 1 / 0)
    assert not psutil.pid_exists(session.client.pid)
    assert time.monotonic() - began < 5.0


def test_torch_gets_its_thread_count_in_the_compute_thread(open_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    torch = types.SimpleNamespace(
        __version__="9.9", set_num_threads=lambda n: calls.append((threading.current_thread().name, n))
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    hello = open_session("thread", start=False, threads=3).client.start()
    assert calls == [("phyai-compute", 3)]
    assert hello.versions["torch"] == "9.9"


def test_stop_is_bounded_while_a_model_hangs(open_session: Any, make_request: Make) -> None:
    session = open_session("process")
    pid = session.client.pid
    session.client.submit(make_request(1, 1, "hold 30"))
    time.sleep(0.1)
    began = time.monotonic()
    assert session.client.stop(1.0)
    assert time.monotonic() - began < 1.2
    assert not psutil.pid_exists(pid)
    (failed,) = session.client.poll()
    assert isinstance(failed, Failed)
    assert failed.cancelled

    hung = open_session("thread")
    hung.client.submit(make_request(1, 1, "deaf 1.2"))
    time.sleep(0.1)
    assert not hung.client.stop(1.0)  # a thread cannot be killed, and that is said
    time.sleep(0.6)  # let it end: warnings about it would fall into other tests


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(open_session: Any, make_request: Make) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job would pass SIG_IGN on
    try:
        session = open_session("process")
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.getpgid(session.client.pid) != os.getpgid(0)
    os.kill(session.client.pid, signal.SIGINT)
    assert isinstance(session.ask(make_request(1, 1, "sleep 0.1")), Answered)


def test_an_on_event_that_raises_is_counted(open_session: Any, make_request: Make) -> None:
    client = open_session(on_event=lambda: 1 / 0).client
    for chunk_id in (1, 2):
        client.submit(make_request(1, chunk_id))
        time.sleep(0.15)
    assert [type(e) for e in client.poll()] == [Answered, Answered]
    assert client.counters["on_event_errors"] == 2


def test_twenty_lives_in_a_thread_leave_nothing(open_session: Any, make_request: Make) -> None:
    process = psutil.Process()

    def live() -> tuple[int, int]:
        session = open_session("thread")
        assert isinstance(session.ask(make_request(1, 1)), Answered)
        assert session.client.stop()
        return threading.active_count(), process.num_fds()

    gc.collect()  # what earlier tests left open must not go meanwhile
    first = live()
    assert [live() for _ in range(19)][-1] == first


class Script:
    """Stands in for worker.serve: accepts the hello, then sends what the test wants for each request."""

    def __init__(self, answer: Callable[[Any], list[list[Any]]]) -> None:
        self._answer = answer

    def __call__(self, endpoint: str, *, context: Any, load: object, threads: int) -> bool:
        with context.socket(zmq.ROUTER) as socket:
            socket.bind(endpoint)
            while socket.poll(3000):
                peer, *frames = socket.recv_multipart()
                message, _ = wire.decode(frames)
                if isinstance(message, wire.Goodbye):
                    break
                if isinstance(message, wire.Hello):
                    engine = wire.EngineHello(
                        horizon=2,
                        action_names=("lift", "turn"),
                        dt_s=0.1,
                        note="",
                        warm_up_ms=(),
                        pid=1,
                        versions={},
                    )
                    socket.send_multipart([peer, *wire.encode(wire.HelloReply(engine=engine))])
                elif isinstance(message, wire.RequestMessage):
                    for reply in self._answer(message):
                        socket.send_multipart([peer, *reply])
        return True


def _reply(epoch: int, chunk_id: int) -> list[Any]:
    return wire.encode(
        wire.Reply(epoch=epoch, chunk_id=chunk_id, timings=StageTimings()),
        {"actions": np.full((2, 2), float(chunk_id))},
    )


@pytest.mark.fault(26)
def test_late_duplicate_and_reordered_replies_are_dropped(
    open_session: Any, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Any) -> list[list[Any]]:
        epoch, chunk_id = request.epoch, request.chunk_id
        right = _reply(epoch, chunk_id)
        return [
            _reply(epoch, chunk_id + 1),
            _reply(epoch - 1, chunk_id),
            right,
            right,
            _reply(epoch, chunk_id - 1),
        ]

    monkeypatch.setattr("phyai_engine.serve.worker.serve", Script(answer))
    session = open_session(heartbeat_timeout_s=10.0)
    for chunk_id in (2, 3, 4):
        event = session.ask(make_request(5, chunk_id))
        assert isinstance(event, Answered)
        assert event.chunk.actions[0, 0] == chunk_id
    time.sleep(0.1)
    assert session.client.poll() == []
    assert session.client.counters == {"submitted": 3, "answered": 3, "dropped_replies": 12}


def test_unreadable_replies_fail_the_request_and_only_it(
    open_session: Any, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Any) -> list[list[Any]]:
        good = _reply(request.epoch, request.chunk_id)
        bad = {
            1: [b"\x02garbage"],
            2: [good[0]],  # the array frame is missing
            3: [good[0], bytes(good[1])[:-1]],  # truncated
            4: [b"\x03" + good[0][1:], good[1]],  # another version
            5: good,
        }
        return [bad[request.chunk_id]]

    monkeypatch.setattr("phyai_engine.serve.worker.serve", Script(answer))
    session = open_session(heartbeat_timeout_s=10.0)
    for chunk_id in (1, 2, 3, 4):
        assert isinstance(session.ask(make_request(5, chunk_id)), Failed)
    assert isinstance(session.ask(make_request(5, 5)), Answered)
    assert session.client.counters["protocol_errors"] == 4


_PARENT = """
import os, signal, sys, time
sys.path[:0] = [{root!r}]

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rclpy"):
            raise ImportError(name + " is not for the client side")

sys.meta_path.insert(0, NoTorch())
import numpy as np
from phyai_engine.config import load_model, load_robot, resolve
from phyai_engine.serve.client import EngineClient
from phyai_engine.serve.host import ProcessHost
from phyai_engine.types import Observation, Request

{install}
robot, model = load_robot(resolve("robots", "arm7")), load_model(resolve("models", "fake"))
client = EngineClient(robot, model, "process", on_event=lambda: None, warm_up_count=1)
client.start()

def ask(instruction):
    images = {{camera.name: np.zeros((48, 64, 3), np.uint8) for camera in robot.cameras}}
    state = np.zeros(len(robot.state))
    client.submit(Request(1, 1, Observation(images, state, state, instruction, 0, 0, 0, 0), None, 0, 0.0))
    until = time.monotonic() + 5
    while not (events := client.poll()) and time.monotonic() < until:
        time.sleep(0.01)
    return type(events[0]).__name__

print(client.pid, flush=True)
{rest}
"""


@contextlib.contextmanager
def _parent(rest: str, *, install: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of its own with the real fake model, or with what ``install`` puts in its place; killed after 15 s."""
    script = _PARENT.format(root=str(ROOT), install=install, rest=rest)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **options) as parent:
        alarm = threading.Timer(15.0, parent.kill)
        alarm.start()
        try:
            yield parent
        finally:
            alarm.cancel()
            parent.kill()
            alarm.join()


def _gone(pid: int, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("rest", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(client.pid, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("sys.exit(0)", 0),  # an exit that forgets stop
    ],
)
def test_the_child_dies_with_its_parent(rest: str, code: int) -> None:
    with _parent(rest) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert parent.wait(5.0) == code
        assert _gone(pid, 2.0)


def test_the_child_ends_at_the_end_of_its_input() -> None:
    host = ProcessHost(threads=1)
    try:
        assert host.exit_cause() is None
        host._stdin.close()
        assert host.wait(5.0)
        assert host.exit_cause() == "exit code 1"
    finally:
        host.kill()
        host.close()


def test_the_client_side_works_where_torch_cannot_be_imported() -> None:
    with _parent("print(ask('go'), 'torch' in sys.modules, client.stop())") as parent:
        assert parent.stdout is not None
        assert parent.stdout.read().split()[1:] == ["Answered", "False", "True"]
        assert parent.wait(5.0) == 0


def test_a_stderr_that_nobody_reads_blocks_neither_side(boot_with_stand_in: Callable[[str], str]) -> None:
    read_end, write_end = os.pipe()
    script = boot_with_stand_in(ProcessHost._BOOT)
    install = f"ProcessHost._BOOT = {script!r}"
    try:
        with _parent("print(ask('say 3000'), client.stop())", install=install, stderr=write_end) as parent:
            assert parent.stdout is not None
            assert parent.stdout.read().split()[1:] == ["Answered", "True"]
    finally:
        os.close(write_end)
        os.close(read_end)


def test_the_folder_is_private_and_a_long_path_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_session: Any
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ProcessHost, "connected", lambda host: seen.append(os.stat(host._folder).st_mode & 0o777))
    session = open_session("process")
    assert seen == [0o700]
    assert session.client.stop()
    assert list(tmp_path.iterdir()) == []
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(EngineError, match="TMPDIR"):
        open_session("process")


_KILLED_EARLY = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from phyai_engine.serve.host import ProcessHost
host = ProcessHost(threads=1)
print(host.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_parent_killed_before_it_connects_leaves_no_folder(tmp_path: Path) -> None:
    script = _KILLED_EARLY.format(root=str(ROOT))
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait(5.0) == -signal.SIGKILL
    assert _gone(child, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_processes_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        ended.wait(5.0)
    old_s = time.time() - 3600.0
    dead, alive = f"phyai-{ended.pid}-dead", f"phyai-{os.getpid()}-alive"
    for name in (dead, alive, "phyai-notes-x", f"phyai-{ended.pid}", f"other-{ended.pid}-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "engine").touch()
        os.utime(tmp_path / name, (old_s, old_s))
    young = tmp_path / f"phyai-{ended.pid}-young"  # perhaps of a container that shares the folder
    young.mkdir()
    host = ProcessHost(threads=1)
    try:
        left = {path.name for path in tmp_path.iterdir()} - {Path(host._folder).name}
        assert Path(host._folder).name.startswith(f"phyai-{os.getpid()}-")
        assert left == {alive, "phyai-notes-x", f"phyai-{ended.pid}", f"other-{ended.pid}-x", young.name}
    finally:
        host.kill()
        assert host.wait(5.0)
        host.close()
