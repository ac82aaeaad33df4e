"""The nouns of one request, without logic.

Arrays are numpy, row-major. Robot units (rad, m, as the robot's topics carry them) everywhere except inside a
:class:`Row`, which is in the model's normalised space. Clocks: ``_ros_ns`` is a message stamp, ``_mono_ns`` is
CLOCK_MONOTONIC of this host; durations are only ever made from the latter.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


class ActionType(enum.IntEnum):
    """What one action means. Equal to the constants of ActionChunk.msg."""

    UNKNOWN = 0
    JOINT_POSITION = 1
    JOINT_VELOCITY = 2
    CARTESIAN_DELTA = 3


class Refusal(enum.IntEnum):
    """Why an observation or a chunk was refused. Equal to the REFUSAL_* constants of PolicyStatus.msg."""

    NONE = 0
    MISSING = 1
    STALE = 2
    SKEWED = 3
    MALFORMED = 4
    NOT_FINITE = 5
    OUT_OF_ENVELOPE = 6
    WRONG_EPOCH = 7
    EXHAUSTED = 8
    OVERLOADED = 9


class AbortCause(enum.IntEnum):
    """What stopped the robot. Equal to the ABORT_* constants of PolicyStatus.msg; DEACTIVATE alone sets no latch."""

    NONE = 0
    SERVICE = 1
    SIGNAL = 2
    DEACTIVATE = 3
    EXCEPTION = 4
    CLOCK_JUMP = 5
    ENGINE_LOST = 6
    EXHAUSTED = 7
    FLEET_STOP = 8
    OBSERVATION_AGE = 9
    INFERENCE_DEADLINE = 10
    MISSES = 11
    PLAYER_LOST = 12
    TICK_OVERRUN = 13
    POLICY_LOST = 14


class SafetyState(enum.IntEnum):
    """State of the player. Equal to the SAFETY_* constants of PolicyStatus.msg."""

    UNKNOWN = 0
    IDLE = 1  # not active: nothing is published
    ARMED = 2  # active, holding, waiting for the first chunk
    RUNNING = 3  # a chunk plays
    HOLDING = 4  # the chunk ran out; the last target is held
    STOPPING = 5  # decelerating after an abort
    LATCHED = 6  # stopped; only re-arm leaves


class CommandKind(enum.IntEnum):
    """What one tick commanded. Equal to the KIND_* constants of ActionStep.msg."""

    UNKNOWN = 0
    ACTION = 1
    HOLD = 2
    STOP = 3


class Schedule(str, enum.Enum):
    """When the next inference starts and what it is conditioned on."""

    SYNC = "sync"
    NAIVE_ASYNC = "naive_async"
    RTC = "rtc"


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """One instant of one robot.

    :param images: camera name -> [h, w, 3] uint8 RGB, as the camera delivered it.
    :param state: [S] float64, the robot file's ``state`` entries in order, robot units.
    :param velocity: [S] float64, NaN where the robot does not report it.
    :param oldest_ros_ns: stamp of the oldest sample used; ``newest_ros_ns`` of the newest.
    :param capture_mono_ns: monotonic time of the oldest sample's stamp (converted once, at receipt).
    :param snapshot_mono_ns: monotonic time at which this observation was assembled.
    :param image_stamps_ros_ns: camera name -> header stamp of its frame, before ``latency_offset_s``; empty where the
        images were never messages.
    """

    images: Mapping[str, U8]
    state: F64
    velocity: F64
    instruction: str
    oldest_ros_ns: int
    newest_ros_ns: int
    capture_mono_ns: int
    snapshot_mono_ns: int
    image_stamps_ros_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """The actions the next inference must continue.

    :param actions: [n, A] float64 robot units: what the player will execute from the snapshot on.
    :param delay_steps: d, steps predicted to be consumed before the handoff.
    :param execution_steps: s, steps of each chunk that are executed before the next one is due.
    """

    actions: F64
    delay_steps: int
    execution_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One inference request. ``committed`` is None for the first chunk and for schedules without conditioning.

    :param seed: seed of the counter-based noise.
    :param remaining_ms: time left until the handoff when the request was made (never a stamp).
    :param slot: which robot of the engine asks; 0 where it serves one.
    """

    epoch: int
    chunk_id: int
    observation: Observation
    committed: Committed | None
    seed: int
    remaining_ms: float
    slot: int = 0


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Durations of one inference in milliseconds; NaN where a stage does not exist."""

    queue_ms: float = float("nan")  # with the engine, not computing; a server's way to its replica and back is in it
    batch_ms: float = float("nan")  # of queue_ms, what a free replica of a server waited for more rows
    encode_ms: float = float("nan")
    prefix_ms: float = float("nan")
    denoise_ms: float = float("nan")
    decode_ms: float = float("nan")
    inference_ms: float = float("nan")  # encode to decode
    transfer_ms: float = float("nan")  # round trip minus queue and inference, filled in by the client
    serialise_ms: float = float("nan")  # of transfer_ms, what the client spent on its own side

    @property
    def network_ms(self) -> float:
        """The rest of transfer_ms: between the two programs, both ways."""
        return self.transfer_ms - self.serialise_ms


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """An action chunk as the engine answers it.

    :param actions: [H, A] float64 robot units; row 0 belongs to the observation's instant.
    :param oldest_ros_ns: stamps of the observation, filled in by the requester, who kept it.
    """

    epoch: int
    chunk_id: int
    actions: F64
    timings: StageTimings
    oldest_ros_ns: int = 0
    newest_ros_ns: int = 0


class CancelToken:
    """Set from another thread; read between denoising steps."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Mark the row; its result will be reported as cancelled."""
        self._event.set()

    @property
    def cancelled(self) -> bool:
        """True once :meth:`cancel` was called."""
        return self._event.is_set()


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Everything that differs between requests of one batch, in the model's normalised, padded space.

    :param inputs: name -> array without batch dimension, names and shapes as ``ModelSpec.inputs`` declares.
    :param target: Y [H, A] float32; ``weight``: W [H, A] float32, 0 where there is no target.
    :param gain: k [N] float32, the guidance gain of each step (0 = plain sampling).
    :param delay_steps: d, rows of Y that are executed before the handoff; 0 where nothing is committed.
    """

    inputs: Mapping[str, NDArray[np.generic]]
    target: F32
    weight: F32
    gain: F32
    seed: int
    delay_steps: int = 0
    embodiment: int = 0
    epoch: int = 0
    cancel: CancelToken = field(default_factory=CancelToken)


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Shape (without batch) and numpy dtype name of one model input."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model declares about itself.

    :param horizon: H. :param action_dim: A of the model (padded). :param times: flow time of each step, t=1 noise.
    :param inputs: name -> BufferSpec of one row.
    :param cameras: camera roles in the model's order.
    :param vocabulary: token ids it knows, 0 where that is unknown.
    :param keeps_state: it remembers a robot between requests, which therefore all go to one replica.
    """

    family: str
    horizon: int
    action_dim: int
    times: tuple[float, ...]
    inputs: Mapping[str, BufferSpec]
    cameras: tuple[str, ...]
    vocabulary: int = 0
    keeps_state: bool = False
