"""The study of handoff methods: training and its cache, claims, plot, command. A tiny net stands for the policy."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from phyai_engine.cli import app
from phyai_engine.intervals import Spread, wilson
from phyai_engine.rtc_study import command, net
from phyai_engine.rtc_study.figure import svg
from phyai_engine.rtc_study.net import ChunkNet, Recipe, Trainer, flow_loss, trained_net
from phyai_engine.rtc_study.result import Study, claims
from phyai_engine.rtc_study.sampling import Method
from phyai_engine.rtc_study.scores import Cell
from phyai_engine.rtc_study.task import ACTIONS, HORIZON, Task

TINY = Recipe(demonstrations=60, width=24, blocks=1, batch=64, steps=60, learning_rate=5e-3)


def test_the_loss_looks_at_the_rows_behind_the_prefix_only() -> None:
    torch.manual_seed(0)
    small = ChunkNet(8, 1)
    chunk, noise = torch.randn(2, 4, HORIZON, ACTIONS)
    time, prefix = torch.full((4,), 0.5), torch.full((4,), 3)
    observation = torch.zeros(4, 2)
    other = noise.clone()
    other[:, :3] = 9.0  # noise of clean rows is never seen
    assert torch.equal(
        flow_loss(small, observation, chunk, noise, time, prefix),
        flow_loss(small, observation, chunk, other, time, prefix),
    )
    free = flow_loss(small, observation, chunk, noise, time, torch.zeros(4))
    assert not torch.equal(free, flow_loss(small, observation, chunk, other, time, torch.zeros(4)))


def test_training_is_repeatable_and_lowers_the_loss() -> None:
    first, second = Trainer(TINY), Trainer(TINY)
    batch = first._batch()
    second._batch()
    before = flow_loss(first.averaged, *batch).item()
    first.round()
    second.round()
    assert flow_loss(first.averaged, *batch).item() < 0.8 * before
    for one, other in zip(first.averaged.parameters(), second.averaged.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_good_net_is_kept_and_a_bad_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = msgspec.structs.replace(TINY, steps=1)
    asked: list[ChunkNet] = []
    assert trained_net(tiny, tmp_path, lambda made: bool(asked.append(made)), rounds_max=2) is None
    assert len(asked) == 2
    assert list(tmp_path.iterdir()) == []
    made = trained_net(tiny, tmp_path, lambda _: True)
    assert made is not None
    monkeypatch.setattr(net, "Trainer", None)  # from here on nothing may be trained
    again = trained_net(tiny, tmp_path, lambda _: False)
    assert again is not None
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in made.state_dict().items())


def test_another_recipe_and_a_broken_file_are_trained_anew(tmp_path: Path) -> None:
    tiny = msgspec.structs.replace(TINY, steps=1)
    path = tmp_path / f"{tiny.key()}.npz"
    path.write_bytes(b"PK\x03\x04 not a net")
    assert net.load(tiny, path) is None
    assert trained_net(tiny, tmp_path, lambda _: True) is not None
    assert net.load(tiny, path) is not None
    assert msgspec.structs.replace(tiny, task=Task(plate_half=0.5)).key() != tiny.key()


def cell(method: Method, delay: int, successes: int, ratio: float) -> Cell:
    return Cell(
        method=method.value,
        delay_steps=delay,
        execution_steps=max(delay, 1),
        episodes=512,
        successes=successes,
        success=wilson(successes, 512),
        touched=512 - successes,
        jump_ratio=Spread(n=100, p50=ratio, p90=2 * ratio, p99=3 * ratio),
        jerk_mean_m_s3=1.0,
        jerk_handoff_p99_m_s3=9.0,
        frozen_error_m_s=None,
        seconds_to_goal=6.0,
    )


def study(*cells: Cell) -> Study:
    return Study(
        recipe=TINY, horizon=HORIZON, denoising_steps=5, seed=1, host="here", train_s=0.0, play_s=1.0, cells=cells
    )


GOOD = (
    cell(Method.NAIVE_ASYNC, 4, 200, 3.4),
    cell(Method.TEMPORAL_ENSEMBLE, 4, 100, 0.9),
    cell(Method.VJP, 0, 500, 1.2),
    cell(Method.VJP, 4, 490, 1.4),
    cell(Method.TRAINED, 0, 505, 1.1),
    cell(Method.TRAINED, 4, 490, 1.3),
)


def test_claims_hold_where_the_cells_say_so() -> None:
    found = claims(study(*GOOD))
    assert [held for _, _, held in found] == [True] * 5
    assert found[0][1].startswith("trained: 95.7 %")  # equal successes: the smaller jump


@pytest.mark.parametrize(
    ("index", "changed", "broken"),
    [
        (0, cell(Method.NAIVE_ASYNC, 4, 475, 3.4), 1),
        (0, cell(Method.NAIVE_ASYNC, 4, 200, 2.9), 4),
        (1, cell(Method.TEMPORAL_ENSEMBLE, 4, 480, 0.9), 2),
        (5, cell(Method.TRAINED, 4, 490, 1.6), 3),
    ],
)
def test_claims_fail_where_the_cells_say_so(index: int, changed: Cell, broken: int) -> None:
    cells = [*GOOD]
    cells[index] = changed
    if broken == 3:
        del cells[3]  # else vjp would be the better of the two
    assert [held for _, _, held in claims(study(*cells))] == [n != broken for n in range(5)]


def test_claims_keep_to_the_cells_there_are() -> None:
    assert claims(study(cell(Method.SYNC, 1, 500, 1.0))) == []
    lost = claims(study(cell(Method.VJP, 0, 500, 1.0), cell(Method.VJP, 4, 400, 1.0)))
    assert [held for _, _, held in lost] == [False, True]


def test_the_study_survives_its_file(tmp_path: Path) -> None:
    made = study(*GOOD)
    made.save(tmp_path / "study.json")
    assert msgspec.json.decode((tmp_path / "study.json").read_bytes(), type=Study) == made
    assert [p.name for p in tmp_path.iterdir()] == ["study.json"]


def test_the_plot_is_one_picture_with_every_method() -> None:
    root = ET.fromstring(svg(study(*GOOD)))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"naive_async", "temporal_ensemble", "vjp", "trained"} <= set(texts)
    assert "sync" not in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 2 * 4
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    for circle in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["rtc-study", *(str(a) for a in arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_table_file_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "policy_net", lambda *_: ChunkNet(TINY.width, TINY.blocks).requires_grad_(False))
    out, plot = tmp_path / "study.json", tmp_path / "study.svg"
    code, text, _ = run("-n", 3, "--methods", "naive_async,vjp", "--delays", "0,4", "--out", out, "--plot", plot)
    assert code == 0
    assert "rtc-study" in text
    assert "…" not in text  # nothing is cut at 80 columns
    assert max(map(len, text.splitlines())) <= 80
    found = msgspec.json.decode(out.read_bytes(), type=Study)
    assert [(c.method, c.delay_steps) for c in found.cells] == [
        ("naive_async", 0),
        ("naive_async", 4),
        ("vjp", 0),
        ("vjp", 4),
    ]
    assert ET.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--methods", "rtc"), "no such method, got rtc, wanted sync, naive_async"),
        (("--delays", "x"), "not a delay in steps, got x"),
        (("--delays", "5"), "wanted delays 0..4"),
        (("--out", "none/x.json"), "no such folder"),
    ],
)
def test_wrong_usage_is_an_error_of_ours(arguments: tuple[str, ...], said: str) -> None:
    code, _, error = run(*arguments)
    assert code == 2
    assert said in error.replace("\n", " ")


def test_a_policy_that_does_not_learn_is_not_studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(command, "trained_net", lambda recipe, folder, good: None)
    code, _, error = run("-n", 3)
    assert code == 2
    assert "the policy did not learn the task" in error
