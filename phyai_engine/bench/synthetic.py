"""Synthetic requests: seeded camera frames, a state within the robot's limits, a prompt of a given length."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from phyai_engine.adapter import Adapter
from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.types import F64, U8, Observation, Request

FRAME = (480, 640, 3)
_FRAMES = 4  # sets of camera frames, used in turn: one set would stay in the caches
_WORDS = "pick up the red block and place it into the open box on the left side of the table then "
_LETTERS_PER_TOKEN = 8  # more than a trained tokenizer makes of these words


def with_cameras(robot: RobotConfig, count: int | None, roles: Sequence[str] | None) -> RobotConfig:
    """The robot with its first cameras only.

    :param count: how many; None keeps what robot and roles allow. :param roles: new roles in the model's order, None
        keeps the robot file's own.
    :raises ConfigError: the robot or the model has fewer.
    """
    most = len(robot.cameras) if roles is None else min(len(robot.cameras), len(roles))
    if count is None:
        count = most
    if count > most:
        raise ConfigError(
            "not that many cameras",
            got=count,
            wanted=f"<= {most}: robot {robot.robot_id} has {len(robot.cameras)}"
            + ("" if roles is None else f", the model {len(roles)}"),
            where="--cameras",
        )
    kept = robot.cameras[:count]
    if roles is not None:
        kept = tuple(
            msgspec.structs.replace(camera, role=role) for camera, role in zip(kept, roles[:count], strict=True)
        )
    return msgspec.structs.replace(robot, cameras=kept)


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """``requests(i)`` is the i-th of an endless, reproducible series.

    :param prompt_tokens: valid tokens of each; 0 where the model reads none. The state is the same in all, since its
        digits are tokens too.
    """

    seed: int
    instruction: str
    prompt_tokens: int
    state: F64
    frames: tuple[Mapping[str, U8], ...]

    def __call__(self, index: int) -> Request:
        return request(self.frames[index % len(self.frames)], self.state, self.instruction, self.seed + index, index)


def requests(adapter: Adapter, *, seed: int, prompt_tokens: int) -> Requests:
    """For this robot and model.

    :param prompt_tokens: length of the prompt, where the model reads one.
    :raises ConfigError: a prompt of that length cannot be made.
    """
    robot, draw = adapter.robot, np.random.default_rng(seed)
    state = _state(robot, draw)
    frames = tuple(
        {camera.name: draw.integers(0, 256, FRAME, dtype=np.uint8) for camera in robot.cameras} for _ in range(_FRAMES)
    )
    small = {camera.name: np.zeros((8, 8, 3), dtype=np.uint8) for camera in robot.cameras}

    def tokens(instruction: str) -> int:
        return int(adapter.encode(request(small, state, instruction, seed, 0)).inputs["token_mask"].sum())

    if "tokens" not in adapter.spec.inputs:
        return Requests(seed, "measure", 0, state, frames)
    instruction = fill(tokens, prompt_tokens)
    return Requests(seed, instruction, tokens(instruction), state, frames)


def request(frames: Mapping[str, U8], state: F64, instruction: str, seed: int, index: int) -> Request:
    """One request of an unconditioned chunk."""
    seen = Observation(
        images=frames,
        state=state,
        velocity=np.zeros_like(state),
        instruction=instruction,
        oldest_ros_ns=0,
        newest_ros_ns=0,
        capture_mono_ns=0,
        snapshot_mono_ns=0,
    )
    return Request(0, index, seen, None, seed=seed, remaining_ms=float("nan"))


def fill(tokens: Callable[[str], int], wanted: int) -> str:
    """The shortest text with that many tokens: exact for a tokenizer of bytes, a token more at most for others.

    :param tokens: text -> tokens of the whole prompt, which may be cut where it is too long.
    :raises ConfigError: no text is that short, or that long.
    """
    longest = wanted * _LETTERS_PER_TOKEN
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts that are tried may be cut, the shortest that fits is not
        least, most = tokens(""), tokens(text(longest))
        if not least <= wanted <= most:
            bound = f">= {least}" if wanted < least else f"<= {most}"
            raise ConfigError("no such prompt", got=f"{wanted} tokens", wanted=bound, where="--prompt-tokens")
        short, long = 0, longest
        while short < long:
            middle = (short + long) // 2
            if tokens(text(middle)) < wanted:
                short = middle + 1
            else:
                long = middle
    return text(long)


def text(length: int) -> str:
    """That many letters of a sentence. It never ends in a blank, which prompts strip."""
    cut = (_WORDS * (length // len(_WORDS) + 1))[:length]
    return f"{cut[:-1]}e" if cut.endswith(" ") else cut


def _state(robot: RobotConfig, draw: np.random.Generator) -> F64:
    """[S] robot units: in the middle half of the limits of the action that drives an entry, else within 0..0.5."""
    state = draw.uniform(0.0, 0.5, len(robot.state))
    for action, at in zip(robot.actions, robot.state_index(), strict=True):
        if robot.action_type == "joint_position" and np.isfinite([action.lower, action.upper]).all():
            state[at] = draw.uniform(0.25, 0.75) * (action.upper - action.lower) + action.lower
    return state
