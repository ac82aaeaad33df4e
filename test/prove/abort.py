"""~/abort while a model of 2 s per chunk computes in a child process: call -> stop message, measured in the caller.

The node, the simulated arm and the caller are three processes. Aborts fall at random phases: before the first chunk,
while a chunk plays, while the next one is computed.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import rclpy
from evidence import conclude, fake_model, options
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from phyai_policy.msg import ActionStep, PolicyStatus
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rich.progress import track
from std_srvs.srv import Trigger

from phyai_engine.types import CommandKind, SafetyState


class Caller:
    """Calls services and hears commands."""

    def __init__(self) -> None:
        self.node = Node("caller")
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self.heard: list[tuple[float, ActionStep]] = []
        self.status = PolicyStatus()
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self.node.create_subscription(PolicyStatus, "policy_node/status", self._on_status, latched)
        self.node.create_subscription(ActionStep, "policy_node/step", self._on_step, QoSProfile(depth=200))
        self.abort = self.node.create_client(Trigger, "policy_node/abort")
        self.rearm = self.node.create_client(Trigger, "policy_node/rearm")

    def _on_status(self, message: PolicyStatus) -> None:
        self.status = message

    def _on_step(self, message: ActionStep) -> None:
        self.heard.append((time.monotonic(), message))

    def until(self, condition: Any, seconds: float) -> bool:
        """Spin until the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.executor.spin_once(timeout_sec=0.02)
        return True

    def call(self, client: Any, request: Any, seconds: float = 5.0) -> Any:
        """The response, within a bound."""
        assert client.wait_for_service(timeout_sec=30.0)
        future = client.call_async(request)
        assert self.until(future.done, seconds), "no answer"
        return future.result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--latency-ms", type=float, default=2000.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = options(parser)
    file = fake_model(latency_ms=chosen.latency_ms, horizon=250)
    python, quiet = sys.executable, {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    sim = subprocess.Popen([python, "-m", "phyai_ros.sim_node", "--ros-args", "-p", "robot:=arm7"], **quiet)
    given = {
        "robot": "arm7",
        "model": file,
        "warm_up_count": "1",
        "request_timeout_s": "30.0",
    }
    pairs = [item for key, value in given.items() for item in ("-p", f"{key}:={value}")]
    policy = subprocess.Popen([python, "-m", "phyai_ros.policy_node", "--ros-args", *pairs], **quiet)
    rclpy.init()
    caller = Caller()
    chance = random.Random(chosen.seed)
    delays, replies, old, phases = [], [], 0, {"armed": 0, "running": 0, "holding": 0}
    refused: list[str] = []
    try:
        change = caller.node.create_client(ChangeState, "policy_node/change_state")
        for number in (Transition.TRANSITION_CONFIGURE, Transition.TRANSITION_ACTIVATE):
            request = ChangeState.Request(transition=Transition(id=number))
            assert caller.call(change, request, 60.0).success
        for _ in track(range(chosen.count), "aborts"):
            wait = chance.uniform(0.05, 1.5 * chosen.latency_ms * 1e-3)
            caller.until(lambda: False, wait)
            phases[SafetyState(caller.status.safety_state).name.lower()] += 1
            epoch, caller.heard = caller.status.epoch, []
            began = time.monotonic()
            future = caller.abort.call_async(Trigger.Request())
            stops: list[float] = []

            def stopped(stops: list[float] = stops) -> bool:
                stops[:] = [t for t, m in caller.heard if m.kind == CommandKind.STOP]
                return bool(stops)

            assert caller.until(stopped, 5.0), "no stop message"
            delays.append((stops[0] - began) * 1e3)
            assert caller.until(future.done, 5.0)
            replies.append((time.monotonic() - began) * 1e3)
            assert caller.until(lambda: caller.status.safety_state == SafetyState.LATCHED, 5.0)
            old += sum(t > stops[0] and m.kind == CommandKind.ACTION and m.epoch <= epoch for t, m in caller.heard)
            end = time.monotonic() + 10.0
            while not (answer := caller.call(caller.rearm, Trigger.Request())).success:
                refused.append(answer.message)  # rightly, without a fresh observation
                assert time.monotonic() < end, f"re-arm refused: {answer.message}"
                caller.until(lambda: False, 0.1)
    finally:
        for process in (policy, sim):
            process.send_signal(signal.SIGINT)
        codes = [process.wait(timeout=15.0) for process in (policy, sim)]
        rclpy.try_shutdown()
    times = np.array(delays)
    p50, p99 = np.percentile(times, [50, 99])
    rows: list[tuple[str, str, bool | None]] = [
        (
            "call -> stop message ms",
            f"p50 {p50:.2f}, p99 {p99:.2f}, max {times.max():.2f}, n {len(times)}",
            p99 <= 20,
        ),
        ("call -> reply ms", f"p50 {np.median(replies):.2f}, max {max(replies):.2f}", None),
        ("old-epoch actions after the stop", str(old), old == 0),
        ("state when aborted", ", ".join(f"{k} {v}" for k, v in phases.items()), None),
        ("re-arms refused at first", f"{len(refused)} {refused[-1] if refused else ''}", None),
        ("exit codes after SIGINT", str(codes), not any(codes)),
    ]
    title = f"abort: {chosen.count} calls, {chosen.latency_ms:.0f} ms a chunk, engine process"
    return conclude(title, rows, log=chosen.log)


if __name__ == "__main__":
    raise SystemExit(main())
