"""Instruction (and for pi0.5 the state) -> token ids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phyai_engine.errors import ConfigError


class Tokenizer(Protocol):
    """Text -> ids, without special tokens."""

    bos: int
    eos: int
    pad: int
    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none of them special."""


class ByteTokenizer:
    """UTF-8 bytes as tokens: id = byte + 3, after PAD 0, EOS 1, BOS 2.

    For models with seeded random weights, demos and tests. No published checkpoint was trained with it.
    """

    bos = 2
    eos = 1
    pad = 0
    vocabulary = 256 + 3

    def encode(self, text: str) -> list[int]:
        """One id per byte."""
        return [byte + 3 for byte in text.encode("utf-8")]


_TOKENIZERS: MappingProxyType[str, Callable[[], Tokenizer]] = MappingProxyType({"bytes": ByteTokenizer})


def tokenizer_from(name: str) -> Tokenizer:
    """The tokenizer a model file names.

    :raises ConfigError: for any other than ``bytes``, the only one that needs no checkpoint.
    """
    if name not in _TOKENIZERS:
        raise ConfigError(
            f"unknown tokenizer {name!r}",
            wanted=f"one of {', '.join(_TOKENIZERS)}",
            where="prompt.tokenizer",
            do="Trained tokenizers come with checkpoints, which are not supported yet; use `bytes`.",
        )
    return _TOKENIZERS[name]()


def clean(instruction: str) -> str:
    """Strip, then underscores and line ends to spaces; case is kept."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def plain(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """pi0's form: BOS, the text, a line end as a token of its own."""
    return [tokenizer.bos, *tokenizer.encode(clean(instruction)), *tokenizer.encode("\n")]


def with_state(tokenizer: Tokenizer, instruction: str, bins: Sequence[int]) -> list[int]:
    """pi0.5's form: the state is part of the text. The blank after "Action:" belongs to it."""
    numbers = " ".join(str(b) for b in bins)
    return [tokenizer.bos, *tokenizer.encode(f"Task: {clean(instruction)}, State: {numbers};\nAction: ")]


def fit(ids: list[int], limit: int, size: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Pad on the right; cut on the right what exceeds ``limit``, with a warning.

    :returns: ids [size] int64 and validity [size] bool.
    """
    if len(ids) > limit:
        warnings.warn(
            f"the prompt has {len(ids)} tokens and is cut to {limit}: its end is lost. "
            "Shorten the instruction or raise prompt.max_tokens.",
            UserWarning,
            stacklevel=2,
        )
        ids = ids[:limit]
    tokens = np.full(size, pad, dtype=np.int64)
    tokens[: len(ids)] = ids
    return tokens, np.arange(size) < len(ids)
