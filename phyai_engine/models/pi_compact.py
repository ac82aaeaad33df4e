"""The compact prefix of pi0 and pi0.5: padding and masked cameras are left out before anything is computed.

Masked tokens take no position and nobody sees them, so a row that starts with its valid tokens and ends there gives
the same actions. A batch is as long as its longest row; what stands behind a shorter row's tokens is computed and
hidden by ``valid``. All of it follows from the masks, on the host: the device is told where tokens stand, and a
captured graph of a larger shape takes what is arranged for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phyai_engine.models.pi_options import PiOptions
from phyai_engine.types import BufferSpec

Inputs = Mapping[str, NDArray[Any]]


class BatchShape(NamedTuple):
    """Sizes of one batch on the device: rows, images encoded for all of them, prefix tokens of each."""

    batch: int
    images: int
    length: int

    def holds(self, other: BatchShape) -> bool:
        """Whether a batch of the other shape can be arranged in this one."""
        return self.batch == other.batch and self.images >= other.images and self.length >= other.length


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which tokens a batch of prefixes holds.

    :param mask: [B, C*T + P] bool: the valid tokens, cameras in order, then the prompt.
    :param present: [M] int64: cameras to encode, as rows of [B*C]. :param valid: [B] int64: tokens that count.
    :param source: [B, L] int64: column j of row b is this row of [M*T encoded image tokens, then B*P prompt tokens];
        behind ``valid`` it is some row.
    """

    mask: NDArray[np.bool_]
    present: NDArray[np.int64]
    source: NDArray[np.int64]
    valid: NDArray[np.int64]


def shape_of(
    image_masks: Iterable[NDArray[np.bool_]], token_masks: Iterable[NDArray[np.bool_]], image_tokens: int
) -> BatchShape:
    """The smallest shape of a batch. :param image_masks: [C] of each row. :param token_masks: [P] of each row.
    :param image_tokens: T.
    """
    seen, said = ([int(np.count_nonzero(mask)) for mask in masks] for masks in (image_masks, token_masks))
    tokens = [images * image_tokens + words for images, words in zip(seen, said, strict=True)]
    return BatchShape(len(tokens), sum(seen), max(1, *tokens))


def arrange(
    image_mask: NDArray[np.bool_], token_mask: NDArray[np.bool_], image_tokens: int, shape: BatchShape | None = None
) -> Layout:
    """Where the tokens of a batch go. :param shape: one that holds the batch; its own unless given."""
    shape = shape or shape_of(image_mask, token_mask, image_tokens)
    batch, cameras = image_mask.shape
    mask = np.concatenate((image_mask.repeat(image_tokens, axis=1), token_mask), axis=1)
    present = np.zeros(shape.images, np.int64)
    found = np.flatnonzero(image_mask)
    present[: len(found)] = found
    slots = (image_mask.ravel().cumsum() - 1).clip(min=0).reshape(batch, cameras, 1)
    pictures = (slots * image_tokens + np.arange(image_tokens)).reshape(batch, -1)
    words = shape.images * image_tokens + np.arange(token_mask.size).reshape(token_mask.shape)
    order = np.argsort(~mask, axis=1, kind="stable")[:, : shape.length]
    source = np.concatenate((pictures, words), axis=1)
    # Without any image, what stands for masked pictures points behind the pool; a shorter row's end may hold it.
    source = np.take_along_axis(source, order, axis=1).clip(max=shape.images * image_tokens + token_mask.size - 1)
    return Layout(mask, present, source, mask.sum(axis=1))


# --- shapes for captured graphs ---


def captured_shapes(options: PiOptions, batches: Sequence[int]) -> list[BatchShape]:
    """Shapes to capture, largest first: for a single row each number of cameras with each prompt bucket, for more rows
    all cameras with the longest prompt.
    """
    cameras, tokens = len(options.cameras), options.image_tokens
    prompts = sorted({min(size, options.prompt_len) for size in (*options.prompt_buckets, options.prompt_len)})
    shapes = {BatchShape(b, b * cameras, cameras * tokens + options.prompt_len) for b in batches}
    if 1 in batches:
        shapes |= {BatchShape(1, seen, seen * tokens + said) for seen in range(1, cameras + 1) for said in prompts}
    return sorted(shapes, reverse=True)


def staged(options: PiOptions, shape: BatchShape) -> dict[str, BufferSpec]:
    """What a batch of that shape brings to the device, whole shapes."""
    image, (batch, images, length) = options.image, shape
    prefix = len(options.cameras) * options.image_tokens + options.prompt_len
    specs = {
        "images": BufferSpec((images, *image.shape), image.dtype),
        "tokens": BufferSpec((batch, options.prompt_len), "int64"),
        "source": BufferSpec((batch, length), "int64"),
        "valid": BufferSpec((batch,), "int64"),
        "mask": BufferSpec((batch, prefix), "bool"),
    }
    return specs | ({"state": BufferSpec((batch, options.action_dim), "float32")} if options.variant == "pi0" else {})


def stage(options: PiOptions, shape: BatchShape, rows: Sequence[Inputs], into: Mapping[str, NDArray[Any]]) -> None:
    """Write a batch into host arrays as ``staged`` has them. Images of masked cameras are not touched.

    The device waits meanwhile: no array is made unless a mask changed.

    :param into: where the last batch still stands: equal masks have an equal layout, which is then left as it is.
    """
    if not all(_has_masks(mask, row, options.image_tokens) for mask, row in zip(into["mask"], rows, strict=True)):
        image_mask, token_mask = (np.stack([row[name] for row in rows]) for name in ("image_mask", "token_mask"))
        layout = arrange(image_mask, token_mask, options.image_tokens, shape)
        into["source"][:], into["valid"][:], into["mask"][:] = layout.source, layout.valid, layout.mask
    images = iter(into["images"])
    for i, row in enumerate(rows):
        for camera in np.flatnonzero(row["image_mask"]):
            next(images)[:] = row["images"][camera]
        # What stands under a false mask may be anything, and beyond the vocabulary.
        np.multiply(row["tokens"], row["token_mask"], out=into["tokens"][i])
        if "state" in into:
            into["state"][i] = row["state"]


def _has_masks(mask: NDArray[np.bool_], row: Inputs, image_tokens: int) -> bool:
    """:param mask: as Layout has it, of one row."""
    pictures = len(row["image_mask"]) * image_tokens
    seen = mask[:pictures:image_tokens] == row["image_mask"]
    return bool(seen.all() and (mask[pictures:] == row["token_mask"]).all())
