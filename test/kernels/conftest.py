"""The kernels' tests run in Triton's interpreter, on the CPU; with ``-m gpu`` they are compiled and run on CUDA.

Which of the two a process holds is chosen in test/conftest.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # emulation.py

# |error| over the largest value. The interpreter cuts bfloat16 off where hardware rounds, and there are up to 4 casts.
ALLOWED = {
    ("cpu", torch.float32): 2e-6,
    ("cpu", torch.bfloat16): 1.6e-2,
    ("cuda", torch.float32): 5e-6,
    ("cuda", torch.bfloat16): 1e-2,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test runs; the generator of random numbers is seeded."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    interpreted = importlib.import_module("phyai_kernels.tiles").INTERPRETED
    if request.param == "cpu" and not interpreted:
        if "gpu" not in request.config.option.markexpr.replace("not gpu", ""):
            pytest.fail("something imported Triton before its interpreter was on (test/conftest.py)")
        pytest.skip("Triton compiles in this process: run the interpreter's tests without -m gpu")
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("needs a CUDA device, and -m gpu alone")
    torch.manual_seed(0)
    return torch.device(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def fused(device: torch.device, request: pytest.FixtureRequest) -> Any:
    """The kernel of the operator that the test file is named for."""
    op = request.path.stem.removeprefix("test_")
    return getattr(importlib.import_module(f"phyai_kernels.{op}"), op)


@pytest.fixture
def normal(device: torch.device) -> Callable[..., Tensor]:
    """Normal values of a shape and, unless it is fp32, a dtype."""
    return lambda *shape, dtype=torch.float32: torch.randn(shape, device=device).to(dtype)


def check_agreement(found: Tensor, wanted: Tensor) -> None:
    """Same shape and dtype, and values that differ by rounding only."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    error = (found.float() - wanted.float()).abs().max()
    assert error <= ALLOWED[found.device.type, found.dtype] * wanted.float().abs().max(), f"off by {error}"


@pytest.fixture
def agree() -> Callable[[Tensor, Tensor], None]:
    return check_agreement
