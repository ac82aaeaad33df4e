"""Where the engine worker runs: a child process or a thread. Used by the client's I/O thread only."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from phyai_engine.errors import EngineError

TAIL_LINES = 50
_LINE_BYTES = 4096  # at most PIPE_BUF: what select calls writable takes that much without blocking
_BURST_BYTES = 1 << 16
_STDERR_FD = 2
_STALE_S = 60.0  # far above the time between making a folder and connecting


class Host(Protocol):
    """The place an engine worker runs in."""

    endpoint: str
    pid: int

    def fileno(self) -> int:
        """Descriptor that becomes readable when :meth:`pump` has work, -1 when there is none."""
        ...

    def pump(self) -> None:
        """Move the worker's output on."""
        ...

    def connected(self) -> None:
        """The client is connected: what was only needed to find the worker can go."""
        ...

    def exit_cause(self) -> str | None:
        """None while the worker runs, else how it ended."""
        ...

    def tail(self) -> str:
        """The last lines that the worker wrote."""
        ...

    def kill(self) -> None:
        """End the worker now, as far as that is possible."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """True once the worker has ended and nothing of it is left."""
        ...

    def close(self) -> None:
        """Release descriptors and folders."""
        ...


class ProcessHost:
    """The worker in a child process, over a socket in a private folder.

    Create it in a thread that lives as long as the child is wanted: the kernel's parent-death signal, which
    the child asks for, fires when the creating *thread* ends.
    """

    # -c rather than -m: -m puts the working directory first on sys.path, where a stray module would shadow
    # ours, and does not find this package when the parent found it by a path of its own.
    _BOOT = """
import sys
root = sys.argv.pop(1)
sys.path[:] = [entry for entry in sys.path if entry]
if root not in sys.path:
    sys.path.insert(0, root)
from phyai_engine.serve.worker import main
main()
"""

    def __init__(self, *, threads: int) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self._folder = tempfile.mkdtemp(prefix=f"phyai-{os.getpid()}-")  # mode 0700
        path = f"{self._folder}/engine"
        if len(path) > zmq.IPC_PATH_MAX_LEN:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineError(
                "the temporary folder's path is too long for a socket",
                got=f"{len(path)} bytes",
                wanted=f"at most {zmq.IPC_PATH_MAX_LEN}",
                where=path,
                do="Set TMPDIR to a shorter folder.",
            )
        self.endpoint = f"ipc://{path}"
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._dropped_lines = 0
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-X", "faulthandler", "-u", "-c", self._BOOT, root]
        command += ["--endpoint", self.endpoint, "--parent-pid", str(os.getpid()), "--threads", str(threads)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of file tells the child that we are gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours: we stop the robot first, then the child
            )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineError(f"cannot start the engine process: {error}", where=sys.executable) from None
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)

    def fileno(self) -> int:
        """The child's output."""
        return -1 if self._output.closed else self._output.fileno()

    def pump(self) -> None:
        """Read what the child wrote, keep the last lines, forward them; never blocks on either side."""
        if self._output.closed:
            return
        try:
            burst = os.read(self._output.fileno(), _BURST_BYTES)
        except BlockingIOError:
            return
        if not burst:
            self._output.close()
        *lines, self._partial = (self._partial + burst).replace(b"\r", b"\n").split(b"\n")
        if len(self._partial) > _LINE_BYTES or (not burst and self._partial):
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._forward(line[: _LINE_BYTES - 1])

    def _forward(self, line: bytes) -> None:
        if not line.strip():
            return
        self._lines.append(line.decode(errors="replace"))
        # A stuck reader of our stderr must stop neither the client nor, through it, the child: drop the line
        # then.
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [_STDERR_FD], [], 0)[1]:
                os.write(_STDERR_FD, line + b"\n")
                return
        self._dropped_lines += 1

    def connected(self) -> None:
        """Remove the folder: the connection outlives its name, and so nothing is left whatever ends us."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def exit_cause(self) -> str | None:
        """Exit code or signal name."""
        code = self._process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def tail(self) -> str:
        """The last lines, and how many could not be forwarded."""
        for _ in range(TAIL_LINES):  # bounded: a grandchild may hold the pipe open and write for ever
            if self._output.closed or not select.select([self._output], [], [], 0)[0]:
                break
            self.pump()
        lines = list(self._lines)
        if self._dropped_lines:
            lines.append(f"({self._dropped_lines} lines were not forwarded: stderr was not writable)")
        return "\n".join(lines)

    def kill(self) -> None:
        """SIGKILL; also reaches a stopped process."""
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Reap the child within the bound."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close the pipes and remove the folder."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _sweep(temporary: Path) -> None:
    """Remove what hosts of dead processes left: parent and child may both be killed before they connect.

    The age matters where containers share the folder: there a living process may look dead.
    """
    for folder in temporary.glob("phyai-*-*"):
        owner = re.fullmatch(r"phyai-(\d{1,9})-\w+", folder.name)
        with contextlib.suppress(OSError):
            found = folder.lstat()
            old = time.time() - found.st_mtime > _STALE_S
            if owner and old and found.st_uid == os.getuid() and not _alive(int(owner.group(1))):
                shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


class ThreadHost:
    """The worker in a thread. A thread cannot be killed: a model that hangs stays, and ``wait`` says so."""

    endpoint = "inproc://engine"

    def __init__(self, serve: Callable[[str], bool]) -> None:
        self.pid = os.getpid()
        self._serve = serve
        self._cause: str | None = None
        self._clean = False
        # daemon: a hung model must not keep the interpreter from ending
        self._thread = threading.Thread(target=self._run, name="phyai-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._clean = self._serve(self.endpoint)
            self._cause = "ended"
        except Exception as error:
            self._cause = f"{type(error).__name__}: {error}"

    def fileno(self) -> int:
        """Nothing to pump."""
        return -1

    def pump(self) -> None:
        """Nothing to pump: the worker writes to this process's streams."""

    def connected(self) -> None:
        """Nothing to remove."""

    def exit_cause(self) -> str | None:
        """How the thread ended."""
        return self._cause

    def tail(self) -> str:
        """Nothing was captured."""
        return ""

    def kill(self) -> None:
        """Not possible for a thread."""

    def wait(self, timeout_s: float) -> bool:
        """True when the worker and its compute thread ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._clean

    def close(self) -> None:
        """Nothing to release."""
