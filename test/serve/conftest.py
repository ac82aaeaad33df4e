"""What the tests of serve/ share: a robot, requests, and clients that are always stopped."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import ActionEntry, ModelConfig, RobotConfig, StateEntry
from phyai_engine.serve.client import EngineClient, Event, Placement
from phyai_engine.serve.host import ProcessHost
from phyai_engine.types import Committed, Observation, Request

sys.path.insert(0, str(Path(__file__).parent))

from served import Served

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture(scope="session")
def stand_in() -> ModuleType:
    """The module stand_in.py, loaded by path: test folders are not packages."""
    spec = importlib.util.spec_from_file_location("serve_stand_in", STAND_IN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def robot() -> RobotConfig:
    """Two joints."""
    names = ("lift", "turn")
    return RobotConfig(
        robot_id="test",
        action_type="joint_position",
        dt_s=0.1,
        state=tuple(StateEntry(name=n) for n in names),
        actions=tuple(ActionEntry(name=n, lower=-1.0, upper=1.0, acceleration_max=2.0, state=n) for n in names),
    )


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """A request; the stand-in answers with ``value`` in every element."""

    def make(
        epoch: int = 1,
        chunk_id: int = 1,
        instruction: str = "",
        *,
        value: float = 0.5,
        images: bool = True,
        committed: bool = False,
    ) -> Request:
        now_ns = time.monotonic_ns()
        rng = np.random.default_rng(chunk_id)
        seen = {"top": rng.integers(0, 255, (6, 7, 3), dtype=np.uint8)} if images else {}
        observation = Observation(
            seen,
            np.array([value, 0.0]),
            np.array([np.nan, 0.0]),
            instruction,
            10,
            20,
            now_ns - 3_000_000,
            now_ns,
        )
        steps = Committed(np.arange(6.0).reshape(3, 2), 1, 2) if committed else None
        return Request(epoch, chunk_id, observation, steps, 2**64 - 1, 80.0)

    return make


class Session:
    """A client with its events collected; ``next`` waits for one."""

    def __init__(self, client: EngineClient, signal: threading.Event) -> None:
        self.client, self._signal, self._events = client, signal, list[Event]()

    def next(self, timeout_s: float = 5.0) -> Event:
        """The next event."""
        deadline = time.monotonic() + timeout_s
        while not self._events:
            assert self._signal.wait(max(0.0, deadline - time.monotonic())), "no event came"
            self._signal.clear()
            self._events += self.client.poll()
        return self._events.pop(0)

    def ask(self, request: Request) -> Event:
        """Submit and wait."""
        self.client.submit(request)
        return self.next()


Open = Callable[..., Session]


@pytest.fixture(scope="session")
def boot_with_stand_in() -> Callable[[str], str]:
    """Changes what the child runs first, so that it loads the stand-in policy."""
    install = f"sys.path.insert(0, {str(STAND_IN.parent)!r}); import stand_in; stand_in.install()\n"
    return lambda boot: boot.replace("from phyai", install + "from phyai")


@pytest.fixture
def open_session(
    robot: RobotConfig,
    stand_in: ModuleType,
    boot_with_stand_in: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Open]:
    """Makes sessions with the stand-in policy; stops them all."""
    monkeypatch.setattr(ProcessHost, "_BOOT", boot_with_stand_in(ProcessHost._BOOT))
    sessions: list[Session] = []

    def make(
        placement: Placement = "thread",
        *,
        options: dict[str, Any] | None = None,
        start: bool = True,
        **rest: Any,
    ) -> Session:
        signal = threading.Event()
        if placement == "thread":
            rest.setdefault("load", stand_in.load_policy)
        model = ModelConfig(family="stand_in", options=options or {})
        client = EngineClient(robot, model, placement, on_event=rest.pop("on_event", signal.set), **rest)
        session = Session(client, signal)
        sessions.append(session)
        if start:
            client.start()
        return session

    yield make
    for session in sessions:
        session.client.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`phyai serve` in a process of its own: the fake model for arm7, under the name ``m``."""
    served = Served(tmp_path_factory.mktemp("server"), expiry_s=1.0)
    yield served
    served.close()
