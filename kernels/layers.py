"""All layers of an action expert over one request, in one kernel: layers.cu, compiled as it is first needed.

A step of the expert streams 600 MB of weights through a hundred small products, each waiting for the one before: as
kernels, their borders take longer than the stream. Here the blocks stay on the chip. Weights of the next phase are on
their way while the last one's results are still being exchanged.

For one shape family: a single request of up to 56 tokens, width 1024, hidden 4096, 8 heads of 256 over one K/V head, up
to 1024 columns, bfloat16, on NVIDIA's compute capability 9.0. What does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from phyai_kernels.rms_norm import norm_rows
from torch import Tensor

BLOCKS, THREADS = 128, 256
PART = 9216  # floats that a block may leave for its group
COUNTERS = 32 * (1 + 32 + 16)  # of all blocks, of each four, of each eight; a cache line each
WIDTH, HIDDEN, HEADS, DIM = 1024, 4096, 8, 256
MOST_ROWS, MOST_COLUMNS = 56, 1024
SHARED_BYTES = 78848 + 135168 + 8192 + MOST_ROWS * 8 * 4 + 64 * 4
SCRATCH = MOST_ROWS * (HEADS * DIM * 2 + HIDDEN + WIDTH)

Weights = Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]


class Layers:
    """The operator with its compiled kernel and the addresses of the weights that it was called with."""

    def __init__(self) -> None:
        self._kernel: Any = None
        self._addresses: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self,
        x: Tensor,
        weights: Weights,
        norms: Tensor,
        table: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        lengths: Tensor,
        heads: int,
    ) -> Tensor:
        """See :func:`phyai_kernels.reference.layers`.

        :raises ValueError: a shape, dtype or device that the kernel is not for.
        :raises RuntimeError: the kernel cannot be compiled, or its blocks do not fit on the chip together.
        """
        batch, rows, width = x.shape
        depth, _, kv_heads, columns, dim = keys.shape
        sizes = (batch, width, weights[0][2].shape[0], heads, kv_heads, dim)
        if sizes != (1, WIDTH, 2 * HIDDEN, HEADS, 1, DIM) or rows > MOST_ROWS or columns > MOST_COLUMNS:
            raise ValueError(f"batch, width, gate and up, heads, kv heads, head_dim {sizes}, {rows} rows, {columns} columns")
        if {x.dtype, keys.dtype, values.dtype} != {torch.bfloat16} or norms.dtype != torch.float32:
            raise ValueError(f"bfloat16 only, with float32 norms: got {x.dtype}, {keys.dtype}, {norms.dtype}")
        tensors = (x, norms, *table, keys, values, start, lengths)
        if not all(t.is_cuda and t.is_contiguous() for t in tensors):
            raise ValueError("all tensors must be contiguous, on one CUDA device")
        kernel = self._compiled()
        out = torch.empty_like(x)
        scratch = torch.empty(SCRATCH, dtype=x.dtype, device=x.device)
        squares = torch.empty(MOST_ROWS * BLOCKS, dtype=torch.float32, device=x.device)
        parts = torch.empty(BLOCKS * PART, dtype=torch.float32, device=x.device)
        counter = torch.zeros(COUNTERS, dtype=torch.int32, device=x.device)
        pointers = self._pointers(weights, x.device)
        args = [x, out, pointers, norms, *table, keys, values, start, lengths, scratch, squares, parts, counter]
        kernel(
            grid=(BLOCKS, 1, 1),
            block=(THREADS, 1, 1),
            args=[*args, rows, depth, columns, norms.shape[1]],
            shared_mem=SHARED_BYTES,
        )
        last = norms[-1]
        return norm_rows(out, last[0], last[1] if len(last) > 1 else None, None, None)[1]

    def _pointers(self, weights: Weights, device: torch.device) -> Tensor:
        """[depth, 4] int64, made before any graph is captured: the first call of a model is outside."""
        addresses = tuple(weight.data_ptr() for layer in weights for weight in layer)
        if addresses not in self._addresses:
            if not all(weight.is_contiguous() for layer in weights for weight in layer):
                raise ValueError("weights must be contiguous")
            self._addresses[addresses] = torch.tensor(addresses, dtype=torch.int64, device=device)
        return self._addresses[addresses]

    def _compiled(self) -> Any:
        if self._kernel is None:
            if torch.version.hip is not None or torch.cuda.get_device_capability() != (9, 0):
                raise ValueError(f"for compute capability 9.0, this is {torch.cuda.get_device_capability()}")
            count = torch.cuda.get_device_properties().multi_processor_count
            if count < BLOCKS:  # they wait for one another, so all must be on the chip at once
                raise RuntimeError(f"{BLOCKS} blocks do not fit on {count} multiprocessors")
            source = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
            kernel = torch.cuda._compile_kernel(source, "layers", compute_capability="90")
            kernel.set_shared_memory_config(SHARED_BYTES)
            self._kernel = kernel
        return self._kernel

