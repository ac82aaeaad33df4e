"""PolicyStatus, ChunkTiming and /diagnostics from one set of facts.

DiagnosticArray is published directly: diagnostic_updater's Python Updater cannot be constructed twice on a node, and
its frequency tasks read a clock of their own that ignores /clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from builtin_interfaces.msg import Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from phyai_policy.msg import ChunkTiming, PolicyStatus

from phyai_engine.control.counters import Counters, Windows
from phyai_engine.control.stream import StreamStats
from phyai_engine.handoff import Fallback
from phyai_engine.safety import Safety
from phyai_engine.timing import Percentiles, Timing, Window, miss_upper95
from phyai_engine.types import AbortCause, Refusal, SafetyState

OUTCOMES = {
    "accepted": ChunkTiming.OUTCOME_ACCEPTED,
    "refused": ChunkTiming.OUTCOME_REFUSED,
    "cancelled": ChunkTiming.OUTCOME_CANCELLED,
    "engine_error": ChunkTiming.OUTCOME_ENGINE_ERROR,
}
EMPTY = Window(1).percentiles()


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a status report says.

    :param cameras: intake of each camera: rate and delivered fraction from stamps, drops by reason; joints likewise.
    :param fallback: and ``fallback_text`` why. :param windows: figures of the newest handoffs.
    :param stop_cause: of the newest stop, also of one without a latch. :param fleet_stop: the fleet's last word.
    :param player_latch: number of the newest latch heard of a player elsewhere.
    :param notes: words about engine, decoder, fleet. :param faults: sentences that make the level ERROR.
    """

    robot_id: str
    lifecycle_id: int
    lifecycle_label: str
    safety: Safety
    placement: str = ""
    schedule: str = ""
    fallback: Fallback = Fallback.NONE
    fallback_text: str = ""
    counters: Counters = field(default_factory=Counters)
    windows: Windows = field(default_factory=lambda: Windows(1))
    jitter: Percentiles = EMPTY
    ticks: int = 0
    cameras: tuple[StreamStats, ...] = ()
    joints: tuple[StreamStats, ...] = ()
    stop_cause: AbortCause = AbortCause.NONE
    fleet_stop: bool = False
    player_latch: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def chunk_timing(timing: Timing, robot_id: str, stamp: Time) -> ChunkTiming:
    """The message of one handoff; field names are the same on both sides."""
    message = ChunkTiming(robot_id=robot_id)
    message.header.stamp = stamp
    numbers = {"outcome": OUTCOMES[timing.outcome], "refusal": int(Refusal[timing.refusal.upper()])}
    for name in Timing.__struct_fields__:
        setattr(message, name, numbers.get(name, getattr(timing, name)))
    return message


def policy_status(facts: Facts, stamp: Time) -> PolicyStatus:
    """The compact status message."""
    counters, windows = facts.counters, facts.windows
    margin, inference = windows.margin.percentiles(), windows.inference.percentiles()
    jump_ratio = windows.jump_ratio.percentiles()
    message = PolicyStatus(
        robot_id=facts.robot_id,
        lifecycle_state=facts.lifecycle_id,
        lifecycle_label=facts.lifecycle_label,
        safety_state=int(facts.safety.state),
        abort_cause=int(facts.safety.cause),
        abort_text=facts.safety.text,
        stop_cause=int(facts.stop_cause),
        fleet_stop=facts.fleet_stop,
        player_latch=facts.player_latch,
        epoch=facts.safety.epoch,
        placement=facts.placement,
        schedule=facts.schedule,
        fallback=facts.fallback.value,
        fallback_text=facts.fallback_text,
        last_refusal=int(counters.last_refusal),
        last_refusal_text=counters.last_refusal_text,
        refusals=list(counters.refusals),
        chunks_accepted=counters.accepted,
        chunks_refused=counters.refused,
        requests=counters.requests,
        misses_cond=counters.misses_cond,
        misses_exhaust=counters.misses_exhaust,
        handoffs=counters.handoffs,
        miss_rate_upper95=miss_upper95(counters.misses, counters.handoffs),
        margin_p50_s=margin.p50,
        margin_p01_s=margin.p01,
        margin_min_s=margin.min,
        inference_p50_s=inference.p50,
        inference_p99_s=inference.p99,
        jump_ratio_p50=jump_ratio.p50,
        jump_ratio_p99=jump_ratio.p99,
        jerk_p99=windows.jerk.percentiles().p99,
        frozen_error_p99=windows.frozen_error.percentiles().p99,
        action_age_p99_s=windows.age.percentiles().p99,
        tick_jitter_p99_s=facts.jitter.p99,
        ticks=facts.ticks,
        dropped_frames=sum(sum(c.dropped.values()) for c in facts.cameras),
        camera_names=[c.name for c in facts.cameras],
        camera_rates_hz=[c.rate_hz for c in facts.cameras],
        camera_delivered=[c.delivered for c in facts.cameras],
    )
    message.header.stamp = stamp
    return message


def diagnostic_array(facts: Facts, node_name: str, stamp: Time) -> DiagnosticArray:
    """/diagnostics: one status for the policy, one for each camera and JointState topic; units in the keys."""
    level, text = _level(facts)
    counters, windows = facts.counters, facts.windows
    margin, inference = windows.margin.percentiles(), windows.inference.percentiles()
    jump_ratio = windows.jump_ratio.percentiles()
    values: dict[str, object] = {
        "lifecycle": facts.lifecycle_label,
        "safety": facts.safety.state.name.lower(),
        "epoch": facts.safety.epoch,
        "abort_cause": facts.safety.cause.name.lower(),
        "abort_text": facts.safety.text,
        "stop_cause": facts.stop_cause.name.lower(),
        "placement": facts.placement,
        "schedule": facts.schedule,
        "fallback": facts.fallback.value or "none",
        "fallback_text": facts.fallback_text,
        "handoffs": counters.handoffs,
        "margin_p50_ms": in_ms(margin.p50),
        "margin_p01_ms": in_ms(margin.p01),
        "margin_min_ms": in_ms(margin.min),
        "misses": counters.misses,
        "misses_in_a_row": counters.misses_in_a_row,
        "miss_rate_upper95": f"{miss_upper95(counters.misses, counters.handoffs):.4g}",
        "misses_cond": counters.misses_cond,
        "misses_exhaust": counters.misses_exhaust,
        "inference_p50_ms": in_ms(inference.p50),
        "inference_p99_ms": in_ms(inference.p99),
        "jump_ratio_p50": f"{jump_ratio.p50:.3g}",
        "jump_ratio_p99": f"{jump_ratio.p99:.3g}",
        "jerk_p99": f"{windows.jerk.percentiles().p99:.4g}",
        "frozen_error_p99": f"{windows.frozen_error.percentiles().p99:.3g}",
        "action_age_p99_ms": in_ms(windows.age.percentiles().p99),
        "tick_jitter_p99_ms": in_ms(facts.jitter.p99),
        "requests": counters.requests,
        "chunks_accepted": counters.accepted,
        "chunks_refused": counters.refused,
        "requests_failed": counters.failed,
        "last_refusal": counters.last_refusal_text,
        **{f"refused_{code.name.lower()}": n for code, n in zip(Refusal, counters.refusals, strict=True) if n},
        **facts.notes,
    }
    array = DiagnosticArray(status=[_status(f"{node_name}: policy", facts.robot_id, level, text, values)])
    for kind, streams in (("camera", facts.cameras), ("joints", facts.joints)):
        array.status += [_stream(f"{node_name}: {kind} {stream.name}", stream, facts) for stream in streams]
    array.header.stamp = stamp
    return array


def _stream(name: str, stream: StreamStats, facts: Facts) -> DiagnosticStatus:
    silent = facts.lifecycle_label == "active" and not stream.rate_hz > 0
    return _status(
        name,
        facts.robot_id,
        DiagnosticStatus.WARN if silent else DiagnosticStatus.OK,
        "no messages" if silent else "receiving",
        {"rate_hz": f"{stream.rate_hz:.1f}", "delivered": f"{stream.delivered:.4f}", **stream.dropped},
    )


def _level(facts: Facts) -> tuple[bytes, str]:
    if facts.safety.latched:
        return (
            DiagnosticStatus.ERROR,
            f"abort latched ({facts.safety.cause.name.lower()}): {facts.safety.text}",
        )
    if facts.faults:
        return DiagnosticStatus.ERROR, "; ".join(facts.faults)
    if facts.safety.may_play and facts.fallback is Fallback.SYNC:
        return DiagnosticStatus.WARN, facts.fallback_text
    if facts.safety.state is SafetyState.HOLDING:
        return (
            DiagnosticStatus.WARN,
            f"holding: {facts.counters.last_refusal_text or 'waiting for a chunk'}",
        )
    if facts.counters.misses:
        return (
            DiagnosticStatus.WARN,
            f"{facts.counters.misses} of {facts.counters.handoffs} handoffs missed",
        )
    return DiagnosticStatus.OK, facts.safety.state.name.lower()


def _status(name: str, hardware_id: str, level: bytes, text: str, values: Mapping[str, object]) -> DiagnosticStatus:
    pairs = [KeyValue(key=k, value=str(v)) for k, v in values.items()]
    return DiagnosticStatus(level=level, name=name, message=text, hardware_id=hardware_id, values=pairs)


def in_ms(seconds: float) -> str:
    """Seconds as milliseconds in words; "nan" when not finite."""
    return "nan" if not math.isfinite(seconds) else f"{seconds * 1e3:.2f}"
