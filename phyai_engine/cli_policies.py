"""The commands that make and judge policies: train one, evaluate one in closed loop, compare the handoff methods."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from phyai_engine.cli_choices import Device, Dtype, When
from phyai_engine.cli_errors import readable_errors

EVAL, POLICY = Path("out/eval"), Path("out/policy")


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A checkpoint folder, a model file, a shipped name.")
    ] = "metaworld",
    robot: Annotated[str, typer.Option(metavar="ROBOT", help="A shipped name or a yaml.")] = "sawyer_20hz",
    manifest: Annotated[Path | None, typer.Option(metavar="FILE", help="Episodes; else they are made.")] = None,
    tasks: Annotated[str, typer.Option(metavar="A,B", help="Default: all of the simulator's tasks.")] = "",
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Of each task.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=20, help="Of scenes and noise.")] = 1,
    schedule: Annotated[When, typer.Option(help="When the next inference starts.")] = When.SYNC,
    guidance: Annotated[str, typer.Option(help="Of rtc, as in a model file; default: the model's own.")] = "",
    delay_ms: Annotated[float, typer.Option(min=0.0, help="From observation to chunk, in whole control ticks.")] = 0.0,
    execution_horizon: Annotated[int, typer.Option(min=0, help="Steps of a chunk to execute; 0: half of it.")] = 0,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse chunks beyond the limits; else clip.")] = False,
    fault: Annotated[str, typer.Option(help="Wire something wrong, such as swapped_cameras.")] = "none",
    seconds: Annotated[float, typer.Option(min=0.1, help="Robot time after which an episode has failed.")] = 15.0,
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the model's.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Simulator processes; 0: the cores but one.")] = 0,
    batch: Annotated[int, typer.Option(min=0, max=8, help="Requests computed at once; 0: 8 on a GPU, else 1.")] = 0,
    films: Annotated[int, typer.Option(min=0, help="GIFs of so many episodes of each task.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="An interrupted run goes on there.")] = EVAL,
) -> None:
    """Play episodes in the simulator, without ROS, and say how many are solved.

    The node's own control loop drives the robot on a virtual clock: the delay is stated, this machine's speed is not
    in the result.
    """
    with readable_errors():
        from phyai_engine.evaluate.command import EvalOptions, eval_command  # noqa: PLC0415
        from phyai_engine.evaluate.condition import Condition, wired  # noqa: PLC0415
        from phyai_engine.types import Schedule  # noqa: PLC0415 - numpy

        condition = Condition(
            schedule=Schedule(schedule.value),
            guidance=guidance,
            delay_ms=delay_ms,
            execution_horizon=execution_horizon,
            clamp=not refuse,
            dtype="" if dtype is None else dtype.value,
            fault=wired(fault),
            seconds_max=seconds,
        )
        options = EvalOptions(
            model=model,
            robot=robot,
            manifest=manifest,
            tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
            episodes=episodes,
            seed=seed,
            condition=condition,
            device=device.value,
            workers=workers,
            batch=batch,
            films=films,
            out=out,
        )
        code = eval_command(options)
    raise typer.Exit(code)


def rtc_study(
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Of each method at each delay.")] = 512,
    methods: Annotated[str, typer.Option(metavar="A,B", help="Default: all; names as in the table.")] = "",
    delays: Annotated[str, typer.Option(metavar="0,1", help="Inference delays in steps. Default: 0 to H/2.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the episodes.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Also draw success and jumps.")] = None,
) -> None:
    """Compare the handoff methods on a small task with two ways out, against the inference delay.

    Trains its policy first (minutes on a CPU; kept in the cache folder).
    """
    with readable_errors():
        from phyai_engine.rtc_study.command import parse_options, study_command  # noqa: PLC0415 - torch

        study_command(parse_options(methods, delays, episodes=episodes, seed=seed), out, plot)


def train(
    what: Annotated[Literal["demo"], typer.Argument(help="demo: a small pi0.5 for the simulated scenes.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The checkpoint folder.")] = POLICY,
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="Demonstrations and the state to resume from; delete it to begin anew.")
    ] = Path("out/train"),
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Begin with this checkpoint: it plays, and is corrected."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Every part once with a tiny network; it learns nothing.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=0, help="Simulators side by side. Default: all cores but two.", show_default=False)
    ] = 0,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of the recipe (phyai_engine/train/recipe.py)."),
    ] = None,
) -> None:
    """Train a policy end to end: demonstrations, flow matching, corrections of its own play, a check in closed loop.

    Needs the extras engine and sim, and for the real one an accelerator.
    """
    with readable_errors():
        from phyai_engine.train.command import recipe_with, train_command  # noqa: PLC0415 - torch
        from phyai_engine.train.recipe import SMOKE, Recipe  # noqa: PLC0415

        train_command(recipe_with(SMOKE if smoke else Recipe(), change or []), out, work, processes or None, start)
