"""Keeps what a replay does, row by row, and makes the record of it. Judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from phyai_engine.config import RobotConfig
from phyai_engine.control.commands import Command, PlaysHere
from phyai_engine.control.control_loop import Client
from phyai_engine.control.counters import Counters
from phyai_engine.host import host
from phyai_engine.replay.record import ChunkRow, Event, EventKind, IdleRow, Record, StepRow, TimingRow, chunk_hash
from phyai_engine.replay.rows import step_row
from phyai_engine.replay.sensor_rows import SensorRows
from phyai_engine.serve.client import Answered, Lost
from phyai_engine.serve.client import Event as EngineEvent
from phyai_engine.timing import Timing
from phyai_engine.types import Refusal, Request

IDLE_S = 1.0
"""Without work for so long an engine's next inference is listed apart: caches and clock rates have gone down."""


class Trace:
    """What was asked, answered and commanded.

    :param now_s: time since the replay began. :param rests: the engine rests while the replay waits.
    """

    def __init__(self, robot: RobotConfig, now_s: Callable[[], float], *, rests: bool) -> None:
        self._rests = rests
        self.lost: Lost | None = None
        self.newest_request: Request | None = None
        self.events: list[Event] = []
        self._robot, self._now_s = robot, now_s
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._steps: list[StepRow] = []
        self._timings: list[TimingRow] = []
        self._chunks: list[ChunkRow] = []
        self._idle: list[IdleRow] = []
        self._answered_s = 0.0  # when the engine last fell idle
        self._asked_s, self._idle_s = 0.0, 0.0  # of the newest request, and how long it had been idle then

    def event(self, kind: EventKind, text: str) -> None:
        """Something happened now."""
        self.events.append(Event(self._now_s(), kind, text))

    def command(self, command: Command) -> None:
        """One tick's command."""
        self._steps.append(step_row(self._now_s(), command))

    def timing(self, timing: Timing) -> None:
        """A handoff or a rejection."""
        row = TimingRow.of(self._now_s(), timing, outcome=timing.outcome, refusal=timing.refusal)
        self._timings.append(row)

    def asked(self, request: Request) -> None:
        """A request went to the engine."""
        self.newest_request, self._asked_s = request, self._now_s()
        self._idle_s = self._asked_s - self._answered_s

    def answered(self, answer: Answered) -> None:
        """The engine's answer, before anything of it is checked."""
        self._answered_s = now_s = self._now_s()
        chunk = answer.chunk
        self._chunks.append(
            ChunkRow(t_s=now_s, epoch=chunk.epoch, chunk_id=chunk.chunk_id, actions=chunk.actions.tolist())
        )
        if self._rests and self._idle_s >= IDLE_S:
            inference_s = chunk.timings.inference_ms * 1e-3
            self._idle.append(IdleRow(t_s=self._asked_s, idle_s=self._idle_s, inference_s=inference_s))

    def probed(self, idle_s: float, inference_s: float) -> None:
        """An inference after the run, made to measure the pause before it."""
        self._idle.append(IdleRow(t_s=self._now_s(), idle_s=idle_s, inference_s=inference_s, probe=True))

    def record(self, counters: Counters, sensors: SensorRows, delivered: Mapping[str, float], **facts: Any) -> Record:
        """Everything, with the ``facts`` of the run that a Record has beside its rows.

        :param delivered: fraction of each camera's frames.
        """
        return Record(
            robot_id=self._robot.robot_id,
            action_names=self._robot.action_names,
            action_type=self._robot.action_type,
            dt_s=self._robot.dt_s,
            started=self._started,
            host=host(),
            events=self.events,
            steps=self._steps,
            timings=self._timings,
            joints=sensors.joints(),
            cameras=sensors.cameras(delivered),
            frames=sensors.frames,
            refusals={Refusal(code).name.lower(): n for code, n in enumerate(counters.refusals) if n},
            chunks=self._chunks,
            chunk_hash=chunk_hash(self._chunks),
            idle=self._idle,
            **facts,
        )


class TracedEngine:
    """An engine whose requests and answers are kept."""

    def __init__(self, engine: Client, trace: Trace) -> None:
        self._engine, self._trace = engine, trace

    def submit(self, request: Request) -> None:
        self._engine.submit(request)
        self._trace.asked(request)

    def cancel(self, epoch: int) -> None:
        self._engine.cancel(epoch)

    def poll(self) -> Sequence[EngineEvent]:
        events = self._engine.poll()
        for event in events:
            if isinstance(event, Answered):
                self._trace.answered(event)
            elif isinstance(event, Lost):
                self._trace.lost = event
        return events


class TracedSteps(PlaysHere):
    """The player's output of a replay: every tick's command is kept, and moves nothing."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def command(self, command: Command) -> None:
        self._trace.command(command)
