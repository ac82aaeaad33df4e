"""Keys, the list of robots, the door over real sockets, and limits."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from phyai_engine.errors import ConfigError
from phyai_engine.serve import keys
from phyai_engine.serve.auth import Gate, Limits, Meter, RobotList, check_bind, check_connect, is_local, secure_client


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("ipc:///run/engine", True),
        ("inproc://engine", True),
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.8.0.1:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://*:5555", False),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://10.0.0.7:5555", False),
        ("tcp://127.0.0.1.example.org:5555", False),  # a name may be anybody's
        ("tcp://localhost.example.org:5555", False),
        ("tcp://127.0.0.1:0;10.0.0.7:5555", False),  # from here to there
        ("udp://127.0.0.1:5555", False),
        ("127.0.0.1:5555", False),
    ],
)
def test_what_needs_no_keys(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) == local
    if local:
        check_bind(endpoint, None)
        check_connect(endpoint, None)
        return
    with pytest.raises(ConfigError, match="keygen"):
        check_bind(endpoint, None)
    with pytest.raises(ConfigError, match="keygen"):
        check_connect(endpoint, None)
    check_bind(endpoint, Path("keys"))


def test_a_pair_is_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "keys"
    before = os.umask(0)
    try:
        public = keys.make_pair(folder, "server")
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "server.key_secret").stat().st_mode) == 0o600
    assert len(public) == 40
    assert keys.server_keys(folder).public == public
    assert sorted(p.name for p in folder.iterdir()) == ["server.key", "server.key_secret"]
    with pytest.raises(ConfigError, match="there is a key already"):
        keys.make_pair(folder, "server")
    secret = keys.server_keys(folder).secret.decode()
    assert secret not in repr(keys.server_keys(folder))
    (folder / "server.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as error:
        keys.server_keys(folder)
    assert secret not in str(error.value)


def test_what_is_no_key_is_refused_without_repeating_it(tmp_path: Path) -> None:
    keys.make_pair(tmp_path, "server")
    keys.make_pair(tmp_path, "r1")
    with pytest.raises(ConfigError, match="no secret key"):
        keys.robot_keys(tmp_path / "r2.key_secret", tmp_path / "server.key")
    with pytest.raises(ConfigError, match="no key file"):
        keys.robot_keys(tmp_path / "r1.key_secret", tmp_path / "other.key")
    public_only = tmp_path / "r1.key"
    public_only.chmod(0o600)
    with pytest.raises(ConfigError, match="public key only"):
        keys.robot_keys(public_only, tmp_path / "server.key")
    wrong = tmp_path / "wrong.key"
    wrong.write_text('curve\n    public-key = "hush"\n')
    with pytest.raises(ConfigError, match="malformed") as error:
        keys.public_key(wrong)
    assert "hush" not in str(error.value)
    for name in ("../r1", "", ".hidden", "a/b", "x" * 65, "r 1"):
        with pytest.raises(ConfigError, match="robot's name"):
            keys.add_robot(tmp_path, name, str(public_only))


def test_the_list_of_robots(tmp_path: Path) -> None:
    one, two = keys.make_pair(tmp_path / "a", "r1"), keys.make_pair(tmp_path / "b", "r2")
    keys.add_robot(tmp_path, "r1", str(tmp_path / "a" / "r1.key"))  # a file
    keys.add_robot(tmp_path, "r2", two)  # or the key itself
    keys.add_robot(tmp_path, "r2", two)
    assert keys.listed(tmp_path / "robots") == {"r1": one, "r2": two}
    with pytest.raises(ConfigError, match="another robot has this key, got r1"):
        keys.add_robot(tmp_path, "r3", one)
    with pytest.raises(ConfigError, match="robot r2 has another key"):
        keys.add_robot(tmp_path, "r2", keys.make_pair(tmp_path / "c", "r2"))
    keys.revoke_robot(tmp_path, "r1")
    assert keys.listed(tmp_path / "robots") == {"r2": two}
    with pytest.raises(ConfigError, match="no robot r1, wanted one of r2"):
        keys.revoke_robot(tmp_path, "r1")


def test_the_list_follows_its_folder_and_fails_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, two = keys.make_pair(tmp_path / "a", "r1"), keys.make_pair(tmp_path / "b", "r2")
    robots = RobotList(tmp_path / "robots")  # not there yet: nobody
    assert robots.name_of(one) is None
    with caplog.at_level(logging.DEBUG):
        for _ in range(20):  # edits within one tick of a file system's clock
            keys.add_robot(tmp_path, "r1", one)
            assert robots.callback("fleet", one.encode())
            assert not robots.callback("fleet", two.encode())
            keys.revoke_robot(tmp_path, "r1")
            assert not robots.callback("fleet", one.encode())
        keys.add_robot(tmp_path, "r1", one)
        (tmp_path / "robots" / "r2.key").write_text("rubbish")
        assert not robots.callback("fleet", one.encode())
    assert "cannot be read" in caplog.text
    assert one not in caplog.text


class Echo:
    """A server behind a gate: it answers each message with the name of the robot, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate = Gate(self.context, keys.server_keys(folder))
        self.socket = self.context.socket(zmq.ROUTER)
        self.gate.guard(self.socket)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._running = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            if self.socket.poll(20):
                peer, body = self.socket.recv_multipart(copy=False)
                self.socket.send_multipart([peer.bytes, (self.gate.robot_of(body) or "nobody").encode()])

    def close(self) -> None:
        self._running = False
        self._thread.join()
        self.socket.close(0)
        self.gate.close()
        self.context.term()


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    keys.make_pair(tmp_path, "server")
    served = Echo(tmp_path)
    yield served
    served.close()


SILENT = 0.4


def ask(
    port: int, pair: keys.RobotKeys | None, patience_s: float = 5.0, *, pauses: tuple[float, ...] = ()
) -> list[str]:
    """What the server says, at once and after each pause; no answer in time is "silence"."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    answers = []
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if pair is not None:
            secure_client(socket, pair)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for pause_s in (0.0, *pauses):
            time.sleep(pause_s)
            socket.send(b"who am I?")
            answers.append(socket.recv().decode() if socket.poll(int(patience_s * 1e3)) else "silence")
    context.term()
    return answers


def test_only_listed_robots_enter_and_a_revoked_one_loses_its_connection(
    echo: Echo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    public = keys.make_pair(tmp_path / "robot", "r1")
    pair = keys.robot_keys(tmp_path / "robot" / "r1.key_secret", tmp_path / "server.key")
    with caplog.at_level(logging.DEBUG):
        assert ask(echo.port, pair, SILENT) == ["silence"]
        keys.add_robot(tmp_path, "r1", public)
        assert ask(echo.port, pair) == ["r1"]
        timer = threading.Timer(0.2, keys.revoke_robot, (tmp_path, "r1"))
        timer.start()
        assert ask(echo.port, pair, pauses=(1.0,)) == ["r1", "nobody"]  # the same connection
        timer.join()
        assert ask(echo.port, pair, SILENT) == ["silence"]
    assert public not in caplog.text
    assert pair.secret.decode() not in caplog.text


def test_no_keys_and_a_wrong_servers_key_are_silence(echo: Echo, tmp_path: Path) -> None:
    public = keys.make_pair(tmp_path / "robot", "r1")
    keys.add_robot(tmp_path, "r1", public)
    assert ask(echo.port, None, SILENT) == ["silence"]
    keys.make_pair(tmp_path / "impostor", "server")
    pair = keys.robot_keys(tmp_path / "robot" / "r1.key_secret", tmp_path / "impostor" / "server.key")
    assert ask(echo.port, pair, SILENT) == ["silence"]


def test_limits() -> None:
    meter = Meter(Limits(messages_hz=10.0, bytes_per_s=1000.0, message_bytes=500), now_s=0.0)
    assert "at most 500" in meter.refused(501, 0.0)
    assert [meter.refused(10, 0.0) for _ in range(10)] == [""] * 10
    assert "10 messages per second" in meter.refused(10, 0.0)
    assert meter.refused(10, 0.1) == ""  # served at its rate, not shut out
    assert "messages" in meter.refused(10, 0.1)
    assert meter.refused(500, 5.0) == ""
    assert meter.refused(500, 5.0) == ""
    assert "1000 bytes per second" in meter.refused(500, 5.0)
    assert meter.refused(500, 4.0) != ""  # a clock that went back gives nothing
    assert meter.refused(500, 5.6) == ""
    huge = Meter(Limits(bytes_per_s=100.0), now_s=0.0)
    assert huge.refused(10_000, 0.0) == ""  # one larger than a second's worth passes, and is paid for
    assert huge.refused(100, 50.0) != ""
    assert huge.refused(100, 102.0) == ""
