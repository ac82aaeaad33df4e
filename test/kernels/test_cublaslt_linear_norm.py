"""linear_norm with cuBLASLt's product: the switch of the process, and where it is used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The process' switch, and what it was set to."""
    seen = ["default"]

    def switch(library: str | None = None) -> str:
        if library is not None:
            seen.append(library)
        return seen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", switch)
    return seen


@pytest.fixture
def form() -> Any:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return importlib.import_module("phyai_kernels.cublaslt_linear_norm")


def operands(rows: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    sizes = (rows, 64), (32, 64), (rows, 32), (32,)
    return tuple(torch.randn(size, generator=draw) for size in sizes)


@pytest.mark.parametrize(
    ("rows", "libraries"),
    [(96, ["default", "cublaslt", "default"]), (192, ["default"]), (64, ["default"])],
)
def test_the_switch_is_back_after_the_product(
    form: Any, switched: list[str], rows: int, libraries: list[str], agree: Any
) -> None:
    found = form.linear_norm(*operands(rows))
    wanted = importlib.import_module("phyai_kernels.reference").linear_norm(*operands(rows))
    assert switched == libraries
    for value, expected in zip(found, wanted, strict=True):
        agree(value, expected)


def test_it_is_back_after_an_error(form: Any, switched: list[str]) -> None:
    x, weight, stream, scale = operands(96)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        form.linear_norm(x[:, :-1], weight, stream, scale)
    assert switched == ["default", "cublaslt", "default"]


@pytest.mark.gpu
def test_torch_has_the_switch(form: Any) -> None:
    """Its real one; a build for CPUs refuses it."""
    before = torch.backends.cuda.preferred_blas_library()
    with form.cublaslt():
        pass
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [784, 712, 832])
def test_it_is_the_reference(form: Any, rows: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    self_check = importlib.import_module("phyai_engine.layers.self_check")
    error = self_check.largest_error(
        "linear_norm", torch.bfloat16, (rows, 16384, 2048), form.linear_norm, torch.device("cuda")
    )
    assert error <= self_check.TOLERANCES[torch.bfloat16]
