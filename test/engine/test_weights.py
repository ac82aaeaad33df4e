"""Strict loading, and the spellings of pi checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai_engine.errors import WeightsError
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.weights.loading import check_tensors, read_tensors
from phyai_engine.weights.pi import EMBEDDING, checkpoint_name, parameter_dtype, random_tensors

TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
OPTIONS = PiOptions(
    vocab=20, vis_width=8, vis_depth=1, vis_mlp=8, vis_heads=2, width=8, depth=2, mlp=8, heads=2, head_dim=4,
    exp_width=8, exp_mlp=8, action_dim=3, action_horizon=4, num_steps=2, prompt_len=3, image_size=8, patch=4,
)  # fmt: skip


def shapes_of(options: PiOptions) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        state = PiModel(options).state_dict()
    return {checkpoint_name(own): tuple(t.shape) for own, t in state.items()}


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return random_tensors(shapes_of(OPTIONS), seed=1, times=(1.0, 0.5), time_table=torch.eye(2, 8))


@pytest.mark.parametrize(("variant", "count"), [("pi0", 777), ("pi05", 812)])
def test_a_released_checkpoint_has_this_many_tensors(variant: str, count: int) -> None:
    shapes = shapes_of(PiOptions(variant=variant))  # type: ignore[arg-type]
    assert len(shapes) + 2 == count  # the two it stores and nobody reads
    expert = "paligemma_with_expert.gemma_expert.model.layers.17."
    assert shapes[expert + "self_attn.o_proj.weight"] == (1024, 2048)
    assert shapes["paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight"] == (2048, 1152)
    position = "vision_tower.vision_model.embeddings.position_embedding.weight"
    assert shapes["paligemma_with_expert.paligemma.model." + position] == (256, 1152)


def test_every_tensor_that_does_not_fit_is_named(tensors: dict[str, Tensor]) -> None:
    del tensors["time_mlp_in.bias"]
    tensors["state_proj.weight"] = torch.zeros(8, 3)
    tensors["action_out_proj.weight"] = torch.zeros(4, 8)
    tensors["action_out_proj.bias"] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(WeightsError) as caught:
        PiModel.from_state(OPTIONS, tensors, where="here")
    text = str(caught.value)
    assert "missing: time_mlp_in.bias" in text
    assert "unexpected: state_proj.weight" in text
    assert "action_out_proj.weight has shape [4, 8], wanted [3, 8]" in text
    assert "action_out_proj.bias is torch.int64, not floating point" in text
    assert "at here" in text


def test_a_long_list_of_names_is_cut(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(WeightsError, match=r"and [0-9]+ more"):
        check_tensors({}, shapes_of(OPTIONS), where=None)


def test_the_variant_is_not_guessed(tensors: dict[str, Tensor]) -> None:
    options = PiOptions(**{**{f: getattr(OPTIONS, f) for f in OPTIONS.__struct_fields__}, "variant": "pi0"})
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
    both = {**tensors, TIED: rows.clone()}
    only_tied = {n: t for n, t in both.items() if n != EMBEDDING}
    for stored in (tensors, both, only_tied):
        assert torch.equal(PiModel.from_state(OPTIONS, stored).embedding.weight, rows)
    with pytest.raises(WeightsError, match=r"two copies of the token embedding differ"):
        PiModel.from_state(OPTIONS, {**both, TIED: rows + 1})
    with pytest.raises(WeightsError, match=rf"missing: {EMBEDDING}"):
        PiModel.from_state(OPTIONS, {n: t for n, t in tensors.items() if n != EMBEDDING})


def test_stored_bf16_is_widened_and_the_source_is_not_changed(tensors: dict[str, Tensor]) -> None:
    stored = {n: t.bfloat16() for n, t in tensors.items()}
    model = PiModel.from_state(OPTIONS, stored)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert stored[EMBEDDING].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("own", "reduced"),
    [
        ("language.layers.0.mlp.up_proj.weight", True),
        ("expert.layers.0.self_attn.q_proj.weight", True),
        ("vision.layers.0.mlp.fc1.bias", True),
        ("projector.weight", True),
        ("embedding.weight", True),
        ("vision.layers.0.layer_norm1.weight", False),
        ("vision.patch_embedding.weight", False),
        ("vision.position_embedding.weight", False),
        ("expert.layers.0.input_layernorm.dense.weight", False),
        ("expert.norm.weight", False),
        ("action_in_proj.weight", False),
        ("time_mlp_in.weight", False),
    ],
)
def test_which_parameters_are_reduced(own: str, reduced: bool) -> None:
    assert parameter_dtype(own, torch.bfloat16) == (torch.bfloat16 if reduced else torch.float32)


def test_reading_a_file_a_folder_and_shards(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    save_file({**first, **second}, tmp_path / "model.safetensors")
    assert read_tensors(tmp_path).keys() == {"a", "b"}
    assert read_tensors(tmp_path / "model.safetensors")["b"].shape == (3,)

    shards = tmp_path / "sharded"
    shards.mkdir()
    save_file(first, shards / "model-1.safetensors")
    save_file(second, shards / "model-2.safetensors")
    index = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_tensors(shards).keys() == {"a", "b"}
    (shards / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**index, "c": "model-2.safetensors"}})
    )
    with pytest.raises(WeightsError, match=r"a shard and the index disagree, got c, .*model-2"):
        read_tensors(shards)
    for content in ("{}", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        (shards / "model.safetensors.index.json").write_text(content)
        with pytest.raises(WeightsError, match=r"cannot read the shard index.*index\.json"):
            read_tensors(shards)


def test_files_of_other_names_are_read_together(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "second.safetensors")
    assert read_tensors(tmp_path).keys() == {"a", "b"}
    save_file({"c": torch.ones(1), "a": torch.ones(2)}, tmp_path / "third.safetensors")
    with pytest.raises(WeightsError, match=r"another file holds too, got a, at .*third"):
        read_tensors(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no weights, wanted model.safetensors"):
        read_tensors(tmp_path)
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(WeightsError, match=r"cannot read the weights"):
        read_tensors(tmp_path)
