"""Coded models: what coding does to a matrix, to the answers, and which models, scales and devices are refused."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
import yaml
from phyai_kernels import reference
from torch import Tensor, nn
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))

from test_pi_savings import inputs_of, noise_of, small, velocities, weights

from phyai_engine.cli import app
from phyai_engine.config import ModelConfig
from phyai_engine.errors import ConfigError, EngineError
from phyai_engine.graphs import Graphs
from phyai_engine.layers.coded import CodedLinear
from phyai_engine.layers.ops import DIMS, REFERENCE, Ops
from phyai_engine.layers.tape import Tape
from phyai_engine.models import pi_coded
from phyai_engine.models.pi import PiModel, PiOptions, op_shapes
from phyai_engine.noise import standard_normal
from phyai_engine.quant.coding import MARGIN, Site, code_linear, code_rows, interleaved, weights_digest
from phyai_engine.quant.scales import FILE, ActivationScales, Seen, load_scales, save_scales
from phyai_engine.quant.schemes import SCHEMES
from phyai_engine.runner import Runner
from phyai_engine.solvers import euler_flow

SIZES: dict[str, Any] = {
    "vis_mlp": 32, "width": 32, "mlp": 64, "exp_width": 32, "exp_mlp": 48, "vis_width": 16, "kv_heads": 1
}  # fmt: skip
KEEPS = [(), ("*.qkv",), ("*.o",), ("*.gate_up", "*.down"), ("*.qkv", "*.o"), ("*.layers.0.*",), ("language.*",)]


def options(variant: str = "pi05", **changes: Any) -> PiOptions:
    given = {"dtype": "bfloat16", "quant": "w8a8_fp8", "quant_keep": (), "kernels": "reference", **changes}
    return small(variant, **{**SIZES, **given})


# --- one matrix ---


def test_a_weight_is_within_half_a_step_and_uses_the_range() -> None:
    weight = torch.randn(24, 400, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 4, 24)[:, None]
    values, scale = code_rows(weight)
    assert (values.dtype, values.shape, scale.shape) == (reference.FP8, (24, 400), (24,))
    decoded = values.float() * scale[:, None]
    normal = weight.abs() >= scale[:, None] * 2**-6
    assert ((decoded - weight).abs()[normal] <= weight.abs()[normal] * 2**-4 * 1.001).all()
    assert (values.float().abs().amax(dim=1) == 448).all()
    error = float((decoded - weight).norm() / weight.norm())
    assert 0.015 < error < 0.035


def test_rows_of_zeros_stay_zeros() -> None:
    values, scale = code_rows(torch.zeros(3, 16))
    assert not values.float().any() and torch.isfinite(scale).all()


def test_interleaving_is_what_the_operators_undo() -> None:
    rows = torch.arange(24).float()
    assert torch.equal(reference.halves_of_pairs(interleaved(rows, 8), 8), rows)


def test_a_coded_layer_is_the_layer_within_its_precision() -> None:
    generator = torch.Generator().manual_seed(1)
    linear = nn.Linear(512, 64, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(50, 512, generator=generator).bfloat16()
    coded = code_linear(linear, Seen(np.zeros(512, np.float32), float(x.abs().max())), 0)
    operand = reference.encode_fp8(x, (coded.centre, coded.inverse))
    out = reference.linear_fp8(operand, coded.weight, coded.factor, coded.bias)
    with torch.no_grad():
        wanted = linear(x).float()
    assert 0.02 < float((out.float() - wanted).norm() / wanted.norm()) < 0.05
    assert float(operand.float().abs().max()) == pytest.approx(448 / MARGIN, rel=0.07)


def test_what_all_tokens_have_in_common_costs_no_precision() -> None:
    """Ten times as large as what differs, it would be the error of what differs ten times over."""
    generator = torch.Generator().manual_seed(2)
    linear = nn.Linear(512, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    common, own = torch.randn(512, generator=generator) * 10, torch.randn(50, 512, generator=generator)
    x = (common + own).bfloat16()
    wanted = nn.functional.linear(x.double(), linear.weight.double())
    varying = wanted - wanted.mean(dim=0)

    def error(centre: Tensor) -> float:
        coded = code_linear(linear, Seen(centre.numpy(), float((x.float() - centre).abs().max())), 0)
        operand = reference.encode_fp8(x, (coded.centre, coded.inverse))
        out = reference.linear_fp8(operand, coded.weight, coded.factor, coded.bias).double()
        return float((out - wanted).norm() / varying.norm())

    assert error(torch.zeros(512)) > 0.2
    assert error(common) < 0.06


# --- a model ---


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_a_coded_model_is_near_the_plain_one(variant: str, keep: tuple[str, ...]) -> None:
    coded = options(variant, quant_keep=keep)
    tensors, inputs, noise = weights(coded), inputs_of(coded), noise_of(coded)
    exact = msgspec.structs.replace(coded, dtype="float32", quant="none")
    wanted = velocities(PiModel.from_state(exact, tensors), inputs, noise)
    model = PiModel.from_state(coded, tensors)
    names = {name for name, module in model.named_modules() if isinstance(module, CodedLinear)}
    assert names == set(pi_coded.sites(coded))
    assert bool(model.coded) == pi_coded.codes_expert(coded) == (keep in ((), ("language.*",)))
    error = float((velocities(model, inputs, noise) - wanted).norm() / wanted.norm())
    assert 1e-3 < error < 0.05


def test_each_coded_matrix_moves_the_answer() -> None:
    """None is forgotten on the way: its weight is multiplied, with its factor."""
    coded = options()
    tensors, inputs, noise = weights(coded), inputs_of(coded), noise_of(coded)
    model = PiModel.from_state(coded, tensors)
    before = velocities(model, inputs, noise)
    factors = {name: cast("CodedLinear", model.get_submodule(name)).factor for name in pi_coded.sites(coded)}
    factors |= {f"expert {i} {k}": m.factor for i, layer in enumerate(model.coded) for k, m in enumerate(layer)}
    assert len(factors) == len(pi_coded.every_site(coded))
    for name, factor in factors.items():
        own = factor.clone()
        factor.mul_(1.5)
        assert not torch.equal(velocities(model, inputs, noise), before), name
        factor.copy_(own)
    assert torch.equal(velocities(model, inputs, noise), before)


def test_every_call_of_a_coded_model_is_checked_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for keep in KEEPS:
        coded = options(quant_keep=keep)
        model = PiModel.from_state(coded, weights(coded))
        called = set[str]()

        def noting(name: str, calls: set[str] = called) -> Any:
            return lambda *args: (calls.add(name), getattr(reference, name)(*args))[1]

        model.ops = Ops(**{name: noting(name) for name in DIMS})
        velocities(model, inputs_of(coded), noise_of(coded))
        coded_calls = {name for name in called if name.endswith("_fp8")}
        assert coded_calls == {shape.op for shape in op_shapes(coded, torch.bfloat16) if shape.op.endswith("_fp8")}


def test_a_larger_shape_gives_the_same_answer() -> None:
    coded = options()
    model = PiModel.from_state(coded, weights(coded))
    row = pi_coded.synthetic_row(coded, 3)
    plain = Runner(model).run([row])[0].actions
    graphs = Graphs(model, replay=False, shapes=[model.shape_of([row.inputs])])
    assert np.array_equal(Runner(model, guidance=graphs.guidance, graphs=graphs).run([row])[0].actions, plain)


def test_guidance_needs_no_coded_operator() -> None:
    """The tape is of the expert's plain matrices; another head would be told."""
    coded, kept = options(), options(quant_keep=("expert.*",))
    noise = noise_of(coded)
    model, plain = (PiModel.from_state(given, weights(given)) for given in (coded, kept))
    prefix = model.prefix(inputs_of(coded))
    velocity, pull = model.velocity_vjp(prefix, noise, 0)
    assert torch.equal(velocity, plain.velocity(plain.prefix(inputs_of(kept)), noise, 0))
    assert 1e-3 < float((model.velocity(prefix, noise, 0) - velocity).norm() / velocity.norm()) < 0.05
    assert torch.isfinite(pull(torch.ones_like(velocity))).all()
    for op in ("gated_up_fp8", "stack_fp8"):
        with pytest.raises(EngineError, match=f"{op} has no backward"):
            getattr(Tape(REFERENCE).ops, op)(None)


# --- the expert ---


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_tokens_that_are_clean_are_not_coded(variant: str) -> None:
    coded = options(variant)
    model, noise = PiModel.from_state(coded, weights(coded)), noise_of(coded)
    prefix, clean = model.prefix(inputs_of(coded)), torch.zeros(4, coded.action_horizon, 1, dtype=torch.bool)
    clean[:, :2] = True
    found, own = model.velocity(prefix, noise, 1, clean), model.velocity(prefix, noise, 1)
    model.coded = ()
    assert torch.equal(model.velocity(prefix, noise, 1, clean), found)
    assert not torch.equal(model.velocity(prefix, noise, 1), own)


@pytest.mark.parametrize(
    "keep", [("expert.*",), ("expert.layers.1.down",), ("*.qkv",), ("*.layers.2.*",)], ids=lambda keep: keep[0]
)
def test_to_keep_any_of_the_expert_keeps_all(keep: tuple[str, ...]) -> None:
    coded = options(quant_keep=keep)
    model = PiModel.from_state(coded, weights(coded))
    assert not pi_coded.codes_expert(coded) and not model.coded
    assert model.ops.reasons["stack_fp8"].endswith("the expert is not coded, `quant_keep` keeps it")


def test_a_fused_form_runs_one_row_and_without_one_nothing_is_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def fused(x: Tensor, *rest: Any) -> Tensor:
        called.append(len(x))
        return reference.stack_fp8(x, *rest)

    coded = options(kernels="auto")
    plain = PiModel.from_state(coded, weights(coded))
    assert not plain.coded and plain.ops.reasons["stack_fp8"].endswith("the expert is not coded, no fused form of it")
    monkeypatch.setattr("phyai_engine.models.pi.load_ops", lambda *_, **__: Ops(stack_fp8=fused))
    model, inputs, noise = PiModel.from_state(coded, weights(coded)), inputs_of(coded), noise_of(coded)
    assert len(model.coded) == coded.depth
    assert torch.equal(velocities(model, inputs, noise), velocities(plain, inputs, noise)) and not called
    row = {name: tensor[:1] for name, tensor in inputs.items()}
    found, wanted = (velocities(m, row, noise[:1]) for m in (model, plain))
    assert called == [1] * coded.num_steps
    assert 1e-3 < float((found - wanted).norm() / wanted.norm()) < 0.05


def test_scales_that_say_nothing_of_the_expert_leave_it_as_it_is(tmp_path: Path) -> None:
    """A file from before it could be coded goes on serving; one of another expert does not."""
    path, plain = tmp_path / FILE, options(quant="none")
    model = PiModel.from_state(plain, weights(plain))
    scales = pi_coded.calibrate(model, [pi_coded.synthetic_row(plain, 0)], "one row")
    prefix = pi_coded.prefix_sites(plain)
    seen = {name: scales.seen[name] for name in prefix}
    save_scales(ActivationScales("earlier", weights_digest(model, prefix), seen), path)
    coded, other = options(quant_scales=str(path)), weights(plain)
    model = PiModel.from_state(coded, weights(coded))
    assert not model.coded and isinstance(model.get_submodule("language.layers.0.qkv"), CodedLinear)
    why = r"no activation scale of expert.layers.0.qkv \(earlier\): run `phyai calibrate` again"
    assert re.search(why, model.ops.reasons["stack_fp8"])
    for name in other:
        if "gemma_expert" in name and name.endswith("proj.weight"):
            other[name] = other[name] * 2
    assert not PiModel.from_state(coded, other).coded
    save_scales(scales, path)
    assert PiModel.from_state(coded, weights(coded)).coded
    with pytest.raises(ConfigError, match="belong to other weights"):
        PiModel.from_state(coded, other)
    save_scales(ActivationScales("of another model", "ab", {"layers.0": scales.seen["expert.layers.0.o"]}), path)
    with pytest.raises(ConfigError, match="belong to other weights"):
        PiModel.from_state(coded, other)
    wrong = {**scales.seen, "expert.layers.0.o": Seen(np.zeros(3, np.float32), 1.0)}
    save_scales(ActivationScales(scales.made, scales.weights, wrong), path)
    with pytest.raises(ConfigError, match=r"no activation scale of expert\.layers\.0\.o.*calibrate"):
        PiModel.from_state(coded, weights(coded))


def test_calibration_sees_what_the_coded_expert_multiplies() -> None:
    """Over all steps, before the norm is divided out."""
    plain = options(quant="none")
    model = PiModel.from_state(plain, weights(plain))
    row = pi_coded.synthetic_row(plain, 4)
    kept = model.ops, model.moved
    found = pi_coded.calibrate(model, [row], "one row").seen
    assert (model.ops, model.moved) == kept
    states: list[Tensor] = []
    prefix = model.prefix({name: model.to_device(array[None]) for name, array in row.inputs.items()})
    noise = model.to_device(standard_normal(row.seed, plain.action_horizon, plain.action_dim)[None])
    euler_flow(model, prefix, noise, model.spec.times, on_step=lambda step, x, _: states.append(x))
    scaled = [
        nn.functional.linear(x, model.action_in.weight, model.action_in.bias).bfloat16().float()
        * (1.0 + model.modulation[step, 0, 0])
        for step, x in enumerate(states)
    ]
    x = torch.stack(scaled).flatten(0, 2)
    centre, largest = found["expert.layers.0.qkv"]
    assert np.allclose(centre, x.mean(dim=0), atol=0.02)
    assert largest == pytest.approx(float((x - x.mean(dim=0)).abs().max()), rel=0.02)


# --- calibration ---


def test_calibration_sees_the_largest_operand_of_each_matrix() -> None:
    plain = options(quant="none")
    model = PiModel.from_state(plain, weights(plain))
    rows = [pi_coded.synthetic_row(plain, seed) for seed in range(2)]
    scales = pi_coded.calibrate(model, rows, "two rows")
    assert list(scales.seen) == sorted(pi_coded.every_site(plain)) and scales.made == "two rows"
    once = pi_coded.calibrate(model, rows[:1], "one row").seen
    seen: list[Tensor] = []
    model.ops = Ops(project_rotate=lambda x, *rest: (seen.append(x), reference.project_rotate(x, *rest))[1])
    Runner(model).run([rows[0]])
    centre, largest = once["language.layers.0.qkv"]
    x = seen[0].float().flatten(0, 1)
    assert np.allclose(centre, x.mean(dim=0), atol=1e-6)
    assert largest == float((x - torch.from_numpy(centre)).abs().max())
    both = scales.seen["language.layers.0.qkv"]
    assert not np.array_equal(both.centre, centre) and both.largest > 0.5 * largest


def test_scales_survive_the_file(tmp_path: Path) -> None:
    scales = ActivationScales("by hand", "ab", {"language.layers.0.qkv": Seen(np.arange(3, dtype=np.float32), 1.25)})
    save_scales(scales, tmp_path / FILE)
    again = load_scales(tmp_path / FILE, checkpoint="x")
    assert (again.made, again.weights, list(again.seen)) == ("by hand", "ab", ["language.layers.0.qkv"])
    assert again.seen["language.layers.0.qkv"].centre.tolist() == [0, 1, 2]
    assert again.seen["language.layers.0.qkv"].largest == 1.25
    with pytest.raises(ConfigError, match=r"Run `phyai calibrate some/folder`"):
        load_scales(tmp_path / "absent.npz", checkpoint="some/folder")
    whole = (tmp_path / FILE).read_bytes()
    for content in (b"", b"made: 3", whole[: len(whole) // 2]):
        (tmp_path / "wrong.npz").write_bytes(content)
        with pytest.raises(ConfigError, match="not a file of activation scales"):
            load_scales(tmp_path / "wrong.npz", checkpoint="x")
    np.savez(tmp_path / "other.npz", other=np.zeros(2))
    with pytest.raises(ConfigError, match="not a file of activation scales"):
        load_scales(tmp_path / "other.npz", checkpoint="x")
    with pytest.raises(ConfigError, match="cannot write the scales"):
        save_scales(scales, tmp_path / "absent" / FILE)


def test_scales_of_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    plain = options(quant="none")
    rows = [pi_coded.synthetic_row(plain, 0)]
    save_scales(pi_coded.calibrate(PiModel.from_state(plain, weights(plain)), rows, "one row"), path)
    coded = options(quant_scales=str(path))
    model = PiModel.from_state(coded, weights(coded))
    module = model.language.layers[0].get_submodule("qkv")
    assert isinstance(module, CodedLinear)
    largest = load_scales(path, checkpoint="x").seen["language.layers.0.qkv"].largest
    assert float(module.inverse) == pytest.approx(448 / (MARGIN * largest))
    with pytest.raises(ConfigError, match="belong to other weights"):
        PiModel.from_state(coded, weights(coded, seed=2))


def test_the_digest_is_of_the_weights() -> None:
    first, second = (nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 2)}) for _ in range(2))
    second.load_state_dict(first.state_dict())
    sites = {"a": Site(), "b": Site()}
    assert weights_digest(first, sites) == weights_digest(second, sites) != weights_digest(first, {"a": Site()})
    with torch.no_grad():
        second["b"].weight[0, 0] = 9.0
    assert weights_digest(first, sites) != weights_digest(second, sites)


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["calibrate", *(str(a) for a in arguments)], catch_exceptions=False)
    return result.exit_code, result.output


def test_the_command_writes_what_a_model_reads(tmp_path: Path) -> None:
    code, text = command("pi05_demo", "--robot", "arm7", "--n", 2)
    assert code == 2 and "--out" in text
    out = tmp_path / "scales.npz"
    code, text = command("pi05_demo", "--robot", "arm7", "--n", 2, "--out", out)
    assert code == 0 and "2 synthetic observations" in text
    content = yaml.safe_load(Path("config/models/pi05_demo.yaml").read_text(encoding="utf-8"))
    given = {"dtype": "bfloat16", "quant": "w8a8_fp8", "quant_scales": str(out), "kernels": "reference"}
    config = msgspec.convert(content | {"options": content["options"] | given}, ModelConfig)
    model = PiModel.load(config)
    assert isinstance(model.language.layers[0].get_submodule("down"), CodedLinear)
    code, text = command("fake", "--robot", "arm7", "--out", out)
    assert code == 2 and "no matrices to code" in text


# --- refusals ---


def test_every_scheme_can_be_asked_for() -> None:
    assert {"none", *SCHEMES} == set(get_args(get_type_hints(PiOptions)["quant"]))


def test_half_an_mlp_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"down is kept and gate_up is not.*Add language.layers.1.gate_up"):
        pi_coded.sites(options(quant_keep=("language.layers.1.down",)))


def test_rows_that_are_no_multiple_of_16_bytes_are_refused() -> None:
    coded = options(mlp=24)
    with pytest.raises(ConfigError, match=r"down cannot be coded.*24 inputs.*multiple of 16"):
        PiModel.from_state(coded, weights(coded))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float32"}, "quant needs dtype: bfloat16"),
        ({"quant": "w4a4"}, "w4a4"),
    ],
)
def test_options_that_contradict_are_refused(changes: dict[str, Any], said: str) -> None:
    given = {"quant": "w8a8_fp8", "quant_keep": [], "dtype": "bfloat16", **changes}
    with pytest.raises((msgspec.ValidationError, ValueError), match=said):
        msgspec.convert(given, PiOptions)


def test_a_device_without_such_products_is_refused() -> None:
    config = ModelConfig(family="pi05", device="cpu", options=msgspec.to_builtins(options(kernels="auto")))
    with pytest.raises(ConfigError, match=r"no e4m3 products.*w8a8_fp8 on cpu.*quant: none"):
        PiModel.load(config)
