"""Several policy nodes, each in a namespace of its own, under one fleet stop.

`ros2 launch phyai_policy fleet.launch.py fleet:=left,right robot:=arm7 model:=fake` gives every robot the same
arguments, which are those of policy.launch.py. What differs between robots stands in a file, `fleet:=FILE.yaml`:

    left:  {robot: arm7, engine: remote, engine_endpoint: "tcp://gpu-server:5555"}
    cell/right:  {robot: /etc/phyai/right.yaml, params_file: /etc/phyai/right_params.yaml}

A robot whose node fails is reported; the others go on. All of them stop by `/fleet_stop`, whose word is latched:
`ros2 topic pub --once --qos-durability transient_local /fleet_stop std_msgs/msg/Bool "{data: true}"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, GroupAction, IncludeLaunchDescription, OpaqueFunction
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

POLICY = Path(__file__).resolve().parent / "policy.launch.py"

# name, default, description. Whatever else policy.launch.py takes is handed on as well.
ARGUMENTS = (
    ("fleet", None, "The robots: namespaces separated by commas, or a YAML file namespace -> arguments of that robot."),
    ("fleet_stop_topic", "/fleet_stop", "The one topic whose `true` stops them all."),
    ("on_failure", "go_on", "When a robot's node cannot be configured or dies: go_on without it, or end."),
)


def generate_launch_description() -> LaunchDescription:
    """Arguments, then a group per robot."""
    arguments = [
        DeclareLaunchArgument(name, default_value=default, description=text) for name, default, text in ARGUMENTS
    ]
    return LaunchDescription([*arguments, OpaqueFunction(function=_robots)])


def _robots(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    topic = context.launch_configurations["fleet_stop_topic"]
    if not topic.startswith("/"):  # each robot would listen in its own namespace, and nobody would stop them all
        raise ValueError(f"fleet_stop_topic is {topic!r}: it must begin with / to be heard by every robot")
    return [_robot(namespace, own) for namespace, own in read_fleet(context.launch_configurations["fleet"]).items()]


def _robot(namespace: str, own: dict[str, str]) -> GroupAction:
    """A node as policy.launch.py makes it; nothing set for it reaches another robot."""
    shared = {name: LaunchConfiguration(name) for name in ("fleet_stop_topic", "on_failure")}
    arguments = {**shared, **own, "namespace": namespace}.items()
    return GroupAction(
        [IncludeLaunchDescription(PythonLaunchDescriptionSource(str(POLICY)), launch_arguments=arguments)]
    )


def read_fleet(text: str) -> dict[str, dict[str, str]]:
    """Namespace -> arguments of that robot.

    :raises ValueError: no robot, a name that stands twice, or a file of another form.
    """
    if not text.endswith((".yaml", ".yml")):
        names = [name.strip().strip("/") for name in text.split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise ValueError(f"fleet is {text!r}: wanted namespaces, each once, separated by commas")
        return {name: {} for name in names}
    content: Any = yaml.safe_load(Path(text).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not content or not all(isinstance(v, dict | None) for v in content.values()):
        raise ValueError(f"{text}: wanted NAMESPACE: {{argument: value}} for each robot")
    fleet = {str(name).strip("/"): {str(k): _text(v) for k, v in (own or {}).items()} for name, own in content.items()}
    for name, own in fleet.items():
        if foreign := {"namespace", "fleet_stop_topic"} & own.keys():
            raise ValueError(f"{text}: {name}: {', '.join(sorted(foreign))} cannot differ from the fleet's")
    return fleet


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
