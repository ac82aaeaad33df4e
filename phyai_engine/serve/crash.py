"""What is known of an engine that ended or fell silent."""

from __future__ import annotations

from dataclasses import dataclass

_KILLED = "Nothing here sent that signal: the kernel does when memory is short."


@dataclass(frozen=True, slots=True)
class CrashReport:
    """How an engine was lost, for people to read.

    :param cause: exit code, signal, or the silence and what the system says of the process.
    :param phase: starting, loading, warming, idle or busy; ``phase_s`` for how long, in seconds.
    :param epoch, chunk_id: of the inference that ran, 0 when none did.
    :param last_lines: of its stderr, of its stdout where it wrote nothing to stderr. Once a silent engine was killed,
        also where its threads were.
    """

    cause: str
    pid: int
    phase: str
    phase_s: float
    epoch: int = 0
    chunk_id: int = 0
    last_lines: tuple[str, ...] = ()

    @property
    def ran(self) -> str:
        """What it did, in words."""
        chunk = f" with chunk {self.chunk_id} of epoch {self.epoch}" if self.chunk_id else ""
        return f"{self.phase}{chunk} for {self.phase_s:.2f} s"

    @property
    def said(self) -> str:
        """Its last lines, with a heading."""
        lines = "\n".join(("Its last lines:", *self.last_lines)) if self.last_lines else "It wrote nothing."
        return f"{_KILLED} {lines}" if "SIGKILL" in self.cause else lines

    def __str__(self) -> str:
        return f"{self.cause}, pid {self.pid}, {self.ran}. {self.said}"
