"""Epoch and latch."""

from __future__ import annotations

import pytest

from phyai_engine.safety import LatchedError, Safety
from phyai_engine.types import AbortCause, SafetyState


def test_abort_bumps_the_epoch_once_and_keeps_the_first_cause() -> None:
    safety = Safety(epoch=10).activate()
    aborted = safety.abort(AbortCause.SERVICE, "first")
    assert aborted.epoch == safety.epoch + 1 and aborted.state is SafetyState.STOPPING
    assert aborted.abort(AbortCause.SIGNAL, "second") == aborted
    assert aborted.stopped().state is SafetyState.LATCHED


def test_latch_survives_deactivate_and_only_rearm_clears_it() -> None:
    safety = Safety(epoch=10).activate().abort(AbortCause.SERVICE, "x").stopped().deactivate()
    assert safety.latched
    with pytest.raises(LatchedError, match="rearm"):
        safety.activate()
    rearmed = safety.rearm(active=False)
    assert not rearmed.latched and rearmed.epoch > safety.epoch
    assert rearmed.activate().state is SafetyState.ARMED


def test_abort_while_inactive_latches_without_a_stop() -> None:
    safety = Safety(epoch=1).abort(AbortCause.SERVICE, "x")
    assert safety.latched and safety.state is SafetyState.LATCHED and not safety.may_play


def test_epoch_grows_with_every_change_that_invalidates_chunks() -> None:
    safety, seen = Safety(epoch=5), [5]
    for change in (
        lambda s: s.activate(),
        lambda s: s.flush(),
        lambda s: s.abort(AbortCause.SERVICE, ""),
        lambda s: s.rearm(active=True),
        lambda s: s.stop(),
        lambda s: s.deactivate(),
    ):
        safety = change(safety)
        seen.append(safety.epoch)
    assert seen == sorted(set(seen))
