"""What a received message does to the observation buffer: the same for a node's subscriptions and for a bag.

A message that cannot be used is counted with its reason and never raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phyai_engine.config import Camera
from phyai_engine.control.observation_buffer import ObservationBuffer, Put
from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.messages import RawDecoder, compressed_to_rgb, image_to_rgb, joint_state_to_arrays, stamp_ns
from phyai_engine.timing import ClockOffset

LOOPED = "the stamps of all inputs went backwards together (a looped bag?)"


class Intake:
    """Decodes messages into one observation buffer.

    :param decode_raw: of sensor_msgs/Image.
    :param on_jump: called with a sentence when the stamps of all inputs went back together.
    :param on_refused: called with camera or topic and the reason for every message that cannot be read.
    """

    def __init__(
        self,
        buffer: ObservationBuffer,
        decode_raw: RawDecoder = image_to_rgb,
        *,
        on_jump: Callable[[str], object],
        on_refused: Callable[[str, str], object],
    ) -> None:
        self._buffer, self._decode_raw = buffer, decode_raw
        self._on_jump, self._on_refused = on_jump, on_refused

    def image(self, camera: Camera, message: Any, received: ClockOffset) -> None:
        """A sensor_msgs/Image or CompressedImage, as the camera's transport says.

        :param received: both clocks, read at receipt, before anything is decoded.
        """
        decode = compressed_to_rgb if camera.transport == "compressed" else self._decode_raw
        try:
            image = decode(message)
        except ImageError as error:
            self.refuse(camera.name, error, received)
            return
        self._took(
            self._buffer.put_image(
                camera.name,
                image,
                stamp_ns(message.header.stamp),
                received_ros_ns=received.ros_ns,
                received_mono_ns=received.mono_ns,
            )
        )

    def joints(self, topic: str, message: Any, received: ClockOffset) -> None:
        """A sensor_msgs/JointState of a topic, as the robot file spells it."""
        try:
            names, positions, velocities = joint_state_to_arrays(
                message, topic=topic, needed=self._buffer.needed(topic)
            )
        except RefusalError as error:
            self.refuse(topic, error, received)
            return
        self._took(
            self._buffer.put_joints(
                topic,
                names,
                positions,
                velocities,
                stamp_ns(message.header.stamp),
                received_ros_ns=received.ros_ns,
                received_mono_ns=received.mono_ns,
            )
        )

    def refuse(self, stream: str, error: ImageError | RefusalError, received: ClockOffset) -> None:
        """A message of a camera or of a JointState topic could not be read."""
        self._buffer.put_refused(stream, error, received.mono_ns)
        self._on_refused(stream, str(error))

    def _took(self, put: Put) -> None:
        if put is Put.JUMPED:
            self._on_jump(LOOPED)
