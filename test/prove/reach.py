"""Worst-case reach against a dense simulation: what must be refused, and what must be accepted.

Random chunks: per joint a random walk of the speed within velocity_max, moved so that its extreme row stands a drawn
gap (1e-7 rad to the whole range, log-uniform) before a limit. From every row that may be played the real StopPlanner,
its clip at the limits taken away, plans a stop; a violation is any of its rows beyond a limit.
Demonstrations: minimum-jerk motions between two drawn poses within the limits (one in four ends on a limit), slow
enough that no joint exceeds velocity_max or acceleration_max anywhere, at rest before and after; a chunk is a window.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np

from phyai_engine.config import ActionEntry, RobotConfig, StateEntry
from phyai_engine.envelope import Envelope
from phyai_engine.errors import RefusalError
from phyai_engine.reach import Reach
from phyai_engine.stop import StopPlanner, row_rates
from phyai_engine.types import F64

JOINTS, HORIZON = 3, 30
TOUCH = 4e-9  # rad: a stop point that is the limit but for rounding is inside, as the check has it
RNG = np.random.Generator


@dataclass
class Counts:
    """What was seen; chunks."""

    random: int = 0
    violations: int = 0
    missed: int = 0
    refused_without: int = 0  # random chunks without a violation that were refused
    demonstrations: int = 0
    demonstrations_refused: int = 0


def robot(jerk_max: float | None = None) -> RobotConfig:
    """Three joints; with a jerk limit, one that binds."""
    names = [f"j{i}" for i in range(JOINTS)]
    rates = zip(names, (1.0, 2.0, 2.6), (3.0, 7.5, 20.0), strict=True)
    return RobotConfig(
        robot_id="reach",
        action_type="joint_position",
        dt_s=0.02,
        state=tuple(StateEntry(name=n) for n in names),
        actions=tuple(
            ActionEntry(name=n, state=n, lower=-1.5, upper=2.0, velocity_max=v, acceleration_max=a, jerk_max=jerk_max)
            for n, v, a in rates
        ),
    )


def random_chunk(rng: RNG, planner: StopPlanner) -> F64:
    """[HORIZON, JOINTS] a chunk within the position and velocity limits, near one of them as often as not."""
    low, high, v_max = planner.lower, planner.upper, planner.velocity_max
    rough = 10.0 ** rng.uniform(-2.0, 0.0, JOINTS)
    walk = rng.uniform(-1.0, 1.0, JOINTS) + np.cumsum(rough * rng.normal(size=(HORIZON - 1, JOINTS)), axis=0)
    way = np.vstack([np.zeros(JOINTS), np.cumsum(np.clip(walk, -1.0, 1.0) * v_max * planner.dt_s, axis=0)])
    room = high - low - np.ptp(way, axis=0)
    gap = np.minimum(room, 10.0 ** rng.uniform(-7.0, np.log10(3.5), JOINTS))
    at_top = high - gap - way.max(axis=0)
    at_bottom = low + gap - way.min(axis=0)
    chunk: F64 = way + np.where(rng.random(JOINTS) < 0.5, at_top, at_bottom)
    return np.clip(chunk, low, high)  # rounding


def demonstration(rng: RNG, planner: StopPlanner) -> F64:
    """[HORIZON, JOINTS] a window of a minimum-jerk motion that keeps every limit of the robot."""
    low, high = planner.lower, planner.upper
    start, end = rng.uniform(low, high), rng.uniform(low, high)
    end = np.where(rng.random(JOINTS) < 0.25, np.where(end > start, high, low), end)
    way = np.abs(end - start)
    needed = max((1.875 * way / planner.velocity_max).max(), np.sqrt(5.7736 * way / planner.acceleration_max).max())
    steps = int(np.ceil(needed * 10.0 ** rng.uniform(0.0, 0.5) / planner.dt_s)) + 1
    t = np.clip(np.arange(-HORIZON, steps + HORIZON) / steps, 0.0, 1.0)[:, None]
    motion = start + t**3 * (10.0 - 15.0 * t + 6.0 * t**2) * (end - start)
    at = rng.integers(0, len(motion) - HORIZON + 1)
    window: F64 = np.clip(motion[at : at + HORIZON], low, high)  # rounding
    return window


def violates(planner: StopPlanner, chunk: F64, first_row: int, before: F64 | None) -> bool:
    """True when a stop from some row would leave the limits."""
    endless = np.full(JOINTS, np.inf)
    free = replace(planner, lower=-endless, upper=endless)
    rates = row_rates(chunk, first_row, before, planner.dt_s)
    for row in range(first_row, len(chunk)):
        seam = row == first_row
        change = np.zeros(JOINTS) if seam else (rates[row] - rates[row - 1]) / planner.dt_s
        rows = free.plan(chunk[row], rates[row], change).values
        if ((rows < planner.lower - TOUCH) | (rows > planner.upper + TOUCH)).any():
            return True
    return False


def refused(reach: Reach, chunk: F64, first_row: int, before: F64 | None) -> bool:
    """What the check says."""
    try:
        reach.check(chunk, first_row=first_row, last_command=before)
    except RefusalError:
        return True
    return False


def count(n_random: int, n_demonstrations: int, *, jerk_max: float | None = None, seed: int = 0) -> Counts:
    """Draw, simulate, compare."""
    made = robot(jerk_max)
    planner = StopPlanner.of(made)
    reach, envelope = Reach.of(made, planner), Envelope.of(made)
    rng, seen = np.random.Generator(np.random.Philox(seed)), Counts()
    for _ in range(n_random):
        chunk, first_row = random_chunk(rng, planner), int(rng.integers(0, HORIZON))
        before = None if rng.random() < 0.2 else chunk[first_row] + rng.normal(size=JOINTS) * 0.01
        envelope.check(chunk, first_row=first_row, last_command=None, measured=None)  # all else is in order
        says = refused(reach, chunk, first_row, before)
        seen.random += 1
        if violates(planner, chunk, first_row, before):
            seen.violations += 1
            seen.missed += not says
        else:
            seen.refused_without += says
    for _ in range(n_demonstrations):
        chunk = demonstration(rng, planner)
        envelope.check(chunk, first_row=0, last_command=None, measured=None)
        seen.demonstrations += 1
        seen.demonstrations_refused += refused(reach, chunk, 0, chunk[0])
    return seen


def time_us(rows: int = 50, joints: int = 14, repeats: int = 200) -> float:
    """Median time of one check."""
    names = [f"j{i}" for i in range(joints)]
    limits = {"lower": -3.0, "upper": 3.0, "velocity_max": 2.0, "acceleration_max": 5.0, "jerk_max": 50.0}
    made = RobotConfig(
        robot_id="reach",
        action_type="joint_position",
        dt_s=0.02,
        state=tuple(StateEntry(name=n) for n in names),
        actions=tuple(ActionEntry(name=n, state=n, **limits) for n in names),
    )
    reach = Reach.of(made, StopPlanner.of(made))
    chunk = np.cumsum(np.full((rows, joints), 0.02), axis=0)
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        reach.check(chunk, first_row=0, last_command=chunk[0])
        took.append(time.perf_counter() - began)
    return float(np.median(took) * 1e6)


def main() -> int:
    from evidence import conclude, options

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20000)
    chosen = options(parser)
    rows: list[tuple[str, str, bool | None]] = []
    for jerk_max, text in ((None, "no jerk limit"), (60.0, "jerk_max 60 rad/s^3, which binds")):
        c = count(chosen.count, chosen.count, jerk_max=jerk_max)
        ok = c.random - c.violations
        rows += [
            (
                f"{text}: random chunks with a violation, refused",
                f"{c.violations - c.missed} of {c.violations}",
                c.missed == 0 and c.violations > c.random / 10,
            ),
            (f"{text}: random chunks without one, refused", f"{c.refused_without} of {ok}", None),
            (
                f"{text}: demonstrations refused",
                f"{c.demonstrations_refused} of {c.demonstrations}",
                c.demonstrations_refused <= 0.01 * c.demonstrations,
            ),
        ]
    rows.append(("one check of 50 x 14, median", f"{(us := time_us()):.0f} us", us < 200.0))
    return conclude("worst-case reach", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
