"""Camera images -> model inputs: two resamplers, one rule for sizes.

Both fit the image into the model's square, keep its aspect and centre it on black; an odd pixel of padding goes to the
bottom or the right. ``pillow`` (openpi) resamples bytes, antialiased when it shrinks, and rounds to bytes. ``float``
(lerobot) resamples value / 255 bilinearly between the four nearest pixels, without antialiasing and without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from phyai_engine.config import RobotConfig
from phyai_engine.host import cores
from phyai_engine.types import F32, U8

BLACK = -1.0  # of padding, and of all pixels of a camera that the robot lacks, whose mask must be False
_HALF_TURN = 180
_BLOCK_ROWS = 24  # in parts that the allocator keeps: 1.6 ms for 640x480 -> 224x224 instead of 3.1 for all rows at once


def planes(
    image: U8,
    size: int,
    *,
    resize: Literal["pillow", "float"] = "pillow",
    rotation_deg: int = 0,
    out: F32 | None = None,
) -> F32:
    """One camera's input.

    :param image: [h, w, 3] uint8, at least one pixel. :param rotation_deg: 0 or 180, turned before it is resized.
    :param out: where it goes, which saves a copy; None makes a new array.
    :returns: [3, size, size] float32 in [-1, 1].
    """
    out = np.empty((3, size, size), dtype=np.float32) if out is None else out
    image = _turned(image, rotation_deg)
    if resize == "pillow":
        return to_planes(resize_pad(image, size), out)
    out[:] = resize_pad_float(image, size)
    return out


def pixels(image: U8, out: U8, *, rotation_deg: int = 0) -> None:
    """One camera's input for a model that takes bytes; the ``pillow`` path.

    :param image: [h, w, 3] uint8, at least one pixel. :param out: [size, size, 3], all of it is written.
    :param rotation_deg: 0 or 180, turned before it is resized.
    """
    resize_pad(_turned(image, rotation_deg), len(out), out)


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make the calls at the same time, where that leaves a core free; what one raises is raised here, at the end.

    Their threads end with them: 0.2 ms beside the 2 of a 640x480 frame, where a pool needs an owner that closes it.
    On two busy cores three frames took 10 to 12 ms at once and 6 to 10 in turn: whoever waits for all of them waits for
    the one that was put off.
    """
    if not 1 < len(calls) < cores():
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(len(calls) - 1, thread_name_prefix="phyai-images") as threads:
        others = [threads.submit(call) for call in calls[1:]]
        calls[0]()
        for other in others:
            other.result()


def fitted(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Where an image lies in the square: rows and columns of its resized form, then its top and its left.

    Rounded down, and at least 1: the references make 0 rows of a 1x1000 image, and fail.
    """
    ratio = max(width / size, height / size)
    rows, columns = max(1, int(height / ratio)), max(1, int(width / ratio))
    return rows, columns, (size - rows) // 2, (size - columns) // 2


def resize_pad(image: U8, size: int, out: U8 | None = None) -> U8:
    """The ``pillow`` path: the client path of the pi checkpoints. A square of the right size is returned as it is.

    :param image: [h, w, 3] uint8. :param out: where it goes in any case. :returns: [size, size, 3] uint8.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        if out is None:
            return image
        out[:] = image
        return out
    rows, columns, top, left = fitted(height, width, size)
    picture = Image.fromarray(image).resize((columns, rows), resample=Image.Resampling.BILINEAR)
    out = np.empty((size, size, 3), dtype=np.uint8) if out is None else out
    out.fill(0)
    out[top : top + rows, left : left + columns] = np.asarray(picture)
    return out


def resize_pad_float(image: U8, size: int) -> F32:
    """The ``float`` path: resample value / 255, keep it within 0..1, pad with 0, then value * 2 - 1.

    :param image: [h, w, 3] uint8. :returns: [3, size, size] float32.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return to_planes(image, np.empty((3, size, size), dtype=np.float32))
    rows, columns, top, left = fitted(height, width, size)
    inner = _resample(image, rows, columns)
    np.clip(inner, 0.0, 1.0, out=inner)
    inner *= 2.0
    inner -= 1.0
    out = np.full((3, size, size), BLACK, dtype=np.float32)
    out[:, top : top + rows, left : left + columns] = inner.transpose(2, 0, 1)
    return out


def fitted_on_arrival(robot: RobotConfig, size: int) -> Callable[[str, U8], U8]:
    """(camera, image) -> the image that the observation keeps: what ``resize_pad`` makes of it, which then leaves it.

    A camera that is mounted upside down keeps its own: it is turned before it is resized. :param size: 0 keeps all.
    """
    fitted = {camera.name for camera in robot.cameras if size and camera.rotation_deg == 0}
    return lambda camera, image: resize_pad(image, size) if camera in fitted else image


def to_planes(image: U8, out: F32) -> F32:
    """[s, s, 3] uint8 -> ``out`` [3, s, s] float32 in [-1, 1]: value / 255 * 2 - 1."""
    out[:] = image.transpose(2, 0, 1)
    out /= 255.0
    out *= 2.0
    out -= 1.0
    return out


def _turned(image: U8, rotation_deg: int) -> U8:
    """:param rotation_deg: 0 or 180."""
    if rotation_deg != _HALF_TURN:
        return image
    # Pixel by pixel, 3 bytes each: 0.6 ms at 640x480, byte by byte 1.4, and Pillow reads a turned view in 4.
    return np.ascontiguousarray(image).view("V3")[::-1, ::-1].copy().view(np.uint8)


def _resample(image: U8, rows: int, columns: int) -> F32:
    """[h, w, 3] uint8 -> [rows, columns, 3] float32, value / 255 between the four nearest pixels.

    Bit-equal to torch's float kernel (2.13) on x86 CPUs with AVX2 or AVX-512, with more than one thread and an output
    of more than 128 rows and columns together. With one thread, or a smaller output, torch adds the four products in
    another order: 4e-7 of the -1..1 range at most. Without FMA its sampling points move too: 2e-5.
    """
    height, width = image.shape[:2]
    row, row_after, top, bottom = _taps(height, rows)
    column, column_after, left, right = _taps(width, columns)
    values = (np.concatenate((column, column_after))[:, None] * 3 + np.arange(3)).ravel()
    left, right = np.repeat(left, 3), np.repeat(right, 3)
    out = np.empty((rows, columns * 3), dtype=np.float32)
    for first in range(0, rows, _BLOCK_ROWS):
        part = slice(first, first + _BLOCK_ROWS)
        lines = image[np.stack((row[part], row_after[part]))].reshape(2, -1, width * 3)
        near = np.take(lines, values, axis=2).astype(np.float32)
        near /= 255.0
        across = _weighted(near[..., : columns * 3], left, near[..., columns * 3 :], right)
        out[part] = _weighted(across[0], top[part, None], across[1], bottom[part, None])
    return out.reshape(rows, columns, 3)


def _weighted(first: F32, weight: F32, second: F32, other: F32) -> F32:
    """first * weight + second * other, the first product fused with the sum as compilers do it.

    A product of two float32 is exact in float64: adding there and rounding once is a fused step.
    """
    total = np.multiply(first, weight, dtype=np.float64)
    total += second * other
    return total.astype(np.float32)


def _taps(count_in: int, count_out: int) -> tuple[NDArray[np.intp], NDArray[np.intp], F32, F32]:
    """Along one axis, for every output: the pixel before its centre and the one after, and their weights (float32)."""
    if count_in == count_out:
        index = np.arange(count_out)
        return index, index, np.ones(count_out, np.float32), np.zeros(count_out, np.float32)
    step = np.float64(np.float32(count_in) / np.float32(count_out))
    at: NDArray[Any] = np.maximum((step * (np.arange(count_out) + 0.5) - 0.5).astype(np.float32), 0.0)
    before = np.minimum(at.astype(np.intp), count_in - 1)
    weight = np.clip(at - before.astype(np.float32), 0.0, 1.0)
    return before, np.minimum(before + 1, count_in - 1), np.float32(1.0) - weight, weight
