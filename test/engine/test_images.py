"""images.py against a slow reference that reads one pixel at a time, and against planted colours."""

from __future__ import annotations

import array
import io
import itertools
import zlib

import numpy as np
import pytest
from PIL import Image

from phyai_engine.errors import ImageError
from phyai_engine.images import ENCODINGS, MAX_PIXELS, decode_compressed, decode_raw

# encoding -> (bytes per sample, samples per pixel, sample index of R, G, B)
PACKED = {
    "rgb8": (1, 3, (0, 1, 2)),
    "bgr8": (1, 3, (2, 1, 0)),
    "rgba8": (1, 4, (0, 1, 2)),
    "bgra8": (1, 4, (2, 1, 0)),
    "rgb16": (2, 3, (0, 1, 2)),
    "bgr16": (2, 3, (2, 1, 0)),
    "rgba16": (2, 4, (0, 1, 2)),
    "bgra16": (2, 4, (2, 1, 0)),
    "mono8": (1, 1, (0, 0, 0)),
    "mono16": (2, 1, (0, 0, 0)),
    "8UC1": (1, 1, (0, 0, 0)),
    "8UC3": (1, 3, (2, 1, 0)),
    "8UC4": (1, 4, (2, 1, 0)),
    "16UC1": (2, 1, (0, 0, 0)),
}
BAYER = {"bayer_rggb8": "RGGB", "bayer_bggr8": "BGGR", "bayer_gbrg8": "GBRG", "bayer_grbg8": "GRBG"}
# byte positions within a group of four: two luma, U, V
YUV422 = {"yuv422": (1, 3, 0, 2), "uyvy": (1, 3, 0, 2), "yuv422_yuy2": (0, 2, 1, 3), "yuyv": (0, 2, 1, 3)}
YUV420 = {"nv12": (0, 1), "nv21": (1, 0)}

HEIGHT = 4


def row_bytes(encoding: str, width: int) -> int:
    if encoding in PACKED:
        return width * PACKED[encoding][0] * PACKED[encoding][1]
    return width * 2 if encoding in YUV422 else width


def rows_of(encoding: str, height: int) -> int:
    return height * 3 // 2 if encoding in YUV420 else height


def slow_yuv(y: int, u: int, v: int) -> list[int]:
    luma = max(y - 16, 0) * 255 / 219
    r = luma + (v - 128) * 1.402 * 255 / 224
    g = luma - (u - 128) * 0.344136 * 255 / 224 - (v - 128) * 0.714136 * 255 / 224
    b = luma + (u - 128) * 1.772 * 255 / 224
    return [min(255, max(0, round(value))) for value in (r, g, b)]


def mirror(index: int, size: int) -> int:
    return -index if index < 0 else 2 * (size - 1) - index if index >= size else index


def slow_bayer(pattern: str, height: int, width: int, step: int, raw: bytes, row: int, column: int) -> list[int]:
    """Each plane is the mean of the nearest sites of its colour within the 3x3 neighbourhood."""
    found: dict[str, dict[int, list[int]]] = {"R": {}, "G": {}, "B": {}}
    for dr, dc in itertools.product((-1, 0, 1), repeat=2):
        colour = pattern[(row + dr) % 2 * 2 + (column + dc) % 2]
        value = raw[mirror(row + dr, height) * step + mirror(column + dc, width)]
        found[colour].setdefault(abs(dr) + abs(dc), []).append(value)
    nearest = [found[colour][min(found[colour])] for colour in "RGB"]
    return [(sum(values) + len(values) // 2) // len(values) for values in nearest]


def slow_pixel(
    encoding: str, height: int, width: int, step: int, big: bool, raw: bytes, row: int, column: int
) -> list[int]:
    if encoding in PACKED:
        size, samples, order = PACKED[encoding]
        start = row * step + column * samples * size
        words = [raw[start + i * size : start + (i + 1) * size] for i in range(samples)]
        values = [int.from_bytes(word, "big" if big else "little") for word in words]
        return [values[i] >> (8 * (size - 1)) for i in order]
    if encoding in YUV422:
        y0, y1, u, v = YUV422[encoding]
        start = row * step + column // 2 * 4
        return slow_yuv(raw[start + (y1 if column % 2 else y0)], raw[start + u], raw[start + v])
    if encoding in YUV420:
        u, v = YUV420[encoding]
        chroma = (height + row // 2) * step + column // 2 * 2
        return slow_yuv(raw[row * step + column], raw[chroma + u], raw[chroma + v])
    return slow_bayer(BAYER[encoding], height, width, step, raw, row, column)


@pytest.mark.fault(12, 28, 30)
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("width", [2, 5, 6, 7])
@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_equals_the_pixel_by_pixel_reference(encoding: str, padding: int, width: int, big: bool) -> None:
    if width % 2 and encoding in {**YUV422, **YUV420}:
        with pytest.raises(ImageError, match=f"{encoding} cannot have this size.*multiple of 2"):
            decode_raw(encoding, HEIGHT, width, width * 2, big, bytes(1000))
        return
    step = row_bytes(encoding, width) + padding
    random = np.random.default_rng(width * 10 + padding)
    raw = random.integers(0, 256, rows_of(encoding, HEIGHT) * step, dtype=np.uint8).tobytes()
    image = decode_raw(encoding, HEIGHT, width, step, big, raw)
    assert image.shape == (HEIGHT, width, 3)
    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    wanted = [[slow_pixel(encoding, HEIGHT, width, step, big, raw, r, c) for c in range(width)] for r in range(HEIGHT)]
    np.testing.assert_array_equal(image, wanted)


def test_every_encoding_has_a_reference() -> None:
    assert set(ENCODINGS) == {*PACKED, *BAYER, *YUV422, *YUV420}


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def patch(encoding: str, colour: tuple[int, int, int], height: int, width: int) -> bytes:
    """A message body of one flat colour, made the way a driver makes it."""
    r, g, b = colour
    if encoding in PACKED:
        size, samples, _ = PACKED[encoding]
        letters = encoding.rstrip("0123456789") if encoding[0] in "rb" else "bgra"
        values = [{"r": r, "g": g, "b": b, "a": 7}[letter] for letter in letters[:samples]]
        return b"".join(bytes([value]) * size for value in values) * (height * width)
    if encoding in BAYER:
        sites = [{"R": r, "G": g, "B": b}[site] for site in BAYER[encoding]]
        return (bytes(sites[:2]) * (width // 2) + bytes(sites[2:]) * (width // 2)) * (height // 2)
    y = round(16 + (65.481 * r + 128.553 * g + 24.966 * b) / 255)
    u = round(128 + (-37.797 * r - 74.203 * g + 112.0 * b) / 255)
    v = round(128 + (112.0 * r - 93.786 * g - 18.214 * b) / 255)
    if encoding in YUV422:
        group = [0, 0, 0, 0]
        for at, value in zip(YUV422[encoding], (y, y, u, v), strict=True):
            group[at] = value
        return bytes(group) * (height * width // 2)
    pair = bytes([u, v] if encoding == "nv12" else [v, u])
    return bytes([y]) * (height * width) + pair * (height * width // 4)


@pytest.mark.fault(30, 33)
@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("encoding", [e for e in ENCODINGS if "mono" not in e and "UC1" not in e])
def test_red_stays_red(encoding: str, colour: str) -> None:
    raw = patch(encoding, COLOURS[colour], 4, 6)
    image = decode_raw(encoding, 4, 6, row_bytes(encoding, 6), False, raw)
    assert np.abs(image.astype(int) - COLOURS[colour]).max() <= (3 if encoding in {**YUV422, **YUV420} else 0)


@pytest.mark.fault(28)
def test_padding_that_is_no_multiple_of_the_channels_does_not_shear() -> None:
    # rgb8 5x3 with step 16: the known case in which a decoder counting pixels per row shears the image.
    image = np.arange(45, dtype=np.uint8).reshape(3, 5, 3)
    raw = b"".join(row.tobytes() + b"\xff" for row in image)
    np.testing.assert_array_equal(decode_raw("rgb8", 3, 5, 16, False, raw), image)


@pytest.mark.fault(12)
def test_the_byte_order_flag_decides_the_high_byte() -> None:
    raw = bytes([0x12, 0x34])
    assert decode_raw("mono16", 1, 1, 2, False, raw)[0, 0, 0] == 0x34
    assert decode_raw("mono16", 1, 1, 2, True, raw)[0, 0, 0] == 0x12


@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "array", "ndarray"])
def test_every_kind_of_buffer(kind: str) -> None:
    raw = bytes(range(12))
    forms = {
        "bytes": raw,
        "bytearray": bytearray(raw),
        "memoryview": memoryview(raw),
        "array": array.array("B", raw),
        "ndarray": np.frombuffer(raw, np.uint8),
    }
    assert decode_raw("rgb8", 2, 2, 6, False, forms[kind])[1, 1].tolist() == [9, 10, 11]


def test_unpadded_rgb_is_a_view_and_padded_rgb_is_not() -> None:
    raw = np.zeros(2 * 8, dtype=np.uint8)
    assert np.shares_memory(decode_raw("rgb8", 2, 2, 6, False, raw), raw)
    assert not np.shares_memory(decode_raw("rgb8", 2, 2, 8, False, raw), raw)


@pytest.mark.parametrize(
    ("encoding", "shape", "size", "words"),
    [
        ("rgb8", (0, 4, 12), 0, "empty, got 4x0"),
        ("rgb8", (4, 0, 0), 0, "empty, got 0x4"),
        ("rgb8", (8001, 8000, 24000), 8, f"too large, got 8000x8001 = 64008000 .*at most {MAX_PIXELS}"),
        ("rgb8", (2, 4, 11), 22, "step is shorter than a row of rgb8, got 11 bytes, wanted >= 12"),
        ("rgb8", (2, 4, 0), 24, "step is shorter"),
        ("rgb8", (2, 4, 12), 23, r"cut short, got 23 bytes, wanted 24 bytes \(2 rows of 12\)"),
        ("rgb8", (2, 4, 16), 28, "cut short, got 28 bytes, wanted 32"),
        ("nv12", (4, 4, 4), 23, "cut short, got 23 bytes, wanted 24"),
        (
            "nv12",
            (3, 4, 4),
            24,
            "nv12 cannot have this size, got 4x3, wanted a height that is a multiple of 2",
        ),
        ("bayer_rggb8", (1, 4, 4), 4, "cannot have this size, got 4x1, wanted at least 2x2"),
        ("32FC1", (2, 2, 8), 16, "holds measurements"),
        ("16SC1", (2, 2, 4), 16, "holds measurements"),
        ("rbg8", (2, 2, 6), 12, "unknown encoding 'rbg8', wanted one of rgb8.*Did you mean '(rgb8|bgr8)'"),
        ("", (2, 2, 6), 12, "unknown encoding ''"),
    ],
)
def test_refused(encoding: str, shape: tuple[int, int, int], size: int, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        decode_raw(encoding, *shape, False, bytes(size))


def encoded(image: np.ndarray, codec: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, codec)
    return file.getvalue()


def halves() -> np.ndarray:
    image = np.zeros((32, 48, 3), dtype=np.uint8)
    image[:16], image[16:] = (250, 10, 10), (10, 10, 250)
    return image


@pytest.mark.parametrize("format", ["png", "PNG", "rgb8; png compressed bgr8", "bgr8; png compressed bgr8"])
def test_png(format: str) -> None:
    np.testing.assert_array_equal(decode_compressed(format, encoded(halves(), "PNG")), halves())


@pytest.mark.parametrize("format", ["jpeg", "jpg", "rgb8; jpeg compressed bgr8", "bgr8;jpeg compressed bgr8"])
def test_jpeg(format: str) -> None:
    image = decode_compressed(format, array.array("B", encoded(halves(), "JPEG")))
    assert image.shape == (32, 48, 3)
    error = np.abs(image.astype(int) - halves())
    assert max(error[:12].max(), error[20:].max()) <= 6  # chroma bleeds over the edge between them
    assert image.flags.c_contiguous


def test_grey_alpha_and_16_bit_files() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert (decode_compressed("mono8; png compressed ", encoded(grey, "PNG")) == grey[..., None]).all()
    deep = (np.arange(12, dtype=np.uint16) * 0x0503).reshape(3, 4)
    assert (decode_compressed("mono16; png compressed ", encoded(deep, "PNG")) == (deep >> 8)[..., None]).all()
    clear = np.full((3, 4, 4), (9, 8, 7, 0), dtype=np.uint8)
    assert (decode_compressed("png", encoded(clear, "PNG")) == (9, 8, 7)).all()


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ("16UC1; compressedDepth png", "compressed depth image is not a picture"),
        ("32FC1; compressedDepth", "compressed depth"),
        ("h264", "unknown compressed image format, got 'h264', wanted jpeg or png"),
        ("rgb8; tiff compressed bgr8", "unknown compressed image format"),
        ("rgb8;", "unknown compressed image format"),
        ("", "unknown compressed image format"),
    ],
)
def test_refused_formats(format: str, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        decode_compressed(format, encoded(halves(), "PNG"))


@pytest.mark.parametrize("codec", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6])
def test_truncated_files(codec: str, share: float) -> None:
    whole = encoded(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8), codec)
    with pytest.raises(ImageError, match=r"damaged|not a whole"):
        decode_compressed(codec.lower(), whole[: int(len(whole) * share)])


def test_a_file_of_another_codec_is_refused() -> None:
    with pytest.raises(ImageError, match=r"not a whole JPEG image, got .* bytes that begin"):
        decode_compressed("jpeg", encoded(halves(), "PNG"))


def test_a_flipped_byte_is_refused() -> None:
    file = bytearray(encoded(halves(), "PNG"))
    file[-20] ^= 0xFF
    with pytest.raises(ImageError, match="damaged"):
        decode_compressed("png", file)


@pytest.mark.parametrize("side", [8001, 12000, 20000])
def test_a_picture_bomb_is_refused_by_its_header(side: int) -> None:
    # 20000x20000 in a few bytes: decoding it would take 1.2 GB. Its header alone is read.
    file = bytearray(encoded(np.zeros((1, 1), dtype=np.uint8), "PNG"))
    file[16:24] = side.to_bytes(4, "big") * 2
    file[29:33] = zlib.crc32(bytes(file[12:29])).to_bytes(4, "big")
    with pytest.raises(ImageError, match=r"too large|not a whole"):
        decode_compressed("png", bytes(file))
