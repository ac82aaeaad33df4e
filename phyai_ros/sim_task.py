"""What the simulated robot is asked to do, as ROS parameters, and whether it has done it, as a topic."""

from __future__ import annotations

from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter
from std_msgs.msg import Bool

from phyai_engine.sim.metaworld_robot import MetaWorldRobot
from phyai_engine.sim.robot import SimRobot
from phyai_engine.sim.tasks import other_task
from phyai_ros.topics import LATCHED_QOS

TASK, SEED = "task", "seed"


class SimTask:
    """Parameters ``task`` and ``seed``, and the topic ``~/success`` (std_msgs/Bool, latched).

    A new ``task`` is one of the same scene, which stays as it is; what counts as success is another. A new ``seed``
    places the scene at the next ``~/reset``. A success is kept until either.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.name = str(node.declare_parameter(TASK, "reach-v3", _described("Meta-World task; others ignore it")).value)
        self.seed = int(node.declare_parameter(SEED, 0, _described("seed of the scene; of the faults at start")).value)
        self._said: bool | None = None
        self._success = node.create_publisher(Bool, "~/success", LATCHED_QOS)

    def follow(self, robot: SimRobot) -> None:
        """The robot that is asked, from now on."""
        self._robot = robot
        self._node.add_on_set_parameters_callback(self._check)
        self._node.add_post_set_parameters_callback(self._apply)
        self.look()

    def look(self) -> None:
        """Say whether the task is solved, where that has changed. Called every control period."""
        if self._robot.success != self._said:
            self._said = self._robot.success
            self._success.publish(Bool(data=self._said))

    def _check(self, parameters: list[Parameter]) -> SetParametersResult:
        for parameter in parameters:
            if parameter.name == TASK and parameter.value not in (known := self._known()):
                reason = f"no such task in this scene, got {parameter.value}, wanted one of {', '.join(known)}"
                return SetParametersResult(successful=False, reason=reason)
        return SetParametersResult(successful=True)

    def _known(self) -> list[str]:
        robot = self._robot
        if not isinstance(robot, MetaWorldRobot) or robot.task is None:
            return [self.name]
        return [robot.task.name, other_task(robot.task).name]

    def _apply(self, parameters: list[Parameter]) -> None:
        for parameter in parameters:
            if parameter.name == SEED:
                self.seed = int(parameter.value)
            elif parameter.name == TASK and parameter.value != self.name and isinstance(self._robot, MetaWorldRobot):
                self.name = str(parameter.value)
                self._robot.set_task(self.name)
                self._node.get_logger().info(f"asked to {self._robot.instruction}")


def _described(text: str) -> ParameterDescriptor:
    return ParameterDescriptor(description=text)
