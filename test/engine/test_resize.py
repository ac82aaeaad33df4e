"""Both resamplers against their references: Pillow itself, and torch's bilinear interpolation on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from phyai_engine.config import load_robot, resolve
from phyai_engine.transforms import image
from phyai_engine.types import F32, U8

# height, width: landscape, portrait, odd, enlarged, one pixel wide or high, exact, nearly exact, extreme
SHAPES = [
    *((480, 640), (640, 480), (720, 1280), (481, 639), (97, 131), (33, 17), (3, 5), (1, 1), (2, 2)),
    *((1, 9), (9, 1), (1, 1000), (1000, 1), (3, 2000), (224, 224), (224, 223), (225, 224), (112, 112), (64, 64)),
]
SIZES = [224, 112, 64]


def noise(height: int, width: int) -> U8:
    return np.random.default_rng(height * 10_000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def place(height: int, width: int, size: int) -> tuple[int, int, int, int]:
    """Rows, columns, top, left by the published rule, for this test alone."""
    ratio = max(width / size, height / size)
    rows, columns = max(1, int(height / ratio)), max(1, int(width / ratio))
    return rows, columns, int((size - rows) / 2), int((size - columns) / 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pillow_path_is_pillow_on_black(shape: tuple[int, int], size: int) -> None:
    picture = noise(*shape)
    rows, columns, top, left = place(*shape, size)
    wanted = Image.new("RGB", (size, size))
    wanted.paste(Image.fromarray(picture).resize((columns, rows), Image.Resampling.BILINEAR), (left, top))
    np.testing.assert_array_equal(image.resize_pad(picture, size), np.asarray(wanted))
    planes = image.planes(picture, size)
    np.testing.assert_array_equal(planes, np.asarray(wanted).transpose(2, 0, 1).astype(np.float32) / 255 * 2 - 1)


def torch_reference(picture: U8, size: int, device: str = "cpu") -> F32:
    """The float path, step by step in torch, as the reference describes it."""
    values = torch.from_numpy(picture).permute(2, 0, 1)[None].contiguous().to(torch.float32) / 255.0
    values = values.to(device)
    if values.shape[2:] != (size, size):
        rows, columns, top, left = place(*picture.shape[:2], size)
        values = functional.interpolate(values, size=(rows, columns), mode="bilinear", align_corners=False)
        values = values.clamp(0.0, 1.0)
        values = functional.pad(values, (left, size - columns - left, top, size - rows - top))
    planes: F32 = (values * 2.0 - 1.0)[0].cpu().numpy()
    return planes


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """torch's own rounding depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_float_path_is_torch_to_the_bit(shape: tuple[int, int], size: int, threads: int) -> None:
    picture = noise(*shape)
    planes, wanted = image.planes(picture, size, resize="float"), torch_reference(picture, size)
    assert planes.shape == (3, size, size)
    assert planes.dtype == np.float32
    assert planes.flags.c_contiguous
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        atol = 4e-5  # torch without fused multiply-add also samples elsewhere
    elif threads > 1 and sum(place(*shape, size)[:2]) > 128:
        atol = 0.0
    else:
        atol = 4e-7
    np.testing.assert_allclose(planes, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_fitted_on_arrival_makes_the_same_planes(shape: tuple[int, int]) -> None:
    robot = load_robot(resolve("robots", "arm7"))
    front, wrist = robot.cameras
    robot = msgspec.structs.replace(robot, cameras=(front, msgspec.structs.replace(wrist, rotation_deg=180)))
    keep, picture = image.fitted_on_arrival(robot, 224), noise(*shape)
    small = keep(front.name, picture)
    assert (small.shape, small.dtype) == ((224, 224, 3), np.uint8)
    np.testing.assert_array_equal(image.planes(small, 224), image.planes(picture, 224))
    assert keep(wrist.name, picture) is picture  # it is turned before it is resized
    assert image.fitted_on_arrival(robot, 0)(front.name, picture) is picture


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_float_path_is_torch_on_the_gpu(shape: tuple[int, int]) -> None:
    picture = noise(*shape)
    planes, wanted = image.planes(picture, 224, resize="float"), torch_reference(picture, 224, "cuda")
    print(f"{shape}: {np.count_nonzero(planes != wanted)} of {planes.size} values differ")
    np.testing.assert_allclose(planes, wanted, rtol=0, atol=4e-7)


def test_float_path_against_the_formula() -> None:
    # Independent of torch: bilinear between pixel centres, in float64. The sampling points are float32 (4e-6 of 64).
    picture = noise(48, 64)
    rows, columns, top, left = place(48, 64, 28)
    y, x = ((np.arange(n) + 0.5) * (full / n) - 0.5 for n, full in ((rows, 48), (columns, 64)))
    y0, x0 = np.floor(y).astype(int), np.floor(x).astype(int)
    fy, fx = (y - y0)[:, None, None], (x - x0)[None, :, None]
    values = picture / 255.0
    upper, lower = (values[r][:, x0] * (1 - fx) + values[r][:, x0 + 1] * fx for r in (y0, y0 + 1))
    wanted = (upper * (1 - fy) + lower * fy) * 2 - 1
    out = image.planes(picture, 28, resize="float")
    np.testing.assert_allclose(out[:, top : top + rows, left : left + columns], wanted.transpose(2, 0, 1), atol=2e-5)


def test_float_path_does_not_antialias() -> None:
    stripes = np.zeros((224 * 4, 224 * 4, 3), dtype=np.uint8)
    stripes[:, ::4] = 255  # between the columns that are sampled
    assert (image.planes(stripes, 224, resize="float") == -1).all()
    assert image.planes(stripes, 224).max() > -0.6


@pytest.mark.parametrize("resize", ["pillow", "float"])
@pytest.mark.parametrize("shape", [(480, 640), (33, 17), (224, 224), (1, 9)])
def test_a_turned_camera_is_turned_before_it_is_resized(resize: Any, shape: tuple[int, int]) -> None:
    picture = noise(*shape)
    turned = np.ascontiguousarray(np.rot90(picture, 2))
    wanted = image.planes(turned, 224, resize=resize)
    np.testing.assert_array_equal(image.planes(picture, 224, resize=resize, rotation_deg=180), wanted)
    assert (image.planes(picture, 224, resize=resize) != wanted).any()


@pytest.mark.parametrize("resize", ["pillow", "float"])
def test_a_view_of_a_larger_image_gives_the_same(resize: Any) -> None:
    large = noise(100, 200)
    view = large[10:90, 20:150]  # rows with a gap between them
    wanted = image.planes(np.ascontiguousarray(view), 64, resize=resize)
    np.testing.assert_array_equal(image.planes(view, 64, resize=resize), wanted)
