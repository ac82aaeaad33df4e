"""A simulated robot as a ROS node: cameras, joint states, commands with their own timeout, faults on request.

The executor runs commands, physics at the robot's dt, and joint states; one thread renders and publishes the
cameras, so that a 10 ms frame never delays a control period.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from phyai_policy.msg import ActionStep
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import ConfigError, RefusalError
from phyai_engine.messages import stamp_ns
from phyai_engine.sim import load_sim
from phyai_engine.sim.arm_robot import ArmRobot
from phyai_engine.sim.faults import FaultyStream
from phyai_engine.sim.robot import CommandInput, JointSample
from phyai_engine.types import U8
from phyai_ros.sim_cameras import CameraThread
from phyai_ros.sim_commands import ControllerState, joint_message, read_step, read_trajectory
from phyai_ros.sim_faults import FaultParameters
from phyai_ros.sim_task import SimTask
from phyai_ros.spin import run

FIRST_FRAME_S = 60.0  # bound on making the OpenGL context and the first frame
JOIN_S = 2.0
# name, default, description; all read-only: a change needs a restart. SimTask has those that are not.
PARAMETERS: tuple[tuple[str, str | int | float, str], ...] = (
    ("robot", "metaworld_sawyer", "robot file, or the name of a shipped one"),
    ("camera_rate_hz", 12.0, "frames per second of each camera [Hz]"),
    ("joint_rate_hz", 100.0, "joint states per second [Hz]"),
    ("image_width", 320, "width of every camera image [px]"),
    ("image_height", 240, "height of every camera image [px]"),
    ("command_source", "step", "what the robot obeys: step (ActionStep) or trajectory (JointTrajectory)"),
    ("command_topic", "policy_node/step", "topic of the ActionStep commands"),
    ("command_timeout_s", 0.2, "silence after which the robot stops by itself [s]"),
)


class SimNode(Node):
    """Node ``sim_robot``. Parameters: :data:`PARAMETERS`, :class:`SimTask` and :class:`FaultParameters`.

    :raises ConfigError: a parameter, the robot file or this machine cannot give the simulated robot.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__("sim_robot", **options)
        value = {name: self._declare(name, default, text) for name, default, text in PARAMETERS}
        self._config = load_robot(resolve("robots", value["robot"]))
        self._check(value)
        self._task = SimTask(self)
        self._robot = load_sim(
            self._config,
            task=self._task.name,
            seed=self._task.seed,
            width=value["image_width"],
            height=value["image_height"],
        )
        self._commands = CommandInput(self._config.kind, timeout_s=value["command_timeout_s"])
        self._epoch_mono_s = time.monotonic()
        self._epoch_ros_ns = self._now_ros_ns()
        self._steps = self._refused = 0
        self._stepped_s = (0.0, 0.0)  # when the first and the last control period began
        self._make_streams(self._task.seed)
        self._task.follow(self._robot)
        self._subscribe(value["command_source"], value["command_topic"])
        self.create_service(Trigger, "~/reset", self._on_reset)
        self._start(value["camera_rate_hz"], value["joint_rate_hz"])

    def _declare(self, name: str, default: str | float, text: str) -> Any:
        descriptor = ParameterDescriptor(description=text, read_only=True)
        return self.declare_parameter(name, default, descriptor).value

    def _check(self, value: dict[str, Any]) -> None:
        """Ranges; written so that NaN is refused too."""
        for name in ("camera_rate_hz", "joint_rate_hz", "image_width", "image_height", "command_timeout_s"):
            if not value[name] > 0:
                raise ConfigError("a parameter is out of range", got=value[name], wanted="> 0", where=name)
        if value["command_source"] not in ("step", "trajectory"):
            got = value["command_source"]
            raise ConfigError("unknown source", got=got, wanted="step or trajectory", where="command_source")

    def _make_streams(self, seed: int) -> None:
        reliable = partial(QoSProfile, history=HistoryPolicy.KEEP_LAST, reliability=ReliabilityPolicy.RELIABLE)
        self._joints: dict[str, tuple[FaultyStream[JointSample], Publisher]] = {
            topic: (
                FaultyStream(topic, seed),
                self.create_publisher(JointState, topic, reliable(depth=10)),
            )
            for topic in self._robot.state()
        }
        self._cameras: dict[str, tuple[FaultyStream[U8], Publisher]] = {
            c.name: (
                FaultyStream(c.name, seed),
                self.create_publisher(Image, c.topic, reliable(depth=2)),
            )
            for c in self._config.cameras
        }
        streams: dict[str, FaultyStream[Any]] = {name: stream for name, (stream, _) in self._joints.items()}
        streams |= {name: stream for name, (stream, _) in self._cameras.items()}
        self._faults = FaultParameters(self, streams)

    def _subscribe(self, source: str, topic: str) -> None:
        self._controller_state: ControllerState | None = None
        if source == "step":
            self.create_subscription(ActionStep, topic, self._on_step, 10)
            return
        if not isinstance(self._robot, ArmRobot):
            got = self._config.robot_id
            raise ConfigError("this robot follows no trajectories", got=got, wanted="command_source: step")
        on_trajectory = partial(self._on_trajectory, self._robot)
        self.create_subscription(JointTrajectory, self._config.trajectory_topic, on_trajectory, 10)
        self._controller_state = ControllerState(self, self._robot, self._config.controller_state_topic)

    def _start(self, camera_rate_hz: float, joint_rate_hz: float) -> None:
        # The physics goes on whatever the ROS clock does.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(self._robot.dt_s, self._on_period, clock=steady)
        self.create_timer(1.0 / joint_rate_hz, self._on_joints, clock=steady)
        self.create_timer(1.0, self._on_second, clock=steady)
        self._thread = CameraThread(self._robot, self._cameras, camera_rate_hz, self._now_ros_ns, self._epoch_mono_s)
        self._thread.start()
        if not self._thread.first_frame.wait(FIRST_FRAME_S):
            self._thread.end()
            raise ConfigError("no camera image", got=f"none in {FIRST_FRAME_S} s", do="Use a smaller image.")
        if self._thread.failure is not None:
            raise self._thread.failure
        self.get_logger().info(f"{self._config.robot_id}: {self._robot.instruction}, seed {self._task.seed}")

    def _now_ros_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _elapsed_ros_s(self, ros_ns: int) -> float:
        return (ros_ns - self._epoch_ros_ns) * 1e-9

    def _refuse(self, error: RefusalError) -> None:
        self._refused += 1
        self.get_logger().warning(str(error), throttle_duration_sec=1.0)

    def _on_step(self, message: ActionStep) -> None:
        try:
            self._commands.put(read_step(message, self._config), time.monotonic())
        except RefusalError as error:
            self._refuse(error)

    def _on_trajectory(self, arm: ArmRobot, message: JointTrajectory) -> None:
        stamp = stamp_ns(message.header.stamp)
        start_s = None if stamp == 0 else self._elapsed_ros_s(stamp)
        try:
            arm.follow(list(message.joint_names), *read_trajectory(message), start_s=start_s)
        except RefusalError as error:
            self._refuse(error)

    def _on_period(self) -> None:
        if self._thread.failure is not None:
            raise self._thread.failure
        if self._commands.expired(time.monotonic()):
            self._robot.hold()
            self.get_logger().warning("no command within the timeout: holding")
        stamp = self._now_ros_ns()
        self._robot.step(self._commands.take(), self._elapsed_ros_s(stamp))
        now_s = time.monotonic()
        self._stepped_s = (self._stepped_s[0] if self._steps else now_s, now_s)
        self._steps += 1
        self._task.look()
        if self._controller_state is not None:
            self._controller_state.publish(stamp)

    def _on_joints(self) -> None:
        now_s, stamp = time.monotonic() - self._epoch_mono_s, self._now_ros_ns()
        for topic, sample in self._robot.state().items():
            stream, publisher = self._joints[topic]
            stream.push(now_s, stamp, sample)
            for released in stream.due(now_s):
                publisher.publish(joint_message(released.payload, released.stamp_ns))

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._robot.reset(self._task.seed)
        self._commands.clear()
        self._task.look()
        response.success, response.message = True, f"reset with seed {self._task.seed}"
        return response

    def _on_second(self) -> None:
        self.get_logger().debug(
            f"steps {self._steps}, frames {self._thread.frames}, late slots {self._thread.late_slots}, "
            f"refused {self._refused}, deltas dropped {self._commands.dropped}, success {self._robot.success}"
        )

    def on_signal(self, name: str) -> None:
        """Nothing to stop: the robot ends with its node."""

    def on_spin_error(self, error: Exception) -> bool:
        """A simulated robot that failed must not look alive."""
        return False

    def close(self) -> None:
        """End the cameras; bounded."""
        elapsed_s = self._stepped_s[1] - self._stepped_s[0]
        share = (self._steps - 1) * self._robot.dt_s / elapsed_s if elapsed_s else 0.0
        self.get_logger().info(f"{self._steps} control periods in {elapsed_s:.1f} s, {share:.3f} of real time")
        self._thread.end()
        self._thread.join(JOIN_S)


def main(args: list[str] | None = None) -> int:
    """Entry point: 0 after SIGINT or SIGTERM, 1 when the robot cannot be made."""
    return run(lambda flag: SimNode(), args)


if __name__ == "__main__":
    sys.exit(main())
