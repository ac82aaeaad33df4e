"""The robots of a server: one session each, from hello to expiry. No sockets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from phyai_engine.config import RobotConfig
from phyai_engine.serve.auth import Limits, Meter
from phyai_engine.serve.pool import Pool
from phyai_engine.serve.protocol import Hello
from phyai_engine.serve.streams import KeptStreams


@dataclass(slots=True, eq=False)
class Session:
    """One robot.

    :param peer: where its messages come from. :param slot: its number at the replicas; never used again.
    :param user: name of the key it came with, "" where no keys are asked for.
    :param state: ``waiting`` until the model is ready, ``joining`` until the replicas know it, then ``open``.
    :param last_chunk_id: of its newest request. :param cancelled_epoch: the newest that it cancelled.
    :param seen_s: monotonic time of its last message.
    """

    robot_id: str
    peer: bytes
    slot: int
    user: str
    hello: Hello
    robot: RobotConfig
    pool: Pool
    seen_s: float
    streams: KeptStreams
    state: Literal["waiting", "joining", "open"] = "waiting"
    last_chunk_id: int = 0
    cancelled_epoch: int = -1
    asking: dict[tuple[int, int], int] = field(default_factory=dict)  # (epoch, chunk_id) -> when it came, ns

    @property
    def running(self) -> tuple[int, int]:
        """Epoch and chunk_id of its newest request under way, else 0, 0."""
        return max(self.asking, default=(0, 0))


class Sessions:
    """All of them, by peer, by slot and by robot id. The meters outlive a session: a reconnect is no way round them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_peer: dict[bytes, Session] = {}
        self._by_slot: dict[int, Session] = {}
        self._by_robot: dict[str, Session] = {}
        self._meters: dict[str, Meter] = {}
        self._slots = 0

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_slot.values()))

    def of_peer(self, peer: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_peer.get(peer)

    def of_slot(self, slot: int) -> Session | None:
        """The session of a slot; None once it ended."""
        return self._by_slot.get(slot)

    def of_robot(self, robot_id: str) -> Session | None:
        """The session of a robot."""
        return self._by_robot.get(robot_id)

    def next_slot(self) -> int:
        """A number that no session had before."""
        self._slots += 1
        return self._slots

    def add(self, session: Session) -> None:
        """A robot said hello."""
        self._by_peer[session.peer] = self._by_slot[session.slot] = session
        self._by_robot[session.robot_id] = session

    def remove(self, session: Session) -> None:
        """Its end, for whatever reason."""
        self._by_slot.pop(session.slot, None)
        if self._by_peer.get(session.peer) is session:
            del self._by_peer[session.peer]
        if self._by_robot.get(session.robot_id) is session:
            del self._by_robot[session.robot_id]

    def refused(self, robot_id: str, size: int, now_s: float) -> str:
        """Why a message of so many bytes is not taken from a robot, whether it has a session or not, or ""."""
        meter = self._meters.get(robot_id)
        if meter is None:
            if len(self._meters) > 2 * len(self) + 64:  # of robots long gone
                self._meters = {robot: meter for robot, meter in self._meters.items() if robot in self._by_robot}
            meter = self._meters[robot_id] = Meter(self._limits, now_s)
        return meter.refused(size, now_s)

    def expired(self, expiry_s: float, now_s: float) -> list[Session]:
        """Those that were silent for too long."""
        return [session for session in self if now_s - session.seen_s > expiry_s]
