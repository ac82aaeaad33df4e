"""The engine protocol: what travels between an EngineClient and an engine, whatever the placement.

One message is a list of frames. Frame 0 is the header: one byte ``PROTOCOL_VERSION``, then msgpack of the
typed message and of one :class:`ArraySpec` per following frame. Each following frame is one array:
little-endian, row-major, no padding. Nothing is unpickled; every size is checked before anything of that size
is allocated.

    client -> engine   Hello  RequestMessage  Cancel  Shutdown
    engine -> client   HelloReply  Reply  ErrorReply  Heartbeat

Durations travel, monotonic stamps do not: the two ends may be on different hosts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from phyai_engine.errors import ProtocolError
from phyai_engine.types import Chunk, Committed, Observation, Refusal, Request, StageTimings

PROTOCOL_VERSION = 1
HEARTBEAT_S = 0.05
MAX_FRAMES = 33  # a header and 32 arrays
MAX_HEADER_BYTES = 1 << 20  # a hello carries the statistics of a wide robot: some tens of kB
MAX_FRAME_BYTES = 64 << 20  # a 3840x2160 RGB image is 24 MiB
MAX_TOTAL_BYTES = 256 << 20

Buffer: TypeAlias = "bytes | memoryview"
Array: TypeAlias = "NDArray[np.generic]"
Count = Annotated[int, Meta(ge=0)]
Phase = Literal["loading", "warming", "idle", "busy"]
ErrorKind = Literal["replaced", "cancelled", "failed", "protocol"]
_WIRE_DTYPES: dict[str, np.dtype[np.generic]] = {
    "uint8": np.dtype("|u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
_IMAGE = "image/"


class _Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all messages: unknown fields are an error, not something to ignore."""


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a client.

    :param robot, model: RobotConfig and ModelConfig as plain values; the engine checks them like files.
    :param parent_pid: process of the client.
    :param warm_up_count: inferences at real shapes before the engine answers.
    """

    robot: dict[str, Any]
    model: dict[str, Any]
    parent_pid: Count
    warm_up_count: Annotated[int, Meta(ge=0, le=100)] = 3


class EngineHello(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine says about itself once it is ready.

    :param horizon: H. :param dt_s: time of one step. :param action_names: [A], the robot file's order.
    :param note: the model's own text, e.g. that its weights are random.
    :param warm_up_ms: one value per warm-up.
    :param versions: component -> version text.
    :param rtc_max_delay: d_max, the longest delay that the guidance can continue, steps; 0 = no limit of its own.
    """

    horizon: Annotated[int, Meta(ge=1)]
    action_names: tuple[str, ...]
    dt_s: Annotated[float, Meta(gt=0)]
    note: str
    warm_up_ms: tuple[float, ...]
    pid: Count
    versions: dict[str, str]
    rtc_max_delay: Count = 0


class HelloReply(_Message, frozen=True, tag="hello_reply"):
    """Answer to Hello: accepted when ``engine`` is there, else ``reason`` says why not."""

    engine: EngineHello | None = None
    reason: str = ""


class CommittedSteps(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The counts of :class:`phyai_engine.types.Committed`; its actions are the array ``committed``."""

    delay_steps: Count
    execution_steps: Count


class RequestMessage(_Message, frozen=True, tag="request"):
    """One inference request. Arrays: ``image/<camera>``, ``state``, ``velocity`` and, if any, ``committed``.

    :param capture_age_ns: age of the oldest sample at the snapshot.
    """

    epoch: Count
    chunk_id: Count
    seed: Count
    remaining_ms: float
    instruction: str
    oldest_ros_ns: int
    newest_ros_ns: int
    capture_age_ns: int
    committed: CommittedSteps | None = None


class Reply(_Message, frozen=True, tag="reply"):
    """A finished inference. Array: ``actions``."""

    epoch: Count
    chunk_id: Count
    timings: StageTimings


class ErrorReply(_Message, frozen=True, tag="error_reply"):
    """A request that got no chunk. For ``protocol`` the ids are 0: the message could not be read.

    :param refusal: code of a RefusalError, so that the node can count it under its own name; else NONE.
    """

    reason: ErrorKind
    error_type: str
    text: str
    refusal: Refusal = Refusal.NONE
    epoch: Count = 0
    chunk_id: Count = 0


class Cancel(_Message, frozen=True, tag="cancel"):
    """Cancel every request whose epoch is at most ``epoch``."""

    epoch: Count


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """Sent every ``HEARTBEAT_S`` by the engine's I/O thread; the ids are of the running inference, else 0."""

    phase: Phase
    epoch: Count = 0
    chunk_id: Count = 0


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """The engine is to end."""


Message: TypeAlias = "Hello | HelloReply | RequestMessage | Reply | ErrorReply | Cancel | Heartbeat | Shutdown"


class ArraySpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Name, type and shape of one array frame."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    dtype: Literal["uint8", "float32", "float64"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=4)]

    @property
    def size_bytes(self) -> int:
        """Bytes its frame must have."""
        return math.prod(self.shape) * _WIRE_DTYPES[self.dtype].itemsize

    def check_extent(self) -> None:
        """Bound the shape also where a zero empties it: numpy refuses (0, 2**31, 2**31, 2**31) as too big.

        :raises ProtocolError: it is above the cap of a frame.
        """
        extent = math.prod(max(n, 1) for n in self.shape) * _WIRE_DTYPES[self.dtype].itemsize
        if extent > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"array {self.name!r} has too large a shape",
                got=list(self.shape),
                wanted=f"at most {MAX_FRAME_BYTES} bytes, a zero counted as one",
            )


class _Header(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    message: Hello | HelloReply | RequestMessage | Reply | ErrorReply | Cancel | Heartbeat | Shutdown
    arrays: tuple[ArraySpec, ...] = ()


def encode(message: Message, arrays: Mapping[str, Array] | None = None) -> list[Buffer]:
    """Message and arrays -> frames.

    The array frames are views of the arrays, which must not change until the frames are sent; only an array
    that is not row-major or not little-endian is copied.

    :raises ProtocolError: a dtype outside the allow-list, or a size above the caps.
    """
    arrays = arrays or {}
    specs: list[ArraySpec] = []
    frames: list[Buffer] = []
    for name, array in arrays.items():
        wire = _WIRE_DTYPES.get(array.dtype.name)
        if wire is None:
            raise ProtocolError(
                f"array {name!r} cannot travel", got=array.dtype, wanted=f"one of {', '.join(_WIRE_DTYPES)}"
            )
        # ascontiguousarray turns a 0-d array into a 1-d one; the spec keeps the shape of the array given.
        flat = np.ascontiguousarray(array, dtype=wire).reshape(-1)
        spec = ArraySpec(name=name, dtype=array.dtype.name, shape=array.shape)  # type: ignore[arg-type]
        if not flat.size:  # the others are bounded by the lengths of their frames
            spec.check_extent()
        specs.append(spec)
        frames.append(flat.data.cast("B") if flat.size else b"")
    try:
        header = msgspec.msgpack.encode(_Header(message=message, arrays=tuple(specs)))
    except (
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # an int above 64 bits, text that is not unicode, an object
        raise ProtocolError(f"the message cannot be encoded: {error}") from None
    frames.insert(0, bytes([PROTOCOL_VERSION]) + header)
    _check_sizes(frames)
    return frames


def decode(frames: Sequence[Buffer]) -> tuple[Message, dict[str, Array]]:
    """Frames -> message and arrays. The arrays are read-only views of the frames.

    :raises ProtocolError: for everything that :func:`encode` of this version would not have made.
    """
    _check_sizes(frames)
    version = bytes(frames[0][:1])
    if version != bytes([PROTOCOL_VERSION]):
        raise ProtocolError(
            "another protocol version",
            got=version[0] if version else "an empty header",
            wanted=PROTOCOL_VERSION,
            do="Run the same phyai_engine version at both ends.",
        )
    try:
        header = msgspec.msgpack.decode(memoryview(frames[0])[1:], type=_Header)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise ProtocolError(f"the header does not follow the schema: {error}") from None
    if len(header.arrays) != len(frames) - 1:
        raise ProtocolError("wrong number of array frames", got=len(frames) - 1, wanted=len(header.arrays))
    arrays: dict[str, Array] = {}
    for spec, frame in zip(header.arrays, frames[1:], strict=True):
        if spec.name in arrays:
            raise ProtocolError(f"array {spec.name!r} stands twice")
        if len(frame) != spec.size_bytes:
            raise ProtocolError(
                f"array {spec.name!r} has the wrong length",
                got=f"{len(frame)} bytes",
                wanted=f"{spec.size_bytes} for {spec.dtype} {list(spec.shape)}",
            )
        spec.check_extent()
        arrays[spec.name] = np.frombuffer(memoryview(frame).toreadonly(), _WIRE_DTYPES[spec.dtype]).reshape(spec.shape)
    return header.message, arrays


def _check_sizes(frames: Sequence[Buffer]) -> None:
    sizes = [len(f) for f in frames]
    if not 1 <= len(sizes) <= MAX_FRAMES:
        raise ProtocolError("wrong number of frames", got=len(sizes), wanted=f"1..{MAX_FRAMES}")
    for what, got, cap in (
        ("the header is too long", sizes[0], MAX_HEADER_BYTES),
        ("a frame is too long", max(sizes), MAX_FRAME_BYTES),
        ("the message is too long", sum(sizes), MAX_TOTAL_BYTES),
    ):
        if got > cap:
            raise ProtocolError(what, got=f"{got} bytes", wanted=f"at most {cap}")


def request_to_wire(request: Request) -> tuple[RequestMessage, dict[str, Array]]:
    """Request -> message and arrays; the inverse of :func:`request_from_wire`."""
    seen, committed = request.observation, request.committed
    steps = None
    if committed is not None:
        steps = CommittedSteps(delay_steps=committed.delay_steps, execution_steps=committed.execution_steps)
    message = RequestMessage(
        epoch=request.epoch,
        chunk_id=request.chunk_id,
        seed=request.seed,
        remaining_ms=request.remaining_ms,
        instruction=seen.instruction,
        oldest_ros_ns=seen.oldest_ros_ns,
        newest_ros_ns=seen.newest_ros_ns,
        capture_age_ns=seen.snapshot_mono_ns - seen.capture_mono_ns,
        committed=steps,
    )
    arrays: dict[str, Array] = {_IMAGE + camera: image for camera, image in seen.images.items()}
    arrays["state"], arrays["velocity"] = seen.state, seen.velocity
    if committed is not None:
        arrays["committed"] = committed.actions
    return message, arrays


def request_from_wire(message: RequestMessage, arrays: Mapping[str, Array], *, now_mono_ns: int) -> Request:
    """Message and arrays -> Request.

    The monotonic times of the observation become times of this host: the snapshot is put at ``now_mono_ns``.

    :raises ProtocolError: an array is missing, unknown, or has the wrong type or rank.
    """
    rest = dict(arrays)
    images = {name[len(_IMAGE) :]: _take(rest, name, np.uint8, 3) for name in arrays if name.startswith(_IMAGE)}
    for camera, image in images.items():
        if image.shape[2] != 3 or image.size == 0:
            raise ProtocolError(f"image {camera!r} has the wrong shape", got=list(image.shape), wanted="[h, w, 3]")
    state, velocity = _take(rest, "state", np.float64, 1), _take(rest, "velocity", np.float64, 1)
    if state.shape != velocity.shape:
        raise ProtocolError("velocity has another length than state", got=velocity.size, wanted=state.size)
    committed = None
    if message.committed is not None:
        committed = Committed(
            actions=_take(rest, "committed", np.float64, 2),
            delay_steps=message.committed.delay_steps,
            execution_steps=message.committed.execution_steps,
        )
    _refuse_rest(rest)
    observation = Observation(
        images=images,
        state=state,
        velocity=velocity,
        instruction=message.instruction,
        oldest_ros_ns=message.oldest_ros_ns,
        newest_ros_ns=message.newest_ros_ns,
        capture_mono_ns=now_mono_ns - message.capture_age_ns,
        snapshot_mono_ns=now_mono_ns,
    )
    return Request(message.epoch, message.chunk_id, observation, committed, message.seed, message.remaining_ms)


def chunk_to_wire(chunk: Chunk) -> tuple[Reply, dict[str, Array]]:
    """Chunk -> message and arrays; the inverse of :func:`chunk_from_wire`."""
    message = Reply(epoch=chunk.epoch, chunk_id=chunk.chunk_id, timings=chunk.timings)
    return message, {"actions": chunk.actions}


def chunk_from_wire(message: Reply, arrays: Mapping[str, Array]) -> Chunk:
    """Message and arrays -> Chunk; finiteness and envelope are the handoff's to judge.

    :raises ProtocolError: ``actions`` is missing, not float64 [H, A], or something else came along.
    """
    rest = dict(arrays)
    actions = _take(rest, "actions", np.float64, 2)
    _refuse_rest(rest)
    return Chunk(message.epoch, message.chunk_id, actions, message.timings)


def _take(rest: dict[str, Array], name: str, dtype: type[np.generic], rank: int) -> NDArray[Any]:
    array = rest.pop(name, None)
    if array is None:
        raise ProtocolError(f"array {name!r} is missing")
    if array.dtype != dtype or array.ndim != rank:
        raise ProtocolError(
            f"array {name!r} has the wrong form",
            got=f"{array.dtype} of rank {array.ndim}",
            wanted=f"{np.dtype(dtype)} of rank {rank}",
        )
    return array


def _refuse_rest(rest: Mapping[str, Array]) -> None:
    if rest:
        raise ProtocolError(f"unknown arrays {', '.join(map(repr, rest))}")
