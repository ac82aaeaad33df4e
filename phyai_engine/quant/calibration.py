"""Measures what each matrix multiplies while a model runs: the operators note their first argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.layers.ops import Ops
from phyai_engine.quant.coding import Site
from phyai_engine.quant.scales import Seen

# Operators whose first argument a matrix multiplies, the second.
_PRODUCTS = ("linear", "linear_gelu", "linear_norm", "gated_up", "project_rotate")


@dataclass(slots=True)
class _Sums:
    """Of all tokens so far, per input [K]: sum, least and largest value, in fp64 and as they are."""

    total: Tensor
    low: Tensor
    high: Tensor
    count: int

    @classmethod
    def of(cls, x: Tensor) -> _Sums:
        tokens = x.detach().reshape(-1, x.shape[-1]).float()
        return cls(tokens.double().sum(dim=0), tokens.amin(dim=0), tokens.amax(dim=0), len(tokens))

    def add(self, other: _Sums) -> None:
        self.total += other.total
        self.low, self.high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)
        self.count += other.count

    def seen(self) -> Seen:
        centre = (self.total / self.count).float()
        largest = torch.maximum(self.high - centre, centre - self.low).amax()
        return Seen(centre.cpu().numpy(), float(largest))


class Observer:
    """Operators that compute as they did, and note.

    :param model: its matrices are nn.Linear. :param sites: module name -> site: those to note.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], ops: Ops) -> None:
        weights = {name: cast("nn.Linear", model.get_submodule(name)).weight for name in sites}
        self._names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self._sums: dict[str, _Sums] = {}
        noting: dict[str, Any] = {op: self._noting(getattr(ops, op)) for op in _PRODUCTS}
        self.ops = replace(ops, **noting)

    def seen(self) -> dict[str, Seen]:
        """Matrix -> its operand so far; what was never multiplied is not there."""
        return {name: sums.seen() for name, sums in sorted(self._sums.items())}

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T in fp32, noted: for ``reference.late_stack``. :param x: fp32."""
        self._note(x, weight)
        return functional.linear(x, weight.float())

    def _note(self, x: Tensor, weight: Tensor) -> None:
        name = self._names.get(weight.untyped_storage().data_ptr())
        if name in self._sums:
            self._sums[name].add(_Sums.of(x))
        elif name is not None:
            self._sums[name] = _Sums.of(x)

    def _noting(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, weight: Tensor, *rest: Any) -> Any:
            self._note(x, weight)
            return implementation(x, weight, *rest)

        return call
