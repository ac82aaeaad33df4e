"""The operator selector: which implementation of each operator a model runs, decided once, with the reason.

A fused form is bound where it equals the reference at every shape the model calls it with; anything else, a missing
package or a failed compilation too, binds the reference and keeps the sentence why. Where the accelerator has a
measured profile, its row decides for each shape; a shape that it does not hold goes by the accelerator's rule. Nothing
is decided while a model runs, but that an operator with several implementations looks up the shape.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from phyai_kernels import backward, reference
from torch import Tensor

from phyai_engine.config import cache_dir, environment
from phyai_engine.errors import EngineError
from phyai_engine.layers.profile import Profile, Rule, load_profile, load_rule
from phyai_engine.layers.self_check import TOLERANCES, definition, largest_error

Kind = Literal["auto", "triton", "flashinfer", "reference"]

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
    "stack": ("batch", "tokens", "width", "inner", "heads", "kv_heads", "head_dim", "columns"),  # inner: the MLP's
    "stack_fp8": ("batch", "tokens", "width", "inner", "heads", "kv_heads", "head_dim", "columns"),
    "rms_norm_fp8": ("rows", "width"),
    "linear_norm_fp8": ("rows", "inputs", "outputs"),
    "gated_up_fp8": ("rows", "inputs", "outputs"),
    "project_rotate_fp8": ("batch", "tokens", "inputs", "heads", "kv_heads", "head_dim", "columns"),
    "attend_fp8": ("batch", "heads", "kv_heads", "queries", "columns", "head_dim"),
    # The way back, of guidance with a gradient. inputs, outputs: of the weight on the way forward.
    "linear_back": ("rows", "inputs", "outputs"),
    "norm_back": ("rows", "width", "outputs"),  # of the product behind the norm
    "gated_up_back": ("rows", "inputs", "outputs"),
    "split_rotate_back": ("batch", "tokens", "heads", "kv_heads", "head_dim"),
    "attend_back": ("batch", "heads", "kv_heads", "queries", "columns", "head_dim"),
}

# Operator -> kind -> module whose function of the operator's name is a candidate. Imported when asked for.
# FlashInfer has no more of these: its attention wants lengths on the host and no head dimension of 72.
CANDIDATES: Mapping[str, Mapping[str, str]] = {
    **{op: {"triton": f"phyai_kernels.{op}"} for op in DIMS},
    "rms_norm": {"triton": "phyai_kernels.rms_norm", "flashinfer": "phyai_kernels.flashinfer_rms_norm"},
    "gelu_mul": {"triton": "phyai_kernels.gelu_mul", "flashinfer": "phyai_kernels.flashinfer_gelu_mul"},
    "attend": {"triton": "phyai_kernels.attend", "cuda": "phyai_kernels.cuda_attend"},
    "attend_fp8": {"triton": "phyai_kernels.attend_fp8", "cuda": "phyai_kernels.cuda_attend_fp8"},
    "stack": {"cuda": "phyai_kernels.stack"},
    "stack_fp8": {"cuda": "phyai_kernels.stack"},  # of the same pieces
}


BACK = tuple(op for op in DIMS if op.endswith("_back"))


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


_PRODUCTS = [op for op, dims in DIMS.items() if dims == DIMS["linear"] and "gated" not in op]
_NORMS = ("rms_norm", "ada_rms_norm", "layer_norm", "rms_norm_fp8")


def _stack_sizes(
    norms: Any, keys: Tensor, values: Any, start: Any, lengths: Any, table: Any, heads: int, *_: Any
) -> tuple[int, ...]:
    return heads, keys.shape[2], keys.shape[4], keys.shape[3]


_CALLS: Mapping[str, Callable[..., tuple[int, ...]]] = {
    **dict.fromkeys(_PRODUCTS, lambda x, w, *_: (x[..., 0].numel(), w.shape[1], w.shape[0])),
    **dict.fromkeys(_NORMS, lambda x, *_: (x[..., 0].numel(), x.shape[-1])),
    "gelu_mul": lambda x: (x[..., 0].numel(), x.shape[-1] // 2),
    "gated_up": lambda x, w: (x[..., 0].numel(), w.shape[1], w.shape[0] // 2),
    "project_rotate": lambda x, w, table, k, v, start, heads: (*x.shape, heads, k.shape[1], k.shape[3], k.shape[2]),
    "split_rotate": lambda x, table, k, v, start, heads: (*x.shape[:2], heads, k.shape[1], k.shape[3], k.shape[2]),
    "gated_up_fp8": lambda x, w, *_: (x[..., 0].numel(), w.shape[1], w.shape[0] // 2),
    "project_rotate_fp8": lambda x, w, f, b, t, k, v, s, heads: (*x.shape, heads, k.shape[1], k.shape[3], k.shape[2]),
    **dict.fromkeys(
        ("attend", "attend_fp8"), lambda q, k, v, *_: (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
    ),
    "stack": lambda x, w, *rest: (*x.shape[:2], *w[0].down.shape, *_stack_sizes(*rest)),
    "stack_fp8": lambda x, w, *rest: (*x.shape[:2], *w[0].down.weight.shape, *_stack_sizes(*rest)),
    "norm_back": lambda grad, w, beside, stream, *_: (grad[..., 0].numel(), stream.shape[-1], grad.shape[-1]),
    "gated_up_back": lambda grad, down, x, w: (x[..., 0].numel(), w.shape[1], w.shape[0] // 2),
    "split_rotate_back": lambda q, k, v, table: (q.shape[0], q.shape[2], q.shape[1], k.shape[1], q.shape[3]),
    "attend_back": lambda grad, q, k, *_: (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3]),
}


def dims_of(op: str, args: Sequence[Any]) -> tuple[int, ...]:
    """What OpShape.dims holds of one call. :param args: as the operator is called."""
    return _CALLS[op](*args)


def dtype_of(op: str, args: Sequence[Any]) -> torch.dtype:
    """What OpShape.dtype holds of one call: of a stack that of its keys, since it may be given actions in float32."""
    return args[3 if op.startswith("stack") else 0].dtype  # type: ignore[no-any-return]


class ByShape:
    """One operator whose implementation depends on the shape of the call.

    :param table: (dtype, dims) -> implementation; a call of other dims takes the entry of its dtype whose sizes are
        nearest, since a bucket of another length is the same work.
    """

    def __init__(self, op: str, table: Mapping[tuple[torch.dtype, tuple[int, ...]], Callable[..., Any]]) -> None:
        self._op = op
        self._table: dict[tuple[torch.dtype, tuple[int, ...]], Callable[..., Any]] = dict(table)

    def __call__(self, *args: Any) -> Any:
        """As the operator."""
        key = dtype_of(self._op, args), dims_of(self._op, args)
        if key not in self._table:
            self._table[key] = self._nearest(*key)
        return self._table[key](*args)

    def _nearest(self, dtype: torch.dtype, dims: tuple[int, ...]) -> Callable[..., Any]:
        def distance(entry: tuple[torch.dtype, tuple[int, ...]]) -> tuple[bool, float]:
            ratios = [max(a, b, 1) / max(min(a, b), 1) for a, b in zip(entry[1], dims, strict=True)]
            return entry[0] != dtype, math.prod(ratios)

        nearest: tuple[torch.dtype, tuple[int, ...]] = min(self._table, key=distance)
        return self._table[nearest]


@dataclass(frozen=True, slots=True, eq=False)
class Ops:
    """One implementation per operator; signatures and meaning are those of ``phyai_kernels.reference``, of the way back
    those of ``phyai_kernels.backward``.

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
    stack: Callable[..., Tensor] = reference.stack  # calls the others, as it is given them
    stack_fp8: Callable[..., Tensor] = reference.stack_fp8
    rms_norm_fp8: Callable[..., Tensor] = reference.rms_norm_fp8
    linear_norm_fp8: Callable[..., tuple[Tensor, Tensor]] = reference.linear_norm_fp8
    gated_up_fp8: Callable[..., Tensor] = reference.gated_up_fp8
    project_rotate_fp8: Callable[..., Tensor] = reference.project_rotate_fp8
    attend_fp8: Callable[..., Tensor] = reference.attend_fp8
    linear_back: Callable[..., Tensor] = backward.linear_back
    norm_back: Callable[..., tuple[Tensor, Tensor]] = backward.norm_back
    gated_up_back: Callable[..., Tensor] = backward.gated_up_back
    split_rotate_back: Callable[..., Tensor] = backward.split_rotate_back
    attend_back: Callable[..., tuple[Tensor, Tensor, Tensor]] = backward.attend_back
    reasons: Mapping[str, str] = field(default_factory=dict)


REFERENCE = Ops()


def load_ops(kind: Kind, *, device: torch.device, shapes: Sequence[OpShape], profile: Profile | None = None) -> Ops:
    """Bind every operator for one model on one device.

    :param kind: ``auto`` takes what the profile says and else the first candidate that passes on an accelerator,
        ``triton`` and ``flashinfer`` insist on trying theirs (on a CPU too, where only Triton's interpreter works),
        ``reference`` takes none.
    :param shapes: every call the model makes; a candidate that fails one of the shapes it would serve is not bound.
    :param profile: measured choices; with ``auto`` the accelerator's own in config/profiles unless given.
    :raises EngineError: unknown kind. :raises ConfigError: the accelerator's profile or the rules are not such files.
    """
    if kind not in get_args(Kind):
        raise EngineError("unknown kernels", got=kind, wanted=f"one of {', '.join(get_args(Kind))}", where="kernels")
    choices, order, origin = _decided(kind, device, profile)
    bound: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for op in DIMS:
        own = [shape for shape in dict.fromkeys(shapes) if shape.op == op]
        named = {s: choices.get((op, str(s.dtype).removeprefix("torch."), s.dims), "") for s in own}
        named = {s: choice if choice in ("reference", *CANDIDATES[op]) else "" for s, choice in named.items()}
        kinds = {name: CANDIDATES[op][name] for name in order if name in CANDIDATES[op]}
        implementation, reasons[op] = _choose(op, kind, device, named, kinds)
        if own and kind == "auto" and device.type != "cpu":
            reasons[op] += f"; by {origin}"
        if implementation is not None:
            bound[op] = implementation
    return Ops(**bound, reasons=reasons)


def _decided(
    kind: Kind, device: torch.device, profile: Profile | None
) -> tuple[Mapping[tuple[str, str, tuple[int, ...]], str], tuple[str, ...], str]:
    """What was measured, the kinds to try where nothing was, and where both are from."""
    known = tuple(dict.fromkeys(name for kinds in CANDIDATES.values() for name in kinds))
    if kind != "auto":
        return {} if profile is None else profile.choices(), (kind,), ""
    if profile is not None:
        return profile.choices(), known, "profile as given"
    profile, origin = load_profile(device)
    if profile is not None:
        return profile.choices(), known, origin
    rule: Rule = load_rule(device)
    return {}, rule.order, f"{origin}; {rule}"


def _choose(
    op: str, kind: Kind, device: torch.device, shapes: Mapping[OpShape, str], kinds: Mapping[str, str]
) -> tuple[Any, str]:
    """The implementation to bind, None for the reference, and what is bound with the sentence why.

    :param shapes: shape -> what the profile names for it, empty where it has no row.
    :param kinds: candidates, best first -> module.
    """
    if kind == "reference":
        return None, "reference, as asked for"
    if not shapes:
        return None, "reference, this model does not call it"
    if kind == "auto" and device.type == "cpu":
        return None, "reference, no accelerator: the reference runs through torch's own kernels"
    if all(choice == "reference" for choice in shapes.values()):
        return None, "reference, measured as the fastest"
    if not kinds:
        return None, "reference, nothing else is tried" if kind == "auto" else f"reference, it has no {kind} form"
    return _bind(op, kind, device, shapes, kinds)


def _bind(
    op: str, kind: Kind, device: torch.device, shapes: Mapping[OpShape, str], kinds: Mapping[str, str]
) -> tuple[Any, str]:
    """See ``_choose``. Each shape takes the kind that was measured for it, else the first; one that fails is out, and
    its shapes take the next."""
    refused: dict[str, str] = {}
    while True:
        served = _served(shapes, [name for name in kinds if name not in refused])
        tried = {
            name: _try_candidate(op, kinds[name], kind, device, own) for name, own in served.items() if name in kinds
        }
        failed = {name: f"{name}: {why}" for name, (candidate, why) in tried.items() if candidate is None}
        if not failed:
            break
        refused |= failed
    if not tried:
        return None, f"reference, {'; '.join(refused.values())}"
    sentences = [f"{name}, {why}" for name, (_, why) in tried.items()] + [*refused.values()]
    if "reference" in served:
        others = "; ".join(map(str, served["reference"]))
        sentences.append(f"the reference, {'else' if refused else 'measured as faster'}, at {others}")
    if len(served) == 1:
        return next(iter(tried.values()))[0], "; ".join(sentences)
    table = {
        (shape.dtype, shape.dims): tried[name][0] if name in tried else definition(op)
        for name, own in served.items()
        for shape in own
    }
    return ByShape(op, table), "; ".join(sentences)


def _served(shapes: Mapping[OpShape, str], kinds: Sequence[str]) -> dict[str, list[OpShape]]:
    """Kind, ``reference`` among them -> the shapes that it is to serve."""
    served: dict[str, list[OpShape]] = {}
    for shape, choice in shapes.items():
        name = choice if choice in (*kinds, "reference") else next(iter(kinds), "reference")
        served.setdefault(name, []).append(shape)
    return served


def _try_candidate(
    op: str, module: str, kind: Kind, device: torch.device, shapes: Sequence[OpShape]
) -> tuple[Any, str]:
    """The candidate, None if it fails, and the sentence why."""
    try:
        keep_compiled()
        candidate = getattr(importlib.import_module(module), op)
    except Exception as failure:  # not installed, built for another Python, a user without a home
        return None, f"cannot be imported: {type(failure).__name__}: {_first_line(failure)}"
    if kind == "auto" and _interpreted():
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


def keep_compiled() -> None:
    """Triton, where it is installed, keeps what it compiles in our cache, unless its own variable says where.

    :raises Exception: it is broken, or there is no folder for the cache.
    """
    if importlib.util.find_spec("triton") and not environment("TRITON_CACHE_DIR"):
        importlib.import_module("phyai_kernels.tiles").keep_compiled(cache_dir() / "triton")


def _interpreted() -> bool:
    """Triton runs its kernels on the CPU in this process."""
    tiles = sys.modules.get("phyai_kernels.tiles")
    return tiles is not None and bool(tiles.INTERPRETED)


def _first_line(failure: Exception) -> str:
    """The sentence of an error whose text may hold a whole kernel."""
    return next(iter(str(failure).strip().splitlines()), "no message")[:200]
