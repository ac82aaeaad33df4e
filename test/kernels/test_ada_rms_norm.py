"""ada_rms_norm: gated residual add and modulated norm against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference

SHAPES = [(1, 1), (2, 5, 72), (1, 1000), (3, 1024)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["norm", "add+norm"])
def test_it_is_the_reference(
    fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...], adds: bool
) -> None:
    x, out = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
    scale, shift, gate = normal(4, 3 * shape[-1])[2].chunk(3)  # a row of the modulation table
    rest = (out, gate) if adds else ()
    wanted = reference.ada_rms_norm(x, scale, shift, *rest)
    for found, value in zip(fused(x, scale, shift, *rest), wanted, strict=True):
        agree(found, value)


@pytest.mark.parametrize(
    ("x", "out", "gate", "total"),
    [
        (0.71875, -3.0, -1.026123046875, 3.78125),  # 3.796875 with the gate in fp32
        (1.1953125, -0.65234375, 1.18994140625, 0.421875),  # 0.419921875 with the product in fp32
    ],
)
def test_it_rounds_where_the_reference_rounds(
    fused: Any, device: torch.device, x: float, out: float, gate: float, total: float
) -> None:
    stream, added = (torch.full((1, 16), value, dtype=torch.bfloat16, device=device) for value in (x, out))
    zero = torch.zeros(16, device=device)
    args = (stream, zero, zero, added, torch.full_like(zero, gate))
    assert reference.ada_rms_norm(*args)[0].unique().tolist() == [total]
    assert fused(*args)[0].unique().tolist() == [total]


def test_gate_and_output_go_together(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="both are None or neither"):
        fused(normal(2, 8), normal(8), normal(8), normal(2, 8))
    with pytest.raises(ValueError, match="both are None or neither"):
        fused(normal(2, 8), normal(8), normal(8), None, normal(8))
