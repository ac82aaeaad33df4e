"""``phyai diff RUN_A RUN_B``: how far two runs' actions are apart, and their latencies side by side.

The tool for kernels, quantisation and models: run one recording through both, and the differences are the engine's
alone. Answers are paired by their number in the run; where the inputs of a pair differ, that is said, for then the
actions differ for that reason too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phyai_engine.errors import BagError, ConfigError
from phyai_engine.replay import record as records
from phyai_engine.replay.record import ChunkRow, Record, chunk_hash
from phyai_engine.replay.recorded import Number, Numbering, Recording, is_recording, open_recording
from phyai_engine.replay.recorded_replay import SolverTrace, TracedPolicy, answered_again
from phyai_engine.replay.recorded_run import record_of
from phyai_engine.replay.summary import MARGINS, STAGES, summary
from phyai_engine.types import F64
from phyai_engine.weights.checkpoint import model_from
from phyai_engine.whole_files import write_json

RECORDED = "recorded"
"""In place of a model: the one that the recording names."""

UNITS = {"joint_position": "rad or m", "joint_velocity": "rad/s or m/s", "cartesian_delta": "command units per step"}


@dataclass(slots=True)
class Side:
    """One of the two runs.

    :param answers: [H, A] robot units by number. :param inputs: digests of what the engine was given, where known.
    :param traces: of a run again. :param again_s: its inference times. :param failed: requests it did not answer.
    """

    name: str
    record: Record
    answers: dict[Number, F64] = field(default_factory=dict)
    inputs: dict[Number, bytes] = field(default_factory=dict)
    traces: dict[Number, SolverTrace] = field(default_factory=dict)
    times: tuple[float, ...] = ()
    again_s: list[float] = field(default_factory=list)
    failed: int = 0


class Spread(Struct, frozen=True):
    """Of the compared chunks: median, 99th percentile, largest. None without any."""

    p50: float | None
    p99: float | None
    max: float | None

    @staticmethod
    def of(values: Sequence[float] | NDArray[Any]) -> Spread:
        """:param values: what is not finite is left out."""
        array = np.asarray(values, dtype=np.float64)
        array = array[np.isfinite(array)]
        if not array.size:
            return Spread(None, None, None)
        p50, p99, largest = (float(value) for value in np.percentile(array, (50, 99, 100)))
        return Spread(p50, p99, largest)


class JointDiff(Struct, frozen=True, kw_only=True):
    """|A - B| of one action over all rows of all chunks, robot units. :param largest_chunk: number in the run."""

    name: str
    difference: Spread
    rms: float
    largest_chunk: str
    largest_row: int


class StepDiff(Struct, frozen=True, kw_only=True):
    """One denoising step at flow time ``t``: relative L2 error of the velocity, |A - B| / |A|."""

    step: int
    t: float
    velocity: Spread


class LatencyRow(Struct, frozen=True, kw_only=True):
    """One figure of both runs [s]; None = not measured. Of a margin p99 is what 99 % of the handoffs had at least."""

    name: str
    a_p50: float | None
    a_p99: float | None
    b_p50: float | None
    b_p99: float | None


class Diff(Struct, frozen=True, kw_only=True):
    """The comparison.

    :param pairs: chunks with the same number on both sides; ``same_inputs`` those whose engine was given the same, -1
        where that is not known. :param same_actions: pairs equal byte by byte.
    :param steps: empty unless both sides were run again; ``displacement`` (action minus noise, relative L2) likewise.
    :param notes: what limits the comparison, sentences.
    """

    version: int = 1
    a: str
    b: str
    unit: str
    pairs: int
    same_inputs: int
    same_actions: int
    only_a: int
    only_b: int
    hash_a: str
    hash_b: str
    joints: Sequence[JointDiff]
    steps: Sequence[StepDiff]
    displacement: Spread
    latency: Sequence[LatencyRow]
    misses: tuple[str, str]
    notes: Sequence[str]

    @property
    def largest(self) -> float:
        """Largest |A - B| of any action, robot units; infinite where a value is not finite on one side."""
        return max((joint.difference.max or 0.0 for joint in self.joints), default=0.0)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, self)


# -- sides -------------------------------------------------------------------------------------------------------------


def load_side(path: Path, model: str = "") -> Side:
    """One run: a recording folder, or the record of a replay.

    :param model: run the recorded requests again with this one, or with ``recorded``; empty: the recorded answers.
    :raises PhyaiError: it cannot be read, or there is nothing to run again.
    """
    if is_recording(path):
        with open_recording(path) as recording:
            return _of_recording(recording, model)
    if path.is_dir():
        raise ConfigError("not a recording", wanted="a folder with run.json, or a record.json of a replay", where=path)
    if model:
        raise ConfigError(
            "a record holds no requests to run again",
            got=path,
            wanted="a recording folder",
            do="Record the run with the node's parameter `record`, or leave the model out.",
        )
    record = records.load(path)
    if not record.chunks:
        raise ConfigError(
            "the record holds no chunks", where=path, do="Compare records of `phyai replay`, or recording folders."
        )
    side, numbering = Side(path.name, record), Numbering()
    for chunk in record.chunks:
        side.answers[numbering(chunk.epoch, chunk.chunk_id)] = np.asarray(chunk.actions, dtype=np.float64)
    return side


def _of_recording(recording: Recording, model: str) -> Side:
    side = Side(recording.folder.name, record_of(recording))
    if not model:
        for exchange in recording.exchanges(images=False):
            side.inputs[exchange.number] = exchange.inputs
            if exchange.actions is not None:
                side.answers[exchange.number] = exchange.actions
        return side
    policy = TracedPolicy(
        recording.robot,
        recording.model if model == RECORDED else model_from(model),
        threads=recording.threads,
    )
    side.name, side.times = f"{recording.folder.name}, run again: {policy.note}", policy.times
    for exchange, again in answered_again(recording, policy):
        side.inputs[exchange.number] = exchange.inputs
        if again is None or again.actions is None or again.trace is None:
            side.failed += 1
            continue
        side.answers[exchange.number] = again.actions
        side.traces[exchange.number] = again.trace
        side.again_s.append(again.inference_s)
    return side


# -- comparison --------------------------------------------------------------------------------------------------------


def compare(a: Side, b: Side) -> Diff:
    """Both runs pair by pair.

    :raises ConfigError: the actions have other names. :raises BagError: no chunk of one has its like in the other.
    """
    names = tuple(a.record.action_names)
    if names != tuple(b.record.action_names):
        raise ConfigError(
            "the runs are of different robots", got=", ".join(b.record.action_names), wanted=", ".join(names)
        )
    pairs = sorted(a.answers.keys() & b.answers.keys())
    if not pairs:
        raise BagError("no chunk of A has its like in B", got=f"{len(a.answers)} and {len(b.answers)} chunks")
    rows = min(len(side.answers[number]) for number in pairs for side in (a, b))
    both = sorted(a.traces.keys() & b.traces.keys() & set(pairs))
    traced = [(a.traces[number], b.traces[number]) for number in both]
    alike = bool(traced) and a.times == b.times and all(x.velocity.shape == y.velocity.shape for x, y in traced)
    known = a.inputs.keys() & b.inputs.keys() & set(pairs)
    return Diff(
        a=a.name,
        b=b.name,
        unit=UNITS.get(a.record.action_type, "robot units"),
        pairs=len(pairs),
        same_inputs=sum(a.inputs[number] == b.inputs[number] for number in known) if known else -1,
        same_actions=sum(a.answers[number].tobytes() == b.answers[number].tobytes() for number in pairs),
        only_a=len(a.answers) - len(pairs),
        only_b=len(b.answers) - len(pairs),
        hash_a=_hash(a, pairs),
        hash_b=_hash(b, pairs),
        joints=_joints(a, b, pairs, rows, names),
        steps=_steps(a.times, traced) if alike else (),
        displacement=Spread.of([_relative(x.displacement, y.displacement) for x, y in traced] if alike else []),
        latency=_latency(a, b),
        misses=(_missed(a.record), _missed(b.record)),
        notes=_notes(a, b, pairs, alike=alike),
    )


def _hash(side: Side, pairs: Sequence[Number]) -> str:
    return chunk_hash(
        ChunkRow(t_s=0.0, epoch=epoch, chunk_id=chunk, actions=side.answers[epoch, chunk].tolist())
        for epoch, chunk in pairs
    )


def _joints(a: Side, b: Side, pairs: Sequence[Number], rows: int, names: Sequence[str]) -> list[JointDiff]:
    apart = np.stack([np.abs(a.answers[n][:rows] - b.answers[n][:rows]) for n in pairs])  # [n, rows, A]
    apart = np.where(np.isfinite(apart), apart, np.inf)
    found = []
    for column, name in enumerate(names):
        values = apart[:, :, column]
        pair, row = (int(i) for i in np.unravel_index(int(values.argmax()), values.shape))
        epoch, chunk = pairs[pair]
        largest = float(values[pair, row])
        spread = Spread.of(values) if math.isfinite(largest) else Spread(None, None, largest)
        found.append(
            JointDiff(
                name=name,
                difference=spread,
                rms=float(np.sqrt(np.mean(values**2))),
                largest_chunk=f"{epoch}/{chunk}",
                largest_row=row,
            )
        )
    return found


def _steps(times: Sequence[float], traced: Sequence[tuple[SolverTrace, SolverTrace]]) -> list[StepDiff]:
    return [
        StepDiff(step=step, t=t, velocity=Spread.of([_relative(x.velocity[step], y.velocity[step]) for x, y in traced]))
        for step, t in enumerate(times)
    ]


def _relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    """|a - b| / |a|; 0 where both are zero."""
    apart, length = (float(np.linalg.norm(x.astype(np.float64))) for x in (a - b, a))
    return apart / length if length else (0.0 if apart == 0.0 else math.inf)


def _latency(a: Side, b: Side) -> list[LatencyRow]:
    runs = [summary(side.record) for side in (a, b)]
    again = [Spread.of(side.again_s) for side in (a, b)]
    figures = [("inference, run again", [(spread.p50, spread.p99) for spread in again])]
    for name in (*STAGES, "l_critical_s"):
        figures.append((name, [(run["stages"][name]["p50"], run["stages"][name]["p99"]) for run in runs]))
    for name in MARGINS:  # of a margin the low end matters
        figures.append((name, [(run["margins"][name]["p50"], run["margins"][name]["p01"]) for run in runs]))
    rows = [
        LatencyRow(name=name, a_p50=of_a[0], a_p99=of_a[1], b_p50=of_b[0], b_p99=of_b[1])
        for name, (of_a, of_b) in figures
    ]
    return [row for row in rows if row.a_p50 is not None or row.b_p50 is not None]


def _missed(record: Record) -> str:
    margin = summary(record)["margins"]["m_ctrl_s"]
    return f"{margin['misses']} of {margin['n']}"


def _notes(a: Side, b: Side, pairs: Sequence[Number], *, alike: bool) -> list[str]:
    notes = []
    lengths = [len(side.answers[pairs[0]]) for side in (a, b)]
    if lengths[0] != lengths[1]:
        notes.append(f"Horizons differ ({lengths[0]} and {lengths[1]} rows): the rows that both have are compared.")
    for side, letter in ((a, "A"), (b, "B")):
        if side.failed:
            notes.append(f"{letter}: {side.failed} requests could not be run again (frames missing, or refused).")
    if not (a.traces and b.traces):
        notes.append("Velocities need both sides run again: --model-a and --model-b (`recorded`: the recording's own).")
    elif not alike:
        notes.append("Velocities are not compared: the models have other flow times or other shapes.")
    return notes
