"""What one ``phyai bench`` measured, as its JSON file holds it. Durations are in ms, memory in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from phyai_engine.bench.ceilings import Ceilings, Rate
from phyai_engine.bench.machine import Environment, Memory
from phyai_engine.timing import Window
from phyai_engine.whole_files import write_json

VERSION = 3


class Figures(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of ``n`` runs, warm-up apart."""

    n: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(durations_ms: list[float]) -> Figures:
        """:param durations_ms: at least one."""
        window = Window(len(durations_ms))
        for value in durations_ms:
            window.add(value)
        p = window.percentiles()
        return Figures(n=p.n, p50_ms=p.p50, p95_ms=p.p95, p99_ms=p.p99, max_ms=p.max)


class WarmUp(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """End-to-end times that are not counted: the first run, and the others. None where there was no such run."""

    first_ms: float | None
    others_ms: tuple[float, ...]


class ChunkCheck(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The answers. :param model: [H, A] shape of the model's; :param robot: of the decoded chunk.

    :param not_finite: runs, warm-up included, with a NaN or an infinity. :param runs: all of them.
    """

    model: tuple[int, ...]
    robot: tuple[int, ...]
    not_finite: int
    runs: int

    @property
    def good(self) -> bool:
        return self.not_finite == 0


class Subject(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured. :param weights: a note on what they are. :param options: of the model file, as it was used."""

    model: str
    weights: str
    robot: str
    device: str
    cameras: int
    prompt_tokens: int
    seed: int
    options: dict[str, Any]


class Result(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement.

    :param phases: in order: ``encode``, the runner's (``step 0`` and so on), ``decode``. :param steps: all denoising
        steps of all runs in one; ``steps_sum`` their sum in each run. :param model: staging to copy out, in each run.
    :param ceilings: None where the model does not say how much it computes. :param rates: phase -> what it achieved;
        ``step`` is each of the steps.
    :param end_to_end: encode to decode on the host's clock.
    :param phase_clock: of the runner's phases; the host's for encode, decode and end to end.
    """

    version: int = VERSION
    subject: Subject
    environment: Environment
    warnings: tuple[str, ...]
    load_s: float
    memory: Memory
    warm_up: WarmUp
    chunk: ChunkCheck
    phase_clock: str
    phases: dict[str, Figures]
    steps: Figures
    steps_sum: Figures
    model: Figures
    end_to_end: Figures
    ceilings: Ceilings | None
    rates: dict[str, Rate]

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_json(path, self)
