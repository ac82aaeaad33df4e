"""stack: the expert's layers on Hopper. What it computes is checked everywhere, its kernels with ``-m gpu``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from phyai_kernels import reference
from phyai_kernels.reference import LayerWeights

from phyai_engine.layers.ops import OpShape
from phyai_engine.layers.self_check import cases, largest_error, map_tensors
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.trial import attempt

SMALL: dict[str, Any] = {
    "vocab": 64, "vis_width": 16, "vis_depth": 1, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 3, "mlp": 64,
    "heads": 4, "kv_heads": 1, "head_dim": 8, "exp_width": 24, "exp_mlp": 48, "action_dim": 5, "action_horizon": 8,
    "num_steps": 3, "prompt_len": 9, "image_size": 20, "patch": 4, "cameras": ("base",),
}  # fmt: skip
# batch, tokens, width, inner, heads, kv_heads, head_dim, columns
EXPERT = (1, 50, 1024, 4096, 8, 1, 256)


# --- what the kernels compute, in plain torch ---


late_stack = functools.partial(reference.late_stack, torch.nn.functional.linear)


def test_norms_behind_their_products_are_the_same_mathematics() -> None:
    dims = (2, 7, 24, 48, 4, 2, 8, 20)
    assert largest_error("stack", torch.float32, dims, late_stack, torch.device("cpu")) < 3e-6


def test_a_shift_that_nobody_moved_is_refused() -> None:
    x, weights, norms, *rest = list(cases("stack", torch.float32, (1, 2, 24, 48, 4, 2, 8, 20), torch.device("cpu")))[1]
    with pytest.raises(ValueError, match="nobody made"):
        late_stack(x, weights, [norm._replace(moved=None) for norm in norms], *rest)


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_a_model_makes_what_shifts_become(variant: str) -> None:
    model = PiModel.random(PiOptions(variant=variant, **SMALL), seed=0)  # type: ignore[arg-type]
    noise = torch.randn(1, 8, 5, generator=torch.Generator().manual_seed(1))
    inputs = {
        "images": torch.rand(1, 1, 3, 20, 20) * 2 - 1,
        "image_mask": torch.ones(1, 1, dtype=torch.bool),
        "tokens": torch.arange(9)[None],
        "token_mask": torch.ones(1, 9, dtype=torch.bool),
        "state": torch.rand(1, 5),
    }
    prefix = model.prefix(inputs)
    wanted = [model.velocity(prefix, noise, step) for step in range(3)]
    model.ops = dataclasses.replace(model.ops, stack=late_stack)
    if variant == "pi05":
        model.moved = model.moved_shifts()
    for step, expected in enumerate(wanted):
        assert (model.velocity(prefix, noise, step) - expected).norm() <= 1e-5 * expected.norm()


def test_a_tape_keeps_the_calls_that_it_is_made_of() -> None:
    """A gradient needs every operator, so the fused form is left out, wherever it is bound."""
    tape = importlib.import_module("phyai_engine.layers.tape").Tape(
        dataclasses.replace(importlib.import_module("phyai_engine.layers.ops").Ops(), stack=late_stack)
    )
    assert tape.ops.stack is reference.stack


# --- the kernels ---


@pytest.fixture(scope="module")
def compiler() -> Any:
    """hopper.py, where its compiler is installed."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("cuda") is None:
        pytest.skip("needs Triton and cuda-bindings")
    hopper = importlib.import_module("phyai_kernels.hopper")
    try:
        hopper.nvrtc.nvrtcVersion()
    except Exception as failure:
        pytest.skip(f"needs NVRTC: {failure}")
    return hopper


def test_the_kernels_compile(compiler: Any) -> None:
    stack = importlib.import_module("phyai_kernels.stack")
    found = list(
        {**stack.expressions(1024, 4096, 2048, 64, stack.MEASURED), **stack.end_expressions(32, 1024)}.values()
    )
    found += {
        **stack.expressions(1024, 4096, 2048, 56, stack.MEASURED_FP8, 1),
        **stack.end_expressions(32, 1024, 1),
    }.values()
    for name, instructions in found:
        binary, lowered = compiler.compile_source(stack.source(instructions), name)
        assert binary[:4] == b"\x7fELF" and lowered in binary


def test_the_compilers_words_are_in_the_error(compiler: Any) -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC refuses nothing<3>: kernels\.cu\(1\): error"):
        compiler.compile_source("int here;", "nothing<3>")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1018, 867, 834, 131])
@pytest.mark.parametrize("tokens", [50, 64, 1])
def test_it_is_the_reference(cuda: torch.device, tokens: int, columns: int) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack
    dims = (1, tokens, *EXPERT[2:], columns)
    assert largest_error("stack", torch.bfloat16, dims, fused, cuda) <= 1.6e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "columns"), [(50, 1018), (50, 867), (50, 131), (64, 1018), (64, 131), (1, 867), (1, 2)]
)
def test_coded_layers_are_the_definition(cuda: torch.device, tokens: int, columns: int) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack_fp8
    dims = (1, tokens, *EXPERT[2:], columns)
    assert largest_error("stack_fp8", torch.bfloat16, dims, fused, cuda) <= 1.6e-2
    args = list(cases("stack_fp8", torch.bfloat16, dims, cuda))[-1]
    first, *others = (fused(*map_tensors(args, torch.clone)) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_coded_layers_that_have_no_kernel_are_refused(cuda: torch.device) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack_fp8
    for dims in ((2, 40, *EXPERT[2:], 300), (1, 50, *EXPERT[2:], 1100)):
        with pytest.raises(ValueError, match="at most 64 rows and 1024 columns have a kernel"):
            fused(*next(cases("stack_fp8", torch.bfloat16, dims, cuda)))


@pytest.mark.gpu
def test_two_rows_of_the_batch_have_their_own_lengths(cuda: torch.device) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack
    assert largest_error("stack", torch.bfloat16, (2, 25, *EXPERT[2:], 300), fused, cuda) <= 1.6e-2
    assert largest_error("stack", torch.bfloat16, (1, 25, 1024, 4096, 8, 2, 256, 300), fused, cuda) <= 1.6e-2


@pytest.mark.gpu
def test_runs_do_not_differ_and_nothing_beyond_a_length_is_seen(cuda: torch.device) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack
    args = list(cases("stack", torch.bfloat16, (*EXPERT, 1018), cuda))[-1]
    results = []
    for poison in (float("nan"), 1e30, 0.0):
        x, weights, norms, keys, values, start, lengths, *rest = args
        keys, values = keys.clone(), values.clone()
        for slab in (keys, values):
            slab[:, :, :, int(start) :] = poison
        results.append(fused(x, weights, norms, keys, values, start, lengths, *rest))
        assert results[-1].isfinite().all()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.gpu
def test_it_can_be_timed_and_judged(cuda: torch.device) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack
    shape = OpShape("stack", torch.bfloat16, (*EXPERT, 300))
    trials = [
        attempt(shape, kind, lambda form=form: form, cuda) for kind, form in (("a", fused), ("b", reference.stack))
    ]
    assert all(trial.us is not None for trial in trials), trials


@pytest.mark.gpu
def test_what_it_does_not_take_goes_to_the_other_operators_or_is_refused(cuda: torch.device) -> None:
    fused = importlib.import_module("phyai_kernels.stack").stack
    args = list(cases("stack", torch.bfloat16, (2, 40, *EXPERT[2:], 300), cuda))[-1]
    called = []
    names = ("ada_rms_norm", "project_rotate", "attend", "linear_norm", "gated_up", "linear")
    ops = SimpleNamespace(**{name: _noted(called, name) for name in names})
    fused(*args[:9], ops, args[-1])
    assert set(called) == set(names)
    few = list(cases("stack", torch.bfloat16, (*EXPERT, 300), cuda))[-1]
    x, weights, norms, *rest = few
    with pytest.raises(ValueError, match=r"Norm\.moved"):
        fused(x, weights, [norm._replace(moved=None) for norm in norms], *rest)
    with pytest.raises(ValueError, match=r"no kernel for torch\.float32"):
        fused(x.float(), [LayerWeights(*(m.float() for m in layer)) for layer in weights], norms, *rest)


def _noted(called: list[str], name: str) -> Any:
    def call(*args: Any) -> Any:
        called.append(name)
        return getattr(reference, name)(*args)

    return call
