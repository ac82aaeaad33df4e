"""A policy node whose engine is a server: what the robot does while the network or the server is away."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from proxy import Faults, Proxy
from scripted_server import ScriptedServer, engine_hello

from phyai_engine.config import load_robot, resolve
from phyai_engine.serve import protocol as wire
from phyai_engine.types import AbortCause, CommandKind, Request, SafetyState, StageTimings

pytestmark = pytest.mark.ros

ARM = load_robot(resolve("robots", "arm7"))
HORIZON = 16  # of 20 ms
HEARTBEAT_S = 0.8
Make = Callable[..., Any]


def answer(server: ScriptedServer, peer: bytes, request: Request) -> None:
    """Stay where the robot is."""
    here = request.observation.state[list(ARM.state_index())]
    message = wire.Reply(
        epoch=request.epoch,
        chunk_id=request.chunk_id,
        timings=StageTimings(queue_ms=0.5, batch_ms=0.25, inference_ms=1.0),
    )
    server.send(peer, message, {"actions": np.tile(here, (HORIZON, 1))})


def arm_server(port: int = 0) -> ScriptedServer:
    hello = engine_hello(horizon=HORIZON, action_names=ARM.action_names, dt_s=ARM.dt_s)
    cameras = tuple(camera.name for camera in ARM.cameras)
    return ScriptedServer(answer, greet=lambda _: wire.HelloReply(engine=hello), port=port, cameras=cameras)


class Far:
    """A server behind a network that can be cut; the server can be killed and started again."""

    def __init__(self) -> None:
        self.server = arm_server()
        self.proxy = Proxy(self.server.port)

    def restart(self) -> None:
        self.server = arm_server(self.server.port)

    def close(self) -> None:
        self.proxy.close()
        self.server.close()


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    made.close()


@pytest.fixture
def rig(make_rig: Make, far: Far) -> Any:
    given = {"engine": "remote", "engine_endpoint": far.proxy.endpoint, "engine_start_timeout_s": 5.0}
    rig = make_rig(**given, engine_heartbeat_s=HEARTBEAT_S, engine_robot_id="left.arm")
    rig.start()
    return rig


def test_it_moves_and_says_how_it_is_connected(rig: Any, far: Far) -> None:
    (hello,) = far.server.hellos
    assert (hello.robot_id, hello.model) == ("left.arm", str(rig.model_file))
    assert rig.status.placement == "remote"

    def notes() -> dict[str, str]:
        return {v.key: v.value for a in rig.diagnostics[-1:] for v in a.status[0].values}

    rig.until(lambda: "p99" in notes().get("engine_network_ms", ""))
    assert notes()["engine_connection"] == f"connected to {far.proxy.endpoint}"
    assert "p99" in notes()["engine_serialise_ms"]
    assert "p99" in notes()["engine_queue_ms"]


def test_the_time_on_the_network_is_told_from_the_rest(rig: Any, far: Far) -> None:
    far.proxy.faults = Faults(delay_s=0.03)
    rig.until(lambda: rig.timings[-1].l_network_s > 0.055)  # both ways
    timing = rig.timings[-1]
    assert 0.0 < timing.l_serialise_s < 0.05
    assert timing.l_serialise_s + timing.l_network_s == pytest.approx(timing.l_transfer_s, abs=1e-6)
    assert 0.0 <= timing.l_batch_s <= timing.l_queue_s


def test_a_short_loss_holds_and_goes_on_by_itself(rig: Any, far: Far) -> None:
    epoch = rig.epoch
    far.server.close()
    rig.until(lambda: rig.safety is SafetyState.HOLDING, 2.0)
    count = len(rig.steps)
    far.restart()
    rig.until(lambda: rig.safety is SafetyState.RUNNING, 2.0)
    assert rig.epoch == epoch  # nothing was latched
    assert CommandKind.STOP not in rig.kinds()
    assert set(rig.kinds()[count:]) >= {CommandKind.HOLD}
    far.proxy.cut()
    rig.until(lambda: rig.safety is SafetyState.HOLDING, 2.0)
    far.proxy.mend()
    rig.until(lambda: rig.safety is SafetyState.RUNNING, 2.0)
    assert rig.epoch == epoch


@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_long_loss_stops_and_only_a_person_resumes(rig: Any, far: Far, how: str) -> None:
    if how == "cut":
        far.proxy.cut()
    else:
        far.server.close()
    rig.told(AbortCause.ENGINE_LOST)
    assert "no heartbeat from the engine server" in rig.status.abort_text
    kinds = rig.kinds()
    stop = kinds.index(CommandKind.STOP)
    assert CommandKind.ACTION not in kinds[stop:]
    refused = rig.call("rearm")
    assert not refused.success
    assert "connecting to tcp://" in refused.message
    epoch = rig.epoch
    if how == "cut":
        far.proxy.mend()
    else:
        far.restart()
    rig.until(lambda: rig.node._session.client.alive)
    rig.spin(0.3)
    assert rig.safety is SafetyState.LATCHED  # it does not resume by itself
    assert rig.epoch == epoch
    rig.resumed()


def test_restart_engine_connects_anew(rig: Any, far: Far) -> None:
    assert rig.call("abort").success
    rig.until(lambda: rig.safety is SafetyState.LATCHED)
    done = rig.call("restart_engine", 8.0)
    assert done.success, done.message
    assert "connected to tcp://" in done.message
    assert len({hello.instance for hello in far.server.hellos}) == 2
    rig.resumed()
