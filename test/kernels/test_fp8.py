"""The operators of coded operands: each equals its reference at odd sizes, and codes as the format says."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from phyai_kernels import reference
from phyai_kernels.reference import FP8, CodedLayer, CodedMatrix
from torch import Tensor

from phyai_engine.layers.self_check import TOLERANCES, cases, largest_error

# Operator -> sizes, in the order of ops.DIMS; nothing is a multiple of a tile in most.
SIZES: dict[str, list[tuple[int, ...]]] = {
    "rms_norm_fp8": [(3, 40), (5, 1000)],
    "linear_norm_fp8": [(3, 48, 24), (70, 144, 40)],
    "gated_up_fp8": [(3, 48, 24), (70, 144, 150)],
    "project_rotate_fp8": [(2, 3, 48, 4, 1, 16, 9), (1, 70, 32, 2, 2, 24, 80), (1, 1, 16, 1, 1, 2, 1)],
    "attend_fp8": [(2, 4, 1, 3, 20, 16), (1, 2, 1, 40, 300, 24)],
}
CALLS = [(op, size) for op, sizes in SIZES.items() for size in sizes]


def kernel(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"phyai_kernels.{op}"), op)
    return function


@pytest.mark.parametrize(("op", "size"), CALLS, ids=str)
def test_it_is_the_reference(device: torch.device, op: str, size: tuple[int, ...]) -> None:
    allowed = TOLERANCES[torch.bfloat16] * (1 if device.type == "cuda" else 2)  # the interpreter cuts bfloat16 off
    error = largest_error(op, torch.bfloat16, size, kernel(op), device)
    assert error <= allowed, f"{op} {size}: {error}"


def test_tiles_are_wide_where_all_run_at_once() -> None:
    cut = pytest.importorskip("phyai_kernels.project_rotate_fp8", reason="Triton is not installed").plan_once
    widths = [cut(rows, 2048, 2560, 132, 227 << 10).outputs for rows in (50, 65, 712, 784, 833, 968)]
    assert widths == [64, 256, 256, 256, 128, 128]
    assert cut(712, 2048, 2560, 128, 99 << 10).outputs == 128, "a GeForce's shared memory does not hold them"


def test_wide_tiles_are_the_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("phyai_kernels.project_rotate_fp8", reason="Triton is not installed")
    size, taken = (1, 70, 128, 2, 1, 24, 80), []
    if device.type == "cpu":
        monkeypatch.setattr(module, "chip_bytes", lambda device: 227 << 10)
    chosen = module.plan_once
    monkeypatch.setattr(module, "plan_once", lambda *args: taken.append(chosen(*args)) or taken[-1])
    test_it_is_the_reference(device, "project_rotate_fp8", size)
    assert {cut.outputs for cut in taken} == {256}


def test_rows_of_one_program_do_not_meet() -> None:
    """Several rows a program, the last of which has fewer, have the bits of one each."""
    module = pytest.importorskip("phyai_kernels.rms_norm", reason="Triton is not installed")
    draw, (rows, width) = torch.Generator().manual_seed(0), (4 * module.WAVE + 3, 40)
    x, out = (torch.randn(rows, width, generator=draw).bfloat16() for _ in range(2))
    scale, factor, bias, centre = torch.randn(4, width, generator=draw)

    def norm(part: slice) -> tuple[Tensor, Tensor]:
        code, scaling = (centre, torch.tensor(30.0)), (factor, bias)
        found: tuple[Tensor, Tensor] = module.norm_rows(x[part], scale, None, out[part], None, code, scaling)
        return found

    together, pieces = norm(slice(None)), [norm(slice(first, first + 500)) for first in (0, 500)]
    for whole, parts in zip(together, zip(*pieces, strict=True), strict=True):
        assert torch.equal(whole.float(), torch.cat(parts).float())


@pytest.mark.parametrize("op", ["gated_up_fp8", "linear_norm_fp8"])
def test_the_last_input_counts(op: str) -> None:
    def blind(x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return getattr(reference, op)(x[..., :-1], weight[:, :-1], *rest)

    assert largest_error(op, torch.bfloat16, (3, 4096, 24), blind, torch.device("cpu")) > TOLERANCES[torch.bfloat16]


Change = Callable[[CodedMatrix], CodedMatrix]
LOSSES: dict[str, Change] = {
    "bias": lambda m: m._replace(bias=m.bias * 0),
    "centre": lambda m: m._replace(code=(m.code[0] * 0, m.code[1])),
    "last input": lambda m: m._replace(
        weight=torch.cat((m.weight[:, :-1], m.weight[:, -1:].float().mul(0).to(FP8)), 1)
    ),
    "order of rows": lambda m: m._replace(weight=m.weight.roll(1, 0)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_stack_that_loses_something_once_is_found(loss: str) -> None:
    """Of one product of one layer; it rounds eight times, and must not hide that."""
    cpu, dims = torch.device("cpu"), (1, 50, 256, 512, 8, 1, 64, 300)
    assert largest_error("stack_fp8", torch.bfloat16, dims, reference.stack_fp8, cpu) < TOLERANCES[torch.bfloat16] * 0.7
    for field in CodedLayer._fields:

        def lossy(x: Tensor, weights: Any, *rest: Any, field: str = field) -> Tensor:
            spoilt = weights[1]._replace(**{field: LOSSES[loss](getattr(weights[1], field))})
            return reference.stack_fp8(x, (weights[0], spoilt), *rest)

        assert largest_error("stack_fp8", torch.bfloat16, dims, lossy, cpu) > TOLERANCES[torch.bfloat16], field


@pytest.mark.parametrize("part", ["shift", "gate"])
def test_a_stack_that_forgets_part_of_its_norms_is_found(part: str) -> None:
    def lossy(x: Tensor, weights: Any, norms: Any, *rest: Any) -> Tensor:
        names = ("shift", "moved") if part == "shift" else (part,)
        return reference.stack_fp8(x, weights, [norm._replace(**dict.fromkeys(names)) for norm in norms], *rest)

    dims = (1, 50, 256, 512, 8, 1, 64, 300)
    assert largest_error("stack_fp8", torch.bfloat16, dims, lossy, torch.device("cpu")) > TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (449.0, 448.0),
        (-1e30, -448.0),
        (float("inf"), 448.0),
        (0.0, 0.0),
        (2.0**-9, 2.0**-9),
        (17.1, 18.0),
        (16.9, 16.0),
    ],
)
def test_what_is_out_of_range_is_held_at_the_largest(device: torch.device, value: float, wanted: float) -> None:
    """rms_norm_fp8 of a row whose normed value is 1 everywhere: what is coded is the gain."""
    x, one = torch.ones((1, 4), device=device), torch.ones((), device=device)
    coded = kernel("rms_norm_fp8")(
        x, torch.full((4,), value - 1.0, device=device), (torch.zeros(4, device=device), one)
    )
    assert reference.encode_fp8(torch.tensor(value), (one.cpu() * 0, one.cpu())).float() == pytest.approx(
        wanted, abs=1e-6
    )
    assert coded.float().tolist() == [[pytest.approx(wanted, rel=1e-3, abs=2e-3)] * 4]


@pytest.mark.parametrize("op", ["rms_norm_fp8", "gated_up_fp8", "attend_fp8"])
def test_a_nan_stays_one(device: torch.device, op: str) -> None:
    """Or a broken observation would become the largest number, and an action."""
    args = next(cases(op, torch.bfloat16, SIZES[op][-1], device))
    broken = args[0].float()
    broken.view(-1)[0] = float("nan")
    # The interpreter's e4m3 has no NaN.
    function = getattr(reference, op) if device.type == "cpu" else kernel(op)
    out = function(broken.to(args[0].dtype), *args[1:]).float()
    assert out.isnan().any() and not out.isnan().all()


def test_rows_of_a_pair_stand_together() -> None:
    columns = torch.arange(12)
    assert reference.halves_of_pairs(columns, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_a_code_takes_the_centre_off_first() -> None:
    x, centre = torch.tensor([[3.0, -1.0], [4.0, 7.0]]), torch.tensor([3.0, -1.0])
    assert reference.encode_fp8(x, (centre, torch.tensor(2.0))).float().tolist() == [[0.0, 0.0], [2.0, 16.0]]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    gated_up = kernel("gated_up_fp8")
    x, weight, factor, bias, code = next(cases("gated_up_fp8", torch.bfloat16, (3, 32, 12), device))
    with pytest.raises(ValueError, match="do not fit"):
        gated_up(x[:, :16], weight, factor, bias, code)
    with pytest.raises(ValueError, match="do not fit"):
        gated_up(x.float(), weight, factor, bias, code)
    with pytest.raises(ValueError, match="do not fit"):
        gated_up(x, weight, factor[1:], bias, code)
    with pytest.raises(ValueError, match="do not fit"):
        gated_up(x, weight, factor, bias[1:], code)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        gated_up(x[:, :8], weight[:, :8].contiguous(), factor, bias, code)
    with pytest.raises(ValueError, match="number must be even"):
        gated_up(x, weight[1:], factor[1:], bias[1:], code)
    with pytest.raises(ValueError, match="a code of 12 numbers is wanted"):
        gated_up(x, weight, factor, bias, (factor, factor[0]))
    with pytest.raises(ValueError, match="a code of 16 numbers is wanted"):
        kernel("rms_norm_fp8")(torch.ones((2, 16), device=device), torch.ones(16, device=device), code)


def test_outside_the_interpreter_a_cpu_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("phyai_kernels.tiles"), "INTERPRETED", False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernel("gated_up_fp8")(*next(cases("gated_up_fp8", torch.bfloat16, (3, 32, 12), torch.device("cpu"))))
