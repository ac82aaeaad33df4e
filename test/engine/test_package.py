"""The package's own papers: versions, messages, requirements, containers, shipped profile."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import setuptools

import phyai_engine

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ET.parse(ROOT / "package.xml").getroot()
PINNED = ("run", "dev", "ros-jazzy", "ros-kilted")
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.fixture
def setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py hands to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def project(requirement: str) -> str:
    """The project's name in one requirement, normalised."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{file}.txt").read_text().splitlines()
    return {project(line): line for line in lines if line and not line.startswith("#")}


def test_one_version(setup_arguments: dict[str, Any]) -> None:
    assert MANIFEST.findtext("version") == setup_arguments["version"] == phyai_engine.__version__ == "0.1.0"
    assert f"## {phyai_engine.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_manifest_is_an_ament_cmake_message_package() -> None:
    assert MANIFEST.get("format") == "3"
    assert MANIFEST.findtext("name") == "phyai_policy"
    assert MANIFEST.findtext("export/build_type") == "ament_cmake"
    assert MANIFEST.findtext("member_of_group") == "rosidl_interface_packages"
    needed = {element.text for element in MANIFEST if element.tag.endswith("depend")}
    assert {"rclpy", "cv_bridge", "launch_ros", "sensor_msgs", "trajectory_msgs", "python3-zmq"} <= needed
    assert not any("torch" in (name or "") for name in needed)
    address = MANIFEST.find("maintainer")
    assert address is not None
    assert re.fullmatch(r"[\w.]+@[\w-]+\.\w+", address.get("email", ""))


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert MANIFEST.findtext("license") == "Apache-2.0"


def test_every_message_is_built() -> None:
    listed = set(re.findall(r"^\s+(msg/\w+\.msg)$", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE))
    assert listed == {f"msg/{path.name}" for path in (ROOT / "msg").glob("*.msg")}


def test_every_message_package_is_declared() -> None:
    used = {m for path in (ROOT / "msg").glob("*.msg") for m in re.findall(r"^(\w+)/", path.read_text(), re.MULTILINE)}
    declared = {element.text for element in MANIFEST if element.tag == "depend"}
    assert used <= declared


def test_executables_name_modules_that_exist() -> None:
    entries = re.findall(r"^install_entry\((\w+) ([\w.]+) ", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert {name for name, _ in entries} >= {"policy_node", "player_node", "sim_node", "phyai"}
    for _, module in entries:
        path = ROOT / (module.replace(".", "/") + ".py")
        assert path.is_file(), f"CMakeLists.txt installs an entry for {module}"
        assert re.search(r"^def main\(", path.read_text(), re.MULTILINE), f"{module} has no main()"


def test_no_package_where_a_folder_is_meant() -> None:
    for folder in ("launch", "msg", "test", "kernels", "config"):
        assert not list((ROOT / folder).rglob("__init__.py")), f"{folder}/ gets no __init__.py"


def test_every_engine_folder_is_a_package() -> None:
    for room in ("phyai_engine", "phyai_ros"):
        for folder in {path.parent for path in (ROOT / room).rglob("*.py")}:
            assert (folder / "__init__.py").is_file(), f"{folder} would not be installed"


def test_base_install_has_no_torch_and_extras_do_not_repeat(setup_arguments: dict[str, Any]) -> None:
    groups = {"base": setup_arguments["install_requires"], **setup_arguments["extras_require"]}
    assert {"engine", "serve", "sim", "gpu", "dev"} <= groups.keys()
    names = [project(requirement) for group in groups.values() for requirement in group]
    assert len(names) == len(set(names))
    base = {project(requirement) for requirement in groups["base"]}
    assert not base & {"torch", "triton", "mujoco", "metaworld"}


def test_setup_installs_every_room_but_ros(setup_arguments: dict[str, Any]) -> None:
    folders = {p.parent for p in (ROOT / "phyai_engine").rglob("*.py")}
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(setup_arguments["packages"]) == expected | {"phyai_kernels"}
    assert setup_arguments["package_dir"] == {"phyai_kernels": "kernels"}


@pytest.mark.parametrize("file", PINNED)
def test_requirements_are_pinned_exactly(file: str) -> None:
    assert pins(file)
    for line in pins(file).values():
        assert re.fullmatch(r'[a-z0-9.-]+==[\w.]+(; (python_version|platform_machine) [<=]{1,2} "[\w.]+")?', line), line


def test_requirements_do_not_overlap() -> None:
    assert not pins("run").keys() & pins("dev").keys()
    assert all(name.startswith("ros-") for file in PINNED[2:] for name in pins(file))


def test_what_setup_names_is_pinned(setup_arguments: dict[str, Any]) -> None:
    named = setup_arguments["install_requires"] + [
        requirement
        for extra in ("engine", "report", "replay", "sim", "dev")
        for requirement in setup_arguments["extras_require"][extra]
    ]
    assert {project(requirement) for requirement in named} <= pins("run").keys() | pins("dev").keys()


def test_shipped_profile_is_shared_memory_only() -> None:
    space = "{http://www.eprosima.com}"
    profile = ET.parse(ROOT / "config" / "fastdds.xml").getroot()
    transports = list(profile.iter(f"{space}transport_descriptor"))
    assert [t.findtext(f"{space}type") for t in transports] == ["SHM"]
    assert transports[0].findtext(f"{space}segment_size") == str(16 * 1024 * 1024)
    participant = profile.find(f".//{space}participant")
    assert participant is not None
    assert participant.get("is_default_profile") == "true"
    assert participant.findtext(f"{space}rtps/{space}useBuiltinTransports") == "false"
    used = [e.text for e in participant.iter(f"{space}transport_id")]
    assert used == [transports[0].findtext(f"{space}transport_id")]


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_there_are_two_containers() -> None:
    assert [path.name for path in DOCKERFILES] == ["thor.Dockerfile", "x86.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_containers_keep_the_rules(path: Path) -> None:
    steps = instructions(path)
    known = {"ARG", "FROM", "SHELL", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT", "CMD", "LABEL"}
    assert {word for word, _ in steps} <= known
    word, image = next(step for step in steps if step[0] != "ARG")
    assert word == "FROM"
    assert re.search(r":[\w.-]+$", image), "the base image has no tag"
    assert not image.endswith(":latest")
    for _, command in (step for step in steps if step[0] == "RUN"):
        if "apt-get install" in command:
            assert "apt-get update" in command
            assert "--no-install-recommends" in command
            assert "rm -rf /var/lib/apt/lists/*" in command
        if "pip install" in command:
            assert "--no-cache-dir" in command
    users = [rest for word, rest in steps if word == "USER"]
    assert users, "the container runs as root"
    assert users[-1] not in ("root", "0")
    assert "NOT RUN HERE" in path.read_text()
