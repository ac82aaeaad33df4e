"""What the fault tests share: a control loop without ROS, and the rig of test/ros where ROS is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import ActionEntry, RobotConfig, StateEntry
from phyai_engine.control.control_loop import ControlLoop, LoopSettings
from phyai_engine.control.player import Command, Player
from phyai_engine.errors import RefusalError
from phyai_engine.handoff import Accepted, HandoffSettings
from phyai_engine.safety import Safety
from phyai_engine.serve.client import Answered, Event
from phyai_engine.stop import StopPlan
from phyai_engine.timing import Timing
from phyai_engine.types import (
    F64,
    Chunk,
    CommandKind,
    Observation,
    Request,
    SafetyState,
    Schedule,
    StageTimings,
)

DT_S = 0.02
HORIZON = 16
NAMES = ("shoulder", "elbow")


def _ros_rig() -> ModuleType:
    """test/ros/conftest.py, loaded by path: test folders are not packages."""
    path = Path(__file__).parents[1] / "ros" / "conftest.py"
    spec = importlib.util.spec_from_file_location("faults_rig", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if all(importlib.util.find_spec(name) for name in ("rclpy", "phyai_policy")):
    make_rig = _ros_rig().make_rig


def two_joints() -> RobotConfig:
    """Two joints, 2 rad/s, 5 rad/s^2: 1 rad/s is lost in ten steps."""
    limits: Any = {"lower": -2.0, "upper": 2.0, "velocity_max": 2.0, "acceleration_max": 5.0}
    return RobotConfig(
        robot_id="two_joints",
        action_type="joint_position",
        dt_s=DT_S,
        state=tuple(StateEntry(name=n) for n in NAMES),
        actions=tuple(ActionEntry(name=n, state=n, **limits) for n in NAMES),
        first_step_max=0.2,
        seam_jump_max=0.1,
    )


class Engine:
    """Answers when the test says so, and answers what was cancelled too: the worst engine there is."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.events: list[Event] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    def cancel(self, epoch: int) -> None:
        self.cancelled.append(epoch)

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class Written:
    """An output that keeps what it is given. Without ``ticks`` a player elsewhere plays; ``reported`` is its count."""

    def __init__(self, ticks: bool) -> None:
        self.ticks = ticks
        self.commands: list[Command] = []
        self.chunks: list[tuple[Chunk, int, int]] = []  # (chunk, base step, first row)
        self.stops: list[StopPlan] = []
        self.reported: int | None = None
        self.since_s = 0.0  # the reported count has stood so long
        self.heard_ns = 0

    def command(self, command: Command) -> None:
        self.commands.append(command)

    def chunk(self, chunk: Chunk, base_step: int, facts: Accepted) -> None:
        self.chunks.append((chunk, base_step, facts.row))

    def stop(self, plan: StopPlan) -> None:
        self.stops.append(plan)

    def consumed(self) -> int | None:
        return self.reported

    def since_step_s(self) -> float | None:
        return None if self.ticks else self.since_s

    def begun(self) -> tuple[int, int] | None:
        return None

    def ready(self) -> RefusalError | None:
        return None

    def heard_mono_ns(self) -> int:
        return self.heard_ns

    def motion(self) -> tuple[F64, F64] | None:
        return None

    def take_rejection(self) -> RefusalError | None:
        return None

    def reset(self, consumed: int) -> None:
        self.reported = None if self.ticks else consumed


class Bench:
    """The node's control loop and player: the test moves the clock, the arm and the engine.

    :param state: [2] measured positions; the arm does not move by itself.
    """

    def __init__(
        self,
        schedule: Schedule = Schedule.RTC,
        *,
        ticks: bool = True,
        request_timeout_s: float = 5.0,
        hold_max_s: float = 10.0,
        **player: Any,
    ) -> None:
        self.robot = two_joints()
        self.state: F64 = np.zeros(2)
        self.blind: RefusalError | None = None  # what every snapshot raises
        self.mono_ns = 1_000_000_000
        self.engine, self.written = Engine(), Written(ticks)
        self.timings: list[Timing] = []
        settings = HandoffSettings(schedule, HORIZON, execution_steps=8, dt_s=DT_S, delay_init_steps=2)
        self.player = Player(self.robot, settings, Safety(epoch=100), self.written, self.measured, **player)
        self.loop = ControlLoop(
            LoopSettings(DT_S, schedule, request_timeout_s=request_timeout_s, hold_max_s=hold_max_s),
            self._snapshot,
            self.engine,
            self.player,
            lambda: self.mono_ns,
            self.timings.append,
        )

    def measured(self) -> F64:
        return self.state.copy()

    def _snapshot(self, now_ros_ns: int, now_mono_ns: int) -> Observation:
        if self.blind is not None:
            raise self.blind
        return Observation(
            images={},
            state=self.state.copy(),
            velocity=np.full(2, np.nan),
            instruction="",
            oldest_ros_ns=1,
            newest_ros_ns=1,
            capture_mono_ns=now_mono_ns,
            snapshot_mono_ns=now_mono_ns,
        )

    def tick(self, count: int = 1) -> None:
        """Control ticks, one period apart."""
        for _ in range(count):
            self.mono_ns += round(DT_S * 1e9)
            self.loop.tick(self.mono_ns)

    def reply(self, actions: F64, request: Request | None = None) -> None:
        """The engine finishes a request, the newest by default; the node has not looked yet."""
        request = self.engine.requests[-1] if request is None else request
        chunk = Chunk(request.epoch, request.chunk_id, actions, StageTimings())
        self.engine.events.append(Answered(chunk, self.mono_ns, self.mono_ns, 0.0))

    def answer(self, actions: F64, request: Request | None = None) -> None:
        """The engine finishes a request and the node takes the chunk."""
        self.reply(actions, request)
        self.loop.on_events()

    def start(self, speed: float = 0.5) -> None:
        """Activate; the first chunk moves away from the measured pose at ``speed`` rad/s."""
        self.loop.activate()
        self.tick()
        self.answer(self.ramp(speed))

    def ramp(self, speed: float = 0.5, start: F64 | None = None) -> F64:
        """[H, 2] both joints at a constant speed from ``start``, else from the measured pose."""
        origin = self.state if start is None else start
        rows: F64 = origin + speed * DT_S * np.arange(HORIZON)[:, None]
        return rows

    @property
    def commands(self) -> list[Command]:
        return self.written.commands

    def kinds(self) -> list[CommandKind]:
        return [c.kind for c in self.commands]

    def values(self, joint: int = 0) -> list[float]:
        """What was commanded to one joint."""
        return [float(c.values[joint]) for c in self.commands]

    @property
    def safety(self) -> SafetyState:
        return self.player.safety.state


@pytest.fixture
def bench() -> Callable[..., Bench]:
    """Makes benches."""
    return Bench
