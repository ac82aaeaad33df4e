"""Listens to one policy node and its robot, and keeps what a record needs. Judges nothing."""

from __future__ import annotations

import io
import math
import os
import platform
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from phyai_policy.msg import ActionStep, ChunkTiming, PolicyStatus
from PIL import Image as Picture
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState

from phyai_engine.config import RobotConfig
from phyai_engine.replay.record import (
    Camera,
    Event,
    EventKind,
    FrameRow,
    Invariant,
    Joints,
    Record,
    StepRow,
    TimingRow,
)
from phyai_engine.types import AbortCause, Refusal, SafetyState
from phyai_ros.convert import image_to_rgb, stamp_ns
from phyai_ros.diagnostics import OUTCOMES

FRAME_EVERY_S = 1.5
KINDS = {1: "action", 2: "hold", 3: "stop"}
SENSOR = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)


class Watch:
    """What was heard since it was made.

    :param policy: name of the policy node.
    """

    def __init__(self, node: Node, robot: RobotConfig, policy: str) -> None:
        self.robot = robot
        self.status: PolicyStatus | None = None
        self.events: list[Event] = []
        self.steps: list[StepRow] = []
        self.timings: list[TimingRow] = []
        self.joint_rows: list[tuple[float, dict[str, float]]] = []
        self.aborted_epoch = 0
        self.abort_reply_s = float("nan")
        self._delivered: dict[str, float] = {}
        self.model = "unknown"
        self._zero_s = time.monotonic()
        self._zero_ros_ns = node.get_clock().now().nanoseconds
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._arrivals: dict[str, list[tuple[float, float]]] = {c.name: [] for c in robot.cameras}
        self._frames: list[FrameRow] = []
        self._frame_due_s = dict.fromkeys(self._arrivals, 0.0)
        self._positions: dict[str, float] = {}
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        node.create_subscription(PolicyStatus, f"{policy}/status", self._on_status, latched)
        node.create_subscription(ActionStep, f"{policy}/step", self._on_step, QoSProfile(depth=100))
        node.create_subscription(ChunkTiming, f"{policy}/timing", self._on_timing, QoSProfile(depth=100))
        node.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, QoSProfile(depth=5))
        for camera in robot.cameras:
            if camera.transport == "raw":
                node.create_subscription(Image, camera.topic, partial(self._on_image, camera.name), SENSOR)
        for topic in dict.fromkeys(entry.topic for entry in robot.state):
            node.create_subscription(JointState, topic, self._on_joints, SENSOR)

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

    def frames_of(self, camera: str) -> list[tuple[float, float]]:
        """(arrival, stamp) of every frame of one camera."""
        return self._arrivals[camera]

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
        names = [n for n in (e.name for e in self.robot.state) if any(n in row for _, row in self.joint_rows)]
        complete = [(t, row) for t, row in self.joint_rows if all(n in row for n in names)]
        return Record(
            robot_id=self.robot.robot_id,
            action_names=self.robot.action_names,
            action_type=self.robot.action_type,
            dt_s=self.robot.dt_s,
            model=self.model,
            placement="" if status is None else status.placement,
            schedule="" if status is None else status.schedule,
            started=self._started,
            host=f"{_processor()}, {os.cpu_count()} cores",
            events=self.events,
            steps=self.steps,
            timings=self.timings,
            joints=Joints(
                names=names,
                t_s=[t for t, _ in complete],
                positions=[[row[n] for n in names] for _, row in complete],
            ),
            cameras={
                name: Camera(
                    t_s=[t for t, _ in arrivals],
                    stamp_s=[s for _, s in arrivals],
                    delivered=self._delivered.get(name, float("nan")),
                )
                for name, arrivals in self._arrivals.items()
            },
            frames=self._frames,
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
        self.steps.append(
            StepRow(
                t_s=self.now_s,
                kind=KINDS[message.kind],  # type: ignore[arg-type]
                values=list(message.values),
                tick=message.tick,
                epoch=message.epoch,
                chunk_id=message.chunk_id,
                step=message.step,
            )
        )

    def _on_timing(self, message: ChunkTiming) -> None:
        outcome = next(name for name, number in OUTCOMES.items() if number == message.outcome)
        refusal = Refusal(message.refusal).name.lower()
        self.timings.append(TimingRow.of(self.now_s, message, outcome=outcome, refusal=refusal))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for value in message.status[0].values:
            if value.key == "model":
                self.model = value.value

    def _on_image(self, camera: str, message: Image) -> None:
        now = self.now_s
        stamp_s = (stamp_ns(message.header.stamp) - self._zero_ros_ns) * 1e-9
        self._arrivals[camera].append((now, stamp_s))
        if now >= self._frame_due_s[camera]:
            self._frame_due_s[camera] = now + FRAME_EVERY_S
            picture = Picture.fromarray(np.ascontiguousarray(image_to_rgb(message)))
            picture.thumbnail((240, 180))
            jpeg = io.BytesIO()
            picture.save(jpeg, "JPEG", quality=80)
            self._frames.append(FrameRow(t_s=now, camera=camera, jpeg=jpeg.getvalue()))

    def _on_joints(self, message: JointState) -> None:
        self._positions.update(zip(message.name, message.position, strict=False))
        if not self.joint_rows or self.now_s - self.joint_rows[-1][0] > 0.05:
            self.joint_rows.append((self.now_s, dict(self._positions)))


def _processor() -> str:
    """The processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
