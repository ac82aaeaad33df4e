"""Installs the engine and its command where there is no ROS (a GPU server); colcon reads CMakeLists.txt."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "phyai_engine/__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None, "phyai_engine/__init__.py has no __version__"

setup(
    name="phyai-policy",
    version=VERSION.group(1),
    description="Drives a robot with a learned policy in real time and stops it safely",
    license="Apache-2.0",
    author="PhyAI maintainers",
    author_email="maintainers@phyai.dev",
    python_requires=">=3.10,<3.13",
    packages=[
        *find_namespace_packages(include=["phyai_engine", "phyai_engine.*"]),
        "phyai_kernels",
    ],
    # kernels/ has no __init__.py and is imported under another name.
    package_dir={"phyai_kernels": "kernels"},
    package_data={"phyai_kernels": ["*.cu", "*.cuh"]},
    data_files=[
        (
            f"share/phyai_policy/{folder.relative_to(HERE)}",
            [str(p.relative_to(HERE)) for p in folder.iterdir() if p.is_file()],
        )
        for folder in sorted({path.parent for path in (HERE / "config").rglob("*") if path.is_file()})
    ],
    # What a robot with a remote engine needs; no torch. requirements/run.txt pins the same packages exactly.
    install_requires=[
        "msgspec>=0.19",
        "numpy>=1.26,<3",
        "pillow>=10",
        "pyyaml>=6",
        "pyzmq>=25",
        "rich>=13",
        "typer>=0.12",
    ],
    extras_require={
        "engine": ["torch>=2.8", "safetensors>=0.4", "sentencepiece>=0.2", "tokenizers>=0.20"],
        "report": ["plotly>=6"],
        "replay": ["rosbags>=0.11.9"],
        "serve": ["prometheus-client>=0.20", "starlette>=0.37", "uvicorn>=0.30"],
        "sim": ["metaworld==3.1.1", "mujoco==3.3.0", "packaging>=24"],
        "gpu": [
            "triton>=3.6",
            "cuda-bindings>=12.8",
            "flashinfer-python>=0.6.12",
            "apache-tvm-ffi>=0.1.15",
            "torch-c-dlpack-ext>=0.1.5",
        ],
        "dev": ["hypothesis>=6", "mypy>=1.15", "psutil>=6", "pytest>=8", "pytest-timeout>=2.3", "ruff>=0.9"],
    },
    entry_points={"console_scripts": ["phyai=phyai_engine.cli:main"]},
)
