"""What is wired wrong on purpose, around a simulated robot and in a model file.

An evaluation must be able to fail: with a policy that looks and moves for a reason each of these costs success.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np

from phyai_engine.config import ModelConfig
from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.condition import Fault
from phyai_engine.sim.robot import JointSample, SimRobot
from phyai_engine.types import F64, U8

STALE_S = 1.0
"""Age of what a stale driver sends with fresh stamps: what is old by its stamp the node refuses by itself."""

WRONG_SCALE, WRONG_OFFSET = 0.4, 0.3
"""Another robot's statistics: its ranges are of another width, and lie elsewhere."""


def wrong_statistics(model: ModelConfig) -> ModelConfig:
    """The model with other statistics of the actions and of the state.

    :raises ConfigError: the model has none.
    """
    given = model.normalisation
    if not given.actions:
        raise ConfigError("the model has no statistics that could be wrong", got=given.kind)

    def moved(statistics: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(WRONG_SCALE * value + WRONG_OFFSET for value in values) for name, values in statistics.items()
        }

    wrong = msgspec.structs.replace(given, actions=moved(given.actions), state=moved(given.state))
    return msgspec.structs.replace(model, normalisation=wrong)


def wired_wrong(sim: SimRobot, fault: Fault) -> SimRobot:
    """The robot behind the fault; itself where the fault lies elsewhere."""
    wrong: dict[Fault, type[_Wired]] = {
        Fault.SWAPPED_CAMERAS: _SwappedCameras,
        Fault.PERMUTED_JOINTS: _PermutedJoints,
        Fault.STALE_OBSERVATIONS: _StaleObservations,
    }
    return wrong[fault](sim) if fault in wrong else sim


class _Wired:
    """Passes everything on."""

    def __init__(self, sim: SimRobot) -> None:
        self._sim = sim
        self.action_names, self.dt_s = sim.action_names, sim.dt_s

    @property
    def instruction(self) -> str:
        return self._sim.instruction

    @property
    def success(self) -> bool:
        return self._sim.success

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        self._sim.step(command, now_s)

    def hold(self) -> None:
        self._sim.hold()

    def state(self) -> Mapping[str, JointSample]:
        return self._sim.state()

    def render(self, camera: str) -> U8:
        return self._sim.render(camera)

    def reset(self, seed: int) -> None:
        self._sim.reset(seed)

    def close(self) -> None:
        self._sim.close()


class _SwappedCameras(_Wired):
    """Two cameras plugged into one another's port."""

    def render(self, camera: str) -> U8:
        other = {"front": "wrist", "wrist": "front"}
        return self._sim.render(other.get(camera, camera))


class _PermutedJoints(_Wired):
    """A driver that names its joints and axes in another order than it sends them: each is taken for its neighbour.

    A value that is held (the last action: a gripper) stays where it is.
    """

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        if command is not None:
            command = np.concatenate([np.roll(command[:-1], 1), command[-1:]])
        self._sim.step(command, now_s)

    def state(self) -> Mapping[str, JointSample]:
        return {
            topic: JointSample(sample.names, np.roll(sample.position, 1), np.roll(sample.velocity, 1))
            for topic, sample in self._sim.state().items()
        }


class _StaleObservations(_Wired):
    """Images and joints of STALE_S ago. Before there are any so old: the first ones."""

    def __init__(self, sim: SimRobot) -> None:
        super().__init__(sim)
        self._delay = max(1, round(STALE_S / sim.dt_s))
        self._forget()

    def _forget(self) -> None:
        self._states: deque[Mapping[str, JointSample]] = deque(maxlen=self._delay)
        self._images: dict[str, deque[U8]] = {}

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self._forget()

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        self._states.append(self._sim.state())
        for camera, images in self._images.items():
            images.append(self._sim.render(camera))
        super().step(command, now_s)

    def state(self) -> Mapping[str, JointSample]:
        return self._states[0] if self._states else self._sim.state()

    def render(self, camera: str) -> U8:
        if camera not in self._images:
            self._images[camera] = deque([self._sim.render(camera)], maxlen=self._delay)
        return self._images[camera][0]
