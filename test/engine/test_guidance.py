"""Guidance: the modes, the true gradient, and what must not change a bit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

import plain_pi as plain

from phyai_engine.errors import EngineError
from phyai_engine.golden_rtc import _TanhFlow
from phyai_engine.layers.ops import REFERENCE
from phyai_engine.layers.tape import Tape
from phyai_engine.models.pi import PiModel, PiOptions, PiPrefix, time_embedding
from phyai_engine.rtc import (
    PLAIN,
    Guidance,
    GuidanceBuffers,
    GuidanceMode,
    gain_table,
    guide_vjp,
    guided_velocity,
    lock_prefix,
    prefix_weights,
)
from phyai_engine.runner import Runner
from phyai_engine.solvers import euler_flow, hold_prefix
from phyai_engine.types import Row
from phyai_engine.weights.pi import random_tensors

MODES = ["none", "identity", "gauss", "vjp", "vjp_early:2", "prefix_lock", "trained"]
VARIANTS = ["pi0", "pi05"]
H, A, N = 6, 3, 8
TIMES = [1 - k / N for k in range(N)]


def guidance_of(text: str) -> Guidance:
    return Guidance.parse(text, max_delay=H if text == "trained" else 0)


# --- the words ---


@pytest.mark.parametrize("text", MODES)
def test_every_mode_is_named(text: str) -> None:
    guidance = guidance_of(text)
    assert guidance.mode.value == text.partition(":")[0]
    assert guidance.early_steps == (2 if ":" in text else 0)
    assert guidance.max_delay == (H if text == "trained" else 0)
    assert [guidance.differentiates(k) for k in (0, 1, 2, 9)] == {
        "vjp": [True] * 4,
        "vjp_early:2": [True, True, False, False],
    }.get(text, [False] * 4)
    assert guidance.locks == (text in ("prefix_lock", "trained"))
    assert guidance.weighs == (text in ("identity", "gauss", "vjp", "vjp_early:2"))


@pytest.mark.parametrize(
    "text", ["", "VJP", "vjp_early", "vjp_early:", "vjp_early:0", "vjp_early:-1", "vjp_early:²", "vjp:3", "identity:1"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="wanted one of none, identity, gauss, vjp, vjp_early:K with K >= 1, pre"):
        Guidance.parse(text)


def test_trained_needs_a_checkpoint_that_was() -> None:
    with pytest.raises(ValueError, match="guidance is 'trained' and rtc_max_delay 0"):
        Guidance.parse("trained")
    assert (
        Guidance.parse("vjp", max_delay=5).max_delay == 0
    )  # the limit is that of the conditioning, not of the weights


def test_gains_of_every_mode() -> None:
    for text in ("identity", "vjp", "vjp_early:2"):
        np.testing.assert_array_equal(guidance_of(text).gains(TIMES, 5.0, 0.5), gain_table(TIMES, 5.0, 0.5))
    np.testing.assert_allclose(guidance_of("gauss").gains(TIMES, 5.0), 1 / np.array(TIMES), rtol=1e-6)
    for text in ("none", "prefix_lock", "trained"):
        assert not guidance_of(text).gains(TIMES, 5.0).any()


def test_gauss_is_the_gain_times_a_gaussian_priors_jacobian() -> None:
    """k J = 1/t for the unclipped k, whatever sigma is: J = s^2 tau / (s^2 tau^2 + t^2)."""
    for sigma in (1.0, 0.3):
        tau = 1 - np.array(TIMES[1:])
        jacobian = sigma**2 * tau / (sigma**2 * tau**2 + (1 - tau) ** 2)
        unclipped = gain_table(TIMES[1:], 1e9, sigma, np.float64)
        np.testing.assert_allclose(unclipped * jacobian, guidance_of("gauss").gains(TIMES[1:], 5.0), rtol=1e-6)


# --- the maths, on a small network in fp64 ---


def small_net(batch: int = 2, seed: int = 3) -> tuple[_TanhFlow, np.ndarray]:
    """A network that mixes all actions of a chunk, and noise."""
    generator = np.random.default_rng(seed)
    shapes = {"fc1.weight": (9, H * A), "fc1.bias": (9,), "fc2.weight": (H * A, 9), "fc2.bias": (H * A,)}
    tensors = {name: generator.standard_normal(shape) * 0.5 for name, shape in shapes.items()}
    tensors["time.weight"] = generator.standard_normal((9, H)) * 0.3
    return _TanhFlow(tensors, TIMES, np.float64), generator.standard_normal((batch, H, A))


def buffers_of(guidance: Guidance, batch: int = 2, delays: tuple[int, ...] = (1, 2), beta: float = 5.0) -> Any:
    """Every row with its own d, Y and W; fp64."""
    target = np.random.default_rng(9).standard_normal((batch, H, A))
    weight = np.stack([prefix_weights(H, d, 4, dtype=np.float64) for d in delays])[:, :, None] * np.ones((1, 1, A))
    gain = np.repeat(guidance.gains(TIMES, beta, dtype=np.float64)[:, None], batch, axis=1)[:, :, None, None]
    return GuidanceBuffers(target, weight, gain, (np.arange(H) < np.array(delays)[:, None])[:, :, None])


def test_the_gradient_is_that_of_the_actions_looked_ahead_to() -> None:
    """guide_vjp against central differences of x0(x) = x - t u(x), which contract with the error."""
    net, x = small_net()
    buffers, step = buffers_of(guidance_of("vjp")), 3
    u, pull = net.velocity_vjp(None, x, step)
    t, gain = TIMES[step], buffers.gain[step]
    guided = guide_vjp(x, u, t, pull=pull, target=buffers.target, weight=buffers.weight, gain=gain)
    error = buffers.weight * (buffers.target - (x - t * u))
    wanted, h = np.zeros_like(x), 1e-6
    for at in np.ndindex(x.shape):
        away = np.zeros_like(x)
        away[at] = h
        ahead = [x + s * away - t * net.velocity(None, x + s * away, step) for s in (1, -1)]
        wanted[at] = (error * (ahead[0] - ahead[1])).sum() / (2 * h)
    np.testing.assert_allclose((u - guided) / gain, wanted, atol=1e-8)
    assert np.abs((u - guided) / gain - error).max() > 0.1  # and the Jacobian is not the identity


@pytest.mark.parametrize("text", MODES)
def test_both_conventions_sample_the_same_actions(text: str) -> None:
    """The paper's x += (v + k g)/N, tau upwards, is our x -= u'/N, t downwards: spec and sign of every mode."""
    net, noise = small_net()
    guidance = guidance_of(text)
    buffers = buffers_of(guidance)
    ours = euler_flow(net, None, noise, TIMES, guidance, buffers)
    paper = noise
    for step, t in enumerate(TIMES):
        tau = 1 - t
        if guidance.locks:
            paper = np.where(buffers.locked, buffers.target, paper)
        u, pull = net.velocity_vjp(None, paper, step)
        v = -(net.velocity(None, paper, step, buffers.locked) if text == "trained" else u)
        error = buffers.weight * (buffers.target - (paper + (1 - tau) * v))
        along = error - (1 - tau) * pull(error)  # J_v = -J_u
        k = 5.0 if tau == 0 else min(5.0, (1 - tau) / tau * (tau**2 + (1 - tau) ** 2) / (1 - tau) ** 2)
        pulled = {"identity": k * error, "gauss": error / (1 - tau), "vjp": k * along}
        pulled["vjp_early:2"] = k * (along if step < 2 else error)
        paper = paper + (v + pulled.get(text, np.zeros_like(v))) / N
    if guidance.locks:
        paper = np.where(buffers.locked, buffers.target, paper)
    np.testing.assert_allclose(ours, paper, atol=1e-12)
    plain_run = euler_flow(net, None, noise, TIMES)
    assert (np.abs(ours - plain_run).max() > 0.1) == (text != "none")


def test_gauss_lands_on_the_target_where_the_weight_is_one() -> None:
    net, noise = small_net()
    guidance = guidance_of("gauss")
    buffers = buffers_of(guidance)
    actions = euler_flow(net, None, noise, TIMES, guidance, buffers)
    held = buffers.weight == 1
    np.testing.assert_allclose(actions[held], buffers.target[held], atol=1e-12)


def test_a_locked_prefix_is_the_target_at_every_step_and_the_others_see_it() -> None:
    net, noise = small_net()
    for text in ("prefix_lock", "trained"):
        guidance, seen = guidance_of(text), []
        buffers = buffers_of(guidance, delays=(0, 3))
        actions = euler_flow(
            net, None, noise, TIMES, guidance, buffers, on_step=lambda k, x, u, seen=seen: seen.append(x)
        )
        for x in (*seen, actions):
            np.testing.assert_array_equal(x[1, :3], buffers.target[1, :3])
        plain_run = euler_flow(net, None, noise, TIMES)
        np.testing.assert_array_equal(actions[0], plain_run[0])  # d = 0
        assert np.abs(actions[1, 3:] - plain_run[1, 3:]).max() > 1e-3


def test_locking_writes_the_targets_bits() -> None:
    for kind in (np.asarray, torch.from_numpy):
        x, target = (np.random.default_rng(s).standard_normal((2, 4, 3)).astype(np.float32) * 1e3 for s in (1, 2))
        locked = np.array([[1, 1, 0, 0], [0, 0, 0, 0]], bool)[:, :, None]
        held = np.asarray(lock_prefix(kind(x), kind(target), kind(locked)))
        np.testing.assert_array_equal(held, np.where(locked, target, x))
        assert held.dtype == np.float32


def test_early_steps_are_counted_from_the_noise() -> None:
    net, noise = small_net()
    whole, never = guidance_of("vjp"), guidance_of("identity")
    buffers = buffers_of(whole)
    runs = {
        k: euler_flow(net, None, noise, TIMES, Guidance(GuidanceMode.VJP_EARLY, k), buffers) for k in (1, 4, N, N + 3)
    }
    np.testing.assert_array_equal(runs[N], euler_flow(net, None, noise, TIMES, whole, buffers))
    np.testing.assert_array_equal(runs[N + 3], runs[N])
    distances = [np.abs(runs[k] - euler_flow(net, None, noise, TIMES, never, buffers)).max() for k in (1, 4, N)]
    assert min(distances) > 1e-3 and len(set(distances)) == 3


def test_a_flow_can_be_ended_between_steps() -> None:
    net, noise = small_net()
    asked: list[int] = []
    assert euler_flow(net, None, noise, TIMES, goes_on=lambda k: bool(asked.append(k)) or k < 3) is None
    assert asked == [0, 1, 2, 3]


# --- the pi family ---


def small(variant: str, **changes: Any) -> PiOptions:
    sizes: dict[str, Any] = {
        "vocab": 40, "vis_width": 16, "vis_depth": 1, "vis_mlp": 24, "vis_heads": 2, "width": 24, "depth": 3,
        "mlp": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "exp_width": 20, "exp_mlp": 28, "action_dim": A,
        "action_horizon": H, "num_steps": N, "prompt_len": 8, "image_size": 9, "patch": 4, "cameras": ("a", "b"),
    }  # fmt: skip
    return PiOptions(variant=variant, **{**sizes, **changes})  # type: ignore[arg-type]


def weights(options: PiOptions, seed: int = 1) -> dict[str, Tensor]:
    """Random weights with plain heads: the shipped skeleton's Jacobian would hardly depend on the network."""
    times = options.spec().times
    tensors = random_tensors(PiModel.expected(options), seed, times, time_embedding(times, options))
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.startswith(("action_", "time_mlp", "state_proj")) or ".dense." in name or "expert" in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
    return tensors


def inputs_of(options: PiOptions, batch: int = 3) -> dict[str, Tensor]:
    """Rows of different lengths."""
    generator = torch.Generator().manual_seed(0)
    size = options.image_size
    return {
        "images": torch.rand((batch, 2, 3, size, size), generator=generator) * 2 - 1,
        "image_mask": torch.tensor([[1, 1], [0, 1], [0, 0]], dtype=torch.bool)[:batch],
        "tokens": torch.randint(0, options.vocab, (batch, options.prompt_len), generator=generator),
        "token_mask": torch.arange(options.prompt_len) < torch.tensor([8, 2, 5])[:batch, None],
        "state": torch.rand((batch, options.action_dim), generator=generator) * 2 - 1,
    }


def pair_of(options: PiOptions, seed: int = 1) -> tuple[PiModel, PiPrefix, Any]:
    """Model, its prefix, and x -> u of the plain forward pass in fp64 at a step's time."""
    tensors, inputs = weights(options, seed), inputs_of(options)
    model = PiModel.from_state(options, tensors)
    reference = plain.PlainPi(options, tensors)
    prefix = reference.prefix(inputs)
    return model, model.prefix(inputs), lambda x, time: reference.velocity(prefix, x, time)


def noise_of(options: PiOptions, seed: int = 9, batch: int = 3) -> Tensor:
    shape = (batch, options.action_horizon, options.action_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def autograd(field: Any, x: Tensor, error: Tensor) -> Tensor:
    x = x.double().requires_grad_()
    return torch.autograd.grad(field(x), x, error.double())[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "depth": 1}], ids=["", "shallow"])
def test_the_tape_equals_autograd_through_the_plain_forward_pass(variant: str, changes: dict[str, Any]) -> None:
    """At every step, with what stands behind a row's tokens in the slab poisoned."""
    options = small(variant, **changes)
    model, prefix, field = pair_of(options)
    for slab in (prefix.actions.keys, prefix.actions.values):
        beyond = torch.arange(slab.shape[3]) >= prefix.actions.lengths[:, None]
        slab.masked_fill_(beyond[None, :, None, :, None], float("nan"))
    for step in (0, 3, N - 1):
        x, error = noise_of(options, step), noise_of(options, step + 50)
        u, pull = model.velocity_vjp(prefix, x, step)
        assert torch.equal(u, model.velocity(prefix, x, step))
        wanted = autograd(lambda y, t=model.spec.times[step]: field(y, t), x, error)
        got = pull(error)
        assert 0.1 < wanted.abs().max() < 100
        assert (got - wanted).abs().max() <= 2e-6 * wanted.abs().max() + 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_loses_digits_and_nothing_else(variant: str) -> None:
    exact, rounded = (small(variant, dtype=dtype) for dtype in ("float32", "bfloat16"))
    x, error = noise_of(exact), noise_of(exact, 4)
    grads = []
    for options in (exact, rounded):
        model = PiModel.from_state(options, weights(options))
        _, pull = model.velocity_vjp(model.prefix(inputs_of(options)), x, 2)
        grads.append(pull(error))
    assert grads[1].dtype == torch.float32
    assert 1e-4 < (grads[1] - grads[0]).norm() / grads[0].norm() < 0.03


def test_the_gradient_reaches_the_input_alone() -> None:
    """No parameter asks for a gradient, and none of the prefix is made: the slab's is of the actions' columns."""
    options = small("pi05")
    model, prefix, _ = pair_of(options)
    counts, attend = [], model.ops.attend_back
    counting = lambda *args: counts.append(args[-1]) or attend(*args)  # noqa: E731
    model.ops = replace(model.ops, attend_back=counting)
    _, pull = model.velocity_vjp(prefix, noise_of(options), 0)
    grad = pull(noise_of(options, 1))
    assert counts == [H] * options.depth
    assert not grad.requires_grad and all(p.grad is None for p in model.parameters())


def test_a_broken_chain_is_an_error_and_not_a_zero() -> None:
    tape = Tape(REFERENCE)
    weight = torch.eye(4)
    first = tape.ops.linear(torch.ones(1, 4), weight)
    last = tape.ops.linear(first * 2, weight)
    with pytest.raises(EngineError, match="no gradient arrives"):
        tape.pull(last, torch.ones(1, 4), first)


def per_token_times(delays: tuple[int, ...], t: float) -> Tensor:
    clean = torch.arange(H) < torch.tensor(delays)[:, None]
    return torch.where(clean, torch.zeros((), dtype=torch.float64), torch.tensor(t, dtype=torch.float64))


@pytest.mark.parametrize("variant", VARIANTS)
def test_clean_tokens_have_flow_time_zero(variant: str) -> None:
    options = small(variant)
    model, prefix, field = pair_of(options)
    x, delays = noise_of(options), (0, 2, H)
    clean = (torch.arange(H) < torch.tensor(delays)[:, None])[:, :, None]
    for step in (0, N - 1):
        got = model.velocity(prefix, x, step, clean)
        wanted = field(x, per_token_times(delays, model.spec.times[step]))
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert torch.equal(got[0], model.velocity(prefix, x, step)[0])  # d = 0: the plain bits
        assert (got[1] - model.velocity(prefix, x, step)[1]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", MODES)
def test_the_first_chunk_is_the_same_program_and_the_plain_result(variant: str, text: str) -> None:
    """Buffers with W = 0, d = 0: bit for bit what a run without guidance gives."""
    options = small(variant)
    model, prefix, _ = pair_of(options)
    noise, guidance = noise_of(options), guidance_of(text)
    free = torch.zeros((3, H, A))
    gain = torch.from_numpy(guidance.gains(model.spec.times, 5.0))[:, None, None, None].expand(-1, 3, -1, -1)
    buffers = GuidanceBuffers(free, free, gain, torch.zeros((3, H, 1), dtype=torch.bool))
    plain_run = euler_flow(model, prefix, noise, model.spec.times)
    assert torch.equal(euler_flow(model, prefix, noise, model.spec.times, guidance, buffers), plain_run)


def row_of(options: PiOptions, seed: int, guidance: Guidance, *, delay: int, guided: bool = True) -> Row:
    generator = np.random.default_rng(seed)
    inputs = inputs_of(options)
    chosen = {name: inputs[name][seed % 3].numpy() for name in options.spec().inputs}
    weight = prefix_weights(H, delay, 4)[:, None] * np.float32(guided) * np.ones((1, A), np.float32)
    return Row(
        inputs=chosen,
        target=generator.standard_normal((H, A)).astype(np.float32),
        weight=weight,
        gain=guidance.gains(options.spec().times, float(3 + seed)),
        seed=seed,
        delay_steps=delay if guided else 0,
    )


def chunks_of(model: PiModel, guidance: Guidance, rows: list[Row]) -> np.ndarray:
    results = Runner(model, guidance=guidance).run(rows)
    return np.stack([result.actions for result in results if result.actions is not None])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("text", MODES)
def test_a_mixed_batch_equals_its_rows_alone(variant: str, text: str) -> None:
    """Other d, Y, W and gains in every row, and one that is not guided."""
    options, guidance = small(variant), guidance_of(text)
    model = PiModel.from_state(options, weights(options))
    rows = [row_of(options, i, guidance, delay=i % 4, guided=i != 2) for i in range(5)]
    together = chunks_of(model, guidance, rows)
    alone = np.stack([chunks_of(model, guidance, [row])[0] for row in rows])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    plain_run = chunks_of(model, PLAIN, rows)
    moved = np.abs(together - plain_run).max(axis=(1, 2)) > 1e-3
    weighed = [text != "none" and i != 2 and (i % 4 > 0 or guidance.weighs) for i in range(5)]
    assert moved.tolist() == weighed


def test_a_delay_that_was_not_trained_is_refused() -> None:
    options, guidance = small("pi05"), Guidance.parse("trained", max_delay=2)
    model = PiModel.from_state(options, weights(options))
    chunks_of(model, guidance, [row_of(options, 0, guidance, delay=2)])
    with pytest.raises(EngineError, match="beyond what the policy can continue, got 3 steps, wanted 0 to 2, at row 1"):
        chunks_of(model, guidance, [row_of(options, 0, guidance, delay=2), row_of(options, 1, guidance, delay=3)])
    row = replace(row_of(options, 0, guidance, delay=2), delay_steps=H + 1)
    with pytest.raises(EngineError, match=f"wanted 0 to {H}"):
        chunks_of(model, PLAIN, [row])


@pytest.mark.parametrize("text", ["prefix_lock", "trained"])
def test_a_locked_prefix_needs_finite_targets_and_reads_no_others(text: str) -> None:
    options, guidance = small("pi05"), guidance_of(text)
    model = PiModel.from_state(options, weights(options))
    row = row_of(options, 0, guidance, delay=2)
    target = row.target.copy()
    target[2:] = np.nan
    poisoned = chunks_of(model, guidance, [replace(row, target=target)])
    np.testing.assert_array_equal(poisoned, chunks_of(model, guidance, [row]))
    np.testing.assert_array_equal(poisoned[0, :2], row.target[:2])
    target[1, 0] = np.inf
    with pytest.raises(EngineError, match="target is not finite"):
        chunks_of(model, guidance, [replace(row, target=target)])


def test_the_gradient_is_made_only_where_a_row_is_guided() -> None:
    options, guidance = small("pi05"), guidance_of("vjp")
    model = PiModel.from_state(options, weights(options))
    steps: list[int] = []
    vjp = model.velocity_vjp
    model.velocity_vjp = lambda prefix, x, step: steps.append(step) or vjp(prefix, x, step)  # type: ignore
    chunks_of(model, guidance, [row_of(options, 0, guidance, delay=1, guided=False)])
    assert steps == []
    chunks_of(model, guidance, [row_of(options, 0, guidance, delay=1)])
    assert steps == list(range(N))


# --- the recorded model ---


def test_vjp_equals_central_differences_on_the_recorded_pi05() -> None:
    """pi05_tiny: our fp32 gradient against differences of the plain forward pass in fp64, along random directions."""
    import guidance_cases

    case = guidance_cases.pi05_tiny()
    for step in (0, 6):
        x, error = case.noise(step), case.noise(step + 20)
        _, pull = case.model.velocity_vjp(case.prefix, x, step)
        grad = pull(error)
        worst = guidance_cases.worst_directional_error(case, x, error, grad, step, directions=8)
        assert worst < 5e-6


def test_both_conventions_agree_on_the_recorded_pi05() -> None:
    import guidance_cases

    assert guidance_cases.convention_error(guidance_cases.pi05_tiny()) < 1e-6


# --- on an accelerator ---


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["identity", "gauss", "vjp", "vjp_early:2", "prefix_lock", "trained"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_captured_program_follows_its_buffers(variant: str, text: str) -> None:
    """One capture; Y, W, gains, d and noise change between replays, which equal the eager run bit for bit."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options, guidance = small(variant), guidance_of(text)
    tensors, inputs = weights(options), {name: t.cuda() for name, t in inputs_of(options).items()}
    model = PiModel.from_state(options, tensors, device="cuda")
    prefix, times = model.prefix(inputs), model.spec.times

    def fresh(seed: int) -> tuple[Tensor, GuidanceBuffers]:
        rows = [row_of(options, 3 * seed + i, guidance, delay=(seed + i) % 4, guided=i + seed > 0) for i in range(3)]
        return noise_of(options, seed).cuda(), GuidanceBuffers.of(guidance, rows).to(model.to_device)

    def run(x: Tensor, buffers: GuidanceBuffers) -> Tensor:
        return euler_flow(model, prefix, x, times, guidance, buffers)

    x, buffers = fresh(0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run(x, buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, buffers)
    for seed in range(4):
        other, wanted_buffers = fresh(seed)
        x.copy_(other)
        for name in ("target", "weight", "gain", "locked"):
            getattr(buffers, name).copy_(getattr(wanted_buffers, name))
        graph.replay()
        assert torch.equal(captured, run(other, wanted_buffers))


def test_the_hook_is_one_function_for_every_head() -> None:
    """A head that knows nothing of guidance, in numpy, is guided by the same call as a torch one."""

    class Pull:
        def velocity(self, prefix: Any, x: Any, step: int, clean: Any = None) -> Any:
            return x * 0.5

        def velocity_vjp(self, prefix: Any, x: Any, step: int) -> Any:
            return x * 0.5, lambda error: error * 0.5

    found: list[Mapping[str, Any]] = []
    for kind in (np.asarray, torch.from_numpy):
        guidance = guidance_of("vjp")
        buffers = buffers_of(guidance).to(kind)
        x = kind(np.ones((2, H, A)))
        found.append(np.asarray(guided_velocity(Pull(), None, x, 2, TIMES[2], guidance, buffers)))
    np.testing.assert_allclose(found[0], found[1], atol=1e-15)
    assert hold_prefix(found[0], PLAIN, None) is found[0]
