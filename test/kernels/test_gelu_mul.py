"""gelu_mul: gated GELU against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from phyai_kernels import reference


@pytest.mark.parametrize("shape", [(1, 2), (3, 7, 200), (2, 3000), (50, 96)], ids=str)
def test_it_is_the_reference(fused: Any, normal: Any, agree: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gate_up = normal(*shape, dtype=dtype) * 3
    agree(fused(gate_up), reference.gelu_mul(gate_up))


def test_large_gates_neither_overflow_nor_leak(fused: Any, device: torch.device, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -300.0, -30.0, 0.0, 30.0, 300.0], device=device)
    found = fused(torch.cat((gate, torch.full_like(gate, 2.0))).to(dtype))
    assert found.abs()[:4].max() < 1e-30
    assert found[4:].tolist() == [60.0, 600.0]


def test_a_nan_passes_through(fused: Any, device: torch.device) -> None:
    found = fused(torch.tensor([[float("nan"), 1.0, 1.0, 1.0]], device=device))
    assert found.isnan().tolist() == [[True, False]]


def test_views_are_read_where_they_stand(fused: Any, normal: Any, agree: Any) -> None:
    gate_up = normal(8, 5).T
    agree(fused(gate_up), reference.gelu_mul(gate_up))


def test_an_odd_axis_is_refused(fused: Any, normal: Any) -> None:
    with pytest.raises(ValueError, match="must be even: got 7"):
        fused(normal(2, 7))


@pytest.mark.gpu
def test_offsets_beyond_2_31(fused: Any, device: torch.device) -> None:
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    gate_up = torch.ones((70_000, 2 * 16384), dtype=torch.bfloat16, device=device)
    gate_up[-1, -1] = 5.0
    assert fused(gate_up)[-1].float().argmax() == 16383
