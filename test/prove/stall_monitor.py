"""An independent witness of the host: sleeps 1 ms at a time and writes down every gap above a bound.

    python test/prove/stall_monitor.py OUT.npy        until standard input ends

Gaps are (begin, end) in monotonic ns. What this process could not run for, others may not have either: a deadline
missed in such a window is the host's, one missed in any other is ours.
"""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

import numpy as np

LOOK_S = 0.001
GAP_NS = 20_000_000


def main(out: Path) -> None:
    """See the module."""
    gaps: list[tuple[int, int]] = []
    before = looked = time.monotonic_ns()
    print("ready", flush=True)
    while True:
        time.sleep(LOOK_S)
        now = time.monotonic_ns()
        if now - before > GAP_NS:
            gaps.append((before, now))
        before = now
        if now - looked > 100_000_000:
            looked = now
            if select.select([sys.stdin], [], [], 0)[0]:
                break
    np.save(out, np.array(gaps, dtype=np.int64).reshape(-1, 2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
