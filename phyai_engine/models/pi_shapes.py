"""Which operators one full request of pi0 or pi0.5 calls, with which sizes: what is checked at load, and tuned."""

from __future__ import annotations

from dataclasses import replace

import torch

from phyai_engine.layers.ops import OpShape
from phyai_engine.models.pi_coded import coded_shapes
from phyai_engine.models.pi_options import PiOptions


def op_shapes(options: PiOptions, dtype: torch.dtype) -> list[OpShape]:
    """Every operator call of one full request: all cameras, the longest prompt, one row.

    :param dtype: of the towers' activations; the vision tower's is ``options.vision_dtype``.
    """
    o, vision = options, vision_dtype(options, dtype)
    queries, images = o.heads * o.head_dim, len(o.cameras) * o.image_tokens
    length = images + o.prompt_len
    columns = length + o.state_tokens + o.action_horizon
    shapes = [
        OpShape("linear", torch.float32, (images, 3 * o.patch**2, o.vis_width)),
        OpShape("layer_norm", vision, (images, o.vis_width)),
        *_linears(images, vision, (o.vis_width, 3 * o.vis_width), (o.vis_width, o.vis_width)),
        *_linears(images, vision, (o.vis_mlp, o.vis_width), (o.vis_width, o.width)),
        OpShape("linear_gelu", vision, (images, o.vis_width, o.vis_mlp)),
        OpShape(
            "attend",
            vision,
            (len(o.cameras), o.vis_heads, o.vis_heads, o.image_tokens, o.image_tokens, o.vis_width // o.vis_heads),
        ),
    ]
    actions = "ada_rms_norm" if o.variant == "pi05" else "rms_norm"
    # Norm, rows, width, MLP of each pass.
    passes = [("rms_norm", length, o.width, o.mlp), (actions, o.action_horizon, o.exp_width, o.exp_mlp)]
    passes += [("rms_norm", 1, o.exp_width, o.exp_mlp)] if o.variant == "pi0" else []
    for norm, rows, width, mlp in passes:
        shapes += [
            OpShape(norm, dtype, (rows, width)),
            OpShape("project_rotate", dtype, (1, rows, width, o.heads, o.kv_heads, o.head_dim, columns)),
            OpShape("attend", dtype, (1, o.heads, o.kv_heads, rows, columns, o.head_dim)),
            OpShape("linear_norm", dtype, (rows, queries, width)),
            OpShape("gated_up", dtype, (rows, width, mlp)),
            OpShape("linear_norm", dtype, (rows, mlp, width)),
        ]
    sizes = o.exp_width, o.exp_mlp, o.heads, o.kv_heads, o.head_dim, columns
    shapes += [OpShape("stack", dtype, (1, rows, *sizes)) for *_, rows, width, _ in passes if width == o.exp_width]
    heads = [(o.action_dim, o.exp_width), (o.exp_width, o.action_dim)]
    if o.variant == "pi0":
        heads += [(o.exp_width, o.exp_width)]
        shapes += _linears(1, torch.float32, (o.action_dim, o.exp_width))
    shapes += _linears(o.action_horizon, torch.float32, *heads)
    shapes += _back_shapes(o, dtype, columns) + [replace(shape, op="linear_back") for shape in shapes[-len(heads) :]]
    return list(dict.fromkeys((*shapes, *coded_shapes(options))))


def _back_shapes(o: PiOptions, dtype: torch.dtype, columns: int) -> list[OpShape]:
    """Of the expert's gradient. :param columns: of the K/V slab."""
    rows, width, heads = o.action_horizon, o.exp_width, (o.heads, o.kv_heads)
    behind = (2 * o.exp_mlp, (o.heads + 2 * o.kv_heads) * o.head_dim, width)
    return [
        *(OpShape("norm_back", dtype, (rows, width, outputs)) for outputs in behind),
        OpShape("gated_up_back", dtype, (rows, width, o.exp_mlp)),
        OpShape("linear_back", dtype, (rows, o.heads * o.head_dim, width)),
        OpShape("attend_back", dtype, (1, *heads, rows, columns, o.head_dim)),
        OpShape("split_rotate_back", dtype, (1, rows, *heads, o.head_dim)),
    ]


def _linears(rows: int, dtype: torch.dtype, *sizes: tuple[int, int]) -> list[OpShape]:
    return [OpShape("linear", dtype, (rows, *size)) for size in sizes]


def vision_dtype(options: PiOptions, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if options.vision_dtype == "float32" else dtype
