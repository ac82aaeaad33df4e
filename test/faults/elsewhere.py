"""The player node without communication, and what is on its way to it; see link.py."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from handoff_machine import POSE
from rclpy.context import Context
from rclpy.node import Node

from phyai_engine.types import F64
from phyai_ros.player_node import PlayerNode


@dataclass(frozen=True, slots=True, eq=False)
class Packet:
    """One message on its way: what the search may tell apart, and the message."""

    epoch: int
    chunk_id: int = 0
    base_step: int = 0
    state: int = 0
    player_latch: int = 0
    stamp_ns: int = 0
    arrived: bool = False
    message: Any = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The player's count when the newest request was made lies between these."""

    chunk_id: int
    heard_consumed: int
    consumed_steps: int


class Network:
    """What is on its way."""

    def __init__(self) -> None:
        self.chunks: tuple[Packet, ...] = ()
        self.statuses: tuple[Packet, ...] = ()
        self.cut = False
        self.snapshot: Snapshot | None = None
        self.heard_consumed: int | None = 0  # the player's count as the policy node last heard it; None: not this one's


class Quiet:
    """A logger nobody reads."""

    def error(self, *_: Any, **__: Any) -> None: ...

    warning = info = error


class Elsewhere(PlayerNode):
    """The player node without communication: what it publishes and subscribes to is kept by topic."""

    def __init__(self, machine: Any, **kwargs: Any) -> None:
        self.machine = machine
        self.callbacks: dict[str, Any] = {}
        super().__init__(**kwargs)

    def create_publisher(self, kind: Any, topic: str, qos: Any, **_: Any) -> Any:
        return SimpleNamespace(publish=self.machine.published)

    def create_subscription(self, kind: Any, topic: str, callback: Any, qos: Any, **_: Any) -> Any:
        self.callbacks[topic.rpartition("/")[2]] = callback

    def create_service(self, kind: Any, name: str, callback: Any, **_: Any) -> Any:
        self.callbacks[name.rpartition("/")[2]] = callback

    def create_timer(self, period_s: float, callback: Any, **_: Any) -> Any:
        self.callbacks["tick"] = callback

    def get_logger(self) -> Any:
        return Quiet()

    def _now_ros_ns(self) -> int:
        return self.machine.world.now_ns

    def _measured(self) -> F64:
        return POSE.copy()


def settle(node: Elsewhere, context: Context) -> None:
    """Leave in the node's own dictionary only what PlayerNode put there: rclpy's part is no state of ours."""
    plain = Node("plain", context=context, start_parameter_services=False, enable_rosout=False)
    base = {name: value for name, value in vars(node).items() if name in vars(plain)}
    plain.destroy_node()
    node.__class__ = type("Settled", (Elsewhere,), base)
    node.__dict__ = {name: value for name, value in vars(node).items() if name not in base}
