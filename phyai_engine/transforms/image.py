"""Camera images -> model inputs."""

from __future__ import annotations

import numpy as np
from PIL import Image

from phyai_engine.types import F32, U8


def resize_pad(image: U8, size: int) -> U8:
    """Fit into a square, keeping the aspect, with black bars; the image is centred.

    Pillow's bilinear on uint8, antialiased when it shrinks: the client path of the pi checkpoints. An odd
    pixel of padding goes to the bottom or the right. A square of the right size is returned as it is.

    :param image: [h, w, 3] uint8. :returns: [size, size, 3] uint8.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    ratio = max(width / size, height / size)
    rows, columns = max(1, int(height / ratio)), max(1, int(width / ratio))
    picture = Image.fromarray(image).resize((columns, rows), resample=Image.Resampling.BILINEAR)
    top, left = (size - rows) // 2, (size - columns) // 2
    out = np.zeros((size, size, 3), dtype=np.uint8)
    out[top : top + rows, left : left + columns] = np.asarray(picture)
    return out


def to_planes(image: U8) -> F32:
    """[s, s, 3] uint8 -> [3, s, s] float32 in [-1, 1]: value / 255 * 2 - 1."""
    planes = image.transpose(2, 0, 1).astype(np.float32, order="C")
    planes /= 255.0
    planes *= 2.0
    planes -= 1.0
    return planes


def black_planes(size: int) -> F32:
    """What a camera that the robot lacks contributes: [3, s, s] of -1. Its mask must be False."""
    return np.full((3, size, size), -1.0, dtype=np.float32)
