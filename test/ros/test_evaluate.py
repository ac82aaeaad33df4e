"""`ros2 run phyai_policy evaluate` on real ROS 2: two tasks of one scene, a fake policy, records like phyai eval's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import PIL.Image
import pytest
import yaml

from phyai_engine.evaluate.command import model_config
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.run_folder import read_run, whole_records
from phyai_engine.evaluate.scores import Summary
from phyai_engine.weights.checkpoint import model_from
from phyai_ros.evaluate import _model_file

pytestmark = pytest.mark.ros


def test_a_manifest_over_topics(tmp_path: Path, domain_of_its_own: Callable[[], tuple[int, Any]]) -> None:
    options = {"horizon": 8, "action_dim": 8, "cameras": ["base_0_rgb", "left_wrist_0_rgb"], "image_size": 16}
    model, out = tmp_path / "fake.yaml", tmp_path / "out"
    model.write_text(yaml.safe_dump({"family": "fake", "normalisation": {"kind": "limits"}, "options": options}))
    domain, lock = domain_of_its_own()
    command = [sys.executable, "-m", "phyai_ros.evaluate", str(model), "--tasks", "window-open,window-close"]
    command += ["--guidance", "gauss", "--films", "1", "--episodes", "1", "--seconds", "1.5", "--out", str(out)]
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
    assert summary.margin_p01_s is not None and summary.title == "rtc gauss, over ROS topics"
    ran = read_run(out)
    assert (ran.driver, ran.condition.guidance) == ("ros", "gauss")
    assert model_from(out / "model.yaml").rtc.guidance == "gauss"
    for name in ("00000.gif", "00001.gif"):
        with PIL.Image.open(out / "films" / name) as film:
            assert getattr(film, "n_frames", 1) >= 3
    assert run().returncode == 0  # everything is played: no node is started
    command[-3] = "2.5"
    assert "another evaluation lies there" in run().stderr


def test_the_node_loads_the_model_that_the_condition_names(tmp_path: Path) -> None:
    config = model_config("metaworld", Condition(guidance="identity", dtype="bfloat16"), "cpu")
    assert (config.rtc.guidance, config.options["dtype"], config.device) == ("identity", "bfloat16", "cpu")
    assert model_from(_model_file(tmp_path, config)) == config
