"""Golden folders: run our model on recorded inputs and measure every recorded array against its gate.

A folder holds ``config.json`` (sizes), ``*.safetensors`` (weights, checkpoint names) and ``io.npz`` (inputs,
intermediates, outputs). Nothing about a folder is fixed here but the array names of its family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, JustifyMethod
from rich.table import Table

from phyai_engine.config import convert
from phyai_engine.errors import ConfigError, PhyaiError
from phyai_engine.models.pi import PiModel, PiOptions, PiPrefix
from phyai_engine.runner import Runner
from phyai_engine.types import Row
from phyai_engine.weights.loading import read_tensors

Array = NDArray[Any]
Arrays = Mapping[str, Array]

# How a recorded sample is run: as recorded, as a batch of one, and beside other rows, two of them guided.
MODES = ("recorded", "alone", "mixed")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One recorded array, or one step of it, in one mode; the error is over all samples.

    :param shape: as recorded, batch included. :param max_abs: NaN if ours is not finite or has another shape.
    """

    name: str
    step: int | None
    mode: str
    shape: tuple[int, ...]
    max_abs: float
    rel_l2: float
    gate: float

    @property
    def passed(self) -> bool:
        """NaN fails."""
        return self.max_abs <= self.gate

    @property
    def label(self) -> str:
        """Array name with its step, as in ``v_steps[3]``."""
        return self.name if self.step is None else f"{self.name}[{self.step}]"


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """All comparisons of one folder, in the order of the dataflow.

    :param not_compared: recorded arrays that are neither inputs nor known to the family; they fail the
        report.
    """

    folder: Path
    family: str
    comparisons: tuple[Comparison, ...]
    not_compared: tuple[str, ...]

    @property
    def first_bad(self) -> Comparison | None:
        """The earliest array that leaves its gate: what follows it may only inherit its error."""
        return next((c for c in self.comparisons if not c.passed), None)

    @property
    def passed(self) -> bool:
        """Every recorded array was compared and is within its gate."""
        return bool(self.comparisons) and self.first_bad is None and not self.not_compared

    def table(self) -> Table:
        """One line per array: the largest absolute error of each mode, over all steps, and its gate."""
        title = f"{self.folder.name} ({self.family}): max abs error per mode, worst relative L2"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for column in ("array", "shape", *MODES, "rel L2", "gate", ""):
            justify: JustifyMethod = "left" if column in ("array", "shape", "") else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for name in dict.fromkeys(c.name for c in self.comparisons):
            same = [c for c in self.comparisons if c.name == name]
            steps = {c.step for c in same} - {None}
            shape = "x".join(str(n) for n in (*([len(steps)] if steps else []), *same[0].shape))
            errors = [max((c.max_abs for c in same if c.mode == m), key=_nan_last) for m in MODES]
            relative = max((c.rel_l2 for c in same), key=_nan_last)
            figures = [f"{e:.1e}" for e in (*errors, relative, same[0].gate)]
            verdict = "[green]ok[/]" if all(c.passed for c in same) else "[red]BAD[/]"
            table.add_row(name, shape, *figures, verdict)
        for name in self.not_compared:
            table.add_row(name, "", *["-"] * 5, "[red]?[/]")
        return table


def run_golden(folder: Path) -> GoldenReport:
    """Run one folder with the family that its config names.

    :raises ConfigError: not a golden folder, or of a family that is not supported.
    :raises WeightsError: the weights do not fit the configuration.
    """
    config, recorded = _read(folder)
    name = str(config.get("model") or config.get("model_type") or "")
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            "no golden check for this model",
            got=repr(name),
            wanted=f"one of {', '.join(FAMILIES)}",
            where=folder / "config.json",
        )
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return family(folder, config, recorded)
    finally:
        torch.set_float32_matmul_precision(precision)


def golden_command(folder: str, first_bad: bool) -> int:
    """What ``phyai golden FOLDER [--first-bad]`` does.

    :param first_bad: print one line about the first array outside its gate instead of the table.
    :return: exit code: 0 all within their gates, 1 not, 2 the folder cannot be run.
    """
    console = Console()
    try:
        report = run_golden(Path(folder))
    except PhyaiError as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    if not first_bad:
        console.print(report.table())
    bad = report.first_bad
    if bad is not None:
        text = f"first bad: {bad.label}, mode {bad.mode}: max abs {bad.max_abs:.2e}, gate {bad.gate:.0e}"
        console.print(f"{text}, relative L2 {bad.rel_l2:.2e}", style="red", markup=False, soft_wrap=True)
    elif report.not_compared:
        text = f"not compared: {', '.join(report.not_compared)}"
        console.print(text, style="red", markup=False, soft_wrap=True)
    else:
        arrays = len({c.name for c in report.comparisons})
        console.print(f"all {arrays} arrays within their gates in modes {', '.join(MODES)}", style="green")
    return 0 if report.passed else 1


def _read(folder: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ConfigError("config.json is not an object", where=folder / "config.json")
        with np.load(folder / "io.npz", allow_pickle=False) as archive:
            return config, {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"not a golden folder: {error}", wanted="config.json, io.npz and *.safetensors", where=folder
        ) from None


def _nan_last(value: float) -> tuple[bool, float]:
    return np.isnan(value), value


def _errors(ours: Array, theirs: Array) -> tuple[float, float]:
    """Largest absolute and relative L2 error of equally shaped arrays; NaN as soon as one value is NaN."""
    difference = ours.astype(np.float64) - theirs.astype(np.float64)
    norm = max(float(np.linalg.norm(theirs.astype(np.float64))), 1e-30)
    return float(np.abs(difference).max(initial=0.0)), float(np.linalg.norm(difference)) / norm


# --- pi0 and pi0.5 ---

_PI_GATES = {"prefix_mask": 0.0, "prefix": 1e-5, "v_steps": 2e-5, "x_steps": 1e-5, "actions": 1e-5}
_PI_CACHE = re.compile(r"prefix_([kv])_layer(\d+)")
_PI_STEPS = ("x_steps", "v_steps")


def _pi(folder: Path, config: Mapping[str, Any], recorded: Arrays) -> GoldenReport:
    model, rows, noise = _pi_setup(folder, config, recorded)
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
    comparisons = [_pi_compare(entry, mode, traces[mode], recorded) for entry in _pi_order(recorded) for mode in MODES]
    known = {"tokens", "token_mask", "state", "noise", *(c.name for c in comparisons)}
    inputs = {f"{kind}_{camera}" for kind in ("image", "mask") for camera in model.options.cameras}
    rest = sorted(recorded.keys() - known - inputs)
    return GoldenReport(folder, model.spec.family, tuple(comparisons), tuple(rest))


def _pi_setup(folder: Path, config: Mapping[str, Any], recorded: Arrays) -> tuple[PiModel, list[Row], list[Array]]:
    """Model, the recorded samples as unguided rows (seed = index into the noise list), and the noise list."""
    tensors = read_tensors(folder)
    try:
        options = _pi_options(config, recorded, tensors)
        model = PiModel.from_state(options, tensors, where=folder)
        samples = dict(recorded)
        samples["images"] = np.stack([recorded[f"image_{c}"] for c in options.cameras], axis=1)
        samples["image_mask"] = np.stack([recorded[f"mask_{c}"] for c in options.cameras], axis=1)
        noise = list(recorded["noise"])
        free = np.zeros(noise[0].shape, np.float32)
        rows = [
            Row(
                inputs={name: samples[name][i] for name in model.spec.inputs},
                target=free,
                weight=free,
                gain=np.zeros(options.num_steps, np.float32),
                seed=i,
            )
            for i in range(len(noise))
        ]
    except KeyError as error:
        raise ConfigError(f"{error} is not recorded", where=folder) from None
    return model, rows, [*noise, *np.negative(recorded["noise"])]


def _pi_options(config: Mapping[str, Any], recorded: Arrays, tensors: Mapping[str, Any]) -> PiOptions:
    """Sizes from the configuration; what it leaves out from the recorded arrays and the weights."""
    given = {**config, **config.get("dims", {})}
    cameras = given.get("cameras") or [n.removeprefix("image_") for n in recorded if n.startswith("image_")]
    steps, _, horizon, action_dim = recorded["x_steps"].shape
    derived: dict[str, Any] = {
        "variant": config["model"],
        "cameras": cameras,
        "image_size": recorded[f"image_{cameras[0]}"].shape[-1],
        "prompt_len": recorded["tokens"].shape[1],
        "num_steps": steps,
        "action_horizon": horizon,
        "action_dim": action_dim,
    }
    patch = next((t.shape[-1] for n, t in tensors.items() if n.endswith("patch_embedding.weight")), None)
    rows = next(
        (
            t.shape[0]
            for n, t in tensors.items()
            if n.endswith("layers.0.self_attn.k_proj.weight") and "language_model" in n
        ),
        None,
    )
    if patch is not None:
        derived["patch"] = patch
    if rows is not None and "head_dim" in given:
        derived["kv_heads"] = rows // given["head_dim"]
    fields = {name: given[name] for name in PiOptions.__struct_fields__ if name in given}
    return convert({**derived, **fields}, PiOptions, where="config.json")


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


class _PiTap:
    """The model, keeping what its prefix phase made."""

    def __init__(self, model: PiModel) -> None:
        self._model = model
        self.spec = model.spec
        self.made: dict[str, Array] = {}

    def to_device(self, array: Array) -> torch.Tensor:
        return self._model.to_device(array)

    def to_host(self, array: torch.Tensor) -> Array:
        return self._model.to_host(array)

    def prefix(self, inputs: Mapping[str, Any]) -> PiPrefix:
        embeddings, mask = self._model.embed(inputs)
        prefix = self._model.prefix(inputs)
        made = {"prefix_embeddings": embeddings, "prefix_mask": mask}
        for i, (key, value) in enumerate(prefix.cache):
            made |= {f"prefix_k_layer{i}": key, f"prefix_v_layer{i}": value}
        self.made = {name: self.to_host(tensor) for name, tensor in made.items()}
        return prefix

    def velocity(self, prefix: PiPrefix, x: torch.Tensor, step: int) -> torch.Tensor:
        return self._model.velocity(prefix, x, step)


def _pi_trace(model: PiModel, rows: Sequence[Row], noise: Sequence[Array]) -> list[dict[str, Array]]:
    """Every array of the family for every row, from the same runner that serves requests."""
    steps: dict[str, list[Array]] = {"x_steps": [], "v_steps": []}

    def record(step: int, x: torch.Tensor, velocity: torch.Tensor) -> None:
        steps["x_steps"].append(model.to_host(x))
        steps["v_steps"].append(model.to_host(velocity))

    tap = _PiTap(model)
    runner = Runner(tap, buckets=(len(rows),), on_step=record, noise=lambda seed, *_: noise[seed])
    results = runner.run(rows)
    host = {**tap.made, **{name: np.stack(arrays, axis=1) for name, arrays in steps.items()}}
    host["actions"] = np.stack([result.actions for result in results if result.actions is not None])
    return [{name: array[i] for name, array in host.items()} for i in range(len(rows))]


def _pi_order(recorded: Arrays) -> list[tuple[str, int | None]]:
    """The recorded arrays in the order in which the forward pass makes them; steps one by one."""
    order: list[tuple[str, int | None]] = [("prefix_mask", None), ("prefix_embeddings", None)]
    layers = sorted({int(m[2]) for name in recorded if (m := _PI_CACHE.fullmatch(name))})
    order += [(f"prefix_{kind}_layer{i}", None) for i in layers for kind in "kv"]
    steps = max((len(recorded[name]) for name in _PI_STEPS if name in recorded), default=0)
    order += [(name, k) for k in range(steps) for name in _PI_STEPS]
    return [entry for entry in [*order, ("actions", None)] if entry[0] in recorded]


def _pi_compare(
    entry: tuple[str, int | None], mode: str, trace: Sequence[Mapping[str, Array]], recorded: Arrays
) -> Comparison:
    name, step = entry
    theirs = recorded[name] if step is None else recorded[name][step]
    shape, max_abs, rel_l2 = theirs.shape, float("nan"), float("nan")
    if name in trace[0]:  # else a layer that the model does not have
        ours = np.stack([sample[name] if step is None else sample[name][step] for sample in trace])
        if ours.shape == shape:
            if name.startswith("prefix_") and name != "prefix_mask":
                valid = np.asarray(recorded["prefix_mask"], dtype=bool)  # elsewhere the values mean nothing
                ours, theirs = (_tokens_second(name, array)[valid] for array in (ours, theirs))
            max_abs, rel_l2 = _errors(ours, theirs)
    return Comparison(name, step, mode, shape, max_abs, rel_l2, _PI_GATES.get(name, _PI_GATES["prefix"]))


def _tokens_second(name: str, array: Array) -> Array:
    """[B, L, ...] of an array with prefix tokens; K and V have their heads before the tokens."""
    return array.swapaxes(1, 2) if _PI_CACHE.fullmatch(name) else array


FAMILIES: Mapping[str, Callable[[Path, Mapping[str, Any], Arrays], GoldenReport]] = {"pi0": _pi, "pi05": _pi}
