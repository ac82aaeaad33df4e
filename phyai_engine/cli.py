"""The command ``phyai``. Every command imports what it needs when it runs: ``--help`` is fast and needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phyai_engine import __version__, cli_fleet, cli_policies, cli_runs, cli_serve
from phyai_engine.cli_choices import Device, Dtype
from phyai_engine.cli_errors import readable_errors

app = typer.Typer(
    help="Drives robots with learned policies in real time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(cli_fleet.keygen)
app.add_typer(cli_fleet.robots, name="robots")
app.command()(cli_fleet.client)
app.command()(cli_serve.serve)
app.command()(cli_serve.status)
app.command()(cli_runs.replay)
app.command()(cli_runs.report)
app.command()(cli_runs.diff)
app.command()(cli_runs.sweep)
app.command("eval")(cli_policies.evaluate)
app.command("rtc-study")(cli_policies.rtc_study)
app.command()(cli_policies.train)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def phyai(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Drives robots with learned policies in real time."""


@app.command()
def golden(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds config.json, *.safetensors and io.npz.")],
    first_bad: Annotated[bool, typer.Option("--first-bad", help="Name only the first array outside its gate.")] = False,
    device: Annotated[Device, typer.Option(help="Gates are for float32 on any of them.")] = Device.CPU,
) -> None:
    """Run our model on recorded inputs and measure every recorded array against its gate.

    Exit code 0: all within their gates, 1: not, 2: the folder cannot be run.
    """
    with readable_errors():
        from phyai_engine.golden import golden_command  # noqa: PLC0415 - torch

        code = golden_command(str(folder), first_bad, device.value)
    raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Say what this machine has, what is missing, and how to mend it.

    Exit code 0: nothing is wrong, 1: something is.
    """
    with readable_errors():
        from phyai_engine.doctor import doctor_command  # noqa: PLC0415

        code = doctor_command()
    raise typer.Exit(code)


@app.command()
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name (pi05, pi0), a yaml, or a checkpoint.")],
    robot: Annotated[
        str, typer.Option("--robot", metavar="ROBOT", help="A shipped name or a yaml. Default: one with three cameras.")
    ] = "",
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the model's.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Runs. Default: 3 on cpu, 200 on cuda.")] = None,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Runs before. Default: 2 on cpu, 10 on cuda.")] = None,
    cameras: Annotated[int | None, typer.Option(min=0, help="Default: all that robot and model have.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Default: all that the model has room for.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of frames, state and noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
) -> None:
    """Time one chunk phase by phase, on synthetic observations.

    Exit code 0: measured, 1: measured, but a chunk was not finite, 2: it cannot be measured.
    """
    with readable_errors():
        from phyai_engine.bench.command import BenchOptions, bench_command  # noqa: PLC0415

        options = BenchOptions(
            model=model,
            robot=robot,
            device=device.value,
            dtype=None if dtype is None else dtype.value,
            n=n,
            warm_up=warm_up,
            cameras=cameras,
            prompt_tokens=prompt_tokens,
            seed=seed,
        )
        code = bench_command(options, out)
    raise typer.Exit(code)


@app.command()
def tune(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Shipped names or yamls. Default: pi05 pi0.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: the accelerator where there is one.")] = Device.AUTO,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.yaml", help="Default: where the selector reads it.")
    ] = None,
) -> None:
    """Time every candidate of every operator at a model's shapes and write this accelerator's profile."""
    with readable_errors():
        from phyai_engine.tune import tune_command  # noqa: PLC0415 - torch

        code = tune_command(models or ["pi05", "pi0"], device.value, out)
    raise typer.Exit(code)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a yaml that names one.")],
    robot: Annotated[str, typer.Option("--robot", metavar="ROBOT", help="Of the synthetic observations.")] = "",
    recording: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a policy node: its observations instead.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Observations.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.npz", help="Default: in the checkpoint's folder.")
    ] = None,
) -> None:
    """Measure the activations that `quant` needs the scales of, and write them beside the weights."""
    with readable_errors():
        from phyai_engine.quant.command import calibrate_command  # noqa: PLC0415 - torch

        code = calibrate_command(model, robot, recording, n, out)
    raise typer.Exit(code)


@app.command()
def hotspots(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name (pi05, pi0) or a yaml.")],
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    top: Annotated[int, typer.Option(min=1, help="Write so many cases.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: out/hotspots/ and the model's name.")
    ] = None,
) -> None:
    """Rank the operator calls of one request by the time they take, and write each as a case for `phyai judge`."""
    with readable_errors():
        from phyai_engine.hotspots import hotspots_command  # noqa: PLC0415 - torch

        code = hotspots_command(model, device.value, top, out or Path("out/hotspots") / Path(model).stem)
    raise typer.Exit(code)


@app.command()
def judge(
    case: Annotated[Path, typer.Argument(metavar="CASE.yaml", help="As `phyai hotspots` writes it.")],
    candidates: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CANDIDATE.py...", help="Files with a function of the operator's name."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole/--alone", help="Also time whole requests with the best.")] = True,
) -> None:
    """Try the shipped candidates and yours for one operator call: equal to the reference, then timed, then compared.

    Exit code 0: one is faster than what is bound, 1: none is, 2: it cannot be judged.
    """
    with readable_errors():
        from phyai_engine.judge import judge_command  # noqa: PLC0415 - torch

        code = judge_command(case, candidates or [], whole=whole)
    raise typer.Exit(code)


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint folder, or a model file that names one.")],
    robot: Annotated[
        str, typer.Option(metavar="ROBOT", help="Also say whether this robot fits: a shipped name or a yaml.")
    ] = "",
    write: Annotated[
        Path | None, typer.Option(metavar="OUT.yaml", help="Write the model file, and beside it OUT_robot.yaml.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds, what is missing, and which files run it.

    Exit code 0: usable, 1: something is missing or does not fit, 2: it cannot be read.
    """
    with readable_errors():
        from phyai_engine.inspection import inspect_command  # noqa: PLC0415

        code = inspect_command(folder, robot, write, as_json)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the console script."""
    app()
