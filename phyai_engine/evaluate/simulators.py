"""Simulator processes around one policy: episodes go out, requests and records come back.

The policy stays in this process and answers what has been asked meanwhile as one batch; each simulator waits for its
own answer, on whose clock no time passes.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, Protocol

from phyai_engine.config import RobotConfig
from phyai_engine.errors import EngineDiedError, EngineError, EngineTimeoutError, PhyaiError, RefusalError
from phyai_engine.evaluate.asked import Ask
from phyai_engine.evaluate.closed_loop import ClosedLoop, PolicyFacts
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.faults import wired_wrong
from phyai_engine.evaluate.film import save_film
from phyai_engine.evaluate.manifest import Episode
from phyai_engine.evaluate.record import EpisodeRecord
from phyai_engine.sim import SimRobot, load_sim
from phyai_engine.types import Chunk, Refusal, Request

STALL_S = 600.0
"""Longest silence of all simulators together: one step takes a millisecond, a full-size model on a CPU minutes."""
END_S = 10.0
SMOKE = -1
"""Number of what is no episode, only its first request."""

Numbered = tuple[int, Episode]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every simulator needs.

    :param films: folder of the films, None for none. :param filmed: numbers of the episodes.
    """

    robot: RobotConfig
    facts: PolicyFacts
    condition: Condition
    films: Path | None = None
    filmed: frozenset[int] = frozenset()


class Answering(Protocol):
    """What is needed of a policy: one answer per request, in order."""

    def infer(self, requests: Sequence[Request]) -> Sequence[Chunk | PhyaiError]: ...


class _Unanswered(NamedTuple):
    """An error on its way to the simulator: exceptions with arguments by name do not survive a pipe."""

    refusal: int
    text: str


class _Broken(NamedTuple):
    """The simulator cannot go on."""

    text: str


def play_all(
    policy: Answering,
    setup: Setup,
    episodes: Iterable[Numbered],
    *,
    workers: int,
    batch: int,
    on_record: Callable[[EpisodeRecord], None],
) -> None:
    """Play every episode once.

    :param batch: most requests that are computed together; with 1 nothing depends on which simulator was faster.
    :param on_record: told of each episode as it ends, in the order of their ends.
    :raises EngineError: a simulator failed or ended, or all of them stood still.
    """
    waiting = deque(episodes)
    context = multiprocessing.get_context("spawn")  # forked, a child would share our OpenGL and CUDA state
    simulators: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(waiting))):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=simulate, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            simulators[ours] = process
        _serve(policy, simulators, waiting, batch, on_record)
    finally:
        for connection, process in simulators.items():
            connection.close()
            process.join(END_S)
            if process.is_alive():
                process.kill()


def smoke(policy: Answering, setup: Setup, episode: Episode) -> None:
    """One request of an episode, answered and accepted.

    In a process of its own, too: where Mesa draws in software, a process that has drawn and then imports Triton dies of
    their two LLVMs.

    :raises EngineError: it was not.
    """
    play_all(policy, setup, [(SMOKE, episode)], workers=1, batch=1, on_record=lambda record: None)


def _serve(
    policy: Answering,
    simulators: Mapping[Connection, BaseProcess],
    waiting: deque[Numbered],
    batch: int,
    on_record: Callable[[EpisodeRecord], None],
) -> None:
    busy = set(simulators)
    while busy:
        asked: list[tuple[Connection, Request]] = []
        ready = wait(list(busy), STALL_S)
        if not ready:
            raise EngineTimeoutError("the simulators stand still", wanted=f"a word within {STALL_S:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)  # we made them
            message = _heard(connection, simulators[connection])
            if isinstance(message, Request):
                asked.append((connection, message))
                continue
            if message is not None:
                on_record(message)
            if not waiting:
                busy.remove(connection)
            connection.send(waiting.popleft() if waiting else None)
        for first in range(0, len(asked), batch):
            part = asked[first : first + batch]
            answers = policy.infer([request for _, request in part])
            for (connection, _), answer in zip(part, answers, strict=True):
                connection.send(answer if isinstance(answer, Chunk) else _packed(answer))


def _heard(connection: Connection, process: BaseProcess) -> Request | EpisodeRecord | None:
    """What a simulator says: a request, the record of its episode, or None when it is ready for one.

    :raises EngineError: it cannot go on.
    """
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(END_S)
        raise EngineDiedError("a simulator process ended", got=f"exit code {process.exitcode}") from None
    if isinstance(message, _Broken):
        raise EngineError("a simulator failed", got=message.text)
    assert message is None or isinstance(message, (Request, EpisodeRecord))  # only simulate() speaks
    return message


def _packed(error: PhyaiError) -> _Unanswered:
    code = error.code if isinstance(error, RefusalError) else Refusal.NONE
    return _Unanswered(int(code), str(error).removeprefix(f"{code.name.lower()}: "))


def simulate(connection: Connection, setup: Setup) -> None:
    """Entry of a simulator process."""
    scene = Scene(setup)
    try:
        connection.send(None)
        ask = partial(_ask, connection)
        while (numbered := connection.recv()) is not None:
            number, episode = numbered
            if number == SMOKE:
                scene.loop(episode, ask).smoke()
                connection.send(None)
            else:
                connection.send(scene.play(number, episode, ask))
    except (EOFError, ConnectionError):
        return  # the policy's process is gone, and has said why
    except Exception as error:
        text = str(error) if isinstance(error, PhyaiError) else traceback.format_exc()
        connection.send(_Broken(text))
    finally:
        scene.close()


def _ask(connection: Connection, request: Request) -> Chunk | PhyaiError:
    connection.send(request)
    answer = connection.recv()
    if isinstance(answer, Chunk):
        return answer
    assert isinstance(answer, _Unanswered)  # only _serve speaks
    if answer.refusal:
        return RefusalError(Refusal(answer.refusal), answer.text)
    return EngineError(answer.text)


class Scene:
    """The simulated robot of one task at a time; another task makes another."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._task = ""
        self._sim: SimRobot | None = None

    def loop(self, episode: Episode, ask: Ask) -> ClosedLoop:
        """The closed loop of one episode, at its beginning."""
        setup = self._setup
        if self._sim is None or self._task != episode.task:
            self.close()
            self._sim = load_sim(
                setup.robot,
                task=episode.task,
                seed=episode.scene_seed,
                width=setup.condition.image_width,
                height=setup.condition.image_height,
            )
            self._task = episode.task
        sim = wired_wrong(self._sim, setup.condition.fault)
        return ClosedLoop(setup.robot, sim, setup.facts, setup.condition, episode, ask)

    def play(self, number: int, episode: Episode, ask: Ask) -> EpisodeRecord:
        """One episode, and its film where one is wanted."""
        loop = self.loop(episode, ask)
        record = loop.play(number)
        if self._setup.films is not None and number in self._setup.filmed:
            save_film(loop.frames, self._setup.films / f"{number:05d}.gif")
        return record

    def close(self) -> None:
        """Free the cameras."""
        if self._sim is not None:
            self._sim.close()
            self._sim = None
