"""What another execution horizon or delay would have done with the latencies of a recorded run.

The product's own state machine (phyai_engine/handoff.py) runs on a clock of whole control ticks; each request takes the
next recorded latency, in the recorded order, so that bursts stay bursts. Nothing is drawn at random and no latency is
used twice: ``n`` never claims more than was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from phyai_engine.errors import ConfigError
from phyai_engine.handoff import Handoff, HandoffSettings, assumed_delay_steps
from phyai_engine.replay.record import Record
from phyai_engine.replay.summary import handoffs
from phyai_engine.types import F64, Chunk, Schedule, StageTimings

_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """What one run measured, a value per accepted chunk, in time order.

    :param wait_s: [n] snapshot -> accepted: transfer, queue, inference, actuate and what no stage covers.
    :param observe_s: [n] capture -> snapshot. :param inference_s: [n].
    """

    schedule: Schedule
    dt_s: float
    wait_s: F64
    observe_s: F64
    inference_s: F64

    @staticmethod
    def of(record: Record, where: object = None) -> Latencies:
        """The accepted chunks of a record whose critical path was measured.

        :raises ConfigError: there are none, or the schedule is not one of ours.
        """
        rows = [row for row in handoffs(record) if math.isfinite(row.l_critical_s) and math.isfinite(row.l_observe_s)]
        if not rows:
            raise ConfigError(
                "the run has no latencies",
                got=f"{len(record.timings)} answers, none of them accepted with a measured critical path",
                wanted="accepted chunks with L_observe and L_critical",
                where=where,
                do="Replay the bag in mode real-time.",
            )
        try:
            schedule = Schedule(record.schedule)
        except ValueError:
            known = ", ".join(s.value for s in Schedule)
            raise ConfigError("unknown schedule", got=record.schedule, wanted=f"one of {known}", where=where) from None
        observe = np.array([row.l_observe_s for row in rows])
        critical = np.array([row.l_critical_s for row in rows])
        return Latencies(
            schedule=schedule,
            dt_s=record.dt_s,
            wait_s=critical - observe,
            observe_s=observe,
            inference_s=np.array([row.l_inference_s for row in rows]),
        )

    @property
    def delay_steps(self) -> int:
        """Control ticks from capture to chunk that half of the requests took at most."""
        return math.ceil(float(np.median(self.observe_s + self.wait_s)) / self.dt_s - 1e-9)


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """One simulated run.

    :param margin_s: M_ctrl of each handoff that had a deadline.
    :param ticks: control ticks; ``played`` those with an action. :param requests: one per recorded latency.
    :param age_s: of the observation behind an action, at the last action of each chunk.
    :param busy: share of the time in which the engine computes, NaN if inference was not measured.
    """

    margin_s: F64
    ticks: int
    played: int
    requests: int
    age_s: F64
    busy: float

    @property
    def misses(self) -> int:
        """Handoffs after their deadline."""
        return int((self.margin_s < 0).sum())

    @property
    def played_fraction(self) -> float:
        """Share of the ticks with an action."""
        return self.played / self.ticks if self.ticks else math.nan


def simulate(latencies: Latencies, *, horizon: int, execution_steps: int, delay_steps: int | None = None) -> Simulated:
    """Play chunks until every recorded latency was used once.

    :param delay_steps: d that each request is conditioned on; None: predicted as the node does, from the delays before.
    :raises ConfigError: the horizon or the steps are out of range.
    """
    if delay_steps is not None and not 0 <= delay_steps <= horizon:
        raise ConfigError("the delay is out of range", got=delay_steps, wanted=f"0..{horizon} steps (the horizon)")
    inference_s = latencies.inference_s[np.isfinite(latencies.inference_s)]
    assumed = (
        assumed_delay_steps((inference_s * 1e3).tolist(), horizon, latencies.dt_s) if len(inference_s) else horizon // 2
    )
    settings = HandoffSettings(
        schedule=latencies.schedule,
        horizon=horizon,
        execution_steps=execution_steps,
        dt_s=latencies.dt_s,
        delay_init_steps=assumed,
    )
    return _Run(latencies, settings, delay_steps).run()


class _Run:
    """The loop of one simulation: arrivals between ticks, then a request if one is due, then one row."""

    def __init__(self, latencies: Latencies, settings: HandoffSettings, delay_steps: int | None) -> None:
        self._latencies, self._settings, self._delay = latencies, settings, delay_steps
        self._handoff = Handoff(settings)
        self._rows: F64 = np.zeros((settings.horizon, 1))
        self._arrival_ns = 0
        self._margins: list[float] = []
        self._ages: list[float] = []
        self._observed_s = math.nan  # capture of the observation that the playing chunk was computed from

    def run(self) -> Simulated:
        dt_ns = round(self._settings.dt_s * _NS)
        used = tick = played = 0
        while used < len(self._latencies.wait_s) or self._handoff.in_flight is not None:
            now_ns = tick * dt_ns
            if self._handoff.in_flight is not None and self._arrival_ns <= now_ns:
                self._arrive(used - 1, now_ns)
            self._fix_delay()
            if used < len(self._latencies.wait_s) and self._handoff.due:
                self._handoff = self._handoff.begin(used + 1, 1, now_ns)
                self._arrival_ns = now_ns + round(float(self._latencies.wait_s[used]) * _NS)
                used += 1
            played += self._handoff.remaining_steps > 0
            self._handoff = self._handoff.advance()
            tick += 1
        inference_s = float(self._latencies.inference_s.sum())
        return Simulated(
            margin_s=np.array(self._margins),
            ticks=tick,
            played=played,
            requests=used,
            age_s=np.array(self._ages),
            busy=inference_s / (tick * self._settings.dt_s) if tick else math.nan,
        )

    def _fix_delay(self) -> None:
        if self._delay is not None:
            self._handoff = replace(self._handoff, delays=(self._delay,))

    def _arrive(self, index: int, now_ns: int) -> None:
        flight = self._handoff.in_flight
        assert flight is not None  # the caller looked
        chunk = Chunk(epoch=1, chunk_id=flight.chunk_id, actions=self._rows, timings=StageTimings())
        timed = flight.remaining_steps > 0 and self._settings.schedule is not Schedule.SYNC
        # Never refused: fewer than H rows are left at a request, so not all of the new chunk's can be past.
        after, facts = self._handoff.accept(chunk, self._arrival_ns)
        if timed:  # M_ctrl as the control loop has it: the binding one of the two deadlines
            self._margins.append(facts.m_exhaust_s if flight.committed is None else facts.m_cond_s)
        if not math.isnan(self._observed_s):
            self._ages.append(now_ns / _NS - self._observed_s)
        self._observed_s = flight.snapshot_mono_ns / _NS - float(self._latencies.observe_s[index])
        self._handoff = after
