"""Flow matching with a random clean prefix: one checkpoint for plain sampling, guidance, and `trained` RTC."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai_engine.train.dataset import Batch, Dataset
from phyai_engine.train.network import PiNetwork
from phyai_engine.train.recipe import Recipe

_WARM_UP = 300  # steps in which the learning rate rises
Report = Callable[[int, float, float], None]
"""(step, mean loss since the last report, share of the round that is done)."""


class Trainer:
    """The network in training and the running average of its weights, which is what plays."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        torch.set_float32_matmul_precision("high")
        self.recipe, self.device = recipe, device
        self.network = PiNetwork(recipe.model).to(device)
        self.average = {name: value.detach().clone() for name, value in self.network.named_parameters()}
        self.optimiser = torch.optim.AdamW(
            self.network.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=recipe.weight_decay,
            fused=device.type == "cuda",
        )
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.step = 0

    def round(self, dataset: Dataset, steps: int, minutes: float, report: Report = lambda *_: None) -> None:
        """Train until ``steps`` are done or the time is up; the learning rate falls to 0 along a cosine by then."""
        began, first, loss_sum, since = time.monotonic(), self.step, 0.0, 0
        share = 0.0
        pending = torch.zeros((), device=self.device)
        while share < 1.0:
            rate = self.recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * share))
            for group in self.optimiser.param_groups:
                group["lr"] = rate * min(1.0, (self.step - first + 1) / _WARM_UP)
            pending += self._update(dataset.draw(self.recipe.batch, self.generator))
            since += 1
            if since == 50:
                loss_sum = float(pending) / since  # waits for the device
                pending.zero_()
                report(self.step, loss_sum, share)
                since = 0
            share = max((self.step - first) / steps, (time.monotonic() - began) / (60.0 * minutes))

    def _update(self, batch: Batch) -> Tensor:
        self.step += 1
        mixed: Any = torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext()
        with mixed:
            loss = flow_loss(self.network, batch, self.recipe, self.generator)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        self.optimiser.step()
        kept = min(self.recipe.average, self.step / (self.step + 10))  # the start values are no part of the policy
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), list(self.network.parameters()), 1.0 - kept)
        return loss.detach()

    def begin_with(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from a checkpoint's weights. :param tensors: canonical names -> tensors."""
        self.network.adopt(tensors)
        for name, value in self.network.named_parameters():
            self.average[name].copy_(value.detach())

    def export(self) -> dict[str, Tensor]:
        """Canonical checkpoint names -> fp32 tensors of the average."""
        return self.network.export(self.average)

    def save(self, path: Path) -> None:
        """Everything that ``load`` needs to go on."""
        state = {
            "network": self.network.state_dict(),
            "average": self.average,
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on where ``save`` was."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        for name, value in state["average"].items():
            self.average[name].copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"].cpu())
        self.step = state["step"]


def flow_loss(network: PiNetwork, batch: Batch, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """Mean squared error of the velocity noise - action over the actions that are known and not clean.

    t ~ Beta(1.5, 1), as openpi draws it, so that the noisy end is seen more often. Half of the draws have a clean
    prefix of 1..d_max actions at flow time 0.
    """
    chunk, known = (part.repeat_interleave(recipe.draws, dim=0) for part in (batch.chunk, batch.known))
    count, horizon = known.shape
    device = chunk.device
    noise = torch.randn(chunk.shape, device=device, generator=generator)
    uniform = torch.rand((2, count), device=device, generator=generator)
    time_drawn = uniform[0].pow(1.0 / 1.5) * 0.999 + 0.001  # the inverse of Beta(1.5, 1)'s distribution
    prefix = torch.randint(1, recipe.max_delay + 1, (count,), device=device, generator=generator) * (uniform[1] < 0.5)
    clean = torch.arange(horizon, device=device) < prefix[:, None]
    t = time_drawn[:, None].masked_fill(clean, 0.0)[..., None]
    x = t * noise + (1.0 - t) * chunk
    seen = network.observe(batch.images, batch.tokens, batch.token_mask)
    error = (network.velocity(seen, x, time_drawn, clean) - (noise - chunk)).square().mean(dim=2)
    counted = (known & ~clean).float()
    loss: Tensor = (error * counted).sum() / counted.sum().clamp(min=1.0)
    return loss
