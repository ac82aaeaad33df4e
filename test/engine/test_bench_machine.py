"""phyai bench: what it says about the machine it ran on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai_engine.bench import machine


def test_a_loaded_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.0, 9.0, 9.0))
    assert machine.load_warning() == ""
    monkeypatch.setattr(os, "getloadavg", lambda: (2.1, 0.0, 0.0))
    assert "the machine was loaded before: 2.1 on 4 cores" in machine.load_warning()


@pytest.mark.parametrize(
    ("all_s", "told"),
    [
        (13.0, ""),  # 3 of them ours: 1.0 cores
        (13.1, "other processes took 1.0 of 4 cores during the runs"),
        (math.nan, ""),
    ],
)
def test_the_work_of_others_is_told(all_s: float, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    warning = machine.others_warning(machine.Work(100.0, 500.0, 5.0), machine.Work(110.0, 500.0 + all_s, 8.0))
    assert warning.partition(";")[0] == told


def test_work_is_what_the_system_counts(tmp_path: Path) -> None:
    counters = tmp_path / "stat"
    assert math.isnan(machine.work(counters).all)
    counters.write_text("cpu  1 2 4 1000 1000 8 16 32 9000 9000\ncpu0 7 7 7 7 7 7 7 7 0 0\n")
    assert machine.work(counters).all == (1 + 2 + 4 + 8 + 16 + 32) / os.sysconf("SC_CLK_TCK")
    before = machine.work()
    while time.process_time() < before.own + 0.2:
        pass
    after = machine.work()
    assert 0.2 <= after.own - before.own < after.wall - before.wall + 0.1
    if Path("/proc/stat").exists():
        assert after.all - before.all > 0.15, "ours is part of all; counted in ticks"


OTHER = machine.GpuProcess("GPU-aa", 7, "trainer")
OURS = machine.GpuProcess("GPU-aa", os.getpid(), "python")
OURS_IN_A_CONTAINER = machine.GpuProcess("GPU-aa", 4_000_000, "python")
ELSEWHERE = machine.GpuProcess("GPU-bb", 8, "other")
PART = machine.GpuProcess("MIG-cc", 9, "part")


@pytest.mark.parametrize(
    ("before", "after", "gpu", "told"),
    [
        ([], [OURS], "aa", []),
        ([], [], "aa", []),
        ([], [OURS_IN_A_CONTAINER], "aa", []),
        ([OTHER], [OTHER, OURS], "aa", ["trainer"]),
        ([OTHER], [OURS_IN_A_CONTAINER], "aa", ["trainer"]),
        ([], [OURS, OTHER], "aa", ["trainer"]),
        ([ELSEWHERE], [ELSEWHERE, OURS], "aa", []),
        ([ELSEWHERE], [ELSEWHERE, OURS], "", ["other"]),  # torch does not say which GPU is ours
        ([PART], [OURS], "aa", ["part"]),
    ],
)
def test_other_processes_on_the_gpu_are_told(
    before: list[machine.GpuProcess], after: list[machine.GpuProcess], gpu: str, told: list[str]
) -> None:
    warnings = machine.gpu_warnings(before, after, gpu)
    assert len(warnings) == len(told)
    assert all(f": {name}, pid " in warning for name, warning in zip(told, warnings, strict=True))


def test_the_list_of_gpu_processes_is_nvidia_smis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = machine.gpu_processes()
    assert isinstance(absent, str)
    assert "nvidia-smi is absent" in absent
    assert machine.gpu_warnings(absent, absent, "") == [absent]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-aa, 7, /usr/bin/trainer, v2'\necho 'No running processes found'\n")
    tool.chmod(0o755)
    assert machine.gpu_processes() == [machine.GpuProcess("GPU-aa", 7, "/usr/bin/trainer, v2")]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "exit status 9" in str(machine.gpu_processes())


def test_weights_that_are_shared_count_once() -> None:
    whole = torch.zeros(250, 4)
    model = torch.nn.ParameterList([whole[:100], whole[100:]])
    model.register_buffer("table", torch.zeros(100, dtype=torch.bfloat16))
    assert machine.weights_bytes(model) == 4000 + 200


def test_the_peak_is_that_of_this_process_and_stays() -> None:
    script = """
import numpy as np
from phyai_engine.bench.machine import peak_rss
before = peak_rss()
reserved = np.empty(500 * 2**20, dtype=np.uint8)  # never touched: no memory
np.ones(100 * 2**20, dtype=np.uint8)
print(before, peak_rss())
"""
    ballast = np.ones(300 * 2**20, dtype=np.uint8)  # a child's getrusage would begin with its parent's peak
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    del ballast
    before, peak = (int(word) / 2**20 for word in done.stdout.split())
    assert before < 200
    assert 95 < peak - before < 150


def test_triton_of_another_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(machine.metadata, "version", unknown)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name == "triton")
    assert machine.environment("cpu", {}).triton == "of another package"


def test_the_environment_names_versions_commit_and_kernels() -> None:
    here = machine.environment("cpu", {"linear": "reference: no accelerator"})
    root = Path(machine.__file__).resolve().parents[2]
    assert here.kernels == {"linear": "reference: no accelerator"}
    assert here.cores >= 1
    assert here.device
    assert here.triton
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert here.commit.rstrip("+") == head.stdout[:12]
