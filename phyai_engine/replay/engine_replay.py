"""Replays a bag to the control loop and an engine, without a ROS graph: the node's own loop, buffer and player.

Modes:

- ``real-time``: the bag plays at the rate it was recorded, the engine answers when it does: what a node would measure.
- ``as-fast-as-possible``: a virtual clock leaps from event to event; an answer comes as much later on it as the engine
  took to compute. Pauses are skipped, so the engine never rests: its latencies are those of a busy one.
- ``step``: the same with a stated latency in place of the measured one. Nothing depends on this machine's speed: equal
  bags, models and seeds give equal chunks. Margins are NaN, for nothing was measured.

The robot of the recording does not obey: it moves as it did. A stop that latches is re-armed as soon as the observation
is fresh again, so that one bad minute does not end the measurement; nobody is moved by that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.control.control_loop import Client, ControlLoop, LoopSettings
from phyai_engine.control.intake import Intake
from phyai_engine.control.observation_buffer import ObservationBuffer
from phyai_engine.control.player import Player
from phyai_engine.errors import EngineTimeoutError, RefusalError
from phyai_engine.handoff import HandoffSettings, assumed_delay_steps
from phyai_engine.messages import UNSTAMPED_NS, stamp_ns
from phyai_engine.replay.bag import Bag, Received
from phyai_engine.replay.clock import Clock, RealClock, VirtualClock
from phyai_engine.replay.engine_link import HeldLink, Link, LiveLink
from phyai_engine.replay.examine import Examined, examine
from phyai_engine.replay.read_ahead import ReadAhead
from phyai_engine.replay.record import Record
from phyai_engine.replay.sensor_rows import SensorRows
from phyai_engine.replay.topic_map import TopicMap, map_topics
from phyai_engine.replay.trace import Trace, TracedEngine, TracedSteps
from phyai_engine.safety import Safety
from phyai_engine.serve.client import Answered, EngineClient, EngineHello
from phyai_engine.timing import ClockOffset, Window
from phyai_engine.types import AbortCause, SafetyState, Schedule

ReplayMode = Literal["real-time", "as-fast-as-possible", "step"]
STEP_MARGINS = "step mode: the latency is stated, not measured"
LAG_S = 0.005
"""A replay that hands over its messages later than this (p99) says so: the figures are then its own, too."""
PROBE_IDLE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a bag is replayed; the rest is as the node's parameters of the same names are by default.

    :param latency_ms: of every answer in mode ``step``. :param seconds: replay only this much, 0 = all.
    :param namespace: of the recorded robot's topics. :param instruction: in place of the bag's.
    :param probes: inferences after the run, each after PROBE_IDLE_S without work; none in mode ``step``.
    """

    mode: ReplayMode = "real-time"
    placement: Literal["process", "thread"] = "process"
    schedule: Schedule = Schedule.RTC
    execution_horizon: int = 0
    seed: int = 0
    threads: int = 0
    latency_ms: float = 0.0
    seconds: float = 0.0
    namespace: str = ""
    instruction: str = ""
    accept_unstamped: bool = False
    warm_up_count: int = 3
    start_timeout_s: float = 600.0
    probes: int = 0
    max_misses: int = 10
    max_observation_age_s: float = 10.0


def replay(
    path: str | Path,
    robot: RobotConfig,
    model: ModelConfig,
    settings: ReplaySettings,
    progress: Callable[[str], None] = lambda phase: None,
) -> Record:
    """Replay one bag. The bag is checked before the model is loaded.

    :param progress: told what goes on.
    :raises BagError: it cannot be read or does not fit the robot.
    :raises EngineError: the engine does not start, or is lost.
    """
    with Bag(path) as bag:
        topics = map_topics(robot, bag, settings.namespace)
        progress(f"reading {bag.name}")
        examined = examine(bag, topics, robot)
        live = settings.mode == "real-time"
        clock: Clock = RealClock() if live else VirtualClock(bag.start_ns)
        answered = threading.Event()
        client = EngineClient(
            robot,
            model,
            settings.placement,
            on_event=clock.wake if live else answered.set,
            start_timeout_s=settings.start_timeout_s,
            threads=settings.threads,
            warm_up_count=max(1, settings.warm_up_count),
        )
        hello = client.start(lambda phase: progress(f"engine: {phase}"))
        try:
            stated_ms = settings.latency_ms if settings.mode == "step" else None
            link: Link = LiveLink(client) if live else HeldLink(client, clock.now_ns, answered, stated_ms)
            run = EngineReplay(bag, topics, examined, robot, settings, hello, link, clock)
            progress(f"replaying {bag.name} ({settings.mode})")
            run.play()
            if settings.mode != "step":
                run.probe(client, settings.probes)
            return run.record()
        finally:
            client.stop()


class _Upcoming(NamedTuple):
    """A message, ``offset_ns`` after the first of the bag. ``content`` is a RefusalError where it cannot be read."""

    offset_ns: int
    topic: str
    content: Any


class EngineReplay:
    """One replay, from the first message to the last. Runs on one thread, as the node's callbacks do.

    :param link: the engine on ``clock``.
    """

    def __init__(
        self,
        bag: Bag,
        topics: TopicMap,
        examined: Examined,
        robot: RobotConfig,
        settings: ReplaySettings,
        hello: EngineHello,
        link: Link,
        clock: Clock,
    ) -> None:
        self._bag, self._topics, self._examined, self._robot = bag, topics, examined, robot
        self._settings, self._hello, self._link, self._clock = settings, hello, link, clock
        self._zero_ns = clock.now_ns()  # on the replay's clock: the first message of the bag
        self._dt_ns = round(robot.dt_s * 1e9)
        self._trace = Trace(robot, self._now_s, rests=settings.mode == "real-time")
        self._buffer = ObservationBuffer(robot, accept_unstamped=settings.accept_unstamped)
        self._buffer.set_instruction(settings.instruction or self._first_instruction())
        self._intake = Intake(self._buffer, on_jump=self._jumped, on_refused=lambda stream, reason: None)
        self._loop = self._make_loop()
        self._lag = Window(1 << 20)
        self._played_ns = 0
        self._ended = False
        self._latched = False

    def play(self) -> None:
        """The whole bag: messages, control ticks from the time that every input has spoken, and answers, in order.

        :raises BagError: the bag breaks off. :raises EngineError: the engine is lost.
        """
        if self._settings.mode == "real-time":  # elsewhere no time passes while the bag is read
            with ReadAhead(self._messages()) as ahead:
                self._play(iter(ahead))
        else:
            self._play(self._messages())
        self._played_ns = self._clock.now_ns() - self._zero_ns
        self._note_abort()
        if (lag := self._lag.percentiles()).p99 > LAG_S:
            late = f"p99 {lag.p99 * 1e3:.1f} ms, at most {lag.max * 1e3:.1f} ms"
            self._trace.event("note", f"the replay handed its messages over late: {late}")

    def _play(self, messages: Iterator[_Upcoming]) -> None:
        self._loop.activate()
        upcoming = next(messages, None)  # read before the clock starts
        self._zero_ns = self._clock.now_ns()
        tick_ns = self._zero_ns + self._examined.ready_ns - self._bag.start_ns
        while upcoming is not None and not self._ended:
            due_ns = self._zero_ns + upcoming.offset_ns
            self._clock.wait(min(due_ns, tick_ns, self._link.due_ns()))
            now_ns = self._clock.now_ns()
            if due_ns <= min(now_ns, tick_ns):  # a message of the same instant comes before the tick
                self._lag.add((now_ns - due_ns) * 1e-9)
                self._take(upcoming)
                upcoming = next(messages, None)
                continue
            self._loop.on_events()
            if self._trace.lost is not None:
                raise self._trace.lost.error
            if tick_ns <= now_ns:
                self._tick()
                tick_ns += self._dt_ns * (1 + (now_ns - tick_ns) // self._dt_ns)  # a tick that is past is skipped

    def probe(self, client: Client, count: int) -> None:
        """Inferences after a pause: the newest request asked again, in a later epoch so that nothing of it plays.

        :raises EngineTimeoutError: no answer.
        """
        request = self._trace.newest_request
        if request is None:
            return
        epoch = self._loop.player.safety.epoch
        client.cancel(epoch)
        for i in range(count):
            time.sleep(PROBE_IDLE_S)
            client.submit(replace(request, epoch=epoch + 1, chunk_id=request.chunk_id + 1 + i))
            answer = _awaited(client, request.chunk_id + 1 + i)
            self._trace.probed(PROBE_IDLE_S, answer.chunk.timings.inference_ms * 1e-3)

    def record(self) -> Record:
        """What happened. Reads the sensors of the bag once more: keeping pictures costs time that a replay has not."""
        settings, hello = self._settings, self._hello
        cameras = self._buffer.camera_stats(self._zero_ns + self._played_ns)
        measured = settings.mode != "step"
        return self._trace.record(
            self._loop.counters,
            self._sensors(),
            {stats.name: stats.delivered for stats in cameras},
            model=hello.note,
            placement=settings.placement,
            schedule=settings.schedule.value,
            mode=settings.mode,
            bag=self._bag.name,
            survey=self._examined.survey,
            first_inference_s=hello.warm_up_ms[0] * 1e-3 if measured else float("nan"),
        )

    def _sensors(self) -> SensorRows:
        rows = SensorRows(self._robot)
        offset_ns = self._examined.clock_offset_ns - self._bag.start_ns
        for upcoming in self._messages():
            if upcoming.offset_ns > self._played_ns:
                break
            t_s, content = upcoming.offset_ns * 1e-9, upcoming.content
            if isinstance(content, RefusalError) or upcoming.topic == self._topics.instruction:
                continue
            if (camera := self._topics.cameras.get(upcoming.topic)) is None:
                rows.joint_state(t_s, content)
            else:
                stamp = stamp_ns(content.header.stamp)
                stamp_s = (stamp + offset_ns) * 1e-9 if stamp > UNSTAMPED_NS else float("nan")
                rows.image(camera, t_s, stamp_s, content)
        return rows

    # -- clocks --------------------------------------------------------------------------------------------------------

    def _now_s(self) -> float:
        return (self._clock.now_ns() - self._zero_ns) * 1e-9

    def _ros_ns(self, now_ns: int) -> int:
        """The replay's clock -> ROS time, the clock of the stamps."""
        return now_ns - self._zero_ns + self._bag.start_ns - self._examined.clock_offset_ns

    # -- what comes from the bag ---------------------------------------------------------------------------------------

    def _messages(self) -> Iterator[_Upcoming]:
        """Read and parsed before they are due, which then costs no time."""
        offset_ns, end_ns = 0, round(self._settings.seconds * 1e9)
        for message in self._bag.messages(self._topics.topics):
            # A file may hold its messages slightly out of order.
            offset_ns = max(offset_ns, message.received_ns - self._bag.start_ns)
            if 0 < end_ns < offset_ns:
                return
            yield _Upcoming(offset_ns, message.topic, self._content(message))

    def _content(self, message: Received) -> Any:
        try:
            return self._bag.decode(message)
        except RefusalError as error:
            return error

    def _first_instruction(self) -> str:
        """A latched instruction may have been recorded at any time: the first one holds from the beginning."""
        topic = self._topics.instruction
        for message in self._bag.messages([topic]) if topic else ():
            content = self._content(message)
            if not isinstance(content, RefusalError):
                return str(content.data)
        return ""

    def _take(self, upcoming: _Upcoming) -> None:
        now_ns = self._clock.now_ns()
        received = ClockOffset(ros_ns=self._ros_ns(now_ns), mono_ns=now_ns, error_ns=0)
        topic, content = upcoming.topic, upcoming.content
        if topic == self._topics.instruction:
            if not self._settings.instruction and not isinstance(content, RefusalError):
                self._buffer.set_instruction(str(content.data))
        elif isinstance(content, RefusalError):
            self._intake.refuse(self._topics.inputs[topic], content, received)
        elif topic in self._topics.cameras:
            self._intake.image(self._topics.cameras[topic], content, received)
        else:
            self._intake.joints(self._topics.joints[topic], content, received)

    def _jumped(self, text: str) -> None:
        """As the node: the stamps went back, everything stops. What comes after is another recording."""
        self._loop.abort(AbortCause.CLOCK_JUMP, text)
        self._ended = True

    # -- the control loop ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now_ns = self._clock.now_ns()
        self._loop.tick(self._ros_ns(now_ns))
        self._note_abort()
        if self._latched and self._loop.player.safety.state is SafetyState.LATCHED:
            try:
                self._loop.rearm(self._ros_ns(now_ns), active=True)
            except RefusalError:
                return  # the next tick tries again
            self._latched = False
            self._trace.event("rearm", "re-armed by the replay")

    def _note_abort(self) -> None:
        safety = self._loop.player.safety
        if safety.latched and not self._latched:
            self._latched = True
            self._trace.event("abort", f"{safety.cause.name.lower()}: {safety.text}")

    def _make_loop(self) -> ControlLoop:
        settings, robot, hello = self._settings, self._robot, self._hello
        step = settings.mode == "step"
        warm_up_ms = (settings.latency_ms,) if step else hello.warm_up_ms
        handoff = HandoffSettings(
            schedule=settings.schedule,
            horizon=hello.horizon,
            execution_steps=settings.execution_horizon or max(1, hello.horizon // 2),
            dt_s=robot.dt_s,
            delay_init_steps=assumed_delay_steps(warm_up_ms, hello.horizon, robot.dt_s),
        )
        player = Player(robot, handoff, Safety(epoch=0), TracedSteps(self._trace), self._measured)
        loop_settings = LoopSettings(
            dt_s=robot.dt_s,
            schedule=settings.schedule,
            seed=settings.seed,
            misses_max=settings.max_misses,
            observation_age_s=settings.max_observation_age_s,
        )
        return ControlLoop(
            loop_settings,
            self._buffer.snapshot,
            TracedEngine(self._link, self._trace),
            player,
            self._clock.now_ns,
            self._trace.timing,
            clock_fault=lambda: STEP_MARGINS if step else "",
        )

    def _measured(self) -> Any:
        return self._buffer.measured_actions(self._clock.now_ns())


def _awaited(client: Client, chunk_id: int) -> Answered:
    """Poll for one answer: nothing else happens meanwhile."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        for event in client.poll():
            if isinstance(event, Answered) and event.chunk.chunk_id == chunk_id:
                return event
        time.sleep(0.001)
    raise EngineTimeoutError("the engine did not answer a probe", wanted="within 60 s")
