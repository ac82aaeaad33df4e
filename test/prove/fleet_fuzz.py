"""Bytes that are no message, and messages that are nearly one: the parser of the engine protocol must refuse or accept.

hypothesis draws a message of every kind with its arrays, and a seed; each example is damaged in 50 ways. Anything but a
ProtocolError is a defect. The memory that a decode allocates is bounded by what came in.
"""

from __future__ import annotations

import random
import resource
import tracemalloc
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from phyai_engine.errors import ProtocolError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve import streams
from phyai_engine.serve.streams import KeptStreams

DAMAGES = 50
CAMERAS = ("a", "b")
_ARRAYS: dict[str, Any] = {
    "image/a": np.arange(48, dtype=np.uint8).reshape(4, 4, 3),
    "jpeg/b": np.frombuffer(b"\xff\xd8\xff\xe0 no picture", np.uint8),
    "state": np.zeros((2, 3)),
    "committed": np.zeros((2, 3)),
    "actions": np.zeros((4, 3), np.float64),
    "f4": np.zeros((0, 2), np.float32),
}
_MESSAGES: list[wire.Message] = [
    wire.Hello(robot={"robot_id": "r", "state": [{"name": "x"}]}, model="m", instance=1, batches=(1, 2)),
    wire.Hello(robot={}, model={"family": "fake", "options": {"deep": [[[[1]]]]}}),
    wire.HelloReply(reason="no", retry_s=1.0),
    wire.Join(slot=1, robot={"a": 1}),
    wire.JoinReply(slot=1),
    wire.Leave(slot=1),
    wire.RequestMessage(
        epoch=1,
        chunk_id=2,
        seed=3,
        remaining_ms=4.0,
        oldest_ros_ns=1,
        newest_ros_ns=2,
        capture_age_ns=3,
        instruction="go",
        committed=wire.CommittedSteps(delay_steps=1, execution_steps=2),
        keys={"instruction": 1, "image/a": 2, "image/b": 3},
    ),
    wire.Reply(epoch=1, chunk_id=2, timings=wire.StageTimings()),
    wire.ErrorReply(reason="failed", error_type="E", text="t"),
    wire.Cancel(epoch=1),
    wire.Heartbeat(phase="idle"),
    wire.Alive(),
    wire.Goodbye(),
    wire.StatusQuery(),
    wire.StatusReply(lines=(("a", "b"),)),
]
_LENGTHS = (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\xdc", b"\xde", b"\xda", b"\xcf", b"\xd3")


@st.composite
def frames(draw: st.DrawFn) -> list[bytes]:
    """A sound message, or plain bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.lists(st.binary(max_size=300), min_size=0, max_size=5))
    message = draw(st.sampled_from(_MESSAGES))
    names = draw(st.lists(st.sampled_from(sorted(_ARRAYS)), unique=True, max_size=len(_ARRAYS)))
    return [bytes(frame) for frame in wire.encode(message, {name: _ARRAYS[name] for name in names})]


def damaged(sound: list[bytes], rng: random.Random) -> list[bytes]:
    """One of the ways a message goes wrong."""
    parts = [bytearray(frame) for frame in sound]
    for _ in range(rng.randint(0, 3)):
        if not parts:
            break
        frame = rng.choice(parts[:1] * 3 + parts)
        at = rng.randrange(len(frame) + 1)
        kind = rng.randrange(8)
        if kind == 0 and frame:
            frame[at - 1] = rng.randrange(256)
        elif kind == 1:
            del frame[at:]
        elif kind == 2:
            frame[at:at] = rng.randbytes(rng.randint(1, 9))
        elif kind == 3:  # a length of up to 4 GiB
            frame[at:at] = rng.choice(_LENGTHS) + rng.randbytes(4)
        elif kind == 4 and frame:
            del frame[rng.randrange(len(frame))]
        elif kind == 5:
            frame[at:] = frame[at:] + frame[:at]
        elif kind == 6:
            parts.insert(rng.randrange(len(parts) + 1), bytearray(rng.randbytes(rng.randint(0, 40))))
        else:
            parts.pop(rng.randrange(len(parts)))
    return [bytes(part) for part in parts]


def parse(given: list[bytes], kept: KeptStreams) -> bool:
    """As the front and then a replica do; True where it was a message."""
    try:
        message, arrays = wire.decode(given)
        if isinstance(message, wire.RequestMessage):
            streams.request_from_wire(*kept.whole(message, arrays), now_mono_ns=0)
        elif isinstance(message, wire.Reply):
            streams.chunk_from_wire(message, arrays)
    except ProtocolError:
        return False
    return True


def run(inputs: int) -> tuple[int, int, int]:
    """:returns: inputs, messages among them, the largest allocation of a decode in bytes (of one example in 64)."""
    counts = [0, 0, 0]
    kept = KeptStreams(CAMERAS)

    @hypothesis.settings(
        max_examples=max(1, inputs // DAMAGES),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(frames(), st.integers(0, 2**32 - 1))
    def one(sound: list[bytes], seed: int) -> None:
        rng = random.Random(seed)
        measured = seed % 64 == 0
        if measured:
            tracemalloc.start()
        try:
            for _ in range(DAMAGES):
                counts[1] += parse(damaged(sound, rng), kept)
                counts[0] += 1
            if measured:
                counts[2] = max(counts[2], tracemalloc.get_traced_memory()[1])
        finally:
            if measured:
                tracemalloc.stop()

    while counts[0] < inputs:
        one()
    return counts[0], counts[1], counts[2]


def fuzz(inputs: int) -> list[tuple[str, str, bool | None]]:
    """Rows of evidence."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done, sound, peak = run(inputs)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return [
        ("fuzz: inputs without anything but a ProtocolError", f"{done}, {sound} of them messages", done >= inputs),
        ("fuzz: largest allocation of 50 decodes", f"{peak / 1e3:.0f} kB", peak < 4e6),
        ("fuzz: peak RSS grew", f"{grown_mb:.1f} MB", grown_mb < 100),
    ]
