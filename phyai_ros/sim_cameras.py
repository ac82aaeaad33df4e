"""The thread that renders and publishes the simulated robot's cameras."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
from rclpy.publisher import Publisher
from sensor_msgs.msg import Image

from phyai_engine.sim import SimRobot
from phyai_engine.sim.faults import FaultyStream
from phyai_engine.types import U8
from phyai_ros.convert import to_stamp


def image_message(image: U8, stamp_ros_ns: int, frame_id: str) -> Image:
    """[h, w, 3] uint8 RGB -> sensor_msgs/Image. array.array skips rclpy's check of every single byte."""
    pixels = array.array("B")
    pixels.frombytes(np.ascontiguousarray(image).data.cast("B"))
    height, width, _ = image.shape
    message = Image(height=height, width=width, encoding="rgb8", step=3 * width, data=pixels)
    message.header.stamp = to_stamp(stamp_ros_ns)
    message.header.frame_id = frame_id
    return message


class CameraThread(threading.Thread):
    """Renders all cameras back to back on a fixed grid and publishes them; owns the robot's rendering side.

    :ivar failure: what ended the thread, None while all is well. :ivar frames: frames published per camera.
    :ivar late_slots: grid points skipped because rendering could not keep up.
    """

    def __init__(
        self,
        robot: SimRobot,
        cameras: Mapping[str, tuple[FaultyStream[U8], Publisher]],
        rate_hz: float,
        now_ros_ns: Callable[[], int],
        epoch_mono_s: float,
    ) -> None:
        super().__init__(name="sim_cameras")
        self._robot, self._cameras, self._period_s = robot, cameras, 1.0 / rate_hz
        self._now_ros_ns, self._epoch_s = now_ros_ns, epoch_mono_s
        self._ending = threading.Event()
        self.first_frame = threading.Event()
        self.failure: Exception | None = None
        self.frames = dict.fromkeys(cameras, 0)
        self.late_slots = 0

    def end(self) -> None:
        """Ask the thread to end; bounded by one frame."""
        self._ending.set()

    def run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # handed to the executor thread, which ends the node with it
            self.failure = error
        finally:
            self.first_frame.set()
            self._robot.close()

    def _loop(self) -> None:
        next_s = self._elapsed()
        while not self._ending.is_set():
            wake_s = min([next_s, *(stream.next_due_s for stream, _ in self._cameras.values())])
            if self._ending.wait(max(0.0, wake_s - self._elapsed())):
                return
            if self._elapsed() >= next_s:
                for name, (stream, _) in self._cameras.items():
                    # The exposure is the instant the physics is read, at the start of the rendering.
                    exposed_s, stamp = self._elapsed(), self._now_ros_ns()
                    stream.push(exposed_s, stamp, self._robot.render(name))
                    self._publish_due()
                self.first_frame.set()
                behind = int((self._elapsed() - next_s) / self._period_s)
                self.late_slots += behind
                next_s += (behind + 1) * self._period_s
            self._publish_due()

    def _publish_due(self) -> None:
        for name, (stream, publisher) in self._cameras.items():
            for sample in stream.due(self._elapsed()):
                if self._ending.is_set():
                    return
                publisher.publish(image_message(sample.payload, sample.stamp_ns, name))
                self.frames[name] += 1

    def _elapsed(self) -> float:
        return time.monotonic() - self._epoch_s
