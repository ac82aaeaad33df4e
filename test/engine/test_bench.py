"""phyai bench: each phase's time stands in its own row; the machine and the answers are told about."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from phyai_engine.adapter import Adapter
from phyai_engine.bench.ceilings import Ceilings, rates
from phyai_engine.bench.command import DEFAULT_RUNS, BenchOptions, model_config, robot_config
from phyai_engine.bench.measure import Bench, Measured, measure
from phyai_engine.bench.result import Result
from phyai_engine.bench.synthetic import Requests, fill, requests, text, with_cameras
from phyai_engine.cli import app
from phyai_engine.clocks import CudaClock, HostClock, clock_of, device_of
from phyai_engine.config import ModelConfig, Normalisation, PromptConfig, RobotConfig, load_model, load_robot, resolve
from phyai_engine.errors import ConfigError
from phyai_engine.models import Model, Work
from phyai_engine.models.fake import FakeModel, FakeOptions
from phyai_engine.models.pi import PiModel
from phyai_engine.models.pi_compact import BatchShape
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.models.pi_work import phase_work
from phyai_engine.policy import Policy, load_policy
from phyai_engine.runner import Runner
from phyai_engine.transforms.tokenizer import ByteTokenizer
from phyai_engine.types import F32, Request

ARM7 = load_robot(resolve("robots", "arm7"))
STEPS = [f"step {step}" for step in range(10)]


def run(*arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of ``phyai bench``."""
    result = CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def read(path: Path) -> Result:
    """Strictly: no key may be missing, unknown, or of another type."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def rows(out: str) -> dict[str, list[str]]:
    """First cell -> the others, of the table."""
    cells = [[cell.strip() for cell in line.strip("│ \n").split("│")] for line in out.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in cells}


# --- the command ---


@pytest.mark.parametrize("model", ["pi05_demo", "pi0_demo"])
def test_a_demo_model_is_measured_phase_by_phase(model: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    code, text, errors = run(model, "--robot", "arm7", "--device", "cpu", "--n", 1, "--warm-up", 1, "--out", out)
    assert code == 0, errors
    result = read(out)
    assert list(result.phases) == ["encode", "stage", "copy_in", "vision", "prefix", *STEPS, "copy_out", "decode"]
    within = sum(figures.p50_ms for figures in result.phases.values())
    assert 0.5 * result.end_to_end.p50_ms < within <= result.end_to_end.p50_ms
    assert result.steps_sum.p50_ms == pytest.approx(sum(result.phases[step].p50_ms for step in STEPS))
    inside = [figures.p50_ms for name, figures in result.phases.items() if name not in ("encode", "decode")]
    assert result.model.p50_ms == pytest.approx(sum(inside))
    assert (result.steps.n, result.steps_sum.n, result.end_to_end.n) == (10, 1, 1)
    assert result.warm_up.first_ms is not None
    assert result.warm_up.others_ms == ()
    assert (result.chunk.model, result.chunk.robot, result.chunk.not_finite, result.chunk.runs) == (
        *((50, 32), (50, 7)),
        *(0, 2),
    )
    assert result.subject.prompt_tokens == {"pi05_demo": 200, "pi0_demo": 96}[model]
    assert result.subject.device == "cpu"
    assert result.memory.weights > 100_000
    assert result.memory.peak_ratio == pytest.approx(result.memory.peak_rss / result.memory.weights)
    assert result.environment.torch == str(torch.__version__)
    assert result.ceilings is not None and result.ceilings.dtype == "float32"
    assert list(result.rates) == ["vision", "prefix", "step"]
    for phase, rate in result.rates.items():
        ms = (result.steps if phase == "step" else result.phases[phase]).p50_ms
        assert rate.tflop_s * ms == pytest.approx(rate.flop / 1e9) and rate.tb_s * ms == pytest.approx(rate.bytes / 1e9)
        assert 0 < rate.floor_ms < ms, "faster than the machine"
    assert "50x32 -> 50x7 (model -> robot), all finite" in text
    assert text.rstrip().endswith("┘"), "the table is the last thing printed"
    assert [*rows(text)] == [
        *("pre-processing", "staging", "copy in", "vision", "prefix", "step 0"),
        *("each of 10 steps", "all steps", "copy out", "decode", "staging to copy out", "end to end"),
        "each step",
    ]
    assert rows(text)["end to end"] == ["1", *3 * [f"{result.end_to_end.p50_ms:.2f}"]]


@pytest.mark.parametrize("cameras", [3, "base", None])
def test_cameras_that_are_no_list_are_refused_by_the_model(cameras: Any, tmp_path: Path) -> None:
    model = tmp_path / "wrong.yaml"
    model.write_text(yaml.safe_dump({"family": "pi05", "options": {"cameras": cameras}}))
    code, _, errors = run(model, "--n", 1)
    assert code == 2
    assert "$.cameras" in errors


def test_figures_that_cannot_be_written_are_shown_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text, errors = run("fake", "--robot", "arm7", "--n", 1, "--out", tmp_path)
    assert code == 2 and "a folder of that name exists" in errors and "end to end" not in text

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Result, "save", full)
    code, text, errors = run("fake", "--robot", "arm7", "--n", 1, "--warm-up", 0, "--out", tmp_path / "a.json")
    assert code == 2 and "cannot write the figures: No space left on device" in errors
    assert "end to end" in text


def test_a_model_without_torch_is_measured_where_there_is_none(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    blocked = "import sys; sys.modules['torch'] = None; from phyai_engine.cli import main; main()"
    command = [sys.executable, "-W", "error", "-c", blocked, "bench", "fake", "--robot", "arm7", "--n", "2", "-o", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = read(out)
    assert result.end_to_end.n == 2
    assert len(result.warm_up.others_ms) == DEFAULT_RUNS["cpu"].warm_up - 1
    assert result.phases["prefix"].p50_ms > 3.0  # its configured latency: 20 ms over 5 calls
    assert (result.memory.weights, result.memory.peak_ratio) == (0, None)
    assert (result.environment.torch, result.environment.threads) == ("not used", 0)
    assert (result.ceilings, result.rates) == (None, {})
    assert "no weights" in done.stdout
    assert "no prompt" in done.stdout


def test_a_chunk_that_is_not_finite_ends_with_1(tmp_path: Path) -> None:
    model, out = tmp_path / "nan.yaml", tmp_path / "bench.json"
    options = {"action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], "nan_at": 3}
    model.write_text(yaml.safe_dump({"family": "fake", "options": options}))
    code, text, _ = run(model, "--robot", "arm7", "--n", 2, "--warm-up", 1, "-o", out)
    assert code == 1
    assert "NOT FINITE: 3 of 3 chunks" in text
    assert read(out).chunk.not_finite == 3


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("pi06",), ("no model named 'pi06'", "pi05")),
        (("fake", "--robot", "arm8"), ("no robot named 'arm8'", "Did you mean 'arm7'?")),
        (("fake", "--robot", "arm7", "--cameras", "3"), ("not that many cameras, got 3, wanted <= 2",)),
        (("fake", "--robot", "arm7", "--device", "cuda"), ("does not compute there, got cpu, wanted cuda",)),
        (("fake", "--robot", "arm7", "--dtype", "bfloat16"), ("unknown key 'dtype'",)),
        (("fake", "--robot", "arm7", "--out", "none/such.json"), ("no such folder, at none",)),
        (
            ("pi0_demo", "--robot", "arm7", "--prompt-tokens", "97"),
            ("got 97 tokens, wanted <= 96, at --prompt-tokens",),
        ),
        (("pi0_demo", "--robot", "arm7", "--prompt-tokens", "1"), ("got 1 tokens, wanted >= 2, at --prompt-tokens",)),
        (("fake", "--n", "0"), ("--n",)),
        (("fake", "--device", "gpu"), ("'cpu', 'cuda'",)),
    ],
)
def test_what_cannot_be_measured_ends_with_2(arguments: tuple[str, ...], fragments: tuple[str, ...]) -> None:
    code, out, errors = run(*arguments)
    assert code == 2
    assert all(fragment in " ".join(errors.replace("│", "").split()) for fragment in fragments), errors
    assert "phyai bench" not in out


def test_a_checkpoint_folder_is_measured_with_its_cameras_and_tokenizer(
    checkpoints: ModuleType, tmp_path: Path
) -> None:
    options, roles = checkpoints.sizes("pi05"), ["top", "left", "right", "far"]
    statistics = checkpoints.statistics(load_robot(resolve("robots", "aloha")))
    folder = checkpoints.write_lerobot(
        tmp_path / "policy", checkpoints.weights(options), options, statistics, cameras=roles
    )
    out = tmp_path / "bench.json"
    code, _, errors = run(folder, "--device", "cpu", "--n", 1, "--warm-up", 0, "--prompt-tokens", 150, "-o", out)
    assert code == 0, errors
    subject = read(out).subject
    assert (subject.robot, subject.cameras, subject.options["cameras"]) == ("aloha", 3, roles)
    assert subject.prompt_tokens in (150, 151)


@pytest.mark.gpu
def test_a_demo_model_is_measured_on_cuda(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    code, text, errors = run("pi05_demo", "--robot", "arm7", "--device", "cuda", "--n", 1, "--out", out)
    assert code == 0, errors
    result = read(out)
    assert list(result.phases) == ["encode", "stage", "copy_in", "vision", "prefix", *STEPS, "copy_out", "decode"]
    assert all(figures.p50_ms > 0 for figures in result.phases.values())
    # Two clocks: the device's between the borders, the host's around it all.
    assert sum(figures.p50_ms for figures in result.phases.values()) <= 1.02 * result.end_to_end.p50_ms
    assert result.memory.peak_device is not None
    assert result.memory.peak_device >= result.memory.weights > 100_000
    assert result.phase_clock in " ".join(text.split())  # a narrow title wraps


# --- what was asked for ---


def test_the_work_of_the_released_pi05_is_that_of_its_dimensions() -> None:
    """Three cameras, 200 prompt tokens, bfloat16: the published layers multiplied out."""
    work = phase_work(PiOptions(), BatchShape(1, 3, 968), 2, 2)
    assert work["vision"].flop / 1e9 == pytest.approx(660.5, rel=1e-3)
    assert work["prefix"].flop / 1e9 == pytest.approx(3756.2, rel=1e-3)
    assert work["prefix"].bytes / 1e6 == pytest.approx(3745.5 + 17.8, rel=1e-3)
    assert work["step"].flop / 1e9 == pytest.approx(38.65, rel=1e-3)
    assert work["step"].bytes / 1e6 == pytest.approx(622.9 + 18.8, rel=2e-3)


def test_coded_weights_are_read_as_bytes() -> None:
    sizes: dict[str, Any] = {
        "vocab": 64, "vis_width": 16, "vis_depth": 1, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 2,
        "mlp": 64, "heads": 4, "kv_heads": 1, "head_dim": 8, "exp_width": 32, "exp_mlp": 48, "action_dim": 5,
        "action_horizon": 8, "num_steps": 2, "prompt_len": 9, "image_size": 20, "patch": 4, "cameras": ("a",),
        "dtype": "bfloat16", "kernels": "reference",
    }  # fmt: skip
    inputs = {"image_mask": np.array([True]), "token_mask": np.ones(9, np.bool_)}
    plain, coded = (
        PiModel.random(PiOptions(**sizes, quant=quant), seed=1).work([inputs]) for quant in ("none", "w8a8_fp8")
    )
    layer = 2 * 32 * 32 + 32 * 2 * 8  # q and o; k and v
    assert plain["step"].bytes - coded["step"].bytes == 2 * (layer + 3 * 32 * 48)
    assert plain["prefix"].bytes - coded["prefix"].bytes == layer + 3 * 32 * 64 + 32 * 2 * 8  # the last layer: k and v
    assert [plain[phase].flop for phase in plain] == [coded[phase].flop for phase in coded]


@pytest.mark.parametrize("variant", ["pi05", "pi0"])
@pytest.mark.parametrize("seen", [(True, True), (False, True)])
def test_the_work_is_what_the_model_multiplies(variant: Any, seen: tuple[bool, bool]) -> None:
    sizes: dict[str, Any] = {
        "vocab": 64, "vis_width": 16, "vis_depth": 2, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 3,
        "mlp": 64, "heads": 4, "kv_heads": 1, "head_dim": 8, "exp_width": 24, "exp_mlp": 48, "action_dim": 5,
        "action_horizon": 8, "num_steps": 5, "prompt_len": 9, "image_size": 20, "patch": 4, "cameras": ("a", "b"),
    }  # fmt: skip
    model = PiModel.random(PiOptions(variant=variant, **sizes), seed=1)
    inputs = {
        "images": np.zeros((2, 3, 20, 20), np.float32), "image_mask": np.array(seen),
        "tokens": np.zeros(9, np.int64), "token_mask": np.arange(9) < 6, "state": np.zeros(5, np.float32),
    }  # fmt: skip
    work = model.work([inputs])
    with FlopCounterMode(display=False) as encoded:
        prefix = model.prefix({name: model.to_device(array[None]) for name, array in inputs.items()})
    with FlopCounterMode(display=False) as stepped:
        model.velocity(prefix, torch.zeros(1, 8, 5), 1)
    length, after = 25 * sum(seen) + 6, 9 if variant == "pi0" else 8
    # The reference multiplies the slab's free columns too, and hides them.
    hidden = 2 * 4 * 32 * (length * after + (8 if variant == "pi0" else 0))
    assert encoded.get_total_flops() == work["vision"].flop + work["prefix"].flop + hidden
    assert stepped.get_total_flops() == work["step"].flop


def test_a_rate_is_work_over_time_and_its_floor_the_longer_of_two() -> None:
    most = Ceilings(tb_s=2.0, tflop_s=100.0, side=1, dtype="float32")
    found = rates({"a": Work(1e12, 1e9), "b": Work(1e9, 4e12), "c": Work(1.0, 1.0)}, {"a": 20.0, "b": 4000.0}, most)
    assert list(found) == ["a", "b"]
    assert (found["a"].tflop_s, found["a"].tb_s, found["a"].floor_ms) == pytest.approx((50.0, 0.05, 10.0))
    assert found["b"].floor_ms == pytest.approx(2000.0)


# --- where the time went ---


class Slow:
    """A fake model with a vision phase, one phase of which takes longer: always, or in the first run only."""

    def __init__(self, phase: str, sleep_s: float, *, first_run_only: bool = False) -> None:
        self._model = FakeModel(FakeOptions(action_dim=8, num_steps=4, horizon=8))
        self.spec = self._model.spec
        self._phase, self._sleep_s, self._first_run_only = phase, sleep_s, first_run_only

    def _sleep(self, phase: str) -> None:
        if phase == self._phase and self._sleep_s:
            time.sleep(self._sleep_s)
            self._sleep_s = 0.0 if self._first_run_only else self._sleep_s

    def to_device(self, array: Any) -> Any:
        return array

    def to_host(self, array: Any) -> Any:
        self._sleep("copy_out")
        return array

    def prefix(self, inputs: Mapping[str, Any], on_phase: Callable[[str], None] = lambda _: None) -> Any:
        self._sleep("copy_in")
        on_phase("vision")
        self._sleep("vision")
        prefix = self._model.prefix(inputs, on_phase)
        self._sleep("prefix")
        return prefix

    def velocity(self, prefix: Any, x: F32, step: int) -> F32:
        self._sleep(f"step {step}")
        return self._model.velocity(prefix, x, step)


def measured(model: Model, monkeypatch: pytest.MonkeyPatch, slow: str = "", **runs: int) -> Measured:
    config = ModelConfig(family="fake", normalisation=Normalisation(kind="limits"))
    adapter = Adapter(msgspec.structs.replace(ARM7, cameras=()), config, model.spec)
    if slow:
        whole = getattr(adapter, slow)
        monkeypatch.setattr(adapter, slow, lambda *arguments: (time.sleep(0.05), whole(*arguments))[1])
    series = requests(adapter, seed=1, prompt_tokens=10)
    return measure(Bench(Policy(adapter, Runner(model), "fake"), series, HostClock()), **runs)


@pytest.mark.parametrize("phase", ["encode", "copy_in", "vision", "prefix", "step 0", "step 3", "copy_out", "decode"])
def test_a_planted_slow_phase_stands_in_its_row(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = phase in ("encode", "decode")
    result = measured(Slow(phase, 0.0 if outside else 0.05), monkeypatch, phase if outside else "", warm_up=0, n=3)
    phases = result.phases()
    assert [*phases] == ["encode", "stage", "copy_in", "vision", "prefix", *STEPS[:4], "copy_out", "decode"]
    medians = {name: figures.p50_ms for name, figures in phases.items()}
    assert medians.pop(phase) >= 50.0
    assert max(medians.values()) < 25.0
    assert (result.steps_sum().p50_ms >= 50.0) == phase.startswith("step")
    assert result.end_to_end().p50_ms >= 50.0
    for one in result.counted:
        assert sum(one.phases.values()) <= one.end_to_end_ms


def test_warm_up_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(Slow("prefix", 0.05, first_run_only=True), monkeypatch, warm_up=3, n=5)
    warm_up = result.warm_up_ms()
    assert warm_up.first_ms is not None
    assert warm_up.first_ms >= 50.0
    assert len(warm_up.others_ms) == 2
    assert result.end_to_end().n == 5
    assert result.end_to_end().p50_ms < 50.0


def test_a_phase_that_begins_twice_is_one() -> None:
    clock = HostClock()
    for phase in ("a", "b", "a", "end"):
        clock(phase)
        time.sleep(0.002)
    taken = clock.take()
    assert [*taken] == ["a", "b"]
    assert taken["a"] >= 4.0
    assert clock.take() == {}, "a run's borders are forgotten"


class StandInCuda:
    """Records what CudaClock asks of torch.cuda; events happen one millisecond apart."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.nvtx = self
        self.now = self.events = 0

    def Event(self, *, enable_timing: bool) -> StandInEvent:  # torch's name
        assert enable_timing
        self.events += 1
        return StandInEvent(self)

    def range_push(self, name: str) -> None:
        self.log.append(f"<{name}")

    def range_pop(self) -> None:
        self.log.append(">")


class StandInEvent:
    def __init__(self, cuda: StandInCuda) -> None:
        self.cuda = cuda
        self.at_ms = -1

    def record(self) -> None:
        self.cuda.now += 1
        self.at_ms = self.cuda.now

    def synchronize(self) -> None:
        self.cuda.log.append(f"wait for {self.at_ms}")

    def elapsed_time(self, end: StandInEvent) -> float:
        return float(end.at_ms - self.at_ms)


def test_cuda_phases_are_event_pairs_and_closed_nvtx_ranges() -> None:
    cuda = StandInCuda()
    clock = CudaClock(cuda)
    for _ in range(2):
        cuda.log.clear()
        with clock.named("encode"):
            pass
        for phase in ("copy_in", "prefix", "end"):
            clock(phase)
        assert cuda.log == ["<encode", ">", "<copy_in", ">", "<prefix", ">"], "nothing waits while a run lasts"
        assert clock.take() == {"copy_in": 1.0, "prefix": 1.0}
        assert cuda.log[-1].startswith("wait for")
    assert cuda.events == 3, "the second run takes those of the first"


def test_a_run_that_was_not_finished_is_forgotten_without_waiting() -> None:
    cuda = StandInCuda()
    clock = CudaClock(cuda)
    clock("stage")
    clock("copy_in")
    clock.drop()
    assert cuda.log == ["<stage", ">", "<copy_in", ">"]
    clock("stage")
    clock("end")
    assert clock.take() == {"stage": 1.0}
    host = HostClock()
    host("stage")
    host.drop()
    assert host.take() == {}


def test_the_clock_follows_where_the_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(FakeOptions())
    assert isinstance(clock_of(model), HostClock)
    on_gpu = SimpleNamespace(device="cuda:0")
    monkeypatch.setattr(model, "to_device", lambda _: on_gpu)
    assert isinstance(clock_of(model), CudaClock)


# --- what is measured ---


def test_the_first_cameras_take_the_models_roles() -> None:
    roles = ("top", "side", "far")
    assert [(c.name, c.role) for c in with_cameras(ARM7, None, roles).cameras] == [("front", "top"), ("wrist", "side")]
    assert [c.role for c in with_cameras(ARM7, None, roles[:1]).cameras] == ["top"]
    assert [c.role for c in with_cameras(ARM7, 1, None).cameras] == ["base_0_rgb"]
    assert with_cameras(ARM7, 0, roles).cameras == ()
    with pytest.raises(ConfigError, match="got 2, wanted <= 1: robot arm7 has 2, the model 1"):
        with_cameras(ARM7, 2, roles[:1])


def test_requests_are_seeded_and_within_the_limits() -> None:
    policy = load_policy(ARM7, load_model(resolve("models", "fake")))
    one, same, other = (requests(policy.adapter, seed=seed, prompt_tokens=1) for seed in (3, 3, 4))
    for index in (0, 1, 7):
        a, b, c = (series(index).observation for series in (one, same, other))
        np.testing.assert_array_equal(a.images["front"], b.images["front"])
        np.testing.assert_array_equal(a.state, b.state)
        assert not np.array_equal(a.images["front"], c.images["front"])
        assert a.images["front"].shape == (480, 640, 3)
    assert one(0).seed != one(1).seed
    assert not np.array_equal(one(0).observation.images["front"], one(1).observation.images["front"])
    state = one(0).observation.state
    assert all(action.lower < value < action.upper for action, value in zip(ARM7.actions, state, strict=True))


@pytest.mark.parametrize("wanted", [10, 11, 17, 18, 92, 93, 100])
def test_the_prompt_has_the_wanted_length_and_is_not_cut(wanted: int) -> None:
    encode = ByteTokenizer().encode
    instruction = fill(lambda s: min(len(encode(f"Task: {s}, A:")), 100), wanted)
    assert len(encode(f"Task: {instruction}, A:")) == wanted
    assert instruction == instruction.strip()


def test_a_text_never_ends_in_a_blank() -> None:
    texts = [text(length) for length in range(400)]
    assert [len(each) for each in texts] == [*range(400)]
    assert not any(each.endswith(" ") for each in texts)


def test_the_prompts_end_survives_on_a_demo_model() -> None:
    series = requests(adapter_of("pi05_demo"), seed=0, prompt_tokens=200)
    row = adapter_of("pi05_demo").encode(series(0))
    said = bytes(int(token) - 3 for token in row.inputs["tokens"][row.inputs["token_mask"]][1:]).decode()
    assert series.prompt_tokens == len(said) + 1 == 200
    assert said.endswith(";\nAction: ")


def adapter_of(name: str) -> Adapter:
    """Without the model's weights."""
    config = load_model(resolve("models", name))
    options = msgspec.convert({"variant": config.family, **config.options}, PiOptions)
    return Adapter(ARM7, config, options.spec())


@pytest.mark.parametrize(("name", "prompt_len"), [("pi05", 200), ("pi0", 48)])
def test_the_full_size_files_are_the_released_dimensions_in_bfloat16(name: str, prompt_len: int) -> None:
    config = load_model(resolve("models", name))
    assert config.family == name
    released = PiOptions(variant=name, dtype="bfloat16", prompt_len=prompt_len)
    assert msgspec.convert({"variant": name, **config.options}, PiOptions) == released
    assert config.prompt == PromptConfig(form="plain" if name == "pi0" else "state_bins", max_tokens=prompt_len)


@pytest.mark.parametrize("name", ["pi05", "pi0"])
def test_the_full_size_files_are_measured_with_three_cameras(name: str) -> None:
    options = BenchOptions(model=name, device="cpu", dtype="float32")
    config = model_config(options)
    assert (config.device, config.options["dtype"]) == ("cpu", "float32")
    robot: RobotConfig = robot_config(options, config)
    assert [camera.role for camera in robot.cameras] == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert len(robot.actions) == 14


def test_the_device_is_asked_of_the_model() -> None:
    model = FakeModel(FakeOptions())
    assert device_of(model) == "cpu"
    model.to_device = lambda _: torch.zeros(1, device="meta")  # type: ignore[method-assign,assignment,return-value]
    assert device_of(model) == "meta"


def test_the_roles_of_a_robot_that_was_asked_for_are_its_own() -> None:
    config = ModelConfig(family="fake", options={"cameras": ["top"]})
    asked, unasked = (robot_config(BenchOptions(model="", robot=name), config) for name in ("arm7", ""))
    assert [camera.role for camera in asked.cameras] == ["base_0_rgb", "left_wrist_0_rgb"]
    assert [camera.role for camera in unasked.cameras] == ["top"]


def test_every_run_has_a_request_of_its_own() -> None:
    policy = load_policy(ARM7, load_model(resolve("models", "fake")))
    series = requests(policy.adapter, seed=0, prompt_tokens=1)
    asked: list[int] = []

    def watched(index: int) -> Request:
        asked.append(index)
        return series(index)

    measure(Bench(policy, watched, HostClock()), warm_up=1, n=2)
    assert asked == [0, 1, 2]


def test_requests_without_a_prompt_need_no_tokens() -> None:
    policy = load_policy(ARM7, load_model(resolve("models", "fake")))
    series: Requests = requests(policy.adapter, seed=0, prompt_tokens=10_000)
    assert series.prompt_tokens == 0


def test_warnings_are_in_the_file_and_on_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    out = tmp_path / "bench.json"
    _, text, _ = run("fake", "--robot", "arm7", "--n", 1, "--warm-up", 0, "--out", out)
    warnings = read(out).warnings
    assert "99.0" in warnings[0]
    assert all(f"warning: {warning}" in " ".join(text.split()) for warning in warnings)
