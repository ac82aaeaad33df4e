"""The commands of an engine server: run one, ask how it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phyai_engine.cli_errors import readable_errors


def serve(
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="A yaml, or a shipped name (local, gpu).")],
) -> None:
    """Serve models to many robots until SIGTERM; then finish what is under way and end.

    Prints `ready ENDPOINT` once every model has warmed up. Exit code 0: ended as asked, 2: it cannot serve.
    """
    with readable_errors():
        from phyai_engine.serve.server import serve_command  # noqa: PLC0415 - zmq, numpy

        serve_command(config)


def status(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Of the server, e.g. tcp://127.0.0.1:5599.")],
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A robot's NAME.key_secret; needed where the server has keys.")
    ] = None,
    server_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's server.key.")] = None,
) -> None:
    """Say how a running server does: robots, replicas, latency model, requests by outcome.

    Exit code 0: it answered, 2: it did not.
    """
    with readable_errors():
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        from phyai_engine.errors import ConfigError  # noqa: PLC0415
        from phyai_engine.serve.keys import robot_keys  # noqa: PLC0415
        from phyai_engine.serve.server import server_status  # noqa: PLC0415 - zmq, numpy

        if (key is None) != (server_key is None):
            raise ConfigError("one key is missing", wanted="both --key and --server-key, or neither")
        keys = robot_keys(key, server_key) if key is not None and server_key is not None else None
        table = Table("what", "now")
        for name, value in server_status(endpoint, keys):
            table.add_row(name, value)
        Console().print(table)
