"""``phyai replay``: replay a bag, say what it showed, write the report."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.replay import gate, record
from phyai_engine.replay.engine_replay import ReplaySettings, replay
from phyai_engine.replay.record import Record
from phyai_engine.replay.report import write_report, write_summary
from phyai_engine.replay.survey import STOPPING
from phyai_engine.replay.verdict import verdict
from phyai_engine.weights.checkpoint import model_and_notes

PASSED, FAILED = 0, 1


def replay_command(
    bag: Path,
    robot: str,
    model: str,
    settings: ReplaySettings,
    *,
    gate_text: str = "",
    out: Path | None = None,
    compare: Path | None = None,
) -> int:
    """Replay, write ``record.json``, ``summary.json`` and ``report.html``, print the verdict.

    Nothing is written before the replay is over, so that a bag that cannot be replayed replaces no earlier result.

    :param out: folder of the results; None: ``out/replay/`` and the bag's name.
    :param compare: record.json of another run, shown beside this one.
    :returns: 0; 1 if a condition of the gate does not hold, or the bag is not one run (:data:`STOPPING`).
    :raises PhyaiError: bag, robot, model and options do not fit, or the engine is lost.
    """
    if not (robot and model):
        raise ConfigError("a replay needs a robot and a model", do="Give --robot and --model.")
    conditions = gate.parse_gate(gate_text) if gate_text else ()
    other = None if compare is None else record.load(compare)
    robot_config = load_robot(resolve("robots", robot))
    model_config, assumed = model_and_notes(model)
    folder = out or Path("out") / "replay" / bag.resolve().name
    if folder.exists() and not folder.is_dir():
        raise ConfigError("a file of that name exists", where=folder, do="Give --out the name of a folder.")
    console = Console(stderr=True)
    for note in assumed:
        console.print(Text(f"{model}: {note}", style="yellow"), soft_wrap=True)
    run = replay(bag, robot_config, model_config, settings, lambda phase: console.print(Text(phase, style="dim")))
    run = msgspec.structs.replace(run, invariants=(*run.invariants, *gate.judge(conditions, run)))
    write_results(run, folder, other)
    show(run, folder, Console())
    return exit_code(run)


def write_results(run: Record, folder: Path, other: Record | None = None) -> None:
    """The record, its figures and its report, in one folder.

    :raises ConfigError: the folder cannot be written.
    """
    try:
        run.save(folder / "record.json")
        write_summary(run, folder / "summary.json")
        write_report(run, folder / "report.html", other=other)
    except OSError as error:
        raise ConfigError(f"cannot write the results: {error.strerror}", where=folder) from None


def show(run: Record, folder: Path, console: Console) -> None:
    """The report's first sentences, and what the chunks were."""
    sentences = verdict(run)
    if run.chunk_hash:
        sentences.append(f"chunk hash {run.chunk_hash} of {len(run.chunks)} chunks")
    for sentence in (*sentences, f"wrote {folder / 'report.html'}, record.json and summary.json"):
        console.print(Text(sentence), soft_wrap=True)


def exit_code(run: Record) -> int:
    """PASSED, or FAILED where an invariant or a condition of the gate does not hold, or the bag is not one run."""
    broken = any(fault.kind in STOPPING for fault in run.survey.faults)
    return FAILED if broken or not all(entry.ok for entry in run.invariants) else PASSED
