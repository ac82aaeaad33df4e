"""A policy on a server, for programs without a control loop: ask, and wait for the chunk. No torch, no ROS."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.errors import EngineTimeoutError
from phyai_engine.serve.client import Answered, EngineClient, EngineHello, Failed
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.types import F64, U8, Committed, Observation, Request


class RemotePolicy:
    """One robot's session with a server::

        with RemotePolicy(robot, RemoteEngine(endpoint="tcp://127.0.0.1:5555", model="pi05")) as policy:
            chunk = policy.infer({"top": frame}, state, "pick up the block").chunk

    For one thread. A connection that breaks is made again between two calls.

    :param robot: the robot file. :param start_timeout_s: bound of connecting; the server may still warm up.
    :param heartbeat_timeout_s: silence after which the server counts as lost.
    """

    def __init__(
        self,
        robot: RobotConfig,
        remote: RemoteEngine,
        *,
        start_timeout_s: float = 120.0,
        heartbeat_timeout_s: float = 2.0,
    ) -> None:
        self._robot = robot
        self._signal = threading.Event()
        self._client = EngineClient(
            robot,
            None,
            "remote",
            on_event=self._signal.set,
            start_timeout_s=start_timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
            remote=remote,
        )
        self._epoch = time.time_ns()
        self._chunk_id = 0
        self.hello: EngineHello | None = None
        """What the server said of itself; None before the session."""

    def __enter__(self) -> RemotePolicy:
        """Connect.

        :raises EngineRefusedError: the server refuses this robot or model. :raises EngineTimeoutError: it is not there.
        """
        self.hello = self._client.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye."""
        self._client.stop()

    @property
    def counters(self) -> dict[str, int]:
        """See :attr:`EngineClient.counters`."""
        return self._client.counters

    def infer(
        self,
        images: Mapping[str, U8],
        state: F64,
        instruction: str = "",
        *,
        velocity: F64 | None = None,
        committed: Committed | None = None,
        seed: int = 0,
        deadline_s: float = 5.0,
    ) -> Answered:
        """One chunk, [H, A] float64 in robot units, with the time of each stage.

        :param images: camera name -> [h, w, 3] uint8 RGB. :param state: [S] robot units, as the robot file lists them.
        :param velocity: [S], NaN where unknown. :param committed: what the chunk must continue.
        :param deadline_s: the server may refuse a request that it cannot answer within this, and the wait ends there.
        :raises RefusalError: the observation, or an overloaded server. :raises EngineError: anything else it could not.
        :raises EngineTimeoutError: no answer in time; nothing of it is heard any more.
        """
        now_ns = time.monotonic_ns()
        unknown = np.full(len(self._robot.state), np.nan)
        seen = Observation(images, state, unknown if velocity is None else velocity, instruction, 0, 0, now_ns, now_ns)
        self._chunk_id += 1
        self._client.submit(Request(self._epoch, self._chunk_id, seen, committed, seed, deadline_s * 1e3))
        by_s = time.monotonic() + deadline_s
        while self._signal.wait(max(0.0, by_s - time.monotonic())):
            self._signal.clear()
            for event in self._client.poll():
                if isinstance(event, Answered) and event.chunk.chunk_id == self._chunk_id:
                    return event
                if isinstance(event, Failed) and event.chunk_id == self._chunk_id:
                    raise event.error
        self._client.cancel(self._epoch)
        self._epoch += 1
        raise EngineTimeoutError(
            "no answer in time", got=self._client.connection, wanted=f"within {deadline_s} s", where="the engine server"
        )
