"""`ros2 run phyai_policy evaluate` on real ROS 2: two tasks of one scene, a fake policy, records like phyai eval's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from phyai_engine.evaluate.run_folder import read_run, whole_records
from phyai_engine.evaluate.scores import Summary

pytestmark = pytest.mark.ros


def test_a_manifest_over_topics(tmp_path: Path, domain_of_its_own: Callable[[], tuple[int, Any]]) -> None:
    options = {"horizon": 8, "action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], "image_size": 16}
    model, out = tmp_path / "fake.yaml", tmp_path / "out"
    model.write_text(yaml.safe_dump({"family": "fake", "normalisation": {"kind": "limits"}, "options": options}))
    domain, lock = domain_of_its_own()
    command = [sys.executable, "-m", "phyai_ros.evaluate", str(model), "--tasks", "window-open,window-close"]
    command += ["--episodes", "1", "--seconds", "1.5", "--out", str(out)]
    environment = {**os.environ, "ROS_DOMAIN_ID": str(domain)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)

    with lock:
        first = run()
    assert first.returncode == 0, first.stderr
    records = whole_records(out)
    assert [(r.task, r.instruction) for r in records] == [
        ("window-open", "open the window"),
        ("window-close", "close the window"),
    ]
    for record in records:
        assert not record.aborted and not record.success and 28 <= record.ticks <= 33
        assert record.accepted >= 4 and record.handoffs == len(record.margins_s) >= 3
    summary = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
    assert summary.margin_p01_s is not None and summary.title == "rtc, over ROS topics"
    assert read_run(out).driver == "ros"
    assert run().returncode == 0  # everything is played: no node is started
    command[-3] = "2.5"
    assert "another evaluation lies there" in run().stderr
