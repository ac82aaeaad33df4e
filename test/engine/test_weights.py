"""Strict loading, tensor by tensor, and where each tensor of a pi checkpoint goes. Names: test_checkpoint.py."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai_engine.config import ModelConfig
from phyai_engine.errors import WeightsError
from phyai_engine.models.pi import PiModel, PiOptions, time_embedding
from phyai_engine.weights import loading
from phyai_engine.weights import pi as weights
from phyai_engine.weights.loading import check_tensors, stream_tensors
from phyai_engine.weights.pi import random_stream, random_tensors
from phyai_engine.weights.pi_names import EMBEDDING, TIED_EMBEDDING, VISION

OPTIONS = PiOptions(
    vocab=20, vis_width=8, vis_depth=1, vis_mlp=8, vis_heads=2, width=8, depth=2, mlp=8, heads=2, head_dim=4,
    exp_width=8, exp_mlp=8, action_dim=3, action_horizon=4, num_steps=2, prompt_len=3, image_size=8, patch=4,
)  # fmt: skip


PATCHES = VISION + "embeddings.patch_embedding.weight"
SIZES = {name: getattr(OPTIONS, name) for name in OPTIONS.__struct_fields__ if name != "variant"}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    times = OPTIONS.spec().times
    return random_tensors(PiModel.expected(OPTIONS), 1, times, time_embedding(times, OPTIONS))


@pytest.mark.parametrize(("variant", "count"), [("pi0", 777), ("pi05", 812)])
def test_a_released_checkpoint_has_this_many_tensors(variant: str, count: int) -> None:
    shapes = PiModel.expected(PiOptions(variant=variant))  # type: ignore[arg-type]
    assert len(shapes) + 2 == count  # the two it stores and nobody reads
    expert = "paligemma_with_expert.gemma_expert.model.layers.17."
    assert shapes[expert + "self_attn.o_proj.weight"] == (1024, 2048)
    assert shapes["paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight"] == (2048, 1152)
    position = "vision_tower.vision_model.embeddings.position_embedding.weight"
    assert shapes["paligemma_with_expert.paligemma.model." + position] == (256, 1152)


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_at_full_size_only_what_inference_reads_is_kept(variant: str) -> None:
    """The last prefix layer's leftover, pi0.5's adaRMS matrices and the time MLP are in no parameter."""
    options = PiOptions(variant=variant, dtype="bfloat16")  # type: ignore[arg-type]
    millions = {"prefix": 1981.8, "embedding": 526.6, "vision": 414.1, "expert": 311.4, "heads": 2.1}
    modulation = 116.5 if variant == "pi05" else 0.0
    leftover = 3 * 2048 * 16384 + 2 * 2048**2
    total = sum(math.prod(shape) for shape in PiModel.expected(options).values())
    assert total == pytest.approx((sum(millions.values()) + modulation) * 1e6, rel=1e-3)
    with torch.device("meta"):
        model = PiModel(options)
    held = [*model.parameters(), *model.buffers()]
    kept = sum(t.numel() for t in held)
    assert kept == pytest.approx(sum(millions.values()) * 1e6 - leftover, rel=1e-3)
    assert sum(t.nbytes for t in held) / kept < 2.01  # bf16 but for norms and heads


def test_every_tensor_that_does_not_fit_is_named(tensors: dict[str, Tensor]) -> None:
    del tensors["time_mlp_in.bias"]
    layer = "paligemma_with_expert.gemma_expert.model.layers.2.mlp.up_proj.weight"
    tensors[layer] = torch.zeros(8, 8)
    tensors["action_out_proj.weight"] = torch.zeros(4, 8)
    tensors["action_out_proj.bias"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(WeightsError) as caught:
        PiModel.from_state(OPTIONS, tensors, where="here")
    text = str(caught.value)
    assert "missing: time_mlp_in.bias" in text
    assert f"unexpected: {layer}" in text
    assert "action_out_proj.weight has shape [4, 8], wanted [3, 8]" in text
    assert "action_out_proj.bias is torch.int64, not floating point" in text
    assert "at here" in text


def test_a_long_list_of_names_is_cut(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(WeightsError, match=r"and [0-9]+ more"):
        check_tensors([], PiModel.expected(OPTIONS), where=None)


def test_the_variant_is_not_guessed(tensors: dict[str, Tensor]) -> None:
    options = PiOptions(variant="pi0", **SIZES)
    with pytest.raises(
        WeightsError, match=r"missing: action_time_mlp_in.bias.*unexpected: .*input_layernorm.dense.bias"
    ):
        PiModel.from_state(options, tensors)


def test_a_leading_model_is_dropped_and_unused_tensors_are_skipped(tensors: dict[str, Tensor]) -> None:
    plain = PiModel.from_state(OPTIONS, tensors).state_dict()
    tensors["paligemma_with_expert.gemma_expert.lm_head.weight"] = torch.full((20, 8), torch.nan)
    tensors["paligemma_with_expert.paligemma.model.language_model.norm.weight"] = torch.zeros(8)
    loaded = PiModel.from_state(OPTIONS, {f"model.{n}": t for n, t in tensors.items()}).state_dict()
    assert loaded.keys() == plain.keys()
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)


def test_the_embedding_may_have_either_name_or_both(tensors: dict[str, Tensor]) -> None:
    rows = tensors[EMBEDDING]
    both = {**tensors, TIED_EMBEDDING: rows.clone()}
    only_tied = {n: t for n, t in both.items() if n != EMBEDDING}
    for stored in (tensors, both, only_tied):
        assert torch.equal(PiModel.from_state(OPTIONS, stored).embedding, rows * 8**0.5)
    with pytest.raises(WeightsError, match=r"two copies of the token embedding differ"):
        PiModel.from_state(OPTIONS, {**both, TIED_EMBEDDING: rows + 1})
    with pytest.raises(WeightsError, match=rf"missing: {EMBEDDING}"):
        PiModel.from_state(OPTIONS, {n: t for n, t in tensors.items() if n != EMBEDDING})


def test_stored_bf16_is_widened_and_the_source_is_not_changed(tensors: dict[str, Tensor]) -> None:
    stored = {n: t.bfloat16() for n, t in tensors.items()}
    model = PiModel.from_state(OPTIONS, stored)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert stored[EMBEDDING].dtype == torch.bfloat16


def test_which_parameters_are_reduced() -> None:
    def fp32(**changes: str) -> set[str]:
        options = PiOptions(variant="pi05", **{**SIZES, "dtype": "bfloat16", **changes})
        model = PiModel.random(options, seed=0)
        return {name for name, t in model.state_dict().items() if t.dtype != torch.bfloat16}

    norms = {f"vision.layers.0.layer_norm{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    norms |= {"vision.post_layernorm.weight", "vision.post_layernorm.bias", "language.norms", "modulation"}
    heads = {f"action_{way}.{kind}" for way in ("in", "out") for kind in ("weight", "bias")}
    assert fp32() == {*norms, *heads, "vision.patch.weight", "vision.patch.bias", "vision.position"}
    tower = {f"vision.layers.0.{p}.{k}" for p in ("qkv", "out", "fc1", "fc2") for k in ("weight", "bias")}
    assert fp32(vision_dtype="float32") - fp32() == {*tower, "projector.weight", "projector.bias"}


def test_random_tensors_above_a_block_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced as they are made; the rest of the model is as without."""
    shapes, times = PiModel.expected(OPTIONS), OPTIONS.spec().times
    table = time_embedding(times, OPTIONS)
    whole = random_tensors(shapes, 1, times, table)
    monkeypatch.setattr(weights, "_BLOCK", 150)
    parts = dict(random_stream(shapes, 1, times, table, torch.bfloat16))
    assert {name for name, t in parts.items() if t.dtype == torch.bfloat16} == {EMBEDDING, PATCHES}
    assert 0.8 < parts[EMBEDDING].float().std() / whole[EMBEDDING].std() < 1.25
    assert len(parts[EMBEDDING].unique()) > 100


def test_tensors_come_one_at_a_time_the_largest_first(tmp_path: Path) -> None:
    held = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor(3.5, dtype=torch.float64),
        "c": torch.arange(40.0).bfloat16(),
        "d": torch.zeros((0, 4), dtype=torch.float16),
        "e": torch.ones(2, dtype=torch.int8),
    }
    save_file(held, tmp_path / "model.safetensors")
    read = dict(stream_tensors(tmp_path, {"a": "A", "b": "b", "c": "c", "d": "d", "not there": "x"}))
    assert list(read) == ["c", "A", "b", "d"]
    for name, tensor in read.items():
        assert tensor.dtype == held[name.lower()].dtype
        assert torch.equal(tensor, held[name.lower()])
    with pytest.raises(WeightsError, match=r"e is I8, not floating point \(16, 32 or 64 bits\), at .*safetensors"):
        list(stream_tensors(tmp_path))


def test_shards_are_read_together(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert dict(stream_tensors(tmp_path)).keys() == {"a", "b"}


def test_a_file_that_shrinks_or_goes_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(20), "b": torch.ones(10)}, file)
    stored = loading.stored_tensors(tmp_path)
    monkeypatch.setattr(loading, "stored_tensors", lambda path: stored)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=r"the file ends inside [ab], at .*model.safetensors. Fetch"):
        list(stream_tensors(tmp_path))
    file.unlink()
    with pytest.raises(WeightsError, match=r"cannot read the weights: No such file.*model.safetensors"):
        list(stream_tensors(tmp_path))


def saved(folder: Path, tensors: dict[str, Tensor]) -> ModelConfig:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return ModelConfig(family="pi05", checkpoint=str(folder), options={**SIZES, "cameras": list(OPTIONS.cameras)})


def test_a_saved_checkpoint_gives_the_same_model(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    wanted = PiModel.from_state(OPTIONS, tensors).state_dict()
    unread = "paligemma_with_expert.paligemma.model.language_model.layers.1.mlp.up_proj.weight"
    extra = {TIED_EMBEDDING: tensors[EMBEDDING].clone(), unread: torch.full_like(tensors[unread], torch.nan)}
    loaded = PiModel.load(saved(tmp_path, {**tensors, **extra})).state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())


def test_what_does_not_fit_is_told_before_a_tensor_is_read(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(loading, "_read", read)
    del tensors["time_mlp_in.bias"]
    tensors["action_out_proj.weight"] = torch.zeros(3, 8, dtype=torch.float8_e4m3fn)
    tensors[TIED_EMBEDDING] = torch.zeros(20, 9)
    with pytest.raises(WeightsError) as caught:
        PiModel.load(saved(tmp_path, tensors))
    text = str(caught.value)
    assert "missing: time_mlp_in.bias" in text
    assert "action_out_proj.weight is F8_E4M3, not floating point (16, 32 or 64 bits)" in text
    assert f"{EMBEDDING} has shape [20, 9], wanted [20, 8]" in text
    assert str(tmp_path) in text


def test_a_tensor_is_let_go_before_the_next_one_is_read(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, alive, kept = loading._read, list[weakref.ref[Tensor]](), list[str]()

    def watched(name: str, entry: loading.Stored) -> Tensor:
        kept.extend(name for ref in alive if ref() is not None)
        tensor = read(name, entry)
        alive.append(weakref.ref(tensor))
        return tensor

    config = saved(tmp_path, tensors)
    monkeypatch.setattr(loading, "_read", watched)
    PiModel.load(config)
    assert len(alive) == len(tensors) - 6  # without what the last prefix layer has beyond K and V
    assert kept == []
