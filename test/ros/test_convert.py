"""Messages -> numpy: images, joint states, stamps, the decoder. Fakes carry the messages' fields."""

from __future__ import annotations

import array
import io
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image as Picture

from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.messages import (
    UNSTAMPED_NS,
    compressed_to_rgb,
    image_to_rgb,
    joint_state_to_arrays,
    stamp_ns,
    view_bytes,
)
from phyai_engine.types import Refusal
from phyai_ros.convert import choose_decoder, to_stamp

RED_BLUE = np.array([[[255, 0, 0], [0, 0, 255], [10, 20, 30]]] * 2, dtype=np.uint8)  # [2, 3, 3] RGB


def image(rgb: np.ndarray, encoding: str, padding: int = 0) -> SimpleNamespace:
    pixels = {"rgb8": rgb, "bgr8": rgb[..., ::-1], "mono8": rgb[..., :1]}[encoding]
    rows = np.ascontiguousarray(pixels).reshape(len(rgb), -1)
    rows = np.pad(rows, ((0, 0), (0, padding)), constant_values=99)
    return SimpleNamespace(
        encoding=encoding,
        height=rgb.shape[0],
        width=rgb.shape[1],
        step=rows.shape[1],
        is_bigendian=0,
        data=array.array("B", rows.tobytes()),
    )


def joints(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"name": [], "position": array.array("d"), "velocity": array.array("d"), **fields})


# -- images --------------------------------------------------------------------------------------------------


@pytest.mark.fault(28, 33)
@pytest.mark.parametrize("padding", [0, 1, 7])
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_red_stays_red_in_every_channel_order_and_padding(encoding: str, padding: int) -> None:
    assert image_to_rgb(image(RED_BLUE, encoding, padding)).tolist() == RED_BLUE.tolist()


def test_unpadded_rgb_is_a_view_of_the_message() -> None:
    msg = image(RED_BLUE, "rgb8")
    rgb = image_to_rgb(msg)
    msg.data[0] = 7
    assert rgb[0, 0, 0] == 7


@pytest.mark.fault(12)
def test_big_endian_flag_decides_the_byte_of_mono16() -> None:
    msg = SimpleNamespace(encoding="mono16", height=1, width=1, step=2, is_bigendian=1, data=bytes([0xAB, 0x01]))
    assert image_to_rgb(msg).tolist() == [[[0xAB] * 3]]
    msg.is_bigendian = 0
    assert image_to_rgb(msg).tolist() == [[[0x01] * 3]]


@pytest.mark.parametrize("buffer", [b"\x01\x02", bytearray(b"\x01\x02"), np.array([1, 2], np.uint8)])
def test_view_bytes_takes_every_byte_buffer(buffer: Any) -> None:
    assert view_bytes(buffer).tolist() == [1, 2]
    assert view_bytes(array.array("B")).size == 0


@pytest.mark.parametrize(
    ("buffer", "words"),
    [([1, 2], "list"), (array.array("d", [1.0]), "8 bytes"), (np.zeros((4, 4), np.uint8)[:, 1], "")],
)
def test_view_bytes_refuses_what_is_no_byte_buffer(buffer: Any, words: str) -> None:
    with pytest.raises(ImageError, match=rf"no byte buffer.*{words}"):
        view_bytes(buffer)


@pytest.mark.parametrize(("height", "width"), [(0, 0), (0, 4), (4, 0)])
def test_zero_sized_image_is_refused(height: int, width: int) -> None:
    msg = SimpleNamespace(encoding="rgb8", height=height, width=width, step=0, is_bigendian=0, data=array.array("B"))
    with pytest.raises(ImageError, match="empty"):
        image_to_rgb(msg)


def test_short_buffer_is_refused() -> None:
    msg = image(RED_BLUE, "rgb8")
    msg.data = msg.data[:-1]
    with pytest.raises(ImageError, match="17 bytes, wanted 18 bytes"):
        image_to_rgb(msg)


def test_compressed_png_keeps_its_colours() -> None:
    file = io.BytesIO()
    Picture.fromarray(RED_BLUE).save(file, "PNG")
    msg = SimpleNamespace(format="rgb8; png compressed bgr8", data=array.array("B", file.getvalue()))
    assert compressed_to_rgb(msg).tolist() == RED_BLUE.tolist()
    msg.data = msg.data[:20]
    with pytest.raises(ImageError):
        compressed_to_rgb(msg)


# -- joint states --------------------------------------------------------------------------------------------


def test_joint_state_keeps_the_order_of_the_message_and_copies_nothing() -> None:
    position = array.array("d", [1.0, 2.0, 4.0, 5.0, 3.0, 6.0])
    names = ["j1", "j2", "j4", "j5", "j3", "j6"]
    got_names, positions, velocities = joint_state_to_arrays(joints(name=names, position=position))
    assert got_names == tuple(names)
    assert positions.tolist() == [1.0, 2.0, 4.0, 5.0, 3.0, 6.0]
    assert velocities is None
    position[0] = 9.0
    assert positions[0] == 9.0


@pytest.mark.fault(16)
def test_unknown_velocities_become_nan() -> None:
    msg = joints(name=["a", "b", "c"], position=[0.0] * 3, velocity=[1.0, math.nan, -math.inf])
    velocities = joint_state_to_arrays(msg)[2]
    assert velocities is not None
    np.testing.assert_array_equal(velocities, [1.0, np.nan, np.nan])


@pytest.mark.fault(18)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ["a", "a"], "position": [1.0, 2.0]}, "joint names stand twice: a, at arm/joint_states"),
        (
            {"name": ["a", "b"], "position": [1.0]},
            "position does not fit the joint names, got 1 values, wanted 2",
        ),
        (
            {"name": ["a"], "position": [1.0, 2.0]},
            "position does not fit the joint names, got 2 values, wanted 1",
        ),
        (
            {"name": ["a", "b"], "position": []},
            "position does not fit the joint names, got 0 values, wanted 2",
        ),
        ({"name": ["a", "b"], "position": [1.0, 2.0], "velocity": [0.0]}, "velocity does not fit"),
    ],
)
def test_malformed_joint_states(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusalError, match=words) as caught:
        joint_state_to_arrays(joints(**fields), topic="arm/joint_states")
    assert caught.value.code is Refusal.MALFORMED


@pytest.mark.fault(23)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_position_that_is_not_finite_names_its_joint(index: int, bad: float) -> None:
    position = array.array("d", [0.1, 0.2, 0.3])
    position[index] = bad
    msg = joints(name=["a", "b", "c"], position=position)
    with pytest.raises(RefusalError, match=f"joint '{'abc'[index]}', got {bad}") as caught:
        joint_state_to_arrays(msg)
    assert caught.value.code is Refusal.NOT_FINITE


def test_a_joint_nobody_needs_may_hold_nan() -> None:
    msg = joints(name=["a", "mimic"], position=[0.1, math.nan])
    assert joint_state_to_arrays(msg, needed={"a"})[1][0] == 0.1
    with pytest.raises(RefusalError, match="mimic"):
        joint_state_to_arrays(msg, needed={"a", "mimic"})


def test_an_empty_joint_state_is_empty() -> None:
    names, positions, velocities = joint_state_to_arrays(joints())
    assert (names, positions.shape, velocities) == ((), (0,), None)


# -- stamps --------------------------------------------------------------------------------------------------


def test_stamps_are_exact_and_zero_means_unstamped() -> None:
    assert stamp_ns(SimpleNamespace(sec=1_700_000_000, nanosec=123_456_789)) == 1_700_000_000_123_456_789
    assert stamp_ns(SimpleNamespace(sec=0, nanosec=0)) == UNSTAMPED_NS == 0


@pytest.mark.ros
def test_to_stamp_is_the_inverse() -> None:
    for ns in (0, 1, 999_999_999, 1_000_000_000, 1_700_000_000_123_456_789):
        assert stamp_ns(to_stamp(ns)) == ns
    with pytest.raises(ValueError, match="int32"):
        to_stamp(2**31 * 10**9)


@pytest.mark.ros
def test_real_messages_are_read_like_the_fakes() -> None:
    from sensor_msgs.msg import Image, JointState

    fake = image(RED_BLUE, "bgr8", padding=1)
    msg = Image(**vars(fake))
    assert isinstance(msg.data, array.array)
    assert image_to_rgb(msg).tolist() == RED_BLUE.tolist()
    state = JointState(name=["b", "a"], position=[2.0, 1.0], velocity=[])
    names, positions, velocities = joint_state_to_arrays(state)
    assert (names, positions.tolist(), velocities) == (("b", "a"), [2.0, 1.0], None)
    assert not positions.flags.owndata


# -- choice of the decoder -----------------------------------------------------------------------------------


def bridge(monkeypatch: pytest.MonkeyPatch, decode: Any) -> None:
    """A cv_bridge whose imgmsg_to_cv2 is ``decode``."""
    module = ModuleType("cv_bridge")
    module.CvBridge = lambda: SimpleNamespace(imgmsg_to_cv2=decode)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cv_bridge", module)


def faithful(msg: Any, desired_encoding: str) -> np.ndarray:
    assert desired_encoding == "rgb8"
    return image_to_rgb(msg).copy()


def shearing(msg: Any, desired_encoding: str) -> np.ndarray:
    """As the public one: rows of whole pixels, so a step that is no multiple of a pixel shears the image."""
    channels = {"mono8": 1, "rgb8": 3, "bgr8": 3}.get(msg.encoding, 4)
    flat = np.frombuffer(msg.data, np.uint8)
    columns = msg.step // channels
    pixels = flat[: msg.height * columns * channels].reshape(msg.height, columns, channels)[:, : msg.width]
    order = {"mono8": [0, 0, 0], "bgr8": [2, 1, 0], "bgra8": [2, 1, 0]}.get(msg.encoding, [0, 1, 2])
    return np.ascontiguousarray(pixels[..., order])


def test_cv_bridge_serves_when_its_self_check_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(msg: Any, desired_encoding: str) -> np.ndarray:
        calls.append(msg.encoding)
        return faithful(msg, desired_encoding)

    bridge(monkeypatch, counted)
    decode, reason = choose_decoder()
    assert reason.startswith("cv_bridge for rgb8, bgr8, rgba8, bgra8, mono8")
    calls.clear()
    assert decode(image(RED_BLUE, "bgr8", padding=1)).tolist() == RED_BLUE.tolist()
    assert calls == ["bgr8"]
    mono16 = SimpleNamespace(encoding="mono16", height=1, width=1, step=2, is_bigendian=1, data=bytes([5, 0]))
    assert decode(mono16).tolist() == [[[5, 5, 5]]]
    assert calls == ["bgr8"]  # encodings outside the self-check stay with our decoder


@pytest.mark.fault(28)
def test_a_shearing_cv_bridge_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge(monkeypatch, shearing)
    decode, reason = choose_decoder()
    assert decode is image_to_rgb
    assert "other pixels for rgb8 5x3 with step" in reason


@pytest.mark.fault(33)
def test_a_cv_bridge_that_swaps_red_and_blue_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge(monkeypatch, lambda msg, desired_encoding: image_to_rgb(msg)[..., ::-1])
    decode, reason = choose_decoder()
    assert decode is image_to_rgb
    assert "other pixels for rgb8 4x3 with step 12" in reason


def test_a_cv_bridge_that_raises_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(msg: Any, desired_encoding: str) -> np.ndarray:
        raise RuntimeError("no conversion")

    bridge(monkeypatch, failing)
    decode, reason = choose_decoder()
    assert decode is image_to_rgb
    assert "cv_bridge cannot decode rgb8, got no conversion" in reason


def test_without_cv_bridge_or_by_parameter_our_decoder_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv_bridge", None)  # makes the import fail
    decode, reason = choose_decoder()
    assert decode is image_to_rgb
    assert "does not import (ModuleNotFoundError" in reason
    bridge(monkeypatch, faithful)
    decode, reason = choose_decoder("own")
    assert decode is image_to_rgb
    assert "parameter decoder" in reason


@pytest.mark.fault(12)
def test_an_import_that_dies_under_numpy_2_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cv_bridge")  # imported in part: the name is there, the class is not
    monkeypatch.setitem(sys.modules, "cv_bridge", module)
    decode, reason = choose_decoder()
    assert decode is image_to_rgb
    assert "AttributeError" in reason
