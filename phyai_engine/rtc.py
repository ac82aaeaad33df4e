"""Real-time chunking in the solver: how a new chunk is made to continue the committed actions.

t = 1 is noise and t = 0 data, u = noise - action (the checkpoint's direction); tau = 1 - t is the paper's. H horizon,
A action_dim, B batch, N steps. Arrays are numpy or torch, of one floating dtype; torch is not imported.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from phyai_engine.types import Row

WeightKind = Literal["exp", "linear", "ones", "zeros"]
Pull = Callable[[Any], Any]
"""e [B,H,A] -> J^T e [B,H,A], where J is du/dx at the x that the velocity was asked for."""


class FlowModel(Protocol):
    """What guidance needs of an action head; each :class:`phyai_engine.models.Model` is one."""

    def velocity(self, prefix: Any, x: Any, step: int, clean: Any = None) -> Any:
        """u at the step's flow time.

        :param prefix: opaque. :param x: [B,H,A]. :param clean: [B,H,1] bool, tokens that are data already: their flow
            time is 0. None = none of them, and what a model needs that was not trained for it.
        """

    def velocity_vjp(self, prefix: Any, x: Any, step: int) -> tuple[Any, Pull]:
        """u, and the product of a cotangent with du/dx. The pull is called at most once, before the next velocity."""


class GuidanceMode(str, enum.Enum):
    """What pulls the new chunk towards the committed actions.

    ``vjp`` is the paper's; ``vjp_early:K`` is ``vjp`` in the first K steps and ``identity`` after them. ``identity``
    takes the denoiser's Jacobian as the identity, ``gauss`` as that of a unit Gaussian prior. ``prefix_lock``
    overwrites the first d actions, on an ordinary checkpoint (experimental: their flow time contradicts their content).
    ``trained`` does so with flow time 0, for checkpoints that were trained with it.
    """

    NONE = "none"
    IDENTITY = "identity"
    GAUSS = "gauss"
    VJP = "vjp"
    VJP_EARLY = "vjp_early"
    PREFIX_LOCK = "prefix_lock"
    TRAINED = "trained"


_LOCKING = (GuidanceMode.PREFIX_LOCK, GuidanceMode.TRAINED)


@dataclass(frozen=True, slots=True)
class Guidance:
    """The mode of one model: the same for all rows, each of which has its own Y, W, gains and d.

    :param early_steps: K of ``vjp_early``.
    :param max_delay: d_max of ``trained``, the longest prefix seen in training; 0 = no limit (every other mode).
    """

    mode: GuidanceMode
    early_steps: int = 0
    max_delay: int = 0

    @classmethod
    def parse(cls, text: str, max_delay: int = 0) -> Guidance:
        """From a model file's words.

        :param text: a mode; ``vjp_early`` with its number of steps, ``vjp_early:4``. :param max_delay: that the
            checkpoint declares, 0 if it declares none.
        :raises ValueError: unknown mode, a missing or superfluous number, or ``trained`` without a declared d_max.
        """
        name, colon, count = text.partition(":")
        early = GuidanceMode.VJP_EARLY.value
        known = [mode.value for mode in GuidanceMode]
        counted = count.isascii() and count.isdecimal() and int(count) >= 1
        if name not in known or bool(colon) != (name == early) or bool(colon) != counted:
            wanted = ", ".join(f"{each}:K with K >= 1" if each == early else each for each in known)
            raise ValueError(f"guidance is {text!r}, wanted one of {wanted}")
        mode = GuidanceMode(name)
        if mode is not GuidanceMode.TRAINED:
            return cls(mode, int(count or 0))
        if max_delay < 1:
            raise ValueError(
                "guidance is 'trained' and rtc_max_delay 0, wanted the longest delay seen in training, >= 1"
            )
        return cls(mode, 0, max_delay)

    @property
    def weighs(self) -> bool:
        """It adds a weighted correction to the velocity: W and the gains are read."""
        return self.mode is not GuidanceMode.NONE and not self.locks

    @property
    def locks(self) -> bool:
        """It overwrites the first d actions: d is read, W and the gains are not."""
        return self.mode in _LOCKING

    def differentiates(self, step: int) -> bool:
        """This step needs the gradient of the action head."""
        early = self.mode is GuidanceMode.VJP_EARLY and step < self.early_steps
        return self.mode is GuidanceMode.VJP or early

    def gains(
        self, times: Sequence[float], beta: float, sigma: float = 1.0, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """[N]: k of every step, as the mode takes it; 0 where it adds nothing.

        ``gauss``: the Jacobian is tau / (tau^2 + t^2), so that k times it is 1/t whatever beta and sigma are; the last
        Euler step then lands on Y where W = 1.
        """
        if self.mode is GuidanceMode.GAUSS:
            return (1.0 / np.asarray(times, dtype=np.float64)).astype(dtype)
        return gain_table(times, beta, sigma, dtype) if self.weighs else np.zeros(len(times), dtype)

    def reads(self, row: Row) -> NDArray[np.bool_]:
        """[H,A]: elements of the row's target that have an influence."""
        if self.locks:
            locked = np.arange(len(row.target)) < row.delay_steps
            return np.broadcast_to(locked[:, None], row.target.shape)
        return row.weight != 0 if self.weighs and row.gain.any() else np.zeros(row.weight.shape, np.bool_)


PLAIN = Guidance(GuidanceMode.NONE)
IDENTITY = Guidance(GuidanceMode.IDENTITY)


@dataclass(frozen=True, slots=True, eq=False)
class GuidanceBuffers:
    """What the guided steps of one batch read; on the device, and never part of a captured program.

    :param target, weight: Y and W, [B,H,A]; Y is 0 where nothing reads it.
    :param gain: k, [N,B,1,1]. :param locked: [B,H,1] bool, the first d actions of each row.
    """

    target: Any
    weight: Any
    gain: Any
    locked: Any

    @classmethod
    def of(cls, guidance: Guidance, rows: Sequence[Row]) -> GuidanceBuffers:
        """On the host. What stands in a target that nobody reads may be anything; 0 * NaN would still be NaN."""
        horizon = len(rows[0].target)
        delays = np.array([row.delay_steps for row in rows])
        return cls(
            target=np.stack([np.where(guidance.reads(row), row.target, row.target.dtype.type(0)) for row in rows]),
            weight=np.stack([row.weight for row in rows]),
            gain=np.stack([row.gain for row in rows], axis=1)[:, :, None, None],
            locked=(np.arange(horizon) < delays[:, None])[:, :, None],
        )

    def to(self, move: Callable[[NDArray[Any]], Any]) -> GuidanceBuffers:
        """Every array moved, as by ``Model.to_device``."""
        return GuidanceBuffers(move(self.target), move(self.weight), move(self.gain), move(self.locked))


def prefix_weights(
    horizon: int, start: int, end: int, kind: WeightKind = "exp", dtype: DTypeLike = np.float32
) -> NDArray[Any]:
    """How firmly each step of the new chunk follows the committed actions, W.

    :param horizon: H. :param start: d, steps that are executed before the handoff: weight 1.
    :param end: H - s, steps that have a target: weight 0 from here on; a later ``start`` is moved down to it.
    :param kind: decay over [start, end): ``linear`` c, ``exp`` c(e^c - 1)/(e - 1), ``ones``, ``zeros``.
    :return: [H]
    """
    if start < 0 or not 0 <= end <= horizon:
        raise ValueError(f"start={start}, end={end}, horizon={horizon}: wanted 0 <= start and 0 <= end <= horizon")
    start = min(start, end)
    index = np.arange(horizon)
    c = np.clip((end - index) / (end - start + 1), 0.0, 1.0)
    shapes: dict[str, NDArray[np.float64]] = {
        "exp": c * np.expm1(c) / (math.e - 1.0),
        "linear": c,
        "ones": (index < end).astype(np.float64),
        "zeros": (index < start).astype(np.float64),
    }
    if kind not in shapes:
        raise ValueError(f"kind is {kind!r}, wanted one of {', '.join(shapes)}")
    return shapes[kind].astype(dtype)


def gain_table(times: Sequence[float], beta: float, sigma: float = 1.0, dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Guidance gain of every step: k = min(beta, (s^2 tau^2 + (1-tau)^2) / (s^2 tau (1-tau))).

    :param times: flow times t. :param beta: upper bound, reached at tau = 0 and tau = 1 where k is infinite.
    :param sigma: prior standard deviation s of the actions; 1 is the paper's.
    :return: [N]
    """
    tau = 1.0 - np.asarray(times, dtype=np.float64)
    over = sigma**2 * tau**2 + (1.0 - tau) ** 2
    under = sigma**2 * tau * (1.0 - tau)
    inside = under > 0.0  # explicit: the ends would divide by 0
    gain = np.full(tau.shape, float(beta))
    gain[inside] = np.minimum(beta, over[inside] / under[inside])
    return gain.astype(dtype)


def guide_identity(x: Any, u: Any, t: float, *, target: Any, weight: Any, gain: Any) -> Any:
    """Velocity pulled towards the target; the denoiser's Jacobian is taken as the identity: no backward pass.

    u' = u - k W (Y - x0), x0 = x - t u. Where k W = 0 and all values are finite the result equals u exactly.
    With the gains of ``gauss`` it is that mode.

    :param x, u, target, weight: [B,H,A]. :param gain: [B,1,1], k of each row.
    """
    return u - gain * (weight * (target - (x - t * u)))


def guide_vjp(x: Any, u: Any, t: float, *, pull: Pull, target: Any, weight: Any, gain: Any) -> Any:
    """Velocity pulled towards the target along the denoiser's true gradient (arXiv 2506.07339).

    u' = u - k (dx0/dx)^T e with e = W (Y - x0) held constant and x0 = x - t u, so (dx0/dx)^T e = e - t J^T e.

    :param x, u, target, weight: [B,H,A]. :param pull: J^T. :param gain: [B,1,1], k of each row.
    """
    error = weight * (target - (x - t * u))
    return u - gain * (error - t * pull(error))


def lock_prefix(x: Any, target: Any, locked: Any) -> Any:
    """x with the locked tokens taken from the target. :param x, target: [B,H,A]. :param locked: [B,H,1] bool."""
    return ~locked * x + locked * target


def guided_velocity(
    model: FlowModel,
    prefix: Any,
    x: Any,
    step: int,
    t: float,
    guidance: Guidance,
    buffers: GuidanceBuffers | None,
) -> Any:
    """u' of one step: the hook through which every flow head is guided.

    :param x: [B,H,A], its prefix locked already where the mode locks. :param t: flow time of the step.
    :param buffers: None: no row is guided, and the result equals that of buffers with W = 0 and d = 0.
    """
    if buffers is None or guidance.mode in (GuidanceMode.NONE, GuidanceMode.PREFIX_LOCK):
        return model.velocity(prefix, x, step)
    if guidance.mode is GuidanceMode.TRAINED:
        return model.velocity(prefix, x, step, buffers.locked)
    gain, target, weight = buffers.gain[step], buffers.target, buffers.weight
    if guidance.differentiates(step):
        u, pull = model.velocity_vjp(prefix, x, step)
        return guide_vjp(x, u, t, pull=pull, target=target, weight=weight, gain=gain)
    return guide_identity(x, model.velocity(prefix, x, step), t, target=target, weight=weight, gain=gain)
