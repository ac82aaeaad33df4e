"""The report of one run: a self-contained HTML page, and its figures as JSON. Needs plotly (extra ``report``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from phyai_engine.replay import figures, tracks
from phyai_engine.replay.look import event_colour
from phyai_engine.replay.page import chart, document, table
from phyai_engine.replay.record import Record, TimingRow
from phyai_engine.replay.sensors import sensors
from phyai_engine.replay.strip import strips
from phyai_engine.replay.summary import STAGES, overlapped, summary, write_summary
from phyai_engine.replay.verdict import ms, number, passed, percent, verdict, why_no_handoffs
from phyai_engine.whole_files import write_whole

__all__ = ["summary", "verdict", "write_report", "write_summary"]

MAX_ROWS = 1000  # of the handoff table; the record holds all


def write_report(record: Record, path: Path, *, other: Record | None = None) -> None:
    """One HTML file that needs no network.

    :param other: a run to compare with, overlaid where that makes sense and in a table of its own.
    :raises ConfigError: rows of the record do not fit its names.
    """
    record.check()
    figures_of_run = summary(record)
    sections = [
        _head(record, figures_of_run),
        sensors(record),
        _ran(record, figures_of_run),
        _events(record),
        "" if other is None else _compared(figures_of_run, summary(other)),
        f'<section id="margins" class="pair"><div>{chart(figures.margin_cdf(record, other))}</div>'
        f"<div>{chart(figures.margin_timeline(record))}</div></section>",
        _stages(record, figures_of_run),
        f'<section id="loop" class="pair even"><div>{chart(figures.control_roofline(record, other))}</div>'
        f"<div>{chart(figures.seams(record))}{_seam_table(figures_of_run)}</div></section>",
        f'<section id="commanded">{chart(tracks.commands(record))}</section>',
        _joints(record),
        _cameras(record, figures_of_run),
        _handoff_table(record),
    ]
    page = document(f"Run of {record.robot_id}, {record.started}", "\n".join(sections))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


def _head(record: Record, run: dict[str, Any]) -> str:
    first, *rest = verdict(record)
    state = {True: "pass", False: "fail", None: "unknown"}[passed(record, run)]
    margin, inference = run["margins"]["m_ctrl_s"], run["stages"]["l_inference_s"]
    roof = run["roofline"]
    tiles = [
        (ms(margin["p50"]), "margin M_ctrl, median", False),
        (ms(margin["p01"]), "margin p01 (1 % are below)", (margin["p01"] or 0) < 0),
        (ms(margin["min"]), "smallest margin", (margin["min"] or 0) < 0),
        (f"{margin['misses']} of {margin['n']}" if margin["n"] else "–", "deadlines missed", margin["misses"] > 0),
        (ms(inference["p50"]), f"inference, median; p99 {ms(inference['p99'])}", False),
        ("–" if roof is None else number(roof["x_crit"]), "X_crit = L_env / L_critical", False),
    ]
    cells = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{value}</b><span>{escape(text)}</span></div>'
        for value, text, bad in tiles
    )
    what = (record.model, f"engine {record.placement}", f"schedule {record.schedule}", record.host, record.started)
    links = {
        **({"sensors": "Sensors"} if record.survey.inputs else {}),
        "margins": "Margins",
        "stage": "Critical path",
        "loop": "Roofline, seams",
        "commanded": "Commands",
        "seen": "Cameras",
        "all": "All handoffs",
    }
    jumps = " ".join(f'<a href="#{name}">{text}</a>' for name, text in links.items())
    return (
        f"<h1>Run of {escape(record.robot_id)}</h1>"
        f'<p class="sub">{" · ".join(escape(part) for part in what)}</p>'
        f'<div class="verdict {state}"><strong>{escape(first)}</strong>'
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in rest)}</ul></div>"
        f'<div class="tiles">{cells}</div>'
        f"<nav>{jumps}<span>Charts: drag to zoom, double-click to reset.</span></nav>"
    )


def _ran(record: Record, run: dict[str, Any]) -> str:
    facts = {
        "Robot": record.robot_id,
        "Model": record.model,
        "Engine placement": record.placement,
        "Schedule": record.schedule + ("" if overlapped(record) else " (the robot waits while the engine computes)"),
        "Control period": f"{record.dt_s * 1e3:g} ms",
        "Hardware": record.host,
        "Started": record.started,
        "Recorded": f"{run['duration_s']:.1f} s",
        **_replayed(record),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{escape(text) or '–'}</dd>" for name, text in facts.items())
    checked = table(
        ("invariant", "held", "detail"),
        [
            (escape(entry.name), "yes" if entry.ok else "!no", escape(entry.detail))
            for entry in sorted(record.invariants, key=lambda entry: entry.ok)
        ],
        text=(0, 2),
    )
    nothing = "No gate was given." if record.bag else "No invariant was checked."
    invariants = checked if record.invariants else f'<p class="empty">{nothing}</p>'
    return (
        f'<section class="pair"><div><h2>What ran</h2><dl>{listed}</dl></div>'
        f"<div><h2>What must hold</h2>{invariants}</div></section>"
    )


def _replayed(record: Record) -> dict[str, str]:
    if not record.bag:
        return {}
    return {"Bag": record.bag, "Mode": record.mode, "Hash of all chunks": record.chunk_hash or "no chunk"}


def _events(record: Record) -> str:
    if not record.events:
        return '<section><h2>Events</h2><p class="empty">No events were recorded.</p></section>'
    rows = "".join(
        f'<li><span class="n" style="background:{event_colour(event)}">{i}</span>'
        f'<span class="t">{event.t_s:.2f} s</span>'
        f'<span class="kind">{event.kind}</span><span class="what">{escape(event.text)}</span></li>'
        for i, event in enumerate(record.events, start=1)
    )
    listed = f'<ol class="events">{rows}</ol>'
    if len(record.events) > 20:
        return f"<section><details><summary>Events ({len(record.events)})</summary>{listed}</details></section>"
    return f"<section><h2>Events</h2>{listed}</section>"


def _compared(run: dict[str, Any], other: dict[str, Any]) -> str:
    both = (run, other)

    def row(name: str, *path: str) -> tuple[str, str, str, str]:
        left, right = (_figure(source, path) for source in both)
        change = "–" if left is None or right is None else f"{(left - right) * 1e3:+,.1f} ms".replace("-", "−")
        return name, ms(left), ms(right), change

    def words(name: str, texts: Iterable[str]) -> tuple[str, str, str, str]:
        left, right = map(escape, texts)
        return name, left, right, "" if left == right else "differs"

    margin = ("margins", "m_ctrl_s")
    faults = (str(len(source["survey"]["faults"])) for source in both)
    rows = [
        words("model", (source["model"] for source in both)),
        words("engine, schedule", (f"{source['placement']}, {source['schedule']}" for source in both)),
        words("hardware", (source["host"] for source in both)),
        words("bag, mode", (f"{source['bag'] or 'no bag'}, {source['mode']}" for source in both)),
        words("sensor faults", faults),
        words("hash of all chunks", (source["chunk_hash"][:16] or "–" for source in both)),
        row("margin p50", *margin, "p50"),
        row("margin p01", *margin, "p01"),
        row("margin minimum", *margin, "min"),
        words(
            "misses",
            (f"{_figure(source, (*margin, 'misses'))} of {_figure(source, (*margin, 'n'))}" for source in both),
        ),
        *(
            row(f"{figures.STAGE_NAMES.get(name, 'L_critical')} {key}", "stages", name, key)
            for name in (*STAGES, "l_critical_s")
            for key in ("p50", "p99")
        ),
        row("age p99", "age", "p99"),
        row("first inference", "first_inference_s"),
    ]
    return f"<section><h2>Compared</h2>{table(('', 'this run', 'other run', 'difference'), rows)}</section>"


def _figure(run: dict[str, Any], path: Sequence[str]) -> Any:
    """One figure of a summary, None where it or what holds it is."""
    value: Any = run
    for key in path:
        value = None if value is None else value[key]
    return value


def _stages(record: Record, run: dict[str, Any]) -> str:
    names = {**figures.STAGE_NAMES, "l_critical_s": "L_critical", "l_env_s": "L_env"}
    kept = {names[name]: run["stages"][name] for name in (*STAGES, "l_critical_s", "l_env_s")}
    kept["age of the observation"] = run["age"]
    if run["after_idle"]["n"]:
        kept["inference after idle"] = run["after_idle"]
    rows = [
        (name, str(figure["n"]), *(ms(figure[key]) for key in ("p50", "p95", "p99", "max")))
        for name, figure in kept.items()
    ]
    first = run["first_inference_s"]
    if first is not None:
        rows.append(("first inference of all, apart", "1", *[ms(first)] * 4))
    listed = table(("stage", "n", "p50", "p95", "p99", "max"), rows) if run["handoffs"] else ""
    return f'<section id="stage">{chart(figures.stages(record))}{listed}</section>'


def _seam_table(run: dict[str, Any]) -> str:
    names = {
        "jump": "jump",
        "jump_ratio": "jump / median step",
        "jerk": "jerk [1/s³]",
        "frozen_error": "frozen error",
        "age_last_s": "action age [s]",
    }
    rows = []
    for name, words in names.items():
        figure = run["seam"][name]
        if figure["n"]:
            values = [number(figure[key], ".3g") for key in ("p50", "p95", "p99", "max")]
            rows.append((words, str(figure["n"]), *values))
    return table(("at the handoff", "n", "p50", "p95", "p99", "max"), rows) if rows else ""


def _joints(record: Record) -> str:
    entry = tracks.measured_joints(record)
    if entry is None:
        return ""
    drawn = chart(entry, titled=False)
    return f"<section><details><summary>{escape(entry.title)}</summary>{drawn}</details></section>"


def _cameras(record: Record, run: dict[str, Any]) -> str:
    rows = [
        (
            escape(name),
            str(seen["frames"]),
            f"{number(seen['rate_hz'], '.1f')} Hz",
            ms(seen["interval"]["p50"]),
            ms(seen["interval"]["p99"]),
            ms(seen["interval"]["max"]),
            f"{number(seen['longest_gap_at_s'])} s",
            ms(seen["delay"]["p50"]),
            ms(seen["delay"]["p99"]),
            percent(seen["delivered"]),
        )
        for name, seen in run["cameras"].items()
    ]
    head = (
        "camera",
        "frames",
        "mean rate",
        "interval p50",
        "p99",
        "longest gap",
        "begins at",
        "stamp to arrival p50",
        "p99",
        "delivered",
    )
    listed = table(head, rows) if rows else ""
    timing = f"<div>{chart(tracks.camera_rates(record))}</div><div>{chart(tracks.camera_lateness(record))}</div>"
    return f'<section id="seen"><div class="pair even">{timing}</div>{listed}{strips(record)}</section>'


def _handoff_table(record: Record) -> str:
    if not record.timings:
        why = escape(why_no_handoffs(record))
        return f'<section id="all"><h2>All handoffs</h2><p class="empty">{why}</p></section>'
    head = (
        "t [s]", "chunk", "epoch", "outcome", "d", "d′", "s", "held",
        *(f"{figures.STAGE_NAMES[name]} [ms]" for name in STAGES),
        "L_critical [ms]", "L_env [ms]", "M_ctrl [ms]", "M_cond [ms]", "M_exhaust [ms]", "age [ms]", "oldest [ms]",
        "jump", "ratio", "jerk", "frozen error", "fallback", "reason",
    )  # fmt: skip
    rows = [_handoff_row(row) for row in record.timings[:MAX_ROWS]]
    n = len(record.timings)
    cut = f", the first {MAX_ROWS} shown; the record holds all" if n > MAX_ROWS else ""
    note = (
        "d: delay predicted, d′: steps consumed between snapshot and handoff, s: execution steps, "
        "held: ticks without an action meanwhile, oldest: age of the observation behind the oldest action of the chunk "
        "before. Red: missed or not accepted."
    )
    listed = table(head, rows, text=(3, len(head) - 2, len(head) - 1))
    return (
        f'<section id="all"><details><summary>All handoffs and rejections ({n}{cut})</summary>'
        f'<p class="note">{note}</p>{listed}</details></section>'
    )


def _handoff_row(row: TimingRow) -> tuple[str, ...]:
    def milli(value_s: float) -> str:
        return number(value_s * 1e3, ".1f")

    def margin(value_s: float) -> str:
        return ("!" if value_s < 0 else "") + milli(value_s)

    outcome = row.outcome if row.refusal == "none" else f"{row.outcome}: {row.refusal}"
    return (
        number(row.t_s),
        str(row.chunk_id),
        str(row.epoch),
        escape(outcome) if row.outcome == "accepted" else f"!{escape(outcome)}",
        str(row.delay_predicted_steps),
        str(row.delay_steps),
        str(row.execution_steps),
        str(row.hold_steps),
        *(milli(getattr(row, name)) for name in STAGES),
        milli(row.l_critical_s),
        milli(row.l_env_s),
        margin(row.m_ctrl_s),
        margin(row.m_cond_s),
        margin(row.m_exhaust_s),
        milli(row.age_s),
        milli(row.age_last_s),
        number(row.jump, ".4g"),
        number(row.jump_ratio),
        number(row.jerk, ".3g"),
        number(row.frozen_error, ".2g"),
        escape(row.fallback),
        escape(row.text),
    )
