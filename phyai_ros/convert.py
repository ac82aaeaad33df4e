"""ROS messages -> numpy.

Reading a message imports neither rclpy nor a message package: any object with the message's fields will do.
``msg.data`` of rclpy is an ``array.array``: it is viewed in place, never turned into a list.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.images import decode_compressed, decode_raw
from phyai_engine.types import F64, U8, Refusal

if TYPE_CHECKING:
    from builtin_interfaces.msg import Time

_NS = 1_000_000_000

UNSTAMPED_NS = 0
"""What :func:`stamp_ns` gives for a header that nobody filled in."""


class _Stamp(Protocol):
    sec: int
    nanosec: int


class _Image(Protocol):
    """Fields of sensor_msgs/Image."""

    encoding: str
    height: int
    width: int
    step: int
    is_bigendian: Any  # uint8 in the message
    data: Any


class _CompressedImage(Protocol):
    """Fields of sensor_msgs/CompressedImage."""

    format: str
    data: Any


class _JointState(Protocol):
    """Fields of sensor_msgs/JointState; rclpy declares the arrays wider than they are, hence Any."""

    name: Any
    position: Any
    velocity: Any


RawDecoder = Callable[[Any], U8]
"""sensor_msgs/Image -> [h, w, 3] uint8 RGB; raises ImageError."""


def stamp_ns(stamp: _Stamp) -> int:
    """A builtin_interfaces/Time in nanoseconds; :data:`UNSTAMPED_NS` when it was left at zero."""
    return stamp.sec * _NS + stamp.nanosec


def to_stamp(ros_ns: int) -> Time:
    """Nanoseconds -> builtin_interfaces/Time.

    :raises ValueError: outside the message's range (int32 seconds).
    """
    from builtin_interfaces.msg import Time  # noqa: PLC0415 - the other functions work without message packages

    sec, nanosec = divmod(ros_ns, _NS)
    if not -(2**31) <= sec < 2**31:
        raise ValueError(f"{ros_ns} ns does not fit a ROS time stamp (int32 seconds)")
    return Time(sec=sec, nanosec=nanosec)


def view_bytes(buffer: Any) -> U8:
    """The bytes of ``msg.data`` as [n] uint8, without a copy.

    :raises ImageError: it is no buffer of single bytes (a list, an array of another item type).
    """
    try:
        view = memoryview(buffer)
    except TypeError:
        raise ImageError(
            "the image has no byte buffer",
            got=type(buffer).__name__,
            wanted="array.array, bytes or uint8 array",
        ) from None
    if view.itemsize != 1 or not view.c_contiguous:
        raise ImageError(
            "the image has no byte buffer",
            got=f"items of {view.itemsize} bytes",
            wanted="contiguous single bytes",
        )
    return np.frombuffer(view, dtype=np.uint8)


def image_to_rgb(msg: _Image) -> U8:
    """sensor_msgs/Image -> [h, w, 3] uint8 RGB; unpadded rgb8 stays a view of the message.

    :raises ImageError: unknown encoding, impossible size or step, too few bytes.
    """
    return decode_raw(msg.encoding, msg.height, msg.width, msg.step, bool(msg.is_bigendian), view_bytes(msg.data))


def compressed_to_rgb(msg: _CompressedImage) -> U8:
    """sensor_msgs/CompressedImage -> [h, w, 3] uint8 RGB.

    :raises ImageError: another codec, a damaged or oversized file.
    """
    return decode_compressed(msg.format, view_bytes(msg.data))


def joint_state_to_arrays(
    msg: _JointState, *, topic: str = "joint_states", needed: Collection[str] | None = None
) -> tuple[tuple[str, ...], F64, F64 | None]:
    """sensor_msgs/JointState -> (names, positions [n], velocities [n] or None), in the message's order.

    Velocities may be left out; one that is NaN or infinite is unknown and becomes NaN. A position may not.

    :param needed: joints whose position must be finite; None means all. Others may hold anything.
    :raises RefusalError: MALFORMED for repeated names or arrays of another length than ``name``; NOT_FINITE.
    """
    names = tuple(msg.name)
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise RefusalError(
            Refusal.MALFORMED,
            f"joint names stand twice: {', '.join(twice)}",
            where=topic,
            do="Two drivers may share the topic, but one message must name a joint once.",
        )
    positions = _floats(msg.position, len(names), "position", topic)
    velocities = _floats(msg.velocity, len(names), "velocity", topic) if len(msg.velocity) else None
    if velocities is not None and not np.isfinite(velocities).all():
        velocities = np.where(np.isfinite(velocities), velocities, np.nan)
    if not np.isfinite(positions).all():
        for name, position in zip(names, positions, strict=True):
            if not math.isfinite(position) and (needed is None or name in needed):
                raise RefusalError(
                    Refusal.NOT_FINITE,
                    f"position of joint {name!r}",
                    got=position,
                    wanted="a finite number",
                    where=topic,
                )
    return names, positions, velocities


def _floats(values: Sequence[float] | Any, length: int, field: str, topic: str) -> F64:
    """[length] float64: a view where the message holds doubles."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,):
        raise RefusalError(
            Refusal.MALFORMED,
            f"{field} does not fit the joint names",
            got=f"{array.size} values",
            wanted=f"{length}, one per name",
            where=topic,
        )
    return array


# -- choice of the decoder -----------------------------------------------------------------------------------

_BRIDGED = ("rgb8", "bgr8", "rgba8", "bgra8", "mono8")
"""Encodings left to cv_bridge: their pixels are exact by definition, so that equality can be asked for."""

_PROBES: tuple[tuple[int, int, int], ...] = ((3, 4, 0), (3, 5, 0), (3, 5, 7), (3, 5, 1), (1, 1, 3))
"""(height, width, bytes of row padding). 1 is no multiple of 3 or 4 channels: cv_bridge shears there."""


def choose_decoder(decoder: str = "auto") -> tuple[RawDecoder, str]:
    """The decoder of raw images and the sentence why.

    :param decoder: ``own``, or ``auto``: the distribution's cv_bridge when it imports and gives our pixels
        for small images of every encoding it would serve, with and without row padding.
    """
    if decoder == "own":
        return image_to_rgb, "own decoder: asked for by the parameter decoder"
    try:
        module = importlib.import_module("cv_bridge")  # optional, and its import fails under NumPy 2
        convert = module.CvBridge().imgmsg_to_cv2
    except Exception as error:  # a broken binary raises anything from ImportError to SystemError
        return image_to_rgb, f"own decoder: cv_bridge does not import ({type(error).__name__}: {error})"

    def bridged(msg: _Image) -> U8:
        if msg.encoding not in _BRIDGED:
            return image_to_rgb(msg)
        view_bytes(msg.data)  # the same refusal as ours for what is no image
        try:
            return np.asarray(convert(msg, desired_encoding="rgb8"), dtype=np.uint8)
        except Exception as error:
            raise ImageError(f"cv_bridge cannot decode {msg.encoding}", got=error) from error

    if difference := _first_difference(bridged, _probe_images()):
        return image_to_rgb, f"own decoder: cv_bridge gives other pixels for {difference}"
    return (
        bridged,
        f"cv_bridge for {', '.join(_BRIDGED)}: its self-check equals the own decoder, which does the rest",
    )


def _probe_images() -> Iterable[_Image]:
    """Small images whose bytes all differ from their neighbours."""
    for encoding in _BRIDGED:
        channels = {"mono8": 1, "rgb8": 3, "bgr8": 3}.get(encoding, 4)
        for height, width, padding in _PROBES:
            step = width * channels + padding
            content = (np.arange(height * step) * 37 + 11) % 256
            yield SimpleNamespace(
                encoding=encoding,
                height=height,
                width=width,
                step=step,
                is_bigendian=0,
                data=content.astype(np.uint8).tobytes(),
            )


def _first_difference(other: RawDecoder, images: Iterable[_Image]) -> str:
    """Where ``other`` and our decoder first disagree, in words; empty when nowhere."""
    for msg in images:
        size = f"{msg.encoding} {msg.width}x{msg.height} with step {msg.step}"
        try:
            if not np.array_equal(other(msg), image_to_rgb(msg)):
                return size
        except ImageError as error:
            return f"{size} ({error})"
    return ""


def controller_state_type() -> Any:
    """Message type of a joint_trajectory_controller's state: control_msgs' own, or JointState where it is not installed
    (it is on no package registry). Only its header stamp, the controller's time, is read."""
    try:
        return importlib.import_module("control_msgs.msg").JointTrajectoryControllerState
    except ImportError:
        return importlib.import_module("sensor_msgs.msg").JointState
