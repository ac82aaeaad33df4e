"""What a robot, a model and a request must satisfy before the adapter works on them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from phyai_engine.config import PromptConfig, RobotConfig
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.transforms.normalise import Floats
from phyai_engine.types import ActionType, Committed, ModelSpec, Observation, Refusal

_OTHER_UNITS = 10.0  # times the limits' span, half of the joints at least


def check_fit(robot: RobotConfig, spec: ModelSpec, inputs: Iterable[str]) -> None:
    """The model must be wide enough for the robot. :param inputs: what the adapter can make.

    :raises ConfigError: an input nobody can make, too few action or state dimensions.
    """
    unknown = sorted(set(spec.inputs) - set(inputs))
    if unknown:
        raise ConfigError(
            f"model {spec.family} needs inputs that nobody makes: {', '.join(unknown)}", wanted=", ".join(inputs)
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


def check_images(spec: ModelSpec, resize: str) -> None:
    """:raises ConfigError: the model takes bytes, and the resampler does not end in any."""
    if "images" in spec.inputs and spec.inputs["images"].dtype == "uint8" and resize != "pillow":
        raise ConfigError(
            f"model {spec.family} takes images of bytes, which this resampler would have to round",
            got=f"resize: {resize}",
            wanted="resize: pillow",
            do="Give the model `options: {images: planes}`, or another `resize`.",
        )


def check_prompt(config: PromptConfig, vocabulary: int, robot: RobotConfig, spec: ModelSpec) -> None:
    """:param vocabulary: of the tokenizer.

    :raises ConfigError: more tokens than the model has room for, or than it knows; a padded state that is too short.
    """
    size = spec.inputs["tokens"].shape[0]
    if config.max_tokens > size:
        raise ConfigError(
            f"prompt.max_tokens exceeds the prompt of model {spec.family}", got=config.max_tokens, wanted=f"<= {size}"
        )
    if 0 < spec.vocabulary < vocabulary:
        raise ConfigError(
            f"the tokenizer has more tokens than model {spec.family} knows",
            got=f"{vocabulary} of {config.tokenizer!r}",
            wanted=f"<= {spec.vocabulary}",
            where="prompt.tokenizer",
            do="Raise options.vocab or choose another tokenizer.",
        )
    if config.padded_state and spec.action_dim < len(robot.state):
        raise ConfigError(
            f"the padded state of model {spec.family} is shorter than the state of robot {robot.robot_id}",
            got=spec.action_dim,
            wanted=f">= {len(robot.state)}",
            where="prompt.padded_state",
        )


def camera_order(robot: RobotConfig, spec: ModelSpec) -> tuple[str | None, ...]:
    """For each of the model's camera roles the robot's camera, None where it has none.

    :raises ConfigError: a camera with a role that the model does not know.
    """
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


def check_units(robot: RobotConfig, limits: tuple[Floats, Floats], trained: Floats) -> None:
    """Degrees for radians is a factor of 57: then the data span far more than most joints can move.

    :param limits: (lower, upper), [S] policy units, of what drives each entry. :param trained: [S], what the data span;
        NaN where nothing tells it.
    :raises ConfigError: the state was trained in other units.
    """
    if robot.kind is not ActionType.JOINT_POSITION:
        return
    driven = robot.state_index()
    spans, reach = trained[driven], (limits[1] - limits[0])[driven]
    usable = np.isfinite(spans) & np.isfinite(reach) & (spans > 0)
    if not usable.any() or np.median(spans[usable] / reach[usable]) <= _OTHER_UNITS:
        return
    at = int(np.flatnonzero(usable)[np.argmax(spans[usable] / reach[usable])])
    raise ConfigError(
        f"the policy was trained on a state of other units than those of robot {robot.robot_id}",
        got=f"data that span {spans[at]:.4g} for {robot.state_names[driven[at]]}, whose limits span {reach[at]:.4g}",
        where=f"robot {robot.robot_id}",
        do="Give `scale` and `offset` of every entry in state and actions: training value = scale * robot value + "
        "offset.",
    )


def check_observation(seen: Observation, robot: RobotConfig) -> None:
    """:raises RefusalError: MISSING camera, MALFORMED or NOT_FINITE content."""
    names = [camera.name for camera in robot.cameras]
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
    check_vectors(seen.state[None], robot.state_names, "state")
    try:
        seen.instruction.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusalError(Refusal.MALFORMED, "the instruction is no text", got=ascii(seen.instruction)) from None


def check_committed(committed: Committed, robot: RobotConfig, horizon: int) -> None:
    """:raises RefusalError: MALFORMED or NOT_FINITE."""
    check_vectors(committed.actions, robot.action_names, "committed actions")
    if len(committed.actions) > horizon or committed.delay_steps < 0:
        raise RefusalError(
            Refusal.MALFORMED,
            "the committed actions do not fit the horizon",
            got=f"{len(committed.actions)} rows, delay {committed.delay_steps}",
            wanted=f"at most {horizon} rows, delay >= 0",
        )


def check_vectors(rows: Floats, names: tuple[str, ...], what: str) -> None:
    """[n, k] rows must have a finite value for every name. :raises RefusalError: MALFORMED, NOT_FINITE."""
    if rows.ndim != 2 or rows.shape[1] != len(names):
        raise RefusalError(
            Refusal.MALFORMED,
            f"{what}: wrong shape",
            got=list(rows.shape),
            wanted=f"[n, {len(names)}] for {', '.join(names)}",
        )
    finite = np.isfinite(rows)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise RefusalError(
            Refusal.NOT_FINITE,
            f"{what}: {names[column]} is not finite",
            got=rows[row, column],
            where=f"row {row}",
        )
