"""The study as a table that fits 80 columns; its JSON file has every figure."""

from __future__ import annotations

from rich import box
from rich.table import Table

from phyai_engine.rtc_study.result import Study
from phyai_engine.rtc_study.scores import Cell

COLUMNS = ("method", "d", "success % [95 %]", "jump p50/p90/p99", "jerk", "frozen", "s")


def row(cell: Cell) -> tuple[str, ...]:
    """One cell, in the order of ``COLUMNS``."""
    s, jump = cell.success, cell.jump_ratio
    return (
        cell.method,
        str(cell.delay_steps),
        f"{100 * s.share:.1f} [{100 * s.low:.1f}, {100 * s.high:.1f}]",
        "–" if jump is None else f"{jump.p50:.2f}/{jump.p90:.1f}/{jump.p99:.1f}",
        f"{cell.jerk_mean_m_s3:.0f}",
        "–" if cell.frozen_error_m_s is None else f"{cell.frozen_error_m_s:.3f}",
        "–" if cell.seconds_to_goal is None else f"{cell.seconds_to_goal:.1f}",
    )


def table(study: Study) -> Table:
    """One row per cell."""
    n = max(cell.episodes for cell in study.cells)
    title = f"phyai rtc-study: {n} episodes a row, H {study.horizon}, N = beta = {study.denoising_steps}, s = max(d, 1)"
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        made.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for method in study.methods():
        for cell in study.cells:
            if cell.method == method.value:
                made.add_row(*row(cell))
        made.add_section()
    made.caption = "jump: ratio to the chunk's own steps; jerk: mean, m/s^3; frozen: m/s; s: to the goal"
    return made
