"""The latched topic that stops a whole fleet: ``True`` stops, also when it was said before this node started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rclpy.event_handler import QoSRequestedIncompatibleQoSInfo, SubscriptionEventCallbacks
from rclpy.exceptions import InvalidTopicNameException
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_msgs.msg import Bool

from phyai_engine.errors import ConfigError
from phyai_ros.spin import Guard
from phyai_ros.topics import LATCHED_QOS, SENSOR_QOS

# As it is published, but deeper: each of several publishers has a last word, and all are delivered to a node at once.
LAST_WORDS_QOS = QoSProfile(depth=10, reliability=LATCHED_QOS.reliability, durability=LATCHED_QOS.durability)


class FleetStop:
    """Listens to one topic from construction to :meth:`close`, in every state of the node.

    Two subscriptions: one hears the last word of latched publishers, the other whoever publishes in another way (a
    person at a terminal): a stop is heard whatever its QoS.

    :param topic: absolute, or in the node's namespace; empty: none.
    :raises ConfigError: the topic is no name.
    :param on_stop: called with the reason on every ``True``. ``False`` only lets :attr:`stopped` fall.
    """

    def __init__(self, node: Node, topic: str, guard: Guard, on_stop: Callable[[str], object]) -> None:
        self.topic = topic
        self.stopped: bool | None = None  # the last value; None until one was heard
        self._node, self._on_stop = node, on_stop
        self._subscriptions = []
        if topic:
            events = SubscriptionEventCallbacks(incompatible_qos=self._volatile)
            subscribe = partial(node.create_subscription, Bool, topic, guard(self._heard))
            try:
                self._subscriptions = [subscribe(LAST_WORDS_QOS, event_callbacks=events), subscribe(SENSOR_QOS)]
            except InvalidTopicNameException as error:
                name = node.get_fully_qualified_name()
                raise ConfigError("fleet_stop_topic is no topic name", got=repr(topic), where=name) from error

    @property
    def words(self) -> str:
        """For /diagnostics."""
        if not self.topic:
            return "no topic"
        return {None: "not heard", True: "stop", False: "go"}[self.stopped] + f" on {self.topic}"

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _heard(self, message: Bool) -> None:
        self.stopped = bool(message.data)
        if self.stopped:
            self._on_stop(f"fleet stop on {self.topic}")

    def _volatile(self, event: QoSRequestedIncompatibleQoSInfo) -> None:
        self._node.get_logger().warning(
            f"a publisher of {self.topic} is not reliable and transient_local: it is obeyed, but nodes that start "
            "later will not hear what it said"
        )
