"""SigLIP vision transformer: image -> patch tokens, no pooling head, no class token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from phyai_kernels.reference import attend, layer_norm
from torch import Tensor, nn
from torch.nn import functional

from phyai_engine.layers.attention import split_heads


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
    def tokens(self) -> int:
        """Tokens per image; a border narrower than a patch is not seen (convolution without padding)."""
        return (self.image_size // self.patch) ** 2


class _Affine(nn.Module):
    """Weight and bias of a LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = layer_norm(x, self.weight, self.bias)
        return normed


class _Attention(nn.Module):
    def __init__(self, options: SiglipOptions) -> None:
        super().__init__()
        self.heads = options.heads
        self.q_proj = nn.Linear(options.width, options.width)
        self.k_proj = nn.Linear(options.width, options.width)
        self.v_proj = nn.Linear(options.width, options.width)
        self.out_proj = nn.Linear(options.width, options.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (split_heads(f(x), self.heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed: Tensor = self.out_proj(attend(query, key, value, None))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, options: SiglipOptions) -> None:
        super().__init__()
        self.fc1 = nn.Linear(options.width, options.mlp)
        self.fc2 = nn.Linear(options.mlp, options.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))
        return out


class _Layer(nn.Module):
    def __init__(self, options: SiglipOptions) -> None:
        super().__init__()
        self.layer_norm1 = _Affine(options.width)
        self.self_attn = _Attention(options)
        self.layer_norm2 = _Affine(options.width)
        self.mlp = _Mlp(options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        out: Tensor = x + self.mlp(self.layer_norm2(x))
        return out


class Siglip(nn.Module):
    """The tower. Patch embedding and position table compute in fp32, the layers in the activation dtype."""

    def __init__(self, options: SiglipOptions) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, options.width, options.patch, stride=options.patch)
        self.position_embedding = nn.Embedding(options.tokens, options.width)
        self.layers = nn.ModuleList(_Layer(options) for _ in range(options.depth))
        self.post_layernorm = _Affine(options.width)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens of a batch of images.

        :param images: [N, 3, image_size, image_size] fp32 RGB in [-1, 1].
        :return: [N, tokens, width] in ``dtype``, patches row-major.
        """
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = (patches + self.position_embedding.weight).to(dtype)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.post_layernorm(x)
        return out
