"""Every recorded request through an engine again: are the actions the same, and if not, by how much.

``phyai replay RECORDING --recorded``. The same engine with the same seeds gives the same bytes; another device, kernel,
precision or model does not, and then the differences are told in robot units.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import BagError, PhyaiError
from phyai_engine.policy import Policy, load_policy
from phyai_engine.replay.record import ChunkRow, chunk_hash
from phyai_engine.replay.recorded import Exchange, Recording, open_recording
from phyai_engine.replay.verdict import ms
from phyai_engine.runner import Runner
from phyai_engine.types import F32, F64, Chunk, Request
from phyai_engine.weights.checkpoint import model_from


@dataclass(frozen=True, slots=True, eq=False)
class SolverTrace:
    """What the solver did, in the model's normalised space; columns of the robot's actions only.

    :param velocity: [N, H, A]: of each step, after guidance. :param displacement: [H, A]: action minus noise.
    """

    velocity: F32
    displacement: F32


@dataclass(frozen=True, slots=True, eq=False)
class Again:
    """The new answer to a recorded request.

    :param actions: [H, A] float64 robot units; None: ``error`` says why.
    :param inference_s: encode to decode.
    """

    actions: F64 | None
    trace: SolverTrace | None
    inference_s: float
    error: str = ""


class TracedPolicy:
    """A policy that also tells what its solver did. Not for concurrent calls.

    :param threads: CPU threads of torch, if the model brings it; 0 = its default.
    :raises PhyaiError: robot and model do not fit, or the weights cannot be read.
    """

    def __init__(self, robot: RobotConfig, model: ModelConfig, *, threads: int = 0) -> None:
        policy = load_policy(robot, model)
        if threads and (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(threads)
        self._model = policy.runner.model
        self._columns = len(robot.actions)
        self._steps: list[tuple[F32, F32]] = []
        own = policy.runner
        runner = Runner(self._model, on_step=self._on_step, guidance=own.guidance, graphs=own.graphs)
        self._policy = Policy(policy.adapter, runner, policy.note)
        self.note = policy.note
        self.times = policy.spec.times
        self._policy.warm_up(2)

    def infer(self, request: Request) -> Again:
        """One answer; an error of the model or the adapter is an answer too."""
        self._steps.clear()
        began = time.monotonic_ns()
        answer = self._policy.infer([request])[0]
        spent_s = (time.monotonic_ns() - began) * 1e-9
        if isinstance(answer, PhyaiError):
            return Again(None, None, spent_s, str(answer))
        assert isinstance(answer, Chunk)
        return Again(answer.actions, self._trace(), spent_s)

    def _on_step(self, step: int, x: Any, velocity: Any) -> None:
        """Copied at once: a model may use the same buffer for its next step."""
        self._steps.append((self._own(x), self._own(velocity)))

    def _own(self, batch: Any) -> F32:
        return np.array(self._model.to_host(batch), dtype=np.float32)[0, :, : self._columns]

    def _trace(self) -> SolverTrace:
        noise, (x, velocity) = self._steps[0][0], self._steps[-1]
        last = x - velocity / np.float32(len(self.times))
        return SolverTrace(np.stack([v for _, v in self._steps]), last - noise)


@dataclass(slots=True)
class RecordedReplay:
    """What a second run of the recorded requests gave.

    :param requests: in the recording; ``compared`` those with an answer then and now, ``same`` of them byte by byte.
    :param incomplete: without all of their frames. :param unanswered: without an answer then (cancelled, or cut).
    :param failed: not answered now; ``error`` the first reason.
    :param hash_then, hash_now: of the compared chunks, as a record has it.
    :param worst: largest difference in robot units, of action ``worst_name`` in chunk ``worst_chunk``.
    """

    requests: int = 0
    compared: int = 0
    same: int = 0
    incomplete: int = 0
    unanswered: int = 0
    failed: int = 0
    error: str = ""
    hash_then: str = ""
    hash_now: str = ""
    worst: float = 0.0
    worst_name: str = ""
    worst_chunk: int = 0
    inference_p50_s: float = float("nan")
    inference_p99_s: float = float("nan")

    @property
    def equal(self) -> bool:
        """Every request that could be compared gave the same bytes, and none failed."""
        return self.same == self.compared > 0 and not self.failed

    def note_worst(self, exchange: Exchange, actions: F64, names: tuple[str, ...]) -> None:
        """Keep the largest difference."""
        assert exchange.actions is not None  # the caller looked
        difference = np.abs(actions - exchange.actions)
        row, column = np.unravel_index(int(difference.argmax()), difference.shape)
        if difference[row, column] > self.worst:
            self.worst, self.worst_name = float(difference[row, column]), names[column]
            self.worst_chunk = exchange.request.chunk_id


def answered_again(recording: Recording, policy: TracedPolicy) -> Iterator[tuple[Exchange, Again | None]]:
    """Every recorded request with its new answer; None where frames are missing."""
    for exchange in recording.exchanges():
        yield exchange, None if exchange.missing else policy.infer(exchange.request)


def replay_recorded(recording: Recording, model: ModelConfig | None = None) -> RecordedReplay:
    """Run every recorded request again.

    :param model: another one than recorded.
    :raises PhyaiError: the model cannot be loaded, or no request can be compared.
    """
    policy = TracedPolicy(recording.robot, model or recording.model, threads=recording.threads)
    result, spent = RecordedReplay(), []
    then: list[ChunkRow] = []
    now: list[ChunkRow] = []
    for exchange, again in answered_again(recording, policy):
        result.requests += 1
        result.incomplete += again is None
        result.unanswered += exchange.actions is None
        if again is None:
            continue
        spent.append(again.inference_s)
        result.failed += again.actions is None
        result.error = result.error or again.error
        if again.actions is None or exchange.actions is None:
            continue
        then.append(_row(exchange, exchange.actions))
        now.append(_row(exchange, again.actions))
        result.compared += 1
        result.same += again.actions.tobytes() == exchange.actions.tobytes()
        if again.actions.shape == exchange.actions.shape:
            result.note_worst(exchange, again.actions, recording.robot.action_names)
    result.hash_then, result.hash_now = chunk_hash(then), chunk_hash(now)
    if spent:
        result.inference_p50_s, result.inference_p99_s = (float(p) for p in np.percentile(spent, (50, 99)))
    if not result.compared:
        raise BagError(
            "no request of the recording can be compared",
            got=f"{result.requests} requests, {result.incomplete} without their frames, {result.unanswered} without an "
            f"answer, {result.failed} not answered now" + (f": {result.error}" if result.error else ""),
            wanted="a request with its frames and its answer",
            where=recording.folder,
        )
    return result


def _row(exchange: Exchange, actions: F64) -> ChunkRow:
    request = exchange.request
    return ChunkRow(t_s=exchange.t_s, epoch=request.epoch, chunk_id=request.chunk_id, actions=actions.tolist())


def recorded_command(folder: Path, model: str = "") -> int:
    """What ``phyai replay RECORDING --recorded`` does.

    :param model: another one than recorded: as ``model_from`` takes it.
    :returns: exit code: 0 the same actions, 1 not.
    :raises PhyaiError: the recording or the model cannot be used.
    """
    console = Console(highlight=False, markup=False)
    with open_recording(folder) as recording:
        for warning in recording.warnings:
            console.print(f"warning: {warning}", style="yellow")
        result = replay_recorded(recording, model_from(model) if model else None)
    for sentence in sentences(result):
        console.print(sentence)
    return 0 if result.equal else 1


def sentences(result: RecordedReplay) -> list[str]:
    """What a second run showed, in words."""
    head = f"{result.same} of {result.compared} chunks have the same actions, byte by byte"
    lines = [
        f"The same: {head}." if result.equal else f"DIFFERENT: {head}.",
        f"hash then {result.hash_then}",
        f"hash now  {result.hash_now}",
        f"inference now: p50 {ms(result.inference_p50_s)}, p99 {ms(result.inference_p99_s)}",
    ]
    if result.worst > 0:
        where = f"{result.worst_name}, chunk {result.worst_chunk}"
        lines.append(f"largest difference {result.worst:.3g} (robot units): {where}")
    left_out = (
        (result.incomplete, "whose frames the recording does not hold"),
        (result.unanswered, "that had no answer (cancelled, failed, or after the recording's end)"),
        (result.failed, f"that are not answered now: {result.error}"),
    )
    lines += [f"not compared: {n} of {result.requests} requests {why}" for n, why in left_out if n]
    return lines
