"""Which topic of a bag feeds which input of a robot file, checked before anything is replayed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from phyai_engine.config import Camera, RobotConfig
from phyai_engine.errors import BagError
from phyai_engine.replay.bag import Bag, Topic

IMAGE = "sensor_msgs/msg/Image"
COMPRESSED = "sensor_msgs/msg/CompressedImage"
JOINT_STATE = "sensor_msgs/msg/JointState"
STRING = "std_msgs/msg/String"


@dataclass(frozen=True, slots=True)
class TopicMap:
    """Topics of a bag by what they are for.

    :param cameras: bag topic -> camera. :param joints: bag topic -> JointState topic as the robot file spells it.
    :param instruction: bag topic of the instruction, empty where the bag has none.
    """

    cameras: Mapping[str, Camera]
    joints: Mapping[str, str]
    instruction: str = ""

    @property
    def topics(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.cameras, *self.joints, *([self.instruction] if self.instruction else []))

    @property
    def inputs(self) -> dict[str, str]:
        """Bag topic -> name of the input, cameras first: the camera's own, or the JointState topic."""
        return {**{topic: camera.name for topic, camera in self.cameras.items()}, **self.joints}


def map_topics(robot: RobotConfig, bag: Bag, namespace: str = "") -> TopicMap:
    """Find every input of the robot in the bag.

    :param namespace: of the recorded robot: topics of the robot file without a leading ``/`` follow it.
    :raises BagError: listing every topic that is missing, empty, or of another type.
    """
    problems: list[str] = []
    cameras: dict[str, Camera] = {}
    for camera in robot.cameras:
        wanted = COMPRESSED if camera.transport == "compressed" else IMAGE
        topic = resolved(camera.topic, namespace)
        problems += _problems(bag.topics, topic, wanted, f"camera {camera.name!r}")
        if topic in cameras:
            problems.append(f"{topic}: cameras {cameras[topic].name!r} and {camera.name!r} share it")
        cameras[topic] = camera
    joints = {resolved(spelt, namespace): spelt for spelt in dict.fromkeys(entry.topic for entry in robot.state)}
    for topic, spelt in joints.items():
        names = [entry.name for entry in robot.state if entry.topic == spelt]
        problems += _problems(bag.topics, topic, JOINT_STATE, f"joints {names[0]}..." if names[1:] else names[0])
    if problems:
        found = ", ".join(f"{t.name} ({t.kind}, {t.messages})" for t in bag.topics.values())
        raise BagError(
            "the bag does not fit the robot file:\n  " + "\n  ".join(problems) + "\n",
            where=f"{bag.path}, robot {robot.robot_id}",
            do=f"Change the topics in the robot file, or give the recording's namespace. The bag holds {found}.",
        )
    return TopicMap(cameras, joints, _instruction(bag.topics))


def resolved(topic: str, namespace: str = "") -> str:
    """A topic of a robot file as a bag names it."""
    if topic.startswith("/"):
        return topic
    return "/" + "/".join(part for part in (namespace.strip("/"), topic) if part)


def _problems(topics: Mapping[str, Topic], name: str, kind: str, what: str) -> list[str]:
    """What is wrong with one wanted topic, in words."""
    found = topics.get(name)
    if found is None:
        return [f"{name} ({what}) is missing{_near(topics, name, kind)}"]
    if found.kind != kind:
        hint = ""
        if {found.kind, kind} == {IMAGE, COMPRESSED}:
            hint = f": set the camera's transport to {'raw' if found.kind == IMAGE else 'compressed'}"
        return [f"{name} ({what}) has type {found.kind}, wanted {kind}{hint}"]
    return [] if found.messages else [f"{name} ({what}) holds no message"]


def _near(topics: Mapping[str, Topic], name: str, kind: str) -> str:
    """A topic that may be meant: of the same type with the same ending, or the most alike."""
    alike = [topic for topic in topics if topic.endswith(name) or name.endswith(topic)]
    alike += difflib.get_close_matches(name, topics, n=1)
    best = next((topic for topic in alike if topics[topic].kind == kind), alike[0] if alike else "")
    return f"; did you mean {best} ({topics[best].kind})?" if best else ""


def _instruction(topics: Mapping[str, Topic]) -> str:
    """The instruction is a node's own topic: whichever node recorded it, if there was only one."""
    named = [t.name for t in topics.values() if t.kind == STRING and t.name.rpartition("/")[2] == "instruction"]
    return named[0] if len(named) == 1 else ""
