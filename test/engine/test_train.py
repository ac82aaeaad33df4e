"""Training: the network in training is the one that plays, what is learned from, resuming, and one whole run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch._dynamo  # now: the optimiser would import Triton after Mesa, and two LLVMs in that order end in a fault
from torch import Tensor

from phyai_engine.config import load_robot, resolve
from phyai_engine.errors import ConfigError, EngineError
from phyai_engine.models.pi import PiModel
from phyai_engine.sim.tasks import TASKS
from phyai_engine.train import checkpoint, workers
from phyai_engine.train.collect import PHRASES, Recording, as_seen
from phyai_engine.train.command import recipe_with, train_command
from phyai_engine.train.dataset import Batch, Dataset, read_steps
from phyai_engine.train.fit import Trainer, flow_loss
from phyai_engine.train.network import PiNetwork
from phyai_engine.train.recipe import SMOKE, Recipe
from phyai_engine.transforms.image import planes
from phyai_engine.transforms.tokenizer import SentencePieceTokenizer
from phyai_engine.weights.checkpoint import describe, model_from

OPTIONS = SMOKE.model
CPU = torch.device("cpu")


def network(seed: int = 0) -> PiNetwork:
    torch.manual_seed(seed)
    made = PiNetwork(OPTIONS)
    with torch.no_grad():
        made.modulate.normal_(std=0.05)  # zero at the start: the time would not matter
    return made


def batch(size: int) -> Batch:
    torch.manual_seed(1)
    side, horizon = OPTIONS.image_size, OPTIONS.action_horizon
    words = torch.tensor([[9], [14], [20]] * size)[:size]
    mask = torch.arange(OPTIONS.prompt_len) < words
    return Batch(
        images=torch.rand(size, len(OPTIONS.cameras), 3, side, side) * 2 - 1,
        tokens=torch.randint(3, 300, (size, OPTIONS.prompt_len)) * mask,
        token_mask=mask,
        chunk=torch.randn(size, horizon, OPTIONS.action_dim),
        known=torch.ones(size, horizon, dtype=torch.bool),
    )


def recorded(folder: Path, clean: Sequence[bool], phrases: Sequence[int], ages: Sequence[int]) -> Path:
    path = folder / "round0-0"
    recording = Recording(path)
    side, drawn = OPTIONS.image_size, np.random.default_rng(0)
    for i in range(len(clean)):
        recording.see([np.full((side, side, 3), i, np.uint8)] * 2)
        recording.states.append(drawn.uniform(size=4))
        recording.actions.append(np.array([i / 100, -i / 100, 0.1 * (i % 3), 1.0 - 2 * (i % 2)]))
        recording.phrases.append(phrases[i])
        recording.clean.append(clean[i])
        recording.ages.append(ages[i])
    recording.close()
    return path


class TestNetwork:
    def test_what_is_trained_is_what_plays(self, tmp_path: Path) -> None:
        trained, seen = network(), batch(3)
        played = PiModel.from_state(OPTIONS, trained.export(dict(trained.named_parameters())))
        inputs = {
            "images": seen.images,
            "image_mask": torch.ones(3, 2, dtype=torch.bool),
            "tokens": seen.tokens,
            "token_mask": seen.token_mask,
        }
        prefix = played.prefix(inputs)
        clean = torch.arange(OPTIONS.action_horizon) < torch.tensor([[0], [4], [9]])
        for step, time in enumerate(played.spec.times):
            wanted = played.velocity(prefix, seen.chunk, step, clean[..., None])
            got = trained.velocity(
                trained.observe(seen.images, seen.tokens, seen.token_mask), seen.chunk, torch.full((3,), time), clean
            )
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
        assert (wanted - played.velocity(prefix, seen.chunk, step)).abs().max() > 1e-3  # the clean prefix matters

    def test_draws_share_their_observation(self) -> None:
        trained, seen = network(), batch(2)
        x, times = torch.randn(6, OPTIONS.action_horizon, OPTIONS.action_dim), torch.rand(6)
        clean = torch.zeros(6, OPTIONS.action_horizon, dtype=torch.bool)
        together = trained.velocity(trained.observe(seen.images, seen.tokens, seen.token_mask), x, times, clean)
        second = trained.observe(seen.images[1:], seen.tokens[1:], seen.token_mask[1:])
        torch.testing.assert_close(together[3:], trained.velocity(second, x[3:], times[3:], clean[3:]))

    def test_every_weight_learns(self) -> None:
        trained = network()
        flow_loss(trained, batch(2), SMOKE, torch.Generator()).backward()  # type: ignore[no-untyped-call]
        still = [name for name, p in trained.named_parameters() if p.grad is None or not p.grad.any()]
        assert not still

    def test_bfloat16_computes_the_same_loss_nearly(self) -> None:
        trained, seen = network(), batch(3)
        exact = flow_loss(trained, seen, SMOKE, torch.Generator().manual_seed(3))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rough = flow_loss(trained, seen, SMOKE, torch.Generator().manual_seed(3))
        assert abs(float(rough - exact.detach())) < 0.02 * float(exact.detach())


class TestLoss:
    def test_unknown_actions_have_no_influence(self) -> None:
        trained, seen = network(), batch(3)
        known = torch.arange(OPTIONS.action_horizon) < torch.tensor([[5], [20], [12]])

        def loss(chunk: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(2)
            return flow_loss(trained, seen._replace(chunk=chunk, known=known), SMOKE, generator)

        # What stands there is noised and seen by the others, so it is not free of influence on them; its own error is.
        other = torch.where(known[..., None], seen.chunk, 1e3)
        assert torch.isfinite(loss(other))
        assert loss(seen.chunk) != loss(seen.chunk + 1.0)

    def test_the_loss_falls_on_a_fixed_batch(self) -> None:
        trainer = Trainer(msgspec.structs.replace(SMOKE, learning_rate=3e-3), CPU)
        fixed = batch(2)
        fixed.chunk.zero_()  # then the velocity is x / t

        class Same:
            def draw(self, size: int, generator: torch.Generator) -> Batch:
                return fixed

        losses: list[float] = []
        trainer.round(Same(), 151, 1.0, lambda step, loss, share: losses.append(loss))  # type: ignore[arg-type]
        assert losses[-1] < 0.7 * losses[0]


def test_the_fast_way_to_halve_an_image_is_the_model_s_own() -> None:
    image = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    exact = (planes(image, 160, resize="float").transpose(1, 2, 0) + 1.0) * 127.5
    assert np.abs(as_seen(image, 160) - exact).max() <= 0.51
    other = image[:, :300]
    assert (
        np.abs(as_seen(other, 96) - (planes(other, 96, resize="float").transpose(1, 2, 0) + 1.0) * 127.5).max() <= 0.51
    )


class TestDataset:
    def test_only_runs_of_the_expert_are_learned(self, tmp_path: Path) -> None:
        clean = [True] * 10 + [False] * 2 + [True] * 8
        path = recorded(tmp_path, clean, [0] * 6 + [1] * 14, range(20))
        known = read_steps([path]).known
        assert known.tolist() == [6, 5, 4, 3, 2, 1, 4, 3, 2, 1, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]

    def test_an_episode_ends_a_run(self, tmp_path: Path) -> None:
        known = read_steps([recorded(tmp_path, [True] * 10, [0] * 10, [*range(5), *range(5)])]).known
        assert known.tolist() == [5, 4, 3, 2, 1, 5, 4, 3, 2, 1]

    def test_a_batch_is_the_model_s_input(self, tmp_path: Path) -> None:
        path = recorded(tmp_path, [True] * 30, [2] * 30, range(30))
        steps = read_steps([path])
        stats = checkpoint.statistics(steps.states, steps.actions)
        tokenizer = tmp_path / "tokenizer.model"
        checkpoint.write_tokenizer(tokenizer, PHRASES, OPTIONS.vocab)
        recipe = msgspec.structs.replace(SMOKE, light=0.0, shift_px=0, lag=(0.0, 0.0, 1.0))
        dataset = Dataset([path], steps, recipe, stats, tokenizer, CPU)
        assert len(dataset) == 27  # the last three have fewer than four actions left
        drawn = dataset.draw(64, torch.Generator().manual_seed(0))
        # An image's brightness is its step: two steps ago, but never before the episode.
        seen = ((drawn.images[:, 0, 0, 0, 0] + 1) * 127.5).round()
        q01, q99 = (stats["action"][name][0] for name in ("q01", "q99"))
        step = (((drawn.chunk[:, 0, 0] + 1) / 2 * (q99 - q01) + q01) * 100).round()
        assert torch.equal(seen, (step - 2).clamp(min=0))
        assert torch.equal(drawn.known.sum(dim=1), (30 - step).clamp(max=20).long())

    def test_without_demonstrations_it_says_so(self) -> None:
        with pytest.raises(ConfigError, match="no demonstrations"):
            read_steps([])


class TestFolder:
    def test_every_bin_of_the_state_is_one_token(self, tmp_path: Path) -> None:
        checkpoint.write_tokenizer(tmp_path / "tokenizer.model", PHRASES, OPTIONS.vocab)
        tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
        empty = len(tokenizer.encode("State: ;"))
        assert {len(tokenizer.encode(f"State: {i};")) for i in range(-1, 256)} <= {empty, empty + 1}
        assert tokenizer.vocabulary <= OPTIONS.vocab
        assert tokenizer.encode("zebra \u00e9")  # every byte has a token

    def test_it_is_a_checkpoint_like_a_user_s_own(self, tmp_path: Path) -> None:
        trained = network()
        checkpoint.write_tokenizer(tmp_path / "tokenizer.model", PHRASES, OPTIONS.vocab)
        stats = checkpoint.statistics(np.random.default_rng(0).uniform(-1, 1, (50, 4)), np.eye(4))
        sha = checkpoint.write(tmp_path, trained.export(dict(trained.named_parameters())), OPTIONS, stats, 10)
        assert len(sha) == 64
        found = describe(tmp_path)
        assert not found.missing
        model = model_from(tmp_path)
        assert model.rtc.guidance == "trained"
        assert model.rtc.rtc_max_delay == 10
        loaded = PiModel.load(model)
        told = {name: getattr(loaded.options, name) for name in OPTIONS.__struct_fields__}
        here = {name: getattr(OPTIONS, name) for name in OPTIONS.__struct_fields__}
        assert {name for name in told if told[name] != here[name]} <= {"kernels", "graphs"}

    def test_training_can_begin_with_one(self, tmp_path: Path) -> None:
        trained, other = network(seed=1), Trainer(SMOKE, CPU)
        stats = checkpoint.statistics(np.random.default_rng(0).uniform(-1, 1, (50, 4)), np.eye(4))
        checkpoint.write(tmp_path, trained.export(dict(trained.named_parameters())), OPTIONS, stats, 10)
        other.begin_with(checkpoint.read_weights(tmp_path))
        assert checkpoint.read_statistics(tmp_path) == stats
        for (name, theirs), ours in zip(trained.named_parameters(), other.average.values(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-5, msg=name)  # stored in 16 bits


class TestResume:
    def test_it_goes_on_as_if_nothing_had_happened(self, tmp_path: Path) -> None:
        class Drawn:
            def draw(self, size: int, generator: torch.Generator) -> Batch:
                kept = batch(size)
                return kept._replace(chunk=torch.randn(kept.chunk.shape, generator=generator))

        whole, first, second = (Trainer(SMOKE, CPU) for _ in range(3))
        for trainer in (whole, first):
            trainer.round(Drawn(), 2, 1.0)  # type: ignore[arg-type]
        first.save(tmp_path / "state.pt")
        second.load(tmp_path / "state.pt")
        for trainer in (whole, second):
            trainer.round(Drawn(), 2, 1.0)  # type: ignore[arg-type]
        for name, tensor in whole.export().items():
            assert torch.equal(tensor, second.export()[name]), name
        assert second.step == 4


def test_the_recipe_can_be_changed_by_name() -> None:
    assert recipe_with(Recipe(), ["steps=7", "lag=[1.0]"]) == Recipe(steps=7, lag=(1.0,))
    with pytest.raises(ConfigError, match="stepz"):
        recipe_with(Recipe(), ["stepz=7"])


def test_a_simulator_that_fails_is_told() -> None:
    robot = load_robot(resolve("robots", "sawyer_20hz"))
    with pytest.raises(EngineError, match="FileNotFoundError"):
        workers.run(robot, [workers.Episodes("/nonexistent/there/x", [0], 32, 1.0)], lambda _: None)


def test_one_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_command(SMOKE, tmp_path / "policy", tmp_path / "work", 1)
    shown = capsys.readouterr().out
    assert "round 1: 6 steps" in shown
    assert all(name in shown for name in TASKS)
    assert not describe(tmp_path / "policy").missing
    (tmp_path / "work" / "round1.done").unlink()  # as if it had been cut short while it trained
    collected = (tmp_path / "work" / "round1-0.npz").stat().st_mtime_ns
    train_command(msgspec.structs.replace(SMOKE, check_episodes=0), tmp_path / "policy", tmp_path / "work", 1)
    shown = capsys.readouterr().out
    assert "resumed after 1 rounds, 6 steps" in shown and "round 1: 9 steps" in shown
    assert (tmp_path / "work" / "round1-0.npz").stat().st_mtime_ns == collected
    with pytest.raises(ConfigError, match="seed differs"):
        train_command(msgspec.structs.replace(SMOKE, seed=7), tmp_path / "policy", tmp_path / "work", 1)
