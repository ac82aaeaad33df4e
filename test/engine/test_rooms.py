"""Which room may import what (design.md section 3), read from the source; nothing is imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# import name -> folder
ROOMS = {"phyai_ros": "phyai_ros", "phyai_engine": "phyai_engine", "phyai_kernels": "kernels"}
FORBIDDEN = {
    "phyai_ros": {"torch", "triton", "flashinfer"},
    "phyai_engine": {"phyai_ros", "triton"},
    "phyai_kernels": {"phyai_ros", "phyai_engine"},
}
# Only phyai_ros may import these.
ROS = {
    *("rclpy", "launch", "launch_ros", "ament_index_python", "cv_bridge", "phyai_policy", "message_filters"),
    *(
        "builtin_interfaces",
        "diagnostic_msgs",
        "lifecycle_msgs",
        "rcl_interfaces",
        "rosgraph_msgs",
        "sensor_msgs",
    ),
    *("std_msgs", "std_srvs", "trajectory_msgs", "control_msgs", "geometry_msgs"),
}
# Must import where torch is not installed (a robot with a remote engine); folders stand for all they hold.
TORCH_FREE = (
    *(
        "types",
        "errors",
        "config",
        "timing",
        "images",
        "messages",
        "handoff",
        "safety",
        "stop",
        "envelope",
        "reach",
        "watchdog",
        "adapter",
        "transforms",
        "replay",
        "sim",
        "control",
    ),
    *("serve", "models.fake", "runner", "policy", "solvers", "doctor", "cli", "host"),
    *("models.pi_options", "inspection", "bench", "robot_check", "evaluate", "intervals", "panel"),
    *(f"train.{name}" for name in ("recipe", "collect", "workers")),  # the simulators' processes
    *(f"weights.{name}" for name in ("header", "pi_names", "recipe", "openpi", "lerobot", "checkpoint")),
)
UNWANTED_WORDS = {"manager", "helper", "helpers", "utils", "util", "pipeline", "handler", "data", "info"}


def modules() -> dict[str, Path]:
    """Dotted import name -> file, of every module in the rooms."""
    found = {}
    for name, folder in ROOMS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [name, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


def imported_names(node: ast.AST, module: str) -> list[str]:
    """Dotted names one import statement brings, relative ones resolved; [] for other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
        # `from a import b` may name a module b of a, or something inside a.
        return [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return []


@functools.cache
def everywhere(module: str) -> set[str]:
    """All names a module imports, also inside functions."""
    return {name for node in ast.walk(TREES[module]) for name in imported_names(node, module)}


@functools.cache
def when_imported(module: str) -> set[str]:
    """Names a module imports as it is imported: not in functions, not under TYPE_CHECKING."""

    def walk(nodes: list[ast.stmt]) -> Iterator[str]:
        for node in nodes:
            yield from imported_names(node, module)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse)
            elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef, ast.For, ast.While)):
                inner = [child for child in ast.walk(node) if isinstance(child, ast.ExceptHandler)]
                yield from walk([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])
                yield from walk([statement for handler in inner for statement in handler.body])

    return set(walk(TREES[module].body))


def test_every_room_has_modules() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    room = module.partition(".")[0]
    tops = {name.split(".")[0] for name in everywhere(module)}
    assert not tops & FORBIDDEN[room], f"{MODULES[module]} imports {tops & FORBIDDEN[room]}"
    if room != "phyai_ros":
        assert not tops & ROS, f"{MODULES[module]} imports {tops & ROS}: ROS stays in phyai_ros"


def torch_path(module: str, seen: set[str]) -> list[str]:
    """A chain of imports from ``module`` to torch, [] where there is none."""
    seen.add(module)
    names = when_imported(module)
    if any(name.split(".")[0] == "torch" for name in names):
        return [module, "torch"]
    # Importing a.b.c runs a and a.b too.
    parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    for name in sorted(parents & MODULES.keys() - seen):
        if chain := torch_path(name, seen):
            return [module, *chain]
    return []


@pytest.mark.parametrize("name", TORCH_FREE)
def test_torch_free_modules_import_no_torch(name: str) -> None:
    dotted = f"phyai_engine.{name}"
    covered = [module for module in MODULES if module == dotted or module.startswith(dotted + ".")]
    for module in covered:
        assert not (chain := torch_path(module, set())), " -> ".join(chain)


def test_the_node_process_imports_no_torch() -> None:
    for module in MODULES:
        if module.startswith("phyai_ros"):
            assert not (chain := torch_path(module, set())), " -> ".join(chain)


def test_the_environment_is_read_in_config_only() -> None:
    for module, tree in TREES.items():
        if module == "phyai_engine.config":
            continue
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            line = getattr(node, "lineno", 0)
            assert name not in {"environ", "getenv", "environb"}, f"{MODULES[module]}:{line} reads the environment"


def test_names_are_the_fields() -> None:
    for module, tree in TREES.items():
        stem = set(module.split(".")[-1].split("_"))
        assert not stem & UNWANTED_WORDS, f"{MODULES[module]} is named {stem & UNWANTED_WORDS}"
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                spaced = "".join(f" {c.lower()}" if c.isupper() else c for c in node.name).replace("_", " ")
                words = set(spaced.split()) & UNWANTED_WORDS
                assert not words, f"{MODULES[module]}:{node.lineno} {node.name} is named {words}"
