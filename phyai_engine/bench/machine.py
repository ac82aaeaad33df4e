"""The machine under a measurement: what it is, what else runs on it, how much memory was needed."""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from phyai_engine.host import cores, processor

_KIB = 1024


class Environment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where and with what a measurement was made.

    :param device: name of the processor or accelerator. :param threads: of torch, 0 without it.
    :param kernels: operator -> what is bound and why. :param commit: of the checkout, with ``+`` where files differ
        from it; empty for an installed package.
    """

    date: str
    host: str
    device: str
    cores: int
    threads: int
    python: str
    torch: str
    triton: str
    commit: str
    kernels: dict[str, str]


def environment(device: str, kernels: Mapping[str, str]) -> Environment:
    """Of this process. :param device: torch's name of where the model computes."""
    torch = _loaded_torch()
    return Environment(
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        host=platform.node(),
        device=torch.cuda.get_device_name(device) if torch and device.startswith("cuda") else processor(),
        cores=cores(),
        threads=torch.get_num_threads() if torch else 0,
        python=platform.python_version(),
        torch=str(torch.__version__) if torch else "not used",
        triton=_triton(),
        commit=_commit(Path(__file__).resolve().parents[2]),
        kernels=dict(kernels),
    )


def load_warning() -> str:
    """A sentence if there was much work in the last minute, else empty. Ask before the measurement: it is load too."""
    load, count = os.getloadavg()[0], cores()
    if load <= count / 2:
        return ""
    return f"the machine was loaded before: {load:.1f} on {count} cores over the last minute; times may be too long"


class Work(NamedTuple):
    """Seconds so far. :param wall: passed. :param all: of work on all cores together, NaN if unknown.

    :param own: of it, this process'.
    """

    wall: float
    all: float
    own: float


def work(counters: Path = Path("/proc/stat")) -> Work:
    """Until now. :param counters: Linux' file."""
    own, wall = time.process_time(), time.monotonic()
    try:
        ticks = [int(word) for word in counters.read_text(encoding="utf-8").split(maxsplit=9)[1:9]]
        user, nice, system, _idle, _wait, irq, soft_irq, steal = ticks
    except (OSError, ValueError):
        return Work(wall, math.nan, own)
    return Work(wall, (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK"), own)


def others_warning(before: Work, after: Work) -> str:
    """A sentence if other processes took more than a quarter of the cores, else empty.

    The load average tells neither when the work was done nor by whom.
    """
    all_, own, count = after.all - before.all, after.own - before.own, cores()
    taken = (all_ - own) / max(after.wall - before.wall, 1e-9)
    if not taken > count / 4:
        return ""
    return f"other processes took {taken:.1f} of {count} cores during the runs; times are too long"


class GpuProcess(NamedTuple):
    """One line of nvidia-smi's list."""

    gpu: str
    pid: int
    name: str


def gpu_processes() -> list[GpuProcess] | str:
    """Who computes on the GPUs of this machine, or the reason why that is not known."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is absent: whether other processes use the GPU is not known"
    query = [tool, "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {error}: whether other processes use the GPU is not known"
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in done.stdout.splitlines()]
    return [GpuProcess(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def gpu_warnings(before: list[GpuProcess] | str, after: list[GpuProcess] | str, gpu: str) -> list[str]:
    """Sentences about others on the GPU that was measured.

    :param before: asked before this process touched it, hence without us. :param after: asked after the measurement.
        In a container our own process stands there under another number.
    :param gpu: its uuid as torch writes it; empty if torch does not say.
    """
    if isinstance(before, str) or isinstance(after, str):
        return [next(reason for reason in (before, after) if isinstance(reason, str))]
    others = [process for process in before if _may_be_on(process, gpu)]
    joined = [p for p in after if p not in before and p.pid != os.getpid() and _may_be_on(p, gpu)]
    if all(process.pid != os.getpid() for process in after):
        joined = joined[1:]
    return [
        f"another process uses the GPU: {process.name}, pid {process.pid}; times may be too long"
        for process in [*others, *joined]
    ]


def gpu_uuid(device: str) -> str:
    """As torch writes it, empty where it does not. :param device: torch's name of a CUDA device."""
    return str(getattr(_loaded_torch().cuda.get_device_properties(device), "uuid", ""))


def _may_be_on(process: GpuProcess, gpu: str) -> bool:
    """A part of a GPU (MIG) has a name of its own, by which we cannot tell."""
    return not gpu or not process.gpu.startswith("GPU-") or process.gpu.removeprefix("GPU-") == gpu


class Memory(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes. :param peak_ratio: the peak where the model computes, as a multiple of its weights; None without weights.

    :param peak_rss: largest resident set of this process, the interpreter and its libraries included.
    :param peak_device: largest sum of tensors on an accelerator; None on the CPU.
    """

    weights: int
    peak_rss: int
    peak_device: int | None
    peak_ratio: float | None


def memory(model: Any, device: str) -> Memory:
    """What this process needed so far, and the weights' share of it."""
    torch, weights = _loaded_torch(), weights_bytes(model)
    on_device = torch.cuda.max_memory_allocated(device) if torch and device.startswith("cuda") else None
    rss = peak_rss()
    peak = rss if on_device is None else on_device
    return Memory(weights=weights, peak_rss=rss, peak_device=on_device, peak_ratio=peak / weights if weights else None)


def weights_bytes(model: Any) -> int:
    """Memory of a model's parameters and buffers; 0 for a model without."""
    torch = _loaded_torch()
    if torch is None or not isinstance(model, torch.nn.Module):
        return 0
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    return sum(storages.values())


def _tensors(model: Any) -> Sequence[Any]:
    return [*model.parameters(), *model.buffers()]


def peak_rss() -> int:
    """Largest resident set of this process so far [bytes].

    getrusage counts what the process was before it became Python, too, so it is asked only where /proc is absent.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else _KIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _triton() -> str:
    """Its version. Builds for other accelerators and torch's nightly have packages of other names."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "of another package" if importlib.util.find_spec("triton") else "absent"


def _loaded_torch() -> Any:
    """torch if a model brought it, else None: a model without torch is measured without it."""
    return sys.modules.get("torch")


def _commit(folder: Path) -> str:
    if not (folder / ".git").exists() or (git := shutil.which("git")) is None:
        return ""
    try:
        head, changes = (
            subprocess.run(
                [git, "-C", str(folder), *command], capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):  # not ours to read, say
        return ""
    return f"{head[:12]}+" if changes else head[:12]
