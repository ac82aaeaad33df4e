"""The page's section on the sensors of a bag: every input's figures, red where a fault was found."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from phyai_engine.replay.page import table
from phyai_engine.replay.record import Record
from phyai_engine.replay.survey import FaultKind, InputSurvey
from phyai_engine.replay.verdict import ms, number

MAX_FAULTS = 50  # of the list; the record holds all

_HEAD = (
    "input", "messages", "rate", "period p99", "longest gap", "gaps", "stamp to arrival p50", "p99", "skew p99",
    "stamps back", "repeated", "without", "frozen in a row", "unreadable", "form",
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
        (escape(fault.where), f"!{fault.kind.replace('_', ' ')}", escape(fault.text), f"{number(fault.t_s)} s")
        for fault in survey.faults[:MAX_FAULTS]
    ]
    listed = table(("input", "fault", "what", "first at"), faults, text=(0, 1, 2)) if faults else ""
    more = len(survey.faults) - MAX_FAULTS
    cut = f'<p class="note">{more} more in the record.</p>' if more > 0 else ""
    quiet = "" if faults else '<p class="note">No fault was found.</p>'
    rows = [_row(one, {f.kind for f in survey.faults if f.where in (one.name, "all inputs")}) for one in survey.inputs]
    return (
        f'<section id="sensors"><h2>Sensors</h2><p class="note">{note}</p>{listed}{cut}{quiet}'
        f"{table(_HEAD, rows, text=(len(_HEAD) - 1,))}</section>"
    )


def _row(one: InputSurvey, faults: Iterable[FaultKind]) -> tuple[str, ...]:
    found = set(faults)

    def cell(text: str, *kinds: FaultKind) -> str:
        return f"!{text}" if found & set(kinds) else text

    gap = f"{ms(one.longest_gap_s)} at {number(one.longest_gap_t_s)} s"
    return (
        escape(one.name),
        str(one.messages),
        f"{number(one.rate_hz, '.1f')} Hz",
        ms(one.period.p99),
        cell(gap, "stall", "gap"),
        cell(str(one.gaps), "stall", "gap"),
        cell(ms(one.lateness.p50), "late", "future_stamp", "clock"),
        cell(ms(one.lateness.p99), "late"),
        cell(ms(one.skew.p99), "skewed"),
        cell(str(one.backward), "backward_stamp", "looped"),
        cell(str(one.repeated), "repeated_stamp"),
        cell(str(one.unstamped), "unstamped"),
        cell(str(one.longest_frozen), "frozen"),
        cell(str(one.undecodable), "undecodable"),
        escape(", ".join(one.encodings)) or "–",
    )
