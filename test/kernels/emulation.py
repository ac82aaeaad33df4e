"""The CUDA C++ of kernels/ on a host: its own text and launches, with Hopper's instructions from emulated.hpp."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


class _Words(ctypes.Structure):
    """emulated.hpp's description of a matrix."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("box", ctypes.c_int64),
        ("size", ctypes.c_int64),
    )


class Map:
    """In the place of hopper.Map, which asks the driver."""

    def __init__(self, matrix: Tensor, box: int) -> None:
        self.words = _Words(matrix.data_ptr(), *matrix.shape, box, matrix.element_size())


class Emulator:
    """What hopper.py offers, on a host.

    :param hopper: kernels/hopper.py. :param files: of the program, behind the headers. :param names: expressions of the
        kernels that it has.
    """

    def __init__(self, hopper: Any, files: Iterable[str], names: Iterable[str], folder: Path) -> None:
        self.hopper, self.seed = hopper, 0
        self._places = {name: i for i, name in enumerate(sorted(set(names)))}
        text = (HERE / "emulated.hpp").read_text(encoding="utf-8")
        for name in ("layout.cuh", *files):
            program = (KERNELS / name).read_text(encoding="utf-8")
            text += program.replace("extern __shared__ char chip[];", "char* chip = own_memory();")
        entries = ", ".join(f"[](void** args) {{ call({name}, args); }}" for name in self._places)
        text += f"""
            void (*kernels[])(void**) = {{{entries}}};
            extern "C" const char* start(
                int kernel, void** args, int x, int y, int threads, int size, int shared, int seed) {{
                return launch([=] {{ kernels[kernel](args); }}, {{x, y, 1}}, threads, size, shared, seed);
            }}
        """
        (folder / "kernels.cpp").write_text(text, encoding="utf-8")
        command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "kernels.so", "kernels.cpp"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        self._start = ctypes.CDLL(str(folder / "kernels.so")).start
        self._start.restype = ctypes.c_char_p

    def load(self, source: str, name: str, device: Any) -> int:
        return self._places[name]

    def launch(self, kernel: Any, grid: tuple[int, int], args: Sequence[Any]) -> None:
        held = [self.hopper._argument(arg) for arg in args]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        sizes = kernel.threads, kernel.cluster, kernel.shared
        why = self._start(kernel.function, addresses, *grid, *sizes, self.seed)
        assert why is None, why.decode()

    @contextmanager
    def in_place(self) -> Iterator[Emulator]:
        """Every launch of hopper.py goes here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.hopper, "load", self.load)
            patch.setattr(self.hopper, "kernel", self.hopper.Kernel)
            patch.setattr(self.hopper, "launch", self.launch)
            patch.setattr(self.hopper, "Map", Map)
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            yield self


@contextmanager
def imported(*names: str) -> Iterator[list[Any]]:
    """Modules of kernels/ made anew, where the driver's bindings may be missing; skips without Triton or a compiler."""
    if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
        pytest.skip("needs Triton and g++")
    wanted = [f"phyai_kernels.{name}" for name in ("hopper", *names)]
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("cuda") is None:
            bindings = ModuleType("cuda.bindings")
            bindings.driver = bindings.nvrtc = None  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
            patch.setitem(sys.modules, "cuda.bindings", bindings)
        for name in wanted:  # not as another test may have imported them
            patch.delitem(sys.modules, name, raising=False)
        yield [importlib.import_module(name) for name in wanted[1:]]
        for name in wanted:
            sys.modules.pop(name, None)
