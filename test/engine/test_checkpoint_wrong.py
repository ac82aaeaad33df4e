"""Every way in which a checkpoint folder is wrong has its own message: a change of a good folder -> the message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from phyai_engine.errors import ConfigError, PhyaiError, WeightsError
from phyai_engine.models.pi import PiModel
from phyai_engine.weights.checkpoint import model_from

Change = Callable[[Path], object]
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
TIED = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
NORM_STATS = "assets/trossen/norm_stats.json"


@pytest.fixture(scope="module")
def good(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder per family and layout; tests change copies."""
    root = tmp_path_factory.mktemp("good")
    rows = checkpoints.spread([-1.0] * 7, [1.0] * 7)
    folders = {}
    for family in ("pi0", "pi05"):
        options = checkpoints.sizes(family)
        tensors = checkpoints.weights(options)
        for layout, write in (("openpi", checkpoints.write_openpi), ("lerobot", checkpoints.write_lerobot)):
            statistics = {"state": dict(rows), "actions": dict(rows)}
            folders[f"{family} {layout}"] = write(root / f"{family}_{layout}", tensors, options, statistics)
    return SimpleNamespace(folders=folders, module=checkpoints)


def edit_json(file: str, change: Callable[[Any], object]) -> Change:
    def apply(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return apply


def edit_weights(change: Callable[[dict[str, torch.Tensor]], object], file: str = "model.safetensors") -> Change:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return apply


def put(**files: str | bytes) -> Change:
    """Write files; ``__`` in a name is a dot."""

    def apply(folder: Path) -> None:
        for name, content in files.items():
            target = folder / name.replace("__", ".")
            target.write_bytes(content.encode() if isinstance(content, str) else content)

    return apply


def remove(*patterns: str) -> Change:
    def apply(folder: Path) -> None:
        for pattern in patterns:
            for path in list(folder.glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return apply


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def orbax(folder: Path) -> None:
    remove("*")(folder)
    (folder / "params").mkdir()
    (folder / "params" / "manifest.ocdbt").write_bytes(b"")


def above(folder: Path) -> None:
    held = list(folder.iterdir())
    (folder / "pretrained_model").mkdir()
    for path in held:
        path.rename(folder / "pretrained_model" / path.name)


def edit_stats(part: str, name: str, at: int, value: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        if name:
            content["norm_stats"][part][name][at] = value
        else:
            content["norm_stats"].pop(part)

    return edit_json(NORM_STATS, change)


def edit_step(file: str, name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(content: dict[str, Any]) -> None:
        for step in content["steps"]:
            if step["registry_name"] == name:
                change(step)

    return edit_json(f"policy_{file}.json", apply)


FILES: list[tuple[str, str, Change, str]] = [
    ("empty folder", "pi0 openpi", remove("*"), "no weights, wanted model.safetensors"),
    ("folder above", "pi0 lerobot", above, "no weights, .*Did you mean .*pretrained_model"),
    ("JAX", "pi0 openpi", orbax, r"a JAX checkpoint \(orbax, params/\).*convert_jax_model_to_pytorch"),
    ("adapter", "pi0 lerobot", put(adapter_config__json="{}"), r"an adapter \(LoRA, PEFT\).*adapter_config.json"),
    ("truncated", "pi0 openpi", cut, "cannot read the weights: it has .* bytes, its header describes"),
    ("no header", "pi0 openpi", put(model__safetensors=b"\xff" * 64), "cannot read the weights: its 64 bytes do not"),
    ("no weights here", "pi0 lerobot", remove("model.safetensors"), "no weights, wanted model.safetensors"),
    ("config is no JSON", "pi0 lerobot", put(config__json="{,}"), "not JSON: .*config.json"),
    ("config is a list", "pi0 lerobot", put(config__json="[]"), "not a mapping, got list, at .*config.json"),
    (
        "other config", "pi0 openpi", put(config__json='{"model_type": "x"}'),
        "a config.json of neither openpi nor lerobot, got model_type",
    ),
    ("config missing", "pi0 lerobot", remove("config.json"), "lerobot's config.json is missing"),
    (
        "other type", "pi0 lerobot", edit_json("config.json", lambda c: c.update(type="pi0_fast")),
        "policies of type 'pi0_fast' are not read, wanted pi0 or pi05",
    ),
    (
        "other family", "pi0 lerobot", edit_json("config.json", lambda c: c.update(type="pi05")),
        "config.json contradicts the weights, got type 'pi05', and the weights are those of pi0",
    ),
    (
        "ill-typed config", "pi0 lerobot", edit_json("config.json", lambda c: c.update(chunk_size="many")),
        r"Expected `int \| null`, got `str` - at `\$.chunk_size`, at .*config.json",
    ),
    (
        "ill-typed openpi config", "pi0 openpi", edit_json("config.json", lambda c: c.update(action_horizon="50")),
        r"Expected `int \| null`, got `str` - at `\$.action_horizon`, at .*config.json",
    ),
    (
        "other action_dim", "pi0 openpi", edit_json("config.json", lambda c: c.update(action_dim=24)),
        "config.json contradicts the weights in action_dim, got 24, and 32 in the weights",
    ),
    (
        "other image size", "pi0 lerobot", edit_json("config.json", lambda c: c.update(image_resolution=[224, 200])),
        "contradicts the weights in image_size, got 224x200, and 56 in the weights",
    ),
    (
        "no cameras", "pi0 lerobot", edit_json("config.json", lambda c: c.update(input_features={})),
        r"names no camera \(no VISUAL entry in input_features\), .*options: \{cameras: \[...\]\}",
    ),
    (
        "memory", "pi05 lerobot", edit_json("config.json", lambda c: c.update(use_visual_memory=True)),
        "not supported: the policy has a memory of past images, got use_visual_memory: true",
    ),
    (
        "PEFT", "pi05 lerobot", edit_json("config.json", lambda c: c.update(use_peft=True)),
        r"not supported: the policy has an adapter \(PEFT\)",
    ),
    (
        "history", "pi0 lerobot", edit_json("config.json", lambda c: c.update(n_obs_steps=2)),
        "several observations at once, got n_obs_steps: 2, wanted 1",
    ),
    (
        "visual statistics", "pi0 lerobot",
        edit_json("config.json", lambda c: c["normalization_mapping"].update(VISUAL="MEAN_STD")),
        "images are normalised by statistics, got VISUAL: MEAN_STD, wanted IDENTITY, at .*config.json",
    ),
    (
        "visual statistics in a step", "pi0 lerobot",
        edit_step("preprocessor", "normalizer_processor", lambda s: s["config"]["norm_map"].update(VISUAL="MIN_MAX")),
        "got VISUAL: MIN_MAX, wanted IDENTITY, at .*policy_preprocessor.json",
    ),
    (
        "unknown step", "pi0 lerobot",
        edit_json("policy_preprocessor.json", lambda c: c["steps"].append({"registry_name": "image_crop_processor"})),
        "a processing step that is not supported, got image_crop_processor, wanted one of to_batch_processor",
    ),
    (
        "no steps", "pi0 lerobot", edit_json("policy_preprocessor.json", lambda c: c.pop("steps")),
        r"Expected `array`, got `null`, at .*policy_preprocessor.json: steps",
    ),
    (
        "no prompt step", "pi05 lerobot",
        edit_json("policy_preprocessor.json", lambda c: c.update(steps=c["steps"][:4])),
        "no step forms the prompt of pi05, .*wanted pi05_prepare_state_tokenizer_processor_step",
    ),
    (
        "unknown mode", "pi0 lerobot",
        edit_step("preprocessor", "normalizer_processor", lambda s: s["config"]["norm_map"].update(STATE="ROBUST")),
        "unknown normalisation mode, got ROBUST, wanted one of IDENTITY, MEAN_STD",
    ),
    (
        "half relative", "pi0 lerobot",
        edit_step("postprocessor", "absolute_actions_processor", lambda s: s["config"].update(enabled=True)),
        "one processor file makes actions relative",
    ),
    (
        "left padding", "pi0 lerobot",
        edit_step("preprocessor", "tokenizer_processor", lambda s: s["config"].update(padding_side="left")),
        "not supported: prompts padded on the left",
    ),
    (
        "two eps", "pi0 lerobot",
        edit_step("preprocessor", "normalizer_processor", lambda s: s["config"].update(eps=1e-3)),
        r"two processor files have different eps, got \[1e-08, 0.001\]",
    ),
    ("no tokenizer", "pi0 openpi", remove("*tokenizer.model"), "no tokenizer in .*Copy PaliGemma's"),
]  # fmt: skip

STATISTICS: list[tuple[str, str, Change, str]] = [
    (
        "no assets", "pi0 openpi", remove("assets"),
        "no statistics in .*, which holds config.json, model.safetensors, .*there, or give `normalisation:`",
    ),
    ("no JSON", "pi0 openpi", put(**{NORM_STATS: "{"}), "not JSON: .*norm_stats.json"),
    ("no table", "pi0 openpi", put(**{NORM_STATS: "{}"}), "no mapping `norm_stats`"),
    ("no actions", "pi0 openpi", edit_stats("actions", "", 0, None), "no statistics of actions, wanted mean, std"),
    ("words", "pi0 openpi", edit_stats("state", "mean", 2, "x"), "mean is no list of numbers, at .*: state"),
    ("NaN", "pi0 openpi", edit_stats("state", "mean", 2, float("nan")), r"are not finite, got mean nan.*state\[2\]"),
    ("std < 0", "pi0 openpi", edit_stats("actions", "std", 1, -0.5), r"got 0.0, -0.5, wanted std >= 0.*actions\[1\]"),
    ("q99 < q01", "pi05 openpi", edit_stats("state", "q99", 4, -2.0), r"got -1.0, -2.0, wanted q01 <= q99.*state\[4\]"),
    (
        "no quantiles", "pi05 openpi",
        edit_json(NORM_STATS, lambda c: c["norm_stats"]["state"].update(q01=None, q99=None)),
        "the statistics have no q01, got mean, std, wanted q01 and q99 for normalisation kind 'quantile'",
    ),
    (
        "ragged", "pi0 openpi", edit_json(NORM_STATS, lambda c: c["norm_stats"]["state"]["std"].pop()),
        "statistics of different lengths, got mean 7, std 6",
    ),
    (
        "too many", "pi0 openpi",
        edit_json(NORM_STATS, lambda c: [c["norm_stats"]["actions"][n].extend([1.0] * 30) for n in ("mean", "std")]),
        "37 dimensions.*wanted at most 32",
    ),
    (
        "file gone", "pi05 lerobot", remove("policy_preprocessor_stats.safetensors"),
        "the file of the statistics is missing, got policy_preprocessor_stats.safetensors",
    ),
    (
        "no postprocessor", "pi05 lerobot", remove("policy_postprocessor.json"),
        "no statistics of the actions in .*A base checkpoint has none: fine-tune it",
    ),
    (
        "base checkpoint", "pi05 lerobot",
        edit_step("preprocessor", "normalizer_processor", lambda s: s["config"].update(features={})),
        "no statistics of the state in .*A base checkpoint has none",
    ),
    (
        "other robot's", "pi0 lerobot",
        edit_json("config.json", lambda c: c["output_features"]["action"].update(shape=[6])),
        "config.json and the statistics disagree on action, got 6 dimensions and 7",
    ),
    (
        "two runs", "pi0 lerobot",
        edit_weights(lambda t: t["action.std"].mul_(2), "policy_postprocessor_stats.safetensors"),
        "two processor files have different statistics of the actions",
    ),
    (
        "matrix", "pi0 lerobot",
        edit_weights(lambda t: t.update({"action.std": torch.ones(7, 1)}), "policy_postprocessor_stats.safetensors"),
        r"action.std is no vector, got \[7, 1\]",
    ),
    (
        "no std", "pi0 lerobot",
        edit_weights(lambda t: t.pop("observation.state.std"), "policy_preprocessor_stats.safetensors"),
        "the statistics have no std, got max, mean, min, q01, q99",
    ),
    (
        "damaged", "pi0 lerobot", put(policy_preprocessor_stats__safetensors=b"123"),
        "cannot read the weights: .*policy_preprocessor_stats.safetensors",
    ),
]  # fmt: skip

WEIGHTS: list[tuple[str, str, Change, str]] = [
    (
        "wrong shape", "pi0 openpi", edit_weights(lambda t: t.update({"state_proj.weight": torch.zeros(40, 31)})),
        r"state_proj.weight has shape \[40, 31\], wanted \[40, 32\]",
    ),
    (
        "missing", "pi05 openpi", edit_weights(lambda t: t.pop("time_mlp_out.bias")),
        "does not fit the model: missing: time_mlp_out.bias",
    ),
    ("missing dims", "pi0 openpi", edit_weights(lambda t: t.pop(EMBEDDING)), f"a tensor is missing, got {EMBEDDING}"),
    (
        "flat", "pi0 openpi", edit_weights(lambda t: t.update({EMBEDDING: torch.zeros(320 * 48)})),
        r"lm_head.weight has shape \[15360\], wanted 2 dimensions",
    ),
    (
        "extra", "pi0 openpi", edit_weights(lambda t: t.update({"value_head.weight": torch.zeros(1)})),
        "tensors that no pi0 or pi0.5 checkpoint has, got value_head.weight",
    ),
    (
        "a layer too many", "pi0 openpi",
        edit_weights(lambda t: t.update({TIED.replace("embed_tokens", "layers.3.mlp.up_proj"): torch.zeros(80, 48)})),
        "missing: .*layers.3",
    ),
    (
        "fp8", "pi0 openpi",
        edit_weights(lambda t: t.update({"action_in_proj.weight": t["action_in_proj.weight"].to(torch.float8_e4m3fn)})),
        "tensors are not floating point of 16 bits or more, got action_in_proj.weight F8_E4M3.*Quantised exports",
    ),
    (
        "integers", "pi0 lerobot",
        edit_weights(lambda t: t.update({"model.action_in_proj.bias": torch.zeros(40, dtype=torch.int8)})),
        "got action_in_proj.bias I8, wanted one of F64",
    ),
    (
        "two embeddings", "pi0 openpi", edit_weights(lambda t: t.update({TIED: t[EMBEDDING] + 1})),
        "two copies of the token embedding differ",
    ),
    (
        "LoRA", "pi0 lerobot", edit_weights(lambda t: t.update({"model.action_in_proj.lora_A.weight": torch.zeros(1)})),
        "holds a LoRA adapter, got model.action_in_proj.lora_A.weight",
    ),
    (
        "memory", "pi05 lerobot", edit_weights(lambda t: t.update({"model.proprio_history_proj.bias": torch.zeros(1)})),
        "holds a projection of past states",
    ),
    (
        "other model", "pi0 openpi", edit_weights(lambda t: [t.pop(n) for n in list(t) if "proj" in n]),
        "not the weights of pi0 or pi0.5",
    ),
]  # fmt: skip


def ids(rows: list[tuple[str, str, Change, str]]) -> Any:
    return pytest.mark.parametrize(
        ("folder", "change", "fragment"), [row[1:] for row in rows], ids=[r[0] for r in rows]
    )


def refused(good: SimpleNamespace, tmp_path: Path, folder: str, change: Change, fragment: str) -> PhyaiError:
    copy = tmp_path / "copy"
    shutil.copytree(good.folders[folder], copy)
    change(copy)
    with pytest.raises(PhyaiError, match=fragment) as caught:
        PiModel.load(model_from(copy))
    return caught.value


@pytest.mark.parametrize("folder", ["pi0 openpi", "pi0 lerobot", "pi05 openpi", "pi05 lerobot"])
def test_the_folders_are_good_before_they_are_changed(good: SimpleNamespace, folder: str) -> None:
    PiModel.load(model_from(good.folders[folder]))


@ids(FILES)
def test_files(good: SimpleNamespace, tmp_path: Path, folder: str, change: Change, fragment: str) -> None:
    refused(good, tmp_path, folder, change, fragment)


@ids(STATISTICS)
def test_statistics(good: SimpleNamespace, tmp_path: Path, folder: str, change: Change, fragment: str) -> None:
    refused(good, tmp_path, folder, change, fragment)


@ids(WEIGHTS)
def test_weights(good: SimpleNamespace, tmp_path: Path, folder: str, change: Change, fragment: str) -> None:
    assert isinstance(refused(good, tmp_path, folder, change, fragment), WeightsError)


def shard_gone(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def shard_of_another(folder: Path) -> None:
    content = json.loads((folder / "model.safetensors.index.json").read_text())
    content["weight_map"]["time_mlp_in.bias"] = "model-00003-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


SHARDS = [
    (shard_gone, r"cannot read the weights: No such file or directory, at .*model-00002"),
    (shard_of_another, r"a shard and the index disagree, got time_mlp_in.bias"),
    (put(model__safetensors__index__json="{"), r"cannot read the shard index: JSONDecodeError"),
    (put(model__safetensors__index__json='{"weight_map": {}}'), r"no weight_map of tensor names to files"),
]


@pytest.mark.parametrize(("change", "fragment"), SHARDS)
def test_shards(good: SimpleNamespace, tmp_path: Path, change: Change, fragment: str) -> None:
    def shard(folder: Path) -> None:
        good.module.write_shards(folder, load_file(folder / "model.safetensors"))
        change(folder)

    refused(good, tmp_path, "pi05 openpi", shard, fragment)


def test_two_files_with_one_tensor(good: SimpleNamespace, tmp_path: Path) -> None:
    def double(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        save_file({"action_in_proj.bias": torch.zeros(40)}, folder / "b.safetensors")

    refused(
        good, tmp_path, "pi05 openpi", double, "tensors that another file holds too, got action_in_proj.bias, at .*b.s"
    )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model named"):
        model_from(tmp_path / "nowhere")
