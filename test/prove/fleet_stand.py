"""Several policy nodes, each with its simulated arm, whose engine is one `phyai serve` behind a network that can fail.

Every node is a process, in a namespace of its own, all in one ROS domain.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from observer import LATCHED, Observer
from phyai_policy.msg import ActionStep, ChunkTiming, PolicyStatus
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_srvs.srv import Trigger

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from proxy import Proxy
from served import Served

from phyai_engine.types import AbortCause, CommandKind, SafetyState

HORIZON, DT_S = 50, 0.02
CHUNK_S = HORIZON * DT_S


class Robot:
    """What is heard of one robot, and the calls to its node.

    ``old`` counts actions that nobody may hear: of an epoch that a stop ended, or of a chunk that ran out or was
    replaced before.
    """

    def __init__(self, node: Node, name: str) -> None:
        self.name = name
        self.heard: list[tuple[float, ActionStep]] = []
        self.statuses: list[PolicyStatus] = []
        self.timings: list[ChunkTiming] = []
        self.old = 0
        self._ended_epoch = -1
        self._newest = (0, 0, 0)  # epoch, chunk, row
        self._held = False
        listen = node.create_subscription
        listen(ActionStep, f"/{name}/policy_node/step", self._on_step, QoSProfile(depth=400))
        listen(PolicyStatus, f"/{name}/policy_node/status", self.statuses.append, LATCHED)
        listen(ChunkTiming, f"/{name}/policy_node/timing", self.timings.append, QoSProfile(depth=100))
        self.change_state = node.create_client(ChangeState, f"/{name}/policy_node/change_state")
        self.rearm = node.create_client(Trigger, f"/{name}/policy_node/rearm")

    def _on_step(self, message: ActionStep) -> None:
        self.heard.append((time.monotonic(), message))
        if message.kind == CommandKind.STOP:
            self._ended_epoch = max(self._ended_epoch, message.epoch)
        elif message.kind == CommandKind.HOLD:
            self._held = True
        elif message.kind == CommandKind.ACTION:
            now = (message.epoch, message.chunk_id, message.step)
            same_chunk = now[:2] == self._newest[:2]
            self.old += message.epoch <= self._ended_epoch or now <= self._newest or (self._held and same_chunk)
            self._newest, self._held = max(now, self._newest), False

    def first(self, kinds: tuple[CommandKind, ...], since: float) -> float | None:
        """When one of these was heard first after an instant."""
        return next((at for at, message in self.heard if at > since and message.kind in kinds), None)

    @property
    def status(self) -> PolicyStatus:
        """The newest."""
        return self.statuses[-1]

    def forget(self) -> None:
        """What was heard before does not matter any more."""
        del self.heard[:-5], self.statuses[:-1], self.timings[:]


class FleetStand(Observer):
    """See the module.

    :param robots: how many. :param parameters: of every policy node.
    """

    def __init__(self, robots: int, parameters: dict[str, Any]) -> None:
        super().__init__()
        self.server = Served(self.folder / "server", {"latency_ms": 20.0, "horizon": HORIZON})
        self.proxy = Proxy(self.server.port)
        self.robots = [Robot(self.node, f"r{i + 1}") for i in range(robots)]
        given = {
            "robot": "arm7",
            "model": "m",
            "engine": "remote",
            "engine_endpoint": self.proxy.endpoint,
            "execution_horizon": 20,
            **parameters,
        }
        try:
            for robot in self.robots:
                sim = {"robot": "arm7", "image_width": 64, "image_height": 48}
                self.launch("-m", "phyai_ros.sim_node", namespace=robot.name, **sim)
                self.launch("-m", "phyai_ros.policy_node", namespace=robot.name, **given)
            for robot in self.robots:
                self.until(partial(_unconfigured, robot), 60.0, f"{robot.name} to start")
                for transition in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
                    request = ChangeState.Request(transition=Transition(id=transition))
                    assert self.call(robot.change_state, request, 60.0).success
            self.moving()
        except BaseException:
            self.close()
            raise

    def close(self) -> list[int]:
        """End everything; exit codes after SIGINT."""
        codes = self.end_processes()
        self.proxy.close()
        with contextlib.suppress(AssertionError):
            self.server.close()
        super().close()
        return codes

    def said(self) -> str:
        """The state of every robot."""
        return str([(r.name, r.statuses and (r.status.safety_state, r.status.abort_text)) for r in self.robots])

    # ---- what is heard --------------------------------------------------------------------------------------------

    def each(self, kinds: tuple[CommandKind, ...], since: float, seconds: float, what: str) -> list[float]:
        """Of each robot the seconds from an instant to the first command of these kinds."""
        self.until(lambda: all(r.first(kinds, since) for r in self.robots), seconds, what)
        return [at - since for r in self.robots if (at := r.first(kinds, since)) is not None]

    def moving(self, seconds: float = 30.0) -> None:
        """Wait until every robot plays chunks again, and forget what was before."""
        since = time.monotonic()
        self.each((CommandKind.ACTION,), since, seconds, "every robot to move")
        self.spin(0.3)
        for robot in self.robots:
            robot.forget()

    def latched(self, cause: AbortCause, seconds: float = 10.0) -> None:
        """Wait until every robot tells this latch."""
        state = SafetyState.LATCHED
        self.until(
            lambda: all(r.status.safety_state == state for r in self.robots), seconds, f"LATCHED by {cause.name}"
        )
        for robot in self.robots:
            assert robot.status.abort_cause == cause, f"{robot.name}: {robot.status.abort_text}"

    def rearmed(self, seconds: float = 30.0) -> Iterator[float]:
        """Re-arm each, as soon as that is granted; the seconds from then to its first action."""
        for robot in self.robots:
            end = time.monotonic() + seconds
            while not (answer := self.call(robot.rearm, Trigger.Request())).success:
                assert time.monotonic() < end, f"{robot.name}: re-arm refused: {answer.message}"
                self.spin(0.02)
            granted = time.monotonic()
            moves = partial(robot.first, (CommandKind.ACTION,), granted)
            self.until(moves, 10.0, f"{robot.name} to move")
            at = moves()
            assert at is not None
            yield at - granted

    @property
    def old(self) -> int:
        """Of all robots."""
        return sum(robot.old for robot in self.robots)


def _unconfigured(robot: Robot) -> bool:
    return bool(robot.statuses) and robot.status.lifecycle_label == "unconfigured"
