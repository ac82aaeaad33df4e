"""Shared by all tests."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_looked_through() -> None:
    """What stands when a module begins is left out of collections: looking through a million objects of earlier tests
    took up to 0.7 s, in which a control loop of a later one stood still.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    """The module checkpoints.py, which writes checkpoint folders; loaded by path: test folders are not packages."""
    path = Path(__file__).with_name("checkpoints.py")
    spec = importlib.util.spec_from_file_location("checkpoints", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def pytest_unconfigure() -> None:
    """Libraries that look for what was never let go of, as they end, find nothing."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """The fast tier means the same everywhere: it runs on the CPU, child processes too; ``-m gpu`` sees the device.

    Triton chooses between its interpreter and compiling as it is imported, so one process holds one of them: it is
    imported here, before any test module can.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    marks = config.option.markexpr
    if ("gpu" in marks and "not gpu" not in marks) or importlib.util.find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:  # not left in the environment: the tests' child processes inherit it
        patch.setenv("TRITON_INTERPRET", "1")
        triton = importlib.import_module("triton")
    triton.knobs.runtime.interpret = True
    if triton.__version__.startswith("3.6"):
        wrong = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"  # its interpreter's own
        config.addinivalue_line("filterwarnings", wrong)
