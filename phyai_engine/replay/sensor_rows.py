"""What the sensors of one run showed, as a record keeps it: arrivals, a small frame now and then, joint positions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.messages import UNSTAMPED_NS, compressed_to_rgb, image_to_rgb, stamp_ns
from phyai_engine.replay.bag import Bag
from phyai_engine.replay.record import Camera as CameraRows
from phyai_engine.replay.record import FrameRow, Joints
from phyai_engine.replay.rows import frame_row
from phyai_engine.replay.topic_map import TopicMap

FRAME_EVERY_S = 1.5
JOINTS_EVERY_S = 0.05


class SensorRows:
    """Rows as messages come. Messages that cannot be read are left out: whoever uses them counts those."""

    def __init__(self, robot: RobotConfig) -> None:
        self.frames: list[FrameRow] = []
        self._names = robot.state_names
        self._arrivals: dict[str, list[tuple[float, float]]] = {camera.name: [] for camera in robot.cameras}
        self._frame_due_s = dict.fromkeys(self._arrivals, -math.inf)
        self._positions: dict[str, float] = {}
        self._joints: list[tuple[float, dict[str, float]]] = []

    def image(self, camera: Camera, t_s: float, stamp_s: float, message: Any) -> None:
        """A sensor_msgs/Image or CompressedImage arrived at ``t_s``.

        :param stamp_s: its header stamp on the same axis.
        """
        self._arrivals[camera.name].append((t_s, stamp_s))
        if t_s < self._frame_due_s[camera.name]:
            return
        decode = compressed_to_rgb if camera.transport == "compressed" else image_to_rgb
        with contextlib.suppress(ImageError):
            self.frames.append(frame_row(t_s, camera.name, decode(message)))
            self._frame_due_s[camera.name] = t_s + FRAME_EVERY_S

    def joint_state(self, t_s: float, message: Any) -> None:
        """A sensor_msgs/JointState arrived at ``t_s``."""
        self._positions.update(zip(message.name, map(float, message.position), strict=False))
        if not self._joints or t_s - self._joints[-1][0] > JOINTS_EVERY_S:
            self._joints.append((t_s, dict(self._positions)))

    def arrivals(self, camera: str) -> Sequence[tuple[float, float]]:
        """(arrival, stamp) of every frame of one camera [s]."""
        return self._arrivals[camera]

    def cameras(self, delivered: Mapping[str, float]) -> dict[str, CameraRows]:
        """Arrivals by camera. :param delivered: fraction of each, where somebody counted it."""
        return {
            name: CameraRows(
                t_s=[t_s for t_s, _ in rows],
                stamp_s=[stamp_s for _, stamp_s in rows],
                delivered=delivered.get(name, math.nan),
            )
            for name, rows in self._arrivals.items()
        }

    def joints(self) -> Joints:
        """Of those joints of the robot's state that were ever heard; from when all of them had been."""
        names = [name for name in self._names if name in self._positions]
        whole = [(t_s, row) for t_s, row in self._joints if all(name in row for name in names)]
        return Joints(
            names=names, t_s=[t_s for t_s, _ in whole], positions=[[row[name] for name in names] for _, row in whole]
        )


def sensors_of(bag: Bag, topics: TopicMap, robot: RobotConfig, offset_ns: int = 0) -> SensorRows:
    """The sensors of a whole bag; times count from its first message.

    :param offset_ns: receipt - stamp that all inputs have in common.
    :raises BagError: the bag breaks off.
    """
    rows = SensorRows(robot)
    for message in bag.messages({*topics.cameras, *topics.joints}):
        t_s = (message.received_ns - bag.start_ns) * 1e-9
        with contextlib.suppress(RefusalError):  # the survey counts what does not follow its type
            decoded = bag.decode(message)
            if (camera := topics.cameras.get(message.topic)) is None:
                rows.joint_state(t_s, decoded)
            else:
                stamp = stamp_ns(decoded.header.stamp)
                stamp_s = (stamp + offset_ns - bag.start_ns) * 1e-9 if stamp > UNSTAMPED_NS else math.nan
                rows.image(camera, t_s, stamp_s, decoded)
    return rows
