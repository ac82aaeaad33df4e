"""Every state that the handoff/safety machine can reach within bounds, and planted defects that the search must find.

The bounds here are those of every day; ``make prove-search`` takes wider ones. What holds in every state is listed in
invariants.NAMES.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from explore import Event, Found, Frame, Search, Violation
from handoff_machine import explore
from invariants import NAMES
from mutations import MUTATIONS, QUICK, Mutation

from phyai_engine.types import SafetyState, Schedule

HAS_ROS = all(importlib.util.find_spec(name) for name in ("rclpy", "phyai_policy"))
ros = pytest.mark.skipif(not HAS_ROS, reason="the player node needs ROS 2: run `make test`")
SCHEDULES = {
    "sync": replace(QUICK, schedule=Schedule.SYNC, hold_ticks=4.5),
    "naive_async": replace(QUICK, schedule=Schedule.NAIVE_ASYNC),
    "rtc": QUICK,
}
MAILBOX = replace(QUICK, mailbox=True, prompt=True, without=QUICK.without | {"died", "garbage", "reconfigure"})
Tell = Callable[[str, Found], None]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Prints what a search saw, also when the test passes."""

    def show(title: str, found: Found) -> None:
        with capsys.disabled():
            print(f"\n  {title}: {found}", end=" ")

    return show


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_the_invariants_hold_in_every_state_whatever_the_engine_says(schedule: str, tell: Tell) -> None:
    found = explore(SCHEDULES[schedule])
    tell(schedule, found)
    assert found.violation is None, str(found)
    assert found.complete
    assert found.states > 1_000
    assert min(found.events.values()) > 100  # every kind of event did happen
    assert {"tick", "abort", "rearm", "flush", "deactivate", "activate", "answer", "fail", "lost"} <= set(found.events)
    assert set(SafetyState) - {SafetyState.UNKNOWN} <= found.seen
    assert {"accepted", "refused", "cancelled", "engine_error", "not_finite"} <= found.seen


def test_the_invariants_hold_in_every_state_behind_the_real_mailbox(tell: Tell) -> None:
    found = explore(MAILBOX)
    tell("mailbox", found)
    assert found.violation is None, str(found)
    assert found.complete
    assert {"deliver", "cancelled", "again"} <= set(found.events)
    assert {"accepted", "refused", "cancelled", "engine_error"} <= found.seen


def test_epochs_do_not_wrap_at_64_bits() -> None:
    """They are Python's integers: near 2**64 the machine is the same (a message cannot carry them, see parameters)."""
    small = replace(SCHEDULES["sync"], answers=("ok",))
    near, far = explore(small), explore(replace(small, first_epoch=2**64 - 3))
    assert far.violation is None, str(far)
    assert (near.states, near.transitions) == (far.states, far.transitions)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "_"))
def test_a_planted_defect_is_found(mutation: Mutation) -> None:
    assert mutation.breaks <= set(NAMES)
    with mutation.patch():
        found = explore(mutation.bounds, states_max=20_000)
    assert found.violation is not None, f"survived: {found}"
    assert found.violation.name in mutation.breaks, str(found)


@ros
def test_a_player_elsewhere_behind_a_bad_network_keeps_the_invariants(tell: Tell) -> None:
    from link import LINK, explore_link

    found = explore_link(LINK)
    tell("chunks", found)
    assert found.violation is None, str(found)
    assert found.complete
    assert {"stale", "wrong_epoch", "missing"} <= found.seen
    assert {"sever", "word", "chunk", "chunk_again", "robot_restart", "policy_restart"} <= set(found.events)


def test_every_invariant_is_broken_by_some_planted_defect() -> None:
    assert set(NAMES) - {"I6"} <= {name for mutation in MUTATIONS for name in mutation.breaks}  # I6: the player's


@ros
@pytest.mark.parametrize("name", ["deaf", "lonely", "credulous", "old_epoch", "again", "base"])
def test_a_planted_defect_of_the_player_elsewhere_is_found(name: str) -> None:
    from link import explore_link
    from link_mutations import LINK_MUTATIONS

    mutation = LINK_MUTATIONS[name]
    with mutation.patch():
        found = explore_link(mutation.bounds, states_max=20_000)
    assert found.violation is not None, f"survived: {found}"
    assert found.violation.name in mutation.breaks, str(found)


@ros
def test_news_of_an_earlier_re_arm_leaves_the_players_own_latch() -> None:
    """The policy node was aborted and re-armed; the player latches by itself; only then both statuses arrive."""
    from link import LINK, linked

    with linked(replace(LINK, calls=9)) as machine:
        late = [("activate",), ("abort", "late"), ("rearm", "late"), ("robot_abort",), ("word", 0), ("word", 1)]
        for event in late + [("tick", "here")] * 3:  # its own stop is finished first
            machine.apply(event)


class Toy:
    """Two counters of five, one of which skips the state 3 of the other when ``broken``."""

    def __init__(self, broken: bool) -> None:
        self.part = type("Part", (), {})()
        self.part.one, self.part.two, self._broken = 0, 0, broken

    @property
    def parts(self) -> list[Any]:
        return [self.part]

    def frames(self) -> list[Frame]:
        return [{"given": {}, "ids": [], "now_ns": 0}]

    def events(self) -> list[Event]:
        return [("one",), ("two",)]

    def apply(self, event: Event) -> None:
        setattr(self.part, event[0], (getattr(self.part, event[0]) + 1) % 5)
        if self._broken and (self.part.one, self.part.two) == (2, 3):
            raise Violation("state", "two and three")


def test_the_search_itself_visits_every_state_once_and_finds_the_shortest_way() -> None:
    found = Search(Toy(False), 1).run()
    assert (found.states, found.transitions, found.depth, found.complete) == (25, 50, 8, True)
    broken = Search(Toy(True), 1).run()
    assert broken.violation is not None
    assert len(broken.trace) == 5
    assert not broken.complete


def test_a_search_that_grows_without_end_says_so() -> None:
    found = explore(QUICK, states_max=10)
    assert not found.complete
    assert "NOT complete" in str(found)
