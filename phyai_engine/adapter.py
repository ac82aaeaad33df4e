"""Robot <-> model: cameras, joint order, units, normalisation, prompt, committed actions. Immutable.

Inputs it can make, each only where ``ModelSpec.inputs`` declares it (C cameras, P tokens):

| name       | shape     | content                                                                        |
|------------|-----------|--------------------------------------------------------------------------------|
| images     | [C,3,s,s] | float32 in [-1, 1], the model's camera order; -1 where the robot has no camera |
| image_mask | [C]       | bool, False where the robot has no camera                                      |
| tokens     | [P]       | int64 prompt, padded on the right                                              |
| token_mask | [P]       | bool, valid tokens                                                             |
| state      | [n]       | float32, normalised, zeros beyond the robot's entries                          |
| anchor     | [A]       | float32, the measured position of what each action commands, normalised as an  |
|            |           | action; NaN for rates, deltas and padding                                      |
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.rtc import gain_table, prefix_weights
from phyai_engine.transforms import image as images
from phyai_engine.transforms import prompt
from phyai_engine.transforms import state as states
from phyai_engine.transforms.normalise import scaling
from phyai_engine.types import (
    F32,
    F64,
    ActionType,
    CancelToken,
    Committed,
    ModelSpec,
    Observation,
    Refusal,
    Request,
    Row,
)

Inputs = dict[str, NDArray[Any]]
_INPUTS = ("images", "image_mask", "tokens", "token_mask", "state", "anchor")


class Adapter:
    """Everything that differs between this robot and this model.

    :raises ConfigError: the two do not fit: unknown camera role, too few action or state dimensions,
        statistics of another length or without a finite range, an input nobody can make, a tokenizer with
        more tokens than the model knows.
    """

    def __init__(self, robot: RobotConfig, model: ModelConfig, spec: ModelSpec) -> None:
        self.robot = robot
        self.spec = spec
        self._model = model
        self._cameras = _camera_order(robot, spec)
        self._state_scale = np.array([s.scale for s in robot.state])
        self._state_offset = np.array([s.offset for s in robot.state])
        self._action_scale = np.array([a.scale for a in robot.actions])
        self._action_offset = np.array([a.offset for a in robot.actions])
        lower, upper = (
            robot.limit(name, np.nan) * self._action_scale + self._action_offset for name in ("lower", "upper")
        )
        action_limits = np.minimum(lower, upper), np.maximum(lower, upper)
        self._actions = scaling(model.normalisation, "actions", action_limits, robot.action_names)
        self._state = scaling(model.normalisation, "state", self._state_limits(), robot.state_names)
        self._driven = robot.state_index()
        self._tokenizer = prompt.tokenizer_from(model.prompt.tokenizer)
        self._check_spec()

    # --- robot -> model ---

    def encode(self, request: Request, cancel: CancelToken | None = None) -> Row:
        """One request -> one row.

        :raises RefusalError: MISSING camera, MALFORMED or NOT_FINITE content.
        """
        seen = request.observation
        self._check_observation(seen)
        with np.errstate(over="ignore"):  # what overflows is refused by name
            target, weight, gain = self._guidance(request)
            inputs = self._inputs(seen)
        return Row(
            inputs=inputs,
            target=target,
            weight=weight,
            gain=gain,
            seed=request.seed,
            delay_steps=0 if request.committed is None else request.committed.delay_steps,
            epoch=request.epoch,
            cancel=CancelToken() if cancel is None else cancel,
        )

    def encode_actions(self, actions: F64, state: F64) -> tuple[F32, NDArray[np.bool_]]:
        """Robot units -> the model's space: the inverse of :meth:`decode`.

        :param actions: [n, A_robot] float64. :param state: [S] of the same request, robot units; absolute
            actions and step-to-step deltas do not depend on it.
        :returns: [n, A_model] float32, zeros in padded columns; [A_model] bool, False where nothing can be
            inverted (padding, dimensions that were constant in training).
        :raises RefusalError: NOT_FINITE: a value is too large for the model's space.
        """
        policy = actions * self._action_scale + self._action_offset
        normalised = states.pad(self._actions.normalise(policy), self.spec.action_dim)
        _check_vectors(normalised[:, : len(self.robot.actions)], self.robot.action_names, "actions, normalised")
        known = np.zeros(self.spec.action_dim, dtype=np.bool_)
        known[: len(self.robot.actions)] = ~self._actions.constant
        return normalised, known

    # --- model -> robot ---

    def decode(self, actions: F32, request: Request) -> F64:
        """The model's answer -> robot units. Nothing is clipped: limits are the envelope's to judge.

        :param actions: [H, A_model] float32. :param request: the one that was encoded.
        :returns: [H, A_robot] float64.
        """
        policy = self._actions.unnormalise(actions[:, : len(self.robot.actions)])
        robot: F64 = (policy - self._action_offset) / self._action_scale
        return robot

    # --- parts ---

    def _inputs(self, seen: Observation) -> Inputs:
        wanted = self.spec.inputs
        policy = seen.state * self._state_scale + self._state_offset
        normalised = self._state.normalise(policy)
        _check_vectors(states.pad(normalised, normalised.size)[None], self.robot.state_names, "state, normalised")
        made: Inputs = {}
        if "images" in wanted:
            size = wanted["images"].shape[-1]
            made["images"] = np.stack([self._planes(seen, camera, size) for camera in self._cameras])
        if "image_mask" in wanted:
            made["image_mask"] = np.array([camera is not None for camera in self._cameras])
        if "tokens" in wanted:
            made["tokens"], made["token_mask"] = self._tokens(seen.instruction, normalised)
        if "state" in wanted:
            made["state"] = states.pad(normalised, wanted["state"].shape[0])
        if "anchor" in wanted:
            made["anchor"] = self._anchor(seen.state)
        return {name: made[name] for name in wanted}

    def _planes(self, seen: Observation, camera: str | None, size: int) -> F32:
        if camera is None:
            return images.black_planes(size)
        return images.to_planes(images.resize_pad(seen.images[camera], size))

    def _tokens(self, instruction: str, state: F64) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        if self._model.prompt.form == "state_bins":
            ids = prompt.with_state(self._tokenizer, instruction, states.bins(state))
        else:
            ids = prompt.plain(self._tokenizer, instruction)
        size = self.spec.inputs["tokens"].shape[0]
        return prompt.fit(ids, self._model.prompt.max_tokens, size, self._tokenizer.pad)

    def _anchor(self, state: F64) -> F32:
        anchor = np.full(self.spec.action_dim, np.nan, dtype=np.float32)
        if self.robot.kind is ActionType.JOINT_POSITION:
            normalised, known = self.encode_actions(state[self._driven][None], state)
            anchor[known] = normalised[0, known]
        return anchor

    def _guidance(self, request: Request) -> tuple[F32, F32, F32]:
        """Y [H,A], W [H,A], k [N]. Slots without a target hold the last committed action, at weight 0.

        Never zeros there: 0 in normalised space is the middle of the data, and would show as a seam.
        """
        spec, committed = self.spec, request.committed
        target = np.zeros((spec.horizon, spec.action_dim), dtype=np.float32)
        weight = np.zeros_like(target)
        steps = len(spec.times)
        if committed is None or len(committed.actions) == 0:
            return target, weight, np.zeros(steps, dtype=np.float32)
        self._check_committed(committed)
        rows, known = self.encode_actions(committed.actions, request.observation.state)
        count, rtc = len(rows), self._model.rtc
        target[:count], target[count:] = rows, rows[-1]
        decay = prefix_weights(spec.horizon, min(committed.delay_steps, count), count, rtc.mask)
        weight[:] = decay[:, None] * known
        return target, weight, gain_table(spec.times, steps if rtc.beta is None else rtc.beta)

    def _state_limits(self) -> tuple[F64, F64]:
        """[S] policy units: limits of the joint action that drives an entry; -1..1 (no change) elsewhere."""
        lower, upper = np.full(len(self.robot.state), -1.0), np.full(len(self.robot.state), 1.0)
        if self.robot.kind is ActionType.JOINT_POSITION:
            for action, at in zip(self.robot.actions, self.robot.state_index(), strict=True):
                ends = np.array([action.lower, action.upper]) * self._state_scale[at] + self._state_offset[at]
                lower[at], upper[at] = ends.min(), ends.max()
        return lower, upper

    # --- checks ---

    def _check_spec(self) -> None:
        spec, robot = self.spec, self.robot
        unknown = sorted(set(spec.inputs) - set(_INPUTS))
        if unknown:
            raise ConfigError(
                f"model {spec.family} needs inputs that nobody makes: {', '.join(unknown)}",
                wanted=", ".join(_INPUTS),
            )
        if spec.action_dim < len(robot.actions):
            raise ConfigError(
                f"model {spec.family} has fewer actions than robot {robot.robot_id}",
                got=spec.action_dim,
                wanted=f">= {len(robot.actions)}",
                do="Choose a model of at least that action_dim.",
            )
        if "state" in spec.inputs and spec.inputs["state"].shape[0] < len(robot.state):
            raise ConfigError(
                f"model {spec.family} takes a shorter state than robot {robot.robot_id} has",
                got=spec.inputs["state"].shape[0],
                wanted=f">= {len(robot.state)}",
            )
        if "tokens" in spec.inputs and self._model.prompt.max_tokens > spec.inputs["tokens"].shape[0]:
            raise ConfigError(
                "prompt.max_tokens exceeds the model's prompt length",
                got=self._model.prompt.max_tokens,
                wanted=f"<= {spec.inputs['tokens'].shape[0]}",
            )
        if "tokens" in spec.inputs and 0 < spec.vocabulary < self._tokenizer.vocabulary:
            raise ConfigError(
                f"the tokenizer has more tokens than model {spec.family} knows",
                got=f"{self._tokenizer.vocabulary} of {self._model.prompt.tokenizer!r}",
                wanted=f"<= {spec.vocabulary}",
                where="prompt.tokenizer",
                do="Raise options.vocab or choose another tokenizer.",
            )

    def _check_observation(self, seen: Observation) -> None:
        names = [camera.name for camera in self.robot.cameras]
        for name in names:
            if name not in seen.images:
                raise RefusalError(Refusal.MISSING, f"no image of camera {name!r}", got=sorted(seen.images))
        unknown = sorted(set(seen.images) - set(names))
        if unknown:
            raise RefusalError(Refusal.MALFORMED, f"unknown cameras {', '.join(unknown)}", wanted=names)
        for name in names:
            image = seen.images[name]
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
                raise RefusalError(
                    Refusal.MALFORMED,
                    f"the image of camera {name!r} has the wrong form",
                    got=f"{image.dtype} {list(image.shape)}",
                    wanted="uint8 [h, w, 3]",
                )
        _check_vectors(seen.state[None], self.robot.state_names, "state")

    def _check_committed(self, committed: Committed) -> None:
        _check_vectors(committed.actions, self.robot.action_names, "committed actions")
        if len(committed.actions) > self.spec.horizon or committed.delay_steps < 0:
            raise RefusalError(
                Refusal.MALFORMED,
                "the committed actions do not fit the horizon",
                got=f"{len(committed.actions)} rows, delay {committed.delay_steps}",
                wanted=f"at most {self.spec.horizon} rows, delay >= 0",
            )


def _check_vectors(rows: F32 | F64, names: tuple[str, ...], what: str) -> None:
    """[n, k] rows must have a finite value for every name."""
    if rows.ndim != 2 or rows.shape[1] != len(names):
        raise RefusalError(
            Refusal.MALFORMED,
            f"{what}: wrong shape",
            got=list(rows.shape),
            wanted=f"[n, {len(names)}] for {', '.join(names)}",
        )
    bad = np.argwhere(~np.isfinite(rows))
    if bad.size:
        row, column = bad[0]
        raise RefusalError(
            Refusal.NOT_FINITE,
            f"{what}: {names[column]} is not finite",
            got=rows[row, column],
            where=f"row {row}",
        )


def _camera_order(robot: RobotConfig, spec: ModelSpec) -> tuple[str | None, ...]:
    """For each of the model's camera roles the robot's camera, None where it has none."""
    for camera in robot.cameras:
        if camera.role not in spec.cameras:
            raise ConfigError(
                f"camera {camera.name!r} has a role that model {spec.family} does not know",
                got=camera.role,
                wanted=f"one of {', '.join(spec.cameras) or '(the model sees no camera)'}",
                where=f"robot {robot.robot_id}",
            )
    names = {camera.role: camera.name for camera in robot.cameras}
    return tuple(names.get(role) for role in spec.cameras)
