"""What the control loop counts and measures between an activation and the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from phyai_engine.timing import Timing, Window
from phyai_engine.types import Refusal


@dataclass(slots=True)
class Counters:
    """Counts since activation."""

    requests: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    misses_cond: int = 0
    misses_exhaust: int = 0
    handoffs: int = 0  # with a deadline, also those that never came
    misses: int = 0  # handoffs after their deadline, or never
    misses_in_a_row: int = 0
    refusals: list[int] = field(default_factory=lambda: [0] * len(Refusal))
    last_refusal: Refusal = Refusal.NONE
    last_refusal_text: str = ""


class Windows:
    """The newest handoffs' figures. What was not measured at a handoff is not in its window.

    :param size: handoffs.
    """

    def __init__(self, size: int) -> None:
        self.margin = Window(size)  # m_ctrl_s
        self.inference = Window(size)  # l_inference_s
        self.jump_ratio = Window(size)
        self.jerk = Window(size)
        self.frozen_error = Window(size)
        self.age = Window(size)  # age_last_s

    def add(self, timing: Timing) -> None:
        """One accepted chunk."""
        self.margin.add(timing.m_ctrl_s)
        self.inference.add(timing.l_inference_s)
        self.jump_ratio.add(timing.jump_ratio)
        self.jerk.add(timing.jerk)
        self.frozen_error.add(timing.frozen_error)
        self.age.add(timing.age_last_s)
