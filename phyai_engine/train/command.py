"""``phyai train demo``: collect, fit, correct, fit again, write the checkpoint folder, check it in the simulator."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phyai_engine.config import RobotConfig, convert, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.models.pi import PiModel
from phyai_engine.runner import Runner
from phyai_engine.sim.tasks import TASKS, other_task
from phyai_engine.train import checkpoint, workers
from phyai_engine.train.collect import PHRASES
from phyai_engine.train.dataset import Dataset, read_steps
from phyai_engine.train.fit import Trainer
from phyai_engine.train.recipe import Recipe
from phyai_engine.weights.checkpoint import model_from

_STATISTICS = "statistics.json"
_CHECK_SEED = 900_000_000  # far from those of the demonstrations


@dataclass
class Run:
    """One training under way.

    :param folder: of the checkpoint that is made. :param work: of demonstrations and of the state to resume from.
    :param start: a checkpoint folder to begin with; it plays half of the first round's episodes.
    """

    recipe: Recipe
    folder: Path
    work: Path
    processes: int
    console: Console
    start: Path | None = None

    def __post_init__(self) -> None:
        self.robot: RobotConfig = load_robot(resolve("robots", self.recipe.robot))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.work.mkdir(parents=True, exist_ok=True)
        self.state = self.work / "state.pt"

    def train(self) -> None:
        """All rounds; a run that was cut short goes on with the round it was in."""
        recipe, console = self.recipe, self.console
        self._refuse_another()
        trainer = Trainer(recipe, self.device)
        done = len(list(self.work.glob("round*.done")))
        if done:
            trainer.load(self.state)
            console.print(f"resumed after {done} rounds, {trainer.step} steps")
        else:
            self._begin(trainer)
        for number in range(done, recipe.rounds):
            began = time.monotonic()
            self._collect(number)
            collected = time.monotonic()
            dataset, stats = self._dataset(number)
            loaded = time.monotonic()
            console.print(
                f"round {number}: {len(dataset)} observations; collected {collected - began:.0f} s, "
                f"read {loaded - collected:.0f} s"
            )
            self._fit(trainer, dataset)
            del dataset
            sha = checkpoint.write(self.folder, trainer.export(), recipe.model, stats, recipe.max_delay)
            trainer.save(self.state)
            (self.work / f"round{number}.done").touch()
            console.print(
                f"round {number}: {trainer.step} steps, trained {time.monotonic() - loaded:.0f} s, SHA-256 {sha}"
            )

    def check(self, episodes: int) -> Table:
        """Play the folder's policy: each task, and then the other one of the scene."""
        trials = [
            workers.Trial(name, _CHECK_SEED + i, other_task(task).name, self.recipe.check_steps)
            for i in range(episodes)
            for name, task in TASKS.items()
        ]
        solved, then, steps = Counter[str](), Counter[str](), Counter[str]()

        def count(verdict: workers.Verdict) -> None:
            solved[verdict.trial.task] += verdict.solved
            then[verdict.trial.task] += verdict.then_solved
            steps[verdict.trial.task] += verdict.steps

        jobs = [trials[i :: self.processes] for i in range(self.processes)]
        workers.run(self.robot, [job for job in jobs if job], count, self._policy())
        table = Table(
            "task", "solved", "then the other one", "steps", title=f"{episodes} episodes each, sync, whole chunks"
        )
        for name in TASKS:
            table.add_row(name, f"{solved[name]}", f"{then[name]}", f"{steps[name] / episodes:.0f}")
        table.add_row("all", f"{sum(solved.values())} of {len(trials)}", f"{sum(then.values())}", "")
        return table

    def _refuse_another(self) -> None:
        """What lies in ``work`` must be of this recipe; how long it goes on may differ."""
        kept = self.work / "recipe.json"
        if kept.is_file():
            old = msgspec.json.decode(kept.read_bytes(), type=Recipe)
            for key in ("robot", "model", "max_delay", "seed"):
                if (was := getattr(old, key)) != (now := getattr(self.recipe, key)):
                    raise ConfigError(
                        f"the work folder belongs to another recipe: {key} differs",
                        got=now,
                        wanted=was,
                        where=self.work,
                        do="Delete the folder, or name another one with --work.",
                    )
        kept.write_bytes(msgspec.json.format(msgspec.json.encode(self.recipe)))

    def _begin(self, trainer: Trainer) -> None:
        if self.start is None:
            checkpoint.write_tokenizer(self.folder / checkpoint.TOKENIZER, PHRASES, self.recipe.model.vocab)
            return
        if self.folder.resolve() != self.start.resolve():
            shutil.copytree(self.start, self.folder, dirs_exist_ok=True)
        (self.work / _STATISTICS).write_bytes(msgspec.json.encode(checkpoint.read_statistics(self.start)))
        trainer.begin_with(checkpoint.read_weights(self.start))

    def _collect(self, number: int) -> None:
        """Files round<N>-<process> below ``work``; what a run collected that was cut short later is not made again."""
        recipe, whole = self.recipe, self.work / f"round{number}.collected"
        if whole.exists():
            return
        for path in self.work.glob(f"round{number}-*"):  # of a collection that was cut short, perhaps by more processes
            path.unlink()
        episodes = recipe.corrections if number else recipe.episodes
        policy = self._policy() if number or self.start else None
        seeds = [recipe.seed * 1_000_000 + number * 100_000 + i for i in range(episodes)]
        jobs = [
            workers.Episodes(
                str(self.work / f"round{number}-{i}"),
                seeds[i :: self.processes],
                recipe.model.image_size,
                60.0 * recipe.collect_minutes,
                recipe.stages,
                corrected=policy is not None and (number > 0 or i % 2 == 0),
            )
            for i in range(min(self.processes, episodes))
        ]
        with _progress(self.console) as progress:
            bar = progress.add_task("demonstrations" if number == 0 else "corrections", total=episodes)
            workers.run(self.robot, jobs, lambda _: progress.advance(bar), policy)
        whole.touch()

    def _dataset(self, number: int) -> tuple[Dataset, checkpoint.Statistics]:
        """Of all rounds so far. The statistics are the first round's: the network has learned in them."""
        files = sorted(path.with_suffix("") for n in range(number + 1) for path in self.work.glob(f"round{n}-*.npz"))
        steps = read_steps(files)
        kept = self.work / _STATISTICS
        if not kept.is_file():
            learned = steps.known > 0
            kept.write_bytes(msgspec.json.encode(checkpoint.statistics(steps.states[learned], steps.actions[learned])))
        stats = msgspec.json.decode(kept.read_bytes())
        return Dataset(files, steps, self.recipe, stats, self.folder / checkpoint.TOKENIZER, self.device), stats

    def _fit(self, trainer: Trainer, dataset: Dataset) -> None:
        with _progress(self.console) as progress:
            bar = progress.add_task("training", total=1.0)
            printed = time.monotonic()

            def report(step: int, loss: float, share: float) -> None:
                nonlocal printed
                progress.update(bar, completed=share, description=f"training, step {step}, loss {loss:.4f}")
                if not self.console.is_terminal and time.monotonic() - printed > 20:
                    printed = time.monotonic()
                    self.console.print(f"step {step}, loss {loss:.4f}, {share:.0%}")

            trainer.round(dataset, self.recipe.steps, self.recipe.minutes, report)

    def _policy(self) -> tuple[Any, Runner]:
        model = model_from(self.folder)
        return model, Runner(PiModel.load(model), buckets=(1, 4, 16))


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def train_command(
    recipe: Recipe, folder: Path, work: Path, processes: int | None = None, start: Path | None = None
) -> None:
    """``phyai train demo``."""
    console = Console()
    run = Run(recipe, folder, work, processes or max(1, (os.cpu_count() or 1) - 2), console, start)
    run.train()
    if recipe.check_episodes:
        console.print(run.check(recipe.check_episodes))
    console.print(f"checkpoint: {folder} (use it as a model: `phyai inspect {folder}`)")


def recipe_with(base: Recipe, changes: Sequence[str]) -> Recipe:
    """:param changes: ``key=value``, values as JSON. :raises ConfigError: an unknown key or a wrong value."""
    given = {**msgspec.to_builtins(base)}
    for text in changes:
        key, _, value = text.partition("=")
        try:
            given[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            given[key] = value
    return convert(given, Recipe, where="--set")
