"""What one episode was: a line of ``episodes.jsonl``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from phyai_engine.config import RobotConfig
from phyai_engine.control.seam import ORDER
from phyai_engine.evaluate.manifest import Episode
from phyai_engine.timing import Timing
from phyai_engine.types import F64, ActionType, Refusal


@dataclass(frozen=True, slots=True)
class Tally:
    """What was counted during an episode; see :class:`EpisodeRecord`. :param refusals: count per Refusal code."""

    requests: int
    failed: int
    refusals: Sequence[int]
    handoffs: int
    misses: int


class EpisodeRecord(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One episode. None where a figure does not exist.

    :param number: position in the manifest, whose fields of the episode follow.
    :param ticks: control ticks until it ended; ``held`` those without an action of a chunk.
    :param refusals: of observations and chunks, by code. :param failed: requests without an answer.
    :param handoffs: with a deadline; ``misses`` those after it.
    :param delay_steps: d', first row played of each chunk that followed another.
    :param jump_ratios: of each handoff (control/seam.py). :param frozen_error: mean over the guided handoffs
        [units of the actions].
    :param jerk: mean over the ticks of the largest |jerk| of the moving actions [units / s^3].
    :param fallbacks: chunks by what the schedule did instead.
    :param aborted: cause and text of an abort, which ends an episode; empty without.
    :param commands: SHA-256 over all commands: equal where two runs commanded the same bytes.
    :param margins_s: M_ctrl of each handoff; in real time only: a virtual clock has none to tell.
    """

    number: int
    task: str
    instruction: str
    scene_seed: int
    noise_seed: int
    success: bool
    ticks: int
    held: int
    requests: int
    accepted: int
    failed: int
    refusals: Mapping[str, int]
    handoffs: int
    misses: int
    delay_steps: Sequence[int]
    jump_ratios: Sequence[float]
    frozen_error: float | None
    jerk: float | None
    fallbacks: Mapping[str, int]
    aborted: str
    commands: str
    wall_s: float
    margins_s: Sequence[float] = ()

    @staticmethod
    def of(
        number: int,
        episode: Episode,
        robot: RobotConfig,
        *,
        success: bool,
        ticks: int,
        actions: int,
        values: F64,
        timings: Sequence[Timing],
        tally: Tally,
        aborted: str,
        wall_s: float,
        margins: bool = False,
    ) -> EpisodeRecord:
        """From what the control loop reported.

        :param actions: ticks that played an action of a chunk. :param values: [T, A] every command in order.
        :param margins: they were measured.
        """
        accepted = [t for t in timings if t.outcome == "accepted"]
        moving = [t for t in accepted if np.isfinite(t.jump_ratio)]
        frozen = [t.frozen_error for t in accepted if np.isfinite(t.frozen_error)]
        return EpisodeRecord(
            number=number,
            task=episode.task,
            instruction=episode.instruction,
            scene_seed=episode.scene_seed,
            noise_seed=episode.noise_seed,
            success=success,
            ticks=ticks,
            held=max(0, ticks - actions),
            requests=tally.requests,
            accepted=len(accepted),
            failed=tally.failed,
            refusals={Refusal(code).name.lower(): n for code, n in enumerate(tally.refusals) if n},
            handoffs=tally.handoffs,
            misses=tally.misses,
            delay_steps=[t.delay_steps for t in moving],
            jump_ratios=[round(t.jump_ratio, 4) for t in moving],
            frozen_error=float(np.mean(frozen)) if frozen else None,
            jerk=mean_jerk(values, robot),
            fallbacks=dict(Counter(t.fallback for t in accepted if t.fallback)),
            aborted=aborted,
            commands=hashlib.sha256(values.tobytes()).hexdigest(),
            wall_s=round(wall_s, 3),
            margins_s=[round(t.m_ctrl_s, 6) for t in accepted if np.isfinite(t.m_ctrl_s)] if margins else [],
        )


def mean_jerk(values: F64, robot: RobotConfig) -> float | None:
    """[units / s^3] (of a velocity per s^2), of actions that move; held values such as a gripper's are left out.

    :param values: [T, A] every command in order. :returns: None for too few.
    """
    moving = values[:, [not action.absolute for action in robot.actions]]
    order = ORDER[robot.kind]
    if len(moving) <= order or not moving.shape[1]:
        return None
    per_s = 1 if robot.kind is ActionType.CARTESIAN_DELTA else 0  # a delta is a difference already
    return float(np.abs(np.diff(moving, n=order, axis=0)).max(axis=1).mean()) / robot.dt_s ** (order + per_s)
