"""Files that are there whole or not at all: no reader, and no run that goes on later, meets half of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


def write_whole(path: Path, content: bytes) -> None:
    """Write a file. :raises OSError: as the system says; what was there before stays."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def write_json(path: Path, value: Any) -> None:
    """Write a struct or plain values as indented JSON; see :func:`write_whole`."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
