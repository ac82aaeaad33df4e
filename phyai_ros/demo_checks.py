"""What the demo claims, checked from what was heard on the wire."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from phyai_engine.replay.record import Invariant, StepRow, TimingRow
from phyai_ros.watch import Watch


@dataclass(frozen=True, slots=True)
class Act:
    """One instruction, whether it was carried out, and after how many seconds (or when it was given up)."""

    instruction: str
    solved: bool
    seconds: float

    def __str__(self) -> str:
        return f"{self.instruction} {f'{self.seconds:.1f} s' if self.solved else 'NOT'}"


def check(
    watch: Watch, acts: list[Act], exit_codes: dict[str, int], torch_in_node: bool, error: str
) -> list[Invariant]:
    """Every claim with what was seen. A run that was cut short fails the first one."""
    steps, timings = watch.steps, watch.timings
    played = [s for s in steps if s.kind == "action"]
    accepted = [t for t in timings if t.outcome == "accepted"]
    return [
        Invariant(
            "the story ran to its end", not error, error or "instructions by topic, dropout, abort, re-arm, stop"
        ),
        Invariant(
            "the policy drove the robot",
            len(played) > 100 and len(accepted) > 5,
            f"{len(played)} actions from {len(accepted)} chunks",
        ),
        _moved(watch),
        *_carried_out(watch, acts),
        _once_per_tick(steps),
        _contiguous(played, accepted),
        _margins(accepted),
        _dropout(watch),
        _abort(watch),
        _rearm(watch, accepted),
        Invariant(
            "the last command is a stop",
            bool(steps) and steps[-1].kind == "stop",
            steps[-1].kind if steps else "no commands",
        ),
        Invariant("the policy node never loaded torch", not torch_in_node, "its process maps no libtorch"),
        Invariant(
            "both processes ended with exit code 0 after SIGINT",
            bool(exit_codes) and not any(exit_codes.values()),
            ", ".join(f"{name} {code}" for name, code in exit_codes.items()),
        ),
    ]


def _moved(watch: Watch) -> Invariant:
    rows = np.array(watch.sensors.joints().positions)
    span = float(np.ptp(rows, axis=0).max()) if len(rows) else 0.0
    return Invariant("the robot moved", span > 0.01, f"largest joint travel {span:.3f} rad or m")


def _carried_out(watch: Watch, acts: list[Act]) -> list[Invariant]:
    """Half of them at least, since no policy is perfect; nothing is claimed for weights that were never trained."""
    solved = sum(act.solved for act in acts)
    text = f"{solved} of {len(acts)} solved: {', '.join(map(str, acts))}"
    trained = "random weights" not in watch.model and "no weights" not in watch.model
    return [Invariant("instructions were carried out", 2 * solved >= len(acts), text)] if acts and trained else []


def _once_per_tick(steps: list[StepRow]) -> Invariant:
    ticks = [s.tick for s in steps]
    twice = len(ticks) - len(set(ticks))
    return Invariant("at most one command in a control tick", twice == 0, f"{len(ticks)} ticks, {twice} with two")


def _contiguous(played: list[StepRow], accepted: list[TimingRow]) -> Invariant:
    """Within a chunk row follows row; a new chunk starts at the count of consumed steps."""
    first = {(t.epoch, t.chunk_id): t.delay_steps for t in accepted}
    wrong = []
    for before, now in itertools.pairwise(played):
        if (before.epoch, before.chunk_id) == (now.epoch, now.chunk_id):
            good = now.step == before.step + 1
        else:
            good = now.step == first.get((now.epoch, now.chunk_id), -1)
        if not good:
            wrong.append(f"chunk {now.chunk_id} row {now.step} after chunk {before.chunk_id} row {before.step}")
    return Invariant("no step was repeated or skipped", not wrong, wrong[0] if wrong else f"{len(played)} steps")


def _margins(accepted: list[TimingRow]) -> Invariant:
    margins = np.array([t.m_exhaust_s for t in accepted if not np.isnan(t.m_exhaust_s)])
    if not len(margins):
        return Invariant("deadline margins were measured", False, "no handoff had a deadline")
    late = int((margins < 0).sum())
    text = f"{len(margins)} handoffs, least {margins.min() * 1e3:.0f} ms before running out, {late} ran out"
    return Invariant("deadline margins were measured", True, text)


def _dropout(watch: Watch) -> Invariant:
    off = next((e for e in watch.events if e.kind == "camera" and e.text.endswith("off")), None)
    on = next((e for e in watch.events if e.kind == "camera" and e.text.endswith("on")), None)
    if off is None or on is None:
        return Invariant("a lost camera is refused, held, recovered", False, "the dropout did not happen")
    held = [s for s in watch.steps if off.t_s < s.t_s < on.t_s and s.kind == "hold"]
    again = [s for s in watch.steps if s.t_s > on.t_s and s.kind == "action"]
    stale = 0 if watch.status is None else int(watch.status.refusals[2])
    return Invariant(
        "a lost camera is refused, held, recovered",
        bool(held) and bool(again) and stale > 0,
        f"{stale} observations refused as stale, {len(held)} holds, "
        f"moving again {again[0].t_s - on.t_s:.2f} s after it came back"
        if again
        else "no recovery",
    )


def _abort(watch: Watch) -> Invariant:
    name = "after ~/abort nothing of the old epoch was played"
    called = next((e for e in watch.events if e.kind == "abort"), None)
    if called is None:
        return Invariant(name, False, "abort was not called")
    stop = next((i for i, s in enumerate(watch.steps) if s.kind == "stop" and s.t_s > called.t_s), None)
    if stop is None:
        return Invariant(name, False, "no stop was published")
    old = [s for s in watch.steps[stop:] if s.kind == "action" and s.epoch <= watch.aborted_epoch]
    delay_ms = (watch.steps[stop].t_s - called.t_s) * 1e3
    return Invariant(
        name,
        not old,
        f"stop heard {delay_ms:.1f} ms after the call, reply after {watch.abort_reply_s * 1e3:.1f} ms, "
        f"{len(old)} old actions",
    )


def _rearm(watch: Watch, accepted: list[TimingRow]) -> Invariant:
    name = "re-arm starts a new epoch with nothing committed"
    event = next((e for e in watch.events if e.kind == "rearm"), None)
    after = [t for t in accepted if event is not None and t.epoch > watch.aborted_epoch and t.t_s > event.t_s - 1.0]
    if event is None or not after:
        return Invariant(name, False, "no chunk was accepted after a re-arm")
    first = after[0]
    return Invariant(
        name,
        first.delay_steps == 0 and bool(np.isnan(first.m_cond_s)),
        f"first chunk starts at row {first.delay_steps}",
    )
