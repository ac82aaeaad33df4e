"""What is evaluated: a list of episodes, each with the seeds that make it repeatable."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from phyai_engine.config import convert, read_yaml
from phyai_engine.errors import ConfigError
from phyai_engine.sim.tasks import TASKS

SEED_STRIDE = 100_000
"""Between the seeds of two episodes: chunk k of one draws its noise from ``noise_seed + k``."""

Seed = Annotated[int, Meta(ge=0, lt=2**31)]


class Episode(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One episode. Equal seeds give equal scenes and equal noise, whatever else is different.

    :param task: of the simulator, such as ``reach-v3``; it places the scene and judges success.
    :param instruction: what the policy is told.
    :param scene_seed: of the scene; ``noise_seed`` of the first chunk's noise.
    """

    task: str
    instruction: str
    scene_seed: Seed
    noise_seed: Seed


Manifest = tuple[Episode, ...]


def made(phrases: Mapping[str, Sequence[str]], episodes: int, seed: int) -> Manifest:
    """A manifest of ``episodes`` of each task: its phrases take turns, its scenes are its own.

    :param phrases: task -> what the policy may be told.
    :param seed: of the whole; the same for the same task whatever tasks are beside it.
    :raises ConfigError: nothing to evaluate, or more episodes than there are seeds.
    """
    if episodes < 1 or not phrases or not all(phrases.values()):
        raise ConfigError("nothing to evaluate", got=f"{episodes} episodes of {len(phrases)} tasks", wanted=">= 1")
    first = seed * 1000
    if first + episodes > 2**31 // SEED_STRIDE:
        raise ConfigError("seed and episodes are too large", got=f"{seed}, {episodes}", wanted="seed below 21")
    return tuple(
        Episode(
            task=task,
            instruction=said[i % len(said)],
            scene_seed=first + i,
            noise_seed=(first + i) * SEED_STRIDE,
        )
        for task, said in phrases.items()
        for i in range(episodes)
    )


def chosen(path: Path | None, tasks: Sequence[str], episodes: int, seed: int) -> Manifest:
    """The file's, or one made of the simulator's tasks. :param tasks: all where empty.

    :raises ConfigError: unknown task, or the file is wrong.
    """
    if path is not None:
        return load_manifest(path)
    if unknown := [name for name in tasks if name not in TASKS]:
        raise ConfigError("no such task", got=", ".join(unknown), wanted=", ".join(TASKS))
    return made({name: TASKS[name].phrases for name in tasks or TASKS}, episodes, seed)


def load_manifest(path: Path) -> Manifest:
    """Read a manifest: a YAML list of episodes, or JSON lines (``.jsonl``), one episode each.

    :raises ConfigError: unreadable, empty, a wrong key or value (named), or an episode that stands twice.
    """
    if path.suffix == ".jsonl":
        try:
            lines = path.read_bytes().splitlines()
            read = [msgspec.json.decode(line) for line in lines if line.strip()]
        except OSError as error:
            raise ConfigError(f"cannot read the manifest: {error.strerror}", where=path) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"not JSON lines: {error}", where=path) from None
    else:
        read = read_yaml(path)
    manifest = convert(read, Manifest, where=str(path))
    if not manifest:
        raise ConfigError("the manifest is empty", where=path)
    if len(set(manifest)) != len(manifest):
        twice = next(episode for i, episode in enumerate(manifest) if episode in manifest[:i])
        raise ConfigError("an episode stands twice", got=twice, where=path, do="Change a seed.")
    return manifest


def lines(manifest: Manifest) -> bytes:
    """As JSON lines."""
    return b"".join(msgspec.json.encode(episode) + b"\n" for episode in manifest)


def digest(manifest: Manifest) -> str:
    """SHA-256 of the JSON lines, hexadecimal."""
    return hashlib.sha256(lines(manifest)).hexdigest()
