"""The pi0 / pi0.5 forward pass: properties that no recorded number shows.

Numbers: test_golden.py. What is merged, folded, skipped and reused: test_pi_savings.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from phyai_kernels.reference import attend, rms_norm, split_rotate
from torch import Tensor

from phyai_engine.config import ModelConfig, RtcOptions, load_model
from phyai_engine.errors import ConfigError, EngineError, WeightsError
from phyai_engine.layers.ops import BACK, REFERENCE, Ops
from phyai_engine.layers.rotary import inverse_frequencies, rotary_table
from phyai_engine.models.pi import PiModel, PiOptions, op_shapes, time_embedding
from phyai_engine.noise import standard_normal
from phyai_engine.solvers import euler_step
from phyai_engine.types import ModelSpec
from phyai_engine.weights import pi as names
from phyai_engine.weights.loading import device_of
from phyai_engine.weights.pi_names import EMBEDDING

SMALL: dict[str, Any] = {
    "vocab": 40, "vis_width": 16, "vis_depth": 2, "vis_mlp": 24, "vis_heads": 2, "width": 24, "depth": 3,
    "mlp": 32, "heads": 4, "head_dim": 8, "exp_width": 20, "exp_mlp": 32, "action_dim": 6,
    "action_horizon": 7, "num_steps": 6, "prompt_len": 8, "image_size": 18, "patch": 4,
    "cameras": ("a", "b", "c"),
}  # fmt: skip
VARIANTS = ["pi0", "pi05"]
CONFIG = Path(__file__).parents[2] / "config" / "models"
BF16_ERROR = 0.01  # relative L2 of a velocity; 4e-3 to 6e-3 were seen


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


def random_tensors(options: PiOptions, seed: int) -> dict[str, Tensor]:
    times = options.spec().times
    return names.random_tensors(PiModel.expected(options), seed, times, time_embedding(times, options))


def noise_of(options: PiOptions, batch: int = 2, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, options.action_horizon, options.action_dim), generator=generator)


# --- layers ---


def test_rotation_pairs_the_halves() -> None:
    """(i, i + D/2) is rotated by position * base^(-2i/D); interleaved pairs would differ."""
    head_dim, base = 8, 100.0
    x = torch.randn((1, 3, 3 * head_dim), generator=torch.Generator().manual_seed(0))
    table = rotary_table(torch.tensor([[0, 4, 11]]), inverse_frequencies(head_dim, base))
    keys, values = torch.zeros((2, 1, 1, 5, head_dim))
    query = split_rotate(x, table, keys, values, torch.tensor([2]), heads=1)
    for turned, first in ((query[0, 0], 0), (keys[0, 0, 2:], head_dim)):
        for s, position in enumerate((0, 4, 11)):
            for i in range(head_dim // 2):
                angle = position * base ** (-2 * i / head_dim)
                pair = complex(x[0, s, first + i], x[0, s, first + i + head_dim // 2])
                wanted = pair * complex(math.cos(angle), math.sin(angle))
                assert abs(complex(turned[s, i], turned[s, i + head_dim // 2]) - wanted) < 1e-5
    assert torch.equal(values[0, 0, 2:], x[0, :, 2 * head_dim :])
    assert not keys[0, 0, :2].any() and not values[0, 0, :2].any()


def test_attention_with_shared_heads_equals_repeated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, 6, 5, 4), generator=generator)
    key, value = torch.randn((2, 2, 3, 7, 4), generator=generator)
    lengths = torch.tensor([7, 4])
    ours = attend(query, key, value, lengths).view(2, 5, 6, 4).transpose(1, 2)
    for b, length in enumerate(lengths):
        for h in range(6):
            logits = query[b, h] @ key[b, h // 2, :length].T / 2.0
            wanted = torch.softmax(logits, dim=-1) @ value[b, h // 2, :length]
            assert torch.allclose(ours[b, h], wanted, atol=1e-6)


def test_rms_norm_adds_one_to_the_stored_weight_and_the_output_before_it() -> None:
    x, weight = torch.tensor([3.0, 4.0]), torch.tensor([0.5, -0.5])
    same, normed = rms_norm(x, weight)
    assert same is x
    assert torch.allclose(normed, x / math.sqrt(12.5) * torch.tensor([1.5, 0.5]))
    total, normed = rms_norm(torch.tensor([1.0, 1.0]), weight, torch.tensor([2.0, 3.0]))
    assert torch.equal(total, x)
    assert torch.allclose(normed, rms_norm(x, weight)[1])


@pytest.mark.parametrize(("least", "most"), [(4e-3, 4.0), (0.1, 2.0)])
def test_time_embedding_is_sines_then_cosines(least: float, most: float) -> None:
    times, half = (1.0, 0.3), 4
    table = time_embedding(times, small(exp_width=2 * half, min_period=least, max_period=most))
    assert table.dtype == torch.float32
    for row, t in enumerate(times):
        for i in range(half):
            period = least * (most / least) ** (i / (half - 1))
            assert table[row, i] == pytest.approx(math.sin(t * 2 * math.pi / period), abs=1e-6)
            assert table[row, half + i] == pytest.approx(math.cos(t * 2 * math.pi / period), abs=1e-6)


# --- masks and positions ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_masked_camera_equals_an_absent_one(variant: str) -> None:
    """Its tokens are invisible and take no positions, whatever stands in its pixels."""
    options = small(variant)
    model = PiModel.random(options, seed=1)
    two = PiModel.random(small(variant, cameras=("a", "c")), seed=1)
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
def test_actions_see_each_other_and_nothing_before_them_sees_an_action(variant: str) -> None:
    options = small(variant)
    model = PiModel.random(options, seed=1)
    prefix, x = model.prefix(inputs_of(options)), noise_of(options)
    before = model.velocity(prefix, x, 0)
    first = int(prefix.actions.start[0])
    assert first == 3 * options.image_tokens + 5 + (variant == "pi0")
    assert (prefix.actions.lengths == first + options.action_horizon).all()
    cached = prefix.actions.keys[:, :, :, :first].clone(), prefix.actions.values[:, :, :, :first].clone()
    x[:, 4] += 1.0
    moved = (model.velocity(prefix, x, 0) - before).abs().amax(dim=(0, 2))
    assert (moved > 1e-7).all()  # earlier actions too: no causal mask
    # The prefix and pi0's state token are where they were, bit by bit.
    assert torch.equal(prefix.actions.keys[:, :, :, :first], cached[0])
    assert torch.equal(prefix.actions.values[:, :, :, :first], cached[1])


def test_text_is_scaled_and_images_are_not() -> None:
    options = small()
    model = PiModel.random(options, seed=1)
    inputs = inputs_of(options)
    arranged = model.arranged(inputs)
    tokens, images = model.embed(arranged), 3 * options.image_tokens
    assert arranged["mask"].shape == (2, images + options.prompt_len)
    assert tokens.shape == (2, images + 5, options.width)
    rows = random_tensors(options, seed=1)[EMBEDDING][inputs["tokens"][:, :5]]
    assert torch.equal(tokens[:, images:], rows * math.sqrt(options.width))
    one = model.vision(inputs["images"][:, 2], model.ops) @ model.projector.weight.T + model.projector.bias
    assert torch.allclose(tokens[:, 2 * options.image_tokens : images], one, atol=1e-6)


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


def demo_inputs(spec: ModelSpec) -> dict[str, Tensor]:
    """A formula instead of a generator."""
    made: dict[str, Callable[[Any], Any]] = {
        "images": lambda i: np.sin(0.37 * i + np.cos(0.0113 * i)),
        "image_mask": lambda i: i >= 0,
        "tokens": lambda i: i * 7 % 256 + 3,
        "token_mask": lambda i: i < 40,
        "state": lambda i: np.cos(0.9 * i),
    }
    arrays = {n: made[n](np.arange(math.prod(b.shape), dtype=np.float64)) for n, b in spec.inputs.items()}
    return {
        n: torch.from_numpy(a.astype(spec.inputs[n].dtype).reshape(1, *spec.inputs[n].shape)) for n, a in arrays.items()
    }


@pytest.mark.parametrize(
    ("name", "some", "total"),
    [
        ("pi0_demo", [-0.099752, -0.137204, -0.01278, 0.242773, -0.413787, -0.155832, -0.100028], 272.2464),
        ("pi05_demo", [-0.354879, 0.08177, -0.299405, 0.097394, 0.340008, -0.26311, 0.209984], 360.5017),
    ],
)
def test_the_demo_models_seeds_keep_their_meaning(name: str, some: list[float], total: float) -> None:
    """Their motions are tuned by seed. Recorded from the plain forward pass, before anything was merged or folded."""
    config = load_model(CONFIG / f"{name}.yaml")
    model = PiModel.load(structs.replace(config, options={**config.options, "images": "planes"}))
    spec = model.spec
    noise = torch.from_numpy(standard_normal(3, spec.horizon, spec.action_dim))[None]
    actions = sample(model, demo_inputs(spec), noise)[0]
    np.testing.assert_allclose(actions[(0, 0, 0, 7, 24, 49, 49), (0, 1, 31, 5, 12, 0, 17)], some, atol=5e-5)
    assert float(actions.abs().sum()) == pytest.approx(total, abs=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vision", ["same", "float32"])
def test_bfloat16_stays_close_and_keeps_actions_fp32(variant: str, vision: str) -> None:
    """Plain random heads (the shipped ones divide by t, which enlarges rounding), scaled until |v| is about |noise|."""
    options = small(variant, width=64, exp_width=32, action_dim=32, head_dim=16, mlp=128, vis_width=32)
    tensors, inputs, noise = random_tensors(options, seed=2), inputs_of(options), noise_of(options)

    def velocity(o: PiOptions) -> Tensor:
        model = PiModel.from_state(o, tensors)
        return model.velocity(model.prefix(inputs), noise, 0)

    tensors["action_out_proj.weight"] *= noise.norm() / velocity(options).norm()
    wanted = velocity(options)
    assert 0.8 < wanted.norm() / noise.norm() < 1.2
    got = velocity(structs.replace(options, dtype="bfloat16", vision_dtype=vision))
    assert got.dtype == torch.float32
    assert not torch.equal(wanted, got)
    assert torch.cosine_similarity(wanted.flatten(), got.flatten(), dim=0) > 0.999
    assert (wanted - got).norm() / wanted.norm() < BF16_ERROR


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
    assert small(image_size=112, patch=14).image_tokens == 64
    assert small(image_size=18, patch=4).image_tokens == 16  # two pixels at the border are not seen


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
        ({"min_period": 4.0}, "min_period must be below max_period"),
        ({"kernels": "fastest"}, "kernels"),
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


def test_the_device_is_chosen_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes the accelerator where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = ModelConfig(family="pi05", options=SMALL, device="auto")
    assert {p.device.type for p in PiModel.load(config).parameters()} == {"cpu"}
    with pytest.raises(ConfigError, match=r"no CUDA device, got device: cuda.*nvidia-smi"):
        PiModel.load(structs.replace(config, device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [device_of(name).type for name in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]


def test_an_accelerator_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(PiModel, "to_empty", too_large)
    with pytest.raises(EngineError, match=r"do not fit .* got CUDA out of memory.* GiB, wanted 0\.0 GiB .*nvidia-smi"):
        PiModel.load(ModelConfig(family="pi05", options=SMALL))


def recorded_calls(model: PiModel, inputs: dict[str, Tensor], noise: Tensor) -> set[tuple[str, torch.dtype, Any]]:
    """Operator, dtype and sizes of every call of one request and a gradient, as OpShape has them."""
    made: set[tuple[str, torch.dtype, Any]] = set()
    sizes: dict[str, Callable[..., tuple[int, ...]]] = {
        **dict.fromkeys(
            ("linear", "linear_gelu", "linear_norm"),
            lambda x, weight, *_: (x[..., 0].numel(), weight.shape[1], weight.shape[0]),
        ),
        "gated_up": lambda x, weight: (x[..., 0].numel(), weight.shape[1], weight.shape[0] // 2),
        "project_rotate": lambda x, weight, table, keys, values, start, heads: (
            *x.shape, heads, keys.shape[1], keys.shape[3], keys.shape[2]
        ),
        "attend": lambda q, keys, values, lengths=None: (
            *q.shape[:2], keys.shape[1], q.shape[2], keys.shape[2], q.shape[3]
        ),
        "stack": lambda x, weights, norms, keys, values, start, lengths, table, heads, ops, ends=None: (
            *x.shape[:2], *weights[0].down.shape, heads, keys.shape[2], keys.shape[4], keys.shape[3]
        ),
        **dict.fromkeys(("rms_norm", "ada_rms_norm", "layer_norm"), lambda x, *_: (x[..., 0].numel(), x.shape[-1])),
        "linear_back": lambda grad, weight: (grad[..., 0].numel(), weight.shape[1], weight.shape[0]),
        "norm_back": lambda grad, weight, beside, stream, *_: (*stream.shape[1:], grad.shape[-1]),
        "gated_up_back": lambda grad, down, x, weight: (*x.shape[1:], down.shape[1]),
        "split_rotate_back": lambda q, k, v, table: (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3]),
        "attend_back": lambda grad, q, k, *_: (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3]),
    }  # fmt: skip

    def wrapped(op: str) -> Callable[..., Any]:
        plain = getattr(model.ops, op)

        def call(x: Tensor, *args: Any) -> Any:
            dtype = args[0][0].qkv.dtype if op == "stack" else x.dtype
            made.add((op, dtype, sizes[op](x, *args)))
            return plain(x, *args)

        return call

    model.ops = dataclasses.replace(model.ops, **{op: wrapped(op) for op in sizes})
    prefix = model.prefix(inputs)
    model.velocity(prefix, noise, 0)
    _, pull = model.velocity_vjp(prefix, noise, 0)
    pull(noise)
    return made


@pytest.mark.parametrize(
    "options",
    [
        small("pi0", kv_heads=2, dtype="bfloat16"),
        small("pi05", vision_dtype="float32", dtype="bfloat16"),
        small("pi05"),
    ],
)
def test_the_listed_operator_calls_are_those_that_are_made(options: PiOptions) -> None:
    """What ``load_ops`` checks is what runs: full prompt, all cameras, one row."""
    model, inputs = PiModel.random(options, seed=0), inputs_of(options, batch=1)
    inputs["token_mask"][:] = True
    made = recorded_calls(model, inputs, noise_of(options, batch=1))
    unlisted = {(op, dtype, dims) for op, dtype, dims in made if op == "project_rotate" and dims[3] == 0}
    assert unlisted  # K and V of a last layer, without queries: OpShape has no such size
    prefix = {(op, dtype, dims) for op, dtype, dims in made if op == "stack" and dims[2] == options.width}
    assert len(prefix) == 1 and options.width != options.exp_width
    unlisted |= prefix  # its rows are too many for any fused form: the other operators, one by one
    assert made - unlisted == {(shape.op, shape.dtype, shape.dims) for shape in op_shapes(options, model.dtype)}


@pytest.mark.parametrize(("guidance", "wanted"), [("identity", False), ("vjp", True), ("vjp_early:3", True)])
def test_a_fused_way_back_is_looked_for_where_guidance_takes_it(
    guidance: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def noted(*_: Any, shapes: Any, **__: Any) -> Ops:
        asked.extend(shape.op for shape in shapes)
        return REFERENCE

    monkeypatch.setattr("phyai_engine.models.pi.load_ops", noted)
    PiModel.load(ModelConfig(family="pi05", options=SMALL, rtc=RtcOptions(guidance=guidance)))
    assert "attend" in asked and bool({*BACK} & {*asked}) == wanted
