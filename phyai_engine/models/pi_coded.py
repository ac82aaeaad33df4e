"""pi0 and pi0.5 with coded matrices: which there are, what calibrates them, and what the device must be able to do."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import REFERENCE, OpShape
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.quant.calibration import Observer
from phyai_engine.quant.coding import Site, check_scales, code_model, weights_digest
from phyai_engine.quant.scales import FILE, ActivationScales, load_scales
from phyai_engine.types import Row

if TYPE_CHECKING:
    from phyai_engine.models.pi import PiModel

_HALVES = {"gate_up": "down", "down": "gate_up"}
_SYNTHETIC = 2  # observations; what a third adds to the largest values is far below the margin


def sites(options: PiOptions) -> dict[str, Site]:
    """Module name -> matrix that ``quant`` codes, in a fixed order.

    :raises ConfigError: half of an MLP is kept: what stands between its halves is of one kind.
    """
    if options.quant == "none":
        return {}
    table = every_site(options)
    kept = {name for pattern in options.quant_keep for name in fnmatch.filter(table, pattern)}
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


def every_site(options: PiOptions) -> dict[str, Site]:
    """Module name -> matrix that can be coded."""
    o, table = options, dict[str, Site]()
    for i in range(o.depth):
        at = f"language.layers.{i}."
        table[at + "qkv"] = Site(pairs=o.head_dim)
        if i + 1 < o.depth:  # the last layer ends at K and V
            table |= {at + "o": Site(), at + "gate_up": Site(pairs=2 * o.mlp), at + "down": Site()}
    return table


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
    return [OpShape(op, dtype, dims) for leaf, calls in found.items() if leaf in leaves for op, dims in calls]


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


def code(model: PiModel, checkpoint: Path | None) -> None:
    """Code the model's matrices as its options say.

    :param checkpoint: its folder; None: the weights are random, and so is what calibrates them.
    :raises ConfigError: no scales, scales of other weights, or a matrix that cannot be coded.
    """
    options = model.options
    if checkpoint is None and not options.quant_scales:
        rows = [synthetic_row(options, seed) for seed in range(_SYNTHETIC)]
        scales = calibrate(model, rows, f"{_SYNTHETIC} synthetic observations")
    else:
        path = Path(options.quant_scales) if options.quant_scales else Path(checkpoint or ".") / FILE
        scales = load_scales(path, checkpoint=checkpoint or "MODEL")
        check_scales(scales, weights_digest(model, every_site(options)), where=path)
    code_model(model, sites(options), scales)


def calibrate(model: PiModel, rows: Sequence[Row], made: str) -> ActivationScales:
    """Encode the rows with a model whose matrices are not coded: what all that can be coded multiply.

    :param made: what the rows are, for people to read.
    """
    own, of = model.ops, every_site(model.options)
    observer = Observer(model, of, REFERENCE)
    model.ops = observer.ops
    try:
        for row in rows:
            model.prefix({name: model.to_device(array[None]) for name, array in row.inputs.items()})
    finally:
        model.ops = own
    return ActivationScales(made=made, weights=weights_digest(model, of), seen=observer.seen())


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
