"""``phyai diff`` for people: sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phyai_engine.errors import ConfigError
from phyai_engine.replay.diff import Diff, Spread, compare, load_side
from phyai_engine.replay.verdict import ms

_NAMES = {
    "l_observe_s": "observe",
    "l_transfer_s": "transfer",
    "l_queue_s": "queue",
    "l_inference_s": "inference",
    "l_actuate_s": "actuate",
    "l_critical_s": "L_critical",
    "m_ctrl_s": "M_ctrl (p50, p01)",
    "m_cond_s": "M_cond (p50, p01)",
    "m_exhaust_s": "M_exhaust (p50, p01)",
}


def diff_command(run_a: Path, run_b: Path, *, models: tuple[str, str], within: float, out: Path | None) -> int:
    """What ``phyai diff`` does.

    :param models: run A's and B's recorded requests again with these; empty: as recorded.
    :param within: largest difference of an action, robot units, that still counts as the same.
    :returns: exit code: 0 the same within that, 1 not.
    :raises PhyaiError: a run cannot be read or compared.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError("no such folder", where=out.parent, do="Make it, or give another --out.")
    found = compare(load_side(run_a, models[0]), load_side(run_b, models[1]))
    if out is not None:
        found.save(out)
    show(found, Console(highlight=False))
    return 0 if found.largest <= within else 1


def show(found: Diff, console: Console) -> None:
    """Everything; the joints come last."""
    for sentence in headline(found):
        console.print(sentence, markup=False)
    if found.latency:
        console.print(_latency_table(found))
    if found.steps:
        console.print(_step_table(found))
    console.print(_joint_table(found))


def headline(found: Diff) -> list[str]:
    """What came out, in words."""
    known = "unknown" if found.same_inputs < 0 else f"{found.same_inputs} of {found.pairs}"
    lines = [
        f"A  {found.a}",
        f"B  {found.b}",
        f"{found.same_actions} of {found.pairs} chunks have the same actions, byte by byte; same inputs: {known}; "
        f"only in A {found.only_a}, only in B {found.only_b}",
        f"deadlines missed: A {found.misses[0]}, B {found.misses[1]}",
    ]
    if 0 <= found.same_inputs < found.pairs:
        lines.append("Inputs differ: so would the actions of one and the same engine.")
    if found.hash_a == found.hash_b:
        lines.append(f"hash {found.hash_a}")
    return lines + list(found.notes)


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _latency_table(found: Diff) -> Table:
    table = _table("Latency", "stage", ("A p50", "A p99", "B p50", "B p99"))
    for row in found.latency:
        figures = (ms(value) for value in (row.a_p50, row.a_p99, row.b_p50, row.b_p99))
        table.add_row(_NAMES.get(row.name, row.name), *figures)
    return table


def _step_table(found: Diff) -> Table:
    table = _table("Relative L2 error |A - B| / |A|", "", ("p50", "p99", "max"))
    for row in found.steps:
        table.add_row(f"velocity, step {row.step} (t = {row.t:.3f})", *_figures(row.velocity))
    table.add_row("action minus noise", *_figures(found.displacement))
    return table


def _joint_table(found: Diff) -> Table:
    table = _table(
        f"Actions, |A - B| [{found.unit}]", "action", ("p50", "p99", "max", "rms", "largest in chunk", "row")
    )
    for joint in found.joints:
        figures = _figures(joint.difference)
        where = (joint.largest_chunk, str(joint.largest_row)) if joint.difference.max else ("–", "–")
        table.add_row(joint.name, *figures, f"{joint.rms:.3g}", *where)
    return table


def _figures(spread: Spread) -> list[str]:
    return ["–" if value is None else f"{value:.3g}" for value in (spread.p50, spread.p99, spread.max)]
