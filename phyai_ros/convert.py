"""numpy -> ROS messages, and what needs the ROS distribution: its cv_bridge, its controller's state.

Messages are read by phyai_engine/messages.py, which needs no ROS.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from phyai_engine.errors import ImageError
from phyai_engine.messages import NS, RawDecoder, image_to_rgb, view_bytes
from phyai_engine.types import U8

if TYPE_CHECKING:
    from builtin_interfaces.msg import Time


def to_stamp(ros_ns: int) -> Time:
    """Nanoseconds -> builtin_interfaces/Time.

    :raises ValueError: outside the message's range (int32 seconds).
    """
    from builtin_interfaces.msg import Time  # noqa: PLC0415 - choose_decoder works without message packages

    sec, nanosec = divmod(ros_ns, NS)
    if not -(2**31) <= sec < 2**31:
        raise ValueError(f"{ros_ns} ns does not fit a ROS time stamp (int32 seconds)")
    return Time(sec=sec, nanosec=nanosec)


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

    def bridged(msg: Any) -> U8:
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


def _probe_images() -> Iterable[Any]:
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


def _first_difference(other: RawDecoder, images: Iterable[Any]) -> str:
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
