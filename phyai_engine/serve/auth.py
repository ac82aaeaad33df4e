"""Who may talk to an engine server, over which addresses, and how much.

Beyond this host every connection is encrypted and authenticated both ways (CurveZMQ): a server proves its key to the
robot, the robot's key must be on the server's list (ZAP, RFC 27). Robot names and addresses are logged; keys and
images never are.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from pathlib import Path

import zmq
from msgspec import Struct
from zmq.auth.thread import ThreadAuthenticator

from phyai_engine.errors import ConfigError
from phyai_engine.serve.keys import RobotKeys, ServerKeys, listed

_LOOK_S = 0.5  # between two looks at the list of robots
_DOMAIN = "fleet"
_log = logging.getLogger(__name__)
_quiet = logging.getLogger(f"{__name__}.zap")  # pyzmq's authenticator: at DEBUG it writes every key
_quiet.setLevel(logging.ERROR)


def is_local(endpoint: str) -> bool:
    """True where an address cannot be reached from another host. A name other than localhost may be anybody's."""
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        return scheme in ("ipc", "inproc")
    host = place.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(endpoint: str, keys: Path | None) -> None:
    """:raises ConfigError: other hosts would reach a server that asks nobody for a key."""
    if keys is None and not is_local(endpoint):
        raise ConfigError(
            "this address is open to other hosts, and there are no keys",
            got=endpoint,
            wanted="an address of this host (tcp://127.0.0.1:..., ipc://...), or a folder of keys",
            do="Run `phyai keygen FOLDER`, add robots, and name the folder.",
        )


def check_connect(endpoint: str, keys: RobotKeys | None) -> None:
    """:raises ConfigError: what the robot sees would cross the network in the clear."""
    if keys is None and not is_local(endpoint):
        raise ConfigError(
            "the engine server is on another host, and there are no keys",
            got=endpoint,
            wanted="this robot's secret key and the server's public key",
            do="Run `phyai keygen FOLDER NAME` here and `phyai robots add NAME` on the server.",
        )


def secure_client(socket: zmq.Socket[bytes], keys: RobotKeys) -> None:
    """Give a socket its keys, before it connects."""
    socket.curve_serverkey = keys.server.encode("ascii")
    socket.curve_publickey = keys.public.encode("ascii")
    socket.curve_secretkey = keys.secret


class RobotList:
    """The robots that may connect: public key -> name. Follows the folder; for any thread.

    A folder that cannot be read lets nobody in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._seen: object = None
        self._look_s = -1.0
        self._look(now_s=time.monotonic())

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's question for each new connection: may this key (z85) enter?"""
        with self._lock:
            self._look(now_s=time.monotonic())
            return key.decode("ascii", errors="replace") in self._names

    def name_of(self, key: str) -> str | None:
        """The robot of a public key; None for one that was revoked. Cheap: it looks at the folder twice a second."""
        with self._lock:
            if (now_s := time.monotonic()) >= self._look_s:
                self._look(now_s)
            return self._names.get(key)

    def _look(self, now_s: float) -> None:
        self._look_s = now_s + _LOOK_S
        try:
            found = [(f.name, f.stat()) for f in os.scandir(self._folder)] if self._folder.is_dir() else []
            seen = sorted((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found)
            if seen == self._seen:
                return
            names = {key: name for name, key in listed(self._folder).items()}
        except (ConfigError, OSError) as error:
            _log.error("nobody may connect: the list of robots cannot be read: %s", error)
            self._names, self._seen = {}, None
            return
        _log.info("%d robots may connect: %s", len(names), ", ".join(sorted(names.values())))
        self._names, self._seen = names, seen


class Gate:
    """A server's door: one per context, made before the first socket binds.

    :param context: of the sockets it guards.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self.robots = RobotList(keys.robots)
        self._secret = keys.secret
        self._zap = ThreadAuthenticator(context, log=_quiet)
        self._zap.start()
        self._zap.configure_curve_callback(_DOMAIN, self.robots)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Ask everybody who connects to ``socket`` for a key. Before it binds."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.zap_domain = _DOMAIN.encode("ascii")

    def robot_of(self, frame: zmq.Frame) -> str | None:
        """Name of the robot whose connection a frame came over; None once it was revoked.

        A handshake happened once: asking at every message is what makes a revocation end a session.
        """
        return self.robots.name_of(str(frame.get("User-Id")))

    def close(self) -> None:
        """End the thread that answers. Idempotent."""
        self._zap.stop()


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one robot may send.

    :param messages_hz: messages per second, of any kind. :param bytes_per_s: bytes per second.
    :param message_bytes: of one message, all frames.
    """

    messages_hz: float = 200.0
    bytes_per_s: float = 200e6
    message_bytes: int = 64 << 20


class Meter:
    """One robot's use of its limits: two buckets that hold a second's worth.

    A message that is refused takes nothing from them, so that a robot above its rate is served at its rate.
    """

    def __init__(self, limits: Limits, now_s: float) -> None:
        self._limits, self._then_s = limits, now_s
        self._messages, self._bytes = limits.messages_hz, limits.bytes_per_s

    def refused(self, size: int, now_s: float) -> str:
        """Why a message of ``size`` bytes is not taken, or "".

        :param now_s: monotonic.
        """
        limits = self._limits
        if size > limits.message_bytes:
            return f"a message of {size} bytes, at most {limits.message_bytes} are taken"
        passed_s, self._then_s = max(0.0, now_s - self._then_s), now_s
        self._messages = min(limits.messages_hz, self._messages + passed_s * limits.messages_hz)
        self._bytes = min(limits.bytes_per_s, self._bytes + passed_s * limits.bytes_per_s)
        if self._messages < 1.0:
            return f"more than {limits.messages_hz:g} messages per second"
        if self._bytes < min(size, limits.bytes_per_s):  # one larger than a second's worth waits for a full bucket
            return f"more than {limits.bytes_per_s:g} bytes per second"
        self._messages -= 1.0
        self._bytes -= size
        return ""
