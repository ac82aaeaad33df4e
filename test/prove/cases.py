"""What a fault to be proved is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stand import Stand
from std_srvs.srv import Trigger

from phyai_engine.types import AbortCause


@dataclass(frozen=True)
class Case:
    """One row.

    :param detected: the code that must be told; the cycle asserts it. :param bound_ms: no cycle may take longer, None
        where nothing is to stop. :param recovery: what a person does; every cycle does it and sees the robot move.
    :param notes: more to print, filled by the cycle. :param factor: so many times the usual number of cycles.
    :param run: one cycle; ms to the safe command, None when there is none to wait for.
    :param stand: makes what it runs on.
    """

    name: str
    detected: str
    bound_ms: float | None
    recovery: str
    notes: dict[str, str] = field(default_factory=dict)
    factor: int = 1
    run: Callable[[Stand], float | None] = field(kw_only=True)
    stand: Callable[[], Stand] = field(kw_only=True)


def aborted(stand: Stand) -> float:
    """Call ~/abort; ms until its stop is heard. Latched afterwards."""
    began = time.monotonic()
    future = stand.triggers["abort"].call_async(Trigger.Request())
    took = stand.safe(began, hold=False)
    stand.until(future.done, what="answer of ~/abort")
    stand.latched(AbortCause.SERVICE)
    return took
