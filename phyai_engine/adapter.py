"""Robot <-> model: cameras, joint order, units, normalisation, prompt, committed actions.

Immutable, but for the prompt's note of which over-long one it has warned about.

Inputs it can make, each only where ``ModelSpec.inputs`` declares it (C cameras, P tokens):

| name       | shape     | content                                                                        |
|------------|-----------|--------------------------------------------------------------------------------|
| images     | [C,3,s,s] | float32 in [-1, 1], the model's camera order; -1 where the robot has no camera |
|            | [C,s,s,3] | or uint8, which the model brings to [-1, 1]; 0 where the robot has no camera   |
| image_mask | [C]       | bool, False where the robot has no camera                                      |
| tokens     | [P]       | int64 prompt, padded on the right                                              |
| token_mask | [P]       | bool, valid tokens                                                             |
| state      | [n]       | float32, normalised, zeros beyond the robot's entries                          |
| anchor     | [A]       | float32, the measured position of what each action commands, normalised as an  |
|            |           | action; NaN for rates, deltas and padding                                      |

The order of both families: robot units -> policy units -> relative to the state (actions) -> normalised -> prompt
(state bins) -> padded. Answers go the same way back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.rtc import prefix_weights
from phyai_engine.transforms import checks
from phyai_engine.transforms import image as images
from phyai_engine.transforms import state as states
from phyai_engine.transforms.normalise import scaling
from phyai_engine.transforms.prompt import Prompt
from phyai_engine.transforms.relative import relative_mask
from phyai_engine.transforms.units import PolicyUnits
from phyai_engine.types import (
    F32,
    F64,
    U8,
    ActionType,
    CancelToken,
    ModelSpec,
    Observation,
    Request,
    Row,
)

Inputs = dict[str, NDArray[Any]]
_INPUTS = ("images", "image_mask", "tokens", "token_mask", "state", "anchor")


class Adapter:
    """Everything that differs between this robot and this model.

    :raises ConfigError: the two do not fit: unknown camera role, too few action or state dimensions,
        statistics of another length or without a finite range, an input nobody can make, a tokenizer that cannot be
        read or has more tokens than the model knows, relative actions of a robot that takes rates or deltas, a state in
        other units than the statistics.
    """

    def __init__(self, robot: RobotConfig, model: ModelConfig, spec: ModelSpec) -> None:
        self.robot = robot
        self.spec = spec
        self._model = model
        checks.check_fit(robot, spec, _INPUTS)
        checks.check_images(spec, model.resize)
        self._cameras = checks.camera_order(robot, spec)
        self._turned = {camera.name: camera.rotation_deg for camera in robot.cameras}
        self._state_units = PolicyUnits.of(robot.state, "state")
        self._action_units = PolicyUnits.of(robot.actions, "actions")
        self._driven = robot.state_index()
        self._relative = relative_mask(robot, model.relative_actions)
        width = spec.inputs["state"].shape[0] if "state" in spec.inputs else spec.action_dim
        normalisation = model.normalisation
        self._actions = scaling(normalisation, "actions", self._action_limits(), robot.action_names, spec.action_dim)
        self._state = scaling(normalisation, "state", self._state_limits(), robot.state_names, width)
        checks.check_units(robot, self._state_limits(), self._state.spread())
        self._prompt: Prompt | None = None
        if "tokens" in spec.inputs:
            self._prompt = Prompt(model.prompt, spec.inputs["tokens"].shape[0], spec.action_dim)
            checks.check_prompt(model.prompt, self._prompt.tokenizer.vocabulary, robot, spec)

    def of(self, robot: RobotConfig) -> Adapter:
        """Likewise for another robot and the same model.

        :raises ConfigError: the two do not fit.
        """
        return Adapter(robot, self._model, self.spec)

    # --- robot -> model ---

    def encode(self, request: Request, cancel: CancelToken | None = None) -> Row:
        """One request -> one row.

        :raises RefusalError: MISSING camera, MALFORMED or NOT_FINITE content.
        """
        seen = request.observation
        checks.check_observation(seen, self.robot)
        with np.errstate(over="ignore"):  # what overflows is refused by name
            target, weight, gain, delay = self._guidance(request)
            inputs = self._inputs(seen)
        return Row(
            inputs=inputs,
            target=target,
            weight=weight,
            gain=gain,
            seed=request.seed,
            delay_steps=delay,
            epoch=request.epoch,
            cancel=CancelToken() if cancel is None else cancel,
        )

    def encode_actions(self, actions: F64, state: F64) -> tuple[F32, NDArray[np.bool_]]:
        """Robot units -> the model's space: the inverse of :meth:`decode`.

        :param actions: [n, A_robot] float64. :param state: [S] of the same request, robot units: what relative
            actions are offsets from; absolute actions and step-to-step deltas do not depend on it.
        :returns: [n, A_model] float32, zeros in padded columns; [A_model] bool, False where nothing can be
            inverted (padding, dimensions that were constant in training).
        :raises RefusalError: NOT_FINITE: a value is too large for the model's space.
        """
        policy = self._action_units.to_policy(actions) - self._reference(state)
        normalised = states.pad(self._actions.normalise(policy), self.spec.action_dim)
        checks.check_vectors(normalised[:, : len(self.robot.actions)], self.robot.action_names, "actions, normalised")
        known = np.zeros(self.spec.action_dim, dtype=np.bool_)
        known[: len(self.robot.actions)] = ~self._actions.constant
        return normalised, known

    # --- model -> robot ---

    def decode(self, actions: F32, request: Request) -> F64:
        """The model's answer -> robot units. Nothing is clipped: limits are the envelope's to judge.

        :param actions: [H, A_model] float32. :param request: the one that was encoded; relative actions are offsets
            from its state.
        :returns: [H, A_robot] float64.
        """
        policy = self._actions.unnormalise(actions[:, : len(self.robot.actions)])
        return self._action_units.to_robot(policy + self._reference(request.observation.state))

    # --- parts ---

    def _inputs(self, seen: Observation) -> Inputs:
        wanted = self.spec.inputs
        normalised = self._state.normalise(self._state_units.to_policy(seen.state))
        shown = states.pad(normalised, normalised.size)  # float32, as the model gets it
        checks.check_vectors(shown[None], self.robot.state_names, "state, normalised")
        made: Inputs = {}
        if "images" in wanted:
            made["images"] = self._images(seen)
        if "image_mask" in wanted:
            made["image_mask"] = np.array([camera is not None for camera in self._cameras])
        if self._prompt is not None:
            made["tokens"], made["token_mask"] = self._prompt(seen.instruction, normalised)
        if "state" in wanted:
            made["state"] = states.pad(normalised, wanted["state"].shape[0])
        if "anchor" in wanted:
            made["anchor"] = self._anchor(seen.state)
        return {name: made[name] for name in wanted}

    def _images(self, seen: Observation) -> NDArray[Any]:
        """Those that must be resampled are so at the same time."""
        wanted = self.spec.inputs["images"]
        made, size = np.empty(wanted.shape, dtype=wanted.dtype), wanted.shape[-2]
        slow = []
        for out, camera in zip(made, self._cameras, strict=True):
            if camera is None:
                out.fill(0 if out.dtype == np.uint8 else images.BLACK)
                continue
            fill = partial(self._fill, out, seen.images[camera], self._turned[camera])
            if seen.images[camera].shape[:2] == (size, size):
                fill()
            else:
                slow.append(fill)
        images.at_once(slow)
        return made

    def _fill(self, out: NDArray[Any], image: U8, rotation_deg: int) -> None:
        if out.dtype == np.uint8:
            images.pixels(image, out, rotation_deg=rotation_deg)
        else:
            images.planes(image, out.shape[-1], resize=self._model.resize, rotation_deg=rotation_deg, out=out)

    def _reference(self, state: F64) -> F64:
        """[A] policy units: what is added to the model's actions; 0 where they are absolute."""
        if not self._relative.any():
            return np.zeros(len(self.robot.actions))
        return np.where(self._relative, self._state_units.to_policy(state)[self._driven], 0.0)

    def _anchor(self, state: F64) -> F32:
        anchor = np.full(self.spec.action_dim, np.nan, dtype=np.float32)
        if self.robot.kind is ActionType.JOINT_POSITION:
            normalised, known = self.encode_actions(state[self._driven][None], state)
            anchor[known] = normalised[0, known]
        return anchor

    def _guidance(self, request: Request) -> tuple[F32, F32, F32, int]:
        """Y [H,A], W [H,A], k [N], d. Slots without a target hold the last committed action, at weight 0.

        Never zeros there: 0 in normalised space is the middle of the data, and would show as a seam.
        """
        spec, committed = self.spec, request.committed
        target = np.zeros((spec.horizon, spec.action_dim), dtype=np.float32)
        weight = np.zeros_like(target)
        steps = len(spec.times)
        if committed is None or len(committed.actions) == 0:
            return target, weight, np.zeros(steps, dtype=np.float32), 0
        checks.check_committed(committed, self.robot, spec.horizon)
        rows, known = self.encode_actions(committed.actions, request.observation.state)
        count, rtc = len(rows), self._model.rtc
        target[:count], target[count:] = rows, rows[-1]
        delay = min(committed.delay_steps, count)
        weight[:] = prefix_weights(spec.horizon, delay, count, rtc.mask)[:, None] * known
        gain = rtc.guide.gains(spec.times, steps if rtc.beta is None else rtc.beta, rtc.sigma)
        return target, weight, gain, delay

    def _state_limits(self) -> tuple[F64, F64]:
        """[S] policy units: limits of the joint action that drives an entry; -1..1 (no change) elsewhere."""
        ends = np.array([[-1.0], [1.0]]).repeat(len(self.robot.state), axis=1)
        if self.robot.kind is ActionType.JOINT_POSITION:
            robot = np.zeros_like(ends)
            robot[:, self._driven] = self.robot.limit("lower", np.nan), self.robot.limit("upper", np.nan)
            ends[:, self._driven] = self._state_units.to_policy(robot)[:, self._driven]
        return ends.min(axis=0), ends.max(axis=0)

    def _action_limits(self) -> tuple[F64, F64]:
        """[A] policy units; of a relative action the largest offsets between two positions within its limits."""
        ends = self._action_units.to_policy(np.stack([self.robot.limit(name, np.nan) for name in ("lower", "upper")]))
        lower, upper = ends.min(axis=0), ends.max(axis=0)
        reach = upper - lower
        return np.where(self._relative, -reach, lower), np.where(self._relative, reach, upper)
