"""The operator selector: what is bound, and the sentence for each reason that speaks against a kernel."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from phyai_kernels import reference

from phyai_engine.errors import EngineError
from phyai_engine.layers import ops
from phyai_engine.layers.ops import Ops, OpShape, load_ops
from phyai_engine.layers.self_check import TOLERANCES, definition, largest_error

KERNELS = Path(reference.__file__).resolve().parent
OPERATORS = [f.name for f in fields(Ops) if f.name != "reasons"]
CPU = torch.device("cpu")
# One small call of each; linear also with more rows than its kernel takes.
SHAPES = [
    OpShape("rms_norm", torch.float32, (3, 40)),
    OpShape("ada_rms_norm", torch.bfloat16, (3, 40)),
    OpShape("layer_norm", torch.float32, (3, 40)),
    OpShape("gelu_mul", torch.bfloat16, (3, 24)),
    OpShape("linear", torch.float32, (3, 40, 24)),
    OpShape("linear", torch.bfloat16, (70, 40, 24)),
    OpShape("linear_gelu", torch.bfloat16, (3, 40, 24)),
    OpShape("linear_norm", torch.float32, (3, 40, 24)),
    OpShape("gated_up", torch.bfloat16, (3, 40, 24)),
    OpShape("project_rotate", torch.float32, (2, 3, 40, 4, 1, 16, 9)),
    OpShape("split_rotate", torch.bfloat16, (2, 3, 4, 1, 16, 9)),
    OpShape("attend", torch.float32, (2, 4, 1, 3, 20, 16)),
    OpShape("stack", torch.float32, (2, 3, 40, 24, 4, 1, 16, 9)),
    OpShape("stack_fp8", torch.bfloat16, (2, 3, 48, 32, 4, 1, 16, 9)),
    OpShape("rms_norm_fp8", torch.bfloat16, (3, 40)),
    OpShape("linear_norm_fp8", torch.bfloat16, (3, 48, 24)),
    OpShape("gated_up_fp8", torch.bfloat16, (3, 48, 24)),
    OpShape("project_rotate_fp8", torch.bfloat16, (2, 3, 48, 4, 1, 16, 9)),
    OpShape("attend_fp8", torch.bfloat16, (2, 4, 1, 3, 20, 16)),
    OpShape("linear_back", torch.bfloat16, (3, 24, 40)),
    OpShape("norm_back", torch.float32, (3, 24, 40)),
    OpShape("gated_up_back", torch.bfloat16, (3, 24, 40)),
    OpShape("split_rotate_back", torch.float32, (2, 3, 4, 1, 16)),
    OpShape("attend_back", torch.bfloat16, (2, 4, 1, 3, 20, 16)),
]
IN_TRITON = [op for op in OPERATORS if "triton" in ops.CANDIDATES[op]]


def candidate(monkeypatch: pytest.MonkeyPatch, op: str, function: Any) -> None:
    """Make a function the only candidate of an operator."""
    module = ModuleType("phyai_kernels.candidate")
    setattr(module, op, function)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(ops.CANDIDATES, op, {"triton": module.__name__})


def choice(op: str, kind: Any = "triton", device: torch.device = CPU) -> tuple[Any, str]:
    """What is bound for one operator, and why."""
    bound = load_ops(kind, device=device, shapes=SHAPES)
    return getattr(bound, op), bound.reasons[op]


def test_operators_references_kernels_and_tables_are_the_same_set() -> None:
    shared = {"reference", "backward", "tiles", "products", "products_fp8", "hopper", "wgmma", "stack_layers"}
    libraries = ("flashinfer", "cuda")  # a second form of an operator is named for both
    files = {path.stem for path in KERNELS.glob("*.py")} - shared
    own = {file for file in files if not file.startswith(libraries)}
    assert own <= set(OPERATORS), "a kernel file without a field of Ops"
    named = {module.removeprefix("phyai_kernels.") for kinds in ops.CANDIDATES.values() for module in kinds.values()}
    assert named == files
    assert set(ops.CANDIDATES) == set(ops.DIMS) == set(OPERATORS)
    for op in OPERATORS:
        assert getattr(Ops(), op) is definition(op), f"{op} has no reference"
        own = "stack" if op == "stack_fp8" else op  # made of the same pieces
        for kind, module in ops.CANDIDATES[op].items():
            assert module in (f"phyai_kernels.{own}", f"phyai_kernels.{kind}_{own}")


def test_every_operator_is_bound_on_its_device(device: torch.device) -> None:
    kind: Any = "triton" if device.type == "cpu" else "auto"
    bound = load_ops(kind, device=device, shapes=SHAPES)
    for op in IN_TRITON:
        assert getattr(bound, op).__module__ == f"phyai_kernels.{op}", bound.reasons[op]
        assert bound.reasons[op].startswith("triton, equals the reference at")
    assert "at 2 shapes" in bound.reasons["linear"]


def test_what_has_no_such_form_is_the_other_operators() -> None:
    for op in ("stack", "stack_fp8"):
        assert choice(op) == (definition(op), "reference, it has no triton form")


@pytest.mark.parametrize("op", OPERATORS)
def test_without_an_accelerator_auto_is_the_reference(op: str) -> None:
    assert choice(op, "auto") == (
        definition(op),
        "reference, no accelerator: the reference runs through torch's own kernels",
    )


def test_the_reference_can_be_asked_for() -> None:
    assert choice("attend", "reference") == (reference.attend, "reference, as asked for")


def test_what_the_model_does_not_call_is_not_tried() -> None:
    bound = load_ops("triton", device=CPU, shapes=[])
    assert bound.linear is reference.linear
    assert bound.reasons["linear"] == "reference, this model does not call it"


def test_a_wrong_result_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate(monkeypatch, "linear", lambda x, weight, bias=None: reference.linear(x, weight, bias) * 1.1)
    bound, why = choice("linear")
    assert bound is reference.linear
    assert "is wrong at rows 3, inputs 40, outputs 24, float32: error 1" in why and "allowed 2e-05" in why


def test_one_wrong_shape_of_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_for_many(x: Any, weight: Any, bias: Any = None) -> Any:
        return reference.linear(x, weight, bias) * (1 if len(x) < 64 else 0)

    candidate(monkeypatch, "linear", wrong_for_many)
    bound, why = choice("linear")
    assert bound is reference.linear
    assert "is wrong at rows 70" in why


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("gelu_mul", lambda gate_up: reference.gelu_mul(gate_up) * float("nan")),
        ("gelu_mul", lambda gate_up: reference.gelu_mul(gate_up).float()),
        ("gelu_mul", lambda gate_up: reference.gelu_mul(gate_up)[:1]),
        ("rms_norm", lambda x, weight, out=None: reference.rms_norm(x, weight)),
        ("attend", lambda q, k, v, lengths=None: reference.attend(q, k.nan_to_num(), v.nan_to_num())),
        ("attend", lambda q, k, v, lengths=None: reference.attend(q, k, v, None if lengths is None else lengths - 1)),
        ("split_rotate", lambda qkv, table, k, v, start, heads: reference.split_rotate(qkv, table, k, k, start, heads)),
    ],
    ids=["NaN", "dtype", "size", "no residual", "no lengths", "last column lost", "values not written"],
)
def test_the_self_check_finds(monkeypatch: pytest.MonkeyPatch, op: str, spoil: Any) -> None:
    candidate(monkeypatch, op, spoil)
    bound, why = choice(op)
    assert bound is definition(op)
    assert "is wrong at" in why


@pytest.mark.parametrize(
    ("op", "dims", "spoil"),
    [
        ("linear", (3, 16384, 8), lambda x, w, b=None: reference.linear(x[:, :-1], w[:, :-1], b)),
        (
            "attend",
            (1, 2, 1, 3, 1018, 16),
            lambda q, k, v, n=None: reference.attend(q, k, v, n if n is None else n - 1),
        ),
    ],
)
def test_losing_the_last_of_many_does_not_pass_as_rounding(op: str, dims: tuple[int, ...], spoil: Any) -> None:
    assert largest_error(op, torch.bfloat16, dims, getattr(reference, op), CPU) < TOLERANCES[torch.bfloat16] / 2
    assert largest_error(op, torch.bfloat16, dims, spoil, CPU) > 2 * TOLERANCES[torch.bfloat16]


def written_nowhere(qkv: Any, table: Any, k: Any, v: Any, start: Any, heads: int) -> Any:
    return reference.split_rotate(qkv, table, k.clone(), v.clone(), start, heads)


def not_without_queries(qkv: Any, table: Any, k: Any, v: Any, start: Any, heads: int) -> Any:
    return (reference.split_rotate if heads else written_nowhere)(qkv, table, k, v, start, heads)


def blind_to_strides(q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
    packed = (
        torch.empty(t.shape, dtype=t.dtype).copy_(t) if t.is_contiguous() else t.transpose(1, 2).view(t.shape)
        for t in (q, k, v)
    )
    return reference.attend(*packed, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("op", "dims", "spoil"),
    [
        ("split_rotate", (2, 3, 4, 1, 16, 9), written_nowhere),
        ("split_rotate", (2, 3, 4, 1, 16, 9), not_without_queries),
        ("attend", (2, 4, 4, 5, 5, 16), blind_to_strides),
    ],
)
def test_the_self_check_calls_as_the_model_does(op: str, dims: Any, spoil: Any, dtype: torch.dtype) -> None:
    """K and V of a last layer, without queries; views of a merged projection; a slab that nobody filled before."""
    assert largest_error(op, dtype, dims, getattr(reference, op), CPU) <= TOLERANCES[dtype]
    assert largest_error(op, dtype, dims, spoil, CPU) > 10 * TOLERANCES[dtype]


def test_what_varies_between_requests_compiles_nothing_new() -> None:
    """Triton compiles again where a specialized number becomes 1 or a multiple of 16: seconds, in a moving robot."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = """
import importlib
names = ("attend", "split_rotate", "linear", "linear_norm", "gated_up", "project_rotate", "project_rotate_fp8")
back = ("linear_back", "norm_back", "gated_up_back", "split_rotate_back", "attend_back")
for name in (*names, *back, "products_fp8"):
    module = importlib.import_module(f"phyai_kernels.{name}")
    for kernel in (kernel for kernel in vars(module).values() if hasattr(kernel, "params")):
        varying = {"columns", "queries", "spans", "tokens", "rows", "count", "tiles"}
        print(kernel.__name__, *(p.name for p in kernel.params if p.name in varying and not p.do_not_specialize))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    kernels = [line.split() for line in done.stdout.splitlines()]
    names = {"_add_spans", "_attend", "_linear", "_merge", "_split_rotate", "_add_norm", "_gated_up", "_project_rotate"}
    names |= {"_product_fp8", "_project_rotate_fp8", "_linear_back", "_norm_back", "_gated_up_back"}
    names |= {"_split_rotate_back", "_pull_queries", "_pull_columns", "_merge_back"}
    assert {name for name, *_ in kernels} >= names
    # Called by kernels, never launched: their arguments are what the caller has.
    inner = {"_sum_columns", "product", "sum_tile", "product_back", "_places"}
    wrong = [kernel for kernel in kernels if len(kernel) > 1 and kernel[0] not in inner]
    assert not wrong, "a varying number is specialized"


def test_a_kernel_that_raises_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory\n" + "line of the kernel\n" * 99)

    candidate(monkeypatch, "gelu_mul", fails)
    bound, why = choice("gelu_mul")
    assert bound is reference.gelu_mul
    assert why == "reference, triton: fails at rows 3, width 24, bfloat16: RuntimeError: out of resource: shared memory"


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gelu_mul", "tiles"):
        monkeypatch.delitem(sys.modules, f"phyai_kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    bound, why = choice("gelu_mul")
    assert bound is reference.gelu_mul
    assert "cannot be imported: ModuleNotFoundError" in why and "triton" in why


def test_outside_the_interpreter_a_cpu_has_no_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("phyai_kernels.tiles"), "INTERPRETED", False)
    bound, why = choice("gelu_mul")
    assert bound is reference.gelu_mul
    assert "TRITON_INTERPRET=1" in why


def test_the_interpreter_is_not_for_auto(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("phyai_kernels.tiles"), "INTERPRETED", True)
    _, why = choice("linear", "auto", torch.device("cuda"))
    assert why.startswith("reference, triton: runs in its interpreter in this process, which is for tests only; by ")


def test_what_is_asked_must_exist() -> None:
    with pytest.raises(EngineError, match="wanted one of auto, triton, flashinfer, reference"):
        load_ops("fast", device=CPU, shapes=[])
    with pytest.raises(EngineError, match="unknown operator"):
        OpShape("matmul", torch.float32, (1,))
    with pytest.raises(EngineError, match="rows, inputs, outputs"):
        OpShape("linear", torch.float32, (1, 2))
    with pytest.raises(EngineError, match="each >= 1"):
        OpShape("rms_norm", torch.float32, (1, 0))
    with pytest.raises(EngineError, match="float64"):
        OpShape("rms_norm", torch.float64, (1, 2))


def test_flashinfer_is_a_candidate_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "phyai_kernels.flashinfer_gelu_mul", raising=False)
    bound, why = choice("gelu_mul", "flashinfer")
    assert bound is reference.gelu_mul
    assert why.startswith("reference, flashinfer: cannot be imported: ModuleNotFoundError")
    assert choice("attend", "flashinfer") == (reference.attend, "reference, it has no flashinfer form")


@pytest.mark.parametrize("name", ["rms_norm", "gelu_mul"])
def test_flashinfer_is_called_as_its_functions_want_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With what stands for FlashInfer and does as its documentation says: writing over its arguments, 2 dimensions."""

    def added(out: Any, stream: Any, weight: Any, eps: float) -> None:
        assert out.dim() == stream.dim() == 2 and weight.dtype == out.dtype and eps == reference.EPS
        stream += out
        out.copy_(reference.rms_norm(stream, weight.float())[1])

    norm = SimpleNamespace(
        gemma_rmsnorm=lambda x, weight, eps: reference.rms_norm(x, weight.float())[1], gemma_fused_add_rmsnorm=added
    )
    package = SimpleNamespace(norm=norm, activation=SimpleNamespace(gelu_tanh_and_mul=reference.gelu_mul))
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.delitem(sys.modules, f"phyai_kernels.flashinfer_{name}", raising=False)
    function = getattr(importlib.import_module(f"phyai_kernels.flashinfer_{name}"), name)
    assert largest_error(name, torch.bfloat16, (3, 40), function, CPU) <= TOLERANCES[torch.bfloat16]
    with pytest.raises(ValueError, match="no kernel for"):
        largest_error(name, torch.float32, (3, 40), function, CPU)


@pytest.mark.gpu
def test_kernels_replay_in_a_graph(device: torch.device) -> None:
    """What varies between requests is read from device memory: a replay follows it."""
    if device.type == "cpu":
        pytest.skip("graphs are CUDA's")
    bound = load_ops("auto", device=device, shapes=SHAPES)
    qkv, angles = torch.randn((2, 3, 96), device=device), torch.randn((2, 3, 8), device=device)
    slabs = torch.zeros((2, 2, 1, 300, 16), device=device)
    start, weight = torch.zeros(2, dtype=torch.int64, device=device), torch.randn((24, 64), device=device)
    norm = torch.randn(24, device=device)

    def step(chosen: Ops) -> torch.Tensor:
        query = chosen.split_rotate(qkv, (angles.cos(), angles.sin()), slabs[0], slabs[1], start, 4)
        mixed = chosen.linear(chosen.attend(query, slabs[0], slabs[1], start + 3), weight)
        stream, normed = chosen.rms_norm(mixed, norm)
        return chosen.gelu_mul(chosen.ada_rms_norm(stream, norm, norm, normed, norm)[1])

    with torch.no_grad():
        step(bound)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step(bound)
        for column in (0, 77, 280):
            start.copy_(torch.tensor([column, column // 2], device=device))
            slabs.normal_()
            kept = slabs.clone()
            graph.replay()
            found = result.clone()
            slabs.copy_(kept)
            torch.testing.assert_close(found, step(ops.REFERENCE), rtol=1e-4, atol=1e-4)
