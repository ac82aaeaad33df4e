"""pi0 and pi0.5 with coded matrices: which there are, what calibrates them, and what the device must be able to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from phyai_engine.errors import ConfigError
from phyai_engine.layers.ops import REFERENCE
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.quant.calibration import Observer
from phyai_engine.quant.coding import Site, code_model, weights_digest
from phyai_engine.quant.scales import FILE, ActivationScales, load_scales
from phyai_engine.rtc import PLAIN
from phyai_engine.runner import Runner
from phyai_engine.types import Row

if TYPE_CHECKING:
    from phyai_engine.models.pi import PiModel

_SYNTHETIC = 2  # observations; what a third adds to the largest values is far below the margin


def sites(options: PiOptions, parts: Iterable[str] | None = None) -> dict[str, Site]:
    """Module name -> matrix of the parts to code, in a fixed order.

    SigLIP's ``out`` is none: the vendor's attention writes what it reads, in 16 bits.

    :param parts: the options' own unless given.
    """
    o, chosen = options, frozenset(options.coded_parts() if parts is None else parts)
    table: dict[str, Site] = {}
    for i in range(o.vis_depth):
        table[f"vision.layers.{i}.qkv"] = Site("vision.attention")
        table[f"vision.layers.{i}.fc1"] = table[f"vision.layers.{i}.fc2"] = Site("vision.mlp")
    for tower, mlp in (("language", o.mlp), ("expert", o.exp_mlp)):
        for i in range(o.depth):
            at = f"{tower}.layers.{i}."
            table[at + "qkv"] = Site(f"{tower}.attention", pairs=o.head_dim)
            if tower == "language" and i + 1 == o.depth:
                continue  # it ends at K and V
            table[at + "o"] = Site(f"{tower}.attention")
            table[at + "gate_up"] = Site(f"{tower}.mlp", pairs=2 * mlp)
            table[at + "down"] = Site(f"{tower}.mlp")
    return {name: site for name, site in table.items() if site.part in chosen}


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
    code_model(model, sites(options), scales)


def calibrate(model: PiModel, rows: Sequence[Row], made: str) -> ActivationScales:
    """Run the rows through a model whose matrices are not coded. :param made: what the rows are, for people to read."""
    own, of = model.ops, sites(model.options)
    observer = Observer(model, of, REFERENCE)
    model.ops = observer.ops
    try:
        runner = Runner(model, buckets=(1,), guidance=PLAIN)
        for row in rows:
            runner.run([row])
    finally:
        model.ops = own
    return ActivationScales(made=made, weights=weights_digest(model, of), largest=observer.largest())


def synthetic_row(options: PiOptions, seed: int) -> Row:
    """Noise in front of every camera and a full prompt of random tokens."""
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
