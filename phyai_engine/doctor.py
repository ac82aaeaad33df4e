"""``phyai doctor``: what this machine offers a policy, and what is missing with the command that brings it.

Nothing here starts ROS: packages are looked up, not imported, except torch, which alone knows its devices.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from phyai_engine.config import cache_dir, environment

# Fast DDS keeps one segment (16 MiB in config/fastdds.xml) per participant: node, player, sim, command line.
PARTICIPANTS = 4
STOCK_SEGMENT = 512 * 1024
MIB = 1024 * 1024
JETPACKS = {"35": "5", "36": "6", "38": "7"}  # L4T major -> JetPack major


class Row(NamedTuple):
    """One finding. ``advice`` is the command or step that mends it, empty where nothing is wrong."""

    topic: str
    value: str
    ok: bool = True
    advice: str = ""


def _has_module(name: str) -> bool:
    """A folder of that name in the working directory is not the package: it has no origin."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


class Machine(NamedTuple):
    """Where the checks look; tests give other places."""

    root: Path = Path("/")
    environment: Callable[[str], str] = environment
    has_module: Callable[[str], bool] = _has_module
    import_torch: Callable[[], Any] = lambda: importlib.import_module("torch")


def check_python(_machine: Machine) -> Row:
    version = sys.version_info[:3]
    fits = (3, 10) <= version[:2] <= (3, 12)
    text = f"{'.'.join(map(str, version))} on {platform.machine()}, {sys.prefix}"
    return Row("python", text, fits, "" if fits else "Use Python 3.10, 3.11 or 3.12.")


def check_ros(machine: Machine) -> Row:
    prefixes = [Path(p) for p in machine.environment("AMENT_PREFIX_PATH").split(os.pathsep) if p]
    home = next((p for p in prefixes if (p / "share" / "rclpy" / "package.xml").is_file()), None)
    if not machine.has_module("rclpy"):
        advice = "`make setup` and `source .venv/env.sh`, or `source /opt/ros/jazzy/setup.bash`."
        return Row("ROS 2", "rclpy is not importable", False, advice)
    if home is None:
        return Row("ROS 2", "rclpy is importable, but no prefix is sourced", False, "`source .venv/env.sh`.")
    return Row("ROS 2", f"{machine.environment('ROS_DISTRO') or 'unknown distribution'}, {home}")


def check_messages(machine: Machine) -> Row:
    if machine.has_module("phyai_policy"):
        return Row("messages", "phyai_policy.msg")
    return Row("messages", "phyai_policy.msg is not importable", False, "`make setup`, then `source .venv/env.sh`.")


def check_optional_ros(machine: Machine) -> Row:
    """Packages the registries do not carry; a robot has them from its distribution."""
    absent = [name for name in ("launch", "launch_ros", "cv_bridge") if not machine.has_module(name)]
    if not absent:
        return Row("launch, cv_bridge", "present")
    distro = machine.environment("ROS_DISTRO") or "jazzy"
    packages = " ".join(f"ros-{distro}-{name.replace('_', '-')}" for name in absent)
    # Not a fault: nodes start by hand, and images are decoded by our own code.
    return Row(
        "launch, cv_bridge",
        f"absent: {', '.join(absent)}",
        True,
        f"With a distribution's ROS: apt-get install {packages}",
    )


def check_rmw(machine: Machine) -> Row:
    chosen = machine.environment("RMW_IMPLEMENTATION")
    reach = machine.environment("ROS_AUTOMATIC_DISCOVERY_RANGE") or "SUBNET"
    domain = machine.environment("ROS_DOMAIN_ID") or "0"
    text = f"{chosen or 'distribution default'}, domain {domain}, discovery {reach}"
    fits = chosen in ("", "rmw_fastrtps_cpp")
    return Row(
        "rmw",
        text,
        fits,
        "" if fits else "The shipped DDS profile is for rmw_fastrtps_cpp; test yours under load.",
    )


def segment_size(profile: Path) -> int:
    """Largest shared-memory segment a Fast DDS profile sets, 0 if none [bytes].

    :raises OSError: unreadable. :raises ET.ParseError: not XML.
    """
    sizes = [e.text or "" for e in ET.parse(profile).iter() if e.tag.rsplit("}", 1)[-1] == "segment_size"]
    return max((int(size) for size in sizes if size.strip().isdigit()), default=0)


def check_profile(machine: Machine) -> Row:
    # Fast DDS 2 (jazzy) reads the first name, Fast DDS 3 the second.
    variable = "FASTRTPS" if machine.environment("ROS_DISTRO") in ("", "humble", "jazzy") else "FASTDDS"
    variable += "_DEFAULT_PROFILES_FILE"
    path = machine.environment(variable)
    if not path:
        text = f"none; the stock {STOCK_SEGMENT // 1024} KiB segments lose camera frames"
        return Row("DDS profile", text, False, f"export {variable}=.../config/fastdds.xml")
    try:
        size = segment_size(Path(path))
    except (OSError, ET.ParseError) as error:
        return Row("DDS profile", f"{path}: {error}", False, f"export {variable}=.../config/fastdds.xml")
    advice = "" if size > STOCK_SEGMENT else "Use the shipped config/fastdds.xml."
    return Row("DDS profile", f"{path}, segments of {size // MIB} MiB", size > STOCK_SEGMENT, advice)


def check_shared_memory(machine: Machine) -> Row:
    folder = machine.root / "dev" / "shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Row("shared memory", f"{folder}: {error.strerror}", False, "Mount a tmpfs there.")
    wanted = PARTICIPANTS * 16 * MIB
    advice = (
        "" if usage.free >= wanted else f"Give it {wanted // MIB} MiB or more: `docker run --shm-size=1g`, --ipc=host."
    )
    return Row("shared memory", f"{usage.free // MIB} of {usage.total // MIB} MiB free", usage.free >= wanted, advice)


def check_torch(machine: Machine) -> list[Row]:
    """Torch and the accelerator; without torch a robot can still use a remote engine."""
    if not machine.has_module("torch"):
        return [Row("torch", "absent; a remote engine needs none", True, "pip install '.[engine]' in the checkout")]
    try:
        torch = machine.import_torch()
        loaded = Row("torch", str(torch.__version__))
    except Exception as error:  # whatever a broken build raises is the finding
        text = f"does not load: {type(error).__name__}: {error}"
        return [Row("torch", text, False, "Install a build for this driver and Python.")]
    try:
        return [loaded, Row("accelerator", _accelerator(torch, machine))]
    except Exception as error:
        text = f"torch cannot ask for it: {type(error).__name__}: {error}"
        return [loaded, Row("accelerator", text, False, "Check the driver, then torch's build against it.")]


def _accelerator(torch: Any, machine: Machine) -> str:
    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores, {cpu_matrix_units(machine)}"
    shape = torch.cuda.get_device_properties(0)
    memory = f"{shape.total_memory / 2**30:.0f} GiB{' unified' if shape.is_integrated else ''}"
    count = torch.cuda.device_count()
    return f"{count} x {shape.name}, compute {shape.major}.{shape.minor}, {memory} memory"


def cpu_matrix_units(machine: Machine) -> str:
    """What the CPU has for bfloat16."""
    try:
        flags = set((machine.root / "proc" / "cpuinfo").read_text().split())
    except OSError:
        return "bf16 support unknown"
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in flags]
    return f"bf16 by {found[0]}" if found else "no bf16 instructions"


def check_kernels(machine: Machine) -> list[Row]:
    """What each operator of a full-size pi0.5 runs on here, and why; compiles and checks it on an accelerator."""
    if not machine.has_module("torch"):
        return []
    try:
        torch = machine.import_torch()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    except Exception:  # check_torch has said so
        return []
    from phyai_engine.layers.ops import load_ops  # noqa: PLC0415 - needs torch
    from phyai_engine.models.pi import PiOptions, op_shapes  # noqa: PLC0415

    shapes = op_shapes(PiOptions(dtype="bfloat16"), torch.bfloat16)
    reasons = load_ops("auto", device=device, shapes=shapes).reasons
    rows = [Row("kernels", coverage(reasons))]
    for op, why in reasons.items():
        advice = "pip install '.[gpu]' in the checkout" if "cannot be imported" in why else ""
        rows.append(Row(f"kernel {op}", why, True, advice))  # no fault: the reference serves too
    return rows


def coverage(reasons: Mapping[str, str]) -> str:
    """How many operators each kind serves. :param reasons: operator -> kind, a comma, and why."""
    kinds = Counter(why.partition(",")[0] for why in reasons.values())
    return f"of {len(reasons)} operators " + ", ".join(f"{kind} serves {count}" for kind, count in kinds.most_common())


def check_jetson(machine: Machine) -> list[Row]:
    """JetPack and power mode, on a Jetson only."""
    try:
        text = (machine.root / "etc" / "nv_tegra_release").read_text()
    except OSError:
        return []
    release = re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", text)
    name = text.splitlines()[0] if text else "unknown"
    if release:
        name = f"{JETPACKS.get(release.group(1), 'unknown')} (L4T {release.group(1)}.{release.group(2)})"
    rows = [Row("JetPack", name)]
    if tool := shutil.which("nvpmodel"):
        try:
            done = subprocess.run([tool, "-q"], capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            return [*rows, Row("power mode", f"nvpmodel -q: {error}", False, "Run it by hand.")]
        mode = re.search(r"NV Power Mode:\s*(\S+)", done.stdout)
        name = mode.group(1) if mode else done.stdout.strip()
        fits = "MAXN" in name.upper()
        advice = "" if fits else "Deadlines are measured at MAXN: `sudo nvpmodel -m 0`."
        rows.append(Row("power mode", name, fits, advice))
    return rows


def check_renderer(machine: Machine) -> Row:
    """Off-screen rendering, which only the simulated robot needs."""
    if not machine.has_module("mujoco"):
        return Row("simulation", "absent; a robot needs none", True, "pip install '.[sim]' in the checkout")
    chosen = machine.environment("MUJOCO_GL")
    advice = "" if chosen in ("egl", "osmesa") else "export MUJOCO_GL=egl where there is no screen."
    text = f"mujoco {metadata.version('mujoco')}, MUJOCO_GL={chosen or 'unset'}"
    return Row("simulation", text, not advice, advice)


def check_caches(_machine: Machine) -> Row:
    advice = "Set PHYAI_CACHE_DIR to a folder that you can read."
    try:
        folder = cache_dir()
    except RuntimeError as error:  # a user without a home
        return Row("caches", str(error), False, advice)
    try:
        total = _size_of(folder) if folder.is_dir() else 0
    except OSError as error:
        return Row("caches", f"{folder}: {error.strerror}", False, advice)
    return Row("caches", f"{folder}, {total / MIB:.1f} MiB")


def _size_of(folder: Path) -> int:
    """Bytes of all files below. :raises OSError: a folder of it cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder, onerror=fail)
        for name in names
    )


def doctor(machine: Machine | None = None) -> list[Row]:
    """Every finding, in reading order.

    :param machine: where to look; the one this runs on unless given.
    """
    machine = machine or Machine()
    return [
        check_python(machine),
        check_ros(machine),
        check_messages(machine),
        check_rmw(machine),
        check_profile(machine),
        check_shared_memory(machine),
        check_optional_ros(machine),
        *check_torch(machine),
        *check_kernels(machine),
        *check_jetson(machine),
        check_renderer(machine),
        check_caches(machine),
    ]


def doctor_command() -> int:
    """Print the findings as a table.

    :returns: 0 when nothing is wrong, 1 otherwise.
    """
    from rich.console import Console  # noqa: PLC0415 - only the command draws
    from rich.table import Table  # noqa: PLC0415

    rows = doctor()
    table = Table(title="phyai doctor", title_justify="left")
    for heading in ("", "topic", "found", "to mend it"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row("[green]ok[/]" if row.ok else "[red]no[/]", row.topic, row.value, row.advice)
    Console().print(table)
    return 0 if all(row.ok for row in rows) else 1
