"""The command ``phyai``. Every command imports what it needs when it runs: ``--help`` is fast and needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
) -> None:
    """Run our model on recorded inputs and measure every recorded array against its gate.

    Exit code 0: all within their gates, 1: not, 2: the folder cannot be run.
    """
    with readable_errors():
        from phyai_engine.golden import golden_command  # noqa: PLC0415 - torch

        code = golden_command(str(folder), first_bad)
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


def main() -> None:
    """Entry point of the console script."""
    app()
