"""Image messages -> RGB. One table row per encoding; numpy and Pillow only.

The output is always [h, w, 3] uint8 RGB. Rules that hold for every raw encoding:

- ``step`` may exceed a row of pixels and need not be a multiple of one: row r starts at byte ``r * step``.
- 16-bit samples keep their high byte (value >> 8); which byte that is follows ``is_bigendian``.
- grey is repeated into the three planes; alpha is dropped.
- ``8UC3``/``8UC4`` name no colour order; they are read as B, G, R (, A), OpenCV's order.
- 4:2:2 and 4:2:0 are BT.601 video range; a chroma sample serves its 2x1 or 2x2 pixels without interpolation.
- Bayer is bilinear over the 3x3 neighbourhood, mirrored at the border so that the mosaic keeps its phase.
"""

from __future__ import annotations

import array
import difflib
import io
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from phyai_engine.errors import ImageError
from phyai_engine.types import U8

# Union[...] because this runs at import, and `bytes | "array.array[int]"` is not valid on Python 3.10.
Buffer = Union[bytes, bytearray, memoryview, "array.array[int]", U8]

MAX_PIXELS = 64_000_000
"""Largest image that is decoded: a corrupt size field must not ask for gigabytes."""


@dataclass(frozen=True, slots=True)
class _Encoding:
    """How one raw encoding lies in memory.

    :param pixel_bytes: bytes of one pixel within a row.
    :param unpack: ([all rows, width * pixel_bytes] uint8 view, big endian) -> [h, w, 3] uint8 RGB.
    :param multiple: (rows, columns) that height and width must be multiples of.
    :param least: smallest height and width.
    :param extra: every ``multiple[0]`` image rows are followed, below the image, by this many rows of chroma.
    """

    pixel_bytes: int
    unpack: Callable[[U8, bool], U8]
    multiple: tuple[int, int] = (1, 1)
    least: int = 1
    extra: int = 0


def _packed(channels: int, order: tuple[int, int, int], word: int = 1) -> _Encoding:
    """Interleaved samples of ``word`` bytes; ``order`` is the channel that holds R, G and B."""

    def unpack(rows: U8, big: bool) -> U8:
        samples = rows.reshape(rows.shape[0], -1, channels, word)[..., 0 if big else word - 1]
        if channels == 3 and order == (0, 1, 2):
            return np.ascontiguousarray(samples)  # rgb8 without padding stays a view of the message
        # Plane by plane: 0.65 ms for 640x480 where one reversed copy costs 1.9 ms.
        out = np.empty((*samples.shape[:2], 3), dtype=np.uint8)
        for plane, channel in enumerate(order):
            out[..., plane] = samples[..., channel]
        return out

    return _Encoding(channels * word, unpack)


def _from_yuv(luma: U8, u: U8, v: U8) -> U8:
    """[h, w] planes in BT.601 video range (luma 16..235, chroma 16..240) -> RGB, rounded."""
    kr, kg, kb = 0.299, 0.587, 0.114
    red, blue = 2 * (1 - kr) * 255 / 224, 2 * (1 - kb) * 255 / 224
    bright = np.maximum(luma.astype(np.float32) - 16, 0) * np.float32(255 / 219)
    du, dv = u.astype(np.float32) - 128, v.astype(np.float32) - 128
    out = np.empty((*luma.shape, 3), dtype=np.uint8)
    for plane, (of_u, of_v) in enumerate(((0.0, red), (-blue * kb / kg, -red * kr / kg), (blue, 0.0))):
        value = bright + du * np.float32(of_u) + dv * np.float32(of_v)
        out[..., plane] = np.clip(np.rint(value), 0, 255)
    return out


def _yuv422(first_luma: int, u: int, v: int) -> _Encoding:
    """Two pixels in four bytes; the arguments are byte positions, the second luma two after the first."""

    def unpack(rows: U8, big: bool) -> U8:
        pairs = rows.reshape(rows.shape[0], -1, 4)
        chroma = (np.repeat(pairs[..., at], 2, axis=1) for at in (u, v))
        return _from_yuv(rows[:, first_luma::2], *chroma)

    return _Encoding(2, unpack, multiple=(1, 2))


def _yuv420(u: int, v: int) -> _Encoding:
    """A luma plane, then a row of interleaved chroma for every two rows; the arguments are byte positions."""

    def unpack(rows: U8, big: bool) -> U8:
        height = rows.shape[0] * 2 // 3
        pairs = rows[height:].reshape(height // 2, -1, 2)
        chroma = (np.repeat(np.repeat(pairs[..., at], 2, axis=0), 2, axis=1) for at in (u, v))
        return _from_yuv(rows[:height], *chroma)

    return _Encoding(1, unpack, multiple=(2, 2), extra=1)


def _bayer(red: tuple[int, int]) -> _Encoding:
    """2x2 mosaic; ``red`` is (row, column) of the red site, blue lies diagonally opposite."""

    def unpack(rows: U8, big: bool) -> U8:
        height, width = rows.shape
        around = np.pad(rows, 1, mode="reflect").astype(np.uint16)
        left, right = around[1:-1, :-2], around[1:-1, 2:]
        up, down = around[:-2, 1:-1], around[2:, 1:-1]
        beside, above = (left + right + 1) >> 1, (up + down + 1) >> 1
        cross = (left + right + up + down + 2) >> 2
        corners = (around[:-2, :-2] + around[:-2, 2:] + around[2:, :-2] + around[2:, 2:] + 2) >> 2
        planes: tuple[NDArray[np.integer[Any]], ...]
        out = np.empty((height, width, 3), dtype=np.uint8)
        for row in (0, 1):
            for column in (0, 1):
                at = (slice(row, None, 2), slice(column, None, 2))
                red_row, red_column = row == red[0], column == red[1]
                if red_row == red_column:  # a red or a blue site
                    planes = (rows, cross, corners) if red_row else (corners, cross, rows)
                else:  # a green site: red lies beside it in a red row, above it otherwise
                    planes = (beside, rows, above) if red_row else (above, rows, beside)
                for plane, values in enumerate(planes):
                    out[..., plane][at] = values[at]
        return out

    return _Encoding(1, unpack, least=2)


_GREY = (0, 0, 0)
_RGB = (0, 1, 2)
_BGR = (2, 1, 0)

_TABLE = MappingProxyType(
    {
        "rgb8": _packed(3, _RGB),
        "bgr8": _packed(3, _BGR),
        "rgba8": _packed(4, _RGB),
        "bgra8": _packed(4, _BGR),
        "rgb16": _packed(3, _RGB, word=2),
        "bgr16": _packed(3, _BGR, word=2),
        "rgba16": _packed(4, _RGB, word=2),
        "bgra16": _packed(4, _BGR, word=2),
        "mono8": _packed(1, _GREY),
        "mono16": _packed(1, _GREY, word=2),
        "8UC1": _packed(1, _GREY),
        "8UC3": _packed(3, _BGR),
        "8UC4": _packed(4, _BGR),
        "16UC1": _packed(1, _GREY, word=2),
        "bayer_rggb8": _bayer((0, 0)),
        "bayer_bggr8": _bayer((1, 1)),
        "bayer_gbrg8": _bayer((1, 0)),
        "bayer_grbg8": _bayer((0, 1)),
        "yuv422": _yuv422(first_luma=1, u=0, v=2),
        "uyvy": _yuv422(first_luma=1, u=0, v=2),
        "yuv422_yuy2": _yuv422(first_luma=0, u=1, v=3),
        "yuyv": _yuv422(first_luma=0, u=1, v=3),
        "nv12": _yuv420(u=0, v=1),
        "nv21": _yuv420(u=1, v=0),
    }
)

ENCODINGS: tuple[str, ...] = tuple(_TABLE)
"""Names of the raw encodings that :func:`decode_raw` reads."""

_CODECS = MappingProxyType({"jpeg": "JPEG", "jpg": "JPEG", "png": "PNG"})
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error),
    *(Image.DecompressionBombError, Image.DecompressionBombWarning),  # the latter where warnings are errors
)


def decode_raw(encoding: str, height: int, width: int, step: int, is_bigendian: bool, buffer: Buffer) -> U8:
    """One raw image -> RGB.

    :param step: bytes from one row to the next.
    :param buffer: at least the bytes of all rows, read in place; of unpadded rgb8 the result is a view.
    :returns: [height, width, 3] uint8 RGB, C-contiguous.
    :raises ImageError: unknown encoding, impossible size or step, or too few bytes.
    """
    entry = _TABLE.get(encoding)
    if entry is None:
        raise _unknown(encoding)
    _check_size(height, width, encoding)
    lines, columns = entry.multiple
    if height % lines or width % columns or min(height, width) < entry.least:
        wanted = [f"a height that is a multiple of {lines}"] if lines > 1 else []
        wanted += [f"a width that is a multiple of {columns}"] if columns > 1 else []
        raise ImageError(
            f"{encoding} cannot have this size",
            got=f"{width}x{height}",
            wanted=" and ".join(wanted) or f"at least {entry.least}x{entry.least}",
            do="Set the driver to a size that its pixel format allows, or to rgb8.",
        )
    row_bytes = width * entry.pixel_bytes
    if step < row_bytes:
        raise ImageError(
            f"step is shorter than a row of {encoding}",
            got=f"{step} bytes",
            wanted=f">= {row_bytes} bytes for {width} pixels",
            do="The driver's step, width or encoding is wrong.",
        )
    rows = height + height // lines * entry.extra
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.size < rows * step:
        raise ImageError(
            f"{encoding} image is cut short",
            got=f"{flat.size} bytes",
            wanted=f"{rows * step} bytes ({rows} rows of {step})",
        )
    return entry.unpack(flat[: rows * step].reshape(rows, step)[:, :row_bytes], bool(is_bigendian))


def decode_compressed(format: str, buffer: Buffer) -> U8:
    """One compressed image -> RGB. The codec's own header says the colours, not the text around it.

    :param format: of sensor_msgs/CompressedImage: ``jpeg``, ``png``, or ``rgb8; jpeg compressed bgr8``.
    :returns: [h, w, 3] uint8 RGB, C-contiguous. 16-bit grey PNG keeps its high byte.
    :raises ImageError: another codec, a depth image, an oversized or damaged file.
    """
    codec = _codec(format)
    file = np.frombuffer(buffer, dtype=np.uint8).tobytes()
    try:
        picture = Image.open(io.BytesIO(file), formats=[codec])
    except _BROKEN:
        raise ImageError(
            f"the bytes are not a whole {codec} image",
            got=f"{len(file)} bytes that begin {file[:8]!r}",
            where=format,
        ) from None
    with picture:
        _check_size(picture.height, picture.width, format)
        try:
            if picture.mode.startswith("I"):  # 16-bit grey; a conversion would clip it at 255
                return _TABLE["mono8"].unpack((np.asarray(picture) >> 8).astype(np.uint8), False)
            return np.array(picture.convert("RGB"))
        except _BROKEN as error:
            raise ImageError(f"the {codec} image is damaged", got=str(error), where=format) from None


def _codec(format: str) -> str:
    """Pillow's codec name of a CompressedImage.format."""
    head, _, tail = format.partition(";")
    if re.search(r"compresseddepth", format, re.IGNORECASE):
        raise ImageError(
            "a compressed depth image is not a picture",
            got=repr(format),
            do="Name the colour camera's `.../compressed` topic in the robot file.",
        )
    words = (tail or head).split()
    codec = _CODECS.get(words[0].lower()) if words else None
    if codec is None:
        raise ImageError("unknown compressed image format", got=repr(format), wanted="jpeg or png")
    return codec


def _check_size(height: int, width: int, where: str) -> None:
    if height <= 0 or width <= 0:
        raise ImageError("the image is empty", got=f"{width}x{height}", wanted="at least 1x1", where=where)
    if height * width > MAX_PIXELS:
        raise ImageError(
            "the image is too large",
            got=f"{width}x{height} = {height * width} pixels",
            wanted=f"at most {MAX_PIXELS}",
            where=where,
        )


def _unknown(encoding: str) -> ImageError:
    if re.fullmatch(r"(32|64)[FS]C\d+|16SC\d+|8SC\d+", encoding):
        return ImageError(
            f"encoding {encoding!r} holds measurements (depth, disparity), not colours",
            do="Name the colour camera's topic in the robot file, or publish rgb8.",
        )
    near = difflib.get_close_matches(encoding, ENCODINGS, n=1)
    return ImageError(
        f"unknown encoding {encoding!r}",
        wanted=f"one of {', '.join(ENCODINGS)}",
        do=f"Did you mean {near[0]!r}?" if near else "Convert it upstream, for example with image_proc.",
    )
