"""What the products of coded operands share: tiles, the loop over the inputs, rounding to e4m3, and the launch.

Operands are read through descriptors (the copy engine fetches whole tiles and fills what lies outside with zeros), so
rows must start at multiples of 16 bytes. Sums are fp32; scale, bias, nonlinearity and coding stand in the epilogue.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from phyai_kernels.gelu_mul import bent_gelu
from phyai_kernels.products import launch_options, overlaps
from phyai_kernels.reference import FP8, LARGEST_FP8, Code
from phyai_kernels.tiles import INTERPRETED, WAVE, block, check_launch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNED = 16  # bytes that rows of operands are multiples of
OLDEST = (8, 9)  # compute capability of the first NVIDIA devices that multiply e4m3
_LARGEST = tl.constexpr(LARGEST_FP8)
_DOT = tl.float32 if INTERPRETED else tl.float8e4nv  # what operands are for ``tl.dot``
_INTERPRETED = tl.constexpr(INTERPRETED)


@functools.cache
def programs_of(device: torch.device) -> int:
    """One for each multiprocessor."""
    return WAVE if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


class Plan(NamedTuple):
    """How one shape is cut: rows, outputs and inputs of a tile, warps and stages of a program."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def plan(rows: int, inputs: int, outputs: int) -> Plan:
    """On an H200: 968 x 2048 -> 2 x 16384 with gated GELU 106 us (cuBLAS' product alone 97), -> 2560 14.5 us.

    :param rows: of the activations.
    """
    if rows <= 64:
        cut = Plan(64, 64, 256, 4, 4)
    elif outputs >= 8192:
        cut = Plan(128, 256, 128, 8, 4)
    else:
        cut = Plan(128, 128, 128, 4, 3)
    inner = block(inputs, smallest=32, largest=cut.inputs)  # fewer the matrix instruction does not take
    return cut._replace(outputs=block(outputs, largest=cut.outputs), inputs=inner)


@triton.jit
def _gelu(x):
    """GELU, tanh form. The hardware's tanh is exact to 2**-11, which eight bits do not see: 106 us instead of 113."""
    if _INTERPRETED:
        result = bent_gelu(x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bent = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1
        )
        result = 0.5 * x * (1.0 + bent)
    return result


@triton.jit
def tile_of(tile, tiles_down, tiles_across, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles go together, so that their operands stay in the L2 cache."""
    together = GROUP * tiles_across
    first = tile // together * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    return first + tile % together % height, tile % together // height


@triton.jit
def sum_tile(
    x,
    weight,
    row,
    output,
    inputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] fp32 from a first row and output on. :param x, weight: descriptors."""
    summed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, inputs, BLOCK_K):
        a = x.load([row, k])
        b = weight.load([output, k])
        summed = tl.dot(a.to(DOT), b.to(DOT).T, summed)
    return summed


@triton.jit
def coded(x, centre, inverse):
    """See reference.encode_fp8. :param centre: values, of x's columns. :param inverse: pointer."""
    held = tl.clamp((x - centre) * tl.load(inverse), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if _INTERPRETED:  # its cast loses the carry into the exponent: hand it what needs no rounding
        bits = held.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        held = tl.where(tl.abs(held) < 2.0**-6, tl.floor(held * 512 + 0.5) / 512, normal)
    return held.to(tl.float8e4nv)


def check_coded(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, *others: Tensor | None) -> None:
    """Refuse what a product of coded operands would get wrong, or a device that has none.

    :raises ValueError: as tiles.check_launch; operands that are not e4m3 or do not fit; rows that are no multiples of
        16 bytes; a device without e4m3 products.
    """
    check_launch(factor, bias, *others)
    outputs, inputs = weight.shape
    if {x.dtype, weight.dtype} != {FP8} or x.shape[-1] != inputs or not factor.shape == bias.shape == (outputs,):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, factor {tuple(factor.shape)} "
            f"and bias {tuple(bias.shape)} do not fit"
        )
    if inputs % ALIGNED or not weight.is_contiguous():
        raise ValueError(f"the weight must be contiguous and its rows multiples of 16 bytes: got {inputs}")
    if len({x.device, weight.device, factor.device}) != 1:
        raise ValueError(f"tensors are on several devices: {x.device}, {weight.device}, {factor.device}")
    check_multiplies(x.device)


def check_code(code: Code, width: int) -> Code:
    """What codes a result of that width, contiguous.

    :raises ValueError: of another size.
    """
    centre, inverse = code
    if centre.shape != (width,) or inverse.numel() != 1:
        raise ValueError(f"a code of {width} numbers is wanted: got {tuple(centre.shape)}, {tuple(inverse.shape)}")
    return centre.contiguous(), inverse


def check_multiplies(device: torch.device) -> None:
    """:raises ValueError: the device has no e4m3 products that Triton knows."""
    if INTERPRETED:
        return
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < OLDEST:
        raise ValueError(f"no e4m3 products on {torch.cuda.get_device_name(device)}; NVIDIA has them from 8.9 on")


def described(x: Tensor, weight: Tensor, cut: Plan) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Both operands as the kernels take them. :param x: [..., K], contiguous."""
    flat = x.view(-1, x.shape[-1])
    return (
        TensorDescriptor.from_tensor(flat, [cut.rows, cut.inputs]),
        TensorDescriptor.from_tensor(weight, [cut.outputs, cut.inputs]),
    )


def launch_constants(cut: Plan, device: torch.device) -> dict[str, Any]:
    """The compile-time parameters that all products share."""
    return {
        "BLOCK_M": cut.rows,
        "BLOCK_N": cut.outputs,
        "BLOCK_K": cut.inputs,
        "GROUP": 8,
        "OVERLAP": overlaps(device),
        "DOT": _DOT,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
        **launch_options(device),
    }


@triton.jit(do_not_specialize=["rows"])  # see attend.py
def _product_fp8(
    x,
    weight,
    factor,
    bias,
    centre,
    inverse,
    out,
    rows,
    inputs,
    outputs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    FLAT: tl.constexpr,
    OVERLAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """Tiles, one after the other. GATED: outputs are in turn gate and up, and their gated GELU is what is stored."""
    tiles_down, tiles_across = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    width = outputs // 2 if GATED else outputs
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Flattened, so that the first operands of the next tile are fetched while this one's result is bent and stored.
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0), flatten=FLAT):
        down, across = tile_of(tile, tiles_down, tiles_across, GROUP)
        result = sum_tile(x, weight, down * BLOCK_M, across * BLOCK_N, inputs, BLOCK_M, BLOCK_N, BLOCK_K, DOT)
        column = across * BLOCK_N + tl.arange(0, BLOCK_N)
        held = column < outputs
        result = result * tl.load(factor + column, mask=held, other=0.0)[None, :]
        result += tl.load(bias + column, mask=held, other=0.0)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(result, (BLOCK_M, BLOCK_N // 2, 2)))
            result = _gelu(gate) * up
            column = across * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        row = down * BLOCK_M + tl.arange(0, BLOCK_M)
        at = out + row.to(tl.int64)[:, None] * width + column[None, :]
        mask = (row < rows)[:, None] & (column < width)[None, :]
        if GATED:
            middle = tl.load(centre + column, mask=column < width, other=0.0)
            tl.store(at, coded(result, middle[None, :], inverse), mask=mask)
        else:
            tl.store(at, result.to(tl.bfloat16), mask=mask)


def fused_product(x: Tensor, weight: Tensor, factor: Tensor, bias: Tensor, code: Code | None = None) -> Tensor:
    """The product with what follows; operands as reference.py has them, checked by the caller.

    :param code: of the gated GELU of the outputs, which are in turn gate and up; None stores them themselves.
    :return: e4m3 with ``code``, else bfloat16.
    """
    outputs, inputs = weight.shape
    x = x.contiguous()
    rows = x.numel() // inputs
    cut = plan(rows, inputs, outputs)
    width, dtype = (outputs, torch.bfloat16) if code is None else (outputs // 2, FP8)
    out = torch.empty((*x.shape[:-1], width), dtype=dtype, device=x.device)
    tiles = triton.cdiv(rows, cut.rows) * triton.cdiv(outputs, cut.outputs)
    programs = programs_of(x.device)
    flat = tiles >= 2 * programs
    _product_fp8[(programs if flat else tiles,)](
        *described(x, weight, cut),
        factor,
        bias,
        *(code or (None, None)),
        out,
        rows,
        inputs,
        outputs,
        GATED=code is not None,
        FLAT=flat,
        **launch_constants(cut, x.device),
    )
    return out


def vendor_product(x: Tensor, weight: Tensor) -> Tensor | None:
    """x @ weight.T as cuBLAS multiplies it, in bfloat16 and yet to be scaled; None where it does not.

    Its tiles are up to 30 % faster than ours, but a factor per output costs it 2 us, and a coded result it has not.
    """
    if INTERPRETED or x.device.type != "cuda" or len(weight) % ALIGNED:
        return None
    one, flat = _one(x.device), x.reshape(-1, x.shape[-1])
    out = torch._scaled_mm(flat, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return out.view(*x.shape[:-1], -1)


@functools.cache
def _one(device: torch.device) -> Tensor:
    """A constant: made anew it would be a launch. The operators' check at load makes it, before any capture."""
    return torch.ones((), device=device)
