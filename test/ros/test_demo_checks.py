"""What `make demo` claims: a story in which all of it holds, and for each claim one in which it does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phyai_engine.replay.record import Event, Joints, StepRow, TimingRow
from phyai_ros.demo_checks import Act, check

pytestmark = pytest.mark.ros
CHUNK, OLD_EPOCH, NEW_EPOCH = 20, 5, 6
ACTS = [Act("open", True, 3.0), Act("close", True, 2.5), Act("open", False, 15.0), Act("close", True, 4.0)]


def story() -> SimpleNamespace:
    """10 s of steps at 20 Hz: chunks of 20 rows, a camera lost from 3 to 4 s, an abort at 6 s, a re-arm at 7 s."""
    steps, timings = [], []
    chunk_id, row = 0, CHUNK
    for tick in range(200):
        t_s, epoch = tick * 0.05, OLD_EPOCH if tick < 140 else NEW_EPOCH
        kind = "hold" if 60 <= tick < 80 else "stop" if 120 <= tick < 140 or tick >= 195 else "action"
        if kind != "action":
            row = CHUNK
        elif row == CHUNK:
            chunk_id, row = chunk_id + 1, 0
            timings.append(TimingRow(t_s=t_s, outcome="accepted", epoch=epoch, chunk_id=chunk_id, m_exhaust_s=0.4))
        step = row if kind == "action" else 0
        steps.append(StepRow(t_s=t_s, kind=kind, values=(0.0,), tick=tick, epoch=epoch, chunk_id=chunk_id, step=step))
        row += kind == "action"
    events = [
        Event(2.99, "camera", "wrist off"), Event(4.0, "camera", "wrist on"), Event(5.99, "abort", "~/abort called"),
        Event(7.0, "rearm", "re-armed"),
    ]  # fmt: skip
    joints = Joints(names=("a",), t_s=(0.0, 1.0), positions=((0.0,), (0.3,)))
    return SimpleNamespace(
        steps=steps,
        timings=timings,
        events=events,
        sensors=SimpleNamespace(joints=lambda: joints),
        status=SimpleNamespace(refusals=[0, 0, 7]),
        aborted_epoch=OLD_EPOCH,
        abort_reply_s=0.004,
        model="pi05, a folder",
    )


def broken(watch: Any, acts: list[Act] = ACTS, codes: dict[str, int] | None = None, **given: Any) -> list[str]:
    """Names of the claims that do not hold."""
    found = check(watch, acts, {"a": 0, "b": 0} if codes is None else codes, given.get("torch", False), "")
    return [claim.name for claim in found if not claim.ok]


def test_a_whole_story_holds() -> None:
    assert broken(story()) == []
    assert broken(story(), acts=[]) == []  # a robot without tasks


def _step(index: int, **changes: Any) -> Callable[[Any], None]:
    def spoil(watch: Any) -> None:
        watch.steps[index] = msgspec.structs.replace(watch.steps[index], **changes)

    return spoil


def _drop(kind: str) -> Callable[[Any], None]:
    def spoil(watch: Any) -> None:
        watch.events = [event for event in watch.events if event.kind != kind]

    return spoil


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda watch: setattr(watch, name, value)


@pytest.mark.parametrize(
    ("spoil", "claim"),
    [
        (_step(10, tick=9), "at most one command in a control tick"),
        (_step(10, step=11), "no step was repeated or skipped"),
        (_step(130, kind="action", chunk_id=4, step=1), "after ~/abort nothing of the old epoch was played"),
        (_drop("abort"), "after ~/abort nothing of the old epoch was played"),
        (_drop("camera"), "a lost camera is refused, held, recovered"),
        (_set("status", SimpleNamespace(refusals=[0] * 3)), "a lost camera is refused, held, recovered"),
        (_drop("rearm"), "re-arm starts a new epoch with nothing committed"),
        (_step(199, kind="hold"), "the last command is a stop"),
        (_set("timings", []), "deadline margins were measured"),
        (_set("sensors", SimpleNamespace(joints=Joints)), "the robot moved"),
    ],
)
def test_each_claim_can_fail(spoil: Callable[[Any], None], claim: str) -> None:
    watch = story()
    spoil(watch)
    assert claim in broken(watch)


def test_half_of_the_instructions_must_be_carried_out() -> None:
    failed = [Act(act.instruction, False, act.seconds) for act in ACTS]
    assert broken(story(), failed) == ["instructions were carried out"]
    random = story()
    random.model = "pi05, seeded random weights"
    assert broken(random, failed) == []  # nothing is claimed of weights that were never trained


def test_torch_in_the_node_and_exit_codes_are_told() -> None:
    assert broken(story(), torch=True) == ["the policy node never loaded torch"]
    assert broken(story(), codes={"a": 0, "b": -9}) == ["both processes ended with exit code 0 after SIGINT"]
    cut = check(story(), ACTS, {"a": 0}, False, "no first action")  # type: ignore[arg-type]
    assert [claim.name for claim in cut if not claim.ok] == ["the story ran to its end"]
