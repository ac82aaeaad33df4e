"""`phyai doctor`: each finding from a machine made up for the test."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phyai_engine import doctor
from phyai_engine.doctor import Machine, Row

ROOT = Path(__file__).resolve().parents[2]


def machine(
    root: Path = Path("/nowhere"), environment: dict[str, str] | None = None, modules: str = "", torch: Any = None
) -> Machine:
    names = modules.split()
    variables = environment or {}
    return Machine(root, lambda name: variables.get(name, ""), names.__contains__, lambda: torch)


def test_every_fault_comes_with_what_mends_it(tmp_path: Path) -> None:
    rows = doctor.doctor(machine(tmp_path))
    faults = [row for row in rows if not row.ok]
    assert {"ROS 2", "messages", "DDS profile", "shared memory"} <= {row.topic for row in faults}
    assert all(row.advice for row in faults)


def test_ros_is_named_with_its_prefix(tmp_path: Path) -> None:
    manifest = tmp_path / "share" / "rclpy" / "package.xml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("<package/>")
    variables = {"AMENT_PREFIX_PATH": f"/overlay:{tmp_path}", "ROS_DISTRO": "kilted"}
    assert doctor.check_ros(machine(environment=variables, modules="rclpy")) == Row("ROS 2", f"kilted, {tmp_path}")
    assert not doctor.check_ros(machine(environment=variables)).ok
    assert not doctor.check_ros(machine(modules="rclpy")).ok


def test_absent_ros_packages_are_a_hint_and_not_a_fault() -> None:
    row = doctor.check_optional_ros(machine(environment={"ROS_DISTRO": "jazzy"}, modules="launch"))
    assert row.ok
    assert "ros-jazzy-launch-ros ros-jazzy-cv-bridge" in row.advice


@pytest.mark.parametrize(
    ("distro", "variable", "fits"),
    [
        ("jazzy", "FASTRTPS_DEFAULT_PROFILES_FILE", True),
        ("jazzy", "FASTDDS_DEFAULT_PROFILES_FILE", False),
        ("kilted", "FASTDDS_DEFAULT_PROFILES_FILE", True),
        ("kilted", "FASTRTPS_DEFAULT_PROFILES_FILE", False),
    ],
)
def test_the_profile_is_read_from_the_name_this_fast_dds_reads(distro: str, variable: str, fits: bool) -> None:
    profile = str(ROOT / "config" / "fastdds.xml")
    row = doctor.check_profile(machine(environment={"ROS_DISTRO": distro, variable: profile}))
    assert row.ok is fits
    assert ("16 MiB" in row.value) is fits


@pytest.mark.parametrize("text", ["<dds/>", "<dds>", "<dds><segment_size>524288</segment_size></dds>"])
def test_a_profile_that_does_not_help_is_a_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.xml"
    path.write_text(text)
    assert not doctor.check_profile(machine(environment={"FASTRTPS_DEFAULT_PROFILES_FILE": str(path)})).ok


def test_small_shared_memory_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=63 * doctor.MIB, total=64 * doctor.MIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert not doctor.check_shared_memory(machine(tmp_path)).ok
    usage.free = 64 * doctor.MIB
    assert doctor.check_shared_memory(machine(tmp_path)).ok


def cuda(**properties: Any) -> SimpleNamespace:
    """A torch that has one device."""
    shape = SimpleNamespace(name="Thor", major=11, minor=0, total_memory=122 * 2**30, **properties)
    calls = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda _: shape, device_count=lambda: 1)
    return SimpleNamespace(__version__="2.11.0", cuda=calls)


def test_the_accelerator_and_its_memory_are_named() -> None:
    rows = doctor.check_torch(machine(modules="torch", torch=cuda(is_integrated=1)))
    assert [row.value for row in rows] == ["2.11.0", "1 x Thor, compute 11.0, 122 GiB unified memory"]
    rows = doctor.check_torch(machine(modules="torch", torch=cuda(is_integrated=0)))
    assert "122 GiB memory" in rows[1].value


def test_without_torch_a_remote_engine_remains() -> None:
    (row,) = doctor.check_torch(machine())
    assert row.ok
    assert "remote engine" in row.value


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError, AttributeError])
def test_torch_that_does_not_load_is_a_fault(kind: type[Exception]) -> None:
    def fails() -> Any:
        raise kind("libcudart.so.13: cannot open")

    (row,) = doctor.check_torch(machine(modules="torch")._replace(import_torch=fails))
    assert not row.ok
    assert f"does not load: {kind.__name__}: libcudart" in row.value


def test_torch_without_a_version_and_a_driver_that_raises_are_faults() -> None:
    (row,) = doctor.check_torch(machine(modules="torch", torch=SimpleNamespace()))
    assert (row.topic, row.ok) == ("torch", False)

    def fails() -> bool:
        raise RuntimeError("CUDA driver version is insufficient")

    torch = SimpleNamespace(__version__="2.11.0", cuda=SimpleNamespace(is_available=fails))
    loaded, accelerator = doctor.check_torch(machine(modules="torch", torch=torch))
    assert (loaded.ok, accelerator.ok) == (True, False)
    assert "insufficient" in accelerator.value


def test_every_kernel_is_named_with_its_reason() -> None:
    rows = doctor.check_kernels(Machine())
    assert [row.topic for row in rows][:2] == ["kernel rms_norm", "kernel ada_rms_norm"]
    assert len(rows) == 12 and all(row.ok for row in rows)
    assert all(", " in row.value and row.value.split(", ")[0] in ("triton", "reference") for row in rows)


def test_an_accelerator_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "reference, triton: cannot be imported: ModuleNotFoundError: No module named 'triton'"
    monkeypatch.setattr("phyai_engine.layers.ops.load_ops", lambda *_, **__: SimpleNamespace(reasons={"linear": why}))
    assert doctor.check_kernels(Machine()) == [Row("kernel linear", why, True, "pip install '.[gpu]' in the checkout")]


def test_without_a_torch_that_loads_there_are_no_kernels() -> None:
    assert doctor.check_kernels(machine()) == []

    def fails() -> Any:
        raise OSError("libcudart.so.13: cannot open")

    assert doctor.check_kernels(machine(modules="torch")._replace(import_torch=fails)) == []


def test_caches_are_measured_and_an_unreadable_folder_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHYAI_CACHE_DIR", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(bytes(3 * doctor.MIB))
    (tmp_path / "dangling").symlink_to("nowhere")
    assert doctor.check_caches(machine()) == Row("caches", f"{tmp_path}, 3.0 MiB")

    def refuse(_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.scandir", refuse)
    row = doctor.check_caches(machine())
    assert (row.ok, row.value) == (False, f"{tmp_path}: Permission denied")
    assert row.advice


def test_a_user_without_a_home_has_no_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(doctor, "cache_dir", fails)
    assert not doctor.check_caches(machine()).ok


@pytest.mark.parametrize(
    ("flags", "found"), [("fpu amx_bf16 avx512_bf16", "amx_bf16"), ("avx512_bf16", "avx512_bf16"), ("fpu", "no bf16")]
)
def test_the_cpu_says_what_it_has_for_bf16(tmp_path: Path, flags: str, found: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"flags : {flags}\n")
    assert found in doctor.cpu_matrix_units(machine(tmp_path))


def jetson(tmp_path: Path) -> Machine:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "nv_tegra_release").write_text("# R38 (release), REVISION: 2.0, GCID: 1, BOARD: generic\n")
    return machine(tmp_path)


@pytest.mark.parametrize(("mode", "fits"), [("MAXN", True), ("120W", False)])
def test_a_jetson_names_jetpack_and_power_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, fits: bool
) -> None:
    tool = tmp_path / "nvpmodel"
    tool.write_text(f"#!/bin/sh\necho 'NV Power Mode: {mode}'\necho 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    jetpack, power = doctor.check_jetson(jetson(tmp_path))
    assert jetpack.value == "7 (L4T 38.2.0)"
    assert (power.value, power.ok) == (mode, fits)


def test_no_jetson_no_rows(tmp_path: Path) -> None:
    assert doctor.check_jetson(machine(tmp_path)) == []


def test_a_folder_of_the_working_directory_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The checkout's own launch/ would pass for the ROS package of that name.
    (tmp_path / "some_ros_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not Machine().has_module("some_ros_package")
    assert Machine().has_module("numpy")


def test_the_command_prints_a_table_and_says_it_in_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("torch", "2.13.0"), Row("DDS profile", "none", False, "export it")]
    monkeypatch.setattr(doctor, "doctor", lambda: rows)
    assert doctor.doctor_command() == 1
    printed = capsys.readouterr().out
    assert "DDS profile" in printed
    assert "export it" in printed
    monkeypatch.setattr(doctor, "doctor", lambda: rows[:1])
    assert doctor.doctor_command() == 0
