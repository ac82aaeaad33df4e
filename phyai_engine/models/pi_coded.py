"""pi0 and pi0.5 with coded matrices: which there are, what calibrates them, and what the device must be able to do.

The prefix' matrices are coded one by one, in place. The expert's layers are one operator, coded as a whole, beside
their matrices.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from phyai_kernels import reference
from phyai_kernels.reference import CodedLayer
from torch import nn

from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import REFERENCE, OpShape
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.noise import standard_normal
from phyai_engine.quant.calibration import Observer
from phyai_engine.quant.coding import Site, check_scales, check_seen, code_matrix, code_model, weights_digest
from phyai_engine.quant.scales import FILE, ActivationScales, load_scales
from phyai_engine.solvers import euler_flow
from phyai_engine.types import Row

if TYPE_CHECKING:
    from phyai_engine.models.pi import PiModel

_HALVES = {"gate_up": "down", "down": "gate_up"}
_SYNTHETIC = 2  # observations; what a third adds to the largest values is far below the margin


def sites(options: PiOptions) -> dict[str, Site]:
    """Module name -> matrix of the prefix that ``quant`` codes, in a fixed order.

    :raises ConfigError: half of an MLP is kept: what stands between its halves is of one kind.
    """
    if options.quant == "none":
        return {}
    table = prefix_sites(options)
    kept = _kept(options, table)
    for name in kept:
        owner, _, leaf = name.rpartition(".")
        if (other := _HALVES.get(leaf)) and f"{owner}.{other}" not in kept:
            raise ConfigError(
                f"{leaf} is kept and {other} is not",
                got=", ".join(options.quant_keep),
                wanted="both halves of an MLP, or none",
                where="options.quant_keep",
                do=f"Add {owner}.{other}.",
            )
    return {name: site for name, site in table.items() if name not in kept}


def codes_expert(options: PiOptions) -> bool:
    """Whether ``quant`` is for the expert too: as a whole, so that keeping any of its matrices keeps all."""
    return options.quant != "none" and not _kept(options, expert_sites(options))


def _kept(options: PiOptions, table: Iterable[str]) -> set[str]:
    return {name for pattern in options.quant_keep for name in fnmatch.filter(table, pattern)}


def every_site(options: PiOptions) -> dict[str, Site]:
    """Module name -> matrix that can be coded, in a fixed order."""
    return prefix_sites(options) | expert_sites(options)


def prefix_sites(options: PiOptions) -> dict[str, Site]:
    """Those of ``every_site`` whose coded form takes their place."""
    o, table = options, dict[str, Site]()
    for i in range(o.depth):
        at = f"language.layers.{i}."
        table[at + "qkv"] = Site(pairs=o.head_dim)
        if i + 1 < o.depth:  # the last layer ends at K and V
            table |= {at + "o": Site(), at + "gate_up": Site(pairs=2 * o.mlp), at + "down": Site()}
    return table


def expert_sites(options: PiOptions) -> dict[str, Site]:
    """Those whose coded form stands beside them, layer by layer: guidance takes its gradient through what they are."""
    return {f"expert.layers.{i}.{leaf}": Site() for i in range(options.depth) for leaf in CodedLayer._fields}


def coded_shapes(options: PiOptions) -> list[OpShape]:
    """Calls of the operators of coded matrices in one full request, beside those that models.pi.op_shapes lists."""
    coded = sites(options)
    leaves = {name.rpartition(".")[2] for name in coded}
    if "language.layers.0.qkv" in coded:
        leaves.add("first")
    o, dtype = options, torch.bfloat16
    rows, queries = len(o.cameras) * o.image_tokens + o.prompt_len, o.heads * o.head_dim
    columns = rows + o.state_tokens + o.action_horizon
    heads = (o.heads, o.kv_heads)
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {
        "first": [("rms_norm_fp8", (rows, o.width))],
        "qkv": [
            ("project_rotate_fp8", (1, rows, o.width, *heads, o.head_dim, columns)),
            ("linear_norm_fp8", (rows, o.mlp, o.width)),
        ],
        "o": [
            ("attend_fp8", (1, *heads, rows, columns, o.head_dim)), ("linear_norm_fp8", (rows, queries, o.width))
        ],
        "gate_up": [
            ("gated_up_fp8", (rows, o.width, o.mlp)), ("linear_norm_fp8", (rows, queries, o.width))
        ],
        "down": [("linear_norm_fp8", (rows, o.mlp, o.width))],
    }  # fmt: skip
    shapes = [OpShape(op, dtype, dims) for leaf, calls in found.items() if leaf in leaves for op, dims in calls]
    if codes_expert(options):
        sizes = o.exp_width, o.exp_mlp, *heads, o.head_dim, columns
        shapes.append(OpShape("stack_fp8", dtype, (1, o.action_horizon, *sizes)))
    return shapes


def check_device(options: PiOptions, device: torch.device) -> None:
    """:raises ConfigError: the device has no products of e4m3 numbers, and the reference was not asked for."""
    if options.quant == "none" or options.kernels != "auto":
        return
    name = device.type
    if device.type == "cuda" and torch.version.hip is None:
        if torch.cuda.get_device_capability(device) >= (8, 9):
            return
        name = torch.cuda.get_device_name(device)
    raise ConfigError(
        "this device has no e4m3 products",
        got=f"quant: {options.quant} on {name}",
        wanted="an NVIDIA GPU of compute capability 8.9 or more",
        where="options.quant",
        do="Write `quant: none`; `kernels: reference` computes the same numbers, slowly.",
    )


def code(model: PiModel, checkpoint: Path | None) -> ActivationScales:
    """Code the matrices of the model's prefix as its options say.

    :param checkpoint: its folder; None: the weights are random, and so is what calibrates them.
    :return: what they were coded by.
    :raises ConfigError: no scales, scales of other weights, or a matrix that cannot be coded.
    """
    options = model.options
    if checkpoint is None and not options.quant_scales:
        rows = [synthetic_row(options, seed) for seed in range(_SYNTHETIC)]
        scales = calibrate(model, rows, f"{_SYNTHETIC} synthetic observations")
    else:
        path = Path(options.quant_scales) if options.quant_scales else Path(checkpoint or ".") / FILE
        scales = load_scales(path, checkpoint=checkpoint or "MODEL")
        # A file from before the expert could be coded says nothing of it, and is right of the rest.
        table = every_site(options)
        told = {name: site for name, site in table.items() if name in scales.seen}
        check_scales(scales, weights_digest(model, told or table), where=path)
    code_model(model, sites(options), scales)
    return scales


def code_expert(model: PiModel, scales: ActivationScales) -> None:
    """Code the expert's layers beside what they are, where something runs them; else the model's ``ops`` say why not.

    :raises ConfigError: scales of a matrix of another size.
    """
    options, names, why = model.options, expert_sites(model.options), ""
    if not codes_expert(options):
        why = "`quant_keep` keeps it"
    elif missing := [name for name in names if name not in scales.seen]:
        why = f"no activation scale of {missing[0]} ({scales.made}): run `phyai calibrate` again"
    elif model.ops.stack_fp8 is reference.stack_fp8 and options.kernels != "reference":
        why = "no fused form of it"
    if why:
        said = model.ops.reasons.get("stack_fp8", "reference")
        reasons = {**model.ops.reasons, "stack_fp8": f"{said}; the expert is not coded, {why}"}
        model.ops = replace(model.ops, reasons=reasons)
        return
    coded = {}
    for name in names:
        weight = cast("nn.Linear", model.get_submodule(name)).weight.detach()
        check_seen(scales, name, weight.shape[1])
        coded[name] = code_matrix(weight, scales.seen[name])
    fields = CodedLayer._fields
    model.coded = [CodedLayer(*(coded[f"expert.layers.{i}.{leaf}"] for leaf in fields)) for i in range(options.depth)]


def calibrate(model: PiModel, rows: Sequence[Row], made: str) -> ActivationScales:
    """Run the rows through a model whose matrices are not coded: what all that can be coded multiply.

    The expert takes all its steps from the row's noise. What it multiplies is seen as its coded form has it, before the
    norm.

    :param made: what the rows are, for people to read.
    """
    own, moved, options = model.ops, model.moved, model.options
    prefix, expert = (Observer(model, of, REFERENCE) for of in (prefix_sites(options), expert_sites(options)))
    late = replace(REFERENCE, stack=partial(reference.late_stack, expert.product))
    if options.variant == "pi05":
        model.moved = model.moved_shifts()
    try:
        for row in rows:
            model.ops = prefix.ops
            seen = model.prefix({name: model.to_device(array[None]) for name, array in row.inputs.items()})
            model.ops = late
            x = model.to_device(standard_normal(row.seed, options.action_horizon, options.action_dim)[None])
            euler_flow(model, seen, x, model.spec.times)
    finally:
        model.ops, model.moved = own, moved
    both = {**expert.seen(), **prefix.seen()}
    return ActivationScales(made=made, weights=weights_digest(model, every_site(options)), seen=both)


def synthetic_row(options: PiOptions, seed: int) -> Row:
    """Noise in front of every camera, as planes, which every form of the model encodes, and a full random prompt."""
    draw, o = np.random.default_rng(seed), options
    count, chunk = len(o.cameras), (o.action_horizon, o.action_dim)
    inputs = {
        "images": draw.uniform(-1, 1, (count, 3, o.image_size, o.image_size)).astype(np.float32),
        "image_mask": np.ones(count, np.bool_),
        "tokens": draw.integers(0, o.vocab, o.prompt_len),
        "token_mask": np.ones(o.prompt_len, np.bool_),
    }
    if o.variant == "pi0":
        inputs["state"] = draw.uniform(-1, 1, o.action_dim).astype(np.float32)
    zeros = np.zeros(chunk, np.float32)
    return Row(inputs=inputs, target=zeros, weight=zeros, gain=np.zeros(o.num_steps, np.float32), seed=seed)
