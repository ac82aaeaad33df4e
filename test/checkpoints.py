"""Checkpoint folders as openpi and lerobot write them, at small sizes, with seeded random weights.

    options = checkpoints.sizes("pi05", tokens=checkpoints.VOCABULARY)
    checkpoints.write_lerobot(folder, checkpoints.weights(options, seed=0), options, statistics)

Everything a folder needs is written: weights, config.json, statistics, processor files, tokenizer.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor

from phyai_engine.config import RobotConfig
from phyai_engine.models.pi import PiModel, time_embedding
from phyai_engine.models.pi_options import PiOptions
from phyai_engine.weights.pi import random_tensors

VOCABULARY = 320
EXPERT = "paligemma_with_expert.gemma_expert."
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model."
ROLES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
# What both families store and inference drops.
UNUSED = (EXPERT + "lm_head.weight", LANGUAGE + "norm.weight")

Statistics = Mapping[str, Mapping[str, Sequence[float]]]


def sizes(family: str, **changed: Any) -> PiOptions:
    """Small dimensions that a folder can tell by itself: the vision width is a multiple of 72."""
    small: dict[str, Any] = {
        "variant": family,
        **{"vocab": VOCABULARY, "vis_width": 72, "vis_depth": 2, "vis_mlp": 40, "vis_heads": 1},
        **{"width": 48, "depth": 3, "mlp": 80, "heads": 4, "kv_heads": 1, "head_dim": 16},
        **{"exp_width": 40, "exp_mlp": 56, "action_dim": 32, "action_horizon": 16, "num_steps": 4},
        **{"image_size": 56, "patch": 14, "prompt_len": 48 if family == "pi0" else 200},
    }
    return PiOptions(**{**small, **changed})


def weights(options: PiOptions, seed: int = 0, *, unused: bool = True) -> dict[str, Tensor]:
    """openpi's names -> fp32 tensors. :param unused: with those that inference drops."""
    times = options.spec().times
    tensors = random_tensors(PiModel.expected(options), seed, times, time_embedding(times, options))
    if unused:
        tensors[UNUSED[0]] = torch.zeros(options.vocab, options.exp_width)
        tensors[UNUSED[1]] = torch.zeros(options.width)
    return tensors


def legacy(name: str) -> str:
    """lerobot's name before 0.4 of openpi's."""
    paligemma = "paligemma_with_expert.paligemma."
    for new, old in (
        (paligemma + "lm_head.", paligemma + "language_model.lm_head."),
        (paligemma + "model.language_model.", paligemma + "language_model.model."),
        (paligemma + "model.", paligemma),
    ):
        if name.startswith(new):
            return "model." + old + name[len(new) :]
    return "model." + name


def statistics(robot: RobotConfig) -> dict[str, dict[str, list[float]]]:
    """Of a robot's limits, as if the data filled them: every normalisation kind maps them to -1..1."""
    ranges = {action.state or action.name: (action.lower, action.upper) for action in robot.actions}
    spans = {
        "state": [ranges.get(entry.name, (-3.2, 3.2)) for entry in robot.state],
        "actions": [(action.lower, action.upper) for action in robot.actions],
    }
    return {part: spread([low for low, _ in rows], [high for _, high in rows]) for part, rows in spans.items()}


def spread(low: Sequence[float], high: Sequence[float]) -> dict[str, list[float]]:
    """All the statistics that both families store, from smallest and largest values."""
    middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    ends = {"min": low, "max": high, "q01": low, "q99": high}
    return {name: list(values) for name, values in {"mean": middle, "std": half, **ends}.items()}


def write_tokenizer(path: Path, size: int = VOCABULARY) -> None:
    """A tiny SentencePiece model with PaliGemma's special tokens, digits one by one, and every byte."""
    texts = [f"pick up the {colour} block {i}" for i, colour in enumerate(("red", "green", "blue", "yellow"))]
    texts += [f"Task: {text}, State: 128 0 255 -1;\nAction: " for text in texts]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.getvalue())


def write_openpi(
    folder: Path,
    tensors: Mapping[str, Tensor],
    options: PiOptions,
    statistics: Statistics,
    *,
    asset: str = "trossen",
    converted: bool = True,
) -> Path:
    """As openpi's converter leaves it; ``converted=False``: as its PyTorch training does, without config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    if converted:
        write_json(
            folder / "config.json",
            {
                "action_dim": options.action_dim,
                "action_horizon": options.action_horizon,
                "paligemma_variant": "gemma_2b",
                "action_expert_variant": "gemma_300m",
                "precision": options.dtype,
            },
        )
    kept = ("mean", "std", "q01", "q99")
    stored = {part: {name: list(values[name]) for name in kept} for part, values in statistics.items()}
    write_json(folder / "assets" / asset / "norm_stats.json", {"norm_stats": stored})
    write_tokenizer(folder / "paligemma_tokenizer.model", options.vocab)
    return folder


def write_lerobot(
    folder: Path,
    tensors: Mapping[str, Tensor],
    options: PiOptions,
    statistics: Statistics,
    *,
    cameras: Sequence[str] = ROLES,
    relative: bool = False,
    names: Sequence[str] | None = None,
    renames: Mapping[str, str] | None = None,
    **config: Any,
) -> Path:
    """As lerobot's save_pretrained leaves policy and processors. :param config: keys of config.json to change."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    mode = "MEAN_STD" if options.variant == "pi0" else "QUANTILES"
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    shape = [3, options.image_size, options.image_size]
    inputs = {f"observation.images.{role}": {"type": "VISUAL", "shape": shape} for role in cameras}
    inputs["observation.state"] = {"type": "STATE", "shape": [len(statistics["state"]["mean"])]}
    outputs = {"action": {"type": "ACTION", "shape": [len(statistics["actions"]["mean"])]}}
    settings = {
        "type": options.variant,
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": modes,
        "chunk_size": options.action_horizon,
        "n_action_steps": options.action_horizon,
        "max_state_dim": options.action_dim,
        "max_action_dim": options.action_dim,
        "num_inference_steps": options.num_steps,
        "min_period": options.min_period,
        "max_period": options.max_period,
        "tokenizer_max_length": options.prompt_len,
        "image_resolution": [options.image_size, options.image_size],
        "empty_cameras": 0,
        "dtype": options.dtype,
        "use_relative_actions": relative,
        "relative_exclude_joints": ["gripper"],
        "rtc_config": None,
        "use_peft": False,
    }
    write_json(folder / "config.json", {**settings, **config})
    _write_processors(folder, options, {**inputs, **outputs}, outputs, modes, relative, names, renames or {})
    features = {"observation.state": statistics["state"], "action": statistics["actions"]}
    flat = {f"{key}.{name}": torch.tensor(v) for key, values in features.items() for name, v in values.items()}
    for step in ("preprocessor", "postprocessor"):
        save_file({name: tensor.clone() for name, tensor in flat.items()}, folder / f"policy_{step}_stats.safetensors")
    write_tokenizer(folder / "tokenizer.model", options.vocab)
    return folder


def _write_processors(
    folder: Path,
    options: PiOptions,
    features: Mapping[str, Any],
    outputs: Mapping[str, Any],
    modes: Mapping[str, str],
    relative: bool,
    names: Sequence[str] | None,
    renames: Mapping[str, str],
) -> None:
    def normalise(name: str, of: Mapping[str, Any], file: str) -> dict[str, Any]:
        config = {"eps": 1e-8, "features": of, "norm_map": modes}
        return {"registry_name": name, "config": config, "state_file": f"policy_{file}_stats.safetensors"}

    step = {"enabled": relative, "exclude_joints": ["gripper"], "action_names": names and list(names)}
    tokenise = {
        "max_length": options.prompt_len,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "google/paligemma-3b-pt-224",
    }
    first = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(renames)}},
        {"registry_name": "to_batch_processor", "config": {}},
    ]
    to_relative = {"registry_name": "relative_actions_processor", "config": step}
    to_model = normalise("normalizer_processor", features, "preprocessor")
    tokens = {"registry_name": "tokenizer_processor", "config": tokenise}
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    if options.variant == "pi0":
        new_line = {"registry_name": "pi0_new_line_processor", "config": {}}
        before = [*first, new_line, tokens, device, to_relative, to_model]
    else:
        prompt = {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}}
        before = [*first, to_relative, to_model, prompt, tokens, device]
    after = [
        normalise("unnormalizer_processor", outputs, "postprocessor"),
        {"registry_name": "absolute_actions_processor", "config": {"enabled": relative}},
        device,
    ]
    write_json(folder / "policy_preprocessor.json", {"name": "policy_preprocessor", "steps": before})
    write_json(folder / "policy_postprocessor.json", {"name": "policy_postprocessor", "steps": after})


def write_json(path: Path, content: Any) -> None:
    """With the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_shards(folder: Path, tensors: Mapping[str, Tensor], count: int = 3) -> None:
    """Instead of one file, several and their index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    index: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = names[i::count]
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
