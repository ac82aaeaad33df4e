"""Recorded episodes as tensors on the training device, and the batches that are drawn of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai_engine.config import Normalisation, PromptConfig
from phyai_engine.errors import ConfigError
from phyai_engine.sim.metaworld_robot import ACTIONS, HAND_JOINTS
from phyai_engine.train.checkpoint import Statistics
from phyai_engine.train.collect import PHRASES
from phyai_engine.train.recipe import Recipe
from phyai_engine.transforms.normalise import scaling
from phyai_engine.transforms.prompt import Prompt
from phyai_engine.types import F64

_LEAST = 4  # steps of a chunk that must be known


class Steps(NamedTuple):
    """All recorded steps, files one after the other; see collect.Recording.

    :param known: [n], how many steps from this one on the expert did in a row, under one instruction.
    """

    states: F64
    actions: F64
    phrases: NDArray[np.int64]
    ages: NDArray[np.int64]
    known: NDArray[np.int64]


class Batch(NamedTuple):
    """Of B observations, on the training device.

    :param images: [B, C, 3, s, s] float in [-1, 1]. :param chunk: [B, H, A] normalised. :param known: [B, H] bool.
    """

    images: Tensor
    tokens: Tensor
    token_mask: Tensor
    chunk: Tensor
    known: Tensor


def read_steps(files: Sequence[Path]) -> Steps:
    """:param files: what ``Recording.save`` was given.

    :raises ConfigError: there are none.
    """
    if not files:
        raise ConfigError("no demonstrations", do="Run the collection first.")
    parts = [dict(np.load(path.with_suffix(".npz"))) for path in files]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    known = np.zeros(len(joined["clean"]), np.int64)
    clean, phrases, ages = joined["clean"], joined["phrases"], joined["ages"]
    for i in range(len(known) - 1, -1, -1):
        if clean[i]:
            goes_on = i + 1 < len(known) and phrases[i + 1] == phrases[i] and ages[i + 1] == ages[i] + 1
            known[i] = 1 + (known[i + 1] if goes_on else 0)
    return Steps(joined["states"], joined["actions"].astype(np.float64), phrases, ages, known)


class Dataset:
    """Draws batches. :param stats: of the checkpoint, ``checkpoint.statistics``. :param tokenizer: its file."""

    def __init__(
        self,
        files: Sequence[Path],
        steps: Steps,
        recipe: Recipe,
        stats: Statistics,
        tokenizer: Path,
        device: torch.device,
    ) -> None:
        self._recipe, self._device = recipe, device
        options, horizon = recipe.model, recipe.model.action_horizon
        usable = np.flatnonzero(steps.known >= _LEAST)
        self._rows = torch.from_numpy(usable).to(device)
        rule = Normalisation(
            kind="quantile",
            rule="lerobot",
            state=_quantiles(stats, "observation.state"),
            actions=_quantiles(stats, "action"),
        )
        none = (np.zeros(0), np.zeros(0))
        actions = scaling(rule, "actions", none, ACTIONS, len(ACTIONS)).normalise(steps.actions)
        self._actions = torch.from_numpy(np.nan_to_num(actions)).float().to(device)
        states = scaling(rule, "state", none, HAND_JOINTS, len(HAND_JOINTS)).normalise(steps.states)
        config = PromptConfig(form="state_bins", tokenizer=str(tokenizer), max_tokens=options.prompt_len)
        prompt = Prompt(config, options.prompt_len, len(HAND_JOINTS))
        said = [prompt(PHRASES[steps.phrases[i]], states[i]) for i in usable]
        self._tokens = torch.from_numpy(np.stack([tokens for tokens, _ in said])).to(device)
        self._masks = torch.from_numpy(np.stack([mask for _, mask in said])).to(device)
        self._known = torch.from_numpy(steps.known).to(device)
        self._ages = torch.from_numpy(steps.ages).to(device)
        self._ahead = torch.arange(horizon, device=device)
        shape = (len(steps.known), len(options.cameras), options.image_size, options.image_size, 3)
        self._images = torch.empty(shape, dtype=torch.uint8, device=device)
        first = 0
        for path in files:
            part = np.fromfile(path.with_suffix(".images"), dtype=np.uint8).reshape(-1, *self._images.shape[1:])
            self._images[first : first + len(part)] = torch.from_numpy(part)
            first += len(part)

    def __len__(self) -> int:
        """Observations that a chunk can be learned from."""
        return len(self._rows)

    def draw(self, size: int, generator: torch.Generator) -> Batch:
        """:param generator: on the training device."""
        place = torch.randint(len(self._rows), (size,), device=self._device, generator=generator)
        rows = self._rows[place]
        at = (rows[:, None] + self._ahead).clamp(max=len(self._actions) - 1)
        known = self._ahead < self._known[rows, None]
        return Batch(self._pictures(rows, generator), self._tokens[place], self._masks[place], self._actions[at], known)

    def _pictures(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Of each camera an image that may be a few steps old, shifted and lit at random."""
        recipe, cameras, size = self._recipe, self._images.shape[1], self._images.shape[2]
        shape = (len(rows), cameras)
        shares = torch.tensor(recipe.lag, device=self._device)
        lag = torch.multinomial(shares, len(rows) * cameras, replacement=True, generator=generator).view(shape)
        lag = torch.minimum(lag, self._ages[rows, None])
        shift = torch.randint(
            -recipe.shift_px, recipe.shift_px + 1, (2, *shape, 1), device=self._device, generator=generator
        )
        down, across = (torch.arange(size, device=self._device) + shift).clamp(0, size - 1)
        seen = self._images[
            (rows[:, None] - lag)[..., None, None],
            torch.arange(cameras, device=self._device)[None, :, None, None],
            down[..., None],
            across[..., None, :],
        ]
        light = 1.0 + recipe.light * (2.0 * torch.rand(shape, device=self._device, generator=generator) - 1.0)
        lit = (seen.float() / 127.5 * light[..., None, None, None] - 1.0).clamp(max=1.0)
        return lit.permute(0, 1, 4, 2, 3)


def _quantiles(stats: Statistics, key: str) -> dict[str, tuple[float, ...]]:
    return {name: tuple(stats[key][name]) for name in ("q01", "q99")}
