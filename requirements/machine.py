"""What the machine must have before anything is installed: OS packages and an interpreter."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable, Iterable, List, NamedTuple, NoReturn, Optional, Tuple

PYTHONS = ((3, 10), (3, 12))
# A command, or a library of MuJoCo's EGL, each with the Debian/Ubuntu package that brings it.
COMMANDS = (("cmake", "cmake"), ("g++", "g++"), ("make", "make"))
LIBRARIES = (
    (("libEGL.so.1",), "libegl1"),
    (("libOpenGL.so.0",), "libopengl0"),
    (("libEGL_mesa.so.0", "libEGL_nvidia.so.0"), "libegl-mesa0"),
)
# Mesa's software renderer, as older and newer releases name it.
RENDERERS = ("dri/*swrast_dri.so", "libgallium-*.so")


def refuse(what: str, do: str) -> NoReturn:
    """End with one message: what is wrong, and what to do."""
    sys.exit(f"setup: {what}\n       {do}")


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_packages(
    which: Callable[[str], Optional[str]] = shutil.which, load: Callable[[str], bool] = loads
) -> List[Tuple[str, str]]:
    """(what is missing, the Debian/Ubuntu package that brings it)."""
    missing = [(command, package) for command, package in COMMANDS if which(command) is None]
    missing += [(names[0], package) for names, package in LIBRARIES if not any(load(name) for name in names)]
    folders = [*Path("/usr/lib").glob("*-linux-gnu*"), Path("/usr/lib"), Path("/usr/lib64")]
    drivers = [path for folder in folders for name in RENDERERS for path in folder.glob(name)]
    if not load("libEGL_nvidia.so.0") and not drivers:
        missing.append(("a software renderer", "libgl1-mesa-dri"))
    return missing


def apt_line(packages: Iterable[str]) -> str:
    return "sudo apt-get install -y --no-install-recommends " + " ".join(sorted(set(packages)))


PROBE = """
import os, sys, sysconfig
from importlib.util import find_spec
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
found = os.path.isfile(header), bool(find_spec("ensurepip")), bool(find_spec("rclpy"))
print(*sys.version_info[:2], *map(int, found))
"""


class Interpreter(NamedTuple):
    """One Python: its version, and whether it has Python.h, can make virtual environments, imports rclpy."""

    version: Tuple[int, int]
    header: bool
    ensurepip: bool
    rclpy: bool


def probe(python: str) -> Optional[Interpreter]:
    """What an interpreter has; None if it does not run."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=30, check=True)
        major, minor, header, ensurepip, rclpy = (int(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Interpreter((major, minor), bool(header), bool(ensurepip), bool(rclpy))


def fits(found: Interpreter, sourced: Optional[Path]) -> bool:
    """Messages are compiled for one interpreter: with a sourced ROS only the one that imports its rclpy."""
    return found.rclpy if sourced else PYTHONS[0] <= found.version <= PYTHONS[1]


def choose_python(sourced: Optional[Path], wanted: str) -> str:
    """The interpreter the environment is made from: ``wanted``, else the running one, else the newest."""
    names = [wanted] if wanted else [sys.executable, "python3", "python3.12", "python3.11", "python3.10"]
    seen = []
    for name in names:
        path = shutil.which(name)
        found = probe(path) if path else None
        if path is None or found is None:
            continue
        dotted = f"python{found.version[0]}.{found.version[1]}"
        seen.append(f"{path} ({dotted})")
        if not fits(found, sourced):
            continue
        if not found.header:
            refuse(f"{path} has no Python.h.", apt_line([f"{dotted}-dev"]))
        if not found.ensurepip:
            refuse(f"{path} cannot make virtual environments.", apt_line([f"{dotted}-venv"]))
        return path
    wish = f"a Python that imports rclpy of {sourced}" if sourced else "Python 3.10, 3.11 or 3.12"
    refuse(
        f"{wish} is needed; found {', '.join(seen) or 'none'}.",
        "Name one: `make setup PYTHON=/path/to/python3.12`.",
    )
