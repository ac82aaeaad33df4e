"""What the sensors of a bag or of a run did, and what of it is a fault. Structs only; examine.py fills them.

Times ``t_s`` count from the first message of the bag; NaN = cannot be told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

NAN = math.nan

FaultKind = Literal[
    "late",  # messages arrive long after their stamp, other inputs do not
    "stall",  # silent for longer than a quarter of a second, and 3 periods
    "gap",  # silent for a second or more
    "frozen",  # new stamps, the same pixels, while the robot moved
    "repeated_stamp",  # new messages with the stamp of the one before
    "backward_stamp",  # a stamp older than the one before, of this input alone
    "looped",  # the stamps of all inputs went back together
    "unstamped",  # header.stamp is 0
    "future_stamp",  # stamped after it was received
    "skewed",  # no sample of another input near its stamps
    "undecodable",  # an encoding or a message that cannot be read
    "clock",  # its stamps are on another clock than those of the other inputs
]

STOPPING: frozenset[FaultKind] = frozenset({"gap", "looped"})
"""Faults after which a replay is not one run of a robot: its exit code is not 0, whatever the gate says."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault of one input.

    :param where: camera name, JointState topic, or ``all inputs``.
    :param text: what it does, with figures; reads on from ``where``. :param t_s: when it was first seen.
    """

    where: str
    kind: FaultKind
    text: str
    t_s: float


class Spread(Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles of a duration [s]; NaN without any."""

    p50: float = NAN
    p99: float = NAN
    max: float = NAN


class InputSurvey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One camera or JointState topic.

    :param name: camera name, or the topic as the robot file spells it. :param topic: in the bag.
    :param rate_hz: 1 / median period of the stamps. :param period: between stamps; ``interval`` between receipts.
    :param gaps: intervals longer than 0.25 s and 3 periods. :param longest_gap_s: at ``longest_gap_t_s`` (its begin).
    :param lateness: receipt - stamp, less ``Survey.clock_offset_s``. :param skew: distance of a stamp to the nearest of
        each input that is not slower, the farthest of those.
    :param frozen: frames whose pixels equal the frame before; ``longest_frozen`` of them in a row.
    :param undecodable: messages that cannot be read. :param encodings: of images, with their sizes: ``rgb8 640x480``.
    """

    name: str
    topic: str
    kind: Literal["camera", "joints"]
    messages: int
    rate_hz: float = NAN
    period: Spread = Spread()
    interval: Spread = Spread()
    gaps: int = 0
    longest_gap_s: float = NAN
    longest_gap_t_s: float = NAN
    lateness: Spread = Spread()
    skew: Spread = Spread()
    backward: int = 0
    repeated: int = 0
    unstamped: int = 0
    frozen: int = 0
    longest_frozen: int = 0
    undecodable: int = 0
    encodings: Sequence[str] = ()


class Survey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sensors of one bag. Empty (no inputs) for a run that had none.

    :param faults: the gravest first. :param warnings: of the bag as a file: cut, without an index.
    :param clock_offset_s: receipt - stamp that all inputs have in common where stamps are on another clock, else 0.
    """

    duration_s: float = NAN
    messages: int = 0
    inputs: Sequence[InputSurvey] = ()
    faults: Sequence[Fault] = ()
    warnings: Sequence[str] = ()
    clock_offset_s: float = 0.0
