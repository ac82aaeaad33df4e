"""Recordings read back and run again: the same bytes for the same engine, and plain words for what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.config import config_dir, load_model
from phyai_engine.errors import BagError, ConfigError
from phyai_engine.replay.recorded import Exchange, Numbering, is_recording, open_recording
from phyai_engine.replay.recorded_replay import recorded_command, replay_recorded, sentences
from phyai_engine.replay.recorded_run import record_of, run_at
from phyai_engine.replay.run_file import RunFile, load_run


@pytest.fixture(scope="module")
def plain(recordings: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of six requests; not to be changed."""
    folder: Path = recordings.write_recording(tmp_path_factory.mktemp("plain") / "run")
    return folder


def exchanges(folder: Path, **more: Any) -> list[Exchange]:
    with open_recording(folder) as recording:
        return list(recording.exchanges(**more))


# -- reading -----------------------------------------------------------------------------------------------------------


def test_every_request_comes_back_with_its_frames_and_its_answer(plain: Path, recordings: ModuleType) -> None:
    found = exchanges(plain)
    assert [e.number for e in found] == [(0, k) for k in range(6)]
    assert [round(e.t_s, 3) for e in found] == pytest.approx([0.1 * k + 0.007 for k in range(6)])  # 3 ms: joints first
    for k, exchange in enumerate(found):
        request = exchange.request
        assert (request.epoch, request.chunk_id, request.seed, request.remaining_ms) == (7, 11 + k, 40 + k, 160.0)
        seen = request.observation
        np.testing.assert_array_equal(seen.state, [0.1 * k, -0.05 * k])
        np.testing.assert_array_equal(seen.velocity, [np.nan, 0.5])
        assert seen.instruction == f"step {k // 3}"
        np.testing.assert_array_equal(seen.images["front"], recordings.frame("front", k))
        assert seen.images["wrist"].shape == (24, 32, 3)  # through a JPEG
        assert exchange.missing == ()
        assert exchange.actions is not None and exchange.actions.shape == (8, 2)
        before = found[k - 1].actions
        if k == 0:
            assert request.committed is None
        else:
            assert request.committed is not None and before is not None
            np.testing.assert_array_equal(request.committed.actions, before[4:])
            assert (request.committed.delay_steps, request.committed.execution_steps) == (1, 4)


def test_inputs_have_a_digest_that_frames_are_part_of(plain: Path, recordings: ModuleType, tmp_path: Path) -> None:
    first, again = exchanges(plain), exchanges(plain, images=False)
    assert [e.inputs for e in first] == [e.inputs for e in again]
    assert len({e.inputs for e in first}) == 6
    assert all(not e.request.observation.images and e.missing == () for e in again)
    other = exchanges(recordings.write_recording(tmp_path / "run", recordings.Script(unstamped=True)), images=False)
    assert {e.inputs for e in first}.isdisjoint(e.inputs for e in other), "only the frames' stamps differ"


def test_numbers_count_epochs_and_chunks_from_the_first_of_each() -> None:
    number = Numbering()
    assert [number(*key) for key in ((9, 4), (9, 6), (12, 7), (9, 8))] == [(0, 0), (0, 2), (1, 0), (0, 4)]


def test_a_frame_that_is_not_in_the_bag_is_named(recordings: ModuleType, tmp_path: Path) -> None:
    script = recordings.Script(lost=[("wrist", 2)], unanswered=[3])
    folder = recordings.write_recording(tmp_path / "run", script)
    found = exchanges(folder)
    assert [e.missing for e in found] == [(), (), ("wrist",), (), (), ()]
    assert [e.actions is None for e in found] == [False, False, False, True, False, False]


def test_a_frame_that_was_recorded_after_the_request_is_found(recordings: ModuleType, tmp_path: Path) -> None:
    """Node and recorder receive each for itself."""
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(late=[1, 5], lost=[("wrist", 3)]))
    found = exchanges(folder)
    assert [e.number for e in found] == [(0, k) for k in range(6)]
    assert [e.missing for e in found] == [(), (), (), ("wrist",), (), ()]
    for k, exchange in enumerate(found):
        np.testing.assert_array_equal(exchange.request.observation.images["front"], recordings.frame("front", k))


def test_frames_without_stamps_are_found_by_their_receipt(recordings: ModuleType, tmp_path: Path) -> None:
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(unstamped=True))
    for k, exchange in enumerate(exchanges(folder)):
        np.testing.assert_array_equal(exchange.request.observation.images["front"], recordings.frame("front", k))
    assert np.isnan(run_at(folder).cameras["front"].stamp_s).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "run.json").unlink(), r"no recording.*run\.json"),
        (lambda f: (f / "run.json").write_text("{"), r"run\.json is not whole JSON"),
        (lambda f: _edit(f, version=2), r"not a run\.json of this version, got version 2"),
        (lambda f: _edit(f, colour="red"), r"does not fit its form.*colour"),
        (lambda f: _edit(f, robot="a: ["), r"the robot is not YAML"),
        (lambda f: _edit(f, robot="robot_id: x"), r"missing required field.*run\.json: robot"),
        (lambda f: _edit(f, model="famly: fake"), r"unknown key 'famly'.*run\.json: model"),
    ],
)
def test_a_wrong_run_file_is_said(plain: Path, tmp_path: Path, change: Any, message: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    change(folder)
    with pytest.raises(ConfigError, match=message):
        open_recording(folder)


def _edit(folder: Path, **changes: Any) -> None:
    path = folder / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_bag_of_something_else_is_no_recording(recordings: ModuleType, tmp_path: Path, plain: Path) -> None:
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(requests=0))
    with pytest.raises(BagError, match="got 0 topics of type phyai_policy/msg/EngineRequest"):
        open_recording(folder)
    assert is_recording(plain) and not is_recording(tmp_path)


def test_requests_of_another_robot_are_refused(plain: Path, tmp_path: Path, recordings: ModuleType) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    _edit(folder, robot=recordings.ROBOT.replace("lift", "raise"))
    with pytest.raises(BagError, match="got lift, turn, wanted raise, turn"):
        exchanges(folder)


def test_run_file_round_trip(tmp_path: Path) -> None:
    run = RunFile(robot="a", model="b", model_name="c", parameters={"seed": 3, "record": "x", "dt": 0.5})
    run.save(tmp_path)
    assert load_run(tmp_path) == run
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


# -- run again ---------------------------------------------------------------------------------------------------------


def test_the_same_engine_gives_the_same_bytes(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_recording(plain) as recording:
        again = replay_recorded(recording)
        run = record_of(recording)
    assert again.equal
    assert (again.requests, again.compared, again.same, again.failed) == (6, 6, 6, 0)
    assert again.hash_then == again.hash_now == run.chunk_hash
    assert CliRunner().invoke(app, ["replay", str(plain), "--recorded"], catch_exceptions=False).exit_code == 0
    assert recorded_command(plain) == 0
    assert "The same: 6 of 6 chunks have the same actions, byte by byte." in capsys.readouterr().out


def test_chunks_are_continued_as_the_recorded_model_does(recordings: ModuleType, tmp_path: Path) -> None:
    model = {**recordings.Script().model, "rtc": {"guidance": "prefix_lock"}}
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(model=model))
    with open_recording(folder) as recording:
        assert replay_recorded(recording).equal


def test_one_other_value_is_found(recordings: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Only of the last chunk: the next request continues what was recorded, and would differ too.
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(changed={5: 1e-9}))
    with open_recording(folder) as recording:
        again = replay_recorded(recording)
    assert not again.equal
    assert again.hash_then != again.hash_now
    assert (again.same, again.worst_chunk) == (5, 16)
    assert again.worst == pytest.approx(1e-9)
    assert recorded_command(folder) == 1
    assert "DIFFERENT: 5 of 6 chunks" in capsys.readouterr().out


def test_what_cannot_be_compared_is_counted(recordings: ModuleType, tmp_path: Path) -> None:
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(lost=[("front", 1)], unanswered=[3]))
    with open_recording(folder) as recording:
        again = replay_recorded(recording)
    assert (again.compared, again.same, again.incomplete, again.unanswered) == (4, 4, 1, 1)
    words = sentences(again)
    assert "not compared: 1 of 6 requests whose frames the recording does not hold" in words
    assert any("1 of 6 requests that had no answer" in sentence for sentence in words)


def test_nothing_to_compare_is_an_error(recordings: ModuleType, tmp_path: Path) -> None:
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(requests=2, unanswered=[0, 1]))
    with open_recording(folder) as recording, pytest.raises(BagError, match="2 requests, 0 without their frames, 2 w"):
        replay_recorded(recording)


def test_a_cut_recording_is_run_as_far_as_it_is_whole(
    plain: Path, recordings: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many small chunks of the file, cut in its middle."""
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(requests=400))
    (mcap,) = folder.glob("*.mcap")
    whole = mcap.read_bytes()
    mcap.write_bytes(whole[: int(len(whole) * 0.8)])
    with open_recording(folder) as recording:
        assert recording.warnings
        again = replay_recorded(recording)
        record = record_of(recording)
    assert again.equal
    assert 50 < again.compared < 400
    assert record.survey.warnings
    assert recorded_command(folder) == 0
    assert "warning: " in capsys.readouterr().out


def test_another_model_is_asked_the_same(plain: Path, tmp_path: Path) -> None:
    model = tmp_path / "other.yaml"
    text = (config_dir() / "models" / "fake.yaml").read_text()
    model.write_text(text.replace("horizon: 16", "horizon: 8").replace("amplitude: 0.1 ", "amplitude: 0.3 "))
    with open_recording(plain) as recording:
        again = replay_recorded(recording, load_model(model))
    assert not again.equal
    assert again.worst > 0.01


def test_a_model_that_sees_gets_the_same_pictures(recordings: ModuleType, tmp_path: Path) -> None:
    """pi0.5, tiny, from raw and JPEG frames: equal to the byte, and not once the frames are swapped."""
    pytest.importorskip("torch")
    path = config_dir() / "models" / "pi05_demo.yaml"
    import yaml

    model = yaml.safe_load(path.read_text())
    model["options"] = {**model["options"], "num_steps": 2, "action_horizon": 8, "image_size": 56, "prompt_len": 64}
    model["prompt"] = {**model["prompt"], "max_tokens": 64}
    script = recordings.Script(requests=3, model=model, parameters={"engine_threads": 1})
    folder = recordings.write_recording(tmp_path / "run", script)
    with open_recording(folder) as recording:
        again = replay_recorded(recording)
        assert again.equal, sentences(again)
        swapped = recordings.ROBOT.replace("role: base_0_rgb", "role: x").replace(
            "role: left_wrist_0_rgb", "role: base_0_rgb"
        )
    _edit(folder, robot=swapped.replace("role: x", "role: left_wrist_0_rgb"))
    with open_recording(folder) as recording:
        assert replay_recorded(recording).same == 0


# -- record and report -------------------------------------------------------------------------------------------------


def test_the_record_of_a_recording(recordings: ModuleType, tmp_path: Path) -> None:
    folder = recordings.write_recording(tmp_path / "run", recordings.Script(refused={2: 5}))
    record = run_at(folder)
    record.check()
    assert (record.robot_id, record.bag, record.mode, record.placement, record.schedule) == (
        "pair", "run", "live", "process", "rtc",
    )  # fmt: skip
    assert record.model == "fake, no weights: synthetic motion"
    assert (len(record.steps), len(record.timings), len(record.chunks)) == (12, 6, 6)
    assert (record.steps[0].kind, record.steps[0].chunk_id, record.steps[0].step) == ("action", 11, 1)
    assert tuple(record.steps[0].values) == tuple(record.chunks[0].actions[1])
    assert (record.timings[1].outcome, record.timings[1].m_ctrl_s) == ("accepted", 0.02)
    assert record.refusals == {"stale": 5}
    assert [e.text for e in record.events] == ["policy node active", "service: ~/abort called"]
    front = record.cameras["front"]
    assert len(front.t_s) == 6
    np.testing.assert_allclose(np.subtract(front.t_s, front.stamp_s), 0.005, atol=1e-9)
    assert front.delivered == 0.9
    assert record.joints.names == ("lift", "turn")
    assert {f.camera for f in record.frames} == {"front", "wrist"}
    assert [one.name for one in record.survey.inputs] == ["front", "wrist", "joint_states"]
    said = CliRunner().invoke(app, ["report", str(folder), "--against", str(folder)], catch_exceptions=False)
    assert (said.exit_code, said.stdout) == (0, f"wrote {tmp_path / 'run.html'}\n")
    page = (tmp_path / "run.html").read_text()
    assert 'class="plan"' in page and "<h2>Compared</h2>" in page
