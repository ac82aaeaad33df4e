"""Run one node with its own signal handling, so that a stop can still be published after Ctrl-C.

rclpy's default handler shuts the context down before any user code runs (rclpy issue 1287); here SIGINT and SIGTERM
only set a flag, the node stops the robot over a living context, and then everything is torn down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions

from phyai_engine.errors import PhyaiError


@runtime_checkable
class Stoppable(Protocol):
    """What :func:`run` needs of a node beside rclpy's."""

    def on_signal(self, name: str) -> None:
        """Stop the robot; returns when the stop has been published, within a bound."""

    def on_spin_error(self, error: Exception) -> bool:
        """An exception left a callback. True to go on spinning."""

    def close(self) -> None:
        """Release everything, within a bound."""


Guard = Callable[[Callable[..., object]], Callable[..., Any]]
"""Wraps a callback so that an exception stops the robot instead of the process."""


def guarded(on_error: Callable[[Exception], bool], callback: Callable[..., Any]) -> Callable[..., Any]:
    """A callback whose exceptions go to ``on_error``; rclpy would end the process without a stop.

    :param on_error: stops the robot and latches; False lets the exception out.
    """

    @wraps(callback)
    def call(*args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:
            if not on_error(error):
                raise
            return args[-1] if args else None  # a service callback must return its response

    return call


FLUSH_S = 0.2  # time given to the middleware to deliver the stop
JOIN_S = 3.0  # threads that have not ended by then are abandoned and the process exits hard


class StopFlag:
    """Set by SIGINT or SIGTERM. Long calls (a model load in configure) look at it between waits."""

    def __init__(self) -> None:
        self.name = ""

    def __bool__(self) -> bool:
        return bool(self.name)

    def catch(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.name = signal.Signals(number).name


def free_output(number: int) -> None:
    """Writing to this descriptor never waits from now on; what its reader does not take is lost.

    rclpy's logger writes with the interpreter lock held: a reader that stands still (Ctrl-S, a stopped launch) would
    freeze the node, every thread of it. A pipe or terminal is opened anew, so that nobody who shares it is changed.

    :param number: file descriptor 1 or 2. A file never waits and is left alone.
    """
    with contextlib.suppress(OSError):  # closed, or nothing that could be opened: as it was
        kind = os.fstat(number).st_mode
        if stat.S_ISSOCK(kind):
            os.set_blocking(number, False)
        elif stat.S_ISFIFO(kind) or os.isatty(number):
            anew = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(anew, number)
            os.close(anew)


def run(make: Callable[[StopFlag], Node], args: list[str] | None = None) -> int:
    """Spin ``make(flag)`` until a signal, stop the robot, shut down. Returns the exit code: 0 after a signal."""
    flag = StopFlag()
    for output in (1, 2):
        free_output(output)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, flag.catch)
    rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
    executor = SingleThreadedExecutor()
    code = 0
    try:
        node = make(flag)
    except PhyaiError as error:  # a parameter or a file a person wrote: a sentence, not a traceback
        print(f"{error}", file=sys.stderr, flush=True)
        rclpy.try_shutdown()
        return 1
    if not isinstance(node, Stoppable):
        raise TypeError(f"{type(node).__name__} does not implement Stoppable")
    executor.add_node(node)
    try:
        while not flag and rclpy.ok() and code == 0:
            code = 0 if _turn(executor, node, 0.1) else 1
        flag.name = flag.name or "shutdown"  # from here on nothing may move the robot again
        node.on_signal(flag.name)
        until = time.monotonic() + FLUSH_S
        while rclpy.ok() and time.monotonic() < until:
            _turn(executor, node, 0.02)
    finally:
        node.close()
        executor.shutdown(timeout_sec=1.0)
        node.destroy_node()
        rclpy.try_shutdown()
    _leave(code)
    return code


def _turn(executor: SingleThreadedExecutor, node: Stoppable, timeout_s: float) -> bool:
    """One callback; an exception that leaves it stops the robot. False when the node wants to end."""
    try:
        executor.spin_once(timeout_sec=timeout_s)
    except ExternalShutdownException:
        return False
    except Exception as error:
        with contextlib.suppress(OSError):  # BlockingIOError: nobody reads
            traceback.print_exc()
        return node.on_spin_error(error)
    return True


def _leave(code: int) -> None:
    """Join what can be joined; a thread stuck inside a library would abort a normal exit, so leave hard then."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a second one (terminal and launch both send) must not undo this
        signal.signal(number, signal.SIG_IGN)
    until = time.monotonic() + JOIN_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, until - time.monotonic()))
    stuck = [t.name for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]
    if stuck:
        with contextlib.suppress(OSError):
            print(f"leaving with threads still running: {', '.join(stuck)}", file=sys.stderr, flush=True)
        os._exit(code)
