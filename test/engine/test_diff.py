"""phyai diff: two runs pair by pair, in robot units, per denoising step, and their latencies side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.errors import BagError, ConfigError
from phyai_engine.replay.diff import Diff, Side, compare, load_side
from phyai_engine.replay.diff_table import headline
from phyai_engine.replay.record import ChunkRow, Record, TimingRow
from phyai_engine.replay.recorded_replay import SolverTrace
from phyai_engine.replay.recorded_run import run_at


@pytest.fixture(scope="module")
def runs(recordings: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recording, another whose last chunk differs, and the record of the first."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "plain": recordings.write_recording(folder / "plain"),
        "changed": recordings.write_recording(folder / "changed", recordings.Script(changed={5: 0.25})),
        "record": folder / "record.json",
    }
    run_at(made["plain"]).save(made["record"])
    return made


def side(actions: list[list[list[float]]], **more: Any) -> Side:
    """A run of two actions without a bag."""
    record = Record(
        robot_id="twin", action_names=("lift", "turn"), action_type="joint_position", dt_s=0.1, model="m",
        placement="process", schedule="rtc", started="", host="", timings=more.pop("timings", ()),
    )  # fmt: skip
    return Side("run", record, {(0, i): np.array(rows) for i, rows in enumerate(actions)}, **more)


def diff(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "140"})
    return result.exit_code, result.stdout, result.stderr


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_joints_by_hand() -> None:
    a = side([[[0.0, 1.0], [0.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    b = side([[[0.0, 1.0], [0.3, 1.0]], [[1.0, 1.0], [1.0, 1.0]], [[9.0, 9.0], [9.0, 9.0]]])
    found = compare(a, b)
    lift, turn = found.joints
    assert (found.pairs, found.only_a, found.only_b, found.same_actions) == (2, 0, 1, 1)
    assert (lift.name, lift.difference.max, lift.largest_chunk, lift.largest_row) == ("lift", 0.3, "0/0", 1)
    assert lift.difference.p50 == 0.0
    assert lift.rms == pytest.approx(math.sqrt(0.09 / 4))
    assert turn.difference.max == 0.0
    assert found.largest == 0.3
    assert found.same_inputs == -1
    assert found.unit == "rad or m"


def test_a_value_that_is_not_finite_is_infinitely_far() -> None:
    found = compare(side([[[0.0, 1.0]]]), side([[[math.nan, 1.0]]]))
    assert found.largest == math.inf


def test_horizons_that_differ_are_compared_as_far_as_both_go() -> None:
    found = compare(side([[[0.0, 0.0], [5.0, 5.0]]]), side([[[0.0, 0.0]]]))
    assert found.largest == 0.0
    assert "Horizons differ (2 and 1 rows): the rows that both have are compared." in found.notes


def test_velocities_by_hand() -> None:
    def trace(velocity: list[float], moved: float) -> SolverTrace:
        steps = np.array([[[v, 0.0]] for v in velocity], np.float32)
        return SolverTrace(steps, np.array([[moved, 0.0]], np.float32))

    a = side([[[0.0, 0.0]]], traces={(0, 0): trace([2.0, 4.0], -3.0)}, times=(1.0, 0.5))
    b = side([[[0.0, 0.0]]], traces={(0, 0): trace([2.0, 3.0], -2.5)}, times=(1.0, 0.5))
    found = compare(a, b)
    assert [(row.step, row.t, row.velocity.max) for row in found.steps] == [(0, 1.0, 0.0), (1, 0.5, 0.25)]
    assert found.displacement.max == pytest.approx(0.5 / 3.0)
    b.times = (1.0, 0.25)
    other = compare(a, b)
    assert other.steps == ()
    assert any("other flow times" in note for note in other.notes)


def test_latencies_stand_side_by_side() -> None:
    def timings(inference: float, margin: float) -> list[TimingRow]:
        figures = {"l_inference_s": inference, "l_critical_s": 2 * inference, "m_ctrl_s": margin}
        return [TimingRow(t_s=1.0, epoch=1, chunk_id=1, outcome="accepted", **figures)]

    rows = [[[0.0, 0.0]]]
    found = compare(side(rows, timings=timings(0.1, 0.05)), side(rows, timings=timings(0.3, -0.15)))
    by_name = {row.name: row for row in found.latency}
    assert (by_name["l_inference_s"].a_p50, by_name["l_inference_s"].b_p99) == (0.1, 0.3)
    assert (by_name["m_ctrl_s"].a_p50, by_name["m_ctrl_s"].b_p50) == (0.05, -0.15)
    assert found.misses == ("0 of 1", "1 of 1")
    assert "l_queue_s" not in by_name, "nothing was measured"


def test_runs_that_have_nothing_in_common_are_refused() -> None:
    with pytest.raises(BagError, match="no chunk of A has its like in B"):
        compare(side([[[0.0, 0.0]]]), side([]))
    other = side([[[0.0, 0.0]]])
    other.record = Record(
        robot_id="x", action_names=("a", "b"), dt_s=0.1, model="", placement="", schedule="", started="", host=""
    )
    with pytest.raises(ConfigError, match="different robots, got a, b, wanted lift, turn"):
        compare(side([[[0.0, 0.0]]]), other)


# -- recordings --------------------------------------------------------------------------------------------------------


def test_a_recording_equals_its_record_and_itself_run_again(runs: dict[str, Path]) -> None:
    plain = load_side(runs["plain"])
    found = compare(plain, load_side(runs["record"]))
    assert (found.pairs, found.same_actions, found.largest) == (6, 6, 0.0)
    assert found.hash_a == found.hash_b == plain.record.chunk_hash
    again = compare(load_side(runs["plain"], "recorded"), load_side(runs["plain"], "recorded"))
    assert (again.same_actions, again.same_inputs) == (6, 6)
    assert [row.velocity.max for row in again.steps] == [0.0] * 4
    assert again.displacement.max == 0.0
    assert again.latency[0].name == "inference, run again"


def test_a_changed_chunk_is_found(runs: dict[str, Path]) -> None:
    found = compare(load_side(runs["plain"]), load_side(runs["changed"]))
    assert (found.pairs, found.same_actions, found.same_inputs) == (6, 5, 6)
    assert [joint.difference.max for joint in found.joints] == pytest.approx([0.25, 0.25])
    assert found.joints[0].largest_chunk == "0/5"
    assert found.hash_a != found.hash_b


def test_inputs_that_differ_are_said(recordings: ModuleType, runs: dict[str, Path], tmp_path: Path) -> None:
    other = recordings.write_recording(tmp_path / "other", recordings.Script(changed={3: 0.1}))
    found = compare(load_side(runs["plain"]), load_side(other))
    assert (found.same_inputs, found.pairs) == (5, 6)  # the request after it continues other rows
    assert "Inputs differ: so would the actions of one and the same engine." in headline(found)


def test_another_model_on_the_same_requests(runs: dict[str, Path], recordings: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    changed = {**recordings.FAKE, "options": {**recordings.FAKE["options"], "amplitude": 0.3}}
    other.write_text(yaml.safe_dump(changed))
    code, out, _ = diff(
        runs["plain"], runs["plain"], "--model-a", "recorded", "--model-b", other, "-o", tmp_path / "d.json"
    )
    assert code == 1
    assert (
        "velocity, step 0 (t = 1.000)" in out and "action minus noise" in out and "lift" in out and "[rad or m]" in out
    )
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["same_inputs"] == found["pairs"] == 6
    assert all(row["velocity"]["max"] > 0 for row in found["steps"])
    assert found["displacement"]["max"] > 0
    assert found["joints"][0]["difference"]["max"] > 0.01


# -- command -----------------------------------------------------------------------------------------------------------


def test_exit_codes(runs: dict[str, Path], tmp_path: Path) -> None:
    assert diff(runs["plain"], runs["record"])[0] == 0
    assert diff(runs["plain"], runs["changed"])[0] == 1
    assert diff(runs["plain"], runs["changed"], "--within", 0.3)[0] == 0
    code, _, error = diff(runs["record"], runs["plain"], "--model-a", "recorded")
    assert code == 2 and "a record holds no requests to run again" in error
    code, _, error = diff(runs["plain"], tmp_path)
    assert code == 2 and "not a recording" in error
    assert diff(runs["plain"], runs["record"], "-o", tmp_path / "none" / "x.json")[0] == 2


def test_a_record_without_chunks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    side([]).record.save(path)
    with pytest.raises(ConfigError, match="holds no chunks"):
        load_side(path)


def test_a_record_keeps_its_chunks(tmp_path: Path) -> None:
    rows = [ChunkRow(t_s=0.0, epoch=3, chunk_id=9, actions=[[0.5, 0.25]])]
    record = Record(
        robot_id="x", action_names=("a", "b"), dt_s=0.1, model="", placement="", schedule="", started="", host="",
        chunks=rows,
    )  # fmt: skip
    record.save(tmp_path / "r.json")
    found = load_side(tmp_path / "r.json")
    assert list(found.answers) == [(0, 0)]
    np.testing.assert_array_equal(found.answers[0, 0], [[0.5, 0.25]])
    assert isinstance(compare(found, found), Diff)
