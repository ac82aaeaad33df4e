"""The golden check of guidance: chunks of lerobot's guided sampler, of the true gradient, and of a hard prefix.

The denoiser is a small network of known weights, so that what is compared is the guidance: parts A (``identity``, fp32)
and C (``trained``) are lerobot's own runs, part B (``vjp_*``) is the Kinetix formula in fp64, in the paper's direction
of time. Part B is run in fp64 and, against the same arrays, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import DTypeLike

from phyai_engine.errors import ConfigError
from phyai_engine.golden_report import MODES, Array, Arrays, Comparison, Device, GoldenReport, errors_of
from phyai_engine.rtc import Guidance, GuidanceBuffers, Pull, WeightKind, prefix_weights
from phyai_engine.solvers import euler_flow, flow_times
from phyai_engine.weights.loading import device_of, stream_tensors

_GATES = {"chunk": 1e-5, "x_steps": 1e-5, "u_steps": 1e-5, "weights": 1e-6, "token_times": 0.0}
_GATE = 5e-5  # of the other fp32 arrays: guided velocities reach 43
_EXACT = 1e-10  # of fp64
_FP32 = " fp32"


class _TanhFlow:
    """u = fc2(tanh(fc1(flatten x) + time t)), with a flow time per token.

    :param put: where it computes: numpy array -> the array that it takes, numpy's or torch's.
    """

    def __init__(
        self, tensors: Arrays, times: Sequence[float], dtype: DTypeLike, put: Callable[[Array], Any] = np.asarray
    ) -> None:
        self.times, self.dtype, self.put = times, np.dtype(dtype), put
        self._tensors = {name: put(tensor.astype(dtype)) for name, tensor in tensors.items()}

    def token_times(self, x: Any, step: int, clean: Any) -> Any:
        """[B,H]"""
        times = _library(x).full_like(x[..., 0], self.times[step])
        return times if clean is None else times * ~clean[..., 0]

    def velocity(self, prefix: None, x: Any, step: int, clean: Any = None) -> Any:
        return self._project(self._inner(x, step, clean), x)

    def velocity_vjp(self, prefix: None, x: Any, step: int) -> tuple[Any, Pull]:
        inner, w = self._inner(x, step, None), self._tensors

        def pull(error: Any) -> Any:
            grad = (error.reshape(len(error), -1) @ w["fc2.weight"]) * (1 - inner**2)
            return (grad @ w["fc1.weight"]).reshape(x.shape)

        return self._project(inner, x), pull

    def _inner(self, x: Any, step: int, clean: Any) -> Any:
        w = self._tensors
        timed = self.token_times(x, step, clean) @ w["time.weight"].T
        return _library(x).tanh(x.reshape(len(x), -1) @ w["fc1.weight"].T + w["fc1.bias"] + timed)

    def _project(self, inner: Any, x: Any) -> Any:
        return (inner @ self._tensors["fc2.weight"].T + self._tensors["fc2.bias"]).reshape(x.shape)


def _library(x: Any) -> Any:
    """Whose array it is."""
    return torch if isinstance(x, torch.Tensor) else np


def _host(x: Any) -> Array:
    array: Array = x.cpu().numpy() if isinstance(x, torch.Tensor) else x
    return array


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """One sample of one case, as the solver takes it; everything without batch dimension."""

    noise: Array
    target: Array
    weight: Array
    gain: Array
    locked: Array


def rtc_lerobot(folder: Path, config: Mapping[str, Any], recorded: Arrays, device: Device) -> GoldenReport:
    """See the module.

    :param device: ``cpu``: the arrays are numpy's, else torch's: guidance is written for both.
    :raises ConfigError: an input is missing or does not fit.
    """
    tensors: Arrays = {name: tensor.numpy() for name, tensor in stream_tensors(folder)}
    noise, steps = _input(recorded, "noise", folder), int(config["steps"])
    shape = (len(noise), int(config["horizon"]), int(config["action_dim"]))
    previous = _input(recorded, "prev_full", folder)
    if noise.shape != shape or previous.shape != shape:
        text = f"{list(noise.shape)}, {list(previous.shape)}"
        raise ConfigError("noise or prev_full has another shape", got=text, wanted=list(shape), where=folder)
    place = device_of(device)
    put: Callable[[Array], Any] = np.asarray if device == "cpu" else lambda array: torch.tensor(array, device=place)
    single = _TanhFlow(tensors, flow_times(steps, "direct"), np.float32, put)
    double = _TanhFlow(tensors, [1 - k / steps for k in range(steps)], np.float64, put)
    cases, prefixes = config.get("cases", []), config.get("prefix_cases", [])
    parts = (
        (single, Guidance.parse("identity"), cases, _identity_arrays, ""),
        (double, Guidance.parse("vjp"), cases, _vjp_arrays, ""),
        (single, Guidance.parse("vjp"), cases, _vjp_arrays, _FP32),
        (single, Guidance.parse("trained", shape[1]), prefixes, _prefix_arrays, ""),
    )
    comparisons: list[Comparison] = []
    for net, guidance, chosen, arrays, suffix in parts:
        samples = [_samples(case, guidance, noise, previous, net) for case in chosen]
        made = _in_every_mode(net, guidance, samples, arrays)
        for i, case in enumerate(chosen):
            comparisons += _compare(case, {mode: made[mode][i] for mode in MODES}, suffix, recorded)
    known = {"noise", "prev_full", *(c.name.removesuffix(_FP32) for c in comparisons)}
    return GoldenReport(folder, "rtc_lerobot", tuple(comparisons), tuple(sorted(recorded.keys() - known)))


def _input(recorded: Arrays, name: str, folder: Path) -> Array:
    if name not in recorded:
        raise ConfigError(f"{name!r} is not recorded", where=folder / "io.npz")
    return recorded[name]


def _samples(
    case: Mapping[str, Any], guidance: Guidance, noise: Array, previous: Array, net: _TanhFlow
) -> list[_Sample]:
    """Every sample of a case. What the previous chunk does not reach is zero; its padded columns keep their weight."""
    horizon, dim = noise.shape[1:]
    rows, columns, delay = case.get("prev_len", horizon), case.get("prev_dim", dim), case["d"]
    target = np.zeros_like(previous)
    target[:, :rows, :columns] = previous[:, :rows, :columns]
    weight: Array = np.zeros(horizon)
    gain: Array = np.zeros(len(net.times))
    if guidance.weighs:
        kind = cast("WeightKind", case["schedule"].lower())
        weight = prefix_weights(horizon, delay, min(case["e"], rows), kind, net.dtype)
        gain = guidance.gains(net.times, case["beta"], dtype=net.dtype)
    locked = (np.arange(horizon) < delay)[:, None]
    whole = np.broadcast_to(weight.astype(net.dtype)[:, None], (horizon, dim))
    gain = gain.astype(net.dtype)
    return [
        _Sample(x.astype(net.dtype), y.astype(net.dtype), whole, gain, locked)
        for x, y in zip(noise, target, strict=True)
    ]


Arranged = Callable[[_TanhFlow, GuidanceBuffers, Array, Array, Array], dict[str, Array]]
"""(net, buffers, x before each step and at the end, u and u' of each step) -> the arrays of a batch, by name."""


def _in_every_mode(
    net: _TanhFlow, guidance: Guidance, cases: Sequence[Sequence[_Sample]], arrays: Arranged
) -> dict[str, list[Arrays]]:
    """Mode -> arrays of each case. Mixed: all cases are one batch, each row with its own d, Y, W and gains."""
    everything = [sample for case in cases for sample in case]
    mixed = _batch(net, guidance, everything, arrays) if everything else []
    first, split = 0, []
    for case in cases:
        split.append(_joined(mixed[first : first + len(case)]))
        first += len(case)
    return {
        "recorded": [_joined(_batch(net, guidance, case, arrays)) for case in cases],
        "alone": [_joined([row for one in case for row in _batch(net, guidance, [one], arrays)]) for case in cases],
        "mixed": split,
    }


def _batch(net: _TanhFlow, guidance: Guidance, samples: Sequence[_Sample], arrays: Arranged) -> list[Arrays]:
    """The arrays of each sample."""
    buffers = GuidanceBuffers(
        target=np.stack([one.target for one in samples]),
        weight=np.stack([one.weight for one in samples]),
        gain=np.stack([one.gain for one in samples], axis=1)[:, :, None, None],
        locked=np.stack([one.locked for one in samples]),
    )
    placed, noise = buffers.to(net.put), net.put(np.stack([one.noise for one in samples]))
    xs: list[Any] = []
    guided: list[Array] = []

    def keep(step: int, x: Any, velocity: Any) -> None:
        xs.append(x)
        guided.append(_host(velocity))

    xs.append(euler_flow(net, None, noise, net.times, guidance, placed, on_step=keep))
    clean = placed.locked if guidance.locks else None
    plain = [_host(net.velocity(None, x, step, clean)) for step, x in enumerate(xs[:-1])]
    made = arrays(net, buffers, np.stack([_host(x) for x in xs]), np.stack(plain), np.stack(guided))
    return [{name: np.moveaxis(array, _axis(name), 0)[i] for name, array in made.items()} for i in range(len(samples))]


def _axis(name: str) -> int:
    """Of the batch: behind the steps, where an array has them."""
    return 0 if name.endswith("chunk") or name in _PER_CASE else 1


_PER_CASE = ("weights", "guidance_weight", "vjp_weights", "vjp_guidance_weight")


def _joined(rows: Sequence[Arrays]) -> Arrays:
    """The arrays of some samples, as they are recorded together; what a case has once is the first one's."""
    return {
        name: rows[0][name] if name in _PER_CASE else np.stack([row[name] for row in rows], axis=_axis(name))
        for name in rows[0]
    }


def _looked_ahead(net: _TanhFlow, buffers: GuidanceBuffers, xs: Array, plain: Array, guided: Array) -> dict[str, Array]:
    """What both guided parts record, the correction as it was applied."""
    t = np.asarray(net.times, net.dtype)[:, None, None, None]
    ahead = xs[:-1] - t * plain
    with np.errstate(divide="ignore"):
        correction = (plain - guided) / buffers.gain
    return {
        "x_steps": xs[:-1],
        "ahead": ahead,
        "error": buffers.weight * (buffers.target - ahead),
        "correction": correction,
        "guidance_weight": buffers.gain[:, :, 0, 0].T,
        "weights": buffers.weight[:, :, 0],
        "chunk": xs[-1],
    }


def _identity_arrays(
    net: _TanhFlow, buffers: GuidanceBuffers, xs: Array, plain: Array, guided: Array
) -> dict[str, Array]:
    made = _looked_ahead(net, buffers, xs, plain, guided)
    made["x0_hat"] = made.pop("ahead")
    return {**made, "u_steps": plain, "u_guided": guided}


def _vjp_arrays(net: _TanhFlow, buffers: GuidanceBuffers, xs: Array, plain: Array, guided: Array) -> dict[str, Array]:
    """In the paper's direction: v = -u."""
    made = _looked_ahead(net, buffers, xs, plain, guided)
    made["x1_hat"] = made.pop("ahead")
    made |= {"v_steps": -plain, "v_guided": -guided}
    return {f"vjp_{name}": array for name, array in made.items() if name != "error"}


def _prefix_arrays(
    net: _TanhFlow, buffers: GuidanceBuffers, xs: Array, plain: Array, guided: Array
) -> dict[str, Array]:
    locked = net.put(buffers.locked)
    times = np.stack([_host(net.token_times(net.put(x), step, locked)) for step, x in enumerate(xs[:-1])])
    return {"x_steps": xs[:-1], "u_steps": plain, "token_times": times, "chunk": xs[-1]}


def _compare(case: Mapping[str, Any], made: Mapping[str, Arrays], suffix: str, recorded: Arrays) -> list[Comparison]:
    """What is recorded of one case, and its chunk in any event."""
    found: list[Comparison] = []
    for array in made["recorded"]:
        if suffix and array in _PER_CASE:  # once is enough
            continue
        name = f"{case['name']}/{array}"
        guided = case.get("prev_len", 1) > 0 or not array.startswith("vjp_")
        gate = _gate(array, suffix)
        if name not in recorded:
            if array.endswith("chunk") and guided:
                nan = float("nan")
                found += [Comparison(name + suffix, None, mode, (), nan, nan, gate, "not recorded") for mode in MODES]
            continue
        theirs = recorded[name]
        for mode in MODES:
            ours = made[mode][array]
            if ours.shape != theirs.shape:
                fault = f"recorded as {list(theirs.shape)}, ours is {list(ours.shape)}"
                errors = (float("nan"), float("nan"))
            else:
                fault, errors = "", errors_of(ours, theirs)
            found.append(Comparison(name + suffix, None, mode, theirs.shape, *errors, gate, fault))
    return found


def _gate(array: str, suffix: str) -> float:
    if array.startswith("vjp_") and not suffix:
        return _EXACT
    return _GATES.get(array, _GATE)
