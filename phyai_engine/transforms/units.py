"""Robot units <-> policy units: per entry an optional map that is not affine, then ``scale`` and ``offset``.

policy = scale * map(robot) + offset. A map may differ between state and actions: where a robot measures a gripper in
one unit and is commanded in another, the policy was trained on both.

``aloha_gripper``: ALOHA's own runtime (0 closed .. 1 open, for what it measures and for what it is commanded) <-> the
units of openpi's ALOHA checkpoints (``adapt_to_pi``). The runtime's state is the finger's position on its rail,
0.01844 m closed .. 0.05800 m open, scaled to 0..1; the policy reads the angle a of the motor whose horn (r = 0.022 m)
pushes the finger through a rod (l = 0.036 m):

    x = 0.01844 + 0.03956 v,   sin a = (r^2 + x^2 - l^2) / (2 r x),   state = (a - 0.5476) / (1.6296 - 0.5476)

The runtime's command is the motor's angle itself, -0.6213 rad closed .. 1.4910 rad open, scaled to 0..1; the policy
gives it in rad from 0.5476 on, and not divided by 1.082 as the state is:

    action = (-0.6213 + 2.1123 v) - 0.5476

The state's map holds for x within l - r .. l + r, v = -0.112..1; beyond, the angle stays at its end, as it does there.
A driver that publishes the finger in metres or takes the motor's angle must be brought to 0..1 first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from phyai_engine.config import ActionEntry, StateEntry
from phyai_engine.types import F64

_CLOSED_M, _OPEN_M = 0.01844, 0.05800
_CLOSED_RAD, _OPEN_RAD = -0.6213, 1.4910
_HORN_M, _ROD_M = 0.022, 0.036
_PI_0_RAD, _PI_1_RAD = 0.5476, 1.6296  # the policy's 0 and 1 of the state


def _finger_to_pi(value: F64) -> F64:
    finger_m = np.clip(_CLOSED_M + value * (_OPEN_M - _CLOSED_M), _ROD_M - _HORN_M, _ROD_M + _HORN_M)
    sine = (_HORN_M**2 + finger_m**2 - _ROD_M**2) / (2 * _HORN_M * finger_m)
    angle_rad: F64 = np.arcsin(np.clip(sine, -1.0, 1.0))  # rounding passes 1 at the ends
    return (angle_rad - _PI_0_RAD) / (_PI_1_RAD - _PI_0_RAD)


def _finger_from_pi(value: F64) -> F64:
    angle_rad = np.clip(_PI_0_RAD + value * (_PI_1_RAD - _PI_0_RAD), -np.pi / 2, np.pi / 2)
    finger_m = _HORN_M * np.sin(angle_rad) + np.sqrt(_ROD_M**2 - (_HORN_M * np.cos(angle_rad)) ** 2)
    position: F64 = (finger_m - _CLOSED_M) / (_OPEN_M - _CLOSED_M)
    return position


def _motor_to_pi(value: F64) -> F64:
    return _CLOSED_RAD + value * (_OPEN_RAD - _CLOSED_RAD) - _PI_0_RAD


def _motor_from_pi(value: F64) -> F64:
    return (value + _PI_0_RAD - _CLOSED_RAD) / (_OPEN_RAD - _CLOSED_RAD)


_Map = tuple[Callable[[F64], F64], Callable[[F64], F64]]  # to the policy, to the robot
_MAPS: Mapping[tuple[str, str], _Map] = MappingProxyType(
    {
        ("aloha_gripper", "state"): (_finger_to_pi, _finger_from_pi),
        ("aloha_gripper", "actions"): (_motor_to_pi, _motor_from_pi),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class PolicyUnits:
    """The units of one vector of a robot file.

    :param scale, offset: [n] float64. :param maps: (column, map) of the entries that have one.
    """

    scale: F64
    offset: F64
    maps: tuple[tuple[int, _Map], ...]

    @staticmethod
    def of(entries: Sequence[StateEntry | ActionEntry], part: Literal["state", "actions"]) -> PolicyUnits:
        """What the entries of a robot file say."""
        return PolicyUnits(
            np.array([entry.scale for entry in entries]),
            np.array([entry.offset for entry in entries]),
            tuple((i, _MAPS[entry.units, part]) for i, entry in enumerate(entries) if entry.units != "affine"),
        )

    def to_policy(self, values: F64) -> F64:
        """[..., n] robot units -> [..., n]."""
        return self._mapped(values, 0) * self.scale + self.offset

    def to_robot(self, values: F64) -> F64:
        """[..., n] policy units -> [..., n] robot units: the inverse, where the maps have one."""
        return self._mapped((values - self.offset) / self.scale, 1)

    def _mapped(self, values: F64, way: int) -> F64:
        if not self.maps:
            return values
        out = values.copy()
        for column, both in self.maps:
            out[..., column] = both[way](values[..., column])
        return out
