"""What the arrays of a message hold: requests and chunks to the wire and back, whole or as what changed.

Streams are ``instruction`` and ``image/<camera>``. A client that keeps :class:`SentStreams` sends a stream again only
when its content changed; the engine keeps the newest content of each in :class:`KeptStreams`. No sockets here.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from phyai_engine.config import Normalisation
from phyai_engine.errors import ImageError, KeyframeError, ProtocolError
from phyai_engine.images import decode_compressed
from phyai_engine.serve.protocol import Array, CommittedSteps, Reply, RequestMessage
from phyai_engine.types import U8, Chunk, Committed, Observation, Request

INSTRUCTION = "instruction"
_IMAGE, _JPEG = "image/", "jpeg/"


def statistics_id(normalisation: Normalisation) -> str:
    """Equal for equal statistics, whatever the host."""
    return hashlib.sha256(msgspec.json.encode(normalisation, order="sorted")).hexdigest()[:16]


def request_to_wire(request: Request) -> tuple[RequestMessage, dict[str, Array]]:
    """Request -> message and arrays, whole; the inverse of :func:`request_from_wire`."""
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
        slot=request.slot,
    )
    arrays: dict[str, Array] = {_IMAGE + camera: image for camera, image in seen.images.items()}
    arrays["state"] = np.stack((seen.state, seen.velocity))
    if committed is not None:
        arrays["committed"] = committed.actions
    return message, arrays


def request_from_wire(message: RequestMessage, arrays: Mapping[str, Array], *, now_mono_ns: int) -> Request:
    """Message and arrays, whole -> Request.

    The monotonic times of the observation become times of this host: the snapshot is put at ``now_mono_ns``.

    :raises ProtocolError: an array is missing, unknown, or has the wrong type or rank; a JPEG is none.
    :raises KeyframeError: the message refers to an instruction that is not here.
    """
    rest = dict(arrays)
    if message.instruction is None:
        raise KeyframeError("the request has no instruction")
    images = _images(rest)
    state = _take(rest, "state", np.float64, 2)
    if len(state) != 2:
        raise ProtocolError("state has the wrong shape", got=list(state.shape), wanted="[2, S]: values, velocities")
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
        state=state[0],
        velocity=state[1],
        instruction=message.instruction,
        oldest_ros_ns=message.oldest_ros_ns,
        newest_ros_ns=message.newest_ros_ns,
        capture_mono_ns=now_mono_ns - message.capture_age_ns,
        snapshot_mono_ns=now_mono_ns,
    )
    return Request(
        message.epoch, message.chunk_id, observation, committed, message.seed, message.remaining_ms, slot=message.slot
    )


def chunk_to_wire(chunk: Chunk, *, slot: int = 0) -> tuple[Reply, dict[str, Array]]:
    """Chunk -> message and arrays; the inverse of :func:`chunk_from_wire`."""
    message = Reply(epoch=chunk.epoch, chunk_id=chunk.chunk_id, timings=chunk.timings, slot=slot)
    return message, {"actions": chunk.actions}


def chunk_from_wire(message: Reply, arrays: Mapping[str, Array]) -> Chunk:
    """Message and arrays -> Chunk; finiteness and envelope are the handoff's to judge.

    :raises ProtocolError: ``actions`` is missing, not float64 [H, A], or something else came along.
    """
    rest = dict(arrays)
    actions = _take(rest, "actions", np.float64, 2)
    _refuse_rest(rest)
    return Chunk(message.epoch, message.chunk_id, actions, message.timings)


class SentStreams:
    """The client's end: what the engine holds by now, and so what a request need not carry. For one thread.

    Compared by content, so that a camera that repeats a frame costs nothing; images are kept by reference.

    :param jpeg_quality: 1..95 sends images as JPEG, which is lossy: the policy sees other pixels. 0 sends them raw.
    """

    def __init__(self, jpeg_quality: int = 0) -> None:
        self._jpeg_quality = jpeg_quality
        self._sent: dict[str, tuple[int, Any]] = {}
        self._next_key = 1

    def forget(self) -> None:
        """The next request is whole: a new session, an answer ``keyframe``, or a message that may not have left."""
        self._sent.clear()

    def to_wire(self, request: Request) -> tuple[RequestMessage, dict[str, Array]]:
        """As :func:`request_to_wire`, without what the engine holds. The caller sends it, or calls ``forget``."""
        message, arrays = request_to_wire(request)
        keys: dict[str, int] = {}
        instruction: str | None = request.observation.instruction
        if not self._changed(INSTRUCTION, instruction, keys):
            instruction = None
        for name in [name for name in arrays if name.startswith(_IMAGE)]:
            image = arrays[name]
            if not self._changed(name, image, keys):
                del arrays[name]
            elif self._jpeg_quality:
                del arrays[name]
                arrays[_JPEG + name.removeprefix(_IMAGE)] = _jpeg(image, self._jpeg_quality)
        return msgspec.structs.replace(message, instruction=instruction, keys=keys), arrays

    def _changed(self, stream: str, content: Any, keys: dict[str, int]) -> bool:
        key, sent = self._sent.get(stream, (0, None))
        changed = not _same(sent, content)
        if changed:
            key, self._next_key = self._next_key, self._next_key + 1
            self._sent[stream] = key, content
        keys[stream] = key
        return changed


class KeptStreams:
    """The engine's end: the newest content of every stream of one client.

    :param cameras: the only ones that may send anything, which bounds what is kept.
    """

    def __init__(self, cameras: Collection[str]) -> None:
        self._streams = {INSTRUCTION, *(_IMAGE + camera for camera in cameras)}
        self._kept: dict[str, tuple[int, str | tuple[str, Array]]] = {}

    def forget(self) -> None:
        """The next request must be whole."""
        self._kept.clear()

    def whole(self, message: RequestMessage, arrays: Mapping[str, Array]) -> tuple[RequestMessage, dict[str, Array]]:
        """The request with everything in it; what it brought is kept, also when something else is missing.

        :raises ProtocolError: a stream of no camera of this robot.
        :raises KeyframeError: it refers to content that is not held.
        """
        full, instruction, missing = dict(arrays), message.instruction, []
        images = {_IMAGE + name.partition("/")[2]: name for name in arrays if name.startswith((_IMAGE, _JPEG))}
        if unknown := {*message.keys, *images} - self._streams:
            raise ProtocolError("streams that this robot does not have", got=", ".join(map(repr, sorted(unknown))))
        for stream, key in message.keys.items():
            if stream == INSTRUCTION and instruction is not None:
                self._kept[stream] = key, instruction
            elif stream in images:
                self._kept[stream] = key, (images[stream], arrays[images[stream]])
            elif (kept := self._kept.get(stream)) is None or kept[0] != key:
                missing.append(stream)
            elif isinstance(kept[1], str):
                instruction = kept[1]
            else:
                full[kept[1][0]] = kept[1][1]
        if missing or instruction is None:
            raise KeyframeError("content that is not held here", got=", ".join(missing) or INSTRUCTION)
        return msgspec.structs.replace(message, instruction=instruction, keys={}), full


def _same(sent: Any, content: Any) -> bool:
    if sent is content:
        return sent is not None
    if isinstance(sent, np.ndarray):
        if sent.shape != content.shape or sent.ndim == 0:
            return np.array_equal(sent, content)
        middle = len(sent) // 2  # no two frames of a live camera have an equal row: the whole is rarely compared
        return np.array_equal(sent[middle : middle + 1], content[middle : middle + 1]) and np.array_equal(sent, content)
    return isinstance(sent, str) and sent == content


def _jpeg(image: Array, quality: int) -> U8:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image)).save(file, "JPEG", quality=quality)
    return np.frombuffer(file.getvalue(), np.uint8)


def _images(rest: dict[str, Array]) -> dict[str, U8]:
    images: dict[str, U8] = {}
    for name in [name for name in rest if name.startswith((_IMAGE, _JPEG))]:
        kind, _, camera = name.partition("/")
        if camera in images:
            raise ProtocolError(f"image {camera!r} is here twice")
        if kind == "jpeg":
            try:
                images[camera] = decode_compressed("jpeg", _take(rest, name, np.uint8, 1).data)
            except ImageError as error:
                raise ProtocolError(f"image {camera!r}: {error}") from None
            continue
        image = images[camera] = _take(rest, name, np.uint8, 3)
        if image.shape[2] != 3 or image.size == 0:
            raise ProtocolError(f"image {camera!r} has the wrong shape", got=list(image.shape), wanted="[h, w, 3]")
    return images


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
