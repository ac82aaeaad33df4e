"""`phyai keygen`, `phyai robots`, and the policy on a server for programs without a loop."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import ScriptedServer

from phyai_engine.cli import app
from phyai_engine.config import RobotConfig
from phyai_engine.errors import EngineDiedError, EngineTimeoutError
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.serve.remote_policy import RemotePolicy
from phyai_engine.types import Request


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.output


def test_keys_and_robots(tmp_path: Path) -> None:
    server, robot = tmp_path / "server", tmp_path / "robot"
    run("keygen", str(server))
    public = run("keygen", str(robot), "r1").split()[-1]
    assert "already" in run("keygen", str(robot), "r1", code=2)
    assert "r1 may connect" in run("robots", "add", "r1", str(robot / "r1.key"), "--keys", str(server))
    assert run("robots", "list", "--keys", str(server)).split() == ["r1", public]
    assert "may not connect" in run("robots", "revoke", "r1", "--keys", str(server))
    assert "no robot r1" in run("robots", "revoke", "r1", "--keys", str(server), code=2)
    assert run("robots", "list", "--keys", str(server)) == ""
    secret = (robot / "r1.key_secret").read_text().rpartition("secret-key = ")[2].strip().strip('"')
    assert len(secret) == 40
    assert secret not in run("robots", "add", "r1", public, "--keys", str(server))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("tcp://gpu-server:5555", "m", "--robot", "arm7"), "phyai keygen"),
        (("tcp://127.0.0.1:1", "m", "--robot", "arm7", "--key", "r1.key_secret"), "one of two key files"),
    ],
)
def test_a_client_that_cannot_work_says_why(options: tuple[str, ...], words: str) -> None:
    assert words in run("client", *options, code=2)


def test_a_policy_without_a_loop(robot: RobotConfig) -> None:
    silent: Callable[[ScriptedServer, bytes, Request], None] = lambda server, peer, request: None  # noqa: E731
    server = ScriptedServer()
    image = np.zeros((6, 7, 3), np.uint8)
    ask: dict[str, Any] = {"images": {"top": image}, "state": np.array([0.25, 0.0])}
    try:
        remote = RemoteEngine(endpoint=server.endpoint, model="m")
        with RemotePolicy(robot, remote, start_timeout_s=5.0) as policy:
            assert policy.hello is not None and policy.hello.horizon == 5
            answer = policy.infer(**ask, instruction="go")
            np.testing.assert_array_equal(answer.chunk.actions, np.full((5, 2), 0.25))
            server.answer = silent
            with pytest.raises(EngineTimeoutError, match=r"no answer in time, got connected to .*within 0\.2 s"):
                policy.infer(**ask, deadline_s=0.2)
            server.answer = ScriptedServer.reply
            assert policy.infer(**ask).chunk.actions[0, 0] == 0.25  # the late one does not disturb
            server.answer = silent
            end = threading.Timer(0.2, server.close)
            end.start()
            with pytest.raises(EngineDiedError, match="lost"):
                policy.infer(**ask)
            end.join()
            assert policy.counters["answered"] == 2
    finally:
        server.close()
