"""Planted defects of the player elsewhere and of the output that feeds it; see mutations.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from link import LINK
from mutations import Mutation, after, instead, planted

from phyai_engine.control.player import Player
from phyai_ros.outputs import ChunksOutput
from phyai_ros.player_node import PlayerNode


def deaf(real: Any, player: Player, epoch: int, playing: bool, *, rearmed: bool) -> None:
    """Only news that the robot may move is obeyed."""
    if playing:
        real(player, epoch, playing, rearmed=rearmed)


def lonely(real: Any, node: PlayerNode) -> None:
    """Nobody watches whether the policy node is still heard."""


def credulous(real: Any, player: Player, epoch: int, playing: bool, *, rearmed: bool) -> None:
    """Any news that the robot may move clears the player's own latch."""
    real(player, epoch, playing, rearmed=True)


def old_epoch(real: Any, node: PlayerNode, message: Any, chunk: Any) -> None:
    """A chunk is taken for one of the present epoch."""
    epoch = node._player.safety.epoch
    message = type(message)(**{name[1:]: getattr(message, name) for name in message.__slots__ if name[0] == "_"})
    message.epoch = epoch
    real(node, message, replace(chunk, epoch=epoch))


def again(real: Any, node: PlayerNode, message: Any, chunk: Any) -> None:
    """A chunk that was played already is taken as new."""
    player = node._player
    player.handoff = replace(player.handoff, last_chunk_id=0)
    real(node, message, chunk)


def base(consumed: int | None, *_: Any) -> int | None:
    """The player's count is taken for one less than it is."""
    return None if consumed is None else consumed - 1


TWO = replace(LINK, calls=3)
LINK_MUTATIONS: dict[str, Mutation] = {
    "deaf": planted("stops are not obeyed", "I1", instead(Player, "follow", deaf), LINK),
    "lonely": planted("a silent policy node is not noticed", "I10", instead(PlayerNode, "_check_policy", lonely), LINK),
    "credulous": planted("the player's latch leaves by itself", "I7", instead(Player, "follow", credulous), TWO),
    "old_epoch": planted("the chunk's epoch is not checked", "I1 I5", instead(PlayerNode, "_take", old_epoch), TWO),
    "again": planted("duplicates are accepted", "I6 I5", instead(PlayerNode, "_take", again), LINK),
    "base": planted("the count is off by one", "I5", after(ChunksOutput, "consumed", base), LINK),
}
