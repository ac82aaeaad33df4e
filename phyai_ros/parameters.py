"""The node's parameters, once: a field of :class:`NodeParameters` is a row with type, default, range, words.

Declaring, reading, checking and the tests of the shipped files all go through that table. Rows are fixed
while the node is configured (cleanup, set, configure) unless marked ``live``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phyai_engine.config import read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.types import Schedule

if TYPE_CHECKING:
    from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
    from rclpy.node import Node
    from rclpy.parameter import Parameter

Value = str | int | float | bool

_TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
_ROS_TYPE = {str: "a string", int: "an integer", float: "a double", bool: "true or false"}

FOREIGN = ("use_sim_time", "start_type_description_service", "qos_overrides.", "diagnostic_updater.")
"""Beginnings of parameter names that belong to rclpy or to a library of the node."""


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter. ``low`` and ``high`` are inclusive; ``choices`` empty means any."""

    name: str
    kind: type
    default: Value
    text: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    live: bool


def _row(
    default: Value,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    live: bool = False,
) -> Any:
    return field(
        default=default,
        metadata={"text": text, "low": low, "high": high, "choices": tuple(choices), "live": live},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParameters:
    """What one configuration runs with. Durations in seconds, rates in hertz, steps in control steps."""

    robot: str = _row("", "Robot file: a path, or the name of a shipped one.")
    model: str = _row(
        "",
        "Model: a model file, the name of a shipped one, a checkpoint folder; engine: remote: its name on the server.",
    )
    engine: str = _row("process", "Where inference runs.", choices=("thread", "process", "remote"))
    engine_endpoint: str = _row("", "Engine server of engine: remote, e.g. tcp://gpu-server:5555.")
    engine_robot_id: str = _row(
        "", "Name of this robot on the server, unique there; empty = the key's name, else the namespace, else robot_id."
    )
    engine_key: str = _row("", "This robot's NAME.key_secret for the server, which needs one beyond this host.")
    engine_server_key: str = _row("", "The server's server.key.")
    engine_jpeg_quality: int = _row(
        0,
        "Images to the server as JPEG of this quality, which changes what the policy sees; 0 = as they are.",
        low=0,
        high=95,
    )
    engine_threads: int = _row(0, "CPU threads of the engine; 0 = its library's default.", low=0, high=256)
    engine_start_timeout_s: float = _row(
        120.0, "Longest wait at configure for the engine to load and warm up.", low=1.0, high=3600.0
    )
    engine_heartbeat_s: float = _row(
        1.0,
        "An engine without a sign of life for this long is lost; remote: a shorter cut of the network only holds.",
        low=0.2,
        high=30.0,
    )
    output: str = _row("steps", "How commands leave the node.", choices=("steps", "trajectory", "chunks"))
    schedule: str = _row(
        "rtc", "When the next inference starts and what it continues.", choices=[s.value for s in Schedule]
    )
    execution_horizon: int = _row(
        0,
        "Steps of a chunk that are executed before the next is due; 0 = half the horizon.",
        low=0,
        high=1000,
    )
    delay_init_steps: int = _row(
        0,
        "Inference delay assumed before one was measured; 0 = what the warm-up took, and a step [steps].",
        low=0,
        high=1000,
    )
    delay_window: int = _row(10, "Recent delays whose maximum predicts the next one [handoffs].", low=1, high=1000)
    delay_slack_steps: int = _row(
        0,
        "Added to that maximum: later than ever keeps its deadline too, for rows that are fixed longer [steps].",
        low=0,
        high=100,
    )
    instruction: str = _row("", "What the robot is to do, in words.", live=True)
    instruction_change: str = _row(
        "keep",
        "On a new instruction: let the chunk play and use it next time, or flush the chunk.",
        choices=("keep", "flush"),
        live=True,
    )
    seed: int = _row(
        0, "Seed of the noise; the k-th chunk since it was set uses seed + k.", low=0, high=2**31 - 1, live=True
    )
    max_hold_s: float = _row(
        10.0,
        "Holding longer than this without a new chunk sets the abort latch; 0.0 = never.",
        low=0.0,
        high=3600.0,
        live=True,
    )
    request_timeout_s: float = _row(
        5.0,
        "An inference without an answer for this long stops the robot and latches (inference_deadline).",
        low=0.05,
        high=600.0,
    )
    max_observation_age_s: float = _row(
        10.0,
        "Playing a chunk computed from an observation older than this latches (observation_age); 0.0 = never.",
        low=0.0,
        high=600.0,
    )
    max_misses: int = _row(
        10,
        "This many handoffs in a row after their deadline latch (misses); 0 = never [handoffs].",
        low=0,
        high=1000,
    )
    player_timeout_s: float = _row(
        2.0,
        "Outputs trajectory and chunks: silence of what plays, after a chunk, that latches (player_lost).",
        low=0.5,
        high=60.0,
    )
    max_tick_gap_s: float = _row(
        0.5,
        "No control tick for this long, and for 5 periods, stops and latches (tick_overrun); 0.0 = never.",
        low=0.0,
        high=10.0,
    )
    fleet_stop_topic: str = _row(
        "/fleet_stop", "std_msgs/Bool, reliable and transient_local: true stops and latches (fleet_stop); empty = none."
    )
    stop_hold_steps: int = _row(
        5, "Hold commands after a stop came to rest; then the node is quiet [steps].", low=0, high=1000
    )
    envelope: str = _row(
        "refuse",
        "A chunk that leaves the limits is refused whole, or clipped and reported.",
        choices=("refuse", "clamp"),
    )
    warm_up_count: int = _row(3, "Inferences at configure that count in no figure.", low=1, high=100)
    status_rate_hz: float = _row(10.0, "Rate of ~/status; a player stops after 1 s without it.", low=2.0, high=100.0)
    diagnostics_rate_hz: float = _row(1.0, "Rate of /diagnostics.", low=0.1, high=10.0)
    frozen_frames: int = _row(
        0, "Refuse a camera after this many frames with the same pixels; 0 = never.", low=0, high=10000
    )
    resize_images: str = _row(
        "engine",
        "Where images are made as small as the model takes them: in each inference, or each as it arrives (the same "
        "actions; each inference shorter, each frame dearer; not with the model's resize: float).",
        choices=("engine", "arrival"),
    )
    accept_unstamped: bool = _row(False, "Take messages with stamp 0, stamped at receipt.")
    decoder: str = _row(
        "auto",
        "Decoder of raw images: cv_bridge when its self-check passes, or always our own.",
        choices=("auto", "own"),
    )
    record: str = _row(
        "", "Folder to record into, made at configure; %Y%m%d-%H%M%S and the like are filled in. Empty: no recording."
    )
    record_max_mib: int = _row(
        4096, "Bound of that folder; a recording that reaches it ends there [MiB].", low=16, high=10_000_000
    )
    on_exception: str = _row(
        "latch",
        "After an exception in a callback: stop and latch, or stop and exit.",
        choices=("latch", "exit"),
    )

    def __post_init__(self) -> None:
        """Every row, then the rows as a set.

        :raises ConfigError: naming parameter, value and limit.
        """
        for row in TABLE:
            if reason := check_value(row, getattr(self, row.name)):
                raise ConfigError(reason)
        if self.engine == "remote" and not self.engine_endpoint:
            raise ConfigError("engine_endpoint is empty", wanted="an address, because engine is remote")
        if self.engine != "remote" and self.engine_endpoint:
            raise ConfigError(
                "engine_endpoint is given, but the engine is local",
                got=f"engine: {self.engine}",
                do="Set engine: remote, or leave engine_endpoint empty.",
            )
        if self.engine != "remote" and (self.engine_key or self.engine_server_key or self.engine_jpeg_quality):
            raise ConfigError(
                "engine_key, engine_server_key and engine_jpeg_quality are of engine: remote",
                got=f"engine: {self.engine}",
            )
        if bool(self.engine_key) != bool(self.engine_server_key):
            raise ConfigError(
                "one of engine_key and engine_server_key is empty",
                wanted="this robot's secret key and the server's public key, or neither",
            )
        if 0 < self.max_hold_s < self.request_timeout_s and self.schedule == Schedule.SYNC.value:
            raise ConfigError(
                "max_hold_s is below request_timeout_s",
                got=self.max_hold_s,
                wanted=f">= {self.request_timeout_s}",
                do="schedule sync holds during every inference: the latch must not come before the timeout.",
            )
        if self.frozen_frames == 1:
            raise ConfigError("frozen_frames is 1", wanted="0 (never) or >= 2: one frame cannot be compared")

    def check_against(self, horizon: int, dt_s: float) -> int:
        """The rows against the model's horizon H and the robot's step. Returns the execution horizon s.

        :raises ConfigError: s exceeds H; s + delay_init_steps exceeds H unless the schedule is sync; the
            delay exceeds s (rtc: d <= s <= H - d); or a duration is shorter than what it must span.
        """
        s, d = self.execution_horizon or max(1, horizon // 2), self.delay_init_steps
        if s > horizon:
            raise ConfigError("execution_horizon is longer than a chunk", got=s, wanted=f"<= {horizon}")
        if self.schedule != Schedule.SYNC.value and s + d > horizon:
            raise ConfigError(
                "execution_horizon + delay_init_steps is longer than a chunk",
                got=f"{s} + {d}",
                wanted=f"<= {horizon}",
                do="The rest of the chunk must cover the inference delay: lower one of them.",
            )
        if self.schedule == Schedule.RTC.value and d > s:
            raise ConfigError(
                "delay_init_steps is above execution_horizon",
                got=d,
                wanted=f"<= {s}",
                do="rtc needs d <= s <= H - d.",
            )
        if self.request_timeout_s < dt_s:
            raise ConfigError(
                "request_timeout_s is shorter than a step", got=self.request_timeout_s, wanted=f">= {dt_s}"
            )
        if 0 < self.max_hold_s < dt_s:
            raise ConfigError("max_hold_s is shorter than a step", got=self.max_hold_s, wanted=f">= {dt_s}")
        if 0 < self.max_observation_age_s <= s * dt_s:
            raise ConfigError(
                "max_observation_age_s is shorter than the steps that are played before the next chunk is due",
                got=self.max_observation_age_s,
                wanted=f"> {s * dt_s:.3f} ({s} steps), and the time of an inference",
            )
        return s


TABLE: tuple[Row, ...] = tuple(
    Row(name=f.name, kind=_TYPES[str(f.type)], default=cast(Value, f.default), **f.metadata)
    for f in fields(NodeParameters)
)
"""Every parameter, in the order in which they are declared."""

NAMES: tuple[str, ...] = tuple(row.name for row in TABLE)

PLAYER_TABLE: tuple[Row, ...] = (
    Row("robot", str, "", "The policy node's robot file: a path, or the name of a shipped one.", None, None, (), False),
    Row("policy", str, "policy_node", "Name of the policy node.", None, None, (), False),
    Row("status_timeout_s", float, 1.0, "Silence of the policy node that latches (policy_lost).", 0.2, 10.0, (), False),
    *(row for row in TABLE if row.name in ("stop_hold_steps", "fleet_stop_topic", "max_tick_gap_s")),
)
"""The parameters of player_node; what both nodes have means the same."""


def check_value(row: Row, value: object) -> str:
    """Type, finiteness, range and choices of one value: the reason against it, or an empty string."""
    if type(value) is not row.kind:
        got = f"{value!r} ({_ROS_TYPE.get(type(value), type(value).__name__)})"
        hint = f": write {value}.0" if row.kind is float and type(value) is int else ""
        return f"{row.name} must be {_ROS_TYPE[row.kind]}, got {got}{hint}"
    if row.choices and value not in row.choices:
        near = difflib.get_close_matches(str(value), row.choices, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        return f"{row.name} must be one of {', '.join(row.choices)}, got {value!r}{hint}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{row.name} must be finite, got {value}"  # NaN passes every comparison with a limit
    if isinstance(value, (int, float)) and row.low is not None and value < row.low:
        return f"{row.name} must be at least {row.low:g}, got {value}"
    if isinstance(value, (int, float)) and row.high is not None and value > row.high:
        return f"{row.name} must be at most {row.high:g}, got {value}"
    return ""


def unknown_name(name: str) -> str:
    """Why a name is no parameter of the node, or an empty string."""
    if name in NAMES or name.startswith(FOREIGN):
        return ""
    near = difflib.get_close_matches(name, NAMES, n=1)
    return f"unknown parameter {name!r}" + (f". Did you mean {near[0]!r}?" if near else "")


def validate(changes: Mapping[str, object], current: NodeParameters | None) -> str:
    """Whether a set request may pass: the reason against it, or an empty string. Changes nothing.

    :param changes: name -> new value; names that are not in the table belong to someone else and pass.
    :param current: what the node is configured with; None while it is not: then every row may be set.
    """
    known = {row.name: row for row in TABLE if row.name in changes}
    for name, row in known.items():
        if reason := check_value(row, changes[name]):
            return reason
        if current is not None and not row.live and changes[name] != getattr(current, name):
            return f"{name} is fixed while the node is configured: deactivate and cleanup first"
    if current is not None:
        try:
            updated(current, changes)
        except ConfigError as error:
            return str(error)
    return ""


def updated(current: NodeParameters, changes: Mapping[str, object]) -> NodeParameters:
    """``current`` with the changed rows of the table.

    :raises ConfigError: as :class:`NodeParameters` does.
    """
    return replace(current, **cast(Any, {name: value for name, value in changes.items() if name in NAMES}))


def check_file(path: str | Path) -> tuple[str, ...]:
    """What is wrong with a ROS 2 parameters file (``NODE: ros__parameters:``), one sentence each.

    :raises ConfigError: it cannot be read, is no YAML, or repeats a key.
    """
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        return (f"{path}: no node name at the top, wanted `policy_node:` or `/**:`",)
    problems: list[str] = []
    for node, block in content.items():
        values = block.get("ros__parameters") if isinstance(block, dict) and len(block) == 1 else None
        if not isinstance(values, dict):
            problems.append(f"{path}: {node}: wanted one key, `ros__parameters:`, with the parameters below it")
            continue
        rows = {row.name: row for row in TABLE}
        for name, value in values.items():
            reason = check_value(rows[name], value) if name in rows else unknown_name(str(name))
            if reason:
                problems.append(f"{path}: {node}: {reason}")
    return tuple(problems)


# -- the node ------------------------------------------------------------------------------------------------


def describe(row: Row) -> ParameterDescriptor:
    """The row as rclpy declares it. ROS checks type and range, :func:`validate` also choices and NaN."""
    from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor  # noqa: PLC0415

    notes = [f"one of {', '.join(row.choices)}"] if row.choices else []
    notes += [] if row.live else ["fixed while the node is configured"]
    descriptor = ParameterDescriptor(name=row.name, description=row.text, additional_constraints="; ".join(notes))
    if row.low is not None and row.high is not None:
        if row.kind is int:
            descriptor.integer_range = [IntegerRange(from_value=int(row.low), to_value=int(row.high), step=1)]
        else:
            descriptor.floating_point_range = [FloatingPointRange(from_value=row.low, to_value=row.high, step=0.0)]
    return descriptor


def declare(node: Node, rows: Sequence[Row] = TABLE) -> tuple[str, ...]:
    """Declare every row. Returns a sentence for each override in the node's block that names no parameter.

    :raises ConfigError: an override has another type, is out of range or no choice.
    """
    overrides: Mapping[str, Parameter] = node._parameter_overrides  # rclpy has no public way to see them
    for row in rows:
        reason = check_value(row, overrides[row.name].value) if row.name in overrides else ""
        if reason:  # before rclpy says it in its own words, and lets NaN and wrong choices pass
            raise ConfigError(reason, where=f"parameters of {node.get_fully_qualified_name()}")
        node.declare_parameter(row.name, row.default, describe(row))
    return tuple(reason for name in overrides if (reason := unknown_name(name)))


def read(node: Node) -> NodeParameters:
    """The declared parameters as one checked value.

    :raises ConfigError: naming parameter, value and limit.
    """
    parameters = NodeParameters(**cast(Any, {name: node.get_parameter(name).value for name in NAMES}))
    for name in ("robot", "model"):
        if not getattr(parameters, name):
            raise ConfigError(
                f"parameter {name} is empty",
                where=node.get_fully_qualified_name(),
                do=f"Give a path or the name of a file in config/{name}s.",
            )
    return parameters


def watch(
    node: Node, current: Callable[[], NodeParameters | None], apply: Callable[[NodeParameters, Collection[str]], None]
) -> None:
    """Answer set requests: refuse what :func:`validate` refuses, hand the new value over once it is set.

    Call it after :func:`declare`. The check is pure, because someone else may still refuse the request.

    :param current: what the node is configured with, None while it is not.
    :param apply: takes the value with the changes, and their names; not called while the node is not configured.
    """
    from rcl_interfaces.msg import SetParametersResult  # noqa: PLC0415

    def check(parameters: list[Parameter]) -> SetParametersResult:
        reason = validate({p.name: p.value for p in parameters}, current())
        return SetParametersResult(successful=not reason, reason=reason)

    def take(parameters: list[Parameter]) -> None:
        before = current()
        changes = {p.name: p.value for p in parameters if p.name in NAMES}
        if before is not None and changes:
            apply(updated(before, changes), changes)

    node.add_on_set_parameters_callback(check)
    node.add_post_set_parameters_callback(take)
