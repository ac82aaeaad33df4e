"""A simulated robot and a policy node. `ros2 launch phyai_policy demo.launch.py -s` lists the arguments.

Those of policy.launch.py work here too, for example `engine:=thread` or `autostart:=false`.
"""

from __future__ import annotations

from pathlib import Path

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import (
    DeclareLaunchArgument,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events.process import ProcessExited
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import Node

HERE = Path(__file__).resolve().parent
PROFILE = HERE.parent / "config" / "profiles" / "demo.yaml"

# name, default, description
ARGUMENTS = (
    ("robot", "sawyer_20hz", "Robot file: a path, or the name of a shipped one (sawyer_20hz, arm7)."),
    ("model", "metaworld", "Checkpoint folder, model file, or the name of a shipped one."),
    ("namespace", "", "Namespace of the nodes and of all their topics."),
    ("params_file", str(PROFILE), "Parameters of the policy node; arguments override it."),
    ("output", "steps", "How commands leave the policy node; trajectory needs robot:=arm7."),
    ("instruction", "open the drawer", "What the robot is to do, in words."),
    ("task", "drawer-open", "Task that the scene is made for; robots without tasks ignore it."),
    ("seed", "1", "Seed of the scene."),
)
COMMAND_TOPICS = {"steps": "policy_node/step", "chunks": "player_node/step"}


def generate_launch_description() -> LaunchDescription:
    """Arguments, the policy (it sets the DDS profile for both), then the simulation."""
    arguments = [
        DeclareLaunchArgument(name, default_value=default, description=text) for name, default, text in ARGUMENTS
    ]
    # The arguments reach the included file by name.
    policy = IncludeLaunchDescription(PythonLaunchDescriptionSource(str(HERE / "policy.launch.py")))
    return LaunchDescription([*arguments, policy, OpaqueFunction(function=_simulation)])


def _simulation(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    given = context.launch_configurations
    trajectory = given["output"] == "trajectory"
    sim = Node(
        package="phyai_policy",
        executable="sim_node",
        name="sim_robot",
        namespace=given["namespace"],
        output="screen",
        ros_arguments=["--log-level", given["log_level"]],
        parameters=[
            {
                "robot": given["robot"],
                "task": given["task"],
                "seed": int(given["seed"]),
                "command_source": "trajectory" if trajectory else "step",
                "command_topic": COMMAND_TOPICS.get(given["output"], COMMAND_TOPICS["steps"]),
            }
        ],
    )
    return [RegisterEventHandler(OnProcessExit(target_action=sim, on_exit=_simulation_ended)), sim]


def _simulation_ended(event: ProcessExited, context: LaunchContext) -> None:
    """Without its robot the demo ends; the exit code is then 1.

    :raises RuntimeError: the simulation ended before the launch did.
    """
    if not context.is_shutdown:
        raise RuntimeError(f"the simulated robot ended with exit code {event.returncode}: its log above says why")
