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
from phyai_kernels.reference import FP8, CodedLayer, Ends, LayerWeights, Norm
from phyai_kernels.rms_norm import norm_rows
from phyai_kernels.stack_layers import HEAD, Layer, Run, Span
from phyai_kernels.tiles import check_launch
from torch import Tensor

FILES = ("stack_products.cu", "stack_attend.cu", "stack_ends.cu")
MOST_ROWS = 64


class Cut(NamedTuple):
    """How a product is cut.

    :param outputs: of a cluster. :param blocks: of it; each has a part of the inputs. :param groups: warpgroups of one.
    :param early: clusters that find room beside the kernel in front; the others bring x and the weight in turns.
    :param late: the next kernel is started when this one has its operands, not at once.
    """

    outputs: int
    blocks: int
    groups: int = 1
    early: int = 1 << 20
    late: bool = False


class AttendCut(NamedTuple):
    """How attention is cut: blocks of a cluster, columns of a block."""

    blocks: int
    columns: int

    def holds(self, columns: int, tokens: int) -> bool:
        """A block has a part of the columns before the last ``tokens``, and a part of those."""
        parts = (max(columns - tokens, 0), min(columns, tokens))
        return sum(-(-part // self.blocks) for part in parts) <= self.columns


class Cuts(NamedTuple):
    """Of one layer. :param ahead: who has gate and up asks for ``down`` to come into the L2 cache."""

    project: Cut
    attend: AttendCut
    o: Cut
    gated: Cut
    down: Cut
    ahead: bool


# As measured on an H200 at 50 rows and 1018 columns.
MEASURED = Cuts(Cut(80, 4, 2), AttendCut(11, 96), Cut(64, 4, 2), Cut(128, 2, 2, early=40), Cut(72, 8), ahead=True)
MEASURED_FP8 = Cuts(
    Cut(128, 8, 2, late=True), AttendCut(8, 128), Cut(64, 4, 2), Cut(64, 1, 2), Cut(72, 8, late=True), ahead=False
)


class Kernels(NamedTuple):
    """The compiled kernels of one size of model, number of rows and device."""

    project: hopper.Kernel
    attend: hopper.Kernel
    o: hopper.Kernel
    gated: hopper.Kernel
    down: hopper.Kernel
    scale_rows: hopper.Kernel


def shared_bytes(cut: Cut, inputs: int, tall: int, size: int, marks: bool = False) -> int:
    """Of a block of a product: as Product in stack_products.cu has it. :param tall: rows of x's panels, 56 or 64."""
    panels, each = inputs * size // cut.blocks // 128, -(-tall // cut.blocks)
    stages = min(panels, 4)
    rows = panels * tall * 128 + (64 - tall) * 128
    sums = cut.blocks * each * (cut.outputs + 8) * 2 + (stages + 2) // 2 * 16
    own = each * (cut.outputs // 4) * 4 if marks else 0
    return 1024 + panels * cut.outputs * 128 + rows + sums + 256 + own


def attend_bytes(cut: AttendCut) -> int:
    """Of a block of attention: keys and values, shares, notes, a barrier."""
    return 1024 + 4 * HEAD * cut.columns + -(-cut.columns // 64) * 64 * 128 + 1024 + 8


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


def expressions(width: int, inner: int, queries: int, tall: int, cuts: Cuts, size: int = 2) -> dict[str, Instance]:
    """Field of Kernels -> the kernel's instance.

    :param tall: rows of a panel. :param size: bytes of an operand's value.
    """
    found: dict[str, Instance] = {}
    for name, (op, cut, inputs) in products(width, inner, queries, cuts).items():
        more = f", {HEAD // 2}" if name == "project" else ""
        sizes = cut.outputs, inputs // cut.blocks, cut.blocks, cut.groups, tall, int(cut.late), cut.early, size
        form = "Eight" if size == 1 else "Mma"
        found[name] = f"{op}<{', '.join(map(str, sizes))}{more}>", ((form, cut.outputs // cut.groups),)
    blocks, columns = cuts.attend
    found["attend"] = f"attend<{blocks}, {columns}, {size}>", (("Deep", columns // 2), ("Turned", HEAD // 2))
    return found | {"scale_rows": (f"scale_rows<{size}>", ())}


def source(instructions: Sequence[tuple[str, int]]) -> str:
    """The program of one kernel. :param instructions: as Instance has them."""
    return wgmma.source(instructions, FILES)


def end_expressions(actions: int, width: int, size: int = 2) -> dict[str, Instance]:
    """Field of EndKernels -> the kernel's instance."""
    return {"enter": (f"enter<{actions}, {size}>", ()), "leave": (f"leave<{actions}, {width}>", ())}


@functools.cache
def kernels(width: int, inner: int, queries: int, tall: int, cuts: Cuts, size: int, device: int) -> Kernels:
    """Compiled and loaded.

    :raises ValueError: sizes that the cuts do not divide. :raises RuntimeError: as hopper.load.
    """
    found = expressions(width, inner, queries, tall, cuts, size)
    functions = {name: hopper.load(source(used), text, device) for name, (text, used) in found.items()}
    made = {}
    for name, (op, cut, inputs) in products(width, inner, queries, cuts).items():
        part = inputs * size // cut.blocks
        if inputs % cut.blocks or (part % 512 and part not in (128, 256)):
            raise ValueError(f"{inputs} inputs are not whole panels of {cut.blocks} blocks")
        shared = shared_bytes(cut, inputs, tall, size, marks=op == "add_product")
        made[name] = hopper.kernel(functions[name], threads=128 * cut.groups, cluster=cut.blocks, shared=shared)
    shared = attend_bytes(cuts.attend)
    made["attend"] = hopper.kernel(functions["attend"], threads=256, cluster=cuts.attend.blocks, shared=shared)
    made["scale_rows"] = hopper.kernel(functions["scale_rows"], threads=256, cluster=1, shared=0)
    return Kernels(**made)


class EndKernels(NamedTuple):
    """The compiled kernels of both ends, of one number of actions, width and device."""

    enter: hopper.Kernel
    leave: hopper.Kernel


@functools.cache
def end_kernels(actions: int, width: int, size: int, device: int) -> EndKernels:
    """Compiled and loaded. :raises RuntimeError: as hopper.load."""
    found = {
        name: hopper.kernel(hopper.load(source(used), text, device), threads=256, cluster=1, shared=0)
        for name, (text, used) in end_expressions(actions, width, size).items()
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
    rest = weights, norms, keys, values, start, lengths, table, heads
    check_launch(x, *weights[0], keys, values)
    if not _fits(x, keys, cuts):
        return reference.stack(x, *rest, ops, ends)
    if ends is not None and not ends_fit(ends, weights[0].qkv.shape[1]):
        return reference.around(functools.partial(stack, cuts=cuts), ends, ops or reference, x, *rest)
    return _run(x, *rest, ends, cuts)


def stack_fp8(
    x: Tensor,
    weights: Sequence[CodedLayer],
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
    cuts: Cuts = MEASURED_FP8,
) -> Tensor:
    """See :func:`phyai_kernels.reference.stack_fp8`; ``start`` and ``lengths`` as ``stack`` has them.

    :raises ValueError: as ``stack``, and where that goes to other operators: of coded weights there are none.
    """
    rest = weights, norms, keys, values, start, lengths, table, heads
    check_launch(x, keys, values)
    if not _fits(x, keys, cuts):
        most = f"{MOST_ROWS} rows and {cuts.attend.blocks * cuts.attend.columns} columns"
        raise ValueError(f"at most {most} have a kernel: got {tuple(x.shape)} over {keys.shape[3]} columns")
    if ends is not None and not ends_fit(ends, weights[0].qkv.weight.shape[1]):
        return reference.around(functools.partial(stack_fp8, cuts=cuts), ends, ops or reference, x, *rest)
    return _run(x, *rest, ends, cuts)


def _fits(x: Tensor, keys: Tensor, cuts: Cuts) -> bool:
    batch, tokens = x.shape[:2]
    return batch * tokens <= MOST_ROWS and cuts.attend.holds(keys.shape[3], tokens)


def _run(
    x: Tensor,
    weights: Sequence[LayerWeights] | Sequence[CodedLayer],
    norms: Sequence[Norm],
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    lengths: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    ends: Ends | None,
    cuts: Cuts,
) -> Tensor:
    layers = [Layer.of(layer) for layer in weights]
    _check(x, layers, norms, keys, heads, ends)
    (batch, tokens), (kv_heads, columns, dim) = x.shape[:2], keys.shape[2:]
    (inner, width), size = layers[0].gate_up.weight.shape, layers[0].qkv.weight.element_size()
    tall = 56 if batch * tokens <= 56 else 64
    made = kernels(width, inner // 2, heads * dim, tall, cuts, size, x.device.index)
    angles = tuple(part.expand(batch, tokens, dim // 2).contiguous() for part in table)
    span = Span(keys, values, start, lengths, angles)
    run = Run(made, cuts, span, (batch, tokens, heads, kv_heads, columns), tall, size)
    ending = None if ends is None else end_kernels(len(ends.out_of[1]), width, size, x.device.index)
    into = None if ends is None or ending is None or ends.into is None else (ending.enter, *ends.into)
    stream = run.first(x.contiguous(), norms[0].scale, layers[0].qkv.code, into)
    for i, layer in enumerate(layers):
        reader = layers[min(i + 1, len(layers) - 1)].qkv.code  # behind the last layer nobody reads what it codes
        stream = run.layer(i, stream, layer, norms[2 * i : 2 * i + 3], reader)
    scale, shift = norms[-1][:2]
    if ends is not None and ending is not None:
        return run.leave(ending.leave, stream, scale, shift, ends.out_of)
    return norm_rows(stream.total, scale, shift, None, None)[1]


def _check(
    x: Tensor, layers: Sequence[Layer], norms: Sequence[Norm], keys: Tensor, heads: int, ends: Ends | None
) -> None:
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        raise ValueError(
            f"built for Hopper, compute capability 9.0: this is {torch.cuda.get_device_capability(x.device)}"
        )
    dtype, wanted = layers[0].qkv.weight.dtype, torch.float32 if ends is not None and ends.into else torch.bfloat16
    if dtype not in (torch.bfloat16, FP8) or x.dtype != wanted or keys.dtype != torch.bfloat16:
        raise ValueError(f"no kernel for {dtype} with x {x.dtype}; bfloat16 and e4m3 with x {wanted} have one")
    if keys.shape[4] != HEAD or heads % keys.shape[2]:
        raise ValueError(f"heads must have {HEAD} values: got {keys.shape[4]}, {heads} over {keys.shape[2]} K/V heads")
    for matrix in (matrix.weight for layer in layers for matrix in layer):
        if not matrix.is_contiguous() or matrix.dtype != dtype:
            raise ValueError(f"weights must be contiguous {dtype}: got {matrix.dtype}, strides {matrix.stride()}")
    if any(norm.shift is not None and norm.moved is None for norm in norms[:-1]):
        raise ValueError("a norm has a shift, and nobody made what it becomes behind the product (Norm.moved)")
