"""SigLIP vision transformer: image -> patch tokens, no pooling head, no class token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from phyai_engine.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class SiglipOptions:
    """Dimensions of the tower. ``image_size`` and ``patch`` in pixels give the size of the position table."""

    width: int
    depth: int
    mlp: int
    heads: int
    image_size: int
    patch: int

    @property
    def grid(self) -> int:
        """Patches along one side; a border narrower than a patch is not seen."""
        return self.image_size // self.patch


class _Layer(nn.Module):
    """Parameters of one block. ``qkv`` holds the three projections one below the other."""

    def __init__(self, options: SiglipOptions, dtype: torch.dtype) -> None:
        super().__init__()
        width = options.width
        self.layer_norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, options.mlp, dtype=dtype)
        self.fc2 = nn.Linear(options.mlp, width, dtype=dtype)


class Siglip(nn.Module):
    """The tower. Patches and positions compute in fp32, the layers in ``dtype``."""

    def __init__(self, options: SiglipOptions, dtype: torch.dtype) -> None:
        super().__init__()
        self.options = options
        self.dtype = dtype
        self.patch = nn.Linear(3 * options.patch**2, options.width)
        self.position = nn.Parameter(torch.empty(options.grid**2, options.width))
        self.layers = nn.ModuleList(_Layer(options, dtype) for _ in range(options.depth))
        self.post_layernorm = nn.LayerNorm(options.width)

    def forward(self, images: Tensor, ops: Ops) -> Tensor:
        """Tokens of a batch of images.

        :param images: RGB as ``spread`` takes it, of image_size.
        :return: [N, tokens, width] in ``dtype``, patches row-major.
        """
        embedded = ops.linear(self._patches(spread(images)), self.patch.weight, self.patch.bias)
        x = (embedded + self.position).to(self.dtype)
        added: tuple[Tensor, ...] = ()  # product and bias of the sub-layer before: the next norm adds them
        for layer in cast("Sequence[_Layer]", self.layers):
            x, normed = ops.layer_norm(x, layer.layer_norm1.weight, layer.layer_norm1.bias, *added)
            added = ops.linear(self._attention(layer, normed, ops), layer.out.weight), layer.out.bias
            x, normed = ops.layer_norm(x, layer.layer_norm2.weight, layer.layer_norm2.bias, *added)
            inner = ops.linear_gelu(normed, layer.fc1.weight, layer.fc1.bias)
            added = ops.linear(inner, layer.fc2.weight), layer.fc2.bias
        return ops.layer_norm(x, self.post_layernorm.weight, self.post_layernorm.bias, *added)[1]

    def _patches(self, images: Tensor) -> Tensor:
        """[N, tokens, 3 * patch**2], each patch flattened colour, row, column: the convolution as one matrix."""
        grid, size = self.options.grid, self.options.patch
        seen = images[..., : grid * size, : grid * size].reshape(-1, 3, grid, size, grid, size)
        return seen.permute(0, 2, 4, 1, 3, 5).reshape(len(images), grid * grid, -1)

    def _attention(self, layer: _Layer, normed: Tensor, ops: Ops) -> Tensor:
        qkv = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
        split = qkv.view(*qkv.shape[:2], 3, self.options.heads, -1)
        query, keys, values = split.permute(2, 0, 3, 1, 4)
        attended: Tensor = ops.attend(query, keys, values)
        return attended


def spread(images: Tensor) -> Tensor:
    """[N, 3, s, s] fp32 in [-1, 1]; planes are so already.

    Bytes [N, s, s, 3] become value / 255 * 2 - 1 in the bits of transforms/image.py: halving the divisor is exact, and
    it stands on the device, since CUDA divides by a host's number with its reciprocal.
    """
    if images.dtype != torch.uint8:
        return images
    return images.permute(0, 3, 1, 2) / images.new_full((), 127.5, dtype=torch.float32) - 1.0
