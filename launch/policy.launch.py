"""One policy node, brought to ACTIVE. `ros2 launch phyai_policy policy.launch.py -s` lists the arguments.

The exit code is 0 after Ctrl-C and 1 when the node could not be configured or died. fleet.launch.py includes this one
once per robot.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.action import Action
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.event_handlers import OnProcessExit, OnProcessStart
from launch.events import matches_action
from launch.events.process import ProcessExited
from launch_ros.actions import LifecycleNode, Node
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from lifecycle_msgs.msg import Transition

PACKAGE = "phyai_policy"
CONFIG = Path(__file__).resolve().parent.parent / "config"
# Fast DDS 2 (jazzy) and 3 (kilted) read different names.
PROFILE_VARIABLES = ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE")
TRUE_OR_FALSE = ("true", "false")
RESPAWN_DELAY_S = 1.0
# Arguments that are parameters of policy_node; an empty one leaves the word to the parameters file.
PARAMETERS = (
    *("robot", "model", "engine", "engine_endpoint", "engine_key", "engine_server_key"),
    *("output", "instruction", "fleet_stop_topic", "record"),
)

# name, default, choices (none: any), description
ARGUMENTS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("robot", "", (), "Robot file: a path, or the name of a shipped one. Empty: as in params_file."),
    ("model", "", (), "Model file: a path, or the name of a shipped one. Empty: as in params_file."),
    ("namespace", "", (), "Namespace of the nodes and of all their topics."),
    ("params_file", str(CONFIG / "profiles" / "default.yaml"), (), "Parameters; arguments override it."),
    (
        "engine",
        "",
        ("", "thread", "process", "remote"),
        "Where inference runs. Empty: as in params_file.",
    ),
    ("engine_endpoint", "", (), "Engine server of engine:=remote, e.g. tcp://gpu-server:5555."),
    ("engine_key", "", (), "engine:=remote: this robot's NAME.key_secret, needed beyond this host."),
    ("engine_server_key", "", (), "engine:=remote: the server's server.key."),
    (
        "output",
        "",
        ("", "steps", "trajectory", "chunks"),
        "How commands leave the node; chunks also starts player_node here. Empty: as in params_file.",
    ),
    (
        "use_sim_time",
        "",
        ("", *TRUE_OR_FALSE),
        "Take the time from /clock. Empty: as in params_file.",
    ),
    ("log_level", "info", ("debug", "info", "warn", "error", "fatal"), "Least severity that is logged."),
    ("autostart", "true", TRUE_OR_FALSE, "Configure and activate the node once it runs."),
    (
        "respawn",
        "false",
        TRUE_OR_FALSE,
        "Start policy_node again after a crash. It stays unconfigured: nothing moves until a person activates it.",
    ),
    (
        "on_failure",
        "end",
        ("end", "go_on"),
        "When a node here cannot be configured or dies: end the whole launch, or say so and leave the others alone.",
    ),
    ("instruction", "", (), "What the robot is to do, in words. Empty: as in params_file."),
    (
        "fleet_stop_topic",
        "",
        (),
        "std_msgs/Bool whose true stops every node that hears it. Empty: as in params_file; player_node: /fleet_stop.",
    ),
    ("record", "", (), "Folder to record into; %Y%m%d-%H%M%S is filled in. Empty: as in params_file."),
)


def generate_launch_description() -> LaunchDescription:
    """Arguments, then environment, then nodes."""
    arguments = [
        DeclareLaunchArgument(name, default_value=default, description=text, choices=list(choices) if choices else None)
        for name, default, choices, text in ARGUMENTS
    ]
    return LaunchDescription([*arguments, OpaqueFunction(function=_environment), OpaqueFunction(function=_nodes)])


def _environment(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The DDS profile and middleware, for the nodes and for launch's own; what a person has set is left alone."""
    wanted = {}
    if not any(context.environment.get(name) for name in PROFILE_VARIABLES):
        wanted = dict.fromkeys(PROFILE_VARIABLES, str(CONFIG / "fastdds.xml"))
    if not context.environment.get("RMW_IMPLEMENTATION"):
        wanted["RMW_IMPLEMENTATION"] = "rmw_fastrtps_cpp"
    return [SetEnvironmentVariable(name, value) for name, value in wanted.items()]


def _nodes(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    given = context.launch_configurations
    params_file = Path(given["params_file"]).absolute()
    if not params_file.is_file():  # launch_ros would warn and go on with the node's defaults
        raise FileNotFoundError(f"params_file {params_file} does not exist")
    explicit: dict[str, str | bool] = {name: given[name] for name in PARAMETERS if given[name]}
    if given["use_sim_time"]:
        explicit["use_sim_time"] = given["use_sim_time"] == "true"
    common = {
        "package": PACKAGE,
        "namespace": given["namespace"],
        "output": "screen",
        "ros_arguments": ["--log-level", given["log_level"]],
    }
    respawn, alone = given["respawn"] == "true", given["on_failure"] == "end"
    policy = LifecycleNode(
        name="policy_node",
        executable="policy_node",
        parameters=[str(params_file), explicit],
        respawn=respawn,
        respawn_delay=RESPAWN_DELAY_S,
        **common,
    )
    handlers = _autostart(policy, alone=alone) if given["autostart"] == "true" else []
    handlers.append(_on_exit(policy, respawn=respawn, alone=alone))
    if given["output"] != "chunks":
        return [*handlers, policy]
    # Never respawned: it would obey the policy at once, and the robot would move by itself after a crash.
    own = {name: explicit[name] for name in ("robot", "use_sim_time", "fleet_stop_topic") if name in explicit}
    player = Node(
        name="player_node",
        executable="player_node",
        parameters=[str(params_file), {**own, "policy": "policy_node"}],
        **common,
    )
    return [*handlers, _on_exit(player, respawn=False, alone=alone), player, policy]


def _autostart(policy: LifecycleNode, *, alone: bool) -> list[Action]:
    """Configure when the process runs, activate when that configuring succeeded: once, and never after a respawn.

    Events fired together would race (launch_ros issue 445), and a handler of every `inactive` would undo a
    person's deactivate.
    """
    configured = OnStateTransition(
        target_lifecycle_node=policy,
        start_state="configuring",
        entities=[OpaqueFunction(function=_activate, args=[policy, alone])],
        handle_once=True,
    )

    def disarm(event: ProcessExited, context: LaunchContext) -> None:
        with contextlib.suppress(ValueError):  # it has run already
            context.unregister_event_handler(configured)

    configure = [_change_state(policy, Transition.TRANSITION_CONFIGURE)]
    return [
        RegisterEventHandler(configured),
        RegisterEventHandler(OnProcessStart(target_action=policy, on_start=configure, handle_once=True)),
        RegisterEventHandler(OnProcessExit(target_action=policy, on_exit=disarm, handle_once=True)),
    ]


def _activate(context: LaunchContext, policy: LifecycleNode, alone: bool) -> list[LaunchDescriptionEntity]:
    """What follows the end of configuring.

    :raises RuntimeError: it failed; launch then stops everything and its exit code is 1.
    """
    goal = context.locals.event.goal_state
    if goal == "inactive":
        return [_change_state(policy, Transition.TRANSITION_ACTIVATE)]
    return [_failed(f"{policy.node_name} could not be configured ({goal}): its log above says why", alone=alone)]


def _failed(text: str, *, alone: bool) -> LogInfo:
    """:raises RuntimeError: nobody else is here who should go on."""
    if alone:
        raise RuntimeError(text)
    return LogInfo(msg=text)


def _change_state(policy: LifecycleNode, transition: int) -> EmitEvent:
    matcher = matches_action(policy)
    return EmitEvent(event=ChangeState(lifecycle_node_matcher=matcher, transition_id=transition))


def _on_exit(node: Node, *, respawn: bool, alone: bool) -> RegisterEventHandler:
    """A crash ends the launch with exit code 1, or is announced: the node is started again, or others go on."""

    def judge(event: ProcessExited, context: LaunchContext) -> LogInfo | None:
        if context.is_shutdown:
            return None
        if respawn:
            todo = "configure and activate it when the robot may move"
            return LogInfo(msg=f"{node.node_name} starts again and stays unconfigured: {todo}")
        if event.returncode != 0:
            text = f"{node.node_name} ended with exit code {event.returncode}: its log above says why"
            return _failed(text, alone=alone)
        return None

    return RegisterEventHandler(OnProcessExit(target_action=node, on_exit=judge))
