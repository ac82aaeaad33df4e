"""A policy for the tests of serve/: it does what the instruction says, in a thread or in a child."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import CancelledError, EngineError, PhyaiError
from phyai_engine.types import CancelToken, Chunk, ModelSpec, Request, StageTimings

HORIZON = 5


class StandIn:
    """Its verbs: ``sleep S``, ``deaf S``, ``hold S``, ``raise``, ``refuse``, ``none``, ``exit``, ``abort``,
    ``say N``, ``pid``, ``threads``, ``break the worker``."""

    def __init__(self, action_dim: int, *, keeps_state: bool = False) -> None:
        self.spec = ModelSpec("stand_in", HORIZON, action_dim, (1.0, 0.0), {}, (), keeps_state=keeps_state)
        self.note = "a stand-in"
        self.seen: list[Request] = []

    def warm_up(self, count: int, rows: int = 1) -> list[float]:
        return [1.5 + rows - 1] * count

    def join(self, slot: int, robot: RobotConfig) -> None:
        if robot.robot_id == "unwanted":
            raise EngineError("not this robot")

    def leave(self, slot: int) -> None:
        pass

    def infer(self, requests: Sequence[Request], cancels: Sequence[CancelToken]) -> Any:
        if len(requests) > 1:
            return [answer for one in zip(requests, cancels, strict=True) for answer in self.infer(one[:1], one[1:])]
        (request,), (token,) = requests, cancels
        self.seen.append(request)
        verb, _, argument = request.observation.instruction.partition(" ")
        result = self._act(verb, argument, token)
        if result is not None:
            return result[0]
        actions = np.full((HORIZON, self.spec.action_dim), request.observation.state[0])
        return [Chunk(request.epoch, request.chunk_id, actions, StageTimings(encode_ms=0.25))]

    def _act(self, verb: str, argument: str, token: CancelToken) -> tuple[Any] | None:  # noqa: PLR0912 - a list
        if verb == "sleep":  # in slices, like denoising steps
            until = time.monotonic() + float(argument)
            while time.monotonic() < until:
                if token.cancelled:
                    return ([CancelledError("stopped between steps")],)
                time.sleep(0.005)
        elif verb == "deaf":
            time.sleep(float(argument))
        elif verb == "hold":  # PyDLL keeps the interpreter lock during the call
            ctypes.PyDLL(None).usleep(int(float(argument) * 1e6))
        elif verb == "raise":
            raise ValueError("a defect \udc80")
        elif verb == "refuse":
            return ([EngineError("not this one")],)
        elif verb == "pid":
            return ([EngineError(f"pid {os.getpid()}")],)
        elif verb == "none":
            return (None,)
        elif verb == "exit":
            sys.exit(3)
        elif verb == "abort":
            sys.stderr.write("about to abort\n")
            os.abort()
        elif verb == "threads":
            return ([EngineError(f"{sys.modules['torch'].get_num_threads()} threads")],)
        elif verb == "break":
            from phyai_engine.serve import worker

            def fails(*_: object) -> None:
                raise RuntimeError("the worker broke")

            threading.Thread(target=time.sleep, args=(60,), daemon=False).start()  # as a library may
            worker._Worker._beat = fails  # type: ignore[method-assign]
            time.sleep(60)
        elif verb == "say":
            for i in range(int(argument)):
                sys.stdout.write(f"line {i} {'x' * 80}\n")
        return None


def load_policy(robot: RobotConfig, model: ModelConfig, batches: Sequence[int] = ()) -> StandIn:
    """Options: ``keeps_state``, ``load_say``, ``load_s``, ``load_error``, ``load_exit``, ``torch``."""
    if text := model.options.get("load_say"):
        sys.stderr.write(text + "\n")
    if model.options.get("torch"):
        import torch  # noqa: F401
    time.sleep(float(model.options.get("load_s", 0.0)))
    if text := model.options.get("load_error"):
        raise PhyaiError(text)
    if code := model.options.get("load_exit"):
        sys.stderr.write("the disk is on fire\n")
        sys.stderr.flush()
        os._exit(code)
    return StandIn(len(robot.actions), keeps_state=bool(model.options.get("keeps_state")))


def install() -> None:
    """Stand in for phyai_engine.policy in this process."""
    module = types.ModuleType("phyai_engine.policy")
    module.load_policy = load_policy  # type: ignore[attr-defined]
    sys.modules["phyai_engine.policy"] = module
