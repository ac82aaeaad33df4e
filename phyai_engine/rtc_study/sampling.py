"""How each method draws its next chunk: the engine's own guidance (phyai_engine/rtc.py) on the study's net."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phyai_engine.rtc import PLAIN, Guidance, GuidanceBuffers, Pull, prefix_weights
from phyai_engine.rtc_study.net import ChunkNet
from phyai_engine.rtc_study.task import HORIZON
from phyai_engine.solvers import euler_flow, flow_times
from phyai_engine.types import F32, F64

STEPS = 5  # N, and beta = N
CANDIDATES = 16  # of bid


class Method(str, enum.Enum):
    """What makes one chunk follow another. Up to ``bid`` the chunks themselves are drawn freely."""

    SYNC = "sync"
    NAIVE_ASYNC = "naive_async"
    TEMPORAL_ENSEMBLE = "temporal_ensemble"
    BID = "bid"
    IDENTITY = "identity"
    GAUSS = "gauss"
    VJP = "vjp"
    VJP_EARLY = "vjp_early"
    TRAINED = "trained"


GUIDANCE = {
    Method.IDENTITY: Guidance.parse("identity"),
    Method.GAUSS: Guidance.parse("gauss"),
    Method.VJP: Guidance.parse("vjp"),
    Method.VJP_EARLY: Guidance.parse("vjp_early:2"),
    Method.TRAINED: Guidance.parse("trained", max_delay=HORIZON // 2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Committed:
    """What plays on while the chunk is computed.

    :param rows: [B, H - s, 2] m/s, from the observation's instant on. :param delay_steps: d, of them are certain to
        play before the handoff.
    """

    rows: F64
    delay_steps: int

    @property
    def weights(self) -> F32:
        """W [H]: 1 over the delay, falling to 0 at the last row that has a target."""
        made: F32 = prefix_weights(HORIZON, self.delay_steps, self.rows.shape[1])
        return made

    @property
    def target(self) -> F64:
        """Y [B, H, 2] m/s; the last row held where there is none."""
        missing = HORIZON - self.rows.shape[1]
        return np.concatenate((self.rows, np.repeat(self.rows[:, -1:], missing, axis=1)), axis=1)


class Head:
    """The net as the action head that the engine's guidance asks for; the observation stands for the prefix."""

    def __init__(self, net: ChunkNet) -> None:
        self.net = net
        self.times = flow_times(STEPS, "direct")

    def velocity(self, prefix: Tensor, x: Tensor, step: int, clean: Tensor | None = None) -> Tensor:
        """u. :param prefix: [B, 2] normalised position. :param x: [B, H, 2]. :param clean: [1, H, 1] bool."""
        times = x.new_full(x.shape[:2], self.times[step])
        if clean is not None:
            times = times.masked_fill(clean[..., 0], 0.0)
        with torch.no_grad():
            u: Tensor = self.net(x, times, prefix)
        return u

    def velocity_vjp(self, prefix: Tensor, x: Tensor, step: int) -> tuple[Tensor, Pull]:
        """u, and cotangent times du/dx."""
        leaf = x.detach().requires_grad_(True)
        with torch.enable_grad():
            u = self.net(leaf, x.new_full(x.shape[:2], self.times[step]), prefix)

        def pull(cotangent: Tensor) -> Tensor:
            return torch.autograd.grad(u, leaf, cotangent)[0]

        return u.detach(), pull


def sample(
    head: Head, position: F64, noise: F32, guidance: Guidance = PLAIN, committed: Committed | None = None
) -> F64:
    """Draw one chunk per row.

    :param position: [B, 2] m. :param noise: [B, H, 2] standard normal. :param committed: None: nothing is continued.
    :return: [B, H, 2] m/s
    """
    prefix = head.net.normal("observation", position)
    buffers = None if committed is None else _buffers(head, guidance, committed)
    return head.net.commands(euler_flow(head, prefix, torch.from_numpy(noise), head.times, guidance, buffers))


def _buffers(head: Head, guidance: Guidance, committed: Committed) -> GuidanceBuffers:
    """Weights, gains and d are the same for all rows of a cell: one row of them serves the batch."""
    return GuidanceBuffers(
        target=head.net.normal("command", committed.target),
        weight=torch.from_numpy(committed.weights)[None, :, None],
        gain=torch.from_numpy(guidance.gains(head.times, beta=float(STEPS)))[:, None, None, None],
        locked=(torch.arange(HORIZON) < committed.delay_steps)[None, :, None],
    )


def draw(head: Head, method: Method, position: F64, noise: F32, committed: Committed | None) -> F64:
    """The next chunk of a method. :param noise: [CANDIDATES or 1, B, H, 2]. :return: [B, H, 2] m/s"""
    if method is Method.BID and committed is not None:
        return _coherent(head, position, noise, committed)
    return sample(head, position, noise[0], GUIDANCE.get(method, PLAIN), committed if method in GUIDANCE else None)


def _coherent(head: Head, position: F64, noise: F32, committed: Committed) -> F64:
    """Of several free draws the one nearest to the committed rows: sum over i of W_i |c_i - Y_i|.

    Bidirectional decoding (arXiv 2408.17355) without its contrast to a weaker policy.
    """
    count, rows = noise.shape[:2]
    drawn = sample(head, np.tile(position, (count, 1)), noise.reshape(-1, *noise.shape[2:])).reshape(noise.shape)
    apart = np.linalg.norm(drawn - committed.target, axis=3) @ committed.weights  # [CANDIDATES, B]
    nearest: F64 = drawn[apart.argmin(axis=0), np.arange(rows)]
    return nearest
