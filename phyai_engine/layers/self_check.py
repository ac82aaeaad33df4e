"""What a fused operator must show before it is bound: the reference's values, on seeded inputs of the model's shapes.

The expected values are the reference's in float32, so that the error is the candidate's own rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from phyai_kernels import backward, reference
from phyai_kernels.reference import CodedLayer, CodedMatrix, Ends, LayerWeights, Norm
from torch import Tensor

# Allowed |error| as a part of the largest expected value. bfloat16 rounds to 2**-9 of a value, and again where the
# reference rounds an intermediate; float32 leaves another order of long sums (16384 products in the widest projection).
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
# Eight bits round to 2**-4 of a value, and another rounding before them moves one value in thirty by a whole step:
# their error is that of all values together, |candidate - reference| over |reference|, 1.3e-2 where all is well. Of a
# stack, which codes inside, it is 1.2e-2; a bias or the last input that one product of its eight loses make it 5e-2,
# shifts that all of them lose 3e-2. As a part of the other tolerance, so that there is one error to compare.
_CODED, _CODES_INSIDE = TOLERANCES[torch.bfloat16] / 4e-2, TOLERANCES[torch.bfloat16] / 2.5e-2


def definition(op: str) -> Callable[..., Any]:
    """The reference of an operator."""
    found: Callable[..., Any] = getattr(backward if op.endswith("_back") else reference, op)
    return found


def largest_error(
    op: str, dtype: torch.dtype, dims: Sequence[int], candidate: Callable[..., Any], device: torch.device, seed: int = 0
) -> float:
    """Largest |candidate - reference| over all results, as a part of the largest |reference|; infinite for a NaN.

    :param dims: sizes, as OpShape has them. :param seed: of the inputs.
    :raises Exception: whatever the candidate raises.
    """
    worst = 0.0
    with torch.no_grad():
        for args in cases(op, dtype, dims, device, seed):
            wanted = _results(op, definition(op), map_tensors(args, widen))
            found = _results(op, candidate, map_tensors(args, torch.clone))
            for i, (value, expected) in enumerate(zip(found, wanted, strict=True)):
                wide = i == 0 and isinstance(args[-1], Ends)  # what leaves the stack is float32
                wanted_dtype = expected.dtype if wide or expected.dtype == reference.FP8 else dtype
                if value.shape != expected.shape or value.dtype != wanted_dtype:
                    return float("inf")
                if not expected.numel():  # no query heads
                    continue
                worst = max(worst, _error(op, value, expected.float()))
    return worst


def _error(op: str, value: Tensor, expected: Tensor) -> float:
    apart = (value.float() - expected).nan_to_num(nan=float("inf"))
    if value.dtype == reference.FP8 or op == "stack_fp8":
        allowed = _CODES_INSIDE if op == "stack_fp8" else _CODED
        return float(apart.norm() / expected.norm()) * allowed
    return float(apart.abs().max() / expected.abs().max())


def cases(
    op: str, dtype: torch.dtype, dims: Sequence[int], device: torch.device, seed: int = 0
) -> Iterator[tuple[Any, ...]]:
    """Seeded arguments of the operator, as a model calls it."""
    return _CASES[op](_Draw(torch.Generator(device).manual_seed(seed), dtype), *dims)


class _Draw:
    """Seeded normal values. ``x`` has the activation dtype, ``wide`` is float32."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        self.generator, self.dtype, self.device = generator, dtype, generator.device

    def x(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.wide(*shape, scale=scale).to(self.dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def coded(self, *shape: int) -> Tensor:
        """Within the range and with its largest value, 448."""
        return (self.wide(*shape) * 100).clamp(-448, 448).to(reference.FP8)

    def columns(self, batch: int, low: int, high: int) -> Tensor:
        """[batch] int64 in [low, high]."""
        return torch.randint(low, high + 1, (batch,), generator=self.generator, device=self.device)


def _rms_norm(draw: _Draw, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x, weight = draw.x(rows, width), draw.wide(width)
    yield x, weight
    yield x, weight, draw.x(rows, width)


def _ada_rms_norm(draw: _Draw, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x, scale, shift = draw.x(rows, width), draw.wide(width), draw.wide(width)
    yield x, scale, shift
    yield x, scale, shift, draw.x(rows, width), draw.wide(width)


def _layer_norm(draw: _Draw, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    x, weight, bias = draw.x(rows, width), draw.wide(width), draw.wide(width)
    yield x, weight, bias
    yield x, weight, bias, draw.x(rows, width), draw.x(width)


def _gelu_mul(draw: _Draw, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    yield (draw.x(rows, 2 * width, scale=2.0),)


def _linear(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    x, weight = draw.x(rows, inputs), draw.x(outputs, inputs, scale=inputs**-0.5)
    x[:, -1] *= 64  # or losing the last of many products would pass as rounding
    yield x, weight
    yield x, weight, draw.x(outputs)


def _linear_gelu(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    yield draw.x(rows, inputs), draw.x(outputs, inputs, scale=inputs**-0.5), draw.x(outputs)


def _linear_norm(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    x, weight = next(_linear(draw, rows, inputs, outputs))
    stream, vectors = draw.x(rows, outputs), [draw.wide(outputs) for _ in range(3)]
    yield x, weight, stream, vectors[0]
    yield x, weight, stream, *vectors


def _gated_up(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    yield draw.x(rows, inputs), draw.x(2 * outputs, inputs, scale=2 * inputs**-0.5)


def _project_rotate(
    draw: _Draw, batch: int, tokens: int, inputs: int, heads: int, kv_heads: int, dim: int, columns: int
) -> Iterator[tuple[Any, ...]]:
    for qkv, *rest, count in _split_rotate(draw, batch, tokens, heads, kv_heads, dim, columns):
        yield draw.x(batch, tokens, inputs), draw.x(qkv.shape[-1], inputs, scale=inputs**-0.5), *rest, count


def _split_rotate(
    draw: _Draw, batch: int, tokens: int, heads: int, kv_heads: int, dim: int, columns: int
) -> Iterator[tuple[Any, ...]]:
    angles = draw.wide(batch, tokens, dim // 2)
    # What stands in the slab must survive outside the written columns.
    slabs = [draw.x(batch, kv_heads, columns, dim) for _ in range(2)]
    start = draw.columns(batch, 0, columns - tokens)
    for count in (0, heads):  # a last layer that only fills the slab has no queries
        yield draw.x(batch, tokens, (count + 2 * kv_heads) * dim), (angles.cos(), angles.sin()), *slabs, start, count


def _attend(
    draw: _Draw, batch: int, heads: int, kv_heads: int, queries: int, columns: int, dim: int
) -> Iterator[tuple[Any, ...]]:
    query = draw.x(batch, heads, queries, dim)
    slabs = [draw.x(batch, kv_heads, columns, dim) for _ in range(2)]
    # Views, as the vision tower makes them of one merged projection.
    views = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, *slabs))
    lengths = draw.columns(batch, 1, columns)
    slabs[1][torch.arange(batch), :, lengths - 1] *= 64  # or losing the last of many columns would pass as rounding
    beyond = torch.arange(columns, device=draw.device) >= lengths[:, None]
    limited = query, *(slab.masked_fill(beyond[:, None, :, None], float("nan")) for slab in slabs), lengths
    yield from (limited, views) if queries == columns else (views, limited)  # last, and timed, as a model calls it


def _stack(
    draw: _Draw, batch: int, tokens: int, width: int, inner: int, heads: int, kv_heads: int, dim: int, columns: int
) -> Iterator[tuple[Any, ...]]:
    sizes = (heads + 2 * kv_heads) * dim, width, heads * dim, inner
    weights = tuple(
        LayerWeights(*(draw.x(*size, scale=size[1] ** -0.5) for size in _matrices(*sizes))) for _ in range(_LAYERS)
    )
    matrices = [matrix.float() for layer in weights for matrix in (layer.qkv, layer.gate_up)]
    yield from _stacks(draw, batch, tokens, width, weights, matrices, heads, kv_heads, dim, columns)


def _stack_fp8(
    draw: _Draw, batch: int, tokens: int, width: int, inner: int, heads: int, kv_heads: int, dim: int, columns: int
) -> Iterator[tuple[Any, ...]]:
    sizes = (heads + 2 * kv_heads) * dim, width, heads * dim, inner
    weights = tuple(CodedLayer(*(_coded_matrix(draw, *size) for size in _matrices(*sizes))) for _ in range(_LAYERS))
    read = [matrix for layer in weights for matrix in (layer.qkv, layer.gate_up)]
    matrices = [m.weight.float() * (m.factor * m.code[1])[:, None] for m in read]
    yield from _stacks(draw, batch, tokens, width, weights, matrices, heads, kv_heads, dim, columns)


_LAYERS = 2


def _matrices(rows: int, width: int, queries: int, inner: int) -> tuple[tuple[int, int], ...]:
    """Outputs and inputs of a layer's."""
    return (rows, width), (width, queries), (2 * inner, width), (width, inner)


def _stacks(
    draw: _Draw,
    batch: int,
    tokens: int,
    width: int,
    weights: tuple[Any, ...],
    matrices: list[Tensor],
    heads: int,
    kv_heads: int,
    dim: int,
    columns: int,
) -> Iterator[tuple[Any, ...]]:
    """:param matrices: fp32, what reads each norm but the last."""
    slabs = [draw.x(_LAYERS, batch, kv_heads, columns, dim) for _ in range(2)]
    start = draw.columns(batch, 0, columns - tokens)
    angles = draw.wide(batch, tokens, dim // 2)
    rest = *slabs, start, start + tokens, (angles.cos(), angles.sin()), heads
    plain = [Norm(draw.wide(width, scale=0.1)) for _ in range(2 * _LAYERS + 1)]
    yield draw.x(batch, tokens, width), weights, tuple(plain), *rest
    shifts = [draw.wide(width, scale=0.1) for _ in plain]
    moved = [shift @ matrix.T for shift, matrix in zip(shifts, matrices, strict=False)]
    gates = [draw.wide(width) for _ in plain]
    adaptive = zip((norm.scale for norm in plain), shifts, gates, [*moved, None], strict=True)
    norms = tuple(Norm(*vectors) for vectors in adaptive)
    yield draw.x(batch, tokens, width), weights, norms, *rest
    yield _between_ends(draw, batch, tokens, width, weights, norms, *rest)


def _between_ends(draw: _Draw, batch: int, tokens: int, width: int, *rest: Any) -> tuple[Any, ...]:
    """``stack`` of as many actions as the released models have."""
    actions = 32
    into = draw.wide(width, actions, scale=actions**-0.5), draw.wide(width)
    out_of = draw.wide(actions, width, scale=width**-0.5), draw.wide(actions)
    return draw.wide(batch, tokens, actions), *rest, None, Ends(into, out_of)


def _coded_product(draw: _Draw, rows: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    """Operands, factor and bias of a product near 1."""
    x, weight = draw.coded(rows, inputs), draw.coded(outputs, inputs)
    factor = draw.wide(outputs).abs().add(0.5) * (1e-4 * inputs**-0.5)
    x[:, -1] = 448.0  # or losing the last of many products would pass as rounding
    weight[:, -1] = 448.0
    return x, weight, factor, draw.wide(outputs)


def _code(draw: _Draw, width: int) -> tuple[Tensor, Tensor]:
    return draw.wide(width), draw.wide().abs() + 30


def _coded_matrix(draw: _Draw, outputs: int, inputs: int) -> CodedMatrix:
    """Of operands near 1, with products near 1."""
    weight, code = draw.coded(outputs, inputs), _code(draw, inputs)
    factor = draw.wide(outputs).abs().add(1.0) * (4e-3 / code[1] * inputs**-0.5)
    weight[:, -1], code[0][-1] = 448.0, 4.0  # or losing the last of many products would pass as rounding
    return CodedMatrix(weight, factor, draw.wide(outputs), code)


def _rms_norm_fp8(draw: _Draw, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    yield draw.x(rows, width), draw.wide(width), _code(draw, width)


def _linear_norm_fp8(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    x, weight, stream, scale = next(_linear_norm(draw, rows, inputs, outputs))
    code = _code(draw, outputs)
    yield x, weight, None, None, stream, scale, code
    yield *_coded_product(draw, rows, inputs, outputs), stream, scale, None
    yield *_coded_product(draw, rows, inputs, outputs), stream, scale, code


def _gated_up_fp8(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    yield *_coded_product(draw, rows, inputs, 2 * outputs), _code(draw, outputs)


def _project_rotate_fp8(
    draw: _Draw, batch: int, tokens: int, inputs: int, heads: int, kv_heads: int, dim: int, columns: int
) -> Iterator[tuple[Any, ...]]:
    for qkv, *rest, count in _split_rotate(draw, batch, tokens, heads, kv_heads, dim, columns):
        x, *others = _coded_product(draw, batch * tokens, inputs, qkv.shape[-1])
        yield x.view(batch, tokens, inputs), *others, *rest, count


def _attend_fp8(
    draw: _Draw, batch: int, heads: int, kv_heads: int, queries: int, columns: int, dim: int
) -> Iterator[tuple[Any, ...]]:
    limited = max(_attend(draw, batch, heads, kv_heads, queries, columns, dim), key=len)
    yield *limited, _code(draw, heads * dim)


def _linear_back(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    grad, weight = draw.x(rows, outputs), draw.x(outputs, inputs, scale=outputs**-0.5)
    grad[:, -1] *= 64  # or losing the last of many products would pass as rounding
    yield grad, weight


def _norm_back(draw: _Draw, rows: int, width: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    stream, beside = draw.x(rows, width), draw.x(rows, width)
    yield draw.x(rows, width), None, None, stream, draw.wide(width), draw.wide(width)
    behind = next(_linear_back(draw, rows, width, outputs))
    yield *behind, None, stream, draw.wide(width)
    yield *behind, beside, stream, draw.wide(width), draw.wide(width)


def _gated_up_back(draw: _Draw, rows: int, inputs: int, outputs: int) -> Iterator[tuple[Any, ...]]:
    x, weight = draw.x(rows, inputs), draw.x(2 * outputs, inputs, scale=2 * inputs**-0.5)
    yield draw.x(rows, outputs), None, x, weight
    yield *next(_linear_back(draw, rows, outputs, inputs)), x, weight


def _split_rotate_back(
    draw: _Draw, batch: int, tokens: int, heads: int, kv_heads: int, dim: int
) -> Iterator[tuple[Any, ...]]:
    angles = draw.wide(batch, tokens, dim // 2)
    grads = [draw.x(batch, count, tokens, dim) for count in (heads, kv_heads, kv_heads)]
    yield *grads, (angles.cos(), angles.sin())


def _attend_back(
    draw: _Draw, batch: int, heads: int, kv_heads: int, queries: int, columns: int, dim: int
) -> Iterator[tuple[Any, ...]]:
    for query, keys, values, *rest in _attend(draw, batch, heads, kv_heads, queries, columns, dim):
        lengths = rest[0].clamp(min=queries) if rest else None
        beyond = torch.arange(columns, device=draw.device) >= (columns if lengths is None else lengths[:, None])
        beyond = beyond.expand(batch, columns)[:, None, :, None]
        slabs = [slab.nan_to_num().masked_fill(beyond, float("nan")) for slab in (keys, values)]
        mixed = reference.attend(query, *slabs, lengths)
        start = torch.full((batch,), columns, device=draw.device) if lengths is None else lengths
        grad = draw.x(batch, queries, heads * dim)
        for count in (queries, 0) if lengths is None else (queries,):  # keys that depend on nothing have no gradient
            yield grad, query, *slabs, mixed, lengths, start - count, count


_CASES: dict[str, Callable[..., Iterator[tuple[Any, ...]]]] = {
    "rms_norm": _rms_norm,
    "ada_rms_norm": _ada_rms_norm,
    "layer_norm": _layer_norm,
    "gelu_mul": _gelu_mul,
    "linear": _linear,
    "linear_gelu": _linear_gelu,
    "linear_norm": _linear_norm,
    "gated_up": _gated_up,
    "project_rotate": _project_rotate,
    "split_rotate": _split_rotate,
    "attend": _attend,
    "stack": _stack,
    "stack_fp8": _stack_fp8,
    "rms_norm_fp8": _rms_norm_fp8,
    "linear_norm_fp8": _linear_norm_fp8,
    "gated_up_fp8": _gated_up_fp8,
    "project_rotate_fp8": _project_rotate_fp8,
    "attend_fp8": _attend_fp8,
    "linear_back": _linear_back,
    "norm_back": _norm_back,
    "gated_up_back": _gated_up_back,
    "split_rotate_back": _split_rotate_back,
    "attend_back": _attend_back,
}


# Operator -> where its arguments hold the slabs of keys and values that it writes into.
_SLABS = {"split_rotate": 2, "project_rotate": 3, "project_rotate_fp8": 5, "stack": 3, "stack_fp8": 3}


def widen(tensor: Tensor) -> Tensor:
    """Always a copy: the reference writes into its slabs, and the candidate must not find its work done."""
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor


def map_tensors(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Every tensor of the arguments changed, also inside a tuple, which keeps its names."""
    changed = [
        change(arg) if isinstance(arg, Tensor) else map_tensors(arg, change) if isinstance(arg, tuple) else arg
        for arg in args
    ]
    return type(args)(*changed) if hasattr(args, "_fields") else tuple(changed)


def _results(op: str, implementation: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What it returns, and the slabs that it writes into."""
    returned = implementation(*args)
    results: tuple[Tensor, ...] = returned if isinstance(returned, tuple) else (returned,)
    first = _SLABS.get(op)
    return results if first is None else (*results, *args[first : first + 2])
