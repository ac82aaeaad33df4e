"""What is merged, folded, skipped and reused changes nothing: against the forward pass written out in plain_pi.py."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))

import plain_pi as plain

from phyai_engine.models import pi
from phyai_engine.models.pi import PiModel, PiOptions, PiPrefix, time_embedding
from phyai_engine.weights.pi import places, random_tensors
from phyai_engine.weights.pi_names import EMBEDDING, EXPERT, LANGUAGE, VISION

VARIANTS = ["pi0", "pi05"]
VALID = (8, 3, 1, 5)  # prompt tokens of each row
CAMERAS = ((1, 1, 1), (1, 0, 1), (0, 0, 0), (0, 1, 0))


def small(variant: str, **changes: Any) -> PiOptions:
    sizes: dict[str, Any] = {
        "vocab": 40, "vis_width": 16, "vis_depth": 2, "vis_mlp": 24, "vis_heads": 2, "width": 24, "depth": 3,
        "mlp": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "exp_width": 20, "exp_mlp": 28, "action_dim": 6,
        "action_horizon": 7, "num_steps": 4, "prompt_len": 8, "image_size": 18, "patch": 4,
        "cameras": ("a", "b", "c"),
    }  # fmt: skip
    return PiOptions(variant=variant, **{**sizes, **changes})  # type: ignore[arg-type]


def weights(options: PiOptions, seed: int = 1) -> dict[str, Tensor]:
    """Random weights with plain heads: the shipped skeleton would make actions that hardly depend on the network."""
    times = options.spec().times
    tensors = random_tensors(PiModel.expected(options), seed, times, time_embedding(times, options))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.startswith(("action_", "time_mlp", "state_proj")) or ".dense." in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    return tensors


def inputs_of(options: PiOptions, seed: int = 0) -> dict[str, Tensor]:
    """Four rows of different lengths; masked cameras hold pixels, padding holds tokens."""
    generator = torch.Generator().manual_seed(seed)
    cameras, size = len(options.cameras), options.image_size
    return {
        "images": torch.rand((4, cameras, 3, size, size), generator=generator) * 2 - 1,
        "image_mask": torch.tensor(CAMERAS, dtype=torch.bool),
        "tokens": torch.randint(0, options.vocab, (4, options.prompt_len), generator=generator),
        "token_mask": torch.arange(options.prompt_len) < torch.tensor(VALID)[:, None],
        "state": torch.rand((4, options.action_dim), generator=generator) * 2 - 1,
    }


def noise_of(options: PiOptions, batch: int = 4) -> Tensor:
    shape = (batch, options.action_horizon, options.action_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


def velocities(model: PiModel, inputs: dict[str, Tensor], noise: Tensor) -> Tensor:
    """[N, B, H, A]: every step from the same x."""
    prefix = model.prefix(inputs)
    return torch.stack([model.velocity(prefix, noise, k) for k in range(model.options.num_steps)])


def one_row(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in inputs.items()}


# --- all of them together ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "depth": 1}, {"cameras": ("only",), "num_steps": 1}])
def test_the_model_equals_the_plain_forward_pass(variant: str, changes: dict[str, Any]) -> None:
    options = small(variant, **changes)
    tensors, inputs, noise = weights(options), inputs_of(options), noise_of(options)
    inputs["image_mask"] = inputs["image_mask"][:, : len(options.cameras)]
    reference = plain.PlainPi(options, tensors)
    wanted_prefix = reference.prefix(inputs)
    model = PiModel.from_state(options, tensors)
    prefix = model.prefix(inputs)
    assert torch.equal(prefix.mask, wanted_prefix.mask)
    for ours, theirs in ((prefix.actions.keys, wanted_prefix.keys), (prefix.actions.values, wanted_prefix.values)):
        for layer, padded in zip(ours, theirs, strict=True):
            for b, mask in enumerate(prefix.mask):
                kept = padded[b][:, mask]
                assert (layer[b, :, : kept.shape[1]] - kept).abs().max() <= 1e-5 * kept.abs().max()
    got = velocities(model, inputs, noise)
    wanted = torch.stack([reference.velocity(wanted_prefix, noise, t) for t in options.spec().times])
    assert 0.1 < wanted.abs().max() < 10
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_different_lengths_equal_their_single_runs(variant: str) -> None:
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    together = velocities(model, inputs, noise)
    for b in range(4):
        alone = velocities(model, one_row(inputs, b), noise[b : b + 1])
        assert (together[:, b] - alone[:, 0]).abs().max() < 1e-5


# --- merged weights ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_matrices_hold_the_checkpoints_rows(dtype: torch.dtype) -> None:
    """Rows of a product are independent, so the merged product holds the separate ones."""
    options = small("pi05", dtype=str(dtype).removeprefix("torch."))
    tensors, own = weights(options), dict(PiModel.from_state(options, weights(options)).named_parameters())
    expert, vision = f"{EXPERT}model.layers.1.", f"{VISION}encoder.layers.1.self_attn."
    merged = {
        "expert.layers.1.qkv.weight": [f"{expert}self_attn.{p}_proj.weight" for p in "qkv"],
        "expert.layers.1.gate_up.weight": [f"{expert}mlp.{p}_proj.weight" for p in ("gate", "up")],
        "vision.layers.1.qkv.weight": [f"{vision}{p}_proj.weight" for p in "qkv"],
        "vision.layers.1.qkv.bias": [f"{vision}{p}_proj.bias" for p in "qkv"],
        "language.layers.2.qkv.weight": [f"{LANGUAGE}layers.2.self_attn.{p}_proj.weight" for p in "kv"],
    }
    x = torch.randn((5, 20), generator=torch.Generator().manual_seed(0)).to(dtype)
    for name, parts in merged.items():
        assert torch.equal(own[name], torch.cat([tensors[part] for part in parts]).to(dtype))
    separate = [functional.linear(x, tensors[part].to(dtype)) for part in merged["expert.layers.1.qkv.weight"]]
    whole = functional.linear(x, own["expert.layers.1.qkv.weight"])
    assert torch.allclose(whole, torch.cat(separate, dim=1), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_every_row_of_every_parameter_comes_from_the_checkpoint_once() -> None:
    for variant in VARIANTS:
        options = small(variant)
        with torch.device("meta"):
            own = dict(PiModel(options).named_parameters())
        rows = {name: [0] * len(parameter) for name, parameter in own.items()}
        for place in places(options).values():
            if place.own:
                count = math.prod(place.shape) // math.prod(own[place.own].shape[1:])
                for row in range(place.row, place.row + count):
                    rows[place.own][row] += 1
        made = {"action_in.weight"} if variant == "pi0" else set()  # folded
        assert {name for name, counts in rows.items() if set(counts) != {1}} == made


# --- folded constants ---


def test_the_modulation_table_holds_the_unfolded_bits() -> None:
    options = small("pi05")
    tensors = weights(options)
    model = PiModel.from_state(options, tensors)
    table = time_embedding((*options.spec().times, 0.0), options)  # the last row: of tokens that are data already
    layers, final = f"{EXPERT}model.layers.", f"{EXPERT}model.norm."
    both = ("input_layernorm.", "post_attention_layernorm.")
    norms = [*(f"{layers}{i}.{norm}" for i in range(options.depth) for norm in both), final]
    assert model.modulation.shape == (5, len(norms), 3, options.exp_width)

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, tensors[name + ".weight"], tensors[name + ".bias"])

    for k in range(5):
        inner = functional.silu(linear(table[k : k + 1], "time_mlp_in"))
        condition = functional.silu(linear(inner, "time_mlp_out"))
        for j, norm in enumerate(norms):
            scale, shift, gate = linear(condition, norm + "dense")[0].chunk(3)
            assert torch.equal(model.modulation[k, j], torch.stack((scale, shift, gate)))
    assert not [name for name in model.state_dict() if "dense" in name or "time" in name]


def test_rows_of_the_modulation_are_scale_shift_gate() -> None:
    options = small("pi05")
    tensors = weights(options)
    width = options.exp_width
    name = f"{EXPERT}model.layers.1.post_attention_layernorm.dense."
    tensors[name + "weight"].zero_()
    tensors[name + "bias"] = torch.cat(
        (torch.full((width,), 1.0), torch.full((width,), 2.0), torch.full((width,), 3.0))
    )
    model = PiModel.from_state(options, tensors)
    assert [set(part.flatten().tolist()) for part in model.modulation[:, 3].unbind(1)] == [{1.0}, {2.0}, {3.0}]


def test_the_embeddings_scale_is_rounded_as_the_looked_up_row_would_be() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        options = small("pi05", width=40, dtype=str(dtype).removeprefix("torch."))  # sqrt(40) is no power of two
        tensors = weights(options)
        model = PiModel.from_state(options, tensors)
        ids = torch.arange(options.vocab)
        wanted = tensors[EMBEDDING].to(dtype)[ids] * options.width**0.5
        assert wanted.dtype == dtype
        assert torch.equal(model.embedding[ids], wanted)


def test_pi0s_action_projection_and_time_half_are_folded() -> None:
    options = small("pi0")
    tensors = weights(options)
    model = PiModel.from_state(options, tensors)
    times = time_embedding((*options.spec().times, 0.0), options)
    x = noise_of(options).double()
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    for k in range(options.num_steps + 1):
        action = functional.linear(x, wide["action_in_proj.weight"], wide["action_in_proj.bias"])
        both = torch.cat((action, times[k].double().expand_as(action)), dim=-1)
        wanted = functional.linear(both, wide["action_time_mlp_in.weight"], wide["action_time_mlp_in.bias"])
        got = functional.linear(x.float(), model.action_in.weight, model.time_rows[k])
        assert (got - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert model.action_in.bias is None and not hasattr(model, "action_time_mlp_in")


# --- skipped ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_prefix_layer_stops_at_its_keys_and_values(variant: str) -> None:
    """Its other weights, and the final norm, are not even read: NaN there changes no bit."""
    options = small(variant)
    tensors, inputs, noise = weights(options), inputs_of(options), noise_of(options)
    wanted = velocities(PiModel.from_state(options, tensors), inputs, noise)
    last = f"{LANGUAGE}layers.{options.depth - 1}."
    unread = [n for n in tensors if n.startswith(last) and not n.endswith(("k_proj.weight", "v_proj.weight"))]
    unread.remove(last + "input_layernorm.weight")
    assert len(unread) == 6
    for name in unread:
        tensors[name] = torch.full_like(tensors[name], torch.nan)
    tensors[f"{LANGUAGE}norm.weight"] = torch.full((options.width,), torch.nan)
    model = PiModel.from_state(options, tensors)
    assert torch.equal(velocities(model, inputs, noise), wanted)
    assert [name for name, _ in model.language.layers[-1].named_parameters()] == ["qkv.weight"]  # type: ignore[union-attr]


def counted(model: PiModel) -> dict[str, list[int]]:
    """Tokens of every call of the model's operators: [tokens per row] of K/V writes, images of vision attention."""
    calls: dict[str, list[int]] = {"written": [], "images": []}
    project_rotate, attend = model.ops.project_rotate, model.ops.attend

    def write(x: Tensor, *rest: Any) -> Tensor:
        calls["written"].append(x.shape[1])
        return project_rotate(x, *rest)

    def look(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            calls["images"].append(len(query))
        return attend(query, keys, values, lengths)

    model.ops = dataclasses.replace(model.ops, project_rotate=write, attend=look)
    return calls


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_valid_tokens_and_present_cameras_are_computed(variant: str) -> None:
    """And the prefix once per observation, pi0's state token once per request, in a step only the actions."""
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    for row in (0, 1, 2, 3):
        calls = counted(model)
        velocities(model, one_row(inputs, row), noise[row : row + 1])
        cameras, length = sum(CAMERAS[row]), sum(CAMERAS[row]) * options.image_tokens + VALID[row]
        assert calls["images"] == [cameras] * (options.vis_depth if cameras else 0)
        state = [1] * options.depth if variant == "pi0" else []
        steps = [options.action_horizon] * options.depth * options.num_steps
        assert calls["written"] == [*[length] * options.depth, *state, *steps]
    calls = counted(model)
    model.prefix(inputs)
    assert calls["images"] == [sum(map(sum, CAMERAS))] * options.vis_depth  # of all rows, as one batch
    assert calls["written"][0] == 3 * options.image_tokens + 8  # the longest row


def test_an_observation_without_any_token_gives_finite_actions() -> None:
    for variant in VARIANTS:
        options = small(variant)
        model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
        inputs["image_mask"][:], inputs["token_mask"][:] = False, False
        assert velocities(model, inputs, noise).isfinite().all()


# --- what must not reach a result ---


def poisoned(inputs: dict[str, Tensor], options: PiOptions) -> dict[str, Tensor]:
    images, tokens = inputs["images"].clone(), inputs["tokens"].clone()
    images[~inputs["image_mask"]] = torch.nan
    tokens[~inputs["token_mask"]] = 1 << 40
    return {**inputs, "images": images, "tokens": tokens}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_stands_under_a_mask_reaches_nothing(variant: str) -> None:
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    wanted = velocities(model, inputs, noise)
    assert torch.equal(velocities(model, poisoned(inputs, options), noise), wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_an_earlier_request_left_in_the_slab_reaches_nothing(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    wanted = velocities(model, inputs, noise)
    stale = []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        stale.append(torch.full(*args, fill_value=torch.nan, **kwargs))
        return stale[-1]

    monkeypatch.setattr(pi.torch, "empty", empty)
    assert torch.equal(velocities(model, inputs, noise), wanted)
    assert [tuple(slab.shape[:3]) for slab in stale] == [(options.depth, 4, options.kv_heads)] * 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_reads_nothing_of_another_step(variant: str) -> None:
    """Each one writes its own K/V over the last one's: in any order, the same bits."""
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    prefix = model.prefix(inputs)
    forth = [model.velocity(prefix, noise * (k + 1), k) for k in range(4)]
    back = [model.velocity(prefix, noise * (k + 1), k) for k in (3, 2, 1, 0)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forth, back, strict=True))


# --- what the runner relies on ---


def test_phases_are_told_as_they_begin() -> None:
    options = small("pi0")
    model, inputs, told = PiModel.from_state(options, weights(options)), inputs_of(options), list[str]()
    calls = counted(model)
    model.prefix(inputs, lambda name: told.append(f"{name} {len(calls['images'])} {len(calls['written'])}"))
    assert told == ["vision 0 0", f"prefix {options.vis_depth} 0"]


class _Waits(TorchDispatchMode):
    """Counts what makes a CUDA host wait for the device: a value read back, a size that depends on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_waits_for_nothing(variant: str) -> None:
    options = small(variant)
    model, inputs, noise = PiModel.from_state(options, weights(options)), inputs_of(options), noise_of(options)
    prefix = model.prefix(inputs)
    with _Waits() as waits:
        model.velocity(prefix, noise, 1)
    assert waits.seen == []
    with _Waits() as waits:
        noise.sum().item()
    assert waits.seen == ["_local_scalar_dense"]


# --- on an accelerator ---


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # a prototype, says torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda_equals_the_plain_forward_pass_and_its_steps_do_not_wait(variant: str) -> None:
    options = small(variant, kernels="reference")
    tensors, inputs, noise = weights(options), inputs_of(options), noise_of(options)
    reference = plain.PlainPi(options, tensors)
    wanted_prefix = reference.prefix(inputs)
    wanted = torch.stack([reference.velocity(wanted_prefix, noise, t) for t in options.spec().times])
    model = PiModel.from_state(options, tensors, device="cuda")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
    on_device = {name: model.to_device(tensor.numpy()) for name, tensor in inputs.items()}
    start = model.to_device(noise.numpy())
    prefix = model.prefix(on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [model.velocity(prefix, start, k) for k in range(options.num_steps)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got = torch.stack([torch.from_numpy(model.to_host(v)) for v in found])
    assert (got - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    assert isinstance(prefix, PiPrefix) and prefix.actions.keys.is_cuda
