"""A table of evidence: printed, and appended to LOG.md when asked with --log."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

LOG = Path(__file__).resolve().parents[2] / "LOG.md"


def host() -> str:
    """Processor and cores in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {os.cpu_count()} cores, {os.environ.get('ROS_DISTRO', 'ros')}, Python {platform.python_version()}"


def options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse with the flag every proof has."""
    parser.add_argument("--log", action="store_true", help="append the table to LOG.md")
    return parser.parse_args()


def fake_model(rtc: Mapping[str, Any] | None = None, **options: float) -> str:
    """Path of a model file: the fake model with these options and two cameras.

    :param rtc: keys of the file's ``rtc``.
    """
    given = {"action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], **options}
    content = {"family": "fake", "normalisation": {"kind": "limits"}, "options": given, "rtc": dict(rtc or {})}
    path = Path(tempfile.mkdtemp()) / "model.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def conclude(title: str, rows: Sequence[tuple[str, str, bool | None]], *, log: bool) -> int:
    """Print what was measured; (what, figure, held or None where nothing is claimed). Returns the exit code."""
    words = {True: "yes", False: "NO", None: ""}
    show(title, ("what", "measured", "held"), [(w, f, words[h]) for w, f, h in rows], log=log)
    return 0 if all(held is not False for _, _, held in rows) else 1


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, log: bool) -> None:
    """Print a table; append it to LOG.md if asked."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if not log:
        return
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=LOG.parent, check=False).stdout.strip()
    lines = [
        f"\n### {datetime.date.today()} {title}",
        f"`{' '.join(['python', *sys.argv])}` at {commit}; {host()}\n",
        _markdown(*columns),
        "|---" * len(columns) + "|",
        *(_markdown(*row) for row in rows),
    ]
    with LOG.open("a", encoding="utf-8") as stream:
        stream.write("\n".join(lines) + "\n")


def _markdown(*cells: str) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
