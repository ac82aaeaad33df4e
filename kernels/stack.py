"""All layers of an action expert on Hopper, five launches each: stack_products.cu, stack_attend.cu and stack_ends.cu.

Separate kernels in Triton take eight launches a layer: attention's spans, and the sums of products whose inputs are
cut, go through the L2 cache into a second kernel, and each norm is a part of one. Here the blocks of one cluster add
them through their shared memory. Worth it for one row of the batch, where the time is the weights' bytes and the
borders between kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from phyai_kernels import hopper, reference, wgmma
from phyai_kernels.reference import EPS, Ends, LayerWeights, Norm
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.tiles import check_launch
from torch import Tensor

FILES = ("stack_products.cu", "stack_attend.cu", "stack_ends.cu")
MOST_ROWS = 64
HEAD = 256
LOG2_E = 1.4426950408889634


class Cut(NamedTuple):
    """How a product is cut: outputs of a cluster, its blocks (each has a part of the inputs), warpgroups of a block,
    and how many panels of the weight stand in its shared memory at a time, all unless said.
    """

    outputs: int
    blocks: int
    groups: int = 1
    held: int = 0

    def panels(self, inputs: int) -> tuple[int, int]:
        """Of a block: all, and those held."""
        count = inputs // self.blocks // 64
        return count, min(self.held or count, count)


class AttendCut(NamedTuple):
    """How attention is cut: blocks of a cluster, columns of a block."""

    blocks: int
    columns: int


class Cuts(NamedTuple):
    """Of one layer; as measured on an H200 at 50 rows and 1018 columns."""

    project: Cut = Cut(64, 4)
    attend: AttendCut = AttendCut(8, 128)
    o: Cut = Cut(64, 4)
    gated: Cut = Cut(128, 2, 2)
    down: Cut = Cut(72, 8)


MEASURED = Cuts()


class Kernels(NamedTuple):
    """The compiled kernels of one size of model, number of rows and device."""

    project: hopper.Kernel
    attend: hopper.Kernel
    o: hopper.Kernel
    gated: hopper.Kernel
    down: hopper.Kernel
    scale_rows: hopper.Kernel


def shared_bytes(cut: Cut, inputs: int, tall: int, marks: bool = False) -> int:
    """Of a block of a product: as Product in stack_products.cu has it. :param tall: rows of x's panels, 56 or 64."""
    (panels, held), each = cut.panels(inputs), -(-tall // cut.blocks)
    stages = 4 if panels >= 4 and held == panels else panels
    rows = panels * tall * 128 + (64 - tall) * 128
    sums = cut.blocks * each * (cut.outputs + 8) * 2 + (stages + 2) // 2 * 16
    own = each * (cut.outputs // 4) * 4 if marks else 0
    return 1024 + held * cut.outputs * 128 + rows + sums + 256 + own


def products(width: int, inner: int, queries: int, cuts: Cuts) -> dict[str, tuple[str, Cut, int]]:
    """Field of Kernels -> the kernel's template, how it is cut, inputs. :param queries: values of all query heads."""
    return {
        "project": ("project_rotate", cuts.project, width),
        "o": ("add_product", cuts.o, queries),
        "gated": ("gated_up", cuts.gated, width),
        "down": ("add_product", cuts.down, inner),
    }


Instance = tuple[str, tuple[tuple[str, int], ...]]
"""A kernel's C++ expression, and forms and widths of its matrix instructions."""


def expressions(width: int, inner: int, queries: int, tall: int, cuts: Cuts) -> dict[str, Instance]:
    """Field of Kernels -> the kernel's instance. :param tall: rows of a panel."""
    found: dict[str, Instance] = {}
    for name, (op, cut, inputs) in products(width, inner, queries, cuts).items():
        more = f", {HEAD // 2}" if name == "project" else ""
        sizes = cut.outputs, inputs // cut.blocks, cut.blocks, cut.groups, tall, cut.panels(inputs)[1]
        text = f"{op}<{', '.join(map(str, sizes))}{more}>"
        found[name] = text, (("Mma", cut.outputs // cut.groups),)
    blocks, columns = cuts.attend
    found["attend"] = f"attend<{blocks}, {columns}>", (("Mma", columns), ("Wide", HEAD))
    return found | {"scale_rows": ("scale_rows", ())}


def source(instructions: Sequence[tuple[str, int]]) -> str:
    """The program of one kernel. :param instructions: as Instance has them."""
    return wgmma.source(instructions, FILES)


def end_expressions(actions: int, width: int) -> dict[str, Instance]:
    """Field of EndKernels -> the kernel's instance."""
    return {"enter": (f"enter<{actions}>", ()), "leave": (f"leave<{actions}, {width}>", ())}


@functools.cache
def kernels(width: int, inner: int, queries: int, tall: int, cuts: Cuts, device: int) -> Kernels:
    """Compiled and loaded.

    :raises ValueError: sizes that the cuts do not divide. :raises RuntimeError: as hopper.load.
    """
    found = expressions(width, inner, queries, tall, cuts)
    functions = {name: hopper.load(source(used), text, device) for name, (text, used) in found.items()}
    made = {}
    for name, (op, cut, inputs) in products(width, inner, queries, cuts).items():
        if inputs % (cut.blocks * 256) and inputs // cut.blocks not in (64, 128):
            raise ValueError(f"{inputs} inputs are not whole panels of {cut.blocks} blocks")
        shared = shared_bytes(cut, inputs, tall, marks=op == "add_product")
        made[name] = hopper.kernel(functions[name], threads=128 * cut.groups, cluster=cut.blocks, shared=shared)
    blocks, columns = cuts.attend
    shared = 1024 + 2 * HEAD * (64 + 2 * columns) + 64 * 8 + 8
    made["attend"] = hopper.kernel(functions["attend"], threads=128, cluster=blocks, shared=shared)
    made["scale_rows"] = hopper.kernel(functions["scale_rows"], threads=256, cluster=1, shared=0)
    return Kernels(**made)


class EndKernels(NamedTuple):
    """The compiled kernels of both ends, of one number of actions, width and device."""

    enter: hopper.Kernel
    leave: hopper.Kernel


@functools.cache
def end_kernels(actions: int, width: int, device: int) -> EndKernels:
    """Compiled and loaded. :raises RuntimeError: as hopper.load."""
    found = {
        name: hopper.kernel(hopper.load(source(used), text, device), threads=256, cluster=1, shared=0)
        for name, (text, used) in end_expressions(actions, width).items()
    }
    return EndKernels(**found)


def ends_fit(ends: Ends, width: int) -> bool:
    """Whether enter and leave take them: a thread of leave holds actions * width / 256 values."""
    actions = len(ends.out_of[1])
    alike = ends.into is None or ends.into[0].shape[1] == actions
    return alike and actions in (8, 16, 32) and width % 1024 == 0 and actions * width <= 32 * 1024


def stack(
    x: Tensor,
    weights: Sequence[LayerWeights],
    norms: Sequence[Norm],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    lengths: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    ops: Any = None,
    ends: Ends | None = None,
    *,
    cuts: Cuts = MEASURED,
) -> Tensor:
    """See :func:`phyai_kernels.reference.stack`; ``start`` + S is ``lengths``, and columns before ``start`` were
    written before the kernel in front. More rows or columns than the kernels take go to ``ops``, one by one.

    :raises ValueError: as tiles.check_launch; another accelerator or dtype, sizes that do not fit, or a norm with a
        shift whose ``moved`` nobody made.
    """
    check_launch(x, *weights[0], keys, values)
    batch, tokens, width = *x.shape[:2], weights[0].qkv.shape[1]
    kv_heads, columns, dim = keys.shape[2:]
    if batch * tokens > MOST_ROWS or columns > cuts.attend.blocks * cuts.attend.columns:
        return reference.stack(x, weights, norms, keys, values, start, lengths, table, heads, ops, ends)
    if ends is not None and not ends_fit(ends, width):
        rest = weights, norms, keys, values, start, lengths, table, heads
        return reference.around(functools.partial(stack, cuts=cuts), ends, ops or reference, x, *rest)
    _check(x, weights, norms, keys, heads, ends)
    tall = 56 if batch * tokens <= 56 else 64
    made = kernels(width, weights[0].down.shape[1], heads * dim, tall, cuts, x.device.index)
    span = _Span(
        keys, values, start, lengths, tuple(part.expand(batch, tokens, dim // 2).contiguous() for part in table)
    )
    run = _Run(made, cuts, span, (batch, tokens, heads, kv_heads, columns), tall)
    stream = run.first(x.contiguous(), norms[0].scale, None if ends is None else ends.into)
    for i, layer in enumerate(weights):
        stream = run.layer(i, stream, layer, norms[2 * i : 2 * i + 3])
    scale, shift = norms[-1][:2]
    if ends is not None:
        return run.leave(stream, scale, shift, ends.out_of)
    return norm_rows(stream.total, scale, shift, None, None)[1]


def _check(
    x: Tensor,
    weights: Sequence[LayerWeights],
    norms: Sequence[Norm],
    keys: Tensor,
    heads: int,
    ends: Ends | None,
) -> None:
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError(
            f"built for Hopper, compute capability 9.0: this is {torch.cuda.get_device_capability(x.device)}"
        )
    dtype, wanted = weights[0].qkv.dtype, torch.float32 if ends is not None and ends.into else torch.bfloat16
    if dtype != torch.bfloat16 or x.dtype != wanted:
        raise ValueError(f"no kernel for {dtype} with x {x.dtype}; bfloat16 with x {wanted} has one")
    if keys.shape[4] != HEAD or heads % keys.shape[2]:
        raise ValueError(f"heads must have {HEAD} values: got {keys.shape[4]}, {heads} over {keys.shape[2]} K/V heads")
    for matrix in (matrix for layer in weights for matrix in layer):
        if not matrix.is_contiguous() or matrix.dtype != dtype:
            raise ValueError(f"weights must be contiguous {dtype}: got {matrix.dtype}, strides {matrix.stride()}")
    if any(norm.shift is not None and norm.moved is None for norm in norms[:-1]):
        raise ValueError("a norm has a shift, and nobody made what it becomes behind the product (Norm.moved)")


class _Span(NamedTuple):
    """Of one call: slabs [depth, B, kv, C, D], first columns and lengths [B], cos and sin [B, S, D/2]."""

    keys: Tensor
    values: Tensor
    start: Tensor
    lengths: Tensor
    table: tuple[Tensor, ...]


class _Stream(NamedTuple):
    """The residual stream [B, S, width], its form times 1 + scale of the norm behind it, and the sums of its squares.

    :param squares: [rows, parts] fp32.
    """

    total: Tensor
    scaled: Tensor
    squares: Tensor


class _Run(NamedTuple):
    """What every layer of one call needs.

    :param sizes: batch, tokens, heads, K/V heads, columns of the slab. :param tall: rows of a panel of x.
    """

    kernels: Kernels
    cuts: Cuts
    span: _Span
    sizes: tuple[int, int, int, int, int]
    tall: int

    def first(self, x: Tensor, scale: Tensor, into: tuple[Tensor, Tensor] | None) -> _Stream:
        """The stream in front of the layers. :param scale: of the first norm. :param into: as Ends has it."""
        (batch, tokens, *_), width = self.sizes, len(scale)
        rows, sums = batch * tokens, (batch * tokens, 1 if into is None else width // 16)
        scaled = torch.empty((batch, tokens, width), dtype=torch.bfloat16, device=x.device)
        squares = torch.empty(sums, device=x.device)
        if into is None:
            hopper.launch(self.kernels.scale_rows, (rows, 1), (x, scale, scaled, squares, width))
            return _Stream(x, scaled, squares)
        total = torch.empty_like(scaled)
        kernel = end_kernels(x.shape[2], width, x.device.index).enter
        hopper.launch(kernel, (width // 16, 1), (x, *into, scale, total, scaled, squares, rows, width))
        return _Stream(total, scaled, squares)

    def leave(self, stream: _Stream, scale: Tensor, shift: Tensor | None, out_of: tuple[Tensor, Tensor]) -> Tensor:
        """[B, S, A] fp32: the last norm and what follows it. :param out_of: as Ends has it."""
        batch, tokens, width = stream.total.shape
        rows, parts = stream.squares.shape
        out = torch.empty((batch, tokens, len(out_of[1])), device=stream.total.device)
        kernel = end_kernels(out.shape[2], width, out.device.index).leave
        hopper.launch(kernel, (rows, 1), (stream.total, stream.squares, scale, shift, *out_of, out, parts, EPS))
        return out

    def layer(self, i: int, stream: _Stream, layer: LayerWeights, norms: Sequence[Norm]) -> _Stream:
        """Five launches."""
        before, between, behind = norms
        attended = self.attend(i, self.project(i, stream, layer.qkv, before.moved))
        stream = self.add_product(self.kernels.o, self.cuts.o, attended, layer.o, stream, before.gate, between.scale)
        gated = self.gated_up(stream, layer.gate_up, between.moved)
        return self.add_product(
            self.kernels.down, self.cuts.down, gated, layer.down, stream, between.gate, behind.scale
        )

    def project(self, i: int, stream: _Stream, weight: Tensor, moved: Tensor | None) -> Tensor:
        """Rotated queries [B, heads, S, D]; K and V are in the slab."""
        (batch, tokens, heads, kv_heads, columns), span, cut = self.sizes, self.span, self.cuts.project
        query = torch.empty((batch, heads, tokens, HEAD), dtype=weight.dtype, device=weight.device)
        slabs = hopper.Slab.of(span.keys[i]), hopper.Slab.of(span.values[i])
        counts = batch * tokens, tokens, heads, kv_heads, columns, stream.squares.shape[1]
        maps = _map(stream.scaled, self.tall), _map(weight, cut.outputs // 2)
        args = *maps, stream.squares, moved, *span.table, query, *slabs, span.start, *counts
        hopper.launch(self.kernels.project, (_blocks(cut, len(weight)), 1), (*args, EPS))
        return query

    def attend(self, i: int, query: Tensor) -> Tensor:
        """[B, S, heads * D]"""
        (batch, tokens, heads, kv_heads, columns), span = self.sizes, self.span
        out = torch.empty((batch, tokens, heads * HEAD), dtype=query.dtype, device=query.device)
        slabs = hopper.Slab.of(span.keys[i]), hopper.Slab.of(span.values[i])
        group = heads // kv_heads
        tiles = -(-group * tokens // 64)
        args = query, *slabs, span.lengths, out, tokens, group, kv_heads, columns, HEAD**-0.5 * LOG2_E
        hopper.launch(self.kernels.attend, (tiles * self.cuts.attend.blocks, batch * kv_heads), args)
        return out

    def gated_up(self, stream: _Stream, weight: Tensor, moved: Tensor | None) -> Tensor:
        """[B, S, inner]"""
        rows, inner = len(stream.squares), len(weight) // 2
        out = torch.empty((*stream.scaled.shape[:2], inner), dtype=weight.dtype, device=weight.device)
        maps = _map(stream.scaled, self.tall), _map(weight, self.cuts.gated.outputs // 2)
        args = *maps, stream.squares, moved, out, rows, inner, stream.squares.shape[1], EPS
        hopper.launch(self.kernels.gated, (_blocks(self.cuts.gated, len(weight)), 1), args)
        return out

    def add_product(
        self,
        kernel: hopper.Kernel,
        cut: Cut,
        x: Tensor,
        weight: Tensor,
        stream: _Stream,
        gate: Tensor | None,
        scale: Tensor,
    ) -> _Stream:
        """The stream behind a sub-layer. :param scale: of the norm behind it."""
        rows, blocks = len(stream.squares), _blocks(cut, len(weight))
        total, scaled = torch.empty_like(stream.total), torch.empty_like(stream.total)
        squares = torch.empty((rows, blocks // cut.blocks), device=x.device)
        maps = _map(x, self.tall), _map(weight, cut.outputs)
        args = *maps, stream.total, gate, scale, total, scaled, squares, rows, len(weight)
        hopper.launch(kernel, (blocks, 1), args)
        return _Stream(total, scaled, squares)


def _blocks(cut: Cut, outputs: int) -> int:
    return -(-outputs // cut.outputs) * cut.blocks


def _map(matrix: Tensor, box: int) -> hopper.Map:
    return hopper.Map(matrix.view(-1, matrix.shape[-1]), box)
