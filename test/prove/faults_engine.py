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


def cases() -> Iterator[Case]:
    """Every fault of the engine."""
    lost, restart = "ABORT_ENGINE_LOST", "~/restart_engine, ~/rearm"
    silent_ms = (HEARTBEAT_S + BEAT_S) * 1e3

    def on(run: Callable[[Stand], float | None], node: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
        return {"run": run, "stand": partial(Stand, {**MODEL, **model}, {**NODE, **(node or {})})}

    yield Case("engine: SIGKILL", lost, AT_ONCE_MS, restart, **on(partial(signalled, signal.SIGKILL)))
    stop = partial(signalled, signal.SIGSTOP)
    yield Case(f"engine: SIGSTOP (heartbeat {HEARTBEAT_S} s)", lost, silent_ms, restart, **on(stop))
    third = partial(in_a_run, AbortCause.ENGINE_LOST)
    yield Case(
        f"engine holds its lock 1 s (heartbeat {HEARTBEAT_S} s)",
        lost,
        silent_ms + 20.0,
        restart,
        **on(third, gil_hold_s=1.0, grace_runs=GRACE),
    )
    yield Case(
        "engine holds its lock for ever",
        lost,
        silent_ms + 20.0,
        restart,
        **on(third, gil_hold_s=3000.0, grace_runs=GRACE),
    )
    slow = {"engine_heartbeat_s": 3.0, "max_misses": 0}
    held = {"gil_hold_s": 1.0, "horizon": 200, "grace_runs": 1}
    yield Case(
        "engine holds its lock 1 s in every run (heartbeat 3 s)",
        "nothing: goes on",
        None,
        "none needed",
        **on(goes_on, slow, **held),
    )
    yield Case("  ~/abort meanwhile", "ABORT_SERVICE", AT_ONCE_MS, "~/rearm", **on(abort_meanwhile, slow, **held))
    yield Case(
        "engine dies in a run",
        lost,
        AT_ONCE_MS + 20.0,
        restart,
        **on(third, crash_on_request=1, grace_runs=GRACE),
    )
    yield Case(
        f"inference hangs (request_timeout_s {TIMEOUT_S})",
        "ABORT_INFERENCE_DEADLINE",
        TIMEOUT_S * 1e3 + 60.0,
        restart,
        **on(
            partial(in_a_run, AbortCause.INFERENCE_DEADLINE),
            {"request_timeout_s": TIMEOUT_S},
            hang_on_request=1,
            grace_runs=GRACE,
        ),
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
        restart,
        **on(not_a_number, {"max_hold_s": 0.3}, nan_at=12, horizon=horizon, grace_runs=GRACE),
    )
    told: dict[str, str] = {}
    yield Case(
        "(no fault, for the next line) ~/abort",
        "ABORT_SERVICE",
        AT_ONCE_MS,
        "~/rearm",
        told,
        **on(partial(jitter, told=told, name="tick jitter p99")),
    )
    flood: dict[str, str] = {}
    yield Case(
        "log flood, 8 MB a run: ~/abort meanwhile",
        "nothing: goes on",
        AT_ONCE_MS,
        "none needed",
        flood,
        **on(partial(jitter, told=flood, name="tick jitter p99"), flood_log_mb=4, grace_runs=1),
    )
