"""The engine of one configuration: the client that answers now, and the way to another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from phyai_engine.config import ModelConfig, RobotConfig
from phyai_engine.errors import EngineError
from phyai_engine.serve.client import Answered, EngineClient, EngineHello, Event
from phyai_engine.serve.keys import key_name, key_pair
from phyai_engine.serve.remote_link import RemoteEngine
from phyai_engine.serve.restart import restart
from phyai_engine.timing import Window, mono_ns
from phyai_engine.types import Chunk, Request, StageTimings
from phyai_engine.weights.checkpoint import model_and_notes
from phyai_ros.diagnostics import in_ms
from phyai_ros.parameters import NodeParameters

REMOTE = "remote"
_WINDOW = 1000
_STAGES = ("serialise_ms", "network_ms", "queue_ms", "batch_ms")  # of StageTimings; inference is in the status


def model_of(params: NodeParameters) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model's file, and what had to be assumed; of a server's model only its name is known here.

    :raises ConfigError: the file is wrong.
    """
    if params.engine != REMOTE:
        return model_and_notes(params.model)
    return ModelConfig(family=REMOTE, options={"model": params.model, "endpoint": params.engine_endpoint}), ()


def client_of(
    robot: RobotConfig, model: ModelConfig, params: NodeParameters, namespace: str, on_event: Callable[[], None]
) -> EngineClient:
    """A client that was not started.

    :param namespace: of the node, which tells two robots of one kind apart.
    :raises ConfigError: a key cannot be used, or is missing.
    """
    remote = None
    if params.engine == REMOTE:
        key, server_key = (Path(p).expanduser() if p else None for p in (params.engine_key, params.engine_server_key))
        remote = RemoteEngine(
            endpoint=params.engine_endpoint,
            model=params.model,
            robot_id=params.engine_robot_id or key_name(key) or namespace.strip("/").replace("/", "."),
            keys=key_pair(key, server_key),
            jpeg_quality=params.engine_jpeg_quality,
        )
    return EngineClient(
        robot,
        None if remote is not None else model,
        params.engine,  # type: ignore[arg-type]  # its choices are checked by the table
        on_event=on_event,
        start_timeout_s=params.engine_start_timeout_s,
        heartbeat_timeout_s=params.engine_heartbeat_s,
        threads=params.engine_threads,
        warm_up_count=params.warm_up_count,
        remote=remote,
    )


class Engine:
    """What the control loop needs of a client, whichever client that is. On the executor thread only.

    :param make: a client that was not started. :param progress: told what it is doing while it starts.
    :param give_up: true when the process was told to end meanwhile.
    """

    def __init__(
        self, make: Callable[[], EngineClient], progress: Callable[[str], None], give_up: Callable[[], bool]
    ) -> None:
        self.client = make()
        self._make, self._progress, self._give_up = make, progress, give_up
        self._memory_bytes = 0
        self._hello: EngineHello | None = None
        self._stages = {name: Window(_WINDOW) for name in _STAGES}
        self.asked: Callable[[Request], object] = lambda request: None
        """Told of every request, on the executor thread, as ``answered`` is of every chunk."""
        self.answered: Callable[[Chunk], object] = lambda chunk: None

    def start(self) -> EngineHello:
        """Start the first client.

        :raises EngineError: as :meth:`EngineClient.start`.
        """
        self._hello = hello = self.client.start(self._progress, give_up=self._give_up)
        self._memory_bytes = self._used_bytes()
        return hello

    def restart(self, timeout_s: float) -> str:
        """Another engine process in place of this one, whatever state that is in. Nothing may be in flight.

        :param timeout_s: bound of each of its waits.
        :returns: what happened, in words.
        :raises EngineError: with the figures; no engine answers then.
        """
        before, began, had = self._hello, mono_ns(), self.client.pid
        self.client, hello = restart(
            self.client,
            self._make,
            memory_bytes=self._memory_bytes,
            timeout_s=timeout_s,
            progress=self._progress,
            give_up=self._give_up,
        )
        if before is not None and hello.horizon != before.horizon:  # only the model file can have changed
            self.client.stop()
            raise EngineError(
                "the new engine has another horizon",
                got=hello.horizon,
                wanted=before.horizon,
                do="The model file changed: deactivate, cleanup and configure.",
            )
        self._hello = hello
        self._memory_bytes = self._used_bytes()
        did = f"engine restarted, pid {had} -> {self.client.pid}" if had else self.client.connection
        return f"{did} after {(mono_ns() - began) * 1e-9:.1f} s: {hello.note}"

    def _used_bytes(self) -> int:
        """What a new engine will need here; a thread shares this process, and a new one brings nothing back."""
        return 0 if self.client.pid in (None, os.getpid()) else peak_bytes(self.client.pid)

    def stop(self) -> None:
        """End it; see :meth:`EngineClient.stop`."""
        self.client.stop()

    def submit(self, request: Request) -> None:
        """See :meth:`EngineClient.submit`."""
        self.client.submit(request)
        self.asked(request)

    def cancel(self, epoch: int) -> None:
        """See :meth:`EngineClient.cancel`."""
        self.client.cancel(epoch)

    def poll(self) -> Sequence[Event]:
        """See :meth:`EngineClient.poll`."""
        events = self.client.poll()
        for event in events:
            if isinstance(event, Answered):
                self._note(event.chunk.timings)
                self.answered(event.chunk)
        return events

    def _note(self, timings: StageTimings) -> None:
        for name, window in self._stages.items():
            window.add(getattr(timings, name))

    @property
    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        return {
            "heartbeat_age_ms": in_ms(self.client.last_heartbeat_age_s()),
            "engine_pid": str(self.client.pid or ""),
            "engine_crash": str(self.client.crash or ""),
            "engine_connection": self.client.connection,
            **{f"engine_{name}": _words(window) for name, window in self._stages.items()},
            **{f"engine_{name}": str(n) for name, n in self.client.counters.items()},
        }


def _words(window: Window) -> str:
    p = window.percentiles()
    return f"p50 {p.p50:.2f}, p99 {p.p99:.2f}, n {p.n}" if p.n else ""


def peak_bytes(pid: int | None) -> int:
    """Largest resident memory a process ever had; 0 where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
