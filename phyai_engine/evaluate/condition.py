"""Under what the episodes are played: one condition per evaluation."""

from __future__ import annotations

import enum
import math
from typing import Annotated

from msgspec import Meta, Struct

from phyai_engine.errors import ConfigError
from phyai_engine.types import Schedule


class Fault(str, enum.Enum):
    """What is wired wrong on purpose: an evaluation that none of them lowers measures nothing (faults.py)."""

    NONE = "none"
    SWAPPED_CAMERAS = "swapped_cameras"
    PERMUTED_JOINTS = "permuted_joints"
    STALE_OBSERVATIONS = "stale_observations"
    WRONG_STATISTICS = "wrong_statistics"


def wired(name: str) -> Fault:
    """The fault of that name.

    :raises ConfigError: there is none.
    """
    known = [fault.value for fault in Fault]
    if name not in known:
        raise ConfigError("no such fault", got=name, wanted=f"one of {', '.join(known)}")
    return Fault(name)


class Condition(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that may change the result beside the checkpoint and the manifest.

    :param guidance: of ``rtc``, as a model file spells it; empty: the model's own.
    :param delay_ms: from observation to chunk, rounded up to whole control ticks.
    :param execution_horizon: s, 0 = half a chunk. :param clamp: values beyond the robot file's limits are clipped, as
        with the node's ``envelope: clamp``; else their chunk is refused.
    :param dtype: of the model's matrices, empty: the model's own.
    :param seconds_max: robot time after which an episode has failed.
    :param image_width: of the simulated cameras [px]; ``image_height`` likewise.
    """

    schedule: Schedule = Schedule.SYNC
    guidance: str = ""
    delay_ms: Annotated[float, Meta(ge=0)] = 0.0
    execution_horizon: Annotated[int, Meta(ge=0)] = 0
    clamp: bool = True
    dtype: str = ""
    fault: Fault = Fault.NONE
    seconds_max: Annotated[float, Meta(gt=0)] = 15.0
    image_width: Annotated[int, Meta(ge=1)] = 320
    image_height: Annotated[int, Meta(ge=1)] = 240

    def delay_ticks(self, dt_s: float) -> int:
        """Control ticks from the observation to its chunk. :param dt_s: control period."""
        return math.ceil(self.delay_ms * 1e-3 / dt_s - 1e-9)

    @property
    def way(self) -> str:
        """How chunks are handed off, in words: ``rtc trained``."""
        guidance = f" {self.guidance}" if self.guidance and self.schedule is Schedule.RTC else ""
        return f"{self.schedule.value}{guidance}"

    @property
    def title(self) -> str:
        """In words: ``rtc trained, 200 ms``."""
        fault = "" if self.fault is Fault.NONE else f", {self.fault.value.replace('_', ' ')}"
        return f"{self.way}, {self.delay_ms:.0f} ms{fault}"

    def check(self, horizon: int, dt_s: float) -> None:
        """What only the model knows.

        :raises ConfigError: no chunk could ever come in time.
        """
        if self.delay_ticks(dt_s) >= horizon:
            raise ConfigError(
                "the delay is longer than a chunk",
                got=f"{self.delay_ms:.0f} ms, {self.delay_ticks(dt_s)} steps",
                wanted=f"fewer than {horizon} steps of {dt_s * 1e3:.0f} ms",
            )
        if self.execution_horizon > horizon:
            raise ConfigError(
                "the execution horizon is longer than a chunk", got=self.execution_horizon, wanted=horizon
            )
