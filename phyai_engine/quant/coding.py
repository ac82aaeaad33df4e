"""Codes the matrices of a model that is loaded: each nn.Linear of a table becomes a CodedLinear.

A weight has a scale per row. Of an activation its mean over all tokens of the calibration is taken off first, for each
input: what all tokens have in common is multiplied once, at load, with the exact weight, and no rounding touches
it. What is left has one constant scale, of twice the largest value that calibration saw: e4m3 keeps its relative
precision over 14 powers of two, so the margin costs nothing, and a new observation is not cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from phyai_kernels.reference import FP8, LARGEST_FP8, CodedMatrix
from torch import Tensor, nn

from phyai_engine.errors import ConfigError
from phyai_engine.layers.coded import CodedLinear
from phyai_engine.quant.scales import ActivationScales, Seen

MARGIN = 2.0
ALIGNED = 16  # inputs: the rows of coded operands start at multiples of 16 bytes
_SMALLEST = 1e-12  # an activation or a row of zeros has no largest value to scale by


class Site(NamedTuple):
    """A matrix to code.

    :param pairs: its rows are groups of that many, whose halves are interleaved for the operator; 0: they stay.
    """

    pairs: int = 0


def code_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [N, K] as e4m3, and the scale of each row, [N] fp32."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=_SMALLEST) / LARGEST_FP8
    return (wide / scale[:, None]).clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8), scale


def interleaved(rows: Tensor, group: int) -> Tensor:
    """Rows (0, g/2, 1, g/2 + 1, ...) of each group of ``group``. :param rows: [N, ...]; N a multiple of it."""
    halves = rows.view(-1, 2, group // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def code_matrix(weight: Tensor, seen: Seen) -> CodedMatrix:
    """:param weight: [N, K]. :param seen: its operand."""
    centre = torch.from_numpy(seen.centre).to(weight.device)
    values, scale = code_rows(weight)
    step = max(seen.largest, _SMALLEST) * MARGIN / LARGEST_FP8
    inverse = torch.tensor(1.0 / step, dtype=torch.float32, device=weight.device)
    return CodedMatrix(values, scale / inverse, weight.float() @ centre, (centre, inverse))


def code_linear(linear: nn.Linear, seen: Seen, pairs: int) -> CodedLinear:
    """Of a layer without a bias. :param seen: its operand. :param pairs: see :class:`Site`."""
    weight = linear.weight.detach()
    values, factor, bias, code = code_matrix(interleaved(weight, pairs) if pairs else weight, seen)
    return CodedLinear(values, factor, bias, *code)


def check_scales(scales: ActivationScales, digest: str, *, where: object) -> None:
    """:raises ConfigError: they were measured with other weights than those of ``weights_digest``."""
    if digest != scales.weights:
        raise ConfigError(
            "the activation scales belong to other weights",
            got=f"digest {scales.weights} ({scales.made})",
            wanted=digest,
            where=where,
            do="Run `phyai calibrate` with these weights.",
        )


def code_model(model: nn.Module, sites: Mapping[str, Site], scales: ActivationScales) -> None:
    """Replace the matrices, one after the other.

    :param sites: module name -> site.
    :raises ConfigError: the scales lack a matrix, or a matrix cannot be coded.
    """
    for name, site in sites.items():
        linear = cast("nn.Linear", model.get_submodule(name))
        if linear.in_features % ALIGNED:
            raise ConfigError(
                f"{name} cannot be coded",
                got=f"{linear.in_features} inputs",
                wanted=f"a multiple of {ALIGNED}",
                do=f"Add {name} to `quant_keep`, or write `quant: none`.",
            )
        check_seen(scales, name, linear.in_features)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, code_linear(linear, scales.seen[name], site.pairs))


def check_seen(scales: ActivationScales, name: str, inputs: int) -> None:
    """:raises ConfigError: they say nothing of a matrix of that many inputs."""
    if name not in scales.seen or scales.seen[name].centre.shape != (inputs,):
        raise ConfigError(f"no activation scale of {name}", got=scales.made, do="Run `phyai calibrate` again.")


def weights_digest(model: nn.Module, sites: Mapping[str, Site]) -> str:
    """Of the matrices' names and largest values: the same on every device and in every dtype, another for others."""
    peaks = [cast("nn.Linear", model.get_submodule(name)).weight.detach().abs().amax() for name in sites]
    exact = torch.stack(peaks).bfloat16().float().cpu().numpy().tobytes()
    return hashlib.sha256(exact + "\n".join(sites).encode()).hexdigest()[:16]
