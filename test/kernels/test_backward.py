"""The operators' backward against autograd through their definitions, and through a whole layer of them."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from phyai_kernels import backward, reference
from torch import Tensor

from phyai_engine.errors import EngineError
from phyai_engine.layers.ops import BACK, REFERENCE, Ops, OpShape, load_ops
from phyai_engine.layers.rotary import inverse_frequencies, rotary_table
from phyai_engine.layers.self_check import TOLERANCES
from phyai_engine.layers.tape import RULES, Arrived, Call, Tape, made

# On the way back autograd computes in a thread of its own, where torch says so once.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")

OPERATORS = [f.name for f in fields(Ops) if f.name != "reasons"]
# |error| over the largest value: autograd rounds elsewhere, and its bfloat16 twin is fp32.
# Arguments without a gradient that have the activation dtype too: weights and biases of products.
ACTIVATIONS = {"linear": (1, 2), "linear_gelu": (1, 2), "linear_norm": (1,), "gated_up": (1,), "layer_norm": (4,)}
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the test runs; the generator of random numbers is seeded."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.device(request.param)
    torch.set_float32_matmul_precision(precision)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def attention(place: torch.device, lengths: list[int] | None) -> tuple[Any, ...]:
    """Query, slabs with NaN beyond the lengths, lengths; the actions are the last 3 columns of each row."""
    query, keys, values = normal(2, 6, 3, 8), normal(2, 2, 20, 8), normal(2, 2, 20, 8)
    limit = None if lengths is None else torch.tensor(lengths)
    if limit is not None:
        beyond = torch.arange(20) >= limit[:, None]
        keys, values = (slab.masked_fill(beyond[:, None, :, None], float("nan")) for slab in (keys, values))
    return tuple(part if part is None else part.to(place) for part in (query, keys, values, limit))


def cases(op: str, place: torch.device) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Arguments, and which of them have a gradient."""
    found: dict[str, list[tuple[tuple[Any, ...], tuple[int, ...]]]] = {
        "linear": [((normal(2, 3, 7), normal(5, 7)), (0,)), ((normal(4, 7), normal(5, 7), normal(5)), (0,))],
        "gelu_mul": [((normal(3, 14) * 2,), (0,))],
        "rms_norm": [((normal(3, 9), normal(9)), (0,)), ((normal(3, 9), normal(9), normal(3, 9)), (0, 2))],
        "ada_rms_norm": [
            ((normal(3, 9), normal(9), normal(9)), (0,)),
            ((normal(3, 9), normal(9), normal(9), normal(3, 9), normal(9)), (0, 3)),
            ((normal(3, 9), normal(3, 9), normal(3, 9), normal(3, 9), normal(3, 9)), (0, 3)),  # a row per token
        ],
        "layer_norm": [
            ((normal(3, 9) + 2, normal(9), normal(9)), (0,)),
            ((normal(3, 9) + 2, normal(9), normal(9), normal(3, 9), normal(9)), (0, 3)),
        ],
        "linear_gelu": [((normal(2, 3, 7), normal(5, 7), normal(5)), (0,))],
        "linear_norm": [
            ((normal(3, 7), normal(9, 7), normal(3, 9), normal(9)), (0, 2)),
            ((normal(3, 7), normal(9, 7), normal(3, 9), normal(9), normal(9), normal(9)), (0, 2)),
        ],
        "gated_up": [((normal(3, 7), normal(10, 7)), (0,))],
    }
    return [(tuple(arg.to(place) for arg in args), places) for args, places in found[op]]


def cast(args: tuple[Any, ...], places: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The activations in the dtype."""
    return tuple(arg.to(dtype) if i in places else arg for i, arg in enumerate(args))


def tuple_of(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape and found.dtype == dtype
    error = (found.float() - wanted).abs().max()
    assert error <= ALLOWED[dtype] * wanted.abs().max(), f"off by {error} of {wanted.abs().max()}"


def gradients(op: str, args: Any, outputs: Any, grads: Any, ops: Ops = REFERENCE) -> dict[int, Tensor]:
    """What a rule yields, by the argument's identity; every product is made."""
    found = RULES[op](Arrived(ops, Call(op, args, outputs), grads), *args)
    return {id(tensor): made(ops, grad) for tensor, grad in found}


def test_every_operator_has_its_rule() -> None:
    """Those of coded matrices have none: no action head calls them. ``stack`` is made of the others."""
    called = {name for name in OPERATORS if not name.endswith(("_fp8", "_back"))} - {"stack"}
    assert set(RULES) == called
    assert all(getattr(REFERENCE, name) is getattr(backward, name) for name in BACK)


@pytest.mark.parametrize("dtype", ALLOWED, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "op", ["linear", "gelu_mul", "rms_norm", "ada_rms_norm", "layer_norm", "linear_gelu", "linear_norm", "gated_up"]
)
def test_it_is_the_gradient_of_the_reference(op: str, dtype: torch.dtype, place: torch.device) -> None:
    for drawn, places in cases(op, place):
        args = cast(drawn, (*places, *ACTIVATIONS.get(op, ())), dtype)
        outputs = tuple_of(getattr(reference, op)(*args))
        grads = tuple(torch.randn_like(output) for output in outputs)
        wide = tuple(
            arg.float().requires_grad_() if i in places else arg.float() if isinstance(arg, Tensor) else arg
            for i, arg in enumerate(args)
        )
        results = tuple_of(getattr(reference, op)(*wide))
        leaves = [wide[i] for i in places]
        wanted = torch.autograd.grad(results, leaves, [grad.float() for grad in grads])
        found = gradients(op, args, outputs, grads)
        assert len(found) == len(places)
        for i, expected in zip(places, wanted, strict=True):
            agree(found[id(args[i])], expected, dtype)


@pytest.mark.parametrize("op", ["rms_norm", "ada_rms_norm", "layer_norm", "linear_norm"])
def test_a_result_that_nothing_follows_adds_nothing(op: str, place: torch.device) -> None:
    args, _ = cases(op, place)[1]
    outputs = getattr(reference, op)(*args)
    grad = torch.randn_like(outputs[0])
    for given in ((grad, None), (None, grad)):
        filled = tuple(torch.zeros_like(grad) if part is None else part for part in given)
        ours, theirs = (gradients(op, args, outputs, grads) for grads in (given, filled))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[each], theirs[each]) for each in ours)


def test_silu(place: torch.device) -> None:
    x, grad = normal(3, 5).to(place).requires_grad_(), normal(3, 5).to(place)
    wanted = torch.autograd.grad(torch.nn.functional.silu(x), x, grad)[0]
    agree(backward.silu_back(grad, x.detach()), wanted, torch.float32)


@pytest.mark.parametrize("dtype", ALLOWED, ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[20, 9], [3, 12], None], ids=str)
def test_attention_gives_query_and_own_columns(lengths: Any, dtype: torch.dtype, place: torch.device) -> None:
    args = cast(attention(place, lengths), (0, 1, 2), dtype)
    query, keys, values, limit = args
    grad = torch.randn((2, 3, 48), device=place).to(dtype)
    start = torch.tensor([17, 17] if lengths is None else [n - 3 for n in lengths], device=place)
    found = backward.attend_back(grad, *args[:3], reference.attend(*args), limit, start, 3)
    wide = [part.float().nan_to_num().requires_grad_() for part in (query, keys, values)]
    wanted = torch.autograd.grad(reference.attend(*wide, limit), wide, grad.float())
    own = start[:, None] + torch.arange(3, device=place)
    at = own[:, None, :, None].expand(2, 2, 3, 8)
    agree(found[0], wanted[0], dtype)
    agree(found[1], wanted[1].gather(2, at), dtype)
    agree(found[2], wanted[2].gather(2, at), dtype)


@pytest.mark.parametrize("dtype", ALLOWED, ids=["fp32", "bf16"])
def test_rotation_is_turned_back(dtype: torch.dtype, place: torch.device) -> None:
    qkv, table, keys, values, start = rotation(place)
    qkv, keys, values = qkv.to(dtype), keys.to(dtype), values.to(dtype)
    grads = [torch.randn((2, n, 3, 8), device=place).to(dtype) for n in (4, 2, 2)]
    found = backward.split_rotate_back(*grads, table)
    wide = qkv.float().requires_grad_()
    slabs = [slab.float() for slab in (keys, values)]
    query = reference.split_rotate(wide, table, *slabs, start, 4)
    at = (start[:, None] + torch.arange(3, device=place))[:, None, :, None].expand(2, 2, 3, 8)
    outputs = (query, *(slab.gather(2, at) for slab in slabs))
    wanted = torch.autograd.grad(outputs, wide, [grad.float() for grad in grads])[0]
    agree(found, wanted, dtype)
    weight = normal(64, 10).to(place).to(dtype)
    args = (normal(2, 3, 10).to(place), weight, table, keys, values, start, 4)
    behind = gradients("project_rotate", args, (query, keys, values), tuple(grads))
    agree(behind[id(args[0])], wanted @ weight.float(), dtype)


def rotation(place: torch.device) -> tuple[Any, ...]:
    """qkv of 4 query and 2 K/V heads, table, two slabs, start."""
    start = torch.tensor([5, 11])
    table = rotary_table(start[:, None] + torch.arange(3), inverse_frequencies(8, 100.0))
    made = (normal(2, 3, 64), normal(2, 2, 14, 8), normal(2, 2, 14, 8), start)
    qkv, keys, values, start = (part.to(place) for part in made)
    return qkv, tuple(part.to(place) for part in table), keys, values, start


def layer(ops: Ops, x: Tensor, rest: tuple[Any, ...], weights: list[Tensor]) -> Tensor:
    """One layer as an expert has it: the residual stream is used twice."""
    table, keys, values, start, lengths = rest
    stream, normed = ops.ada_rms_norm(x, weights[0], weights[1])
    query = ops.project_rotate(normed, weights[2], table, keys, values, start, 4)
    attended = ops.attend(query, keys, values, lengths)
    stream, normed = ops.linear_norm(attended, weights[3], stream, weights[0], weights[1], weights[4])
    inner = ops.gated_up(normed, weights[5])
    return ops.linear_norm(inner, weights[6], stream, weights[1])[1]


def unfused_layer(ops: Ops, x: Tensor, rest: tuple[Any, ...], weights: list[Tensor]) -> Tensor:
    """The same of smaller operators: the next norm adds the last output."""
    table, keys, values, start, lengths = rest
    stream, normed = ops.ada_rms_norm(x, weights[0], weights[1])
    query = ops.split_rotate(ops.linear(normed, weights[2]), table, keys, values, start, 4)
    out = ops.linear(ops.attend(query, keys, values, lengths), weights[3])
    stream, normed = ops.ada_rms_norm(stream, weights[0], weights[1], out, weights[4])
    out = ops.linear(ops.gelu_mul(ops.linear(normed, weights[5])), weights[6])
    return ops.rms_norm(stream, weights[1], out)[1]


def layer_arguments(place: torch.device) -> tuple[Tensor, tuple[Any, ...], list[Tensor]]:
    _, table, keys, values, start = rotation(place)
    shapes = [(10,), (10,), (64, 10), (10, 32), (10,), (24, 10), (10, 12)]
    weights = [torch.randn(shape).to(place) * 0.5 for shape in shapes]
    return normal(2, 3, 10).to(place), (table, keys, values, start, start + 3), weights


@pytest.mark.parametrize("form", [layer, unfused_layer])
def test_a_layer_through_the_tape(place: torch.device, form: Callable[..., Tensor]) -> None:
    x, rest, weights = layer_arguments(place)
    tape = Tape(REFERENCE)
    y = form(tape.ops, x, rest, weights)
    grad = torch.randn_like(y)
    leaf = x.clone().requires_grad_()
    table, keys, values, start, lengths = rest
    wanted = torch.autograd.grad(
        layer(REFERENCE, leaf, (table, keys.clone(), values.clone(), start, lengths), weights), leaf, grad
    )[0]
    agree(tape.pull(y, grad, x), wanted, torch.float32)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton's interpreter runs from now on."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    run, names = executor.__call__, list[str]()
    monkeypatch.setattr(
        executor, "__call__", lambda self, *a, **k: (names.append(self.fn.__name__), run(self, *a, **k))
    )
    return names


def test_the_tape_through_fused_forms(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fused form returns is what its rule takes, and what fused forms of the way back take."""
    x, rest, weights = layer_arguments(device)
    sizes = {"ada_rms_norm": [(6, 10)], "project_rotate": [(2, 3, 10, 4, 2, 8, 14)], "attend": [(2, 4, 2, 3, 14, 8)]}
    sizes |= {"linear_norm": [(6, 32, 10), (6, 12, 10)], "gated_up": [(6, 10, 12)]}
    sizes |= {"norm_back": [(6, 10, 24), (6, 10, 64), (6, 10, 10)], "gated_up_back": [(6, 10, 12)]}
    sizes |= {"linear_back": [(6, 32, 10)], "attend_back": [(2, 4, 2, 3, 14, 8)]}
    sizes |= {"split_rotate_back": [(2, 3, 4, 2, 8)]}
    shapes = [OpShape(op, torch.float32, dims) for op, each in sizes.items() for dims in each]
    bound = load_ops("triton", device=device, shapes=shapes)
    for op in sizes:
        assert getattr(bound, op).__module__ == f"phyai_kernels.{op}", bound.reasons[op]
    grad, tapes = torch.randn_like(x), [Tape(ops) for ops in (bound, REFERENCE)]
    results = [layer(tape.ops, x, rest, weights) for tape in tapes]
    launched = launches(monkeypatch) if device.type == "cpu" else []
    found = [tape.pull(of, grad, x) for tape, of in zip(tapes, results, strict=True)]
    if launched:
        assert len(launched) == 10 + 1, f"ten a layer, and the norm behind the last: {launched}"
    assert (found[0] - found[1]).abs().max() <= TOLERANCES[torch.float32] * found[1].abs().max()


def test_keys_that_nothing_here_wrote_are_constants(place: torch.device) -> None:
    query, keys, values, lengths = attention(place, None)
    tape = Tape(REFERENCE)
    grad = torch.randn((2, 3, 48), device=place)
    found = tape.pull(tape.ops.attend(query, keys, values, lengths), grad, query)
    leaf = query.clone().requires_grad_()
    wanted = torch.autograd.grad(reference.attend(leaf, keys, values, lengths), leaf, grad)[0]
    agree(found, wanted, torch.float32)


def test_a_tape_that_nobody_needs_lets_go_of_its_tensors(place: torch.device) -> None:
    """At once, not when the collector comes: a captured step would keep its memory from the next one."""
    gc.disable()
    try:
        tape = Tape(REFERENCE)
        kept = weakref.ref(tape.ops.linear(torch.ones(1, 2, device=place), torch.ones(3, 2, device=place)))
        assert kept() is not None
        del tape
        assert kept() is None
    finally:
        gc.enable()


def test_a_call_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "linear")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="operator linear has no backward"):
        Tape(REFERENCE).ops.linear(torch.ones(1, 2), torch.ones(3, 2))


@pytest.mark.gpu
def test_the_backward_is_captured(place: torch.device) -> None:
    """Forward and backward of a layer in one CUDA graph: a replay follows its inputs."""
    if place.type == "cpu":
        pytest.skip("graphs are CUDA's")
    x, rest, weights = layer_arguments(place)
    grad = torch.randn((2, 3, 10), device=place)

    def run() -> Tensor:
        tape = Tape(REFERENCE)
        return tape.pull(layer(tape.ops, x, rest, weights), grad, x)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        x.normal_()
        grad.normal_()
        graph.replay()
        assert torch.equal(captured, run())
