"""Demonstrations: the scripted expert in the simulated scenes, disturbed, in both orders, from anywhere.

An episode is one scene and several instructions, one after the other; some come before the last one is done. Now and
then something else moves the hand for a while, at random or as the policy would (a correction round): the expert then
recovers from where that ended. Only what the expert does on its own is learned; where that ends, a chunk ends too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.sim.expert import Expert
from phyai_engine.sim.metaworld_robot import HAND_TOPIC, MetaWorldRobot
from phyai_engine.sim.tasks import TASKS, Task, other_task
from phyai_engine.transforms.image import planes
from phyai_engine.types import F32, F64, U8

WIDTH, HEIGHT = 320, 240  # as the simulator node renders
PHRASES = tuple(phrase for task in TASKS.values() for phrase in task.phrases)
_HAND_LOWER, _HAND_UPPER = (-0.3, 0.42, 0.08), (0.3, 0.66, 0.42)  # m, wider than any evaluation starts
_STAGE_STEPS = 150
_DISTURBED = 0.03  # chance per step of a random burst
_CORRECTED = (0.7, 0.02)  # chance that the policy begins a stage, and per step that it plays again

Plays = Callable[[MetaWorldRobot, str, dict[str, U8]], F64]
"""(scene, instruction, images by camera) -> [n, 4], what to do next: the policy."""


@dataclass
class Recording:
    """Steps of whole episodes, in order, in two files; images go to theirs at once, they would fill the memory.

    :param path: of ``.images`` and ``.npz``. :param states: [n, S] robot units. :param actions: [n, A], what the expert
        would do. :param phrases: [n], index into ``PHRASES``. :param clean: [n] bool: the action was done.
    :param ages: [n], steps since the episode began, or since something unrecorded happened.
    """

    path: Path
    states: list[F64] = field(default_factory=list)
    actions: list[F64] = field(default_factory=list)
    phrases: list[int] = field(default_factory=list)
    clean: list[bool] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._images = self.path.with_suffix(".images").open("wb")

    def see(self, images: Sequence[U8]) -> None:
        """The next step's images in the model's order, each [s, s, 3] as the model sees it."""
        for image in images:
            self._images.write(image.tobytes())

    def close(self) -> None:
        """Write what is not yet written."""
        self._images.close()
        np.savez(
            self.path.with_suffix(".npz"),
            states=np.stack(self.states),
            actions=np.stack(self.actions).astype(np.float32),
            phrases=np.array(self.phrases),
            clean=np.array(self.clean),
            ages=np.array(self.ages),
        )


class Scenes:
    """The simulated robots of one process, one for each scene: making one takes a second."""

    def __init__(self, config: RobotConfig) -> None:
        self._config = config
        self._robots: dict[str, MetaWorldRobot] = {}

    def robot(self, task: Task) -> MetaWorldRobot:
        """The scene of a task, asked for it."""
        key = task.scene.environment
        if key not in self._robots:
            self._robots[key] = MetaWorldRobot(self._config, task=task.name, width=WIDTH, height=HEIGHT)
        self._robots[key].set_task(task.name)
        return self._robots[key]

    def close(self) -> None:
        """Free the rendering contexts."""
        for robot in self._robots.values():
            robot.close()


class Demonstrator:
    """Makes episodes in one process.

    :param size: of the images, pixels. :param stages: fewest and most instructions of an episode.
    :param plays: the policy that is to be corrected; None for demonstrations.
    """

    def __init__(
        self,
        robot: RobotConfig,
        size: int,
        recording: Recording,
        *,
        stages: tuple[int, int] = (2, 3),
        plays: Plays | None = None,
    ) -> None:
        self._size, self._recording, self._stages, self._plays = size, recording, stages, plays
        self._cameras = [camera.name for camera in robot.cameras]
        self._scenes = Scenes(robot)
        self._age = 0

    def episode(self, seed: int) -> None:
        """Some instructions in one scene. :param seed: of all that is drawn."""
        drawn = np.random.default_rng(seed)
        tasks = list(TASKS.values())
        task = tasks[seed % len(tasks)]
        robot = self._scenes.robot(task)
        self._age = 0
        share = float(drawn.choice([0.0, 1.0, drawn.uniform()], p=[0.35, 0.15, 0.5]))
        at = drawn.uniform(task.scene.lower, task.scene.upper)
        robot.place(drawn.uniform(_HAND_LOWER, _HAND_UPPER), at, share)
        for _ in range(int(drawn.integers(self._stages[0], self._stages[1] + 1))):
            self._stage(robot, task, drawn)
            task = other_task(task)

    def close(self) -> None:
        """Free the scenes' rendering contexts, and finish the recording."""
        self._scenes.close()
        self._recording.close()

    def _stage(self, robot: MetaWorldRobot, task: Task, drawn: np.random.Generator) -> None:
        """One instruction until it is done and a little longer, or until it is cut short."""
        robot.set_task(task.name)
        phrase = PHRASES.index(str(drawn.choice(task.phrases, p=[0.6, 0.2, 0.2])))
        expert = Expert(task, speed=drawn.uniform(0.3, 0.6), bend=float(drawn.choice([0.0, 0.08, -0.08])))
        limit = int(drawn.integers(8, 50)) if drawn.uniform() < 0.2 else _STAGE_STEPS
        linger = int(drawn.integers(3, 12))
        first, chance = (0.0, _DISTURBED) if self._plays is None else _CORRECTED
        step, disturbed = 0, drawn.uniform() < first
        while step < limit and linger > 0:
            if disturbed or drawn.uniform() < chance:
                self._disturb(robot, phrase, expert, drawn)
                disturbed = False
            action = expert.action(robot)
            self._record(robot, phrase, action, clean=True)
            robot.step(action)
            step += 1
            linger -= not action[:3].any()

    def _disturb(self, robot: MetaWorldRobot, phrase: int, expert: Expert, drawn: np.random.Generator) -> None:
        """Something else moves the hand."""
        if self._plays is not None:
            self._play(robot, phrase, int(drawn.integers(5, 60)), drawn)
            return
        velocity = np.append(drawn.uniform(-0.6, 0.6, size=3), drawn.choice([-1.0, 1.0]))
        for _ in range(int(drawn.integers(3, 14))):
            self._record(robot, phrase, expert.action(robot), clean=False)
            robot.step(np.clip(velocity + drawn.normal(0.0, 0.1, size=4), -1.0, 1.0))

    def _play(self, robot: MetaWorldRobot, phrase: int, steps: int, drawn: np.random.Generator) -> None:
        """The policy plays, so that the expert takes over where the policy gets to. Only the end is recorded."""
        assert self._plays is not None
        done = 0
        while done < steps:
            images = {camera: robot.render(camera) for camera in self._cameras}
            chunk = self._plays(robot, PHRASES[phrase], images)
            for action in chunk[: int(drawn.integers(4, len(chunk) + 1))]:
                robot.step(np.clip(action, -1.0, 1.0))
                done += 1
        self._age = 0

    def _record(self, robot: MetaWorldRobot, phrase: int, action: F64, *, clean: bool) -> None:
        made = self._recording
        made.see([as_seen(robot.render(camera), self._size) for camera in self._cameras])
        made.states.append(robot.state()[HAND_TOPIC].position.copy())
        made.actions.append(action)
        made.phrases.append(phrase)
        made.clean.append(clean)
        made.ages.append(self._age)
        self._age += 1


def as_seen(image: U8, size: int) -> U8:
    """[s, s, 3] uint8: what the model is given of a camera's image, rounded to bytes."""
    if image.shape[:2] == (size * 3 // 2, size * 2):
        return _halved(image, size)
    seen: F32 = planes(image, size, resize="float")
    rounded: U8 = np.rint((seen.transpose(1, 2, 0) + 1.0) * 127.5).astype(np.uint8)
    return rounded


def _halved(image: U8, size: int) -> U8:
    """4:3 at twice the size: resampling is the mean of four pixels; 0.4 ms instead of 1.7."""
    rows = image[0::2].astype(np.uint16) + image[1::2]
    inner = (rows[:, 0::2] + rows[:, 1::2] + 2) >> 2
    top = (size - len(inner)) // 2
    padded = np.zeros((size, size, 3), np.uint8)
    padded[top : top + len(inner)] = inner
    return padded
