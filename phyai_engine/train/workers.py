"""Simulators in processes of their own, and one policy that answers all of them in batches."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
from msgspec import Struct

from phyai_engine.adapter import Adapter
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import EngineError
from phyai_engine.runner import Runner
from phyai_engine.sim.metaworld_robot import HAND_TOPIC, MetaWorldRobot
from phyai_engine.sim.tasks import TASKS
from phyai_engine.train.collect import Demonstrator, Recording, Scenes
from phyai_engine.types import F32, F64, U8, ModelSpec, Observation, Request, Row

_BATCH = 16


class Trial(Struct, frozen=True):
    """One closed-loop episode. :param then: the task that is asked for next in the same scene; empty for none.

    :param limit: steps of the control period for each of the two.
    """

    task: str
    seed: int
    then: str = ""
    limit: int = 200


class Episodes(Struct, frozen=True):
    """Episodes to record. :param size: of the images. :param seconds: no episode begins after that time.

    :param stages: fewest and most instructions of one. :param corrected: the policy plays parts of them.
    """

    path: str
    seeds: list[int]
    size: int
    seconds: float
    stages: tuple[int, int] = (2, 3)
    corrected: bool = False


class Verdict(Struct, frozen=True):
    """How a trial ended. :param steps: of the control period, until it was solved or the time was up."""

    trial: Trial
    solved: bool
    steps: int
    then_solved: bool = False


Job = Episodes | list[Trial]


class Player:
    """The policy as a simulator's process sees it: the product's adapter here, the model elsewhere.

    :param ask: model inputs and noise seed -> [H, A_model].
    """

    def __init__(self, adapter: Adapter, ask: Callable[[dict[str, Any], int], F32]) -> None:
        self._adapter, self._ask, self._asked = adapter, ask, 0

    def __call__(self, robot: MetaWorldRobot, instruction: str, images: dict[str, U8]) -> F64:
        """The next chunk, [H, 4]."""
        state = robot.state()[HAND_TOPIC].position
        seen = Observation(images, state, np.full_like(state, np.nan), instruction, 0, 0, 0, 0)
        self._asked += 1
        request = Request(0, self._asked, seen, None, self._asked, 0.0)
        row = self._adapter.encode(request)
        return self._adapter.decode(self._ask(dict(row.inputs), request.seed), request)


def play(robot: MetaWorldRobot, instruction: str, plays: Player, cameras: Sequence[str], steps: int) -> int:
    """Whole chunks, one after the other, until the scene's task is solved. :return: steps that it took."""
    done = 0
    while done < steps:
        for action in plays(robot, instruction, {camera: robot.render(camera) for camera in cameras}):
            robot.step(np.clip(action, -1.0, 1.0))
            done += 1
            if robot.success or done >= steps:
                return done
    return done


def _trial(trial: Trial, cameras: Sequence[str], scenes: Scenes, plays: Player) -> Verdict:
    robot = scenes.robot(TASKS[trial.task])
    robot.reset(trial.seed)
    steps = play(robot, robot.instruction, plays, cameras, trial.limit)
    solved, then_solved = robot.success, False
    if solved and trial.then:
        robot.set_task(trial.then)
        play(robot, TASKS[trial.then].phrases[0], plays, cameras, trial.limit)
        then_solved = robot.success
    return Verdict(trial, solved, steps, then_solved)


def _serve(pipe: Connection, config: RobotConfig, model: tuple[ModelConfig, ModelSpec] | None, job: Job) -> None:
    """In the simulator's process."""
    try:

        def ask(inputs: dict[str, Any], seed: int) -> F32:
            pipe.send(("ask", (inputs, seed)))
            answer: F32 = pipe.recv()
            return answer

        plays = Player(Adapter(config, *model), ask) if model else None
        if isinstance(job, Episodes):
            _record(job, config, plays if job.corrected else None, pipe)
        else:
            assert plays is not None
            cameras, scenes = [camera.name for camera in config.cameras], Scenes(config)
            for trial in job:
                pipe.send(("verdict", _trial(trial, cameras, scenes, plays)))
            scenes.close()
        pipe.send(("end", None))
    except (EOFError, ConnectionError):
        return  # the process that asked is gone
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))


def _record(job: Episodes, config: RobotConfig, plays: Player | None, pipe: Connection) -> None:
    demonstrator = Demonstrator(config, job.size, Recording(Path(job.path)), stages=job.stages, plays=plays)
    end = time.monotonic() + job.seconds
    for seed in job.seeds:
        demonstrator.episode(seed)
        pipe.send(("verdict", seed))
        if time.monotonic() > end:
            break
    demonstrator.close()


def run(
    config: RobotConfig,
    jobs: Sequence[Job],
    on_verdict: Callable[[Any], None],
    policy: tuple[ModelConfig, Runner] | None = None,
) -> None:
    """One process for each of ``jobs``; waits for all.

    :param on_verdict: told each finished trial, or the seed of each recorded episode.
    :raises EngineError: one of them failed.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes: dict[Connection, SpawnProcess] = {}
    model = None if policy is None else (policy[0], policy[1].model.spec)
    for job in jobs:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, config, model, job), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = process
    try:
        while pipes:
            asked: list[tuple[Connection, Any]] = []
            for pipe in cast("list[Connection]", wait(list(pipes))):
                kind, content = _received(pipe)
                if kind == "ask":
                    asked.append((pipe, content))
                elif kind == "verdict":
                    on_verdict(content)
                elif kind == "end":
                    pipes.pop(pipe).join(10)
                else:
                    raise EngineError("a simulator's process failed", got=content)
            if asked and policy is not None:
                _answer(policy[1], asked)
    finally:
        for process in pipes.values():
            process.kill()


def _received(pipe: Connection) -> tuple[str, Any]:
    try:
        received: tuple[str, Any] = pipe.recv()
    except EOFError:
        return "error", "it ended without a word"
    return received


def _answer(runner: Runner, asked: Sequence[tuple[Connection, Any]]) -> None:
    spec = runner.model.spec
    nothing = np.zeros((spec.horizon, spec.action_dim), np.float32)
    gain = np.zeros(len(spec.times), np.float32)
    for first in range(0, len(asked), _BATCH):
        part = asked[first : first + _BATCH]
        rows = [Row(inputs, nothing, nothing, gain, seed) for _, (inputs, seed) in part]
        for (pipe, _), result in zip(part, runner.run(rows), strict=True):
            pipe.send(result.actions)
