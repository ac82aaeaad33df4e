"""What one request of pi0 or pi0.5 has to compute and to read at least, phase by phase: for rates, not for planning.

Counted are products and attention, with all exact savings; weights once a phase, K and V. Norms, activations and what a
larger captured shape computes beside the valid tokens are not: a rate is that of the work that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from phyai_engine.models import Work
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.models.pi_options import PiOptions

_WIDE = 4  # bytes of what stays fp32


def phase_work(
    options: PiOptions, shape: BatchShape, size: int, vision_size: int, coded: Mapping[str, int] | None = None
) -> Mapping[str, Work]:
    """``vision``, ``prefix`` and ``step``, of which each takes one.

    :param shape: images and the longest row's valid tokens of the batch. :param size: bytes of a value of the towers;
        :param vision_size: of the vision tower's. :param coded: phase -> how many of its weights have eight bits.
    """
    o = options
    pixels, tokens = 3 * o.patch**2, o.image_tokens
    layer = 4 * o.vis_width**2 + 2 * o.vis_width * o.vis_mlp
    weights = o.vis_depth * layer + o.vis_width * o.width
    attention = o.vis_depth * 4 * tokens**2 * o.vis_width
    vision = Work(
        shape.images * (2 * tokens * (weights + pixels * o.vis_width) + attention),
        vision_size * weights + _WIDE * pixels * o.vis_width if shape.images else 0,
    )
    prefix = _stack(o, shape, shape.length, o.width, o.mlp, size, keys_values_only=True)
    step_tokens, seen = o.action_horizon, shape.length + o.state_tokens + o.action_horizon
    step = _stack(o, shape, step_tokens, o.exp_width, o.exp_mlp, size, seen=seen)
    heads = 2 * o.action_dim * o.exp_width + (o.exp_width**2 if o.variant == "pi0" else 0)
    step = Work(step.flop + 2 * shape.batch * step_tokens * heads, step.bytes + _WIDE * heads)
    if o.variant == "pi0":  # its state token goes through the expert once
        state = _stack(o, shape, 1, o.exp_width, o.exp_mlp, size, seen=shape.length + 1, keys_values_only=True)
        entry = o.action_dim * o.exp_width
        prefix = Work(prefix.flop + state.flop + 2 * shape.batch * entry, prefix.bytes + state.bytes + _WIDE * entry)
    found = {"vision": vision, "prefix": prefix, "step": step}
    for phase, count in (coded or {}).items():
        found[phase] = Work(found[phase].flop, found[phase].bytes - (size - 1) * count)
    return found


def _stack(
    o: PiOptions,
    shape: BatchShape,
    tokens: int,
    width: int,
    mlp: int,
    size: int,
    *,
    seen: int = 0,
    keys_values_only: bool = False,
) -> Work:
    """One pass of a Gemma stack. :param seen: columns that each token attends to, its own pass' among them."""
    queries, cached = o.heads * o.head_dim, 2 * o.kv_heads * o.head_dim
    seen = seen or tokens
    whole = o.depth - (1 if keys_values_only else 0)
    weights = o.depth * width * cached + whole * (2 * width * queries + 3 * width * mlp)
    attention = whole * 4 * tokens * seen * queries
    return Work(
        shape.batch * (2 * tokens * weights + attention),
        size * (weights + shape.batch * o.depth * seen * cached),
    )
