"""A Meta-World task as a robot: MuJoCo physics, EGL off-screen cameras."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import numpy as np

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError, PhyaiError
from phyai_engine.sim.robot import JointSample
from phyai_engine.types import F64, U8, ActionType

ACTIONS = ("dx", "dy", "dz", "gripper")
ARM_TOPIC, HAND_TOPIC = "joint_states", "hand_state"
ARM_JOINTS = tuple(f"right_j{i}" for i in range(7))
HAND_JOINTS = ("hand_x", "hand_y", "hand_z", "gripper")
# Our camera -> (Meta-World's camera, mounted upside down).
CAMERAS = {"front": ("corner4", True), "wrist": ("gripperPOV", False)}
EGL_PACKAGES = "libegl1 libegl-mesa0 libopengl0 libgl1-mesa-dri"


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the Meta-World robot needs {module.partition('.')[0]}",
            got=error,
            do="Run `pip install '.[sim]'` in the checkout.",
        ) from error


class MetaWorldRobot:
    """One Meta-World task with the Sawyer arm, stepped once per control period and never ending by itself.

    Actions are Meta-World's own: dx, dy, dz in units of 10 mm per step, gripper -1 (open) .. 1 (closed), each
    in [-1, 1]. State on two topics, as a real arm and its hand would publish: seven joints [rad], and the
    hand's position [m] with the finger opening (0..1).

    :param robot: a cartesian_delta robot file with Meta-World's action and state names.
    :param task: e.g. ``reach-v3``.
    """

    def __init__(
        self,
        robot: RobotConfig,
        *,
        task: str = "reach-v3",
        seed: int = 0,
        width: int = 320,
        height: int = 240,
    ) -> None:
        _check_supported(robot)
        environments = _require("metaworld.env_dict").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        name = f"{task}-goal-observable"
        if name not in environments:
            known = ", ".join(key.removesuffix("-goal-observable") for key in environments)
            raise ConfigError("unknown Meta-World task", got=task, wanted=f"one of {known}")
        self.action_names: tuple[str, ...] = ACTIONS
        self.dt_s = robot.dt_s
        self.instruction = task.rpartition("-")[0].replace("-", " ")
        self._env = environments[name](seed=seed)
        # Goals drawn from the environment's own seeded generator, and no end after 500 steps.
        self._env.seeded_rand_vec, self._env._freeze_rand_vec = True, False
        self._env.max_path_length = sys.maxsize
        self._arm = self._env.model.joint(ARM_JOINTS[0]).qposadr[0]
        self._renderer: _EglRenderer | None = None
        self._size = (width, height)
        self._lock = threading.Lock()  # the physics state, shared with the rendering thread
        self.reset(seed)

    @property
    def success(self) -> bool:
        """True once the task was solved since the last reset."""
        return self._success

    def reset(self, seed: int) -> None:
        """Start the task over with goal and objects placed by ``seed``; 50 ms."""
        with self._lock:
            self._env.seed(seed)
            observation, _ = self._env.reset()
        self._gripper = -1.0
        self._success = False
        self._positions = self._read(observation)
        self._velocities = np.zeros_like(self._positions)

    def step(self, command: F64 | None, now_s: float | None = None) -> None:
        """See :meth:`SimRobot.step`. Without a command the target stays and the gripper keeps its grip."""
        if command is None:
            action = np.array([0.0, 0.0, 0.0, self._gripper], dtype=np.float32)
        else:
            self._gripper = float(command[3])
            action = command.astype(np.float32)
        with self._lock:
            observation, _, _, _, report = self._env.step(action)
        self._success = self._success or bool(report["success"])
        positions = self._read(observation)
        # Differences, not MuJoCo's velocities: a control period is dt_s of ROS time but 12.5 ms of physics.
        self._velocities = (positions - self._positions) / self.dt_s
        self._positions = positions

    def _read(self, observation: F64) -> F64:
        joints = self._env.data.qpos[self._arm : self._arm + len(ARM_JOINTS)]
        return np.concatenate([joints, observation[: len(HAND_JOINTS)]])

    def hold(self) -> None:
        """Nothing to do: a delta robot without commands keeps its target (see :meth:`step`)."""

    def state(self) -> dict[str, JointSample]:
        """See :meth:`SimRobot.state`."""
        split = len(ARM_JOINTS)
        q, v = self._positions, self._velocities
        return {
            ARM_TOPIC: JointSample(ARM_JOINTS, q[:split], v[:split]),
            HAND_TOPIC: JointSample(HAND_JOINTS, q[split:], v[split:]),
        }

    def render(self, camera: str) -> U8:
        """See :meth:`SimRobot.render`. The physics is locked for 25 us; the drawing runs without the GIL."""
        if camera not in CAMERAS:
            raise ConfigError("unknown camera", got=camera, wanted=f"one of {', '.join(CAMERAS)}")
        if self._renderer is None:
            self._renderer = _EglRenderer(self._env.model, *self._size)
        return self._renderer.draw(self._env.data, *CAMERAS[camera], self._lock)

    def close(self) -> None:
        """Free the OpenGL context; from the thread that rendered."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class _EglRenderer:
    """MuJoCo's renderer with an EGL context made here, so that no environment variable must be set.

    Shadows, reflections and multisampling are off: in software (2 cores, 320x240) 10 ms a frame instead of
    86. Bound to the thread that makes it.
    """

    def __init__(self, model: Any, width: int, height: int) -> None:
        self._mujoco = mujoco = _require("mujoco")
        self._model, self._thread = model, threading.get_ident()
        self._context: Any = None
        try:
            self._gl = importlib.import_module("mujoco.egl").GLContext(width, height)
            self._gl.make_current()
        except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
            raise ConfigError(
                "no off-screen OpenGL (EGL) on this machine",
                got=error,
                do=f"Run: apt-get install {EGL_PACKAGES}.",
            ) from error
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        self._option = mujoco.MjvOption()
        self._view = mujoco.MjvCamera()
        self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._rectangle = mujoco.MjrRect(0, 0, width, height)
        self._pixels: U8 = np.empty((height, width, 3), dtype=np.uint8)

    def draw(self, state: Any, camera: str, upside_down: bool, lock: threading.Lock) -> U8:
        """[h, w, 3] uint8 RGB. ``lock`` is held only while the scene is read from the physics ``state``."""
        if threading.get_ident() != self._thread:
            raise PhyaiError("rendering moved to another thread", do="Render and close from one thread.")
        mujoco = self._mujoco
        self._view.fixedcamid = self._model.camera(camera).id
        with lock:
            mujoco.mjv_updateScene(
                self._model, state, self._option, None, self._view, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
        mujoco.mjr_render(self._rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(self._pixels, None, self._rectangle, self._context)
        # OpenGL's first row is the lowest: flipping the columns alone turns the image by 180 degrees.
        return np.ascontiguousarray(self._pixels[:, ::-1] if upside_down else self._pixels[::-1])

    def close(self) -> None:
        """Free context and buffers; from the thread that made them."""
        if threading.get_ident() != self._thread:
            raise PhyaiError("the renderer is closed from another thread", do="Render and close from one thread.")
        self._context.free()
        self._gl.free()


def _check_supported(robot: RobotConfig) -> None:
    where = f"robot {robot.robot_id}"
    if robot.kind is not ActionType.CARTESIAN_DELTA or robot.action_names != ACTIONS:
        raise ConfigError(
            "the Meta-World robot takes other actions",
            got=f"{robot.action_type}: {', '.join(robot.action_names)}",
            wanted=f"cartesian_delta: {', '.join(ACTIONS)}",
            where=where,
        )
    unknown = [c.name for c in robot.cameras if c.name not in CAMERAS]
    if unknown:
        raise ConfigError("unknown cameras", got=", ".join(unknown), wanted=f"among {', '.join(CAMERAS)}", where=where)
    published = {(ARM_TOPIC, n) for n in ARM_JOINTS} | {(HAND_TOPIC, n) for n in HAND_JOINTS}
    missing = [f"{s.topic}/{s.name}" for s in robot.state if (s.topic, s.name) not in published]
    if missing:
        raise ConfigError("state entries this robot does not publish", got=", ".join(missing), where=where)
