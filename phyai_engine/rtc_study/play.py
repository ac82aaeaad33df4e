"""Closed loop of one cell of the study: one method at one delay, all episodes at once.

Chunk k is observed at one tick and played from a later one, its handoff; row 0 belongs to the tick of its observation
(as in phyai_engine/handoff.py). All episodes of a cell share the timeline; starts, action noise and the start noise of
chunk k are the same for every method and delay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from phyai_engine.rtc_study.sampling import CANDIDATES, Committed, Head, Method, draw
from phyai_engine.rtc_study.task import ACTIONS, HORIZON, Bools, Task, advance, at_goal, start, touches
from phyai_engine.types import F32, F64

MOVING_STEPS_MAX = 100  # an episode that has not reached the goal line by then has failed
ENSEMBLE_DECAY = 0.01  # per rank, the oldest chunk first and heaviest, as ACT has it


@dataclass(frozen=True, slots=True)
class Timeline:
    """When chunks are observed and handed off. The first one starts from rest: nothing plays, and it skips no row.

    :param delay: d, ticks from observation to handoff. :param stops: ``sync``: the robot stands still meanwhile.
    """

    delay: int
    stops: bool = False

    @property
    def execute(self) -> int:
        """s, rows of a chunk that were played when the next one is observed: as few as the delay allows."""
        return max(self.delay, 1)

    @property
    def ticks_max(self) -> int:
        return math.ceil(MOVING_STEPS_MAX * (self.execute + self.delay * self.stops) / self.execute)

    def observed(self, chunk: int) -> int:
        """Tick of the chunk's observation."""
        return chunk * self.execute + max(chunk - 1, 0) * self.delay * self.stops

    def handoff(self, chunk: int) -> int:
        """Tick that plays the first row of the chunk."""
        return 0 if chunk == 0 else self.observed(chunk) + self.delay

    def row(self, chunk: int, tick: int) -> int:
        """Row of the chunk at a tick. While the robot stands no row is consumed."""
        return tick - self.handoff(chunk) + (0 if self.stops or chunk == 0 else self.delay)


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What happened. n episodes, T ticks, K chunks; entries of an episode that has ended mean nothing.

    :param commands: [T, n, 2] m/s, zero while the robot stands. :param running: [T, n].
    :param chunks: [K, n, H, 2] m/s as drawn. :param touched, reached: [n]. :param ticks: [n] until it ended.
    """

    timeline: Timeline
    commands: F64
    running: Bools
    chunks: F64
    touched: Bools
    reached: Bools
    ticks: F64


class _Chance:
    """All that is drawn, apart from the method's choices: a pure function of the seed and what it is for."""

    def __init__(self, seed: int, episodes: int) -> None:
        self.seed, self.episodes = seed, episodes

    def of_start(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, 0])

    def of_tick(self, tick: int) -> F64:
        return np.random.default_rng([self.seed, 1, tick]).standard_normal((self.episodes, ACTIONS))

    def of_chunk(self, chunk: int, draws: int) -> F32:
        shape = (draws, self.episodes, HORIZON, ACTIONS)
        return np.random.default_rng([self.seed, 2, chunk]).standard_normal(shape, dtype=np.float32)


def play(head: Head, task: Task, method: Method, delay: int, *, episodes: int, seed: int) -> Played:
    """Run one cell. :param delay: d in control steps, 0..H/2."""
    if not 0 <= delay <= HORIZON // 2:
        raise ValueError(f"delay is {delay}, wanted 0..{HORIZON // 2}: d <= s <= H - d has no other")
    timeline = Timeline(delay, stops=method is Method.SYNC)
    chance = _Chance(seed, episodes)
    masses = start(task, episodes, chance.of_start())
    touched: Bools = np.zeros(episodes, bool)
    running, reached = ~touched, touched
    ticks = np.full(episodes, np.nan)
    chunks: list[F64] = []
    commands, ran = [], []
    playing = 0
    for tick in range(timeline.ticks_max):
        if tick == timeline.observed(len(chunks)):
            noise = chance.of_chunk(len(chunks), CANDIDATES if method is Method.BID else 1)
            chunks.append(_next(head, method, timeline, masses.position, noise, running, chunks))
        if playing + 1 < len(chunks) and tick == timeline.handoff(playing + 1):
            playing += 1
        command = _command(method, timeline, chunks[: playing + 1], tick)
        commands.append(command)
        ran.append(running)
        masses = advance(task, masses, command, chance.of_tick(tick))
        touched = touched | (running & touches(task, masses.position))
        reached = reached | (running & at_goal(task, masses.position))
        ended = running & (touched | reached)
        ticks[ended] = tick + 1
        running = running & ~ended
        if not running.any():
            break
    return Played(timeline, np.stack(commands), np.stack(ran), np.stack(chunks), touched, reached, ticks)


def _next(
    head: Head, method: Method, timeline: Timeline, position: F64, noise: F32, running: Bools, chunks: list[F64]
) -> F64:
    """[n, H, 2]: the next chunk of every episode that runs, zero for the others."""
    chunk = np.zeros((len(position), HORIZON, ACTIONS))
    committed = None
    if chunks:
        committed = Committed(chunks[-1][running, timeline.execute :], timeline.delay)
    chunk[running] = draw(head, method, position[running], noise[:, running], committed)
    return chunk


def _command(method: Method, timeline: Timeline, chunks: list[F64], tick: int) -> F64:
    """[n, 2] m/s. :param chunks: those that have arrived, the last of them is playing."""
    newest = len(chunks) - 1
    row = timeline.row(newest, tick)
    if timeline.stops and row >= timeline.execute:
        return np.zeros_like(chunks[newest][:, 0])
    if method is not Method.TEMPORAL_ENSEMBLE:
        return chunks[newest][:, row]
    rows = [(chunk, tick - timeline.observed(index)) for index, chunk in enumerate(chunks)]
    alive = np.stack([chunk[:, at] for chunk, at in rows if at < HORIZON])  # [live chunks, n, 2], the oldest first
    weight = np.exp(-ENSEMBLE_DECAY * np.arange(len(alive)))
    mean: F64 = np.tensordot(weight / weight.sum(), alive, axes=1)
    return mean
