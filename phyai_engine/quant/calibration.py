"""Measures what each matrix multiplies while a model runs: the operators note their first argument's largest value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from phyai_engine.layers.ops import Ops
from phyai_engine.quant.coding import Site

# Operators whose first argument a matrix multiplies, the second.
_PRODUCTS = ("linear", "linear_gelu", "linear_norm", "gated_up", "project_rotate")


class Observer:
    """Operators that compute as they did, and note.

    :param model: its matrices are nn.Linear. :param sites: module name -> site: those to note.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], ops: Ops) -> None:
        weights = {name: cast("nn.Linear", model.get_submodule(name)).weight for name in sites}
        # By storage: a stack that ends at K and V multiplies with a part of the rows.
        self._names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}
        self._largest: dict[str, Tensor] = {}
        noting: dict[str, Any] = {op: self._noting(getattr(ops, op)) for op in _PRODUCTS}
        self.ops = replace(ops, **noting)

    def largest(self) -> dict[str, float]:
        """Matrix -> largest |activation| so far; what was never multiplied is not there."""
        return {name: float(value) for name, value in sorted(self._largest.items())}

    def _noting(self, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, weight: Tensor, *rest: Any) -> Any:
            name = self._names.get(weight.untyped_storage().data_ptr())
            if name is not None:
                peak = x.detach().abs().amax().float()
                held = self._largest.get(name)
                self._largest[name] = peak if held is None else torch.maximum(held, peak)
            return implementation(x, weight, *rest)

        return call
