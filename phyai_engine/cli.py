"""The command ``phyai``. Every command imports what it needs when it runs: ``--help`` is fast and needs no torch."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from phyai_engine import __version__, cli_fleet, cli_serve
from phyai_engine.cli_errors import readable_errors
from phyai_engine.errors import ConfigError

app = typer.Typer(
    help="Drives robots with learned policies in real time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(cli_fleet.keygen)
app.add_typer(cli_fleet.robots, name="robots")
app.command()(cli_fleet.client)
app.command()(cli_serve.serve)
app.command()(cli_serve.status)


class Device(str, Enum):
    """Where a model computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def phyai(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Drives robots with learned policies in real time."""


@app.command()
def golden(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Holds config.json, *.safetensors and io.npz.")],
    first_bad: Annotated[bool, typer.Option("--first-bad", help="Name only the first array outside its gate.")] = False,
    device: Annotated[Device, typer.Option(help="Gates are for float32 on any of them.")] = Device.CPU,
) -> None:
    """Run our model on recorded inputs and measure every recorded array against its gate.

    Exit code 0: all within their gates, 1: not, 2: the folder cannot be run.
    """
    with readable_errors():
        from phyai_engine.golden import golden_command  # noqa: PLC0415 - torch

        code = golden_command(str(folder), first_bad, device.value)
    raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Say what this machine has, what is missing, and how to mend it.

    Exit code 0: nothing is wrong, 1: something is.
    """
    with readable_errors():
        from phyai_engine.doctor import doctor_command  # noqa: PLC0415

        code = doctor_command()
    raise typer.Exit(code)


@app.command()
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


class Dtype(str, Enum):
    """Of a model's matrices."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name (pi05, pi0), a yaml, or a checkpoint.")],
    robot: Annotated[
        str, typer.Option("--robot", metavar="ROBOT", help="A shipped name or a yaml. Default: one with three cameras.")
    ] = "",
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the model's.")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Runs. Default: 3 on cpu, 200 on cuda.")] = None,
    warm_up: Annotated[int | None, typer.Option(min=0, help="Runs before. Default: 2 on cpu, 10 on cuda.")] = None,
    cameras: Annotated[int | None, typer.Option(min=0, help="Default: all that robot and model have.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Default: all that the model has room for.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of frames, state and noise.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
) -> None:
    """Time one chunk phase by phase, on synthetic observations.

    Exit code 0: measured, 1: measured, but a chunk was not finite, 2: it cannot be measured.
    """
    with readable_errors():
        from phyai_engine.bench.command import BenchOptions, bench_command  # noqa: PLC0415

        options = BenchOptions(
            model=model,
            robot=robot,
            device=device.value,
            dtype=None if dtype is None else dtype.value,
            n=n,
            warm_up=warm_up,
            cameras=cameras,
            prompt_tokens=prompt_tokens,
            seed=seed,
        )
        code = bench_command(options, out)
    raise typer.Exit(code)


@app.command()
def tune(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="Shipped names or yamls. Default: pi05 pi0.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: the accelerator where there is one.")] = Device.AUTO,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.yaml", help="Default: where the selector reads it.")
    ] = None,
) -> None:
    """Time every candidate of every operator at a model's shapes and write this accelerator's profile."""
    with readable_errors():
        from phyai_engine.tune import tune_command  # noqa: PLC0415 - torch

        code = tune_command(models or ["pi05", "pi0"], device.value, out)
    raise typer.Exit(code)


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a yaml that names one.")],
    robot: Annotated[str, typer.Option("--robot", metavar="ROBOT", help="Of the synthetic observations.")] = "",
    recording: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a policy node: its observations instead.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Observations.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.npz", help="Default: in the checkpoint's folder.")
    ] = None,
) -> None:
    """Measure the activations that `quant` needs the scales of, and write them beside the weights."""
    with readable_errors():
        from phyai_engine.quant.command import calibrate_command  # noqa: PLC0415 - torch

        code = calibrate_command(model, robot, recording, n, out)
    raise typer.Exit(code)


@app.command()
def hotspots(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name (pi05, pi0) or a yaml.")],
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    top: Annotated[int, typer.Option(min=1, help="Write so many cases.")] = 8,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: out/hotspots/ and the model's name.")
    ] = None,
) -> None:
    """Rank the operator calls of one request by the time they take, and write each as a case for `phyai judge`."""
    with readable_errors():
        from phyai_engine.hotspots import hotspots_command  # noqa: PLC0415 - torch

        code = hotspots_command(model, device.value, top, out or Path("out/hotspots") / Path(model).stem)
    raise typer.Exit(code)


@app.command()
def judge(
    case: Annotated[Path, typer.Argument(metavar="CASE.yaml", help="As `phyai hotspots` writes it.")],
    candidates: Annotated[
        list[Path] | None,
        typer.Argument(metavar="CANDIDATE.py...", help="Files with a function of the operator's name."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole/--alone", help="Also time whole requests with the best.")] = True,
) -> None:
    """Try the shipped candidates and yours for one operator call: equal to the reference, then timed, then compared.

    Exit code 0: one is faster than what is bound, 1: none is, 2: it cannot be judged.
    """
    with readable_errors():
        from phyai_engine.judge import judge_command  # noqa: PLC0415 - torch

        code = judge_command(case, candidates or [], whole=whole)
    raise typer.Exit(code)


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A checkpoint folder, or a model file that names one.")],
    robot: Annotated[
        str, typer.Option(metavar="ROBOT", help="Also say whether this robot fits: a shipped name or a yaml.")
    ] = "",
    write: Annotated[
        Path | None, typer.Option(metavar="OUT.yaml", help="Write the model file, and beside it OUT_robot.yaml.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a checkpoint holds, what is missing, and which files run it.

    Exit code 0: usable, 1: something is missing or does not fit, 2: it cannot be read.
    """
    with readable_errors():
        from phyai_engine.inspection import inspect_command  # noqa: PLC0415

        code = inspect_command(folder, robot, write, as_json)
    raise typer.Exit(code)


class Mode(str, Enum):
    """How a bag is replayed."""

    REAL_TIME = "real-time"
    FAST = "as-fast-as-possible"
    STEP = "step"


class When(str, Enum):
    """Of the next inference: the schedules of the node."""

    SYNC = "sync"
    NAIVE_ASYNC = "naive_async"
    RTC = "rtc"


class Placement(str, Enum):
    """Where the engine of a replay runs."""

    PROCESS = "process"
    THREAD = "thread"


@app.command()
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


@app.command()
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


@app.command()
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


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A checkpoint folder, a model file, a shipped name.")
    ] = "metaworld",
    robot: Annotated[str, typer.Option(metavar="ROBOT", help="A shipped name or a yaml.")] = "sawyer_20hz",
    manifest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Episodes, as a YAML list or JSON lines; else they are made.")
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="A,B", help="Default: all of the simulator's tasks.")] = "",
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Of each task.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=20, help="Of scenes and noise.")] = 1,
    schedule: Annotated[When, typer.Option(help="When the next inference starts.")] = When.SYNC,
    guidance: Annotated[str, typer.Option(help="Of rtc, as in a model file; default: the model's own.")] = "",
    delay_ms: Annotated[float, typer.Option(min=0.0, help="From observation to chunk, in whole control ticks.")] = 0.0,
    execution_horizon: Annotated[int, typer.Option(min=0, help="Steps of a chunk to execute; 0: half of it.")] = 0,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse chunks beyond the limits; else clip.")] = False,
    fault: Annotated[str, typer.Option(help="Wire something wrong, such as swapped_cameras.")] = "none",
    seconds: Annotated[float, typer.Option(min=0.1, help="Robot time after which an episode has failed.")] = 15.0,
    device: Annotated[Device, typer.Option(help="auto: as the model file says, else the accelerator.")] = Device.AUTO,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the model's.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Simulator processes; 0: the cores but one.")] = 0,
    batch: Annotated[int, typer.Option(min=0, max=8, help="Requests computed at once; 0: 8 on a GPU, else 1.")] = 0,
    films: Annotated[int, typer.Option(min=0, help="GIFs of so many episodes of each task.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="An interrupted run goes on there.")] = Path(
        "out/eval"
    ),
) -> None:
    """Play episodes in the simulator, without ROS, and say how many are solved.

    The node's own control loop drives the robot on a virtual clock: the delay is stated, this machine's speed is not
    in the result.
    """
    with readable_errors():
        from phyai_engine.evaluate.command import EvalOptions, eval_command  # noqa: PLC0415
        from phyai_engine.evaluate.condition import Condition, wired  # noqa: PLC0415
        from phyai_engine.types import Schedule  # noqa: PLC0415 - numpy

        condition = Condition(
            schedule=Schedule(schedule.value),
            guidance=guidance,
            delay_ms=delay_ms,
            execution_horizon=execution_horizon,
            clamp=not refuse,
            dtype="" if dtype is None else dtype.value,
            fault=wired(fault),
            seconds_max=seconds,
        )
        options = EvalOptions(
            model=model,
            robot=robot,
            manifest=manifest,
            tasks=tuple(name.strip() for name in tasks.split(",") if name.strip()),
            episodes=episodes,
            seed=seed,
            condition=condition,
            device=device.value,
            workers=workers,
            batch=batch,
            films=films,
            out=out,
        )
        code = eval_command(options)
    raise typer.Exit(code)


@app.command("rtc-study")
def rtc_study(
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Of each method at each delay.")] = 512,
    methods: Annotated[str, typer.Option(metavar="A,B", help="Default: all; names as in the table.")] = "",
    delays: Annotated[str, typer.Option(metavar="0,1", help="Inference delays in steps. Default: 0 to H/2.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the episodes.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="OUT.json", help="Also write every figure.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.svg", help="Also draw success and jumps.")] = None,
) -> None:
    """Compare the handoff methods on a small task with two ways out, against the inference delay.

    Trains its policy first (minutes on a CPU; kept in the cache folder).
    """
    with readable_errors():
        from phyai_engine.rtc_study.command import parse_options, study_command  # noqa: PLC0415 - torch

        study_command(parse_options(methods, delays, episodes=episodes, seed=seed), out, plot)


@app.command()
def train(
    what: Annotated[Literal["demo"], typer.Argument(help="demo: a small pi0.5 for the simulated scenes.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The checkpoint folder.")] = Path(
        "out/policy"
    ),
    work: Annotated[
        Path, typer.Option(metavar="DIR", help="Demonstrations and the state to resume from; delete it to begin anew.")
    ] = Path("out/train"),
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Begin with this checkpoint: it plays, and is corrected."),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Every part once with a tiny network; it learns nothing.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=0, help="Simulators side by side. Default: all cores but two.", show_default=False)
    ] = 0,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of the recipe (phyai_engine/train/recipe.py)."),
    ] = None,
) -> None:
    """Train a policy end to end: demonstrations, flow matching, corrections of its own play, a check in closed loop.

    Needs the extras engine and sim, and for the real one an accelerator.
    """
    with readable_errors():
        from phyai_engine.train.command import recipe_with, train_command  # noqa: PLC0415 - torch
        from phyai_engine.train.recipe import SMOKE, Recipe  # noqa: PLC0415

        train_command(recipe_with(SMOKE if smoke else Recipe(), change or []), out, work, processes or None, start)


def main() -> None:
    """Entry point of the console script."""
    app()
