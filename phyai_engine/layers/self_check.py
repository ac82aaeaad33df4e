"""What a fused operator must show before it is bound: the reference's values, on seeded inputs of the model's shapes.

The expected values are the reference's in float32, so that the error is the candidate's own rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from phyai_kernels import reference
from torch import Tensor

# Allowed |error| as a part of the largest expected value. bfloat16 rounds to 2**-9 of a value, and again where the
# reference rounds an intermediate; float32 leaves another order of long sums (16384 products in the widest projection).
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


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
            wanted = _results(op, getattr(reference, op), _map(args, _widen))
            found = _results(op, candidate, _map(args, torch.clone))
            for value, expected in zip(found, wanted, strict=True):
                if value.shape != expected.shape or value.dtype != dtype:
                    return float("inf")
                if not expected.numel():  # no query heads
                    continue
                error = (value.float() - expected).abs().nan_to_num(nan=float("inf")).max() / expected.abs().max()
                worst = max(worst, float(error))
    return worst


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
    yield tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, *slabs))
    lengths = draw.columns(batch, 1, columns)
    slabs[1][torch.arange(batch), :, lengths - 1] *= 64  # or losing the last of many columns would pass as rounding
    beyond = torch.arange(columns, device=draw.device) >= lengths[:, None]
    yield query, *(slab.masked_fill(beyond[:, None, :, None], float("nan")) for slab in slabs), lengths


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
}


# Operator -> where its arguments hold the slabs of keys and values that it writes into.
_SLABS = {"split_rotate": 2, "project_rotate": 3}


def _widen(tensor: Tensor) -> Tensor:
    """Always a copy: the reference writes into its slabs, and the candidate must not find its work done."""
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor


def _map(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Every tensor of the arguments changed, also inside a tuple."""
    return tuple(
        change(arg) if isinstance(arg, Tensor) else _map(arg, change) if isinstance(arg, tuple) else arg for arg in args
    )


def _results(op: str, implementation: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """What it returns, and the slabs that it writes into."""
    returned = implementation(*args)
    results: tuple[Tensor, ...] = returned if isinstance(returned, tuple) else (returned,)
    first = _SLABS.get(op)
    return results if first is None else (*results, *args[first : first + 2])
