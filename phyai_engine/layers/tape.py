"""The gradient of an action head with respect to its input alone: the operators' calls, kept and walked back.

Own rules instead of autograd: no graph of parameters is built, fused operators need no autograd form, K and V of the
prefix get no gradient, and every step can be captured in a CUDA graph. What lies between an operator and the next must
hand its tensors on as they are; a cast or a nonlinearity of its own belongs to the model's head, before the first call
or behind the last.

A gradient that comes from behind a matrix waits as a ``Product`` until somebody needs it: a fused form makes the
product together with what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from phyai_kernels import backward, reference
from torch import Tensor

from phyai_engine.errors import EngineError
from phyai_engine.layers.ops import Ops


class Product(NamedTuple):
    """grad @ weight, not made yet. :param grad: [..., N]. :param weight: [N, K], as the operator had it."""

    grad: Tensor
    weight: Tensor


Gradient = Tensor | Product
Found = Iterator[tuple[Tensor, Gradient]]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One operator call.

    :param outputs: its results; then the slabs it wrote into.
    :param own: of attend, first column [B] and number of columns that a kept call wrote into its keys; None: the keys
        depend on nothing here.
    """

    op: str
    args: tuple[Any, ...]
    outputs: tuple[Tensor, ...]
    own: tuple[Tensor, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What has come back to one call.

    :param ops: what computes the way back. :param grads: of each output; None where nothing follows. Of a slab it is
        that of the written columns.
    """

    ops: Ops
    call: Call
    grads: tuple[Gradient | None, ...]

    def made(self, index: int) -> Tensor:
        """The gradient of an output; zeros where nothing follows."""
        grad = self.grads[index]
        return torch.zeros_like(self.call.outputs[index]) if grad is None else made(self.ops, grad)

    def behind(self, index: int) -> tuple[Tensor, Tensor | None]:
        """The same as a product that an operator makes by itself: its factors, or the gradient and no matrix."""
        grad = self.grads[index]
        return grad if isinstance(grad, Product) else (self.made(index), None)

    def beside(self) -> Tensor | None:
        """Of the residual stream, the first output, from elsewhere than the norm behind it."""
        return None if self.grads[0] is None else self.made(0)

    def norm(self, scale: Tensor, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Through the norm at the end of a call: of the stream, and of what was added to it times ``gate``."""
        return self.ops.norm_back(*self.behind(1), self.beside(), self.call.outputs[0], scale, gate)


def made(ops: Ops, grad: Gradient) -> Tensor:
    """The gradient itself."""
    return ops.linear_back(*grad) if isinstance(grad, Product) else grad


Rule = Callable[..., Found]
"""(what arrived, the call's arguments) -> (argument, gradient) pairs."""


def _linear(at: Arrived, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    yield x, Product(at.made(0), weight)


def _linear_gelu(at: Arrived, x: Tensor, weight: Tensor, bias: Tensor) -> Found:
    yield x, Product(backward.linear_gelu_back(at.made(0), x, weight, bias), weight)


def _gelu_mul(at: Arrived, gate_up: Tensor) -> Found:
    yield gate_up, backward.gelu_mul_back(at.made(0), gate_up)


def _gated_up(at: Arrived, x: Tensor, weight: Tensor) -> Found:
    yield x, Product(at.ops.gated_up_back(*at.behind(0), x, weight), weight)


def _added(x: Tensor, out: Tensor | None, grad: Tensor, grad_out: Tensor) -> Found:
    """Of a residual add; without ``out`` there was none."""
    yield x, grad
    if out is not None:
        yield out, grad_out


def _rms_norm(at: Arrived, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Found:
    return _added(x, out, *at.norm(weight))


def _ada_rms_norm(
    at: Arrived, x: Tensor, scale: Tensor, shift: Tensor, out: Tensor | None = None, gate: Tensor | None = None
) -> Found:
    return _added(x, out, *at.norm(scale, gate))


def _layer_norm(
    at: Arrived, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None = None, out_bias: Tensor | None = None
) -> Found:
    grad = backward.layer_norm_back(at.made(1), at.beside(), at.call.outputs[0], weight)
    return _added(x, out, grad, grad)


def _linear_norm(
    at: Arrived,
    x: Tensor,
    weight: Tensor,
    stream: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> Found:
    grad, grad_out = at.norm(scale, gate)
    yield x, Product(grad_out, weight)
    yield stream, grad


def _turned(at: Arrived, table: tuple[Tensor, Tensor]) -> Tensor:
    return at.ops.split_rotate_back(at.made(0), at.made(1), at.made(2), table)


def _split_rotate(at: Arrived, qkv: Tensor, table: tuple[Tensor, Tensor], *_: Any) -> Found:
    yield qkv, _turned(at, table)


def _project_rotate(at: Arrived, x: Tensor, weight: Tensor, table: tuple[Tensor, Tensor], *_: Any) -> Found:
    yield x, Product(_turned(at, table), weight)


def _attend(at: Arrived, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Found:
    start, count = at.call.own or (torch.zeros(len(query), dtype=torch.int64, device=query.device), 0)
    slabs, mixed = (keys, values), at.call.outputs[0]
    grad_query, *grads = at.ops.attend_back(at.made(0), query, *slabs, mixed, lengths, start, count)
    yield query, grad_query
    if count:
        yield from zip(slabs, grads, strict=True)


RULES: Mapping[str, Rule] = {
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
"""Operator -> its backward. A new field of ``Ops`` that an action head calls needs its row."""

# Operators that write into slabs: which of their arguments are the keys, the values and the first columns. The first
# argument has the tokens.
_WRITES: Mapping[str, tuple[int, int, int]] = {"split_rotate": (2, 3, 4), "project_rotate": (3, 4, 5)}


class Tape:
    """Of one pass.

    :param ops: what computes it, and the way back, which belongs to the operators' definitions, whatever is bound.
    """

    def __init__(self, ops: Ops) -> None:
        self._calls: list[Call] = []
        self._own: dict[int, tuple[Tensor, int]] = {}
        self._back = ops
        names = [field.name for field in fields(Ops) if field.name not in ("reasons", "stack")]
        forward = [name for name in names if not name.endswith("_back")]
        kept: dict[str, Any] = {name: self._kept(name, getattr(ops, name)) for name in forward}
        kept["stack"] = reference.stack  # not as one call, but the kept calls that it is made of
        self.ops: Ops = replace(ops, **kept)

    def _kept(self, op: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        if op not in RULES:
            return _refusing(op)
        calls, own = self._calls, self._own  # not the tape itself: in a circle its tensors would outlive the step

        def call(*args: Any) -> Any:
            result = implementation(*args)
            outputs = result if isinstance(result, tuple) else (result,)
            if op in _WRITES:
                keys, values, start = (args[i] for i in _WRITES[op])
                own[id(keys)] = start, args[0].shape[1]
                outputs = (*outputs, keys, values)
            calls.append(Call(op, args, outputs, own.get(id(args[1])) if op == "attend" else None))
            return result

        return call

    def pull(self, of: Tensor, grad: Tensor, to: Tensor) -> Tensor:
        """J^T grad with J = d ``of`` / d ``to``.

        :param of: a result of a kept call. :param grad: like it. :param to: an argument of one.
        :raises EngineError: no kept call leads from ``to`` to ``of``.
        """
        found: dict[int, Gradient] = {id(of): grad}  # the tape holds every tensor, so no id is used twice
        for call in reversed(self._calls):
            grads = tuple(found.pop(id(output), None) for output in call.outputs)
            if all(part is None for part in grads):
                continue
            for tensor, part in RULES[call.op](Arrived(self._back, call, grads), *call.args):
                held = found.get(id(tensor))
                found[id(tensor)] = part if held is None else made(self._back, held) + made(self._back, part)
        if id(to) not in found:
            raise EngineError("no gradient arrives", where="Tape.pull", do="Hand tensors from operator to operator.")
        return made(self._back, found[id(to)])


def _refusing(op: str) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise EngineError(f"operator {op} has no backward", where="layers/tape.py", do="Add its rule to RULES.")

    return call
