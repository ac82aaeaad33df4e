"""Where the engine worker runs: a child process or a thread. Used by the client's I/O thread only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import zmq

from phyai_engine.errors import EngineError
from phyai_engine.serve.output import ChildOutput

TRACE_SIGNAL = signal.SIGUSR1
"""Has a worker process write where its threads are, whatever they hold."""

_TRACE_S = 0.3  # on a busy host; nothing waits for it but the end of an engine that is lost anyway
_POLL_S = 0.02
_STALE_S = 60.0  # far above the time between making a folder and connecting
_STATES = {"R": "running", "S": "asleep", "D": "in the kernel", "T": "stopped", "t": "stopped"}


class Host(Protocol):
    """The place an engine worker runs in."""

    endpoint: str
    pid: int

    def fileno(self) -> int:
        """Descriptor that becomes readable when the worker ends, -1 when there is none."""
        ...

    def pump(self) -> None:
        """Move the worker's output on; to be called at least every ``output.PERIOD_S``."""
        ...

    def connected(self) -> None:
        """The client is connected: what was only needed to find the worker can go."""
        ...

    def exit_cause(self) -> str | None:
        """None while the worker runs, else how it ended."""
        ...

    def state(self) -> str:
        """What the system says the worker does; "" where it does not tell."""
        ...

    def tail(self) -> tuple[str, ...]:
        """The last lines that the worker wrote."""
        ...

    @property
    def dropped_bytes(self) -> int:
        """Output that was neither forwarded nor kept."""
        ...

    def trace(self) -> bool:
        """Have the worker write where its threads are; False where it cannot."""
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

    def __init__(self, *, threads: int, environment: Mapping[str, str] | None = None) -> None:
        """:param environment: of the child; None: this process's own."""
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
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-X", "faulthandler", "-u", "-c", self._BOOT, root]
        command += ["--endpoint", self.endpoint, "--parent-pid", str(os.getpid()), "--threads", str(threads)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of file tells the child that we are gone
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours: we stop the robot first, then the child
            )
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineError(f"cannot start the engine process: {error}", where=sys.executable) from None
        self.pid = self._process.pid
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin, self._output = stdin, ChildOutput([stdout, stderr])
        try:
            self._ended_fd = os.pidfd_open(self.pid)
        except (OSError, AttributeError):  # a kernel before 5.3, or not Linux: the heartbeat's period bounds it then
            self._ended_fd = -1

    def fileno(self) -> int:
        """The process."""
        return self._ended_fd

    def pump(self) -> None:
        """Keep the last lines and forward the rest; never blocks on either side."""
        self._output.pump()

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

    def state(self) -> str:
        """Running, asleep, stopped, or in the kernel."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return _STATES.get(stat.rpartition(") ")[2][:1], "")

    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return self._output.lines()

    @property
    def dropped_bytes(self) -> int:
        """What was more than may be forwarded."""
        return self._output.dropped_bytes

    def trace(self) -> bool:
        """See TRACE_SIGNAL; a stopped process would only write it when it goes on."""
        if self.exit_cause() is not None or self.state() == "stopped":
            return False
        self._process.send_signal(TRACE_SIGNAL)
        return True

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
        """Close descriptors and remove the folder. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._output.close()
        if self._ended_fd >= 0:
            os.close(self._ended_fd)
            self._ended_fd = -1
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
        except BaseException as error:  # also SystemExit: a thread that ended must not look alive
            self._cause = f"{type(error).__name__}: {error}"

    def fileno(self) -> int:
        """None: a thread has none."""
        return -1

    def pump(self) -> None:
        """Nothing to pump: the worker writes to this process's streams."""

    def connected(self) -> None:
        """Nothing to remove."""

    def exit_cause(self) -> str | None:
        """How the thread ended."""
        return self._cause

    def state(self) -> str:
        """Not asked: it is this process."""
        return ""

    def tail(self) -> tuple[str, ...]:
        """Nothing was captured."""
        return ()

    @property
    def dropped_bytes(self) -> int:
        """Nothing was captured."""
        return 0

    def trace(self) -> bool:
        """Not asked: it is this process."""
        return False

    def kill(self) -> None:
        """Not possible for a thread."""

    def wait(self, timeout_s: float) -> bool:
        """True when the worker and its compute thread ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._clean

    def close(self) -> None:
        """Nothing to release."""


def end(host: Host, until_s: float, *, ask: bool, trace: bool) -> bool:
    """Wait for a worker that was told to end; kill it at half of the time, or at once unless ``ask``.

    :param until_s: monotonic time up to which this may take.
    :param trace: have one that is killed at once say first what holds it.
    :returns: True when nothing of it is left.
    """
    now_s = time.monotonic()
    patience_s = (until_s - now_s) / 2 if ask else _TRACE_S if trace and host.trace() else 0.0
    while host.exit_cause() is None and time.monotonic() < now_s + patience_s:
        host.wait(_POLL_S)
        host.pump()
    host.kill()
    return host.wait(max(_POLL_S, until_s - time.monotonic()))
