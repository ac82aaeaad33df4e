"""The folder of one evaluation: ``run.json`` says what it is, ``episodes.jsonl`` grows, the rest is made at its end.

An interrupted evaluation goes on where it was; one of something else is refused. What is aggregated has one record of
every episode of the manifest, no more and no less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from phyai_engine.config import RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.evaluate.condition import Condition
from phyai_engine.evaluate.manifest import Episode, Manifest, digest, lines, load_manifest
from phyai_engine.evaluate.provenance import Provenance
from phyai_engine.evaluate.record import EpisodeRecord
from phyai_engine.whole_files import write_json, write_whole

VERSION = 1
IN_PROCESS, ROS = "in-process", "ros"


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is evaluated and with what.

    :param robot: robot_id; ``robot_sha256`` of the robot as read, ``dt_s`` its control period.
    :param manifest_sha256: of its JSON lines.
    :param batch: requests that may be computed together.
    :param driver: IN_PROCESS, on a virtual clock, or ROS: over topics in real time.
    """

    version: int = VERSION
    driver: str
    robot: str
    robot_sha256: str
    dt_s: float
    condition: Condition
    manifest_sha256: str
    episodes: int
    batch: int
    provenance: Provenance

    @staticmethod
    def of(
        driver: str,
        robot: RobotConfig,
        condition: Condition,
        manifest: Manifest,
        provenance: Provenance,
        *,
        batch: int = 1,
    ) -> Run:
        """What is about to begin."""
        return Run(
            driver=driver,
            robot=robot.robot_id,
            robot_sha256=hashlib.sha256(msgspec.json.encode(robot)).hexdigest(),
            dt_s=robot.dt_s,
            condition=condition,
            manifest_sha256=digest(manifest),
            episodes=len(manifest),
            batch=batch,
            provenance=provenance,
        )

    @property
    def title(self) -> str:
        """The condition in words; over topics the delay is what it is."""
        return self.condition.title if self.driver == IN_PROCESS else f"{self.condition.way}, over ROS topics"

    @property
    def identity(self) -> dict[str, object]:
        """What must be equal for episodes to be counted together; software and machine are archived, and may differ."""
        return {
            "driver": self.driver,
            "robot": self.robot_sha256,
            "condition": self.condition,
            "manifest": self.manifest_sha256,
            "model": self.provenance.model_sha256,
            "checkpoint": self.provenance.checkpoint_sha256,
        }


class RunFolder:
    """One folder.

    :param path: made where it is missing.
    :raises ConfigError: it cannot be used, or holds the evaluation of something else.
    """

    def __init__(self, path: Path, run: Run, manifest: Manifest) -> None:
        self.path, self.run, self.manifest = path, run, manifest
        self._episodes = path / "episodes.jsonl"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if (path / "run.json").exists():
                self._check_same(read_run(path))
            else:
                write_whole(path / "manifest.jsonl", lines(manifest))
                write_json(path / "run.json", run)
            self._drop_torn_line()
        except OSError as error:
            raise ConfigError(f"cannot use the folder: {error.strerror}", where=path) from None

    def _check_same(self, before: Run) -> None:
        mine, other = self.run.identity, before.identity
        if wrong := [name for name in mine if mine[name] != other[name]]:
            name = wrong[0]
            raise ConfigError(
                f"another evaluation lies there: its {', '.join(wrong)} differs",
                got=other[name],
                wanted=mine[name],
                where=self.path,
                do="Give another --out, or remove that folder.",
            )

    def _drop_torn_line(self) -> None:
        """A line that was being written when the process was killed is no record."""
        if not self._episodes.exists():
            return
        content = self._episodes.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            write_whole(self._episodes, whole)

    def waiting(self) -> list[tuple[int, Episode]]:
        """Episodes without a record, by their number."""
        done = {record.number for record in read_records(self.path)}
        return [(number, episode) for number, episode in enumerate(self.manifest) if number not in done]

    def add(self, record: EpisodeRecord) -> None:
        """Append one record; it is on the disk's way when this returns."""
        with self._episodes.open("ab") as stream:
            stream.write(msgspec.json.encode(record) + b"\n")


def read_run(path: Path) -> Run:
    """``run.json`` of a folder.

    :raises ConfigError: it is none of ours.
    """
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=Run)
    except OSError as error:
        raise ConfigError(f"no evaluation: {error.strerror}", where=path) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"not the run.json of an evaluation: {error}", where=path / "run.json") from None


def read_records(path: Path) -> list[EpisodeRecord]:
    """All records of a folder, in the order in which their episodes ended.

    :raises ConfigError: a line is no record.
    """
    file = path / "episodes.jsonl"
    if not file.exists():
        return []
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=EpisodeRecord))
        except msgspec.DecodeError as error:
            raise ConfigError(f"not a record: {error}", where=f"{file}:{number}") from None
    return found


def whole_records(path: Path) -> list[EpisodeRecord]:
    """One record for every episode of the folder's manifest, in its order: what may be aggregated.

    :raises ConfigError: the counts differ from the manifest, or a record is of another episode.
    """
    run, manifest, records = read_run(path), load_manifest(path / "manifest.jsonl"), read_records(path)
    if digest(manifest) != run.manifest_sha256:
        raise ConfigError("the manifest was changed after the evaluation began", where=path / "manifest.jsonl")
    by_number = {record.number: record for record in records}
    missing = sorted(set(range(len(manifest))) - set(by_number))
    unknown = sorted(set(by_number) - set(range(len(manifest))))
    if missing or unknown or len(records) != len(manifest):
        raise ConfigError(
            "the records are not those of the manifest",
            got=f"{len(records)} records, {len(missing)} episodes missing{_some(missing)}, "
            f"{len(records) - len(by_number)} twice, {len(unknown)} unknown{_some(unknown)}",
            wanted=f"one of each of {len(manifest)} episodes",
            where=path,
            do="Run the same command again: it plays what is missing.",
        )
    for number, episode in enumerate(manifest):
        record = by_number[number]
        if (record.task, record.instruction, record.scene_seed, record.noise_seed) != (
            episode.task,
            episode.instruction,
            episode.scene_seed,
            episode.noise_seed,
        ):
            raise ConfigError("a record is of another episode", got=record.number, wanted=episode, where=path)
    return [by_number[number] for number in range(len(manifest))]


def _some(numbers: Sequence[int]) -> str:
    return f" ({', '.join(map(str, numbers[:5]))}{', ...' if len(numbers) > 5 else ''})" if numbers else ""
