"""EngineClient: the one way to an engine. Nothing here imports torch, except an engine in a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import ConfigError
from phyai_engine.serve.compute import Load
from phyai_engine.serve.crash import CrashReport
from phyai_engine.serve.in_flight import Answered, Event, Failed, Lost
from phyai_engine.serve.link import Link
from phyai_engine.serve.local_link import LocalLink
from phyai_engine.serve.protocol import EngineHello
from phyai_engine.serve.remote_link import RemoteEngine, RemoteLink
from phyai_engine.types import Request

__all__ = ["Answered", "CrashReport", "EngineClient", "EngineHello", "Event", "Failed", "Lost", "Placement"]

Placement = Literal["thread", "process", "remote"]


class EngineClient:
    """One engine, from start to stop; a restart is a new client.

    One I/O thread owns the socket and the child. Everything but ``start`` and ``stop`` returns at once, from
    any thread.

    :param model: for an engine of our own; None with ``remote``, whose server has loaded its models.
    :param placement: ``process`` (a spawned child), ``thread`` (this process; a model that holds the
        interpreter lock then holds the node, and one that hangs cannot be ended) or ``remote`` (a server).
    :param on_event: called after events were queued, in the I/O thread (after the engine's end in the thread
        that submits); it must be cheap and only signal.
    :param threads: torch threads of an engine of our own, 0 = its default.
    :param heartbeat_timeout_s: silence after which a ready engine is lost; a model that holds the child's
        interpreter lock that long is lost as well, since it can be neither cancelled nor watched. A remote engine
        that is lost comes as Lost too, and the client goes on trying: ``alive`` says when it is back.
    :param warm_up_count: inferences at real shapes during the start of an engine of our own.
    :param load: replaces ``load_policy``, in the thread placement only.
    :param remote: the server, for ``remote`` only.
    """

    def __init__(
        self,
        robot: RobotConfig,
        model: ModelConfig | None,
        placement: Placement,
        *,
        on_event: Callable[[], None],
        start_timeout_s: float = 120.0,
        threads: int = 1,
        heartbeat_timeout_s: float = 1.0,
        warm_up_count: int = 3,
        load: Load | None = None,
        remote: RemoteEngine | None = None,
    ) -> None:
        if placement not in ("thread", "process", "remote"):
            raise ConfigError("no such engine placement", got=placement, wanted="thread, process or remote")
        if load is not None and placement != "thread":
            raise ConfigError("a load function cannot travel to another process", got=placement, wanted="thread")
        if (remote is None) == (placement == "remote"):
            raise ConfigError("a server belongs to engine: remote, and to no other", got=placement)
        common: dict[str, Any] = {
            "on_event": on_event,
            "start_timeout_s": start_timeout_s,
            "heartbeat_timeout_s": heartbeat_timeout_s,
        }
        self._link: Link
        if remote is not None:
            self._link = RemoteLink(robot, remote, **common)
        elif model is None:
            raise ConfigError("an engine of our own needs a model", got=placement)
        else:
            self._link = LocalLink(
                robot,
                model,
                thread=placement == "thread",
                threads=threads,
                warm_up_count=warm_up_count,
                load=load,
                **common,
            )
        self._heartbeat_timeout_s = heartbeat_timeout_s

    def start(
        self, progress: Callable[[str], None] | None = None, *, give_up: Callable[[], bool] = lambda: False
    ) -> EngineHello:
        """Start the engine, or connect to it, and wait until it has warmed up.

        :param progress: called in this thread with ``starting``, ``loading``, ``warming`` as they begin.
        :param give_up: asked several times a second; True ends the start (the process was told to end).
        :raises EngineRefusedError: the engine refused the configuration or could not load the model.
        :raises EngineDiedError: it ended meanwhile; the message has the cause and its last lines.
        :raises EngineTimeoutError: not ready within ``start_timeout_s``.
        After any of them everything is released.
        """
        self._link.begin()
        try:
            return self._link.await_ready(progress, give_up)
        except BaseException:  # also a KeyboardInterrupt, or a progress callback that raises
            self.stop()
            raise

    def submit(self, request: Request) -> None:
        """Have a request answered; one that still waits for the engine is replaced."""
        self._link.requests.submit(request)
        self._link.nudge()

    def cancel(self, epoch: int) -> None:
        """Cancel every request whose epoch is at most ``epoch``: none of them comes as Answered any more."""
        self._link.requests.cancel(epoch)
        self._link.nudge()

    def poll(self) -> list[Event]:
        """The events since the last poll, oldest first."""
        return self._link.requests.poll()

    @property
    def alive(self) -> bool:
        """True while the engine is ready and its heartbeat fresh."""
        return self._link.ready and self._link.heartbeat_age_s <= self._heartbeat_timeout_s

    def last_heartbeat_age_s(self) -> float:
        """Time since the last sign of life; infinite before the first."""
        return self._link.heartbeat_age_s

    @property
    def pid(self) -> int | None:
        """Process the engine runs in; None before ``start``, and of a server."""
        return self._link.pid

    @property
    def crash(self) -> CrashReport | None:
        """How an engine of our own was lost; None as long as it was not. Its last lines may grow until it was ended."""
        return self._link.crash

    @property
    def counters(self) -> dict[str, int]:
        """How requests ended and what was dropped, by name."""
        return self._link.counters

    @property
    def connection(self) -> str:
        """How the connection to a server stands, for people; "" for an engine of our own."""
        return self._link.words

    def stop(self, timeout_s: float = 2.0, *, ask: bool = True) -> bool:
        """End an engine of our own: cancel, ask, and after half of ``timeout_s`` SIGKILL. Leave a server. Idempotent.

        :param ask: False kills at once.
        :returns: True when nothing of it is left; False for a thread placement whose model hangs, or a child
            that the kernel could not end within the bound.
        """
        return self._link.end(timeout_s, ask=ask)
