"""The gradient of an action head with respect to its input alone: the operators' calls, kept and walked back.

Own rules instead of autograd: no graph of parameters is built, fused operators need no autograd form, K and V of the
prefix get no gradient, and every step can be captured in a CUDA graph. What lies between an operator and the next must
hand its tensors on as they are; a cast or a nonlinearity of its own belongs to the model's head, before the first call
or behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from phyai_kernels import backward, reference
from torch import Tensor

from phyai_engine.errors import EngineError
from phyai_engine.layers.ops import Ops

Grads = tuple[Any, ...]
Found = Iterator[tuple[Tensor, Tensor]]


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


Rule = Callable[..., Found]
"""(call, gradients of its outputs or None, its arguments) -> (argument, gradient) pairs. Of a slab, the gradient is
that of the written columns."""


def _linear(call: Call, grads: Grads, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Found:
    yield x, backward.linear(grads[0], weight)


def _gelu_mul(call: Call, grads: Grads, gate_up: Tensor) -> Found:
    yield gate_up, backward.gelu_mul(grads[0], gate_up)


def _rms_norm(call: Call, grads: Grads, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Found:
    grad = backward.rms_norm(*grads, call.outputs[0], weight)
    yield x, grad
    if out is not None:
        yield out, grad


def _ada_rms_norm(
    call: Call,
    grads: Grads,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    out: Tensor | None = None,
    gate: Tensor | None = None,
) -> Found:
    grad, grad_out = backward.ada_rms_norm(*grads, call.outputs[0], scale, gate)
    yield x, grad
    if out is not None:
        yield out, grad_out


def _layer_norm(
    call: Call,
    grads: Grads,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor | None = None,
    out_bias: Tensor | None = None,
) -> Found:
    grad = backward.layer_norm(*grads, call.outputs[0], weight)
    yield x, grad
    if out is not None:
        yield out, grad


def _linear_gelu(call: Call, grads: Grads, x: Tensor, weight: Tensor, bias: Tensor) -> Found:
    yield x, backward.linear_gelu(grads[0], x, weight, bias)


def _linear_norm(
    call: Call,
    grads: Grads,
    x: Tensor,
    weight: Tensor,
    stream: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
) -> Found:
    grad_x, grad_stream = backward.linear_norm(*grads, call.outputs[0], weight, scale, gate)
    yield x, grad_x
    yield stream, grad_stream


def _gated_up(call: Call, grads: Grads, x: Tensor, weight: Tensor) -> Found:
    yield x, backward.gated_up(grads[0], x, weight)


def _project_rotate(
    call: Call,
    grads: Grads,
    x: Tensor,
    weight: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Found:
    yield x, backward.project_rotate(*grads, weight, table)


def _split_rotate(
    call: Call,
    grads: Grads,
    qkv: Tensor,
    table: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
) -> Found:
    yield qkv, backward.split_rotate(*grads, table)


def _attend(
    call: Call, grads: Grads, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None
) -> Found:
    start, count = call.own or (torch.zeros(len(query), dtype=torch.int64, device=query.device), 0)
    grad_query, grad_keys, grad_values = backward.attend(grads[0], query, keys, values, lengths, start, count)
    yield query, grad_query
    if count:
        yield keys, grad_keys
        yield values, grad_values


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

    :param ops: what computes it. The backward belongs to the operators' definitions, whatever form is bound.
    """

    def __init__(self, ops: Ops) -> None:
        self._calls: list[Call] = []
        self._own: dict[int, tuple[Tensor, int]] = {}
        names = [field.name for field in fields(Ops) if field.name not in ("reasons", "stack")]
        kept: dict[str, Any] = {name: self._kept(name, getattr(ops, name)) for name in names}
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
        found: dict[int, Tensor] = {id(of): grad}  # the tape holds every tensor, so no id is used twice
        for call in reversed(self._calls):
            grads = tuple(found.pop(id(output), None) for output in call.outputs)
            if all(part is None for part in grads):
                continue
            for tensor, part in RULES[call.op](call, grads, *call.args):
                held = found.get(id(tensor))
                found[id(tensor)] = part if held is None else held + part
        if id(to) not in found:
            raise EngineError("no gradient arrives", where="Tape.pull", do="Hand tensors from operator to operator.")
        return found[id(to)]


def _refusing(op: str) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise EngineError(f"operator {op} has no backward", where="layers/tape.py", do="Add its rule to RULES.")

    return call
