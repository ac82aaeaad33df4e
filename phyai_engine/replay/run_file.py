"""``run.json`` of a recording: what ran, so that the recording alone is enough to run it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phyai_engine.errors import ConfigError
from phyai_engine.whole_files import write_json

NAME = "run.json"
VERSION = 1


class RunFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a recorder writes beside the bag it fills, when it starts.

    :param robot: the robot file's whole text. :param model: the model file's whole text.
    :param model_name: as it was asked for: a shipped name or a path.
    :param parameters: of the node, by name, those left at their default too.
    :param package: version of this package. :param started: ISO 8601. :param host: processor and cores in words.
    """

    version: int = VERSION
    robot: str
    model: str
    model_name: str
    parameters: Mapping[str, Any] = {}
    package: str = ""
    started: str = ""
    host: str = ""

    def save(self, folder: Path) -> None:
        """Write ``run.json`` into ``folder``, whole or not at all."""
        write_json(folder / NAME, self)


def load_run(folder: Path) -> RunFile:
    """Read ``run.json`` of a recording.

    :raises ConfigError: no such file, not JSON, another version, or fields that do not fit.
    """
    path = folder / NAME
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            "no recording",
            got=error.strerror,
            wanted=f"a folder with a bag and {NAME}",
            where=path,
            do="Record with the node's parameter `record`.",
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{NAME} is not whole JSON", got=error, where=path) from error
    found = raw.get("version") if isinstance(raw, dict) else None
    if found != VERSION:
        got = "no version" if found is None else f"version {found}"
        raise ConfigError(f"not a {NAME} of this version", got=got, wanted=f"version {VERSION}", where=path)
    try:
        return msgspec.convert(raw, RunFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{NAME} does not fit its form", got=error, where=path) from error
