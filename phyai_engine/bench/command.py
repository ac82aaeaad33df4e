"""``phyai bench``: load, warm up, measure, show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from phyai_engine.bench import machine, synthetic
from phyai_engine.bench.ceilings import ceilings, rates
from phyai_engine.bench.measure import Bench, Measured, measure
from phyai_engine.bench.result import Result, Subject
from phyai_engine.bench.table import show
from phyai_engine.clocks import clock_of, device_of
from phyai_engine.config import ModelConfig, RobotConfig, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.models import Counted
from phyai_engine.policy import Policy, load_policy
from phyai_engine.weights.checkpoint import model_from

NOT_FINITE = 1


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says. None takes the default that fits the model or the device.

    :param model: a shipped model's name, a yaml, or a checkpoint folder. :param robot: likewise, without folders;
        empty takes the bench robot, whose cameras then take the model's roles.
    """

    model: str
    robot: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    n: int | None = None
    warm_up: int | None = None
    cameras: int | None = None
    prompt_tokens: int | None = None
    seed: int = 0


class Runs(NamedTuple):
    """How often."""

    warm_up: int
    n: int


# A full-size model needs 20 s for a chunk on a CPU, and some 0.1 s or less on a GPU, where a p99 is worth having.
DEFAULT_RUNS = {"cpu": Runs(warm_up=2, n=3), "cuda": Runs(warm_up=10, n=200)}
BENCH_ROBOT = "aloha"


def bench_command(options: BenchOptions, out: Path | None = None) -> int:
    """Measure, write ``out``, print the table.

    :returns: 0, or 1 if a chunk was not finite.
    :raises PhyaiError: model, robot and options do not fit, or the model cannot answer.
    """
    if out is not None and not out.parent.is_dir():
        raise ConfigError("no such folder", where=out.parent, do="Make it, or give another --out.")
    if out is not None and out.is_dir():
        raise ConfigError("a folder of that name exists", where=out, do="Give --out the name of a file.")
    result = bench(options, Console(stderr=True))
    show(result, Console())
    if out is not None:
        try:
            result.save(out)
        except OSError as error:
            raise ConfigError(f"cannot write the figures: {error.strerror}", where=out) from None
    return 0 if result.chunk.good else NOT_FINITE


def bench(options: BenchOptions, progress: Console) -> Result:
    """Load, warm up and measure. :param progress: where to say what goes on."""
    config = model_config(options)
    robot = robot_config(options, config)
    loaded = machine.load_warning()
    gpu_before = machine.gpu_processes() if options.device != "cpu" else []
    progress.print(f"loading {options.model} …", highlight=False)
    began = time.perf_counter()
    policy = load_policy(robot, config)
    load_s = time.perf_counter() - began

    model = policy.runner.model
    device = device_of(model)
    kind = device.partition(":")[0]
    if options.device not in ("auto", kind):
        raise ConfigError(f"model {options.model} does not compute there", got=device, wanted=options.device)
    tokens = config.prompt.max_tokens if options.prompt_tokens is None else options.prompt_tokens
    requests = synthetic.requests(policy.adapter, seed=options.seed, prompt_tokens=tokens)
    before = machine.work()
    measured = _measure(Bench(policy, requests, clock_of(model)), _runs(options, kind), progress)
    if kind == "cuda":
        warnings = machine.gpu_warnings(gpu_before, machine.gpu_processes(), machine.gpu_uuid(device))
    else:
        warnings = [warning for warning in (loaded, machine.others_warning(before, machine.work())) if warning]
    needed = machine.memory(model, device)  # before the ceilings take theirs
    most = ceilings(device, str(config.options.get("dtype", "float32"))) if isinstance(model, Counted) else None
    work = model.work([policy.adapter.encode(requests(0)).inputs]) if isinstance(model, Counted) else {}
    medians = {name: figures.p50_ms for name, figures in measured.phases().items()}
    medians["step"] = measured.steps().p50_ms
    return Result(
        subject=_subject(options, config, policy, requests, device),
        environment=machine.environment(device, _reasons(model)),
        warnings=tuple(warnings),
        load_s=load_s,
        memory=needed,
        warm_up=measured.warm_up_ms(),
        chunk=measured.chunk(),
        phase_clock="CUDA event clock" if kind == "cuda" else "host clock",
        phases=measured.phases(),
        steps=measured.steps(),
        steps_sum=measured.steps_sum(),
        model=measured.model(),
        end_to_end=measured.end_to_end(),
        ceilings=most,
        rates={} if most is None else rates(work, medians, most),
    )


def model_config(options: BenchOptions) -> ModelConfig:
    """The model file with what the command line changes.

    :raises ConfigError: no such model, or not a model file.
    """
    config = model_from(options.model)
    changed = {} if options.dtype is None else {"dtype": options.dtype}
    device = config.device if options.device == "auto" else options.device
    return msgspec.structs.replace(config, device=device, options={**config.options, **changed})


def robot_config(options: BenchOptions, config: ModelConfig) -> RobotConfig:
    """The robot with as many cameras as asked for.

    :raises ConfigError: no such robot, or fewer cameras.
    """
    robot = load_robot(resolve("robots", options.robot or BENCH_ROBOT))
    roles = None if options.robot else config.options.get("cameras")
    if not isinstance(roles, (list, tuple)):  # absent, or what the model refuses with its reason
        roles = None
    return synthetic.with_cameras(robot, options.cameras, roles)


def _runs(options: BenchOptions, kind: str) -> Runs:
    default = DEFAULT_RUNS["cuda" if kind == "cuda" else "cpu"]
    return Runs(
        default.warm_up if options.warm_up is None else options.warm_up,
        default.n if options.n is None else options.n,
    )


def _measure(bench: Bench, runs: Runs, console: Console) -> Measured:
    console.print(f"{runs.warm_up} runs to warm up, then {runs.n} …", highlight=False)
    with _bar(console, sum(runs)) as bar:
        task = bar.task_ids[0]
        return measure(bench, warm_up=runs.warm_up, n=runs.n, each=lambda: bar.update(task, advance=1, refresh=True))


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Progress]:
    """Drawn between the runs only, never during one: a thread that draws would take the interpreter from it."""
    columns = (TextColumn("run"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, auto_refresh=False, transient=True, disable=quiet) as bar:
        bar.add_task("run", total=total)
        yield bar


def _subject(
    options: BenchOptions, config: ModelConfig, policy: Policy, requests: synthetic.Requests, device: str
) -> Subject:
    robot = policy.adapter.robot
    return Subject(
        model=options.model,
        weights=policy.note,
        robot=robot.robot_id,
        device=device,
        cameras=len(robot.cameras),
        prompt_tokens=requests.prompt_tokens,
        seed=options.seed,
        options=dict(config.options),
    )


def _reasons(model: Any) -> dict[str, str]:
    """Why each operator is bound as it is; models without operators of ours have none."""
    return dict(getattr(getattr(model, "ops", None), "reasons", {}))
