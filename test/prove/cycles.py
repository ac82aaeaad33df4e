"""configure -> activate -> deactivate -> cleanup, many times over: threads, descriptors and memory must stay flat."""

from __future__ import annotations

import argparse
import gc
import os
import threading
from pathlib import Path

import numpy as np
import psutil
import rclpy
from evidence import conclude, options
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from rich.progress import track

from phyai_ros.policy_node import PolicyNode

FLAT_MIB = 8.0  # growth over all cycles that is still allocator noise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--engine", default="process", choices=("process", "thread"))
    chosen = options(parser)
    rclpy.init()
    given = {"robot": "arm7", "model": "fake", "engine": chosen.engine, "warm_up_count": 1}
    node = PolicyNode(parameter_overrides=[Parameter(k, value=v) for k, v in given.items()])
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    process, seen = psutil.Process(), []

    for _ in track(range(chosen.count), "cycles"):
        for name in ("configure", "activate", "deactivate", "cleanup"):
            assert getattr(node, f"trigger_{name}")() is TransitionCallbackReturn.SUCCESS, name
            for _ in range(3):
                executor.spin_once(timeout_sec=0.005)
        gc.collect()
        left = len(process.children(recursive=True))
        opened = len(os.listdir("/proc/self/fd"))
        seen.append((threading.active_count(), opened, left, process.memory_info().rss / 2**20))
    node.close()
    rclpy.shutdown()
    settle = min(10, chosen.count // 2)
    threads, fds, children, rss = (np.array(column) for column in zip(*seen[settle:], strict=True))
    folders = len(list(Path("/tmp").glob("phyai-*")))
    rows: list[tuple[str, str, bool | None]] = [
        ("threads", f"{threads[0]} -> {threads[-1]}", threads[0] == threads[-1]),
        ("descriptors", f"{fds[0]} -> {fds[-1]}", fds[-1] <= fds[0] + 1),
        ("child processes left", str(children.max()), children.max() == 0),
        ("resident MiB", f"{rss[0]:.1f} -> {rss[-1]:.1f}", rss[-1] - rss[0] <= FLAT_MIB),
        ("temporary folders", str(folders), None),
    ]
    return conclude(f"{chosen.count} lifecycle cycles, engine {chosen.engine}", rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
