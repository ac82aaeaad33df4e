"""An evaluation as a table; its JSON file has every figure."""

from __future__ import annotations

from rich import box
from rich.table import Table

from phyai_engine.evaluate.scores import Score, Summary
from phyai_engine.intervals import Spread

COLUMNS = ("task", "n", "success [95 %]", "s", "jerk")


def table(summary: Summary) -> Table:
    """A row per task, and one for all."""
    made = Table(title=f"phyai eval: {summary.title}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for score in summary.tasks:
        made.add_row(*row(score))
    made.add_section()
    made.add_row(*row(summary.all), style="bold")
    made.caption = f"mean over the tasks {summary.task_mean:.1%}; {'; '.join(facts(summary))}"
    made.caption_justify = "left"
    return made


def row(score: Score) -> tuple[str, ...]:
    """In the order of ``COLUMNS``."""
    return (
        score.task,
        str(score.n),
        str(score.success),
        "–" if score.seconds is None else f"{score.seconds:.1f}",
        "–" if score.jerk is None else f"{score.jerk:.0f}",
    )


def facts(summary: Summary) -> list[str]:
    """What else is worth a line, in words; what did not happen is left out."""
    found = [
        f"{summary.chunks} chunks",
        f"handoffs with a deadline {summary.handoffs}, missed {summary.misses}",
        f"d' {_spread(summary.delay_steps, '.0f')}",
        f"jump ratio {_spread(summary.jump_ratio, '.2f')}",
        f"ticks without an action {summary.held:.1%}",
    ]
    if summary.margin_p01_s is not None:
        found.append(f"margin that 99 % had {summary.margin_p01_s * 1e3:.0f} ms")
    if summary.frozen_error is not None:
        found.append(f"frozen error {summary.frozen_error:.3g}")
    counted = {"refused": summary.refusals, "fallback": summary.fallbacks}
    found += [f"{what} {name} {n}" for what, counts in counted.items() for name, n in counts.items()]
    found += [f"{n} {what}" for what, n in (("failed requests", summary.failed), ("aborts", summary.aborted)) if n]
    return found


def _spread(values: Spread | None, form: str) -> str:
    return "–" if values is None else "/".join(f"{v:{form}}" for v in (values.p50, values.p90, values.p99))
