"""The page's section on the sensors of a bag: every input's figures, red where a fault was found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from phyai_engine.replay.page import table
from phyai_engine.replay.record import Record
from phyai_engine.replay.survey import FaultKind, InputSurvey
from phyai_engine.replay.verdict import fault_name, ms, number

MAX_FAULTS = 50  # of the list; the record holds all

_HEAD = (
    "input", "messages", "rate", "longest gap", "gaps", "stamp to arrival p50", "p99", "skew p99", "bad stamps",
    "frozen in a row", "unreadable", "form",
)  # fmt: skip


def sensors(record: Record) -> str:
    """As HTML; empty for a run that no bag was replayed in."""
    survey = record.survey
    if not survey.inputs:
        return ""
    note = (
        f"What the bag itself holds, {number(survey.duration_s, '.1f')} s and {survey.messages} messages, before any "
        "replay. Red: named as a fault. Times count from the first message of the bag."
    )
    faults = [
        (f"!{escape(fault_name(fault))}", escape(fault.text), f"{number(fault.t_s)} s")
        for fault in survey.faults[:MAX_FAULTS]
    ]
    listed = table(("fault", "what", "first at"), faults, text=(1,)) if faults else ""
    more = len(survey.faults) - MAX_FAULTS
    cut = f'<p class="note">{more} more in the record.</p>' if more > 0 else ""
    quiet = "" if faults else '<p class="note">No fault was found.</p>'
    rows = [_row(one, {f.kind for f in survey.faults if f.where in (one.name, "all inputs")}) for one in survey.inputs]
    return (
        f'<section id="sensors"><h2>Sensors</h2><p class="note">{note}</p>{listed}{cut}{quiet}'
        f"{table(_HEAD, rows)}</section>"
    )


def _row(one: InputSurvey, faults: Iterable[FaultKind]) -> tuple[str, ...]:
    found = set(faults)

    def cell(text: str, *kinds: FaultKind) -> str:
        return f"!{text}" if found & set(kinds) else text

    gap = "–" if math.isnan(one.longest_gap_s) else f"{ms(one.longest_gap_s)} at {number(one.longest_gap_t_s)} s"
    counts = {"back": one.backward, "repeated": one.repeated, "without": one.unstamped}
    stamps = ", ".join(f"{n} {name}" for name, n in counts.items() if n) or "0"
    return (
        escape(one.name),
        str(one.messages),
        f"{number(one.rate_hz, '.1f')} Hz",
        cell(gap, "stall", "gap"),
        cell(str(one.gaps), "stall", "gap"),
        cell(ms(one.lateness.p50), "late", "future_stamp", "clock"),
        cell(ms(one.lateness.p99), "late"),
        cell(ms(one.skew.p99), "skewed"),
        cell(stamps, "backward_stamp", "looped", "repeated_stamp", "unstamped"),
        cell(str(one.longest_frozen), "frozen"),
        cell(str(one.undecodable), "undecodable"),
        escape(", ".join(one.encodings)) or "–",
    )
