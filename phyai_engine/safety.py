"""Epoch and abort latch. Pure: no clock, no ROS."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phyai_engine.errors import PhyaiError
from phyai_engine.types import AbortCause, SafetyState


class LatchedError(PhyaiError):
    """The abort latch is set; only re-arm clears it."""


@dataclass(frozen=True, slots=True)
class Safety:
    """Epoch and latch. The epoch only grows; nothing of an older epoch is ever played.

    :param epoch: starts at boot wall-clock ns, so that a restarted node cannot reuse a number.
    """

    epoch: int
    state: SafetyState = SafetyState.IDLE
    cause: AbortCause = AbortCause.NONE
    text: str = ""

    @property
    def latched(self) -> bool:
        """True from an abort until :meth:`rearm`."""
        return self.cause is not AbortCause.NONE

    @property
    def may_play(self) -> bool:
        """True when a row of the current epoch may be commanded."""
        return self.state in (
            SafetyState.ARMED,
            SafetyState.RUNNING,
            SafetyState.HOLDING,
        )

    def activate(self) -> Safety:
        """IDLE -> ARMED in a new epoch.

        :raises LatchedError: the latch is set.
        """
        if self.latched:
            raise LatchedError(
                f"the abort latch is set by {self.cause.name.lower()}",
                got=self.text or None,
                do="Call ~/rearm first.",
            )
        return replace(self, epoch=self.epoch + 1, state=SafetyState.ARMED)

    def abort(self, cause: AbortCause, text: str) -> Safety:
        """Set the latch and bump the epoch. The first cause is kept; a second abort changes nothing."""
        if self.latched:
            return self
        active = self.state is not SafetyState.IDLE
        state = SafetyState.STOPPING if active else SafetyState.LATCHED
        return replace(self, epoch=self.epoch + 1, state=state, cause=cause, text=text)

    def stop(self) -> Safety:
        """A controlled stop without latch (deactivation), in a new epoch."""
        return replace(self, epoch=self.epoch + 1, state=SafetyState.STOPPING) if self.may_play else self

    def stopped(self) -> Safety:
        """The stop sequence has been published."""
        if self.state is not SafetyState.STOPPING:
            return self
        return replace(self, state=SafetyState.LATCHED if self.latched else SafetyState.IDLE)

    def rearm(self, *, active: bool) -> Safety:
        """Clear the latch in a new epoch. The caller has checked that the cause is gone and observations are fresh."""
        state = SafetyState.ARMED if active else SafetyState.IDLE
        return replace(self, epoch=self.epoch + 1, state=state, cause=AbortCause.NONE, text="")

    def deactivate(self) -> Safety:
        """-> IDLE in a new epoch; a set latch stays set."""
        return replace(self, epoch=self.epoch + 1, state=SafetyState.IDLE)

    def flush(self) -> Safety:
        """A new epoch: what was computed for the old instruction or timeline is never played."""
        state = SafetyState.ARMED if self.may_play else self.state
        return replace(self, epoch=self.epoch + 1, state=state)

    def playing(self, rows_left: bool) -> Safety:
        """ARMED/HOLDING -> RUNNING when a row is played, RUNNING -> HOLDING when none is left."""
        if not self.may_play:
            return self
        if rows_left:
            state = SafetyState.RUNNING
        else:
            state = SafetyState.ARMED if self.state is SafetyState.ARMED else SafetyState.HOLDING
        return replace(self, state=state)
