"""requirements/bootstrap.py: where it builds, when it has nothing to do, what it repairs and what it asks for."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bootstrap(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    return importlib.import_module("bootstrap")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    return importlib.import_module("machine")


def ros_prefix(folder: Path) -> Path:
    manifest = folder / "share" / "rclpy" / "package.xml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("<package/>")
    return folder


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({}, (".venv", "build", "install")),
        ({"ROS_DISTRO": "jazzy"}, (".venv", "build", "install")),
        ({"ROS_DISTRO": "kilted"}, (".venv-kilted", "build-kilted", "install-kilted")),
        ({"ROS_DISTRO": "kilted", "VENV": "/x/mine"}, ("mine", "build-kilted", "install-kilted")),
    ],
)
def test_folders_of_two_distributions_do_not_clash(
    bootstrap: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    names: tuple[str, ...],
) -> None:
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "x86_64")
    place = bootstrap.find_place(environment)
    assert (place.venv.name, place.build.name, place.install.name) == names
    assert place.sourced is None


def test_a_sourced_ros_is_used(bootstrap: ModuleType, tmp_path: Path) -> None:
    prefix = ros_prefix(tmp_path / "opt")
    path = f"{tmp_path / 'overlay'}:{prefix}"
    place = bootstrap.find_place({"AMENT_PREFIX_PATH": path, "ROS_DISTRO": "rolling"})
    assert place.sourced == prefix
    assert (place.venv.name, place.install.name) == (".venv-sourced", "install-sourced")


def test_our_own_environment_is_not_a_sourced_ros(bootstrap: ModuleType, tmp_path: Path) -> None:
    prefix = ros_prefix(tmp_path)
    (prefix / bootstrap.STAMP).write_text("{}")
    assert bootstrap.sourced_prefix(str(prefix)) is None


def test_what_cannot_be_built_is_said(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="'humble'; wheels exist for jazzy, kilted"):
        bootstrap.find_place({"ROS_DISTRO": "humble"})
    monkeypatch.setattr(bootstrap.platform, "machine", lambda: "aarch64")
    with pytest.raises(SystemExit, match="x86_64 only, this is aarch64"):
        bootstrap.find_place({})


EXPORT = (
    'set(x "/opt/python/cp311-cp311/include/python3.11;'
    '/opt/python/cp311-cp311/lib/python3.11/site-packages/numpy/_core/include;${_IMPORT_PREFIX}/include")\n'
)


def test_exported_paths_are_rewritten_once(bootstrap: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "share" / "a_msgs" / "cmake" / "export.cmake"
    path.parent.mkdir(parents=True)
    path.write_text(EXPORT)
    assert bootstrap.repair_exports(tmp_path, "/py/include", r"/np\1/include") == 1
    assert path.read_text() == 'set(x "/py/include;/np\\1/include;${_IMPORT_PREFIX}/include")\n'
    assert bootstrap.repair_exports(tmp_path, "/py/include", "/np/include") == 0


def test_an_exported_path_that_remains_is_an_error(bootstrap: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "share" / "a_msgs" / "cmake" / "export.cmake"
    path.parent.mkdir(parents=True)
    path.write_text('set(x "/opt/python/cp311-cp311/new/layout")\n')
    with pytest.raises(SystemExit, match=r"still name the machine.*export\.cmake"):
        bootstrap.repair_exports(tmp_path, "/py", "/np")


@pytest.fixture
def checkout(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small checkout that counts as installed and built."""
    root = tmp_path / "checkout"
    for name in ("msg/A.msg", "CMakeLists.txt", "package.xml", "phyai_ros/__init__.py", "requirements/run.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name in ("dev.txt", "ros-jazzy.txt"):
        (root / "requirements" / name).write_text(name)
    for name in (".venv/bin/python", ".venv/env.sh", ".venv/pyvenv.cfg", "install/setup.sh"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(bootstrap, "ROOT", root)
    place = bootstrap.find_place({})
    packages = bootstrap.packages_key(place)
    bootstrap.write_stamp(place.venv, packages=packages, script=bootstrap.script_key())
    bootstrap.write_stamp(place.install, packages=packages, sources=bootstrap.build_key())
    return root


def steps_taken(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps `make setup` would run, without running them."""
    steps: list[str] = []
    monkeypatch.setattr(bootstrap, "missing_packages", list)
    monkeypatch.setattr(bootstrap, "existing_or_chosen", lambda _place: "python3")
    for name in ("make_venv", "install_packages", "build_package"):
        monkeypatch.setattr(bootstrap, name, lambda *_, name=name: steps.append(name))
    bootstrap.setup(bootstrap.find_place({}))
    return steps


def test_nothing_changed_nothing_done(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "phyai_ros" / "__init__.py").write_text("another text: it is symlinked")
    cached = checkout / "phyai_ros" / "__pycache__"
    cached.mkdir()
    (cached / "x.pyc").write_text("")
    assert steps_taken(bootstrap, monkeypatch) == []
    assert "up to date: ROS jazzy wheels" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["msg/A.msg", "CMakeLists.txt", "package.xml", "phyai_ros/new.py", "msg/B.msg"])
def test_a_change_of_the_package_builds_only(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (checkout / name).write_text("changed")
    assert steps_taken(bootstrap, monkeypatch) == ["build_package"]


@pytest.mark.parametrize("name", ["requirements/run.txt", "requirements/ros-jazzy.txt", ".venv/pyvenv.cfg"])
def test_a_change_of_the_requirements_installs(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (checkout / name).write_text("changed")
    assert steps_taken(bootstrap, monkeypatch) == ["make_venv", "install_packages", "build_package"]


def test_a_failed_build_is_tried_again(bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "install" / bootstrap.STAMP).unlink()
    assert steps_taken(bootstrap, monkeypatch) == ["build_package"]


def test_missing_system_packages_are_named_before_anything_runs(
    bootstrap: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "msg" / "A.msg").write_text("changed")
    monkeypatch.setattr(bootstrap, "missing_packages", lambda: [("cmake", "cmake"), ("libEGL.so.1", "libegl1")])
    wanted = r"missing on this machine: cmake, libEGL\.so\.1\.\s+sudo apt-get install .* cmake libegl1$"
    with pytest.raises(SystemExit, match=wanted):
        bootstrap.setup(bootstrap.find_place({}))


def test_commands_and_libraries_are_looked_for(machine: ModuleType) -> None:
    everything = machine.missing_packages(which=lambda _: None, load=lambda _: False)
    packages = {package for _, package in everything}
    assert {"cmake", "g++", "make", "libegl1", "libegl-mesa0", "libopengl0"} <= packages
    # NVIDIA's driver brings its own EGL and renderer.
    nvidia = {"libEGL.so.1", "libEGL_nvidia.so.0", "libOpenGL.so.0"}
    assert machine.missing_packages(which=lambda name: name, load=nvidia.__contains__) == []


def test_a_python_that_does_not_fit_is_passed_over(machine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "python3": machine.Interpreter((3, 13), True, True, False),
        "python3.11": machine.Interpreter((3, 11), True, True, True),
    }
    monkeypatch.setattr(machine.sys, "executable", "python3")
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(machine, "probe", found.get)
    assert machine.choose_python(None, "") == "python3.11"
    assert machine.choose_python(Path("/opt/ros"), "") == "python3.11"
    with pytest.raises(SystemExit, match=r"3\.10, 3\.11 or 3\.12 is needed; found python3 \(python3\.13\)"):
        machine.choose_python(None, "python3")
    found["python3.11"] = found["python3.11"]._replace(header=False)
    with pytest.raises(SystemExit, match=r"no Python\.h\.\s+sudo apt-get install .* python3\.11-dev"):
        machine.choose_python(None, "")


def test_prefix_scripts_put_wheels_first_and_only_once(bootstrap: ModuleType, tmp_path: Path) -> None:
    bootstrap.write_prefix_scripts(tmp_path, {"X_PATH": ["/a", "/b"], "ROS_DISTRO": ["jazzy"]})
    script = f'X_PATH=/c; . {tmp_path}/local_setup.sh; . {tmp_path}/setup.bash; echo "$X_PATH $ROS_DISTRO"'
    shell = ["bash", "-euc", script]
    assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout == "/a:/b:/c jazzy\n"


def test_a_folder_that_is_no_environment_is_not_cleared(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    place = bootstrap.find_place({"VENV": str(tmp_path)})
    with pytest.raises(SystemExit, match="not a virtual environment"):
        bootstrap.make_venv(place, None, "python3")
    assert (tmp_path / "thesis.tex").exists()


def test_a_broken_stamp_counts_as_none(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / bootstrap.STAMP).write_text("{")
    assert bootstrap.read_stamp(tmp_path) == {}
    (tmp_path / bootstrap.STAMP).write_text(json.dumps([1]))
    assert bootstrap.read_stamp(tmp_path) == {}
