"""The golden check of guidance: lerobot's runs and the true gradient; and that a mistake in either is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai_engine import rtc
from phyai_engine.golden import golden_command, run_golden
from phyai_engine.golden_report import MODES

FOLDER = Path(__file__).parents[1] / "golden" / "rtc_lerobot"


def test_every_recorded_array_passes_in_every_mode() -> None:
    """lerobot's guided variant is our identity, the Kinetix gradient our vjp, its hard prefix our trained."""
    report = run_golden(FOLDER)
    assert report.passed, report.first_bad
    with np.load(FOLDER / "io.npz") as recorded:
        wanted = set(recorded.files) - {"noise", "prev_full"}
    compared = {(c.name, c.mode) for c in report.comparisons}
    assert compared >= {(name, mode) for name in wanted for mode in MODES}
    worst = {suffix: max(c.max_abs for c in report.comparisons if c.name.endswith(suffix)) for suffix in ENDS}
    assert {suffix: value <= ENDS[suffix] for suffix, value in worst.items()} == dict.fromkeys(ENDS, True), worst


@pytest.mark.parametrize("device", ["auto", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torchs_arrays_pass_too(device: Any) -> None:
    report = run_golden(FOLDER, device)
    assert report.passed, report.first_bad


# Far below the gates, so that a mistake of their size would be seen: fp32 and fp64 rounding of chunks of size 3.
ENDS = {"/chunk": 3e-6, "/vjp_chunk": 1e-12, "/vjp_chunk fp32": 5e-6, "/vjp_correction": 1e-12}


def without_jacobian(x: Any, u: Any, t: float, *, pull: Any, target: Any, weight: Any, gain: Any) -> Any:
    return rtc.guide_identity(x, u, t, target=target, weight=weight, gain=gain)


@pytest.mark.parametrize(
    ("name", "wrong", "first"),
    [
        ("guide_vjp", without_jacobian, "vjp_"),
        ("guide_identity", lambda x, u, t, *, target, weight, gain: u + gain * weight * (target - x + t * u), ""),
        ("guide_identity", lambda x, u, t, *, target, weight, gain: u - gain * weight * (target - x), ""),
        ("guide_vjp", lambda x, u, t, *, pull, target, weight, gain: u - gain * pull(weight * (target - x)), "vjp_"),
    ],
    ids=["the Jacobian left out", "the other sign", "no look ahead", "no identity part"],
)
def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, first: str) -> None:
    monkeypatch.setattr(rtc, name, wrong)
    bad = run_golden(FOLDER).first_bad
    assert bad is not None
    assert bad.name.startswith(f"case0/{first}") and bad.max_abs > 1e-2


def own_copy(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(FOLDER, folder)
    with np.load(folder / "io.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    np.savez(folder / "io.npz", **arrays)
    return folder


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a["case3/chunk"].__iadd__(3e-5), "case3/chunk, mode recorded: max abs 3."),
        (lambda a: a["case4/vjp_x_steps"].__iadd__(1e-9), "case4/vjp_x_steps, mode recorded: max abs 1."),
        (lambda a: a["prefix1/token_times"].__iadd__(1e-6), "prefix1/token_times, mode recorded"),
        (lambda a: a.pop("case2/vjp_chunk"), "case2/vjp_chunk, mode recorded: not recorded"),
        (lambda a: a.update({"case1/weights": np.zeros(3)}), "case1/weights, mode recorded: recorded as [3]"),
        (lambda a: a.update(other=np.zeros(1)), "not compared: other"),
    ],
)
def test_a_damaged_recording_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], text: str
) -> None:
    assert golden_command(str(own_copy(tmp_path / "own", change)), first_bad=True) == 1
    assert text in capsys.readouterr().out


def test_samples_of_a_case_are_a_batch(tmp_path: Path) -> None:
    """Recorded with one sample; with two equal ones every mode must still find what is recorded."""

    def twice(arrays: dict[str, Any]) -> None:
        for name, array in arrays.items():
            axis = next((i for i, size in enumerate(array.shape) if size == 1), None)
            arrays[name] = array if axis is None else np.repeat(array, 2, axis=axis)

    folder = own_copy(tmp_path / "own", twice)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "batch": 2}))
    report = run_golden(folder)
    assert report.passed, report.first_bad


def test_the_command_prints_a_line_per_array(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden_command(str(FOLDER), first_bad=False) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip() for line in lines if line.endswith("ok")}
    assert rows >= {"chunk", "u_guided", "vjp_chunk", "vjp_chunk fp32", "token_times"}
