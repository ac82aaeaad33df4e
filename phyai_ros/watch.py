"""Listens to one policy node and its robot, and keeps what a record needs. Judges nothing."""

from __future__ import annotations

import math
import time
from datetime import datetime, timezone
from functools import partial
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from phyai_policy.msg import ActionStep, ChunkTiming, PolicyStatus
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.host import host
from phyai_engine.messages import stamp_ns
from phyai_engine.replay.record import Event, EventKind, Invariant, Record, StepRow, TimingRow
from phyai_engine.replay.rows import step_row, timing_row
from phyai_engine.replay.sensor_rows import SensorRows
from phyai_engine.types import AbortCause, Refusal, SafetyState

SENSOR = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


class Watch:
    """What was heard since it was made.

    :param policy: name of the policy node.
    :param sensors: where they are known already (a bag that is played): no camera or joint is listened to.
    """

    def __init__(self, node: Node, robot: RobotConfig, policy: str, *, sensors: SensorRows | None = None) -> None:
        self.robot = robot
        self.status: PolicyStatus | None = None
        self.events: list[Event] = []
        self.steps: list[StepRow] = []
        self.timings: list[TimingRow] = []
        self.sensors = SensorRows(robot) if sensors is None else sensors
        self.aborted_epoch = 0
        self.abort_reply_s = float("nan")
        self._delivered: dict[str, float] = {}
        self.model = "unknown"
        self.warm_up_s: tuple[float, ...] = ()
        """Inferences of the warm-up; the first is the very first of the engine."""
        self._zero_s = time.monotonic()
        self._zero_ros_ns = node.get_clock().now().nanoseconds
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        node.create_subscription(PolicyStatus, f"{policy}/status", self._on_status, latched)
        node.create_subscription(ActionStep, f"{policy}/step", self._on_step, QoSProfile(depth=100))
        node.create_subscription(ChunkTiming, f"{policy}/timing", self._on_timing, QoSProfile(depth=100))
        node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QoSProfile(depth=5))
        if sensors is not None:
            return
        for camera in robot.cameras:
            kind = CompressedImage if camera.transport == "compressed" else Image
            node.create_subscription(kind, camera.topic, partial(self._on_image, camera), SENSOR)
        for topic in dict.fromkeys(entry.topic for entry in robot.state):
            node.create_subscription(JointState, topic, self._on_joints, SENSOR)

    def begin(self) -> None:
        """The record begins now: what was heard before is forgotten, events before are put at its start."""
        self._zero_s = time.monotonic()
        self.events = [Event(0.0, event.kind, event.text) for event in self.events]
        self.steps.clear()
        self.timings.clear()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._zero_s

    @property
    def epoch(self) -> int:
        """The policy node's newest epoch."""
        return 0 if self.status is None else int(self.status.epoch)

    def event(self, kind: EventKind, text: str) -> None:
        """Note something that happened."""
        self.events.append(Event(self.now_s, kind, text))

    def rows(self) -> list[tuple[str, str]]:
        """Key and value of the live view."""
        status = self.status
        if status is None:
            return [("state", "waiting for the policy node")]
        recent = [s for s in self.steps if s.t_s > self.now_s - 2.0]
        cameras = ", ".join(
            f"{name} {rate:.0f} Hz" for name, rate in zip(status.camera_names, status.camera_rates_hz, strict=True)
        )
        refused = ", ".join(f"{Refusal(code).name.lower()} {n}" for code, n in enumerate(status.refusals) if n)
        return [
            ("state", f"{status.lifecycle_label} · {SafetyState(status.safety_state).name.lower()}"),
            ("model", f"{self.model} · engine {status.placement or '-'} · {status.schedule or '-'}"),
            ("fallback", f"{status.fallback}: {status.fallback_text}" if status.fallback else "none"),
            ("rates", f"steps {len(recent) / 2:.0f} Hz · {cameras or 'no cameras yet'}"),
            (
                "margin",
                f"p50 {status.margin_p50_s * 1e3:.1f} ms · worst 1 % {status.margin_p01_s * 1e3:.1f} ms · "
                f"n {status.handoffs} · inference p50 {status.inference_p50_s * 1e3:.1f}, "
                f"p99 {status.inference_p99_s * 1e3:.1f} ms",
            ),
            ("misses", f"late {status.misses_cond} · ran out {status.misses_exhaust}"),
            ("jump ratio", f"p50 {status.jump_ratio_p50:.2f} · p99 {status.jump_ratio_p99:.2f}"),
            ("refusals", refused or "none"),
            ("last refusal", status.last_refusal_text or "-"),
            (
                "abort",
                f"{AbortCause(status.abort_cause).name.lower()}: {status.abort_text}" if status.abort_cause else "-",
            ),
        ]

    def line(self, phase: str) -> str:
        """The live view as one line, for logs."""
        status = self.status
        if status is None:
            return f"{self.now_s:6.1f} s  {phase}"
        state = SafetyState(status.safety_state).name.lower()
        return (
            f"{self.now_s:6.1f} s  {state:9s} margin p50 {status.margin_p50_s * 1e3:6.1f} ms  "
            f"late {status.misses_cond} ran out {status.misses_exhaust}  refusals {sum(status.refusals)}  {phase}"
        )

    def record(self, invariants: list[Invariant]) -> Record:
        """Everything heard, as a record."""
        status = self.status
        return Record(
            robot_id=self.robot.robot_id,
            action_names=self.robot.action_names,
            action_type=self.robot.action_type,
            dt_s=self.robot.dt_s,
            model=self.model,
            placement="" if status is None else status.placement,
            schedule="" if status is None else status.schedule,
            started=self._started,
            host=host(),
            events=self.events,
            steps=self.steps,
            timings=self.timings,
            joints=self.sensors.joints(),
            cameras=self.sensors.cameras(self._delivered),
            frames=self.sensors.frames,
            refusals={}
            if status is None
            else {Refusal(code).name.lower(): int(n) for code, n in enumerate(status.refusals) if n},
            invariants=invariants,
        )

    def _on_status(self, message: PolicyStatus) -> None:
        self.status = message
        for name, share in zip(message.camera_names, message.camera_delivered, strict=True):
            if not math.isnan(share):  # unknown again once the node is deactivated
                self._delivered[name] = float(share)

    def _on_step(self, message: ActionStep) -> None:
        self.steps.append(step_row(self.now_s, message))

    def _on_timing(self, message: ChunkTiming) -> None:
        self.timings.append(timing_row(self.now_s, message))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        said = {value.key: value.value for value in message.status[0].values}
        self.model = said.get("model", self.model)
        if warm_up_ms := said.get("warm_up_ms"):
            self.warm_up_s = tuple(float(ms) * 1e-3 for ms in warm_up_ms.split(","))

    def _on_image(self, camera: Camera, message: Any) -> None:
        stamp_s = (stamp_ns(message.header.stamp) - self._zero_ros_ns) * 1e-9
        self.sensors.image(camera, self.now_s, stamp_s, message)

    def _on_joints(self, message: JointState) -> None:
        self.sensors.joint_state(self.now_s, message)
