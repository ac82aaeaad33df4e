"""The wire protocol: what goes in comes out, and nothing else is accepted."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phyai_engine.errors import ProtocolError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve import streams
from phyai_engine.types import Chunk, Request, StageTimings

Make = Callable[..., Request]
MESSAGES = [
    wire.Hello(robot={"a": [1, 2.5, None, "x"]}, model={}, parent_pid=7),
    wire.HelloReply(reason="no"),
    wire.HelloReply(
        engine=wire.EngineHello(
            horizon=3,
            action_names=("a", "b"),
            dt_s=0.1,
            note="random weights",
            warm_up_ms=(1.0, 0.5),
            pid=1,
            versions={"torch": "2"},
            rtc_max_delay=4,
        )
    ),
    wire.Hello(robot={}, model="pi05", horizon=50, statistics="ab", instance=2**63 - 1, batches=(1, 2)),
    wire.Join(slot=1, robot={}),
    wire.JoinReply(slot=1, reason="no"),
    wire.Leave(slot=1),
    wire.ErrorReply(reason="failed", error_type="ValueError", text="x", epoch=2**60, chunk_id=1, slot=3),
    wire.Cancel(epoch=2**63 - 1),
    wire.Heartbeat(phase="busy", epoch=3, chunk_id=9),
    wire.Alive(),
    wire.Goodbye(reason="draining"),
    wire.StatusQuery(),
    wire.StatusReply(lines=(("robots", "3"),)),
]


def _header(message: dict[str, Any], arrays: Any = (), version: int = wire.PROTOCOL_VERSION) -> bytes:
    return bytes([version]) + msgspec.msgpack.encode({"message": message, "arrays": arrays})


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive(message: wire.Message) -> None:
    frames = [bytes(f) for f in wire.encode(message)]
    assert wire.decode(frames) == (message, {})


@pytest.mark.parametrize("committed", [False, True])
def test_a_request_survives(make_request: Make, committed: bool) -> None:
    request = make_request(4, 5, "pick it up", committed=committed)
    frames = wire.encode(*streams.request_to_wire(request))
    message, arrays = wire.decode([bytes(f) for f in frames])
    assert isinstance(message, wire.RequestMessage)
    got = streams.request_from_wire(message, arrays, now_mono_ns=10**12)
    for name in ("epoch", "chunk_id", "seed", "remaining_ms"):
        assert getattr(got, name) == getattr(request, name)
    seen, sent = got.observation, request.observation
    assert (seen.instruction, seen.oldest_ros_ns, seen.newest_ros_ns) == ("pick it up", 10, 20)
    assert (seen.snapshot_mono_ns, seen.capture_mono_ns) == (10**12, 10**12 - 3_000_000)
    assert list(seen.images) == ["top"]
    np.testing.assert_array_equal(seen.images["top"], sent.images["top"])
    np.testing.assert_array_equal(seen.state, sent.state)
    np.testing.assert_array_equal(seen.velocity, sent.velocity)  # NaN means "not reported" and travels
    if committed:
        assert got.committed is not None
        assert request.committed is not None
        np.testing.assert_array_equal(got.committed.actions, request.committed.actions)
        assert (got.committed.delay_steps, got.committed.execution_steps) == (1, 2)
    else:
        assert got.committed is None


def test_a_chunk_survives() -> None:
    timings = StageTimings(queue_ms=1.0, inference_ms=20.0)
    chunk = Chunk(3, 4, np.arange(6.0).reshape(3, 2), timings)
    message, arrays = wire.decode(wire.encode(*streams.chunk_to_wire(chunk)))
    assert isinstance(message, wire.Reply)
    got = streams.chunk_from_wire(message, arrays)
    assert (got.epoch, got.chunk_id) == (3, 4)
    np.testing.assert_array_equal(got.actions, chunk.actions)
    np.testing.assert_equal(msgspec.to_builtins(got.timings), msgspec.to_builtins(timings))


def test_arrays_are_not_copied() -> None:
    image = np.zeros((480, 640, 3), np.uint8)
    frames = wire.encode(wire.Goodbye(), {"a": image})
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), image)
    _, arrays = wire.decode(frames)
    assert np.shares_memory(arrays["a"], image)
    assert not arrays["a"].flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.uint8).reshape(4, 6)[:, ::2],  # strided: the padded rows of an image
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">f8").reshape(3, 2),
        np.arange(3, dtype=">f4"),
        np.zeros((0, 3)),
        np.array(2.5),
        np.array([np.nan, np.inf, -0.0]),
    ],
)
def test_any_layout_survives(array: np.ndarray[Any, Any]) -> None:
    _, arrays = wire.decode(wire.encode(wire.Goodbye(), {"a": array}))
    np.testing.assert_array_equal(arrays["a"], array)
    assert arrays["a"].shape == array.shape
    assert arrays["a"].dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([1 + 2j]),
        np.zeros(2, np.float16),
        np.zeros(2, bool),
        np.zeros(2, [("x", "f8")]),
        np.array(["2020"], "M8[D]"),
    ],
)
def test_other_dtypes_do_not_leave(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ProtocolError, match="cannot travel"):
        wire.encode(wire.Goodbye(), {"a": array})


def test_what_msgpack_cannot_hold_does_not_leave() -> None:
    for robot in ({"a": object()}, {"a": 2**70}, {"a": "\udc80"}):
        with pytest.raises(ProtocolError, match="cannot be encoded"):
            wire.encode(wire.Hello(robot=robot, model={}, parent_pid=1))


def test_an_empty_shape_that_would_not_arrive_does_not_leave() -> None:
    with pytest.raises(ProtocolError, match="too large a shape"):
        wire.encode(wire.Goodbye(), {"a": np.zeros((0, wire.MAX_FRAME_BYTES + 1), np.uint8)})
    frames = wire.encode(wire.Goodbye(), {"a": np.zeros((0, wire.MAX_FRAME_BYTES), np.uint8)})
    assert wire.decode(frames)[1]["a"].shape == (0, wire.MAX_FRAME_BYTES)


def test_another_version_is_named() -> None:
    frames = [bytes(f) for f in wire.encode(wire.Goodbye())]
    with pytest.raises(ProtocolError, match=r"version, got 3, wanted 2.*same phyai_engine"):
        wire.decode([b"\x03" + frames[0][1:]])
    with pytest.raises(ProtocolError, match="empty header"):
        wire.decode([b""])


BEAT = {"kind": "heartbeat", "phase": "idle"}
SPEC = {"name": "a", "dtype": "uint8", "shape": [2, 3]}


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "number of frames"),
        ([_header(BEAT)] + [b""] * wire.MAX_FRAMES, "number of frames"),
        ([_header(BEAT), b"x"], "number of array frames"),
        ([_header(BEAT, [SPEC])], "number of array frames"),
        ([_header(BEAT, [SPEC]), b"12345"], "wrong length"),
        ([_header(BEAT, [SPEC]), b"1234567"], "wrong length"),
        ([_header(BEAT, [SPEC, SPEC]), b"123456", b"123456"], "stands twice"),
        ([_header(BEAT, [{**SPEC, "dtype": "object"}]), b"123456"], "schema"),
        ([_header(BEAT, [{**SPEC, "dtype": "|O"}]), b"123456"], "schema"),
        ([_header(BEAT, [{**SPEC, "shape": [-2, -3]}]), b"123456"], "schema"),
        ([_header(BEAT, [{**SPEC, "shape": [2**31 - 1] * 4}]), b"123456"], "wrong length"),
        ([_header(BEAT, [{**SPEC, "shape": [1, 1, 1, 2, 3]}]), b"123456"], "schema"),
        ([_header(BEAT, [{**SPEC, "shape": [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]}]), b""], "too large a shape"),
        ([_header(BEAT, [{**SPEC, "shape": [wire.MAX_FRAME_BYTES + 1, 0]}]), b""], "too large a shape"),
        (
            [_header(BEAT, [{**SPEC, "shape": [wire.MAX_FRAME_BYTES // 8 + 1, 0], "dtype": "float64"}]), b""],
            "too large",
        ),
        ([_header(BEAT, [{**SPEC, "name": ""}]), b"123456"], "schema"),
        ([_header({**BEAT, "extra": 1})], "schema"),
        ([_header({"kind": "heartbeat", "phase": "asleep"})], "schema"),
        ([_header({"kind": "heartbeat"})], "schema"),
        ([_header({"kind": "exec", "code": "1"})], "schema"),
        ([_header({**BEAT, "epoch": -1})], "schema"),
        ([_header({**BEAT, "epoch": "1"})], "schema"),
        ([_header(BEAT) + b"tail"], "schema"),
        ([pickle.dumps({"kind": "heartbeat"})], "version"),
        ([b"\x02" + pickle.dumps({"kind": "heartbeat"})], "schema"),
        ([b"\x02\x81\xa7message\x82\xa4kind\xa5hello\xa5robot\x81\xa1a" + b"\x91" * 100_000], "recursion"),
    ],
)
def test_malformed_messages_are_refused(frames: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        wire.decode(frames)


@pytest.mark.fault(24)
def test_caps() -> None:
    big = memoryview(np.zeros(wire.MAX_FRAME_BYTES + 1, np.uint8))
    exact = big[:-1]
    with pytest.raises(ProtocolError, match="header is too long"):
        wire.decode([bytes(wire.MAX_HEADER_BYTES + 1)])
    with pytest.raises(ProtocolError, match="frame is too long"):
        wire.decode([b"\x02", big])
    with pytest.raises(ProtocolError, match="message is too long"):
        wire.decode([b"\x02", *[exact] * 4])
    with pytest.raises(ProtocolError, match="frame is too long"):
        wire.encode(wire.Goodbye(), {"a": np.frombuffer(big, np.uint8)})


@pytest.mark.fault(24)
@pytest.mark.parametrize("prefix", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
@pytest.mark.parametrize(
    "before",
    [
        b"\x02",
        b"\x02\x82\xa7message",
        b"\x02\x82\xa6arrays",
        b"\x02\x81\xa7message\x84\xa4kind\xa5hello\xa5robot",
    ],
)
def test_a_gigabyte_length_field_allocates_nothing(before: bytes, prefix: bytes) -> None:
    frame = before + prefix + struct.pack(">I", 1 << 30) + b"\x00" * 16
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.decode([frame])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.binary(max_size=200), max_size=4), st.booleans())
def test_random_frames_raise_nothing_else(frames: list[bytes], versioned: bool) -> None:
    if versioned and frames:
        frames[0] = bytes([wire.PROTOCOL_VERSION]) + frames[0]
    with pytest.raises(ProtocolError):  # 200 random bytes never spell a message
        wire.decode(frames)


REQUEST = wire.RequestMessage(
    epoch=1,
    chunk_id=2,
    seed=3,
    remaining_ms=4.0,
    instruction="go",
    oldest_ros_ns=1,
    newest_ros_ns=2,
    capture_age_ns=3,
    committed=wire.CommittedSteps(delay_steps=1, execution_steps=2),
)
REQUEST_FRAMES = [
    bytes(f)
    for f in wire.encode(
        REQUEST,
        {
            "image/a": np.zeros((2, 2, 3), np.uint8),
            "state": np.zeros((2, 2)),
            "committed": np.zeros((1, 2)),
        },
    )
]


@given(st.integers(0, 400), st.integers(0, 255), st.integers(0, 3), st.integers(0, 60))
def test_a_damaged_request_is_a_request_or_a_protocol_error(at: int, byte: int, which: int, cut: int) -> None:
    frames = list(REQUEST_FRAMES)
    header = bytearray(frames[0])
    header[at % len(header)] = byte
    frames[0] = bytes(header)
    frames[which] = frames[which][: max(0, len(frames[which]) - max(0, cut - 30))]
    try:
        message, arrays = wire.decode(frames)
        if isinstance(message, wire.RequestMessage):
            streams.request_from_wire(message, arrays, now_mono_ns=0)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"state": None}, "'state' is missing"),
        ({"state": np.zeros((3, 2))}, "wrong shape"),
        ({"state": np.zeros((2, 2), np.float32)}, "float32 of rank 2, wanted float64 of rank 2"),
        ({"state": np.zeros(2)}, "rank 1"),
        ({"committed": None}, "'committed' is missing"),
        ({"committed": np.zeros(2)}, "rank 1"),
        ({"image/a": np.zeros((2, 2, 4), np.uint8)}, "wrong shape"),
        ({"image/a": np.zeros((0, 2, 3), np.uint8)}, "wrong shape"),
        ({"image/a": np.zeros((2, 2, 3))}, "float64 of rank 3"),
        ({"image/a": np.zeros((2, 2), np.uint8)}, "rank 2"),
        ({"other": np.zeros(1)}, "unknown arrays 'other'"),
    ],
)
def test_wrong_arrays_of_a_request_are_refused(change: dict[str, Any], text: str) -> None:
    _, arrays = wire.decode(REQUEST_FRAMES)
    changed = {k: v for k, v in {**arrays, **change}.items() if v is not None}
    with pytest.raises(ProtocolError, match=text):
        streams.request_from_wire(REQUEST, changed, now_mono_ns=0)


def test_committed_without_its_counts_is_refused() -> None:
    _, arrays = wire.decode(REQUEST_FRAMES)
    message = msgspec.structs.replace(REQUEST, committed=None)
    with pytest.raises(ProtocolError, match="unknown arrays 'committed'"):
        streams.request_from_wire(message, arrays, now_mono_ns=0)


@pytest.mark.parametrize(
    "arrays",
    [{}, {"actions": np.zeros(3)}, {"actions": np.zeros((2, 2), np.float32)}, {"a": np.zeros((2, 2))}],
)
def test_wrong_arrays_of_a_chunk_are_refused(arrays: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        streams.chunk_from_wire(wire.Reply(epoch=1, chunk_id=1, timings=StageTimings()), arrays)
