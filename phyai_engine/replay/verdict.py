"""What a run showed, in sentences, and how numbers are written. No plotly: a terminal can print the same."""

from __future__ import annotations

import math
from typing import Any

from phyai_engine.replay.record import Record
from phyai_engine.replay.summary import handoffs, overlapped, summary
from phyai_engine.replay.survey import Fault


def ms(value_s: float | None, digits: int = 1) -> str:
    """Seconds as text in milliseconds; an en dash when not measured."""
    return "–" if value_s is None or math.isnan(value_s) else f"{value_s * 1e3:,.{digits}f} ms".replace("-", "−")


def number(value: float | None, form: str = ".2f") -> str:
    """A number as text; an en dash when not measured."""
    return "–" if value is None or math.isnan(value) else format(value, form).replace("-", "−")


def percent(value: float | None) -> str:
    """A fraction as text in percent."""
    return "–" if value is None else f"{value * 100:.1f} %"


def verdict(record: Record) -> list[str]:
    """What the run showed, in words; first whether it passed, then every sensor fault by its name."""
    return _verdict(record, summary(record))


def passed(record: Record, run: dict[str, Any]) -> bool | None:
    """Whether the run is good: by its invariants, a gate's conditions among them; a bag without any by its deadline and
    its sensors. None: nothing was judged, or the gate holds in spite of a miss or a sensor fault.

    :param run: :func:`phyai_engine.replay.summary.summary` of the record.
    """
    ok: bool | None = run["ok"]
    if not record.bag or ok is False:
        return ok
    clean = not record.survey.faults and not run["margins"]["m_ctrl_s"]["misses"]
    return True if clean else (False if ok is None else None)


def fault_name(fault: Fault) -> str:
    """Input and kind: ``front late``."""
    return f"{fault.where} {fault.kind.replace('_', ' ')}"


def _verdict(record: Record, run: dict[str, Any]) -> list[str]:
    failed = [entry for entry in record.invariants if not entry.ok]
    n = len(record.invariants)
    if failed:
        first = f"FAILED: {len(failed)} of {n} invariants did not hold"
    elif n:
        first = f"Passed: all {n} invariants held" if n > 1 else "Passed: the one invariant held"
    else:
        first = _replayed(record, run) if record.bag else "No invariant was checked"
    sentences = [first, *(f"{entry.name}: {entry.detail or 'did not hold'}" for entry in failed)]
    if record.bag and n:
        sentences.append(f"{_replayed(record, run)}.")
    sentences += [f"Sensor fault, {fault_name(fault)}: {fault.text}" for fault in record.survey.faults]
    sentences += [f"The bag: {warning}" for warning in record.survey.warnings]
    sentences += [_deadline(record, run), _answers(record, run), _motion(run), *_handoffs(run)]
    if run["random_weights"]:
        sentences.append(
            "The model has seeded random weights: the run shows the whole path at work, not a learned skill."
        )
    return sentences


def _replayed(record: Record, run: dict[str, Any]) -> str:
    """What a bag came to, in one line."""
    margin, faults = run["margins"]["m_ctrl_s"], record.survey.faults
    if not margin["n"]:
        deadline = "no deadline was measured"
    elif margin["misses"]:
        deadline = f"deadline missed at {margin['misses']} of {margin['n']} handoffs"
    else:
        deadline = f"deadline kept at {margin['n']} of {margin['n']} handoffs"
    named = ", ".join(dict.fromkeys(map(fault_name, faults)))
    sensors = f"{len(faults)} sensor fault{'s' * (len(faults) > 1)}: {named}" if faults else "no sensor fault"
    return f"{record.bag}, {record.mode}: {deadline}; {sensors}"


def _deadline(record: Record, run: dict[str, Any]) -> str:
    margin = run["margins"]["m_ctrl_s"]
    if not margin["n"]:
        return why_no_margins(record)
    bound = f"upper 95 % bound {percent(margin['miss_rate_upper95'])}"
    kept = (
        f"Deadline missed at {margin['misses']} of {margin['n']} handoffs ({percent(margin['miss_rate'])}, {bound})"
        if margin["misses"]
        else f"Deadline kept at {margin['n']} of {margin['n']} handoffs that had one (miss rate 0, {bound})"
    )
    return f"{kept}: margin p50 {ms(margin['p50'])}, p01 {ms(margin['p01'])}, minimum {ms(margin['min'])}."


def _answers(record: Record, run: dict[str, Any]) -> str:
    rejected = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in run["rejected"].items() if n)
    counted = ", ".join(f"{name} {n}" for name, n in run["refusals"].items())
    if not record.timings:
        answers = "No answer of the engine was recorded"
    elif rejected:
        answers = f"{run['handoffs']} handoffs; other answers: {rejected}"
    else:
        answers = f"{run['handoffs']} handoffs, every answer was accepted"
    return f"{answers}. {f'Refusals by code: {counted}' if counted else 'Nothing was refused'}."


def _motion(run: dict[str, Any]) -> str:
    ticks = run["ticks"]
    if not (ticks["action"] or ticks["hold"] or ticks["stop"]):
        return "No control tick was recorded."
    return (
        f"Control ticks: {ticks['action']} actions, {ticks['hold']} holds "
        f"(longest {ticks['hold_longest_s']:.2f} s), {ticks['stop']} stop commands; "
        f"an action in {percent(ticks['played_fraction'])} of the ticks outside stops."
    )


def _handoffs(run: dict[str, Any]) -> list[str]:
    """How smooth the handoffs were, and how many were not made as configured; nothing where none had a seam."""
    ratio, fallbacks = run["seam"]["jump_ratio"], run["fallbacks"]
    sentences = []
    if ratio["n"]:
        sentences.append(
            f"Jump at a handoff over the median step of its chunk: p50 {number(ratio['p50'])}, "
            f"p99 {number(ratio['p99'])} of {ratio['n']} (1 = like any other step)."
        )
    if fallbacks:
        counted = ", ".join(f"{name} {n}" for name, n in fallbacks.items())
        n = sum(fallbacks.values())
        sentences.append(f"The schedule fell back at {n} of {run['handoffs']} handoffs: {counted}.")
    return sentences


def why_no_handoffs(record: Record) -> str:
    """A sentence for charts that have nothing to show."""
    if record.timings:
        return f"No handoffs were recorded: none of the {len(record.timings)} answers was accepted."
    if record.steps:
        return "No handoffs were recorded: the node ticked, but no chunk arrived."
    return "No handoffs were recorded: the record holds neither timings nor control ticks."


def why_no_margins(record: Record) -> str:
    if not handoffs(record):
        return why_no_handoffs(record)
    if not overlapped(record):
        return "No deadlines: with schedule sync the robot waits for each chunk, so none can be late."
    if record.mode == "step":
        return "No margins: in step mode the latency is stated, not measured."
    return "No handoff had a deadline: nothing played at the requests, or the clocks gave no durations."
