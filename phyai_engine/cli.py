"""The command ``phyai``. Every command imports what it needs when it runs: ``--help`` is fast and needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from phyai_engine import __version__
from phyai_engine.errors import ConfigError, PhyaiError

FAILED = 2
"""Exit code of a command that could not do its work; 1 is the answer "no" of one that could."""

# Packages that an installation may do without, and the extra that brings them.
EXTRAS = {"torch": "engine", "safetensors": "engine", "plotly": "report"}

app = typer.Typer(
    help="Drives robots with learned policies in real time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Device(str, Enum):
    """Where a model computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print what a person can mend in red, without a traceback, and end with exit code 2."""
    try:
        yield
        return
    except PhyaiError as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        reason = f"this command needs {error.name}. Run `pip install '.[{extra}]'` in the checkout."
    typer.secho(reason, fg=typer.colors.RED, err=True)
    raise typer.Exit(FAILED)


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
def report(
    record: Annotated[Path, typer.Argument(metavar="RECORD.json", help="A record of a run.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.html", help="Default: beside the record.")
    ] = None,
) -> None:
    """Write the report of a recorded run as one HTML file."""
    with readable_errors():
        from phyai_engine.replay import record as records  # noqa: PLC0415
        from phyai_engine.replay.report import write_report  # noqa: PLC0415 - plotly

        page = out or record.with_suffix(".html")
        if not page.parent.is_dir():
            raise ConfigError("no such folder", where=page.parent, do="Make it, or give another --out.")
        write_report(records.load(record), page)
    typer.echo(f"wrote {page}")


class Dtype(str, Enum):
    """Of a model's matrices."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


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
