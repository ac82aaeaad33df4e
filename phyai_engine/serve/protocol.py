"""The engine protocol: what travels between an EngineClient and an engine, whatever the placement.

One message is a list of frames. Frame 0 is the header: one byte ``PROTOCOL_VERSION``, then msgpack of the
typed message and of one :class:`ArraySpec` per following frame. Each following frame is one array:
little-endian, row-major, no padding. Nothing is unpickled; every size is checked before anything of that size
is allocated. PROTOCOL.md has the conversation and what becomes of bad input; streams.py what the arrays hold.

    client -> engine    Hello  RequestMessage  Cancel  Alive  Goodbye  StatusQuery
    engine -> client    HelloReply  Reply  ErrorReply  Heartbeat  Goodbye  StatusReply
    front -> replica    also  Join  Leave         replica -> front    also  JoinReply

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
from phyai_engine.types import Refusal, StageTimings

PROTOCOL_VERSION = 2
HEARTBEAT_S = 0.05
MAX_FRAMES = 33  # a header and 32 arrays
MAX_HEADER_BYTES = 1 << 20  # a hello carries the statistics of a wide robot: some tens of kB
MAX_FRAME_BYTES = 64 << 20  # a 3840x2160 RGB image is 24 MiB
MAX_TOTAL_BYTES = 256 << 20

Buffer: TypeAlias = "bytes | memoryview"
Array: TypeAlias = "NDArray[np.generic]"
Count = Annotated[int, Meta(ge=0)]
Key = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Phase = Literal["loading", "warming", "idle", "busy"]
ErrorKind = Literal[
    "replaced", "cancelled", "failed", "protocol", "overloaded", "keyframe", "duplicate", "unknown_session"
]
_WIRE_DTYPES: dict[str, np.dtype[np.generic]] = {
    "uint8": np.dtype("|u1"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}
# Of either byte order; looked up by dtype, whose own .name takes 20 us to say.
_NAMES: dict[np.dtype[np.generic], Literal["uint8", "float32", "float64"]] = {
    np.dtype("u1"): "uint8",
    **{np.dtype(order + "f4"): "float32" for order in "<>"},
    **{np.dtype(order + "f8"): "float64" for order in "<>"},
}


class _Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of all messages: unknown fields are an error, not something to ignore."""


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a client: what it drives and expects. Whatever does not fit is refused with the reason.

    :param robot: RobotConfig as plain values, checked like a file: id, state and actions by name, dt, cameras.
    :param model: ModelConfig likewise, for an engine to load; or the name of one that a server has loaded.
    :param robot_id: of the session, unique among a server's robots; empty: the robot file's.
    :param parent_pid: process of the client; 0 where it is no parent.
    :param warm_up_count: inferences at real shapes before a loading engine answers.
    :param batches: sizes of the batches to get ready for, by an engine that loads; empty: one request at a time.
    :param horizon: the H that the client counts on; 0 = any. :param statistics: likewise the id of the model's
        normalisation (:func:`phyai_engine.serve.streams.statistics_id`); empty = any.
    :param instance: a number that this client drew when it started. A second hello of a robot takes its session over
        only with the same number; with another the robot id is in use.
    """

    robot: dict[str, Any]
    model: dict[str, Any] | str
    robot_id: Annotated[str, Meta(max_length=128)] = ""
    parent_pid: Count = 0
    warm_up_count: Annotated[int, Meta(ge=0, le=100)] = 3
    batches: Annotated[tuple[Annotated[int, Meta(ge=1, le=1024)], ...], Meta(max_length=24)] = ()
    horizon: Count = 0
    statistics: Annotated[str, Meta(max_length=128)] = ""
    instance: Key = 0


class EngineHello(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an engine says about itself once it is ready.

    :param horizon: H. :param dt_s: time of one step. :param action_names: [A], the robot file's order.
    :param note: the model's own text, e.g. that its weights are random.
    :param warm_up_ms: one value per warm-up.
    :param versions: component -> version text.
    :param rtc_max_delay: d_max, the longest delay that the guidance can continue, steps; 0 = no limit of its own.
    :param heartbeat_s: time between its signs of life. :param expiry_s: silence of a client after which its session
        ends; 0 = never.
    :param batch_ms: measured (rows, ms) of a batch, per size of ``Hello.batches``.
    :param keeps_state: the model remembers a robot between requests.
    :param statistics: id of the model's normalisation. :param boot: drawn when the engine started: another one means
        that it was restarted.
    """

    horizon: Annotated[int, Meta(ge=1)]
    action_names: tuple[str, ...]
    dt_s: Annotated[float, Meta(gt=0)]
    note: str
    warm_up_ms: tuple[float, ...]
    pid: Count
    versions: dict[str, str]
    rtc_max_delay: Count = 0
    heartbeat_s: Annotated[float, Meta(gt=0)] = HEARTBEAT_S
    expiry_s: Annotated[float, Meta(ge=0)] = 0.0
    batch_ms: tuple[tuple[Count, float], ...] = ()
    statistics: str = ""
    boot: Key = 0
    keeps_state: bool = False


class HelloReply(_Message, frozen=True, tag="hello_reply"):
    """Answer to Hello: accepted when ``engine`` is there, else ``reason`` says why not.

    :param retry_s: of a refusal that may pass by itself: when to say hello again; 0 = it will not.
    """

    engine: EngineHello | None = None
    reason: str = ""
    retry_s: Annotated[float, Meta(ge=0)] = 0.0


class Join(_Message, frozen=True, tag="join"):
    """Front to replica: requests with this ``slot`` come from this robot. Answered by JoinReply."""

    slot: Annotated[int, Meta(ge=1)]
    robot: dict[str, Any]


class JoinReply(_Message, frozen=True, tag="join_reply"):
    """A slot can be used; or cannot, for ``reason``."""

    slot: Count
    reason: str = ""


class Leave(_Message, frozen=True, tag="leave"):
    """Front to replica: the slot's robot is gone."""

    slot: Annotated[int, Meta(ge=1)]


class CommittedSteps(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The counts of :class:`phyai_engine.types.Committed`; its actions are the array ``committed``."""

    delay_steps: Count
    execution_steps: Count


class RequestMessage(_Message, frozen=True, tag="request"):
    """One inference request. Arrays: ``image/<camera>`` or ``jpeg/<camera>``, ``state`` and, if any, ``committed``.

    A stream (``instruction``, ``image/<camera>``) whose content is here defines its key, and the engine keeps the
    newest; one whose content is not here is what the key meant before. An engine that does not hold it answers
    ``keyframe``.

    :param remaining_ms: until the handoff, when this was sent; what the network takes back is the engine's allowance.
    :param capture_age_ns: age of the oldest sample at the snapshot.
    :param keys: stream -> key; empty where everything is here and nothing is to be kept.
    :param slot: whose request it is, between front and replica.
    :param rows_left: requests of the same batch that follow.
    """

    epoch: Count
    chunk_id: Count
    seed: Count
    remaining_ms: float
    oldest_ros_ns: int
    newest_ros_ns: int
    capture_age_ns: int
    instruction: Text | None = None
    committed: CommittedSteps | None = None
    keys: Annotated[dict[str, Key], Meta(max_length=MAX_FRAMES)] = msgspec.field(default_factory=dict)
    slot: Count = 0
    rows_left: Count = 0


class ServerLoad(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How busy a server is as it answers.

    :param queued: requests that wait. :param rows: of the batch this answer was in. :param predicted_ms: what a request
        that came now would take.
    """

    robots: Count
    queued: Count
    rows: Count
    predicted_ms: float


class Reply(_Message, frozen=True, tag="reply"):
    """A finished inference. Array: ``actions``.

    :param valid_ms: after this long from the snapshot the chunk must not be started; 0 = no limit.
    :param load: of a server.
    """

    epoch: Count
    chunk_id: Count
    timings: StageTimings
    valid_ms: Annotated[float, Meta(ge=0)] = 0.0
    load: ServerLoad | None = None
    slot: Count = 0


class ErrorReply(_Message, frozen=True, tag="error_reply"):
    """A request that got no chunk. For ``protocol`` the ids are 0: the message could not be read.

    ``overloaded``: at once, where the answer would come too late. ``keyframe``: send it again, whole. ``duplicate``:
    its chunk_id does not grow. ``unknown_session``: say hello first, or again (the server restarted, or the session
    expired).

    :param refusal: code of a RefusalError, so that the node can count it under its own name; else NONE.
    """

    reason: ErrorKind
    error_type: str
    text: str
    refusal: Refusal = Refusal.NONE
    epoch: Count = 0
    chunk_id: Count = 0
    slot: Count = 0


class Cancel(_Message, frozen=True, tag="cancel"):
    """Cancel every request of the slot whose epoch is at most ``epoch``."""

    epoch: Count
    slot: Count = 0


class Heartbeat(_Message, frozen=True, tag="heartbeat"):
    """Sent every ``heartbeat_s`` by the engine's I/O; the ids are of the client's running inference, else 0."""

    phase: Phase
    epoch: Count = 0
    chunk_id: Count = 0


class Alive(_Message, frozen=True, tag="alive"):
    """A client with nothing else to say; every message of its counts as a sign of life."""


class Goodbye(_Message, frozen=True, tag="goodbye"):
    """Ends a session, from either end; a local engine ends with its client's. A server sends it before it drains."""

    reason: Text = ""


class StatusQuery(_Message, frozen=True, tag="status_query"):
    """Asks a server how it does; needs no session."""


class StatusReply(_Message, frozen=True, tag="status_reply"):
    """Lines of name and value, for people to read."""

    lines: tuple[tuple[str, str], ...]


Message: TypeAlias = (
    "Hello | HelloReply | Join | JoinReply | Leave | RequestMessage | Reply | ErrorReply | Cancel | Heartbeat | Alive"
    " | Goodbye | StatusQuery | StatusReply"
)


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
    message: (
        Hello
        | HelloReply
        | Join
        | JoinReply
        | Leave
        | RequestMessage
        | Reply
        | ErrorReply
        | Cancel
        | Heartbeat
        | Alive
        | Goodbye
        | StatusQuery
        | StatusReply
    )
    arrays: tuple[ArraySpec, ...] = ()


_DECODER = msgspec.msgpack.Decoder(_Header)


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
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise ProtocolError(
                f"array {name!r} cannot travel", got=array.dtype, wanted=f"one of {', '.join(_WIRE_DTYPES)}"
            )
        # ascontiguousarray turns a 0-d array into a 1-d one; the spec keeps the shape of the array given.
        flat = np.ascontiguousarray(array, dtype=_WIRE_DTYPES[dtype]).reshape(-1)
        spec = ArraySpec(name=name, dtype=dtype, shape=array.shape)
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
        header = _DECODER.decode(memoryview(frames[0])[1:])
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
