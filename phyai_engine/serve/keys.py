"""CURVE keys as files, and the list of robots that a server lets in.

    KEYS/server.key           public: every robot has a copy
    KEYS/server.key_secret    the server's alone
    KEYS/robots/NAME.key      public key of a robot that may connect; NAME is the robot id it may use
    NAME.key, NAME.key_secret on the robot: made there, only NAME.key ever leaves it

The files are pyzmq's certificates (zmq.auth.certs), so czmq's tools read them too.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq.auth

from phyai_engine.errors import ConfigError

SERVER = "server"
ROBOTS = "robots"
PUBLIC, SECRET = ".key", ".key_secret"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # z85 of 32 bytes


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """What a server shows and keeps. :param robots: folder of the robots that may connect."""

    public: str
    secret: bytes = field(repr=False)
    robots: Path


@dataclass(frozen=True, slots=True)
class RobotKeys:
    """What a robot shows, keeps, and expects of its server."""

    public: str
    server: str
    secret: bytes = field(repr=False)


def make_pair(folder: Path, name: str) -> str:
    """Write NAME.key and NAME.key_secret (mode 0600) into ``folder``, which is made where it is missing.

    :returns: the public key, 40 characters.
    :raises ConfigError: a wrong name, a file of that name exists, or the folder cannot be written.
    """
    check_name(name)
    paths = folder / f"{name}{PUBLIC}", folder / f"{name}{SECRET}"
    for path in paths:
        if path.exists():
            raise ConfigError("there is a key already", where=path, do="Whoever has the old one would be shut out.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # pyzmq writes with the umask: in a folder of mode 0700 nobody reads the secret before its mode is set.
        made = Path(tempfile.mkdtemp(dir=folder, prefix=".new-"))
        try:
            for written, path in zip(zmq.auth.create_certificates(made, name), paths, strict=True):
                os.chmod(written, 0o600 if path.suffix == SECRET else 0o644)
                os.rename(written, path)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write the keys: {error.strerror}", where=folder) from None
    return public_key(paths[0])


def public_key(path: Path) -> str:
    """The 40 characters of a key file.

    :raises ConfigError: it cannot be read or holds no key.
    """
    return _load(path)[0]


def server_keys(folder: Path) -> ServerKeys:
    """The server's pair, and where its robots stand.

    :raises ConfigError: there is none, or its secret is readable by others.
    """
    public, secret = _pair(folder / f"{SERVER}{SECRET}", f"Run `phyai keygen {folder}`.")
    return ServerKeys(public, secret, folder / ROBOTS)


def robot_keys(secret_file: Path, server_file: Path) -> RobotKeys:
    """A robot's own pair and the public key of its server.

    :raises ConfigError: a file is missing or holds no key, or the secret is readable by others.
    """
    public, secret = _pair(secret_file, "Run `phyai keygen FOLDER NAME` on the robot.")
    return RobotKeys(public, public_key(server_file), secret)


def key_pair(key: Path | None, server_key: Path | None) -> RobotKeys | None:
    """Both files, or none.

    :raises ConfigError: only one is given, or one cannot be used.
    """
    if key is None and server_key is None:
        return None
    if key is None or server_key is None:
        raise ConfigError("one of two key files is missing", wanted="the robot's secret and the server's public key")
    return robot_keys(key, server_key)


def key_name(key: Path | None) -> str:
    """The robot that a key file is of; "" without one."""
    return "" if key is None else key.name.removesuffix(SECRET)


def add_robot(folder: Path, name: str, key: str) -> Path:
    """Let a robot in: from now on, without a restart of the server.

    :param folder: the server's keys. :param key: a key file, or its 40 characters.
    :raises ConfigError: a wrong name or key, the name has another key, or another robot has this key.
    """
    check_name(name)
    public = key if _KEY.fullmatch(key) else public_key(Path(key))
    robots = folder / ROBOTS
    for other, known in listed(robots).items():
        if other == name and known != public:
            raise ConfigError(
                f"robot {name} has another key", where=robots, do=f"Run `phyai robots revoke {name}` first."
            )
        if other != name and known == public:
            raise ConfigError("another robot has this key", got=other, where=robots, do="Make a pair for each robot.")
    path = robots / f"{name}{PUBLIC}"
    try:
        robots.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = robots / f".{name}.part"
        part.write_text(f'curve\n    public-key = "{public}"\n', encoding="ascii")
        part.replace(path)  # whole or not at all: a server may read it now
    except OSError as error:
        raise ConfigError(f"cannot write the list of robots: {error.strerror}", where=robots) from None
    return path


def revoke_robot(folder: Path, name: str) -> None:
    """Shut a robot out: its session ends within seconds and it cannot connect again.

    :raises ConfigError: no such robot.
    """
    check_name(name)
    path = folder / ROBOTS / f"{name}{PUBLIC}"
    try:
        path.unlink()
    except FileNotFoundError:
        known = ", ".join(listed(folder / ROBOTS)) or "nobody"
        raise ConfigError(f"no robot {name}", where=path.parent, wanted=f"one of {known}") from None
    except OSError as error:
        raise ConfigError(f"cannot change the list of robots: {error.strerror}", where=path) from None


def listed(robots: Path) -> dict[str, str]:
    """Robot name -> public key, by name. A folder that does not exist lists nobody.

    :raises ConfigError: a file in it is no key.
    """
    if not robots.is_dir():
        return {}
    return {path.name.removesuffix(PUBLIC): public_key(path) for path in sorted(robots.glob(f"*{PUBLIC}"))}


def check_name(name: str) -> None:
    """:raises ConfigError: ``name`` cannot be a robot's: it names a file and stands in logs."""
    if not _NAME.fullmatch(name):
        wanted = "letters, digits, . _ -, at most 64, the first a letter or digit"
        raise ConfigError("not a robot's name", got=repr(name), wanted=wanted)


def _pair(path: Path, do: str) -> tuple[str, bytes]:
    if not path.is_file():
        raise ConfigError("there is no secret key", where=path, do=do)
    if path.stat().st_mode & 0o077:
        raise ConfigError("others can read the secret key", where=path, do=f"Run `chmod 600 {path}`.")
    public, secret = _load(path)
    if secret is None:
        raise ConfigError("the file holds a public key only", where=path, wanted=f"a file that ends in {SECRET}")
    return public, secret


def _load(path: Path) -> tuple[str, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError):
        raise ConfigError("this is no key file", where=path, wanted="one that `phyai keygen` made") from None
    text = public.decode("ascii", errors="replace")
    if not _KEY.fullmatch(text):  # the text itself is not repeated: it may be a secret in the wrong place
        raise ConfigError("the public key is malformed", where=path, wanted="40 characters")
    return text, secret
