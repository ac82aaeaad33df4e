"""stack's CUDA C++ on a host (emulation.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulation import Emulator, imported
from phyai_kernels import reference
from torch import Tensor

from phyai_engine.layers.self_check import TOLERANCES, cases, largest_error, map_tensors, widen

# batch, tokens, width, inner, heads, kv_heads, head_dim, columns: as small as the cuts below allow
DIMS = (1, 20, 1024, 1024, 2, 1, 256, 200)


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    with imported("stack_layers", "stack") as (_, module):
        yield module


@pytest.fixture(scope="module")
def cuts(stack: Any) -> dict[str, Any]:
    """Small, but with every path: one and two warpgroups, clusters of 1 to 11 blocks, tiles with pairs of two heads."""
    cut, attend = stack.Cut, stack.AttendCut
    one = stack.Cuts(cut(80, 4), attend(8, 64), cut(64, 2), cut(128, 2), cut(72, 8), True)
    two = stack.Cuts(cut(128, 4, 2), attend(11, 80), cut(64, 4), cut(64, 1, 2, 2), cut(72, 2, 1, 0, late=True), False)
    return {"one": one, "two": two}


@pytest.fixture(scope="module")
def emulator(stack: Any, cuts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    _, _, width, inner, heads, _, dim, _ = DIMS
    found = [stack.end_expressions(32, width, size) for size in (1, 2)]
    forms = (56, cuts["one"], 2), (64, cuts["two"], 2), (56, cuts["two"], 1)
    found += [stack.expressions(width, inner, heads * dim, *form) for form in forms]
    names = [name for kernels in found for name, _ in kernels.values()]
    made = Emulator(stack.hopper, stack.FILES, names, tmp_path_factory.mktemp("emulated"))
    with made.in_place():
        yield made


def test_the_kernels_are_the_reference(stack: Any, emulator: Emulator, cuts: dict[str, Any]) -> None:
    """Plain and adaptive norms, and with both ends; 40 packed queries are not a whole tile."""

    def fused(*args: Any) -> Tensor:
        result: Tensor = stack.stack(*args, cuts=cuts["one"])
        return result

    error = largest_error("stack", torch.bfloat16, DIMS, fused, torch.device("cpu"))
    assert error <= TOLERANCES[torch.bfloat16], error


def test_the_coded_kernels_are_the_definition(stack: Any, emulator: Emulator, cuts: dict[str, Any]) -> None:
    def fused(*args: Any) -> Tensor:
        result: Tensor = stack.stack_fp8(*args, cuts=cuts["two"])
        return result

    error = largest_error("stack_fp8", torch.bfloat16, DIMS, fused, torch.device("cpu"))
    assert error <= TOLERANCES[torch.bfloat16], error


@pytest.mark.parametrize("seed", [1])
def test_no_order_of_threads_and_copies_matters(
    stack: Any, emulator: Emulator, cuts: dict[str, Any], seed: int
) -> None:
    """Two warpgroups; rows of two lengths, 60 in all; what stands beyond a length is NaN."""
    dims = (2, 30, *DIMS[2:])
    args = list(cases("stack", torch.bfloat16, dims, torch.device("cpu")))[-1]
    wide = map_tensors(args, widen)
    for slab in args[3:5]:
        for row, start in enumerate(args[5].tolist()):
            slab[:, row, :, start:] = float("nan")
    emulator.seed = seed
    found, wanted = stack.stack(*args, cuts=cuts["two"]), reference.stack(*wide)
    assert (found - wanted).abs().max() <= TOLERANCES[torch.bfloat16] * wanted.abs().max()
    for row, (start, length) in enumerate(zip(args[5].tolist(), args[6].tolist(), strict=True)):
        for own, expected in zip(args[3:5], wide[3:5], strict=True):
            apart = own[:, row, :, start:length].float() - expected[:, row, :, start:length]
            assert apart.abs().max() <= TOLERANCES[torch.bfloat16] * expected.abs().max()
