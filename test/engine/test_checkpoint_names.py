"""Every spelling of pi0 and pi0.5 checkpoints, by the official names, written out here."""

from __future__ import annotations

import pytest

from phyai_engine.errors import WeightsError
from phyai_engine.models.pi import PiModel
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.weights.pi_names import canonical, family

Shapes = dict[str, tuple[int, ...]]
P = "paligemma_with_expert."
LM_HEAD = P + "paligemma.lm_head.weight"
TIED = P + "paligemma.model.language_model.embed_tokens.weight"
DROPPED = {P + "gemma_expert.lm_head.weight", P + "paligemma.model.language_model.norm.weight"}


def affine(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def official(kind: str) -> Shapes:
    """Name and shape of every tensor of a released checkpoint, embedding under one name."""
    tower = P + "paligemma.model.vision_tower.vision_model."
    found: Shapes = {
        tower + "embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        tower + "embeddings.patch_embedding.bias": (1152,),
        tower + "embeddings.position_embedding.weight": (256, 1152),
        tower + "post_layernorm.weight": (1152,),
        tower + "post_layernorm.bias": (1152,),
        **affine(P + "paligemma.model.multi_modal_projector.linear", 2048, 1152),
        LM_HEAD: (257152, 2048),
        P + "paligemma.model.language_model.norm.weight": (2048,),
        P + "gemma_expert.lm_head.weight": (257152, 1024),
        **affine("action_in_proj", 1024, 32),
        **affine("action_out_proj", 32, 1024),
    }
    for i in range(27):
        layer = f"{tower}encoder.layers.{i}."
        for norm in ("layer_norm1", "layer_norm2"):
            found |= {f"{layer}{norm}.weight": (1152,), f"{layer}{norm}.bias": (1152,)}
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= affine(f"{layer}self_attn.{projection}", 1152, 1152)
        found |= affine(layer + "mlp.fc1", 4304, 1152) | affine(layer + "mlp.fc2", 1152, 4304)
    for i in range(18):
        found |= gemma(f"{P}paligemma.model.language_model.layers.{i}.", 2048, 16384)
        found |= gemma(f"{P}gemma_expert.model.layers.{i}.", 1024, 4096)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{P}paligemma.model.language_model.layers.{i}.{norm}.weight"] = (2048,)
            found |= expert_norm(kind, f"{P}gemma_expert.model.layers.{i}.{norm}")
    found |= expert_norm(kind, P + "gemma_expert.model.norm")
    if kind == "pi0":
        found |= affine("state_proj", 1024, 32) | affine("action_time_mlp_in", 1024, 2048)
        return found | affine("action_time_mlp_out", 1024, 1024)
    return found | affine("time_mlp_in", 1024, 1024) | affine("time_mlp_out", 1024, 1024)


def gemma(layer: str, width: int, mlp: int) -> Shapes:
    return {
        layer + "self_attn.q_proj.weight": (2048, width),
        layer + "self_attn.k_proj.weight": (256, width),
        layer + "self_attn.v_proj.weight": (256, width),
        layer + "self_attn.o_proj.weight": (width, 2048),
        layer + "mlp.gate_proj.weight": (mlp, width),
        layer + "mlp.up_proj.weight": (mlp, width),
        layer + "mlp.down_proj.weight": (width, mlp),
    }


def expert_norm(kind: str, name: str) -> Shapes:
    return {name + ".weight": (1024,)} if kind == "pi0" else affine(name + ".dense", 3072, 1024)


def legacy(name: str) -> str:
    """lerobot before 0.4."""
    name = name.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
    name = name.replace("paligemma.lm_head.", "paligemma.language_model.lm_head.")
    return "model." + name.replace("paligemma.model.", "paligemma.")


SPELLINGS = {
    "openpi": lambda name: name,
    "lerobot": lambda name: "model." + name,
    "lerobot before 0.4": legacy,
    "transformers 5.6": lambda name: name.replace("vision_tower.vision_model.", "vision_tower."),
}
FAMILIES = pytest.mark.parametrize(("kind", "count"), [("pi0", 777), ("pi05", 812)])


@FAMILIES
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_official_name_is_placed_and_none_is_left(kind: str, count: int, spelling: str) -> None:
    shapes = official(kind)
    assert len(shapes) == count
    stored = {SPELLINGS[spelling](name): shape for name, shape in shapes.items()}
    assert len(stored) == count
    names = canonical(stored, where=None)
    assert {new: stored[name] for name, new in names.items()} == PiModel.expected(PiOptions(variant=kind))  # type: ignore[arg-type]
    assert stored.keys() - names.keys() == {SPELLINGS[spelling](name) for name in DROPPED}
    assert family(set(names.values())) == kind


@pytest.mark.parametrize("spelling", [str, legacy])
def test_both_names_of_the_embedding_are_one(spelling: type[str]) -> None:
    stored = [spelling(name) for name in {**official("pi05"), TIED: (257152, 2048)}]
    names = canonical(stored, where=None)
    assert len(stored) == 813
    assert names[spelling(LM_HEAD)] == names[spelling(TIED)] == LM_HEAD
    only_tied = canonical([name for name in stored if name != spelling(LM_HEAD)], where=None)
    assert only_tied[spelling(TIED)] == LM_HEAD


@FAMILIES
def test_a_time_mlp_under_the_other_family_s_name(kind: str, count: int) -> None:
    def swapped(name: str) -> str:
        if name.startswith("time_mlp_"):
            return "action_" + name
        return name.removeprefix("action_") if name.startswith("action_time_mlp_") else name

    names = canonical([swapped(name) for name in official(kind)], where=None)
    assert set(names.values()) == official(kind).keys() - DROPPED
    assert family(set(names.values())) == kind


def test_left_overs_of_pi0_in_pi05_are_dropped() -> None:
    left = {"state_proj.weight", "state_proj.bias", P + "gemma_expert.model.norm.weight"}
    left.add(P + "gemma_expert.model.layers.3.input_layernorm.weight")
    assert set(canonical(official("pi05").keys() | left, where=None)) == official("pi05").keys() - DROPPED


def test_statistics_and_the_zero_embedding_of_old_files_are_dropped() -> None:
    stored = ["model." + name for name in official("pi0")]
    extra = ["normalize_inputs.buffer_observation_state.mean", "unnormalize_outputs.buffer_action.std"]
    extra.append("model.paligemma_with_expert.gemma_expert.model.embed_tokens.weight")
    assert set(canonical([*stored, *extra], where=None)).isdisjoint(extra)


def test_a_converted_pi05_without_its_modulation_stays_pi05() -> None:
    """openpi's converter chooses the norms by the folder's name; the loader then says what is missing."""
    names = {name for name in official("pi05") if ".dense." not in name}
    plain = {name for name in official("pi0") if "gemma_expert" in name and "norm" in name}
    found = canonical(names | plain, where=None)
    assert family(set(found.values())) == "pi05"
    assert not any(".dense." in name for name in found.values())


@pytest.mark.parametrize(
    ("extra", "fragment"),
    [
        ("paligemma_with_expert.paligemma.model.vision_tower.vision_model.head.probe", r"tensors that no pi0"),
        ("value_head.weight", r"no pi0 or pi0.5 checkpoint has, got value_head.weight, at here"),
        ("proprio_history_proj.weight", r"holds a projection of past states \(memory\), got proprio_history_proj"),
        ("base_model.model.action_in_proj.lora_A.weight", r"holds a LoRA adapter.*Merge the adapter"),
        ("model.action_in_proj.bias", r"stored under two names, got action_in_proj.bias and model.action_in_proj.bias"),
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(extra: str, fragment: str) -> None:
    with pytest.raises(WeightsError, match=fragment):
        canonical([*official("pi05"), extra], where="here")


@pytest.mark.parametrize("stored", [[], ["transformer.h.0.attn.weight"], ["action_in_proj.weight"]])
def test_other_models_are_told_apart(stored: list[str]) -> None:
    with pytest.raises(WeightsError, match=r"not the weights of pi0 or pi0.5"):
        canonical(stored, where=None)
