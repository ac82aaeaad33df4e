"""Each exact saving of pi0 and pi0.5 alone, side by side in one run on a GPU: the same work with and without it.

Each form is one CUDA graph at full size in bfloat16; what the product no longer has is written out here, and so is what
it does not do (marked so) where the saving was asked for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_model
import torch
from evidence import options, show
from gpu_model import graph_times, staged
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from phyai_engine.layers.ops import OpShape
from phyai_engine.models.backbones.gemma import GemmaStack
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.trial import attempt, shipped

Call = Callable[[], Any]
Pair = tuple[str, Call, Call]


def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).to(dtype)


def of_vision_and_prefix(model: PiModel) -> list[Pair]:
    o = model.options
    whole = staged(model, BatchShape(1, 3, 3 * o.image_tokens + 200), (True, True, True), 200)
    few = (True, False, True), 16
    padded, compact = (
        staged(model, shape, *few)
        for shape in (BatchShape(1, 3, 3 * o.image_tokens + 200), BatchShape(1, 2, 2 * o.image_tokens + 16))
    )
    full = GemmaStack(replace(model.language.options, keys_values_only=False), model.dtype).to("cuda")
    for parameter in full.parameters():
        parameter.requires_grad_(False).normal_(std=0.01)
    tokens = model.embed(whole)
    span = replace(model.encode(whole).actions, start=torch.zeros_like(whole["valid"]), lengths=whole["valid"])
    span = replace(span, rotary=model._rotary(span.start, tokens.shape[1]))
    table, words = some(o.vocab, o.width), whole["tokens"]
    return [
        (
            "all cameras as one vision batch",
            lambda: model.vision(whole["images"], model.ops),
            lambda: [model.vision(whole["images"][i : i + 1], model.ops) for i in range(3)],
        ),
        (
            "no padding, no masked camera (2 cameras, 16 tokens)",
            lambda: model.encode(compact),
            lambda: model.encode(padded),
        ),
        (
            "last prefix layer: K and V only",
            lambda: model.language.fill(tokens, span, model.language.plain_norm, model.ops),
            lambda: full(tokens, span, full.plain_norm, model.ops),
        ),
        (
            "embedding scale in the table",
            lambda: functional.embedding(words, table),
            lambda: functional.embedding(words, table) * o.width**0.5,
        ),
    ]


def of_constants(model: PiModel) -> list[Pair]:
    """What could be multiplied into weights: norm weights and softmax scale of the prefix, -1/N of ten steps."""
    o, length = model.options, 968
    x, scale = some(1, length, o.width), some(o.width)
    query, keys, values = (some(1, heads, length, o.head_dim) for heads in (o.heads, o.kv_heads, o.kv_heads))
    lengths = torch.full((1,), length, device="cuda")
    chunk, velocity = some(1, o.action_horizon, o.action_dim).float(), some(1, o.action_horizon, o.action_dim).float()

    def norms(weight: Tensor | None) -> Call:
        return lambda: [functional.rms_norm(x, x.shape[-1:], weight, 1e-6) for _ in range(2 * o.depth)]

    return [
        ("not done: norm weights in the matrix behind (rounds otherwise)", norms(None), norms(scale)),
        (
            "softmax scale in the attention kernel",
            lambda: [model.ops.attend(query, keys, values, lengths) for _ in range(o.depth)],
            lambda: [model.ops.attend(query * o.head_dim**-0.5, keys, values, lengths) for _ in range(o.depth)],
        ),
        (
            "not done: -1/N in the action head (guidance reads the velocity)",
            lambda: [chunk + velocity for _ in range(o.num_steps)],
            lambda: [chunk + (-1.0 / o.num_steps) * velocity for _ in range(o.num_steps)],
        ),
    ]


def of_steps(model: PiModel) -> list[Pair]:
    """Ten steps of pi0.5; layers' weights take turns, so that none stays in the cache."""
    o = model.options
    prefix = model.encode(staged(model, BatchShape(1, 3, 968), (True, True, True), 200))
    x = torch.randn(1, o.action_horizon, o.action_dim, device="cuda")
    dense = [(some(3 * o.exp_width, o.exp_width), some(3 * o.exp_width)) for _ in range(2 * o.depth + 1)]
    mlp, condition = [some(o.exp_width, o.exp_width) for _ in range(2)], some(1, o.exp_width)
    slabs = [some(1, o.kv_heads, 968, o.head_dim) for _ in range(2 * o.depth)]
    own = some(1, o.kv_heads, o.action_horizon, o.head_dim)

    def steps(before: Call) -> Call:
        def run() -> None:
            for step in range(o.num_steps):
                before()
                model.velocity(prefix, x, step)

        return run

    def modulate() -> None:
        made = condition
        for weight in mlp:
            made = functional.silu(functional.linear(made, weight))
        for weight, bias in dense:
            functional.linear(made, weight, bias)

    def joined() -> None:
        for slab in slabs:
            torch.cat((slab, own), dim=2)

    plain = steps(lambda: None)
    return [
        ("time's modulation from a table", plain, steps(modulate)),
        ("new K and V written behind the prefix's", plain, steps(joined)),
    ]


def of_pi0(model: PiModel) -> list[Pair]:
    """Ten steps; the state token and the time MLP."""
    o = model.options
    prefix = model.encode(staged(model, BatchShape(1, 3, 816), (True, True, True), 48))
    span, norm, horizon = prefix.actions, model.expert.plain_norm, o.action_horizon
    both = replace(span, start=span.start - 1, rotary=model._rotary(span.start - 1, horizon + 1))
    alone = replace(span, start=span.start - 1, lengths=span.start, rotary=model._rotary(span.start - 1, 1))
    actions, state, x = some(1, horizon, o.exp_width), some(1, 1, o.exp_width), some(1, horizon, o.action_dim).float()
    tokens = torch.cat((state, actions), dim=1)
    wide = [
        some(o.exp_width, 2 * o.exp_width).float(),
        some(o.exp_width, o.exp_width).float(),
        some(o.exp_width).float(),
    ]
    into, time = some(o.exp_width, o.action_dim).float(), some(1, 1, o.exp_width).float()

    def once() -> None:
        model.expert.fill(state, alone, norm, model.ops)
        for _ in range(o.num_steps):
            model.expert(actions, span, norm, model.ops)

    def always() -> None:
        for _ in range(o.num_steps):
            model.expert(tokens, both, norm, model.ops)

    def unfolded() -> None:
        for _ in range(o.num_steps):
            first = functional.linear(x, into)
            inner = functional.linear(torch.cat((first, time.expand_as(first)), dim=-1), wide[0], wide[2])
            functional.linear(functional.silu(inner), wide[1], wide[2])

    def folded() -> None:
        for step in range(o.num_steps):
            model._into(x, step)

    return [
        ("pi0: the state token's K and V once", once, always),
        ("pi0: time MLP folded into the action's projection", folded, unfolded),
    ]


def attention(model: PiModel) -> list[tuple[str, ...]]:
    """us of one call: what the product has, and each of torch's."""
    o, rows = model.options, []
    shapes = {
        "vision": (
            len(o.cameras),
            o.vis_heads,
            o.vis_heads,
            o.image_tokens,
            o.image_tokens,
            o.vis_width // o.vis_heads,
        ),
        "prefix": (1, o.heads, o.kv_heads, 968, 1018, o.head_dim),
        "action expert": (1, o.heads, o.kv_heads, o.action_horizon, 1018, o.head_dim),
    }
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for name, dims in shapes.items():
        shape = OpShape("attend", torch.bfloat16, dims)
        loads = shipped("attend", torch.device("cuda")) | {
            each.name: lambda each=each: _sdpa(each) for each in backends
        }
        trials = [attempt(shape, kind, load, torch.device("cuda")) for kind, load in loads.items()]
        rows.append((name, *("wrong or fails" if t.us is None else f"{t.us:.1f}" for t in trials)))
    return [("attention, us", *loads), *rows]


def _sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """torch's, of all columns where the lengths are on the device: the time of the longest row."""

    def attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> Tensor:
        columns = keys.shape[2] if lengths is None or torch.cuda.is_current_stream_capturing() else int(lengths.max())
        group = query.shape[1] // keys.shape[1]
        wide = [slab[:, :, :columns].repeat_interleave(group, 1) if group > 1 else slab for slab in (keys, values)]
        with sdpa_kernel(backend):
            mixed = functional.scaled_dot_product_attention(query, *wide)
        return mixed.transpose(1, 2).flatten(2)

    return attend


def saving(pair: Pair, n: int) -> tuple[tuple[str, ...], bool]:
    """A row, printed as soon as it is there, and whether it could be measured."""
    name, *calls = pair
    try:
        times = [graph_times(call, n) for call in calls]
    except RuntimeError as error:  # of torch, or of a kernel: the other rows are still worth having
        print(f"{name}: {error}", flush=True)
        return (name, "FAILED", str(error)[:60], ""), False
    medians = [statistics.median(each) for each in times]
    cells = [f"{median:.3f} / {each[int(0.99 * n)]:.3f}" for median, each in zip(medians, times, strict=True)]
    print(f"{name}: with {cells[0]} ms, without {cells[1]}", flush=True)
    return (name, *cells, f"{medians[1] - medians[0]:.3f}"), True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=100)
    chosen = options(parser)
    where, found = gpu_model.gpu_or_leave(), []
    for variant, prompt in (("pi05", 200), ("pi0", 48)):
        model = gpu_model.full_size(PiOptions(variant=variant, dtype="bfloat16", prompt_len=prompt))
        parts = (of_vision_and_prefix, of_constants, of_steps) if variant == "pi05" else (of_pi0,)
        for part in parts:
            found += [saving(pair, chosen.n) for pair in part(model)]
        if variant == "pi05":
            choices = attention(model)
        del model
        torch.cuda.empty_cache()
    columns = ("saving", "with, ms p50 / p99", "without", "saves, p50")
    title = f"gpu: exact savings, each alone, bf16, n {chosen.n}, {where}"
    show(title, columns, [row for row, _ in found], log=chosen.log)
    show(f"gpu: attention choice, bf16, {where}", choices[0], choices[1:], log=chosen.log)
    return 0 if all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
