"""Tasks of the Meta-World robot that share scenes, two to a scene: only the instruction says which of them is meant.

A task is judged by the joint of the scene, whatever the scene was made for: it is solved when the joint stands within
a tenth of its travel of the end that the instruction asks for. Meta-World's own predicates belong to the class that
made the scene, and ask nearly the same: drawer open at the very end (here 144 of 160 mm) and closed from 147 mm on,
window open from 190 of 200 mm (here 180) and closed up to 40 mm (here 20), faucet within about 0.4 rad (here 0.31) of
its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

SOLVED_SHARE = 0.1  # of the joint's travel

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Scene:
    """One Meta-World model. :param environment: the class that makes it. :param joint: what all its tasks move.

    :param body: what is placed by the seed. :param lower, upper: m, the box of the places.
    """

    environment: str
    joint: str
    body: str
    lower: Vector
    upper: Vector


@dataclass(frozen=True, slots=True)
class Grip:
    """Where and how the hand meets the object; lengths in m.

    :param part: a body or a site of the scene. :param offset: of the hand from it before it moves the object.
    :param push: unit vector of the motion; zero: around the scene's body, as a lever turns.
    :param clear: from there to where nothing is in the hand's way. :param gripper: -1 open .. 1 closed.
    """

    part: tuple[Literal["body", "site"], str]
    offset: Vector
    push: Vector
    clear: Vector
    gripper: float = 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do in a scene.

    :param end: of the joint's range, where it must be brought. :param phrases: instructions that mean it; the first is
        the usual one.
    """

    name: str
    scene: Scene
    end: Literal["lower", "upper"]
    phrases: tuple[str, ...]
    grip: Grip


_DRAWER = Scene("drawer-open-v3", "goal_slidey", "drawer", (-0.1, 0.9, 0.0), (0.1, 0.9, 0.0))
_WINDOW = Scene("window-open-v3", "window_slide", "window", (-0.1, 0.75, 0.16), (0.1, 0.85, 0.16))
_FAUCET = Scene("faucet-open-v3", "knob_Joint_1", "faucetBase", (-0.05, 0.8, 0.0), (0.05, 0.85, 0.0))
_ABOVE, _BEFORE, _AROUND = (0.0, 0.0, 0.15), (0.0, -0.12, 0.0), (0.0, 0.0, 0.0)

_ALL = (
    Task(
        "drawer-open",
        _DRAWER,
        "lower",
        ("open the drawer", "pull the drawer open", "pull out the drawer"),
        Grip(("body", "drawer_link"), (0.0, -0.16, -0.02), (0.0, -1.0, 0.0), _ABOVE, -1.0),
    ),
    Task(
        "drawer-close",
        _DRAWER,
        "upper",
        ("close the drawer", "push the drawer shut", "shut the drawer"),
        Grip(("body", "drawer_link"), (0.0, -0.23, 0.03), (0.0, 1.0, 0.0), _ABOVE),
    ),
    Task(
        "window-open",
        _WINDOW,
        "upper",
        ("open the window", "slide the window open", "slide the window to the right"),
        Grip(("site", "handleOpenStart"), (-0.03, -0.03, -0.08), (1.0, 0.0, 0.0), _BEFORE),
    ),
    Task(
        "window-close",
        _WINDOW,
        "lower",
        ("close the window", "slide the window shut", "slide the window to the left"),
        Grip(("site", "handleCloseStart"), (0.03, -0.03, -0.08), (-1.0, 0.0, 0.0), _BEFORE),
    ),
    Task(
        "faucet-open",
        _FAUCET,
        "upper",
        ("open the faucet", "turn the faucet on", "turn the faucet to the right"),
        Grip(("site", "handleStartOpen"), (0.05, 0.02, 0.025), _AROUND, _ABOVE),
    ),
    Task(
        "faucet-close",
        _FAUCET,
        "lower",
        ("close the faucet", "turn the faucet off", "turn the faucet to the left"),
        Grip(("site", "handleStartClose"), (0.05, 0.02, 0.025), _AROUND, _ABOVE),
    ),
)

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ALL})
"""Name -> task."""


def other_task(task: Task) -> Task:
    """The other task of the same scene: what undoes it."""
    return next(other for other in _ALL if other.scene == task.scene and other != task)


def progress(task: Task, position: float, travel: tuple[float, float]) -> float:
    """0 at the end that the task leads away from, 1 at the end that it asks for. :param travel: the joint's range."""
    lower, upper = travel
    share = (position - lower) / (upper - lower)
    return share if task.end == "upper" else 1.0 - share


def is_solved(task: Task, position: float, travel: tuple[float, float]) -> bool:
    """Whether the joint stands where the task asks for it."""
    return progress(task, position, travel) >= 1.0 - SOLVED_SHARE
