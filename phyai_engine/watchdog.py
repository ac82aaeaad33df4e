"""What must not last too long while the robot may move. Pure: durations go in, a cause comes out.

Every limit ends in the one abort latch. The engine's heartbeat is the client's (serve/client.py) and comes as Lost;
the player node's own watchdog, the silence of its policy node, is in phyai_ros/player_node.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phyai_engine.types import AbortCause

TICK_GAP_PERIODS = 5
"""A tick is never called late below this many control periods: slow robots have a period near any limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogSettings:
    """Limits, each of which 0 switches off.

    :param tick_gap_s: time between two turns of the thread that ticks; at least TICK_GAP_PERIODS periods count.
    :param request_timeout_s: age of an unanswered request.
    :param observation_age_s: age of the observation that the playing chunk was computed from.
    :param player_timeout_s: silence of a player elsewhere after a chunk was handed to it.
    :param misses_max: handoffs missed in a row that are one too many.
    :param hold_max_s: holding without a new chunk.
    """

    tick_gap_s: float = 0.0
    request_timeout_s: float = 5.0
    observation_age_s: float = 0.0
    player_timeout_s: float = 0.0
    misses_max: int = 0
    hold_max_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """How long each watched thing has lasted, in seconds; 0 where there is nothing to watch.

    :param dt_s: control period. :param chunk_id: the unanswered request's. :param misses: in a row.
    """

    dt_s: float
    tick_gap_s: float = 0.0
    chunk_id: int = 0
    request_s: float = 0.0
    observation_age_s: float = 0.0
    player_silence_s: float = 0.0
    misses: int = 0
    hold_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Watchdogs:
    """Compares vitals with limits."""

    settings: WatchdogSettings

    def tick_limit_s(self, dt_s: float) -> float:
        """The gap between two turns from which on the tick is overrun; 0 = never."""
        limit = self.settings.tick_gap_s
        return max(limit, TICK_GAP_PERIODS * dt_s) if limit > 0 else 0.0

    def check(self, vitals: Vitals) -> tuple[AbortCause, str] | None:
        """The first limit that is passed, and the sentence why; None while all is well.

        A late tick comes first: while nothing ran, everything else grew old too.
        """
        return next(self._passed(vitals), None)

    def _passed(self, vitals: Vitals) -> Iterator[tuple[AbortCause, str]]:
        limits = self.settings
        if 0 < (gap := self.tick_limit_s(vitals.dt_s)) < vitals.tick_gap_s:
            yield AbortCause.TICK_OVERRUN, late_tick(vitals.tick_gap_s, gap)
        if 0 < (limit := limits.request_timeout_s) <= vitals.request_s:
            text = f"chunk {vitals.chunk_id} was not answered within {limit} s (request_timeout_s)"
            yield AbortCause.INFERENCE_DEADLINE, f"{text}; if the engine hangs, call ~/restart_engine"
        if 0 < (limit := limits.observation_age_s) < (age := vitals.observation_age_s):
            text = f"what plays was computed from an observation {age:.3f} s old"
            yield AbortCause.OBSERVATION_AGE, f"{text}, more than {limit} s (max_observation_age_s)"
        if 0 < (limit := limits.player_timeout_s) < (silence := vitals.player_silence_s):
            text = f"nothing was heard of what plays the chunks for {silence:.3f} s"
            yield AbortCause.PLAYER_LOST, f"{text}, more than {limit} s (player_timeout_s)"
        if 0 < limits.misses_max <= vitals.misses:
            text = f"{vitals.misses} handoffs in a row came after their deadline, or never (max_misses)"
            yield AbortCause.MISSES, f"{text}: inference is too slow for the horizon, or fails"
        if 0 < (limit := limits.hold_max_s) < vitals.hold_s:
            yield AbortCause.EXHAUSTED, f"held for more than {limit} s without a new chunk (max_hold_s)"


def late_tick(gap_s: float, limit_s: float) -> str:
    """The sentence of TICK_OVERRUN."""
    return f"no control tick for {gap_s:.3f} s, more than {limit_s:.3f} s (max_tick_gap_s): a callback blocked"
