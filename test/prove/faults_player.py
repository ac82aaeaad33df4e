"""Faults between a policy node and a player node that plays its chunks. A cycle starts and ends in motion."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
from cases import Case, aborted
from lifecycle_msgs.msg import Transition
from phyai_policy.msg import ActionChunk
from rclpy.publisher import Publisher
from stand import Stand, end_hard

from phyai_engine.types import AbortCause, CommandKind, Refusal
from phyai_ros.outputs import ACKNOWLEDGE_S

AT_ONCE_MS = 30.0
SILENCE_S = 0.5
MODEL = {"latency_ms": 20.0, "horizon": 50}
Change = Callable[[ActionChunk], None]


def policy_dies(stand: Stand) -> float:
    """SIGKILL of the policy node: its player hears nothing more and stops by itself."""
    stand.spin(random.uniform(0.0, 0.1))
    began = end_hard(stand.policy.pid)
    took = stand.safe(began, hold=False)
    stand.policy.wait()
    stand.until(lambda: stand.acknowledged[-1].abort_cause == AbortCause.POLICY_LOST, what="ABORT_POLICY_LOST")
    stand.launch_policy()
    stand.change(Transition.TRANSITION_CONFIGURE)
    stand.until(lambda: stand.status.abort_cause == AbortCause.POLICY_LOST, what="the new policy node latched")
    stand.rearm()
    stand.change(Transition.TRANSITION_ACTIVATE)
    stand.moving()
    return took


def player_dies(stand: Stand, *, told: dict[str, str]) -> float:
    """SIGKILL of what commands the robot: nobody here can stop it, its own timeout does; ms to the policy's latch."""
    began = end_hard(stand.player.pid)
    stand.player.wait()
    stand.until(lambda: stand.status.abort_cause, what="a latch")
    took = (time.monotonic() - began) * 1e3
    cause = AbortCause(stand.status.abort_cause)
    # Fast DDS may block a publisher while it finds out that a reader on this host is dead: then the sentry is first.
    assert cause in (AbortCause.PLAYER_LOST, AbortCause.TICK_OVERRUN), cause
    told[cause.name] = str(int(told.get(cause.name, 0)) + 1)
    stand.start_player()
    # With the shared-memory profile a node does not reach the new player before DDS has given up the dead one (lease).
    count = stand.node.count_publishers
    stand.until(lambda: count("policy_node/chunk_status") == 1, 40.0, "the end of the dead player's lease")
    stand.resume()
    return took


def aborted_through(stand: Stand) -> float:
    """~/abort of the policy node is a stop of the player."""
    stand.spin(random.uniform(0.0, 0.1))
    took = aborted(stand)
    stand.resume()
    return took


def wrong_chunk(change: Change, codes: tuple[Refusal, ...], back: int, stand: Stand, *, epoch: bool = False) -> None:
    """A chunk that the player must refuse whole, just after a good one; the motion goes on row after row.

    :param back: which of the newest chunks is sent. :param epoch: abort and resume before it is sent.
    """
    count = len(stand.chunks)
    stand.until(lambda: len(stand.chunks) >= count + 2, what="two chunks")
    message = copy.deepcopy(stand.chunks[-back])
    if epoch:
        aborted(stand)
        stand.resume()
        stand.until(lambda: stand.chunks and stand.chunks[-1].epoch > message.epoch, what="a chunk of the new epoch")
    change(message)
    message.header.stamp = stand.node.get_clock().now().to_msg()
    since, told = time.monotonic(), len(stand.acknowledged)

    def refused() -> list[int]:
        return [a.refusal for a in stand.acknowledged[told:] if not a.accepted]

    for _ in range(4):  # the player reads the newest chunk: one of the policy node may take this one's place unread
        publisher(stand).publish(message)
        end = time.monotonic() + 0.5
        while not refused() and time.monotonic() < end:
            stand.spin(0.02)
        if refused():
            break
    else:
        raise AssertionError("the player never refused it")
    assert refused()[0] in codes, refused()
    stand.spin(0.4)
    assert not stand.kinds(CommandKind.STOP, since), f"it stopped the robot: {stand.status.abort_text}"
    rows = [(m.chunk_id, m.step) for at, m in stand.heard if at > since and m.kind == CommandKind.ACTION]
    assert len(rows) > 10 and all(b[1] == a[1] + 1 for a, b in pairwise(rows) if a[0] == b[0]), (
        rows,
        [m.kind for at, m in stand.heard if at > since],
    )
    del stand.heard[:-400], stand.chunks[:-5], stand.acknowledged[:-50], stand.timings[:-50], stand.statuses[:-50]


def publisher(stand: Stand) -> Publisher:
    """Of chunks, beside the policy node's."""
    made = [p for p in stand.node.publishers if p.topic_name.endswith("policy_node/chunk")]
    if made:
        return made[0]
    made = [stand.node.create_publisher(ActionChunk, "policy_node/chunk", 1)]
    stand.until(lambda: made[0].get_subscription_count() >= 2, what="the player's subscription")
    return made[0]


def with_value(value: float, message: ActionChunk) -> None:
    """The next chunk, one value of its middle spoiled."""
    message.chunk_id += 1
    actions = np.array(message.actions)
    actions[len(actions) // 2] = value
    message.actions = actions.tolist()


def cases() -> Iterator[Case]:
    """Every fault between the two."""
    node = {"execution_horizon": 10, "player_timeout_s": SILENCE_S}
    told: dict[str, str] = {}
    stand = partial(Stand, MODEL, node, player={"status_timeout_s": SILENCE_S})
    yield Case("~/abort, a player node plays", "ABORT_SERVICE", AT_ONCE_MS, "~/rearm", run=aborted_through, stand=stand)
    yield Case(
        f"policy node: SIGKILL (status_timeout_s {SILENCE_S})",
        "ABORT_POLICY_LOST (player)",
        SILENCE_S * 1e3 + 50.0,
        "start it, configure, ~/rearm, activate",
        run=policy_dies,
        stand=stand,
    )
    yield Case(
        f"player node: SIGKILL, until the latch (player_timeout_s {SILENCE_S})",
        "ABORT_PLAYER_LOST or ABORT_TICK_OVERRUN",
        (ACKNOWLEDGE_S + SILENCE_S) * 1e3 + 250.0,
        "start it, ~/rearm once DDS has given up the dead one",
        told,
        run=partial(player_dies, told=told),
        stand=stand,
    )
    same: Change = lambda message: None  # noqa: E731
    late = (Refusal.WRONG_EPOCH, Refusal.STALE, Refusal.MALFORMED, Refusal.EXHAUSTED)
    faults: dict[str, tuple[Change, tuple[Refusal, ...], int]] = {
        "chunk twice": (same, late, 1),
        "chunks in another order": (same, late, 2),
        "NaN mid-chunk at the player": (partial(with_value, float("nan")), (Refusal.NOT_FINITE,), 1),
        "chunk out of the envelope": (partial(with_value, 3.5), (Refusal.OUT_OF_ENVELOPE,), 1),
    }
    for name, (change, codes, back) in faults.items():
        code = f"REFUSAL_{codes[0].name}: goes on" if len(codes) == 1 else "ChunkStatus refused: goes on"
        run = partial(wrong_chunk, change, codes, back)
        yield Case(name, code, None, "none needed", run=run, stand=stand)
    run = partial(wrong_chunk, same, (Refusal.WRONG_EPOCH,), 1, epoch=True)
    yield Case("chunk of an ended epoch", "REFUSAL_WRONG_EPOCH: goes on", None, "none needed", run=run, stand=stand)
