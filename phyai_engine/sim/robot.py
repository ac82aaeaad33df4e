"""What every simulated robot offers, and the command input with its own timeout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from phyai_engine.types import F64, U8, ActionType


class JointSample(NamedTuple):
    """Joints of one publisher: [n] names, positions and velocities (per second of ROS time), topic units."""

    names: tuple[str, ...]
    position: F64
    velocity: F64


class SimRobot(Protocol):
    """A simulated robot: stepped by one thread, rendered by another.

    ``render`` and ``close`` belong to the rendering thread (an OpenGL context cannot move), all else to the
    stepping one.
    """

    action_names: tuple[str, ...]
    dt_s: float

    @property
    def instruction(self) -> str:
        """What a person would say to have the task done."""
        ...

    @property
    def success(self) -> bool:
        """True once the task was solved since the last reset; False for a robot without a task."""
        ...

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        """One control period of ``dt_s``.

        :param command: [A] float64 in the order of ``action_names``; None: nothing new, the target stays.
        :param now_s: the controller's clock, for robots that follow trajectories; None: one period after the
            last step.
        """
        ...

    def hold(self) -> None:
        """Stop as soon as the robot can and stay there: what its own watchdog does when commands cease."""
        ...

    def state(self) -> Mapping[str, JointSample]:
        """Publisher topic -> newest joint sample."""
        ...

    def render(self, camera: str) -> U8:
        """One camera's image of this instant, [h, w, 3] uint8 RGB, a new array each time.

        :raises ConfigError: unknown camera, or no off-screen rendering on this machine.
        """
        ...

    def reset(self, seed: int) -> None:
        """Start over; equal seeds give equal scenes."""
        ...

    def close(self) -> None:
        """Free the rendering resources; from the thread that rendered."""
        ...


class CommandInput:
    """Received commands until the robot takes them, with the robot's own timeout.

    Positions: the newest wins. Deltas: each is applied once, in order, one per control period, because sender
    and robot run on unsynchronised clocks; beyond ``pending_max`` the oldest is dropped and counted, so that
    the robot never lags. Used by one thread.
    """

    def __init__(self, kind: ActionType, *, timeout_s: float, pending_max: int = 3) -> None:
        self._timeout_s = timeout_s
        self._pending: deque[F64] = deque(maxlen=pending_max if kind is ActionType.CARTESIAN_DELTA else 1)
        self._counts_drops = kind is ActionType.CARTESIAN_DELTA
        self._last_s: float | None = None
        self._expired = False
        self.dropped = 0

    def put(self, values: F64, now_s: float) -> None:
        """Accept one command, received at ``now_s`` (any steady clock)."""
        if self._counts_drops and len(self._pending) == self._pending.maxlen:
            self.dropped += 1
        self._pending.append(np.array(values, dtype=np.float64))
        self._last_s, self._expired = now_s, False

    def take(self) -> F64 | None:
        """The command of this control period, None if none is pending."""
        return self._pending.popleft() if self._pending else None

    def expired(self, now_s: float) -> bool:
        """True once per silence: the last command is older than the timeout. Pending ones are discarded."""
        if self._last_s is None or self._expired or now_s - self._last_s <= self._timeout_s:
            return False
        self._pending.clear()
        self._expired = True
        return True

    def clear(self) -> None:
        """Forget everything, as after a reset: no timeout until the next command."""
        self._pending.clear()
        self._last_s, self._expired = None, False
