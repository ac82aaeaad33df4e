"""A new engine in place of one that died, hangs or leaks: on request only, every wait bounded (design.md 8)."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from phyai_engine.errors import EngineError, EngineTimeoutError
from phyai_engine.serve.client import EngineClient, EngineHello

_END_S = 2.0
_ASK_S = 0.1


def restart(
    old: EngineClient,
    make: Callable[[], EngineClient],
    *,
    memory_bytes: int,
    timeout_s: float,
    progress: Callable[[str], None] | None = None,
    give_up: Callable[[], bool] = lambda: False,
    available_bytes: Callable[[], int | None] | None = None,
) -> tuple[EngineClient, EngineHello]:
    """Kill ``old``, whatever state it is in, wait until it and its memory are gone, start another.

    :param make: a client that was not started.
    :param memory_bytes: what the new engine needs of this host; where the device shares the host's memory, both.
        Memory of a device of its own is not asked for: that would need torch, which the node's process does not
        import. An engine that finds too little there fails as it loads.
    :param timeout_s: bound of the wait for memory. The start has the client's own.
    :param give_up: asked several times a second; True ends the restart.
    :param available_bytes: free memory of this host, None where unknown; asked of the kernel unless given.
    :raises EngineError: the old one did not end, memory is short, or the new one did not start; there is none then,
        and the same call may be made again.
    """
    if not old.stop(_END_S, ask=False):
        raise EngineTimeoutError(
            "the old engine did not end",
            got=f"pid {old.pid} still there",
            wanted=f"gone within {_END_S} s",
            do="A thread cannot be ended, nor a process inside a driver call: restart the node.",
        )
    _await_memory(memory_bytes, timeout_s, give_up, available_bytes or host_available_bytes)
    client = make()
    return client, client.start(progress, give_up=give_up)


def _await_memory(
    memory_bytes: int, timeout_s: float, give_up: Callable[[], bool], available_bytes: Callable[[], int | None]
) -> None:
    until_s = time.monotonic() + timeout_s
    while (free := available_bytes()) is not None and free < memory_bytes:
        if give_up():
            raise EngineError("the restart of the engine was interrupted", got="still waiting for memory")
        if time.monotonic() >= until_s:
            raise EngineError(
                "not enough free memory for a new engine",
                got=f"{free / 2**20:.0f} MiB",
                wanted=f"{memory_bytes / 2**20:.0f} MiB, what the old one used, within {timeout_s} s",
                where="this host",
                do="End what uses it, and call ~/restart_engine again.",
            )
        time.sleep(_ASK_S)


def host_available_bytes() -> int | None:
    """What Linux can give without swapping; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
