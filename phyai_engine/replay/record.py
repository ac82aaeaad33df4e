"""The record of one run: what was commanded, measured and timed, in one JSON file.

Every ``t_s`` counts from the start of the record on one clock; NaN = not measured (null in the file).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import Struct

from phyai_engine.errors import ConfigError
from phyai_engine.replay.survey import Survey
from phyai_engine.timing import Outcome, Timing
from phyai_engine.whole_files import write_whole

VERSION = 1
NAN = math.nan

StepKind = Literal["action", "hold", "stop"]
Mode = Literal["live", "real-time", "as-fast-as-possible", "step"]
EventKind = Literal["lifecycle", "abort", "rearm", "stop", "camera", "instruction", "fault", "note"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)


class Event(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that happened at ``t_s``."""

    t_s: float
    kind: EventKind
    text: str


class StepRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one control tick commanded: ActionStep.msg. ``values`` in the order of ``Record.action_names``."""

    t_s: float
    kind: StepKind
    values: Sequence[float]
    tick: int
    epoch: int
    chunk_id: int = 0
    step: int = 0


class TimingRow(Timing, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One handoff or rejection at ``t_s``."""

    t_s: float

    @staticmethod
    def of(t_s: float, source: object, *, outcome: str, refusal: str = "none") -> TimingRow:
        """Copy the fields that ``source`` names alike: a ChunkTiming message or the control loop's Timing.

        :param outcome: in words, since the message holds a number. :param refusal: likewise.
        """
        own = {"t_s": t_s, "outcome": outcome, "refusal": refusal}
        # A message of an older recording lacks what was added since: not measured.
        names = [name for name in TimingRow.__struct_fields__ if name not in own and hasattr(source, name)]
        copied = {name: getattr(source, name) for name in names}
        return msgspec.convert({**copied, **own}, TimingRow)


class Joints(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured joints: ``positions[i][j]`` of ``names[j]`` at ``t_s[i]``, rad or m."""

    names: Sequence[str] = ()
    t_s: Sequence[float] = ()
    positions: Sequence[Sequence[float]] = ()


class Camera(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arrivals of one camera.

    :param t_s: arrival. :param stamp_s: the header stamp of each, on the same axis (NaN if unknown).
    :param delivered: delivered fraction as the node counted it, from stamps.
    """

    t_s: Sequence[float] = ()
    stamp_s: Sequence[float] = ()
    delivered: float = NAN


class FrameRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kept image, as JPEG bytes (base64 in the file)."""

    t_s: float
    camera: str
    jpeg: bytes


class ChunkRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One answer of the engine, before any clamp or refusal: ``actions`` [H][A] in robot units, received at ``t_s``."""

    t_s: float
    epoch: int
    chunk_id: int
    actions: Sequence[Sequence[float]]


class IdleRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One inference after the engine had nothing to do for ``idle_s``.

    :param probe: asked for after the run to measure this, and no request of the control loop.
    """

    t_s: float
    idle_s: float
    inference_s: float
    probe: bool = False


class Invariant(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that must hold, and whether it did."""

    name: str
    ok: bool
    detail: str = ""


class Record(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run; every list in time order.

    :param action_type: lower-case name of the ActionType; it gives the commands their unit.
    :param model: what ran, in words; say "random weights" when they are.
    :param started: ISO 8601 wall-clock time of ``t_s`` = 0.
    :param host: processor and cores in words.
    :param refusals: count per refusal name as the node counted them: refused observations too, which make no
        TimingRow. Empty: only the refused chunks among ``timings`` are known.
    :param mode: ``live``, or how a bag was replayed; ``bag`` its name, ``survey`` what its sensors did.
    :param chunks: the engine's answers; ``chunk_hash`` over all of them (:func:`chunk_hash`), empty without any.
    :param first_inference_s: the very first after the model was loaded, which no figure of the run contains.
    :param idle: inferences after a pause of the engine; those of the control loop are among ``timings`` too.
    """

    version: int = VERSION
    robot_id: str
    action_names: Sequence[str]
    action_type: str = "unknown"
    dt_s: float
    model: str
    placement: str
    schedule: str
    started: str
    host: str
    events: Sequence[Event] = ()
    steps: Sequence[StepRow] = ()
    timings: Sequence[TimingRow] = ()
    joints: Joints = Joints()
    cameras: Mapping[str, Camera] = {}
    frames: Sequence[FrameRow] = ()
    refusals: Mapping[str, int] = {}
    invariants: Sequence[Invariant] = ()
    mode: Mode = "live"
    bag: str = ""
    survey: Survey = Survey()
    chunks: Sequence[ChunkRow] = ()
    chunk_hash: str = ""
    first_inference_s: float = NAN
    idle: Sequence[IdleRow] = ()

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all. Infinities become null, as NaN does: JSON has neither."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.encode(self))

    @property
    def duration_s(self) -> float:
        """Time of the last thing recorded [s]; 0.0 for an empty record."""
        times = [row.t_s for rows in (self.events, self.steps, self.timings, self.frames) for row in rows]
        times += [camera.t_s[-1] for camera in self.cameras.values() if camera.t_s]
        times += list(self.joints.t_s[-1:])
        return max(times, default=0.0)

    def check(self, where: object = None) -> None:
        """What types alone do not say.

        :raises ConfigError: row lengths that do not fit their names.
        """
        wanted = len(self.action_names)
        for i, step in enumerate(self.steps):
            if len(step.values) != wanted:
                _unfit(f"steps[{i}].values", len(step.values), wanted, where)
        for i, chunk in enumerate(self.chunks):
            if bad := next((row for row in chunk.actions if len(row) != wanted), None):
                _unfit(f"chunks[{i}].actions", len(bad), wanted, where)
        joints = self.joints
        if len(joints.positions) != len(joints.t_s):
            _unfit("joints.positions", len(joints.positions), len(joints.t_s), where)
        for i, row in enumerate(joints.positions):
            if len(row) != len(joints.names):
                _unfit(f"joints.positions[{i}]", len(row), len(joints.names), where)
        for name, camera in self.cameras.items():
            if len(camera.stamp_s) != len(camera.t_s):
                _unfit(
                    f"cameras.{name}.stamp_s",
                    len(camera.stamp_s),
                    len(camera.t_s),
                    where,
                )


def chunk_hash(chunks: Iterable[ChunkRow]) -> str:
    """sha256 in hex over every chunk in order: its number within its epoch (uint64) and its actions (float64), both
    little endian, rows one after the other. Equal for runs that computed the same actions, whenever they ran."""
    digest = hashlib.sha256()
    first: dict[int, int] = {}
    for chunk in chunks:
        number = chunk.chunk_id - first.setdefault(chunk.epoch, chunk.chunk_id)
        digest.update(number.to_bytes(8, "little"))
        digest.update(np.asarray(chunk.actions, dtype="<f8").tobytes())
    return digest.hexdigest() if first else ""


def _unfit(key: str, got: int, wanted: int, where: object) -> None:
    raise ConfigError(
        f"a row of the record has the wrong length: {key}",
        got=f"{got} entries",
        wanted=wanted,
        where=where,
    )


def load(path: Path) -> Record:
    """Read what :meth:`Record.save` wrote.

    :raises ConfigError: no such file, not JSON, another version, or fields that do not fit.
    """
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError("the record cannot be read", got=error.strerror, where=path) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the record is not whole JSON",
            got=error,
            where=path,
            do="Record the run again.",
        ) from error
    found = raw.get("version") if isinstance(raw, dict) else None
    if found != VERSION:
        raise ConfigError(
            "not a record of this version",
            got="no version" if found is None else f"version {found}",
            wanted=f"version {VERSION}",
            where=path,
            do="Read it with the release that wrote it, or record the run again.",
        )
    try:
        record = msgspec.convert(_nan_for_null(raw), Record)
    except msgspec.ValidationError as error:
        raise ConfigError("the record does not fit its form", got=error, where=path) from error
    record.check(path)
    return record


def _nan_for_null(value: Any) -> Any:
    """No field of a record is optional, so null can only be a float that JSON could not write."""
    if value is None:
        return NAN
    if isinstance(value, list):
        return [_nan_for_null(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _nan_for_null(entry) for key, entry in value.items()}
    return value
