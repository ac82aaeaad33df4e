"""Requests as what changed: what one end leaves out the other end puts back, or asks for."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phyai_engine.config import Normalisation
from phyai_engine.errors import KeyframeError, ProtocolError
from phyai_engine.serve import protocol as wire
from phyai_engine.serve import streams
from phyai_engine.serve.streams import KeptStreams, SentStreams
from phyai_engine.types import Observation, Request


def _request(images: dict[str, Any], instruction: str = "go") -> Request:
    seen = Observation(images, np.arange(2.0), np.arange(2.0), instruction, 1, 2, 0, 5)
    return Request(1, 1, seen, None, 7, 80.0)


def _image(value: int, height: int = 4) -> Any:
    return np.full((height, 5, 3), value, np.uint8)


def _carried(sent: SentStreams, request: Request) -> tuple[wire.RequestMessage, dict[str, Any]]:
    message, arrays = wire.decode([bytes(f) for f in wire.encode(*sent.to_wire(request))])
    assert isinstance(message, wire.RequestMessage)
    return message, arrays


def _arrived(kept: KeptStreams, message: wire.RequestMessage, arrays: dict[str, Any]) -> Observation:
    return streams.request_from_wire(*kept.whole(message, arrays), now_mono_ns=5).observation


def test_what_did_not_change_is_not_sent_again() -> None:
    sent, kept = SentStreams(), KeptStreams(["a", "b"])
    first = _carried(sent, _request({"a": _image(1), "b": _image(2)}))
    assert sorted(first[1]) == ["image/a", "image/b", "state"] and first[0].instruction == "go"
    _arrived(kept, *first)
    # An equal frame in other memory is the same frame.
    second = _carried(sent, _request({"a": _image(1), "b": _image(3)}))
    assert sorted(second[1]) == ["image/b", "state"] and second[0].instruction is None
    seen = _arrived(kept, *second)
    assert (seen.images["a"] == 1).all() and (seen.images["b"] == 3).all() and seen.instruction == "go"
    third = _carried(sent, _request({"a": _image(1), "b": _image(3)}, "stop"))
    assert sorted(third[1]) == ["state"] and third[0].instruction == "stop"
    assert _arrived(kept, *third).instruction == "stop"


def test_what_is_not_held_is_asked_for_by_name() -> None:
    sent, kept = SentStreams(), KeptStreams(["a", "b"])
    _carried(sent, _request({"a": _image(1), "b": _image(2)}))  # lost on the way
    delta = _carried(sent, _request({"a": _image(1), "b": _image(9)}))
    with pytest.raises(KeyframeError, match=r"instruction, image/a|image/a, instruction"):
        kept.whole(*delta)
    sent.forget()
    seen = _arrived(kept, *_carried(sent, _request({"a": _image(1), "b": _image(9)})))
    assert (seen.images["a"] == 1).all() and (seen.images["b"] == 9).all()


def test_an_old_key_is_not_taken_for_the_newest() -> None:
    sent, kept = SentStreams(), KeptStreams(["a"])
    old = _carried(sent, _request({"a": _image(1)}))
    _arrived(kept, *old)
    refers = _carried(sent, _request({"a": _image(1)}))
    _arrived(kept, *_carried(sent, _request({"a": _image(2)})))
    with pytest.raises(KeyframeError, match="image/a"):
        kept.whole(*refers)  # came late: the newest is another frame


def test_streams_of_no_camera_are_refused() -> None:
    kept = KeptStreams(["a"])
    with pytest.raises(ProtocolError, match="'image/b'"):
        kept.whole(*_carried(SentStreams(), _request({"b": _image(1)})))
    message, arrays = streams.request_to_wire(_request({"a": _image(1)}))
    with pytest.raises(ProtocolError, match="'image/z'"):
        kept.whole(message, {**arrays, "jpeg/z": np.zeros(3, np.uint8)})


def test_a_whole_request_needs_and_leaves_nothing() -> None:
    kept = KeptStreams(["a"])
    message, arrays = streams.request_to_wire(_request({"a": _image(1)}))
    assert kept.whole(message, arrays) == (message, arrays)
    with pytest.raises(KeyframeError):
        kept.whole(*_carried_without(message))


def _carried_without(message: wire.RequestMessage) -> tuple[wire.RequestMessage, dict[str, Any]]:
    return msgspec.structs.replace(message, keys={"image/a": 1, "instruction": 1}), {"state": np.zeros((2, 2))}


def test_jpeg_is_decoded_where_the_request_is_used() -> None:
    ramp = np.repeat(np.arange(64, dtype=np.uint8)[:, None, None] * 4, 48, axis=1).repeat(3, axis=2)
    sent, kept = SentStreams(jpeg_quality=95), KeptStreams(["a"])
    message, arrays = _carried(sent, _request({"a": ramp}))
    assert sorted(arrays) == ["jpeg/a", "state"] and arrays["jpeg/a"].nbytes < ramp.nbytes / 4
    seen = _arrived(kept, message, arrays)
    assert np.abs(seen.images["a"].astype(int) - ramp).max() < 6
    np.testing.assert_array_equal(_arrived(kept, *_carried(sent, _request({"a": ramp}))).images["a"], seen.images["a"])
    with pytest.raises(ProtocolError, match="not a whole JPEG"):
        streams.request_from_wire(message, {**arrays, "jpeg/a": np.zeros(9, np.uint8)}, now_mono_ns=0)
    both = {**arrays, "image/a": ramp}
    with pytest.raises(ProtocolError, match="twice"):
        streams.request_from_wire(message, both, now_mono_ns=0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(["x", "y"]), st.booleans())))
def test_any_history_arrives_whole_or_is_asked_for(history: list[tuple[int, int, str, bool]]) -> None:
    """Whatever is lost: what arrives is what was sent, and one whole message mends everything."""
    sent, kept = SentStreams(), KeptStreams(["a", "b"])
    for a, b, instruction, lost in history:
        request = _request({"a": _image(a, 1), "b": _image(b, 1)}, instruction)
        message = _carried(sent, request)
        if lost:
            continue
        try:
            seen = _arrived(kept, *message)
        except KeyframeError:
            sent.forget()
            seen = _arrived(kept, *_carried(sent, request))
        assert (seen.images["a"] == a).all() and (seen.images["b"] == b).all() and seen.instruction == instruction


def test_equal_statistics_have_equal_ids() -> None:
    one = Normalisation(kind="mean_std", state={"mean": (0.0,), "std": (1.0,)})
    other = Normalisation(kind="mean_std", state={"std": (1.0,), "mean": (0.0,)})
    assert streams.statistics_id(one) == streams.statistics_id(other)
    assert streams.statistics_id(one) != streams.statistics_id(msgspec.structs.replace(one, eps=1e-3))
