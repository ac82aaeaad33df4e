"""Faults of the engine process under a real policy node. A cycle starts and ends with a robot that moves."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cases import Case, aborted
from phyai_policy.msg import ChunkTiming
from stand import Stand, end_hard

from phyai_engine.types import AbortCause, CommandKind, Refusal

HEARTBEAT_S, BEAT_S = 0.5, 0.15  # the parameter; how much later at most its end is seen
TIMEOUT_S = 0.6
DUE = 10  # the row at which the next request is made
AT_ONCE_MS = 30.0
GRACE = 1 + 2  # runs: the warm-up and two chunks
MODEL = {"latency_ms": 20.0, "horizon": 50}
LOST, RESTART = "ABORT_ENGINE_LOST", "~/restart_engine, ~/rearm"
NODE = {"execution_horizon": DUE, "engine_heartbeat_s": HEARTBEAT_S}


def signalled(number: int, stand: Stand) -> float:
    """The engine gets a signal while it is idle or computes, by chance."""
    stand.spin(random.uniform(0.0, 0.2))
    began = end_hard(stand.engine_pid, number)
    took = stand.safe(began, hold=False)
    stand.latched(AbortCause.ENGINE_LOST)
    stand.resume(engine=True)
    return took


def in_a_run(cause: AbortCause, stand: Stand) -> float:
    """The engine goes wrong in the third run; counts from its request."""
    stand.latched(cause)
    began = stand.requested_at(DUE)
    took = stand.safe(began, hold=False)
    stand.resume(engine=True)
    return took


def out_of_memory(stand: Stand) -> float:
    """A run that finds no memory fails; the next one comes; the robot goes on."""
    stand.until(lambda: _outcomes(stand, ChunkTiming.OUTCOME_ENGINE_ERROR), what="engine_error")
    began, told = stand.requested_at(DUE), _outcomes(stand, ChunkTiming.OUTCOME_ENGINE_ERROR)[-1]
    assert "MemoryError" in told[1].text, told[1].text
    stand.until(lambda: stand.timings[-1][1].outcome == ChunkTiming.OUTCOME_ACCEPTED, what="the next chunk")
    assert not stand.kinds(CommandKind.STOP, began), "an engine that goes on stopped the robot"
    aborted(stand)
    stand.timings.clear()
    stand.resume(engine=True)
    return (told[0] - began) * 1e3


def goes_on(stand: Stand) -> None:
    """One more chunk comes, and nothing was stopped or held meanwhile."""
    began, count = time.monotonic(), len(stand.timings)
    stand.until(lambda: len(stand.timings) > count, 5.0, "a chunk")
    stopped = stand.kinds(CommandKind.STOP, began) + stand.kinds(CommandKind.HOLD, began)
    assert not stopped, "it was to go on"
    del stand.timings[:-20], stand.heard[:-400], stand.statuses[:-50]


def abort_meanwhile(stand: Stand) -> float:
    """~/abort at any time of what the engine does."""
    stand.spin(random.uniform(0.05, 0.9))
    took = aborted(stand)
    stand.resume()
    return took


def not_a_number(stand: Stand) -> float:
    """NaN in the middle of every chunk from the third on: each is refused whole, the robot holds, then latches."""
    stand.until(lambda: _outcomes(stand, ChunkTiming.OUTCOME_REFUSED), what="a refusal")
    began, told = _outcomes(stand, ChunkTiming.OUTCOME_REFUSED)[0]
    assert told.refusal == Refusal.NOT_FINITE, told.text
    took = stand.safe(began)
    stand.latched(AbortCause.EXHAUSTED)
    stand.timings.clear()
    stand.resume(engine=True)
    return took


def _outcomes(stand: Stand, outcome: int) -> list[tuple[float, ChunkTiming]]:
    return [(at, m) for at, m in stand.timings if m.outcome == outcome]


def jitter(stand: Stand, told: dict[str, str], name: str) -> float:
    """An abort, and what the node says of its tick before."""
    stand.spin(0.3)
    told[name] = f"{stand.status.tick_jitter_p99_s * 1e3:.1f} ms"
    return abort_meanwhile(stand)


def on(run: Callable[[Stand], float | None], node: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """What a case runs, and on which stand."""
    return {"run": run, "stand": partial(Stand, {**MODEL, **model}, {**NODE, **(node or {})})}


def cases() -> Iterator[Case]:
    """Every fault of the engine."""
    yield from lost()
    yield from held()
    yield from wrong()
    yield from flooded()


def lost() -> Iterator[Case]:
    """It ends, or stands still."""
    silent_ms = (HEARTBEAT_S + BEAT_S) * 1e3
    yield Case("engine: SIGKILL", LOST, AT_ONCE_MS, RESTART, **on(partial(signalled, signal.SIGKILL)))
    stop = partial(signalled, signal.SIGSTOP)
    yield Case(f"engine: SIGSTOP (heartbeat {HEARTBEAT_S} s)", LOST, silent_ms, RESTART, **on(stop))
    third = partial(in_a_run, AbortCause.ENGINE_LOST)
    for words, seconds in ((f"1 s (heartbeat {HEARTBEAT_S} s)", 1.0), ("for ever", 3000.0)):
        yield Case(
            f"engine holds its lock {words}",
            LOST,
            silent_ms + 20.0,
            RESTART,
            **on(third, gil_hold_s=seconds, grace_runs=GRACE),
        )


def held() -> Iterator[Case]:
    """It holds its lock for less than the heartbeat's limit."""
    slow = {"engine_heartbeat_s": 3.0, "max_misses": 0}
    model = {"gil_hold_s": 1.0, "horizon": 200, "grace_runs": 1}
    yield Case(
        "engine holds its lock 1 s in every run (heartbeat 3 s)",
        "nothing: goes on",
        None,
        "none needed",
        **on(goes_on, slow, **model),
    )
    yield Case("  ~/abort meanwhile", "ABORT_SERVICE", AT_ONCE_MS, "~/rearm", **on(abort_meanwhile, slow, **model))


def wrong() -> Iterator[Case]:
    """A run goes wrong."""
    yield Case(
        "engine dies in a run",
        LOST,
        AT_ONCE_MS + 20.0,
        RESTART,
        **on(partial(in_a_run, AbortCause.ENGINE_LOST), crash_on_request=1, grace_runs=GRACE),
    )
    hangs = partial(in_a_run, AbortCause.INFERENCE_DEADLINE)
    yield Case(
        f"inference hangs (request_timeout_s {TIMEOUT_S})",
        "ABORT_INFERENCE_DEADLINE",
        TIMEOUT_S * 1e3 + 60.0,
        RESTART,
        **on(hangs, {"request_timeout_s": TIMEOUT_S}, hang_on_request=1, grace_runs=GRACE),
    )
    yield Case(
        "engine out of memory (RLIMIT_AS)",
        "ChunkTiming engine_error: goes on; time until told",
        None,
        "none needed",
        **on(out_of_memory, oom_on_request=1, grace_runs=GRACE),
    )
    horizon = 24
    yield Case(
        f"NaN mid-chunk from the engine (H {horizon}, max_hold_s 0.3)",
        "REFUSAL_NOT_FINITE; ABORT_EXHAUSTED",
        horizon * 20.0 + 30.0,
        RESTART,
        **on(not_a_number, {"max_hold_s": 0.3}, nan_at=12, horizon=horizon, grace_runs=GRACE),
    )


def flooded() -> Iterator[Case]:
    """It writes to its log without end; what the tick loses by that, beside one without a fault."""
    for name, detected, recovery, model in (
        ("(no fault, for the next line) ~/abort", "ABORT_SERVICE", "~/rearm", {}),
        (
            "log flood, 8 MB a run: ~/abort meanwhile",
            "nothing: goes on",
            "none needed",
            {"flood_log_mb": 4, "grace_runs": 1},
        ),
    ):
        told: dict[str, str] = {}
        run = partial(jitter, told=told, name="tick jitter p99")
        yield Case(name, detected, AT_ONCE_MS, recovery, told, **on(run, **model))
