"""The compute thread keeps an accelerator awake while nothing is asked, where the model file says so."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from phyai_engine.config import ActionEntry, ModelConfig, RobotConfig, load_model, load_robot, resolve
from phyai_engine.policy import load_policy
from phyai_engine.serve.compute import Compute, Ready, Work
from phyai_engine.types import Chunk, ModelSpec, Observation, Request, StageTimings

ROBOT = RobotConfig(
    robot_id="test",
    action_type="joint_position",
    dt_s=0.1,
    state=(),
    actions=(ActionEntry(name="lift", lower=-1.0, upper=1.0),),
)
REQUEST = Request(1, 2, Observation({}, np.zeros(1), np.zeros(1), "", 0, 0, 0, 0), None, 0, float("nan"))


class Resting:
    """Answers at once, and notes when it was kept warm."""

    spec = ModelSpec("resting", 3, 1, (1.0,), {}, ())
    note = "a stand-in"

    def __init__(self, *, fails: bool = False) -> None:
        self.warmed: list[float] = []
        self.fails = fails

    def warm_up(self, count: int, rows: int = 1) -> list[float]:
        return [1.0] * count

    def infer(self, requests: Any, cancels: Any) -> list[Chunk]:
        return [Chunk(1, 2, np.zeros((3, 1)), StageTimings())]

    def keep_warm(self) -> None:
        self.warmed.append(time.monotonic())
        if self.fails:
            raise RuntimeError("the device is gone")


def run(policy: Resting, keep_warm_s: float, rest_s: float) -> list[Ready | Work]:
    """Load, rest, ask once."""
    posted: list[Ready | Work] = []
    event = threading.Event()
    compute = Compute(lambda outcome: (posted.append(outcome), event.set())[1], ROBOT, 0)
    compute.start(lambda: policy, 1, keep_warm_s=keep_warm_s)
    assert event.wait(5)
    event.clear()
    time.sleep(rest_s)
    assert not compute.put([Work(REQUEST, time.monotonic_ns())])
    assert event.wait(5)
    assert compute.stop(5)
    return posted


def test_a_resting_engine_is_kept_warm_and_still_answers() -> None:
    policy = Resting()
    posted = run(policy, 0.02, 0.5)
    assert len(policy.warmed) >= 5
    assert isinstance(posted[1], Work) and isinstance(posted[1].result, Chunk)


def test_without_it_nothing_runs() -> None:
    policy = Resting()
    run(policy, 0.0, 0.1)
    assert policy.warmed == []


def test_a_failure_is_logged_once_and_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    policy = Resting(fails=True)
    posted = run(policy, 0.02, 0.3)
    assert len(policy.warmed) == 1
    assert [record.message for record in caplog.records] == [
        "keeping the accelerator warm failed; it is not tried again"
    ]
    assert isinstance(posted[1], Work) and isinstance(posted[1].result, Chunk)


def test_a_model_without_graphs_has_nothing_to_run() -> None:
    policy = load_policy(load_robot(resolve("robots", "arm7")), load_model(resolve("models", "fake")))
    policy.keep_warm()
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"family": "fake", "keep_warm_s": -1}, ModelConfig)
