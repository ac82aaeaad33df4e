"""Golden folders: run our model on recorded inputs and measure every recorded array against its gate.

A folder holds ``config.json`` (sizes), ``*.safetensors`` (weights, checkpoint names) and ``io.npz`` (inputs,
intermediates, outputs). Nothing about a folder is fixed here but the array names of its family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from phyai_engine.config import convert
from phyai_engine.errors import ConfigError, PhyaiError
from phyai_engine.golden_report import MODES, NUMBERS, Array, Arrays, Comparison, Device, GoldenReport, errors_of
from phyai_engine.golden_rtc import rtc_lerobot
from phyai_engine.graphs import Graphs
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.runner import Runner
from phyai_engine.types import Row
from phyai_engine.weights.header import Stored, stored_tensors
from phyai_engine.weights.loading import device_of, stream_tensors


def run_golden(folder: Path, device: Device = "cpu") -> GoldenReport:
    """Run one folder with the family that its config names.

    :param device: torch's name; on an accelerator the steps run as captured graphs.
    :raises ConfigError: not a golden folder, inputs that the model cannot take, or a family that is not supported.
    :raises WeightsError: the weights do not fit the configuration.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        config, recorded = _read(folder)
        name = _family(config)
        if name not in FAMILIES:
            raise ConfigError(
                "no golden check for this model",
                got=repr(name),
                wanted=f"one of {', '.join(FAMILIES)}",
                where=folder / "config.json",
            )
        with np.errstate(invalid="ignore", over="ignore"):  # such values are reported as errors that fail
            return FAMILIES[name](folder, config, recorded, device)
    except PhyaiError:
        raise
    except Exception as error:  # the files are anyone's: whatever they break is said with the folder's name
        text = f"the folder cannot be run: {type(error).__name__}: {error}"
        raise ConfigError(text, where=folder) from error
    finally:
        torch.set_float32_matmul_precision(precision)


def golden_command(folder: str, first_bad: bool, device: Device = "cpu") -> int:
    """What ``phyai golden FOLDER [--first-bad] [--device cuda]`` does.

    :param first_bad: print one line about the first array outside its gate instead of the table.
    :return: exit code: 0 all within their gates, 1 not, 2 the folder cannot be run.
    """
    console = Console()
    try:
        report = run_golden(Path(folder), device)
    except PhyaiError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    if not first_bad:
        console.print(report.table())
    bad = report.first_bad
    if bad is not None:
        figures = f"max abs {bad.max_abs:.2e}, gate {bad.gate:.0e}, relative L2 {bad.rel_l2:.2e}"
        text = f"first bad: {bad.label}, mode {bad.mode}: {bad.fault or figures}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    elif report.not_compared:
        text = f"not compared: {', '.join(report.not_compared)}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    else:
        arrays = len({c.name for c in report.comparisons})
        console.print(f"all {arrays} arrays within their gates in modes {', '.join(MODES)}", style="green")
    return 0 if report.passed else 1


def _read(folder: Path) -> tuple[dict[str, Any], Arrays]:
    """The configuration without its null values, and every recorded array."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # Opened here, as numpy leaves the file open when it is no archive.
        with (folder / "io.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            recorded = {name: archive[name] for name in archive.files}
    except Exception as error:  # a damaged archive raises what zipfile, zlib or numpy's parsers happen to raise
        text = f"not a golden folder: {type(error).__name__}: {error}"
        raise ConfigError(text, wanted="config.json, io.npz and *.safetensors", where=folder) from error
    return _object(config, "config.json", folder), recorded


def _object(value: Any, what: str, folder: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is not an object", where=folder / "config.json")
    return {key: entry for key, entry in value.items() if entry is not None}


def _family(config: Mapping[str, Any]) -> str:
    return str(config.get("model") or config.get("model_type") or "")


# --- pi0 and pi0.5 ---

_PI_GATES = {"prefix_mask": 0.0, "prefix": 1e-5, "v_steps": 2e-5, "x_steps": 1e-5, "actions": 1e-5}
_PI_CACHE = re.compile(r"prefix_([kv])_layer(\d+)")
_PI_STEPS = ("x_steps", "v_steps")
# Sizes that a configuration may leave out: option, array, its rank, the axis; of two the later one counts.
_PI_SIZES = (
    ("prompt_len", "tokens", 2, 1),
    ("action_horizon", "noise", 3, 1),
    ("action_dim", "noise", 3, 2),
    ("num_steps", "v_steps", 4, 0),
    ("num_steps", "x_steps", 4, 0),
)


def _pi(folder: Path, config: Mapping[str, Any], recorded: Arrays, device: Device) -> GoldenReport:
    model, rows, noise = _pi_setup(folder, config, recorded, device)
    count = len(rows)
    traces: dict[str, list[dict[str, Array]]] = {
        "recorded": _pi_trace(model, rows, noise),
        "alone": [trace for row in rows for trace in _pi_trace(model, [row], noise)],
        "mixed": [],
    }
    for i in range(0, count, 2):
        # Other partners, other slots: [partner, last, partner, first]; an odd last sample fills both places.
        first, last = rows[i], rows[min(i + 1, count - 1)]
        batch = [_pi_partner(first, count), last, _pi_partner(last, count), first]
        out = _pi_trace(model, batch, noise)
        traces["mixed"] += [out[3], out[1]][: count - i]
    order = _pi_order(recorded, model.options)
    comparisons = [_pi_compare(entry, mode, traces[mode], recorded) for entry in order for mode in MODES]
    known = {"tokens", "token_mask", "state", "noise", *(c.name for c in comparisons)}
    inputs = {f"{kind}_{camera}" for kind in ("image", "mask") for camera in model.options.cameras}
    rest = sorted(recorded.keys() - known - inputs)
    return GoldenReport(folder, model.spec.family, tuple(comparisons), tuple(rest))


def _pi_setup(
    folder: Path, config: Mapping[str, Any], recorded: Arrays, device: Device
) -> tuple[PiModel, list[Row], list[Array]]:
    """Model, the recorded samples as unguided rows (seed = index into the noise list), and the noise list."""
    options = _pi_options(folder, config, recorded, stored_tensors(folder))
    model = PiModel.from_state(options, dict(stream_tensors(folder)), where=folder, device=device_of(device))
    samples, noise = _pi_inputs(folder, model, recorded)
    free = np.zeros(noise.shape[1:], np.float32)
    gain = np.zeros(options.num_steps, np.float32)
    rows = [
        Row(inputs={name: array[i] for name, array in samples.items()}, target=free, weight=free, gain=gain, seed=i)
        for i in range(len(noise))
    ]
    return model, rows, [*noise, *np.negative(noise)]


def _pi_options(folder: Path, config: Mapping[str, Any], recorded: Arrays, tensors: Mapping[str, Stored]) -> PiOptions:
    """Sizes from the configuration; what it leaves out from the recorded arrays and the weights."""
    given = {**config, **_object(config.get("dims", {}), "dims", folder)}
    images = [name for name in recorded if name.startswith("image_")]
    derived: dict[str, Any] = {"cameras": [name.removeprefix("image_") for name in images]}
    sizes = [*_PI_SIZES, *(("image_size", name, 4, 3) for name in images)]
    for option, name, rank, axis in sizes:
        shape = recorded[name].shape if name in recorded else ()
        if len(shape) == rank and shape[axis]:
            derived[option] = shape[axis]
        elif name not in _PI_STEPS:  # an input; a trajectory of another shape fails when it is compared
            raise ConfigError(f"{name!r} is not recorded, or not with {rank} axes", where=folder / "io.npz")
    head_dim = given.get("head_dim")
    for name, tensor in tensors.items():
        if name.endswith("patch_embedding.weight"):
            derived["patch"] = tensor.shape[-1]
        if name.endswith("language_model.layers.0.self_attn.k_proj.weight") and isinstance(head_dim, int):
            derived["kv_heads"] = tensor.shape[0] // max(1, head_dim)
    fields = {name: given[name] for name in PiOptions.__struct_fields__ if name in given}
    if isinstance(fields.get("dtype"), str):
        fields["dtype"] = fields["dtype"].removeprefix("torch.")
    return convert({**derived, **fields, "variant": _family(config)}, PiOptions, where=str(folder / "config.json"))


def _pi_inputs(folder: Path, model: PiModel, recorded: Arrays) -> tuple[dict[str, Array], Array]:
    """The model's inputs [B, ...] and the noise [B, H, A], in the model's dtypes."""
    where = folder / "io.npz"
    options, specs = model.options, model.spec.inputs
    count = max(1, len(recorded["noise"]))
    noise = _input(recorded, "noise", (count, options.action_horizon, options.action_dim), "float32", where)
    samples: dict[str, Array] = {}
    for name, spec in specs.items():
        if name in ("images", "image_mask"):
            kind = "image" if name == "images" else "mask"
            shape = (count, *spec.shape[1:])
            each = [_input(recorded, f"{kind}_{c}", shape, spec.dtype, where) for c in options.cameras]
            samples[name] = np.stack(each, axis=1)
        else:
            samples[name] = _input(recorded, name, (count, *spec.shape), spec.dtype, where)
    said = samples["tokens"][samples["token_mask"]]
    if said.size and not 0 <= said.min() <= said.max() < options.vocab:
        text = f"{said.min()} to {said.max()}"
        raise ConfigError("token ids outside the vocabulary", got=text, wanted=f"below {options.vocab}", where=where)
    return samples, noise


def _input(recorded: Arrays, name: str, shape: tuple[int, ...], dtype: str, where: Path) -> Array:
    """A recorded input, cast to the dtype that the model takes; whole numbers and truths must stay what they are."""
    if name not in recorded:
        raise ConfigError(f"{name!r} is not recorded", where=where)
    array = recorded[name]
    cast = array.astype(dtype) if array.shape == shape and array.dtype.kind in NUMBERS else None
    if cast is None or (cast.dtype.kind != "f" and not np.array_equal(cast, array)):
        raise ConfigError(
            f"{name} does not fit the model",
            got=f"{array.dtype} {list(array.shape)}",
            wanted=f"values of {dtype} {list(shape)}",
            where=where,
        )
    return cast


def _pi_partner(row: Row, count: int) -> Row:
    """A row to share a batch with: other pixels and noise, no first camera, half the prompt, guided."""
    inputs = {name: array.copy() for name, array in row.inputs.items()}
    inputs["images"] = np.negative(inputs["images"])
    inputs["image_mask"] = inputs["image_mask"] & (np.arange(len(inputs["image_mask"])) != 0)
    length = int(inputs["token_mask"].sum())
    inputs["token_mask"][max(1, length // 2) :] = False
    weight = np.zeros_like(row.weight)
    weight[: max(1, len(weight) // 4)] = 1.0
    return Row(
        inputs=inputs,
        target=np.full_like(row.target, 0.5),
        weight=weight,
        gain=np.full_like(row.gain, 2.0),
        seed=count + row.seed,
    )


def _pi_prefix(model: PiModel, rows: Sequence[Row]) -> dict[str, Array]:
    """What the prefix phase makes of a batch."""
    inputs = {name: model.to_device(np.stack([row.inputs[name] for row in rows])) for name in model.spec.inputs}
    arranged = model.arranged(inputs)
    prefix = model.encode(arranged)
    mask, actions = model.to_host(prefix.mask), prefix.actions
    made = {"prefix_mask": mask, "prefix_embeddings": _padded(model.to_host(model.embed(arranged)), mask)}
    for kind, slab in (("k", actions.keys), ("v", actions.values)):
        for i, layer in enumerate(model.to_host(slab)):
            made[f"prefix_{kind}_layer{i}"] = _padded(layer.swapaxes(1, 2), mask).swapaxes(1, 2)
    return made


def _padded(compact: Array, mask: Array) -> Array:
    """Compact tokens [B, L or more, ...] at the places they have in the recorded prefix, [B, padded length, ...]."""
    padded = np.zeros((*mask.shape, *compact.shape[2:]), compact.dtype)
    for row, tokens, valid in zip(padded, compact, mask, strict=True):
        row[valid] = tokens[: valid.sum()]
    return padded


def _pi_trace(model: PiModel, rows: Sequence[Row], noise: Sequence[Array]) -> list[dict[str, Array]]:
    """Every array of the family for every row, from the same runner that serves requests."""
    steps: dict[str, list[Array]] = {"x_steps": [], "v_steps": []}

    def record(step: int, x: torch.Tensor, velocity: torch.Tensor) -> None:
        steps["x_steps"].append(model.to_host(x))
        steps["v_steps"].append(model.to_host(velocity))

    graphs = None
    if model.captured_shapes((len(rows),)):
        graphs = Graphs(model, shapes=[model.shape_of([row.inputs for row in rows])])
    runner = Runner(model, buckets=(len(rows),), on_step=record, noise=lambda seed, *_: noise[seed], graphs=graphs)
    results = runner.run(rows)
    host = {**_pi_prefix(model, rows), **{name: np.stack(arrays, axis=1) for name, arrays in steps.items()}}
    host["actions"] = np.stack([result.actions for result in results if result.actions is not None])
    return [{name: array[i] for name, array in host.items()} for i in range(len(rows))]


def _pi_order(recorded: Arrays, options: PiOptions) -> list[tuple[str, int | None]]:
    """What is compared, in the order in which the forward pass makes it; steps one by one.

    Besides every recorded array these are the ones that each folder of the family must hold. A trajectory with
    another number of steps is one entry.
    """
    ends = {0, options.depth - 1}
    layers = sorted(ends | {int(m[2]) for name in recorded if (m := _PI_CACHE.fullmatch(name))})
    required = {"prefix_embeddings", *_PI_STEPS, "actions"} | {f"prefix_{kind}_layer{i}" for i in ends for kind in "kv"}
    order: list[tuple[str, int | None]] = [("prefix_mask", None), ("prefix_embeddings", None)]
    order += [(f"prefix_{kind}_layer{i}", None) for i in layers for kind in "kv"]
    whole = [name for name in _PI_STEPS if name not in recorded or recorded[name].shape[:1] != (options.num_steps,)]
    for k in range(options.num_steps):
        order += [(name, None if name in whole else k) for name in _PI_STEPS if k == 0 or name not in whole]
    return [entry for entry in [*order, ("actions", None)] if entry[0] in recorded or entry[0] in required]


def _pi_compare(
    entry: tuple[str, int | None], mode: str, trace: Sequence[Mapping[str, Array]], recorded: Arrays
) -> Comparison:
    name, step = entry
    gate, nan = _PI_GATES.get(name, _PI_GATES["prefix"]), float("nan")
    if name not in recorded:
        return Comparison(name, step, mode, (), nan, nan, gate, "not recorded")
    theirs = recorded[name]
    shape = theirs.shape if step is None else theirs.shape[1:]
    if name not in trace[0]:
        return Comparison(name, step, mode, shape, nan, nan, gate, "the model has no such layer")
    ours = np.stack([sample[name] for sample in trace], axis=1 if name in _PI_STEPS else 0)
    if ours.shape != theirs.shape or theirs.dtype.kind not in NUMBERS:
        fault = f"recorded as {theirs.dtype} {list(theirs.shape)}, ours is {ours.dtype} {list(ours.shape)}"
        return Comparison(name, step, mode, shape, nan, nan, gate, fault)
    if step is not None:
        ours, theirs = ours[step], theirs[step]
    elif name.startswith("prefix_") and name != "prefix_mask":
        # Elsewhere the values mean nothing. Our own mask: a recorded one that differs fails by itself.
        valid = np.stack([sample["prefix_mask"] for sample in trace])
        ours, theirs = (_tokens_second(name, array)[valid] for array in (ours, theirs))
    return Comparison(name, step, mode, shape, *errors_of(ours, theirs), gate)


def _tokens_second(name: str, array: Array) -> Array:
    """[B, L, ...] of an array with prefix tokens; K and V have their heads before the tokens."""
    return array.swapaxes(1, 2) if _PI_CACHE.fullmatch(name) else array


FAMILIES: Mapping[str, Callable[[Path, Mapping[str, Any], Arrays, Device], GoldenReport]] = {
    "pi0": _pi,
    "pi05": _pi,
    "rtc_lerobot": rtc_lerobot,
}
