"""Tokenizers from files: a tiny SentencePiece model trained here, and the same vocabulary as a tokenizer.json."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai_engine.config import PromptConfig
from phyai_engine.errors import ConfigError
from phyai_engine.transforms.prompt import Prompt
from phyai_engine.transforms.tokenizer import tokenizer_from

WHY = "a tokenizer's package is not installed: pip install sentencepiece tokenizers"
sentencepiece = pytest.importorskip("sentencepiece", reason=WHY)
tokenizers = pytest.importorskip("tokenizers", reason=WHY)

SENTENCES = (
    "pick up the red block",
    "put the block into the box",
    "Task: open the drawer, State: 12 200 7;",
    "Action: ",
)
# as PaliGemma's: digits one by one, unknown characters as bytes, no blank put in front, blanks kept, "\n" a token
LIKE_PALIGEMMA = {
    **{"model_type": "bpe", "split_digits": True, "byte_fallback": True, "add_dummy_prefix": False},
    **{"remove_extra_whitespaces": False, "normalization_rule_name": "identity", "user_defined_symbols": ["\n"]},
    **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
}


def train(path: Path, **changes: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        vocab_size=330,
        hard_vocab_limit=False,
        minloglevel=3,
        **{**LIKE_PALIGEMMA, **changes},
    )
    path.write_bytes(model.getvalue())
    return path


def to_json(model: Path, path: Path, *, leave_out: str = "") -> Path:
    """The same pieces and ids as a BPE file; a merge for every split of a piece into two others."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    merges = [
        (piece[:at], piece[at:])
        for piece in ids
        if not piece.startswith("<0x")
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    bpe = tokenizers.models.BPE(vocab=ids, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    built = tokenizers.Tokenizer(bpe)
    built.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    built.add_tokens([tokenizers.AddedToken("\n", normalized=False)])
    special = [name for name in ("<pad>", "<eos>", "<bos>") if name != leave_out]
    named = {"<pad>": "<pad>", "<eos>": "</s>", "<bos>": "<s>"}  # SentencePiece's own names of its three
    text = built.to_str()
    for name in special:
        text = text.replace(f'"{named[name]}":', f'"{name}":')
    built = tokenizers.Tokenizer.from_str(text)
    built.add_special_tokens(special)
    built.enable_truncation(4)  # a file may bring both: they must not act
    built.enable_padding(length=9)
    built.save(str(path))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizers")
    to_json(train(path / "tiny.model"), path / "tiny.json")
    return path


TEXTS = (
    *("pick up the red block", "Task: put  the box, State: -1 0 128 255;\nAction: ", "\n", "", " blank", "12345"),
    *("tür 抓 🤖 kept as bytes", "PICK_up"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_both_files_give_the_ids_of_sentencepiece(folder: Path, text: str) -> None:
    wanted = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tiny.model")).encode(text)
    assert tokenizer_from(str(folder / "tiny.model")).encode(text) == wanted
    assert tokenizer_from(str(folder / "tiny.json")).encode(text) == wanted


def test_digits_are_split_and_words_are_not(folder: Path) -> None:
    encode = tokenizer_from(str(folder / "tiny.model")).encode
    assert len(encode("200")) == 3
    assert len(encode("block")) < 5


@pytest.mark.parametrize("file", ["tiny.model", "tiny.json"])
def test_special_tokens_come_from_the_file(folder: Path, file: str) -> None:
    found = tokenizer_from(str(folder / file))
    assert (found.pad, found.eos, found.bos) == (0, 1, 2)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tiny.model"))
    assert found.vocabulary == pieces.get_piece_size()


@pytest.mark.parametrize("file", ["tiny.model", "tiny.json"])
def test_an_instruction_cannot_spell_a_special_token(folder: Path, file: str) -> None:
    found = tokenizer_from(str(folder / file))
    for text in ("<bos>", "<eos>", "<pad>", "<s>", "</s>", "go <bos> on"):
        assert not {found.bos, found.eos, found.pad} & set(found.encode(text))


def test_a_special_token_beyond_the_model_is_not_counted(folder: Path, tmp_path: Path) -> None:
    # as <image> in PaliGemma's: one more than the model's embedding has rows
    built = tokenizers.Tokenizer.from_file(str(folder / "tiny.json"))
    known = tokenizer_from(str(folder / "tiny.json")).vocabulary
    built.add_special_tokens(["<image>"])
    built.save(str(tmp_path / "image.json"))
    found = tokenizer_from(str(tmp_path / "image.json"))
    assert built.token_to_id("<image>") == known == found.vocabulary
    assert max(found.encode("see <image> there")) < known
    built.add_tokens(["plain"])  # this one a text can make
    built.save(str(tmp_path / "image.json"))
    assert tokenizer_from(str(tmp_path / "image.json")).vocabulary == known + 2


@pytest.mark.parametrize("file", ["tiny.model", "tiny.json"])
@pytest.mark.parametrize(
    ("form", "instruction", "text"),
    [
        ("plain", "  Pick_up the\nblock ", "Pick up the block|\n"),
        ("verbatim", " Pick_up ", " Pick_up \n"),
        ("verbatim", "pick up\n", "pick up\n"),
        ("state_bins", "pick_up ", "Task: pick up, State: -1 0 128 255;\nAction: "),
    ],
)
def test_prompt_ids(folder: Path, file: str, form: Any, instruction: str, text: str) -> None:
    prompt = Prompt(PromptConfig(form=form, tokenizer=str(folder / file), max_tokens=90), 100, 6)
    tokens, valid = prompt(instruction, np.array([-1.5, -1.0, 0.0, 1.0]))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tiny.model"))
    wanted = [2, *(i for part in text.split("|") for i in pieces.encode(part))]
    assert tokens[valid].tolist() == wanted
    assert (tokens[~valid] == 0).all()
    assert tokens.shape == valid.shape == (100,)


# --- files that do not serve ---


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.model", None, "file is missing, got .*none.model, at prompt.tokenizer"),
        ("none.json", None, "file is missing, got .*none.json"),
        ("bad.model", b"version https://git-lfs", "not a SentencePiece model: .*bad.model. Fetch the file again"),
        ("empty.model", b"", "not a SentencePiece model"),
        ("bad.json", b"{}", "not a tokenizer.json: "),
        ("bad.json", b"\x00", "not a tokenizer.json: .*bad.json. Fetch"),
        ("tokens.txt", b"", r"unknown tokenizer '.*tokens.txt', wanted the path of a SentencePiece .model or"),
    ],
)
def test_wrong_files_are_told(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        tokenizer_from(str(tmp_path / name))


def test_a_folder_is_not_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.model").mkdir()
    with pytest.raises(ConfigError, match="file is missing"):
        tokenizer_from(str(tmp_path / "a.model"))


@pytest.mark.parametrize(("missing", "name"), [("pad_id", "PAD"), ("bos_id", "BOS"), ("eos_id", "EOS")])
def test_a_model_without_a_special_token_is_refused(tmp_path: Path, missing: str, name: str) -> None:
    path = train(tmp_path / "x.model", **{missing: -1})
    with pytest.raises(ConfigError, match=f"has no {name} token, wanted BOS, EOS and PAD.*x.model"):
        tokenizer_from(str(path))


@pytest.mark.parametrize(("missing", "name"), [("<pad>", "PAD"), ("<bos>", "BOS"), ("<eos>", "EOS")])
def test_a_json_without_a_special_token_is_refused(folder: Path, tmp_path: Path, missing: str, name: str) -> None:
    path = to_json(folder / "tiny.model", tmp_path / "x.json", leave_out=missing)
    if missing == "<pad>":  # SentencePiece names its own so
        path.write_text(path.read_text(encoding="utf-8").replace("<pad>", "<other>"), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"has no {name} token"):
        tokenizer_from(str(path))


@pytest.mark.parametrize(("package", "file"), [("sentencepiece", "tiny.model"), ("tokenizers", "tiny.json")])
def test_a_missing_package_is_told_with_the_line_that_installs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{file} needs the package {package}.* pip install {package}"):
        tokenizer_from(str(folder / file))
    assert tokenizer_from("bytes").vocabulary == 259
