"""The recorded pi0.5 beside its plain forward pass in fp64: for the tests of the gradient, and for its evidence."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import plain_pi as plain

from phyai_engine import golden
from phyai_engine.models.pi import PiModel, PiPrefix
from phyai_engine.rtc import Guidance, GuidanceBuffers, prefix_weights
from phyai_engine.solvers import euler_flow

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Case:
    """:param field: (x [B,H,A] fp64, step) -> u, fp64."""

    model: PiModel
    prefix: PiPrefix
    field: Any

    def noise(self, seed: int) -> Tensor:
        o, batch = self.model.options, len(self.prefix.mask)
        shape = (batch, o.action_horizon, o.action_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pi05_tiny(name: str = "pi05_tiny") -> Case:
    """The golden folder's weights and both its samples."""
    folder = GOLDEN / name
    config, recorded = golden._read(folder)
    model, rows, _ = golden._pi_setup(folder, config, recorded, "cpu")
    inputs = {key: torch.stack([torch.from_numpy(row.inputs[key]) for row in rows]) for key in rows[0].inputs}
    reference = plain.PlainPi(model.options, load_file(folder / "model.safetensors"))
    state = {"state": torch.zeros(len(rows), model.options.action_dim)}
    prefix = reference.prefix({**state, **inputs})
    times = model.spec.times
    return Case(model, model.prefix(inputs), lambda x, step: reference.velocity(prefix, x, times[step]))


def worst_directional_error(case: Case, x: Tensor, error: Tensor, grad: Tensor, step: int, *, directions: int) -> float:
    """Largest |gradient - central difference| of e.u along random unit directions, over what is typical of one.

    A direction has all axes in it: the gradient along it is typically its length over the square root of their number.
    """
    x, error, h = x.double(), error.double(), 1e-4
    generator, worst = torch.Generator().manual_seed(7), 0.0
    for _ in range(directions):
        away = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        away /= away.flatten(1).norm(dim=1)[:, None, None]
        with torch.no_grad():
            ends = [(error * case.field(x + s * h * away, step)).flatten(1).sum(dim=1) for s in (1, -1)]
        difference = (ends[0] - ends[1]) / (2 * h)  # of each sample: its rows do not mix
        along = (grad.double() * away).flatten(1).sum(dim=1)
        typical = grad.double().flatten(1).norm(dim=1) * x[0].numel() ** -0.5
        worst = max(worst, float(((along - difference).abs() / typical).max()))
    return worst


def convention_error(case: Case) -> float:
    """Largest difference of a guided chunk from the paper's direction of time, tau upwards; fp32, both samples."""
    model, prefix, noise = case.model, case.prefix, case.noise(1)
    o, times, guidance = model.options, model.spec.times, Guidance.parse("vjp")
    target = case.noise(2).clamp(-1, 1)
    weight = torch.from_numpy(prefix_weights(o.action_horizon, 5, 30))[None, :, None].expand(noise.shape)
    gain = torch.from_numpy(guidance.gains(times, o.num_steps))[:, None, None, None].expand(-1, len(noise), -1, -1)
    buffers = GuidanceBuffers(target, weight, gain, torch.zeros((len(noise), o.action_horizon, 1), dtype=torch.bool))
    ours: Tensor = euler_flow(model, prefix, noise, times, guidance, buffers)
    paper = noise
    for step, t in enumerate(times):
        u, pull = model.velocity_vjp(prefix, paper, step)
        v, tau = -u, 1 - t
        error = weight * (target - (paper + (1 - tau) * v))
        paper = paper + (v + gain[step] * (error + (1 - tau) * -pull(error))) / o.num_steps
    return float((ours - paper).abs().max())
