"""A trained network as a folder in lerobot's layout, which weights/lerobot.py reads."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai_engine.models.pi_options import PiOptions
from phyai_engine.sim.metaworld_robot import ACTIONS
from phyai_engine.types import F64
from phyai_engine.weights.lerobot import POSTPROCESSOR, PREPROCESSOR
from phyai_engine.weights.pi_names import canonical

Statistics = Mapping[str, Mapping[str, Sequence[float]]]
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.model"
_STATISTICS = "policy_{}_stats.safetensors"
_MODES = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
_TOWERS = re.compile(r"vision_tower|_proj\.weight|multi_modal|lm_head|dense\.weight")


def statistics(states: F64, actions: F64) -> dict[str, dict[str, list[float]]]:
    """What lerobot stores of both vectors. :param states: [n, S]. :param actions: [m, A]."""

    def of(rows: F64) -> dict[str, list[float]]:
        low, high = np.quantile(rows, (0.01, 0.99), axis=0)
        values = {
            "mean": rows.mean(0),
            "std": rows.std(0),
            "min": rows.min(0),
            "max": rows.max(0),
            "q01": low,
            "q99": high,
        }
        return {name: [round(float(v), 6) for v in value] for name, value in values.items()}

    return {"observation.state": of(states), "action": of(actions)}


def write_tokenizer(path: Path, phrases: Sequence[str], size: int) -> None:
    """A SentencePiece model with PaliGemma's special tokens; every bin of the state is one token, every byte has one.

    :param phrases: instructions that it should need few tokens for. :param size: of the vocabulary, at most.
    """
    texts = [f"Task: {text}, State: ;\nAction: " for text in phrases] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        user_defined_symbols=[f"\u2581{i}" for i in range(-1, 256)],
        byte_fallback=True,
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


def write(folder: Path, tensors: Mapping[str, Tensor], options: PiOptions, stats: Statistics, max_delay: int) -> str:
    """Write everything but the tokenizer.

    The towers' matrices are stored in half precision (11 bits of mantissa) and computed with in float32: on a CPU
    without bfloat16 units nothing else is fast, and a folder of half the size is enough for what was learned.

    :param tensors: canonical names -> fp32. :param max_delay: longest prefix that it was trained to continue, steps.
    :return: SHA-256 of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {f"model.{name}": t.half() if _TOWERS.search(name) else t for name, t in tensors.items()}
    save_file(stored, folder / WEIGHTS)
    shape = [3, options.image_size, options.image_size]
    inputs = {f"observation.images.{role}": {"type": "VISUAL", "shape": shape} for role in options.cameras}
    inputs["observation.state"] = {"type": "STATE", "shape": [len(stats["observation.state"]["mean"])]}
    outputs = {"action": {"type": "ACTION", "shape": [len(stats["action"]["mean"])]}}
    settings = {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": _MODES,
        "chunk_size": options.action_horizon,
        "n_action_steps": options.action_horizon,
        "max_state_dim": options.action_dim,
        "max_action_dim": options.action_dim,
        "num_inference_steps": options.num_steps,
        "min_period": options.min_period,
        "max_period": options.max_period,
        "tokenizer_max_length": options.prompt_len,
        "image_resolution": [options.image_size, options.image_size],
        "dtype": "float32",
        "action_feature_names": list(ACTIONS),
        "rtc_training_max_delay": max_delay,
    }
    _write_json(folder / "config.json", settings)
    _write_processors(folder, {**inputs, **outputs}, outputs, options)
    flat = {f"{key}.{name}": torch.tensor(v) for key, values in stats.items() for name, v in values.items()}
    for step in ("preprocessor", "postprocessor"):
        save_file({name: tensor.clone() for name, tensor in flat.items()}, folder / _STATISTICS.format(step))
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Canonical names -> tensors of a folder that ``write`` or lerobot made."""
    stored = load_file(folder / WEIGHTS)
    return {new: stored[name] for name, new in canonical(stored, where=folder).items()}


def read_statistics(folder: Path) -> dict[str, dict[str, list[float]]]:
    """What ``statistics`` made."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, tensor in load_file(folder / _STATISTICS.format("preprocessor")).items():
        key, _, kind = name.rpartition(".")
        found.setdefault(key, {})[kind] = [round(float(value), 6) for value in tensor]
    return found


def _write_processors(
    folder: Path, features: Mapping[str, Any], outputs: Mapping[str, Any], options: PiOptions
) -> None:
    def normalise(name: str, of: Mapping[str, Any], file: str) -> dict[str, Any]:
        config = {"eps": 1e-8, "features": of, "norm_map": _MODES}
        return {"registry_name": name, "config": config, "state_file": _STATISTICS.format(file)}

    def step(name: str, **config: Any) -> dict[str, Any]:
        return {"registry_name": name, "config": config}

    before = [
        step("rename_observations_processor", rename_map={}),
        step("to_batch_processor"),
        normalise("normalizer_processor", features, "preprocessor"),
        step("pi05_prepare_state_tokenizer_processor_step"),
        step("tokenizer_processor", max_length=options.prompt_len, padding_side="right", tokenizer_name="."),
        step("device_processor", device="cpu"),
    ]
    after = [normalise("unnormalizer_processor", outputs, "postprocessor"), step("device_processor", device="cpu")]
    _write_json(folder / PREPROCESSOR, {"name": "policy_preprocessor", "steps": before})
    _write_json(folder / POSTPROCESSOR, {"name": "policy_postprocessor", "steps": after})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
