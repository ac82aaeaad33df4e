"""Everything beside the model, in one call on a GPU machine: each part is a process of its own with its own time.

What a part prints stands as it comes; the table at the end says how each ended, and which were left out when
the time was up. A part that fails, hangs or dies costs no other. Needs no ROS.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import checkout
from evidence import conclude, options

HERE = Path(__file__).resolve().parent
LEAST_S = 30.0  # a part needs that for its weights alone
TESTS = [f"test/engine/test_{name}.py" for name in ("image_bytes", "graphs", "resize")]
# `checkout` makes the kernels importable; the timeouts of pyproject.toml need a plugin that may not be there.
PYTEST = (
    "import sys; sys.path.insert(0, 'test/prove'); import checkout, pytest; "
    "sys.exit(pytest.main(['-q', '-m', 'gpu', '-o', 'addopts=--import-mode=importlib', '-p', 'no:cacheprovider', "
    "'-p', 'no:benchmark', *sys.argv[1:]]))"
)
# Part -> command, seconds that it may take.
PARTS: dict[str, tuple[list[str], float]] = {
    "overhead": ([str(HERE / "gpu_overhead.py")], 150.0),
    "tests": (["-c", PYTEST, *TESTS], 150.0),
    "savings": ([str(HERE / "gpu_savings.py")], 150.0),
    "many": ([str(HERE / "gpu_batch.py"), "--only", "many"], 150.0),
    "planes": ([str(HERE / "gpu.py"), "--images", "planes", "--n", "100"], 150.0),
}


def run(command: Sequence[str], limit_s: float) -> str:
    """How it ended; empty: well."""
    try:
        code = subprocess.run([sys.executable, *command], cwd=checkout.ROOT, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:.0f} s"
    return f"exit code {code}" if code else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all, in this order")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all of them")
    chosen = options(parser)
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; wanted: {', '.join(PARTS)}")
    rows: list[tuple[str, str, bool | None]] = []
    end = time.perf_counter() + chosen.limit
    for name in chosen.parts or PARTS:
        command, limit_s = PARTS[name]
        left_s = end - time.perf_counter()
        if left_s < LEAST_S:
            rows.append((name, "left out: the time is up", False))
            continue
        print(f"=== {name}", flush=True)
        began = time.perf_counter()
        wrong = run([*command, *(["--log"] if chosen.log and name != "tests" else [])], min(limit_s, left_s))
        rows.append((name, f"{time.perf_counter() - began:.0f} s{wrong and ', '}{wrong}", not wrong))
    return conclude("gpu: beside the model, its parts", rows, log=False)


if __name__ == "__main__":
    sys.exit(main())
