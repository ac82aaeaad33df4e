"""stack's CUDA C++ on a host: its own text and its own launches, with Hopper's instructions from emulated.hpp."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from phyai_kernels import reference, wgmma
from torch import Tensor

from phyai_engine.layers.self_check import TOLERANCES, cases, largest_error, map_tensors, widen

HERE = Path(__file__).parent
# batch, tokens, width, inner, heads, kv_heads, head_dim, columns: as small as the cuts below allow
DIMS = (1, 20, 1024, 512, 2, 1, 256, 200)


class _Words(ctypes.Structure):
    """emulated.hpp's description of a matrix."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("box", ctypes.c_int64),
    )


class Map:
    """In the place of hopper.Map, which asks the driver."""

    def __init__(self, matrix: Tensor, box: int) -> None:
        self.words = _Words(matrix.data_ptr(), *matrix.shape, box)


class Emulator:
    """What hopper.py offers, on a host. :param stack: kernels/stack.py. :param cuts: whose kernels it has."""

    def __init__(self, stack: Any, cuts: Sequence[Any], dims: Sequence[int], folder: Path) -> None:
        self.stack, self.seed = stack, 0
        _, _, width, inner, heads, _, dim, _ = dims
        names = {
            name for cut in cuts for tall in (56, 64) for name in self._names(width, inner, heads * dim, tall, cut)
        }
        self._places = {name: i for i, name in enumerate(sorted(names))}
        text = (HERE / "emulated.hpp").read_text(encoding="utf-8")
        for name in wgmma.FILES[1:]:
            program = (Path(wgmma.__file__).with_name(name)).read_text(encoding="utf-8")
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

    def _names(self, width: int, inner: int, queries: int, tall: int, cuts: Any) -> Iterator[str]:
        found = self.stack.expressions(width, inner, queries, tall, cuts)
        found |= self.stack.end_expressions(32, width)
        yield from (name for name, _ in found.values())

    def load(self, source: str, name: str, device: Any) -> int:
        return self._places[name]

    def launch(self, kernel: Any, grid: tuple[int, int], args: Sequence[Any]) -> None:
        held = [self.stack.hopper._argument(arg) for arg in args]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
        sizes = kernel.threads, kernel.cluster, kernel.shared
        why = self._start(kernel.function, addresses, *grid, *sizes, self.seed)
        assert why is None, why.decode()


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    """kernels/stack.py, where the driver's bindings may be missing."""
    if importlib.util.find_spec("triton") is None or shutil.which("g++") is None:
        pytest.skip("needs Triton and g++")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("cuda") is None:
            bindings = ModuleType("cuda.bindings")
            bindings.driver = bindings.nvrtc = None  # type: ignore[attr-defined]
            patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
            patch.setitem(sys.modules, "cuda.bindings", bindings)
        for name in ("hopper", "stack"):  # not as another test may have imported them
            patch.delitem(sys.modules, f"phyai_kernels.{name}", raising=False)
        yield importlib.import_module("phyai_kernels.stack")
        for name in ("hopper", "stack"):
            sys.modules.pop(f"phyai_kernels.{name}", None)


@pytest.fixture(scope="module")
def cuts(stack: Any) -> dict[str, Any]:
    """Small, but with every path: one and two warpgroups, clusters of 2 to 8 blocks, all panels held and some."""
    cut, attend = stack.Cut, stack.AttendCut
    one = stack.Cuts(cut(64, 4), attend(4, 64), cut(64, 2), cut(128, 2), cut(72, 8))
    two = stack.Cuts(cut(128, 4, 2, 3), attend(2, 128), cut(64, 4), cut(128, 2, 2, 3), cut(72, 2, 1, 2))
    return {"one": one, "two": two}


@pytest.fixture(scope="module")
def emulator(stack: Any, cuts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    made = Emulator(stack, list(cuts.values()), DIMS, tmp_path_factory.mktemp("emulated"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.hopper, "load", made.load)
        patch.setattr(stack.hopper, "kernel", stack.hopper.Kernel)
        patch.setattr(stack.hopper, "launch", made.launch)
        patch.setattr(stack.hopper, "Map", Map)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        yield made


def test_the_kernels_are_the_reference(emulator: Emulator, cuts: dict[str, Any]) -> None:
    """Plain and adaptive norms, and with both ends; 40 packed queries are not a whole tile."""

    def fused(*args: Any) -> Tensor:
        result: Tensor = emulator.stack.stack(*args, cuts=cuts["one"])
        return result

    error = largest_error("stack", torch.bfloat16, DIMS, fused, torch.device("cpu"))
    assert error <= TOLERANCES[torch.bfloat16], error


@pytest.mark.parametrize("seed", [1])
def test_no_order_of_threads_and_copies_matters(emulator: Emulator, cuts: dict[str, Any], seed: int) -> None:
    """Two warpgroups; rows of two lengths, 60 in all; what stands beyond a length is NaN."""
    dims = (2, 30, *DIMS[2:])
    args = list(cases("stack", torch.bfloat16, dims, torch.device("cpu")))[-1]
    wide = map_tensors(args, widen)
    for slab in args[3:5]:
        for row, start in enumerate(args[5].tolist()):
            slab[:, row, :, start:] = float("nan")
    emulator.seed = seed
    found, wanted = emulator.stack.stack(*args, cuts=cuts["two"]), reference.stack(*wide)
    assert (found - wanted).abs().max() <= TOLERANCES[torch.bfloat16] * wanted.abs().max()
    for row, (start, length) in enumerate(zip(args[5].tolist(), args[6].tolist(), strict=True)):
        for own, expected in zip(args[3:5], wide[3:5], strict=True):
            apart = own[:, row, :, start:length].float() - expected[:, row, :, start:length]
            assert apart.abs().max() <= TOLERANCES[torch.bfloat16] * expected.abs().max()
