"""``phyai inspect``: what a checkpoint folder holds, whether it can run, and the files that run it.

The findings need no torch; only the list of expected tensors comes from the model's class.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from phyai_engine.adapter import Adapter
from phyai_engine.config import ModelConfig, RobotConfig, convert, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.weights.checkpoint import Checkpoint, opened, swapped_cameras
from phyai_engine.weights.recipe import NEEDS, PARTS, Part

FILL_IN = "FILL_IN"
Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is printed.

    :param own: keys of the model file that was asked about, if one was.
    :param model: what runs it; None where something is missing.
    :param tensors: what the weights' files hold against what the model needs.
    :param notes: what was assumed. :param missing: sentences; empty where the checkpoint can run.
    :param misfits: of a robot file.
    """

    checkpoint: Checkpoint
    own: Mapping[str, Any]
    model: ModelConfig | None
    tensors: dict[str, Any]
    notes: tuple[str, ...]
    missing: tuple[str, ...]
    misfits: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Nothing is missing, and the robot file, if one was given, fits."""
        return not self.missing and not self.misfits


def inspect(name: str | Path, robot: RobotConfig | None = None) -> Inspection:
    """Look at a checkpoint folder, or at the one that a model file names.

    :raises PhyaiError: it cannot be read.
    """
    checkpoint, own, where = opened(name)
    if checkpoint is None:
        raise ConfigError("the model file names no checkpoint", where=where, do="Give a checkpoint folder.")
    missing = [f"{point.what}. {point.do}" for point in checkpoint.unmet(own)]
    model = None
    try:
        model = checkpoint.model(own, where=where)
    except ConfigError as error:
        missing = missing or [str(error)]
    tensors, gaps = _tensors(checkpoint, model)
    notes, misfits = list(checkpoint.recipe.open_notes(own)), []
    if robot is not None:
        misfits = _misfits(checkpoint, model, robot)
        fed = {camera.role for camera in robot.cameras}
        if unfed := [role for role in checkpoint.options["cameras"] if role not in fed and not _is_empty(role)]:
            notes.append(f"No camera of {robot.robot_id} has the role {', '.join(unfed)}: the policy does not see it.")
    return Inspection(checkpoint, own, model, tensors, tuple(notes), (*missing, *gaps), tuple(misfits))


def _is_empty(role: str) -> bool:
    """Of lerobot: a camera that no robot has."""
    return role.startswith("empty_camera_")


def _tensors(checkpoint: Checkpoint, model: ModelConfig | None) -> tuple[dict[str, Any], list[str]]:
    stored, names = checkpoint.stored, checkpoint.names
    size = sum(tensor.stop - tensor.start for tensor in stored.values())
    counts: dict[str, Any] = {
        "files": sorted({tensor.file.name for tensor in stored.values()}),
        "bytes": size,
        "dtypes": dict(Counter(tensor.dtype for tensor in stored.values())),
        "stored": len(stored),
        "used": len(set(names.values())),
        "unused": sorted(set(stored) - set(names)),
    }
    options = checkpoint.options if model is None else model.options
    if "vis_heads" not in options:
        return counts, []
    try:
        from phyai_engine.models.pi import PiModel  # noqa: PLC0415 - torch
    except ModuleNotFoundError as error:
        return {**counts, "expected": f"unknown without {error.name}"}, []
    checked = convert({**options, "variant": checkpoint.family}, PiOptions, where="options")
    expected, held = PiModel.expected(checked), checkpoint.shapes
    absent = sorted(expected.keys() - held.keys())
    extra = sorted(held.keys() - expected.keys())
    gaps = [f"tensors are missing: {_some(absent)}. Fetch the checkpoint again."] if absent else []
    gaps += [f"tensors of another size of model: {_some(extra)}."] if extra else []
    gaps += [
        f"{name} has shape {list(held[name])}, wanted {list(shape)}."
        for name, shape in expected.items()
        if name in held and held[name] != shape
    ]
    return {**counts, "expected": len(expected)}, gaps


def _some(names: Sequence[str], limit: int = 5) -> str:
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"


def _misfits(checkpoint: Checkpoint, model: ModelConfig | None, robot: RobotConfig) -> list[str]:
    """What keeps a robot from using the policy, and what looks mistaken."""
    roles, recipe = checkpoint.options["cameras"], checkpoint.recipe
    found = swapped_cameras(robot, roles)
    for what, mine, trained in (
        ("state", len(robot.state), recipe.state_dim),
        ("actions", len(robot.actions), recipe.action_dim),
    ):
        if trained is not None and mine != trained and trained != checkpoint.options["action_dim"]:
            found.append(f"{what}: the robot file has {mine} entries, the policy was trained with {trained}.")
    trained_names = _names(recipe.action_names, None, "action")
    for what, mine_names in (("state", robot.state_names), ("actions", robot.action_names)):
        if list(mine_names) != trained_names and sorted(mine_names) == sorted(trained_names):
            found.append(f"{what}: another order than in training, which was {', '.join(trained_names)}.")
    if recipe.relative is not None and recipe.action_names and len(recipe.action_names) == len(robot.actions):
        for trained_name, name in zip(recipe.action_names, robot.action_names, strict=True):
            absolute = [any(token in n.lower() for token in recipe.relative.exclude) for n in (trained_name, name)]
            if absolute[0] != absolute[1]:
                kinds = ["absolute" if a else "relative" for a in absolute]
                found.append(
                    f"action {name}: {kinds[0]} in training (as {trained_name}), {kinds[1]} by its name here. Set "
                    "`relative_actions: {exclude: [...]}` in the model file to this robot's names."
                )
    if model is not None:
        try:
            options = convert({**model.options, "variant": model.family}, PiOptions, where="options")
            Adapter(robot, model, options.spec())
        except ConfigError as error:
            found.append(str(error))
    return found


# --- the files that run it ---


def model_yaml(seen: Inspection) -> str:
    """A model file; what the folder says itself is there as comments."""
    checkpoint = seen.checkpoint
    recipe, plain = checkpoint.recipe, msgspec.to_builtins
    keys = {"family": checkpoint.family, **seen.own, "checkpoint": str(checkpoint.folder)}
    lines = [
        f"# {_title(checkpoint)}. What is commented out the folder says itself; a line without # wins.",
        yaml.safe_dump(keys, sort_keys=False, width=110).rstrip(),
        *(f"# asset: {asset}" for asset in recipe.assets),
        f"# resize: {recipe.resize}",
        f"# prompt: {_flow(plain(recipe.prompt))}",
        f"# relative_actions: {_flow(plain(recipe.relative))}",
        "# options:",
        *(f"#   {key}: {_flow(value)}" for key, value in checkpoint.options.items()),
        *(f"# Note: {note}" for note in seen.notes),
        *(f"# MISSING: {text}" for text in seen.missing),
    ]
    return "\n".join(lines) + "\n"


def robot_yaml(checkpoint: Checkpoint) -> str:
    """A robot file to fill in; it is refused until every FILL_IN is gone. Limits are the robot's, not the data's."""
    recipe = checkpoint.recipe
    actions = _names(recipe.action_names, recipe.action_dim, "action")
    state = _names(recipe.action_names, recipe.state_dim, "state")
    joints = "joint_position" if recipe.relative is not None else FILL_IN
    lines = [
        f"# For {_title(checkpoint)}. Fill in every FILL_IN; limits are the robot's own, in its own units.",
        "# Where training had other units (lerobot's SO-101: degrees or -100..100, ROS: rad), every entry of state and",
        "# actions needs `scale` and `offset`: training value = scale * robot value + offset.",
        f"robot_id: {FILL_IN.lower()}",
        f"action_type: {joints}   # joint_position, joint_velocity or cartesian_delta",
        f"dt_s: {FILL_IN}   # seconds per action, as in training",
        "state:",
        *(f"  - {{name: {_quoted(name)}}}{_range(checkpoint, 'state', i)}" for i, name in enumerate(state)),
        "actions:",
    ]
    for i, name in enumerate(actions):
        drives = f", state: {_quoted(name)}" if name in state else ""
        limits = f"lower: {FILL_IN}, upper: {FILL_IN}, velocity_max: {FILL_IN}, acceleration_max: {FILL_IN}"
        lines.append(f"  - {{name: {_quoted(name)}{drives}, {limits}}}{_range(checkpoint, 'actions', i)}")
    back = {new: old for old, new in recipe.renames.items()}
    lines.append("cameras:")
    for role in checkpoint.options["cameras"]:
        if not _is_empty(role):
            name = back.get(role, role.removesuffix("_0_rgb"))
            lines.append(f"  - {{name: {name}, topic: {name}/image_raw, role: {role}}}")
    return "\n".join(lines) + "\n"


def _names(stored: Sequence[str], count: int | None, kind: str) -> list[str]:
    if stored and count in (None, len(stored)):
        return [name.removesuffix(".pos") for name in stored]
    return [f"{kind}_{i + 1}" for i in range(count or 0)] or [FILL_IN]


def _quoted(name: str) -> str:
    """As YAML needs it: motors are often named 1, 2, ..."""
    return yaml.safe_dump([name], default_flow_style=True, width=1000).strip()[1:-1]


def _range(checkpoint: Checkpoint, part: Part, i: int) -> str:
    """What the training data spanned, as a comment."""
    found = checkpoint.recipe.statistics[part]
    for names in (NEEDS.get(found.kind, ()), ("q01", "q99"), ("min", "max"), ("mean", "std")):
        if names and all(name in found.values and i < len(found.values[name]) for name in names):
            low, high = (found.values[name][i] for name in names)
            return f"   # training data: {names[0]} {low:.4g}, {names[1]} {high:.4g}"
    return ""


def _flow(value: Any) -> str:
    """YAML of one line; JSON is YAML."""
    return json.dumps(value)


def _title(checkpoint: Checkpoint) -> str:
    name = {"pi0": "pi0", "pi05": "pi0.5"}[checkpoint.family]
    return f"{name} of {checkpoint.folder.name} ({checkpoint.recipe.source})"


# --- the command ---


def inspect_command(name: str, robot: str, write: Path | None, as_json: bool) -> int:
    """Print what a checkpoint holds, and write its files where asked.

    :param robot: a robot file or a shipped robot's name; empty for none.
    :returns: 0 usable, 1 something is missing or does not fit.
    :raises PhyaiError: it cannot be read, or a file to write exists.
    """
    seen = inspect(name, load_robot(resolve("robots", robot)) if robot else None)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(as_mapping(seen)), indent=2).decode())
    else:
        _print(seen)
    if write is not None:
        _write(seen, write, quiet=as_json)
    return 0 if seen.usable else 1


def as_mapping(seen: Inspection) -> dict[str, Any]:
    """Plain values, for ``--json``."""
    checkpoint, recipe = seen.checkpoint, seen.checkpoint.recipe
    return {
        "folder": str(checkpoint.folder),
        "family": checkpoint.family,
        "told": checkpoint.told,
        "source": recipe.source,
        "usable": seen.usable,
        "missing": list(seen.missing),
        "misfits": list(seen.misfits),
        "notes": list(seen.notes),
        "options": dict(checkpoint.options),
        "cameras": list(checkpoint.options["cameras"]),
        "renames": dict(recipe.renames),
        "state_dim": recipe.state_dim,
        "action_dim": recipe.action_dim,
        "action_names": list(recipe.action_names),
        "relative_actions": msgspec.to_builtins(recipe.relative),
        "execution_steps": recipe.execution_steps,
        "rtc_training_max_delay": recipe.rtc_training_max_delay,
        "statistics": {
            part: {"kind": found.kind, "where": found.where, **found.values}
            for part, found in recipe.statistics.items()
        },
        "assets": list(recipe.assets),
        "prompt": msgspec.to_builtins(recipe.prompt),
        "tensors": seen.tensors,
        "model_yaml": model_yaml(seen),
        "robot_yaml": robot_yaml(checkpoint),
    }


def _facts(seen: Inspection) -> Rows:
    checkpoint, recipe, tensors = seen.checkpoint, seen.checkpoint.recipe, seen.tensors
    options, model = checkpoint.options, seen.model
    offsets = recipe.relative if model is None else model.relative_actions
    prompt = recipe.prompt if model is None else model.prompt
    relative = "absolute"
    if offsets is not None:
        kept = ", ".join(offsets.exclude)
        relative = f"relative to the state{f' but those named {kept}' if kept else ''}"
    rows = [
        ("family", f"{checkpoint.family} ({checkpoint.told})"),
        ("source", recipe.source),
        ("horizon", f"{options['action_horizon']} steps" + _if(recipe.execution_steps, ", of which {} are executed")),
        ("solver", f"{options.get('num_steps', 10)} steps, time rule {options['time_rule']}"),
        ("cameras, in order", ", ".join(options["cameras"]) or "unknown"),
        *((f"  {new}", f"recorded as {old}") for old, new in recipe.renames.items()),
        ("image", f"{options['image_size']} pixels, patch {options['patch']}, resize {recipe.resize}"),
        ("state", f"{recipe.state_dim or 'unknown'} of {options['action_dim']} dimensions"),
        ("actions", f"{recipe.action_dim or 'unknown'} of {options['action_dim']} dimensions, {relative}"),
        ("prompt", f"{prompt.form}, at most {prompt.max_tokens} tokens"),
        ("tokenizer", prompt.tokenizer or "none"),
        ("dtype", f"{options['dtype']}; stored {', '.join(f'{n} {d}' for d, n in tensors['dtypes'].items())}"),
        ("weights", f"{tensors['bytes'] / 1e6:,.1f} MB in {', '.join(tensors['files'])}"),
        ("tensors", f"{tensors['used']} used, {tensors.get('expected', 'unknown')} expected"),
        ("unused", _some(tensors["unused"]) or "none"),
        ("sizes", ", ".join(f"{k} {options[k]}" for k in _SIZES if k in options)),
    ]
    if recipe.rtc_training_max_delay:
        rows.append(("trained for RTC", f"delays up to {recipe.rtc_training_max_delay} steps"))
    return rows


_SIZES = (
    *("vocab", "vis_width", "vis_depth", "vis_mlp", "vis_heads", "width", "depth", "mlp", "heads", "kv_heads"),
    *("head_dim", "exp_width", "exp_mlp"),
)


def _if(value: object, text: str) -> str:
    return text.format(value) if value is not None else ""


def _print(seen: Inspection) -> None:
    from rich.console import Console  # noqa: PLC0415 - only the command draws
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    table = Table(title=str(seen.checkpoint.folder), title_justify="left", show_header=False)
    for name, value in _facts(seen):
        table.add_row(name, _plain(value))
    console.print(table)
    for part in PARTS:
        found = seen.checkpoint.recipe.statistics[part]
        if not found.values:
            continue
        names = sorted(found.values)
        table = Table("", *names, title=f"statistics of {part}: {found.kind}, {found.where}", title_justify="left")
        for i in range(found.dims or 0):
            table.add_row(str(i), *(f"{found.values[n][i]:.6g}" if i < len(found.values[n]) else "" for n in names))
        console.print(table)
    for text in seen.notes:
        console.print(f"[yellow]note[/] {_plain(text)}", highlight=False)
    for heading, texts in (("missing", seen.missing), ("does not fit", seen.misfits)):
        for text in texts:
            console.print(f"[red]{heading}[/] {_plain(text)}", highlight=False)
    if seen.usable:
        console.print("[green]usable[/]")
    for heading, text in (("model file", model_yaml(seen)), ("robot file, to fill in", robot_yaml(seen.checkpoint))):
        console.print(f"\n[bold]{heading}[/]")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    """Brackets are no markup."""
    return text.replace("[", "\\[")


def _write(seen: Inspection, out: Path, *, quiet: bool) -> None:
    robot = out.with_name(f"{out.stem}_robot.yaml")
    for path, text in ((out, model_yaml(seen)), (robot, robot_yaml(seen.checkpoint))):
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise ConfigError(
                f"cannot write the file: {error.strerror}", where=path, do="Give another --write."
            ) from None
        if not quiet:
            print(f"wrote {path}")
