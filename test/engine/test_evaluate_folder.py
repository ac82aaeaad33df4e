"""Manifests, the folder of an evaluation, scores and figures; ``phyai eval`` end to end with simulator processes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from phyai_engine.bench.machine import environment
from phyai_engine.cli import app
from phyai_engine.config import ModelConfig, PromptConfig
from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.condition import Condition, Fault
from phyai_engine.evaluate.figure import svg_of_cells, svg_of_tasks
from phyai_engine.evaluate.manifest import SEED_STRIDE, Episode, Manifest, digest, lines, load_manifest, made
from phyai_engine.evaluate.provenance import Provenance, checkpoint_sha256, model_sha256
from phyai_engine.evaluate.record import EpisodeRecord
from phyai_engine.evaluate.run_folder import Run, RunFolder
from phyai_engine.evaluate.scores import Summary, difference, summarise
from phyai_engine.evaluate.table import facts, table
from phyai_engine.replay.success import Trials, load_success
from phyai_engine.types import Schedule

PHRASES = {"drawer-open": ("open the drawer", "pull it"), "drawer-close": ("close the drawer",)}
MANIFEST = made(PHRASES, 3, seed=2)


def run_of(manifest: Manifest = MANIFEST, **changes: Any) -> Run:
    provenance = Provenance(
        model="m",
        weights="w",
        model_sha256="1",
        checkpoint_sha256="2",
        environment=environment("cpu", {}),
        gpu_driver="",
        packages={},
    )
    given: dict[str, Any] = {
        "driver": "in-process",
        "robot": "r",
        "robot_sha256": "3",
        "dt_s": 0.05,
        "condition": Condition(),
        "manifest_sha256": digest(manifest),
        "episodes": len(manifest),
        "batch": 1,
        "provenance": provenance,
    }
    return Run(**{**given, **changes})


def record_of(number: int, episode: Episode, *, success: bool = True, **changes: Any) -> EpisodeRecord:
    given: dict[str, Any] = {
        "ticks": 100,
        "held": 10,
        "requests": 9,
        "accepted": 8,
        "failed": 0,
        "refusals": {},
        "handoffs": 7,
        "misses": 1,
        "delay_steps": [4, 4],
        "jump_ratios": [1.0, 3.0],
        "frozen_error": None,
        "jerk": 50.0,
        "fallbacks": {},
        "aborted": "",
        "commands": "",
        "wall_s": 1.0,
    }
    own = msgspec.structs.asdict(episode)
    return EpisodeRecord(number=number, success=success, **own, **{**given, **changes})


def whole(path: Path, successes: int = 4, **changes: Any) -> Path:
    folder = RunFolder(path, run_of(**changes), MANIFEST)
    for number, episode in folder.waiting():
        folder.add(record_of(number, episode, success=number < successes))
    return path


def test_a_made_manifest_is_paired_by_seed_and_noise_never_overlaps() -> None:
    assert [e.task for e in MANIFEST] == ["drawer-open"] * 3 + ["drawer-close"] * 3
    assert [e.instruction for e in MANIFEST[:3]] == ["open the drawer", "pull it", "open the drawer"]
    assert [e.scene_seed for e in MANIFEST] == [2000, 2001, 2002] * 2
    assert MANIFEST[1].noise_seed - MANIFEST[0].noise_seed == SEED_STRIDE
    assert made({"drawer-close": PHRASES["drawer-close"]}, 3, seed=2) == MANIFEST[3:]
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        made(PHRASES, 0, seed=1)
    with pytest.raises(ConfigError, match="too large"):
        made(PHRASES, 1000, seed=21)


def test_manifests_are_read_from_both_forms_and_wrong_ones_are_named(tmp_path: Path) -> None:
    text, listed = tmp_path / "m.jsonl", tmp_path / "m.yaml"
    text.write_bytes(lines(MANIFEST))
    listed.write_text(yaml.safe_dump([msgspec.structs.asdict(e) for e in MANIFEST]))
    assert load_manifest(text) == load_manifest(listed) == MANIFEST
    for content, wanted in (
        ("[]", "empty"),
        ("- {task: a, instruction: b, scene_seed: 1, noise_sed: 2}", "unknown key 'noise_sed'.*Did you mean"),
        ("- {task: a, instruction: b, scene_seed: -1, noise_seed: 2}", r"scene_seed"),
        ("- &e {task: a, instruction: b, scene_seed: 1, noise_seed: 2}\n- *e", "stands twice"),
    ):
        listed.write_text(content)
        with pytest.raises(ConfigError, match=wanted):
            load_manifest(listed)
    text.write_text("{")
    with pytest.raises(ConfigError, match="not JSON lines"):
        load_manifest(text)


def test_an_interrupted_run_goes_on_and_another_one_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, run_of(), MANIFEST)
    folder.add(record_of(4, MANIFEST[4]))
    with (tmp_path / "episodes.jsonl").open("ab") as stream:
        stream.write(b'{"number":5,"task":"dra')  # killed while it wrote
    again = RunFolder(tmp_path, run_of(batch=8), MANIFEST)
    assert [number for number, _ in again.waiting()] == [0, 1, 2, 3, 5]
    with pytest.raises(ConfigError, match=r"its condition differs.*another --out"):
        RunFolder(tmp_path, run_of(condition=Condition(delay_ms=50.0)), MANIFEST)
    with pytest.raises(ConfigError, match="manifest"):
        RunFolder(tmp_path, run_of(MANIFEST[:2]), MANIFEST[:2])


def test_what_differs_from_the_manifest_is_not_aggregated(tmp_path: Path) -> None:
    path = whole(tmp_path / "a")
    assert summarise(path).all.n == 6
    records = (path / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    for wrong, why in (
        (records[:-1], r"5 records, 1 episodes missing \(5\)"),
        ([*records, records[0]], "7 records, 0 episodes missing, 1 twice"),
        ([*records[:-1], records[0].replace(b'"number":0', b'"number":9')], r"1 unknown \(9\)"),
        ([*records[:-1], records[0].replace(b'"number":0', b'"number":5')], "of another episode"),
        ([*records[:-1], b"{}\n"], "not a record"),
    ):
        (path / "episodes.jsonl").write_bytes(b"".join(wrong))
        with pytest.raises(ConfigError, match=why):
            summarise(path)
    (path / "episodes.jsonl").write_bytes(b"".join(records))
    (path / "manifest.jsonl").write_bytes(lines(MANIFEST[:5]))
    with pytest.raises(ConfigError, match="manifest was changed"):
        summarise(path)


def test_scores(tmp_path: Path) -> None:
    summary = summarise(whole(tmp_path / "a", successes=4))
    assert [(s.task, s.n, s.successes) for s in summary.tasks] == [("drawer-open", 3, 3), ("drawer-close", 3, 1)]
    assert summary.all.success.share == pytest.approx(4 / 6) and summary.task_mean == pytest.approx(2 / 3)
    assert summary.all.seconds == pytest.approx(5.0) and summary.held == pytest.approx(0.1)
    assert (summary.handoffs, summary.misses, summary.chunks) == (42, 6, 48)
    assert summary.jump_ratio is not None and summary.jump_ratio.n == 12
    better = difference(whole(tmp_path / "b", 6), tmp_path / "a")
    assert better.share == pytest.approx(1 / 3) and better.low < better.share < better.high
    assert "handoffs with a deadline 42, missed 6" in facts(summary) and table(summary).row_count == 3


def test_sweep_takes_the_rate_of_a_whole_evaluation(tmp_path: Path) -> None:
    condition = Condition(schedule=Schedule.RTC, delay_ms=180.0, execution_horizon=7)
    folder = whole(tmp_path / "eval", successes=3, condition=condition)
    (own,) = load_success([str(folder)]).trials
    assert own == Trials(
        run=run_of().provenance.weights, success=0.5, n=6, schedule="rtc", execution_steps=7, delay_steps=4
    )
    (named,) = load_success([f"thor={folder}"]).trials
    assert named == msgspec.structs.replace(own, run="thor")
    ros = whole(tmp_path / "ros", driver="ros", condition=condition)
    assert load_success([str(ros)]).trials[0].delay_steps == 4  # as measured
    with pytest.raises(ConfigError, match="planted fault"):
        load_success([str(whole(tmp_path / "fault", condition=Condition(fault=Fault.SWAPPED_CAMERAS)))])
    (folder / "episodes.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="not those of the manifest"):
        load_success([str(folder)])


def test_figures(tmp_path: Path) -> None:
    def cell(schedule: Schedule, delay_ms: float, guidance: str = "") -> Summary:
        condition = Condition(schedule=schedule, delay_ms=delay_ms, guidance=guidance)
        return summarise(whole(tmp_path / condition.title, condition=condition))

    cells = [cell(s, d) for s in (Schedule.SYNC, Schedule.NAIVE_ASYNC) for d in (0.0, 200.0, 400.0)]
    cells += [cell(Schedule.RTC, d, "trained") for d in (0.0, 400.0)]
    root = ET.fromstring(svg_of_cells(cells))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"sync", "naive_async", "rtc trained", "200", "400"} <= set(texts)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2 * len(cells)
    root = ET.fromstring(svg_of_tasks(cells[0]))
    assert "drawer-close" in [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_hashes_follow_the_weights_and_not_the_folder(tmp_path: Path) -> None:
    def folder(name: str, **files: bytes) -> str:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / f"{file}.safetensors").write_bytes(content)
        return str(tmp_path / name)

    one = checkpoint_sha256(folder("a", model=b"abc", policy_stats=b"1"))
    assert one == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    other, parts = folder("b", model=b"abd"), folder("c", model_1=b"a", model_2=b"bc")
    assert len({one, checkpoint_sha256(other), checkpoint_sha256(parts)}) == 3
    assert checkpoint_sha256("") == ""
    here = ModelConfig(family="pi05", checkpoint="here", prompt=PromptConfig(tokenizer="here/t.model"))
    there = ModelConfig(family="pi05", checkpoint="there", prompt=PromptConfig(tokenizer="there/t.model"), device="cpu")
    assert model_sha256(here) == model_sha256(there) != model_sha256(ModelConfig(family="pi05", seed=1))


def test_phyai_eval_end_to_end(tmp_path: Path) -> None:
    """Two scenes, two simulator processes, a fake policy; again it has nothing to do; less than that is refused."""
    model, out = tmp_path / "fake.yaml", tmp_path / "out"
    options = {"horizon": 16, "action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], "image_size": 16}
    model.write_text(yaml.safe_dump({"family": "fake", "normalisation": {"kind": "limits"}, "options": options}))
    arguments = ["eval", str(model), "--tasks", "drawer-open,window-close", "-n", "1", "--seconds", "1.5"]
    arguments += ["--workers", "2", "--films", "1", "--schedule", "rtc", "--delay-ms", "200", "--out", str(out)]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    summary = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
    assert [(s.task, s.n) for s in summary.tasks] == [("drawer-open", 1), ("window-close", 1)]
    assert summary.delay_steps is not None and (summary.delay_steps.p50, summary.delay_steps.p99) == (4.0, 4.0)
    assert ET.parse(out / "figure.svg").getroot().tag.endswith("svg")
    assert sorted(p.name for p in (out / "films").iterdir()) == ["00000.gif", "00001.gif"]
    before = (out / "episodes.jsonl").read_bytes()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0 and (out / "episodes.jsonl").read_bytes() == before
    other = CliRunner().invoke(app, [*arguments, "--delay-ms", "100"])
    assert other.exit_code == 2 and "another evaluation lies there" in other.output
    unknown = CliRunner().invoke(app, ["eval", str(model), "--tasks", "fly"])
    assert unknown.exit_code == 2 and "no such task" in unknown.output
    unknown = CliRunner().invoke(app, ["eval", str(model), "--fault", "rain"])
    assert unknown.exit_code == 2 and "one of none, swapped_cameras" in unknown.output
