"""How the commands of ``phyai`` end when they cannot do their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from phyai_engine.errors import PhyaiError

FAILED = 2
"""Exit code of a command that could not do its work; 1 is the answer "no" of one that could."""

# Packages that an installation may do without, and the extra that brings them.
EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "sentencepiece": "engine",
    "plotly": "report",
    "rosbags": "replay",
}


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
