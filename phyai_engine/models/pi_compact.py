"""The compact prefix of pi0 and pi0.5: padding and masked cameras are left out before anything is computed.

Masked tokens take no position and nobody sees them, so a row that starts with its valid tokens and ends there gives
the same actions. A batch is as long as its longest row; what stands behind a shorter row's tokens is computed and
hidden by ``lengths``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which tokens a batch of prefixes holds, on the device.

    :param mask: [B, C*T + P] bool: the valid tokens, cameras in order, then the prompt.
    :param present: [M] int64: cameras to encode, as rows of [B*C].
    :param source: [B, L] int64: column j of row b is this row of [M*T encoded image tokens, then B*P prompt tokens];
        behind ``valid`` it is some row.
    :param valid: [B] int64: tokens of each row that count.
    """

    mask: Tensor
    present: Tensor
    source: Tensor
    valid: Tensor


def compact(image_mask: Tensor, token_mask: Tensor, image_tokens: int) -> Layout:
    """Waits for the device once, to learn which cameras are there and how long the longest row is.

    :param image_mask: [B, C] bool. :param token_mask: [B, P] bool. :param image_tokens: T, of one camera.
    """
    device, (batch, cameras) = image_mask.device, image_mask.shape
    host = torch.cat((image_mask, token_mask), dim=1).cpu()
    seen, said = host[:, :cameras], host[:, cameras:]
    mask = torch.cat((seen.repeat_interleave(image_tokens, dim=1), said), dim=1)
    valid = mask.sum(dim=1)
    present = seen.flatten().nonzero().flatten()
    slots = (seen.flatten().cumsum(dim=0) - 1).clamp(min=0).view(batch, cameras, 1)
    pictures = (slots * image_tokens + torch.arange(image_tokens)).flatten(1)
    words = len(present) * image_tokens + torch.arange(said.numel()).view(said.shape)
    order = mask.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(valid.max()))]
    source = torch.cat((pictures, words), dim=1).gather(1, order)
    return Layout(mask.to(device), present.to(device), source.to(device), valid.to(device))
