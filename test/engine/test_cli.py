"""The command ``phyai``: exit codes, readable errors, and that it starts fast and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phyai_engine import __version__
from phyai_engine import doctor as doctor_module
from phyai_engine import golden as golden_module
from phyai_engine import tune as tune_module
from phyai_engine.cli import app
from phyai_engine.errors import ConfigError
from phyai_engine.replay.record import Record, StepRow

GOLDEN = Path(__file__).parents[1] / "golden"
RED = "\x1b[31m"


def run(*arguments: object, color: bool = False) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command in this process."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], color=color, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_help_names_every_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert "--version" in out
    commands = "golden doctor inspect bench tune calibrate hotspots judge replay report diff sweep train eval rtc-study"
    assert all(f" {name} " in out for name in f"{commands} serve status client keygen robots".split())


def test_version() -> None:
    assert run("--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("arguments", [("gold",), ("golden",), ("report",), ("golden", "x", "--frist-bad")])
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("answer", [0, 1, 2])
def test_golden_passes_its_arguments_and_the_answer_on(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    seen: list[tuple[str, bool, str]] = []

    def command(folder: str, first_bad: bool, device: str) -> int:
        seen.append((folder, first_bad, device))
        return answer

    monkeypatch.setattr(golden_module, "golden_command", command)
    assert run("golden", "some/folder")[0] == answer
    assert run("golden", "some/folder", "--first-bad", "--device", "cuda")[0] == answer
    assert seen == [("some/folder", False, "cpu"), ("some/folder", True, "cuda")]


def test_tune_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(tune_module, "tune_command", lambda *arguments: seen.append(arguments) or 0)
    assert run("tune")[0] == 0
    assert run("tune", "pi05", "--device", "cpu", "--out", "x.yaml")[0] == 0
    assert seen == [(["pi05", "pi0"], "auto", None), (["pi05"], "cpu", Path("x.yaml"))]


def test_golden_runs_a_committed_folder() -> None:
    code, out, _ = run("golden", GOLDEN / "pi05_tiny", "--first-bad")
    assert code == 0, out
    assert "within their gates" in out


@pytest.mark.parametrize("answer", [0, 1])
def test_doctor_passes_its_answer_on(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    monkeypatch.setattr(doctor_module, "doctor_command", lambda: answer)
    assert run("doctor")[0] == answer


def test_an_error_of_ours_is_one_red_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise ConfigError("no such [thing]", got="7", do="Name another.")

    monkeypatch.setattr(doctor_module, "doctor_command", refuse)
    assert run("doctor") == (2, "", "no such [thing], got 7. Name another.\n")
    assert run("doctor", color=True)[2].startswith(RED)


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash() -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(doctor_module, "doctor_command", crash)
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_report_writes_one_page_beside_the_record_or_where_asked(tmp_path: Path) -> None:
    record, other = tmp_path / "run.json", tmp_path / "other.html"
    kept = Record(
        robot_id="twin",
        action_names=("lift",),
        action_type="joint_position",
        dt_s=0.1,
        model="fake",
        placement="thread",
        schedule="sync",
        started="2026-01-02T03:04:05+00:00",
        host="here",
        steps=[StepRow(t_s=0.0, kind="hold", values=(0.0,), tick=0, epoch=1)],
    )
    kept.save(record)
    assert run("report", record) == (0, f"wrote {tmp_path / 'run.html'}\n", "")
    assert run("report", record, "-o", other) == (0, f"wrote {other}\n", "")
    assert "<html" in other.read_text()
    assert other.read_text() == (tmp_path / "run.html").read_text()
    code, _, error = run("report", record, "--out", tmp_path / "none" / "x.html")
    assert code == 2
    assert "no such folder" in error


def test_a_record_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    wrong = tmp_path / "record.json"
    wrong.write_text("{")
    code, _, error = run("report", wrong)
    assert code == 2
    assert str(wrong) in error
    assert list(tmp_path.iterdir()) == [wrong]


BLOCKED = """
import sys, time

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rclpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
began = time.process_time()
from phyai_engine.cli import main
try:
    main()
finally:
    print(f"{time.process_time() - began:.3f}", file=sys.stderr)
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", BLOCKED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_is_fast_and_needs_no_torch() -> None:
    runs = [without_torch("--help") for _ in range(3)]
    assert [r.returncode for r in runs] == [0, 0, 0], runs[0].stderr
    seconds = min(float(r.stderr.split()[-1]) for r in runs)
    print(f"phyai --help: {seconds:.3f} s of CPU time after the start of the interpreter")
    assert seconds < 0.3


def test_a_command_without_its_package_says_what_to_install() -> None:
    done = without_torch("golden", str(GOLDEN / "pi05_tiny"))
    assert done.returncode == 2
    assert "this command needs torch. Run `pip install '.[engine]'` in the checkout." in done.stderr
    assert "Traceback" not in done.stderr
