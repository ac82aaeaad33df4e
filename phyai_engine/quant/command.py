"""``phyai calibrate``: observations -> the file of activation scales that a coded model reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
from rich.console import Console

from phyai_engine.bench import synthetic
from phyai_engine.bench.command import BenchOptions, robot_config
from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.models.pi import PiModel
from phyai_engine.models.pi_coded import calibrate
from phyai_engine.policy import Policy, load_policy
from phyai_engine.quant.scales import FILE, ActivationScales, save_scales
from phyai_engine.replay.recorded import Recording, open_recording
from phyai_engine.types import Request
from phyai_engine.weights.checkpoint import model_from

_FAMILIES = ("pi0", "pi05")


def calibrate_command(model: str, robot: str, recording: Path | None, n: int, out: Path | None) -> int:
    """Measure and write.

    :param robot: whose synthetic observations are taken; empty takes the bench robot.
    :param recording: of a policy node: its requests and its robot are taken instead. :param n: observations.
    :param out: None writes into the checkpoint's folder.
    :raises PhyaiError: model, robot and recording do not fit, or nothing can be written.
    """
    config = model_from(model)
    path = _path(config, model, out)
    if recording is None:
        policy = _policy(robot_config(BenchOptions(model=model, robot=robot), config), config, model)
        made = synthetic.requests(policy.adapter, seed=0, prompt_tokens=config.prompt.max_tokens)
        scales = _measure(policy, (made(i) for i in range(n)), "synthetic observations")
    else:
        with open_recording(recording) as opened:
            policy = _policy(opened.robot, config, model)
            scales = _measure(policy, islice(_recorded(opened), n), f"observations of {recording.name}")
    save_scales(scales, path)
    Console().print(f"wrote {path}: {len(scales.seen)} matrices, {scales.made}", highlight=False)
    return 0


def _path(config: ModelConfig, model: str, out: Path | None) -> Path:
    if out is None and not config.checkpoint:
        raise ConfigError(
            "where to?",
            got=f"model {model}, which names no checkpoint",
            do="Give --out, and name that file as `quant_scales`. Random weights need none: they calibrate themselves.",
        )
    return out or Path(config.checkpoint) / FILE


def _policy(robot: RobotConfig, config: ModelConfig, model: str) -> Policy:
    """With a model whose matrices are not coded, without graphs."""
    plain = {**config.options, "quant": "none", "graphs": "none"}
    if config.family not in _FAMILIES:
        raise ConfigError(f"model {model} has no matrices to code", got=config.family, wanted=" or ".join(_FAMILIES))
    return load_policy(robot, msgspec.structs.replace(config, options=plain))


def _measure(policy: Policy, requests: Iterable[Request], what: str) -> ActivationScales:
    rows = [policy.adapter.encode(request, None) for request in requests]
    if not rows:
        raise ConfigError("no observation to calibrate with", where=what)
    model = policy.runner.model
    assert isinstance(model, PiModel)
    return calibrate(model, rows, f"{len(rows)} {what}")


def _recorded(recording: Recording) -> Iterator[Request]:
    """Requests whose frames are all there."""
    return (exchange.request for exchange in recording.exchanges() if not exchange.missing)
