"""Plays the inputs of a bag over DDS at the rate at which they were recorded, with /clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from phyai_engine.replay.bag import Bag
from phyai_engine.replay.read_ahead import ReadAhead
from phyai_engine.replay.topic_map import TopicMap
from phyai_engine.timing import Percentiles, Window, mono_ns
from phyai_ros.convert import to_stamp

CLOCK_NS = 5_000_000
"""/clock is sent with every message and at least this often: a control tick is late by no more than that."""
TURN_NS = 1_000_000  # a wait shorter than this is slept, not used for callbacks
AHEAD = 256  # messages read ahead of their time


@dataclass(frozen=True, slots=True)
class Played:
    """What was published: messages, and how late each was against the recording [s]."""

    messages: int
    lateness: Percentiles


class BagPlayer:
    """Publishers of the robot's inputs, and of the instruction if the bag has one.

    :param policy: name of the policy node.
    :param offset_ns: receipt - stamp that all inputs have in common: /clock is the bag's time less it.
    """

    def __init__(self, node: Node, bag: Bag, topics: TopicMap, policy: str, offset_ns: int = 0) -> None:
        self._bag, self._offset_ns, self._told_ns = bag, offset_ns, 0
        self._clock = node.create_publisher(Clock, "/clock", QoSProfile(depth=10))
        kinds = {"raw": Image, "compressed": CompressedImage}
        make = node.create_publisher
        self._publishers: dict[str, Publisher] = {
            topic: make(kinds[camera.transport], camera.topic, QoSProfile(depth=2))
            for topic, camera in topics.cameras.items()
        }
        for topic, spelt in topics.joints.items():
            self._publishers[topic] = make(JointState, spelt, QoSProfile(depth=10))
        self._instruction = topics.instruction
        if topics.instruction:
            self._publishers[topics.instruction] = make(String, f"{policy}/instruction", QoSProfile(depth=1))

    @property
    def heard(self) -> bool:
        """True once somebody listens to every topic."""
        return all(p.get_subscription_count() for p in (self._clock, *self._publishers.values()))

    def instruct(self) -> None:
        """The first instruction holds from the beginning: a latched one may have been recorded at any time."""
        if (topic := self._instruction) and (first := next(self._bag.messages([topic]), None)) is not None:
            self._publishers[topic].publish(bytes(first.raw))

    def play(self, turn: Callable[[float], None]) -> Played:
        """Publish everything; returns when the last message is out.

        :param turn: called while nothing is due, with the seconds that are left.
        :raises BagError: the bag breaks off.
        """
        lateness = Window(1_000_000)
        count, clock_ns, began_ns = 0, 0, mono_ns()
        with ReadAhead(self._bag.messages(set(self._publishers)), AHEAD) as messages:
            for message in messages:
                due_ns = began_ns + message.received_ns - self._bag.start_ns
                while (now_ns := mono_ns()) < due_ns:
                    if now_ns >= clock_ns + CLOCK_NS:
                        clock_ns = now_ns
                        self._tell(self._bag.start_ns + now_ns - began_ns)
                    else:
                        _wait(min(due_ns, clock_ns + CLOCK_NS) - now_ns, turn)
                clock_ns = now_ns
                self._tell(message.received_ns)
                # As it was recorded: nothing is read or serialised again.
                self._publishers[message.topic].publish(bytes(message.raw))
                lateness.add((now_ns - due_ns) * 1e-9)
                count += 1
        return Played(count, lateness.percentiles())

    def _tell(self, bag_ns: int) -> None:
        """/clock never goes back here: a message that is late, or recorded out of order, is no jump of the clock."""
        self._told_ns = max(self._told_ns, bag_ns - self._offset_ns)
        self._clock.publish(Clock(clock=to_stamp(self._told_ns)))


def _wait(left_ns: int, turn: Callable[[float], None]) -> None:
    if left_ns > TURN_NS:
        turn((left_ns - TURN_NS // 2) * 1e-9)
    elif left_ns > 0:
        time.sleep(left_ns * 1e-9)
