"""The operator selector: which implementation of each operator a model runs, decided once, with the reason.

A fused form is bound where it equals the reference at every shape the model calls it with; anything else, a missing
package or a failed compilation too, binds the reference and keeps the sentence why. Nothing is decided while a model
runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from phyai_kernels import reference
from torch import Tensor

from phyai_engine.config import cache_dir, environment
from phyai_engine.errors import EngineError
from phyai_engine.layers.self_check import TOLERANCES, largest_error

Kind = Literal["auto", "triton", "reference"]

# Operator -> what OpShape.dims holds, in order. ``rows`` are all leading axes of the activations multiplied.
DIMS: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("rows", "width"),
    "ada_rms_norm": ("rows", "width"),
    "layer_norm": ("rows", "width"),
    "gelu_mul": ("rows", "width"),  # of the result: the merged projection is twice as wide
    "linear": ("rows", "inputs", "outputs"),
    "linear_gelu": ("rows", "inputs", "outputs"),
    "linear_norm": ("rows", "inputs", "outputs"),
    "gated_up": ("rows", "inputs", "outputs"),
    "project_rotate": ("batch", "tokens", "inputs", "heads", "kv_heads", "head_dim", "columns"),
    "split_rotate": ("batch", "tokens", "heads", "kv_heads", "head_dim", "columns"),  # columns of the K/V slab
    "attend": ("batch", "heads", "kv_heads", "queries", "columns", "head_dim"),
}

# Operator -> kind -> module whose function of the operator's name is a candidate, best first. Imported when asked for.
CANDIDATES: Mapping[str, Mapping[str, str]] = {
    "rms_norm": {"triton": "phyai_kernels.rms_norm"},
    "ada_rms_norm": {"triton": "phyai_kernels.ada_rms_norm"},
    "layer_norm": {"triton": "phyai_kernels.layer_norm"},
    "gelu_mul": {"triton": "phyai_kernels.gelu_mul"},
    "linear": {"triton": "phyai_kernels.linear"},
    "linear_gelu": {"triton": "phyai_kernels.linear_gelu"},
    "linear_norm": {"triton": "phyai_kernels.linear_norm"},
    "gated_up": {"triton": "phyai_kernels.gated_up"},
    "project_rotate": {"triton": "phyai_kernels.project_rotate"},
    "split_rotate": {"triton": "phyai_kernels.split_rotate"},
    "attend": {"triton": "phyai_kernels.attend"},
}


@dataclass(frozen=True, slots=True)
class OpShape:
    """One call of one operator, as a model makes it.

    :param op: a field of ``Ops``. :param dtype: of the activations. :param dims: sizes, in the order of ``DIMS[op]``.
    :raises EngineError: unknown operator or dtype, wrong number of sizes, or a size below 1.
    """

    op: str
    dtype: torch.dtype
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        wanted = DIMS.get(self.op)
        if wanted is None:
            raise EngineError("unknown operator", got=self.op, wanted=f"one of {', '.join(DIMS)}", where="OpShape")
        if self.dtype not in TOLERANCES:
            raise EngineError("no tolerance", got=self.dtype, wanted=f"one of {[*TOLERANCES]}", where=self.op)
        if len(self.dims) != len(wanted) or min(self.dims) < 1:
            raise EngineError("wrong sizes", got=self.dims, wanted=f"{', '.join(wanted)}, each >= 1", where=self.op)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in zip(DIMS[self.op], self.dims, strict=True))
        return f"{sizes}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """One implementation per operator; signatures and meaning are those of ``phyai_kernels.reference``.

    :param reasons: operator -> what is bound and the sentence why, as ``phyai doctor`` shows it.
    """

    rms_norm: Callable[..., tuple[Tensor, Tensor]] = reference.rms_norm
    ada_rms_norm: Callable[..., tuple[Tensor, Tensor]] = reference.ada_rms_norm
    layer_norm: Callable[..., tuple[Tensor, Tensor]] = reference.layer_norm
    gelu_mul: Callable[..., Tensor] = reference.gelu_mul
    linear: Callable[..., Tensor] = reference.linear
    linear_gelu: Callable[..., Tensor] = reference.linear_gelu
    linear_norm: Callable[..., tuple[Tensor, Tensor]] = reference.linear_norm
    gated_up: Callable[..., Tensor] = reference.gated_up
    project_rotate: Callable[..., Tensor] = reference.project_rotate
    split_rotate: Callable[..., Tensor] = reference.split_rotate
    attend: Callable[..., Tensor] = reference.attend
    reasons: Mapping[str, str] = field(default_factory=dict)


REFERENCE = Ops()


def load_ops(kind: Kind, *, device: torch.device, shapes: Sequence[OpShape]) -> Ops:
    """Bind every operator for one model on one device.

    :param kind: ``auto`` takes the first candidate that passes on an accelerator, ``triton`` insists on trying it (on a
        CPU too, where only its interpreter works), ``reference`` takes none.
    :param shapes: every call the model makes; a candidate that fails one of an operator's shapes is not bound at all.
    :raises EngineError: unknown kind.
    """
    if kind not in get_args(Kind):
        raise EngineError("unknown kernels", got=kind, wanted=f"one of {', '.join(get_args(Kind))}", where="kernels")
    bound: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for op in DIMS:
        own = [shape for shape in dict.fromkeys(shapes) if shape.op == op]
        implementation, reasons[op] = _choose(op, kind, device, own)
        if implementation is not None:
            bound[op] = implementation
    return Ops(**bound, reasons=reasons)


def _choose(op: str, kind: Kind, device: torch.device, shapes: Sequence[OpShape]) -> tuple[Any, str]:
    """The implementation to bind, None for the reference, and what is bound with the sentence why."""
    kinds = {name: module for name, module in CANDIDATES[op].items() if kind in ("auto", name)}
    if kind == "reference":
        return None, "reference, as asked for"
    if not shapes:
        return None, "reference, this model does not call it"
    if kind == "auto" and device.type == "cpu":
        return None, "reference, no accelerator: the reference runs through torch's own kernels"
    refused = []
    for name, module in kinds.items():
        candidate, sentence = _try_candidate(op, module, kind, device, shapes)
        if candidate is not None:
            return candidate, f"{name}, {sentence}"
        refused.append(f"{name}: {sentence}")
    return None, f"reference, {'; '.join(refused)}"


def _try_candidate(
    op: str, module: str, kind: Kind, device: torch.device, shapes: Sequence[OpShape]
) -> tuple[Any, str]:
    """The candidate, None if it fails, and the sentence why."""
    try:
        candidate = getattr(importlib.import_module(module), op)
        tiles = importlib.import_module("phyai_kernels.tiles")
        if not environment("TRITON_CACHE_DIR"):
            tiles.keep_compiled(cache_dir() / "triton")
    except Exception as failure:  # not installed, built for another Python, a user without a home
        return None, f"cannot be imported: {type(failure).__name__}: {_first_line(failure)}"
    if tiles.INTERPRETED and kind == "auto":
        return None, "runs in its interpreter in this process, which is for tests only"
    worst = 0.0
    for shape in shapes:
        try:
            error = largest_error(shape.op, shape.dtype, shape.dims, candidate, device)
        except Exception as failure:  # whatever a compiler or a driver raises is the reason
            return None, f"fails at {shape}: {type(failure).__name__}: {_first_line(failure)}"
        if not error <= TOLERANCES[shape.dtype]:
            allowed = TOLERANCES[shape.dtype]
            return None, f"is wrong at {shape}: error {error:.1e} of the largest value, allowed {allowed:.0e}"
        worst = max(worst, error)
    count = f"{len(shapes)} shape{'s' if len(shapes) > 1 else ''}"
    return candidate, f"equals the reference at {count}, largest error {worst:.1e} of the largest value"


def _first_line(failure: Exception) -> str:
    """The sentence of an error whose text may hold a whole kernel."""
    return next(iter(str(failure).strip().splitlines()), "no message")[:200]
