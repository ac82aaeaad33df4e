"""Captured shapes: staging, the choice of a shape, and that a batch in a larger shape gives the same actions.

On the CPU the same buffers are used without graphs; with ``-m gpu`` the graphs are captured, and equal that bit for
bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from phyai_engine.errors import EngineError
from phyai_engine.graphs import Graphs, Staging
from phyai_engine.models import Capturable
from phyai_engine.models.fake import FakeModel, FakeOptions
from phyai_engine.models.pi import PiModel, PiOptions
from phyai_engine.models.pi_compact import BatchShape, arrange, captured_shapes, shape_of, stage
from phyai_engine.models.pi_compact import staged as staged_arrays
from phyai_engine.policy import captured_graphs
from phyai_engine.rtc import IDENTITY, PLAIN, Guidance, prefix_weights
from phyai_engine.runner import Runner
from phyai_engine.types import BufferSpec, Row

VARIANTS = ["pi0", "pi05"]
GUIDANCES = ["none", "identity", "gauss", "vjp", "vjp_early:2", "prefix_lock", "trained"]
CPU = torch.device("cpu")


def small(variant: str = "pi05", **changes: Any) -> PiOptions:
    sizes: dict[str, Any] = {
        "vocab": 64, "vis_width": 16, "vis_depth": 1, "vis_mlp": 32, "vis_heads": 2, "width": 32, "depth": 2, "mlp": 64,
        "heads": 4, "kv_heads": 1, "head_dim": 8, "exp_width": 24, "exp_mlp": 48, "action_dim": 5, "action_horizon": 8,
        "num_steps": 5, "prompt_len": 9, "image_size": 20, "patch": 4, "cameras": ("base", "wrist"),
        "prompt_buckets": (4,),
    }  # fmt: skip
    return PiOptions(variant=variant, **{**sizes, **changes})  # type: ignore[arg-type]


def row(
    options: PiOptions,
    seed: int,
    *,
    prompt: int,
    cameras: tuple[bool, bool],
    guided: bool = False,
    guidance: Guidance = IDENTITY,
) -> Row:
    """What is masked holds NaN and tokens beyond the vocabulary."""
    draw = np.random.default_rng(seed)
    size, chunk = options.image_size, (options.action_horizon, options.action_dim)
    seen, said = np.array(cameras), np.arange(options.prompt_len) < prompt
    images = draw.uniform(-1, 1, (len(cameras), 3, size, size)).astype(np.float32)
    images[~seen] = np.nan
    inputs = {
        "images": images,
        "image_mask": seen,
        "tokens": np.where(said, draw.integers(0, options.vocab, options.prompt_len), 1 << 40),
        "token_mask": said,
    }
    if options.variant == "pi0":
        inputs["state"] = draw.uniform(-1, 1, options.action_dim).astype(np.float32)
    weights = prefix_weights(options.action_horizon, 2, 5)[:, None] * np.float32(guided)
    return Row(
        inputs=inputs,
        target=draw.uniform(-1, 1, chunk).astype(np.float32),
        weight=np.broadcast_to(weights, chunk).copy(),
        gain=guidance.gains(options.spec().times, beta=5.0),
        seed=seed,
        delay_steps=2 * guided,
    )


def some_rows(options: PiOptions, guidance: Guidance = IDENTITY) -> list[Row]:
    return [
        row(options, 1, prompt=9, cameras=(True, True)),
        row(options, 2, prompt=2, cameras=(False, True), guided=True, guidance=guidance),
        row(options, 3, prompt=4, cameras=(True, False)),
        row(options, 4, prompt=7, cameras=(True, True), guided=True, guidance=guidance),
    ]


def actions_of(runner: Runner, rows: list[Row]) -> np.ndarray:
    return np.stack([result.actions for result in runner.run(rows) if result.actions is not None])


# --- shapes ---


def test_shapes_are_largest_first_and_hold_what_fits() -> None:
    shapes = captured_shapes(small(), (1, 4))
    assert shapes == [
        BatchShape(4, 8, 59),
        BatchShape(1, 2, 59),
        BatchShape(1, 2, 54),
        BatchShape(1, 1, 34),
        BatchShape(1, 1, 29),
    ]
    assert captured_shapes(small(prompt_buckets=(400,)), (1,)) == [BatchShape(1, 2, 59), BatchShape(1, 1, 34)]
    assert BatchShape(1, 2, 59).holds(BatchShape(1, 1, 34))
    assert not BatchShape(1, 1, 34).holds(BatchShape(1, 2, 30))
    assert not BatchShape(1, 2, 59).holds(BatchShape(2, 2, 59))
    assert len(captured_shapes(PiOptions(), (1, 2, 4, 8))) <= 24


def test_a_larger_shape_holds_the_same_tokens_in_the_same_places() -> None:
    images, prompt = np.array([[True, False], [False, True]]), np.arange(9) < np.array([[3], [5]])
    exact, padded = arrange(images, prompt, 25), arrange(images, prompt, 25, BatchShape(2, 4, 59))
    assert shape_of(images, prompt, 25) == BatchShape(2, 2, 30)
    assert list(exact.present) == [0, 3] and list(padded.present[:2]) == [0, 3]
    for b, valid in enumerate(exact.valid):
        moved = np.where(exact.source[b, :valid] < 50, exact.source[b, :valid], exact.source[b, :valid] + 50)
        assert (padded.source[b, :valid] == moved).all()  # the words stand behind two more images
    assert padded.source.shape == (2, 59) and padded.source.max() < 4 * 25 + 18


def test_images_are_staged_however_they_lie_in_memory() -> None:
    """From a received message, which must not be written, or a view with gaps."""
    options = small()
    whole = row(options, 1, prompt=3, cameras=(True, True))
    images = whole.inputs["images"]
    fixed, gaps = images.copy(), np.repeat(images, 2, axis=-1)[..., ::2]
    fixed.flags.writeable = False
    shape = BatchShape(1, 2, 59)
    for given in (images, fixed, gaps):
        into = {name: np.full(spec.shape, 7, spec.dtype) for name, spec in staged_arrays(options, shape).items()}
        stage(options, shape, [whole.inputs | {"images": given}], into)
        assert (into["images"] == images).all()


def test_an_observation_without_any_token_has_a_shape() -> None:
    nothing = np.zeros((1, 2), bool), np.zeros((1, 9), bool)
    assert shape_of(*nothing, 25) == BatchShape(1, 0, 1)
    assert 0 <= arrange(*nothing, 25).source.min() <= arrange(*nothing, 25).source.max() < 9


# --- staging ---


def test_staged_arrays_are_views_of_one_block() -> None:
    specs = {"a": BufferSpec((2, 3), "float32"), "b": BufferSpec((5,), "bool"), "c": BufferSpec((1,), "int64")}
    staging = Staging(specs, CPU)
    host = staging.open()
    host["a"][:], host["b"][:], host["c"][:] = 1.5, True, 7
    assert not staging.device["a"].any()
    staging.copy_in()
    assert staging.device["a"].tolist() == [[1.5] * 3] * 2
    assert staging.device["b"].tolist() == [True] * 5 and staging.device["c"].tolist() == [7]


# --- batches ---


def guidance_of(text: str) -> Guidance:
    return Guidance.parse(text, max_delay=4 if text == "trained" else 0)


@pytest.mark.parametrize("text", GUIDANCES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_in_a_larger_shape_equals_the_plain_run(variant: str, text: str) -> None:
    options, guidance = small(variant), guidance_of(text)
    model = PiModel.random(options, seed=3)
    graphs = Graphs(model, guidance=guidance, replay=False, shapes=captured_shapes(options, (1, 4)))
    rows = some_rows(options, guidance)
    plain = np.concatenate([actions_of(Runner(model, guidance=guidance), [one]) for one in rows])
    for staged in graphs.shapes:
        staged.inputs.host["images"][...] = np.nan  # what an earlier batch left
        staged.inputs.host["tokens"][...] = 1
    runner = Runner(model, guidance=guidance, graphs=graphs)
    alone = np.concatenate([actions_of(runner, [one]) for one in rows])
    together = actions_of(runner, rows)
    np.testing.assert_allclose(alone, plain, atol=1e-5, rtol=0)
    np.testing.assert_allclose(together, plain, atol=1e-5, rtol=0)
    free = actions_of(Runner(model, guidance=PLAIN), rows)
    assert [bool(np.abs(own - other).max() > 1e-3) for own, other in zip(together, free, strict=True)] == [
        False, text != "none", False, text != "none",
    ]  # fmt: skip


def test_graphs_of_another_guidance_are_refused() -> None:
    model = PiModel.random(small(), seed=3)
    graphs = Graphs(model, guidance=guidance_of("vjp"), replay=False, shapes=[BatchShape(1, 2, 59)])
    with pytest.raises(EngineError, match="the graphs hold another guidance"):
        Runner(model, graphs=graphs)


def test_the_smallest_shape_that_holds_a_batch_is_taken() -> None:
    options = small()
    model = PiModel.random(options, seed=3)
    graphs = Graphs(model, replay=False, shapes=captured_shapes(options, (1, 4)))

    def taken(*rows: Row) -> Any:
        batch = graphs.batch(rows)
        return batch and batch.shape

    first, second, third, _ = some_rows(options)
    assert [taken(one) for one in (first, second, third)] == [
        BatchShape(1, 2, 59),
        BatchShape(1, 1, 29),
        BatchShape(1, 1, 29),
    ]
    assert taken(*some_rows(options)) == BatchShape(4, 8, 59)
    assert taken(first, second) is None
    np.testing.assert_array_equal(
        actions_of(Runner(model, graphs=graphs), [first, second]), actions_of(Runner(model), [first, second])
    )


def test_a_layout_is_kept_only_for_equal_masks() -> None:
    options = small()
    model = PiModel.random(options, seed=3)
    graphs = Graphs(model, replay=False, shapes=[BatchShape(1, 2, 59)])
    rows = some_rows(options)
    rows.append(row(options, 5, prompt=2, cameras=(True, True)))  # of row 1 one mask alone is another
    for i in (0, 0, 1, -1, 1, 2, 1, 3, 0):
        np.testing.assert_allclose(
            actions_of(Runner(model, graphs=graphs), [rows[i]]), actions_of(Runner(model), [rows[i]]), atol=1e-5, rtol=0
        )


def test_an_answer_stays_when_the_next_one_comes() -> None:
    options = small()
    model = PiModel.random(options, seed=3)
    runner = Runner(model, graphs=Graphs(model, replay=False, shapes=captured_shapes(options, (1,))))
    first, _, third, _ = some_rows(options)
    kept = runner.run([first])[0].actions
    assert kept is not None
    before = kept.copy()
    runner.run([third])
    np.testing.assert_array_equal(kept, before)


def test_a_cancelled_batch_leaves_nothing_to_the_next() -> None:
    options = small()
    model = PiModel.random(options, seed=3)
    graphs = Graphs(model, replay=False, shapes=captured_shapes(options, (1,)))
    rows = some_rows(options)
    wanted = actions_of(Runner(model, graphs=graphs), [rows[0]])
    steps = []

    def cancel(step: int, _x: Any, _velocity: Any) -> None:
        steps.append(step)
        rows[1].cancel.cancel()

    assert Runner(model, graphs=graphs, on_step=cancel).run([rows[1]])[0].cancelled
    assert steps == [0]
    np.testing.assert_array_equal(actions_of(Runner(model, graphs=graphs), [rows[0]]), wanted)


def test_only_models_on_an_accelerator_have_graphs() -> None:
    model = PiModel.random(small(), seed=0)
    assert isinstance(model, Capturable)
    assert captured_graphs(model, IDENTITY) is None
    fake = FakeModel(FakeOptions())
    assert not isinstance(fake, Capturable)
    assert captured_graphs(fake, IDENTITY) is None


# --- on an accelerator ---


@pytest.mark.gpu
@pytest.mark.parametrize("text", GUIDANCES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_replay_equals_the_calls_bit_for_bit_and_captures_nothing_new(variant: str, dtype: str, text: str) -> None:
    options, guidance = small(variant, dtype=dtype), guidance_of(text)
    model = PiModel.random(options, seed=3, device="cuda")
    captured, called = (Graphs(model, (1, 4), guidance=guidance, replay=replay) for replay in (True, False))
    rows = some_rows(options, guidance)
    for batch in (*([one] for one in rows), rows):
        runs = [
            actions_of(Runner(model, guidance=guidance, graphs=graphs), batch)
            for graphs in (captured, called, captured)
        ]
        np.testing.assert_array_equal(runs[0], runs[1])
        np.testing.assert_array_equal(runs[0], runs[2])
    assert captured.captures == len(captured.shapes) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["identity", "vjp"])
def test_a_replay_reads_nothing_that_an_earlier_one_left(text: str) -> None:
    options, guidance = small(dtype="bfloat16"), guidance_of(text)
    model = PiModel.random(options, seed=3, device="cuda")
    graphs = Graphs(model, (1,), guidance=guidance)
    rows = some_rows(options, guidance)
    runner = Runner(model, guidance=guidance, graphs=graphs)
    wanted = [actions_of(runner, [one]) for one in rows]
    for one, expected in zip(rows, wanted, strict=True):
        for shape in graphs.shapes:
            for tensor in (shape.prefix.actions.keys, shape.prefix.actions.values):
                tensor.fill_(torch.nan)
            for guided in (False, True):
                for tensor in (*shape.x[guided][1:], *shape.velocity[guided]):
                    tensor.fill_(torch.nan)
        np.testing.assert_array_equal(actions_of(runner, [one]), expected)


@pytest.mark.gpu
def test_keeping_warm_changes_no_bit() -> None:
    options = small(dtype="bfloat16")
    model = PiModel.random(options, seed=3, device="cuda")
    graphs = Graphs(model, (1,))
    runner, request = Runner(model, graphs=graphs), some_rows(options)[0]
    wanted = actions_of(runner, [request])
    graphs.keep_warm()
    np.testing.assert_array_equal(actions_of(runner, [request]), wanted)


@pytest.mark.gpu
def test_memory_does_not_grow_with_requests() -> None:
    options = small(dtype="bfloat16")
    model = PiModel.random(options, seed=3, device="cuda")
    runner = Runner(model, graphs=Graphs(model, (1,)))
    rows = some_rows(options)
    runner.run([rows[0]])
    before = torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()
    for i in range(200):
        runner.run([dataclasses.replace(rows[i % 4], seed=i)])
    assert (torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.memory_allocated()) == before
