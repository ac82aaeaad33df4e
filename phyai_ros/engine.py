"""The engine of one configuration: the client that answers now, and the way to another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from phyai_engine.errors import EngineError
from phyai_engine.serve.client import Answered, EngineClient, EngineHello, Event
from phyai_engine.serve.restart import restart
from phyai_engine.timing import mono_ns
from phyai_engine.types import Chunk, Request
from phyai_ros.diagnostics import in_ms


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
        return f"engine restarted in {(mono_ns() - began) * 1e-9:.1f} s, pid {had} -> {self.client.pid}: {hello.note}"

    def _used_bytes(self) -> int:
        """What a new engine will need; a thread shares this process, and a new one brings nothing back."""
        return 0 if self.client.pid == os.getpid() else peak_bytes(self.client.pid)

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
                self.answered(event.chunk)
        return events

    @property
    def notes(self) -> dict[str, str]:
        """For /diagnostics."""
        return {
            "heartbeat_age_ms": in_ms(self.client.last_heartbeat_age_s()),
            "engine_pid": str(self.client.pid or ""),
            "engine_crash": str(self.client.crash or ""),
            **{f"engine_{name}": str(n) for name, n in self.client.counters.items()},
        }


def peak_bytes(pid: int | None) -> int:
    """Largest resident memory a process ever had; 0 where the kernel does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
