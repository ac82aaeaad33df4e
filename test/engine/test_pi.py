"""The pi0 / pi0.5 forward pass: properties that no recorded number shows. Numbers: test_golden.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from phyai_kernels.reference import attend, rms_norm, rotate
from torch import Tensor

from phyai_engine.config import ModelConfig
from phyai_engine.errors import ConfigError, WeightsError
from phyai_engine.layers.rotary import inverse_frequencies, rotary_table
from phyai_engine.models.backbones.gemma import AdaRmsNorm
from phyai_engine.models.pi import PiModel, PiOptions, time_embedding
from phyai_engine.solvers import euler_step

SMALL: dict[str, Any] = {
    "vocab": 40, "vis_width": 16, "vis_depth": 2, "vis_mlp": 24, "vis_heads": 2, "width": 24, "depth": 3,
    "mlp": 32, "heads": 4, "head_dim": 8, "exp_width": 20, "exp_mlp": 32, "action_dim": 6,
    "action_horizon": 7, "num_steps": 6, "prompt_len": 8, "image_size": 18, "patch": 4,
    "cameras": ("a", "b", "c"),
}  # fmt: skip
VARIANTS = ["pi0", "pi05"]


def small(variant: str = "pi05", **changes: Any) -> PiOptions:
    return PiOptions(variant=variant, **{**SMALL, **changes})  # type: ignore[arg-type]


def inputs_of(options: PiOptions, batch: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cameras, size = len(options.cameras), options.image_size
    return {
        "images": torch.rand((batch, cameras, 3, size, size), generator=generator) * 2 - 1,
        "image_mask": torch.ones((batch, cameras), dtype=torch.bool),
        "tokens": torch.randint(0, options.vocab, (batch, options.prompt_len), generator=generator),
        "token_mask": torch.arange(options.prompt_len).expand(batch, -1) < 5,
        "state": torch.rand((batch, options.action_dim), generator=generator) * 2 - 1,
    }


def sample(model: PiModel, inputs: dict[str, Tensor], noise: Tensor) -> Tensor:
    prefix, x = model.prefix(inputs), noise
    for step in range(len(model.spec.times)):
        x = euler_step(x, model.velocity(prefix, x, step), len(model.spec.times))
    return x


def noise_of(options: PiOptions, batch: int = 2, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, options.action_horizon, options.action_dim), generator=generator)


# --- layers ---


def test_rotation_pairs_the_halves() -> None:
    """(i, i + D/2) is rotated by position * base^(-2i/D); interleaved pairs would differ."""
    head_dim, base = 8, 100.0
    x = torch.randn((1, 1, 3, head_dim), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 4, 11]])
    ours = rotate(x, rotary_table(positions, inverse_frequencies(head_dim, base)))
    for s, position in enumerate((0, 4, 11)):
        for i in range(head_dim // 2):
            angle = position * base ** (-2 * i / head_dim)
            pair = complex(x[0, 0, s, i], x[0, 0, s, i + head_dim // 2]) * complex(math.cos(angle), math.sin(angle))
            got = complex(ours[0, 0, s, i], ours[0, 0, s, i + head_dim // 2])
            assert abs(got - pair) < 1e-5


def test_attention_with_shared_heads_equals_repeated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 6, 5, 4), generator=generator)
    key, value = torch.randn((2, 2, 3, 7, 4), generator=generator)
    mask = torch.rand((2, 5, 7), generator=generator) > 0.4
    mask[:, :, 0] = True
    ours = attend(query, key, value, mask).view(2, 5, 6, 4).transpose(1, 2)
    for h in range(6):
        logits = query[:, h] @ key[:, h // 2].transpose(-1, -2) / 2.0
        weights = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
        assert torch.allclose(ours[:, h], weights @ value[:, h // 2], atol=1e-6)


def test_a_row_that_sees_nothing_stays_finite() -> None:
    query, key = torch.randn((1, 1, 2, 4)), torch.randn((1, 1, 3, 4))
    value = torch.arange(12.0).view(1, 1, 3, 4)
    out = attend(query, key, value, torch.zeros((1, 2, 3), dtype=torch.bool))
    assert torch.allclose(out, value.mean(dim=2).expand(1, 2, 4))


def test_rms_norm_adds_one_to_the_stored_weight() -> None:
    x = torch.tensor([3.0, 4.0])
    wanted = x / math.sqrt(12.5) * torch.tensor([1.5, 0.5])
    assert torch.allclose(rms_norm(x, torch.tensor([0.5, -0.5])), wanted)


def test_ada_rms_norm_splits_scale_shift_gate_in_this_order() -> None:
    norm = AdaRmsNorm(2).requires_grad_(False)
    norm.dense.weight.zero_()
    norm.dense.bias.copy_(torch.tensor([1.0, 1.0, 10.0, 10.0, 100.0, 100.0]))
    out, gate = norm(torch.tensor([[[3.0, 4.0]]]), torch.zeros((1, 2)))
    assert torch.allclose(out, torch.tensor([[[3.0, 4.0]]]) / math.sqrt(12.5) * 2.0 + 10.0)
    assert gate is not None
    assert gate.flatten().tolist() == [100.0, 100.0]


def test_time_embedding_is_sines_then_cosines() -> None:
    times, width = (1.0, 0.3), 8
    table = time_embedding(times, width)
    assert table.dtype == torch.float32
    for row, t in enumerate(times):
        for i in range(width // 2):
            period = 4e-3 * 1000.0 ** (i / (width // 2 - 1))
            assert table[row, i] == pytest.approx(math.sin(t * 2 * math.pi / period), abs=1e-6)
            assert table[row, width // 2 + i] == pytest.approx(math.cos(t * 2 * math.pi / period), abs=1e-6)


# --- masks and positions ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_masked_camera_equals_an_absent_one(variant: str) -> None:
    """Its tokens are invisible and take no positions, whatever stands in its pixels."""
    options = small(variant)
    model = PiModel.random(options, seed=1)
    two = PiModel(small(variant, cameras=("a", "c"))).requires_grad_(False)
    two.load_state_dict(model.state_dict())
    inputs, noise = inputs_of(options), noise_of(options)
    inputs["image_mask"][:, 1] = False
    without = {**inputs, "images": inputs["images"][:, [0, 2]], "image_mask": inputs["image_mask"][:, [0, 2]]}
    wanted = sample(two, without, noise)
    assert torch.allclose(sample(model, inputs, noise), wanted, atol=2e-6)
    inputs["images"][:, 1] = torch.nan
    assert torch.allclose(sample(model, inputs, noise), wanted, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_of_the_prompt_changes_nothing(variant: str) -> None:
    options = small(variant)
    model = PiModel.random(options, seed=1)
    inputs, noise = inputs_of(options), noise_of(options)
    wanted = sample(model, inputs, noise)
    inputs["tokens"][:, 5:] = 10_000_000  # beyond the vocabulary: not even looked up
    assert torch.equal(sample(model, inputs, noise), wanted)
    shorter = {**inputs, "tokens": inputs["tokens"][:, :5], "token_mask": inputs["token_mask"][:, :5]}
    assert torch.allclose(sample(model, shorter, noise), wanted, atol=2e-6)
    inputs["token_mask"][0, 4] = False  # a valid token less is seen
    changed = sample(model, inputs, noise)
    assert not torch.allclose(changed[0], wanted[0], atol=1e-5)
    assert torch.allclose(changed[1], wanted[1], atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_actions_see_each_other_and_the_state_token_sees_no_action(variant: str) -> None:
    options = small(variant)
    model = PiModel.random(options, seed=1)
    prefix, x = model.prefix(inputs_of(options)), noise_of(options)
    before = model.velocity(prefix, x, 0)
    x[:, 4] += 1.0
    moved = (model.velocity(prefix, x, 0) - before).abs().amax(dim=(0, 2))
    assert (moved > 1e-7).all()  # earlier actions too: no causal mask
    valid, suffix = prefix.mask.shape[1], prefix.suffix_mask[0, :, prefix.mask.shape[1] :]
    assert prefix.suffix_mask.shape[2] == valid + suffix.shape[0]
    first = 1 if variant == "pi0" else 0
    assert suffix.shape[0] == options.action_horizon + first
    assert suffix[first:].all()
    assert suffix[0].tolist() == ([True] + [False] * options.action_horizon if first else [True] * suffix.shape[1])


def test_text_is_scaled_and_images_are_not() -> None:
    options = small()
    model = PiModel.random(options, seed=1)
    inputs = inputs_of(options)
    tokens, mask = model.embed(inputs)
    images = 3 * options.vision.tokens
    assert mask.shape == (2, images + options.prompt_len)
    wanted = model.embedding.weight[inputs["tokens"]] * math.sqrt(options.width)
    assert torch.allclose(tokens[:, images:][mask[:, images:]], wanted[mask[:, images:]])
    one = model.projector(model.vision(inputs["images"][:, 2], torch.float32))
    assert torch.allclose(tokens[:, 2 * options.vision.tokens : images], one, atol=1e-6)


def test_state_is_an_input_of_pi0_only() -> None:
    for variant in VARIANTS:
        options = small(variant)
        model = PiModel.random(options, seed=1)
        assert ("state" in model.spec.inputs) == (variant == "pi0")
        inputs, noise = inputs_of(options), noise_of(options)
        before = sample(model, inputs, noise)
        inputs["state"] = -inputs["state"]
        assert torch.equal(before, sample(model, inputs, noise)) == (variant == "pi05")


# --- random weights ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_weights_give_bounded_smooth_actions_that_follow_the_observation(variant: str) -> None:
    options = small(variant, num_steps=10, exp_width=32, action_horizon=20)
    for seed in range(3):
        model = PiModel.random(options, seed)
        inputs = inputs_of(options, batch=4, seed=seed)
        actions = sample(model, inputs, noise_of(options, 4))
        again = sample(model, inputs, noise_of(options, 4, seed=10))
        assert actions.abs().max() < 1.0
        assert actions.diff(dim=1).abs().max() < 0.2
        assert (actions - again).abs().max() < 0.03  # the start noise is forgotten
        assert actions.std(dim=0).mean() > 5 * (actions - again).abs().mean()  # the observation is not


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_weights_look_ahead_to_the_same_actions_from_every_step(variant: str) -> None:
    # x - t v is what guidance compares with the committed actions; it must not swing with the noise.
    options = small(variant, num_steps=10, exp_width=32)
    model = PiModel.random(options, seed=0)
    prefix, x = model.prefix(inputs_of(options)), noise_of(options)
    ahead = []
    for step, t in enumerate(model.spec.times):
        v = model.velocity(prefix, x, step)
        ahead.append(x - t * v)
        x = euler_step(x, v, len(model.spec.times))
    assert max((early - x).abs().max() for early in ahead) < 0.8  # the noise reaches 2.5 and more


def test_random_weights_are_reproducible_and_bounded_even_where_they_cannot_attract() -> None:
    options = small(exp_width=4)  # narrower than the action
    inputs, noise = inputs_of(options), noise_of(options)
    first, second, other = (sample(PiModel.random(options, seed), inputs, noise) for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.allclose(first, other, atol=0.01)
    assert first.abs().max() < 20.0


def test_bfloat16_stays_close_and_keeps_actions_fp32() -> None:
    # An expert no wider than the action has plain random heads; others divide by t, which enlarges rounding.
    options = small(action_dim=20)
    exact, reduced = (PiModel.random(small(action_dim=20, dtype=dtype), seed=2) for dtype in ("float32", "bfloat16"))
    assert reduced.embedding.weight.dtype == torch.bfloat16
    assert reduced.action_in_proj.weight.dtype == torch.float32
    inputs, noise = inputs_of(options), noise_of(options)
    wanted, got = sample(exact, inputs, noise) - noise, sample(reduced, inputs, noise) - noise
    assert got.dtype == torch.float32
    assert torch.cosine_similarity(wanted.flatten(), got.flatten(), dim=0) > 0.999
    assert not torch.equal(wanted, got)


# --- options and loading ---


def test_the_spec_says_what_the_model_takes() -> None:
    options = small("pi0")
    spec = PiModel.random(options, seed=0).spec
    assert (spec.family, spec.horizon, spec.action_dim, len(spec.times)) == ("pi0", 7, 6, 6)
    assert spec.cameras == ("a", "b", "c")
    shapes = {name: (buffer.shape, buffer.dtype) for name, buffer in spec.inputs.items()}
    assert shapes == {
        "images": ((3, 3, 18, 18), "float32"),
        "image_mask": ((3,), "bool"),
        "tokens": ((8,), "int64"),
        "token_mask": ((8,), "bool"),
        "state": ((6,), "float32"),
    }


def test_the_position_table_follows_the_image() -> None:
    assert small(image_size=112, patch=14).vision.tokens == 64
    assert small(image_size=18, patch=4).vision.tokens == 16  # two pixels at the border are not seen


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"exp_width": 21}, "exp_width must be even"),
        ({"vis_heads": 3}, "vis_width must be a multiple of vis_heads"),
        ({"image_size": 3}, "image_size must be at least one patch"),
        ({"cameras": ["a", "a"]}, "cameras must differ"),
        ({"cameras": []}, "length >= 1"),
        ({"num_steps": 0}, r"num_steps"),
        ({"exp_widht": 16}, "unknown key 'exp_widht'.*Did you mean 'exp_width'"),
    ],
)
def test_wrong_options_are_refused_with_the_rule(change: dict[str, Any], rule: str) -> None:
    config = ModelConfig(family="pi05", options={**SMALL, **change})
    with pytest.raises(ConfigError, match=rule):
        PiModel.load(config)


def test_load_makes_random_weights_or_reads_a_checkpoint(tmp_path: Any) -> None:
    config = ModelConfig(family="pi0", seed=4, options=SMALL)
    model = PiModel.load(config)
    assert model.spec.family == "pi0"
    wanted = PiModel.random(small("pi0"), seed=4).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(WeightsError, match="no weights"):
        PiModel.load(ModelConfig(family="pi0", checkpoint=str(tmp_path), options=SMALL))
    with pytest.raises(ConfigError, match="contradicts the family, got pi05, wanted pi0"):
        PiModel.load(ModelConfig(family="pi0", options={**SMALL, "variant": "pi05"}))


def test_arrays_travel_to_the_device_and_back() -> None:
    model = PiModel.random(small(), seed=0)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    tensor = model.to_device(array)
    np.testing.assert_array_equal(model.to_host(tensor), array)
    assert model.to_device(np.array([True, False])).dtype == torch.bool
