"""Images that stay bytes up to the device: the same bits as planes that the host made, and nothing else changes."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai_engine.adapter import Adapter
from phyai_engine.config import Camera, ModelConfig, RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.graphs import Graphs
from phyai_engine.models.backbones.siglip import spread
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.runner import Runner
from phyai_engine.transforms import image as images
from phyai_engine.types import U8, CancelToken, Observation, Request, Row

SIZES: dict[str, Any] = {
    "vocab": 300, "vis_width": 16, "vis_depth": 1, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 2, "mlp": 64,
    "heads": 4, "head_dim": 8, "exp_width": 24, "exp_mlp": 48, "action_dim": 5, "action_horizon": 8, "num_steps": 3,
    "prompt_len": 48, "image_size": 22, "patch": 4, "cameras": ("base", "left", "right"), "prompt_buckets": (),
}  # fmt: skip


def options(form: str, **changes: Any) -> PiOptions:
    return PiOptions(images=form, **{**SIZES, **changes})  # type: ignore[arg-type]


def noise(*shape: int) -> U8:
    return np.random.default_rng(shape[0]).integers(0, 256, (*shape, 3), dtype=np.uint8)


@pytest.fixture
def robot(make_robot: Any) -> RobotConfig:
    """Two of the model's three cameras, one of them upside down."""
    cameras = (
        Camera(name="front", topic="front", role="base"),
        Camera(name="wrist", topic="wrist", role="right", rotation_deg=180),
    )
    made: RobotConfig = make_robot(robot={"cameras": cameras})
    return made


def ask(front: U8, wrist: U8) -> Request:
    seen = Observation({"front": front, "wrist": wrist}, np.zeros(2), np.zeros(2), "go", 0, 0, 0, 0)
    return Request(0, 0, seen, None, seed=3, remaining_ms=0.0)


def encoded(robot: RobotConfig, form: str, request: Request, **changes: Any) -> Row:
    spec = options(form, **changes).spec()
    return Adapter(robot, ModelConfig(family=spec.family), spec).encode(request)


# --- the model ---


def every_value() -> U8:
    """All bytes, each colour at another place."""
    ramp = np.arange(256, dtype=np.uint8)
    return np.stack((ramp, ramp[::-1], np.roll(ramp, 100)), axis=-1).reshape(16, 16, 3)


def check_values(device: str) -> None:
    picture = every_value()
    made = spread(torch.from_numpy(picture)[None].to(device))
    assert made.dtype == torch.float32
    np.testing.assert_array_equal(made[0].cpu().numpy(), images.planes(picture, 16))


def test_each_byte_becomes_the_hosts_float() -> None:
    check_values("cpu")
    planes = torch.rand(1, 3, 4, 4)
    assert spread(planes) is planes


@pytest.mark.gpu
def test_each_byte_becomes_the_hosts_float_on_an_accelerator() -> None:
    check_values("cuda")


def check_actions(robot: RobotConfig, device: str, dtype: str, variant: str, *, replay: bool) -> None:
    """Plain, and from staged arrays: the same bits from bytes as from planes."""
    request = ask(noise(48, 64), noise(22, 22))
    found = []
    for form in ("planes", "bytes"):
        o = options(form, dtype=dtype, variant=variant)
        model, row = PiModel.random(o, seed=3, device=device), encoded(robot, form, request, variant=variant)
        graphs = Graphs(model, shapes=[model.shape_of([row.inputs])], replay=replay)
        staged = graphs.shapes[0].inputs.host["images"]
        assert (staged.dtype, staged.shape) == (o.image.dtype, (2, *o.image.shape))
        found += [Runner(model, (1,), graphs=each).run([row])[0].actions for each in (None, graphs)]
    for actions in found:
        assert actions is not None and np.isfinite(actions).all()
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_bytes_give_the_actions_of_planes(robot: RobotConfig, variant: str, dtype: str) -> None:
    check_actions(robot, "cpu", dtype, variant, replay=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_bytes_give_the_actions_of_planes_in_graphs(robot: RobotConfig, variant: str, dtype: str) -> None:
    check_actions(robot, "cuda", dtype, variant, replay=True)


def test_pixels_of_a_masked_camera_change_nothing(robot: RobotConfig) -> None:
    row = encoded(robot, "bytes", ask(noise(22, 22), noise(22, 22)))
    model = PiModel.random(options("bytes"), seed=3)
    pixels: Any = row.inputs["images"].copy()
    pixels[1] = 255
    one, other = (
        Runner(model).run([replace(row, inputs={**row.inputs, "images": each}, cancel=CancelToken())])[0].actions
        for each in (row.inputs["images"], pixels)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("resize", "asked", "form"),
    [("pillow", {}, "bytes"), ("float", {}, "planes"), ("pillow", {"images": "planes"}, "planes")],
)
def test_a_model_file_takes_bytes_where_its_resampler_ends_in_them(resize: Any, asked: Any, form: str) -> None:
    config = ModelConfig(family="pi05", device="cpu", resize=resize, options={**SIZES, **asked})
    assert PiModel.load(config).options.images == form


# --- the adapter ---


@pytest.mark.parametrize("front", [(48, 64), (22, 22), (5, 90)])
@pytest.mark.parametrize("wrist", [(48, 64), (22, 22)])
def test_bytes_are_the_planes_before_they_are_spread(
    robot: RobotConfig, front: tuple[int, int], wrist: tuple[int, int]
) -> None:
    request = ask(noise(*front), noise(*wrist))
    planes, pixels = (encoded(robot, form, request).inputs["images"] for form in ("planes", "bytes"))
    assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 22, 22, 3))
    assert not pixels[1].any()  # no such camera
    np.testing.assert_array_equal(spread(torch.from_numpy(pixels)).numpy(), planes)
    picture = request.observation.images["wrist"][::-1, ::-1]
    np.testing.assert_array_equal(pixels[2], images.resize_pad(np.ascontiguousarray(picture), 22))


def test_the_rows_images_are_its_own(robot: RobotConfig) -> None:
    """A frame that a camera's callback writes over later, or one that came over a socket and must not be written."""
    request = ask(noise(22, 22), noise(22, 22))
    request.observation.images["front"].flags.writeable = False
    pixels = encoded(robot, "bytes", request).inputs["images"]
    before = pixels.copy()
    request.observation.images["wrist"][:] = 0
    np.testing.assert_array_equal(pixels, before)
    assert not np.shares_memory(pixels, request.observation.images["front"])


def test_bytes_of_a_resampler_that_ends_in_none_are_refused(robot: RobotConfig) -> None:
    config = ModelConfig(family="pi05", resize="float")
    with pytest.raises(ConfigError, match=r"images of bytes.*got resize: float.*wanted resize: pillow.*planes"):
        Adapter(robot, config, options("bytes").spec())
    assert Adapter(robot, config, options("planes").spec())


@pytest.mark.parametrize("resize", ["pillow", "float"])
def test_frames_are_resampled_at_the_same_time_by_threads_that_end(
    robot: RobotConfig, resize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the others: one after the other they would never come to an end."""
    spec = options("planes").spec()
    adapter = Adapter(robot, ModelConfig(family="pi05", resize=resize), spec)
    met, plain, before = threading.Barrier(2, timeout=10), images.planes, threading.active_count()

    def meeting(*args: Any, **given: Any) -> Any:
        met.wait()
        return plain(*args, **given)

    request = ask(noise(48, 64), noise(30, 40))
    wanted = adapter.encode(request).inputs["images"]
    monkeypatch.setattr(images, "planes", meeting)
    monkeypatch.setattr(images, "cores", lambda: 3)
    np.testing.assert_array_equal(adapter.encode(request).inputs["images"], wanted)
    assert threading.active_count() == before


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_one_of_them_raises_is_raised_when_all_have_ended(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "cores", lambda: 4)
    ended = []

    def call(i: int) -> None:
        ended.append(i)
        if i == bad:
            raise ValueError(f"frame {i}")

    with pytest.raises(ValueError, match=f"frame {bad}"):
        images.at_once([lambda i=i: call(i) for i in range(3)])  # type: ignore[misc]
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.parametrize(("calls", "cores"), [(0, 8), (1, 8), (2, 2), (3, 2)])
def test_one_frame_and_too_few_cores_need_no_thread(calls: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "cores", lambda: cores)
    by: list[threading.Thread] = []
    images.at_once([lambda: by.append(threading.current_thread())] * calls)
    assert by == [threading.current_thread()] * calls
