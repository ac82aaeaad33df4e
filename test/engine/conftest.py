"""Shared by the engine tests."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tiny tensors gain nothing from a second thread; on two busy cores it made them four times slower."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
