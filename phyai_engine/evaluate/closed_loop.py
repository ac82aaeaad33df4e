"""One episode in closed loop: the node's control loop, player and observation buffer on a clock of whole ticks.

A chunk comes a stated number of ticks after its observation, half a tick before the one that it is due at. No time
passes while the policy computes, so that a result does not depend on how fast this machine is.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.control.commands import Command, PlaysHere
from phyai_engine.control.control_loop import ControlLoop, LoopSettings
from phyai_engine.control.observation_buffer import ObservationBuffer
from phyai_engine.control.player import Player
from phyai_engine.errors import EngineError
from phyai_engine.evaluate.asked import Ask, AskedEngine
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.manifest import Episode
from phyai_engine.evaluate.record import EpisodeRecord, Tally
from phyai_engine.handoff import HandoffSettings
from phyai_engine.replay.clock import VirtualClock
from phyai_engine.replay.engine_link import HeldLink
from phyai_engine.safety import Safety
from phyai_engine.sim.robot import SimRobot
from phyai_engine.timing import Timing
from phyai_engine.types import F64, U8, CommandKind, Observation

START_NS = 1_000_000_000  # a clock at 0 is one that nobody has set


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What the loop must know of the policy: H, and the longest delay that it can continue (0 = any)."""

    horizon: int
    max_delay: int


class _Commands(PlaysHere):
    """Where the player writes. ``now`` is the command of this tick; None: the robot keeps its target."""

    def __init__(self) -> None:
        self.all: list[Command] = []
        self.now: Command | None = None

    def command(self, command: Command) -> None:
        self.all.append(command)
        self.now = command


class ClosedLoop:
    """One episode. Make it, then :meth:`play` it.

    :param robot: as the policy and the player know it. :param sim: reset to the episode's scene here; cameras are
        drawn only when an observation is taken.
    :param ask: the policy.
    """

    def __init__(
        self, robot: RobotConfig, sim: SimRobot, facts: PolicyFacts, condition: Condition, episode: Episode, ask: Ask
    ) -> None:
        condition.check(facts.horizon, robot.dt_s)
        self._robot, self._sim, self._condition, self._episode = robot, sim, condition, episode
        self.frames: list[dict[str, U8]] = []
        """Images of every observation, by camera, in time order."""
        self._dt_ns = round(robot.dt_s * 1e9)
        self._clock = VirtualClock(START_NS)
        self._commands = _Commands()
        self._timings: list[Timing] = []
        self._ticks = 0
        self._topics = {entry.topic for entry in robot.state}
        self._buffer = ObservationBuffer(robot)
        self._buffer.set_instruction(episode.instruction)
        delay = condition.delay_ticks(robot.dt_s)
        engine, answered = AskedEngine(ask), threading.Event()
        latency_ms = max(0.0, delay - 0.5) * robot.dt_s * 1e3
        self._link = HeldLink(engine, self._clock.now_ns, answered, latency_ms)
        self._loop = self._make_loop(facts, max(1, delay))
        sim.reset(episode.scene_seed)

    def _make_loop(self, facts: PolicyFacts, delay_steps: int) -> ControlLoop:
        """:param delay_steps: at least 1: the row of a tick is played before an answer to its observation can come."""
        robot, condition = self._robot, self._condition
        settings = HandoffSettings(
            schedule=condition.schedule,
            horizon=facts.horizon,
            execution_steps=condition.execution_horizon or max(1, facts.horizon // 2),
            dt_s=robot.dt_s,
            delay_init_steps=delay_steps,
            delay_limit_steps=facts.max_delay,
        )
        player = Player(robot, settings, Safety(epoch=0), self._commands, self._measured, clamp=condition.clamp)
        loop = LoopSettings(dt_s=robot.dt_s, schedule=condition.schedule, seed=self._episode.noise_seed)
        return ControlLoop(loop, self._snapshot, self._link, player, self._clock.now_ns, self._timings.append)

    def play(self, number: int) -> EpisodeRecord:
        """Until success, an abort, or the time is over. :param number: of the episode in its manifest."""
        began = time.perf_counter()
        self._loop.activate()
        ticks_max = round(self._condition.seconds_max / self._robot.dt_s)
        while self._ticks < ticks_max and not self._sim.success and not self._loop.player.safety.latched:
            self._tick()
        safety, counters, commands = self._loop.player.safety, self._loop.counters, self._commands.all
        return EpisodeRecord.of(
            number,
            self._episode,
            self._robot,
            success=self._sim.success,
            ticks=self._ticks,
            actions=sum(command.kind is CommandKind.ACTION for command in commands),
            values=np.array([c.values for c in commands]).reshape(len(commands), len(self._robot.actions)),
            timings=self._timings,
            tally=Tally(counters.requests, counters.failed, counters.refusals, counters.handoffs, counters.misses),
            aborted=f"{safety.cause.name.lower()}: {safety.text}" if safety.latched else "",
            wall_s=time.perf_counter() - began,
        )

    def smoke(self) -> None:
        """Up to the first chunk: whether robot, model and scene work together, before hundreds of episodes are played.

        :raises EngineError: the first request is not answered by a chunk that may be played.
        """
        self._loop.activate()
        for _ in range(self._condition.delay_ticks(self._robot.dt_s) + 2):
            self._tick()
            if self._timings:
                break
        if not self._timings or self._timings[0].outcome != "accepted":
            text = self._loop.counters.last_refusal_text or "".join(timing.text for timing in self._timings)
            raise EngineError("the first request of the evaluation failed", got=text or "no answer")

    def _tick(self) -> None:
        tick_ns = START_NS + self._ticks * self._dt_ns
        while self._link.due_ns() <= tick_ns:
            self._clock.wait(self._link.due_ns())
            self._loop.on_events()
        self._clock.wait(tick_ns)
        self._feel(tick_ns)
        self._commands.now = None
        self._loop.tick(tick_ns)
        command = self._commands.now
        self._sim.step(None if command is None else command.values)
        self._ticks += 1

    def _feel(self, now_ns: int) -> None:
        for topic, joints in self._sim.state().items():
            if topic not in self._topics:
                continue
            self._buffer.put_joints(
                topic,
                joints.names,
                joints.position,
                joints.velocity,
                now_ns,
                received_ros_ns=now_ns,
                received_mono_ns=now_ns,
            )

    def _snapshot(self, now_ros_ns: int, now_ns: int) -> Observation:
        seen = {camera.name: self._sim.render(camera.name) for camera in self._robot.cameras}
        self.frames.append(seen)
        for name, image in seen.items():
            self._buffer.put_image(name, image, now_ros_ns, received_ros_ns=now_ros_ns, received_mono_ns=now_ns)
        return self._buffer.snapshot(now_ros_ns, now_ns)

    def _measured(self) -> F64:
        return self._buffer.measured_actions(self._clock.now_ns())
