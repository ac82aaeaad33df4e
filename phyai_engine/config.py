"""YAML -> frozen values. The only module that reads files a person wrote, and the environment.

Unknown keys are refused with their path and the nearest known name; wrong types and ranges name the path too.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import yaml
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from phyai_engine.errors import ConfigError
from phyai_engine.robot_check import check_robot
from phyai_engine.rtc import Guidance, WeightKind
from phyai_engine.types import F64, ActionType
from phyai_engine.unique_keys import UniqueKeyLoader

T = TypeVar("T")
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]
Units = Literal["affine", "aloha_gripper"]
Kind = Literal["identity", "limits", "mean_std", "quantile", "min_max"]


class StateEntry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the robot's state vector, read from a JointState topic by name.

    policy value = ``scale * map(topic value) + offset`` (gripper units differ: 0..1, m, rad, %).

    :param units: the map, applied to the topic's value first: ``affine`` changes nothing, transforms/units.py explains
        the others.
    """

    name: Name
    topic: Name = "joint_states"
    scale: float = 1.0
    offset: float = 0.0
    units: Units = "affine"


class ActionEntry(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One action dimension in robot units with its limits; ``units``, ``scale``, ``offset`` as in StateEntry, undone.

    Limits, the handoff and a fake model compare an action with the state entry it drives: both in the same robot units.

    :param lower: smallest value; ``upper`` largest. Always checked.
    :param velocity_max: [unit/s], joint positions only. :param acceleration_max: [unit/s^2], the stop's
        deceleration; needed for joint positions; a velocity robot without it stops in one step. Absent = no limit.
    :param jerk_max: [unit/s^3], the stop's: its deceleration grows and fades no faster. Absent = no limit.
    :param command_acceleration_max: [unit/s^2], largest acceleration that the rows of a chunk ask for, also across the
        seam to what was commanded before; ``command_jerk_max`` [unit/s^3] likewise. Joint robots. Absent = not checked.
    :param first_step_max: of this action, in place of the robot's; ``seam_jump_max`` likewise. Absent = the robot's,
        ``.inf`` = no limit: a gripper may open at once where a joint may not.
    :param state: name of the state entry this action drives (joint robots); empty for Cartesian deltas.
    :param absolute: a value that is held, not zeroed, when a velocity or delta robot stops (a gripper: zero
        would drop the object).
    """

    name: Name
    lower: float
    upper: float
    velocity_max: Positive | None = None
    acceleration_max: Positive | None = None
    jerk_max: Positive | None = None
    command_acceleration_max: Positive | None = None
    command_jerk_max: Positive | None = None
    first_step_max: Positive | None = None
    seam_jump_max: Positive | None = None
    state: str = ""
    absolute: bool = False
    scale: float = 1.0
    offset: float = 0.0
    units: Units = "affine"


class Camera(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One camera stream.

    :param name: the camera's name in the node. :param role: the model's camera it feeds.
    :param latency_offset_s: subtracted from the stamp (a driver that stamps at receipt, not at exposure).
    :param tolerance_s: largest distance of its stamp from the observation's instant.
    :param max_age_s: freshness bound, by stamp and by receipt.
    :param rotation_deg: turn that brings the picture to how the policy was trained, before it is resized.
    """

    name: Name
    topic: Name
    role: Name
    transport: Literal["raw", "compressed"] = "raw"
    rotation_deg: Literal[0, 180] = 0
    tolerance_s: Positive = 0.05
    max_age_s: Positive = 0.3
    latency_offset_s: float = 0.0


class CommandOutput(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the robot listens to in ``steps`` output, beside ``~/step``, which is always published.

    :param interface: ``joint_trajectory`` one point per step (positions), ``float64_multi_array`` the values of
        forward_command_controller, ``joint_state`` positions or velocities by name.
    """

    topic: str = ""
    interface: Literal["none", "joint_trajectory", "float64_multi_array", "joint_state"] = "none"


class Workspace(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A box that the hand of a Cartesian-delta robot must not leave. One value per axis in every list.

    :param state: state entries that measure the hand [m]. :param actions: the deltas that move it, same order.
    :param metres_per_unit: metres that one unit of such an action moves the hand.
    :param lower: corner of the box [m], in the frame of the state entries; ``upper`` the opposite one. It leaves room
        for how far the hand lags behind its commands: the deltas are added to where it is measured.
    """

    state: Annotated[tuple[Name, ...], Meta(min_length=1)]
    actions: tuple[Name, ...]
    metres_per_unit: Positive
    lower: tuple[float, ...]
    upper: tuple[float, ...]


class RobotConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One robot file (config/robots/*.yaml). A topic without a leading / follows the node's namespace.

    :param dt_s: control period; one action a period.
    :param trajectory_topic: where ``output: trajectory`` writes; ``controller_state_topic`` where its time is read.
    :param joint_max_age_s: freshness bound of joint states, by stamp and by receipt.
    :param joint_tolerance_s: largest distance of a joint sample from the observation's instant.
    :param joint_sample: ``nearest`` to the images, or the ``newest`` (as the policy was trained).
    :param first_step_max: largest |first action - measured| when motion starts; joint positions only, else no limit.
    :param seam_jump_max: largest |first new row - last command| at a handoff; likewise. Both hold for every action
        whose entry gives no number of its own.
    :param first_step: a chunk that starts beyond first_step_max is refused, or (``ramp``) is refused and the robot is
        moved slowly to its first row, so that one of the next fits. The way there is straight in joint space.
    :param stop: what an abort or a deactivation sends. ``hold_measured`` latches the measured pose at once, which is a
        step in velocity: drives may fault. ``stop_publishing`` sends nothing: only for a controller whose own command
        timeout stops the robot.
    """

    robot_id: Name
    action_type: Literal["joint_position", "joint_velocity", "cartesian_delta"]
    dt_s: Positive
    state: Annotated[tuple[StateEntry, ...], Meta(min_length=1)]
    actions: Annotated[tuple[ActionEntry, ...], Meta(min_length=1)]
    cameras: tuple[Camera, ...] = ()
    command: CommandOutput = field(default_factory=CommandOutput)
    trajectory_topic: str = "joint_trajectory_controller/joint_trajectory"
    controller_state_topic: str = "joint_trajectory_controller/controller_state"
    joint_max_age_s: Positive = 0.1
    joint_tolerance_s: Positive = 0.05
    joint_sample: Literal["nearest", "newest"] = "nearest"
    first_step_max: Positive | None = None
    seam_jump_max: Positive | None = None
    first_step: Literal["refuse", "ramp"] = "refuse"
    stop: Literal["decelerate", "hold_measured", "stop_publishing"] = "decelerate"
    workspace: Workspace | None = None

    @property
    def kind(self) -> ActionType:
        """The action type as the message constant."""
        return ActionType[self.action_type.upper()]

    @property
    def action_names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.actions)

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.state)

    def state_index(self) -> NDArray[np.intp]:
        """[A] int: index into the state of the entry each action drives, -1 where there is none."""
        names = self.state_names
        return np.array(
            [names.index(a.state) if a.state else -1 for a in self.actions],
            dtype=np.intp,
        )

    def measured_index(self) -> NDArray[np.intp]:
        """[A] int: index into the state of what each action moves: its joint, or its axis of the hand (workspace)."""
        index = self.state_index()
        if self.workspace is not None:
            for action, state in zip(self.workspace.actions, self.workspace.state, strict=True):
                index[self.action_names.index(action)] = self.state_names.index(state)
        return index

    def limit(self, field_name: str, default: float) -> F64:
        """[A] float64: one limit of every action, ``default`` where the file gives none."""
        values = [getattr(a, field_name) for a in self.actions]
        return np.array([default if v is None else v for v in values], dtype=np.float64)


class Normalisation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How robot values map to the model's space: transforms/normalise.py has the formula of each kind.

    ``state`` and ``actions`` hold the statistics of a kind, a value per entry of the robot file, in its order and its
    policy units; of relative actions those of the offsets. Statistics as long as the model's padded vector are used
    up to the robot's entries. ``limits`` takes the robot file's own limits where none are given.

    :param kind: of both; ``state_kind`` and ``actions_kind`` override it for one. ``min_max`` is lerobot's alone.
    :param rule: whose arithmetic: the two families add eps in different places.
    :param eps: None takes the rule's own (openpi 1e-6, lerobot 1e-8).
    """

    kind: Kind = "identity"
    state_kind: Kind | None = None
    actions_kind: Kind | None = None
    rule: Literal["openpi", "lerobot"] = "openpi"
    eps: NonNegative | None = None
    state: dict[str, tuple[float, ...]] = field(default_factory=dict)
    actions: dict[str, tuple[float, ...]] = field(default_factory=dict)


class PromptConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Prompt form and tokenizer; transforms/prompt.py has the forms.

    :param tokenizer: ``bytes`` (demos and tests, id = byte + 3), or the path of a SentencePiece ``.model`` or a
        ``tokenizer.json``.
    :param max_tokens: a longer prompt is cut at its end, with a warning.
    :param padded_state: ``state_bins`` of the state padded with zeros to the model's action_dim, as lerobot's first
        pi0.5 checkpoints were trained.
    """

    form: Literal["plain", "verbatim", "state_bins"] = "plain"
    tokenizer: str = "bytes"
    max_tokens: Annotated[int, Meta(ge=1)] = 48
    padded_state: bool = False


class RelativeActions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model's actions are offsets from the state of the observation, in policy units; joint positions only.

    :param exclude: actions of the robot file whose name contains one of these, in upper or lower case, are absolute.
        Each must be in some action's name.
    """

    exclude: tuple[Name, ...] = ("gripper",)


class RtcOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a new chunk is made to continue the committed actions; rtc.py has the modes and formulas.

    :param guidance: ``none``, ``identity``, ``gauss``, ``vjp``, ``vjp_early:K``, ``prefix_lock`` or ``trained``.
    :param mask: decay of the weight after the frozen steps.
    :param beta: largest gain; the number of steps if None. :param sigma: prior standard deviation of the actions.
    :param rtc_max_delay: longest delay the checkpoint was trained to continue, steps; 0 = it was not.
    """

    guidance: str = "identity"
    mask: WeightKind = "exp"
    beta: Positive | None = None
    sigma: Positive = 1.0
    rtc_max_delay: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        Guidance.parse(self.guidance, self.rtc_max_delay)

    @property
    def guide(self) -> Guidance:
        """The mode that ``guidance`` names."""
        return Guidance.parse(self.guidance, self.rtc_max_delay)


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model file (config/models/*.yaml). ``options`` is checked by the family's own struct.

    :param checkpoint: folder with the weights; empty means seeded random weights, which is said on screen. What the
        folder itself says (weights/checkpoint.py) is the default of every other key.
    :param asset: which statistics of an openpi folder, where it holds several.
    :param device: where the model computes; ``auto`` is the accelerator where there is one.
    :param keep_warm_s: while nothing is asked, a short piece of work runs on the accelerator this often, so that the
        first request after a rest does not wait for its clock; 0 = never.
    :param resize: of images: ``pillow`` (openpi) or ``float`` (lerobot); transforms/image.py has both.
    :param relative_actions: None: actions are what the robot file's action type says.
    """

    family: Name
    checkpoint: str = ""
    asset: str = ""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    keep_warm_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    resize: Literal["pillow", "float"] = "pillow"
    normalisation: Normalisation = field(default_factory=Normalisation)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    relative_actions: RelativeActions | None = None
    rtc: RtcOptions = field(default_factory=RtcOptions)
    options: dict[str, Any] = field(default_factory=dict)


def _fields_at(kind: Any, path: str) -> tuple[str, ...]:
    """Field names of the struct that a msgspec error path such as ``$.cameras[0]`` points into."""
    for part in re.findall(r"\.(\w+)|\[", path):
        for candidate in (kind, *get_args(kind)):
            if isinstance(candidate, type) and issubclass(candidate, Struct):
                if part:
                    kind = get_type_hints(candidate).get(part, object)
                break
        else:
            args = [a for a in get_args(kind) if a is not Ellipsis]
            kind = args[0] if args else object
    while not (isinstance(kind, type) and issubclass(kind, Struct)):
        args = [a for a in get_args(kind) if a is not Ellipsis]
        if not args:
            return ()
        kind = args[0]
    return kind.__struct_fields__


def convert(value: Any, kind: type[T], *, where: str) -> T:
    """Plain Python data -> a frozen struct.

    :param where: file or origin, used in messages.
    :raises ConfigError: unknown key (with the nearest known one), wrong type or range, with the key's path.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        unknown = re.search(r"unknown field `([^`]+)`(?: - at `([^`]+)`)?", text)
        if unknown is None:
            raise ConfigError(text, where=where) from None
        name, path = unknown.group(1), unknown.group(2) or "$"
        known = _fields_at(kind, path)
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"unknown key {name!r}",
            where=f"{where}: {path}",
            do=f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}.",
        ) from None


def read_yaml(path: str | Path) -> Any:
    """Read one YAML file.

    :raises ConfigError: the file is missing, unreadable, not YAML, or repeats a key.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as stream:
            return yaml.load(stream, Loader=UniqueKeyLoader)  # a SafeLoader
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", where=path) from None
    except ConfigError:
        raise
    except Exception as error:  # also what PyYAML lets through: no UTF-8, a 13th month, 3000 brackets
        raise ConfigError(f"not YAML: {error}", where=path) from None


def load_robot(path: str | Path) -> RobotConfig:
    """Read and cross-check a robot file.

    :raises ConfigError: with the path of the wrong key.
    """
    robot = convert(read_yaml(path), RobotConfig, where=str(path))
    check_robot(robot, where=str(path))
    return robot


def load_model(path: str | Path) -> ModelConfig:
    """Read a model file.

    :raises ConfigError: with the path of the wrong key.
    """
    return convert(read_yaml(path), ModelConfig, where=str(path))


def environment(name: str) -> str:
    """One environment variable, empty where it is unset. Reads outside this module come through here."""
    return os.environ.get(name, "")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with some variables changed, for a process that it starts."""
    return {**os.environ, **changes}


def config_dir() -> Path:
    """Folder with the shipped robot and model files: this checkout's ``config/``, else the installed one.

    PHYAI_CONFIG_DIR overrides both.
    """
    if override := os.environ.get("PHYAI_CONFIG_DIR"):
        return Path(override)
    checkout = Path(__file__).resolve().parent.parent / "config"
    if checkout.is_dir():
        return checkout
    for prefix in (*environment("AMENT_PREFIX_PATH").split(os.pathsep), sys.prefix):
        shared = Path(prefix) / "share" / "phyai_policy" / "config"
        if prefix and shared.is_dir():
            return shared
    raise ConfigError(
        "the shipped config folder is not found",
        do="Source install/setup.bash or set PHYAI_CONFIG_DIR.",
    )


def resolve(kind: Literal["robots", "models", "serve"], name: str) -> Path:
    """A file path, or the name of a shipped file without ``.yaml``.

    :raises ConfigError: listing what exists.
    """
    direct = Path(name)
    if direct.suffix in (".yaml", ".yml") or direct.is_file():
        return direct
    folder = config_dir() / kind
    candidate = folder / f"{name}.yaml"
    if candidate.is_file():
        return candidate
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    near = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"no {kind[:-1]} named {name!r}",
        wanted=f"a path or one of {', '.join(known)}",
        where=folder,
        do=f"Did you mean {near[0]!r}?" if near else None,
    )


def cache_dir() -> Path:
    """Folder of all caches: PHYAI_CACHE_DIR, else ``$XDG_CACHE_HOME/phyai``, else ``~/.cache/phyai``."""
    if override := os.environ.get("PHYAI_CACHE_DIR"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phyai"
