"""Publishers of either reliability are heard, and one that cannot be heard is an ERROR that names its topic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not on the path: run `make test`")
pytest.importorskip("phyai_policy", reason="the package is not built: run `make test`")

from diagnostic_msgs.msg import DiagnosticStatus
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import Bool

from phyai_engine.types import AbortCause
from phyai_ros.policy_node import PolicyNode

pytestmark = pytest.mark.ros
Make = Callable[..., Any]
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
SUCCESS = TransitionCallbackReturn.SUCCESS


def offer(rig: Any, **policies: Any) -> None:
    """The front camera offers another QoS."""
    rig.peer.destroy_publisher(rig._images["front"])
    rig._images["front"] = rig.peer.create_publisher(Image, "front/image_raw", QoSProfile(depth=2, **policies))


@pytest.mark.fault(38)
@pytest.mark.parametrize("reliability", [ReliabilityPolicy.BEST_EFFORT, ReliabilityPolicy.RELIABLE])
@pytest.mark.parametrize("durability", [DurabilityPolicy.VOLATILE, DurabilityPolicy.TRANSIENT_LOCAL])
def test_a_camera_of_any_reliability_is_heard(make_rig: Make, reliability: Any, durability: Any) -> None:
    rig = make_rig()
    offer(rig, reliability=reliability, durability=durability)
    rig.start()
    assert rig.node._session.faults == {}
    assert rig.steps or rig.until(lambda: bool(rig.steps), 1.0)


@pytest.mark.fault(38)
def test_a_qos_that_does_not_match_is_an_error_in_the_diagnostics(make_rig: Make) -> None:
    rig = make_rig(**{"qos_overrides./front/image_raw.subscription.reliability": "reliable"}, diagnostics_rate_hz=10.0)
    offer(rig, reliability=ReliabilityPolicy.BEST_EFFORT)
    rig.configure()
    assert rig.node.trigger_activate() is SUCCESS
    rig.diagnostics.clear()

    def level() -> bytes:
        return bytes(rig.diagnostics[-1].status[0].level) if rig.diagnostics else b""

    rig.until(lambda: level() == DiagnosticStatus.ERROR)
    text = rig.diagnostics[-1].status[0].message
    assert text == "front/image_raw: a publisher offers an incompatible QoS (reliability), no message arrives"
    rig.until(lambda: "camera 'front'" in rig.status.last_refusal_text)
    assert rig.steps == []
    offer(rig, reliability=ReliabilityPolicy.RELIABLE)
    rig.until(lambda: bool(rig.steps))
    rig.until(lambda: level() != DiagnosticStatus.ERROR)


def test_the_last_word_of_every_publisher_is_heard_by_a_node_that_starts_later(make_rig: Make) -> None:
    rig = make_rig(fleet_stop_topic="")
    publishers = [rig.peer.create_publisher(Bool, "/fleet_stop", LATCHED) for _ in range(2)]
    for publisher, word in zip(publishers, (True, False), strict=True):
        publisher.publish(Bool(data=word))
    given = [Parameter("robot", value="arm7"), Parameter("model", value=str(rig.model_file))]
    late = PolicyNode(context=rig.context, namespace="late", parameter_overrides=given)
    rig.others.append(late)
    time.sleep(1.0)  # both words arrive before the node's first turn
    rig.executor.add_node(late)
    rig.until(lambda: late._safety().cause is AbortCause.FLEET_STOP)
