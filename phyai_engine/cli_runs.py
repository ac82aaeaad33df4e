"""The commands of runs: replay a bag, draw a run, compare two, simulate others from their latencies."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from phyai_engine.cli_choices import When
from phyai_engine.cli_errors import readable_errors
from phyai_engine.errors import ConfigError


class Mode(str, Enum):
    """How a bag is replayed."""

    REAL_TIME = "real-time"
    FAST = "as-fast-as-possible"
    STEP = "step"


class Placement(str, Enum):
    """Where the engine of a replay runs."""

    PROCESS = "process"
    THREAD = "thread"


def replay(
    bag: Annotated[Path, typer.Argument(metavar="BAG", help="A rosbag2 folder, a .mcap or a .db3 file.")],
    robot: Annotated[str, typer.Option(metavar="ROBOT", help="Of the bag: a shipped name or a yaml.")] = "",
    model: Annotated[str, typer.Option(metavar="MODEL", help="A shipped name, a yaml, or a checkpoint folder.")] = "",
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Of a policy node's recording: ask the engine its very requests again.")
    ] = False,
    engine: Annotated[Placement, typer.Option(help="Where inference runs.")] = Placement.PROCESS,
    mode: Annotated[Mode, typer.Option(help="step: equal chunks every time, with --latency-ms.")] = Mode.REAL_TIME,
    schedule: Annotated[When, typer.Option(help="When the next inference starts.")] = When.RTC,
    execution_horizon: Annotated[int, typer.Option(min=0, help="Steps of a chunk to execute; 0: half of it.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise; chunk k uses seed + k.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the engine; 0: its library's default.")] = 0,
    latency_ms: Annotated[float, typer.Option(min=0.0, help="Stated latency of mode step.")] = 0.0,
    seconds: Annotated[float, typer.Option(min=0.0, help="Replay only so much; 0: all.")] = 0.0,
    namespace: Annotated[str, typer.Option(help="Of the recorded robot's topics.")] = "",
    instruction: Annotated[str, typer.Option(help="In place of the recorded one.")] = "",
    accept_unstamped: Annotated[bool, typer.Option("--accept-unstamped", help="Take messages with stamp 0.")] = False,
    idle_probes: Annotated[int, typer.Option(min=0, help="Inferences after the run, each after 2 s of rest.")] = 3,
    gate: Annotated[str, typer.Option(help="Such as p99_margin_ms>=5,miss_rate<=1e-3.")] = "",
    compare: Annotated[
        Path | None, typer.Option(metavar="RECORD.json", help="Another run to show beside this one.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: out/replay/ and the bag's name.")
    ] = None,
) -> None:
    """Replay a rosbag2 recording to an engine, without a ROS graph, and say whether the policy keeps its deadline.

    With --recorded: whether the engine gives the same actions again; robot and model are the recording's own, unless
    another --model is named; the other options do not matter then.

    Exit code 0: replayed, 1: the gate does not hold, or the recording has a gap or is looped, 2: it cannot be replayed.
    """
    with readable_errors():
        if recorded:
            from phyai_engine.replay.recorded_replay import recorded_command  # noqa: PLC0415

            raise typer.Exit(recorded_command(bag, model))
        from phyai_engine.replay.command import replay_command  # noqa: PLC0415 - plotly
        from phyai_engine.replay.engine_replay import ReplaySettings  # noqa: PLC0415
        from phyai_engine.types import Schedule  # noqa: PLC0415 - numpy

        settings = ReplaySettings(
            mode=mode.value,
            placement=engine.value,
            schedule=Schedule(schedule.value),
            execution_horizon=execution_horizon,
            seed=seed,
            threads=threads,
            latency_ms=latency_ms,
            seconds=seconds,
            namespace=namespace,
            instruction=instruction,
            accept_unstamped=accept_unstamped,
            probes=idle_probes,
        )
        code = replay_command(bag, robot, model, settings, gate_text=gate, out=out, compare=compare)
    raise typer.Exit(code)


def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A recording folder, or the record of a replay.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Likewise; may be the same recording.")],
    model_a: Annotated[
        str, typer.Option(metavar="MODEL", help="Run A's recorded requests again with this one; `recorded`: its own.")
    ] = "",
    model_b: Annotated[str, typer.Option(metavar="MODEL", help="Likewise of B.")] = "",
    within: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of an action, robot units, that counts as the same.")
    ] = 0.0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
) -> None:
    """Compare two runs: actions, velocities of the denoising steps, latency. For kernels, quantisation and models.

    Exit code 0: the same actions, 1: not, 2: a run cannot be read or compared.
    """
    with readable_errors():
        from phyai_engine.replay.diff_table import diff_command  # noqa: PLC0415

        code = diff_command(run_a, run_b, models=(model_a, model_b), within=within, out=out)
    raise typer.Exit(code)


def sweep(
    runs: Annotated[list[str], typer.Argument(metavar="[NAME=]RUN...", help="Records of replays, recording folders.")],
    steps: Annotated[
        str, typer.Option(metavar="S,S", help="Execution horizons. Default: 1/4, 1/2 and 3/4 of the run's horizon.")
    ] = "",
    delay: Annotated[
        str, typer.Option(metavar="D,D", help="Delays in steps, or `predicted`, as the node does.")
    ] = "predicted",
    horizon: Annotated[int | None, typer.Option(min=1, help="Of runs that kept no chunks.")] = None,
    eps: Annotated[float, typer.Option(help="Largest accepted miss rate.")] = 1e-3,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Of one robot's hour, in the price file's money.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="YAML", help="Default: config/prices.yaml, whose numbers are placeholders.")
    ] = None,
    success: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]EVAL", help="A folder of `phyai eval`, or a file of rates. Repeat."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
) -> None:
    """Say which execution horizon, delay, model and placement keep the deadline, from recorded latencies.

    Exit code 0: some configuration does, within the budget, 1: none does, 2: a file cannot be used.
    """
    with readable_errors():
        from phyai_engine.replay.sweep_command import sweep_command  # noqa: PLC0415

        code = sweep_command(
            runs,
            execution_steps=steps,
            delay_steps=delay,
            horizon=horizon,
            eps=eps,
            budget=budget,
            prices=prices,
            success=success or [],
            out=out,
        )
    raise typer.Exit(code)


def report(
    record: Annotated[Path, typer.Argument(metavar="RUN", help="A record of a run, or a recording folder.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.html", help="Default: beside the record.")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="RUN", help="Another run to compare it with.")] = None,
) -> None:
    """Write the report of a recorded run as one HTML file."""
    with readable_errors():
        from phyai_engine.replay.recorded_run import run_at  # noqa: PLC0415
        from phyai_engine.replay.report import write_report  # noqa: PLC0415 - plotly

        page = out or (record.with_suffix(".html") if record.is_file() else record.with_name(f"{record.name}.html"))
        if not page.parent.is_dir():
            raise ConfigError("no such folder", where=page.parent, do="Make it, or give another --out.")
        write_report(run_at(record), page, other=None if against is None else run_at(against))
    typer.echo(f"wrote {page}")
