"""phyai hotspots and judge: what a request spends its time in, and the one gate that candidates go through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from phyai_kernels import reference

from phyai_engine import judge
from phyai_engine.errors import ConfigError
from phyai_engine.hotspots import _RANGE, Case, _times, full_request, hotspots, hotspots_command, load_case, save
from phyai_engine.judge import judge_command, whole_requests, winner
from phyai_engine.layers.ops import OpShape
from phyai_engine.trial import Trial, attempt, fastest

CPU = torch.device("cpu")
CASE = Case(
    op="linear", reference="phyai_kernels.reference.linear", dtype="float32", dims=(3, 20, 8), calls=4, us=9.0,
    share=0.5, bound="reference", model="pi05_demo", device="cpu",
)  # fmt: skip
SLOW = """import time
from phyai_kernels import reference

def linear(*a):
    time.sleep(0.01)
    return reference.linear(*a)
"""
WRONG = "def linear(x, w, b=None):\n    return 1.1 * (x @ w.T)\n"


@pytest.fixture
def small_model(tmp_path: Path) -> str:
    """A pi0.5 of a few thousand weights."""
    sizes = {
        "vocab": 300, "vis_width": 16, "vis_depth": 1, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 2,
        "mlp": 64, "heads": 4, "kv_heads": 1, "head_dim": 8, "exp_width": 40, "exp_mlp": 48, "num_steps": 3,
        "prompt_len": 40, "image_size": 20, "patch": 4, "cameras": ["base", "wrist"],
    }  # fmt: skip
    content = {"family": "pi05", "device": "cpu", "options": sizes, "normalisation": {"kind": "limits"}}
    content["prompt"] = {"max_tokens": 40}
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_the_calls_of_a_request_are_ranked_and_add_up(small_model: str) -> None:
    policy, row = full_request(small_model, "cpu")
    bound = policy.runner.model.ops  # type: ignore[attr-defined]
    found, total_us = hotspots(policy, row, small_model, "cpu")
    assert policy.runner.model.ops is bound  # type: ignore[attr-defined]
    assert [case.share for case in found] == sorted((case.share for case in found), reverse=True)
    assert 0.3 < sum(case.share for case in found) <= 1.0 and total_us > 0
    calls = {(case.op, case.dims[0]): case.calls for case in found if case.op in ("gated_up", "ada_rms_norm")}
    length = max(rows for op, rows in calls if op == "gated_up")
    # Of two layers: the prefix leaves its last MLP out, the action expert runs three times.
    assert calls == {("gated_up", length): 1, ("gated_up", 50): 6, ("ada_rms_norm", 50): 3}
    assert all(case.us > 0 for case in found)


def event(name: str, start: int, end: int, *, on: str = "DeviceType.CUDA", children: list[Any] | None = None) -> Any:
    """As torch's profiler has them [us]."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    inside = sum(child.cpu_time_total for child in children or [])
    return SimpleNamespace(
        name=name, device_type=on, time_range=span, cpu_time_total=end - start, cpu_children=children or [],
        self_cpu_time_total=end - start - inside,
    )  # fmt: skip


def test_a_kernel_belongs_to_the_innermost_range_around_it() -> None:
    """Not the span of a range, in which the device also waits for the host."""
    a, b = f"{_RANGE} outer", f"{_RANGE} inner"
    events = [
        event(a, 0, 100), event(b, 10, 30), event("k1", 0, 5), event("k2", 10, 14), event("k3", 26, 30),
        event("k4", 90, 100), event("copy", 200, 207), event("k1", 0, 5, on="DeviceType.CPU"),
    ]  # fmt: skip
    spent, total = _times(SimpleNamespace(events=lambda: events), on_cuda=True)
    assert (spent, total) == ({a: 15.0, b: 8.0}, 30.0)


def test_on_the_cpu_a_range_has_what_no_range_inside_it_has() -> None:
    a, b = f"{_RANGE} outer", f"{_RANGE} inner"
    inner = event(b, 10, 30, on="DeviceType.CPU")
    between = event("aten::linear", 5, 40, on="DeviceType.CPU", children=[inner])
    events = [event(a, 0, 100, on="DeviceType.CPU", children=[between]), between, inner]
    spent, total = _times(SimpleNamespace(events=lambda: events), on_cuda=False)
    assert (spent, total) == ({a: 80.0, b: 20.0}, 100.0)


def test_cases_are_written_and_are_what_judge_reads(
    small_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cases"
    assert hotspots_command(small_model, "cpu", 3, out) == 0
    files = sorted(out.iterdir())
    assert [file.name[:3] for file in files] == ["01_", "02_", "03_"]
    first = load_case(files[0])
    assert first.reference == f"phyai_kernels.reference.{first.op}" and first.shape.dims == first.dims
    printed = " ".join(capsys.readouterr().out.split())
    assert "all that is no operator" in printed and "wrote 3 cases" in printed


def test_a_model_without_operators_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fake.yaml"
    path.write_text("family: fake\nnormalisation: {kind: limits}\noptions: {action_dim: 32, cameras: [base_0_rgb]}\n")
    with pytest.raises(ConfigError, match="no operators of ours"):
        full_request(str(path), "auto")


@pytest.mark.parametrize(("change", "text"), [({"dtype": "float64"}, "unknown dtype"), ({"op": "matmul"}, "unknown")])
def test_a_case_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "case.yaml"
    save(CASE, path)
    assert load_case(path) == CASE
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(Exception, match=text):
        _ = load_case(path).shape


def test_the_gate_drops_what_is_wrong_or_fails_and_times_what_is_right() -> None:
    right = attempt(CASE.shape, "right", lambda: reference.linear, CPU)
    assert right.us is not None and right.us > 0 and right.error == 0.0 and not right.why
    wrong = attempt(CASE.shape, "wrong", lambda: lambda x, w, b=None: 1.1 * reference.linear(x, w, b), CPU)
    assert wrong.us is None and wrong.why.startswith("wrong, error 1") and "allowed 2e-05" in wrong.why
    failed = attempt(CASE.shape, "broken", lambda: {}["nothing"], CPU)  # type: ignore[arg-type,index]
    assert (failed.us, failed.error) == (None, None) and failed.why.startswith("fails: KeyError")


def test_chance_displaces_nobody() -> None:
    assert fastest({"bound": 10.0, "other": 9.8}, "bound") == "bound"
    assert fastest({"bound": 10.0, "other": 9.6}, "bound") == "other"
    assert fastest({}, "bound") == "bound"
    trials = [Trial("bound", 0.0, 10.0, "", 0.1), Trial("slow", 0.0, 30.0, "", 0.1), Trial("bad", 1.0, None, "x", 0.1)]
    assert winner(trials) is None
    assert winner([*trials, Trial("fast", 0.0, 5.0, "", 0.1)]) == Trial("fast", 0.0, 5.0, "", 0.1)


def test_candidates_of_files_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tmp_path / "case.yaml"
    save(CASE, case)
    files = {name: tmp_path / f"{name}.py" for name in ("slow", "wrong", "empty")}
    for name, text in {"slow": SLOW, "wrong": WRONG, "empty": ""}.items():
        files[name].write_text(text)
    # What is bound is the reference itself: it may lose to itself by chance, then a request is timed too.
    judge_command(case, list(files.values()), whole=False)
    printed = " ".join(capsys.readouterr().out.split())
    assert "dropped: a regression" in printed and "dropped: wrong, error" in printed
    assert "dropped: fails: AttributeError" in printed and "search: " in printed
    with pytest.raises(ConfigError, match="no such candidate"):
        judge_command(case, [tmp_path / "absent.py"], whole=False)


def test_a_gain_is_measured_in_whole_requests(
    small_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, row = full_request(small_model, "cpu")
    shape = OpShape("gated_up", torch.float32, (50, 40, 48))
    calls: list[int] = []

    def counted(x: Any, weight: Any) -> Any:
        calls.append(len(x))
        return reference.gated_up(x, weight)

    before, after = whole_requests(policy, row, shape, counted)
    assert before > 0 and after > 0
    assert len(calls) == 7 * 6  # five timed requests and two before, six calls each; no other shape
    assert policy.runner.model.ops.gated_up is reference.gated_up  # type: ignore[attr-defined]

    case, file = tmp_path / "case.yaml", tmp_path / "fast.py"
    save(Case(**{**{f: getattr(CASE, f) for f in CASE.__struct_fields__}, "op": "gated_up", "dims": (50, 40, 48),
                 "model": small_model}), case)  # fmt: skip
    file.write_text(
        "from phyai_kernels.reference import gated_up as own\n\n\ndef gated_up(x, w):\n    return own(x, w)\n"
    )

    def slow(*_: Any) -> Any:
        return lambda x, w: (torch.ones(300, 300) @ torch.ones(300, 3000), reference.gated_up(x, w))[1]

    monkeypatch.setattr(judge, "bound_at", slow)
    monkeypatch.setattr(judge, "whole_requests", lambda *_: (5.0, 4.0))
    assert judge_command(case, [file], whole=True) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "x as fast; 4 calls a request gain" in printed and "5.000 -> 4.000 ms, +1.000 ms gained" in printed
    monkeypatch.setattr(judge, "whole_requests", lambda *_: (4.0, 5.0))
    assert judge_command(case, [file], whole=True) == 1
    assert "dropped: a regression of the request" in " ".join(capsys.readouterr().out.split())
