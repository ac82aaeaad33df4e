"""ROS messages -> numpy, without ROS: any object with a message's fields will do.

rclpy's messages and those that a bag's reader makes are read alike. ``msg.data`` is viewed in place (an ``array.array``
or a numpy array), never turned into a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.images import decode_compressed, decode_raw
from phyai_engine.types import F64, U8, Refusal

NS = 1_000_000_000

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
    return stamp.sec * NS + stamp.nanosec


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
