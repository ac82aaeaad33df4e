"""What a robot's cameras send, heard for a while, as pictures of a film."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image

from phyai_engine.config import Camera
from phyai_engine.errors import ImageError
from phyai_engine.evaluate.film import FRAME_MS
from phyai_engine.messages import compressed_to_rgb, image_to_rgb
from phyai_engine.types import U8
from phyai_ros.watch import SENSOR


class Film:
    """Listens from when it is made until :meth:`close`.

    :ivar frames: camera -> [h, w, 3], every FRAME_MS, once each camera has spoken.
    """

    def __init__(self, node: Node, cameras: Sequence[Camera]) -> None:
        self.frames: list[dict[str, U8]] = []
        self._node, self._count = node, len(cameras)
        self._newest: dict[str, U8] = {}
        self._due_s = 0.0
        self._heard = [
            node.create_subscription(
                CompressedImage if camera.transport == "compressed" else Image,
                camera.topic,
                partial(self._on_image, camera),
                SENSOR,
            )
            for camera in cameras
        ]

    def close(self) -> None:
        """Hear no more."""
        for subscription in self._heard:
            self._node.destroy_subscription(subscription)

    def _on_image(self, camera: Camera, message: Any) -> None:
        with contextlib.suppress(ImageError):  # the policy node refuses it, and says so
            decode = compressed_to_rgb if camera.transport == "compressed" else image_to_rgb
            self._newest[camera.name] = decode(message)
        if len(self._newest) == self._count and time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + FRAME_MS * 1e-3
            self.frames.append(dict(self._newest))
