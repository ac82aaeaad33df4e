"""What evidence is measured on: policy node, simulated arm and player node as processes, and the observer, this one.

It hears every command and counts those of an epoch that a stop has ended.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from evidence import fake_model
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from observer import LATCHED, Observer
from phyai_policy.msg import ActionChunk, ActionStep, ChunkStatus, ChunkTiming, PolicyStatus
from rcl_interfaces.srv import SetParameters
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from phyai_engine.types import AbortCause, CommandKind, SafetyState

POLICY = ("-m", "phyai_ros.policy_node")
Heard = tuple[float, ActionStep]


class SimulatedClock:
    """/clock at the rate of real time, 200 Hz, from a thread of its own."""

    def __init__(self, node: Node) -> None:
        self.ns, self.runs, self._ended = 1_000_000 * 10**9, True, threading.Event()
        publisher = node.create_publisher(Clock, "/clock", 10)

        def run() -> None:
            last = time.monotonic_ns()
            while not self._ended.wait(0.005):
                now = time.monotonic_ns()
                if self.runs:
                    self.ns += now - last
                last, message = now, Clock()
                message.clock.sec, message.clock.nanosec = divmod(self.ns, 10**9)
                publisher.publish(message)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more time."""
        self._ended.set()
        self._thread.join()


class Stand(Observer):
    """See the module.

    :param model: options of the fake model. :param parameters: of the policy node. :param player: parameters of a
        player node, which plays then. :param policy: how the policy node is started. :param simulated: on /clock.
    """

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        parameters: dict[str, Any] | None = None,
        *,
        player: dict[str, Any] | None = None,
        policy: Sequence[str] = POLICY,
        simulated: bool = False,
    ) -> None:
        super().__init__()
        self.heard: list[Heard] = []
        self.statuses: list[PolicyStatus] = []
        self.timings: list[tuple[float, ChunkTiming]] = []
        self.chunks: list[ActionChunk] = []
        self.acknowledged: list[ChunkStatus] = []
        self.notes: dict[str, str] = {}
        self.hears_joints = False
        self.old = 0  # actions of an epoch that a stop had ended
        self._ended_epoch = -1
        self._listen()
        self.clock = SimulatedClock(self.node) if simulated else None
        self._use: dict[str, Any] = {"use_sim_time": "true"} if simulated else {}
        self._player = player
        given = {"robot": "arm7", "model": fake_model(**(model or {})), "warm_up_count": "1", **(parameters or {})}
        if player is not None:
            given["output"] = "chunks"
        self._policy, self._given = tuple(policy), given
        topic = {"command_topic": "player_node/step"} if player is not None else {}
        sim = {"robot": "arm7", "image_width": 64, "image_height": 48, **topic}
        self.sim = self.launch("-m", "phyai_ros.sim_node", **sim)
        try:
            if player is not None:
                self.start_player()
            self.start_policy()
        except BaseException:
            self.close()  # the next case needs the context, and nothing may play on
            raise
        gc.collect()
        gc.freeze()  # the observer must not be what is late
        gc.disable()

    def _listen(self) -> None:
        listen = self.node.create_subscription
        for name in ("policy_node", "player_node"):
            listen(ActionStep, f"{name}/step", self._on_step, QoSProfile(depth=200))
        listen(PolicyStatus, "policy_node/status", self.statuses.append, LATCHED)
        listen(ChunkTiming, "policy_node/timing", self._on_timing, QoSProfile(depth=50))
        listen(ActionChunk, "policy_node/chunk", self.chunks.append, QoSProfile(depth=5))
        listen(ChunkStatus, "policy_node/chunk_status", self.acknowledged.append, QoSProfile(depth=50))
        listen(DiagnosticArray, "/diagnostics", self._on_diagnostics, QoSProfile(depth=5))
        client = self.node.create_client
        names = ("abort", "rearm", "restart_engine")
        self.triggers = {n: client(Trigger, f"policy_node/{n}") for n in names}
        self.change_state = client(ChangeState, "policy_node/change_state")
        self._set = client(SetParameters, "sim_robot/set_parameters")
        self.fleet = self.node.create_publisher(Bool, "/fleet_stop", LATCHED)

    def _on_step(self, message: ActionStep) -> None:
        self.heard.append((time.monotonic(), message))
        if message.kind == CommandKind.STOP:
            self._ended_epoch = max(self._ended_epoch, message.epoch)
        elif message.kind == CommandKind.ACTION:  # after a stop only a later epoch may move
            self.old += message.epoch <= self._ended_epoch

    def _on_timing(self, message: ChunkTiming) -> None:
        self.timings.append((time.monotonic(), message))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        self.notes = {v.key: v.value for v in message.status[0].values}
        self.hears_joints = all(s.level == DiagnosticStatus.OK for s in message.status if ": joints " in s.name)

    # ---- processes ------------------------------------------------------------------------------------------------

    def launch(self, *command: str, namespace: str = "", **parameters: Any) -> subprocess.Popen[bytes]:
        """A node as a process, on the stand's clock."""
        return super().launch(*command, namespace=namespace, **parameters, **self._use)

    def start_policy(self) -> None:
        """Start the policy node, configure and activate it."""
        self.launch_policy()
        self.change(Transition.TRANSITION_CONFIGURE)
        self.change(Transition.TRANSITION_ACTIVATE)

    def launch_policy(self) -> None:
        """Start the policy node; unconfigured."""
        self.statuses.clear()
        self.policy = self.launch(*self._policy, **self._given)
        new = lambda: self.statuses and self.statuses[-1].lifecycle_label == "unconfigured"  # noqa: E731
        self.until(new, 30.0, "the policy node")  # after a SIGKILL the dead node's services still seem to be there
        self.spin(0.3)

    def start_player(self) -> None:
        """Start the player node."""
        self.acknowledged.clear()
        self.player = self.launch("-m", "phyai_ros.player_node", robot="arm7", **(self._player or {}))
        self.until(lambda: self.acknowledged, 30.0, "the player node")

    @property
    def engine_pid(self) -> int:
        """The engine process: the policy node's child."""
        return next(c.pid for c in psutil.Process(self.policy.pid).children())

    def close(self) -> list[int]:
        """End everything; exit codes after SIGINT."""
        gc.enable()
        codes = self.end_processes()
        if self.clock is not None:
            self.clock.close()
        super().close()
        return codes

    # ---- calls ----------------------------------------------------------------------------------------------------

    def said(self) -> str:
        """State, and the kinds of the last commands."""
        safety = f"{self.status.safety_state} {self.status.abort_text!r}" if self.statuses else "no status"
        return f"state {safety}, kinds {[m.kind for _, m in self.heard[-5:]]}"

    def trigger(self, name: str, seconds: float = 30.0) -> Any:
        """Call a Trigger service of the policy node."""
        return self.call(self.triggers[name], Trigger.Request(), seconds)

    def change(self, transition: int, *, refused: bool = False) -> None:
        """A lifecycle transition, and whether it was to be refused."""
        answer = self.call(self.change_state, ChangeState.Request(transition=Transition(id=transition)), 60.0)
        assert answer.success is not refused, f"transition {transition}: success {answer.success}"

    def set_sim(self, **values: Any) -> None:
        """Set fault parameters of the simulated robot; ``__`` is a dot."""
        pairs = [Parameter(name.replace("__", "."), value=v).to_parameter_msg() for name, v in values.items()]
        answer = self.call(self._set, SetParameters.Request(parameters=pairs))
        assert all(r.successful for r in answer.results), answer.results

    # ---- what is heard --------------------------------------------------------------------------------------------

    @property
    def status(self) -> PolicyStatus:
        """The newest."""
        return self.statuses[-1]

    def kinds(self, kind: CommandKind, since: float) -> list[float]:
        """When commands of a kind were heard after an instant."""
        return [at for at, message in self.heard if at > since and message.kind == kind]

    def safe(self, since: float, seconds: float = 10.0, *, hold: bool = True) -> float:
        """ms from an instant to the first STOP, or HOLD if that counts."""

        def first() -> list[float]:
            held = self.kinds(CommandKind.HOLD, since) if hold else []
            return [*self.kinds(CommandKind.STOP, since)[:1], *held[:1]]

        self.until(first, seconds, "STOP or HOLD")
        return (min(first()) - since) * 1e3

    def latched(self, cause: AbortCause, seconds: float = 10.0) -> None:
        """Wait until the latch is told, and with this cause."""
        self.until(lambda: self.status.safety_state == SafetyState.LATCHED, seconds, f"LATCHED by {cause.name}")
        assert self.status.abort_cause == cause, f"{self.status.abort_cause} {self.status.abort_text}"

    def moving(self, more: int = 3) -> None:
        """Wait until actions are heard of the newest epoch."""
        since = time.monotonic()
        self.until(lambda: len(self.kinds(CommandKind.ACTION, since)) >= more, 20.0, "ACTION")
        del self.heard[:-400], self.statuses[:-50], self.timings[:-50], self.chunks[:-5], self.acknowledged[:-50]

    def rearm(self) -> None:
        """Re-arm; it is rightly refused while the stop is published or nothing fresh was seen."""
        end = time.monotonic() + 10.0
        while not (answer := self.trigger("rearm")).success:
            assert time.monotonic() < end, f"re-arm refused: {answer.message}"
            self.spin(0.02)

    def resume(self, *, engine: bool = False) -> None:
        """What a person does after a latch; the robot must move again."""
        if engine:
            answer = self.trigger("restart_engine", 60.0)
            end = time.monotonic() + 5.0
            while not answer.success and "still being published" in answer.message and time.monotonic() < end:
                self.spin(0.05)
                answer = self.trigger("restart_engine", 60.0)
            assert answer.success, answer.message
        assert not any(m.kind == CommandKind.ACTION and m.epoch >= self.status.epoch for _, m in self.heard)
        self.rearm()
        self.moving()

    def requested_at(self, row: int) -> float:
        """When the last request of the last chunk was made: the row at which it is due was heard; +- a tick."""
        actions = [(at, m) for at, m in self.heard if m.kind == CommandKind.ACTION]
        last = actions[-1][1].chunk_id
        return next(at for at, m in actions if m.chunk_id == last and m.step >= row)


def end_hard(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; the instant before."""
    began = time.monotonic()
    os.kill(pid, number)
    return began
