"""Tokenizers: text -> ids, from the file that a checkpoint brings."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from phyai_engine.errors import ConfigError

_WHERE = "prompt.tokenizer"


class Tokenizer(Protocol):
    """Text -> ids, without special tokens: an instruction cannot spell one.

    ``vocabulary`` is one more than the largest id it makes, special ones included.
    """

    bos: int
    eos: int
    pad: int
    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Ids of the text, none of them special. :raises UnicodeEncodeError: half a surrogate pair."""


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


class SentencePieceTokenizer:
    """A SentencePiece ``.model``, as openpi reads PaliGemma's.

    :raises ConfigError: the package or the file is missing, the file is another, or it lacks a special token.
    """

    def __init__(self, path: Path) -> None:
        package = _package("sentencepiece", path)
        try:
            self._pieces: Any = package.SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # of its C++ side: RuntimeError, OSError
            raise _unreadable(path, "SentencePiece model", error) from None
        self.bos, self.eos, self.pad = (
            _special(name, found if found >= 0 else None, path)
            for name, found in (
                ("BOS", self._pieces.bos_id()),
                ("EOS", self._pieces.eos_id()),
                ("PAD", self._pieces.pad_id()),
            )
        )
        self.vocabulary = int(self._pieces.get_piece_size())

    def encode(self, text: str) -> list[int]:
        """See :class:`Tokenizer`."""
        ids: list[int] = self._pieces.encode(text)
        return ids


class JsonTokenizer:
    """A ``tokenizer.json``, as lerobot reads PaliGemma's: its special tokens are <bos>, <eos> and <pad>.

    PaliGemma's has one token more than the model: ``<image>``. It is special, so no text makes it.

    :raises ConfigError: the package or the file is missing, the file is another, or it lacks a special token.
    """

    def __init__(self, path: Path) -> None:
        package = _package("tokenizers", path)
        try:
            self._tokens: Any = package.Tokenizer.from_file(str(path))
        except Exception as error:  # of its Rust side: bare Exception
            raise _unreadable(path, "tokenizer.json", error) from None
        self._tokens.no_padding()  # a file may bring both of its own
        self._tokens.no_truncation()
        self._tokens.encode_special_tokens = True  # "<bos>" in an instruction is text
        self.bos, self.eos, self.pad = (
            _special(name, self._tokens.token_to_id(text), path)
            for name, text in (("BOS", "<bos>"), ("EOS", "<eos>"), ("PAD", "<pad>"))
        )
        special = {i for i, token in self._tokens.get_added_tokens_decoder().items() if token.special}
        made = set(self._tokens.get_vocab(with_added_tokens=True).values()) - special
        self.vocabulary = 1 + max(made | {self.bos, self.eos, self.pad})

    def encode(self, text: str) -> list[int]:
        """See :class:`Tokenizer`."""
        ids: list[int] = self._tokens.encode(text, add_special_tokens=False).ids
        return ids


def tokenizer_from(name: str) -> Tokenizer:
    """The tokenizer a model file names: ``bytes``, or the path of a ``.model`` or ``.json`` file.

    :raises ConfigError: another name, a file that is missing or another, a package that is not installed.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name)
    kinds: dict[str, Callable[[Path], Tokenizer]] = {".model": SentencePieceTokenizer, ".json": JsonTokenizer}
    if path.suffix not in kinds:
        raise ConfigError(
            f"unknown tokenizer {name!r}",
            wanted="the path of a SentencePiece .model or a tokenizer.json, or `bytes`",
            where=_WHERE,
            do="Use the file that came with the checkpoint; models with random weights use `bytes`.",
        )
    if not path.is_file():
        raise ConfigError("the tokenizer's file is missing", got=path, where=_WHERE, do="Copy it there.")
    return kinds[path.suffix](path)


def _package(name: str, path: Path) -> ModuleType:
    """Imported only for a file that needs it: a robot with `bytes` or a remote engine has no use for it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{path.name} needs the package {name}", got=error, where=_WHERE, do=f"pip install {name}"
        ) from None


def _unreadable(path: Path, kind: str, error: Exception) -> ConfigError:
    return ConfigError(f"not a {kind}: {error}", where=f"{_WHERE}: {path}", do="Fetch the file again.")


def _special(name: str, found: int | None, path: Path) -> int:
    if found is None:
        raise ConfigError(
            f"the tokenizer has no {name} token",
            wanted="BOS, EOS and PAD, as PaliGemma's has",
            where=f"{_WHERE}: {path}",
            do="Use the file that the checkpoint was trained with.",
        )
    return int(found)
