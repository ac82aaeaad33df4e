"""The enums of the engine and the constants of the messages are the same numbers."""

from __future__ import annotations

import enum

import pytest
from phyai_policy.msg import ActionChunk, ActionStep, ChunkTiming, PolicyStatus

from phyai_engine.timing import Timing
from phyai_engine.types import AbortCause, ActionType, CommandKind, Refusal, SafetyState
from phyai_ros.diagnostics import OUTCOMES

pytestmark = pytest.mark.ros


@pytest.mark.parametrize(
    ("kind", "message", "prefix"),
    [
        (ActionType, ActionChunk, "ACTION_"),
        (CommandKind, ActionStep, "KIND_"),
        (Refusal, PolicyStatus, "REFUSAL_"),
        (AbortCause, PolicyStatus, "ABORT_"),
        (SafetyState, PolicyStatus, "SAFETY_"),
    ],
)
def test_constants_match(kind: type[enum.IntEnum], message: type, prefix: str) -> None:
    names = {n.removeprefix(prefix): getattr(message, n) for n in dir(message) if n.startswith(prefix)}
    assert names == {member.name: int(member) for member in kind}


def test_every_outcome_and_field_of_a_timing_has_its_message_counterpart() -> None:
    names = {n.removeprefix("OUTCOME_").lower(): getattr(ChunkTiming, n) for n in dir(ChunkTiming) if "OUTCOME_" in n}
    assert names == {**OUTCOMES, "unknown": 0}
    fields = set(ChunkTiming.get_fields_and_field_types())
    assert set(Timing.__struct_fields__) <= fields
    assert fields - set(Timing.__struct_fields__) == {"header", "robot_id"}
