"""The commands of a fleet: keys, the list of robots, a robot's view of a server. No torch, no ROS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phyai_engine.cli_errors import readable_errors

Keys = Annotated[Path, typer.Option("--keys", metavar="FOLDER", help="The server's keys, as `phyai keygen` made them.")]

robots = typer.Typer(
    help="Say which robots a server lets in. It follows at once, without a restart.", no_args_is_help=True
)


def keygen(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Is made where it is missing.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="server, or on a robot the robot's name.")] = "server",
) -> None:
    """Make a pair of keys: NAME.key, which everybody may see, and NAME.key_secret, which stays here."""
    with readable_errors():
        from phyai_engine.serve.keys import make_pair  # noqa: PLC0415

        typer.echo(f"{folder / name}.key: {make_pair(folder, name)}")


@robots.command("add")
def robots_add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The robot id it may use.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="Its NAME.key file, or the 40 characters in it.")],
    keys: Keys,
) -> None:
    """Let a robot in."""
    with readable_errors():
        from phyai_engine.serve.keys import add_robot  # noqa: PLC0415

        typer.echo(f"{name} may connect: {add_robot(keys, name, key)}")


@robots.command("revoke")
def robots_revoke(name: Annotated[str, typer.Argument(metavar="NAME")], keys: Keys) -> None:
    """Shut a robot out; its session ends within a second."""
    with readable_errors():
        from phyai_engine.serve.keys import revoke_robot  # noqa: PLC0415

        revoke_robot(keys, name)
        typer.echo(f"{name} may not connect any more")


@robots.command("list")
def robots_list(keys: Keys) -> None:
    """Print who may connect."""
    with readable_errors():
        from phyai_engine.serve.keys import ROBOTS, listed  # noqa: PLC0415

        for name, key in listed(keys / ROBOTS).items():
            typer.echo(f"{name}  {key}")


def client(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Of the server, e.g. tcp://gpu-server:5555.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name on the server.")],
    robot: Annotated[str, typer.Option("--robot", metavar="ROBOT", help="A shipped name or a yaml.")],
    robot_id: Annotated[
        str, typer.Option(metavar="ID", help="Default: the key's name, else the robot file's id.")
    ] = "",
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This robot's NAME.key_secret; needed beyond this host.")
    ] = None,
    server_key: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's server.key.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Requests.")] = 100,
    hz: Annotated[float, typer.Option(min=0.0, help="Their rate; 0: the next when the last is answered.")] = 5.0,
    deadline_ms: Annotated[float, typer.Option(min=1.0, help="That each request has.")] = 1000.0,
    width: Annotated[int, typer.Option(min=8, max=4096, help="Of the made-up camera frames.")] = 640,
    height: Annotated[int, typer.Option(min=8, max=4096)] = 480,
    jpeg: Annotated[int, typer.Option(min=0, max=95, help="Quality of JPEG; 0: raw images.")] = 0,
) -> None:
    """Ask a server as a robot would, with made-up observations, and say where the time goes.

    Exit code 0: every request was answered in time, 1: not all were, 2: the server does not accept this robot.
    """
    with readable_errors():
        from phyai_engine.serve.client_command import ClientOptions, client_command  # noqa: PLC0415 - numpy, zmq

        options = ClientOptions(
            endpoint=endpoint,
            model=model,
            robot=robot,
            robot_id=robot_id,
            key=key,
            server_key=server_key,
            n=n,
            hz=hz,
            deadline_ms=deadline_ms,
            frame=(height, width, 3),
            jpeg_quality=jpeg,
        )
        code = client_command(options)
    raise typer.Exit(code)
