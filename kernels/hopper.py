"""CUDA C++ kernels for Hopper: compiled once when a model is loaded, kept on disk, launched on torch's stream.

For what Triton cannot say: blocks of one cluster that read each other's shared memory. The compiler is the CUDA
toolkit's library (NVRTC) through cuda-bindings, which torch's CUDA builds bring along; neither nvcc nor a host compiler
is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from cuda.bindings import driver, nvrtc
from torch import Tensor

OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")
PORTABLE = 8  # blocks of a cluster; more must be asked for


class Kernel(NamedTuple):
    """One compiled kernel. :param function: the driver's. :param threads, shared: of a block; bytes."""

    function: Any
    threads: int
    cluster: int
    shared: int


class Slab(ctypes.Structure):
    """Keys or values [B, heads, columns, D]: address, strides in values."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("column", ctypes.c_int64),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> Slab:
        return cls(tensor.data_ptr(), *tensor.stride()[:3])


class Pair(ctypes.Structure):
    """Two tensors as one argument; none are null."""

    _fields_ = (("first", ctypes.c_void_p), ("second", ctypes.c_void_p))

    @classmethod
    def of(cls, tensors: tuple[Tensor, Tensor] | None) -> Pair:
        return cls(*(tensor.data_ptr() for tensor in tensors or ()))


class Map:
    """A matrix of bf16 or e4m3 as the copy engine reads it: boxes whose rows are 128 bytes, swizzled.

    :param matrix: [rows, columns], contiguous. :param box: rows of a box. What is beyond the matrix reads as 0.
    :raises RuntimeError: the driver refuses it.
    """

    def __init__(self, matrix: Tensor, box: int) -> None:
        (rows, columns), size = matrix.shape, matrix.element_size()
        types = driver.CUtensorMapDataType
        swizzle, promotion = driver.CUtensorMapSwizzle, driver.CUtensorMapL2promotion
        made = _value(
            driver.cuTensorMapEncodeTiled(
                types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if size == 2 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
                2,
                matrix.data_ptr(),
                [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
                [driver.cuuint64_t(size * columns)],
                [driver.cuuint32_t(128 // size), driver.cuuint32_t(box)],
                [driver.cuuint32_t(1), driver.cuuint32_t(1)],
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        self.words = (ctypes.c_uint64 * 16)(*(int(word) for word in made.opaque))


@functools.cache
def load(source: str, name: str, device: int) -> Any:
    """The driver's function of an expression, as ``gated_up<128, 512, 2, 1, 56>``, loaded on a device.

    :raises RuntimeError: the compiler's log, or the driver's word.
    """
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context
        binary, lowered = compiled(source, name)
        return _value(driver.cuModuleGetFunction(_value(driver.cuModuleLoadData(binary)), lowered))


def kernel(function: Any, *, threads: int, cluster: int, shared: int) -> Kernel:
    """A function with what its launch needs.

    :raises RuntimeError: the driver refuses so much shared memory or such a cluster.
    """
    attribute = driver.CUfunction_attribute
    wanted = {
        attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shared,
        # A multiprocessor that must divide its memory anew is emptied first: all kernels ask for the same division.
        attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100,
        attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: int(cluster > PORTABLE),
    }
    for name, value in wanted.items():
        _value(driver.cuFuncSetAttribute(function, name, value))
    return Kernel(function, threads, cluster, shared)


def launch(kernel: Kernel, grid: tuple[int, int], args: Sequence[Any]) -> None:
    """Start a kernel on the current stream, as soon as the one in front has started.

    :param args: tensors (their addresses), None (a null address), Maps, ints (of 32 bits), floats, and values of a
        ctypes type.
    """
    held = [_argument(arg) for arg in args]
    addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(value) for value in held))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared
    config.hStream = torch.cuda.current_stream().cuda_stream
    early, cluster = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = kernel.cluster, 1, 1
    config.attrs = [early, cluster]
    config.numAttrs = 2
    _value(driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(addresses), 0))


def _argument(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, Map):
        return arg.words
    if arg is None:
        return ctypes.c_void_p(0)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return ctypes.c_int32(arg) if isinstance(arg, int) else arg


def compiled(source: str, name: str) -> tuple[bytes, bytes]:
    """Machine code, and the kernel's name in it; compiled unless the kernels' cache holds it."""
    version = _value(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, name, OPTIONS, version)).encode()).hexdigest()
    kept = Path(triton.knobs.cache.dir) / f"hopper-{key}"
    if kept.exists():
        lowered, _, binary = kept.read_bytes().partition(b"\n")
        return binary, lowered
    binary, lowered = compile_source(source, name)
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_bytes(lowered + b"\n" + binary)
    part.replace(kept)
    return binary, lowered


def compile_source(source: str, name: str) -> tuple[bytes, bytes]:
    """Machine code for Hopper of one kernel, and its name in it. Needs no GPU.

    :raises RuntimeError: with the compiler's log.
    """
    program = _value(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    _value(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    (result,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), list(OPTIONS))
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_value(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC refuses {name}: {log.decode(errors='replace')[:2000]}")
    lowered: bytes = _value(nvrtc.nvrtcGetLoweredName(program, name.encode()))
    binary = bytes(_value(nvrtc.nvrtcGetCUBINSize(program)))
    _value(nvrtc.nvrtcGetCUBIN(program, binary))
    nvrtc.nvrtcDestroyProgram(program)
    return binary, lowered


def _value(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver or the compiler returned. :raises RuntimeError: it failed."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code.name}")
    return values[0] if len(values) == 1 else tuple(values)
