"""The study's flow-matching policy: a small net in torch, its training, and its file.

One net serves every method. Its flow time is per row of the chunk, and half of its training samples have a clean
prefix (t = 0, loss on the rest only), which `trained` conditions on; with one time for all rows it is a plain policy.
t = 1 is noise, t = 0 data, u = noise - action, as everywhere in the engine. Chunks and observations are normalised.
"""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.rtc_study.task import ACTIONS, HORIZON, Demonstrations, Task, demonstrate
from phyai_engine.types import F64


class Recipe(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the net is made. :param steps: of one round of training; rounds are added until the policy is good enough.

    :param prefix_max: d_max, the longest clean prefix it is trained with.
    :param average: kept share of the running average of the weights, which is what plays.
    """

    task: Task = Task()
    demonstrations: int = 3000
    width: int = 256
    blocks: int = 4
    prefix_max: int = HORIZON // 2
    batch: int = 512
    steps: int = 5000
    learning_rate: float = 1e-3
    average: float = 0.999
    seed: int = 0

    def key(self) -> str:
        """Name of its file in the cache: another recipe, or another form of the file, is another name."""
        return hashlib.sha256(b"1" + msgspec.json.encode(self)).hexdigest()[:16]


class ChunkNet(nn.Module):
    """u of a whole chunk from its noisy rows, a flow time for each row, and the observation.

    Buffers hold mean and standard deviation of observations [2] and commands [2].
    """

    WAVES = 3  # octaves of sines by which time and position are seen
    observation_mean: Tensor
    observation_std: Tensor
    command_mean: Tensor
    command_std: Tensor

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        seen = 1 + 2 * self.WAVES  # features of one number
        self.enter = nn.Linear(HORIZON * (ACTIONS + seen) + 2 * seen, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.leave = nn.Linear(width, HORIZON * ACTIONS)
        for name in ("observation", "command"):
            self.register_buffer(f"{name}_mean", torch.zeros(2))
            self.register_buffer(f"{name}_std", torch.ones(2))

    def forward(self, x: Tensor, times: Tensor, observation: Tensor) -> Tensor:
        """:param x: [B, H, 2]. :param times: [B, H]. :param observation: [B, 2]. :return: u, like x."""
        features = [x.flatten(1), self._seen(times), self._seen(observation)]
        hidden = functional.silu(self.enter(torch.cat(features, dim=1)))
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + functional.silu(block(norm(hidden)))
        out: Tensor = self.leave(hidden).view(-1, HORIZON, ACTIONS)
        return out

    def _seen(self, values: Tensor) -> Tensor:
        """[B, K] -> [B, K * seen]: the value and its sines and cosines."""
        angles = (values[..., None] * (math.pi / 2 * 2.0 ** torch.arange(self.WAVES))).flatten(1)
        return torch.cat((values, angles.sin(), angles.cos()), dim=1)

    def scale_to(self, demonstrations: Demonstrations) -> None:
        """Take means and deviations from the training pairs."""
        for name, values in (("observation", demonstrations.observations), ("command", demonstrations.chunks)):
            rows = values.reshape(-1, 2)
            getattr(self, f"{name}_mean").copy_(torch.from_numpy(rows.mean(axis=0)))
            getattr(self, f"{name}_std").copy_(torch.from_numpy(rows.std(axis=0)))

    def normal(self, name: str, values: F64) -> Tensor:
        """Normalised fp32. :param name: ``observation`` or ``command``. :param values: [.., 2]."""
        mean, std = getattr(self, f"{name}_mean"), getattr(self, f"{name}_std")
        normalised: Tensor = (torch.from_numpy(values).float() - mean) / std
        return normalised

    def commands(self, chunk: Tensor) -> F64:
        """[.., 2] m/s from a normalised chunk."""
        made: F64 = (chunk * self.command_std + self.command_mean).numpy().astype(np.float64)
        return made


class Trainer:
    """The net in training, its running average, and the pairs it learns from."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)  # the layers' start values
        self.recipe = recipe
        self.generator = torch.Generator().manual_seed(recipe.seed)
        pairs = demonstrate(recipe.task, recipe.demonstrations, recipe.seed)
        self.net = ChunkNet(recipe.width, recipe.blocks)
        self.net.scale_to(pairs)
        self.averaged = ChunkNet(recipe.width, recipe.blocks)
        self.averaged.load_state_dict(self.net.state_dict())
        self.averaged.requires_grad_(False)
        self.observations = self.net.normal("observation", pairs.observations)
        self.chunks = self.net.normal("command", pairs.chunks)
        self.optimiser = torch.optim.AdamW(self.net.parameters(), lr=recipe.learning_rate)
        self.step = 0

    def round(self) -> None:
        """``steps`` more updates. The rate falls to zero over a round, along a half cosine, and starts high again."""
        for step in range(self.recipe.steps):
            rate = self.recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * step / self.recipe.steps))
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self._update()

    def _update(self) -> None:
        self.step += 1
        loss = flow_loss(self.net, *self._batch())
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        # A short average at first: the start values are no part of the policy.
        kept = min(self.recipe.average, self.step / (self.step + 10))
        with torch.no_grad():
            for mean, value in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(value, 1.0 - kept)

    def _batch(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """observation [B, 2], chunk and noise [B, H, 2], flow time [B], length of the clean prefix [B]."""
        size, generator = self.recipe.batch, self.generator
        rows = torch.randint(len(self.chunks), (size,), generator=generator)
        noise = torch.randn((size, HORIZON, ACTIONS), generator=generator)
        time = torch.rand(size, generator=generator)
        prefix = torch.randint(1, self.recipe.prefix_max + 1, (size,), generator=generator)
        prefix *= torch.rand(size, generator=generator) < 0.5
        return self.observations[rows], self.chunks[rows], noise, time, prefix


def flow_loss(net: ChunkNet, observation: Tensor, chunk: Tensor, noise: Tensor, time: Tensor, prefix: Tensor) -> Tensor:
    """Mean squared error of u over the rows behind the clean prefix. Arguments as ``Trainer._batch`` makes them."""
    clean = torch.arange(HORIZON) < prefix[:, None]  # [B, H]
    times = time[:, None].masked_fill(clean, 0.0)
    x = times[..., None] * noise + (1.0 - times[..., None]) * chunk
    error = (net(x, times, observation) - (noise - chunk)).square().mean(dim=2)
    free = (~clean).float()
    loss: Tensor = (error * free).sum() / free.sum()
    return loss


def save(net: ChunkNet, path: Path) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as stream:
        np.savez(stream, **{name: value.numpy() for name, value in net.state_dict().items()})
    os.replace(unfinished, path)


def load(recipe: Recipe, path: Path) -> ChunkNet | None:
    """The net of that file; None where there is none, or it cannot be read: then it is made again."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            state = {name: torch.from_numpy(stored[name]) for name in stored.files}
        net = ChunkNet(recipe.width, recipe.blocks)
        net.load_state_dict(state)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile):
        return None
    return net.requires_grad_(False)


def trained_net(recipe: Recipe, folder: Path, good: Callable[[ChunkNet], bool], rounds_max: int = 3) -> ChunkNet | None:
    """The cached net, or a new one trained round by round until it is good.

    :param good: whether the policy plays well enough to be studied.
    :return: None when it still was not after ``rounds_max`` rounds; nothing is cached then.
    """
    path = folder / f"{recipe.key()}.npz"
    if (net := load(recipe, path)) is not None:
        return net
    trainer = Trainer(recipe)
    for _ in range(rounds_max):
        trainer.round()
        if good(trainer.averaged):
            save(trainer.averaged, path)
            return trainer.averaged
    return None
