"""What made a result: commit, machine, driver, packages, and the checkpoint's own hash."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct

from phyai_engine.bench.machine import Environment, environment
from phyai_engine.config import ModelConfig

PACKAGES = ("numpy", "msgspec", "torch", "triton", "safetensors", "sentencepiece", "pillow", "mujoco", "metaworld")
_BLOCK = 1 << 20


class Provenance(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Archived with every evaluation.

    :param model: as it was named; ``weights`` what they are, in words.
    :param model_sha256: of its description, without where files lie and where it computes.
    :param checkpoint_sha256: of the weights file; of the hashes of all, in the order of their names, where there are
        several; empty for a model without.
    :param gpu_driver: version, empty without a GPU. :param packages: name -> version, ``absent``.
    """

    model: str
    weights: str
    model_sha256: str
    checkpoint_sha256: str
    environment: Environment
    gpu_driver: str
    packages: dict[str, str]

    @staticmethod
    def of(name: str, config: ModelConfig, weights: str, device: str, reasons: dict[str, str]) -> Provenance:
        """Of this process.

        :param device: torch's name of where the model computes; ``auto`` where another process chooses.
        :param reasons: of its kernels.
        """
        return Provenance(
            model=name,
            weights=weights,
            model_sha256=model_sha256(config),
            checkpoint_sha256=checkpoint_sha256(config.checkpoint),
            environment=environment(device, reasons),
            gpu_driver="" if device == "cpu" else gpu_driver(),
            packages={package: _version(package) for package in PACKAGES},
        )


def model_sha256(config: ModelConfig) -> str:
    """Of everything that a model file or a checkpoint's description says, paths and device left out."""
    prompt = msgspec.structs.replace(config.prompt, tokenizer=Path(config.prompt.tokenizer).name)
    placed = msgspec.structs.replace(config, checkpoint="", device="auto", prompt=prompt)
    return hashlib.sha256(msgspec.json.encode(placed)).hexdigest()


def checkpoint_sha256(folder: str) -> str:
    """Of a checkpoint folder's weights; see :class:`Provenance`."""
    files = sorted(Path(folder).glob("model*.safetensors")) if folder else []
    hashes = [_sha256(path) for path in files]
    if len(hashes) <= 1:
        return "".join(hashes)
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


def gpu_driver() -> str:
    """As nvidia-smi tells it, empty where it does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
