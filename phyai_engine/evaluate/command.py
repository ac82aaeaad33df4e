"""``phyai eval``: load the policy, try one request, play the manifest, aggregate, show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phyai_engine.clocks import device_of
from phyai_engine.config import ModelConfig, RobotConfig, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.closed_loop import PolicyFacts
from phyai_engine.evaluate.condition import Condition, Fault
from phyai_engine.evaluate.faults import wrong_statistics
from phyai_engine.evaluate.figure import svg_of_tasks
from phyai_engine.evaluate.manifest import Manifest, chosen
from phyai_engine.evaluate.provenance import Provenance
from phyai_engine.evaluate.record import EpisodeRecord
from phyai_engine.evaluate.run_folder import IN_PROCESS, Run, RunFolder
from phyai_engine.evaluate.scores import Summary, summarise
from phyai_engine.evaluate.simulators import Setup, play_all, smoke
from phyai_engine.evaluate.table import table
from phyai_engine.host import cores
from phyai_engine.policy import Policy, load_policy
from phyai_engine.runner import BUCKETS
from phyai_engine.weights.checkpoint import model_from
from phyai_engine.whole_files import write_json, write_whole

ROBOT = "sawyer_20hz"
SIMULATORS_MAX = 32


class EvalOptions(Struct, frozen=True, kw_only=True):
    """What the command line says.

    :param manifest: None makes one of ``tasks`` (all where empty), ``episodes`` of each, from ``seed``.
    :param device: ``auto``: as the model file says. :param workers: simulator processes, 0: as many as there are cores
        beside this process' own. :param batch: 0: 8 on a GPU, 1 elsewhere.
    :param films: of so many episodes of each task.
    """

    model: str
    robot: str = ROBOT
    manifest: Path | None = None
    tasks: tuple[str, ...] = ()
    episodes: int = 50
    seed: int = 1
    condition: Condition = Condition()
    device: str = "auto"
    workers: int = 0
    batch: int = 0
    films: int = 0
    out: Path = Path("out/eval")


def eval_command(options: EvalOptions) -> int:
    """Evaluate and show. Returns 0.

    :raises PhyaiError: robot, model, manifest and condition do not fit, or the evaluation broke off.
    """
    console = Console()
    summary = evaluate(options, Console(stderr=True))
    console.print(table(summary))
    console.print(f"records: {options.out / 'episodes.jsonl'}   figure: {options.out / 'figure.svg'}", highlight=False)
    return 0


def evaluate(options: EvalOptions, progress: Console) -> Summary:
    """Everything but the printing. :param progress: where to say what goes on."""
    robot = load_robot(resolve("robots", options.robot))
    manifest = chosen(options.manifest, options.tasks, options.episodes, options.seed)
    config = model_config(options.model, options.condition, options.device)
    progress.print(f"loading {options.model} …", highlight=False)
    policy = load_policy(robot, config, batches=BUCKETS)
    device = device_of(policy.runner.model)
    batch = options.batch or (BUCKETS[-1] if device.startswith("cuda") else 1)
    setup = Setup(
        robot,
        PolicyFacts(policy.spec.horizon, policy.runner.guidance.max_delay),
        options.condition,
        options.out / "films" if options.films else None,
        filmed(manifest, options.films),
    )
    folder = RunFolder(options.out, _run(options, robot, config, policy, manifest, batch), manifest)
    waiting = folder.waiting()
    if waiting:
        policy.warm_up()
        smoke(policy, setup, waiting[0][1])
        progress.print(f"smoke request answered; {len(waiting)} of {len(manifest)} episodes to play", highlight=False)
        workers = options.workers or max(1, min(SIMULATORS_MAX, cores() - 1))
        with _bar(progress, len(waiting)) as bar:
            solved = 0

            def on_record(record: EpisodeRecord) -> None:
                nonlocal solved
                folder.add(record)
                solved += record.success
                bar.update(bar.task_ids[0], advance=1, solved=solved)

            play_all(policy, setup, waiting, workers=workers, batch=batch, on_record=on_record)
    return conclude(options.out)


def conclude(out: Path) -> Summary:
    """Aggregate a folder whose every episode was played; writes ``summary.json`` and ``figure.svg``.

    :raises ConfigError: the counts differ from the manifest.
    """
    summary = summarise(out)
    write_json(out / "summary.json", summary)
    write_whole(out / "figure.svg", svg_of_tasks(summary).encode())
    return summary


def model_config(model: str, condition: Condition, device: str = "auto") -> ModelConfig:
    """The model with what the condition changes. :param device: ``auto``: as the model file says.

    :raises ConfigError: no such model, or it cannot be changed so.
    """
    config = model_from(model)
    changed: dict[str, Any] = {}
    if condition.guidance:
        try:
            changed["rtc"] = msgspec.structs.replace(config.rtc, guidance=condition.guidance)
            changed["rtc"].__post_init__()
        except ValueError as error:
            raise ConfigError(str(error), where="guidance") from None
    if condition.dtype:
        changed["options"] = {**config.options, "dtype": condition.dtype}
    if device != "auto":
        changed["device"] = device
    config = msgspec.structs.replace(config, **changed)
    return wrong_statistics(config) if condition.fault is Fault.WRONG_STATISTICS else config


def filmed(manifest: Manifest, films: int) -> frozenset[int]:
    """Numbers of the first ``films`` episodes of each task."""
    seen: dict[str, int] = {}
    chosen = set()
    for number, episode in enumerate(manifest):
        seen[episode.task] = seen.get(episode.task, 0) + 1
        if seen[episode.task] <= films:
            chosen.add(number)
    return frozenset(chosen)


def _run(
    options: EvalOptions, robot: RobotConfig, config: ModelConfig, policy: Policy, manifest: Manifest, batch: int
) -> Run:
    model = policy.runner.model
    reasons = dict(getattr(getattr(model, "ops", None), "reasons", {}))
    provenance = Provenance.of(options.model, config, policy.note, device_of(model), reasons)
    return Run.of(IN_PROCESS, robot, options.condition, manifest, provenance, batch=batch)


def _bar(console: Console, total: int) -> Progress:
    columns = (
        TextColumn("episode"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("solved {task.fields[solved]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    bar.add_task("episode", total=total, solved=0)
    return bar
