"""Subscriptions of one robot file, feeding the observation buffer.

QoS follows ros2.md: sensors are taken best effort and shallow, so that any publisher matches. What a message does to
the buffer is phyai_engine/control/intake.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rclpy.event_handler import (
    QoSRequestedIncompatibleQoSInfo,
    SubscriptionEventCallbacks,
)
from rclpy.node import Node
from rclpy.qos import QoSProfile, qos_policy_name_from_kind
from rclpy.qos_overriding_options import QoSOverridingOptions
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.control.intake import Intake
from phyai_engine.control.observation_buffer import ObservationBuffer
from phyai_engine.messages import RawDecoder, image_to_rgb
from phyai_engine.timing import ClockOffset
from phyai_ros.spin import Guard
from phyai_ros.topics import SENSOR_QOS


class JointInputs:
    """The JointState topics of one robot, feeding an observation buffer.

    :param guard: wraps a callback so that an exception stops the robot instead of the process.
    :param active: False while the node is not active: messages are then dropped before any decoding.
    :param on_jump: called with a sentence when the stamps of all inputs went back together.
    """

    def __init__(
        self,
        node: Node,
        robot: RobotConfig,
        buffer: ObservationBuffer,
        guard: Guard,
        *,
        active: Callable[[], bool],
        on_jump: Callable[[str], object],
        decode_raw: RawDecoder = image_to_rgb,
    ) -> None:
        self.faults: dict[str, str] = {}
        """Topic -> why nothing can be heard there."""
        self._node, self._active = node, active
        self._intake = Intake(buffer, decode_raw, on_jump=on_jump, on_refused=self._warn)
        topics = dict.fromkeys(entry.topic for entry in robot.state)
        self._subscriptions = [self._subscribe(JointState, t, guard(partial(self._on_joints, t))) for t in topics]

    @property
    def topics(self) -> dict[str, type[Any]]:
        """Full name -> message type of every subscription."""
        return {subscription.topic_name: subscription.msg_type for subscription in self._subscriptions}

    def destroy(self) -> None:
        """Drop every subscription. Idempotent."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions.clear()

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

    def _on_joints(self, topic: str, msg: JointState) -> None:
        if self._active():
            self._intake.joints(topic, msg, ClockOffset.sample(self._now_ros_ns, tries=1))

    def _warn(self, stream: str, reason: str) -> None:
        self._node.get_logger().warning(f"{stream}: {reason}", throttle_duration_sec=2.0)

    def _now_ros_ns(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)


class Inputs(JointInputs):
    """Cameras, joint states and the instruction topic of one robot."""

    def __init__(
        self,
        node: Node,
        robot: RobotConfig,
        buffer: ObservationBuffer,
        decode_raw: RawDecoder,
        guard: Guard,
        *,
        active: Callable[[], bool],
        on_instruction: Callable[[str], None],
        on_jump: Callable[[str], object],
    ) -> None:
        super().__init__(node, robot, buffer, guard, active=active, on_jump=on_jump, decode_raw=decode_raw)
        self._subscriptions += [self._camera(camera, guard) for camera in robot.cameras]
        instruct = guard(lambda msg: on_instruction(msg.data))
        self._subscriptions.append(node.create_subscription(String, "~/instruction", instruct, QoSProfile(depth=1)))

    def _camera(self, camera: Camera, guard: Guard) -> Any:
        kind = CompressedImage if camera.transport == "compressed" else Image
        return self._subscribe(kind, camera.topic, guard(partial(self._on_image, camera)))

    def _on_image(self, camera: Camera, msg: Any) -> None:
        if self._active():
            self._intake.image(camera, msg, ClockOffset.sample(self._now_ros_ns, tries=1))
