"""A bag replayed to the control loop and an engine: the three modes, the record, the gate, and every bad input."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import BagError, EngineError
from phyai_engine.replay.clock import RealClock, VirtualClock
from phyai_engine.replay.engine_link import HeldLink
from phyai_engine.replay.engine_replay import ReplaySettings, replay
from phyai_engine.replay.read_ahead import ReadAhead
from phyai_engine.replay.record import Record, chunk_hash, load
from phyai_engine.serve.client import Answered
from phyai_engine.types import Chunk, Schedule, StageTimings

Make = Callable[..., RobotConfig]
FAKE: dict[str, Any] = {
    "horizon": 16,
    "action_dim": 4,
    "num_steps": 2,
    "cameras": ["base_0_rgb", "left_wrist_0_rgb"],
    "image_size": 16,
}


def fake(**options: Any) -> ModelConfig:
    return msgspec.convert(
        {"family": "fake", "normalisation": {"kind": "limits"}, "options": {**FAKE, **options}}, ModelConfig
    )


@pytest.fixture(scope="module")
def clean(bags: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean recording of two seconds; not to be changed."""
    return bags.write_bag(tmp_path_factory.mktemp("clean") / "bag")  # type: ignore[no-any-return]


@pytest.fixture
def run(bag_robot: Make, clean: Path) -> Callable[..., Record]:
    """Replays the clean bag, or another one, in mode step on a thread."""

    def make(bag: Path = clean, model: ModelConfig | None = None, **settings: Any) -> Record:
        chosen = ReplaySettings(**{"mode": "step", "placement": "thread", "warm_up_count": 1, **settings})
        return replay(bag, bag_robot(), model or fake(), chosen)

    return make


# -- the modes ---------------------------------------------------------------------------------------------------------


def test_step_gives_the_same_chunks_and_the_same_record_three_times(run: Callable[..., Record]) -> None:
    runs = [run(latency_ms=30.0) for _ in range(3)]
    first = runs[0]
    assert len(first.chunks) > 5
    assert len(first.chunk_hash) == 64
    assert first.chunk_hash == chunk_hash(first.chunks)
    still = [msgspec.json.encode(msgspec.structs.replace(r, started="")) for r in runs]
    assert still[0] == still[1] == still[2]
    other = run(latency_ms=30.0, execution_horizon=4)
    assert other.chunk_hash != first.chunk_hash


def test_step_measures_no_margin_and_delays_by_the_stated_latency(run: Callable[..., Record]) -> None:
    record = run(latency_ms=50.0)
    accepted = [row for row in record.timings if row.outcome == "accepted"]
    assert accepted
    for row in accepted:
        assert row.l_inference_s == pytest.approx(0.05)
        assert row.l_critical_s == pytest.approx(row.l_observe_s + 0.05)
        assert math.isnan(row.m_ctrl_s)
        assert row.text == "step mode: the latency is stated, not measured"
    assert {row.delay_steps for row in accepted[1:]} == {3}  # two and a half periods
    assert math.isnan(record.first_inference_s)
    assert record.idle == []


def test_the_record_holds_the_whole_run(run: Callable[..., Record], bags: ModuleType) -> None:
    record = run()
    assert (record.mode, record.bag, record.placement, record.schedule) == ("step", "bag", "thread", "rtc")
    assert record.survey.faults == ()
    assert record.events == []
    assert record.refusals == {}
    assert [len(camera.t_s) for camera in record.cameras.values()] == [40, 40]
    front = record.cameras["front"]
    assert (front.t_s[3], front.stamp_s[3]) == (pytest.approx(0.156), pytest.approx(0.15))
    ticks = [step.tick for step in record.steps]
    assert ticks == list(range(ticks[0], ticks[0] + len(ticks)))
    assert [b.t_s - a.t_s for a, b in zip(record.steps, record.steps[1:], strict=False)] == pytest.approx(
        [0.02] * (len(ticks) - 1)
    )
    played = {(step.chunk_id, step.step): step.values for step in record.steps if step.kind == "action"}
    rows = {(chunk.chunk_id, k): row for chunk in record.chunks for k, row in enumerate(chunk.actions)}
    assert played
    assert all(list(values) == list(rows[key]) for key, values in played.items())
    assert record.joints.names == ["j0", "j1"]
    assert record.joints.positions[0] == pytest.approx(bags.position(0.0))
    assert {frame.camera for frame in record.frames} == {"front", "wrist"}
    record.check()


def test_as_fast_as_possible_measures_latency_without_waiting(run: Callable[..., Record]) -> None:
    record = run(model=fake(latency_ms=15.0), mode="as-fast-as-possible")
    accepted = [row for row in record.timings if row.outcome == "accepted"]
    margins = [row.m_ctrl_s for row in accepted if math.isfinite(row.m_ctrl_s)]
    assert margins
    assert all(row.l_inference_s >= 0.015 for row in accepted)
    for row in accepted:
        stages = row.l_observe_s + row.l_transfer_s + row.l_queue_s + row.l_inference_s + row.l_actuate_s
        assert stages == pytest.approx(row.l_critical_s, abs=2e-6)
        assert row.l_serialise_s + row.l_network_s == pytest.approx(row.l_transfer_s, abs=2e-6)
    assert record.first_inference_s >= 0.015
    assert record.chunk_hash


def test_real_time_takes_as_long_as_the_bag(run: Callable[..., Record]) -> None:
    began = time.monotonic()
    record = run(mode="real-time", seconds=1.0, model=fake(latency_ms=10.0))
    assert time.monotonic() - began > 1.0
    assert record.duration_s == pytest.approx(1.0, abs=0.1)
    accepted = [row for row in record.timings if row.outcome == "accepted"]
    assert len(accepted) >= 3
    assert any(math.isfinite(row.m_ctrl_s) for row in accepted)
    assert sum(step.kind == "action" for step in record.steps) > 25


def test_the_engine_process_gives_the_same_chunks_as_the_thread(run: Callable[..., Record]) -> None:
    assert run(placement="process", seconds=0.6).chunk_hash == run(seconds=0.6).chunk_hash


def test_a_pause_of_the_engine_is_measured_apart(run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai_engine.replay.engine_replay.PROBE_IDLE_S", 0.05)
    record = run(mode="as-fast-as-possible", seconds=0.5, probes=2)
    assert [(row.idle_s, row.probe) for row in record.idle] == [(0.05, True)] * 2
    assert all(row.inference_s > 0 for row in record.idle)
    assert len(record.chunks) == max(chunk.chunk_id for chunk in record.chunks)  # the probes are not among them


def test_schedules_differ(run: Callable[..., Record]) -> None:
    sync = run(schedule=Schedule.SYNC, latency_ms=30.0)
    assert any(step.kind == "hold" for step in sync.steps)
    assert run(schedule=Schedule.NAIVE_ASYNC).schedule == "naive_async"


def test_the_recorded_instruction_is_used_unless_another_is_given(
    run: Callable[..., Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "phyai_engine.replay.trace.Trace.asked", lambda self, request: seen.append(request.observation.instruction)
    )
    run(seconds=0.3)
    run(seconds=0.3, instruction="point")
    assert set(seen) == {"wave", "point"}


# -- what goes wrong on the way ----------------------------------------------------------------------------------------


def test_a_gap_holds_refuses_and_goes_on(run: Callable[..., Record], bags: ModuleType, tmp_path: Path) -> None:
    script = bags.Script(received=lambda name, t: None if 1.0 < t < 3.5 else t + 0.005, seconds=4.5)
    record = run(bags.write_bag(tmp_path / "bag", script))
    assert record.refusals["stale"] > 50
    assert any(step.kind == "hold" for step in record.steps)
    assert record.steps[-1].kind == "action"
    assert [fault.kind for fault in record.survey.faults] == ["gap"]


def test_looped_stamps_abort_and_end_the_replay(run: Callable[..., Record], bags: ModuleType, tmp_path: Path) -> None:
    record = run(bags.write_bag(tmp_path / "bag", bags.Script(seconds=1.5, cycles=3)))
    (event,) = [event for event in record.events if event.kind == "abort"]
    assert event.text == "clock_jump: the stamps of all inputs went backwards together (a looped bag?)"
    assert 1.5 < event.t_s < 2.0
    assert record.steps[-1].t_s <= event.t_s


def test_a_watchdog_latches_and_the_replay_re_arms(run: Callable[..., Record]) -> None:
    record = run(max_observation_age_s=0.1, latency_ms=20.0)
    kinds = [event.kind for event in record.events]
    assert kinds[:2] == ["abort", "rearm"]
    assert record.events[0].text.startswith("observation_age: what plays was computed from an observation 0.1")
    assert len({chunk.epoch for chunk in record.chunks}) > 1
    assert any(step.kind == "stop" for step in record.steps)


def test_a_model_that_fails_is_counted(run: Callable[..., Record]) -> None:
    record = run(model=fake(fail_every=3, grace_runs=1))
    outcomes = [row.outcome for row in record.timings]
    assert {"accepted", "engine_error"} <= set(outcomes)


def test_an_engine_that_dies_ends_the_replay(run: Callable[..., Record]) -> None:
    with pytest.raises(EngineError):
        run(model=fake(crash_on_request=2, grace_runs=1), placement="process")


def test_unread_frames_are_refused_and_counted_by_reason(
    run: Callable[..., Record], bags: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = bags._message

    def spoilt(name: str, t: float, stamp_ns: int, script: Any) -> Any:
        kind, message = make(name, t, stamp_ns, script)
        if name == "front" and t > 1.0:
            message.encoding = "rgb12"
        return kind, message

    monkeypatch.setattr(bags, "_message", spoilt)
    record = run(bags.write_bag(tmp_path / "bag"))
    assert record.refusals["malformed"] > 10
    assert [(fault.where, fault.kind) for fault in record.survey.faults] == [("front", "undecodable")]


def test_stamps_on_another_clock_are_replayed_on_theirs(
    run: Callable[..., Record], bags: ModuleType, tmp_path: Path
) -> None:
    script = bags.Script(stamp=lambda name, t: t - 1_600_000_000.0)
    record = run(bags.write_bag(tmp_path / "bag", script))
    assert record.refusals == {}
    assert record.chunks
    assert record.cameras["front"].stamp_s[0] == pytest.approx(0.001, abs=1e-5)


def test_unstamped_messages_are_taken_only_if_asked(
    run: Callable[..., Record], bags: ModuleType, tmp_path: Path
) -> None:
    bag = bags.write_bag(tmp_path / "bag", bags.Script(stamp=lambda name, t: None))
    assert run(bag).refusals == {"malformed": pytest.approx(100, abs=5)}
    assert run(bag, accept_unstamped=True).chunks


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_a_virtual_clock_leaps_and_a_real_one_waits_until_it_is_woken() -> None:
    virtual = VirtualClock(5)
    virtual.wait(9)
    virtual.wait(7)
    assert virtual.now_ns() == 9
    clock = RealClock()
    began = clock.now_ns()
    threading.Timer(0.02, clock.wake).start()
    clock.wait(began + 10_000_000_000)
    assert clock.now_ns() - began < 5_000_000_000
    clock.wait(clock.now_ns() + 20_000_000)
    assert time.monotonic_ns() - began >= 20_000_000


def test_reading_ahead_keeps_the_order_the_error_and_no_thread() -> None:
    def numbers() -> Iterator[int]:
        yield from range(200)
        raise BagError("the bag breaks off")

    def take(ahead: ReadAhead[int]) -> None:
        for number in ahead:
            seen.append(number)

    seen: list[int] = []
    with ReadAhead(numbers(), depth=4) as ahead, pytest.raises(BagError, match="breaks off"):
        take(ahead)
    assert seen == list(range(200))
    with ReadAhead(iter(range(10**9)), depth=4) as ahead:
        assert next(iter(ahead)) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "phyai-read-ahead"]


def test_a_held_answer_of_a_cancelled_epoch_never_comes() -> None:
    class Engine:
        def __init__(self) -> None:
            self.events: list[Any] = []

        def submit(self, request: Any) -> None:
            chunk = Chunk(request.epoch, request.chunk_id, None, StageTimings())  # type: ignore[arg-type]
            self.events.append(Answered(chunk, 0, 0, 7.0))

        def cancel(self, epoch: int) -> None: ...

        def poll(self) -> list[Any]:
            events, self.events = self.events, []
            return events

    class Asked:
        epoch, chunk_id = 3, 1

    clock = VirtualClock(0)
    link = HeldLink(Engine(), clock.now_ns, threading.Event(), None)
    link.submit(Asked())  # type: ignore[arg-type]
    assert (link.due_ns(), link.poll()) == (7_000_000, [])
    clock.wait(7_000_000)
    (event,) = link.poll()
    assert (event.received_mono_ns, event.chunk.chunk_id) == (7_000_000, 1)  # type: ignore[union-attr]
    link.submit(Asked())  # type: ignore[arg-type]
    link.cancel(3)
    clock.wait(20_000_000)
    assert link.poll() == []


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(bag_robot: Make, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs ``phyai replay`` with the robot and a fake model; results go to tmp_path/out."""
    robot, model = tmp_path / "robot.yaml", tmp_path / "model.yaml"
    robot.write_text(yaml.safe_dump(msgspec.to_builtins(bag_robot())), encoding="utf-8")
    model.write_text(yaml.safe_dump(msgspec.to_builtins(fake())), encoding="utf-8")

    def call(bag: Path, *options: str) -> tuple[int, str, str]:
        out = ("--out", str(tmp_path / "out"), "--mode", "step", "--engine", "thread", "--idle-probes", "0")
        words = ["replay", str(bag), "--robot", str(robot), "--model", str(model), *out, *options]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        return result.exit_code, result.stdout, result.stderr

    return call


def test_the_command_writes_record_summary_and_report(
    command: Callable[..., tuple[int, str, str]], clean: Path, tmp_path: Path
) -> None:
    code, said, _ = command(clean)
    assert code == 0, said
    record = load(tmp_path / "out" / "record.json")
    assert record.bag == "bag"
    assert f"chunk hash {record.chunk_hash}" in said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["record.json", "report.html", "summary.json"]
    code, said, _ = command(clean, "--compare", str(tmp_path / "out" / "record.json"))
    assert code == 0, said


def test_gate_exit_codes_are_right_both_ways(
    command: Callable[..., tuple[int, str, str]], clean: Path, tmp_path: Path
) -> None:
    fast = ("--mode", "as-fast-as-possible")
    assert command(clean, *fast, "--gate", "handoffs>=5,miss_rate<=1e-3,p99_margin_ms>=-1000")[0] == 0
    assert [entry.ok for entry in load(tmp_path / "out" / "record.json").invariants] == [True, True, True]
    code, said, _ = command(clean, *fast, "--gate", "handoffs>=5,p99_margin_ms>=100000")
    assert code == 1
    assert "gate p99_margin_ms >= 100000" in said
    assert command(clean, "--gate", "p99_margin_ms>=-1e6")[0] == 1  # mode step measures none


@pytest.mark.parametrize(("change", "kind"), [("gap", "gap"), ("loop", "looped")])
def test_a_recording_that_is_not_one_run_is_reported_and_ends_with_1(
    command: Callable[..., tuple[int, str, str]], bags: ModuleType, tmp_path: Path, change: str, kind: str
) -> None:
    script = {
        "gap": bags.Script(received=lambda name, t: None if 1.0 < t < 3.5 else t + 0.005, seconds=4.5),
        "loop": bags.Script(seconds=1.5, cycles=2),
    }[change]
    assert command(bags.write_bag(tmp_path / "bag", script))[0] == 1
    assert [fault.kind for fault in load(tmp_path / "out" / "record.json").survey.faults] == [kind]


def test_a_cut_recording_is_replayed_with_a_warning(
    command: Callable[..., tuple[int, str, str]], bags: ModuleType, tmp_path: Path
) -> None:
    folder = bags.write_bag(tmp_path / "bag", bags.Script(size=(120, 160)))
    file = bags.storage_file(folder)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    assert command(folder)[0] == 0
    (warning,) = load(tmp_path / "out" / "record.json").survey.warnings
    assert "a chunk is cut at byte" in warning


Spoil = Callable[[ModuleType, Path], Path]
BAD: dict[str, tuple[Spoil, str]] = {
    "no bag": (lambda bags, path: path / "none", "no such bag"),
    "empty": (
        lambda bags, path: bags.write_bag(path, bags.Script(received=lambda n, t: None, instruction="")),
        "the bag holds no message",
    ),
    "missing topic": (lambda bags, path: bags.write_bag(path, bags.Script(cameras=("front",))), "/wrist/image_raw"),
    "no cameras": (lambda bags, path: bags.write_bag(path, bags.Script(cameras=())), "(camera 'front') is missing"),
    "wrong type": (
        lambda bags, path: bags.write_bag(path, bags.Script(compressed=("front",))),
        "set the camera's transport to compressed",
    ),
    "another image format": (
        lambda bags, path: bags.write_bag(path, bags.Script(encoding="rgb12")),
        "none of the 40 messages of an input can be read",
    ),
    "other joints": (
        lambda bags, path: bags.write_bag(path, bags.Script(joint_names=("a", "b"))),
        "no message of /joint_states names j0, j1",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_bag_is_refused_in_words_and_replaces_no_result(
    command: Callable[..., tuple[int, str, str]], bags: ModuleType, tmp_path: Path, what: str
) -> None:
    spoil, words = BAD[what]
    kept = tmp_path / "out" / "record.json"
    kept.parent.mkdir()
    kept.write_text("an earlier result", encoding="utf-8")
    code, _, error = command(spoil(bags, tmp_path / "bag"))
    assert code == 2
    assert words in error
    assert "Traceback" not in error
    assert kept.read_text(encoding="utf-8") == "an earlier result"
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gate", "colour>3"), "the gate names no figure, got colour"),
        (("--model", "none"), "none"),
        (("--compare", "no.json"), "the record cannot be read"),
        (("--execution-horizon", "99"), "execution horizon is out of range"),
    ],
)
def test_bad_options_end_with_2(
    command: Callable[..., tuple[int, str, str]], clean: Path, tmp_path: Path, options: tuple[str, str], words: str
) -> None:
    code, _, error = command(clean, *options)
    assert code == 2
    assert words in error
    assert not (tmp_path / "out").exists()


def test_robot_and_model_are_asked_for(clean: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(clean)])
    assert (result.exit_code, result.stderr) == (2, "a replay needs a robot and a model. Give --robot and --model.\n")


def test_without_rosbags_the_command_says_what_to_install(clean: Path) -> None:
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rosbags":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
from phyai_engine.cli import main
main()
"""
    command = [sys.executable, "-c", code, "replay", str(clean), "--robot", "arm7", "--model", "fake"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "this command needs rosbags. Run `pip install '.[replay]'` in the checkout." in done.stderr
    assert "Traceback" not in done.stderr
