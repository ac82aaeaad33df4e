"""``phyai rtc-study``: train or load the policy, play every cell, show."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from msgspec import Struct
from rich.console import Console

from phyai_engine.config import cache_dir
from phyai_engine.errors import ConfigError, EngineError
from phyai_engine.rtc_study.figure import svg
from phyai_engine.rtc_study.net import ChunkNet, Recipe, trained_net
from phyai_engine.rtc_study.play import play
from phyai_engine.rtc_study.result import Study, claims, percent
from phyai_engine.rtc_study.sampling import STEPS, Head, Method
from phyai_engine.rtc_study.scores import Cell, score
from phyai_engine.rtc_study.table import table
from phyai_engine.rtc_study.task import HORIZON

GOOD = 0.9  # success of `sync` at d = 1 from which differences between methods mean something
PROBE_EPISODES, PROBE_SEED = 512, 2  # other episodes than those of the default seed


class StudyOptions(Struct, frozen=True, kw_only=True):
    """What the command line says. :param delays: d, each 0..H/2. :param seed: of the episodes that are reported."""

    methods: tuple[Method, ...] = tuple(Method)
    delays: tuple[int, ...] = tuple(range(HORIZON // 2 + 1))
    episodes: int = 512
    seed: int = 1
    recipe: Recipe = Recipe()


def parse_options(methods: str, delays: str, *, episodes: int, seed: int) -> StudyOptions:
    """From the command line. :param methods, delays: separated by commas; empty takes all.

    :raises ConfigError: no such method, or not a number.
    """
    known = [method.value for method in Method]
    names = [name.strip() for name in methods.split(",") if name.strip()] or known
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("no such method", got=", ".join(unknown), wanted=", ".join(known))
    given = [delay.strip() for delay in delays.split(",") if delay.strip()]
    if wrong := [delay for delay in given if not delay.isdecimal()]:
        raise ConfigError("not a delay in steps", got=", ".join(wrong), wanted="whole numbers, as in 0,2,4")
    steps = tuple(sorted({int(delay) for delay in given})) or StudyOptions().delays
    return StudyOptions(
        methods=tuple(m for m in Method if m.value in names), delays=steps, episodes=episodes, seed=seed
    )


def study_command(options: StudyOptions, out: Path | None = None, plot: Path | None = None) -> None:
    """Play the study, write what was asked for, print the table.

    :raises ConfigError: an option is out of range, or there is no such folder.
    :raises EngineError: the policy could not be trained well enough.
    """
    for path in (out, plot):
        if path is not None and not path.parent.is_dir():
            raise ConfigError("no such folder", where=path.parent, do="Make it, or give another path.")
    study = run_study(options, Console(stderr=True))
    console = Console()
    console.print(table(study))
    for what, figure, held in claims(study):
        console.print(f"{'yes' if held else 'NO '}  {what}: {figure}", style=None if held else "red", highlight=False)
    try:
        if out is not None:
            study.save(out)
        if plot is not None:
            plot.write_text(svg(study), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write: {error.strerror}", where=error.filename) from None


def run_study(options: StudyOptions, progress: Console) -> Study:
    """Everything but the printing. :param progress: where to say what goes on."""
    wrong = [d for d in options.delays if not 0 <= d <= HORIZON // 2]
    if wrong or not options.delays or not options.methods or options.episodes < 1:
        raise ConfigError(
            "no such study",
            got=f"delays {list(options.delays)}, {len(options.methods)} methods, {options.episodes} episodes",
            wanted=f"delays 0..{HORIZON // 2} (d <= s <= H - d with H = {HORIZON}), a method and an episode at least",
        )
    began = time.perf_counter()
    head = Head(policy_net(options.recipe, progress))
    trained = time.perf_counter()
    cells = list(_cells(options, head, progress))
    return Study(
        recipe=options.recipe,
        horizon=HORIZON,
        denoising_steps=STEPS,
        seed=options.seed,
        host=f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}",
        train_s=round(trained - began, 1),
        play_s=round(time.perf_counter() - trained, 1),
        cells=tuple(cells),
    )


def policy_net(recipe: Recipe, progress: Console) -> ChunkNet:
    """The cached policy, or a new one.

    :raises EngineError: it does not learn.
    """

    def good(net: ChunkNet) -> bool:
        played = play(Head(net), recipe.task, Method.SYNC, 1, episodes=PROBE_EPISODES, seed=PROBE_SEED)
        cell = score(Method.SYNC.value, played, recipe.task.dt_s)
        progress.print(f"sync at d = 1: {percent(cell)}, wanted more than {GOOD:.0%}", highlight=False)
        return cell.success.share > GOOD

    folder = cache_dir() / "rtc_study"
    progress.print(f"policy: from {folder}, or trained in some minutes …", highlight=False)
    net = trained_net(recipe, folder, good)
    if net is None:
        raise EngineError(
            "the policy did not learn the task", wanted=f"sync at d = 1 above {GOOD:.0%}", do="Change the recipe."
        )
    return net


def _cells(options: StudyOptions, head: Head, progress: Console) -> Iterable[Cell]:
    for method in options.methods:
        for delay in options.delays:
            began = time.perf_counter()
            played = play(head, options.recipe.task, method, delay, episodes=options.episodes, seed=options.seed)
            cell = score(method.value, played, options.recipe.task.dt_s)
            seconds = time.perf_counter() - began
            progress.print(f"{method.value:18} d = {delay}: {percent(cell)}, {seconds:.1f} s", highlight=False)
            yield cell
