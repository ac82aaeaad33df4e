"""Subscriptions of one robot file, feeding the observation buffer.

QoS follows ros2.md: sensors are taken best effort and shallow, so that any publisher matches. Every image or joint
message that cannot be used is counted with its reason and never ends the node.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rclpy.event_handler import (
    QoSRequestedIncompatibleQoSInfo,
    SubscriptionEventCallbacks,
)
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import (
    DurabilityPolicy,
    HistoryPolicy,
    QoSProfile,
    ReliabilityPolicy,
    qos_policy_name_from_kind,
)
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.errors import ImageError, RefusalError
from phyai_engine.timing import ClockOffset
from phyai_ros.convert import (
    RawDecoder,
    compressed_to_rgb,
    joint_state_to_arrays,
    stamp_ns,
)
from phyai_ros.observation_buffer import ObservationBuffer, Put

SENSOR_QOS = QoSProfile(
    history=HistoryPolicy.KEEP_LAST,
    depth=5,
    reliability=ReliabilityPolicy.BEST_EFFORT,
    durability=DurabilityPolicy.VOLATILE,
)
Guard = Callable[[Callable[..., object]], Callable[..., None]]


class Inputs:
    """Cameras, joint states and the instruction topic of one robot.

    :param guard: wraps a callback so that an exception stops the robot instead of the process.
    :param active: False while the node is not active: messages are then dropped before any decoding.
    """

    def __init__(
        self,
        node: LifecycleNode,
        robot: RobotConfig,
        buffer: ObservationBuffer,
        decode_raw: RawDecoder,
        *,
        guard: Guard,
        active: Callable[[], bool],
        on_instruction: Callable[[str], None],
        on_jump: Callable[[str], object],
    ) -> None:
        self.faults: dict[str, str] = {}
        self._node, self._buffer, self._active, self._decode_raw = (
            node,
            buffer,
            active,
            decode_raw,
        )
        self._on_jump = on_jump
        self._subscriptions = [self._camera(camera, guard) for camera in robot.cameras]
        for topic in dict.fromkeys(entry.topic for entry in robot.state):
            self._subscriptions.append(self._subscribe(JointState, topic, guard(partial(self._on_joints, topic))))
        self._subscriptions.append(
            node.create_subscription(
                String,
                "~/instruction",
                guard(lambda msg: on_instruction(msg.data)),
                QoSProfile(depth=1),
            )
        )

    def destroy(self) -> None:
        """Drop every subscription. Idempotent."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions.clear()

    def _camera(self, camera: Camera, guard: Guard) -> Any:
        kind, decode = (
            (CompressedImage, compressed_to_rgb) if camera.transport == "compressed" else (Image, self._decode_raw)
        )
        return self._subscribe(kind, camera.topic, guard(partial(self._on_image, camera.name, decode)))

    def _subscribe(self, kind: Any, topic: str, callback: Callable[..., None]) -> Any:
        def incompatible(event: QoSRequestedIncompatibleQoSInfo) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind).lower()
            self.faults[topic] = f"{topic}: a publisher offers an incompatible QoS ({policy}), no message arrives"

        def heard(message: Any) -> None:
            self.faults.pop(topic, None)  # another publisher, or the same one started anew
            callback(message)

        return self._node.create_subscription(
            kind,
            topic,
            heard,
            SENSOR_QOS,
            event_callbacks=SubscriptionEventCallbacks(incompatible_qos=incompatible),
            qos_overriding_options=QoSOverridingOptions.with_default_policies(),
        )

    def _on_image(self, name: str, decode: Callable[[Any], Any], msg: Any) -> None:
        if not self._active():
            return
        clocks = ClockOffset.sample(self._now_ros_ns, tries=1)
        try:
            image = decode(msg)
        except ImageError as error:
            self._reject(name, error, clocks)
            return
        self._took(
            self._buffer.put_image(
                name,
                image,
                stamp_ns(msg.header.stamp),
                received_ros_ns=clocks.ros_ns,
                received_mono_ns=clocks.mono_ns,
            )
        )

    def _on_joints(self, topic: str, msg: JointState) -> None:
        if not self._active():
            return
        clocks = ClockOffset.sample(self._now_ros_ns, tries=1)
        try:
            names, positions, velocities = joint_state_to_arrays(msg, topic=topic, needed=self._buffer.needed(topic))
        except RefusalError as error:
            self._reject(topic, error, clocks)
            return
        self._took(
            self._buffer.put_joints(
                topic,
                names,
                positions,
                velocities,
                stamp_ns(msg.header.stamp),
                received_ros_ns=clocks.ros_ns,
                received_mono_ns=clocks.mono_ns,
            )
        )

    def _took(self, put: Put) -> None:
        if put is Put.JUMPED:
            self._on_jump("the stamps of all inputs went backwards together (a looped bag?)")

    def _reject(self, stream: str, error: ImageError | RefusalError, clocks: ClockOffset) -> None:
        self._buffer.put_refused(stream, error, clocks.mono_ns)
        self._node.get_logger().warning(f"{stream}: {error}", throttle_duration_sec=2.0)

    def _now_ros_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)
