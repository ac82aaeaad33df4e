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
from phyai_engine.sim.tasks import TASKS, Task, is_solved, other_task
from phyai_engine.types import F64, U8, ActionType

ACTIONS = ("dx", "dy", "dz", "gripper")
ARM_TOPIC, HAND_TOPIC = "joint_states", "hand_state"
ARM_JOINTS = tuple(f"right_j{i}" for i in range(7))
HAND_JOINTS = ("hand_x", "hand_y", "hand_z", "gripper")
# Our camera -> (Meta-World's camera, mounted upside down). The one at the hand looks ahead, over the gripper: straight
# down (gripperPOV) it would see none of the objects before the hand is upon them.
CAMERAS = {"front": ("corner4", True), "wrist": ("behindGripper", False)}
PHYSICS_S = 0.0125  # of one environment step
# The hand follows its target like a spring. Unbounded, a target that ran ahead of a blocked hand has to come all the
# way back before the hand moves again, and no observation shows it.
TARGET_LEAD_M = 0.05
NOWHERE = (10.0, 10.0, 10.0)  # m: the marker of Meta-World's goal would tell the policy what only the words should
# Where the hand starts in a scene of tasks.py, m: in front of the objects and above them.
HAND_LOWER, HAND_UPPER = (-0.2, 0.45, 0.2), (0.2, 0.6, 0.35)
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
    """One Meta-World scene with the Sawyer arm; it never ends by itself.

    Actions are Meta-World's own: dx, dy, dz in units of 10 mm per environment step, gripper -1 (open) .. 1 (closed),
    each in [-1, 1]. A command is held for the environment steps (12.5 ms of physics) that fit into a control period, at
    least one: a period of 50 ms is real time, one of 20 ms 0.625 of it. State on two topics, as a real arm and its hand
    would publish: seven joints [rad], and the hand's position [m] with the finger opening (0..1).

    :param robot: a cartesian_delta robot file with Meta-World's action and state names.
    :param task: one of sim/tasks.py such as ``drawer-open``, whose scenes also start with the object half moved and the
        hand anywhere before it, or one of Meta-World's own such as ``reach-v3``.
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
        self.task: Task | None = TASKS.get(task)
        name = f"{self.task.scene.environment if self.task else task}-goal-observable"
        if name not in environments:
            known = ", ".join((*TASKS, *(key.removesuffix("-goal-observable") for key in environments)))
            raise ConfigError("unknown Meta-World task", got=task, wanted=f"one of {known}")
        self.action_names: tuple[str, ...] = ACTIONS
        self.dt_s = robot.dt_s
        self._steps = max(1, int(robot.dt_s / PHYSICS_S + 1e-6))
        self._env = environments[name](seed=seed)
        # Goals drawn from the environment's own seeded generator, and no end after 500 steps.
        self._env.seeded_rand_vec, self._env._freeze_rand_vec = True, False
        self._env.max_path_length = sys.maxsize
        self._arm = self._env.model.joint(ARM_JOINTS[0]).qposadr[0]
        self._renderer: _EglRenderer | None = None
        self._size = (width, height)
        self._lock = threading.Lock()  # the physics state, shared with the rendering thread
        self._own_instruction = task.rpartition("-")[0].replace("-", " ")
        if self.task is not None:
            self._env.reset()  # its own predicates need a goal
            self._env._target_pos = np.array(NOWHERE)
            for name, _ in self._env._target_site_config:
                self._env.model.site(name).pos = NOWHERE
        self.reset(seed)

    @property
    def instruction(self) -> str:
        """What a person would say to have the task done."""
        return self.task.phrases[0] if self.task else self._own_instruction

    @property
    def success(self) -> bool:
        """True once the task was solved since the last reset or change of the task."""
        return self._success

    def set_task(self, task: str) -> None:
        """Ask for another task of the same scene, which stays as it is.

        :raises ConfigError: the scene does not have it.
        """
        if self.task is None or task not in (known := [self.task.name, other_task(self.task).name]):
            raise ConfigError("the scene has no such task", got=task, wanted=f"one of {known}" if self.task else "")
        self.task = TASKS[task]
        self._success = self.solved()

    def solved(self, task: Task | None = None) -> bool:
        """Whether a task of the scene is solved as the scene stands now. :param task: the asked one unless given."""
        task = task or self.task
        return task is not None and is_solved(task, *self.joint(task))

    def joint(self, task: Task) -> tuple[float, tuple[float, float]]:
        """What the scene's tasks move: its position and its range, m or rad."""
        lower, upper = self._env.model.joint(task.scene.joint).range
        return float(self._env.data.joint(task.scene.joint).qpos[0]), (float(lower), float(upper))

    @property
    def hand(self) -> F64:
        """[3] m."""
        return self._positions[len(ARM_JOINTS) : len(ARM_JOINTS) + 3]

    def position_of(self, kind: str, name: str) -> F64:
        """[3] m. :param kind: ``body`` or ``site`` of the scene."""
        at: F64 = getattr(self._env.data, kind)(name).xpos.copy()
        return at

    def reset(self, seed: int) -> None:
        """Start the task over with goal and objects placed by ``seed``; 50 ms."""
        if self.task is not None:
            drawn = np.random.default_rng(seed)
            share = (
                0.7 * float(drawn.uniform()) * float(drawn.uniform() < 0.5)
            )  # often at the very end, as a person left it
            self.place(drawn.uniform(HAND_LOWER, HAND_UPPER), drawn.uniform(*_box(self.task)), share)
            return
        with self._lock:
            self._env.seed(seed)
            observation, _ = self._env.reset()
        self._begin(observation)

    def place(self, hand: F64, at: F64, share: float) -> None:
        """Arrange the scene of a task of sim/tasks.py; the last reset's arrangement is gone.

        :param hand: [3] m. :param at: [3] m, the object's place. :param share: of the way that the task's joint has
            already gone, 0..1.
        """
        task, env = self.task, self._env
        if task is None:
            raise ConfigError("only scenes of sim/tasks.py are arranged", wanted=f"one of {', '.join(TASKS)}")
        mujoco = _require("mujoco")
        with self._lock:
            mujoco.mj_resetData(env.model, env.data)
            env.hand_init_pos = np.array(hand)
            env.model.body(task.scene.body).pos = (0.0, 5.0, 0.0)  # out of the hand's way
            env._reset_hand()
            env.model.body(task.scene.body).pos = at
            lower, upper = env.model.joint(task.scene.joint).range
            joint = env.data.joint(task.scene.joint)
            joint.qpos[0] = lower + (upper - lower) * (share if task.end == "upper" else 1.0 - share)
            joint.qvel[0] = 0.0
            mujoco.mj_forward(env.model, env.data)
            observation = env._get_obs()
        self._begin(observation)

    def _begin(self, observation: F64) -> None:
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
        for _ in range(self._steps):  # the renderer may look in between
            with self._lock:
                observation, _, _, _, report = self._env.step(action)
                lead = self._env.data.mocap_pos[0] - observation[:3]
                self._env.data.mocap_pos[0] = observation[:3] + np.clip(lead, -TARGET_LEAD_M, TARGET_LEAD_M)
        self._success = self._success or (bool(report["success"]) if self.task is None else self.solved())
        positions = self._read(observation)
        # Differences, not MuJoCo's velocities: a control period is dt_s of ROS time, whatever the physics' is.
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
        self._gl.make_current()  # a thread may render several scenes
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
        self._gl.make_current()
        self._context.free()
        self._gl.free()


def _box(task: Task) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    return task.scene.lower, task.scene.upper


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
